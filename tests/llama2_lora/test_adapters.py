"""llama2_lora/weights/adapters: what is saved, loaded and refused, saves that are cut, PEFT's own computation."""

import json
import os
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from common import files
from common.training.data.safetensors_file import open_file, write_file
from llama2_lora.config import Config
from llama2_lora.state import State
from llama2_lora.weights import adapters
from tests.helpers.llama2_lora_case import CPU, TINY, follow_eager, weights, write_checkpoint

CONFIG = Config(
    layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=96, vocab=128, sequence=32, rank=4, alpha=8.0
)
Q_PROJ = "base_model.model.model.layers.{}.self_attn.q_proj.lora_A.weight"


def masters(seed=0, config=CONFIG):
    generator = torch.Generator().manual_seed(seed)
    return {
        f"layers.{index}.{name}": torch.randn(shape, generator=generator)
        for index in range(config.layers)
        for name, shape in config.adapters.items()
    }


def assert_holds(folder, seed):
    found, expected = adapters.load(folder, CONFIG), masters(seed)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def refused(folder, config=CONFIG):
    with pytest.raises(ValueError, match="^--adapter") as caught:
        adapters.load(folder, config)
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.fixture
def folder(tmp_path):
    adapters.save(tmp_path / "new" / "adapter", masters(), CONFIG)
    return tmp_path / "new" / "adapter"


def change(folder, **fields):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def rewrite(folder, edit):
    """Let `edit(tensors)` change the tensors of the adapter."""
    file = open_file(folder / "adapter_model.safetensors", "--adapter")
    tensors = {name: file.read(name) for name in file.entries}
    edit(tensors)
    write_file(folder / "adapter_model.safetensors", tensors, file.metadata)


def test_what_is_saved_is_loaded_bit_for_bit_until_a_later_save_replaces_it(folder):
    assert_holds(folder, seed=0)
    adapters.save(folder, masters(1), CONFIG)
    assert_holds(folder, seed=1)
    assert sorted(path.name for path in folder.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]


@pytest.mark.parametrize("place", range(4))
def test_a_save_that_is_cut_anywhere_leaves_a_whole_adapter(folder, monkeypatch, place):
    """Two files are moved into place; a cut before the last move leaves the old adapter, after it the new one."""
    calls, replace_file = [], files.os.replace

    def cut(source, target):
        if len(calls) * 2 == place:
            raise KeyboardInterrupt
        replace_file(source, target)
        calls.append(target)
        if len(calls) * 2 - 1 == place:
            raise KeyboardInterrupt

    monkeypatch.setattr(files.os, "replace", cut)
    with pytest.raises(KeyboardInterrupt):
        adapters.save(folder, masters(1), CONFIG)
    monkeypatch.undo()
    assert_holds(folder, seed=1 if place == 3 else 0)
    adapters.save(folder, masters(2), CONFIG)
    assert_holds(folder, seed=2)
    assert len(list(folder.iterdir())) == 2


def test_tensors_have_pefts_names_and_the_three_share_one_a(folder):
    file = open_file(folder / "adapter_model.safetensors", "--adapter")
    assert len(file.entries) == CONFIG.layers * 4 * 2
    prefix = "base_model.model.model.layers.1.self_attn."
    a = [file.read(f"{prefix}{name}_proj.lora_A.weight") for name in "qkv"]
    b = [file.read(f"{prefix}{name}_proj.lora_B.weight") for name in "qkv"]
    assert all(torch.equal(one, masters()["layers.1.qkv.a"]) for one in a)
    assert [len(one) for one in b] == [64, 32, 32]
    assert torch.equal(torch.cat(b), masters()["layers.1.qkv.b"])
    assert torch.equal(file.read(f"{prefix}o_proj.lora_B.weight"), masters()["layers.1.proj.b"])
    described = json.loads((folder / "adapter_config.json").read_text())
    assert (described["r"], described["lora_alpha"], described["lora_dropout"]) == (4, 8, 0.1)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"r": 8}, "holds an adapter of r 8, this run has 4 (--rank)"),
        ({"lora_alpha": 32}, "holds an adapter of lora_alpha 32, this run has 8.0 (--alpha)"),
        (
            {"target_modules": ["q_proj", "v_proj"]},
            "holds an adapter of target_modules ['q_proj', 'v_proj'], this run has ['k_proj', 'o_proj', 'q_proj', ",
        ),
        ({"peft_type": "LO\nRA\x1b[2J"}, r"holds an adapter of peft_type 'LO\nRA\x1b[2J', this run has LORA"),
        ({"use_dora": True}, "holds an adapter of use_dora True, this run has None"),
    ],
)
def test_an_adapter_of_another_kind(folder, fields, named):
    change(folder, **fields)
    assert named in refused(folder)


def test_three_a_that_differ_cannot_be_held(folder):
    rewrite(folder, lambda tensors: tensors[Q_PROJ.format(1)].add_(1e-3))
    told = (
        "layers.1.self_attn.k_proj.lora_A.weight differs from q_proj's; here q, k and v are one projection with one A"
    )
    assert told in refused(folder)


def test_other_layers_shapes_and_kinds_show_by_their_tensors(folder):
    """Of PEFT's rank_pattern, layers_to_transform and lora_bias, too."""
    first = Q_PROJ.format(0)
    assert "k_proj.lora_A.weight is none, the flags say (4, 64)" in refused(folder, replace(CONFIG, layers=3))
    assert "k_proj.lora_A.weight is (4, 64), the flags say none" in refused(folder, replace(CONFIG, layers=1))
    assert "is (4, 64), the flags say (4, 128)" in refused(folder, replace(CONFIG, hidden=128))
    for change, told in (
        ({"lora_B\n.bias": torch.ones(4)}, r"the shape of 'lora_B\n.bias' is (4,), the flags say none"),
        ({first: torch.ones(8, 64)}, "is (8, 64), the flags say (4, 64)"),
    ):
        rewrite(folder, lambda tensors, change=change: tensors.update(change))
        assert told in refused(folder)


def test_an_adapter_of_half_precision_is_loaded(folder):
    rewrite(folder, lambda tensors: tensors.update({name: tensor.bfloat16() for name, tensor in tensors.items()}))
    loaded = adapters.load(folder, CONFIG)
    assert all(loaded[name].dtype == torch.float32 for name in loaded)
    assert all(torch.equal(loaded[name], tensor.bfloat16().float()) for name, tensor in masters().items())


def test_folders_that_are_no_adapter(tmp_path, folder):
    assert "adapter_config.json (No such file or directory)" in refused(tmp_path)
    model, path = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    os.truncate(model, 100)
    assert "is damaged or truncated" in refused(folder)
    for text in (b"{", b"7", b"\xff\xfe\xff", b"[" * 200_000):
        path.write_bytes(text)
        assert "adapter_config.json is damaged, it is no JSON object" in refused(folder)
    os.truncate(path, 9 * 2**20)
    assert "adapter_config.json has 9,437,184 bytes, at most 8,388,608 are read" in refused(folder)
    path.unlink()
    os.mkfifo(path)
    assert "it is a pipe, a socket or a device" in refused(folder)


def test_an_adapter_of_another_rank_is_not_overwritten(folder):
    config = replace(CONFIG, rank=8)
    with pytest.raises(ValueError, match=r"^--save-adapter .*holds an adapter of r 4, this run has 8 \(--rank\)$"):
        adapters.save(folder, masters(config=config), config)
    assert_holds(folder, seed=0)


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="^--save-adapter .*cannot write"):
        adapters.save(tmp_path / "file" / "adapter", masters(), CONFIG)


# --- PEFT and transformers


@pytest.mark.slow
def test_an_adapter_trained_here_has_the_same_loss_in_peft(tmp_path):
    """40 steps at tiny on a checkpoint; then held-out windows here in bf16, and in PEFT in FP32.

    At a fifth of tiny's learning rate: at 1e-2 gradient norms jump from 1 to 40, and what comes of it is chance.
    """
    peft = pytest.importorskip("peft", reason="./setup.sh peft installs peft and transformers")
    transformers = pytest.importorskip("transformers", reason="./setup.sh peft installs peft and transformers")
    tensors = {name: tensor * 0.05 if tensor.ndim == 2 else 1 + tensor * 0.1 for name, tensor in weights(TINY).items()}
    folders = {name: str(tmp_path / name) for name in ("checkpoint", "save_adapter")}
    write_checkpoint(tmp_path / "checkpoint", TINY, tensors)
    trained = State(replace(TINY, precision="bf16", lr=2e-3, batches=32, **folders), CPU, "handwritten")
    before = trained.evaluate()
    follow_eager(trained, 40)
    trained.finish()
    ours = trained.evaluate()

    base = transformers.LlamaForCausalLM.from_pretrained(folders["checkpoint"], dtype=torch.float32)
    adapted = peft.PeftModel.from_pretrained(base, folders["save_adapter"]).eval()
    losses = []
    for index in range(trained.windows.num_held_out):
        window = trained.windows.held_out(index)
        with torch.no_grad():
            each = F.cross_entropy(adapted(window.tokens[None]).logits[0], window.targets, reduction="none")
        losses.append(float((each * window.loss_mask).sum() / window.loss_mask.sum()))
    assert ours < before - 0.5
    assert sum(losses) / len(losses) == pytest.approx(ours, rel=5e-3)

    # And back: what PEFT saves of it is loaded here.
    adapted.save_pretrained(tmp_path / "again")
    saved, again = (adapters.load(tmp_path / name, TINY) for name in ("save_adapter", "again"))
    assert all(torch.equal(again[name], tensor) for name, tensor in saved.items())
