"""What RNN-T's training reads and writes: built once, reset in place, the same for every variant."""

import contextlib
import functools

import numpy as np
import torch

from common import memory
from common.late import ScaledReport
from common.measure import Unsupported, section
from common.optimizers import LossScaler
from rnnt import buckets, decoding, lstm
from rnnt.batch import Batch
from rnnt.config import (
    GENERATED,
    Config,
    learning_rate,
    limits,
    padded_cost,
    predicted_bytes,
    time_steps,
    training_flops,
)
from rnnt.inputs import Inputs
from rnnt.lamb import Lamb
from rnnt.loss import transducer_loss
from rnnt.model import RNNT, flatten, initialise, log_prior
from rnnt.synthetic import Synthetic, draw_lengths

SEED = 1234
HELD_OUT_SEED = 4321
HELD_OUT_BATCHES = 4
# Batches of speech that are looked at to choose buckets.
NUM_SCANNED = 64


class State:
    """Networks, loss scaler, optimizer, data, the plan of buckets, and the losses seen."""

    def __init__(self, config: Config, device: torch.device, rank: int = 0, world_size: int = 1):
        self.config, self.device, self.rank, self.world_size = config, device, rank, world_size
        _require_memory(config, device)
        _require_lstm(config, device)
        self.dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[config.precision]
        with torch.device(device):
            self.model = RNNT(config)
        self.model.to(self.dtype)
        # What the step calls; a compiled variant puts its own here.
        self.encoder, self.prediction, self.joint = self.model.encoder, self.model.prediction, self.model.joint
        flatten(self.model)
        initialise(self.model, config, SEED)
        self.names, self.parameters = zip(*self.model.named_parameters(), strict=True)
        self.scaler = LossScaler(device, config.loss_scale, config.growth_interval, config.hysteresis)
        self.lamb = Lamb(
            self.parameters,
            self.scaler,
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            weight_decay=config.weight_decay,
            max_grad_norm=config.clip,
            ema_decay=config.ema,
            rank=rank,
            world_size=world_size,
        )
        self.blank = config.vocab - 1
        self.source = open_source(config, device, rank, world_size, self.dtype, SEED, training=True)
        self.log_prior = None
        if config.prior_bias:
            self.log_prior = log_prior((one.tokens for one in self.source.corpus.utterances), config.vocab).to(device)
        held_out = HELD_OUT_BATCHES * config.batch if config.data in GENERATED else 0
        self.hyperparameters = {"train_samples": self.source.num_samples, "eval_samples": held_out}
        # A bucket may be longer than the longest utterance.
        self.plan = self._make_plan()
        size = (max(self.plan.audio), config.batch, config.features)
        self.inputs = Inputs(self.source, size, max(self.plan.text), self.dtype, device)
        self.tally = buckets.Tally(skips_padding=config.lstm != "cudnn")
        self._side = torch.cuda.Stream(device) if config.streams == 2 and device.type == "cuda" else None
        # Ranks that stop must stop at the same step.
        self.report = ScaledReport(device, self.scaler, config.max_floor_overflows, exact=world_size > 1)

    def _make_plan(self):
        """Alike on all ranks: buckets are chosen by what any of them may meet."""
        maxima = _scan(self.source)
        most = getattr(self.source, "max_frames", 0), getattr(self.source, "max_tokens", 0)
        if self.world_size > 1:
            every = [None] * self.world_size
            torch.distributed.all_gather_object(every, (maxima, most))
            maxima = sorted({pair for found, _ in every for pair in found})
            most = tuple(max(values) for values in zip(*(each for _, each in every), strict=True))
        largest = limits(self.config)
        if self.config.buckets == "auto":
            largest = tuple(own or limit for own, limit in zip(most, largest, strict=True))
        return buckets.make_plan(self.config.buckets, maxima, *largest, functools.partial(padded_cost, self.config))

    def reset(self):
        # Weights are the same on all ranks, draws each rank's own.
        torch.manual_seed(SEED + self.rank)
        initialise(self.model, self.config, SEED)
        if self.log_prior is not None:
            with torch.no_grad():
                self.model.joint.linear.bias.copy_(self.log_prior)
        self.model.train()
        self.lamb.reset()
        self.scaler.reset()
        self.inputs.reset()
        self.tally.reset()
        self.report.reset()

    def close(self):
        """End the data's threads. For the record: steps skipped since the last reset, utterances dropped."""
        dropped = self.source.dropped
        self.source.close()
        return {
            "num_skipped_steps": int(self.scaler.num_skipped),
            "num_dropped_samples": len(dropped),
            "dropped_samples": [str(one) for one in dropped[:20]],
        }

    # -- one step, part by part; all but begin_step and end_step can be captured

    def begin_step(self, index: int, fit=None):
        """The next batch into the static inputs, this step's learning rate into its place: (views, shape).

        fit: how the batch is padded; None: not at all.
        """
        with section("data"):
            views, batch, shape = self.inputs.load(fit)
            self.lamb.lr.fill_(learning_rate(self.config, index))
        original = len(batch.features), batch.tokens.shape[1]
        frames, tokens = batch.feature_lengths.tolist(), batch.token_lengths.tolist()
        self.tally.add(original, shape, frames, tokens)
        return views, shape

    @contextlib.contextmanager
    def aside(self):
        """What is launched here and what comes after it, until `join`, need not wait for each other.

        With --streams 2, on a stream of its own, where autograd runs its backward, too.
        """
        if self._side is None:
            yield
            return
        self._side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._side):
            yield

    def join(self, *results):
        """The current stream waits for what was launched aside; results: the tensors of it that are read here."""
        if self._side is not None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_stream(self._side)
            for tensor in results:
                tensor.record_stream(stream)

    def loss(self, f, g, views, frame_lengths):
        """Mean loss of the batch, FP32, from both networks' outputs."""
        logits = self.joint(f, g)
        losses = transducer_loss(logits, views.tokens, frame_lengths, views.token_lengths, self.blank)
        return losses.mean()

    def scaled(self, loss):
        return loss * self.scaler.scale

    @torch.no_grad()
    def update(self, loss, grads):
        """Overflow check, LAMB, moving average, loss scale."""
        self.lamb.step(grads)
        self.report.fill(loss, self.lamb.grad_norm)

    def end_step(self, index: int):
        """What this step reports, on its way to the host; FloatingPointError where an earlier one ends the run."""
        with section("report"):
            try:
                self.report.end_step(index)
            except FloatingPointError:
                self.check()
                raise

    def check(self):
        """Waits for the device. RuntimeError where an LSTM kernel gave up, which makes NaN of everything after it."""
        if self.config.lstm != "cudnn":
            lstm.check(self.device)

    # -- what the harness asks

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean loss of the moving average over HELD_OUT_BATCHES batches that no rank trains on, without dropout.

        Raises Unsupported for speech, which has no part that is not trained on.
        """
        if self.config.data not in GENERATED:
            raise Unsupported("all utterances of the folder are trained on: no loss of held-out ones")
        source = open_source(self.config, self.device, 0, 1, self.dtype, HELD_OUT_SEED, training=False)
        total = torch.zeros((), device=self.device)
        with self.averaged():
            for _ in range(HELD_OUT_BATCHES):
                batch = Batch(*(tensor.to(self.device) for tensor in source.next()))
                f, lengths = self.model.encoder(batch.features, batch.feature_lengths)
                logits = self.model.joint(f, self.model.prediction(batch.tokens, batch.token_lengths))
                total += transducer_loss(logits, batch.tokens, lengths, batch.token_lengths, self.blank).mean()
        source.close()
        return float(total) / HELD_OUT_BATCHES

    @contextlib.contextmanager
    def averaged(self):
        """Within it the parameters are the moving average, in place, and nothing is dropped out."""
        self.lamb.gather_ema()
        with torch.no_grad():
            kept = [parameter.clone() for parameter in self.parameters]
            torch._foreach_copy_(list(self.parameters), self.lamb.ema)
        self.model.eval()
        try:
            yield
        finally:
            self.model.train()
            with torch.no_grad():
                torch._foreach_copy_(list(self.parameters), kept)

    def finish(self, variant, record):
        """What buckets cost, how fast eager and graphed greedy decoding are, and the word error rate of speech."""
        report = self.tally.report(*(functools.partial(count, self.config) for count in (training_flops, time_steps)))
        record["extra"]["buckets"] = {"audio": self.plan.audio, "text": self.plan.text} | report
        if self.config.data != "synthetic":
            record["flops_per_step"] = report["useful_flops_per_step"]
        decoding.finish(self, record)
        self.check()

    def named_state(self):
        yield from zip(self.names, self.parameters, strict=True)
        yield from self.lamb.named_state()
        yield from self.scaler.named_state()

    def read_losses(self, count: int) -> list[float]:
        """Raises FloatingPointError where none of many steps trained, RuntimeError as `check` does."""
        self.check()
        return self.report.read_losses(count)

    def read_grad_norms(self, count: int) -> list[float]:
        return self.report.read_grad_norms(count)

    def batch_class(self, index: int) -> int:
        """Batches that come again and again with lengths of their own are each compared with themselves.

        Those of speech never come again, and a window is not equally long for every variant. The first min_steps, which
        all windows have, are a class each, so that variants are compared on the same batches; all later ones are one
        more class, whose weight is that of one step.
        """
        period = getattr(self.source, "period", None)
        return index % period if period else min(index, self.config.min_steps)


def open_source(config: Config, device, rank, world_size, dtype, seed, training: bool):
    """A source of batches for --data; what it must have is in the docstring of rnnt/batch.py."""
    if config.data in GENERATED:
        return Synthetic(config, rank, world_size, dtype, seed, pinned=device.type == "cuda")
    from rnnt.data import open_speech

    return open_speech(config, device, rank, world_size, dtype, seed, training)


def _scan(source):
    """(frames, tokens) of the longest in many batches. Speech is read for it: only its features tell how long it is."""
    if hasattr(source, "batch_maxima"):
        return source.batch_maxima()
    maxima = []
    for _ in range(NUM_SCANNED):
        batch = source.next()
        maxima.append((len(batch.features), batch.tokens.shape[1]))
    source.reset()
    return maxima


def _require_memory(config, device):
    free, need = memory.free_bytes(device), predicted_bytes(config)
    if free is not None and need > free:
        raise torch.OutOfMemoryError(f"--batch {config.batch} needs {need:,} bytes, {free:,} are free: lower --batch")


def _require_lstm(config, device):
    if config.lstm != "cudnn":
        widths = config.encoder_hidden, config.prediction_hidden
        if config.streams == 1:
            widths = [max(widths)] * (2 if config.lstm == "wavefront" else 1)
        lstm.require(device, config.lstm, *widths)


def hyperparameters(config: Config, world_size: int) -> dict:
    """What the MLPerf log says of this training."""
    return {
        "seed": SEED,
        "global_batch_size": config.batch * world_size,
        "gradient_accumulation_steps": 1,
        "opt_name": "lamb",
        "opt_base_learning_rate": config.lr,
        "opt_lamb_learning_rate_warmup_steps": config.lr_warmup,
        "opt_lamb_beta_1": config.beta1,
        "opt_lamb_beta_2": config.beta2,
        "opt_lamb_epsilon": config.eps,
        "opt_lamb_weight_decay_rate": config.weight_decay,
    }


def nominal_flops(config: Config) -> float:
    """FLOP of a step for utterances' true lengths; for speech --frames and --tokens stand in until it has been read."""
    if config.data != "lengths":
        return config.batch * training_flops(config, config.frames, config.tokens)
    frames, tokens = draw_lengths(np.random.default_rng(SEED), 4096, *limits(config))
    pairs = zip(frames.tolist(), tokens.tolist(), strict=True)
    return config.batch * sum(training_flops(config, *pair) for pair in pairs) / len(frames)
