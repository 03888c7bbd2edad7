"""common/fused_adam against torch's AdamW on a GPU, and through Triton's interpreter without one."""

import pytest
import torch

from common.optimizers.adam import Adam
from common.optimizers.hyperparameters import Hyperparameters
from common.optimizers.loss_scaler import LossScaler
from tests.helpers.triton_interpreter import DEVICE, INTERPRETED, on_device, run_interpreted

NUMBERS = Hyperparameters(lr=0.01, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)
# More than one chunk, less than one, a 4-d weight with channels last, one number.
SHAPES = [(300, 33), (17,), (8, 16, 3, 3), (1,)]
CPU = torch.device("cpu")
# An eps that is not small beside a gradient: the update then depends on the gradients' scale, hence on clipping.
CLIPPING = Hyperparameters(lr=0.01, betas=(0.9, 0.999), eps=0.05, weight_decay=0.1, clip=1.0)
# The interpreter cuts bits off where a GPU rounds to bf16.
LOW_PRECISION = torch.float16 if INTERPRETED else torch.bfloat16


def make(device, fused):
    generator = torch.Generator().manual_seed(0)
    params = [torch.randn(shape, generator=generator).half() for shape in SHAPES]
    params[2] = params[2].to(memory_format=torch.channels_last)
    params = [torch.nn.Parameter(param.to(device)) for param in params]
    adam = Adam(params, NUMBERS, scaler=LossScaler(device, 1024.0, 1000, 2))
    if fused and adam._fused is None:
        from common.optimizers.fused_adam import FusedUpdate

        states = (params, adam.masters, adam.exp_avg, adam.exp_avg_sq)
        adam._fused = FusedUpdate(states, NUMBERS)
    return adam


def gradients(adam, step, overflow=False):
    generator = torch.Generator().manual_seed(100 + step)
    grads = [torch.randn(param.shape, generator=generator).half() for param in adam.params]
    if overflow:
        grads[0][-1, -1] = float("inf")
    return [torch.empty_like(param).copy_(grad) for param, grad in zip(adam.params, grads, strict=True)]


@on_device
def test_the_update_is_torchs():
    ours, torchs = make(torch.device(DEVICE), fused=True), make(CPU, fused=False)
    # A tensor that is given back, and one whose address is used again, must both be found.
    for step in range(6):
        before = [tensor.clone() for _, tensor in ours.named_state()]
        for adam in (ours, torchs):
            adam.step(gradients(adam, step, overflow=step == 2))
        if step == 2:
            assert not torch.isfinite(ours.grad_norm)
            assert all(torch.equal(a, b) for a, (_, b) in zip(before, ours.named_state(), strict=True))
        else:
            torch.testing.assert_close(ours.grad_norm.cpu(), torchs.grad_norm, rtol=1e-5, atol=0)
    assert ours.step_count.item() == 5
    for (_, a), (_, b) in zip(ours.named_state(), torchs.named_state(), strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-5, atol=2e-7)
    for param, master in zip(ours.params, ours.masters, strict=True):
        assert torch.equal(param.detach(), master.half())


@pytest.mark.gpu
def test_replays_and_eager_steps_do_not_mix_their_gradients():
    from graph_worth.capture.pool import Pool

    device = torch.device("cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        graphed, eager = make(device, fused=True), make(device, fused=True)
        static, kept = gradients(graphed, 0), gradients(graphed, 0)
        for adam in (graphed, eager):
            adam.step(kept)
        pool = Pool(device)
        graph, _ = pool.capture(lambda: graphed.step([grad * 1.0 for grad in static]))
        for step in range(6):
            torch._foreach_copy_(static, gradients(graphed, step))
            if step % 3 == 2:
                torch._foreach_copy_(kept, static)
                graphed.step(kept)
            else:
                graph.replay()
            eager.step(gradients(eager, step))
        for (name, a), (_, b) in zip(graphed.named_state(), eager.named_state(), strict=True):
            assert torch.equal(a, b), name
        pool.release()


# --- FP32 gradients at fixed addresses, clipped


def clipped(device, fused):
    """An Adam and its gradients; a tensor of two whole chunks and a rest, and three of less than one."""
    from common.optimizers.fused_adam import TILES, FusedUpdate

    shapes = [(2 * TILES[4].chunk + 40, 1), *SHAPES[1:]]
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator).to(device, LOW_PRECISION)) for shape in shapes]
    grads = [torch.zeros_like(param, dtype=torch.float32) for param in params]
    adam = Adam(params, CLIPPING, grads)
    if fused and adam._fused is None:
        states = (params, adam.masters, adam.exp_avg, adam.exp_avg_sq)
        adam._fused = FusedUpdate(states, CLIPPING, grads)
    return adam


def fill(adam, step, size=1.0):
    generator = torch.Generator().manual_seed(100 + step)
    for grad in adam.grads:
        grad.copy_(torch.randn(grad.shape, generator=generator) * size)


@on_device
def test_the_clipped_update_is_torchs():
    ours, torchs = clipped(torch.device(DEVICE), fused=True), clipped(CPU, fused=False)
    start = [master.clone() for master in torchs.masters]
    # Norms of about 0.02, 200 and 2, and a learning rate that changes.
    factors = []
    for step, size in enumerate([1e-4, 1.0, 0.01, 1e-4, 1.0]):
        for adam in (ours, torchs):
            adam.lr.fill_(0.01 * 0.7**step)
            fill(adam, step, size)
            adam.step()
        torch.testing.assert_close(ours.grad_norm.cpu(), torchs.grad_norm, rtol=1e-5, atol=0)
        factors.append(CLIPPING.clip / float(torchs.grad_norm))
    assert min(factors) < 0.01 and max(factors) > 10
    assert ours.step_count.item() == torchs.step_count.item() == 5
    for (name, a), (_, b) in zip(ours.named_state(), torchs.named_state(), strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-5, atol=1e-7, msg=lambda text, name=name: f"{name}: {text}")
    for param, master, first in zip(ours.params, ours.masters, start, strict=True):
        assert torch.equal(param.detach(), master.to(LOW_PRECISION))
        # Every element, the last of a chunk and of the tensor too.
        assert (master.cpu() != first).all()


@on_device
def test_a_step_repeats_bit_for_bit_and_leaves_gradients_alone():
    states = []
    for _ in range(2):
        adam = clipped(torch.device(DEVICE), fused=True)
        fill(adam, 0)
        before = [grad.clone() for grad in adam.grads]
        adam.step()
        assert all(map(torch.equal, adam.grads, before))
        states.append([adam.grad_norm.clone(), *(tensor.clone() for _, tensor in adam.named_state())])
    assert all(map(torch.equal, *states))


@on_device
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_gradient_that_is_not_finite_shows(bad):
    """Clipping must not hide it: without a loss scale no step is skipped."""
    for adam in (clipped(torch.device(DEVICE), fused=True), clipped(CPU, fused=False)):
        fill(adam, 0)
        adam.grads[0][-1] = bad
        adam.step()
        assert not torch.isfinite(adam.grad_norm)
        assert torch.isnan(adam.masters[0][-1]).all() and adam.step_count == 1
        if bad != bad:
            assert torch.isnan(adam.masters[1]).all()


@on_device
def test_an_offset_beyond_31_bits_is_found():
    """The chunks of a large tensor are found by 64-bit offsets; a table that says so stands for its 8 GiB."""
    from common.optimizers.fused_adam import TILES, _sum_of_squares, tl

    tiles, far = TILES[4], 2**33
    data = torch.arange(tiles.chunk, dtype=torch.float32, device=DEVICE)
    partial, zero = torch.zeros(1, device=DEVICE), torch.zeros(1, dtype=torch.int64, device=DEVICE)
    # data is what lies `far` elements behind the address in the table.
    address = torch.tensor([data.data_ptr() - 4 * far], device=DEVICE)
    sizes = torch.tensor([far + tiles.chunk], device=DEVICE)
    tables = (address, zero, torch.tensor([far], device=DEVICE), sizes)
    _sum_of_squares[(1,)](partial, *tables, tiles.chunk, tiles.norm_block, tl.float32, num_warps=tiles.norm_warps)
    torch.testing.assert_close(partial[0], data.square().sum(), rtol=1e-5, atol=0)


@pytest.mark.gpu
def test_a_captured_step_reads_the_learning_rate_of_now():
    from graph_worth.capture.pool import Pool

    device = torch.device("cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        graphed, eager = clipped(device, fused=True), clipped(device, fused=True)
        for adam in (graphed, eager):
            fill(adam, 0)
            adam.step()
        pool = Pool(device)
        graph, _ = pool.capture(graphed.step)
        for step in range(6):
            for adam in (graphed, eager):
                adam.lr.mul_(0.5)
                fill(adam, step)
            graph.replay()
            eager.step()
        assert torch.equal(graphed.grad_norm, eager.grad_norm)
        for (name, a), (_, b) in zip(graphed.named_state(), eager.named_state(), strict=True):
            assert torch.equal(a, b), name
        pool.release()


# --- compiled for an H100 or H200, which needs none


def compiled_kernels(monkeypatch, tiles, grad_dtype):
    """{kernel's name: what Triton's compiler made of it} of one step, with `tiles`."""
    from common.optimizers import fused_adam
    from tests.helpers.triton_compiling import Compiling

    monkeypatch.setattr(fused_adam, "Launch", Compiling)
    monkeypatch.setattr(Compiling, "compiled", {})
    monkeypatch.setitem(fused_adam.TILES, grad_dtype.itemsize, tiles)
    # Two tensors, since of a number 1 Triton makes a constant.
    params = [torch.zeros(8, 8, dtype=torch.bfloat16) for _ in range(2)]
    masters, moments, moments_sq = ([torch.zeros(8, 8) for _ in params] for _ in range(3))
    grads = [torch.zeros_like(param, dtype=grad_dtype) for param in params]
    update = fused_adam.FusedUpdate((params, masters, moments, moments_sq), NUMBERS, grads)
    update.norm(grads, out=torch.zeros(()))
    update.step(grads, [torch.zeros(()) for _ in range(6)])
    return {key[0]: kernel for key, kernel in Compiling.compiled.items()}


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="the interpreter has no compiler")
def test_kernels_compile_for_hopper_with_wide_accesses_and_no_spills(monkeypatch):
    """Whole chunks are read and written 16 bytes at a time; their rest, with a mask, element by element."""
    from common.optimizers.fused_adam import TILES
    from tests.helpers.triton_compiling import resources, wide_accesses

    for size, tiles in TILES.items():
        kernels = compiled_kernels(monkeypatch, tiles, {2: torch.float16, 4: torch.float32}[size])
        assert kernels.keys() == {"_sum_of_squares", "_prepare", "_update"}
        for name, kernel in kernels.items():
            used = resources(kernel)
            # 65,536 registers a multiprocessor: below 128 of them, of 2,048 threads at least a quarter run at once.
            assert used["STACK"] == used["LOCAL"] == 0 and used["REG"] <= 128, (tiles, name, used)
        each = size * tiles.norm_block // (16 * 32 * tiles.norm_warps)
        assert wide_accesses(kernels["_sum_of_squares"]) == (each * tiles.chunk // tiles.norm_block, 0), tiles
        loads, stores = wide_accesses(kernels["_update"])
        assert loads >= 3 and stores >= 3, tiles


@pytest.mark.slow
def test_in_the_interpreter():
    run_interpreted(__file__)
