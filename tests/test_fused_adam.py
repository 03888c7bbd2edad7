"""common/fused_adam against torch's AdamW on a GPU, and through Triton's interpreter without one."""

import pytest
import torch

from common.optimizers import LossScaler, ScaledMasterAdam
from tests.triton_interpreter import DEVICE, on_device, run_interpreted

OPTIONS = {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
# More than one chunk, less than one, a 4-d weight with channels last, one number.
SHAPES = [(300, 33), (17,), (8, 16, 3, 3), (1,)]
CPU = torch.device("cpu")


def make(device, fused):
    generator = torch.Generator().manual_seed(0)
    params = [torch.randn(shape, generator=generator).half() for shape in SHAPES]
    params[2] = params[2].to(memory_format=torch.channels_last)
    params = [torch.nn.Parameter(param.to(device)) for param in params]
    adam = ScaledMasterAdam(params, LossScaler(device, 1024.0, 1000, 2), **OPTIONS)
    if fused and adam._fused is None:
        from common.fused_adam import FusedUpdate

        states = (params, adam.masters, adam.exp_avg, adam.exp_avg_sq)
        adam._fused = FusedUpdate(*states, OPTIONS["betas"], OPTIONS["eps"], OPTIONS["weight_decay"])
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
    from common.capture import Pool

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


def test_in_the_interpreter():
    run_interpreted(__file__)
