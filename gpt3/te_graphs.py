"""GPT-3's layers in Transformer Engine's own graphs, te.make_graphed_callables: as submitted and in two other forms.

make_graphed_callables (read in version 2.20.2, transformer_engine/pytorch/graph.py) takes the layers, sample inputs and
`_order`, the forward (1) and backward (-1) passes of a step. It warms up and captures in that order, a graph for each
pass of each layer, all in one pool. A pair of graphs with its static buffers is a slot; its sample inputs, and what is
returned, come in the order of microbatches and within one in that of layers. The returned callables are called like
layers, and a call

- copies its input into the slot, its output's gradient too: buffers are not chained from layer to layer;
- casts the weights to FP8 in every slot, by kernels that a flag on the device turns into no-ops. The first layer called
  in a microbatch sets it from is_first_microbatch. In the capture the modules know no first microbatch;
- for the same reason always adds to main_grad, which therefore is zeroed in every step (`accumulate_all`). TE could
  overwrite it for a weight whose `overwrite_main_grad` is set, but in each microbatch alike;
- updates the FP8 scales outside of the graphs, as eager layers do: the forward ones where `fp8.forward()` ends, the
  backward ones after the graph of the first layer's backward.

The hooks of gpt3/model.py run in the captures: what biases and norms get is added to main_grad there, and no gradient
of theirs is returned. There is no dropout, hence no random state to register.
"""

from typing import ClassVar

from common.capture import Pool
from common.measure import Capture, Unsupported, mark, section
from gpt3.state import State


class AsSubmitted:
    """A slot for every microbatch, 2 x layers x microbatches graphs, and nothing is copied that need not be.

    Slots share static inputs and output gradients (`_reuse_graph_input_output_buffers`): those of a microbatch are
    free after its backward, and outputs go back to the pool then. What this costs over one slot is the graphs' own
    memory, and a longer capture, since warm-up and capture go through every slot.

    warm_up(state, capture): eager steps before the capture. Raises Unsupported without a GPU or Transformer Engine.
    """

    name = "graph_te"
    one_slot = False
    flags: ClassVar = {"clone_param_grads_on_return": False, "_reuse_graph_input_output_buffers": True}

    def __init__(self, state: State, warm_up):
        make_graphed_callables = require(state, self.name)
        config = state.config
        num_slots = 1 if self.one_slot else config.microbatches
        order = [1, -1] * num_slots
        self.state = state
        self.pool = Pool(state.device)
        strategy = "te.make_graphed_callables, order [1, -1]" + (f" x {num_slots}" if num_slots > 1 else "")
        self.capture = Capture(strategy=strategy, pools=[self.pool])
        warm_up(state, self.capture)
        fp8 = config.precision == "fp8"
        with self.capture.timed("capture_s"), self.pool.adopt():
            callables = make_graphed_callables(
                tuple(state.layers),
                self._sample_inputs(num_slots),
                enabled=fp8,
                recipe=state.fp8.recipe if fp8 else None,
                cache_quantized_params=fp8,
                _order=order,
                _num_layers_per_chunk=len(state.layers),
                **self.flags,
            )
        num_layers = len(state.layers)
        self.slots = [callables[slot * num_layers :][:num_layers] for slot in range(num_slots)]

    def _sample_inputs(self, num_slots):
        """(x,) for every slot: of each layer in the first microbatch, then of each in the second, and so on.

        No two layers may share memory. Two microbatches may where TE reuses buffers, and would share it then anyway.
        """
        sample = self.state.embedding(self.state.inputs["tokens"][0]).detach()
        num_shared = num_slots if self.flags.get("_reuse_graph_input_output_buffers") else 1
        own = len(self.state.layers) * num_slots // num_shared
        return tuple((sample.clone().requires_grad_(),) for _ in range(own)) * num_shared

    def step(self, index: int):
        state = self.state
        state.begin_step(index, accumulate_all=True)
        for microbatch in range(state.config.microbatches):
            with section("embedding"):
                hidden = state.embedding(state.inputs["tokens"][microbatch])
            with section("forward"), state.fp8.forward():
                for layer in self.slots[microbatch % len(self.slots)]:
                    hidden = layer(hidden, is_first_microbatch=microbatch == 0)
            loss = state.microbatch_loss(hidden, microbatch)
            mark()
            with section("backward"):
                loss.backward()
            mark()
        state.end_step(index)

    def replays_of(self, index: int) -> int:
        return 2 * self.state.config.layers * self.state.config.microbatches

    def close(self):
        for slot in self.slots:
            for layer in slot:
                layer.reset()
        self.pool.release()


class OneSlot(AsSubmitted):
    """One slot that every microbatch uses again, 2 x layers graphs, as Megatron-Core captures without a pipeline.

    It is right because a microbatch's backward is over before the next one's forward begins. It saves graphs and
    the time to capture them; kernels and replays of a step are those of `AsSubmitted`.
    """

    name = "graph_te_slot"
    one_slot = True
    flags: ClassVar = {"clone_param_grads_on_return": False}


class Defaults(AsSubmitted):
    """A slot for every microbatch with TE's default flags, on weights marked as Megatron-Core marks them.

    Every slot keeps static inputs, outputs and output gradients of its own. By default TE clones each parameter
    gradient that it returns. For weights with the mark `grad_added_to_main_grad` it returns one of the weight's shape
    that holds nothing, so that hooks on gradients run: each backward of a layer then reads and writes as much memory
    as its weights take, for nothing. Without the mark, as in the other variants, no parameter's gradient is returned,
    and the default has nothing to clone.
    """

    name = "graph_te_default"
    flags: ClassVar = {}

    def __init__(self, state: State, warm_up):
        require(state, self.name)
        self.hooks = []
        for weight in state.overwritten:
            weight.grad_added_to_main_grad = False
            self.hooks.append(weight.register_post_accumulate_grad_hook(_drop_placeholder))
        super().__init__(state, warm_up)

    def close(self):
        for weight, hook in zip(self.state.overwritten, self.hooks, strict=True):
            hook.remove()
            del weight.grad_added_to_main_grad
        super().close()


def _drop_placeholder(weight):
    from transformer_engine.pytorch.graph import is_graph_capturing

    # In a capture TE still has to see it.
    if not is_graph_capturing():
        weight.grad = None


def require(state: State, name: str):
    """te.make_graphed_callables; raises Unsupported where variant `name` cannot run."""
    if state.config.layer != "te" or state.device.type != "cuda":
        raise Unsupported(f"{name} needs a GPU and Transformer Engine: make te")
    from transformer_engine.pytorch import make_graphed_callables

    return make_graphed_callables
