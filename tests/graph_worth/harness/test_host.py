"""python -m benchmarks.host: times of calls on this machine, and what it says of an interpreter that cannot."""

import contextlib
import json
import sys

import pytest

from graph_worth.harness import host
from tests.helpers.processes import program


@pytest.mark.slow
def test_calls_of_this_host_are_timed_quiet_and_beside_busy_processes(monkeypatch, capsys):
    monkeypatch.setattr(host, "SECONDS", 0.1)
    assert host.main(["--json", "--host-load", "1"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    assert found["busy_processes"] == 1 and found["host"]["cores"] >= 1
    for name in ("quiet", "busy"):
        times = found[name]
        assert ("graph" in times) == bool(found["host"]["gpus"]) and {"operator", "linear"} <= times.keys()
        assert all(0 < each["p50_us"] <= each["p99_us"] for each in times.values())
    lines = host.table(found).splitlines()
    assert "beside 1 busy processes" in lines[1] and lines[3].split()[:2] == ["eager", "operator"]
    assert "no graph to launch" in lines[0] or found["host"]["gpus"]
    assert max(map(len, lines)) <= 100


@pytest.mark.slow
def test_busy_processes_run_beside_the_second_answer_alone(monkeypatch):
    running = []

    @contextlib.contextmanager
    def busy(number):
        running.append(number)
        yield
        running.append("end")

    loads = host.json.loads
    monkeypatch.setattr(host, "busy_processes", busy)
    monkeypatch.setattr(host.json, "loads", lambda text: running.append("answer") or loads(text))
    monkeypatch.setattr(host, "SECONDS", 0.01)
    host.measured(sys.executable, 3)
    assert running == ["answer", "answer", 3, "answer", "end"]


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ("echo '[[3, 12], \"\"]'", 2, " has no torch"),
        ('if [ "$1" = -c ]; then echo \'[[3, 12], "2.9.0"]\'; fi', 1, "the process that measures has ended"),
    ],
)
def test_an_interpreter_that_cannot_is_one_line(tmp_path, capsys, body, status, said):
    python = program(tmp_path / "python", f"#!/bin/sh\n{body}\n")
    assert host.main(["--python", python]) == status
    printed = capsys.readouterr()
    assert said in printed.err and printed.err.count("\n") == 1 and not printed.out


def test_a_command_that_is_none_is_one_line(capsys):
    assert host.main(["--python", "/nowhere/python"]) == 2
    assert "no such command" in capsys.readouterr().err
