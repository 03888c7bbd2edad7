"""make on a machine of fakes: what each target runs, and that a value is never a command."""

import importlib
import os
import re
import shlex
import signal
import subprocess
import sys

import pytest

from benchmarks import from_make
from graph_worth.harness import run
from tests.helpers.fake_machine import FAKE_PYTHON, ROOT, Machine, matching
from tests.helpers.processes import until


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def test_variables_become_flags_and_empty_ones_do_not(machine):
    given = {"PRESET": "tiny", "MINUTES": "30", "HOST_LOAD": "16", "OUT": "a b"}
    values = [f"{name}={value}" for name, value in given.items()]
    answer = machine.make("bench", "MODEL=gpt3,rnnt", *values, "ARGS=--no-control -- --layers 4")
    words = (
        "-m benchmarks.run --host-load=16 --minutes=30 --model=gpt3,rnnt {} --preset=tiny --no-control -- --layers 4"
    )
    assert machine.log()[-1] == f".venv/bin/python {words.format('--out=a b')}"
    # Said as a shell would take it.
    said = words.format("'--out=a b'")
    assert answer.stdout.splitlines()[-1] == f".venv/bin/python {said}"
    machine.make("bench", "MODEL=gpt3", *(f"{name}=" for name in given), "ARGS=", "PYTHON=")
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
        ("compare", ["OUT=runs/a b", "ARGS=--model x"], "compare runs/a b --model x"),
        ("compare", ["OUT= ", "BASE="], "compare results"),
        ("compare", ["BASE=old c"], "gate results --against=old c"),
        ("frame", ["OUT=runs", "TABLE=rows", "TO=a b.csv"], "frame runs --table=rows --to=a b.csv"),
        ("readme", [], "plot results"),
    ],
)
def test_a_target_runs_its_program(machine, target, given, words):
    assert machine.make(target, *given).returncode == 0
    assert machine.log()[-1].endswith(f" -m benchmarks.{words}")


def parsed(target, given):
    """The values that make was given, as the program of a target takes them."""
    _, module, *words = from_make.command_of(target, given)
    # A command of the suite may be a few lines over the harness.
    program = sys.modules[importlib.import_module(module).main.__module__]
    args = getattr(program, "parse", program.main)(words)
    # sweep hands on flags of benchmarks.run.
    return run.parse(["--model", "gpt3", *args.rest]) if target == "sweep" else args


ENOUGH = {
    "bench": {"MODEL": "gpt3"},
    "measure": {"STEP": "my_step.py:build"},
    "publish": {"RUN": "run.json"},
    "judge": {"RUN": "run.json"},
    "sweep": {"MODEL": "gpt3", "OVER": "batch", "VALUES": "1,2"},
    "submit": {"MODEL": "gpt3"},
}
DOCUMENTED = {
    name: text.partition(":")[0].split(", ")
    for name, text in re.findall(r"^# ([A-Z_]+) +## (.*)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    if not text.startswith("all")
}


def test_every_variable_of_help_is_taken_by_its_targets():
    numbers = dict.fromkeys(("CYCLES", "MINUTES", "NGPU", "VALUES", "NODES"), "1") | {"HOST_LOAD": "0"}
    numbers["TABLE"] = "rows"
    for name, targets in DOCUMENTED.items():
        for target in targets:
            enough = ENOUGH.get("measure" if target == "doctor" else target, {})
            parsed(target, enough | {name: numbers.get(name, "some")})
    assert parsed("measure", ENOUGH["measure"] | {"PYTHON": "python3"}).python == "python3"


@pytest.mark.parametrize(
    ("target", "given", "said"),
    [
        ("bench", {"MODEL": "x", "NODES": "2"}, "unknown argument '--nodes=2'"),
        ("bench", {"MODEL": "x", "OVER": "batch"}, "unknown argument '--over=batch'"),
        ("bench", {"MODEL": "x", "CYCLE": "3"}, "unknown argument '--cycle=3'"),
        ("census", {"NGPU": "2"}, "unrecognized arguments: --ngpu=2"),
        ("census", {"CONTROL": "0"}, "unrecognized arguments: --control=0"),
        ("sweep", {"MODEL": "x", "OVER": "y", "VALUES": "1", "NODES": "2"}, "unknown argument '--nodes=2'"),
        ("readme", {"OUT": "x"}, "unrecognized arguments: --out=x"),
        ("compare", {"NODES": "2"}, "unrecognized arguments: --nodes=2"),
        ("publish", {"RUN": "x", "BASE": "y"}, "unrecognized arguments: --base=y"),
        ("bench", {}, "arguments are required: --model"),
        ("bench", {"MODEL": " "}, "arguments are required: --model"),
        ("sweep", {"MODEL": "x", "OVER": "y"}, "arguments are required: --values"),
        ("measure", {}, "arguments are required: --step"),
        ("publish", {}, "arguments are required: RUN"),
        ("judge", {}, "arguments are required: RUN"),
    ],
)
def test_a_variable_that_a_target_does_not_take_or_lacks_is_refused_in_one_line(capsys, target, given, said):
    with pytest.raises(SystemExit, match="2"):
        parsed(target, given)
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_a_mistake_is_one_line(machine):
    answer = machine.make("bench", "MODEL=x", "ARGS='a")
    line = answer.stderr.splitlines()[0]
    assert answer.returncode == 2 and "no closing quotation" in line and not matching(machine.log(), "-m benchmarks")


def test_a_variable_of_any_name_reaches_the_program(machine):
    machine.make("bench", "MODEL=gpt3", "CYCLE=3")
    assert machine.log()[-1] == ".venv/bin/python -m benchmarks.run --cycle=3 --model=gpt3"


def test_what_the_shell_exports_is_no_variable_of_make(machine):
    exported = {"OUT": "/x", "MODEL": "rnnt", "NODES": "2", "ARGS": "--x", "make_OUT": "/y"}
    machine.make("bench", "MODEL=gpt3", **exported)
    assert machine.log()[-1] == ".venv/bin/python -m benchmarks.run --model=gpt3"
    machine.make("bench", **exported)
    assert machine.log()[-1] == ".venv/bin/python -m benchmarks.run"


# Each would make the file `pwned` in the folder where make runs, if make, a shell or an option parser took it.
INJECTIONS = [
    "x' ; touch pwned ; '",
    'x" ; touch pwned ; "',
    "`touch pwned` && $$(touch pwned) > pwned &",
    "$(eval $(shell touch pwned))",
    "x\r\n\ttouch pwned\n",
    "\udcff\udcfe; touch pwned",
    "--no-control",
    "* ~  b",
    "$(value MODEL) $HOME #c",
]
TAKERS = {
    "bench": ("MODEL", "LABEL", "OUT", "CYCLES"),
    "sweep": ("VALUES", "VARIANT"),
    "submit": ("SBATCH", "IMAGE"),
    "publish": ("RUN",),
    "judge": ("RUN",),
    "compare": ("OUT", "BASE"),
    "frame": ("OUT", "TO"),
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
    answer = subprocess.run(
        ["make", target, *given, "PYTHON=python3"],
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
            if name == "RUN" or (name, target) in (("OUT", "compare"), ("OUT", "frame")):
                assert words[2] == f"{'./' if value[0] == '-' else ''}{value.strip()}"
            else:
                flag = "--against" if name == "BASE" else f"--{name.lower()}"
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


def begun(machine):
    """The process of a make whose program waits."""
    machine.make("bench", "MODEL=gpt3")
    (machine.folder / "wait").touch()
    process = subprocess.Popen(
        ["make", "bench", "MODEL=gpt3"],
        cwd=machine.repo,
        env=machine.environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        # A shell that starts pytest in the background ignores interrupts, and so would make.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert until((machine.folder / "running").exists), "the program was not started"
    return process


def test_interrupt_ends_make_as_an_interrupt(machine):
    process = begun(machine)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=240) in (-signal.SIGINT, 130)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL])
def test_a_signal_to_make_alone_ends_the_program(machine, number):
    process = begun(machine)
    process.send_signal(number)
    assert until((machine.folder / "stopped").exists), "the program goes on"
    assert process.wait(timeout=240) == -number


def test_test_leaves_out_what_is_slow_or_needs_hardware(machine):
    machine.make("test", "ARGS=-q")
    assert machine.log()[-1].endswith("-m not slow and not slurm and not gpu and not long -q")
    machine.make("test-slow")
    assert machine.log()[-1].endswith("-m (slow or slurm) and not gpu and not long")


def test_help_lists_every_target_and_variable(machine):
    text = machine.make().stdout
    makefile = (ROOT / "Makefile").read_text()
    (phony,) = re.findall(r"^\.PHONY: (.*)", makefile, re.MULTILINE)
    listed = {line.split()[0] for line in text.splitlines() if line.startswith("  ")}
    assert listed == {*phony.split(), *DOCUMENTED, "ARGS", "PYTHON"}
    assert "models: gpt3" in text and not machine.log()
    listed = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "models: examples/minimal gpt3 llama2_lora " in listed and "tests/" not in listed.splitlines()[-1]


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


def test_no_timer_is_left_that_would_end_make_with_an_alarm():
    code = "import os, signal; from benchmarks import from_make as made; made._find_make = lambda: str(os.getppid()); "
    code += "made._is_ending = lambda make: False; status = made.run(['true']); "
    code += "assert (status, signal.getitimer(signal.ITIMER_REAL)) == (0, (0.0, 0.0))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
