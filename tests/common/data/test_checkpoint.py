"""common/data/checkpoint.py: what is read and where it lies, what does not fit, damaged files."""

import json
import shutil
from dataclasses import replace

import pytest
import torch

from common.data.checkpoint import open_checkpoint
from llama2_lora.config import Config
from tests.helpers.llama2_lora_case import described, weights, write_checkpoint

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
        prefix = f"model.layers.{index}."
        part = {name.removeprefix(prefix): t.bfloat16() for name, t in tensors.items() if name.startswith(prefix)}
        layer = {name: checkpoint.read(name, index) for name in ("qkv", "proj", "fc1", "fc2", "norm1", "norm2")}
        q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
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
    assert torch.equal(checkpoint.read("embedding"), tensors["model.embed_tokens.weight"].bfloat16())
    assert torch.equal(checkpoint.read("head"), tensors["lm_head.weight"].bfloat16())
    assert torch.equal(checkpoint.read("final_norm"), tensors["model.norm.weight"].bfloat16())


@pytest.mark.parametrize(("dtype", "shards"), [(torch.bfloat16, 1), (torch.float32, 3)])
def test_every_tensor_is_read_in_its_place(tmp_path, shards, dtype):
    tensors = weights(CONFIG, dtype)
    # Old checkpoints of Llama 2 hold RoPE's frequencies beside the weights.
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    checkpoint = open_checkpoint(write_checkpoint(tmp_path / "llama", CONFIG, tensors, shards), CONFIG)
    assert_equals(checkpoint, tensors, CONFIG)
    assert not checkpoint.tied


def test_a_tied_head_is_the_embedding(tmp_path):
    tensors = weights(CONFIG)
    del tensors["lm_head.weight"]
    folder = write_checkpoint(tmp_path / "llama", CONFIG, tensors, tie_word_embeddings=True)
    checkpoint = open_checkpoint(folder, CONFIG)
    assert checkpoint.tied and torch.equal(checkpoint.read("head"), tensors["model.embed_tokens.weight"])
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
    assert torch.equal(checkpoint.read("norm1", 1), weights(CONFIG)["model.layers.1.input_layernorm.weight"])


@pytest.mark.parametrize(
    ("config", "flags"),
    [
        (replace(CONFIG, layers=4), "--layers 3"),
        (replace(CONFIG, heads=8, head_dim=32), "--heads 4 --head-dim 16"),
        (replace(CONFIG, ffn=192, vocab=160), "--ffn 96 --vocab 128"),
        (replace(CONFIG, rope_theta=500000.0), "--rope-theta 10000.0"),
    ],
)
def test_sizes_that_differ_are_named_with_the_flags_to_take(folder, config, flags):
    assert refused(folder, config).endswith(f"take {flags}")


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("model_type", "mistral", "model_type mistral"),
        ("mlp_bias", True, "mlp_bias True"),
        ("rope_scaling", {"rope_type": "llama3", "factor": 8.0}, "rope_type llama3"),
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


def test_missing_tensors_and_wrong_shapes_and_dtypes(tmp_path):
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


def test_folders_that_are_no_checkpoint(tmp_path, folder):
    assert refused(tmp_path / "none") == f"--checkpoint {tmp_path / 'none'}: no such folder"
    assert "not a folder" in refused(folder / "config.json")
    assert "cannot read" in refused(tmp_path)
    (folder / "model.safetensors.index.json").unlink()
    assert "neither model.safetensors.index.json nor model.safetensors" in refused(folder)


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


@pytest.mark.parametrize("name", ["../out.safetensors", "/out.safetensors", "a/../../out.safetensors"])
def test_an_index_reads_no_file_outside_of_its_folder(folder, name):
    """The file outside holds the tensor, so nothing but its name is wrong."""
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    tensor, inside = next(iter(index["weight_map"].items()))
    shutil.copy(folder / inside, folder.parent / "out.safetensors")
    (folder / "a").mkdir()
    taken = str(folder.parent / "out.safetensors") if name.startswith("/") else name
    path.write_text(json.dumps({"weight_map": {**index["weight_map"], tensor: taken}}))
    assert "which is no file of its folder" in refused(folder)


def test_layers_that_are_left_out_are_named(folder):
    assert open_checkpoint(folder, CONFIG).notes == []
    assert open_checkpoint(folder, replace(CONFIG, layers=2)).notes == ["--checkpoint: the first 2 of 3 layers"]


@pytest.mark.parametrize("name", ["hidden_size", "rope_theta"])
@pytest.mark.parametrize("digits", [400, 5000])
def test_an_integer_beyond_a_float_is_refused(folder, name, digits):
    text = json.dumps(described(CONFIG) | {name: -1}).replace("-1", "9" * digits)
    (folder / "config.json").write_text(text)
    assert refused(folder).endswith("sizes that are no numbers from 1 up" if digits == 400 else "is not JSON")


def test_a_disk_that_fails_is_one_line(folder):
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("/proc/self/mem")
    assert refused(folder).endswith("config.json (Input/output error)")
