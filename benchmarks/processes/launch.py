r"""How a training script is started: as it is, by torchrun on this machine, or on several nodes through a launcher.

    python -m benchmarks.run --model gpt3 --ngpu 8 --nnodes 2 --out runs/two \
        --launch "srun --nodes 2 --ntasks-per-node 1 --kill-on-bad-exit=1 benchmarks/slurm/node.sh"

A launcher is any command that takes another command behind it. It has to:

- start that command once on each of --nnodes nodes, from the repository's root, with this environment;
- set PET_NODE_RANK there (torchrun's variable for --node-rank), 0 to nnodes - 1. Node 0 is the machine of this command,
  since rank 0 talks to it through a Unix socket in GRAPH_SOCKET_DIR, a folder that a container has to see too;
- end all when one fails (srun: --kill-on-bad-exit=1) and on SIGTERM, with a status other than 0 if one failed.

Repository and --out lie on a file system that all nodes share. Node 0's torchrun listens at --rendezvous, a static
one, since c10d gives rank 0 to any node.
"""

import os
import shlex
import shutil
import socket
import sys
from dataclasses import asdict, dataclass

from benchmarks import ROOT
from benchmarks.command import Mistake, positive
from benchmarks.processes import gpus
from common.machine import environment

PORT = 29500
# Environment variable: the folder for sockets.
SOCKET_DIR = "GRAPH_SOCKET_DIR"


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How a script is started. `prefix`: the launcher's words; `rendezvous`: host and port of node 0's torchrun."""

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


def add_arguments(parser) -> None:
    """Add the flags of `parse` to a parser."""
    parser.add_argument("--nnodes", metavar="N", type=positive, default=1, help="nodes, --ngpu ranks on each (1)")
    parser.add_argument(
        "--launch", metavar="COMMAND", help="starts what follows it on every node; see benchmarks/processes/launch.py"
    )
    parser.add_argument("--rendezvous", metavar="HOST:PORT", help=f"node 0, for the others (this host:{PORT})")
    parser.add_argument("--python", metavar="PATH", help="interpreter of the training script (this one)")


def parse(args) -> Launch:
    """Return the launch that the flags ask for.

    Args:
        args: nnodes, ngpu, launch, rendezvous, python, out and host_load, as argparse gives them.

    Raises:
        Mistake: something cannot be; the text names the flag to change.
    """
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
    asked = getattr(args, "python", None) or sys.executable
    python = shutil.which(asked)
    if python is None:
        raise Mistake(f"--python {asked}: no such command")
    host, _, port = (args.rendezvous or f"{socket.gethostname()}:{PORT}").rpartition(":")
    if not host or not (port.isdecimal() and 0 < int(port) < 65536):
        raise Mistake(f"--rendezvous {args.rendezvous!r} is not HOST:PORT")
    ranks = {"nnodes": args.nnodes, "ngpu": args.ngpu}
    return Launch(prefix=prefix, rendezvous=(host, int(port)), python=os.path.abspath(python), **ranks)


def describe_here() -> dict:
    """Return the environment of this machine and source as a resumed run compares it, and its GPUs."""
    found = gpus.find_gpus()
    env = environment.describe_environment("cpu", 1)
    return {"name": socket.gethostname(), "env": env | {"driver": found.driver}, "gpus": asdict(found)}
