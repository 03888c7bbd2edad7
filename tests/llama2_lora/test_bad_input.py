"""python -m llama2_lora.train with what it cannot use: one line on stderr that names the flag, before weights exist."""

import os
from dataclasses import replace

import pytest

from tests.helpers import forked
from tests.helpers.llama2_lora_case import TINY, weights, write_checkpoint


def said(*arguments):
    """The one line on stderr; on stdout no card and no table, at most that a build began."""
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    answer = forked.run("llama2_lora.train", ["--preset", "tiny", *arguments], environment, timeout_s=300)
    assert (answer.returncode, answer.stderr.count("\n")) == (2, 1), answer
    assert answer.stdout.splitlines()[1:] in ([], ["building llama2_lora/tiny"]), answer
    assert answer.stderr.startswith("python -m llama2_lora.train: "), answer.stderr
    return answer.stderr


@pytest.mark.parametrize(
    "arguments, told",
    [
        (["--sequence", "1000"], "--sequence 1000: takes a multiple of 16"),
        (["--keep", "1 fc2"], "--keep 1 fc2: takes auto, all, least, or numbers of the last layers with items"),
        (["--batches", "1000000000000"], "--batches 1000000000000: takes at most 10,000"),
        (["--checkpoint", "/nowhere/llama"], "--checkpoint /nowhere/llama: no such folder"),
        (["--save-adapter", "/proc/adapter"], "--save-adapter /proc/adapter/adapter_model.safetensors: cannot write"),
    ],
)
def test_flags(arguments, told):
    assert told in said(*arguments)


def test_a_checkpoint_that_does_not_fit(tmp_path):
    folder = write_checkpoint(tmp_path / "wide", replace(TINY, ffn=512, layers=1))
    line = said("--checkpoint", str(folder))
    assert "does not fit ffn 256, layers 3: take --ffn 512 --layers 1" in line
    tensors = weights(TINY)
    del tensors["model.layers.2.mlp.up_proj.weight"]
    folder = write_checkpoint(tmp_path / "lacking", TINY, tensors)
    assert "holds no tensor model.layers.2.mlp.up_proj.weight" in said("--checkpoint", str(folder))
