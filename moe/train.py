"""Mixture of experts: Qwen3-30B-A3B and GPT-OSS, with graphs over growing parts of each layer up to the whole step.

The training loop without graphs, as the loop at the end of this file and `eager_step` run it:

    for step in range(num_steps):
        for microbatch in range(num_microbatches):
            hidden = embedding(tokens[microbatch])
            for layer in layers:
                x = layer.attention(hidden, inputs)           # inputs: rotary tables, bounds of packed documents
                y, routed = layer.route(x)                    # y: normalised x; routed: each token's experts, weights
                plan = layer.preprocess(routed)               # the order of the experts' rows
                hidden = layer.mix(x, y, routed, plan)        # rows to experts, two grouped GEMMs, rows back
            loss(hidden, targets[microbatch]).backward()      # microbatch 0 overwrites main_grad, others add to it
        all_reduce(main_grad)                                 # with --ep: of all but the experts
        clip(main_grad), adam(main_grad)

main_grad is a buffer that never moves, because a graph holds its address. The backward of our GEMMs writes it, or adds
to it after microbatch 0; for the other gradients a hook does the same, and then sets p.grad to None. If you keep plain
p.grad, allocate it before the capture and zero it in place.

No token is dropped, and only the GPU knows how many tokens an expert gets. Shapes are fixed all the same: a token makes
top_k rows, rows are sorted by expert, and torch._grouped_mm reads on the GPU where each expert's rows end. So a graph
can hold the layer. With --ep `mix` reads row counts on the host, as Megatron does for its exchange. No graph can hold
that, so graph_layer and graph_step refuse --ep above 1. Graphs that stop before `mix` allow it.

Captured, a forward and a backward graph for each layer and microbatch (section 3):
    graph_attn                       attention: hidden -> x
    graph_attn_router                attention and route: hidden -> x, y, routed
    graph_attn_router_preprocess     attention, route and preprocess: hidden -> x, y, routed, plan
    graph_layer                      all four parts: hidden -> hidden
or one graph, whose inputs and results are buffers of `State` (read section 4 first, then 3):
    graph_step                       all microbatches with embedding and loss, clipping and Adam (section 4)
    graph_static                     all microbatches, also with --ep: ranks exchange padded buffers (static_buffers.py)
In plain torch, graph_step is:

    torch.cuda.set_stream(torch.cuda.Stream())        # before all else: captures cannot use the default stream
    for index in range(3): eager_step(state, index)   # warm-up: libraries allocate and choose kernels
    graph = torch.cuda.CUDAGraph()                    # thread_local: other threads, as NCCL's, may call CUDA meanwhile
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
        training_step(state)                          # recorded, not run
    state.reset()                                     # undoes the warm-up in place, since graphs hold addresses
    for index in range(num_steps):
        state.begin_step(index)                       # copies the batch to state.inputs
        graph.replay()                                # overwrites losses, main_grad and gradient norm, trains weights
        state.end_step(index)                         # keeps loss and gradient norm

Not captured, and why:
    the batch           it comes from the host, each time from another address
    the kept loss       each step stores it at another address; a graph always writes to the same addresses
    clip, Adam          by choice: graph_step alone shows what they need, step count and learning rate in tensors
    embedding, loss     in graphs of layers, with all_reduce: a few large kernels, so there is little to gain
    rest of a layer     by choice: growing parts show what each part gains. With --ep `mix` has to be eager

Copied in      the batch, to state.inputs. With graphs of layers also each layer's hidden (in graph_layer only layer
               0's: the layer before writes the others) and the gradients of its outputs.
Read in time   end_step keeps losses and gradient norm before the next step overwrites them.
Reused         in graphs of layers, by later captures: a layer's activations, outputs and grad_hidden. No capture gets
               the memory of a tensor that lives, so `pool.borrow` returns one at the same address that owns nothing.
               That is safe: replays have the order of captures, and the eager rest of the layer (in graph_layer the
               next layer or the loss) and the backward read outputs and grad_hidden before a replay writes there.
Freed          at the end of a run `session` calls reset() of every graph, which gives their pool back.

Which to choose: divide an eager step's time by the time in which it keeps the GPU busy (`make bench`: "at most").
    near 1              The GPU is the limit: leave it eager. At bench it is 1.01, and our graphs gain 1.00 to 1.01x.
    more, one rank      The host is the limit: take graph_step. At bench, an H100's host launches a step of eager in
                        17.5 ms, of graph_attn_router_preprocess in 7.5, of graph_layer in 3.6, of graph_step in 0.4.
    more, with --ep     Take graph_attn_router_preprocess, the largest that ends before `mix`. graph_static lost time.
Numbers: results/overview.csv. We quote no gain where the host is the limit: in all such runs CUBLAS_WORKSPACE_CONFIG
slowed eager (docs/method.md). It lengthens these launches, too, but not graph_step's.

    python -m moe.train --preset tiny --variant graph_step
    python -m moe.train --preset bench --variant graph_step       # 8 layers of Qwen3-30B-A3B; gpt_oss: GPT-OSS-20B
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

MARK_EVERY = 4  # layers between two marks

# ------------------------------------------------------------------------------------------------
# 1. Build. State makes once, and never moves, all that eager code and graphs share: weights, main_grad, Adam's masters,
# moments, count of steps and learning rate; state.inputs, the batch: tokens and targets int64 [microbatches, tokens],
# with --documents also positions and bounds; state.microbatch_losses [microbatches]; the history of losses.


def build(config: Config, device: torch.device, ranks) -> Training:
    config.require_ranks(ranks.world_size)
    config, notes = resolve(config, device)  # as many layers as fit
    state = State(config, device)  # all of the above
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


# ------------------------------------------------------------------------------------------------
# 2. The eager step


# For the command line and the harness (graph_worth/contract.py, docs/reading_a_script.md): skip it at first reading.
@variant("eager", kind="eager", help="kernels launched one by one", parity="bitwise", headline=True)
def eager_step(state: State, index: int):
    """Train on batch `index`. On one rank nothing in it waits for the GPU; with --ep the host waits in each `mix`."""
    state.begin_step(index)  # copies the batch from pinned host memory to state.inputs
    training_step(state)
    state.end_step(index)  # keeps loss and gradient norm on the GPU; they are read after the loop


def training_step(state: State):
    """From the batch in state.inputs to new weights: `graph_step` captures it."""
    forward_and_backward(state)
    with section("optimizer"):
        state.update()  # clips, Adam


def forward_and_backward(state: State, graphed=None):
    """Run all microbatches. graphed[microbatch]: layers by graphs, called in the place of the eager ones."""
    for microbatch in range(state.config.microbatches):
        state.accumulation.adds = microbatch > 0  # the first backward of a step overwrites main_grad
        inputs = state.inputs_of(microbatch)  # rotary tables and bounds of sequences, which attention reads
        with section("forward"):
            hidden = state.embed(microbatch)  # [tokens, hidden]
            for number, layer in enumerate(graphed[microbatch] if graphed else state.layers):
                hidden = layer(hidden, inputs)  # eager: attention, route, preprocess, mix
                if (number + 1) % MARK_EVERY == 0:
                    mark(hidden)  # also where its gradient is ready, in the backward
        with section("loss"):
            loss = state.loss(hidden, microbatch)  # kept in state.microbatch_losses
        mark()
        with section("backward"):
            loss.backward()
        mark()
    state.reduce_gradients()  # the sum over ranks with --ep; nothing on one rank


# ------------------------------------------------------------------------------------------------
# 3. Graphs of the first parts of each layer: four variants. `captured` is recorded. It makes a tuple of tensors from
# hidden, the layer's input, and each replay writes these tensors anew. `rest` is eager: it makes the layer's output
# from them. Every layer has the tuple, in each microbatch, in this order, as far as the graph goes:
#     x, y [tokens, hidden], weights [tokens, top_k]                               have gradients
#     experts [tokens, top_k], counts [experts], plan: five tensors (RowPlan)      int32, have none
# In graph_layer the tuple is the layer's output alone, [tokens, hidden], and there is no rest.

NUM_WITH_GRADIENTS = 3  # x, y and weights: the first outputs, as far as the graph goes


@variant(
    "graph_attn",
    kind="graph",
    help="attention of each layer in graphs; router and experts eager",
    graphs=lambda config: config.layer_passes,  # 2 x layers x microbatches
    parity="bitwise",
)
def graphed_attention(state: State, capture: Capture):
    def captured(layer, hidden, inputs):
        return (layer.attention(hidden, inputs),)

    def rest(layer, x):
        y, routed = layer.route(x)
        return layer.mix(x, y, routed, layer.preprocess(routed))

    return GraphedLayers(state, capture, captured, rest)


@variant(
    "graph_attn_router",
    kind="graph",
    help="attention and router of each layer in graphs; the rows' order and the experts eager",
    graphs=lambda config: config.layer_passes,
    parity="bitwise",
)
def graphed_router(state: State, capture: Capture):
    def captured(layer, hidden, inputs):
        x = layer.attention(hidden, inputs)
        y, (weights, experts, counts) = layer.route(x)
        return x, y, weights, experts, counts

    def rest(layer, x, y, weights, experts, counts):
        routed = Routed(weights, experts, counts)
        return layer.mix(x, y, routed, layer.preprocess(routed))

    return GraphedLayers(state, capture, captured, rest)


@variant(
    "graph_attn_router_preprocess",
    kind="graph",
    help="Megatron Bridge's scope: attention, router and the rows' order in graphs; the experts eager",
    graphs=lambda config: config.layer_passes,
    parity="bitwise",
    headline=True,
)
def graphed_preprocess(state: State, capture: Capture):
    def captured(layer, hidden, inputs):
        x = layer.attention(hidden, inputs)
        y, routed = layer.route(x)
        return x, y, *routed, *layer.preprocess(routed)

    def rest(layer, x, y, weights, experts, counts, *plan):
        return layer.mix(x, y, Routed(weights, experts, counts), RowPlan(*plan))

    return GraphedLayers(state, capture, captured, rest)


@variant(
    "graph_layer",
    kind="graph",
    help="each dropless layer whole, forward and backward in graphs, buffers chained",
    graphs=lambda config: config.layer_passes,
    parity="bitwise",
    headline=True,
)
def graphed_layer(state: State, capture: Capture):
    require_capturable(state.exchange.size, "layer")  # refuses --ep above 1
    return GraphedLayers(state, capture, lambda layer, hidden, inputs: (layer(hidden, inputs),))


class GraphedLayers:
    """Two graphs for each layer in each microbatch, all in one pool.

    A capture freezes addresses, so layers share no graphs: each has its weights and main_grads. Nor do microbatches:
    each has its positions and bounds of packed documents, and all but microbatch 0 add to main_grad (accumulation.adds,
    which a capture freezes, too).
    """

    def __init__(self, state: State, capture: Capture, captured, rest=None):
        self.state, pool = state, capture.pool()  # memory that the graphs share
        capture.warm_up(eager_step)  # three steps; `session` calls state.reset before step 0, and set the stream
        self.graphed: list[list[GraphedLayer]] = [[] for _ in range(state.config.microbatches)]
        grads: list[torch.Tensor] = []  # one set serves all: a backward graph reads it right after it is filled
        with capture.capturing():  # only counts the seconds and the memory of this block: pool.capture captures
            for microbatch, layers in enumerate(self.graphed):
                state.accumulation.adds = microbatch > 0
                for number in range(state.config.layers):
                    before = layers[-1] if layers and not rest else None
                    layers.append(GraphedLayer(pool, state, microbatch, number, captured, rest, before))
                grads = grads or [torch.zeros_like(output) for output in layers[0].outputs[:NUM_WITH_GRADIENTS]]
                for layer in reversed(layers):
                    layer.capture_backward(pool, grads)

    def step(self, index: int):
        """`eager_step` with graphed layers. Autograd runs it as in eager, with `Replayed` for their graphs."""
        self.state.begin_step(index)
        forward_and_backward(self.state, self.graphed)
        with section("optimizer"):
            self.state.update()
        self.state.end_step(index)


class GraphedLayer:
    """A layer in one microbatch, called as the eager one is: two graphs, the tensors they read and write, the rest.

        forward graph     reads hidden, weights and state.inputs      writes outputs, and activations in the pool
        backward graph    reads grads, hidden and the activations     writes grad_hidden and main_grad

    before: the layer whose output is this one's hidden, read where it lies (chained). None: a step copies to hidden.
    In plain torch, for attention of layer 0 and steps of one microbatch (`Attention` does what `Replayed` does):

        torch.cuda.set_stream(torch.cuda.Stream())
        for index in range(3): eager_step(state, index)
        layer, inputs = state.layers[0], state.inputs_of(0)
        h, grad = torch.zeros_like(state.embed(0)).requires_grad_(), torch.zeros_like(state.embed(0))  # static buffers
        forward_graph, backward_graph = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        shared = {"pool": torch.cuda.graph_pool_handle(), "stream": torch.cuda.current_stream()}
        shared["capture_error_mode"] = "thread_local"
        with torch.cuda.graph(forward_graph, **shared):
            x = layer.attention(h, inputs)               # recorded, not run
        with torch.cuda.graph(backward_graph, **shared):
            x.backward(grad)                             # recorded, too: fills h.grad and main_grad
        class Attention(torch.autograd.Function):
            @staticmethod
            def forward(ctx, hidden):
                h.copy_(hidden)
                forward_graph.replay()
                return x.detach()
            @staticmethod
            def backward(ctx, grad_x):
                grad.copy_(grad_x)
                backward_graph.replay()
                return h.grad
        layer.attention = lambda hidden, inputs: Attention.apply(hidden)
        state.reset()
        for index in range(num_steps): eager_step(state, index)
    """

    def __init__(self, pool, state: State, microbatch: int, number: int, captured, rest, before):
        c, self.layer, self.rest, self.is_chained = state.config, state.layers[number], rest, before is not None
        if before:
            hidden = before.outputs[0].detach()  # autograd's graph ends here; in a step `Replayed` joins the layers
        else:
            hidden = torch.zeros(c.tokens, c.hidden, dtype=state.dtype, device=state.device)
        # With --lora-rank the embedding is frozen, so layer 0's input needs no gradient.
        self.hidden = hidden.requires_grad_(number > 0 or not c.lora_rank)
        # `with torch.cuda.graph(...)` above: records the launches, returns (graph, result). A replay checks that
        # state.static (the tensors of state.inputs) and hidden kept address, shape and strides; not a chained hidden,
        # which only graphs write.
        self.forward, self.outputs = pool.capture(
            lambda: captured(self.layer, self.hidden, state.inputs_of(microbatch)),
            state.static if before else (*state.static, hidden),
        )

    def capture_backward(self, pool, grads):
        """grads: buffers of the gradients of the first outputs, which a step fills before the replay."""
        self.grads = grads
        self.backward, grad_hidden = pool.capture(
            lambda: input_gradient(self.hidden, self.outputs[: len(grads)], grads), tuple(grads)
        )
        # Later captures may use this memory, see "Reused" at the top. self.hidden keeps its own, which the backward
        # graph reads. In graph_layer that is the output of the layer before, so only the last layer's is given away.
        self.grad_hidden = None if grad_hidden is None else pool.borrow(grad_hidden)
        self.outputs = [pool.borrow(output.detach()) for output in self.outputs]

    def __call__(self, hidden, inputs):
        # Autograd calls Replayed.backward only if hidden requires a gradient. A frozen embedding's output is made to;
        # its gradient is None then. inputs: the graphs read them where they lie.
        hidden = hidden if hidden.requires_grad else hidden.detach().requires_grad_()
        outputs = Replayed.apply(hidden, self)
        return self.rest(self.layer, *outputs) if self.rest else outputs[0]


def input_gradient(hidden, outputs, grads):
    """Return hidden's gradient, None if it needs none. autograd.grad would not call the hooks that fill main_grad."""
    hidden.grad = None  # else backward would add to it
    torch.autograd.backward(outputs, grads)
    grad, hidden.grad = hidden.grad, None  # else hidden would keep the memory
    return grad


class Replayed(torch.autograd.Function):
    """A layer's first parts as an operator of autograd, hidden -> outputs: forward and backward replay their graphs."""

    @staticmethod
    def forward(ctx, hidden, graphed):
        ctx.graphed = graphed
        if not graphed.is_chained:
            graphed.hidden.copy_(hidden)
        graphed.forward.replay()
        # New tensor objects on the same memory, since autograd attaches the step's history to the returned objects.
        outputs = tuple(output.view_as(output) for output in graphed.outputs)
        ctx.mark_non_differentiable(*outputs[NUM_WITH_GRADIENTS:])
        return outputs

    @staticmethod
    def backward(ctx, *grads):
        graphed = ctx.graphed
        torch._foreach_copy_(graphed.grads, grads[: len(graphed.grads)])
        graphed.backward.replay()
        return graphed.grad_hidden, None  # the gradients of hidden and of graphed


# ------------------------------------------------------------------------------------------------
# 4. The whole step in one graph: no tensor goes in or out but the buffers of section 1


@variant(
    "graph_step",
    kind="graph",
    help="the whole step in one graph: all microbatches, clipping and Adam",
    graphs=1,
    parity="bitwise",
    headline=True,
)
class GraphedStep:
    """A replay reads state.inputs, and writes main_grad, the losses and the weights; all lie outside of the pool."""

    def __init__(self, state: State, capture: Capture):
        require_capturable(state.exchange.size, "layer")  # refuses --ep above 1: a step holds its layers' exchange
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
# 5. The loop. session builds, makes the variant of --variant (which warms up and captures), calls state.reset, and
# after the loop releases the graphs and their pool. `make bench` calls run.step itself, and times these calls alone.


if __name__ == "__main__":
    with session(args, build) as (run, log):
        for index in log.steps():
            run.step(index)
