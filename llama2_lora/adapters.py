"""Adapters in PEFT's format, and what resuming needs beside them.

    save(folder, masters, config, state, step)       adapter_config.json, adapter_model.safetensors, training state
    masters = load(folder, config)
    state, step = load_state(folder)
    require(config)                                  both folders, before anything is built

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
import tempfile
from pathlib import Path

import torch

from common.files import write_whole
from common.safetensors_file import open_file, write_file
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
    folder = _folder_to_save(folder, config)
    tensors = {name: masters[ours][rows].detach().float() for name, ours, rows in _matrices(config)}
    try:
        state_file = f"training_state-{secrets.token_hex(4)}.safetensors"
        write_file(folder / state_file, state, {"step": str(step)})
        described = json.dumps(_describe(config), indent=2).encode()
        write_whole(folder / CONFIG_FILE, lambda file: file.write(described))
        write_file(folder / MODEL_FILE, tensors, {"format": "pt", "training_state": state_file})
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
    file, masters, filled = _open(folder, config), _empty_masters(config), set()
    for name, ours, rows in _matrices(config):
        matrix = file.read(name).float()
        place = ours, rows.start
        if place in filled and not torch.equal(masters[ours][rows], matrix):
            raise ValueError(
                f"{FLAG} {folder}: {name} differs from q_proj's; here q, k and v are one projection with one A, which "
                f"cannot hold that: take an adapter with one A for the three"
            )
        filled.add(place)
        masters[ours][rows] = matrix
    return masters


def load_state(folder) -> tuple[dict[str, torch.Tensor], int]:
    """(tensors of the optimizer by name, steps done) as `save` wrote them; ({}, 0) beside an adapter that it did not
    write. ValueError that names --adapter."""
    folder = Path(folder)
    name = open_file(folder / MODEL_FILE, FLAG).metadata.get("training_state")
    if name is None:
        return {}, 0
    file = open_file(folder / Path(name).name, FLAG)
    return {tensor: file.read(tensor) for tensor in file.entries}, int(file.metadata["step"])


def require(config: Config) -> None:
    """ValueError where --adapter does not fit, as `load` says it, or nothing can be saved in --save-adapter."""
    if config.adapter:
        _open(config.adapter, config)
    if config.save_adapter:
        _folder_to_save(config.save_adapter, config)


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


def _folder_to_save(folder, config):
    """Made. A save that is cut between its files must not leave the config of one adapter beside another's weights."""
    folder, described = Path(folder), _describe(config)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"{SAVE_FLAG} {folder}: cannot write ({error.strerror})") from None
    before = _read_config(folder, SAVE_FLAG) if (folder / MODEL_FILE).exists() else described
    for name in ("r", "lora_alpha", "peft_type"):
        if before.get(name) != described[name]:
            raise ValueError(
                f"{SAVE_FLAG} {folder}: holds an adapter of {name} {before.get(name)}, this one has {described[name]}: "
                f"take another folder"
            )
    return folder


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


def _empty_masters(config, device="cpu"):
    return {
        f"layers.{index}.{name}": torch.empty(shape, device=device)
        for index in range(config.layers)
        for name, shape in config.adapters.items()
    }


def _matrices(config):
    """(PEFT's name, name here, rows of it) of every matrix. The fused projection has q's rows, then k's, then v's."""
    q, kv, every = config.q_width, config.kv_heads * config.head_dim, slice(None)
    parts = (("qkv", slice(0, q)), ("qkv", slice(q, q + kv)), ("qkv", slice(q + kv, q + 2 * kv)), ("proj", every))
    for index in range(config.layers):
        for target, (ours, rows) in zip(TARGETS, parts, strict=True):
            name = f"base_model.model.model.layers.{index}.self_attn.{target}.lora_"
            yield f"{name}A.weight", f"layers.{index}.{ours}.a", every
            yield f"{name}B.weight", f"layers.{index}.{ours}.b", rows


def _open(folder, config):
    """The file of an adapter that fits by its config, names and shapes."""
    folder = Path(folder)
    _require_fit(folder, _read_config(folder, FLAG), config)
    file, masters = open_file(folder / MODEL_FILE, FLAG), _empty_masters(config, "meta")
    shapes = {name: tuple(masters[ours][rows].shape) for name, ours, rows in _matrices(config)}
    for name in [*shapes, *file.entries]:
        if name not in file.entries:
            raise ValueError(f"{FLAG} {folder}: holds no {name}, --layers {config.layers} takes it")
        if name not in shapes:
            raise ValueError(f"{FLAG} {folder}: holds {name}, which has no place in --layers {config.layers}")
        entry = file.entries[name]
        if entry.shape != shapes[name] or entry.dtype not in ("F32", "F16", "BF16"):
            raise ValueError(
                f"{FLAG} {folder}: {name} is {entry.dtype} of the shape {entry.shape}, the flags say {shapes[name]}"
            )
    return file
