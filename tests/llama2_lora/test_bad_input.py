"""python -m llama2_lora.train with what it cannot use: one line on stderr that names the flag, before weights exist."""

from dataclasses import replace

import pytest

from tests.helpers import forked
from tests.helpers.llama2_lora_case import TINY, weights, write_checkpoint


@pytest.mark.parametrize(
    "arguments, told",
    [
        (["--sequence", "1000"], "--sequence 1000: takes a multiple of 16"),
        (["--keep", "1 fc2"], "--keep 1 fc2: takes auto, all, least, or numbers of the last layers with items"),
        (["--checkpoint", "/nowhere/llama"], "--checkpoint /nowhere/llama: no such folder"),
        (["--save-adapter", "/proc/adapter"], "--save-adapter /proc/adapter/adapter_model.safetensors: cannot write"),
    ],
)
def test_flags(arguments, told):
    assert told in forked.refusal("llama2_lora", *arguments)


def test_a_checkpoint_that_does_not_fit(tmp_path):
    folder = write_checkpoint(tmp_path / "wide", replace(TINY, ffn=512, layers=1))
    line = forked.refusal("llama2_lora", "--checkpoint", str(folder))
    assert "does not fit ffn 256, layers 3: take --ffn 512 --layers 1" in line
    tensors = weights(TINY)
    del tensors["model.layers.2.mlp.up_proj.weight"]
    folder = write_checkpoint(tmp_path / "lacking", TINY, tensors)
    line = forked.refusal("llama2_lora", "--checkpoint", str(folder))
    assert "holds no tensor model.layers.2.mlp.up_proj.weight" in line
