"""Weights of a Hugging Face folder of Qwen3-MoE or GPT-OSS in bf16 (config.json, *.safetensors), one tensor at a time.

    checkpoint = open_checkpoint(config)        names, shapes and sizes of all files checked, nothing read
    checkpoint.read_into("w1", 0, tensor)       layer 0's first expert matrices, gate and up side by side

Names and shapes: transformers 5.23, models/qwen3_moe and models/gpt_oss. Qwen3 stores a matrix for each expert and
projection, [outputs, inputs]; GPT-OSS stores all experts together, [experts, inputs, outputs], with the columns of gate
and up taking turns.
"""

from pathlib import Path

import torch

from common.text import printable
from common.training.data import hugging_face
from common.training.data.hugging_face import FLAG
from moe.config import Config
from moe.model import YARN


class Checkpoint:
    """The opened folder. files: name -> file that holds it. notes: for people, on layers that are left out."""

    def __init__(self, config: Config, files: dict, notes: list[str]):
        self._config, self._files, self.notes = config, files, notes

    def read_into(self, name: str, layer: int | None, target: torch.Tensor) -> None:
        """Fill one of our parameters, or its master. ValueError where a file has changed since it was opened."""
        shapes, c = parts_of(self._config, name, layer), self._config
        tensors = [self._read(each, shape) for each, shape in shapes.items()]
        if name == "w1" and c.family == "qwen3":
            gates, ups = tensors[::2], tensors[1::2]
            for own, gate, up in zip(target, gates, ups, strict=True):
                own.copy_(torch.cat((gate, up)).t())
        elif name == "w2" and c.family == "qwen3":
            for own, tensor in zip(target, tensors, strict=True):
                own.copy_(tensor.t())
        elif name in ("w1", "bias1"):
            (both,) = tensors
            target.copy_(torch.cat((both[..., ::2], both[..., 1::2]), -1))
        else:
            target.copy_(torch.cat(tensors))

    def _read(self, name, shape):
        out = torch.empty(shape)
        self._files[name].read_into(name, out)
        return out


def parts_of(config: Config, name: str, layer: int | None) -> dict[str, tuple[int, ...]]:
    """Hugging Face's name -> shape of the tensors that one of our parameters is made of, in order."""
    c = config
    q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
    ends = {"embedding": "model.embed_tokens.weight", "final_norm": "model.norm.weight", "head": "lm_head.weight"}
    if layer is None:
        return {ends[name]: (c.hidden,) if name == "final_norm" else (c.vocab, c.hidden)}
    router = "gate" if c.family == "qwen3" else "router"
    of_layer: dict[str, dict[str, tuple[int, ...]]] = {
        "norm1": {"input_layernorm.weight": (c.hidden,)},
        "norm2": {"post_attention_layernorm.weight": (c.hidden,)},
        "qkv": {
            f"self_attn.{each}_proj.weight": (rows, c.hidden) for each, rows in zip("qkv", (q, kv, kv), strict=True)
        },
        "qkv_bias": {f"self_attn.{each}_proj.bias": (rows,) for each, rows in zip("qkv", (q, kv, kv), strict=True)},
        "proj": {"self_attn.o_proj.weight": (c.hidden, q)},
        "proj_bias": {"self_attn.o_proj.bias": (c.hidden,)},
        "q_norm": {"self_attn.q_norm.weight": (c.head_dim,)},
        "k_norm": {"self_attn.k_norm.weight": (c.head_dim,)},
        "sinks": {"self_attn.sinks": (c.heads,)},
        "router": {f"mlp.{router}.weight": (c.experts, c.hidden)},
        "router_bias": {"mlp.router.bias": (c.experts,)},
    }
    if c.family == "qwen3":
        experts = [f"mlp.experts.{expert}" for expert in range(c.experts)]
        of_layer["w1"] = {f"{e}.{each}_proj.weight": (c.ffn, c.hidden) for e in experts for each in ("gate", "up")}
        of_layer["w2"] = {f"{e}.down_proj.weight": (c.hidden, c.ffn) for e in experts}
    else:
        of_layer["w1"] = {"mlp.experts.gate_up_proj": (c.experts, c.hidden, 2 * c.ffn)}
        of_layer["bias1"] = {"mlp.experts.gate_up_proj_bias": (c.experts, 2 * c.ffn)}
        of_layer["w2"] = {"mlp.experts.down_proj": (c.experts, c.ffn, c.hidden)}
        of_layer["bias2"] = {"mlp.experts.down_proj_bias": (c.experts, c.hidden)}
    return {f"model.layers.{layer}.{theirs}": shape for theirs, shape in of_layer[name].items()}


def open_checkpoint(config: Config) -> Checkpoint:
    """The opened folder of --checkpoint. A checkpoint of more layers than the config takes is read up to the config's.

    ValueError in one line that names --checkpoint, what does not fit, and the flags that would.
    """
    folder = Path(config.checkpoint)
    if not folder.is_dir():
        raise ValueError(f"{FLAG} {folder}: {'not a folder' if folder.exists() else 'no such folder'}")
    described = hugging_face.read_json(folder / "config.json")
    _require_features(folder, described, config)
    notes = hugging_face.require_sizes(folder, config, lambda: _sizes(described, config.family == "qwen3"))
    names = ["norm1", "norm2", "qkv", "proj", "router", "w1", "w2"]
    names += ["q_norm", "k_norm"] if config.family == "qwen3" else []
    names += ["qkv_bias", "proj_bias", "sinks", "router_bias", "bias1", "bias2"] if config.family == "gpt_oss" else []
    shapes: dict[str, tuple[int, ...]] = {}
    for name in ("embedding", "final_norm", "head"):
        shapes |= parts_of(config, name, None)
    for layer in range(config.layers):
        for name in names:
            shapes |= parts_of(config, name, layer)
    entries = hugging_face.all_entries(folder)
    hugging_face.require_tensors(folder, entries, shapes)
    return Checkpoint(config, {name: entries[name] for name in shapes}, notes)


def _require_features(folder, described, config):
    """Raise ValueError where config.json has a feature that the model here has not."""
    rope = described.get("rope_parameters") or described.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise ValueError(f"{FLAG} {folder}: config.json is damaged, its rope_parameters are no object")
    is_qwen3 = config.family == "qwen3"
    wanted = {
        "model_type": (described.get("model_type"), "qwen3_moe" if is_qwen3 else "gpt_oss"),
        "quantization_config": (described.get("quantization_config"), None),
        "tie_word_embeddings": (described.get("tie_word_embeddings", False), False),
        "attention_bias": (described.get("attention_bias", not is_qwen3), not is_qwen3),
        "rope_type": (rope.get("rope_type", rope.get("type", "default")), "default" if is_qwen3 else "yarn"),
    }
    if is_qwen3:
        wanted |= {name: (described.get(name, value), value) for name, value in _QWEN3.items()}
    else:
        wanted |= {name: (rope.get(name, value), value) for name, value in YARN.items()}
        wanted |= {name: (described.get(name, value), value) for name, value in _GPT_OSS.items()}
        # transformers rounds the bounds of YaRN's ramp unless the folder says otherwise.
        wanted["truncate"] = (rope.get("truncate", True), False)
        kinds = described.get("layer_types") or []
        in_turns = isinstance(kinds, list) and all(kind == _LAYER_TYPES[i % 2] for i, kind in enumerate(kinds))
        wanted["layer_types"] = (_IN_TURNS if in_turns else "in another order", _IN_TURNS)
    for name, (value, built) in wanted.items():
        if value != built:
            value = printable(str(value.get("quant_method", value) if isinstance(value, dict) else value))
            raise ValueError(
                f"{FLAG} {folder}: config.json has {name} {value}, --family {config.family} has {built}: take another "
                "checkpoint or --family"
            )


_QWEN3 = {"hidden_act": "silu", "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
_QWEN3 |= {"use_sliding_window": False}
_GPT_OSS = {"swiglu_limit": 7.0, "swiglu_alpha": 1.702}
_LAYER_TYPES, _IN_TURNS = ("sliding_attention", "full_attention"), "in turns, sliding first"


def _sizes(described, is_qwen3):
    rope = described.get("rope_parameters") or {}
    return {
        "hidden": described["hidden_size"],
        "heads": described["num_attention_heads"],
        "kv_heads": described["num_key_value_heads"],
        "head_dim": described["head_dim"],
        "experts": described["num_local_experts"] if "num_local_experts" in described else described["num_experts"],
        "top_k": described["num_experts_per_tok"],
        "ffn": described["moe_intermediate_size" if is_qwen3 else "intermediate_size"],
        "vocab": described["vocab_size"],
        "window": 0 if is_qwen3 else described["sliding_window"],
        # In rope_parameters since transformers 5.
        "rope_theta": rope["rope_theta"] if "rope_theta" in rope else described["rope_theta"],
        "norm_eps": described["rms_norm_eps"],
        "layers": described["num_hidden_layers"],
    }
