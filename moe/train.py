"""Mixture of experts: Qwen3-30B-A3B and GPT-OSS, with graphs over growing parts of each layer up to the whole step.

What is trained, without graphs. The loop at the end of this file runs it, and its body is `eager_step`:

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
exchange, a graph must stop before the experts, as graph_attn, graph_attn_router and graph_attn_router_preprocess do.

    graph_attn ... graph_layer       a forward and a backward graph for the first parts of each layer, or all four
    graph_fwd_bwd                    all microbatches, embedding, loss and backward too, in one graph
    graph_step                       the same with clipping and Adam
    graph_static                     graph_fwd_bwd with the ranks' exchange in buffers of fixed size (static_buffers.py)
    graph_moe_padded                 graph_layer with a fixed number of rows an expert (other_variants.py)

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
Freed: a microbatch's activations once its backward is captured, for later captures; graphs and pool after the loop.

    python -m moe.train --preset tiny --variant graph_step
    python -m moe.train --preset bench --variant graph_step       # 8 layers of Qwen3-30B-A3B
    python -m moe.train --preset gpt_oss --variant graph_step     # GPT-OSS-20B, as many layers as fit
"""

from common.contract import Training, parse, variant
from moe import config as moe_config
from moe.config import FACTS, PRESETS, Config

if __name__ == "__main__":
    # Before torch is imported: --help, --describe and mistakes are answered at once.
    args = parse("moe", Config, PRESETS, **FACTS)

import torch

# section names a part of the step in a profile. mark does nothing in timed steps and captures; where the host's time is
# measured, the launch queue, which holds some 1,000 launches, is drained there.
from common.measuring.marks import mark, section
from common.session import session
from common.training import flops
from moe.exchange import require_capturable
from moe.kernels.order import Plan
from moe.kernels.routing import Routed
from moe.state import State, hyperparameters, resolve

# ------------------------------------------------------------------------------------------------
# 1. The eager step


@variant("eager", kind="eager", help="kernels launched one by one", parity="bitwise", headline=True)
def eager_step(state: State, index: int):
    """Train on batch `index`. Nothing in it waits for the GPU."""
    state.begin_step(index)  # copies the batch to state.inputs
    training_step(state)
    state.end_step(index)  # keeps loss and gradient norm


def training_step(state: State):
    """From the batch in state.inputs to new weights: `graph_step` captures it."""
    forward_and_backward(state)
    with section("optimizer"):
        state.update()  # clips, Adam


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
# 2. The first parts of each layer, or all of them
#
# A graph has fixed outputs, so `first_parts` returns a flat tuple of tensors. `rest_of_layer` gets the same tuple and
# makes Routed and Plan of it again.


class GraphedParts:
    """Two graphs for each layer in each microbatch, all in one pool.

    They are captured in the order in which a step replays them, so that each microbatch uses the memory of the one
    before again. Autograd runs a step as if it were eager: `Replayed` replays the forward graph of a layer's parts and,
    when the gradients of its outputs are there, its backward graph.
    """

    is_chained = False  # whether the output of a layer's graph is the static input of the next one

    def __init__(self, state: State, capture):
        # Pool makes graphs that share memory; without a GPU it records operators.
        self.state, self.pool = state, capture.pool()
        # Libraries allocate and choose their kernels at first use, which must not be in a graph. Warm-up trains;
        # `state.reset` undoes that. The harness runs everything on one stream that is not the default one.
        capture.warm_up(eager_step)
        self.parts: dict[tuple[int, int], Part] = {}
        # Gradients of a part's outputs, which a backward graph reads: one set for all, each is read at once.
        self.grads: list[torch.Tensor] = []
        with capture.capturing():
            for microbatch in range(state.config.microbatches):
                state.accumulation.adds = microbatch > 0
                for number in range(state.config.layers):
                    self.parts[microbatch, number] = self.capture_forward(microbatch, number)
                for number in reversed(range(state.config.layers)):
                    self.capture_backward(self.parts[microbatch, number])

    def first_parts(self, number: int, inputs, x) -> tuple:
        """What the graphs of layer `number` hold."""
        raise NotImplementedError

    def rest_of_layer(self, number: int, x, y=None, *outputs):
        """The parts that follow, eager: what the graph has returned is not computed again."""
        layer, num_routed = self.state.layers[number], len(Routed._fields)
        if y is None:
            y, routed = layer.route(x)
        else:
            routed = Routed(*outputs[:num_routed])
        plan = outputs[num_routed:]
        return layer.mix(x, y, routed, Plan(*plan) if plan else layer.preprocess(routed, self.state.is_padded))

    def capture_forward(self, microbatch: int, number: int):
        state, before = self.state, self.parts.get((microbatch, number - 1))
        is_chained = self.is_chained and before is not None
        x = before.outputs[0].detach() if is_chained else torch.zeros_like(state.embed(microbatch))
        # Below the first layer nothing has a gradient where the embedding is frozen.
        x = x.detach().requires_grad_(bool(number or not state.config.lora_rank))
        # state.static are the buffers that the host writes before each replay. Of packed documents the graph reads
        # positions and bounds there.
        graph, outputs = self.pool.capture(
            lambda: self.first_parts(number, state.inputs_of(microbatch), x),
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
        """`State.run_layer` with a replay in the place of the first parts."""
        # Autograd calls the backward of what an input with a gradient has gone into.
        hidden = hidden if hidden.requires_grad else hidden.detach().requires_grad_()
        outputs = Replayed.apply(hidden, self.parts[inputs.microbatch, number])
        hidden = self.rest_of_layer(number, *outputs)
        self.state.mark(number, hidden)
        return hidden


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


@variant(
    "graph_attn",
    kind="graph",
    help="attention of each layer in graphs; router and experts eager",
    graphs=lambda config: config.layer_passes,
    parity="bitwise",
)
class GraphedAttention(GraphedParts):
    def first_parts(self, number: int, inputs, x):
        return (self.state.layers[number].attention(x, inputs),)


@variant(
    "graph_attn_router",
    kind="graph",
    help="attention and router of each layer in graphs; the rows' order and the experts eager",
    graphs=lambda config: config.layer_passes,
    parity="bitwise",
)
class GraphedRouter(GraphedParts):
    def first_parts(self, number: int, inputs, x):
        x = self.state.layers[number].attention(x, inputs)
        y, routed = self.state.layers[number].route(x)
        return x, y, *routed


@variant(
    "graph_attn_router_preprocess",
    kind="graph",
    help="Megatron Bridge's scope: attention, router and the rows' order in graphs; the experts eager",
    graphs=lambda config: config.layer_passes,
    parity="bitwise",
    headline=True,
)
class GraphedPreprocess(GraphedRouter):
    def first_parts(self, number: int, inputs, x):
        x, y, *routed = super().first_parts(number, inputs, x)
        plan = self.state.layers[number].preprocess(Routed(*routed), self.state.is_padded)
        return x, y, *routed, *plan


@variant(
    "graph_layer",
    kind="graph",
    help="each dropless layer whole, forward and backward in graphs, buffers chained",
    graphs=lambda config: config.layer_passes,
    parity="bitwise",
    headline=True,
)
class GraphedLayers(GraphedParts):
    is_chained = True

    def __init__(self, state: State, capture):
        require_capturable(state.exchange.size, "layer")
        super().__init__(state, capture)

    def first_parts(self, number: int, inputs, x):
        return (self.state.run_layer(number, x, inputs),)

    def rest_of_layer(self, number: int, x):
        return x


# ------------------------------------------------------------------------------------------------
# 3. The whole step in one graph


@variant(
    "graph_fwd_bwd",
    kind="graph",
    help="forward and backward of all microbatches in one graph; optimizer eager",
    graphs=1,
    parity="bitwise",
)
class GraphedPass:
    """A replay reads state.inputs and the weights, writes main_grad and the losses; all lie outside of the pool."""

    def __init__(self, state: State, capture, captured=forward_and_backward):
        require_capturable(state.exchange.size, "layer")  # the graph holds whole layers
        self.state, pool = state, capture.pool()
        capture.warm_up(eager_step)
        with capture.capturing():
            self.graph, _ = pool.capture(lambda: captured(state), state.static)

    def step(self, index: int):
        self.replay(index)
        with section("optimizer"):
            self.state.update()
        self.state.end_step(index)

    def replay(self, index: int):
        self.state.begin_step(index)
        with section("replay"):
            self.graph.replay()


@variant(
    "graph_step",
    kind="graph",
    help="the whole step in one graph: all microbatches, clipping and Adam",
    graphs=1,
    parity="bitwise",
    headline=True,
)
class GraphedStep(GraphedPass):
    """Clipping and Adam are in the graph, too: learning rate and count of steps are on the device."""

    def __init__(self, state: State, capture):
        super().__init__(state, capture, captured=training_step)

    def step(self, index: int):
        self.replay(index)
        self.state.end_step(index)


# ------------------------------------------------------------------------------------------------
# 4. What a run is told, and the loop. Variants of static_buffers.py and other_variants.py are run by it, too.


def build(config: Config, device: torch.device, ranks) -> Training:
    config.require_ranks(ranks.world_size)
    config, notes = resolve(config, device)  # as many layers as fit
    state = State(config, device)
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return Training(
        state=state,
        config=config,
        results=state.read_losses,
        grad_norms=state.read_grad_norms,
        named_state=state.named_state,
        reset=state.reset,
        evaluate=state.evaluate,
        close=state.close,
        items=config.tokens * config.microbatches,
        unit="tokens",
        flops=moe_config.flops_per_step(config),
        flops_convention=flops.CAUSAL_HALF,
        peak_flops=flops.peak_flops(gpu, "bf16"),
        card=moe_config.card(config),
        notes=notes,
        hyperparameters=hyperparameters(config),
    )


if __name__ == "__main__":
    with session(args, build) as (run, log):
        for index in log.steps():
            run.step(index)
