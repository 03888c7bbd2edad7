"""Fifty kills of the command or of its worker at any moment: nothing finished is lost, no process is left."""

import contextlib
import json
import os
import random
import signal
import time

import pytest

from benchmarks import judge
from benchmarks.files import partial
from benchmarks.processes import supervisor
from tests.helpers.bench_process import bench, only_run, start, workers
from tests.helpers.processes import until

MORE = (["eager", "graph_step"], "--cycles", 3)
# From the start of the process to some time after its usual end.
LATEST_S = 12.0


@pytest.mark.long
@pytest.mark.parametrize("number", range(50))
def test_after_a_kill_the_same_command_goes_on(tmp_path, number):
    draw = random.Random(number)
    process = start(tmp_path, *MORE)
    time.sleep(draw.uniform(0.2, LATEST_S))
    mine = set(supervisor.descendants(process.pid))
    own = {pid: path for pid, path in workers().items() if pid in mine}
    for pid in own if own and draw.random() < 0.5 else [process.pid]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.communicate(timeout=120)
    assert until(lambda: not set(own.values()) & set(workers().values()))
    kept = []
    if not list(tmp_path.rglob("*.json")):
        lines = [line for path in tmp_path.rglob(f"*{partial.SUFFIX}") for line in path.read_bytes().splitlines()]
        kept = [json.loads(line) for line in lines if b'"fact":"block"' in line and line.endswith(b"}")]
        done = bench(tmp_path, *MORE)
        assert done.returncode == 0, done.stdout + done.stderr
    (judged,) = judge.judged(only_run(tmp_path)).values()
    blocks, verdict = judged.blocks("graph_step"), judged.verdicts["graph_step"]
    assert [block.cycle for block in blocks] == [0, 1, 2] and verdict.status == "pass", verdict.reason
    # A cycle that had ended stands as it was measured.
    ended = {fact["cycle"]: fact["step_ms"] for fact in kept if fact["variant"] == "graph_step"}
    whole = {fact["cycle"] for fact in kept if fact["variant"] == judged.build.anchor and fact["place"] > 0}
    assert all(block.step_ms == ended[block.cycle] for block in blocks if block.cycle in whole & ended.keys())
