"""The command of a make target, from the values that make was given.

    make_MODEL=gpt3 python -m benchmarks.from_make bench            runs python -m benchmarks.run --model=gpt3

make passes each value in the environment as make_NAME, so no shell ever reads it. A flag and its value are one word:
a value that begins with - stays a value. ARGS is split as a shell splits words, and nothing in it is expanded.
"""

from __future__ import annotations  # An old interpreter must come to say that it is old.

import importlib.util
import os
import shlex
import sys

# What programs need. pip knows xdist under another name.
MEASURE, TABLES = ("torch", "numpy", "scipy", "msgspec"), ("numpy", "scipy", "msgspec")
FIGURES, TEST = (*TABLES, "matplotlib"), (*MEASURE, "pandas", "pytest", "xdist")
PIP = {"xdist": "pytest-xdist"}
RUN = ("MODEL", "PRESET", "VARIANTS", "CYCLES", "MINUTES", "NGPU", "HOST_LOAD", "OUT", "LABEL")
POINT = ("MODEL", "PRESET", "CYCLES", "MINUTES", "NGPU", "HOST_LOAD", "OUT", "OVER", "VALUES", "VARIANT")
STEP = ("STEP", "VARIANTS", "CYCLES", "MINUTES", "NGPU", "HOST_LOAD", "OUT", "PYTHON")
JOB = ("VARIANTS", "NODES", "PARTITION", "ACCOUNT", "TIME", "IMAGE", "MOUNTS", "SBATCH")
TESTS = ["-m", "pytest", "--dist"]

# target: words of its program, variables that become flags, packages that it needs
TARGETS = {
    "bench": (["-m", "benchmarks.run"], RUN, MEASURE),
    "measure": (["-m", "benchmarks.measure"], STEP, MEASURE),
    "census": (["-m", "benchmarks.census"], ("MODEL", "PRESET", "CYCLES", "MINUTES", "OUT"), MEASURE),
    "doctor": (["-m", "benchmarks.measure", "--doctor"], ("STEP", "MODEL", "PRESET", "NGPU", "PYTHON"), MEASURE),
    "publish": (["-m", "benchmarks.publish", "RUN"], (), TABLES),
    "sweep": (["-m", "benchmarks.sweep"], POINT, MEASURE),
    "submit": (["-m", "benchmarks.submit"], POINT + JOB, TABLES),
    "compare": (["-m", "benchmarks.compare", "OUT"], (), TABLES),
    "gate": (["-m", "benchmarks.gate", "OUT"], ("BASE",), TABLES),
    "plots": (["-m", "benchmarks.plot", "OUT"], (), FIGURES),
    "readme": (["-m", "benchmarks.overview", "--write"], (), FIGURES),
    "test": ([*TESTS, "worksteal", "-n", "3", "-m", "not slow and not slurm and not gpu and not long"], (), TEST),
    "long": ([*TESTS, "loadfile", "-n", "2", "-m", "long"], (), TEST),
    "test-slow": ([*TESTS, "loadgroup", "-n", "3", "-m", "(slow or slurm) and not gpu and not long"], (), TEST),
}
FLAGS = {"BASE": "--against"}


def command_of(target: str, given: dict[str, str]) -> list[str]:
    """Words for the interpreter.

    Raises:
        ValueError: CONTROL or ARGS cannot be read; the text says why.
    """
    program, variables, _ = TARGETS[target]
    given = {name: value.strip() for name, value in given.items()}
    words = [_path(given, word) if word in ("OUT", "RUN") else word for word in program]
    words += [f"{FLAGS.get(v, '--' + v.lower().replace('_', '-'))}={given[v]}" for v in variables if given.get(v)]
    if given.get("CONTROL", "") not in ("", "0", "1"):
        raise ValueError(f"CONTROL={given['CONTROL']!a}: takes 0, without the control, or 1")
    words += ["--no-control"] if given.get("CONTROL") == "0" else []
    try:
        return words + shlex.split(given.get("ARGS", ""))
    except ValueError as error:
        raise ValueError(f"ARGS={given['ARGS']!a}: {str(error).lower()}") from None


def _path(given, name):
    value = given.get(name) or "results"
    return f"./{value}" if value.startswith("-") else value


def main() -> None:
    """Become the program, or end with one line and status 2."""
    target, said = sys.argv[1], ""
    given = {name[len("make_") :]: value for name, value in os.environ.items() if name.startswith("make_")}
    # A step of one's own runs in PYTHON, the harness does not.
    own = "PYTHON" in TARGETS[target][1]
    python = (None if own else given.get("PYTHON")) or ".venv/bin/python"
    missing = [PIP.get(name, name) for name in TARGETS[target][2] if importlib.util.find_spec(name) is None]
    if sys.version_info < (3, 11):  # noqa: UP036 - PYTHON= may be any.
        said = f"{python} is Python {sys.version_info[0]}.{sys.version_info[1]}, this takes 3.11 or newer"
    elif missing:
        said = f"{python} has no {', '.join(missing)}: {python} -m pip install -c constraints.txt {' '.join(missing)}"
    try:
        words = [python, *command_of(target, given)]
    except ValueError as error:
        said = said or str(error)
    if said:
        print(f"make {target}: {said}", file=sys.stderr)
        sys.exit(2)
    print(" ".join(shlex.quote(word) if word.isprintable() else ascii(word) for word in words), flush=True)
    os.execvp(python, words)


if __name__ == "__main__":
    main()
