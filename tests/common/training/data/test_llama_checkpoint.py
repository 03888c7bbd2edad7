"""common/llama_checkpoint: what is read and where it lies, what does not fit, damaged files, host memory."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from common.training.data.llama_checkpoint import open_checkpoint
from llama2_lora.config import Config
from tests.helpers.llama2_lora_case import described, weights, write_checkpoint

ROOT = Path(__file__).resolve().parents[4]
CONFIG = Config(layers=3, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=96, vocab=128, sequence=32, rank=4)


@pytest.fixture
def folder(tmp_path):
    return write_checkpoint(tmp_path / "llama", CONFIG)


def refused(folder, config=CONFIG):
    with pytest.raises(ValueError, match="^--checkpoint") as caught:
        open_checkpoint(folder, config)
    text = str(caught.value)
    assert "\n" not in text
    return text


def assert_equals(checkpoint, tensors, config):
    for index in range(config.layers):
        part = {
            name.split(f"layers.{index}.")[1]: t.bfloat16() for name, t in tensors.items() if f"layers.{index}." in name
        }
        layer = checkpoint.layer(index)
        q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
        assert list(layer) == ["qkv", "proj", "fc1", "fc2", "norm1", "norm2"]
        assert all(tensor.dtype == torch.bfloat16 and tensor.is_contiguous() for tensor in layer.values())
        for name, rows in (("q", slice(0, q)), ("k", slice(q, q + kv)), ("v", slice(q + kv, q + 2 * kv))):
            assert torch.equal(layer["qkv"][rows], part[f"self_attn.{name}_proj.weight"])
        assert torch.equal(layer["fc1"][: config.ffn], part["mlp.gate_proj.weight"])
        assert torch.equal(layer["fc1"][config.ffn :], part["mlp.up_proj.weight"])
        assert layer["qkv"].shape[0] == q + 2 * kv and layer["fc1"].shape[0] == 2 * config.ffn
        assert torch.equal(layer["proj"], part["self_attn.o_proj.weight"])
        assert torch.equal(layer["fc2"], part["mlp.down_proj.weight"])
        assert torch.equal(layer["norm1"], part["input_layernorm.weight"])
        assert torch.equal(layer["norm2"], part["post_attention_layernorm.weight"])
    assert torch.equal(checkpoint.embedding(), tensors["model.embed_tokens.weight"].bfloat16())
    assert torch.equal(checkpoint.head(), tensors["lm_head.weight"].bfloat16())
    assert torch.equal(checkpoint.final_norm(), tensors["model.norm.weight"].bfloat16())


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_tensor_is_read_in_its_place(tmp_path, shards, dtype):
    tensors = weights(CONFIG, dtype)
    # Old checkpoints of Llama 2 hold RoPE's frequencies beside the weights.
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    checkpoint = open_checkpoint(write_checkpoint(tmp_path / "llama", CONFIG, tensors, shards), CONFIG)
    assert_equals(checkpoint, tensors, CONFIG)
    assert checkpoint.num_layers == 3 and not checkpoint.tied


def test_a_tied_head_is_the_embedding(tmp_path):
    tensors = weights(CONFIG)
    del tensors["lm_head.weight"]
    folder = write_checkpoint(tmp_path / "llama", CONFIG, tensors, tie_word_embeddings=True)
    checkpoint = open_checkpoint(folder, CONFIG)
    assert checkpoint.tied and torch.equal(checkpoint.head(), tensors["model.embed_tokens.weight"])
    (folder / "config.json").write_text(json.dumps(described(CONFIG)))
    assert "holds no tensor lm_head.weight" in refused(folder)


def test_llama_3_as_transformers_5_describes_it(tmp_path):
    config = replace(CONFIG, rope_theta=500000.0, head_dim=32, vocab=256)
    rope = {"rope_theta": 500000.0, "rope_type": "default"}
    folder = write_checkpoint(tmp_path / "llama", config, rope_parameters=rope, head_dim=32)
    assert_equals(open_checkpoint(folder, config), weights(config), config)
    assert refused(folder, replace(config, rope_theta=10000.0)).endswith("take --rope-theta 500000.0")


def test_the_first_layers_of_a_deeper_checkpoint(folder):
    checkpoint = open_checkpoint(folder, replace(CONFIG, layers=2))
    assert checkpoint.num_layers == 3
    assert torch.equal(checkpoint.layer(1)["norm1"], weights(CONFIG)["model.layers.1.input_layernorm.weight"])


@pytest.mark.parametrize(
    ("config", "flags"),
    [
        (replace(CONFIG, layers=4), "--layers 3"),
        (replace(CONFIG, hidden=128), "--hidden 64"),
        (replace(CONFIG, heads=8, head_dim=32), "--heads 4 --head-dim 16"),
        (replace(CONFIG, kv_heads=4), "--kv-heads 2"),
        (replace(CONFIG, ffn=192, vocab=160), "--ffn 96 --vocab 128"),
        (replace(CONFIG, norm_eps=1e-6), "--norm-eps 1e-05"),
        (replace(CONFIG, rope_theta=500000.0), "--rope-theta 10000.0"),
    ],
)
def test_sizes_that_differ_are_named_with_the_flags_to_take(folder, config, flags):
    assert refused(folder, config).endswith(f"take {flags}")


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("model_type", "mistral", "model_type mistral"),
        ("hidden_act", "gelu", "hidden_act gelu"),
        ("attention_bias", True, "attention_bias True"),
        ("mlp_bias", True, "mlp_bias True"),
        ("rope_scaling", {"rope_type": "llama3", "factor": 8.0}, "rope_type llama3"),
        ("rope_scaling", {"type": "linear", "factor": 2.0}, "rope_type linear"),
        ("rope_parameters", {"rope_type": "yarn", "rope_theta": 10000.0}, "rope_type yarn"),
        ("quantization_config", {"quant_method": "gptq"}, "quantization_config gptq"),
        ("num_attention_heads", 0, "sizes that are no numbers"),
        ("vocab_size", "many", "sizes that are no numbers"),
    ],
)
def test_a_model_that_is_not_built_here(tmp_path, field, value, named):
    assert named in refused(write_checkpoint(tmp_path / "llama", CONFIG, **{field: value}))


def test_a_config_json_that_says_too_little(folder):
    content = described(CONFIG)
    del content["hidden_size"]
    (folder / "config.json").write_text(json.dumps(content))
    assert "config.json has no hidden_size" in refused(folder)
    for text in ("{", "[]"):
        (folder / "config.json").write_text(text)
        assert "config.json is damaged" in refused(folder)


def test_missing_tensors_and_wrong_shapes_dtypes_and_biases(tmp_path):
    whole, name = weights(CONFIG), "model.layers.1.mlp.up_proj.weight"
    lacking = {key: tensor for key, tensor in whole.items() if ".mlp." not in key}
    assert "holds no tensor model.layers.0.mlp.gate_proj.weight and 8 more" in refused(
        write_checkpoint(tmp_path / "a", CONFIG, lacking)
    )
    odd = {**whole, name: whole[name][:-1]}
    assert f"{name} has the shape (95, 64), the flags say (96, 64)" in refused(
        write_checkpoint(tmp_path / "b", CONFIG, odd)
    )
    quantised = {**whole, name: whole[name].to(torch.int8)}
    assert f"{name} has dtype I8, not BF16, F16, F32" in refused(write_checkpoint(tmp_path / "c", CONFIG, quantised))
    biased = {**whole, "model.layers.0.self_attn.q_proj.bias": torch.ones(64)}
    assert "holds model.layers.0.self_attn.q_proj.bias" in refused(write_checkpoint(tmp_path / "d", CONFIG, biased))


def test_folders_that_are_no_checkpoint(tmp_path, folder):
    assert refused(tmp_path / "none") == f"--checkpoint {tmp_path / 'none'}: no such folder"
    assert "not a folder" in refused(folder / "config.json")
    assert "cannot read" in refused(tmp_path)
    (folder / "model.safetensors.index.json").unlink()
    assert "neither model.safetensors.index.json nor model.safetensors" in refused(folder)
    (folder / "pytorch_model-00001-of-00002.bin").touch()
    assert "pytorch_model-00001-of-00002.bin is pickled" in refused(folder)


def test_a_shard_that_is_truncated_or_missing_is_named_at_opening(folder):
    shard = folder / "model-00002-of-00002.safetensors"
    content = shard.read_bytes()
    shard.write_bytes(content[: len(content) // 2])
    assert "model-00002-of-00002.safetensors is damaged or truncated: " in refused(folder)
    shard.unlink()
    assert "cannot read" in refused(folder) and "model-00002-of-00002.safetensors" in refused(folder)


def test_an_index_that_does_not_match_its_files(folder):
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    first, second = sorted(set(index["weight_map"].values()))
    name = next(name for name, file in index["weight_map"].items() if file == first)
    path.write_text(json.dumps({"weight_map": {**index["weight_map"], name: second}}))
    assert f"looks for {name} in {second}, which does not hold it" in refused(folder)
    for content in ({}, {"weight_map": ["a"]}, {"weight_map": {"a": 1}}):
        path.write_text(json.dumps(content))
        assert "does not name files" in refused(folder)


MEASURE = """
import sys, torch
from common.training.data.llama_checkpoint import open_checkpoint
from llama2_lora.config import Config
from tests.helpers.llama2_lora_case import described, weights, write_checkpoint

def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) * 1024

config = Config(layers=6, hidden=1024, heads=8, kv_heads=2, head_dim=128, ffn=2048, vocab=512, sequence=32)
for folder in sys.argv[1:]:
    checkpoint = open_checkpoint(folder, config)
    checkpoint.embedding(), checkpoint.final_norm()  # loads what a first read loads
    open("/proc/self/clear_refs", "w").write("5")  # the peak starts again at what is resident now
    before = peak()
    for index in range(config.layers):
        layer = checkpoint.layer(index)
        num_bytes = sum(tensor.numel() * 2 for tensor in layer.values())
        del layer
    print(peak() - before, num_bytes)
"""


def test_host_memory_stays_at_one_layer_and_a_piece(tmp_path):
    config = Config(layers=6, hidden=1024, heads=8, kv_heads=2, head_dim=128, ffn=2048, vocab=512, sequence=32)
    folders = []
    for dtype in (torch.bfloat16, torch.float32):
        folders.append(str(write_checkpoint(tmp_path / str(dtype), config, weights(config, dtype))))
    # What is freed goes back at once: malloc's own choice, which changes from run to run, would keep some of it.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(2**16)}
    child = subprocess.run(
        [sys.executable, "-c", MEASURE, *folders],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert child.returncode == 0, child.stderr
    for line, piece in zip(child.stdout.splitlines(), (0, 16 * 2**20), strict=True):
        peak, layer = map(int, line.split())
        assert layer * 0.9 < peak < 1.5 * layer + piece
