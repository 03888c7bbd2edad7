"""GPT-3's variants: what each is, what it promises, and where it is made (no torch here).

The eager step and the captures are in train.py, the others in other_variants.py. With several stages or chunks
workload.py puts the constructors of pipeline/ in their places.
"""

from common.variant_table import Declared, table

# What torch.compile needs: te and FP8 modules opt out of it.
TORCH_BF16 = {"layer": "torch", "precision": "bf16"}
BUILDS = {"torch_bf16": TORCH_BF16, "parameterized": TORCH_BF16}
STEP = {"step": "gpt3.train:eager_step"}


def graphs_of_units(config) -> int:
    """A graph for each unit's forward and backward in each microbatch. A unit is a layer, or with a flag a chunk."""
    return 2 * (config.chunks if config.unit == "chunk" else config.stage_layers) * config.microbatches


def graphs_of_layers(config) -> int:
    """A graph for each layer's forward and backward in each microbatch."""
    return 2 * config.stage_layers * config.microbatches


VARIANTS = table(
    Declared(
        "eager",
        "kernels launched one by one",
        kind="eager",
        make="common.variant:Eager",
        options=STEP,
        parity="bitwise",
        headline=True,
        builds=("", "torch_bf16", "parameterized"),
    ),
    Declared(
        "graph_layer",
        "our own forward and backward graphs per layer and microbatch, one pool, buffers chained",
        kind="graph",
        make="gpt3.train:Graphed",
        graphs=graphs_of_units,
        replays=graphs_of_units,
        parity="bitwise",
        headline=True,
        formerly="graph",
    ),
    Declared(
        "graph_layer_te",
        "NVIDIA's submission: Transformer Engine's make_graphed_callables, a slot for every microbatch",
        kind="graph",
        make="gpt3.other_variants:AsSubmitted",
        options=STEP,
        graphs=graphs_of_layers,
        replays=graphs_of_layers,
        parity="bitwise",
        headline=True,
        formerly="graph_te",
    ),
    Declared(
        "graph_layer_te_slot",
        "graph_layer_te with one slot that every microbatch uses again",
        kind="graph",
        make="gpt3.other_variants:OneSlot",
        options=STEP,
        graphs=lambda config: 2 * config.stage_layers,
        replays=graphs_of_layers,
        parity="bitwise",
        formerly="graph_te_slot",
    ),
    Declared(
        "graph_layer_te_default",
        "graph_layer_te with Transformer Engine's default flags: gradients cloned, no buffer reused",
        kind="graph",
        make="gpt3.other_variants:Defaults",
        options=STEP,
        graphs=graphs_of_layers,
        replays=graphs_of_layers,
        parity="bitwise",
        formerly="graph_te_default",
    ),
    Declared(
        "graph_layer_optimizer",
        "graph_layer, with clipping and Adam in a graph of their own",
        kind="graph",
        make="gpt3.train:GraphedOptimizer",
        graphs=lambda config: graphs_of_layers(config) + 1,
        replays=lambda config: graphs_of_layers(config) + 1,
        parity="bitwise",
        formerly="graph_opt",
    ),
    Declared(
        "compile",
        "torch.compile of the layers (default mode, no graphs)",
        kind="compile",
        make="gpt3.other_variants:compiled",
        options=STEP,
        parity=1e-3,  # compiled kernels round otherwise
        builds=("torch_bf16",),
    ),
    Declared(
        "reduce_overhead",
        "torch.compile(mode='reduce-overhead'): graphs as torch makes them",
        kind="compile",
        make="gpt3.other_variants:compiled",
        options={**STEP, "mode": "reduce-overhead"},
        graphs=None,
        replays=None,
        parity=1e-3,  # compiled kernels round otherwise
        builds=("torch_bf16",),
    ),
    Declared(
        "graph_parameterized",
        "forward and backward of each layer as graphs without a pool, launched on the memory of the eager step",
        kind="graph",
        make="gpt3.other_variants:parameterized",
        options=STEP,
        graphs=None,
        replays=None,
        parity="bitwise",
        builds=("parameterized",),
    ),
)
