"""The mixture of experts as it can run on this device, and what a run is told of it."""

import os
from dataclasses import replace

import torch

from common.machine import host_state
from common.training import flops
from common.training.memory_fit import fewer_layers, require_host
from common.training.parallel.host_messages import of_all_ranks
from common.variant import Workload
from moe import config as moe_config
from moe.checkpoint import open_checkpoint
from moe.config import CONTEXT_BYTES, GIB, PRESETS, Config
from moe.other_variants import padded
from moe.state import State, hyperparameters
from moe.variants import VARIANTS

# (hidden, experts) -> name, layers, experts of the whole model.
KNOWN = {(2048, 128): ("Qwen3-30B-A3B", 48), (2880, 32): ("GPT-OSS-20B", 24), (2880, 128): ("GPT-OSS-120B", 36)}


def workload(args, device: torch.device, rank: int, world_size: int, eager_step):
    """(arguments as they can run on `device`, Workload), for `common.script.main`."""
    args, notes = resolve(args, device)
    config = args.config
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    is_padded = VARIANTS[args.run.variant].reference == "eager_padded"
    return args, Workload(
        model="moe",
        build=lambda config, device: State(config, device),
        variants=VARIANTS,
        reference=padded(eager_step) if is_padded else eager_step,
        card=card(config),
        notes=notes,
        flops_per_step=moe_config.flops_per_step(config),
        flops_convention=flops.CAUSAL_HALF,
        items_per_step=config.tokens * config.microbatches,
        unit="tokens",
        peak_flops=flops.peak_flops(gpu, "bf16"),
        hyperparameters=hyperparameters(config),
    )


def require_ranks(args) -> None:
    """ValueError in one line where torchrun's ranks are not those of --ep, before any of them waits for the others."""
    args.config.require_ranks(int(os.environ.get("WORLD_SIZE", "1")))


def resolve(args, device: torch.device):
    """(Arguments with as many layers as fit, notes). ValueError where they cannot run: nothing is on the GPU then."""
    config, run, notes = args.config, args.run, []
    if config.checkpoint:
        open_checkpoint(config)
    if device.type == "cpu":
        for need in (moe_config.needed_bytes, moe_config.host_bytes):
            require_host(config, PRESETS, need, host_state.available_host_bytes())
    else:
        # The same on all ranks: one with other layers would wait for an exchange that no other one makes.
        budget = (min(of_all_ranks(torch.cuda.mem_get_info(device)[0])) - CONTEXT_BYTES) // GIB
        fitted = moe_config.fit(config, budget * GIB)
        if fitted.layers < config.layers:
            run = replace(run, preset=f"{run.preset}-l{fitted.layers}")
            notes.append(fewer_layers(fitted, config, budget))
        config = fitted
    if config.routing == "balanced":
        notes.append("balanced routing: every expert gets as many tokens, whatever the router says")
    if not config.update:
        notes.append("forward and backward alone: no clipping, no Adam")
    notes.append(f"formats: weights bf16, main_grad bf16{_optimizer_formats(config)}")
    if config.lora_rank:
        notes.append(
            f"LoRA: adapters of rank {config.lora_rank} on attention's projections, "
            f"{moe_config.trained_parameters(config):,} parameters; all else is frozen"
        )
    return replace(args, config=config, run=run), notes


def _optimizer_formats(config):
    if not config.update:
        return ""
    if config.masters == "none":
        return ", no masters (stochastic rounding), moments fp8 (E4M3)"
    return f", masters fp32, moments {config.moments}"


def card(config: Config) -> list[str]:
    """Lines that say what runs."""
    c = config
    name, layers = KNOWN.get((c.hidden, c.experts), ("toy widths", c.layers))
    slice_of = f"{c.layers} of {layers} layers of " if c.layers != layers else ""
    share = f", a GPU's share at TP{c.share_tp} EP{c.share_ep}" if c.share_tp * c.share_ep > 1 else ""
    share += f", {c.rank_experts} of the experts on each of {c.ep} ranks" if c.ep > 1 else ""
    packed = f", up to {c.documents} documents packed into a sequence" if c.documents else ""
    return [
        f"{c.layers} layers, hidden {c.hidden}, heads {c.local_heads} ({c.local_kv_heads} groups), {c.local_experts} "
        f"experts of width {c.ffn}, {c.top_k} a token, {moe_config.num_parameters(c) / 1e6:,.1f} M parameters: "
        f"{slice_of}{name}{share}",
        f"{c.microbatches} microbatches of {c.microbatch} x {c.sequence} tokens{packed} | bf16, {c.routing} routing | "
        f"{moe_config.flops_per_step(c) / 1e12:.4g} TFLOP/step",
    ]
