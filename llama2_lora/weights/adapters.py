"""Adapters in PEFT's format.

    save(folder, masters, config)            adapter_config.json and adapter_model.safetensors
    masters = load(folder, config)
    require(config)                          checks both folders before anything is built

masters: FP32 by name, layers.<i>.qkv.a [rank, hidden], layers.<i>.qkv.b [(heads + 2 kv_heads) head_dim, rank],
layers.<i>.proj.a [rank, heads head_dim], layers.<i>.proj.b [hidden, rank].

PEFT (0.21) adapts q_proj, k_proj and v_proj, each with its own A. The fused projection here has one A. So the three are
saved with equal A and their rows of B, and PEFT computes with them what is computed here. An adapter with three
different A is refused. PEFT's own training would draw three dropout masks and so move the three A apart.
"""

import json
from pathlib import Path

import torch

from common.config import require_writable
from common.files import write_text
from common.training.data.limits import MAX_HEADER_BYTES, open_regular, shown
from common.training.data.safetensors_file import File, open_file, write_file
from llama2_lora.config import Config

FLAG, SAVE_FLAG = "--adapter", "--save-adapter"
CONFIG_FILE, MODEL_FILE = "adapter_config.json", "adapter_model.safetensors"
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
# Fields of PEFT's LoraConfig that a plain LoRA leaves empty or false. Other kinds show by their tensors.
_OTHER_KINDS = ("fan_in_fan_out", "use_rslora", "use_dora", "alpha_pattern", "alora_invocation_tokens")


def save(folder, masters: dict[str, torch.Tensor], config: Config) -> None:
    """Write the adapter. The folder is made; an adapter of the same rank and alpha in it is replaced.

    Raises:
        ValueError: In one line that names --save-adapter: the folder cannot be written, or holds another adapter.
    """
    folder = Path(folder)
    _require_place(folder, config)
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": config.checkpoint or None,
        "inference_mode": True,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": config.dropout,
        "target_modules": list(TARGETS),
        "bias": "none",
    }
    try:
        write_text(folder / CONFIG_FILE, json.dumps(described, indent=2))
        tensors = {name: masters[ours][rows].detach().float() for name, ours, rows in _matrices(config)}
        write_file(folder / MODEL_FILE, tensors, {"format": "pt"})
    except OSError as error:
        raise ValueError(f"{SAVE_FLAG} {folder}: cannot write ({error.strerror})") from None


def load(folder, config: Config) -> dict[str, torch.Tensor]:
    """The masters of an adapter in PEFT's format, new FP32 CPU tensors by name.

    Raises:
        ValueError: In one line that names --adapter: no adapter, another rank, alpha or target modules, a kind of LoRA
            that is not built, other layers or shapes, or A matrices of q, k and v that differ.
    """
    file, parts = _open(folder, config), {}
    for name, ours, _ in _matrices(config):
        matrices = parts.setdefault(ours, [])
        matrices.append(file.read(name).float())
        if ours.endswith(".a") and not torch.equal(matrices[0], matrices[-1]):
            raise ValueError(
                f"{FLAG} {folder}: {name} differs from q_proj's; here q, k and v are one projection with one A: take "
                "an adapter with one A for the three"
            )
    return {ours: found[0] if ours.endswith(".a") else torch.cat(found) for ours, found in parts.items()}


def require(config: Config) -> None:
    """ValueError if --adapter does not fit, or nothing can be saved in --save-adapter."""
    if config.adapter:
        _open(config.adapter, config)
    if config.save_adapter:
        _require_place(Path(config.save_adapter), config)


def _require_place(folder, config):
    """Another adapter is not replaced: a save cut between its two files would leave a mixture of both."""
    require_writable(SAVE_FLAG, folder / MODEL_FILE)
    if (folder / MODEL_FILE).exists():
        _require_alike(folder, config, SAVE_FLAG)


def _require_alike(folder, config, flag):
    """ValueError unless the folder's adapter is a LoRA of this run's rank, alpha and target modules."""
    with open_regular(folder / CONFIG_FILE, flag, MAX_HEADER_BYTES) as file:
        try:
            found = json.load(file)
        except (ValueError, RecursionError):
            found = None
    if not isinstance(found, dict):
        raise ValueError(f"{flag} {folder}: {CONFIG_FILE} is damaged, it is no JSON object")
    targets = found.get("target_modules")
    if isinstance(targets, list):
        found["target_modules"] = sorted({str(target).rsplit(".", 1)[-1] for target in targets})
    own = {"peft_type": "LORA", "r": config.rank, "lora_alpha": config.alpha, "target_modules": sorted(TARGETS)}
    for name, value in {**own, **dict.fromkeys(_OTHER_KINDS)}.items():
        if (found.get(name) or None) != value:
            by = {"r": " (--rank)", "lora_alpha": " (--alpha)"}.get(name, "")
            told = shown(str(found.get(name)))
            raise ValueError(f"{flag} {folder}: holds an adapter of {name} {told}, this run has {value}{by}")


def _matrices(config):
    """(PEFT's name, name here, rows of it) of every matrix. The fused projection has q's rows, then k's, then v's."""
    q, kv, every = config.q_width, config.kv_width, slice(None)
    parts = (("qkv", slice(0, q)), ("qkv", slice(q, q + kv)), ("qkv", slice(q + kv, q + 2 * kv)), ("proj", every))
    for index in range(config.layers):
        for target, (ours, rows) in zip(TARGETS, parts, strict=True):
            name = f"base_model.model.model.layers.{index}.self_attn.{target}.lora_"
            yield f"{name}A.weight", f"layers.{index}.{ours}.a", every
            yield f"{name}B.weight", f"layers.{index}.{ours}.b", rows


def _open(folder, config) -> File:
    """The file of an adapter that fits by its config, names and shapes."""
    folder = Path(folder)
    _require_alike(folder, config, FLAG)
    file, shapes = open_file(folder / MODEL_FILE, FLAG), {}
    for name, ours, rows in _matrices(config):
        num_rows, columns = config.adapters[ours.split(".", 2)[2]]
        shapes[name] = (len(range(num_rows)[rows]), columns)
    found = {name: entry.shape for name, entry in file.entries.items()}
    # PEFT's rank_pattern, layers_to_transform and lora_bias show here, too.
    for name in sorted(shapes.keys() | found.keys()):
        given, wanted = found.get(name, "none"), shapes.get(name, "none")
        if given != wanted:
            raise ValueError(f"{FLAG} {folder}: the shape of {shown(name)} is {given}, the flags say {wanted}")
    return file
