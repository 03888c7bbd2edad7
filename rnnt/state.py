"""What RNN-T's training reads and writes: built once, reset in place, the same for every variant."""

import contextlib
import functools
import itertools

import numpy as np
import torch

from common import flops, host_state, memory
from common.marks import section
from common.optimizers import LossScaler
from common.step_report import ScaledReport
from common.variant import Unsupported
from rnnt import buckets, evaluation, lstm
from rnnt import config as rnnt_config
from rnnt.batches import Batch, Inputs, Source
from rnnt.config import GENERATED, Config
from rnnt.lamb import Lamb
from rnnt.loss import transducer_loss
from rnnt.model import RNNT, flatten, initialise, log_prior
from rnnt.synthetic import Synthetic, draw_lengths

SEED = 1234
HELD_OUT_SEED = 4321
HELD_OUT_BATCHES = 4


class State:
    """Networks, loss scaler, optimizer, data, the plan of buckets, and the losses seen."""

    def __init__(self, config: Config, device: torch.device, rank: int = 0, world_size: int = 1):
        self.config, self.device, self.rank, self.world_size = config, device, rank, world_size
        memory.require_batch(config.batch, rnnt_config.predicted_bytes(config), device)
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
        # Where the parameters of each network are among all of them.
        counts = [len(list(network.parameters())) for network in (self.encoder, self.prediction, self.joint)]
        ends = list(itertools.accumulate(counts, initial=0))
        self.slices = dict(zip(("encoder", "prediction", "joint"), map(slice, ends, ends[1:]), strict=True))
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
        self.source = self.open_source(rank, world_size, SEED, training=True)
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

    def open_source(self, rank: int, world_size: int, seed: int, training: bool) -> Source:
        """Batches for --data."""
        if self.config.data in GENERATED:
            pinned = self.device.type == "cuda"
            return Synthetic(self.config, rank, world_size, self.dtype, seed, pinned)
        from rnnt.speech import open_speech

        return open_speech(self.config, self.device, rank, world_size, self.dtype, seed, training)

    def _make_plan(self):
        """Alike on all ranks: buckets are chosen by what any of them may meet."""
        shapes, most = self.source.batch_shapes(), (self.source.max_frames, self.source.max_tokens)
        if self.world_size > 1:
            every = [None] * self.world_size
            torch.distributed.all_gather_object(every, (shapes, most))
            shapes = sorted({pair for found, _ in every for pair in found})
            most = tuple(max(values) for values in zip(*(each for _, each in every), strict=True))
        largest = most if self.config.buckets == "auto" else rnnt_config.limits(self.config)
        cost = functools.partial(rnnt_config.padded_cost, self.config)
        return buckets.make_plan(self.config.buckets, shapes, *largest, cost)

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
        self.source.close()
        return self.report.closing(self.source.dropped)

    # -- one step

    @contextlib.contextmanager
    def side_stream(self):
        """What is launched here and what comes after it, until `wait_for_side_stream`, need not wait for each other.

        With --streams 2, on a stream of its own, where autograd runs its backward, too.
        """
        if self._side is None:
            yield
            return
        self._side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._side):
            yield

    def wait_for_side_stream(self, *results):
        """Of the current stream. results: the side stream's tensors that are read on the current one."""
        if self._side is not None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_stream(self._side)
            for tensor in results:
                tensor.record_stream(stream)

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
        source = self.open_source(0, 1, HELD_OUT_SEED, training=False)
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
        counts = (rnnt_config.training_flops, rnnt_config.time_steps)
        report = self.tally.report(*(functools.partial(count, self.config) for count in counts))
        record["extra"]["buckets"] = {"audio": self.plan.audio, "text": self.plan.text} | report
        if self.config.data != "synthetic":
            record["flops_per_step"] = report["useful_flops_per_step"]
        evaluation.finish(self, record)
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
        period = self.source.period
        return index % period if period else min(index, self.config.min_steps)


def _require_lstm(config, device):
    if config.lstm != "cudnn":
        widths = config.encoder_hidden, config.prediction_hidden
        if config.streams == 1:
            widths = [max(widths)] * (2 if config.lstm == "wavefront" else 1)
        lstm.require(device, config.lstm, *widths)


def said_of_run(args, device: torch.device, world_size: int) -> dict:
    """Fields of common.variant.Workload that describe this training. ValueError where it does not fit on a CPU."""
    config = args.config
    if device.type == "cpu":
        rnnt_config.require(config, host_state.available_host_bytes())
    flops_per_step = nominal_flops(config)
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return {
        "card": rnnt_config.card(config, device.type, flops_per_step),
        "notes": rnnt_config.notes(config, device.type, args.run.variant),
        "flops_per_step": flops_per_step,
        "flops_convention": "matrix products of the utterances' true lengths",
        "items_per_step": config.batch,
        "unit": "utterances",
        "peak_flops": flops.peak_flops(gpu, config.precision),
        # Of MLPerf's log.
        "hyperparameters": {
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
        },
    }


def nominal_flops(config: Config) -> float:
    """FLOP of a step for utterances' true lengths; for speech --frames and --tokens stand in until it has been read."""
    if config.data != "lengths":
        return config.batch * rnnt_config.training_flops(config, config.frames, config.tokens)
    frames, tokens = draw_lengths(np.random.default_rng(SEED), 4096, *rnnt_config.limits(config))
    pairs = zip(frames.tolist(), tokens.tolist(), strict=True)
    return config.batch * sum(rnnt_config.training_flops(config, *pair) for pair in pairs) / len(frames)
