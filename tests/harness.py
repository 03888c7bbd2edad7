"""What tests of the harness share: the command and its children in this process, sessions by name.

A run of the fake model is a function call here (`run_here`): a process for each would take minutes. Tests of processes
themselves do without the fixture `quick` of tests/machines.py.
"""

import contextlib
import functools
import io
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import time
import traceback
from types import SimpleNamespace
from unittest import mock

from benchmarks import ROOT, children, rounds, run, script, sessions
from common import record as records

MODEL = "tests.fake_model"
ON_GPU = ("--pretend-gpu", "true")

# Starts the command twice on this machine, as two nodes, and does what launch.py asks of a launcher.
TWO_NODES = """#!/bin/bash
trap 'kill -TERM "${pids[@]}"' TERM
pids=()
for rank in ${RANKS:-0 1}; do
    PET_NODE_RANK=$rank "$@" &
    pids+=($!)
done
status=0
for pid in "${pids[@]}"; do
    # One that fails ends the others.
    if ! wait -n; then
        status=1
        kill -TERM "${pids[@]}" 2>/dev/null
    fi
done
wait
exit $status
"""

# ------------------------------------------------------------------------------------------------
# Processes


def processes_with(mark):
    """Process ids, zombies left out, whose command line holds `mark`."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            try:
                with open(f"/proc/{entry}/cmdline", "rb") as file:
                    if mark.encode() in file.read():
                        found.append(int(entry))
            except OSError:
                continue
    return found


def until(condition, limit_s=10.0):
    deadline = time.monotonic() + limit_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


# ------------------------------------------------------------------------------------------------
# GPUs that are none


def fake_nvidia_smi(folder, monkeypatch, listing):
    folder.mkdir()
    program = folder / "nvidia-smi"
    program.write_text(f'#!/bin/sh\nif [ "$1" = -L ]; then printf "{listing}"; else echo 580.1; fi\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


# ------------------------------------------------------------------------------------------------
# Children in this process

_run_child = children.run_child
_describe = script.describe


def run_here(command, *, log, limit_s, environment, is_remote=False, watch=None, importer=None):
    """children.run_child of a fake that neither hangs nor dies, in this process."""
    start = command.index(f"{MODEL}.train") if f"{MODEL}.train" in command else 0
    if start != 2 or option(command, "--variant") in ("hang", "die"):
        return _run_child(command, log=log, limit_s=limit_s, environment=environment, is_remote=is_remote)
    log.parent.mkdir(parents=True, exist_ok=True)
    began, status = time.perf_counter(), 0
    with (
        open(log, "a") as file,
        mock.patch.dict(os.environ, environment, clear=True),
        mock.patch.object(sys, "argv", command[2:]),
        contextlib.redirect_stdout(file),
        contextlib.redirect_stderr(file),
    ):
        try:
            fake().main()
        except SystemExit as stop:
            status = stop.code or 0
        except Exception:
            traceback.print_exc()
            status = 1
    return children.Outcome(status, False, time.perf_counter() - began)


@functools.cache
def fake():
    from tests.fake_model import train

    return train


def describe_here(model, flags, preset=None):
    return json.loads(_described(model, tuple(flags), preset))


@functools.cache
def _described(model, flags, preset):
    if model == MODEL:
        words = [f"{model}.train", "--describe", *(["--preset", preset] if preset else []), *flags]
        said = io.StringIO()
        quiet = contextlib.redirect_stderr(io.StringIO())
        argv = mock.patch.object(sys, "argv", words)
        with argv, contextlib.redirect_stdout(said), quiet, contextlib.suppress(SystemExit):
            fake().main()
        if said.getvalue() and not any(flag.split("=")[0] in script.RESERVED_FLAGS for flag in flags):
            return said.getvalue()
    return json.dumps(_describe(model, list(flags), preset))


def option(command, flag):
    return command[command.index(flag) + 1]


def which_run(command):
    """(variant, round, name of the record) of a child's command."""
    name = os.path.basename(option(command, "--record")).removesuffix(".json")
    return option(command, "--variant"), int(option(command, "--round")), name


def watched(monkeypatch, before=None, after=None):
    """Names of the runs to come, in order; before(name, command) and after(name, path of the record) see each."""
    seen, original = [], children.run_child

    def child(command, **more):
        _, _, name = which_run(command)
        seen.append(name)
        if before:
            before(name, command)
        outcome = original(command, **more)
        if after:
            after(name, option(command, "--record"))
        return outcome

    monkeypatch.setattr(children, "run_child", child)
    return seen


def stop_at(monkeypatch, name):
    """Ctrl-C when the run `name` would start; returns what lets it run again."""
    seen, original = [], children.run_child

    def child(command, **more):
        if which_run(command)[2] == name and not seen:
            seen.append(name)
            raise KeyboardInterrupt
        return original(command, **more)

    monkeypatch.setattr(children, "run_child", child)


def edited(monkeypatch, edit):
    """edit(name, record) changes the record that each child leaves."""

    def after(name, path):
        with contextlib.suppress(FileNotFoundError, records.RecordError):
            record = records.read(path)
            edit(name, record)
            records.write(path, record)

    return watched(monkeypatch, after=after)


def scale(record, factor):
    """All times of a timed record, so that it stays consistent."""
    times = [round(time_ms * factor, 4) for time_ms in record["steps"]["gpu_ms"]]
    record["steps"].update(gpu_ms=times, wall_ms=sum(times))
    record["statistic_ms"] = statistics.median(times)
    record["busy_ms"] = min(record["busy_ms"], record["statistic_ms"])
    record["idle_fraction"] = max(0.0, 1 - record["busy_ms"] / record["statistic_ms"])
    record["conditions"]["window_s"] = sum(times) / 1e3
    record["proof"]["settled_ms"] = {"0": record["statistic_ms"]}


def quick_children(monkeypatch, seconds):
    """Every child takes seconds(round, variant) on the session's own clock, and no time at all of the test's."""
    clock = [0.0]
    original = children.run_child

    def child(command, **more):
        variant, number, _ = which_run(command)
        outcome = original(command, **more)
        clock[0] += seconds(number, variant)
        return children.Outcome(outcome.exit_status, outcome.timed_out, seconds(number, variant))

    monkeypatch.setattr(children, "run_child", child)
    monkeypatch.setattr(rounds, "time", SimpleNamespace(monotonic=lambda: clock[0]))


# ------------------------------------------------------------------------------------------------
# The command


def go(out, variants="graph", *arguments, flags=(), model=MODEL):
    """The command in this process; returns its exit status."""
    return main(["--model", model, "--variants", variants, "--out", str(out), *arguments], flags)


def main(argv, flags=()):
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        return run.main([*map(str, argv), *(["--", *flags] if flags else [])])
    except SystemExit as stop:
        return stop.code
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def command(*arguments, **more):
    """The command as a process."""
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.run", *map(str, arguments)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **more,
    )


# ------------------------------------------------------------------------------------------------
# Sessions


def only(out):
    """The one session below `out`, open or packed."""
    (path,) = sessions.find(out)
    return path


def newest(out):
    return max(sessions.find(out), key=lambda path: path.name)


def read(path):
    """Name -> record of a session, open or packed alike: graph.r1, graph.r1.a2, and graph.r1.t1 of a failed try."""
    found, faults = sessions.read_records(path)
    assert faults == []
    named = {}
    for _, record in found:
        name = records.file_name(record["variant"], record["round"], record["attempt"]).removesuffix(".json")
        if record["extra"].get("superseded"):
            name = next(each for each in (f"{name}.t{index}" for index in itertools.count(1)) if each not in named)
        named[name] = record
    return named


def names(path):
    return sorted(read(path))


def of(variants, last, first=0):
    """Names of whole rounds: of(["eager", "graph"], 2)."""
    return sorted(f"{variant}.r{number}" for variant in variants for number in range(first, last + 1))


def change_meta(path, **values):
    """Write other values into session.json of an open session."""
    meta = sessions.read_meta(path)
    sessions.write_meta(path, meta | values)
