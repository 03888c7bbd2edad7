"""llama2_lora/weights/adapters: what is saved, what is refused, and PEFT's own computation with it."""

import json
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from common.data.safetensors_file import open_file
from llama2_lora.config import Config
from llama2_lora.state import State
from llama2_lora.weights import adapters
from tests.helpers.llama2_lora_case import CPU, TINY, follow_eager, weights, write_checkpoint

CONFIG = Config(
    layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=96, vocab=128, sequence=32, rank=4, alpha=8.0
)


def test_tensors_have_pefts_names_and_the_three_share_one_a(tmp_path):
    folder, generator = tmp_path / "new" / "adapter", torch.Generator().manual_seed(0)
    masters = {
        f"layers.{index}.{name}": torch.randn(shape, generator=generator)
        for index in range(CONFIG.layers)
        for name, shape in CONFIG.adapters.items()
    }
    adapters.save(folder, masters, CONFIG)
    assert sorted(path.name for path in folder.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    file = open_file(folder / "adapter_model.safetensors", "--adapter")
    assert len(file.entries) == CONFIG.layers * 4 * 2
    prefix = "base_model.model.model.layers.1.self_attn."
    a = [file.read(f"{prefix}{name}_proj.lora_A.weight") for name in "qkvo"]
    b = [file.read(f"{prefix}{name}_proj.lora_B.weight") for name in "qkvo"]
    assert all(torch.equal(one, masters["layers.1.qkv.a"]) for one in a[:3])
    assert [len(one) for one in b] == [64, 32, 32, 64]
    assert torch.equal(torch.cat(b[:3]), masters["layers.1.qkv.b"])
    assert torch.equal(a[3], masters["layers.1.proj.a"]) and torch.equal(b[3], masters["layers.1.proj.b"])
    described = json.loads((folder / "adapter_config.json").read_text())
    assert (described["r"], described["lora_alpha"], described["lora_dropout"]) == (4, 8, 0.1)


def test_places_where_nothing_is_saved(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "adapter_model.safetensors").touch()
    for folder, told in ((tmp_path / "file", "cannot write in"), (tmp_path, "holds an adapter already, take another")):
        with pytest.raises(ValueError, match=f"^--save-adapter .*{told}"):
            adapters.require_place(folder)
    with pytest.raises(ValueError, match="^--save-adapter .*cannot write"):
        adapters.save(tmp_path / "file", {}, replace(CONFIG, layers=1))
    adapters.require_place(tmp_path / "new")


@pytest.mark.slow
def test_an_adapter_trained_here_has_the_same_loss_in_peft(tmp_path):
    """40 steps at tiny on a checkpoint, without dropout; then four windows here in bf16, and in PEFT in FP32.

    At a fifth of tiny's learning rate: at 1e-2 gradient norms jump from 1 to 40, and what comes of it is chance.
    """
    peft = pytest.importorskip("peft", reason="./setup.sh peft installs peft and transformers")
    transformers = pytest.importorskip("transformers", reason="./setup.sh peft installs peft and transformers")
    tensors = {name: tensor * 0.05 if tensor.ndim == 2 else 1 + tensor * 0.1 for name, tensor in weights(TINY).items()}
    folders = {name: str(tmp_path / name) for name in ("checkpoint", "save_adapter")}
    write_checkpoint(tmp_path / "checkpoint", TINY, tensors)
    trained = State(replace(TINY, precision="bf16", lr=2e-3, dropout=0.0, batches=32, **folders), CPU, "handwritten")

    def mean_loss():
        losses = []
        for index in range(4):
            trained.load_window(index)
            hidden = trained.stack.embed()
            for layer in range(TINY.layers):
                hidden = trained.stack.forward(layer, *hidden)
            trained.stack.compute_loss(*hidden)
            losses.append(float(trained.stack.loss))
        return sum(losses) / 4

    before = mean_loss()
    follow_eager(trained, 40)
    trained.finish()
    ours = mean_loss()

    base = transformers.LlamaForCausalLM.from_pretrained(folders["checkpoint"], dtype=torch.float32)
    adapted = peft.PeftModel.from_pretrained(base, folders["save_adapter"]).eval()
    losses = []
    for index in range(4):
        window = trained.windows.batch(index)
        with torch.no_grad():
            each = F.cross_entropy(adapted(window.tokens[None]).logits[0], window.targets, reduction="none")
        losses.append(float((each * window.loss_mask).sum() / window.loss_mask.sum()))
    assert ours < before - 0.5
    assert sum(losses) / len(losses) == pytest.approx(ours, rel=5e-3)
