"""The watch over a script on a pretended GPU whose profiler fails."""

import json

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks

from graph_worth.measuring import kernel_trace
from graph_worth.your_step import script_watch
from graph_worth.your_step.script_watch import ScriptWatch


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
