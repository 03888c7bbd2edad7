"""make and setup.sh on a machine of fakes: interpreters, pip and nvidia-smi only log what they are asked.

pytest tests/test_setup.py
"""

import itertools
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks import from_make

ROOT = Path(__file__).resolve().parent.parent
TOOLS = "awk bash cat cksum cp dirname echo env find head make mkdir paste rm sleep tail touch"

# Stands for every interpreter. $MACHINE/faults holds lines "STATUS REGEX": what matches "$0 $*" exits so.
FAKE_PYTHON = """#!/bin/bash
call="${0#$MACHINE/bin/} $*"
# It makes a command of make's values and runs that, by this interpreter.
[[ $call != *benchmarks.from_make* ]] || exec "$REAL_PYTHON" "$@"
echo "$call${NVTE_FRAMEWORK:+ NVTE_FRAMEWORK=$NVTE_FRAMEWORK}" | paste -s -d ' ' >>"$MACHINE/log"
while read -r status regex; do
    [[ $call =~ $regex ]] && exit "$status"
done <"$MACHINE/faults"
case "$*" in
"-m venv"*) rm -rf .venv && mkdir -p .venv/bin && cp "$MACHINE/fake_python" .venv/bin/python ;;
"- "*) exec "$REAL_PYTHON" "$@" ;;
--version) echo "Python 3.12.9" ;;
*benchmarks.run*) [ ! -e "$MACHINE/wait" ] || { touch "$MACHINE/running"; sleep 30; } ;;
esac
"""


class Machine:
    """A folder with a copy of what set-up needs, and a PATH of few tools and fake interpreters."""

    def __init__(self, folder: Path):
        self.folder, self.repo, self.bin = folder, folder / "repo", folder / "bin"
        self.bin.mkdir()
        for name in TOOLS.split():
            (self.bin / name).symlink_to(shutil.which(name))
        (self.repo / "gpt3").mkdir(parents=True)
        (self.repo / "gpt3" / "train.py").touch()
        (self.repo / "benchmarks").mkdir()
        programs = ("benchmarks/__init__.py", "benchmarks/from_make.py")
        for name in ("Makefile", "setup.sh", "pyproject.toml", "constraints.txt", *programs):
            shutil.copy(ROOT / name, self.repo / name)
        for name in ("fake_python", "bin/python3.12", "bin/python3"):
            self.script(name, FAKE_PYTHON)
        (folder / "log").touch()
        self.faults()

    def script(self, name, text):
        path = self.folder / name
        path.write_text(text)
        path.chmod(0o755)

    def faults(self, *lines):
        (self.folder / "faults").write_text("".join(line + "\n" for line in lines))

    def gpu(self, answer="GPU 0: NVIDIA H200 (UUID: GPU-1)", status=0):
        self.script("bin/nvidia-smi", f"#!/bin/bash\necho nvidia-smi >>$MACHINE/log\necho '{answer}'\nexit {status}\n")

    @property
    def environment(self):
        # Built from nothing: MAKEFLAGS and variables of an outer make must not reach the inner one.
        return {"PATH": str(self.bin), "MACHINE": str(self.folder), "REAL_PYTHON": sys.executable}

    def make(self, *arguments, **variables):
        return subprocess.run(
            ["make", *arguments],
            cwd=self.repo,
            env={**self.environment, **variables},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=30,
        )

    def log(self):
        """Calls since the last time, one a line."""
        lines = (self.folder / "log").read_text().splitlines()
        (self.folder / "log").write_text("")
        return lines


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def matching(lines, text):
    return [line for line in lines if text in line]


# ------------------------------------------------------------------------------------------------
# Set-up


def test_fresh_machine_gets_venv_and_pinned_versions_then_runs(machine):
    answer = machine.make("bench", "MODEL=gpt3")
    assert answer.returncode == 0, answer.stderr
    log = machine.log()
    assert matching(log, "python3.12 -m venv --clear .venv")
    (install,) = matching(log, "install")
    assert (
        "-m pip" in install
        and " --quiet " in install
        and "--constraint constraints.txt" in install
        and "core.txt" in install
    )
    assert "torch>=2.11" in (machine.repo / ".venv/.setup/core.txt").read_text()
    assert log[-1] == ".venv/bin/python -m benchmarks.run --model=gpt3"


@pytest.mark.parametrize(("target", "program"), [("bench", "-m benchmarks.run"), ("test", "-m pytest")])
def test_second_call_does_no_setup_work(machine, target, program):
    machine.gpu()
    given = ["MODEL=gpt3"] if target == "bench" else []
    machine.make(target, *given)
    assert matching(machine.log(), "install")
    answer = machine.make(target, *given)
    assert answer.returncode == 0 and "setup:" not in answer.stdout
    (only,) = machine.log()
    assert only.startswith(f".venv/bin/python {program}")


def test_test_after_bench_adds_its_extras_alone(machine):
    machine.make("bench", "MODEL=gpt3")
    machine.log()
    machine.make("test")
    installs = matching(machine.log(), "install")
    extras = ("dev.txt", "plots.txt", "lightning.txt", "speech.txt", "dali.txt")
    assert len(installs) == len(extras)
    assert all(name in line for name, line in zip(extras, installs, strict=True))
    machine.make("bench", "MODEL=gpt3")
    assert not matching(machine.log(), "pip")


@pytest.mark.parametrize("name", ["constraints.txt", "pyproject.toml"])
def test_changed_pins_or_extras_are_installed_again(machine, name):
    machine.make("bench", "MODEL=gpt3")
    machine.log()
    path = machine.repo / name
    path.write_text(path.read_text() + "\n# changed\n")
    machine.make("bench", "MODEL=gpt3")
    log = machine.log()
    assert matching(log, "install") and not matching(log, "-m venv")


def test_touched_files_with_equal_text_are_not_installed_again(machine):
    machine.make("bench", "MODEL=gpt3")
    machine.log()
    os.utime(machine.repo / "constraints.txt", (time.time() + 1000,) * 2)
    machine.make("bench", "MODEL=gpt3")
    assert not matching(machine.log(), "pip")


def test_venv_whose_interpreter_is_gone_is_made_again(machine):
    machine.make("bench", "MODEL=gpt3")
    machine.log()
    (machine.repo / ".venv/bin/python").unlink()
    (machine.repo / ".venv/bin/python").symlink_to("/nowhere/python3.12")
    assert machine.make("bench", "MODEL=gpt3").returncode == 0
    log = machine.log()
    assert matching(log, "-m venv") and matching(log, "core.txt")


@pytest.mark.parametrize(
    "fault", ["127 python3.12 ", "1 python3.12 -c import sys; ", "1 python3.12 -c import ensurepip"]
)
def test_interpreters_that_are_broken_old_or_without_venv_are_passed_over(machine, fault):
    machine.faults(fault)
    assert machine.make("bench", "MODEL=gpt3").returncode == 0
    assert matching(machine.log(), "python3 -m venv")


@pytest.mark.parametrize(
    ("fault", "said"), [("1 -c import sys; ", "no Python >= 3.11"), ("1 -c import ensurepip", "python3.12-venv")]
)
def test_no_usable_python_is_one_line(machine, fault, said):
    machine.faults(fault)
    answer = machine.make("bench", "MODEL=gpt3")
    assert answer.returncode == 2
    setup_line, make_line = answer.stderr.splitlines()
    assert said in setup_line and make_line.startswith("make: ***")
    assert not (machine.repo / ".venv").exists() and not matching(machine.log(), "benchmarks.run")


def test_failed_pip_stops_and_the_next_call_tries_again(machine):
    machine.faults("1 -m pip .*core.txt")
    answer = machine.make("bench", "MODEL=gpt3")
    assert answer.returncode == 2 and "pip could not install core" in answer.stderr
    assert not matching(machine.log(), "benchmarks.run")
    machine.faults()
    assert machine.make("bench", "MODEL=gpt3").returncode == 0
    log = machine.log()
    assert matching(log, "core.txt") and matching(log, "benchmarks.run")


@pytest.mark.parametrize("how", ["command line", "environment"])
def test_given_python_is_used_without_setup(machine, how):
    machine.gpu()
    answer = machine.make("test", "PYTHON=python3") if how == "command line" else machine.make("test", PYTHON="python3")
    assert answer.returncode == 0
    assert [line.split(" -m ")[0] for line in machine.log()] == ["python3"]
    assert not (machine.repo / ".venv").exists()


def test_unknown_extra_is_named(machine):
    machine.make("bench", "MODEL=gpt3")
    answer = subprocess.run(
        ["./setup.sh", "plotz"], cwd=machine.repo, env=machine.environment, capture_output=True, text=True
    )
    assert answer.returncode == 1 and "'plotz'" in answer.stderr and "plots" in answer.stderr


def test_a_venv_of_another_user_is_left_alone(machine, tmp_path):
    machine.make("bench", "MODEL=gpt3")
    machine.log()
    (machine.repo / "constraints.txt").write_text("x==1\n")
    if os.geteuid() == 0:
        os.chown(machine.repo / ".venv", 65534, 65534)
    else:
        shutil.rmtree(machine.repo / ".venv")
        (machine.repo / ".venv").symlink_to("/usr")
    answer = machine.make("bench", "MODEL=gpt3")
    line, _ = answer.stderr.splitlines()
    assert answer.returncode == 2 and line.startswith(f"setup: {machine.repo}/.venv belongs to another user")
    assert not matching(machine.log(), "-m venv")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_a_checkout_of_another_user_is_left_alone():
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        machine = Machine(Path(folder))
        (machine.folder / "log").chmod(0o666)
        options = {"cwd": machine.repo, "env": machine.environment, "capture_output": True, "text": True}
        answer = subprocess.run(["./setup.sh", "core"], user=65534, **options)
        assert answer.returncode == 1 and answer.stderr.count("\n") == 1
        assert answer.stderr.startswith(f"setup: {machine.repo} belongs to another user")
        assert not machine.log()


# ------------------------------------------------------------------------------------------------
# Transformer Engine


def test_te_is_installed_where_nvidia_smi_answers(machine):
    machine.gpu()
    answer = machine.make("bench", "MODEL=gpt3")
    assert answer.returncode == 0 and "plain PyTorch" not in answer.stdout
    log = machine.log()
    (install,) = matching(log, "te.txt")
    assert "--no-build-isolation" in install and "--constraint constraints.txt" in install
    assert "NVTE_FRAMEWORK=pytorch" in install
    assert "transformer_engine[pytorch]==2.20.2" in (machine.repo / ".venv/.setup/te.txt").read_text()
    assert log.index(matching(log, "core.txt")[0]) < log.index(install)
    assert "NVTE" not in log[-1]


@pytest.mark.parametrize("answer", [None, ("No devices found", 6), ("NVIDIA-SMI has failed", 9)])
def test_te_is_not_tried_without_a_gpu(machine, answer):
    if answer:
        machine.gpu(*answer)
    result = machine.make("bench", "MODEL=gpt3")
    assert result.returncode == 0 and "Transformer Engine" not in result.stdout
    assert not matching(machine.log(), "te.txt")


@pytest.mark.parametrize("fault", ["1 -m pip .*te.txt", "1 -c import torch, transformer_engine"])
def test_te_that_fails_is_said_remembered_and_left_to_make_te(machine, fault):
    machine.gpu()
    machine.faults(fault)
    for call in (1, 2):
        answer = machine.make("bench", "MODEL=gpt3")
        assert answer.returncode == 0
        assert len(matching(answer.stdout.splitlines(), "plain PyTorch layers")) == 1
        log = machine.log()
        assert log[-1] == ".venv/bin/python -m benchmarks.run --model=gpt3"
        assert len(matching(log, "te.txt")) == (call == 1)
    answer = machine.make("te")
    assert answer.returncode == 2 and "could not be installed" in answer.stderr
    assert matching(machine.log(), "te.txt")
    machine.faults()
    assert machine.make("te").returncode == 0
    assert matching(machine.log(), "te.txt")
    assert "Transformer Engine" not in machine.make("bench", "MODEL=gpt3").stdout
    machine.log()
    assert machine.make("te").returncode == 0
    assert not machine.log()


# ------------------------------------------------------------------------------------------------
# make


def test_variables_become_flags_and_empty_ones_do_not(machine):
    given = {
        "PRESET": "tiny",
        "VARIANTS": "eager,graph_step",
        "CYCLES": "auto",
        "MINUTES": "30",
        "NGPU": "2",
        "HOST_LOAD": "16",
        "OUT": "a b",
        "LABEL": "quiet",
    }
    answer = machine.make(
        "bench", "MODEL=gpt3,rnnt", *(f"{name}={value}" for name, value in given.items()), "ARGS=-- --layers 4"
    )
    words = (
        "-m benchmarks.run --model=gpt3,rnnt --preset=tiny --variants=eager,graph_step --cycles=auto --minutes=30"
        " --ngpu=2 --host-load=16 --out=a b --label=quiet -- --layers 4"
    )
    assert machine.log()[-1] == f".venv/bin/python {words}"
    # Said as a shell would take it.
    assert (
        answer.stdout.splitlines()[-1]
        == f".venv/bin/python {words.replace('--out=a b', chr(39) + '--out=a b' + chr(39))}"
    )
    machine.make("bench", "MODEL=gpt3", *(f"{name}=" for name in given), "ARGS=", "PYTHON=", "CONTROL=")
    assert machine.log()[-1] == ".venv/bin/python -m benchmarks.run --model=gpt3"


@pytest.mark.parametrize(("value", "words"), [("0", " --no-control"), ("1", "")])
def test_control_of_0_leaves_it_out(machine, value, words):
    machine.make("bench", "MODEL=all", f"CONTROL={value}")
    assert machine.log()[-1] == f".venv/bin/python -m benchmarks.run --model=all{words}"


@pytest.mark.parametrize(("given", "said"), [("CONTROL=no", "CONTROL='no'"), ("ARGS=--out 'a", "no closing quotation")])
def test_a_value_that_cannot_be_read_is_one_line(machine, given, said):
    answer = machine.make("bench", "MODEL=gpt3", given)
    assert answer.returncode == 2 and not matching(machine.log(), "benchmarks.run")
    assert said in answer.stderr.splitlines()[0] and answer.stderr.startswith("make bench: ")


def test_sweep_and_submit_have_their_flags(machine):
    machine.make("sweep", "MODEL=gpt3", "OVER=batch", "VALUES=1,2", "VARIANT=graph", "CYCLES=auto", "MINUTES=5")
    assert machine.log()[-1].endswith(
        "-m benchmarks.sweep --model=gpt3 --cycles=auto --minutes=5 --over=batch --values=1,2 --variant=graph"
    )
    machine.make("submit", "MODEL=a,b", "NODES=2", "NGPU=8", "TIME=1:00", "SBATCH=qos=high nice=1", "ARGS=--dry-run")
    assert machine.log()[-1].endswith(
        "-m benchmarks.submit --model=a,b --ngpu=8 --nodes=2 --time=1:00 --sbatch=qos=high nice=1 --dry-run"
    )


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
        ("bench", "NODES=2", "make bench takes no NODES, make submit does"),
        ("bench", "OVER=batch", "make bench takes no OVER, make sweep or make submit does"),
        ("sweep", "ROUNDS=2", "make sweep takes no ROUNDS, no target does any more"),
        ("submit", "STEPS=60", "make submit takes no STEPS, no target does any more"),
        ("bench", "CLOSE=1", "make bench takes no CLOSE, no target does any more"),
        ("bench", "VERBOSE=1", "VERBOSE"),
        ("publish", "SESSION=runs/a", "make publish takes no SESSION"),
        ("sweep", "LABEL=a", "make sweep takes no LABEL, make bench does"),
        ("compare", "MODEL=gpt3", "MODEL"),
    ],
)
def test_a_variable_of_another_target_is_refused_in_one_line_before_any_setup(machine, target, given, said):
    answer = machine.make(target, *(["MODEL=gpt3"] if target == "bench" else []), given)
    (line,) = answer.stderr.splitlines()
    assert answer.returncode == 2 and said in line and not machine.log()


def test_what_the_shell_exports_is_no_variable_of_make(machine):
    exported = {
        "OUT": "/x",
        "STEPS": "5",
        "MODEL": "rnnt",
        "NODES": "2",
        "ARGS": "--x",
        "CONTROL": "0",
        "make_OUT": "/y",
    }
    machine.make("bench", "MODEL=gpt3", **exported)
    assert machine.log()[-1] == ".venv/bin/python -m benchmarks.run --model=gpt3"
    machine.make("compare", **exported)
    assert machine.log()[-1] == ".venv/bin/python -m benchmarks.compare results"
    assert "MODEL is missing" in machine.make("bench", **exported).stderr


# Each would make the file `pwned` in the folder where make runs, if make, a shell or an option parser took it.
INJECTIONS = [
    "; touch pwned",
    "x; touch pwned; #",
    "x' ; touch pwned ; '",
    'x" ; touch pwned ; "',
    "`touch pwned`",
    "$(touch pwned)",
    "$$(touch pwned)",
    "$(shell touch pwned)",
    "${shell touch pwned}",
    "$(eval $(shell touch pwned))",
    "$(error $(shell touch pwned))",
    "x\ntouch pwned",
    "x\r\n\ttouch pwned\n",
    "x && touch pwned",
    "x | touch pwned",
    "x & touch pwned &",
    "> pwned",
    "x\\\n; touch pwned",
    "') || touch pwned #",
    "\udcff\udcfe; touch pwned",
    "--no-control",
    "-- --layers 4",
    "*",
    "~",
    "a  b",
    "$(value MODEL) $HOME #c",
]
TAKERS = {
    "bench": ("MODEL", "LABEL", "OUT", "PRESET", "VARIANTS", "CYCLES"),
    "sweep": ("VALUES", "OVER", "VARIANT"),
    "submit": ("SBATCH", "IMAGE", "PARTITION"),
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
        timeout=30,
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


@pytest.mark.parametrize("value", [value for value in INJECTIONS if not set(value) & set("'\"")], ids=ascii)
def test_args_are_split_into_words_and_nothing_more(seeing, value):
    for target in ("bench", "test"):
        words, split = words_of(seeing, target, f"ARGS={value}"), shlex.split(value)
        assert words[len(words) - len(split) :] == split


@pytest.mark.parametrize("value", ["$(shell touch pwned)", "x; touch pwned", "`touch pwned`"])
def test_an_interpreter_of_any_name_is_one_word(machine, value):
    answer = machine.make("bench", "MODEL=gpt3", f"PYTHON={value}")
    assert answer.returncode == 2 and not list(machine.folder.rglob("pwned"))


def test_an_interpreter_without_packages_says_which_are_missing(machine):
    machine.script("bin/bare", '#!/bin/bash\nexec "$REAL_PYTHON" -S "$@"\n')
    for target, names in (
        ("bench", "torch, numpy, scipy"),
        ("test", "torch, numpy, scipy, pandas, pytest, pytest-xdist"),
    ):
        answer = machine.make(target, *(["MODEL=gpt3"] if target == "bench" else []), "PYTHON=bare")
        (line, _) = answer.stderr.splitlines()
        assert line.startswith(f"make {target}: bare has no {names}: bare -m pip install ")
    assert not machine.log()


@pytest.mark.parametrize("given", [False, True])
def test_missing_model_is_one_line_before_any_setup(machine, given):
    answer = machine.make("bench", *(["MODEL= "] if given else []))
    assert answer.returncode == 2
    (line,) = answer.stderr.splitlines()
    assert "MODEL is missing" in line and "models: gpt3" in line
    assert not machine.log()


def test_publish_takes_a_run(machine):
    machine.make("publish", "RUN=runs/h200x1/a b.json", "ARGS=runs/other.json")
    assert machine.log()[-1].endswith("-m benchmarks.publish runs/h200x1/a b.json runs/other.json")
    answer = machine.make("publish")
    assert answer.returncode == 2 and "RUN is missing, as in make publish RUN=runs/" in answer.stderr
    assert not machine.log()


def test_compare_reads_the_folder(machine):
    machine.make("compare", "OUT=runs/a b", "ARGS=--markdown")
    assert machine.log()[-1].endswith("-m benchmarks.compare runs/a b --markdown")
    machine.make("compare", "OUT= ", "BASE=")
    assert machine.log()[-1].endswith("-m benchmarks.compare results")


def test_compare_with_a_base_is_the_gate(machine):
    machine.make("compare", "OUT=runs/a b", "BASE=old c", "ARGS=--tolerance 1")
    assert machine.log()[-1].endswith("-m benchmarks.gate runs/a b --against=old c --tolerance 1")
    machine.make("compare", "BASE=old")
    assert machine.log()[-1].endswith("-m benchmarks.gate results --against=old")


def test_readme_writes_tables_and_figures(machine):
    machine.make("readme")
    overview, plot = machine.log()[-2:]
    assert overview.endswith("-m benchmarks.overview --write")
    assert plot.endswith("-m benchmarks.plot results")


def test_failure_of_a_program_is_not_hidden(machine):
    machine.faults("3 benchmarks.run", "4 -m pytest", "5 -m ruff")
    for target, status in (("bench MODEL=gpt3", 3), ("test", 4), ("test-slow", 4), ("lint", 5)):
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
    deadline = time.monotonic() + 60
    while not (machine.folder / "running").exists():
        assert time.monotonic() < deadline, "the program was not started"
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=60) in (-signal.SIGINT, 130)


def test_test_leaves_out_what_is_slow_or_needs_hardware(machine):
    machine.make("test", "ARGS=-q")
    quick = "not slow and not slurm and not gpu and not long"
    assert machine.log()[-1].endswith(f"-m pytest --dist worksteal -n 3 -m {quick} -q")
    machine.make("test-slow")
    assert machine.log()[-1].endswith("-m pytest --dist loadfile -n 2 -m (slow or slurm) and not gpu and not long")


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


# ------------------------------------------------------------------------------------------------
# Pins


def read_pins():
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and line[0] != "#"]
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}


def test_every_declared_requirement_is_pinned_within_its_range():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = read_pins()
    for text in itertools.chain(project["dependencies"], *project["optional-dependencies"].values()):
        requirement = Requirement(text)
        version = pins.get(canonicalize_name(requirement.name))
        assert version and requirement.specifier.contains(version), f"{text} is not met by constraints.txt ({version})"


def test_torch_is_pinned_without_a_build_tag_so_that_any_build_of_it_fits():
    assert read_pins()["torch"] == "2.13.0"
    assert not [version for version in read_pins().values() if "+" in version]
