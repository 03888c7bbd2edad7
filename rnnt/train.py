"""RNN-T: graphs per length bucket as MLPerf had them, and the full-iteration graph beside it.

graph: encoder and prediction network, forward and backward, one graph each per bucket, replayed around an eager joint,
loss, LAMB and loss scale. full: one graph per pair of buckets over all of it. Eager in both: the batch's copy into
static inputs with its padding, one number for the learning rate, and what the host reads of the last steps. Why: a
graph's shapes are fixed, a batch's are not, and padding to one of a few lengths is what makes one out of the other.

    python -m rnnt.train --preset tiny --variant graph
    python -m rnnt.train --preset bench_lengths --variant full --record runs/full.r1.json
    torchrun --standalone --nproc-per-node 2 -m rnnt.train --variant graph    # data parallel
"""

from common.config import mistakes_in_one_line, parse
from rnnt import config as rnnt_config
from rnnt.config import ABOUT, PRESETS, VARIANTS, Config

if __name__ == "__main__":
    # Before torch is imported: --help, --describe and mistakes are answered at once.
    args = parse("rnnt", Config, PRESETS, VARIANTS, about=ABOUT)

import sys

import torch

from common import collectives, environment, flops, measure
from common.capture import Pool
from common.measure import Capture, Unsupported, mark, section
from rnnt import buckets
from rnnt.state import State, hyperparameters, nominal_flops

# ------------------------------------------------------------------------------------------------
# The eager step


def training_step(state: State, views):
    """Forward, loss, backward and update on a batch in the static inputs. Nothing here waits for the device."""
    with state.aside(), section("prediction"):
        g = state.prediction(views.tokens, views.token_lengths)
    with section("encoder"):
        f, lengths = state.encoder(views.features, views.feature_lengths)
    state.join(g)
    mark()
    with section("joint and loss"):
        loss = state.loss(f, g, views, lengths)
    mark()
    with section("backward"):
        grads = torch.autograd.grad(state.scaled(loss), state.parameters)
    mark()
    with section("optimizer"):
        state.update(loss, grads)


def eager_step(state: State, index: int, fit=None):
    views, _ = state.begin_step(index, fit)
    training_step(state, views)
    state.end_step(index)


def padded_step(state: State, index: int):
    """The eager step on what the graphs compute: batches padded to their buckets."""
    eager_step(state, index, state.plan.fit)


# ------------------------------------------------------------------------------------------------
# Buckets per network


class Graphed:
    """Forward and backward graphs per bucket of encoder and prediction network: four replays a step."""

    def __init__(self, state: State):
        self.state = state
        self.encoder_pool, self.prediction_pool = Pool(state.device), Pool(state.device)
        self.capture = Capture(
            strategy=f"encoder, buckets: {len(state.plan.audio)}; prediction, buckets: {len(state.plan.text)}",
            pools=[self.encoder_pool, self.prediction_pool],
        )
        _warm_up(state, self.capture)
        # What all buckets of a network share: gradients of their outputs and of their parameters.
        self.grads = [torch.zeros_like(parameter) for parameter in state.parameters]
        num_encoder, num_prediction = (
            len(list(network.parameters())) for network in (state.model.encoder, state.model.prediction)
        )
        self.joint = slice(num_encoder + num_prediction, None)
        encoder = _Buckets(state, self.encoder_pool, self.grads, slice(num_encoder), self._encode, self.capture)
        parameters = slice(num_encoder, self.joint.start)
        prediction = _Buckets(state, self.prediction_pool, self.grads, parameters, self._predict, self.capture)
        # The largest first: the memory it takes holds all the smaller ones. All eager passes before any capture, which
        # gives the memory that they leave behind back.
        for add in (_Buckets.warm_up, _Buckets.add):
            for frames in reversed(state.plan.audio):
                add(encoder, frames, state.inputs.fill(frames, 1))
            for tokens in reversed(state.plan.text):
                add(prediction, tokens, state.inputs.fill(1, tokens))
        self.encoder, self.prediction = encoder, prediction

    def _encode(self, views):
        return self.state.encoder(views.features, views.feature_lengths)

    def _predict(self, views):
        return (self.state.prediction(views.tokens, views.token_lengths),)

    def step(self, index: int):
        state = self.state
        views, (frames, tokens) = state.begin_step(index, state.plan.fit)
        # One after the other whatever --streams says: all replays read the random offset from one place.
        with section("prediction"):
            (g,) = self.prediction.forward(tokens)
        with section("encoder"):
            f, lengths = self.encoder.forward(frames)
        with section("joint and loss"):
            loss = state.loss(f.requires_grad_(), g.requires_grad_(), views, lengths)
        mark()
        with section("backward"):
            wanted = (f, g, *state.parameters[self.joint])
            grad_f, grad_g, *self.grads[self.joint] = torch.autograd.grad(state.scaled(loss), wanted)
            self.prediction.backward(tokens, grad_g)
            self.encoder.backward(frames, grad_f)
        mark()
        with section("optimizer"):
            state.update(loss, self.grads)
        state.end_step(index)

    def replays_of(self, index: int) -> int:
        return 4

    def close(self):
        self.prediction_pool.release()
        self.encoder_pool.release()


class _Buckets:
    """A network's graphs in one pool: of all its buckets one is in use between a forward and its backward."""

    def __init__(self, state, pool, grads, parameters, run, capture):
        """parameters: the network's among those of the state. run(views): what it gives, the first one differentiable.

        grads: FP16 or BF16 buffers of all parameters' gradients. They lie outside of the pool, where a copy of 87 MB in
        each of fifty buckets' graphs costs 40 us a step at 4.3 TB/s, and buffers of their own for each would be 4 GB.
        """
        self.pool, self.run, self.capture = pool, run, capture
        self.parameters, self.grads = state.parameters[parameters], grads[parameters]
        self.graphs = {}
        self.grad_output = None

    def warm_up(self, length, views):
        with self.capture.timed("warmup_s"):
            output = self.run(views)[0]
            torch.autograd.grad(output, self.parameters, torch.zeros_like(output))

    def add(self, length, views):
        with self.capture.timed("capture_s"):
            forward, outputs = self.pool.capture(lambda: self.run(views), (views.features, views.tokens))
            if self.grad_output is None:
                # Of the largest bucket; the others take its beginning.
                self.grad_output = torch.zeros(outputs[0].numel(), dtype=outputs[0].dtype, device=outputs[0].device)
            grad_output = self.grad_output[: outputs[0].numel()].view(outputs[0].shape)
            backward, _ = self.pool.capture(lambda: self._backward(outputs[0], grad_output), (grad_output,))
        self.graphs[length] = forward, [output.detach() for output in outputs], backward, grad_output

    def _backward(self, output, grad_output):
        grads = torch.autograd.grad(output, self.parameters, grad_output)
        with torch.no_grad():
            torch._foreach_copy_(self.grads, grads)

    def forward(self, length):
        graph, outputs, _, _ = self.graphs[length]
        graph.replay()
        # Each step's own tensors, over the graph's memory.
        return [output.detach() for output in outputs]

    def backward(self, length, grad):
        _, _, graph, grad_output = self.graphs[length]
        grad_output.copy_(grad)
        graph.replay()


# ------------------------------------------------------------------------------------------------
# The full iteration


class FullGraphed:
    """The full iteration as one graph per pair of buckets, all in one pool: one replay a step.

    Each graph starts from weights, optimizer state and static inputs and leaves weights, optimizer state and report,
    all outside of the pool, so that it does not matter which graph was replayed before.
    """

    def __init__(self, state: State):
        pairs = _few_pairs(state, "full")
        self.state = state
        self.pool = Pool(state.device)
        self.capture = Capture(strategy=f"full iteration, pairs of buckets: {len(pairs)}", pools=[self.pool])
        self.graphs = {}
        _warm_up(state, self.capture)
        # All eager passes before any capture, which gives the memory that they leave behind back.
        with self.capture.timed("warmup_s"):
            for shape in reversed(pairs):
                training_step(state, state.inputs.fill(*shape))
        for shape in reversed(pairs):
            views = state.inputs.fill(*shape)
            with self.capture.timed("capture_s"):
                self.graphs[shape], _ = self.pool.capture(lambda views=views: training_step(state, views), views)

    def step(self, index: int):
        _, shape = self.state.begin_step(index, self.state.plan.fit)
        graph = self.graphs.get(shape)
        if graph is None:
            raise ValueError(
                f"--buckets {self.state.config.buckets}: a batch is padded to {shape[0]} frames and {shape[1]} tokens, "
                "a pair that was not seen before: take auto, or 4 and fewer"
            )
        with section("replay"):
            graph.replay()
        self.state.end_step(index)

    def replays_of(self, index: int) -> int:
        return 1

    def close(self):
        self.pool.release()


def _few_pairs(state, name):
    """All shapes that a batch is padded to. ValueError where there are too many to make each one ready."""
    number = len(state.plan.pairs)
    if number > buckets.MAX_PAIRS:
        raise ValueError(
            f"--buckets {state.config.buckets}: {number} pairs of buckets occur, {name} takes at most "
            f"{buckets.MAX_PAIRS}: take fewer, or auto"
        )
    return state.plan.pairs


def _warm_up(state, capture, steps=3):
    """Eager steps on the capture stream: libraries initialise and choose their kernels before anything is recorded."""
    state.inputs.reset()
    with capture.timed("warmup_s"):
        for index in range(steps):
            padded_step(state, index)


# ------------------------------------------------------------------------------------------------
# The other variants


class Eager:
    """The baseline: no graph, no compiler, no buckets, nothing that waits for the device."""

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


class EagerPadded(Eager):
    """Eager on batches padded to the graphs' shapes."""

    def step(self, index: int):
        padded_step(self.state, index)


class EagerSync(Eager):
    """The usual loop: a loss that needs lengths on the host, a logged loss, and a look at the overflow; each waits."""

    def step(self, index: int):
        state = self.state
        views, _ = state.begin_step(index)
        with state.aside(), section("prediction"):
            g = state.prediction(views.tokens, views.token_lengths)
        with section("encoder"):
            f, lengths = state.encoder(views.features, views.feature_lengths)
        state.join(g)
        mark()
        with section("joint and loss"):
            # What torchaudio's loss reads: it takes logits of just these sizes.
            sizes = lengths.max().item(), views.token_lengths.max().item()
            assert sizes == (f.shape[1], g.shape[1] - 1)
            loss = state.loss(f, g, views, lengths)
            logged = {"loss": loss.item()}
        if logged["loss"] != logged["loss"]:
            state.check()
            raise FloatingPointError(f"loss is NaN at step {index}")
        mark()
        with section("backward"):
            grads = torch.autograd.grad(state.scaled(loss), state.parameters)
        mark()
        with section("optimizer"):
            state.lamb.check(grads)
            if not state.scaler.found_inf.item():
                state.lamb.apply(grads)
            state.scaler.update()
            state.report.fill(loss, state.lamb.grad_norm)
        state.end_step(index)
        self.logged = logged


class Compiled(EagerPadded):
    """torch.compile of the three networks; their LSTMs break its graphs, so it has what lies between and the joint.

    Batches are padded, since each new shape is compiled for itself. Dropout draws as eager does, but not the joint's:
    compiled code cannot call its kernel.
    """

    def __init__(self, state: State):
        if state.device.type != "cuda":
            raise Unsupported("torch.compile is measured on a GPU only: the host graph cannot record compiled code")
        import torch._dynamo.config
        import torch._inductor.config

        shapes = _few_pairs(state, "compile")
        torch._inductor.config.fallback_random = True
        # Each shape is compiled once, and what is not compiled is not timed as if it were.
        torch._dynamo.config.recompile_limit = 4 * buckets.MAX_PAIRS
        torch._dynamo.config.fail_on_recompile_limit_hit = True
        self.state = state
        self.capture = Capture(strategy="torch.compile of encoder, prediction network and joint")
        for name in ("encoder", "prediction", "joint"):
            setattr(state, name, torch.compile(getattr(state.model, name), dynamic=False))
        with self.capture.timed("compile_s"):
            for shape in shapes:
                training_step(state, state.inputs.fill(*shape))


MAKE_VARIANT = {
    "eager": Eager,
    "eager_sync": EagerSync,
    "eager_padded": EagerPadded,
    "graph": Graphed,
    "full": FullGraphed,
    "compile": Compiled,
}

# ------------------------------------------------------------------------------------------------
# Main


def _card(config, device, flops_per_step):
    c = config
    name = "RNN-T of MLPerf" if rnnt_config.num_parameters(c) == 49_071_616 else "toy widths"
    memory = f" | memory predicted {rnnt_config.predicted_bytes(c) / 2**30:.1f} GiB" if device.type == "cuda" else ""
    lengths = f"{c.frames} frames, {c.tokens} tokens" if c.data == "synthetic" else f"--data {c.data}"
    return [
        f"{rnnt_config.num_parameters(c) / 1e6:,.1f} M parameters: {name}",
        f"batch {c.batch}, {lengths}, buckets {c.buckets} | {c.precision} with FP32 masters | "
        f"{flops_per_step / 1e12:.3g} TFLOP/step{memory}",
        f"LSTMs: {c.lstm}, streams: {c.streams}",
    ]


def _notes(config, device, variant):
    notes = []
    if device.type == "cpu" and config.lstm != "cudnn":
        notes.append(f"--lstm {config.lstm}: on a CPU plain torch computes what the kernels do, slowly")
    if config.streams == 2 and (device.type == "cpu" or variant == "graph"):
        notes.append("--streams 2 changes nothing on a CPU and in graph")
    if device.type == "cuda" and config.lstm == "cudnn" and not rnnt_config.persistent_lstms(config):
        kernels = "cuDNN's persistent LSTM kernels"
        notes.append(f"{kernels} take FP16, widths of 128 and batches of 8 to 128: this runs without them")
    return notes


def main(args):
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    rank, local_rank, world_size = collectives.init(kind)
    device = torch.device(kind, local_rank) if kind == "cuda" else torch.device(kind)
    try:
        config = args.config
        if kind == "cpu":
            rnnt_config.require(config, environment.available_host_bytes())
        flops_per_step = nominal_flops(config)
        gpu = torch.cuda.get_device_name(device) if kind == "cuda" else ""
        # What a graph is compared with must be padded as it is; other variants have no graphs to compare.
        workload = measure.Workload(
            model="rnnt",
            build=lambda config, device: State(config, device, rank, world_size),
            variants=MAKE_VARIANT,
            reference=padded_step,
            card=_card(config, device, flops_per_step),
            notes=_notes(config, device, args.run.variant),
            flops_per_step=flops_per_step,
            flops_convention="matrix products of the utterances' true lengths",
            items_per_step=config.batch,
            unit="utterances",
            peak_flops=flops.peak_flops(gpu, config.precision),
            hyperparameters=hyperparameters(config, world_size),
            kinds=ABOUT["kinds"],
            promises=ABOUT["promises"],
        )
        return measure.run(workload, args, device, rank, world_size)
    finally:
        collectives.shutdown()


if __name__ == "__main__":
    with mistakes_in_one_line("rnnt"):
        record = main(args)
    sys.exit(0 if record["status"] in ("pass", "unsupported", "oom") else 1)
