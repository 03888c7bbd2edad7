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


def test_a_profiler_that_fails_ends_the_watch_and_not_the_script(tmp_path, monkeypatch):
    def fails(*_):
        raise RuntimeError("Profiler is already enabled")
        yield

    monkeypatch.setattr(script_watch.atexit, "register", lambda *_: None)
    monkeypatch.setattr(script_watch.os, "register_at_fork", lambda **_: None)
    for name, answer in {"is_available": True, "is_initialized": True, "synchronize": None}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    monkeypatch.setattr(kernel_trace, "profiled", fails)
    ScriptWatch(str(tmp_path))
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(40):
        weight.sum().backward()
        optimizer.step()
    (path,) = tmp_path.iterdir()
    told = json.loads(path.read_text())
    assert told["error"] == "RuntimeError: Profiler is already enabled" and told["step_ms"] > 0
    assert not _global_optimizer_post_hooks
