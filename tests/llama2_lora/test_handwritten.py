"""llama2_lora/layers/handwritten: gradients against autograd, and the same bits whatever a layer keeps."""

import itertools
import math

import pytest
import torch

from llama2_lora.kernels.attention import PlainAttention
from llama2_lora.kernels.torch_operators import dropout_key
from tests.helpers.llama2_lora_case import (
    TINY,
    all_ways,
    autograd_step,
    inputs_of,
    kept,
    make_stack,
    run_step,
    with_fields,
)

LENGTHS = [10, 1, 30, 23]


def relative(ours, theirs):
    return float((ours - theirs).norm() / theirs.norm())


@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["one document", "four"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_gradients_are_autograds(lengths, dropout):
    """FP32, so that only the order of sums differs; the test computes the masks of dropout itself."""
    config = with_fields(precision="bf16", dropout=dropout)
    stack = make_stack(config, main=torch.float32, inputs=inputs_of(config, lengths=lengths))
    loss, grads = run_step(stack)
    expected_loss, expected = autograd_step(stack)
    assert float(loss) == pytest.approx(float(expected_loss), rel=1e-6)
    for (name, ours), (_, theirs) in zip(stack.adapters.named(grads), stack.adapters.named(expected), strict=True):
        assert relative(ours, theirs) < 1e-5, name
    assert expected.norm() > 1e-4


@pytest.mark.parametrize("precision, bound", [("bf16", 0.02), ("fp8", 0.15), ("nvfp4_emulated", 0.5)])
def test_low_precision_is_near_fp32(precision, bound):
    """Against FP32 with the same rounded weights, so only operands and activations lose precision."""
    stack = make_stack(with_fields(precision=precision))
    # Delayed scaling needs a step to know its scales.
    run_step(stack)
    loss, grads = run_step(stack)
    exact = make_stack(with_fields(precision=precision), main=torch.float32)
    exact.adapters.values.copy_(stack.adapters.values)
    for name in ("embedding", "head"):
        getattr(exact.weights, name).copy_(getattr(stack.weights, name))
    expected_loss, expected = autograd_step(exact, step=2)
    assert float(loss) == pytest.approx(float(expected_loss), rel=2e-3)
    error = relative(grads.float(), expected)
    assert error < bound
    # FP8 has three bits of a mantissa and two: a GEMM that were not quantised would be nearer.
    assert precision == "bf16" or error > 0.02


@pytest.mark.parametrize("precision", ["fp8", "bf16"])
def test_all_ways_to_keep_tensors_give_the_same_bits(precision):
    """Each set in a layer between two others, two steps with the scales that they make."""
    config = with_fields(precision=precision, sequence=32)
    ways = all_ways(config)
    assert len(ways) == (32 if precision == "fp8" else 16)

    def steps(keeps):
        stack = make_stack(config, keeps)
        return [tensor for _ in range(2) for tensor in run_step(stack)], [t.clone() for _, t in stack.named_state()]

    expected = steps([ways[0]] * 3)
    # In threes, so that a third of as many stacks has all of them.
    for keeps in [[ways[place - 1], ways[place], ways[(place + 1) % len(ways)]] for place in range(0, len(ways), 3)]:
        for ours, theirs in zip(itertools.chain(*steps(keeps)), itertools.chain(*expected), strict=True):
            assert torch.equal(ours, theirs), keeps
    assert len({float(loss) for loss in expected[0][::2]}) == 2


def test_a_layer_keeps_what_it_is_told():
    config = with_fields()
    stack = make_stack(config, [frozenset(), frozenset({"qkv", "residual"}), all_ways(config)[0]])
    assert [set(kept) for kept in stack.kept] == [set(), {"qkv", "residual"}, {"qkv", "residual", "fc1"}]
    assert stack.holds_transposes == [False, False, True]
    assert stack.kept[2]["fc1"].dtype == torch.float8_e4m3fn
    hidden = stack.embed()
    for layer in range(3):
        hidden = stack.forward(layer, *hidden)
    assert [each is not None for each in stack.attended] == [False, False, True]
    grad = stack.compute_loss(*hidden)
    for layer in (2, 1, 0):
        grad = stack.backward(layer, *grad)
    assert stack.attended == [None] * 3


def test_weights_use_the_range_of_their_format():
    stack = make_stack(TINY)
    exact = make_stack(with_fields(precision="bf16"))
    for layer, exact_layer in zip(stack.weights.layers, exact.weights.layers, strict=True):
        for name, matrix in layer.items():
            assert float(matrix.value.float().abs().max()) == 448
            # Half of the last bit of three, and numbers too small for the format.
            weight, wanted = matrix.value.float() * matrix.inverse, exact_layer[name].value.float()
            torch.testing.assert_close(weight, wanted, rtol=2**-4, atol=float(matrix.inverse) * 2**-10)


def test_dropout_draws_a_mask_for_each_step_layer_and_adapter():
    operators = make_stack(TINY).operators
    ones, masks = torch.ones(64, 128), []
    for step, layer, adapter in [(1, 0, 0), (2, 0, 0), (1, 1, 0), (1, 0, 1)]:
        operators.step.fill_(step)
        dropped = torch.empty_like(ones)
        operators.quantize(ones, dropped=dropped, key=dropout_key(layer, adapter))
        assert torch.equal(dropped > 0, torch.from_numpy(kept(ones.numel(), layer, adapter, step, 0.1)).view(64, 128))
        masks.append(dropped > 0)
        # 8,192 draws: five standard deviations are 0.017.
        assert abs(float(masks[-1].float().mean()) - 0.9) < 0.017
    for a, b in itertools.combinations(masks, 2):
        # Independent masks agree in 0.9^2 + 0.1^2 of their places.
        assert abs(float((a == b).float().mean()) - 0.82) < 0.025


def test_delayed_scaling_uses_the_largest_amax_of_its_history():
    config = with_fields(amax_history=2)
    stack = make_stack(config)
    slot, seen = stack.scaling.slot(1, "fc1_in"), []
    assert float(slot.scale) == 1.0
    for factor in (1.0, 4.0, 1.0, 1.0):
        for norms in stack.weights.norms:
            norms[1].fill_(factor)
        hidden = stack.embed()
        for layer in range(config.layers):
            hidden = stack.forward(layer, *hidden)
        seen.append(float(slot.amax))
        stack.update_scales()
        assert float(slot.scale) == pytest.approx(448 / max(seen[-2:]))
        assert float(slot.amax) == 0.0
    assert seen[1] > 3 * seen[0]


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [None, [300, 1, 1000, 747]], ids=["cudnn", "flash"])
def test_gpu_attention_is_the_plain_one(lengths):
    from llama2_lora.kernels.attention import CudnnAttention, FlashAttention

    device = torch.device("cuda")
    config = with_fields(sequence=2048, heads=16, kv_heads=2, head_dim=128, hidden=2048)
    inputs = inputs_of(config, device, lengths)
    qkv = torch.randn(2048, config.qkv_width, device=device, dtype=torch.bfloat16)
    grad = torch.randn(2048, config.q_width, device=device, dtype=torch.bfloat16)
    results = []
    for kind in (PlainAttention, FlashAttention if lengths else CudnnAttention):
        attention = kind(config, inputs)
        parts = attention.split(qkv)
        out, rest = attention.forward(*parts)
        results.append([out, *attention.backward(grad, *parts, out, rest)])
    for plain, ours in zip(*results, strict=True):
        assert plain.shape == ours.shape and ours.stride(-1) == 1
        assert relative(ours.float(), plain.float()) < 2e-2


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp8", "bf16"])
def test_gpu_stack_is_the_plain_one(precision):
    """Triton, cuDNN and FP8 GEMMs against plain PyTorch: losses and gradients of three steps."""
    from llama2_lora.kernels.attention import CudnnAttention
    from llama2_lora.kernels.triton_operators import TritonOperators

    device = torch.device("cuda")
    config = with_fields(precision=precision, hidden=256, head_dim=64, ffn=512, sequence=128)
    results = []
    for operators, attention in ((TritonOperators, CudnnAttention), (None, None)):
        ways = all_ways(config)
        keeps = [ways[0], ways[-1], ways[1]]
        if operators:
            stack = make_stack(config, keeps, device=device, operators=operators)
            stack.attention = attention(config, stack.inputs)
        else:
            stack = make_stack(config, keeps, device=device)
        results.append([run_step(stack) for _ in range(3)])
    for (loss, grads), (plain_loss, plain) in zip(*results, strict=True):
        assert math.isclose(float(loss), float(plain_loss), rel_tol=2e-3)
        assert relative(grads.float(), plain.float()) < 0.1
