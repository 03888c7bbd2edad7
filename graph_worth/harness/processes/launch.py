r"""Commands that start a training script: directly, by torchrun on this machine, or by a launcher on several nodes.

    python -m benchmarks.run --model gpt3 --ngpu 8 --nnodes 2 --out runs/two \
        --launch "srun --nodes 2 --ntasks-per-node 1 --kill-on-bad-exit=1 benchmarks/slurm/node.sh"

A launcher is any command that takes another command behind it. It has to:

- start that command once on each of --nnodes nodes, from the repository's root, with this environment;
- set PET_NODE_RANK there (torchrun's variable for --node-rank), 0 to nnodes - 1. Node 0 is the machine of this command,
  since rank 0 talks to it through a Unix socket in GRAPH_SOCKET_DIR, a folder that a container has to see too;
- end all when one fails (srun: --kill-on-bad-exit=1) and on SIGTERM, with a status other than 0 if one failed.

Repository and --out lie on a file system that all nodes share. Node 0's torchrun listens at --rendezvous, a static
one, since c10d gives rank 0 to any node. Before the first run `machine` asks every node what it is.
"""

import json
import os
import shlex
import shutil
import socket
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from graph_worth.folders import ROOT, START
from graph_worth.harness.command import Mistake, parser_of
from graph_worth.harness.processes import gpus, supervisor
from graph_worth.machine import environment, source

PORT = 29500
ASK_LIMIT_S = 300
LATE_S = 10.0
# Environment variables: the folder for sockets, and a folder in it that node 0 has to see.
SOCKET_DIR, SEEN = "GRAPH_SOCKET_DIR", "GRAPH_SEEN"
# These are the same on all nodes, or ranks would run different code.
ALIKE = ("source_hash", "torch", "transformer_engine", "driver")


@dataclass(frozen=True, kw_only=True)
class Launch:
    """The command that starts a script. `prefix`: its words; `rendezvous`: host and port of node 0's torchrun."""

    nnodes: int = 1
    ngpu: int = 1
    prefix: tuple = ()
    rendezvous: tuple = ("", PORT)
    python: str = sys.executable

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.nnodes * self.ngpu

    def command(self, script: list[str]) -> list[str]:
        """Return the whole command; `script` are words after the interpreter, as in ["-m", "gpt3.train", ...]."""
        torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(self.ngpu)]
        if self.nnodes > 1:
            host, port = self.rendezvous
            torchrun += ["--nnodes", str(self.nnodes), "--master-addr", host, "--master-port", str(port)]
        else:
            torchrun = [*torchrun, "--standalone"] if self.ngpu > 1 else []
        return [*self.prefix, self.python, *torchrun, *script]


def parse(args) -> Launch:
    """Return the launch that the flags (`graph_worth.harness.ask.Options`) ask for, or raise a Mistake."""
    try:
        prefix = tuple(shlex.split(args.launch or ""))
    except ValueError as error:
        raise Mistake(f"--launch {args.launch!r}: {error}") from None
    if args.nnodes > 1 and not prefix:
        raise Mistake(f"--nnodes {args.nnodes} needs --launch, a command that starts another on every node")
    # Children start in the root, and so does a launcher with a relative name.
    if prefix and not shutil.which(prefix[0], path=os.pathsep.join([str(ROOT), os.environ.get("PATH", "")])):
        raise Mistake(f"--launch: no command {prefix[0]}")
    if prefix and not args.out:
        raise Mistake("--launch needs --out, a folder on a file system that all nodes share")
    if args.nnodes > 1 and args.host_load:
        raise Mistake("--host-load with --nnodes > 1: only this node would be busy, so neither row would be true")
    if args.rendezvous and args.nnodes == 1:
        raise Mistake("--rendezvous is for several nodes, --nnodes is 1")
    interpreter = args.python or sys.executable
    python = shutil.which(interpreter)
    if python is None:
        raise Mistake(f"--python {interpreter}: no such command")
    host, _, port = (args.rendezvous or f"{socket.gethostname()}:{PORT}").rpartition(":")
    if not host or not (port.isdecimal() and 0 < int(port) < 65536):
        raise Mistake(f"--rendezvous {args.rendezvous!r} is not HOST:PORT")
    ranks = {"nnodes": args.nnodes, "ngpu": args.ngpu}
    return Launch(prefix=prefix, rendezvous=(host, int(port)), python=os.path.abspath(python), **ranks)


# ------------------------------------------------------------------------------------------------
# The nodes


class NodesDiffer(RuntimeError):
    """The nodes cannot run one job together; the message says which and why."""


def machine(args) -> dict:
    """Return "name", "env" and "gpus" of this machine, which is node 0; with a launcher, ask every node first.

    Raises:
        NodesDiffer: a node does not answer through --out, does not get this environment, or has other source, versions
            or GPUs, or too few of them; or node 0 is not this machine, or does not see the folder of sockets.
    """
    here, launch = describe_here(), parse(args)
    if launch.prefix:
        answers = _ask_nodes(launch, Path(args.out).resolve())
        for rank, answer in enumerate(answers):
            fault = _fault(answer, answers[0], launch) or ("" if rank else _fault_of_first(answer, here))
            if fault:
                raise NodesDiffer(f"node {rank} ({answer['name']}): {fault}")
    return here


def _ask_nodes(launch, out):
    """The answer of each node, by rank."""
    out.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=".nodes-", dir=out))
    log = folder / "log"
    try:
        # A worker's socket will lie beside it.
        with tempfile.TemporaryDirectory(prefix="nodes-", dir=os.environ.get(SOCKET_DIR)) as seen:
            answer = [sys.executable, str(START), "graph_worth.harness.processes.launch", "--answer", str(folder)]
            command = [*launch.prefix, *answer]
            status = supervisor.run_logged(command, log, ASK_LIMIT_S, os.environ | {SEEN: seen})
        answers = _read_answers(folder, launch.nnodes if status == 0 else 0)
        last_lines = " | ".join([line for line in log.read_text(errors="replace").splitlines() if line.strip()][-3:])
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    missing = [rank for rank in range(launch.nnodes) if rank not in answers]
    if missing or len(answers) > launch.nnodes:
        what = f"no answer in {ASK_LIMIT_S} s" if status is None else f"exit status {status}"
        raise NodesDiffer(
            f"--launch reached {len(answers)} of {launch.nnodes} nodes through {out} ({what}; missing: "
            f"{', '.join(map(str, missing)) or 'none'}). Every node has to see that folder and have its own "
            f"PET_NODE_RANK. The log ends: {last_lines[-400:] or '-'}"
        )
    return [answers[rank] for rank in range(launch.nnodes)]


def _read_answers(folder, num_expected):
    # A network file system may show what another node has written only after seconds.
    deadline = time.monotonic() + LATE_S
    while len(paths := list(folder.glob("*.json"))) < num_expected and time.monotonic() < deadline:
        time.sleep(0.2)
    return {int(path.stem): json.loads(path.read_text()) for path in paths}


def _fault(answer, first, launch) -> str:
    for key in ALIKE:
        if answer["env"][key] != first["env"][key]:
            return f"{key} is {answer['env'][key]}, on node 0 it is {first['env'][key]}"
    names, first_names = answer["gpus"]["names"], first["gpus"]["names"]
    if set(names) != set(first_names):
        return f"its GPUs are {', '.join(names) or 'none'}, those of node 0 {', '.join(first_names) or 'none'}"
    if names and len(names) < launch.ngpu:
        return f"--ngpu {launch.ngpu}: it shows {len(names)}"
    return "" if answer["seen"] else f"--launch does not pass the environment on ({SEEN} is missing)"


def _fault_of_first(answer, here) -> str:
    if answer["env"]["boot_id"] != here["env"]["boot_id"]:
        return f"is another machine than this ({here['name']}), where rank 0 has to run: start this command there"
    if not answer["sees"]:
        return f"does not see {answer['seen']}: {SOCKET_DIR} has to name a folder that a container mounts"
    return ""


def describe_here() -> dict:
    """Return the environment of this machine and source as a resumed run compares it, and its GPUs."""
    visible_gpus = gpus.find_gpus()
    env = environment.describe_environment("cpu", 1) | source.describe_source()
    return {"name": socket.gethostname(), "env": env | {"driver": visible_gpus.driver}, "gpus": asdict(visible_gpus)}


def main(argv=None) -> int:
    """Answer for this node; return the exit status."""
    parser = parser_of("launch", "Describe this node, for a run on several nodes.")
    parser.add_argument("--answer", metavar="FOLDER", required=True, help="folder for this node's answer")
    args = parser.parse_args(argv)
    rank = os.environ.get("PET_NODE_RANK", "0")
    if not rank.isdigit():
        print(f"{parser.prog}: PET_NODE_RANK is {rank!r}, not the number of this node", file=sys.stderr)
        return 2
    seen, path = os.environ.get(SEEN, ""), Path(args.answer, f"{rank}.json")
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        # A folder that is not there is not made: all nodes have to share it.
        temporary.write_text(json.dumps(describe_here() | {"seen": seen, "sees": os.path.isdir(seen)}))
        temporary.rename(path)
    except OSError as error:
        print(f"{parser.prog}: {socket.gethostname()}: {args.answer}: {error.strerror}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
