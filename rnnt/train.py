"""RNN-T, MLPerf's speech recogniser: the whole training step in one CUDA graph, or graphs of its two networks.

The training loop without graphs, as the loop at the end of this file and `eager_step` run it:

    for step in range(num_steps):
        features, lengths, tokens, token_lengths = next(batches)  # padded to the batch's longest utterance
        g = prediction(tokens)                          # LSTMs over the tokens of the transcript
        f, f_lengths = encoder(features, lengths)       # LSTMs over the audio; f has half as many frames
        loss = transducer_loss(joint(f, g), tokens, f_lengths, token_lengths, blank).mean()
        gradients = torch.autograd.grad(loss * loss_scale, parameters)
        if all_finite(gradients):                       # decided on the GPU
            lamb(gradients, learning_rate(step))        # with a moving average of the weights
        loss_scale.update()                             # on the GPU; from `if` to here: state.lamb.step
        end_step(report)                                # starts a copy to the host, which reads it in a later step

The `if` is no branch: all steps launch the same kernels, as torch.where(found_inf > 0, old, new). found_inf, on a GPU,
is 1 after an overflow. GradScaler reads it on the host unless the optimizer is fused (docs/capture_it.md#amp).

A graph repeats kernels with the shapes and addresses of its capture, but batches differ in length. So each batch is
copied into static buffers, which never move, and padded there to buckets, a few lengths for each network: by --buckets
auto at most 16 pairs of (frames, tokens), by --buckets N N lengths each, up to 50 as in MLPerf's submission. The loss
reads no padding, and LSTMs run forwards in time, so padding changes only rounding, dropout's draws, and the last frame
of an utterance of odd length: the encoder joins frames in pairs (rnnt/model.py). With the lengths of bench_lengths,
padding costs 2.5 to 2.9 % and the graphs gain 1.03x, together 1.00x (rnnt/README.md, three archived hosts).

Captured by `graph_step`: `train_on`, which is everything from g to loss_scale.update() with LAMB's communication, and
filling the report: loss, gradient norm, loss scale and two counts of overflows in one GPU tensor. In plain torch:

    torch.cuda.set_stream(torch.cuda.Stream())          # before all else: captures cannot use the default stream
    pool, graphs = torch.cuda.graph_pool_handle(), {}
    for shape in pairs_of_buckets:                      # (frames, tokens), at most 16, the most expensive first
        train_on(static_buffers[shape])                 # warm-up; features [T, B, F]: storage[:T], one for all shapes
        graphs[shape] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[shape], pool=pool, stream=torch.cuda.current_stream()):
            train_on(static_buffers[shape])             # recorded, not run
    state.reset()                                       # undoes the warm-up in place, since graphs hold addresses

and the body of the loop is

    shape = copy_into_static_buffers(next(batches))     # padded to the smallest buckets that hold it
    lr.fill_(learning_rate(step))                       # lr: a number on the GPU, which LAMB reads
    graphs[shape].replay()                              # overwrites the report
    end_step(report)                                    # starts its copy

Captured by `graph_networks`: encoder and prediction network, each with a forward and a backward graph per bucket, as
in MLPerf's submission. Joint and loss stay eager there: their shapes depend on both lengths, and 50 buckets a network
make up to 2,500 pairs. LAMB and loss scale could be captured; the submission left them eager. One network's graphs of
one bucket, in plain torch, after the stream and a warm-up as above, and their part of a step:

    pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.current_stream()
    forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(forward, pool=pool, stream=stream):
        output = network(static_input)                  # its autograd graph keeps the activations in the pool
    grad_output = torch.zeros_like(output)
    with torch.cuda.graph(backward, pool=pool, stream=stream):
        gradients = torch.autograd.grad(output, parameters, grad_output)

    forward.replay()
    leaf = output.detach().requires_grad_()             # eager autograd goes from the loss back to here
    grad_output.copy_(torch.autograd.grad(loss(leaf), leaf)[0])
    backward.replay()

Not captured by either, and why:
    the batch's copy and padding    each batch has its own length and its own address in host memory
    the learning rate               a schedule on the host computes it, and a graph would repeat its first value
    storing the report              each step copies it to another address; a graph always writes to the same ones

Copied in      `load_batch` copies the batch to the static buffers, and the learning rate to a GPU number that LAMB
               reads. In `graph_networks` the gradients of f and g go to buffers that the backward graphs read.
Read in time   end_step copies the report before the next replay of `graph_step` overwrites it. In `graph_networks` f,
               g, f's lengths and the parameters' gradients are read in the step that wrote them. All these kernels and
               copies run on one stream, so the GPU keeps the order of the code.
Freed          at the end of a run `session` calls graph.reset() and drops graphs and outputs: that frees the pools.

    python -m rnnt.train --preset tiny --variant graph_step
    python -m rnnt.train --preset bench_lengths --variant graph_step --steps 20
    torchrun --standalone --nproc-per-node 2 -m rnnt.train --variant graph_networks    # data parallel
"""

from graph_worth import Training, parse, variant
from rnnt.config import FACTS, PRESETS, Config, card, learning_rate, notes, require

if __name__ == "__main__":
    args = parse("rnnt", Config, PRESETS, **FACTS)  # before torch is imported: --help and mistakes are answered at once

from typing import Any, NamedTuple

import torch

from common.flops import peak_flops

# section names a part of the step in a profile, at a mark the harness times the host. In a capture both do nothing.
from graph_worth import Capture, mark, section, session
from graph_worth.machine.host_state import available_host_bytes
from rnnt.data.batches import Batch
from rnnt.loss import transducer_loss
from rnnt.state import State, nominal_flops

# ------------------------------------------------------------------------------------------------
# 1. The eager step
# Shapes decide which dropout numbers are drawn and how sums are rounded, so graphs are compared with eager_padded. It
# trains on the samples of eager. Skip @variant at first reading: it is for the harness (docs/reading_a_script.md).


@variant(
    "eager",
    kind="eager",
    help="kernels launched one by one, nothing waits for the GPU, batches without padding to buckets",
    parity="bitwise",
    headline=True,
    warm_up=lambda state, index: padded_step(state, index),  # the graphs' shapes; padded_step is defined below
)
def eager_step(state: State, index: int, fit=None):
    """Train on batch `index`; fit: see load_batch. Nothing here waits for the GPU."""
    batch = load_batch(state, index, fit)
    train_on(state, batch)
    state.end_step(index)  # starts the report's copy to the host; reads an earlier step's report that has arrived


@variant(
    "eager_padded",
    kind="eager",
    help="eager with batches padded to the graphs' shapes: graph_networks and graph_step must equal it",
    reference="eager_padded",
    parity="bitwise",
    traits={"extra_work": "computes the padding of the graphs' shapes", "draws": "dropout of padded shapes"},
    headline=True,
)
def padded_step(state: State, index: int):
    """eager_step with the graphs' padding. A run compares the graphs' numbers with those of this step."""
    eager_step(state, index, state.plan.fit)


def load_batch(state: State, index: int, fit=None) -> Batch:
    """Copy the next batch into the static buffers, and this step's learning rate to the GPU. No variant captures this.

    fit: fit(frames, tokens) is the shape of the buckets to pad to, with zeros; None: the batch's longest utterance.
    """
    with section("data"):
        batch, original = state.inputs.load(fit)
        state.lamb.lr.fill_(learning_rate(state.config, index))
        # Counts padding. The lengths of `original` are in host memory, so tolist() does not wait.
        lengths = original.feature_lengths.tolist(), original.token_lengths.tolist()
        state.tally.add(original.shape, batch.shape, *lengths)
    return batch


def train_on(state: State, batch: Batch):
    """From a batch in the static buffers to new weights: `graph_step` captures this."""
    with section("prediction"):
        g = state.prediction(batch.tokens)
    with section("encoder"):
        f, lengths = state.encoder(batch.features, batch.feature_lengths)
    mark()
    with section("joint and loss"):
        loss = mean_loss(state, f, g, lengths, batch)
    mark()
    with section("backward"):
        # Not loss.backward(): without .grad nothing has to be zeroed. Captured gradients lie in the graph's pool.
        gradients = torch.autograd.grad(loss * state.scaler.scale, state.parameters)
    mark()
    with section("optimizer"):
        # Averages gradients over the ranks, looks for overflows, updates weights by LAMB (rnnt/lamb.py) unless a
        # gradient overflowed, then the loss scale. All of it on the GPU.
        state.lamb.step(gradients)
        state.report.fill(loss, state.lamb.grad_norm)  # adds loss scale and counts; end_step copies it to the host


def mean_loss(state: State, f, g, lengths, batch: Batch):
    """The batch's mean loss, FP32. f [B, T2, J] and its lengths, int32 [B]: encoder; g [B, U + 1, J]: prediction."""
    logits = state.joint(f, g)
    return transducer_loss(logits, batch.tokens, lengths, batch.token_lengths, state.blank).mean()


# ------------------------------------------------------------------------------------------------
# 2. The whole step as one graph


@variant(
    "graph_step",
    kind="graph",
    help="the whole step as one graph per pair of buckets, 16 at most",
    graphs=None,  # known once the data has been seen
    replays=1,
    reference="eager_padded",
    parity=1e-3,  # of the losses; the runs in results/ have equal bits
    headline=True,
    formerly="full",
)
class GraphedStep:
    """`graph_step`: a graph of `train_on` for each pair of buckets, all in one memory pool. A step is one replay.

    A replay reads the static batch, the learning rate, the weights, LAMB's state (FP32 masters, moments, averages and
    count of steps) and the loss scale with its counters. It writes weights, LAMB's state, loss scale and report. All of
    these lie outside the pool. The pool holds activations and gradients, which no later replay reads. So the graphs may
    be replayed in any order, and a later capture may use the memory of an earlier one. Dropout draws new numbers, since
    torch gives each replay the generator's next offset. Ranks may replay different buckets, since LAMB's collectives
    are the same in every graph.
    """

    def __init__(self, state: State, capture: Capture):
        self.state, pool = state, capture.pool()  # memory that the graphs share
        pairs = state.plan.require_few_pairs("graph_step")
        capture.strategy = f"full iteration, pairs of buckets: {len(pairs)}"
        # Three eager steps, then each shape runs once; `session` undoes them by state.reset before step 0. dummy_batch
        # fills, with random frames, the very tensors that load_batch later returns for this shape.
        capture.warm_up(padded_step)
        with capture.timed("warmup_s"):
            for shape in reversed(pairs):
                train_on(state, state.inputs.dummy_batch(*shape))
        self.graphs = {}
        # The most expensive first: the others can use its memory. capturing() counts seconds and memory of the block.
        # pool.capture(fn, static) is the `with torch.cuda.graph(...)` block of the docstring: it records fn's launches
        # and returns (graph, fn's result). Each replay checks that static's tensors kept address, shape and strides.
        for shape in reversed(pairs):
            batch = state.inputs.dummy_batch(*shape)
            with capture.capturing():
                self.graphs[shape], _ = pool.capture(lambda batch=batch: train_on(state, batch), batch)

    def step(self, index: int):
        """`padded_step` with a replay in the place of `train_on`."""
        batch = load_batch(self.state, index, self.state.plan.fit)
        # Only with --buckets N above 4: the plan then has the pairs of the batches that it has looked at.
        if batch.shape not in self.graphs:
            kind, (frames, tokens) = self.state.plan.kind, batch.shape
            raise ValueError(
                f"--buckets {kind}: no graph is of {frames} frames and {tokens} tokens: take auto or 1 to 4"
            )
        with section("replay"):
            self.graphs[batch.shape].replay()
        self.state.end_step(index)


# ------------------------------------------------------------------------------------------------
# 3. Graphs per network and bucket, as MLPerf's submission had them


@variant(
    "graph_networks",
    kind="graph",
    help="a forward and a backward graph per bucket of encoder and prediction network; the rest eager",
    graphs=None,
    replays=4,
    reference="eager_padded",
    parity="bitwise",
    headline=True,
    formerly="graph",
)
class GraphedNetworks:
    """`graph_networks`: forward and backward graphs of encoder and prediction network, four replays a step.

    In a step autograd runs the joint and the loss only, back to f and g. A backward graph copies the parameters'
    gradients to static tensors, which LAMB reads.
    """

    def __init__(self, state: State, capture: Capture):
        self.state = state
        model, self.joint_parameters = state.model, list(state.model.joint.parameters())
        self.encoder = ForwardAndBackward(
            capture.pool(), model.encoder, lambda batch: state.encoder(batch.features, batch.feature_lengths)
        )
        self.prediction = ForwardAndBackward(
            capture.pool(), model.prediction, lambda batch: (state.prediction(batch.tokens),)
        )
        audio, text = state.plan.audio, state.plan.text
        capture.strategy = f"encoder, buckets: {len(audio)}; prediction, buckets: {len(text)}"
        capture.warm_up(padded_step)
        # The encoder's graphs need no tokens and the prediction network's no frames: 1 stands for the other length. It
        # changes nothing for them: features of a bucket begin at one address, whatever the number of tokens.
        buckets = [(self.encoder, frames, (frames, 1)) for frames in reversed(audio)]
        buckets += [(self.prediction, tokens, (1, tokens)) for tokens in reversed(text)]
        with capture.timed("warmup_s"):
            for network, _, shape in buckets:
                network.warm_up(state.inputs.dummy_batch(*shape))
        for network, length, shape in buckets:
            batch = state.inputs.dummy_batch(*shape)
            with capture.capturing():
                network.capture(length, batch)

    def step(self, index: int):
        state = self.state
        batch = load_batch(state, index, state.plan.fit)
        frames, tokens = batch.shape
        with section("prediction"):
            (g,) = self.prediction.forward(tokens)
        with section("encoder"):
            f, lengths = self.encoder.forward(frames)
        with section("joint and loss"):  # eager, and so is its backward pass
            loss = mean_loss(state, f.requires_grad_(), g.requires_grad_(), lengths, batch)
        mark()
        with section("backward"):
            grad_f, grad_g, *grad_joint = torch.autograd.grad(loss * state.scaler.scale, (f, g, *self.joint_parameters))
            self.prediction.backward(tokens, grad_g)
            self.encoder.backward(frames, grad_f)
        mark()
        with section("optimizer"):
            state.lamb.step([*self.encoder.gradients, *self.prediction.gradients, *grad_joint])  # as state.parameters
            state.report.fill(loss, state.lamb.grad_norm)
        state.end_step(index)


class Graphs(NamedTuple):
    """The two graphs of one bucket, what the forward one writes, and what the backward one reads."""

    forward: Any  # with replay()
    outputs: list[torch.Tensor]
    backward: Any
    grad_output: torch.Tensor


class ForwardAndBackward:
    """One network's graphs, a forward and a backward per bucket.

    A step uses one bucket of a network, so the graphs of all its buckets share a pool. Both networks are in use between
    their forwards and their backwards, so each has a pool of its own.
    """

    def __init__(self, pool, network: torch.nn.Module, run):
        """run(batch): the network's outputs, the first one differentiable."""
        self.run, self.pool, self.parameters = run, pool, list(network.parameters())
        # Outside the pool, one set for all buckets: the encoder's is 87 MB in FP16, and fifty would be 4 GB. The copy
        # from the pool to here takes 40 us a step at 4.3 TB/s.
        self.gradients = [torch.zeros_like(parameter) for parameter in self.parameters]
        self.graphs: dict[int, Graphs] = {}
        self.grad_output = None

    def warm_up(self, batch: Batch):
        output = self.run(batch)[0]
        torch.autograd.grad(output, self.parameters, torch.zeros_like(output))

    def capture(self, length: int, batch: Batch):
        """length: the bucket, in frames or tokens. The largest comes first, so that others can use its memory."""
        forward, outputs = self.pool.capture(lambda: self.run(batch), batch)
        output = outputs[0]
        if self.grad_output is None:
            # Made for the largest bucket; the smaller ones use its beginning.
            self.grad_output = torch.zeros(output.numel(), dtype=output.dtype, device=output.device)
        grad_output = self.grad_output[: output.numel()].view(output.shape)
        backward, _ = self.pool.capture(lambda: self._backward(output, grad_output), (grad_output,))
        # `output` keeps autograd's graph, and so the activations, until this method returns: nothing else refers to it.
        # Then the next bucket may use their memory, since in a step no graph of another bucket comes between these two.
        self.graphs[length] = Graphs(forward, [tensor.detach() for tensor in outputs], backward, grad_output)

    @torch.no_grad()  # the copies are not for autograd
    def _backward(self, output, grad_output):
        torch._foreach_copy_(self.gradients, torch.autograd.grad(output, self.parameters, grad_output))

    def forward(self, length: int):
        graphs = self.graphs[length]
        graphs.forward.replay()
        # New views, since the step makes them require gradients. A replay in a later step may overwrite their memory.
        return [output.detach() for output in graphs.outputs]

    def backward(self, length: int, gradient):
        graphs = self.graphs[length]
        graphs.grad_output.copy_(gradient)
        graphs.backward.replay()


# ------------------------------------------------------------------------------------------------
# 4. Build and loop. session builds, makes the variant of --variant (which warms up and captures), calls state.reset,
# and after the loop releases the graphs and their pools. run.step is the variant's step.


def build(config: Config, device: torch.device, ranks) -> Training:
    """Build the state and its description. A ValueError names flags that cannot run here."""
    if device.type == "cpu":
        require(config, available_host_bytes())
    flops, gpu = nominal_flops(config), torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    state = State(config, device, ranks.rank, ranks.world_size)
    return Training(
        state=state,
        results=state.read_losses,
        grad_norms=state.read_grad_norms,
        named_state=state.named_state,
        reset=state.reset,  # in place, since graphs hold addresses
        skip=state.inputs.skip,
        batch_class=state.batch_class,
        finish=state.finish,
        close=state.close,
        items=config.batch,
        unit="utterances",
        flops=flops,
        flops_convention="matrix products of the utterances' true lengths",
        peak_flops=peak_flops(gpu, config.precision),
        card=card(config, device.type, flops),
        notes=notes(config, device.type),
    )


if __name__ == "__main__":
    with session(args, build) as (run, log):
        for index in log.steps():
            run.step(index)
