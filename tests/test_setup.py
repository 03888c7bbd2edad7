"""setup.sh on a machine of fakes: what is installed, when, and with which pins."""

import itertools
import os
import shutil
import subprocess
import tempfile
import time
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.helpers.fake_machine import ROOT, Machine, matching


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


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


def test_second_call_does_no_setup_work(machine):
    machine.gpu()
    machine.make("test")
    assert matching(machine.log(), "install")
    os.utime(machine.repo / "constraints.txt", (time.time() + 1000,) * 2)
    answer = machine.make("test")
    assert answer.returncode == 0 and "setup:" not in answer.stdout
    (only,) = machine.log()
    assert only.startswith(".venv/bin/python -m pytest")


def test_test_after_bench_adds_its_extras_alone(machine):
    machine.make("bench", "MODEL=gpt3")
    machine.log()
    machine.make("test")
    installs = matching(machine.log(), "install")
    extras = ("dev.txt", "plots.txt", "lightning.txt", "speech.txt", "dali.txt", "parquet.txt")
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


def test_venv_whose_interpreter_is_gone_is_made_again(machine):
    machine.make("bench", "MODEL=gpt3")
    machine.log()
    (machine.repo / ".venv/bin/python").unlink()
    (machine.repo / ".venv/bin/python").symlink_to("/nowhere/python3.12")
    assert machine.make("bench", "MODEL=gpt3").returncode == 0
    log = machine.log()
    assert matching(log, "-m venv") and matching(log, "core.txt")


@pytest.mark.parametrize("fault", ["127 python3.12 ", "1 python3.12 -c import ensurepip"])
def test_interpreters_that_are_broken_or_without_venv_are_passed_over(machine, fault):
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


def test_given_python_is_used_without_setup(machine):
    machine.gpu()
    assert machine.make("test", "PYTHON=python3").returncode == 0
    assert machine.make("test", PYTHON="python3").returncode == 0
    assert [line.split(" -m ")[0] for line in machine.log()] == ["python3", "python3"]
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
