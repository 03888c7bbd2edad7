"""llama2_lora/kernels against the plain operators, on a GPU and through Triton's interpreter without one."""

from dataclasses import replace

import pytest
import torch

from llama2_lora.config import Config
from llama2_lora.kernels.scaling import Formats, Scaling
from llama2_lora.kernels.torch_operators import TorchOperators
from tests.helpers.triton_interpreter import DEVICE, INTERPRETED, on_device, run_interpreted

triton = pytest.importorskip("triton")
# Widths that are no powers of two, three groups of heads.
CONFIG = Config(
    layers=1, hidden=48, heads=12, kv_heads=4, head_dim=16, ffn=80, vocab=83, sequence=16, rank=4, dropout=0.3
)
PRECISIONS = ("fp8", "bf16")


def _convert_float(values, source, target, rounding_mode):
    """The interpreter's conversion between formats, rounding to nearest even as a GPU does.

    Its own cuts bits off for bf16, and loses the carry from mantissa to exponent for FP8. What is too large for FP8
    becomes the format's largest, as cvt.satfinite has it.
    """
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}
    bits = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}
    source, target = dtypes[str(source)], dtypes[str(target)]
    values = torch.frombuffer(bytearray(values.tobytes()), dtype=source).reshape(values.shape)
    if target.itemsize == 1:
        largest = torch.finfo(target).max
        values = values.clamp(-largest, largest)
    return values.to(target).view(bits[target.itemsize]).numpy()


if INTERPRETED:
    from triton.runtime import interpreter

    interpreter._convert_float = _convert_float


def both(precision, **changes):
    """(Triton's, plain) operators at a scale of 20, in the third step."""
    from llama2_lora.kernels.triton_operators import TritonOperators

    config, device = replace(CONFIG, precision=precision, **changes), torch.device(DEVICE)
    made = []
    for kind in (TritonOperators, TorchOperators):
        scaling = Scaling(config, device)
        scaling.scale.fill_(20.0)
        scaling.inverse.fill_(1 / 20.0)
        operators = kind(config, Formats.of(config), scaling, device)
        operators.step.fill_(3)
        made.append(operators)
    return made


def random(*shape, seed=0, scale=1.0):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale
    return values.to(DEVICE, torch.bfloat16)


def compare(operators, call, *outputs):
    """call(operators, *fresh copies of outputs) with both; every output, amax and scale must agree.

    Sums of a row are taken in another order, so a value may round to the neighbour in its format.
    """
    results = []
    for each in operators:
        fresh = [output.clone() for output in outputs]
        call(each, *fresh)
        results.append([*fresh, each.scaling.amax[:, 0].clone(), each.scaling.scale[:, 0].clone()])
    for ours, plain in zip(*results, strict=True):
        unit = {torch.float8_e4m3fn: 2**-3, torch.float8_e5m2: 2**-2, torch.bfloat16: 2**-7}.get(ours.dtype, 1e-5)
        ours, plain = ours.float(), plain.float()
        torch.testing.assert_close(ours, plain, rtol=unit, atol=2e-3 * float(plain.abs().max()))
        # Few do.
        assert unit == 1e-5 or (ours != plain).float().mean() < 0.03
    # All that should be written was.
    assert not any(torch.equal(a.float(), b.float()) for a, b in zip(outputs, results[0], strict=False))


def operand(width, precision, gradient=False):
    formats = Formats.of(Config(precision=precision))
    return torch.zeros(CONFIG.sequence, width, device=DEVICE).to(formats.gradient if gradient else formats.operand)


@on_device
@pytest.mark.parametrize("precision", PRECISIONS)
def test_norm(precision):
    x, add, gain = random(16, 48), random(16, 48, seed=1), random(48, seed=2)
    z, e = torch.zeros_like(x), operand(48, precision)
    operators = both(precision)

    def everything(op, total, written, dropped, plain):
        slot = op.scaling.slot(0, "qkv_in")
        op.norm(x, gain, add=add, total=total, operand=written, slot=slot, dropped=dropped, key=5, plain=plain)

    compare(operators, everything, z, e, z, z)
    compare(operators, lambda op, plain: op.norm(x, gain, plain=plain), z)
    compare(operators, lambda op, dropped: op.norm(x, gain, dropped=dropped, key=7), z)


@on_device
@pytest.mark.parametrize("precision", PRECISIONS)
def test_norm_backward(precision):
    grad, through, x, residual = (random(16, 48, seed=seed) for seed in range(4))
    gain, z, e = random(48, seed=5), torch.zeros_like(x), operand(48, precision, gradient=True)
    operators = both(precision)

    def everything(op, out, written):
        slot = op.scaling.slot(0, "proj_grad")
        through_adapter = {"through_dropout": through, "key": 5}
        op.norm_backward(grad, x, gain, out, residual=residual, operand=written, slot=slot, **through_adapter)

    compare(operators, everything, z, e)
    compare(operators, lambda op, out: op.norm_backward(grad, x, gain, out), z)
    # In place of the residual, as layers call it.
    compare(operators, lambda op, out: op.norm_backward(grad, x, gain, out, residual=out), residual)


@on_device
@pytest.mark.parametrize("precision", PRECISIONS)
def test_quantize_and_dropout(precision):
    x, through, operators = random(16, 192), random(16, 192, seed=1), both(precision)
    z, e = torch.zeros_like(x), operand(192, precision)

    def both_ways(op, written, dropped):
        op.quantize(x, operand=written, slot=op.scaling.slot(0, "proj_in"), dropped=dropped, key=11)

    compare(operators, both_ways, e, z)
    compare(operators, lambda op, dropped: op.quantize(x, dropped=dropped, key=12), z)
    # With one of these keys or another the last element is kept.
    for key in (11, 12, 13):
        compare(operators, lambda op, grad: op.add_dropout_gradient(grad, through, key=key), x)  # noqa: B023
    dropped = torch.zeros_like(x)
    operators[0].quantize(torch.ones_like(x), dropped=dropped, key=11)
    assert 0.2 < float((dropped == 0).float().mean()) < 0.4
    assert float(dropped.max()) == pytest.approx(1 / 0.7, rel=1e-2)


@on_device
@pytest.mark.parametrize("precision", PRECISIONS)
def test_rope(precision):
    operators, positions = both(precision), torch.tensor([*range(9), *range(7)], device=DEVICE)
    width = CONFIG.qkv_width
    compare(operators, lambda op, qkv: op.rope(qkv, positions), random(16, width))
    # Strided as two kinds of attention return them: heads first, tokens first.
    grads = [random(16, heads, 16, seed=heads).transpose(0, 1) for heads in (12, 4)] + [random(4, 16, 16, seed=9)]

    def back(op, out, written):
        op.rope_backward(*grads, positions, out, operand=written, slot=op.scaling.slot(0, "qkv_grad"))

    compare(operators, back, torch.zeros_like(random(16, width)), operand(width, precision, gradient=True))


@on_device
@pytest.mark.parametrize("precision", PRECISIONS)
def test_swiglu(precision):
    fc1, grad, operators = random(16, 160, scale=3.0), random(16, 80, seed=1), both(precision)
    out, out_grad = operand(80, precision), operand(160, precision, gradient=True)
    compare(operators, lambda op, u: op.swiglu(fc1, operand=u, slot=op.scaling.slot(0, "fc2_in")), out)

    def back(op, source, written, slot):
        op.swiglu_backward(source, grad, operand=written, slot=op.scaling.slot(0, "fc1_grad"), stored_slot=slot)

    compare(operators, lambda op, d: back(op, fc1, d, None), out_grad)
    if precision == "bf16":
        return
    stored = torch.zeros(16, 160, device=DEVICE).to(torch.float8_e4m3fn)

    def store(op, u, kept):
        kept_by = {"stored_slot": op.scaling.slot(0, "fc1_out"), "stored": kept}
        op.swiglu(fc1, operand=u, slot=op.scaling.slot(0, "fc2_in"), **kept_by)

    compare(operators, store, out, stored)
    # Without a place to keep it only the amax is found.
    compare(operators, lambda op, u: store(op, u, None), out)
    assert float(operators[0].scaling.slot(0, "fc1_out").amax) == float(fc1.abs().max())
    store(operators[0], out, stored)
    compare(operators, lambda op, d: back(op, stored, d, op.scaling.slot(0, "fc1_out")), out_grad)
    # Kept in FP8 or computed again and rounded: the same bits.
    kept_grad, again_grad = out_grad.clone(), out_grad.clone()
    back(operators[0], stored, kept_grad, operators[0].scaling.slot(0, "fc1_out"))
    back(operators[0], fc1, again_grad, operators[0].scaling.slot(0, "fc1_out"))
    assert torch.equal(kept_grad.view(torch.uint8), again_grad.view(torch.uint8))


@on_device
@pytest.mark.parametrize("vocab", [83, 9000])
def test_cross_entropy(vocab):
    """Check rows of logits of one block and of several blocks."""
    operators, generator = both("fp8", vocab=vocab), torch.Generator().manual_seed(0)
    targets = torch.randint(0, vocab, (16,), generator=generator).to(DEVICE)
    weights = torch.rand(16, generator=generator).to(DEVICE)
    logits = random(16, vocab, scale=4.0)
    compare(
        operators,
        lambda op, grad, losses: op.cross_entropy(grad, targets, weights, losses),
        logits,
        torch.zeros(16, device=DEVICE),
    )


@on_device
@pytest.mark.parametrize("rows, columns", [(128, 256), (256, 128), (48, 80)])
def test_transpose(rows, columns):
    weight = torch.arange(rows * columns, device=DEVICE).remainder(251).to(torch.uint8).view(rows, columns)
    out = torch.zeros(columns, rows, dtype=torch.uint8, device=DEVICE)
    both("fp8")[0].transpose(weight.view(torch.float8_e4m3fn), out.view(torch.float8_e4m3fn))
    assert torch.equal(out, weight.t())


@pytest.mark.gpu
@pytest.mark.parametrize("fast", [False, True])
def test_fp8_gemm(fast):
    triton_operators, plain = both("fp8")
    a, b = random(32, 256).to(torch.float8_e5m2), random(64, 256, seed=1).to(torch.float8_e4m3fn)
    scales = torch.full((1,), 0.5, device=DEVICE), torch.full((1,), 0.25, device=DEVICE)
    ours, theirs = (torch.zeros(32, 64, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    triton_operators.gemm(a, b.t(), *scales, ours, fast)
    plain.gemm(a, b.t(), *scales, theirs, fast)
    torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)


@pytest.mark.slow
def test_in_the_interpreter():
    run_interpreted(__file__)
