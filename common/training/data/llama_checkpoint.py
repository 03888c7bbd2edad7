"""Weights of a Hugging Face Llama folder (config.json, *.safetensors), one layer at a time.

    checkpoint = open_checkpoint(config.checkpoint, config)     names, shapes, sizes of all files checked, nothing read
    weights = checkpoint.layer(0)                               {"qkv", "proj", "fc1", "fc2", "norm1", "norm2"}, bf16

Names and shapes: transformers, models/llama/modeling_llama.py (Llama 2 and 3 alike). Rows of q and k keep their order,
that of rotate_half: element i of a head turns with element i + head_dim / 2.
"""

from pathlib import Path
from typing import Protocol

import torch

from common.text import printable
from common.training.data import hugging_face
from common.training.data.hugging_face import FLAG


class Llama(Protocol):
    """The fields of a config that describe its model. ffn: width of the gate and of the up projection, each."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    rope_theta: float
    norm_eps: float


class Checkpoint:
    """Tensors of a folder that fits a config. Made by `open_checkpoint`; methods return new bf16 CPU tensors.

    tied: the head is the embedding. notes: for people, on layers that are left out. shard: (rank, ranks), where ranks
    share each matrix: sizes of outputs and inputs below are then divided by their number, and only this rank's share is
    read. A method raises ValueError in one line where a file has changed since it was opened.
    """

    def __init__(self, config: Llama, files: dict, tied: bool, notes: list[str], shard: tuple[int, int] = (0, 1)):
        self._config, self._files, self.tied, self.notes, self._shard = config, files, tied, notes, shard

    def layer(self, index: int) -> dict[str, torch.Tensor]:
        """The weights of layer `index`.

        qkv [(heads + 2 kv_heads) head_dim, hidden], rows of q, then k, then v; proj [hidden, heads head_dim];
        fc1 [2 ffn, hidden], rows of gate, then up; fc2 [hidden, ffn]; norm1, norm2 [hidden]. Of several ranks each has
        its rows of all matrices that are stacked in qkv and fc1, its columns of proj and fc2, and whole norms.
        """
        weights = {}
        for ours, shapes in _layer_shapes(self._config, index).items():
            weights[ours] = self._read(shapes, {"proj": 1, "fc2": 1, "norm1": None, "norm2": None}.get(ours, 0))
        return weights

    def embedding(self) -> torch.Tensor:
        """[vocab, hidden]."""
        return self._read({"model.embed_tokens.weight": (self._config.vocab, self._config.hidden)}, 0)

    def head(self) -> torch.Tensor:
        """[vocab, hidden]; the embedding where they are tied."""
        name = "model.embed_tokens.weight" if self.tied else "lm_head.weight"
        return self._read({name: (self._config.vocab, self._config.hidden)}, 0)

    def final_norm(self) -> torch.Tensor:
        """[hidden]."""
        return self._read({"model.norm.weight": (self._config.hidden,)}, None)

    def _read(self, shapes, dim):
        """This rank's parts of tensors {name: shape}, split along `dim` (None: whole), below each other."""
        rank, ranks = self._shard if dim is not None else (0, 1)
        parts = {name: [slice(size) for size in shape] for name, shape in shapes.items()}
        for name, part in parts.items():
            size = shapes[name][dim or 0] // ranks
            part[dim or 0] = slice(rank * size, (rank + 1) * size)
        sizes = [[each.stop - (each.start or 0) for each in part] for part in parts.values()]
        out = torch.empty(sum(rows for rows, *_ in sizes), *sizes[0][1:], dtype=torch.bfloat16)
        for (name, part), place in zip(parts.items(), out.split([rows for rows, *_ in sizes]), strict=True):
            self._files[name].read_into(name, place, tuple(part))
        return out


def open_checkpoint(
    folder, config: Llama, rope_scaling: dict | None = None, shard: tuple[int, int] = (0, 1)
) -> Checkpoint:
    """Check a checkpoint against the config: config.json, names and shapes of all tensors, byte ranges of all files.

    A checkpoint of more layers than the config takes is read up to the config's. rope_scaling: Llama 3.1's, where the
    model has it. shard: as in Checkpoint. ValueError in one line that names --checkpoint, what does not fit, and the
    flags that would.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{FLAG} {folder}: {'not a folder' if folder.exists() else 'no such folder'}")
    described = hugging_face.read_json(folder / "config.json")
    _require_llama(folder, described, rope_scaling)
    notes = hugging_face.require_sizes(folder, config, lambda: _sizes(described))
    entries = hugging_face.all_entries(folder)
    shapes = {"model.embed_tokens.weight": (config.vocab, config.hidden), "model.norm.weight": (config.hidden,)}
    # Files of tied models often hold the head as well; it is the same tensor.
    tied = bool(described.get("tie_word_embeddings", False))
    if not tied:
        shapes["lm_head.weight"] = (config.vocab, config.hidden)
    for index in range(config.layers):
        for parts in _layer_shapes(config, index).values():
            shapes.update(parts)
    hugging_face.require_tensors(folder, entries, shapes)
    return Checkpoint(config, {name: entries[name] for name in shapes}, tied, notes, shard)


def _layer_shapes(config, index):
    """Ours -> {Llama's name: shape} of the parts that are stacked by rows, in this order."""
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    hidden, ffn = config.hidden, config.ffn
    modules: dict[str, dict[str, tuple[int, ...]]] = {
        "qkv": {"self_attn.q_proj": (q, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden)},
        "proj": {"self_attn.o_proj": (hidden, q)},
        "fc1": {"mlp.gate_proj": (ffn, hidden), "mlp.up_proj": (ffn, hidden)},
        "fc2": {"mlp.down_proj": (hidden, ffn)},
        "norm1": {"input_layernorm": (hidden,)},
        "norm2": {"post_attention_layernorm": (hidden,)},
    }
    return {
        ours: {f"model.layers.{index}.{module}.weight": shape for module, shape in parts.items()}
        for ours, parts in modules.items()
    }


def _require_llama(folder, described, rope_scaling):
    """Raise ValueError where config.json has a feature of Llamas that the model here has not."""
    rope = described.get("rope_parameters") or described.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise ValueError(f"{FLAG} {folder}: config.json is damaged, its rope_parameters are no object")
    kind = rope.get("rope_type", rope.get("type", "default"))
    found = {
        "model_type": (described.get("model_type"), ("llama",)),
        "hidden_act": (described.get("hidden_act", "silu"), ("silu",)),
        "attention_bias": (described.get("attention_bias", False), (False,)),
        "mlp_bias": (described.get("mlp_bias", False), (False,)),
        "quantization_config": (described.get("quantization_config"), (None,)),
        "rope_type": (kind, ("llama3",) if rope_scaling else ("default",)),
    }
    for name, value in (rope_scaling or {}).items():
        found[name] = (rope.get(name), (value,))
    for name, (value, allowed) in found.items():
        if value not in allowed:
            value = printable(str(value.get("quant_method", value) if isinstance(value, dict) else value))
            raise ValueError(
                f"{FLAG} {folder}: config.json has {name} {value}, only {allowed[0]} is built: take another checkpoint"
            )


def _sizes(described):
    heads = described["num_attention_heads"]
    return {
        "hidden": described["hidden_size"],
        "heads": heads,
        "kv_heads": described.get("num_key_value_heads") or heads,
        "head_dim": described.get("head_dim") or described["hidden_size"] // heads,
        "ffn": described["intermediate_size"],
        "vocab": described["vocab_size"],
        # In rope_parameters since transformers 5.
        "rope_theta": (described | (described.get("rope_parameters") or {})).get("rope_theta", 10000.0),
        "norm_eps": described.get("rms_norm_eps", 1e-6),
        "layers": described["num_hidden_layers"],
    }
