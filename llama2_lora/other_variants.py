"""The variants beside train.py's: Transformer Engine's make_graphed_callables, torch.compile, parameterized launches.

They run train.py's eager step, which calls the layers that `state.stack.calls` lists.
"""

import torch

from common.precision import nvfp4
from common.precision.transformer_engine import undone_where_it_fails
from graph_worth import Compiled, Parameterized, Unsupported, require_compiler, variant
from llama2_lora.state import State
from llama2_lora.train import GraphedStep, eager_step


@variant(
    "graph_layer_te",
    kind="graph",
    help="Transformer Engine's make_graphed_callables over its modules: two graphs per layer, one slot",
    graphs=lambda c: 2 * c.layers,
    parity="bitwise",
    reference="eager_te",
    headline=True,
    builds=("te",),
    traits={"layer": "te"},
    formerly="graph_te",
)
class GraphedByTransformerEngine:
    """NVIDIA's mechanism: make_graphed_callables over Transformer Engine's layers, one slot of two graphs for each.

    The wrapped layers are called like layers under autograd. Each call copies its input into the slot, and each
    backward its gradient. The adapters' gradients come out of the graphs and are added to their buffers eagerly. A step
    puts the functions that it returns (gpt3/other_variants.py) into `stack.calls` and takes them out again.
    """

    def __init__(self, state: State, capture):
        if state.kind != "te":
            raise Unsupported("graph_layer_te needs Transformer Engine's layers")
        from transformer_engine.pytorch import make_graphed_callables

        self.state, stack = state, state.stack
        pool, capture.strategy = capture.pool(), "te.make_graphed_callables, order [1, -1]"
        capture.warm_up(eager_step)
        is_quantized = state.config.precision != "bf16"
        # Below the first layer nothing needs a gradient.
        samples = tuple((torch.randn_like(stack.x).requires_grad_(index > 0),) for index in range(len(stack.layers)))
        with capture.capturing(), pool.adopt(), undone_where_it_fails(stack.layers):
            self.calls = make_graphed_callables(
                tuple(stack.layers),
                samples,
                allow_unused_input=True,
                enabled=is_quantized,
                recipe=stack.fp8.recipe if is_quantized else None,
                # Frozen FP8 weights: there is nothing to cast in a graph.
                cache_quantized_params=False,
                clone_param_grads_on_return=False,
                _order=[1, -1],
                _num_layers_per_chunk=len(stack.layers),
            )

    def step(self, index: int):
        stack = self.state.stack
        stack.calls = self.calls
        try:
            eager_step(self.state, index)
        finally:
            stack.calls = list(stack.layers)

    def close(self):
        for call in self.calls:
            call.reset()


@variant(
    "compile",
    kind="compile",
    help="torch.compile of plain PyTorch layers (default mode, no graphs)",
    parity=1e-3,  # compiled kernels round otherwise
    builds=("torch_bf16",),
    apart="compiled",
)
def compiled(state: State, capture, mode="default"):
    require_compiler(state.device)
    # Dropout draws as it does in eager layers.
    with torch._inductor.config.patch(fallback_random=True):
        return Compiled(state, eager_step, _layers(state), "each layer", mode, capture=capture)


@variant(
    "reduce_overhead",
    kind="compile",
    help="torch.compile(mode='reduce-overhead'): graphs as torch makes them",
    graphs=None,
    parity=1e-3,  # compiled kernels round otherwise
    builds=("torch_bf16",),
    apart="reduce_overhead",
)
def reduce_overhead(state: State, capture):
    return compiled(state, capture, "reduce-overhead")


@variant(
    "graph_step_nvfp4",
    kind="graph",
    help="graph_step in FP4, or in its numbers (--precision nvfp4_emulated), which is slow",
    graphs=1,
    parity="bitwise",
    builds=("nvfp4_emulated",),
)
def in_fp4(state: State, capture):
    nvfp4.require_asked(state.config.precision)
    return GraphedStep(state, capture)


@variant(
    "graph_parameterized",
    kind="graph",
    help="forward and backward of each layer as graphs without a pool, launched on the memory of the eager step",
    graphs=None,
    parity="bitwise",
    builds=("torch_bf16",),
    apart="parameterized",
)
def parameterized(state: State, capture):
    return Parameterized(state, eager_step, _layers(state), "each layer", capture=capture)


def _layers(state):
    """The functions that the compiler takes."""
    if state.kind != "torch" or state.config.precision != "bf16":
        raise Unsupported(
            "torch.compile cannot see into handwritten layers, Transformer Engine's or FP8 modules: compare all "
            "variants with --layer torch --precision bf16"
        )
    return [(layer, "forward") for layer in state.stack.layers]
