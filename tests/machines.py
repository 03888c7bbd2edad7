"""Machines that tests of the harness run on, as fixtures: `pytest_plugins = ["tests.machines"]` makes them known.

no_gpu    no GPU, and locks of the test's own
gpu       one H200
quick     runs of the fake model without a process
"""

import functools
import json
import subprocess

import pytest

from benchmarks import children, script
from common import environment
from tests.harness import describe_here, fake_nvidia_smi, run_here

GPU = r"GPU 0: NVIDIA H200 (UUID: GPU-0)\n"
_source_hash = functools.cache(environment.source_hash)
_git_state = functools.cache(environment.git_state)


@pytest.fixture
def no_gpu(tmp_path_factory, monkeypatch):
    """No GPU, and locks of this test's own."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    folder = tmp_path_factory.mktemp("machine")
    monkeypatch.setenv("GRAPH_LOCK_DIR", str(folder / "locks"))
    fake_nvidia_smi(folder / "bin", monkeypatch, "No devices found.")


@pytest.fixture
def gpu(no_gpu, tmp_path_factory, monkeypatch):
    """One H200 by the name of GPU-0, which nobody probes."""
    fake_nvidia_smi(tmp_path_factory.mktemp("gpu") / "bin", monkeypatch, GPU)
    answer = json.dumps({"us_per_operator": 3.5, "us_per_launch": 2.0, "device": "cuda"})
    real = subprocess.run

    def ask(command, **more):
        if "common.probe" in command:
            return subprocess.CompletedProcess(command, 0, f"{answer}\n", "")
        return real(command, **more)

    monkeypatch.setattr(subprocess, "run", ask)


@pytest.fixture
def quick(monkeypatch):
    """Runs of the fake model, --describe and hashes without a process; the source is what it was at first."""
    monkeypatch.setattr(children, "run_child", run_here)
    monkeypatch.setattr(script, "describe", describe_here)
    monkeypatch.setattr(environment, "source_hash", _source_hash)
    monkeypatch.setattr(environment, "git_state", _git_state)
