"""GPT-3 175B, one GPU's share: CUDA graphs per layer and microbatch.

In the graphs: every transformer layer, forward and backward, with its weight gradients accumulated into
FP32 main_grad. Eager: data, embedding, head and loss, the FP8 scale updates, gradient clipping and Adam.
Why: that is the scope NVIDIA submitted (MLPerf v4.1, 11,616 GPUs). The layers are nearly all of the work,
and what changes from step to step in a real run (schedules, communication, logging) stays plain Python.
`graph_opt` captures clipping and Adam, too. Transformer Engine's own graphs are in te_graphs.py.

    python -m gpt3.train --preset tiny --variant graph
    python -m gpt3.train --preset bench --variant graph --record runs/graph.r1.json
    torchrun --standalone --nproc-per-node 2 -m gpt3.train --preset tiny --variant graph      # data parallel
"""

from common.config import mistakes_in_one_line, parse
from gpt3 import config as gpt3_config
from gpt3.config import ABOUT, PRESETS, VARIANTS, Config

if __name__ == "__main__":
    # Before torch is imported: --help, --describe and mistakes are answered at once.
    args = parse("gpt3", Config, PRESETS, VARIANTS, about=ABOUT)

import contextlib
import sys
from dataclasses import replace as replace_fields

import torch

from common import collectives, environment, flops, measure, precision
from common.capture import Pool
from common.measure import Capture, Unsupported, mark, section
from gpt3 import te_graphs
from gpt3.state import State, hyperparameters

# ------------------------------------------------------------------------------------------------
# The eager step


def eager_step(state: State, index: int):
    """One training step: microbatches one after the other, then clip and Adam. Nothing here waits for the device."""
    state.begin_step(index)
    for microbatch in range(state.config.microbatches):
        with section("embedding"):
            hidden = state.embedding(state.inputs["tokens"][microbatch])
        with section("forward"), state.fp8.forward():
            for layer in state.layers:
                hidden = layer(hidden, is_first_microbatch=microbatch == 0)
        loss = state.microbatch_loss(hidden, microbatch)
        mark()
        with section("backward"), state.fp8.backward():
            loss.backward()
        mark()
    state.end_step(index)


class Eager:
    """The baseline: no graph, no compiler."""

    def __init__(self, state: State):
        self.state = state
        self.capture = Capture(strategy="none")
        _warm_up(state, self.capture)

    def step(self, index: int):
        eager_step(self.state, index)

    def replays_of(self, index: int) -> int:
        return 0

    def close(self):
        """Nothing to release."""


def _warm_up(state, capture, steps=3):
    """Eager steps on the capture stream: libraries initialise, FP8 caches and optimizer state exist afterwards."""
    with capture.timed("warmup_s"):
        for index in range(steps):
            eager_step(state, index)


# ------------------------------------------------------------------------------------------------
# The capture, and the step that replays it


def capture_forward(state: State, pool: Pool, x, microbatch: int):
    """A graph for every layer's forward, buffers chained: what layer l writes is what layer l+1 reads.

    The FP8 weight cast is in the graphs of the first microbatch alone, as in the eager step. Returns the
    graphs in order, (input, output) of every layer for the backward, and the last layer's output.
    """
    graphs, saved, hidden = [], [], x
    for layer in state.layers:
        static = (x,) if hidden is x else ()
        graph, output = pool.capture(lambda: layer(hidden, is_first_microbatch=microbatch == 0), static)  # noqa: B023
        graphs.append(graph)
        saved.append((hidden, output))
        hidden = output.detach().requires_grad_()
    return graphs, saved, hidden.detach()


def capture_backward(pool: Pool, saved, grad_y):
    """A graph for every layer's backward, last layer first: gradients chained, weight gradients into main_grad.

    Consumes `saved`, so that the activations' memory is free for what is captured next. Returns the graphs
    in order of replay and the gradient of layer 0's input.
    """
    graphs, grad = [], grad_y
    while saved:
        x, output = saved.pop()
        graph, grad = pool.capture(lambda: _input_gradient(x, output, grad))  # noqa: B023
        graphs.append(graph)
        del x, output
    return graphs, grad


def _input_gradient(x, output, grad):
    x.grad = None
    output.backward(grad)
    grad, x.grad = x.grad, None
    return grad


class Graphed:
    """Forward and backward graphs per layer and microbatch, one pool, captured in the order in which a step runs them.

    That order lets a microbatch's activations take the place of the last one's, and a replay copies
    nothing between layers: only the embedding's output and the loss's gradient are copied in.
    """

    def __init__(self, state: State):
        self.state = state
        self.pool = Pool(state.device)
        self.capture = Capture(strategy="layer x microbatch, forward and backward", pools=[self.pool])
        _warm_up(state, self.capture)
        self.x = torch.zeros_like(state.embedding(state.inputs["tokens"][0])).requires_grad_()
        self.grad_y = torch.zeros_like(self.x)
        self.forward, self.y, self.backward, self.grad_x = [], [], [], []
        self.update = state.adam.step
        with self.capture.timed("capture_s"), state.fp8.capturing():
            for microbatch in range(state.config.microbatches):
                graphs, saved, y = capture_forward(state, self.pool, self.x, microbatch)
                self.forward.append(graphs)
                self.y.append(y)
                graphs, grad_x = capture_backward(self.pool, saved, self.grad_y)
                self.backward.append(graphs)
                self.grad_x.append(grad_x)

    def step(self, index: int):
        state = self.state
        state.begin_step(index)
        for microbatch in range(state.config.microbatches):
            with section("embedding"):
                embedded = state.embedding(state.inputs["tokens"][microbatch])
                self.x.detach().copy_(embedded.detach())
            with section("forward"), state.fp8.forward():
                replay(self.forward[microbatch])
            hidden = self.y[microbatch].detach().requires_grad_()
            loss = state.microbatch_loss(hidden, microbatch)
            mark()
            with section("backward"):
                loss.backward()
                self.grad_y.copy_(hidden.grad)
                with state.fp8.backward(replayed=True):
                    replay(self.backward[microbatch])
                embedded.backward(self.grad_x[microbatch])
            mark()
        state.end_step(index, self.update)

    def replays_of(self, index: int) -> int:
        return 2 * self.state.config.layers * self.state.config.microbatches

    def close(self):
        self.pool.release()


def replay(graphs):
    for graph in graphs:
        graph.replay()


class GraphedOptimizer(Graphed):
    """`graph`, with clipping and Adam in a graph of their own, one more replay a step.

    What changes from step to step must be on the device, or the graph would keep what it was at capture: the learning
    rate, Adam's count of steps and the gradients' norm are tensors that the replay reads and writes. A schedule fills
    `state.adam.lr` before the step. Outside stay the all-reduce of the gradients, and where losses are kept, which
    depends on the step's number.
    """

    def __init__(self, state: State):
        super().__init__(state)
        self.capture.strategy += "; clipping and Adam"
        # Last in the step and last in the pool: it may use what the layers' graphs are done with.
        with self.capture.timed("capture_s"):
            graph, _ = self.pool.capture(state.adam.step)
        self.update = graph.replay

    def replays_of(self, index: int) -> int:
        return super().replays_of(index) + 1


class GraphedOverlap:
    """`graph`, with the forward of microbatch m+1 beside the backward of microbatch m on a second stream.

    The same kernels on the same values: only their overlap differs, which fills the GPU where a kernel is
    too small for it. A host that replays needs a tenth of a step to issue it and can feed two streams;
    one that launches kernels cannot. Two microbatches are in flight, and what runs at the same time must
    not share memory: forward graphs have one pool, backward graphs another, static buffers come in pairs.
    """

    def __init__(self, state: State):
        if state.device.type == "cuda" and (state.config.layer, state.config.precision) != ("te", "fp8"):
            raise Unsupported("graph_overlap needs --layer te --precision fp8: other GEMMs share one workspace")
        self.state = state
        self.pools = [Pool(state.device), Pool(state.device)]
        self.capture = Capture(strategy="layer x microbatch, forward beside backward", pools=self.pools)
        self.side = torch.cuda.Stream(state.device) if state.device.type == "cuda" else None
        _warm_up(state, self.capture)
        sample = torch.zeros_like(state.embedding(state.inputs["tokens"][0]))
        self.x = [torch.zeros_like(sample).requires_grad_() for _ in range(2)]
        self.grad_y = torch.zeros_like(sample)
        self.forward, self.y, self.backward, self.grad_x = [], [], [], []
        with self.capture.timed("capture_s"), state.fp8.capturing():
            last = self._capture_forward(0)
            for microbatch in range(state.config.microbatches):
                saved, last = last, self._capture_forward(microbatch + 1)
                with state.fp8.other_workspace():
                    graphs, grad_x = capture_backward(self.pools[1], saved, self.grad_y)
                self.backward.append(graphs)
                self.grad_x.append(grad_x)

    def _capture_forward(self, microbatch):
        if microbatch == self.state.config.microbatches:
            return None
        graphs, saved, y = capture_forward(self.state, self.pools[0], self.x[microbatch % 2], microbatch)
        self.forward.append(graphs)
        self.y.append(y)
        return saved

    def step(self, index: int):
        state = self.state
        state.begin_step(index)
        embedded = self._forward(0, None)
        self._loss(0)
        for microbatch in range(state.config.microbatches):
            following = None
            if microbatch + 1 < state.config.microbatches:
                following = self._forward(microbatch + 1, self.side)
            with section("backward"):
                with state.fp8.backward(replayed=True):
                    replay(self.backward[microbatch])
                embedded.backward(self.grad_x[microbatch])
            mark()
            if self.side:
                torch.cuda.current_stream().wait_stream(self.side)
            if following is not None:
                self._loss(microbatch + 1)
                embedded = following
        state.end_step(index)

    def _forward(self, microbatch, stream):
        with section("embedding"):
            embedded = self.state.embedding(self.state.inputs["tokens"][microbatch])
            self.x[microbatch % 2].detach().copy_(embedded.detach())
        with _beside(stream), section("forward"), self.state.fp8.forward():
            replay(self.forward[microbatch])
        return embedded

    def _loss(self, microbatch):
        hidden = self.y[microbatch].detach().requires_grad_()
        loss = self.state.microbatch_loss(hidden, microbatch)
        with section("backward"):
            loss.backward()
            self.grad_y.copy_(hidden.grad)
        mark()

    def replays_of(self, index: int) -> int:
        return 2 * self.state.config.layers * self.state.config.microbatches

    def close(self):
        for pool in self.pools:
            pool.release()


@contextlib.contextmanager
def _beside(stream):
    """Run the block on `stream`, after what is issued so far; None: on the current one."""
    if stream is None:
        yield
        return
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield


# ------------------------------------------------------------------------------------------------
# The other variants


class Compiled:
    """torch.compile of every layer; plain bf16 layers only, since te and FP8 modules leave the compiler."""

    mode = "default"

    def __init__(self, state: State):
        if state.device.type != "cuda":
            raise Unsupported("torch.compile is measured on a GPU only: the host graph cannot record compiled code")
        if state.config.layer != "torch" or state.config.precision != "bf16":
            raise Unsupported(
                "te and FP8 modules opt out of torch.compile: compare all variants with --layer torch --precision bf16"
            )
        self.state = state
        self.pool = Pool(state.device)
        self.capture = Capture(strategy=f"torch.compile, mode {self.mode}", pools=[self.pool])
        self.originals = [layer.forward for layer in state.layers]
        for layer in state.layers:
            layer.forward = torch.compile(layer.forward, mode=self.mode, dynamic=False, fullgraph=True)
        # reduce-overhead captures in its second and third step; from then on each step makes as many replays.
        with self.capture.timed("compile_s"), self.pool.adopt():
            for index in range(4):
                self.step(index)
        before = self.pool.num_replays
        self.step(0)
        self.num_replays = self.pool.num_replays - before

    def step(self, index: int):
        torch.compiler.cudagraph_mark_step_begin()
        eager_step(self.state, index)

    def replays_of(self, index: int) -> int:
        return self.num_replays

    @contextlib.contextmanager
    def as_eager(self):
        compiled = [layer.forward for layer in self.state.layers]
        self.close()
        try:
            yield
        finally:
            for layer, forward in zip(self.state.layers, compiled, strict=True):
                layer.forward = forward

    def close(self):
        for layer, original in zip(self.state.layers, self.originals, strict=True):
            layer.forward = original


class ReduceOverhead(Compiled):
    mode = "reduce-overhead"

    def __init__(self, state: State):
        super().__init__(state)
        if not self.num_replays:
            raise Unsupported("torch.compile(mode='reduce-overhead') made no graphs of these layers")


MAKE_VARIANT = {
    "eager": Eager,
    "graph_te": lambda state: te_graphs.AsSubmitted(state, _warm_up),
    "graph_te_slot": lambda state: te_graphs.OneSlot(state, _warm_up),
    "graph_te_default": lambda state: te_graphs.Defaults(state, _warm_up),
    "graph": Graphed,
    "graph_opt": GraphedOptimizer,
    "graph_overlap": GraphedOverlap,
    "compile": Compiled,
    "reduce_overhead": ReduceOverhead,
}

# ------------------------------------------------------------------------------------------------
# Main


def resolve(args, device: torch.device):
    """Arguments with layer, precision and number of layers as they can run here, and notes on what changed."""
    config, run, notes = args.config, args.run, []
    if config.layer == "auto":
        fault = None if device.type == "cpu" else _te_fault()
        on_te = device.type == "cuda" and fault is None
        config = replace_fields(config, layer="te" if on_te else "torch")
        if fault and config.precision == "fp8":
            config = replace_fields(config, precision="bf16")
            notes.append(f"plain-PyTorch layer in bf16: {fault}")
    if config.layer == "te" and device.type == "cpu":
        raise ValueError("--layer te needs a GPU; take --layer torch")
    if device.type == "cpu":
        gpt3_config.require(config, environment.available_host_bytes())
    if config.layer == "torch" and config.precision == "fp8":
        notes.append("FP8 emulated: operands rounded to FP8, GEMMs in bf16")
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        smaller = gpt3_config.fit(config, free)
        if smaller.layers < config.layers:
            run = replace_fields(run, preset=f"{run.preset}-l{smaller.layers}")
            notes.append(f"{smaller.layers} of {config.layers} layers: what fits into {free / 2**30:.0f} GiB")
            config = smaller
    return replace_fields(args, config=config, run=run), notes


def _te_fault():
    """Why te.TransformerLayer cannot run on this GPU in FP8, or None."""
    try:
        te = precision.transformer_engine()
    except (ImportError, OSError) as error:
        return f"Transformer Engine is not usable ({str(error).splitlines()[0][:120]})"
    available, reason = te.is_fp8_available(return_reason=True)
    return None if available else f"no FP8 on this GPU ({reason})"


def _card(config, device, flops_per_step):
    share = "one GPU's share of GPT-3 175B" if config.hidden == 12288 else "toy widths"
    memory = (
        f" | memory predicted {gpt3_config.predicted_bytes(config) / 2**30:.1f} GiB" if device.type == "cuda" else ""
    )
    return [
        f"{config.layers} layers, hidden {config.hidden}, heads {config.heads}, ffn {config.ffn}, "
        f"{gpt3_config.num_parameters(config) / 1e6:,.1f} M parameters: {share}",
        f"{config.microbatches} microbatches of {config.microbatch} x {config.sequence} tokens | "
        f"{config.layer} layer, {config.precision} | {flops_per_step / 1e12:.3g} TFLOP/step{memory}",
    ]


def main(args):
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    rank, local_rank, world_size = collectives.init(kind)
    device = torch.device(kind, local_rank) if kind == "cuda" else torch.device(kind)
    try:
        args, notes = resolve(args, device)
        config = args.config
        attention, sequences = config.heads * config.head_dim, config.microbatch * config.microbatches
        count = sequences * flops.gpt(
            num_layers=config.layers,
            sequence_length=config.sequence,
            hidden=config.hidden,
            q_width=attention,
            kv_width=attention,
            ffn=config.ffn,
            vocab=config.vocab,
            mlp_matrices=2,
        )
        gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        workload = measure.Workload(
            model="gpt3",
            build=lambda config, device: State(config, device, rank, world_size),
            variants=MAKE_VARIANT,
            reference=eager_step,
            card=_card(config, device, count),
            notes=notes,
            flops_per_step=count,
            flops_convention=flops.CAUSAL_HALF,
            items_per_step=config.sequence * sequences,
            unit="tokens",
            peak_flops=flops.peak_flops(gpu, config.precision),
            hyperparameters=hyperparameters(config, world_size),
            kinds=ABOUT["kinds"],
            promises=ABOUT["promises"],
        )
        return measure.run(workload, args, device, rank, world_size)
    finally:
        collectives.shutdown()


if __name__ == "__main__":
    with mistakes_in_one_line("gpt3"):
        record = main(args)
    sys.exit(0 if record["status"] in ("pass", "unsupported", "oom") else 1)
