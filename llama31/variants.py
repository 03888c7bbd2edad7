"""Llama 3.1's variants: what each is, what it promises, and where it is made (no torch here).

The eager step and the captures are in train.py, graphs of single layers in pipeline/stage_graphs.py, the others in
other_variants.py.
"""

from common.variant_table import Declared, table

# What torch.compile needs: te, FP8 and FP4 modules leave the compiler.
TORCH_BF16 = {"layer": "torch", "precision": "bf16", "weights": "bf16"}
BUILDS = {
    "validate": {"validate_every": 4},  # training and validation, a graph each, as in NVIDIA's submission
    "torch_bf16": TORCH_BF16,
    "parameterized": TORCH_BF16,
}
STEP = {"step": "llama31.train:eager_step"}


def has_equal_stages(config) -> bool:
    """Return whether all stages of a pipeline have the same number of layers."""
    return len(set(config.stage_sizes)) == 1


def layer_replays(config) -> int | None:
    """A forward and a backward graph for each layer and microbatch; None where it depends on the stage."""
    return replays_of(config, 2 * config.stage_sizes[0] * config.microbatches) if has_equal_stages(config) else None


def layer_graphs(config) -> int | None:
    """As replays, and the validation's."""
    return 2 * config.stage_sizes[0] * config.microbatches + 1 if has_equal_stages(config) else None


def passes(config) -> int:
    """Graphs of microbatches: one for each, in a pipeline one for each chunk's forward and for its backward."""
    return config.microbatches * (2 * config.chunks if config.pp > 1 else 1)


def replays_of(config, count: int) -> int | None:
    """`count` replays a step, None where steps differ: with other numbers of microbatches, or a validation in some."""
    differ = set(config.counts) != {config.microbatches} or config.validate_every
    return None if differ else count


VARIANTS = table(
    Declared(
        "eager",
        "kernels launched one by one",
        kind="eager",
        make="common.variant:Eager",
        options=STEP,
        parity="bitwise",
        headline=True,
        builds=("", "validate", "torch_bf16", "parameterized"),
    ),
    Declared(
        "graph_layer",
        "a forward and a backward graph per layer and microbatch, one pool, buffers chained",
        kind="graph",
        make="llama31.pipeline.stage_graphs:StageGraphs",
        graphs=layer_graphs,
        replays=layer_replays,
        parity="bitwise",
        formerly="layer",
    ),
    Declared(
        "graph_microbatch",
        "a graph per microbatch, forward and backward",
        kind="graph",
        make="llama31.pipeline.stage_graphs:graphed_microbatches",
        graphs=lambda config: passes(config) + 1,
        replays=lambda config: replays_of(config, passes(config)),
        parity="bitwise",
        formerly="chunk",
    ),
    Declared(
        "graph_fwd_bwd",
        "NVIDIA's submission: forward and backward of all microbatches, with their communication, in one graph",
        kind="graph",
        make="llama31.train:Graphed",
        graphs=2,  # and the validation's
        replays=lambda config: replays_of(config, 1),
        parity="bitwise",
        headline=True,
        builds=("", "validate"),
        formerly="graph",
    ),
    Declared(
        "graph_step",
        "graph_fwd_bwd, with clipping and Adam in it",
        kind="graph",
        make="llama31.train:GraphedStep",
        graphs=2,
        replays=lambda config: replays_of(config, 1),
        parity="bitwise",
        headline=True,
        formerly="full_step",
    ),
    Declared(
        "compile",
        "torch.compile of the layers (default mode, no graphs)",
        kind="compile",
        make="llama31.other_variants:compiled",
        options={**STEP, "mode": "default"},
        parity=1e-3,  # compiled kernels round otherwise
        builds=("torch_bf16",),
    ),
    Declared(
        "reduce_overhead",
        "torch.compile(mode='reduce-overhead'): graphs as torch makes them",
        kind="compile",
        make="llama31.other_variants:compiled",
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
        make="llama31.other_variants:parameterized",
        options=STEP,
        graphs=None,
        replays=None,
        parity="bitwise",
        builds=("parameterized",),
    ),
    Declared(
        "eager_nan_checks",
        "eager, with the NaN checks that a graph over all microbatches forbids",
        kind="eager",
        make="llama31.other_variants:CheckedEager",
        options=STEP,
        parity="bitwise",
        traits={"extra_work": "reads each microbatch's loss and the gradient norm on the host"},
    ),
)
