"""Mixture of experts: Qwen3-30B-A3B and GPT-OSS, with graphs over growing parts of each layer up to the whole step.

What is trained, without graphs; `main` (common/script/main.py) runs the loop, and its body is `eager_step`:

    for step in range(num_steps):
        for microbatch in range(num_microbatches):
            hidden = embedding(tokens[microbatch])
            for layer in layers:
                hidden = layer.attention(hidden)
                y, routed = layer.route(hidden)               # norm, router: experts and weights of each token
                plan = layer.preprocess(routed)               # the order of the experts' rows
                hidden = layer.mix(hidden, y, routed, plan)   # rows to experts, two grouped GEMMs, rows back
            loss(hidden, targets[microbatch]).backward()      # gradients go to main_grad
        sum over ranks(main_grad of all but the experts)      # with --ep
        clip(main_grad), adam(main_grad)

No token is dropped, and how many each expert gets is known on the device alone. Shapes are fixed all the same: each
token makes top_k rows, rows are sorted by expert, and torch._grouped_mm reads from a tensor on the device where each
expert's rows end. So the layer can be captured whole. Where counts are read on the host, as Megatron does for its
exchange, a graph must stop before the experts: these are the scopes `attn`, `attn_router`, `attn_router_preprocess`.

    graph_attn ... graph_layer       a forward and a backward graph for the first parts of each layer, or all four
    graph_fwd_bwd                    all microbatches, embedding, loss and backward too, in one graph
    graph_step                       the same with clipping and Adam
    graph_static                     graph_fwd_bwd with the ranks' exchange in buffers of fixed size (static_buffers.py)
    graph_moe_padded                 graph_layer with a fixed number of rows an expert, which drops and pads

In plain PyTorch the captures come to:

    with torch.cuda.graph(forward, pool=pool):
        outputs = layer.attention(x)                          # recorded, not run; or more parts of the layer
    with torch.cuda.graph(backward, pool=pool):
        torch.autograd.backward(outputs, gradients)           # fills x.grad and main_grad
    x.copy_(hidden), forward.replay()                         # in a step: outputs are then new

    with torch.cuda.graph(step, pool=pool):
        forward_and_backward(state), state.update()
    inputs.copy_(batch), step.replay()

Not captured, and why:
    the batch           it comes from the host, each time from another address
    the kept loss       each step stores it at its own place, and a graph writes to fixed ones
    clip, Adam          only graph_step holds them: else a learning rate may be a Python number, which a graph freezes
    embedding, loss     by the graphs of layers: a few large kernels a microbatch

Copied in before a replay: the batch to state.inputs; by graphs of parts, x and the gradients of the outputs.
Read in time: a part's outputs by the rest of its layer, in the same microbatch; main_grad by Adam, and the losses by
end_step, before the next step overwrites them.
Freed: a microbatch's activations once its backward is captured, for later captures; graphs and pool in `close`.

    python -m moe.train --preset tiny --variant graph_step
    python -m moe.train --preset bench --variant graph_step       # 8 layers of Qwen3-30B-A3B
    python -m moe.train --preset gpt_oss --variant graph_step     # GPT-OSS-20B, as many layers as fit
"""

from common.config import parse
from moe.config import ABOUT, PRESETS, Config
from moe.variants import VARIANTS

if __name__ == "__main__":
    # Before torch is imported: --help, --describe and mistakes are answered at once.
    args = parse("moe", Config, PRESETS, VARIANTS, about=ABOUT)

from functools import partial

import torch

# The harness: Pool makes graphs that share memory (without a GPU it records operators), Capture reports them, warm_up
# runs three eager steps. section names a part of the step in a profile. mark does nothing in timed steps and captures;
# where the host's time is measured, the launch queue, which holds some 1,000 launches, is drained there.
from common.capture.pool import Pool
from common.measuring.marks import mark, section
from common.script.main import main
from common.variant import Capture, warm_up
from moe.exchange import require_capturable
from moe.kernels.order import Plan
from moe.kernels.routing import Routed
from moe.state import State
from moe.workload import require_ranks, workload

# ------------------------------------------------------------------------------------------------
# 1. The eager step. The baseline `eager` runs it as it is.


def eager_step(state: State, index: int):
    """Train on batch `index`. Nothing in it waits for the GPU."""
    state.begin_step(index)  # copies the batch to state.inputs
    forward_and_backward(state)
    with section("optimizer"):
        state.update()  # clips, Adam
    state.end_step(index)  # keeps loss and gradient norm


def forward_and_backward(state: State, run_layer=None):
    """All microbatches of a step. run_layer: stands for `State.run_layer`, which has the layers of the lesson above."""
    for microbatch in range(state.config.microbatches):
        state.accumulation.adds = microbatch > 0  # the first backward of a step overwrites main_grad
        inputs = state.inputs_of(microbatch)
        with section("forward"):
            hidden = state.embed(microbatch)
            for number in range(state.config.layers):
                hidden = (run_layer or state.run_layer)(number, hidden, inputs)
        with section("loss"):
            loss = state.loss(hidden, microbatch)  # kept in state.microbatch_losses
        mark()
        with section("backward"):
            loss.backward()
        mark()
    state.reduce_gradients()


# ------------------------------------------------------------------------------------------------
# 2. The whole step in one graph


class GraphedPasses:
    """`graph_fwd_bwd`: forward and backward of all microbatches in one graph; clipping and Adam are eager.

    A replay reads state.inputs and the weights, writes main_grad and the losses; all of these lie outside of the pool.
    """

    strategy = "forward and backward of all microbatches"

    def __init__(self, state: State):
        require_capturable(state.exchange.size, "layer")  # the graph holds whole layers
        self.state, self.pool = state, Pool(state.device)
        self.capture = Capture(strategy=self.strategy, pools=[self.pool])
        # Libraries allocate and choose their kernels at first use, which must not be in a graph. Warm-up trains;
        # `state.reset` undoes that. The harness runs everything on one stream that is not the default one.
        warm_up(state, self.capture, eager_step)
        with self.capture.timed("capture_s"):
            # state.static are the buffers that the host writes before each replay; here nothing is returned.
            self.graph, _ = self.pool.capture(self.captured, state.static)

    def captured(self):
        forward_and_backward(self.state)

    def step(self, index: int):
        self.state.begin_step(index)
        with section("replay"):
            self.graph.replay()
        self.update()
        self.state.end_step(index)

    def update(self):
        with section("optimizer"):
            self.state.update()

    def replays_of(self, index: int) -> int:
        return 1

    def close(self):
        self.pool.release()


class GraphedStep(GraphedPasses):
    """`graph_step`: clipping and Adam in the graph, too. Learning rate and count of steps are on the device."""

    strategy = "the whole step"

    def captured(self):
        forward_and_backward(self.state)
        self.state.update()

    def update(self):
        """The graph has done so."""


# ------------------------------------------------------------------------------------------------
# 3. The first parts of each layer, or all of them
#
# A scope returns a flat tuple of tensors, since a graph has fixed outputs. `rest_of_layer` gets the same tuple and
# makes Routed and Plan of it again.


def attn(state: State, number: int, inputs, x):
    return (state.layers[number].attention(x, inputs),)


def attn_router(state: State, number: int, inputs, x):
    x = state.layers[number].attention(x, inputs)
    y, routed = state.layers[number].route(x)
    return x, y, *routed


def attn_router_preprocess(state: State, number: int, inputs, x):
    x, y, *routed = attn_router(state, number, inputs, x)
    plan = state.layers[number].preprocess(Routed(*routed), state.is_padded)
    return x, y, *routed, *plan


def layer(state: State, number: int, inputs, x):
    return (state.run_layer(number, x, inputs),)


def rest_of_layer(state: State, number: int, x, y=None, *outputs):
    """The parts of a layer that follow a scope, eager: what the scope's graph has returned is not computed again."""
    own, num_routed = state.layers[number], len(Routed._fields)
    if y is None:
        y, routed = own.route(x)
    else:
        routed = Routed(*outputs[:num_routed])
    plan = Plan(*outputs[num_routed:]) if outputs[num_routed:] else own.preprocess(routed, state.is_padded)
    return own.mix(x, y, routed, plan)


SCOPES = {each.__name__: each for each in (attn, attn_router, attn_router_preprocess, layer)}


class GraphedParts:
    """`graph_attn` to `graph_layer`: two graphs for each layer in each microbatch, in one pool.

    They are captured in the order in which a step replays them, so that each microbatch uses the memory of the one
    before again. Autograd runs a step as if it were eager: `Replayed` replays a part's forward graph and, when the
    gradients of its outputs are there, its backward graph. scope: the name of one of SCOPES.
    """

    def __init__(self, state: State, scope: str):
        if scope == "layer":
            require_capturable(state.exchange.size, "layer")
        self.state, self.scope, self.pool = state, SCOPES[scope], Pool(state.device)
        self.capture = Capture(strategy=f"{scope} x microbatch, forward and backward", pools=[self.pool])
        warm_up(state, self.capture, eager_step)
        self.parts: dict[tuple[int, int], Part] = {}
        # Gradients of a part's outputs, which a backward graph reads: one set for all, each is read at once.
        self.grads: list[torch.Tensor] = []
        with self.capture.timed("capture_s"):
            for microbatch in range(state.config.microbatches):
                state.accumulation.adds = microbatch > 0
                for number in range(state.config.layers):
                    self.parts[microbatch, number] = self.capture_forward(microbatch, number)
                for number in reversed(range(state.config.layers)):
                    self.capture_backward(self.parts[microbatch, number])

    def capture_forward(self, microbatch: int, number: int):
        state, before = self.state, self.parts.get((microbatch, number - 1))
        # Whole layers are chained: the output of one is the static input of the next.
        is_chained = self.scope is layer and before is not None
        x = before.outputs[0].detach() if is_chained else torch.zeros_like(state.embed(microbatch))
        # Below the first layer nothing has a gradient where the embedding is frozen.
        x = x.detach().requires_grad_(bool(number or not state.config.lora_rank))
        # Of packed documents the graph reads positions and bounds in state.inputs.
        graph, outputs = self.pool.capture(
            lambda: self.scope(state, number, state.inputs_of(microbatch), x),
            state.static if is_chained else (*state.static, x),
        )
        return Part(x, is_chained, graph, outputs)

    def capture_backward(self, part):
        differentiable = [output for output, is_ in zip(part.outputs, part.differentiable, strict=True) if is_]
        self.grads = self.grads or [torch.zeros_like(output) for output in differentiable]
        part.grads = self.grads
        part.backward, grad_x = self.pool.capture(
            lambda: input_gradient(part.x, differentiable, part.grads), tuple(part.grads)
        )
        # Borrowed: what is captured next may use the memory of the activations and of this gradient.
        part.grad_x = None if grad_x is None else self.pool.borrow(grad_x)
        part.outputs = [None if output is None else self.pool.borrow(output.detach()) for output in part.outputs]

    def step(self, index: int):
        self.state.begin_step(index)
        forward_and_backward(self.state, self.run_layer)
        with section("optimizer"):
            self.state.update()
        self.state.end_step(index)

    def run_layer(self, number: int, hidden, inputs):
        """`State.run_layer` with a replay in the place of the scope's parts."""
        # Autograd calls the backward of what an input with a gradient has gone into.
        hidden = hidden if hidden.requires_grad else hidden.detach().requires_grad_()
        outputs = Replayed.apply(hidden, self.parts[inputs.microbatch, number])
        if self.scope is not layer:
            outputs = (rest_of_layer(self.state, number, *outputs),)
        self.state.mark(number, outputs[0])
        return outputs[0]

    def replays_of(self, index: int) -> int:
        return 2 * len(self.parts)

    def close(self):
        self.pool.release()


class Part:
    """The graphs of one layer's parts in one microbatch, and the tensors that they read and write."""

    def __init__(self, x, is_chained, forward, outputs):
        self.x, self.is_chained, self.forward, self.outputs = x, is_chained, forward, outputs
        self.differentiable = [output is not None and output.requires_grad for output in outputs]


def input_gradient(x, outputs, grads):
    """The gradient of x. Not by autograd.grad: the hooks that fill main_grad run in backward()."""
    x.grad = None
    torch.autograd.backward(outputs, grads)
    grad, x.grad = x.grad, None
    return grad


class Replayed(torch.autograd.Function):
    """A part of a layer by its graphs: what autograd calls in the place of the part."""

    @staticmethod
    def forward(ctx, hidden, part):
        ctx.part = part
        if not part.is_chained:
            part.x.copy_(hidden)
        part.forward.replay()
        outputs = tuple(None if output is None else output.view_as(output) for output in part.outputs)
        flags = zip(outputs, part.differentiable, strict=True)
        ctx.mark_non_differentiable(*(output for output, is_ in flags if output is not None and not is_))
        return outputs

    @staticmethod
    def backward(ctx, *grads):
        part = ctx.part
        own = [grad for grad, is_ in zip(grads, part.differentiable, strict=True) if is_]
        torch._foreach_copy_(part.grads, own)
        part.backward.replay()
        return part.grad_x, None


# 4. All variants, declared in variants.py
#
#     eager                                       eager_step above, run by common.variant.Eager
#     graph_attn, ..., graph_layer                GraphedParts
#     graph_fwd_bwd, graph_step                   GraphedPasses, GraphedStep
#     eager_static, graph_static                  static_buffers.py
#     compile, reduce_overhead                    other_variants.py
#     eager_padded, graph_moe_padded              other_variants.py

if __name__ == "__main__":
    main("moe", args, partial(workload, eager_step=eager_step), require_ranks)
