"""Two jobs into Slurm's queue, or none: the second makes the tables when the first has ended."""

import contextlib
import os
import re
import signal
import subprocess

from benchmarks import ROOT
from benchmarks.command import Mistake

SLURM_LIMIT_S = 120
# Settings of the caller's environment that would break what a submission promises.
DROPPED = ("SBATCH_ARRAY_INX", "SBATCH_INPUT", "SBATCH_NO_REQUEUE", "SBATCH_OPEN_MODE", "SBATCH_WAIT")


class Refused(RuntimeError):
    """Slurm does not take the job, and nothing is in its queue; the message is its own."""


class Unknown(RuntimeError):
    """Something may be in the queue; the message says what, and how to look."""


def check(*commands: list[str], environment: dict) -> None:
    """Ask `sbatch --test-only` whether each sbatch command would be taken; submits nothing. Raises Refused."""
    for command in commands:
        _call([*command[:2], "--test-only", *command[2:]], environment)


def reaches_cluster(environment: dict) -> bool:
    """Return whether a Slurm controller answers."""
    return _run(["scontrol", "ping"], environment).returncode == 0


def submit(jobs: list[str], bench: list[str], collate, environment: dict, lead_s: int) -> None:
    """Submit both jobs, the first held until the second is in the queue; their ids are appended to `jobs`.

    bench: sbatch's command, with --hold. collate: gives the second command for the id of the first. lead_s: so long
    before its limit the job stops. Raises Refused, Mistake or KeyboardInterrupt, with nothing left in the queue, and
    Unknown where that is not sure.
    """
    with _signals_held_back() as arrived:
        try:
            for command in (lambda: bench, lambda: collate(jobs[0])):
                jobs.append(_submitted(command(), environment))
                _stop_if(arrived)
            _require_time(jobs[0], lead_s)
            _call(["scontrol", "release", jobs[0]], environment)
            _stop_if(arrived)
        except BaseException as error:
            _cancel(jobs, error)
            raise


def _require_time(job, lead_s):
    """Raises Mistake where the job's limit, its partition's perhaps, leaves no time to measure."""
    text = _run(["squeue", "--noheader", "--job", job, "--format=%l"]).stdout.split()
    # Slurm writes [days-][[hours:]minutes:]seconds, or a word where there is no limit.
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text[0] if text else "")
    if match:
        days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
        # It needs as long to measure.
        if ((days * 24 + hours) * 60 + minutes) * 60 + seconds < 2 * lead_s:
            least = f"{2 * lead_s / 60:.3g} minutes"
            raise Mistake(f"TIME= (--time): a job stops {lead_s} s before its limit of {text[0]}, ask for {least}")


def _cancel(jobs, error):
    """Take back what is in the queue. Raises Unknown where that fails."""
    left = []
    # The end of the first would start the second.
    while jobs:
        job = jobs.pop()
        gone = _run(["scancel", job])
        if gone.returncode:
            left.append(f"job {job} could not be cancelled: {gone.stderr.strip()}; squeue --job {job}")
    if left:
        raise Unknown("; ".join([str(error) or "stopped", *left])) from None


@contextlib.contextmanager
def _signals_held_back():
    """SIGINT, SIGTERM and SIGHUP only go into the list that this gives: between two calls there is a good place."""
    arrived = []
    numbers = [n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) != signal.SIG_IGN]
    before = [signal.signal(number, lambda number, frame: arrived.append(number)) for number in numbers]
    try:
        yield arrived
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _stop_if(arrived):
    if arrived:
        raise KeyboardInterrupt


def _call(command, environment):
    """A call that submits nothing. Raises Refused."""
    answer = _run(command, environment)
    if answer.returncode:
        raise Refused(_said(answer))


def _submitted(command, environment) -> str:
    """Submit, and return the job's id. Raises Refused, or Unknown where Slurm may have taken the job all the same."""
    answer = _run(command, environment)
    # On a federation: ID;CLUSTER.
    match = re.search(r"^([0-9]+)(;.*)?$", answer.stdout, re.MULTILINE)
    if answer.returncode == 0 and match:
        return match[1]
    said = _said(answer)
    # 124 is ours; of a socket that timed out sbatch does not know more than that.
    if answer.returncode in (0, 124) or answer.returncode < 0 or "timed out" in said.lower():
        name = next((word.partition("=")[2] for word in command if word.startswith("--job-name=")), "collate")
        raise Unknown(f"{said}; whether a job is in the queue is unknown: squeue --me --name={name}, scancel its id")
    raise Refused(said)


def _said(answer):
    said = answer.stderr.strip() or answer.stdout.strip() or f"exit status {answer.returncode}"
    return "\n".join(dict.fromkeys(said.splitlines()))


def _run(command, environment=None):
    try:
        # In a session of its own, as Ctrl-C would end it too, half way.
        return subprocess.run(
            command,
            env=environment,
            cwd=ROOT,
            start_new_session=True,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=SLURM_LIMIT_S,
        )
    except FileNotFoundError:
        return subprocess.CompletedProcess(command, 127, "", f"no {command[0]} on PATH")
    except subprocess.TimeoutExpired:
        said = f"{command[0]} gives no answer in {SLURM_LIMIT_S} s"
        return subprocess.CompletedProcess(command, 124, "", said)


def inherited(chosen: dict) -> dict:
    """The environment of both jobs, which sbatch hands on: the caller's, and `chosen`.

    What is not asked for on the command line must not come from elsewhere.
    """
    kept = {name: value for name, value in os.environ.items() if name not in (*DROPPED, "IMAGE", "MOUNTS")}
    return kept | chosen
