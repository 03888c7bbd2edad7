"""RNN-T, MLPerf's speech recogniser: one graph of the whole step, and MLPerf's own graphs per network.

What is trained, without graphs:

    for step in range(n):
        features, tokens, lengths = next(batches)       # as long as the longest utterance of the batch
        g = prediction(tokens)                          # LSTMs over the tokens of the transcript
        f = encoder(features)                           # LSTMs over the audio
        loss = transducer_loss(joint(f, g), tokens, lengths).mean()
        gradients = torch.autograd.grad(loss * loss_scale, parameters)
        if all_finite(gradients):                       # decided on the GPU
            lamb(gradients, learning_rate(step))        # with a moving average of the weights
        loss_scale.update()                             # on the GPU
        print(loss of an earlier step)                  # whose copy has arrived on the host

A graph repeats kernels with the shapes and addresses of its capture, but batches have any length. So each batch is
copied into static buffers (rnnt/batches.py) and padded there to a bucket, one of a few lengths (rnnt/buckets.py). That
does not change the loss, since LSTMs run forwards in time and the loss reads the utterances' lengths on the GPU. Two
exceptions: rounding, and the last pair of frames of an utterance of odd length (rnnt/model.py).

Captured by `full`:  everything from g to loss_scale.update(), LAMB's communication too; a graph per pair of buckets.
Captured by `graph`: encoder and prediction network, forward and backward, a graph of each per bucket, as in MLPerf's
    submission, which left joint, loss, LAMB and loss scale eager. Joint and loss depend on both lengths, and with the
    submission's 50 buckets a network there are hundreds of pairs. `full` takes 16 at most (plan.require_few_pairs).
Captured by neither, and why:
    the batch's copy and its padding    each batch lies at another address of the host's memory and has its own length
    the learning rate                   a schedule on the host computes it; it is written where LAMB reads it
    the report                          loss, gradient norm and loss scale are copied to the host and read steps later

    python -m rnnt.train --preset tiny --variant full
    python -m rnnt.train --preset bench_lengths --variant full --record runs/full.r1.json
    torchrun --standalone --nproc-per-node 2 -m rnnt.train --variant graph    # data parallel
"""

from common.config import parse
from rnnt.config import ABOUT, PRESETS, VARIANTS, Config, learning_rate

if __name__ == "__main__":
    # Before torch is imported: --help, --describe and mistakes are answered at once.
    args = parse("rnnt", Config, PRESETS, VARIANTS, about=ABOUT)

import torch

from common.capture import Pool  # of CUDA graphs; without a GPU, of host graphs, which record operators and rerun them
from common.main import main
from common.marks import mark, section  # for measuring passes; one mark per 800 launches suffices: `full` has none
from common.variant import Capture, Eager, Workload, warm_up
from rnnt import variants
from rnnt.batches import Batch
from rnnt.loss import transducer_loss
from rnnt.state import State, said_of_run

# ------------------------------------------------------------------------------------------------
# 1. The eager step
# The eager variants, common.variant.Eager, warm up with three padded steps and then run eager_step or padded_step.


def eager_step(state: State, index: int, fit=None):
    """Train on batch `index`; fit: see load_batch. Nothing here waits for the device."""
    batch = load_batch(state, index, fit)
    train_on(state, batch)
    # Starts the report's copy to the host; reads the newest report that has arrived, an earlier step's.
    state.end_step(index)


def padded_step(state: State, index: int):
    """eager_step with the batch padded to its buckets: the same work as in `full` and `graph`, and their reference."""
    eager_step(state, index, state.plan.fit)


def load_batch(state: State, index: int, fit=None) -> Batch:
    """Copy the next batch into the static buffers, write this step's learning rate. No variant captures this.
    fit(frames, tokens): the shape that the batch is padded to, with zeros; None: no padding.
    """
    with section("data"):
        batch, original = state.inputs.load(fit)
        state.lamb.lr.fill_(learning_rate(state.config, index))
    # For the record: how much padding adds. The lengths of `original` are in host memory: tolist() does not wait.
    state.tally.add(original.shape, batch.shape, original.feature_lengths.tolist(), original.token_lengths.tolist())
    return batch


def train_on(state: State, batch: Batch):
    """Forward, loss, backward and update on a batch in the static buffers: what `full` captures."""
    # On a second stream with --streams 2; both outputs are needed only in the joint.
    with state.side_stream(), section("prediction"):
        g = state.prediction(batch.tokens, batch.token_lengths)
    with section("encoder"):
        f, lengths = state.encoder(batch.features, batch.feature_lengths)
    state.wait_for_side_stream(g)
    mark()
    with section("joint and loss"):
        loss = mean_loss(state, f, g, lengths, batch)
    mark()
    with section("backward"):
        # Not loss.backward(): without .grad nothing has to be zeroed, and the gradients live for this step alone.
        gradients = torch.autograd.grad(loss * state.scaler.scale, state.parameters)
    mark()
    with section("optimizer"):
        # Overflow check; LAMB, whose kernels change nothing on an overflow; loss scale. All of it on the device.
        state.lamb.step(gradients)
        state.report.fill(loss, state.lamb.grad_norm)  # device numbers, which end_step copies to the host


def mean_loss(state: State, f, g, lengths, batch: Batch):
    """The batch's mean loss, FP32. f [B, T2, J], lengths int32 [B]: of the encoder; g [B, U + 1, J]: the prediction."""
    logits = state.joint(f, g)
    return transducer_loss(logits, batch.tokens, lengths, batch.token_lengths, state.blank).mean()


# ------------------------------------------------------------------------------------------------
# 2. The whole step as one graph


class FullGraphed:
    """`full`: one graph for each pair of buckets, all in one memory pool; a step is one replay.

    A replay reads the static batch, learning rate, weights, LAMB's state (FP32 masters, moments, the weights' moving
    average, the count of steps) and the loss scale with its counters. It writes weights, LAMB's state, loss scale and
    report. All lie outside the pool, so it does not matter which graph was replayed before. Dropout draws new numbers:
    torch gives each replay the generator's next offset. Ranks may be in different buckets, since LAMB's collectives are
    the same in every graph. Warm-up trains; `state.reset`, which common/measure.py calls before it measures, undoes it.
    """

    def __init__(self, state: State):
        self.state = state
        self.pool = Pool(state.device)
        pairs = state.plan.require_few_pairs("full")
        self.capture = Capture(strategy=f"full iteration, pairs of buckets: {len(pairs)}", pools=[self.pool])
        warm_up(state, self.capture, padded_step)
        # Libraries choose kernels by shape, so each shape runs eagerly once before the first capture, which frees the
        # memory that these steps leave in the allocator's cache.
        with self.capture.timed("warmup_s"):
            for shape in reversed(pairs):
                train_on(state, state.inputs.dummy_batch(*shape))
        self.graphs = {}
        # The largest shape first: the smaller ones then fit into the memory that it took. The second argument of
        # pool.capture: tensors that a step overwrites; each replay checks that they have not moved or changed shape.
        for shape in reversed(pairs):
            batch = state.inputs.dummy_batch(*shape)
            with self.capture.timed("capture_s"):
                self.graphs[shape], _ = self.pool.capture(lambda batch=batch: train_on(state, batch), batch)

    def step(self, index: int):
        batch = load_batch(self.state, index, self.state.plan.fit)
        if batch.shape not in self.graphs:
            raise ValueError(self.state.plan.unseen(batch.shape))
        with section("replay"):
            # The kernels of train_on(state, batch): the graph reads the buffers that `batch` is a view of.
            self.graphs[batch.shape].replay()
        self.state.end_step(index)

    def replays_of(self, index: int) -> int:
        return 1

    def close(self):
        self.pool.release()


# ------------------------------------------------------------------------------------------------
# 3. Graphs per network and bucket, as MLPerf's submission had them


class Graphed:
    """`graph`: forward and backward graphs of encoder and prediction network, four replays a step.

    Autograd ends at the networks' outputs: the eager loss gives the outputs' gradients, which are copied into the
    buffers that the backward graphs read. Those copy the parameters' gradients into the tensors that LAMB reads.
    """

    def __init__(self, state: State):
        self.state = state
        # What LAMB reads: of the networks, tensors of NetworkGraphs; of the joint, new ones in each step.
        self.gradients = [None] * len(state.parameters)
        self.capture = Capture(
            strategy=f"encoder, buckets: {len(state.plan.audio)}; prediction, buckets: {len(state.plan.text)}"
        )
        encoder, prediction = state.encoder, state.prediction
        self.encoder = NetworkGraphs(self, "encoder", lambda x: encoder(x.features, x.feature_lengths))
        self.prediction = NetworkGraphs(self, "prediction", lambda x: (prediction(x.tokens, x.token_lengths),))
        warm_up(state, self.capture, padded_step)
        buckets = [(self.encoder, frames, (frames, 1)) for frames in reversed(state.plan.audio)]
        buckets += [(self.prediction, tokens, (1, tokens)) for tokens in reversed(state.plan.text)]
        for network, _, shape in buckets:
            network.warm_up(state.inputs.dummy_batch(*shape))
        for network, length, shape in buckets:
            network.capture_bucket(length, state.inputs.dummy_batch(*shape))

    def step(self, index: int):
        state = self.state
        batch = load_batch(state, index, state.plan.fit)
        frames, tokens = batch.shape
        # One after the other, even with --streams 2: before a replay torch writes its random seed and offset to the
        # device. Not every version has a place for each graph, so replays side by side could race.
        with section("prediction"):
            (g,) = self.prediction.forward(tokens)
        with section("encoder"):
            f, lengths = self.encoder.forward(frames)
        with section("joint and loss"):
            loss = mean_loss(state, f.requires_grad_(), g.requires_grad_(), lengths, batch)
        mark()
        with section("backward"):
            joint = state.slices["joint"]
            leaves = (f, g, *state.parameters[joint])
            grad_f, grad_g, *gradients = torch.autograd.grad(loss * state.scaler.scale, leaves)
            self.gradients[joint] = gradients
            self.prediction.backward(tokens, grad_g)
            self.encoder.backward(frames, grad_f)
        mark()
        with section("optimizer"):
            state.lamb.step(self.gradients)
            state.report.fill(loss, state.lamb.grad_norm)
        state.end_step(index)

    def replays_of(self, index: int) -> int:
        return 4

    def close(self):
        self.prediction.pool.release()
        self.encoder.pool.release()


class NetworkGraphs:
    """One network's graphs, a forward and a backward per bucket. Buckets share a pool, since a step uses one of them;
    the two networks have a pool each, since both are in use between forward and backward.
    """

    def __init__(self, owner: Graphed, name: str, run):
        """run(batch): the network's outputs, the first one differentiable."""
        self.run, self.pool, self.capture = run, Pool(owner.state.device), owner.capture
        place = owner.state.slices[name]
        self.parameters = owner.state.parameters[place]
        # Outside the pool, one set for all buckets: fifty sets of 87 MB would be 4 GB. The copy out of the pool takes
        # 40 us a step at 4.3 TB/s.
        self.gradients = owner.gradients[place] = [torch.zeros_like(parameter) for parameter in self.parameters]
        self.capture.pools.append(self.pool)
        self.graphs = {}
        self.grad_output = None

    def warm_up(self, batch: Batch):
        with self.capture.timed("warmup_s"):
            output = self.run(batch)[0]
            torch.autograd.grad(output, self.parameters, torch.zeros_like(output))

    def capture_bucket(self, length: int, batch: Batch):
        """length: the bucket's, in frames or tokens. The largest bucket comes first, as in FullGraphed."""
        with self.capture.timed("capture_s"):
            forward, outputs = self.pool.capture(lambda: self.run(batch), batch)
            output = outputs[0]
            if self.grad_output is None:
                # Smaller buckets use its beginning.
                self.grad_output = torch.zeros(output.numel(), dtype=output.dtype, device=output.device)
            grad_output = self.grad_output[: output.numel()].view(output.shape)
            backward, _ = self.pool.capture(lambda: self._backward(output, grad_output), (grad_output,))
        self.graphs[length] = forward, [each.detach() for each in outputs], backward, grad_output

    @torch.no_grad()
    def _backward(self, output, grad_output):
        torch._foreach_copy_(self.gradients, torch.autograd.grad(output, self.parameters, grad_output))

    def forward(self, length: int):
        graph, outputs, _, _ = self.graphs[length]
        graph.replay()
        # New views: autograd marks them in this step. The next replay of the graph overwrites their memory.
        return [output.detach() for output in outputs]

    def backward(self, length: int, gradient):
        _, _, graph, grad_output = self.graphs[length]
        grad_output.copy_(gradient)
        graph.replay()


# ------------------------------------------------------------------------------------------------
# 4. Main

MAKE_VARIANT = {
    "eager": lambda state: Eager(state, eager_step, warm_up_step=padded_step),
    "eager_padded": lambda state: Eager(state, padded_step),
    "eager_sync": lambda state: variants.eager_sync(state, load_batch, mean_loss, padded_step),
    "full": FullGraphed,
    "graph": Graphed,
    "compile": lambda state: variants.compiled(state, train_on, padded_step),
}


def workload(args, device: torch.device, rank: int, world_size: int):
    """(args, what common/measure.py runs)"""
    return args, Workload(
        model="rnnt",
        build=lambda config, device: State(config, device, rank, world_size),
        variants=MAKE_VARIANT,
        reference=padded_step,  # padded as the graphs are
        kinds=ABOUT["kinds"],
        promises=ABOUT["promises"],
        **said_of_run(args, device, world_size),
    )


if __name__ == "__main__":
    main("rnnt", args, workload)
