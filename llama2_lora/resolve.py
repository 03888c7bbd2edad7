"""What of the arguments can run on this device, precision, memory, number and kind of layers, and the card."""

from dataclasses import replace

import torch

from common import host_state
from common.host_messages import of_all_ranks
from common.llama_checkpoint import open_checkpoint
from common.memory_plan import GIB
from llama2_lora import adapters
from llama2_lora import config as lora_config
from llama2_lora import plan as plans
from llama2_lora.config import ABOUT, FP8


def resolve(args, device: torch.device, world_size: int = 1):
    """(Arguments as they can run here, notes on what changed.)

    ValueError where they cannot, or where checkpoint or adapter do not fit: nothing has been built then.
    """
    args.config.ranks(world_size)
    args, notes = _fit(args, device)
    # What the record says is the rate that it trains at.
    config = replace(args.config, lr=args.config.learning_rate)
    args = replace(args, config=config)
    if config.checkpoint:
        open_checkpoint(config.checkpoint, config)
    adapters.require(config)
    if config.memory_gib and kind_of_layers(args) == "lean":
        plans.make_plan(config, int(config.memory_gib * GIB))
    return args, notes


def _fit(args, device):
    config, run, notes = args.config, args.run, []
    if config.layer == "te" and device.type == "cpu":
        raise ValueError("--layer te needs a GPU; take --layer lean or torch")
    if device.type == "cpu":
        available = host_state.available_host_bytes()
        if available is not None:
            plans.require(config, available)
        if config.precision in FP8:
            notes.append("FP8 emulated: operands rounded to FP8, GEMMs in FP32")
        return args, notes
    if config.precision in FP8 and torch.cuda.get_device_capability(device) < (8, 9):
        config = replace(config, precision="bf16", fc1_store="auto")
        notes.append("bf16: no FP8 on this GPU, it needs compute capability 8.9")
    # The same on all ranks, which so have one plan and as many layers.
    free = min(of_all_ranks(torch.cuda.mem_get_info(device)[0]))
    budget = plans.budget_bytes(free) // GIB
    if config.memory_gib > free / GIB:
        raise ValueError(f"--memory-gib {config.memory_gib}: {free / GIB:.1f} GiB are free, take at most {budget}")
    if not config.memory_gib:
        smaller = plans.fit(config, budget * GIB)
        if smaller.layers < config.layers:
            run = replace(run, preset=f"{run.preset}-l{smaller.layers}")
            notes.append(f"{smaller.layers} of {config.layers} layers: what fits into {budget} GiB")
        config = replace(smaller, memory_gib=float(budget))
    return replace(args, config=config, run=run), notes


def kind_of_layers(args) -> str:
    """The layers that the variant is declared to have, else those of --layer."""
    return ABOUT["traits"].get(args.run.variant, {}).get("layer", args.config.layer)


def card(config, kind: str, device: torch.device) -> list[str]:
    """Lines that say what runs; on a GPU with the plan of the layers, where they have one."""
    known = {(8192, 80): "Llama 2 70B", (8192, config.layers): f"{config.layers} of 80 layers of Llama 2 70B"}
    of_window = f" of a window of {config.sequence}, which {config.cp} ranks share" if config.cp > 1 else ""
    lines = [
        f"{config.layers} layers, hidden {config.hidden}, heads {config.heads} ({config.kv_heads} groups), "
        f"ffn {config.ffn}: {known.get((config.hidden, config.layers), 'toy widths')}",
        f"{lora_config.num_parameters(config) / 1e6:,.1f} M frozen parameters, "
        f"{'of ' + config.checkpoint if config.checkpoint else 'random'}; "
        f"{lora_config.num_trainable(config) / 1e6:,.2f} M trainable ones, learning rate {config.learning_rate:g}",
        f"{config.tokens} tokens{of_window} | {kind} layers, {config.precision} | "
        f"{lora_config.flops_per_step(config) / 1e12:.4g} TFLOP/step",
    ]
    if device.type == "cuda" and (plan := plans.plan_for(kind, config, int(config.memory_gib * GIB))):
        lines += ["", *plan.text().splitlines()]
    return lines
