"""common/fused_adam against torch's AdamW on a GPU, and through Triton's interpreter without one."""

import os
import subprocess
import sys

import pytest
import torch

from common.optimizers import LossScaler, ScaledMasterAdam

OPTIONS = {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
# More than one chunk, less than one, a 4-d weight with channels last, one number.
SHAPES = [(300, 33), (17,), (8, 16, 3, 3), (1,)]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


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


def check_against_torch(device):
    ours, torchs = make(device, fused=True), make(torch.device("cpu"), fused=False)
    # A tensor that is given back, and one whose address is used again, must both be found.
    for step in range(6):
        before = [tensor.clone() for _, tensor in ours.named_state()]
        for adam in (ours, torchs):
            adam.step(gradients(adam, step, overflow=step == 2))
        if step == 2:
            assert not torch.isfinite(ours.grad_norm)
            assert all(torch.equal(a, b) for a, (_, b) in zip(before, ours.named_state(), strict=True))
        else:
            torch.testing.assert_close(ours.grad_norm.cpu(), torchs.grad_norm, rtol=1e-6, atol=0)
    assert ours.step_count.item() == 5
    for (name, a), (_, b) in zip(ours.named_state(), torchs.named_state(), strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=2e-6, atol=1e-7)
    for param, master in zip(ours.params, ours.masters, strict=True):
        assert torch.equal(param.detach(), master.half())


def check_replays():
    """Replays of a graph and eager steps in turn: each reads the gradients at its own addresses."""
    from common.capture import Pool

    with torch.cuda.stream(torch.cuda.Stream()):
        graphed, eager = make(DEVICE, fused=True), make(DEVICE, fused=True)
        static = gradients(graphed, 0)
        kept = gradients(graphed, 0)
        graphed.step(kept)
        graphed.reset(), graphed.scaler.reset()
        pool = Pool(DEVICE)
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


@pytest.mark.gpu
def test_on_a_gpu_the_update_is_torchs():
    check_against_torch(DEVICE)


@pytest.mark.gpu
def test_replays_and_eager_steps_do_not_mix_their_gradients():
    check_replays()


def test_the_kernels_compute_torchs_update():
    """Triton's interpreter runs the kernels on the CPU; it must be switched on before they are defined."""
    pytest.importorskip("triton", reason="the kernels need triton: pip install triton")
    code = "import torch; from tests.test_fused_adam import check_against_torch as f; f(torch.device('cpu'))"
    result = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
