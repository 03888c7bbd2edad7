"""common/your_step/pace.py: whether a step is bound by its launches, measured without a GPU of its own."""

from types import SimpleNamespace

import pytest
import torch

from common.measuring import marks
from common.your_step import pace
from common.your_step.state import StepState


@pytest.mark.parametrize(
    ("issue", "busy", "words"),
    [
        (15.0, 10.0, "launch-bound: the host issues an eager step in 15 ms, the GPU is busy for 10 ms, so"),
        (10.05, 10.0, "not launch-bound: "),
    ],
)
def test_a_step_is_launch_bound_where_its_host_is_slower(issue, busy, words):
    assert pace.text(issue, busy).startswith(words)
    assert ("up to 1.50x" in pace.text(issue, busy)) == (issue == 15.0)


def test_issue_and_busy_are_of_eager_steps_one_after_the_other(monkeypatch):
    trained, resets = [], []
    device = SimpleNamespace(type="cuda")
    state = SimpleNamespace(device=device, marked_train=trained.append, reset=lambda: resets.append(len(trained)))
    times = iter((9.0, 7.0, 8.0))

    def issue(variant, index, device):
        variant.step(index)
        return next(times)

    def profile(run_steps, num_steps, num_heat_steps):
        run_steps(num_heat_steps)
        run_steps(num_steps)
        return SimpleNamespace(events=["kernels"])

    monkeypatch.setattr(pace.block, "issue_ms_of", issue)
    monkeypatch.setattr(pace.trace, "profile", profile)
    monkeypatch.setattr(pace.trace, "facts", lambda events, steps: {"busy_ms": 4.0 if events else None})
    assert pace.measured(state) == pace.text(8.0, 4.0)
    assert trained == list(range(4 * pace.NUM_STEPS)) and resets == [0, len(trained)]
    monkeypatch.setattr(device, "type", "cpu")
    assert pace.measured(state) == ""


def test_layers_are_marked_only_where_somebody_watches(tmp_path):
    path = tmp_path / "step.py"
    path.write_text(
        "import torch\n"
        "def build(device):\n"
        "    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())\n"
        "    def step(batch):\n"
        "        loss = model(batch).mean()\n"
        "        loss.backward()\n"
        "        return loss\n"
        "    return step, [torch.randn(2, 4)], [model]\n"
    )
    state = StepState(f"{path}:build", torch.device("cpu"), "test")
    seen = []
    with marks.watching_marks(lambda: seen.append(1)):
        state.marked_train(0)
    state.marked_train(0)
    # Forward and backward of both layers, once.
    assert len(seen) == 4
