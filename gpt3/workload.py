"""GPT-3 as it can run on this device, and what a run is told of it."""

from dataclasses import replace as replace_fields

import torch

from common.machine import host_state
from common.training import flops
from common.training.memory_fit import fewer_layers
from common.training.parallel.host_messages import of_all_ranks
from common.training.precision import fp8
from common.variant import Unsupported, Workload
from common.variant_table import Declared
from gpt3 import config as gpt3_config
from gpt3.config import ABOUT, FP8
from gpt3.pipeline import stage as pipeline
from gpt3.state import State, hyperparameters

# What makes them over several stages or chunks.
OF_STAGES = {
    "eager": "gpt3.pipeline.stage:eager",
    "graph_layer": "gpt3.pipeline.stage_graphs:Graphed",
    "graph_layer_te": "gpt3.other_variants:StageAsSubmitted",
}


def workload(args, device: torch.device, rank: int, world_size: int, variants: dict, eager_step):
    """(arguments as they can run on `device`, Workload), for `common.script.main`.

    variants: of gpt3/variants.py, for a run of one stage. Several stages or chunks have other constructors.
    """
    ranks = args.config.ranks(world_size)
    args, notes = resolve(args, device, ranks.dp)
    config = args.config
    if config.staged:
        variants = {name: _over_stages(variant) for name, variant in variants.items()}
        eager_step = pipeline.eager_step
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    sequences = config.microbatch * config.microbatches
    num_flops = _flops(config)
    return args, Workload(
        model="gpt3",
        build=lambda config, device: State(config, device, rank, world_size),
        variants=variants,
        reference=eager_step,
        card=_card(config, device, num_flops, ranks.dp),
        notes=notes,
        flops_per_step=num_flops,
        flops_convention=flops.CAUSAL_HALF,
        items_per_step=config.sequence * sequences // (ranks.tp * ranks.pp),
        unit="tokens",
        peak_flops=flops.peak_flops(gpu, "fp8" if config.precision in FP8 else config.precision),
        hyperparameters=hyperparameters(config, ranks.dp),
        kinds=ABOUT["kinds"],
        promises=ABOUT["promises"],
    )


def _over_stages(variant: Declared) -> Declared:
    """The variant as several stages or chunks have it."""
    return replace_fields(variant, make=OF_STAGES.get(variant.name, "gpt3.workload:of_one_stage"), options={})


def of_one_stage(state):
    """In the place of a constructor that knows one stage alone: raises Unsupported."""
    names = ", ".join(OF_STAGES)
    raise Unsupported(f"over stages or chunks, and with --graph-unit chunk, there are {names} alone")


def _flops(config):
    """Return the FLOP of a step and a GPU: the mean over all stages, or those of the stage that runs alone."""
    attention = config.heads * config.head_dim
    all_stages = not config.alone
    model = flops.Transformer(
        layers=config.layers if all_stages else config.stage_layers,
        sequence=config.sequence,
        hidden=config.hidden,
        q_width=attention,
        kv_width=attention,
        ffn=config.ffn,
        vocab=config.vocab if all_stages or config.pp_rank == config.pp - 1 else 0,
        mlp_matrices=2,
    )
    return config.microbatch * config.microbatches * model.flops() / (config.pp if all_stages else 1)


def resolve(args, device: torch.device, data_ranks: int = 1):
    """(arguments with layer, precision and number of layers as they can run on `device`, notes on what changed)."""
    config, run, notes = args.config, args.run, []
    if config.precision == "fp32":
        config = replace_fields(config, layer="torch")
    if config.layer == "auto":
        fault = None if device.type == "cpu" else fp8.te_fault(fp8=config.precision in FP8)
        on_te = device.type == "cuda" and fault is None
        config = replace_fields(config, layer="te" if on_te else "torch")
        if fault and config.precision in FP8:
            config = replace_fields(config, precision="bf16")
        if fault:
            notes.append(f"plain-PyTorch layer in {config.precision}: {fault}")
    if config.layer == "te" and device.type == "cpu":
        raise ValueError("--layer te needs a GPU; take --layer torch")
    if config.layer == "torch" and config.precision in FP8:
        notes.append("FP8 emulated: operands rounded to FP8, GEMMs in bf16")
    if config.alone:
        notes.append(
            f"stage {config.pp_rank} of {config.pp} by itself: no tensor-parallel and no pipeline communication, edges "
            "fed with fixed tensors, no optimizer"
        )
    if device.type == "cpu":
        gpt3_config.require(config, host_state.available_host_bytes())
    else:
        # The same on all ranks.
        free = min(of_all_ranks(torch.cuda.mem_get_info(device)[0]))
        smaller = gpt3_config.fit(config, free, data_ranks)
        if smaller.layers < config.layers:
            run = replace_fields(run, preset=f"{run.preset}-l{smaller.layers}")
            notes.append(fewer_layers(smaller, config, free / 2**30))
            config = smaller
    return replace_fields(args, config=config, run=run), notes


def _card(config, device, num_flops, data_ranks):
    share = "one GPU's share of GPT-3 175B" if config.hidden == 12288 else "toy widths"
    predicted = gpt3_config.predicted_bytes(config, data_ranks) / 2**30
    memory = f" | memory predicted {predicted:.1f} GiB" if device.type == "cuda" else ""
    lines = [
        f"{config.stage_layers} layers, hidden {config.hidden}, heads {config.heads}, ffn {config.ffn}, "
        f"{gpt3_config.num_parameters(config) / 1e6:,.1f} M parameters: {share}",
        f"{config.microbatches} microbatches of {config.microbatch} x {config.sequence} tokens | {config.layer} layer, "
        f"{config.precision} | {num_flops / 1e12:.3g} TFLOP/step{memory}",
    ]
    if config.alone:
        lines.append(
            f"stage {config.pp_rank} of {config.pp} by itself, {config.chunks} chunks of "
            f"{config.stage_layers // config.chunks} layers: edges fed with fixed tensors, no optimizer"
        )
    elif config.tp * config.pp > 1 or config.staged:
        lines.append(f"tensor ranks {config.tp}, stages {config.pp} of {config.chunks} chunks, data ranks {data_ranks}")
    return lines
