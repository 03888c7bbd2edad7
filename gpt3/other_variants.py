"""GPT-3's layers otherwise: Transformer Engine's own graphs, torch.compile, parameterized launches.

They capture what gpt3/train.py captures. te.make_graphed_callables (version 2.20.2,
transformer_engine/pytorch/graph.py) takes the layers, sample inputs and `_order`, the forward (1) and backward (-1)
passes of a step. It captures in that order, a graph for each pass of each layer, all in one pool. A pair of graphs with
its static buffers is a slot; slots come in the order of microbatches and within one in that of layers. The returned
callables are called like layers, and a call

- copies its input and its output's gradient into the slot: buffers are not chained from layer to layer;
- casts the weights to FP8 in every slot, by kernels that a flag on the device turns into no-ops. The first layer called
  in a microbatch sets it from is_first_microbatch. In the capture the modules know no first microbatch;
- for the same reason always adds to main_grad, which therefore is zeroed in every step (`accumulate_all`). TE could
  overwrite it for a weight whose `overwrite_main_grad` is set, but in each microbatch alike;
- updates the FP8 scales outside of the graphs, as eager layers do: the forward ones where `fp8.forward()` ends, the
  backward ones after the graph of the first layer's backward.

The hooks of gpt3/model.py run in the captures, so gradients of biases and norms are added to main_grad there. With
`_order` it returns functions and leaves the layers' `forward` as it is, so eager steps run no graphs. But a process has
one flag on the device, and any later capture of a layer would read it. So each of these variants has a flag of its own,
which is Transformer Engine's between `enter` and `leave` alone.
"""

import torch

from common.precision.transformer_engine import exchange_flag, undone_where_it_fails
from gpt3.pipeline import stage as pipeline
from gpt3.state import State
from gpt3.train import GraphedLayers, eager_step
from graph_worth import Compiled, Parameterized, Pool, Unsupported, mark, require_compiler, section, variant
from graph_worth.parallel import collectives

# Flags of make_graphed_callables: no gradient is cloned, and slots share static inputs and output gradients.
REUSED = {"clone_param_grads_on_return": False, "_reuse_graph_input_output_buffers": True}


class ByTransformerEngine:
    """Graphs of make_graphed_callables, and the flag by which they cast the weights (None in bf16)."""

    state: State
    pool: Pool
    flag: torch.Tensor | None = None

    def make_callables(self, capture, make_graphed_callables, samples, order, num_layers: int, **options) -> None:
        """self.callables of the state's layers, in the order of samples, with the flag taken out."""
        state, fp8 = self.state, self.state.config.precision == "fp8"
        with capture.capturing(), self.pool.adopt(), undone_where_it_fails(state.layers):
            try:
                self.callables = make_graphed_callables(
                    tuple(state.layers),
                    samples,
                    enabled=fp8,
                    recipe=state.fp8.recipe if fp8 else None,
                    cache_quantized_params=fp8,
                    _order=order,
                    _num_layers_per_chunk=num_layers,
                    **options,
                )
            finally:
                self.flag = exchange_flag(None)

    def enter(self):
        """Put in the flag that these graphs read."""
        exchange_flag(self.flag)

    def leave(self):
        """Take the flag out, as other variants' captures need it."""
        exchange_flag(None)

    def close(self):
        for layer in self.callables:
            layer.reset()


@variant(
    "graph_layer_te",
    kind="graph",
    help="NVIDIA's submission: Transformer Engine's make_graphed_callables, a slot for every microbatch",
    graphs=lambda c: c.layer_passes,
    parity="bitwise",
    headline=True,
    formerly="graph_te",
    when=lambda c: c.is_plain,
)
class AsSubmitted(ByTransformerEngine):
    """A slot for every microbatch, 2 x layers x microbatches graphs, and nothing is copied that need not be.

    Slots share static inputs and output gradients (`_reuse_graph_input_output_buffers`): those of a microbatch are
    free after its backward, and outputs go back to the pool then.

    Raises Unsupported without a GPU or Transformer Engine.
    """

    def __init__(self, state: State, capture):
        make_graphed_callables = require(state)
        num_layers, num_slots = len(state.layers), state.config.microbatches
        self.state, self.pool = state, capture.pool()
        flags = REUSED
        if state.config.tp > 1:
            # Named where there is one: Transformer Engine keeps amaxes by group.
            flags = {"amax_reduction_group": collectives.process_group(state.groups.tensor), **REUSED}
        capture.strategy = "te.make_graphed_callables, order [1, -1]" + (f" x {num_slots}" if num_slots > 1 else "")
        capture.warm_up(eager_step)
        # (x,) of each layer in the first microbatch, then of each in the second. No two layers may share memory, two
        # microbatches may: Transformer Engine would share it then anyway.
        sample = state.embedding(state.inputs["tokens"][0]).detach()
        samples = tuple((sample.clone().requires_grad_(),) for _ in state.layers) * num_slots
        order = [1, -1] * num_slots
        self.make_callables(capture, make_graphed_callables, samples, order, num_layers, **flags)
        self.slots = [self.callables[slot * num_layers :][:num_layers] for slot in range(num_slots)]

    def step(self, index: int):
        state = self.state
        state.begin_step(index, accumulate_all=True)
        for microbatch in range(state.config.microbatches):
            with section("embedding"):
                hidden = state.embedding(state.inputs["tokens"][microbatch])
            with section("forward"), state.fp8.forward():
                for layer in self.slots[microbatch]:
                    hidden = layer(hidden, is_first_microbatch=microbatch == 0)
            loss = state.microbatch_loss(hidden, microbatch)
            mark()
            with section("backward"):
                loss.backward()
            mark()
        with section("optimizer"):
            state.reduce_gradients()
            state.adam.step()
        state.keep_results(index)


@variant("graph_layer_te", graphs=lambda c: c.layer_passes, when=lambda c: c.staged)
class StageAsSubmitted(ByTransformerEngine, pipeline.Stage):
    """`AsSubmitted` over a stage of a pipeline: a slot for each layer and microbatch, in the stage's own order.

    Sample inputs and what is returned come by chunk, within one by microbatch, then by layer. Slots share static inputs
    where one's backward pass is over before the other's forward pass begins, which Transformer Engine finds out from
    the order; it leaves an input's gradient valid until the next chunk's backward pass has ended, and by then it is
    sent. FP8 scales are updated once a step, as in gpt3/pipeline/stage.py.

    Raises Unsupported without a GPU or Transformer Engine.
    """

    accumulate_all = True

    def __init__(self, state: State, capture):
        super().__init__(state)
        make_graphed_callables, self._num_layers = require(state), len(state.chunks[0])
        self.pool, order = capture.pool(), [step for step, _ in state.steps]
        capture.strategy = f"te.make_graphed_callables, order {order}"
        capture.warm_up(pipeline.eager_step)
        num_slots = len(state.layers) * state.config.microbatches
        samples = tuple((torch.zeros_like(state.empty_hidden()).requires_grad_(),) for _ in range(num_slots))
        group = collectives.process_group(state.groups.tensor)
        flags = {"amax_reduction_group": group, **REUSED}
        self.make_callables(capture, make_graphed_callables, samples, order, self._num_layers, **flags)

    def layers(self, chunk, microbatch):
        start = ((chunk - 1) * self.state.config.microbatches + microbatch) * self._num_layers
        return self.callables[start : start + self._num_layers]


def require(state: State):
    """te.make_graphed_callables; raises Unsupported where graph_layer_te cannot run."""
    if state.config.layer != "te" or state.device.type != "cuda":
        raise Unsupported("graph_layer_te needs a GPU and Transformer Engine: make te")
    from transformer_engine.pytorch import make_graphed_callables

    return make_graphed_callables


@variant(
    "compile",
    kind="compile",
    help="torch.compile of the layers (default mode, no graphs)",
    parity=1e-3,  # compiled kernels round otherwise
    builds=("torch_bf16",),
    apart="compiled",
    when=lambda c: c.is_plain,
)
def compiled(state: State, capture, mode="default"):
    require_compiler(state.device)
    return Compiled(state, eager_step, _layers(state), "each layer", mode, capture=capture)


@variant(
    "graph_layer_compiled",
    kind="compile",
    help="graph_layer over layers that torch.compile made: what a graph adds to the compiler",
    graphs=lambda c: c.layer_passes,
    parity=1e-3,  # compiled kernels round otherwise
    builds=("torch_bf16",),
    apart="compiled",
    formerly="graph_layer_compile",
    when=lambda c: c.is_plain,
)
def compiled_graphed(state: State, capture):
    strategy = "each layer's forward and backward, by torch.compile"
    return compiled(state, capture).graphed(GraphedLayers, strategy)


@variant(
    "reduce_overhead",
    kind="compile",
    help="torch.compile(mode='reduce-overhead'): graphs as torch makes them",
    graphs=None,
    parity=1e-3,  # compiled kernels round otherwise
    builds=("torch_bf16",),
    apart="reduce_overhead",
    when=lambda c: c.is_plain,
)
def reduce_overhead(state: State, capture):
    return compiled(state, capture, "reduce-overhead")


@variant(
    "graph_parameterized",
    kind="graph",
    help="forward and backward of each layer as graphs without a pool, launched on the memory of the eager step",
    graphs=None,
    parity="bitwise",
    builds=("torch_bf16",),
    apart="parameterized",
    when=lambda c: c.is_plain,
)
def parameterized(state: State, capture):
    parameters = [list(layer.parameters()) for layer in state.layers]
    return Parameterized(state, eager_step, _layers(state), "each layer", parameters, capture=capture)


def _layers(state):
    """The functions that the compiler takes."""
    if state.config.layer != "torch" or state.config.precision != "bf16":
        raise Unsupported(
            "te and FP8 modules opt out of torch.compile: compare all variants with --layer torch --precision bf16"
        )
    if state.config.tp > 1:
        raise Unsupported("the layers are compiled whole, without the collectives of several tensor ranks: --tp 1")
    return [(layer, "forward") for layer in state.layers]
