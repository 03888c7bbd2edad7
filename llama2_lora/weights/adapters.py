"""The adapters of all layers, and their files in PEFT's format: adapter_config.json and adapter_model.safetensors.

PEFT (0.21) adapts q_proj, k_proj and v_proj, each with its own A. The fused projection here has one A. So the three are
saved with equal A and their rows of B, and PEFT computes with them what is computed here.
"""

import json
import math
from pathlib import Path

import torch
from safetensors import torch as safetensors_torch

from graph_worth.config import require_writable
from graph_worth.files import write_text
from llama2_lora.config import REPLICATED, Config
from llama2_lora.weights.frozen import shard_of, unsharded

FLAG = "--save-adapter"
CONFIG_FILE, MODEL_FILE = "adapter_config.json", "adapter_model.safetensors"
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")


class Adapters:
    """One flat buffer of values and one of gradients, with a view for each matrix.

    values, grads: main dtype, flat. main_grad: FP32, flat, read by the optimizer.

    layers[i], transposed[i], layer_grads[i]: name as in `Config.adapters` -> view. A gradient is written, not added
    to: a step has one microbatch. With --tp these are the shards of tensor rank `rank`.
    """

    def __init__(self, config: Config, dtype, device, rank: int = 0):
        self.config, self.rank = config, rank
        count = config.layers * sum(rows * columns for rows, columns in config.shard.adapters.values())
        self.values, self.grads = (torch.zeros(count, dtype=dtype, device=device) for _ in range(2))
        self.main_grad = torch.zeros(count, device=device)
        self.layers, self.layer_grads = self.views(self.values), self.views(self.grads)
        self.transposed = [{name: matrix.t() for name, matrix in layer.items()} for layer in self.layers]

    def views(self, flat) -> list[dict[str, torch.Tensor]]:
        """Views of a flat tensor laid out as `values`: for each layer, name -> matrix."""
        offset = 0
        views: list[dict[str, torch.Tensor]] = [{} for _ in range(self.config.layers)]
        # Replicated matrices of all layers come first: one collective sums their gradients.
        for is_replicated in (True, False):
            for layer in views:
                for name, (rows, columns) in self.config.shard.adapters.items():
                    if (name in REPLICATED) is is_replicated:
                        layer[name] = flat[offset : offset + rows * columns].view(rows, columns)
                        offset += rows * columns
        return views

    def replicated(self, flat) -> torch.Tensor:
        """View of the replicated matrices in a flat tensor laid out as `values`: the same on all tensor ranks."""
        shapes = self.config.adapters
        return flat[: self.config.layers * sum(math.prod(shapes[name]) for name in REPLICATED)]

    def named(self, flat):
        """(layers.<i>.<name>, view) of a flat tensor laid out as `values`."""
        for index, layer in enumerate(self.views(flat)):
            for name, view in layer.items():
                yield f"layers.{index}.{name}", view

    def named_whole(self, flats):
        """(layers.<i>.<name>, matrix of the whole model) of the flat tensors of all tensor ranks, in their order."""
        for named in zip(*map(self.named, flats), strict=True):
            path = named[0][0]
            yield path, unsharded(self.config, path.split(".", 2)[2], [part for _, part in named])

    def collect(self) -> None:
        """main_grad = grads, in FP32."""
        self.main_grad.copy_(self.grads)

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """In place and seeded: a uniform within 1 / sqrt(inputs), b zero, as in PEFT and NeMo."""
        generator = torch.Generator(self.values.device).manual_seed(seed)
        self.values.zero_()
        for layer in self.layers:
            for name, view in layer.items():
                if name.endswith(".a"):
                    whole = view.new_empty(self.config.adapters[name])
                    bound = 1 / math.sqrt(whole.shape[1])
                    whole.uniform_(-bound, bound, generator=generator)
                    view.copy_(shard_of(self.config, name, whole, self.rank))


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
