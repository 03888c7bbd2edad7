"""common/your_step/bisect.py and idle.py: modules captured one by one, and those for whose kernels a GPU waits."""

import pytest
import torch

from common.measuring import idle, torch_settings
from common.your_step import bisect
from common.your_step.doctor import diagnose
from common.your_step.state import StepState

STEP = """
import torch
from torch import nn

class Reads(nn.Module):
    def forward(self, x, scale=1.0):
        return x * float(x.detach().mean()) * scale

class ReadsBackwards(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, gradient):
        return gradient * gradient.mean().item()

class Late(nn.Module):
    def forward(self, x):
        return ReadsBackwards.apply(x)

class Block(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.up, self.act, self.inner = nn.Linear(16, 16), nn.ReLU(inplace=True), inner
    def forward(self, x):
        return self.inner(self.act(self.up(x)))

def build(device):
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(each) for each in MODULES], nn.Linear(16, 4)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    batches = [torch.randn(8, 16, device=device) for _ in range(4)]
    def step(batch):
        optimizer.zero_grad()
        loss = LOSS
        loss.backward()
        optimizer.step()
        return loss
    return step, batches, [model, optimizer]
"""
LOSS = "model(batch).square().mean()"


def written(tmp_path, modules, loss=LOSS):
    path = tmp_path / "step.py"
    path.write_text(STEP.replace("MODULES", modules).replace("LOSS", loss))
    return f"{path}:build"


@pytest.mark.parametrize(
    ("modules", "failed", "alike", "passed"),
    [
        ("(nn.Identity(), Reads(), Reads())", ["1.inner"], 1, {"0", "1.up", "1.act", "3"}),
        ("(nn.Identity(), Late(), nn.Tanh())", ["1.inner"], 0, {"0", "1.up", "2", "3"}),
        ("(nn.Identity(), nn.Tanh())", [], 0, {"0", "1", "2", "Sequential"}),
    ],
)
@pytest.mark.parametrize("in_children", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_smallest_module_that_fails_is_found_forward_and_backward(
    tmp_path, modules, failed, alike, passed, in_children
):
    state = StepState(written(tmp_path, modules), torch.device("cpu"), "test")

    found = bisect.alone(state, in_children)

    assert list(found.failed) == failed and sum(found.alike.values()) == alike
    assert passed <= set(found.passed) and found.untried == 0
    assert ("Sequential" in found.bad) == bool(failed)
    assert not failed or "reads a value of the GPU on the host" in found.text()


def test_a_module_whose_capture_ends_its_process_is_named_and_the_next_child_goes_on(tmp_path):
    text = written(tmp_path, "(nn.Identity(), Late(), nn.Tanh())")
    path = tmp_path / "step.py"
    # A module that is tried alone gets gradients of zero.
    dies = "(1 if gradient.any() else __import__('os')._exit(9))"
    path.write_text(path.read_text().replace("gradient.mean().item()", dies))

    found = bisect.alone(StepState(text, torch.device("cpu"), "test"), in_children=True)

    assert found.failed == {"1.inner": bisect.ENDED} and {"2.inner", "3"} <= set(found.passed)


def test_a_child_that_cannot_build_the_step_says_why(tmp_path):
    text = written(tmp_path, "(nn.Identity(), Late(), nn.Tanh())")
    state = StepState(text, torch.device("cpu"), "test")
    (tmp_path / "step.py").write_text("def build(device):\n    raise MemoryError('no room')\n")
    found = bisect.alone(state, in_children=True)
    assert found.text().startswith("no module was captured alone: ") and "no room" in found.text()


def test_the_plan_has_the_modules_that_keep_their_shapes(tmp_path):
    loss = "model[2](model[0](batch)[batch[:, 0] > 0]).square().mean() + model[1](batch).mean()"

    found = diagnose(written(tmp_path, "(nn.Identity(), nn.Tanh())", loss), torch.device("cpu"))

    assert {name for name, _ in found.parts} == {"0", "1"}
    assert "was not measured" in found.text()


@pytest.mark.gpu
def test_on_a_gpu_the_plan_has_shares_of_the_pauses(tmp_path):
    device = torch.device("cuda:0")
    torch_settings.prepare(device)

    found = diagnose(written(tmp_path, "(nn.Identity(), Reads(), nn.Tanh())"), device)

    assert list(found.alone.failed) == ["1.inner"] and found.pace, found.text()
    assert 0 < found.waits.of_step < 1 and {name for name, _ in found.parts} == {"0", "1.up", "1.act", "2", "3"}
    assert 0 < sum(share for _, share in found.parts) <= 1


def span(name, cat, ts, dur, tid=1, **args):
    return {"name": name, "cat": cat, "ph": "X", "ts": ts, "dur": dur, "tid": tid, "args": args}


def kernel(launch_us, start_us, us, number, tid=1):
    yield span("cudaLaunchKernel", "cuda_runtime", launch_us, 1, tid, correlation=number)
    yield span("a kernel", "kernel", start_us, us, 7, correlation=number)


def test_a_pause_of_the_gpu_counts_for_the_module_whose_kernel_ends_it():
    named = span("module a.b", "user_annotation", 10, 20)
    made = [
        span("aten::t", "cpu_op", 11, 1, **{"Sequence number": 5}),
        span("aten::mm", "cpu_op", 15, 5, **{"Sequence number": 5}),
    ]
    node = span("autograd::engine::evaluate_function: MmBackward0", "cpu_op", 100, 20, 2, **{"Sequence number": 5})
    work = [*kernel(1, 5, 5, 1), *kernel(16, 20, 10, 2), *kernel(105, 110, 10, 3, tid=2), *kernel(150, 160, 10, 4)]

    found = idle.idle_of([named, *made, node, *work])

    # Pauses of 10 us forward, 80 us backward, 40 us outside of modules, in 165 us.
    assert found.of_step == pytest.approx(130 / 165)
    assert found.inside("a") == found.inside("a.b") == pytest.approx(90 / 130)
    assert found.inside("a.bc") == 0 and found.of_modules[""] == pytest.approx(40 / 130)
    assert idle.idle_of([named, *made]) is None


def test_launches_of_forward_and_backward_belong_to_their_module(tmp_path):
    state = StepState(written(tmp_path, "(nn.Identity(), nn.Tanh())"), torch.device("cpu"), "test")
    events = idle.profiled(state)
    owners = idle.Owners(events)
    found = {
        name: {owners.of(e["tid"], e["ts"]) for e in events if e["name"] == name}
        for name in ("aten::tanh", "aten::tanh_backward", "aten::threshold_backward", "aten::_fused_sgd_")
    }
    assert found == {
        "aten::tanh": {"1.inner"},
        "aten::tanh_backward": {"1.inner"},
        "aten::threshold_backward": {"0.act", "1.act"},
        "aten::_fused_sgd_": {""},
    }
