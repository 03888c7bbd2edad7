"""The variants of the mixture of experts: what each is, what it promises, and where it is made (no torch here).

The eager step and the captures are in train.py, the others in other_variants.py.
"""

from common.variant_table import Declared, table

TRAIN, OTHER, STATIC = "moe.train:", "moe.other_variants:", "moe.static_buffers:"
PASSES = {"passes": f"{TRAIN}forward_and_backward"}
STEP = {"step": f"{TRAIN}eager_step"}


def two_a_layer(config) -> int:
    """A graph for the forward and one for the backward of each layer in each microbatch."""
    return 2 * config.layers * config.microbatches


PARTS = {"kind": "graph", "graphs": two_a_layer, "replays": two_a_layer, "parity": "bitwise"}
ONE_GRAPH = {"kind": "graph", "graphs": 1, "replays": 1, "parity": "bitwise"}

VARIANTS = table(
    Declared(
        "eager",
        "kernels launched one by one",
        kind="eager",
        make="common.variant:Eager",
        options=STEP,
        parity="bitwise",
        headline=True,
    ),
    Declared(
        "graph_attn",
        "attention of each layer in graphs; router and experts eager",
        make=f"{TRAIN}GraphedParts",
        options={"scope": "attn"},
        **PARTS,
    ),
    Declared(
        "graph_attn_router",
        "attention and router of each layer in graphs; the rows' order and the experts eager",
        make=f"{TRAIN}GraphedParts",
        options={"scope": "attn_router"},
        **PARTS,
    ),
    Declared(
        "graph_attn_router_preprocess",
        "Megatron Bridge's scope: attention, router and the rows' order in graphs; the experts eager",
        make=f"{TRAIN}GraphedParts",
        options={"scope": "attn_router_preprocess"},
        headline=True,
        **PARTS,
    ),
    Declared(
        "graph_layer",
        "each dropless layer whole, forward and backward in graphs, buffers chained",
        make=f"{TRAIN}GraphedParts",
        options={"scope": "layer"},
        headline=True,
        **PARTS,
    ),
    Declared(
        "graph_fwd_bwd",
        "forward and backward of all microbatches in one graph; optimizer eager",
        make=f"{TRAIN}GraphedPasses",
        **ONE_GRAPH,
    ),
    Declared(
        "graph_step",
        "the whole step in one graph: all microbatches, clipping and Adam",
        make=f"{TRAIN}GraphedStep",
        headline=True,
        **ONE_GRAPH,
    ),
    Declared(
        "eager_static",
        "eager with fixed numbers of rows between ranks; an overflow runs the pass again without them",
        kind="eager",
        make=f"{STATIC}EagerStatic",
        options=PASSES,
        parity="bitwise",
        traits={"extra_work": "sends padding, and reads after each pass whether rows were left out"},
    ),
    Declared(
        "graph_static",
        "forward and backward of all microbatches with their exchange in one graph; reruns as eager_static",
        make=f"{STATIC}GraphedStatic",
        options=PASSES,
        **ONE_GRAPH,
    ),
    Declared(
        "compile",
        "torch.compile of each layer's attention and router; experts in their own kernels, no graphs",
        kind="compile",
        make=f"{OTHER}CompiledParts",
        options={**STEP, "mode": "default"},
        parity=1e-3,  # compiled kernels round otherwise
    ),
    Declared(
        "reduce_overhead",
        "the same with torch.compile(mode='reduce-overhead'): graphs as torch makes them",
        kind="compile",
        make=f"{OTHER}CompiledParts",
        options={**STEP, "mode": "reduce-overhead"},
        graphs=None,
        replays=None,
        parity=1e-3,  # compiled kernels round otherwise
    ),
    Declared(
        "eager_padded",
        "eager with a fixed number of rows for each expert: rows are dropped and padded",
        kind="eager",
        make=f"{OTHER}EagerPadded",
        options=STEP,
        reference="eager_padded",
        parity="bitwise",
        traits={"extra_work": "pads experts to their capacity, and drops what is beyond it"},
    ),
    Declared(
        "graph_moe_padded",
        "each layer whole in graphs as Megatron takes it, rows dropped and padded to a capacity",
        make=f"{OTHER}GraphedPadded",
        options={"parts": f"{TRAIN}GraphedParts"},
        reference="eager_padded",
        **PARTS,
    ),
)
