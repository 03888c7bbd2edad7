"""Llama 2 70B LoRA: CUDA graphs per layer, or one for the whole step.

In the graphs of `graph`: every layer, forward and backward, with the gradients of its adapters. Eager: data, embedding,
head and loss, the gradients' reduction over ranks, clipping, AdamW and the FP8 scale updates. `one_graph` has all of
that in it but data and reduction. Why: a window is one microbatch, so a layer needs two graphs; nothing in the step
waits for the host, so nothing has to stay out.

    python -m llama2_lora.train --preset tiny --variant graph
    python -m llama2_lora.train --preset bench --variant graph --record runs/graph.r1.json
    torchrun --standalone --nproc-per-node 2 -m llama2_lora.train --preset tiny --variant graph      # data parallel
"""

from common.config import mistakes_in_one_line, parse
from llama2_lora.config import ABOUT, PRESETS, VARIANTS, Config

if __name__ == "__main__":
    # Before torch is imported: --help, --describe and mistakes are answered at once.
    args = parse("llama2_lora", Config, PRESETS, VARIANTS, about=ABOUT)

import sys
from dataclasses import replace as replace_fields

import torch

from common import collectives, environment, flops, measure
from common.capture import Pool
from common.measure import Capture, Unsupported, mark, section
from common.memory_plan import GIB
from llama2_lora import config as lora_config
from llama2_lora import plan as plans
from llama2_lora.config import FP8
from llama2_lora.state import State, hyperparameters

# ------------------------------------------------------------------------------------------------
# The eager step


def training_step(state: State):
    """Forward, loss and backward of the window in the static inputs. Nothing here waits for the device."""
    stack = state.stack
    with section("embedding"):
        stack.begin()
    with section("forward"):
        stack.forward_all()
    mark()
    with section("loss"):
        stack.head()
    with section("backward"):
        stack.backward_all()
    mark()


def eager_step(state: State, index: int):
    state.begin_step(index)
    training_step(state)
    state.reduce()
    state.update()
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
    """Eager steps on the capture stream: libraries initialise and kernels are compiled."""
    with capture.timed("warmup_s"):
        for index in range(steps):
            eager_step(state, index)


# ------------------------------------------------------------------------------------------------
# The captures, and the steps that replay them


class Graphed:
    """A forward and a backward graph of each layer, captured in the order in which a step runs them.

    What layer l writes is what layer l + 1 reads, so a replay copies nothing; attention's output, the only tensor that
    a layer allocates and keeps, lives in the pool from its forward graph to its backward graph.
    """

    def __init__(self, state: State):
        self.state, stack = state, state.stack
        self.pool = Pool(state.device)
        self.capture = Capture(strategy="layer, forward and backward", pools=[self.pool])
        _warm_up(state, self.capture)
        self.forward, self.backward = [], []
        with self.capture.timed("capture_s"), stack.capturing():
            for layer in range(state.config.layers):
                graph, _ = self.pool.capture(lambda: stack.forward(layer))  # noqa: B023
                self.forward.append(graph)
            for layer in reversed(range(state.config.layers)):
                graph, _ = self.pool.capture(lambda: stack.backward(layer))  # noqa: B023
                self.backward.append(graph)
        # Eager steps from here on, the canary's, find the memory for it taken.
        stack.keeps_attention = False

    def step(self, index: int):
        state = self.state
        state.begin_step(index)
        with section("embedding"):
            state.stack.begin()
        with section("forward"), state.stack.replaying_forward():
            replay(self.forward)
        mark()
        with section("loss"):
            state.stack.head_of_chain()
        with section("backward"), state.stack.replaying_backward():
            replay(self.backward)
        mark()
        state.reduce()
        state.update()
        state.end_step(index)

    def replays_of(self, index: int) -> int:
        return 2 * self.state.config.layers

    def close(self):
        self.pool.release()
        self.state.stack.keeps_attention = True


def replay(graphs):
    for graph in graphs:
        graph.replay()


class OneGraph:
    """Everything from the embedding to AdamW in one graph; with several ranks the reduction and AdamW follow it."""

    def __init__(self, state: State):
        self.state = state
        self.pool = Pool(state.device)
        self.capture = Capture(strategy="the whole step", pools=[self.pool])
        _warm_up(state, self.capture)
        self.updates = state.world_size == 1
        with self.capture.timed("capture_s"):
            self.graph, _ = self.pool.capture(self._captured)
        state.stack.keeps_attention = False

    def _captured(self):
        training_step(self.state)
        if self.updates:
            self.state.reduce()
            self.state.update()

    def step(self, index: int):
        self.state.begin_step(index)
        with section("replay"):
            self.graph.replay()
        mark()
        if not self.updates:
            self.state.reduce()
            self.state.update()
        self.state.end_step(index)

    def replays_of(self, index: int) -> int:
        return 1

    def close(self):
        self.pool.release()
        self.state.stack.keeps_attention = True


# ------------------------------------------------------------------------------------------------
# Transformer Engine's modules and torch.compile


class EagerTransformerEngine(Eager):
    """The baseline of graph_te: what most people train, kernels launched one by one."""

    def __init__(self, state: State):
        if state.kind != "te":
            raise Unsupported("Transformer Engine's layers need a GPU")
        super().__init__(state)


class GraphedByTransformerEngine:
    """NVIDIA's mechanism: make_graphed_callables over Transformer Engine's layers, one slot of two graphs for each.

    The wrapped layers are called like layers under autograd; each call copies its input into the slot, and each
    backward its gradient. The adapters' gradients come out of the graphs and are added to their buffers eagerly.
    """

    def __init__(self, state: State):
        if state.kind != "te":
            raise Unsupported("Transformer Engine's layers need a GPU")
        from transformer_engine.pytorch import make_graphed_callables

        self.state, stack = state, state.stack
        self.pool = Pool(state.device)
        self.capture = Capture(strategy="te.make_graphed_callables, order [1, -1]", pools=[self.pool])
        _warm_up(state, self.capture)
        fp8 = state.config.precision == "fp8"
        # Below the first layer nothing needs a gradient.
        samples = tuple((torch.randn_like(stack.x).requires_grad_(index > 0),) for index in range(len(stack.layers)))
        with self.capture.timed("capture_s"), self.pool.adopt():
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
            eager_step(self.state, index)
        finally:
            stack.calls = list(stack.layers)

    def replays_of(self, index: int) -> int:
        return 2 * self.state.config.layers

    def close(self):
        for call in self.calls:
            call.reset()
        self.pool.release()


class Compiled:
    """torch.compile of every layer; plain bf16 layers only."""

    mode = "default"

    def __init__(self, state: State):
        if state.device.type != "cuda":
            raise Unsupported("torch.compile is measured on a GPU only: the host graph cannot record compiled code")
        if state.kind != "torch" or state.config.precision != "bf16":
            raise Unsupported(
                "lean layers are kernels called by hand, te and FP8 modules leave the compiler: compare all variants "
                "with --layer torch --precision bf16"
            )
        self.state, stack = state, state.stack
        self.pool = Pool(state.device)
        self.capture = Capture(strategy=f"torch.compile, mode {self.mode}", pools=[self.pool])
        self.calls = [torch.compile(layer, mode=self.mode, dynamic=False, fullgraph=True) for layer in stack.layers]
        # reduce-overhead captures in its second and third step; from then on each step makes as many replays. Dropout
        # draws as it does in eager layers.
        fallback = torch._inductor.config.patch(fallback_random=True)
        with self.capture.timed("compile_s"), self.pool.adopt(), fallback:
            for index in range(4):
                self.step(index)
        before = self.pool.num_replays
        self.step(0)
        self.num_replays = self.pool.num_replays - before

    def step(self, index: int):
        torch.compiler.cudagraph_mark_step_begin()
        stack = self.state.stack
        stack.calls = self.calls
        try:
            eager_step(self.state, index)
        finally:
            stack.calls = list(stack.layers)

    def replays_of(self, index: int) -> int:
        return self.num_replays

    def close(self):
        """Compiled code goes with the process."""


class ReduceOverhead(Compiled):
    mode = "reduce-overhead"

    def __init__(self, state: State):
        super().__init__(state)
        if not self.num_replays:
            raise Unsupported("torch.compile(mode='reduce-overhead') made no graphs of these layers")


MAKE_VARIANT = {
    "eager": Eager,
    "graph": Graphed,
    "one_graph": OneGraph,
    "eager_te": EagerTransformerEngine,
    "graph_te": GraphedByTransformerEngine,
    "compile": Compiled,
    "reduce_overhead": ReduceOverhead,
}

# ------------------------------------------------------------------------------------------------
# Main


def resolve(args, device: torch.device):
    """Arguments with precision, memory and number of layers as they can run here, and notes on what changed."""
    config, run, notes = args.config, args.run, []
    if config.layer == "te" and device.type == "cpu":
        raise ValueError("--layer te needs a GPU; take --layer lean or torch")
    if device.type == "cpu":
        available = environment.available_host_bytes()
        needed = plans.needed_bytes(config)
        if available is not None and needed > available:
            raise ValueError(
                f"this preset needs {needed / GIB:.1f} GiB on a GPU, there is none, and the host has "
                f"{available / GIB:.1f} GiB free: run --preset tiny"
            )
        if config.precision in FP8:
            notes.append("FP8 emulated: operands rounded to FP8, GEMMs in FP32")
        return replace_fields(args, config=config), notes
    if config.precision in FP8 and torch.cuda.get_device_capability(device) < (8, 9):
        config = replace_fields(config, precision="bf16", fc1_store="auto")
        notes.append("bf16: no FP8 on this GPU, it needs compute capability 8.9")
    free, _ = torch.cuda.mem_get_info(device)
    # In whole GiB, so that runs of one session get one plan.
    budget = max(1, (free - plans.CONTEXT_BYTES) // GIB)
    if config.memory_gib > free / GIB:
        raise ValueError(f"--memory-gib {config.memory_gib}: {free / GIB:.1f} GiB are free, take at most {budget}")
    if not config.memory_gib:
        smaller = plans.fit(config, budget * GIB)
        if smaller.layers < config.layers:
            run = replace_fields(run, preset=f"{run.preset}-l{smaller.layers}")
            notes.append(f"{smaller.layers} of {config.layers} layers: what fits into {budget} GiB")
        config = replace_fields(smaller, memory_gib=float(budget))
    return replace_fields(args, config=config, run=run), notes


def kind_of_layers(args, device) -> str:
    """--layer, but Transformer Engine's for the variants that are named after it, where there is a GPU."""
    return "te" if args.run.variant.endswith("_te") and device.type == "cuda" else args.config.layer


def _card(config, kind, device, flops_per_step):
    known = {(8192, 80): "Llama 2 70B", (8192, config.layers): f"{config.layers} of 80 layers of Llama 2 70B"}
    lines = [
        f"{config.layers} layers, hidden {config.hidden}, heads {config.heads} ({config.kv_heads} groups), "
        f"ffn {config.ffn}: {known.get((config.hidden, config.layers), 'toy widths')}",
        f"{lora_config.num_parameters(config) / 1e6:,.1f} M frozen parameters, "
        f"{'of ' + config.checkpoint if config.checkpoint else 'random'}; "
        f"{lora_config.num_trainable(config) / 1e6:,.2f} M trainable ones",
        f"{config.sequence} tokens | {kind} layers, {config.precision} | {flops_per_step / 1e12:.4g} TFLOP/step",
    ]
    if device.type == "cuda" and kind == "lean":
        plan = plans.make_plan(config, int(config.memory_gib * GIB))
        lines += ["", *plan.text().splitlines()]
    return lines


def main(args):
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    rank, local_rank, world_size = collectives.init(kind)
    device = torch.device(kind, local_rank) if kind == "cuda" else torch.device(kind)
    try:
        args, notes = resolve(args, device)
        config, layers = args.config, kind_of_layers(args, device)
        count = lora_config.flops_per_step(config)
        gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        workload = measure.Workload(
            model="llama2_lora",
            build=lambda config, device: State(config, device, layers, rank, world_size),
            variants=MAKE_VARIANT,
            reference=eager_step,
            card=_card(config, layers, device, count),
            notes=notes,
            flops_per_step=count,
            flops_convention=flops.CAUSAL_HALF,
            items_per_step=config.sequence,
            unit="tokens",
            peak_flops=flops.peak_flops(gpu, "fp8" if config.precision in FP8 else "bf16"),
            hyperparameters=hyperparameters(config, world_size),
            kinds=ABOUT["kinds"],
            promises=ABOUT["promises"],
        )
        return measure.run(workload, args, device, rank, world_size)
    finally:
        collectives.shutdown()


if __name__ == "__main__":
    with mistakes_in_one_line("llama2_lora"):
        record = main(args)
    sys.exit(0 if record["status"] in ("pass", "unsupported", "oom") else 1)
