"""The GPUs that nvidia-smi lists."""

import os

from graph_worth.harness.processes import gpus
from tests.helpers.processes import program


def fake_nvidia_smi(folder, monkeypatch, listing):
    folder.mkdir()
    program(folder / "nvidia-smi", f'#!/bin/sh\nif [ "$1" = -L ]; then printf "{listing}"; else echo 580.1; fi\n')
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_gpus_are_found(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    lines = r"GPU 0: NVIDIA H200 (UUID: GPU-0a)\nGPU 1: NVIDIA H200 (UUID: GPU-1b)\n"
    fake_nvidia_smi(tmp_path / "bin", monkeypatch, lines)
    found = gpus.find_gpus()
    assert found == gpus.Gpus(("NVIDIA H200",) * 2, ("GPU-0a", "GPU-1b"), "580.1")
    assert found.slug == "h200"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert gpus.find_gpus().uuids == ("GPU-1b",)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpus.find_gpus() == gpus.Gpus()


def test_no_gpu_is_an_empty_answer(monkeypatch, tmp_path):
    fake_nvidia_smi(tmp_path / "bin", monkeypatch, "No devices found.")
    assert gpus.find_gpus().slug == "cpu"
    assert gpus.Gpus(("NVIDIA A100-SXM4-80GB",)).slug == "a100-sxm4-80gb"
    assert gpus.Gpus(("NVIDIA H100 80GB HBM3",)).slug == "h100"
    assert gpus.Gpus(("NVIDIA GeForce RTX 4090",)).slug == "rtx-4090"
