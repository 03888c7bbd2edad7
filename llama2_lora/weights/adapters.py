"""Adapters saved in PEFT's format: adapter_config.json and adapter_model.safetensors.

PEFT (0.21) adapts q_proj, k_proj and v_proj, each with its own A. The fused projection here has one A. So the three are
saved with equal A and their rows of B, and PEFT computes with them what is computed here.
"""

import json
from pathlib import Path

import torch
from safetensors import torch as safetensors_torch

from common.config import require_writable
from common.files import write_text
from llama2_lora.config import Config

FLAG = "--save-adapter"
CONFIG_FILE, MODEL_FILE = "adapter_config.json", "adapter_model.safetensors"
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")


def require_place(folder) -> None:
    """ValueError in one line if nothing can be saved in the folder, or an adapter is there already."""
    path = Path(folder, MODEL_FILE)
    if path.exists():
        raise ValueError(f"{FLAG} {folder}: holds an adapter already, take another folder")
    require_writable(FLAG, path)


def save(folder, masters: dict[str, torch.Tensor], config: Config) -> None:
    """Write the two files; the folder is made. ValueError in one line where it cannot be written.

    masters: FP32, layers.<i>.qkv.a, layers.<i>.qkv.b, layers.<i>.proj.a, layers.<i>.proj.b (Config.adapters).
    """
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
        write_text(Path(folder, CONFIG_FILE), json.dumps(described, indent=2))
        # Copies: the package refuses tensors that share memory.
        tensors = {name: tensor.cpu().clone() for name, tensor in _matrices(masters, config)}
        write_text(Path(folder, MODEL_FILE), safetensors_torch.save(tensors, {"format": "pt"}))
    except OSError as error:
        raise ValueError(f"{FLAG} {folder}: cannot write ({error.strerror})") from None


def _matrices(masters, config):
    """(PEFT's name, matrix). The fused projection has q's rows of B, then k's, then v's."""
    for index in range(config.layers):
        ours = f"layers.{index}"
        qkv = masters[f"{ours}.qkv.b"].split([config.q_width, config.kv_width, config.kv_width])
        for target, b in zip(TARGETS, (*qkv, masters[f"{ours}.proj.b"]), strict=True):
            name = f"base_model.model.model.{ours}.self_attn.{target}.lora_"
            yield f"{name}A.weight", masters[f"{ours}.proj.a" if target == "o_proj" else f"{ours}.qkv.a"]
            yield f"{name}B.weight", b
