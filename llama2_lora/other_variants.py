"""The variants beside train.py's: Transformer Engine's make_graphed_callables, torch.compile, parameterized launches.

Each is made from a state and train.py's eager step, which calls the layers that `state.stack.calls` lists.
"""

import torch

from common.capture.pool import Pool
from common.training.precision.transformer_engine import undone_where_it_fails
from common.variant import Capture, Compiled, Unsupported, require_compiler, warm_up
from common.variant_parameterized import Parameterized


class GraphedByTransformerEngine:
    """NVIDIA's mechanism: make_graphed_callables over Transformer Engine's layers, one slot of two graphs for each.

    The wrapped layers are called like layers under autograd. Each call copies its input into the slot, and each
    backward its gradient. The adapters' gradients come out of the graphs and are added to their buffers eagerly.

    With `_order` Transformer Engine returns functions and leaves the layers' own `forward` as it is (version 2.20.2,
    transformer_engine/pytorch/graph.py). A step puts them into `stack.calls` and takes them out again, so there is
    nothing to enter or leave.
    """

    def __init__(self, state, step):
        if state.kind != "te":
            raise Unsupported("graph_layer_te needs Transformer Engine's layers")
        from transformer_engine.pytorch import make_graphed_callables

        self.state, self._step, stack = state, step, state.stack
        self.pool = Pool(state.device)
        self.capture = Capture(strategy="te.make_graphed_callables, order [1, -1]", pools=[self.pool])
        warm_up(state, self.capture, step)
        fp8 = state.config.precision == "fp8"
        # Below the first layer nothing needs a gradient.
        samples = tuple((torch.randn_like(stack.x).requires_grad_(index > 0),) for index in range(len(stack.layers)))
        with self.capture.timed("capture_s"), self.pool.adopt(), undone_where_it_fails(stack.layers):
            self.calls = make_graphed_callables(
                tuple(stack.layers),
                samples,
                allow_unused_input=True,
                enabled=fp8,
                recipe=stack.fp8.recipe if fp8 else None,
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
            self._step(self.state, index)
        finally:
            stack.calls = list(stack.layers)

    def replays_of(self, index: int) -> int:
        return 2 * self.state.config.layers

    def close(self):
        for call in self.calls:
            call.reset()
        self.pool.release()


def compiled(state, step, mode: str) -> Compiled:
    """torch.compile of every layer; plain bf16 layers only."""
    require_compiler(state.device)
    # Dropout draws as it does in eager layers.
    with torch._inductor.config.patch(fallback_random=True):
        return Compiled(state, step, _layers(state), "each layer", mode)


def parameterized(state, step) -> Parameterized:
    """Every layer's forward and backward as parameterized launches; plain bf16 layers only."""
    return Parameterized(state, step, _layers(state), "each layer")


def _layers(state):
    """The functions that the compiler takes."""
    if state.kind != "torch" or state.config.precision != "bf16":
        raise Unsupported(
            "torch.compile cannot see into handwritten layers, Transformer Engine's or FP8 modules: compare all "
            "variants with --layer torch --precision bf16"
        )
    return [(layer, "forward") for layer in state.stack.layers]
