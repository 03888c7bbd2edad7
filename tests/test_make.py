"""make on a machine of fakes: what each target runs, and that a value is never a command."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time

import pytest

from benchmarks import from_make
from tests.helpers.fake_machine import FAKE_PYTHON, ROOT, Machine, matching


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def test_variables_become_flags_and_empty_ones_do_not(machine):
    given = {"PRESET": "tiny", "MINUTES": "30", "HOST_LOAD": "16", "OUT": "a b"}
    values = [f"{name}={value}" for name, value in given.items()]
    answer = machine.make("bench", "MODEL=gpt3,rnnt", *values, "CONTROL=0", "ARGS=-- --layers 4")
    words = (
        "-m benchmarks.run --model=gpt3,rnnt --preset=tiny --minutes=30 --host-load=16 {} --no-control -- --layers 4"
    )
    assert machine.log()[-1] == f".venv/bin/python {words.format('--out=a b')}"
    # Said as a shell would take it.
    said = words.format("'--out=a b'")
    assert answer.stdout.splitlines()[-1] == f".venv/bin/python {said}"
    machine.make("bench", "MODEL=gpt3", *(f"{name}=" for name in given), "ARGS=", "PYTHON=", "CONTROL=")
    assert machine.log()[-1] == ".venv/bin/python -m benchmarks.run --model=gpt3"


@pytest.mark.parametrize(
    ("target", "given", "words"),
    [
        ("sweep", ["MODEL=gpt3", "OVER=batch", "VALUES=1,2"], "sweep --model=gpt3 --over=batch --values=1,2"),
        (
            "submit",
            ["MODEL=a,b", "NODES=2", "SBATCH=qos=high nice=1"],
            "submit --model=a,b --nodes=2 --sbatch=qos=high nice=1",
        ),
        ("publish", ["RUN=runs/a b.json", "ARGS=runs/other.json"], "publish runs/a b.json runs/other.json"),
        ("compare", ["OUT=runs/a b", "ARGS=--wide"], "compare runs/a b --wide"),
        ("compare", ["OUT= ", "BASE="], "compare results"),
        ("compare", ["BASE=old c"], "gate results --against=old c"),
        ("readme", [], "plot results"),
    ],
)
def test_a_target_runs_its_program(machine, target, given, words):
    assert machine.make(target, *given).returncode == 0
    assert machine.log()[-1].endswith(f" -m benchmarks.{words}")


def test_every_flag_is_one_of_its_program(machine):
    for target, (program, variables, _) in from_make.TARGETS.items():
        if variables:
            # sweep and submit hand on flags of benchmarks.run.
            programs = [program[1], *(["benchmarks.run"] if target in ("sweep", "submit") else [])]
            known = "".join((ROOT / f"{name.replace('.', '/')}.py").read_text() for name in programs)
            for name in variables:
                assert f'"{from_make.FLAGS.get(name, "--" + name.lower().replace("_", "-"))}"' in known, (target, name)


@pytest.mark.parametrize(
    ("target", "given", "said"),
    [
        ("bench", "MODEL=x CONTROL=no", "CONTROL='no'"),
        ("bench", "MODEL=x ARGS='a", "no closing quotation"),
        ("bench", "MODEL=x NODES=2", "make bench takes no NODES, make submit does"),
        ("bench", "MODEL=x OVER=batch", "make bench takes no OVER, make sweep or make submit does"),
        ("sweep", "ROUNDS=2", "make sweep takes no ROUNDS, no target does any more"),
        ("bench", "", "MODEL is missing, as in make bench MODEL=gpt3; models: gpt3"),
        ("bench", "MODEL=", "MODEL is missing"),
        ("publish", "", "RUN is missing, as in make publish RUN=runs/"),
    ],
)
def test_a_mistake_is_one_line(machine, target, given, said):
    answer = machine.make(target, *given.split())
    line = answer.stderr.splitlines()[0]
    assert answer.returncode == 2 and said in line and not matching(machine.log(), "-m benchmarks")


def test_what_the_shell_exports_is_no_variable_of_make(machine):
    exported = {"OUT": "/x", "MODEL": "rnnt", "NODES": "2", "ARGS": "--x", "CONTROL": "0", "make_OUT": "/y"}
    machine.make("bench", "MODEL=gpt3", **exported)
    assert machine.log()[-1] == ".venv/bin/python -m benchmarks.run --model=gpt3"
    assert "MODEL is missing" in machine.make("bench", **exported).stderr


# Each would make the file `pwned` in the folder where make runs, if make, a shell or an option parser took it.
INJECTIONS = [
    "; touch pwned",
    "x' ; touch pwned ; '",
    'x" ; touch pwned ; "',
    "`touch pwned`",
    "$$(touch pwned)",
    "$(shell touch pwned)",
    "$(eval $(shell touch pwned))",
    "x\r\n\ttouch pwned\n",
    "x && touch pwned",
    "x | touch pwned &",
    "> pwned",
    "x\\\n; touch pwned",
    "\udcff\udcfe; touch pwned",
    "--no-control",
    "-- --layers 4",
    "* ~  b",
    "$(value MODEL) $HOME #c",
]
TAKERS = {
    "bench": ("MODEL", "LABEL", "OUT", "CYCLES"),
    "sweep": ("VALUES", "VARIANT"),
    "submit": ("SBATCH", "IMAGE"),
    "publish": ("RUN",),
    "compare": ("OUT", "BASE"),
}


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    """A machine whose interpreter keeps the words of the last program as they are, each ended by a zero byte."""
    machine = Machine(tmp_path_factory.mktemp("seeing"))
    words = 'case "$*" in *benchmarks.from_make*) ;; *) printf \'%s\\0\' "$@" >"$MACHINE/words" ;; esac\n'
    machine.script("bin/python3", FAKE_PYTHON.replace("#!/bin/bash\n", f"#!/bin/bash\n{words}"))
    return machine


def words_of(machine, target, *given):
    (machine.folder / "words").unlink(missing_ok=True)
    needs = {"bench": ["MODEL=x"], "sweep": ["MODEL=x", "OVER=x"], "submit": ["MODEL=x"]}
    answer = subprocess.run(
        ["make", target, *needs.get(target, []), *given, "PYTHON=python3"],
        cwd=machine.repo,
        env=machine.environment,
        capture_output=True,
        errors="surrogateescape",
        timeout=300,
    )
    assert answer.returncode == 0, answer.stderr
    assert not list(machine.folder.rglob("pwned")), "it was run"
    return os.fsdecode((machine.folder / "words").read_bytes()).split("\0")[:-1]


@pytest.mark.parametrize("value", INJECTIONS, ids=ascii)
def test_a_value_is_never_a_command(seeing, value):
    """Whatever it holds, the program gets it in one word, which is no option of its own."""
    for target, names in TAKERS.items():
        words = words_of(seeing, target, *(f"{name}={value}" for name in names))
        for name in names:
            if name == "RUN" or (target, name) == ("compare", "OUT"):
                assert words[2] == f"{'./' if value[0] == '-' else ''}{value.strip()}"
            else:
                flag = from_make.FLAGS.get(name, f"--{name.lower()}")
                assert f"{flag}={value.strip()}" in words, (target, name)
        assert value[0] != "-" or value not in words


@pytest.mark.parametrize("value", ["$(shell touch pwned)", "x; touch pwned", "* ~", "-x\ny"], ids=ascii)
def test_args_are_split_into_words_and_nothing_more(seeing, value):
    words, split = words_of(seeing, "bench", f"ARGS={value}"), shlex.split(value)
    assert words[len(words) - len(split) :] == split


@pytest.mark.parametrize("value", ["$(shell touch pwned)", "x; touch pwned"])
def test_an_interpreter_of_any_name_is_one_word(machine, value):
    answer = machine.make("bench", "MODEL=gpt3", f"PYTHON={value}")
    assert answer.returncode == 2 and not list(machine.folder.rglob("pwned"))


def test_an_interpreter_without_packages_says_which_are_missing(machine):
    machine.script("bin/bare", '#!/bin/bash\nexec "$REAL_PYTHON" -S "$@"\n')
    answer = machine.make("test", "PYTHON=bare")
    names = "torch, numpy, scipy, msgspec, pandas, pytest, pytest-xdist"
    assert answer.stderr.startswith(f"make test: bare has no {names}: bare -m pip install ") and not machine.log()


def test_failure_of_a_program_is_not_hidden(machine):
    machine.faults("3 benchmarks.run", "4 -m pytest", "5 -m ruff")
    for target, status in (("bench MODEL=gpt3", 3), ("test-slow", 4), ("lint", 5)):
        answer = machine.make(*target.split())
        assert answer.returncode == 2 and "[Makefile:" in answer.stderr and f"Error {status}" in answer.stderr


def test_interrupt_ends_make_as_an_interrupt(machine):
    machine.make("bench", "MODEL=gpt3")
    (machine.folder / "wait").touch()
    process = subprocess.Popen(
        ["make", "bench", "MODEL=gpt3"],
        cwd=machine.repo,
        env=machine.environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    deadline = time.monotonic() + 240
    while not (machine.folder / "running").exists():
        assert time.monotonic() < deadline, "the program was not started"
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=240) in (-signal.SIGINT, 130)


def test_test_leaves_out_what_is_slow_or_needs_hardware(machine):
    machine.make("test", "ARGS=-q")
    assert machine.log()[-1].endswith("-m not slow and not slurm and not gpu and not long -q")
    machine.make("test-slow")
    assert machine.log()[-1].endswith("-m (slow or slurm) and not gpu and not long")


def test_help_lists_every_target_and_variable(machine):
    text = machine.make().stdout
    makefile = (ROOT / "Makefile").read_text()
    (phony,) = re.findall(r"^\.PHONY: (.*)", makefile, re.MULTILINE)
    used = {
        "PYTHON",
        *re.findall(r"\b[A-Z_]{3,}\b", " ".join(re.findall(r"^\w+_takes = (.*)", makefile, re.MULTILINE))),
    }
    assert used >= {name for _, variables, _ in from_make.TARGETS.values() for name in variables}
    listed = {line.split()[0] for line in text.splitlines() if line.startswith("  ")}
    assert listed == set(phony.split()) | used
    assert "models: gpt3" in text and not machine.log()


def test_signals_that_nohup_ignores_reach_what_tests_start():
    code = (
        "import signal, subprocess, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN); import tests.conftest;"
        "child = 'import os, signal; os.kill(os.getpid(), signal.SIGHUP)';"
        "print(subprocess.run([sys.executable, '-c', child]).returncode)"
    )
    answer = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert answer.stdout == f"{-signal.SIGHUP}\n", answer.stderr


def test_clean_keeps_runs(machine):
    machine.make("bench", "MODEL=gpt3")
    for name in ("runs/cpux1/gpt3-tiny", "gpt3/__pycache__"):
        (machine.repo / name).mkdir(parents=True)
    assert machine.make("clean").returncode == 0
    assert (machine.repo / "runs/cpux1/gpt3-tiny").is_dir()
    assert not (machine.repo / ".venv").exists() and not (machine.repo / "gpt3/__pycache__").exists()
