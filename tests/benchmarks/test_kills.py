"""Two hundred kills of the command, its worker or the process between, at any moment of a run, starts included.

By SIGKILL or SIGHUP. Nothing finished is lost, no variant is accused, no process is left, and no folder of a worker.
"""

import contextlib
import json
import os
import random
import signal
import time

import pytest

from graph_worth.harness import judge
from graph_worth.harness.files import partial
from graph_worth.harness.processes import supervisor
from tests.helpers.bench_process import bench, only_run, start, wait_for, workers
from tests.helpers.processes import until

MORE = (["eager", "graph_step"], "--cycles", 3)
# From the start of the process to some time after its usual end.
LATEST_S = 12.0
KILLS = 10


def blocks_of_whole_cycles(folder):
    """(cycle, place) -> times of each block that a run which goes on does not measure again."""
    (path,) = list(folder.rglob(f"*{partial.SUFFIX}")) or [None]
    facts = [json.loads(line) for line in path.read_bytes().splitlines(True) if line.endswith(b"\n")] if path else []
    whole = {fact["cycle"] for fact in facts if fact["fact"] == "cycle"}
    return {
        (fact["cycle"], fact["place"]): fact["step_ms"]
        for fact in facts
        if fact["fact"] == "block" and fact["cycle"] in whole
    }


def require_whole(folder, kept):
    (judged,) = judge.judged(only_run(folder)).values()
    assert {name: own.status for name, own in judged.verdicts.items()} == dict.fromkeys(judged.verdicts, "pass")
    assert [block.cycle for block in judged.blocks("graph_step")] == [0, 1, 2]
    blocks = [block for own in judged.build.variants.values() for block in own.blocks]
    found = {(block.cycle, block.place): block.step_ms for block in blocks}
    assert all(found[key] == step_ms for key, step_ms in kept.items())


def kill(process, draw):
    """Kill the command, or its worker, or the process between the two, by either signal."""
    mine = supervisor.descendants(process.pid)
    worker = [pid for pid in workers() if pid in mine]
    between = [pid for pid in mine if pid not in worker][:1]
    # A SIGTERM to the command seals what has two cycles.
    number = draw.choice([signal.SIGKILL, signal.SIGHUP])
    for pid in draw.choice([[process.pid], worker or [process.pid], between or [process.pid]]):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
    process.communicate(timeout=120)
    return mine


@pytest.mark.long
@pytest.mark.parametrize("number", range(20))
def test_after_each_kill_the_same_command_goes_on(tmp_path, number):
    draw, temporary = random.Random(number), tmp_path / "temporary"
    temporary.mkdir()
    folder, kept = tmp_path / "0", {}
    for each in range(KILLS):
        process = start(folder, *MORE, audits=True, TMPDIR=str(temporary))
        time.sleep(draw.uniform(0.0, LATEST_S))
        mine = kill(process, draw)
        assert until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in mine)), "a process is left"  # noqa: B023
        assert until(lambda: not list(temporary.glob("worker-*"))), "a folder of a worker is left"
        if folder.exists():
            kept |= blocks_of_whole_cycles(folder)
        if list(folder.rglob("*.json")) and not list(folder.rglob(f"*{partial.SUFFIX}")):
            require_whole(folder, kept)
            folder, kept = tmp_path / str(each + 1), {}
    done = bench(folder, *MORE, audits=True)
    assert done.returncode == 0, done.stdout + done.stderr
    require_whole(folder, kept)


def kill_workers(process, number):
    """Kill so many workers of a command as they start."""
    killed = set()
    while len(killed) < number and process.poll() is None:
        for pid in workers().keys() & set(supervisor.descendants(process.pid)) - killed:
            os.kill(pid, signal.SIGKILL)
            killed.add(pid)


@pytest.mark.slow
def test_a_run_goes_on_after_a_worker_that_was_killed_while_it_started(tmp_path):
    first = start(tmp_path, *MORE)
    kill_workers(first, 1)
    assert "it is started once more" in wait_for(first, "cycle 1 of 3")
    first.kill()
    first.communicate()
    kept = blocks_of_whole_cycles(tmp_path)
    second = start(tmp_path, *MORE)
    kill_workers(second, 2)
    said, _ = second.communicate(timeout=240)
    assert second.returncode == 1 and "the same command goes on from there" in said.splitlines()[-1], said
    assert kept and not list(tmp_path.rglob("*.json")), "it was sealed"
    assert bench(tmp_path, *MORE).returncode == 0
    require_whole(tmp_path, kept)
