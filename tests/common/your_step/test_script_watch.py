"""The watch over a script on a pretended GPU: what is timed, profiled and noted, in which steps."""

import gc
import json
import weakref

import pytest
import torch
from torch.optim.optimizer import _global_optimizer_post_hooks

from common.measuring import trace
from common.your_step import script_watch
from common.your_step.script_watch import AFTER, HEAT, PROFILED, READ, TIMED, ScriptWatch

SEEN = AFTER + TIMED + HEAT + PROFILED + READ


@pytest.fixture
def log(monkeypatch):
    found = []
    monkeypatch.setattr(script_watch.atexit, "register", lambda *_: None)
    monkeypatch.setattr(script_watch.os, "register_at_fork", lambda **_: None)
    fakes = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "synchronize": lambda *_: found.append("drain"),
        "get_sync_debug_mode": lambda: 0,
        "set_sync_debug_mode": lambda mode: found.append(f"sync {mode}"),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)

    def profiled(profile, num_steps, num_heat_steps):
        found.append("prepare")
        for _ in range(num_heat_steps):
            yield
        found.append("profile")
        for _ in range(num_steps):
            yield
        found.append("profiled")

    monkeypatch.setattr(trace, "profiled", profiled)
    monkeypatch.setattr(trace, "facts", lambda events, number: {"busy_ms": 0.5, "graph_share": 0.0, "steps": number})
    return found


def train(log, steps):
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for index in range(steps):
        log.append(index)
        weight.sum().backward()
        optimizer.step()
    return weakref.ref(optimizer)


def test_the_steps_are_timed_then_profiled_then_noted_and_the_hook_is_gone(tmp_path, log):
    kept = ScriptWatch(str(tmp_path))
    optimizer = train(log, SEEN + 3)
    gc.collect()
    assert kept is not None and optimizer() is None
    (path,) = tmp_path.iterdir()
    told = json.loads(path.read_text())
    assert told["on_gpu"] and told["busy_ms"] == 0.5 and told["reads"] == [] and told["step_ms"] > 0
    places = {name: [log[index - 1] for index, each in enumerate(log) if each == name] for name in set(map(str, log))}
    assert places["drain"] == [AFTER - 1, AFTER + TIMED - 1]
    assert log[log.index("drain") - 1] == AFTER - 1
    order = [each for each in log if isinstance(each, str)]
    assert order == ["drain", "drain", "prepare", "profile", "profiled", *["sync warn", "sync 0"] * READ]
    assert log.index("profile") == log.index(AFTER + TIMED + HEAT - 1) + 1
    assert log.index("profiled") == log.index(AFTER + TIMED + HEAT + PROFILED - 1) + 1
    assert log[-4:] == ["sync 0", *range(SEEN, SEEN + 3)]
    assert not _global_optimizer_post_hooks


def test_a_profiler_that_fails_ends_the_watch_and_not_the_script(tmp_path, log, monkeypatch):
    def fails(*_):
        raise RuntimeError("Profiler is already enabled")
        yield

    monkeypatch.setattr(trace, "profiled", fails)
    ScriptWatch(str(tmp_path))
    train(log, 40)
    (path,) = tmp_path.iterdir()
    told = json.loads(path.read_text())
    assert log[-1] == 39 and told["error"] == "RuntimeError: Profiler is already enabled" and told["step_ms"] > 0
    assert not _global_optimizer_post_hooks
