"""Two jobs into Slurm's queue, or none: the second makes the tables when the first has ended."""

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Callable

from graph_worth.folders import ROOT

SLURM_LIMIT_S = 120
# Settings of the caller's environment that would break what a submission promises, or were not asked for.
DROPPED = ["SBATCH_ARRAY_INX", "SBATCH_INPUT", "SBATCH_NO_REQUEUE", "SBATCH_OPEN_MODE", "SBATCH_WAIT"]
DROPPED += ["IMAGE", "MOUNTS"]


class SlurmRefused(RuntimeError):
    """Slurm does not take the jobs; the message is its own, and names what may be left in the queue."""


def inherited(chosen: dict) -> dict:
    """Return the environment of both jobs, which sbatch hands on: the caller's, and `chosen`."""
    return {name: value for name, value in os.environ.items() if name not in DROPPED} | chosen


def check(*commands: list[str], environment: dict) -> None:
    """Ask `sbatch --test-only` whether each command would be taken."""
    for command in commands:
        _call([*command[:2], "--test-only", *command[2:]], environment)


def submit(bench: list[str], collate: Callable[[str], list[str]], environment: dict) -> tuple[str, str]:
    """Submit both jobs, the first held until the second is in the queue, and return their ids.

    Both are cancelled where Slurm does not take one, and where the command is stopped.

    Args:
        bench: sbatch's command, with --hold.
        collate: gives the second command for the id of the first.
        environment: of both.
    """
    jobs: list[str] = []
    try:
        with _signals_wait():
            jobs.append(_submitted(bench, environment))
        with _signals_wait():
            jobs.append(_submitted(collate(jobs[0]), environment))
        _call(["scontrol", "release", jobs[0]], environment)
    except BaseException as error:
        # The end of the first would start the second.
        left = [job for job in reversed(jobs) if _run(["scancel", job], environment).returncode]
        if left:
            raise SlurmRefused(f"{error or 'stopped'}; still in the queue: scancel {' '.join(left)}") from None
        raise
    return jobs[0], jobs[1]


@contextlib.contextmanager
def _signals_wait():
    """Let Ctrl-C and SIGTERM wait until the id of a job is known."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _submitted(command, environment) -> str:
    output = _call(command, environment)
    # On a federation: ID;CLUSTER.
    match = re.search(r"^([0-9]+)(;.*)?$", output, re.MULTILINE)
    if match is None:
        raise SlurmRefused(f"sbatch names no job: {output.strip()!r}; see squeue --me")
    return match[1]


def _call(command, environment) -> str:
    """Run a command of Slurm and return its output. Raises Refused."""
    answer = _run(command, environment)
    if answer.returncode:
        message = answer.stderr.strip() or answer.stdout.strip() or f"{command[0]}: exit status {answer.returncode}"
        raise SlurmRefused(" | ".join(dict.fromkeys(message.splitlines())))
    return answer.stdout


def _run(command, environment):
    try:
        return subprocess.run(
            command,
            env=environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=SLURM_LIMIT_S,
        )
    except FileNotFoundError:
        return subprocess.CompletedProcess(command, 127, "", f"no {command[0]} on PATH")
    except subprocess.TimeoutExpired:
        message = f"{command[0]} gives no answer in {SLURM_LIMIT_S} s; see squeue --me"
        return subprocess.CompletedProcess(command, 124, "", message)
