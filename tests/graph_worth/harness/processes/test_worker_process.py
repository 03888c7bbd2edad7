"""graph_worth/harness/processes/worker_process.py: which end of a worker or of its ranks came from outside."""

import signal
from types import SimpleNamespace

import pytest

from graph_worth.harness.processes import worker_process
from graph_worth.harness.processes.worker_process import WorkerEnded, WorkerProcess

# As torchrun prints it.
TABLE = """------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-28_18:20:01
  host      : h
  rank      : {rank} (local_rank: {rank})
  exitcode  : {status} (pid: 77)
  error_file: <N/A>
"""
STOPPED = "torch.distributed.elastic.multiprocessing.api.SignalException: Process 12 got signal: 15\n"
LOST = "Connection closed by peer [127.0.0.1]:1"


def ended(tmp_path, status, printed):
    """A worker whose process has ended so, and whose ranks and torchrun have printed this."""
    worker = WorkerProcess.__new__(WorkerProcess)
    worker.log, worker._log_start, worker._has_ranks = tmp_path / "log", 0, True
    worker.log.write_text(printed)
    worker._process = SimpleNamespace(poll=lambda: status, wait=lambda limit_s: status)
    return worker


ENDS = [
    (137, "", "the worker was ended by SIGKILL, perhaps out of host memory", True),
    (143, "", "the worker was ended by SIGTERM", True),
    (139, "", "the worker was ended by SIGSEGV", False),
    (1, TABLE.format(rank=1, status=-9), "rank 1 was ended by SIGKILL", True),
    (1, TABLE.format(rank=0, status=-15), "rank 0 was ended by SIGTERM", True),
    (1, TABLE.format(rank=0, status=-11), "rank 0 was ended by SIGSEGV", False),
    (1, TABLE.format(rank=1, status=7), "rank 1 ended with exit status 7 (exit status 1)", False),
    (1, STOPPED, "torchrun was ended by SIGTERM", True),
]


@pytest.mark.parametrize(("status", "printed", "said", "is_from_outside"), ENDS)
def test_the_end_of_a_worker_says_whether_it_came_from_outside(tmp_path, status, printed, said, is_from_outside):
    with pytest.raises(WorkerEnded) as end:
        ended(tmp_path, status, printed)._require_alive()
    assert (str(end.value), end.value.is_from_outside) == (said, is_from_outside)


@pytest.mark.parametrize("reason", [LOST, "rank 1: died in block: no sign of life"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_rank_that_lost_one_that_a_signal_ended_is_no_answer(tmp_path, number, reason):
    with pytest.raises(WorkerEnded, match=f"rank 1 was ended by {number.name}") as end:
        ended(tmp_path, 1, TABLE.format(rank=1, status=-number))._explain({"reason": reason})
    assert end.value.is_from_outside


@pytest.mark.parametrize(
    ("status", "reason", "said"),
    [(7, LOST, "rank 1 ended with exit status 7"), (7, "rank 1: no", None), (1, LOST, None)],
)
def test_a_rank_that_failed_gives_its_end_to_those_that_lost_it(tmp_path, status, reason, said):
    message = {"reason": reason}
    ended(tmp_path, 1, TABLE.format(rank=1, status=status))._explain(message)
    assert message["reason"] == (said or reason)


def test_a_silent_call_is_waits_of_until_the_variant_is_made(monkeypatch):
    """The messages come in turn, None for half a second of silence; each moment is as long as WAITING_S."""
    messages = [None, None, {"say": "made"}, None, None, {"say": "done"}]
    moments = iter(range(100))
    monkeypatch.setattr(worker_process.time, "monotonic", lambda: worker_process.WAITING_S * next(moments))
    worker = WorkerProcess.__new__(WorkerProcess)
    worker._channel = SimpleNamespace(send=lambda command: None, receive=lambda timeout_s: messages.pop(0))
    worker._require_alive = lambda: None
    waits = []
    assert worker.call({"do": "capture"}, 1e9, waits.append) == {"say": "done"} and len(waits) == 2
    assert waits[1] > waits[0] >= worker_process.WAITING_S
