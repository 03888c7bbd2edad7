"""Llama 2 70B LoRA as it can run on this device, and the lines that a run prints about it."""

from dataclasses import replace

import torch

from common.machine import host_state
from common.training import flops
from common.training.data.llama_checkpoint import open_checkpoint
from common.training.memory_fit import fewer_layers
from common.training.memory_plan import GIB
from common.training.parallel.host_messages import of_all_ranks
from common.variant import Workload
from llama2_lora import config as lora_config
from llama2_lora import plan
from llama2_lora.config import ABOUT
from llama2_lora.data import rows
from llama2_lora.state import State, hyperparameters
from llama2_lora.weights import adapters


def workload(args, device: torch.device, rank: int, world_size: int, variants: dict, eager_step):
    """(arguments as they can run on `device`, Workload), for `common.script.main`. variants: a table."""
    args, notes = resolve(args, device, world_size)
    config, kind = args.config, kind_of_layers(args)
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return args, Workload(
        model="llama2_lora",
        build=lambda config, device: State(config, device, kind, rank, world_size),
        variants=variants,
        reference=eager_step,
        card=card(config, kind, device),
        notes=notes,
        flops_per_step=lora_config.flops_per_step(config),
        flops_convention=flops.CAUSAL_HALF,
        items_per_step=config.tokens,
        unit="tokens",
        peak_flops=flops.peak_flops(gpu, "fp8" if config.precision == "fp8" else "bf16"),
        hyperparameters=hyperparameters(config, config.ranks(world_size).dp),
    )


def kind_of_layers(args) -> str:
    """The layers that the variant is declared to have, else those of --layer."""
    return ABOUT["traits"].get(args.run.variant, {}).get("layer", args.config.layer)


def resolve(args, device: torch.device, world_size: int = 1):
    """(arguments with precision, memory and number of layers as they can run on `device`, notes on what changed).

    ValueError if they cannot run, or checkpoint or data do not fit. Nothing has been built then.
    """
    args.config.ranks(world_size)
    args, notes = _fit(args, device)
    # A run file says at which rate it trained.
    config = replace(args.config, lr=args.config.learning_rate)
    args = replace(args, config=config)
    if config.checkpoint:
        open_checkpoint(config.checkpoint, config)
    if config.save_adapter:
        adapters.require_place(config.save_adapter)
    rows.require(config.data)
    if kind_of_layers(args) == "handwritten":
        plan.make_plan(config)
    return args, notes


def _fit(args, device):
    config, run, notes = args.config, args.run, []
    if device.type == "cpu":
        if config.layer == "te":
            raise ValueError("--layer te needs a GPU; take --layer handwritten or torch")
        plan.require(config, host_state.available_host_bytes())
        if config.precision == "fp8":
            notes.append("FP8 emulated: operands rounded to FP8, GEMMs in FP32")
        return args, notes
    if config.precision == "fp8" and torch.cuda.get_device_capability(device) < (8, 9):
        config = replace(config, precision="bf16", fc1_store="auto")
        notes.append("bf16: no FP8 on this GPU, it needs compute capability 8.9")
    # The least of all ranks, so that all have as many layers, which keep the same.
    free, total = (min(of_all_ranks(size)) for size in torch.cuda.mem_get_info(device))
    budget = plan.budget_bytes(free)
    fitted = plan.fit(config, budget)
    if kind_of_layers(args) == "handwritten":
        fitted = replace(fitted, keep=plan.choose(fitted, run.preset, total, budget))
    if fitted.layers < config.layers:
        run = replace(run, preset=f"{run.preset}-l{fitted.layers}")
        notes.append(fewer_layers(fitted, config, budget / GIB))
    return replace(args, config=fitted, run=run), notes


def card(config, kind: str, device: torch.device) -> list[str]:
    """Lines that say what runs; on a GPU with what handwritten layers keep."""
    model = f"{config.layers} of 80 layers of Llama 2 70B" if config.hidden == 8192 else "toy widths"
    of_window = f" of a window of {config.sequence}, which {config.cp} ranks share" if config.cp > 1 else ""
    lines = [
        f"{config.layers} layers, hidden {config.hidden}, heads {config.heads} ({config.kv_heads} groups), "
        f"ffn {config.ffn}: {model}",
        f"{lora_config.num_parameters(config) / 1e6:,.1f} M frozen parameters, "
        f"{'of ' + config.checkpoint if config.checkpoint else 'random'}; "
        f"{lora_config.num_trainable(config) / 1e6:,.2f} M trainable ones, learning rate {config.learning_rate:g}",
        f"{config.tokens} tokens{of_window} | {kind} layers, {config.precision} | "
        f"{lora_config.flops_per_step(config) / 1e12:.4g} TFLOP/step",
    ]
    if device.type == "cuda" and kind == "handwritten":
        lines += ["", *plan.make_plan(config).text().splitlines()]
    return lines
