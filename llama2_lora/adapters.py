"""Adapters in PEFT's format, and what resuming needs beside them.

    save(folder, masters, config, state, step)       adapter_config.json, adapter_model.safetensors, training state
    masters = load(folder, config)
    state, step = load_state(folder)

masters: FP32 by name, layers.<i>.qkv.a [rank, hidden], layers.<i>.qkv.b [(heads + 2 kv_heads) head_dim, rank],
layers.<i>.proj.a [rank, heads head_dim], layers.<i>.proj.b [hidden, rank].

PEFT (0.21) adapts q_proj, k_proj and v_proj each with an A of its own, where the fused projection here has one. So the
three are saved with equal A and the rows of B that are theirs, and computed by PEFT they give what is computed here.
The other way round only adapters fit whose three A are equal. While training, PEFT would drop other elements of the
input for each of the three and move their A apart.
"""

import json
import math
import secrets
from pathlib import Path

import torch

from common.safetensors_file import File, open_file, write_atomically, write_file
from llama2_lora.config import Config

FLAG, SAVE_FLAG = "--adapter", "--save-adapter"
CONFIG_FILE, MODEL_FILE = "adapter_config.json", "adapter_model.safetensors"
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
# Fields of PEFT's LoraConfig that change what an adapter computes: each is absent or one of these. What adds tensors
# shows by their names, too.
_PLAIN = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "fan_in_fan_out": (False,),
    "use_rslora": (False,),
    "use_dora": (False,),
    "use_qalora": (False,),
    "lora_bias": (False,),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "modules_to_save": (None, []),
    "layers_to_transform": (None,),
    "layer_replication": (None,),
    "alora_invocation_tokens": (None,),
}


def save(folder, masters: dict[str, torch.Tensor], config: Config, state: dict[str, torch.Tensor], step: int) -> None:
    """Write the adapter, and beside it tensors and step count of the optimizer for resuming.

    state: tensors by name, as `load_state` gives them back. The folder is made. An adapter that is there is replaced in
    one move, together with its training state: adapter_model.safetensors names the file that belongs to it, which is
    written before. ValueError that names --save-adapter where the folder holds an adapter of another kind.
    """
    folder = Path(folder)
    described = _describe(config)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _require_same_kind(folder, described)
        state_file = f"training_state-{secrets.token_hex(4)}.safetensors"
        write_file(folder / state_file, state, {"step": str(step)})
        write_atomically(folder / CONFIG_FILE, lambda file: file.write(json.dumps(described, indent=2).encode()))
        metadata = {"format": "pt", "training_state": state_file}
        write_file(folder / MODEL_FILE, _to_peft(masters, config), metadata)
        for path in folder.glob("training_state-*.safetensors"):
            if path.name != state_file:
                path.unlink()
    except OSError as error:
        raise ValueError(f"{SAVE_FLAG} {folder}: cannot write ({error.strerror})") from None


def load(folder, config: Config) -> dict[str, torch.Tensor]:
    """The masters of an adapter in PEFT's format, new FP32 CPU tensors by name.

    ValueError in one line that names --adapter: no adapter, another rank, alpha or target modules, a kind of LoRA that
    is not built, other layers or shapes, and A matrices of q, k and v that differ.
    """
    folder = Path(folder)
    _require_fit(folder, _read_config(folder, FLAG), config)
    file = open_file(folder / MODEL_FILE, FLAG)
    shapes = {name: shape for index in range(config.layers) for name, shape in _peft_shapes(config, index).items()}
    for name in [*shapes, *file.entries]:
        if name not in file.entries:
            raise ValueError(f"{FLAG} {folder}: holds no {name}, --layers {config.layers} takes it")
        if name not in shapes:
            raise ValueError(f"{FLAG} {folder}: holds {name}, which has no place in --layers {config.layers}")
        if file.entries[name].shape != shapes[name] or file.entries[name].dtype not in ("F32", "F16", "BF16"):
            entry = file.entries[name]
            raise ValueError(
                f"{FLAG} {folder}: {name} is {entry.dtype} of the shape {entry.shape}, the flags say {shapes[name]}"
            )
    masters = {}
    for index in range(config.layers):
        masters.update(_from_peft(file, config, index))
    return masters


def load_state(folder) -> tuple[dict[str, torch.Tensor], int]:
    """(tensors of the optimizer by name, steps done) as `save` wrote them. ValueError that names --adapter."""
    folder = Path(folder)
    name = open_file(folder / MODEL_FILE, FLAG).metadata.get("training_state")
    if name is None:
        raise ValueError(f"{FLAG} {folder}: has no training state to resume from, it was not saved by this program")
    file = open_file(folder / Path(name).name, FLAG)
    return {tensor: file.read(tensor) for tensor in file.entries}, int(file.metadata["step"])


def has_state(folder) -> bool:
    """Whether `load_state` finds a training state; ValueError where there is no adapter."""
    return "training_state" in open_file(Path(folder) / MODEL_FILE, FLAG).metadata


# ------------------------------------------------------------------------------------------------
# adapter_config.json


def _describe(config):
    alpha = int(config.alpha) if config.alpha == int(config.alpha) else config.alpha
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": config.checkpoint or None,
        "inference_mode": True,
        "r": config.rank,
        "lora_alpha": alpha,
        "lora_dropout": config.dropout,
        "target_modules": list(TARGETS),
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
    }


def _read_config(folder, flag):
    if not folder.is_dir():
        raise ValueError(f"{flag} {folder}: {'not a folder' if folder.exists() else 'no such folder'}")
    try:
        described = json.loads((folder / CONFIG_FILE).read_text())
        if not isinstance(described, dict):
            raise ValueError("no JSON object")
    except OSError as error:
        raise ValueError(f"{flag} {folder}: no adapter in PEFT's format, {CONFIG_FILE}: {error.strerror}") from None
    except ValueError:
        raise ValueError(f"{flag} {folder}: {CONFIG_FILE} is damaged, it is no JSON object") from None
    return described


def _require_same_kind(folder, described):
    """A cut between the two files of one save must not leave the config of one adapter beside another's weights."""
    if not (folder / MODEL_FILE).exists():
        return
    before = _read_config(folder, SAVE_FLAG)
    for name in ("r", "lora_alpha", "peft_type"):
        if before.get(name) != described[name]:
            raise ValueError(
                f"{SAVE_FLAG} {folder}: holds an adapter of {name} {before.get(name)}, this one has {described[name]}: "
                f"take another folder"
            )


def _require_fit(folder, described, config):
    for name, allowed in _PLAIN.items():
        if described.get(name, allowed[0]) not in allowed:
            raise ValueError(f"{FLAG} {folder}: has {name} {described[name]}, which is not built: take a plain LoRA")
    if described.get("r") != config.rank:
        raise ValueError(f"{FLAG} {folder}: has rank {described.get('r')}: take --rank {described.get('r')}")
    alpha = described.get("lora_alpha")
    if not isinstance(alpha, (int, float)) or not math.isclose(alpha, config.alpha):
        raise ValueError(f"{FLAG} {folder}: has alpha {alpha}: take --alpha {alpha}")
    targets = described.get("target_modules")
    found = {target.rsplit(".", 1)[-1] for target in targets} if isinstance(targets, list) else {str(targets)}
    if found != set(TARGETS):
        raise ValueError(
            f"{FLAG} {folder}: adapts {', '.join(sorted(found))}, only {', '.join(TARGETS)} together are built: "
            f"take another adapter"
        )


# ------------------------------------------------------------------------------------------------
# adapter_model.safetensors


def _peft_name(index, target, matrix):
    return f"base_model.model.model.layers.{index}.self_attn.{target}.lora_{matrix}.weight"


def _rows(config):
    """The rows of the fused projection that are q's, k's and v's."""
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    return {"q_proj": slice(0, q), "k_proj": slice(q, q + kv), "v_proj": slice(q + kv, q + 2 * kv)}


def _peft_shapes(config, index):
    shapes = {}
    for target, rows in _rows(config).items():
        shapes[_peft_name(index, target, "A")] = (config.rank, config.hidden)
        shapes[_peft_name(index, target, "B")] = (rows.stop - rows.start, config.rank)
    shapes[_peft_name(index, "o_proj", "A")] = (config.rank, config.heads * config.head_dim)
    shapes[_peft_name(index, "o_proj", "B")] = (config.hidden, config.rank)
    return shapes


def _to_peft(masters, config):
    tensors = {}
    for index in range(config.layers):
        for target, rows in _rows(config).items():
            tensors[_peft_name(index, target, "A")] = masters[f"layers.{index}.qkv.a"]
            tensors[_peft_name(index, target, "B")] = masters[f"layers.{index}.qkv.b"][rows]
        tensors[_peft_name(index, "o_proj", "A")] = masters[f"layers.{index}.proj.a"]
        tensors[_peft_name(index, "o_proj", "B")] = masters[f"layers.{index}.proj.b"]
    return {name: tensor.detach().float() for name, tensor in tensors.items()}


def _from_peft(file: File, config, index):
    tensors = {name: file.read(name).float() for name in _peft_shapes(config, index)}
    a = {target: tensors[_peft_name(index, target, "A")] for target in _rows(config)}
    for target in ("k_proj", "v_proj"):
        if not torch.equal(a["q_proj"], a[target]):
            raise ValueError(
                f"{FLAG} {file.path.parent}: the A of q_proj and {target} in layer {index} differ; here q, k and v are "
                f"one projection with one A, which cannot hold that: take an adapter with one A for the three"
            )
    return {
        f"layers.{index}.qkv.a": a["q_proj"],
        f"layers.{index}.qkv.b": torch.cat([tensors[_peft_name(index, target, "B")] for target in _rows(config)]),
        f"layers.{index}.proj.a": tensors[_peft_name(index, "o_proj", "A")],
        f"layers.{index}.proj.b": tensors[_peft_name(index, "o_proj", "B")],
    }
