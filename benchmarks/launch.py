"""How a training script is started: as it is, by torchrun on this machine, or on several nodes through a launcher.

    python -m benchmarks.run --model gpt3 --ngpu 8 --nnodes 2 --out runs/two \\
        --launch "srun --nodes 2 --ntasks-per-node 1 --kill-on-bad-exit=1 benchmarks/slurm/node.sh"

A launcher is any command that takes another command behind it. What it has to do:

- start that command once on each of --nnodes nodes, from the repository's root, with this environment;
- set PET_NODE_RANK there (torchrun's variable for --node-rank), 0 to nnodes - 1;
- end when all of them have, with a status other than 0 if one failed, and end all of them on SIGTERM;
- when one fails, end the others, which else may wait for it until --limit-s (srun: --kill-on-bad-exit=1). On one node
  torchrun does that: it ends the ranks beside one that fails or is killed, and its own status is 1.

Repository and --out lie on a file system that all nodes share. Node 0's torchrun listens at --rendezvous;
torchrun's static rendezvous is used since c10d gives rank 0 to any node, and rounds are only compared when
rank 0 has the same GPU in each. Before the first run every node is asked what it is: see `ask_nodes`.

    python -m benchmarks.launch --answer FOLDER      what runs on a node then
"""

import json
import os
import shlex
import shutil
import socket
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks import ROOT, children, gpus
from benchmarks.command import Mistake, parser_of, positive
from common import environment

PORT = 29500
ASK_LIMIT_S = 300
LATE_S = 10.0
# In all answers alike, else ranks would run different code.
ALIKE = ("source_hash", "torch", "transformer_engine", "cuda", "driver")


@dataclass(frozen=True, kw_only=True)
class Launch:
    """prefix: the launcher's words, empty without one. rendezvous: (host, port) of node 0's torchrun, nnodes > 1."""

    nnodes: int = 1
    ngpu: int = 1
    prefix: tuple = ()
    rendezvous: tuple = ("", PORT)

    @property
    def world_size(self) -> int:
        return self.nnodes * self.ngpu

    def command(self, script: list[str]) -> list[str]:
        """The whole command for `script`, the words after the interpreter, as in ["-m", "gpt3.train", ...]."""
        torchrun = ["-m", "torch.distributed.run"]
        if self.nnodes > 1:
            host, port = self.rendezvous
            torchrun += ["--nnodes", str(self.nnodes), "--nproc-per-node", str(self.ngpu)]
            torchrun += ["--master-addr", host, "--master-port", str(port)]
        elif self.ngpu > 1:
            torchrun += ["--standalone", "--nproc-per-node", str(self.ngpu)]
        else:
            torchrun = []
        return [*self.prefix, sys.executable, *torchrun, *script]


def add_arguments(parser) -> None:
    """The flags of `parse`."""
    parser.add_argument("--nnodes", metavar="N", type=positive, default=1, help="nodes, --ngpu ranks on each (1)")
    parser.add_argument(
        "--launch", metavar="COMMAND", help="starts what follows it on every node; see benchmarks/launch.py"
    )
    parser.add_argument("--rendezvous", metavar="HOST[:PORT]", help=f"node 0, for the others (this host:{PORT})")


def parse(args) -> Launch:
    """The launch that the flags ask for. Raises Mistake that names the flag to change."""
    try:
        prefix = tuple(shlex.split(args.launch or ""))
    except ValueError as error:
        raise Mistake(f"--launch {args.launch!r}: {error}") from None
    if args.launch is not None and not prefix:
        raise Mistake("--launch is empty; leave it out, or give a command such as srun with its options")
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
    return Launch(nnodes=args.nnodes, ngpu=args.ngpu, prefix=prefix, rendezvous=_endpoint(args.rendezvous))


def _endpoint(text):
    if not text:
        return socket.gethostname(), PORT
    host, colon, port = text.rpartition(":") if ":" in text else (text, "", "")
    if not host or (colon and not (port.isdigit() and 0 < int(port) < 65536)):
        raise Mistake(f"--rendezvous {text!r} is not HOST or HOST:PORT")
    return host, int(port or PORT)


# ------------------------------------------------------------------------------------------------
# What the nodes are


class NodesDiffer(RuntimeError):
    """The nodes cannot run one job together; the message says which and why."""


def ask_nodes(launch: Launch, out: Path, environment: dict) -> list[dict]:
    """One answer a node, by rank, through the launcher as runs go: {"name", "env", "gpus"}.

    environment: what runs will have. Raises NodesDiffer when a node does not answer through `out`, has not
    got the environment, other source, versions, GPUs or too few of them.
    """
    folder = out / f".nodes-{os.getpid()}"
    folder.mkdir(parents=True)
    try:
        script = [sys.executable, "-m", "benchmarks.launch", "--answer", str(folder)]
        log = folder / "log"
        outcome = children.run_child(
            [*launch.prefix, *script], log=log, limit_s=ASK_LIMIT_S, environment=environment, is_remote=True
        )
        answers = _read_answers(folder, launch.nnodes if outcome.exit_status == 0 else 0)
        said = children.last_lines(log)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    ranks = range(launch.nnodes)
    if sorted(answers) != list(ranks):
        what = f"no answer in {ASK_LIMIT_S} s" if outcome.timed_out else outcome.describe()
        missing = ", ".join(str(rank) for rank in ranks if rank not in answers) or "none"
        raise NodesDiffer(
            f"--launch reached {len(answers)} of {launch.nnodes} nodes through {out} ({what}; missing: {missing}). "
            f"Every node has to see that folder and have its own PET_NODE_RANK. The log ends: {said or '-'}"
        )
    answers = [answers[rank] for rank in ranks]
    for rank, answer in enumerate(answers):
        fault = _fault(answer, answers[0], launch, environment)
        if fault:
            raise NodesDiffer(f"node {rank} ({answer['name']}): {fault}")
    return answers


def _read_answers(folder, num_expected):
    # A network file system may show what another node has written only after seconds.
    deadline = time.monotonic() + LATE_S
    while len(paths := list(folder.glob("*.json"))) < num_expected and time.monotonic() < deadline:
        time.sleep(0.2)
    return {int(path.stem): json.loads(path.read_text()) for path in paths}


def _fault(answer, first, launch, environment):
    for key in ALIKE:
        if answer["env"][key] != first["env"][key]:
            return f"{key} is {answer['env'][key]}, on node 0 it is {first['env'][key]}"
    names, first_names = answer["gpus"]["names"], first["gpus"]["names"]
    if sorted(set(names)) != sorted(set(first_names)):
        return f"its GPUs are {', '.join(names) or 'none'}, those of node 0 {', '.join(first_names) or 'none'}"
    if names and len(names) < launch.ngpu:
        return f"--ngpu {launch.ngpu}: it shows {len(names)}"
    name = "CUBLAS_WORKSPACE_CONFIG"
    if answer["env"]["variables"].get(name) != environment.get(name):
        return f"--launch does not pass the environment on ({name} is missing)"
    return None


def describe_here() -> dict:
    """`env` of this machine and source as resume compares it, and its GPUs."""
    found = gpus.find_gpus()
    env = environment.describe_environment("cpu", 1)
    env.update(driver=found.driver, cuda=gpus.cuda_version())
    return {"name": socket.gethostname(), "env": env, "gpus": asdict(found)}


def main(argv=None) -> int:
    parser = parser_of("launch", "What this node is, for a run on several nodes.")
    parser.add_argument("--answer", metavar="FOLDER", required=True, help="where this node writes what it is")
    args = parser.parse_args(argv)
    rank = os.environ.get("PET_NODE_RANK", "0")
    if not rank.isdigit():
        print(f"{parser.prog}: PET_NODE_RANK is {rank!r}, not the number of this node", file=sys.stderr)
        return 2
    path = Path(args.answer, f"{rank}.json")
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        temporary.write_text(json.dumps(describe_here()))
        temporary.rename(path)
    except OSError as error:
        print(f"{parser.prog}: {socket.gethostname()}: {args.answer}: {error.strerror}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
