"""Jobs of a few gloo ranks in which one rank fails in some phase: `python -m tests.helpers.rank_job FOLDER JOB ...`.

JOB is kind:phase:rank:world_size, as in killed:steps:1:2. A few run at a time. Each is forked from a process that has
imported torch, and each leader does what torchrun does: it holds the store, waits for its ranks, and stops the others
when one has failed ("alone" as a fifth part: it does not). FOLDER/JOB.json holds exit statuses; FOLDER/JOB
has the file of --record.
"""

import contextlib
import gc
import importlib
import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch
from torch import distributed as dist

from graph_worth.capture.pool import Pool
from graph_worth.config import RunOptions, Timing
from graph_worth.contract import Training
from graph_worth.made_variant import Capture, Unsupported
from graph_worth.parallel import collectives
from tests.helpers.by_hand import trained

KINDS = ("killed", "oom", "refused", "raised", "stalled", "none")
PHASES = ("build", "capture", "steps", "profile")
NUM_AT_ONCE = 8
PORT_DIGITS = 5


@dataclass(frozen=True, kw_only=True)
class Config(Timing):
    min_steps: int = 20


def fail(kind):
    if kind == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "oom":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    if kind == "refused":
        raise Unsupported("this GPU has no FP8")
    if kind == "raised":
        raise RuntimeError("a bug of this rank")
    if kind == "stalled":
        time.sleep(1000)


class State:
    """A weight that moves by the mean over ranks of a gradient."""

    def __init__(self, fails):
        self.device, self.fails = torch.device("cpu"), fails
        self.weight, self.grad = torch.zeros(4), torch.zeros(4)
        self.losses = torch.zeros(100_000)
        fails("build")

    def reset(self):
        self.weight.zero_()
        self.losses.zero_()

    def named_state(self):
        return [("weight", self.weight)]

    def read_losses(self, count):
        return self.losses[:count].tolist()

    read_grad_norms = read_losses

    def batch_class(self, index):
        return 0

    def step(self, index):
        self.grad.fill_(dist.get_rank() + 1.0)
        collectives.all_reduce_mean_([self.grad])
        self.weight += self.grad
        self.losses[index] = 1.0


class Graphed:
    def __init__(self, state):
        self.state, self.pool = state, Pool(state.device)
        self.capture = Capture(strategy="the sum", state=state, pools=[self.pool])
        self.capture.warm_up(State.step)
        state.fails("capture")
        with self.capture.timed("capture_s"):
            self.graph, _ = self.pool.capture(self._reduce)

    def _reduce(self):
        self.state.grad.fill_(dist.get_rank() + 1.0)
        collectives.all_reduce_mean_([self.state.grad])

    def step(self, index):
        if index == 3:
            self.state.fails("profile" if "--profile" in sys.argv else "steps")
        self.graph.replay()
        self.state.weight += self.state.grad
        self.state.losses[index] = 1.0

    def replays_of(self, index):
        return 1

    def close(self):
        self.pool.release()


class Model:
    """A `graph_worth.script.session.Model` of this training and its one variant."""

    name, device, config, kinds = "rank_job", torch.device("cpu"), Config(), MappingProxyType({})

    def __init__(self, options, fails, rank, world_size):
        self.options, self._fails, self.rank, self.world_size = options, fails, rank, world_size

    def build(self):
        state = State(self._fails)
        named = {name: getattr(state, name) for name in ("named_state", "reset", "batch_class")}
        self.training = Training(state=state, results=state.read_losses, grad_norms=state.read_grad_norms, **named)
        return self.training

    def make(self, name):
        return Graphed(self.training.state)

    def promises(self, name):
        return None, None

    def reference_step(self, name):
        return self.training.state.step


def run_rank(job, folder):
    kind, phase, failing, world_size = job[:4]
    rank = int(os.environ["RANK"])

    def fails(place):
        # Among the steps that are timed, in which no garbage is collected, and not in a step before them.
        if rank == int(failing) and place == phase and not (place == "steps" and gc.isenabled()):
            fail(kind)

    sys.argv = ["rank_job"] + (["--profile"] if phase == "profile" else [])
    torch.set_num_threads(1)
    run = {"profile": str(folder / "trace.json")} if phase == "profile" else {}
    collectives.init("cpu")
    options = RunOptions(preset="tiny", variant="graph", record=str(folder / "graph.json"), **run)
    try:
        result = trained(Model(options, fails, rank, int(world_size)))
    finally:
        collectives.shutdown()
    return 0 if result["status"] in ("pass", "oom", "unsupported") else 1


def lead(job, folder):
    """Hold the store, start the ranks, and end with what became of each.

    The store has a thread. A child forked beside it may wait for ever for a lock that the thread held. So the ranks are
    forked first, and read the store's port from a pipe.
    """
    name, alone, world_size = ":".join(job), len(job) > 4, int(job[3])
    home = folder / name
    home.mkdir(parents=True)
    os.environ.update(MASTER_ADDR="127.0.0.1", WORLD_SIZE=str(world_size), TORCHELASTIC_USE_AGENT_STORE="True")
    read, write = os.pipe()
    pids = {}
    for rank in range(world_size):
        pid = os.fork()
        if pid == 0:
            # So that a leader that dies ends the read below.
            os.close(write)
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), MASTER_PORT=os.read(read, PORT_DIGITS).decode())
            out = os.open(home / f"{rank}.txt", os.O_WRONLY | os.O_CREAT)
            os.dup2(out, 1)
            os.dup2(out, 2)
            status = 1
            with contextlib.suppress(BaseException):
                status = run_rank(job, home)
            sys.stdout.flush()
            os._exit(status)
        pids[pid] = rank
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(write, f"{store.port:{PORT_DIGITS}d}".encode() * world_size)
    statuses = {}
    while pids:
        pid, status = os.wait()
        code = os.waitstatus_to_exitcode(status)
        statuses[pids.pop(pid)] = code
        if code and not alone:
            for other in pids:
                os.kill(other, signal.SIGTERM)
    answer = {"statuses": [statuses[rank] for rank in range(world_size)]}
    (folder / f"{name}.json").write_text(json.dumps(answer))


def main(folder, *jobs):
    # Once, before all forks: it imports torch's compiler, which takes seconds.
    torch.use_deterministic_algorithms(False)
    importlib.import_module("torch.distributed.nn.functional")
    for index, job in enumerate(jobs):
        if index >= NUM_AT_ONCE:
            os.wait()
        if os.fork() == 0:
            lead(job.split(":"), Path(folder))
            os._exit(0)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
