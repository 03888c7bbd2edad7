"""make and setup.sh on a machine of fakes: interpreters, pip and nvidia-smi only log what they are asked.

pytest tests/test_setup.py
"""

import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
TOOLS = "awk bash cat cksum cp dirname echo env find head make mkdir paste rm sleep tail touch"

# Stands for every interpreter. $MACHINE/faults holds lines "STATUS REGEX": what matches "$0 $*" exits so.
FAKE_PYTHON = """#!/bin/bash
call="${0#$MACHINE/bin/} $*"
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
        for name in ("Makefile", "setup.sh", "pyproject.toml", "constraints.txt"):
            shutil.copy(ROOT / name, self.repo)
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
    assert "-m pip" in install and "--constraint constraints.txt" in install and "core.txt" in install
    assert "torch>=2.11" in (machine.repo / ".venv/.setup/core.txt").read_text()
    assert log[-1] == ".venv/bin/python -m benchmarks.run --model gpt3"


@pytest.mark.parametrize(("target", "program"), [("bench", "-m benchmarks.run"), ("test", "-m pytest")])
def test_second_call_does_no_setup_work(machine, target, program):
    machine.gpu()
    machine.make(target, "MODEL=gpt3")
    assert matching(machine.log(), "install")
    answer = machine.make(target, "MODEL=gpt3")
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
        assert log[-1] == ".venv/bin/python -m benchmarks.run --model gpt3"
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
        "VARIANTS": "eager,graph",
        "ROUNDS": "auto",
        "STEPS": "60",
        "NGPU": "2",
        "HOST_LOAD": "16",
        "MINUTES": "30",
        "OUT": "a b",
        "LABEL": "quiet",
        "CONTROL": "1",
        "CLOSE": "1",
        "SESSION": "x y",
    }
    machine.make("bench", "MODEL=gpt3", *(f"{name}={value}" for name, value in given.items()), "ARGS=-- --layers 4")
    assert machine.log()[-1].endswith(
        "-m benchmarks.run --model gpt3 --preset tiny --variants eager,graph --rounds auto --steps 60 --ngpu 2"
        " --host-load 16 --minutes 30 --out a b --label quiet --control --close --session x y -- --layers 4"
    )
    assert '--out "a b"' in machine.make("-n", "bench", "MODEL=gpt3", "OUT=a b").stdout
    machine.make("bench", "MODEL=gpt3", *(f"{name}=" for name in given), "ARGS=", "PYTHON=")
    assert machine.log()[-1].endswith("-m benchmarks.run --model gpt3")


@pytest.mark.parametrize("given", [False, True])
def test_missing_model_is_one_line_before_any_setup(machine, given):
    answer = machine.make("bench", *(["MODEL= "] if given else []))
    assert answer.returncode == 2
    (line,) = answer.stderr.splitlines()
    assert "MODEL is missing" in line and "models: gpt3" in line
    assert not machine.log()


def test_a_session_is_closed_by_its_name_without_a_model(machine):
    machine.make("bench", "CLOSE=1", "SESSION=20261122T031500Z-13f405-c77b")
    assert machine.log()[-1].endswith("-m benchmarks.run --close --session 20261122T031500Z-13f405-c77b")


def test_publish_takes_sessions(machine):
    machine.make("publish", "SESSION=runs/a runs/b")
    assert machine.log()[-1].endswith("-m benchmarks.publish publish runs/a runs/b")
    answer = machine.make("publish")
    assert answer.returncode == 2 and "SESSION is missing, as in make publish SESSION=runs/" in answer.stderr
    assert not machine.log()


def test_compare_reads_the_folder(machine):
    machine.make("compare", "OUT=runs/a b", "ARGS=--markdown")
    assert machine.log()[-1].endswith("-m benchmarks.compare runs/a b --markdown")
    machine.make("compare", "OUT= ", "BASE=")
    assert machine.log()[-1].endswith("-m benchmarks.compare results")


def test_compare_with_a_base_is_the_gate(machine):
    machine.make("compare", "OUT=runs/a b", "BASE=old c", "ARGS=--tolerance 1")
    assert machine.log()[-1].endswith("-m benchmarks.gate runs/a b --against old c --tolerance 1")
    machine.make("compare", "BASE=old")
    assert machine.log()[-1].endswith("-m benchmarks.gate results --against old")


def test_readme_writes_tables_and_figures(machine):
    machine.make("readme")
    overview, plot = machine.log()[-2:]
    assert overview.endswith("-m benchmarks.overview results --write --readme")
    assert plot.endswith("-m benchmarks.plot results --readme")


def test_failure_of_a_program_is_not_hidden(machine):
    machine.faults("3 benchmarks.run", "4 -m pytest", "5 -m ruff")
    for target, status in (("bench", 3), ("test", 4), ("test-slow", 4), ("lint", 5)):
        answer = machine.make(target, "MODEL=gpt3")
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
    assert machine.log()[-1].endswith("-m pytest -n 3 --dist worksteal -m not slow and not slurm and not gpu -q")
    machine.make("test-slow")
    assert machine.log()[-1].endswith("-m pytest -n 2 --dist loadfile -m (slow or slurm) and not gpu")


def test_help_lists_every_target_and_variable(machine):
    text = machine.make().stdout
    makefile = (ROOT / "Makefile").read_text()
    (phony,) = re.findall(r"^\.PHONY: (.*)", makefile, re.MULTILINE)
    used = {*re.findall(r"call (?:flag|need),([A-Z_]+)", makefile), "ARGS", "PYTHON"}
    used |= {*re.findall(r"if \$\(strip \$\(([A-Z_]+)\)\)", makefile)}
    listed = {line.split()[0] for line in text.splitlines() if line.startswith("  ")}
    assert listed == set(phony.split()) | used
    assert "models: gpt3" in text and not machine.log()


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
