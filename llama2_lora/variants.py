"""Llama 2 LoRA's variants: what each captures, what it promises, and where it is made (no torch here).

The eager step and our captures are in train.py, the others in other_variants.py. A variant without a trait `layer` runs
the layers that --layer names.
"""

from common.variant_table import Declared, table

# torch.compile needs plain layers in bf16: it cannot see into our kernels or Transformer Engine's.
TORCH_BF16 = {"layer": "torch", "precision": "bf16"}
BUILDS = {"te": {"layer": "te"}, "torch_bf16": TORCH_BF16, "parameterized": TORCH_BF16}
STEP = {"step": "llama2_lora.train:eager_step"}
EXACT = {"parity": "bitwise", "headline": True}
TE = {"reference": "eager_te", "builds": ("te",), "traits": {"layer": "te"}}


def graphs_of_layers(config) -> int:
    """A graph for each layer's forward, and one for its backward."""
    return 2 * config.layers


VARIANTS = table(
    Declared(
        "eager",
        "kernels launched one by one",
        kind="eager",
        make="common.variant:Eager",
        options=STEP,
        builds=("", "torch_bf16", "parameterized"),
        **EXACT,
    ),
    Declared(
        "graph_layer",
        "a forward and a backward graph per layer, one pool, buffers chained",
        kind="graph",
        make="llama2_lora.train:GraphedLayers",
        graphs=graphs_of_layers,
        replays=graphs_of_layers,
        formerly="graph",
        **EXACT,
    ),
    Declared(
        "graph_step",
        "the whole step in one graph: all layers, loss, clipping and AdamW",
        kind="graph",
        make="llama2_lora.train:GraphedStep",
        graphs=1,
        replays=1,
        formerly="one_graph",
        **EXACT,
    ),
    Declared(
        "eager_te",
        "eager, with Transformer Engine's modules",
        kind="eager",
        make="common.variant:Eager",
        options=STEP,
        **EXACT,
        **TE,
    ),
    Declared(
        "graph_layer_te",
        "Transformer Engine's make_graphed_callables over its modules: two graphs per layer, one slot",
        kind="graph",
        make="llama2_lora.other_variants:GraphedByTransformerEngine",
        options=STEP,
        graphs=graphs_of_layers,
        replays=graphs_of_layers,
        formerly="graph_te",
        **EXACT,
        **TE,
    ),
    Declared(
        "compile",
        "torch.compile of plain PyTorch layers (default mode, no graphs)",
        kind="compile",
        make="llama2_lora.other_variants:compiled",
        options={**STEP, "mode": "default"},
        parity=1e-3,  # compiled kernels round otherwise
        builds=("torch_bf16",),
    ),
    Declared(
        "reduce_overhead",
        "torch.compile(mode='reduce-overhead'): graphs as torch makes them",
        kind="compile",
        make="llama2_lora.other_variants:compiled",
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
        make="llama2_lora.other_variants:parameterized",
        options=STEP,
        graphs=None,
        replays=None,
        parity="bitwise",
        builds=("parameterized",),
    ),
)
