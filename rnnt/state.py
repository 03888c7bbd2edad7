"""State of RNN-T's training: built once, reset in place, the same for all variants."""

import functools

import torch

from common.optimizers.loss_scaler import LossScaler
from common.step_report import ScaledReport
from graph_worth import section
from graph_worth.machine import memory
from rnnt import config as rnnt_config
from rnnt.config import GENERATED, Config
from rnnt.data import buckets
from rnnt.data.batches import Inputs
from rnnt.data.synthetic import Synthetic, typical_lengths
from rnnt.lamb import Lamb
from rnnt.model import RNNT, flatten, initialise

SEED = 1234


class State:
    """Networks, loss scale, optimizer, batches, buckets, and the losses of past steps."""

    def __init__(self, config: Config, device: torch.device, rank: int = 0, world_size: int = 1):
        self.config, self.device, self.rank, self.world_size = config, device, rank, world_size
        memory.require_batch(config.batch, rnnt_config.predicted_bytes(config), device)
        self.dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[config.precision]
        with torch.device(device):
            self.model = RNNT(config)
        self.model.to(self.dtype)
        self.encoder, self.prediction, self.joint = self.model.encoder, self.model.prediction, self.model.joint
        flatten(self.model)
        initialise(self.model, config, SEED)
        self.names, self.parameters = zip(*self.model.named_parameters(), strict=True)
        self.scaler = LossScaler(device, config.loss_scale, config.growth_interval, config.hysteresis)
        self.lamb = Lamb(self.parameters, self.scaler, config, rank, world_size)
        self.blank = config.vocab - 1
        self.source = self._open_source(rank, world_size)
        self.plan = self._make_plan()
        # A bucket may be longer than the longest utterance.
        size = (max(self.plan.audio), config.batch, config.features)
        self.inputs = Inputs(self.source, size, max(self.plan.text), self.dtype, device)
        counts = (functools.partial(count, config) for count in (rnnt_config.training_flops, rnnt_config.time_steps))
        self.tally = buckets.Tally(*counts)
        # exact: ranks that stop must stop at the same step.
        self.report = ScaledReport(device, self.scaler, config.max_floor_overflows, exact=world_size > 1)
        self.read_losses, self.read_grad_norms = self.report.read_losses, self.report.read_grad_norms

    def _open_source(self, rank: int, world_size: int):
        """Return batches of --data without an end, the same in each run.

        next(): the next batch, ready for work on the current stream. batch_shapes(): (T, U) of many batches, by which
        buckets are chosen; reset() comes next. num_samples: utterances trained on. max_frames, max_tokens: longest
        utterance. dropped: reasons why utterances are left out. period: batches after which the same lengths come
        again; None: never. Raises ValueError that names the flag to change, or the packages to install.
        """
        if self.config.data in GENERATED:
            pinned = self.device.type == "cuda"
            return Synthetic(self.config, rank, world_size, self.dtype, SEED, pinned)
        try:
            from rnnt.speech.utterances import Speech
        except ImportError as error:
            packages = f"speech takes soundfile and nvidia-dali ({error})"
            raise ValueError(f"--data {self.config.data}: {packages}: ./setup.sh speech dali") from None
        return Speech(self.config, self.device, rank, world_size, self.dtype, SEED)

    def _make_plan(self):
        """The same on all ranks: buckets are chosen by the batches of all of them."""
        shapes, most = self.source.batch_shapes(), (self.source.max_frames, self.source.max_tokens)
        if self.world_size > 1:
            every = [None] * self.world_size
            torch.distributed.all_gather_object(every, (shapes, most))
            shapes = sorted({pair for rank_shapes, _ in every for pair in rank_shapes})
            most = tuple(max(values) for values in zip(*(rank_most for _, rank_most in every), strict=True))
        largest = most if self.config.buckets == "auto" else (self.config.max_frames, self.config.max_tokens)
        cost = functools.partial(rnnt_config.padded_cost, self.config)
        return buckets.make_plan(self.config.buckets, shapes, *largest, cost)

    def reset(self):
        # Weights are the same on all ranks; each rank draws its own dropout.
        torch.manual_seed(SEED + self.rank)
        initialise(self.model, self.config, SEED)
        self.model.train()
        for part in (self.lamb, self.scaler, self.inputs, self.tally, self.report):
            part.reset()

    def close(self):
        """Return steps skipped since the last reset and utterances dropped."""
        self.source.close()
        return self.report.closing(self.source.dropped)

    def end_step(self, index: int):
        """Start the report's copy to the host. Raises FloatingPointError if an earlier step's report ends the run."""
        with section("report"):
            self.report.end_step(index)

    def finish(self) -> list[str]:
        """Lines on the cost of padding."""
        return self.tally.report()

    def named_state(self):
        yield from zip(self.names, self.parameters, strict=True)
        yield from self.lamb.named_state()
        yield from self.scaler.named_state()

    def batch_class(self, index: int) -> int:
        """Batches of one class have the same lengths in each run.

        The lengths of speech never come again: each of the first min_steps steps is a class, and all later ones
        together are one, so that variants are compared by the same batches.
        """
        period = self.source.period
        return index % period if period else min(index, self.config.min_steps)


def nominal_flops(config: Config) -> float:
    """FLOP of a step for the utterances' true lengths. For speech, of which nothing is read yet, --frames and --tokens
    stand for them.
    """
    pairs = [(config.frames, config.tokens)]
    if config.data == "lengths":
        pairs = typical_lengths(SEED, config.max_frames, config.max_tokens)
    return config.batch * sum(rnnt_config.training_flops(config, *pair) for pair in pairs) / len(pairs)
