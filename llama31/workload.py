"""Llama 3.1 as it can run on this device, and what a run is told of it."""

from dataclasses import replace

import torch

from common.machine import host_state
from common.training import flops
from common.training.memory_fit import fewer_layers
from common.training.memory_plan import GIB
from common.training.parallel.host_messages import of_all_ranks
from common.training.precision.fp8 import te_fault
from common.variant import Workload
from llama31 import config as llama_config
from llama31.config import ABOUT
from llama31.memory import plan
from llama31.state import State, hyperparameters
from llama31.weights import open_checkpoint

KNOWN = {
    (16384, 53248): ("Llama 3.1 405B", 126),
    (8192, 28672): ("Llama 3.1 70B", 80),
    (4096, 14336): ("Llama 3.1 8B", 32),
}


def workload(args, device: torch.device, rank: int, world_size: int, variants: dict, eager_step):
    """(arguments as they can run on `device`, Workload), for `common.script.main`. variants: a table."""
    args, notes = resolve(args, device, world_size)
    config, ranks = args.config, args.config.ranks(world_size)
    return args, Workload(
        model="llama31",
        build=lambda config, device: State(config, device, rank, world_size),
        variants=variants,
        reference=eager_step,
        card=card(config, device, ranks.dp),
        notes=notes,
        flops_per_step=llama_config.flops_per_step(config),
        flops_convention=flops.CAUSAL_HALF,
        items_per_step=_tokens(config),
        unit="tokens",
        peak_flops=flops.peak_flops(
            torch.cuda.get_device_name(device) if device.type == "cuda" else "", config.precision
        ),
        hyperparameters=hyperparameters(config, ranks.dp),
        kinds=ABOUT["kinds"],
        promises=ABOUT["promises"],
    )


def resolve(args, device: torch.device, world_size: int = 1):
    """(Arguments with layer, precision, memory and number of layers as they can run on `device`, notes.)

    ValueError where they cannot: nothing has been done on the GPU then.
    """
    config, run, notes = args.config, args.run, []
    dp = config.ranks(world_size).dp
    if config.checkpoint:
        open_checkpoint(config)
    if config.layer == "te" and device.type == "cpu":
        raise ValueError("--layer te needs a GPU; take --layer torch")
    if config.layer == "auto":
        plain_only = device.type == "cpu" or config.precision == "nvfp4_emulated"
        fault = None if plain_only else te_fault(fp8=config.precision == "fp8")
        config = replace(config, layer="torch" if plain_only or fault else "te")
        if fault and config.precision == "fp8":
            config = replace(config, precision="bf16", weights="bf16")
        if fault:
            notes.append(f"plain-PyTorch layer in {config.precision}: {fault}")
    if config.layer == "torch" and config.precision == "fp8":
        notes.append("FP8 emulated: operands rounded to FP8, GEMMs in bf16")
    if device.type == "cpu":
        plan.require(config, host_state.available_host_bytes())
    else:
        # The same on all ranks: one that ran other layers again would wait for collectives that no other one posts.
        free, total = (min(of_all_ranks(size)) for size in torch.cuda.mem_get_info(device))
        budget = plan.budget_bytes(free)
        fitted = plan.fit(config, budget, dp)
        fitted = replace(fitted, keep=plan.choose(fitted, run.preset, total, budget, dp))
        if fitted.layers < config.layers:
            run = replace(run, preset=f"{run.preset}-l{fitted.layers}")
            notes.append(fewer_layers(fitted, config, budget / GIB))
        config = fitted
    plan.make_plan(config, dp)
    optimizer = f"masters fp32, moments {config.moments}" if config.optimizer == "adam" else "no masters or moments"
    notes.append(f"formats: matrices of layers {config.weights}, main_grad {config.main_grad}, {optimizer}")
    return replace(args, config=config, run=run), notes


def _tokens(config):
    """Tokens of a step on one GPU: its share of a pipeline's and a tensor group's."""
    tokens = config.microbatch * config.local_sequence * sum(config.counts) / len(config.counts)
    return tokens / (config.tp * config.pp)


def card(config, device: torch.device, dp: int = 1) -> list[str]:
    """Lines that say what runs. dp: data ranks."""
    c = config
    name, layers = KNOWN.get((c.hidden, c.ffn), ("toy widths", c.layers))
    share = f", a GPU's share at TP{c.share_tp * c.tp} CP{c.share_cp * c.cp}" if c.share_tp * c.share_cp > 1 else ""
    slice_of = f"{c.layers} of {layers} layers of " if c.layers != layers else ""
    counts = [llama_config.flops_per_step(c, causal) / 1e12 for causal in (True, False)]
    lines = [
        f"{c.layers} layers, hidden {c.hidden}, heads {c.local_heads} ({c.local_kv_heads} groups), ffn {c.local_ffn}, "
        f"{llama_config.num_parameters(c) / 1e6:,.1f} M parameters: {slice_of}{name}{share}",
        f"{c.ramp or c.microbatches} microbatches of {c.microbatch} x {c.local_sequence} tokens | {c.layer} layer, "
        f"{c.precision} | {counts[0]:.4g} TFLOP/step (MLPerf's count, attention in full: {counts[1]:.4g})",
        f"weights {c.weights}, main_grad {c.main_grad}, "
        + (f"moments {c.moments}" if c.optimizer == "adam" else "no Adam"),
    ]
    if device.type == "cuda":
        lines += ["", *plan.make_plan(c, dp).text().splitlines()]
    return lines
