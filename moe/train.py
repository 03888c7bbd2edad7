"""Mixture of experts: Qwen3-30B-A3B and GPT-OSS, with graphs over growing parts of each layer up to the whole step.

The training loop without graphs. The loop is at the end of this file, its body is `eager_step`:

    for step in range(num_steps):
        for microbatch in range(num_microbatches):
            hidden = embedding(tokens[microbatch])
            for layer in layers:
                hidden = layer.attention(hidden)
                y, routed = layer.route(hidden)               # y: normalised hidden; routed: each token's experts
                plan = layer.preprocess(routed)               # the order of the experts' rows
                hidden = layer.mix(hidden, y, routed, plan)   # rows to experts, two grouped GEMMs, rows back
            loss(hidden, targets[microbatch]).backward()      # microbatch 0 overwrites main_grad, others add to it
        sum over ranks(main_grad of all but the experts)      # with --ep
        clip(main_grad), adam(main_grad)

main_grad is a buffer that never moves. A layer's own backward writes it, or a hook, which then sets p.grad to None;
with plain p.grad: make it before the capture, zero it in place. No token is dropped, and only the device knows how many
tokens an expert gets. Shapes are fixed all the same: a token makes top_k rows, rows are sorted by expert, and
torch._grouped_mm reads on the device where each expert's rows end. So a graph can hold the layer. With --ep `mix` reads
row counts on the host, as Megatron does for its exchange. No graph can hold that: graph_layer and graph_step refuse
--ep above 1. Graphs that stop before `mix` allow it.

    graph_attn ... graph_layer       a forward and a backward graph for the first parts of each layer, or all four
    graph_step                       all microbatches, embedding, loss, backward, clipping and Adam in one graph
    graph_static                     forward and backward of all microbatches in one graph, with the ranks' exchange in
                                     buffers of fixed size (static_buffers.py)

In plain PyTorch, attention's capture and replays in one layer, then graph_step:

    torch.cuda.set_stream(torch.cuda.Stream())                # before all else: captures cannot use the default stream
    for index in range(3): eager_step(state, index)           # warm-up
    forward, backward, step = (torch.cuda.CUDAGraph() for _ in range(3))
    shared = {"pool": torch.cuda.graph_pool_handle(), "stream": torch.cuda.current_stream()}
    x, grad = torch.zeros_like(hidden, requires_grad=True), torch.zeros_like(hidden)
    with torch.cuda.graph(forward, **shared):
        output = layer.attention(x)                           # recorded, not run
    with torch.cuda.graph(backward, **shared):
        output.backward(grad)                                 # recorded, too: fills x.grad and main_grad
    # Each layer keeps output and x.grad in memory so; `capture_backward` below shows how later captures may use it.

    class Replayed(torch.autograd.Function):                  # in a step, in attention's place: Replayed.apply(hidden)
        def forward(ctx, hidden):
            x.copy_(hidden); forward.replay(); return output
        def backward(ctx, gradient):
            grad.copy_(gradient); backward.replay(); return x.grad
    state.reset()                                             # undoes the warm-up in place, since graphs hold addresses

    with torch.cuda.graph(step, stream=torch.cuda.current_stream()):    # graph_step
        forward_and_backward(state); state.update()
    inputs.copy_(batch); step.replay()                        # in a step

Not captured, and why:
    the batch           it comes from the host, each time from another address
    the kept loss       each step stores it at another address; a graph always writes to the same ones
    clip, Adam          by choice: only graph_step shows what they need, learning rate and step count in tensors
    embedding, loss     eager beside graphs of layers: a few large kernels a microbatch
    rest of a layer     by choice: graphs of growing parts show what each part gains. With --ep `mix` has to be eager
    sum over ranks      beside graphs of layers a few launches a step

Copied in      the batch to state.inputs; for graphs of layers also hidden to x and the gradients of the outputs to
               grad. In graph_layer x is the output of the layer before (chained): a step copies hidden for the first
               layer only, but gradients for each.
Read in time   a graph's outputs, by the eager rest of the layer (graph_layer: the next layer or the loss), forward and
               backward, before this layer's backward is replayed. x.grad, by the eager backward or the copy to the next
               grad, before the next backward is replayed. main_grad by Adam, losses and gradient norm by end_step, in
               their step.
Reused         by later captures: a layer's activations and outputs, but not x, once its backward is captured.
Freed          at the end of a run `session` calls reset() of every graph and drops it, which gives the pool back.

    python -m moe.train --preset tiny --variant graph_step
    python -m moe.train --preset bench --variant graph_step       # 8 layers of Qwen3-30B-A3B
    python -m moe.train --preset gpt_oss --variant graph_step     # GPT-OSS-20B, as many layers as fit
"""

from graph_worth import Training, parse, variant
from moe import config as moe_config
from moe.config import FACTS, PRESETS, Config

if __name__ == "__main__":
    args = parse("moe", Config, PRESETS, **FACTS)  # before torch is imported: --help and mistakes are answered at once

import torch

from common import flops

# section names a part of the step in a profile, at a mark the harness times the host. In a capture both do nothing.
from graph_worth import Capture, mark, section, session
from moe.exchange import require_capturable
from moe.kernels.order import RowPlan
from moe.kernels.routing import Routed
from moe.state import State, resolve

# ------------------------------------------------------------------------------------------------
# 1. The eager step


# For the command line and the harness (graph_worth/contract.py, docs/reading_a_script.md): skip it at first reading.
@variant("eager", kind="eager", help="kernels launched one by one", parity="bitwise", headline=True)
def eager_step(state: State, index: int):
    """Train on batch `index`. On one rank nothing in it waits for the GPU."""
    state.begin_step(index)  # copies the batch to state.inputs
    training_step(state)
    state.end_step(index)  # keeps loss and gradient norm


def training_step(state: State):
    """From the batch in state.inputs to new weights: `graph_step` captures it."""
    forward_and_backward(state)
    with section("optimizer"):
        state.update()  # clips, Adam


def forward_and_backward(state: State, run_layer=None):
    """Run all microbatches. run_layer: called instead of `State.run_layer`, which calls the four parts of a layer."""
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
    state.reduce_gradients()  # the sum over ranks with --ep; nothing on one rank


# ------------------------------------------------------------------------------------------------
# 2. The first parts of each layer, or all of them
#
# A graph's outputs are fixed tensors. `first_parts` returns them as a flat tuple: x, y, the fields of Routed, those of
# RowPlan, as far as the graph computes them. `rest_of_layer` gets this tuple.


class GraphedParts:
    """Two graphs for each layer in each microbatch, all in one pool.

    A capture freezes `accumulation.adds`, which is false in microbatch 0 alone, and addresses: the positions and bounds
    of each microbatch's packed sequences have their own. So microbatches share no graphs. Captures have the order of
    replays, so microbatches use the same memory in turn. Autograd runs a step as in eager, with `Replayed` for graphs.
    """

    is_chained = False  # whether a layer's graph reads the output of the layer before where it lies, without a copy

    def __init__(self, state: State, capture: Capture):
        self.state, self.pool = state, capture.pool()  # memory that the graphs share
        # Three eager steps: libraries allocate and choose kernels at first use, which must not be in a capture.
        # `session` undoes them by state.reset before step 0, in place, since graphs hold addresses. All is on one side
        # stream (graph_worth/measuring/torch_settings.py), eager steps too.
        capture.warm_up(eager_step)
        self.graphs: dict[tuple[int, int], LayerGraphs] = {}
        # Gradients of a graph's outputs. One set serves all: a backward graph reads it right after it is filled.
        self.grads: list[torch.Tensor] = []
        with capture.capturing():  # only counts the seconds and the memory of this block: pool.capture captures
            for microbatch in range(state.config.microbatches):
                state.accumulation.adds = microbatch > 0
                for number in range(state.config.layers):
                    self.graphs[microbatch, number] = self.capture_forward(microbatch, number)
                for number in reversed(range(state.config.layers)):
                    self.capture_backward(self.graphs[microbatch, number])

    def first_parts(self, number: int, inputs, x) -> tuple:
        """Run the parts of layer `number` that its graphs hold."""
        raise NotImplementedError

    def rest_of_layer(self, number: int, x, y=None, *outputs):
        """Run the other parts, eager. y: None if the graph holds attention alone."""
        layer, num_routed = self.state.layers[number], len(Routed._fields)
        if y is None:
            y, routed = layer.route(x)
        else:
            routed = Routed(*outputs[:num_routed])
        plan = outputs[num_routed:]
        return layer.mix(x, y, routed, RowPlan(*plan) if plan else layer.preprocess(routed))

    def capture_forward(self, microbatch: int, number: int):
        state, before = self.state, self.graphs.get((microbatch, number - 1))
        is_chained = self.is_chained and before is not None
        # The embedding gives shape and dtype only. detach: autograd's graph ends at x; in a step `Replayed` joins them.
        x = before.outputs[0] if is_chained else torch.zeros_like(state.embed(microbatch))
        # With --lora-rank the embedding is frozen, so layer 0's x needs no gradient.
        x = x.detach().requires_grad_(bool(number or not state.config.lora_rank))
        # The `with torch.cuda.graph(...)` block of the docstring: records the launches, returns (graph, result).
        # A replay checks that state.static (the tensors of state.inputs) and x kept address, shape and strides; not a
        # chained x, which only graphs write.
        graph, outputs = self.pool.capture(
            lambda: self.first_parts(number, state.inputs_of(microbatch), x),
            state.static if is_chained else (*state.static, x),
        )
        return LayerGraphs(x, is_chained, graph, outputs)

    def capture_backward(self, graphs):
        differentiable = [output for output, has_grad in zip(graphs.outputs, graphs.has_grad, strict=True) if has_grad]
        self.grads = self.grads or [torch.zeros_like(output) for output in differentiable]
        graphs.grads = self.grads
        graphs.backward, grad_x = self.pool.capture(
            lambda: input_gradient(graphs.x, differentiable, graphs.grads), tuple(graphs.grads)
        )
        # Later captures may use the memory of these tensors. That is safe: captures have the order of replays, and in a
        # step every reader comes before the next replay that writes there. borrow makes a tensor of the address alone
        # (torch.as_tensor of an object with __cuda_array_interface__); with the last owner gone the allocator gives the
        # memory away. x stays, since the backward graph reads it: in graph_layer the output before.
        graphs.grad_x = None if grad_x is None else self.pool.borrow(grad_x)
        graphs.outputs = [self.pool.borrow(output.detach()) for output in graphs.outputs]

    def step(self, index: int):
        self.state.begin_step(index)
        forward_and_backward(self.state, self.run_layer)
        with section("optimizer"):
            self.state.update()
        self.state.end_step(index)

    def run_layer(self, number: int, hidden, inputs):
        """Run a layer as `State.run_layer` does, with a replay of the first parts."""
        # Autograd calls Replayed.backward only if an input requires a gradient. A frozen embedding's output does not,
        # so it is made to; its gradient is None then.
        hidden = hidden if hidden.requires_grad else hidden.detach().requires_grad_()
        outputs = Replayed.apply(hidden, self.graphs[inputs.microbatch, number])
        hidden = self.rest_of_layer(number, *outputs)
        self.state.mark(number, hidden)  # calls mark after every few layers
        return hidden


class LayerGraphs:
    """The two graphs of one layer in one microbatch, and the tensors that they read and write."""

    def __init__(self, x, is_chained, forward, outputs):
        self.forward, self.backward = forward, None
        self.x, self.is_chained = x, is_chained  # read by both; chained: an earlier graph writes it, not the step
        self.outputs = outputs  # written by forward
        self.has_grad = [output.requires_grad for output in outputs]
        self.grads: list[torch.Tensor] = []  # read by backward: gradients of the outputs that have one
        self.grad_x = None  # written by backward


def input_gradient(x, outputs, grads):
    """Return the gradient of x, None if x needs none. autograd.grad would not call the hooks that fill main_grad."""
    x.grad = None  # else backward would add to it
    torch.autograd.backward(outputs, grads)
    grad, x.grad = x.grad, None  # else x would keep the memory
    return grad


class Replayed(torch.autograd.Function):
    """A layer's first parts as an operator of autograd: forward and backward replay their graphs."""

    @staticmethod
    def forward(ctx, hidden, graphs):
        ctx.graphs = graphs
        if not graphs.is_chained:
            graphs.x.copy_(hidden)
        graphs.forward.replay()
        # New tensor objects on the same memory, since autograd attaches the step's history to the returned objects.
        outputs = tuple(output.view_as(output) for output in graphs.outputs)
        pairs = zip(outputs, graphs.has_grad, strict=True)
        # Outputs without a gradient in the capture have none here: numbers of experts, counts, the plan.
        ctx.mark_non_differentiable(*(output for output, has_grad in pairs if not has_grad))
        return outputs

    @staticmethod
    def backward(ctx, *grads):
        graphs = ctx.graphs
        used_grads = [grad for grad, has_grad in zip(grads, graphs.has_grad, strict=True) if has_grad]
        torch._foreach_copy_(graphs.grads, used_grads)
        graphs.backward.replay()
        return graphs.grad_x, None  # the gradients of hidden and of graphs


@variant(
    "graph_attn",
    kind="graph",
    help="attention of each layer in graphs; router and experts eager",
    graphs=lambda config: config.layer_passes,  # 2 x layers x microbatches
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
        plan = self.state.layers[number].preprocess(Routed(*routed))
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

    def __init__(self, state: State, capture: Capture):
        require_capturable(state.exchange.size, "layer")  # refuses --ep above 1
        super().__init__(state, capture)

    def first_parts(self, number: int, inputs, x):
        return (self.state.run_layer(number, x, inputs),)

    def rest_of_layer(self, number: int, x):
        return x


# ------------------------------------------------------------------------------------------------
# 3. The whole step in one graph


@variant(
    "graph_step",
    kind="graph",
    help="the whole step in one graph: all microbatches, clipping and Adam",
    graphs=1,
    parity="bitwise",
    headline=True,
)
class GraphedStep:
    """A replay reads state.inputs, and writes main_grad, the losses and the weights; all lie outside of the pool.

    Learning rate and count of steps, which Adam reads and writes, are tensors on the device.
    """

    def __init__(self, state: State, capture: Capture):
        require_capturable(state.exchange.size, "layer")  # refuses --ep above 1
        self.state, pool = state, capture.pool()
        capture.warm_up(eager_step)
        with capture.capturing():
            self.graph, _ = pool.capture(lambda: training_step(state), state.static)  # the tensors of state.inputs

    def step(self, index: int):
        self.state.begin_step(index)
        with section("replay"):
            self.graph.replay()
        self.state.end_step(index)


# ------------------------------------------------------------------------------------------------
# 4. Build and loop. session builds, makes the variant of --variant (which warms up and captures), calls state.reset,
# and after the loop releases the graphs and their pool. run.step is the variant's step.


def build(config: Config, device: torch.device, ranks) -> Training:
    config.require_ranks(ranks.world_size)
    config, notes = resolve(config, device)  # as many layers as fit
    state = State(config, device)
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    flops_per_step = moe_config.flops_per_step(config, state.lengths)
    return Training(
        state=state,
        config=config,
        results=state.read_losses,
        grad_norms=state.read_grad_norms,
        named_state=state.named_state,
        reset=state.reset,
        close=state.close,
        items=config.tokens * config.microbatches,
        unit="tokens",
        flops=flops_per_step,
        flops_convention=flops.CAUSAL_HALF,
        flops_notes=moe_config.flops_notes(config, flops_per_step),
        peak_flops=flops.peak_flops(gpu, "bf16"),
        card=moe_config.card(config, flops_per_step),
        notes=[*notes, *state.notes],
    )


if __name__ == "__main__":
    with session(args, build) as (run, log):
        for index in log.steps():
            run.step(index)
