"""Weights of a Hugging Face folder (config.json, *.safetensors) of Llama, Qwen3-MoE or GPT-OSS, by a table of names.

    checkpoint = open_checkpoint(folder, config)         names, shapes and sizes of all files checked, nothing read
    qkv = checkpoint.read("qkv", layer=0)                one of our tensors, on the CPU

Names and shapes: transformers 5.23, models/llama (Llama 2 and 3 alike), qwen3_moe and gpt_oss. Rows of q and k keep
their order, that of rotate_half: element i of a head turns with element i + head_dim / 2. Qwen3 stores a matrix for
each expert and projection, [outputs, inputs]; GPT-OSS stores all experts together, [experts, inputs, outputs], with the
columns of gate and up taking turns.

Every mistake is a ValueError in one line that begins with --checkpoint.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from common.data import safetensors_file
from common.data.limits import MAX_HEADER_BYTES, open_regular
from graph_worth.text import printable

FLAG = "--checkpoint"
_READABLE = ("BF16", "F16", "F32")
_MODEL_TYPES = {"llama": "llama", "qwen3": "qwen3_moe", "gpt_oss": "gpt_oss"}
# Features in config.json that are built here. A field that is missing says the same.
_BUILT: dict[str, dict[str, Any]] = {
    "llama": {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
    "qwen3": {
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "use_sliding_window": False,
    },
    "gpt_oss": {"attention_bias": True, "tie_word_embeddings": False, "swiglu_limit": 7.0, "swiglu_alpha": 1.702},
}
_LAYER_TYPES, _IN_TURNS = ("sliding_attention", "full_attention"), "in turns, sliding first"
_ENDS = {"embedding": "model.embed_tokens.weight", "final_norm": "model.norm.weight", "head": "lm_head.weight"}
# Tensors that ranks split by their inputs, and those that each has whole; all others are split by their outputs.
_BY_INPUTS, _WHOLE = ("proj", "fc2"), ("norm1", "norm2", "final_norm")


class Checkpoint:
    """Tensors of a folder that fits a config. Made by `open_checkpoint`.

    tied: the head is the embedding. notes: for people, on layers that are left out.
    """

    def __init__(self, family: str, config, files: dict, tied: bool, notes: list[str], shard: tuple[int, int]):
        self._family, self._config, self._files, self._shard = family, config, files, shard
        self.tied, self.notes = tied, notes

    def read(self, name: str, layer: int | None = None) -> torch.Tensor:
        """Return one of our tensors (`parts_of`), new and in bf16: those of the file below each other.

        qkv has the rows of q, then k, then v; fc1 the gate's, then up's. Where ranks share each matrix, only this
        rank's share is read: its rows of all matrices that are stacked, its columns of proj and fc2, and whole norms.
        ValueError where a file has changed since it was opened.
        """
        name = "embedding" if name == "head" and self.tied else name
        dim, (rank, ranks) = int(name in _BY_INPUTS), (0, 1) if name in _WHOLE else self._shard
        parts = {}
        for theirs, shape in parts_of(self._family, self._config, name, layer).items():
            size = shape[dim] // ranks
            share = slice(rank * size, (rank + 1) * size)
            parts[theirs] = (*[slice(None)] * dim, share)
        tensors = [self._files[theirs].read(theirs, part).bfloat16() for theirs, part in parts.items()]
        return torch.cat(tensors) if len(tensors) > 1 else tensors[0]

    def read_into(self, name: str, layer: int | None, target: torch.Tensor) -> None:
        """Fill a tensor of a model with experts: w1 [experts, hidden, 2 ffn], gate first; w2 [experts, ffn, hidden]."""
        tensors = [self._files[theirs].read(theirs) for theirs in parts_of(self._family, self._config, name, layer)]
        if name == "w1" and self._family == "qwen3":
            for expert, gate, up in zip(target, tensors[::2], tensors[1::2], strict=True):
                expert.copy_(torch.cat((gate, up)).t())
        elif name == "w2" and self._family == "qwen3":
            for expert, tensor in zip(target, tensors, strict=True):
                expert.copy_(tensor.t())
        elif name in ("w1", "bias1"):
            target.copy_(torch.cat((tensors[0][..., ::2], tensors[0][..., 1::2]), -1))
        else:
            target.copy_(torch.cat(tensors))


def parts_of(family: str, config, name: str, layer: int | None) -> dict[str, tuple[int, ...]]:
    """Hugging Face's name -> shape of the tensors that one of ours is made of, in order. layer None: of an end."""
    if layer is None:
        return {_ENDS[name]: (config.hidden,) if name == "final_norm" else (config.vocab, config.hidden)}
    return {f"model.layers.{layer}.{theirs}": shape for theirs, shape in _of_layer(family, config)[name].items()}


def _of_layer(family, config) -> dict[str, dict[str, tuple[int, ...]]]:
    """Ours -> {Hugging Face's: shape} of a layer."""
    c, q, kv = config, config.heads * config.head_dim, config.kv_heads * config.head_dim
    qkv = list(zip("qkv", (q, kv, kv), strict=True))
    table: dict[str, dict[str, tuple[int, ...]]] = {
        "norm1": {"input_layernorm.weight": (c.hidden,)},
        "norm2": {"post_attention_layernorm.weight": (c.hidden,)},
        "qkv": {f"self_attn.{name}_proj.weight": (rows, c.hidden) for name, rows in qkv},
        "proj": {"self_attn.o_proj.weight": (c.hidden, q)},
    }
    if family == "llama":
        table["fc1"] = {f"mlp.{name}_proj.weight": (c.ffn, c.hidden) for name in ("gate", "up")}
        table["fc2"] = {"mlp.down_proj.weight": (c.hidden, c.ffn)}
    elif family == "qwen3":
        experts = [f"mlp.experts.{expert}" for expert in range(c.experts)]
        table["q_norm"] = {"self_attn.q_norm.weight": (c.head_dim,)}
        table["k_norm"] = {"self_attn.k_norm.weight": (c.head_dim,)}
        table["router"] = {"mlp.gate.weight": (c.experts, c.hidden)}
        table["w1"] = {f"{e}.{name}_proj.weight": (c.ffn, c.hidden) for e in experts for name in ("gate", "up")}
        table["w2"] = {f"{e}.down_proj.weight": (c.hidden, c.ffn) for e in experts}
    else:
        table["qkv_bias"] = {f"self_attn.{name}_proj.bias": (rows,) for name, rows in qkv}
        table["proj_bias"] = {"self_attn.o_proj.bias": (c.hidden,)}
        table["sinks"] = {"self_attn.sinks": (c.heads,)}
        table["router"] = {"mlp.router.weight": (c.experts, c.hidden)}
        table["router_bias"] = {"mlp.router.bias": (c.experts,)}
        table["w1"] = {"mlp.experts.gate_up_proj": (c.experts, c.hidden, 2 * c.ffn)}
        table["bias1"] = {"mlp.experts.gate_up_proj_bias": (c.experts, 2 * c.ffn)}
        table["w2"] = {"mlp.experts.down_proj": (c.experts, c.ffn, c.hidden)}
        table["bias2"] = {"mlp.experts.down_proj_bias": (c.experts, c.hidden)}
    return table


def open_checkpoint(
    folder, config, family: str = "llama", rope: dict | None = None, shard: tuple[int, int] = (0, 1)
) -> Checkpoint:
    """Check a checkpoint against a config: config.json, names and shapes of all tensors, byte ranges of all files.

    A checkpoint of more layers than the config takes is read up to the config's.

    Args:
        folder: The checkpoint's.
        config: Its fields are the sizes of `_sizes`.
        family: llama, qwen3 or gpt_oss.
        rope: rope_type and the numbers of its scaling, by their names in config.json; None: without any.
        shard: (rank, ranks), where ranks share each matrix.

    Raises:
        ValueError: In one line, which names --checkpoint, what does not fit, and the flags that would.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{FLAG} {folder}: {'not a folder' if folder.exists() else 'no such folder'}")
    described = _read_json(folder / "config.json")
    _require_features(folder, described, family, rope or {"rope_type": "default"})
    notes = _require_sizes(folder, config, lambda: _sizes(described, family))
    tied = bool(described.get("tie_word_embeddings", False))
    # Files of tied models often hold the head as well; it is the same tensor.
    keys: list[tuple[str, int | None]] = [(name, None) for name in _ENDS if not (tied and name == "head")]
    keys += [(name, layer) for layer in range(config.layers) for name in _of_layer(family, config)]
    shapes: dict[str, tuple[int, ...]] = {}
    for name, layer in keys:
        shapes |= parts_of(family, config, name, layer)
    files = _files(folder)
    _require_tensors(folder, files, shapes)
    return Checkpoint(family, config, {name: files[name] for name in shapes}, tied, notes, shard)


def _read_json(path) -> dict:
    with open_regular(path, FLAG, MAX_HEADER_BYTES) as file:
        text = file.read(MAX_HEADER_BYTES)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(f"{FLAG}: {printable(path)} is damaged, it is not JSON") from None
    if not isinstance(content, dict):
        raise ValueError(f"{FLAG}: {printable(path)} is damaged, it is not a JSON object")
    return content


def _require_features(folder, described, family, rope):
    """Raise ValueError where config.json has a feature that the model here has not."""
    described_rope = described.get("rope_parameters") or described.get("rope_scaling") or {}
    if not isinstance(described_rope, dict):
        raise ValueError(f"{FLAG} {folder}: config.json is damaged, its rope_parameters are no object")
    wanted = {
        "model_type": (described.get("model_type"), _MODEL_TYPES[family]),
        "quantization_config": (described.get("quantization_config"), None),
        "rope_type": (described_rope.get("rope_type", described_rope.get("type", "default")), rope["rope_type"]),
    }
    wanted |= {name: (described.get(name, value), value) for name, value in _BUILT[family].items()}
    wanted |= {name: (described_rope.get(name), value) for name, value in rope.items() if name != "rope_type"}
    if family == "gpt_oss":
        kinds = described.get("layer_types") or []
        in_turns = isinstance(kinds, list) and all(kind == _LAYER_TYPES[i % 2] for i, kind in enumerate(kinds))
        wanted["layer_types"] = (_IN_TURNS if in_turns else "in another order", _IN_TURNS)
    for name, (value, built) in wanted.items():
        if value != built:
            value = printable(str(value.get("quant_method", value) if isinstance(value, dict) else value))
            raise ValueError(
                f"{FLAG} {folder}: config.json has {name} {value}, only {built} is built: take another checkpoint"
            )


def _sizes(described, family):
    """Sizes in config.json by the names of a config's fields."""
    heads = described["num_attention_heads"]
    sizes = {
        "hidden": described["hidden_size"],
        "heads": heads,
        "kv_heads": described.get("num_key_value_heads") or heads,
        "head_dim": described.get("head_dim") or described["hidden_size"] // heads,
        "ffn": described["moe_intermediate_size" if family == "qwen3" else "intermediate_size"],
        "vocab": described["vocab_size"],
        # In rope_parameters since transformers 5.
        "rope_theta": (described | (described.get("rope_parameters") or {})).get("rope_theta", 10000.0),
        "norm_eps": described.get("rms_norm_eps", 1e-6),
        "layers": described["num_hidden_layers"],
    }
    if family != "llama":
        sizes["experts"] = described["num_local_experts" if "num_local_experts" in described else "num_experts"]
        sizes["top_k"] = described["num_experts_per_tok"]
        sizes["window"] = described["sliding_window"] if family == "gpt_oss" else 0
    return sizes


def _require_sizes(folder: Path, config, sizes: Callable[[], dict]) -> list[str]:
    """Check sizes against a config; return a note on layers left out."""
    try:
        values = sizes()
        layers = values.pop("layers")
        differing = {name: value for name, value in values.items() if not math.isclose(value, getattr(config, name))}
        if layers < config.layers:
            differing["layers"] = layers
    except KeyError as error:
        raise ValueError(f"{FLAG} {folder}: config.json has no {error.args[0]}") from None
    except (TypeError, ZeroDivisionError, OverflowError):
        raise ValueError(f"{FLAG} {folder}: config.json has sizes that are no numbers from 1 up") from None
    if differing:
        flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in differing.items())
        ours = ", ".join(f"{name} {getattr(config, name)}" for name in differing)
        raise ValueError(f"{FLAG} {folder}: does not fit {ours}: take {flags}")
    return [f"{FLAG}: the first {config.layers} of {layers} layers"] if layers > config.layers else []


def _files(folder: Path) -> dict[str, safetensors_file.File]:
    """Name -> the opened file that holds the tensor, from the index or the single file."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if not index.is_file():
        if not single.is_file():
            raise ValueError(f"{FLAG} {folder}: neither model.safetensors.index.json nor model.safetensors")
        file = safetensors_file.open_file(single, FLAG)
        return dict.fromkeys(file.entries, file)
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ValueError(f"{FLAG}: {index} is damaged, its weight_map does not name files")
    for name in weight_map.values():
        if Path(name).name != name:
            raise ValueError(f"{FLAG}: {index} names {printable(name[:100])}, which is no file of its folder")
    files = {name: safetensors_file.open_file(folder / name, FLAG) for name in sorted(set(weight_map.values()))}
    for name, file in weight_map.items():
        if name not in files[file].entries:
            raise ValueError(f"{FLAG}: {index} looks for {name} in {file}, which does not hold it")
    return {name: files[file] for name, file in weight_map.items()}


def _require_tensors(folder: Path, files: dict[str, safetensors_file.File], shapes: dict) -> None:
    """Check that the files hold tensors of these shapes, by name, in 16 or 32 bits."""
    missing = [name for name in shapes if name not in files]
    if missing:
        more = f" and {len(missing) - 1:,} more" if len(missing) > 1 else ""
        raise ValueError(f"{FLAG} {folder}: holds no tensor {missing[0]}{more}")
    for name, shape in shapes.items():
        entry = files[name].entries[name]
        if entry.shape != shape:
            raise ValueError(f"{FLAG} {folder}: {name} has the shape {entry.shape}, the flags say {shape}")
        if entry.dtype not in _READABLE:
            raise ValueError(f"{FLAG} {folder}: {name} has dtype {entry.dtype}, not {', '.join(_READABLE)}")
