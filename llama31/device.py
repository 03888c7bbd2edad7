"""A config as this device runs it: kind of layer, precision, what layers keep; and the lines that say so."""

from dataclasses import replace

import torch

from common.fit import fewer_layers
from common.memory_plan import GIB, budget_bytes
from common.precision import nvfp4
from graph_worth import Unsupported
from graph_worth.machine import host_state
from graph_worth.parallel.host_messages import of_all_ranks
from llama31 import config as llama_config
from llama31.config import ROPE_SCALING, Config
from llama31.memory import plan

KNOWN = {
    (16384, 53248): ("Llama 3.1 405B", 126),
    (8192, 28672): ("Llama 3.1 70B", 80),
    (4096, 14336): ("Llama 3.1 8B", 32),
}


def resolve(config: Config, preset: str, device: torch.device, world_size: int = 1) -> tuple[Config, list[str]]:
    """(The config with layer, precision, memory and number of layers as they can run on `device`, notes.)

    preset: its name, for what layers keep. ValueError where they cannot: nothing has been done on the GPU then.
    """
    notes = []
    config.ranks(world_size)
    config = replace(config, share_tp=config.share)  # a run file says whose share it is
    if config.layer == "te" and device.type == "cpu":
        raise ValueError("--layer te needs a GPU; take --layer torch")
    if config.layer == "auto":
        plain_only = device.type == "cpu" or config.precision == "nvfp4_emulated"
        fault = None if plain_only else _te_fault(config)
        config = replace(config, layer="torch" if plain_only or fault else "te")
        if fault and config.precision == "fp8":
            config = replace(config, precision="bf16", weights="bf16")
        if fault:
            notes.append(f"plain-PyTorch layer in {config.precision}: {fault}")
    if config.layer == "megatron":
        from common import megatron

        if fault := megatron.fault_of(config.precision):
            raise ValueError(f"--layer megatron: {fault}")
        config = replace(config, keep="all")  # nothing is computed again
    if config.layer == "torch" and config.precision == "fp8":
        notes.append("FP8 emulated: operands rounded to FP8, GEMMs in bf16")
    if device.type == "cpu":
        plan.require(config, host_state.available_host_bytes())
    else:
        # The same on all ranks: one that ran other layers again would wait for collectives that no other one posts.
        free, total = (min(of_all_ranks(size)) for size in torch.cuda.mem_get_info(device))
        budget = budget_bytes(free, plan.CONTEXT_BYTES)
        fitted = plan.fit(config, budget)
        fitted = replace(fitted, keep=plan.choose(fitted, preset, total, budget))
        if fitted.layers < config.layers:
            notes.append(fewer_layers(fitted, config, budget / GIB))
        config = fitted
    optimizer = f"masters fp32, moments {config.moments}" if config.optimizer == "adam" else "no masters or moments"
    notes.append(f"formats: matrices of layers {config.weights}, main_grad {config.main_grad}, {optimizer}")
    return config, notes


def _te_fault(config):
    from common.precision.transformer_engine import te_fault

    return te_fault(fp8=config.precision == "fp8")


def open_checkpoint(config: Config):
    """The opened folder of --checkpoint. ValueError, one line with the flag, where it does not fit the config."""
    from common.data import checkpoint

    if config.share > 1 or config.share_cp > 1:
        raise ValueError("--checkpoint takes a whole model: --share-tp 1 --share-cp 1")
    return checkpoint.open_checkpoint(config.checkpoint, config, rope={"rope_type": "llama3", **ROPE_SCALING})


def require_precision(config: Config, device: torch.device) -> None:
    """Unsupported, in Transformer Engine's words where it has some, where this device does not compute the config."""
    if config.precision == "nvfp4":
        nvfp4.require(device, "" if config.layer == "te" else "plain layers have no NVFP4 GEMM, take --layer te")
    if config.layer == "te":
        from common.precision.transformer_engine import require_fp8, usable_transformer_engine

        usable_transformer_engine()
        if config.precision == "nvfp4_emulated":
            raise Unsupported("--precision nvfp4_emulated needs --layer torch")
        if config.precision == "fp8":
            require_fp8()


def recipe_of(config: Config):
    """Transformer Engine's recipe of a config with its layers; None for bf16 and for plain layers.

    fp8: current scaling by tensor, E4M3 forward and E5M2 backward.
    """
    if config.layer != "te" or config.precision == "bf16":
        return None
    if config.precision == "nvfp4":
        return nvfp4.recipe()
    from transformer_engine.common import recipe

    return recipe.Float8CurrentScaling(fp8_format=recipe.Format.HYBRID)


def card(config: Config, device: torch.device, *_) -> list[str]:
    """Lines that say what runs."""
    c = config
    name, layers = KNOWN.get((c.hidden, c.ffn), ("toy widths", c.layers))
    share = f", a GPU's share at TP{c.share * c.tp} CP{c.share_cp * c.cp}" if c.share * c.share_cp > 1 else ""
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
        lines += ["", *plan.make_plan(c).text().splitlines()]
    return lines
