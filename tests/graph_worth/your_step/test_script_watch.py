"""The watch over a script on a pretended GPU: a profiler that fails, and kernels on several streams."""

import json

import pytest
import torch
from torch.optim.optimizer import _global_optimizer_post_hooks

from graph_worth.measuring import kernel_trace
from graph_worth.your_step import script_watch
from graph_worth.your_step.script_watch import ScriptWatch, second_streams


def kernel(stream, duration_us=4.0, by_graph=False, is_kernel=True):
    return {"stream": stream, "duration_us": duration_us, "by_graph": by_graph, "is_kernel": is_kernel}


@pytest.mark.parametrize(
    ("work", "is_said"),
    [
        ([kernel(7), kernel(7)], False),
        ([kernel(7), kernel(20)], True),
        ([kernel(7), kernel(20, is_kernel=False)], False),
        ([kernel(7, 30.0), kernel(20, 30.0)], False),
        ([kernel(7, by_graph=True), kernel(7)], False),
        ([kernel(7, by_graph=True), kernel(20)], True),
        # A graph with a fork.
        ([kernel(7, by_graph=True), kernel(7, by_graph=True), kernel(21, by_graph=True), kernel(7)], False),
        ([], False),
    ],
)
def test_a_second_stream_is_said_where_kernels_are_short(work, is_said):
    assert second_streams(work, {"b.py:2", "a.py:1"}) == (["a.py:1", "b.py:2"] if is_said else [])
    assert second_streams(work, set()) == ([""] if is_said else [])


@pytest.fixture
def on_gpu(monkeypatch):
    """A pretended GPU, and a watch that leaves nothing in this process."""
    monkeypatch.setattr(script_watch.atexit, "register", lambda *_: None)
    monkeypatch.setattr(script_watch.os, "register_at_fork", lambda **_: None)
    for name, answer in {"is_available": True, "is_initialized": True, "synchronize": None}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)


LOOP = """
def train():
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(40):
        weight.sum().backward()
        optimizer.step()
"""


def told_by(tmp_path, module="train"):
    """The report of a watch over 40 steps in the loop of a module."""
    ScriptWatch(str(tmp_path))
    names = {"torch": torch, "__name__": module}
    exec(LOOP, names)
    names["train"]()
    (path,) = tmp_path.iterdir()
    return json.loads(path.read_text())


@pytest.mark.parametrize(
    ("module", "loop"),
    [
        ("transformers.trainer", "transformers"),
        ("lightning.pytorch.loops.training_epoch_loop", "lightning"),
        ("lightning.fabric.fabric", ""),
        ("__main__", ""),
    ],
)
@pytest.mark.usefixtures("on_gpu")
def test_kernels_and_the_hosts_time_to_issue_them_are_reported_with_the_loop(tmp_path, monkeypatch, module, loop):
    def profiled(profile, num_steps, num_heat):
        yield from range(num_steps + num_heat)
        one = {"name": "gemm", "cat": "kernel", "ph": "X", "ts": 0.0, "dur": 30.0, "pid": 0, "tid": 7, "args": {}}
        profile.events = [one | {"ts": 100.0 * index} for index in range(6)]

    monkeypatch.setattr(kernel_trace, "profiled", profiled)
    monkeypatch.setattr(script_watch.torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(script_watch.torch.cuda, "set_sync_debug_mode", lambda mode: None)
    told = told_by(tmp_path, module)
    assert "error" not in told and (told["kernels"], told["loop"]) == (2, loop)
    assert told["busy_ms"] == pytest.approx(0.06) and 0 < told["issue_ms"] <= told["step_ms"]


@pytest.mark.usefixtures("on_gpu")
def test_a_profiler_that_fails_ends_the_watch_and_not_the_script(tmp_path, monkeypatch):
    def fails(*_):
        raise RuntimeError("Profiler is already enabled")
        yield

    monkeypatch.setattr(kernel_trace, "profiled", fails)
    told = told_by(tmp_path)
    assert told["error"] == "RuntimeError: Profiler is already enabled" and told["step_ms"] > 0
    assert not _global_optimizer_post_hooks
