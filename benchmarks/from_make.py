"""The command of a make target, from the values that make was given.

    make_MODEL=gpt3 python -m benchmarks.from_make bench            runs python -m benchmarks.run --model=gpt3

make passes each value in the environment as make_NAME, so no shell ever reads it. Each becomes a flag, and the program
refuses a flag that it does not take. A flag and its value are one word: a value that begins with - stays a value. ARGS
is split as a shell splits words, and nothing in it is expanded.

The program ends with make. Where make alone gets a signal it tells a shell at most, so this process looks at make once
a second, and ends the program with a SIGTERM.
"""

from __future__ import annotations  # An old interpreter must come to say that it is old.

import ctypes
import importlib.util
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

# What programs need. pip knows xdist under another name.
MEASURE, TABLES = ("torch", "numpy", "scipy", "msgspec"), ("numpy", "scipy", "msgspec")
TEST, TABLES_OF_RUNS = (*MEASURE, "pandas", "pytest", "xdist"), (*TABLES, "pandas")
FIGURES = (*TABLES_OF_RUNS, "matplotlib")
PIP = {"xdist": "pytest-xdist"}
TESTS = ["pytest", "--dist"]

PR_SET_PDEATHSIG, LOOK_S = 1, 1.0
# make handles each of these, or leaves it ignored. Once it has got one it handles that one no more.
ENDING = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)

# target: its program, with OUT or RUN in the place of a folder or file, and the packages that it needs
TARGETS = {
    "bench": (["benchmarks.run"], MEASURE),
    "measure": (["benchmarks.measure"], MEASURE),
    "census": (["benchmarks.census"], MEASURE),
    "epochs": (["benchmarks.epochs"], MEASURE),
    "doctor": (["benchmarks.measure", "--doctor"], MEASURE),
    "host": (["benchmarks.host"], MEASURE),
    "watch": (["benchmarks.watch"], ()),
    "publish": (["benchmarks.publish", "RUN"], TABLES_OF_RUNS),
    "judge": (["benchmarks.judge", "RUN"], TABLES),
    "sweep": (["benchmarks.sweep"], MEASURE),
    "submit": (["benchmarks.submit"], TABLES),
    "compare": (["benchmarks.compare", "OUT"], TABLES_OF_RUNS),
    "frame": (["benchmarks.frame", "OUT"], TABLES_OF_RUNS),
    "plots": (["benchmarks.plot", "OUT"], FIGURES),
    "readme": (["benchmarks.overview"], FIGURES),
    "test": ([*TESTS, "worksteal", "-n", "3", "-m", "not slow and not slurm and not gpu and not long"], TEST),
    "long": ([*TESTS, "loadfile", "-n", "2", "-m", "long"], TEST),
    "test-slow": ([*TESTS, "loadgroup", "-n", "3", "-m", "(slow or slurm) and not gpu and not long"], TEST),
}


def command_of(target: str, given: dict[str, str]) -> list[str]:
    """Return words for the interpreter: each value is a flag, which the program may refuse."""
    given = {name: value.strip() for name, value in sorted(given.items()) if value.strip()}
    args = given.pop("ARGS", "")
    words = ["-m", *TARGETS[target][0]]
    if words[-1] in ("OUT", "RUN"):
        path = given.pop(words[-1], "results" if words[-1] == "OUT" else "")
        words[-1:] = [f"./{path}" if path.startswith("-") else path] if path else []
    if target == "compare" and "BASE" in given:
        words[1:] = ["benchmarks.gate", *words[2:], f"--against={given.pop('BASE')}"]
    words += [f"--{name.lower().replace('_', '-')}={value}" for name, value in given.items()]
    try:
        return words + shlex.split(args)
    except ValueError as error:
        raise ValueError(f"ARGS={args!a}: {str(error).lower()}") from None


def _status(pid: str) -> dict[str, str]:
    """Fields of a process in /proc; {} where it is gone."""
    try:
        lines = Path("/proc", pid, "status").read_text().splitlines()
    except OSError:
        return {}
    return dict(line.split(":\t", 1) for line in lines if ":\t" in line)


def _find_make() -> str | None:
    """The process id of the make that started this process, perhaps through a shell."""
    pid = str(os.getppid())
    for _ in range(3):
        status = _status(pid)
        if status.get("Name") in ("make", "gmake"):
            return pid
        pid = status.get("PPid", "")
    return None


def _is_ending(make: str) -> bool:
    """Return whether make is gone, or waits for its children to end, which it told nothing."""
    status = _status(make)
    handled = int(status.get("SigCgt", "0"), 16) | int(status.get("SigIgn", "0"), 16)
    return status.get("State", "Z").startswith("Z") or not all(handled >> (number - 1) & 1 for number in ENDING)


def run(words: list[str]) -> int:
    """Run the program for as long as make lasts, and return its exit status; end as it ends by a signal."""
    make, ends = _find_make(), []
    # A watched script ends by itself, however long it saves a checkpoint after Ctrl-C.
    if make is None or "benchmarks.watch" in words:
        os.execvp(words[0], words)

    def end(*_):
        ends.append(True)
        process.terminate()

    def look(*_):
        if not ends and _is_ending(make):
            end()

    # A terminal interrupts the program, too. No child inherits these handlers.
    for number, handler in zip(ENDING, (end, lambda *_: None, end), strict=False):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)
    # This process has one thread, so no lock is held across the fork.
    prctl = ctypes.CDLL(None).prctl
    process = subprocess.Popen(words, preexec_fn=lambda: prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0))
    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, LOOK_S, LOOK_S)
    status = process.wait()
    # As Python ends, a signal has no handler any more and would kill it.
    signal.setitimer(signal.ITIMER_REAL, 0)
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


def main() -> None:
    """Run the program, or end with one line and status 2."""
    target, reason = sys.argv[1], ""
    given = {name[len("make_") :]: value for name, value in os.environ.items() if name.startswith("make_")}
    # A step of the user's own runs in PYTHON, the harness does not.
    is_of_step = target in ("measure", "doctor")
    python = (not is_of_step and given.pop("PYTHON", "")) or ".venv/bin/python"
    missing = [PIP.get(name, name) for name in TARGETS[target][1] if importlib.util.find_spec(name) is None]
    if sys.version_info < (3, 11):  # noqa: UP036 - PYTHON= may be any.
        reason = f"{python} is Python {sys.version_info[0]}.{sys.version_info[1]}, this takes 3.11 or newer"
    elif missing:
        reason = f"{python} has no {', '.join(missing)}: {python} -m pip install -c constraints.txt {' '.join(missing)}"
    try:
        words = [python, *command_of(target, given)]
    except ValueError as error:
        reason = reason or str(error)
    if reason:
        print(f"make {target}: {reason}", file=sys.stderr)
        sys.exit(2)
    print(" ".join(shlex.quote(word) if word.isprintable() else ascii(word) for word in words), flush=True)
    sys.exit(run(words))


if __name__ == "__main__":
    main()
