"""Batches of real speech, made ahead of the step.

Every epoch is shuffled anew from (seed, epoch). A step of all ranks takes the next batch * world_size utterances, and
the last ones that do not fill a step are left out. Speed, dither and masks of a batch are drawn from (seed, rank, its
number), so a batch can be made again without those before it.
"""

import collections
import concurrent.futures
import itertools
import sys

import numpy as np
import torch

from rnnt.config import Config
from rnnt.data.batches import Batch
from rnnt.speech.dali_pipeline import DaliExtractor
from rnnt.speech.features import draw_masks, finish
from rnnt.speech.folder import FASTEST, SLOWEST, num_frames, resampled, scan, spliced

AHEAD = 3  # batches that are made, or being made, before they are asked for
NUM_SCANNED = 64  # batches that buckets are chosen by
MAX_NAMED = 10  # dropped files that stderr names; `dropped` has all


class Speech:
    """Batches of speech, see `rnnt.state.State`. Raises ValueError that names the flag to change.

    `num_batches`: of this rank in one pass over the utterances.

    A thread makes batches ahead, on CUDA on a stream of its own, since it launches kernels while the step's stream may
    be captured. These slow replays of small kernels (docs/one_stream.md). `next` waits for that thread where no batch
    is ready, and lets the current stream wait for the features.
    """

    # Lengths never come again.
    period = None

    def __init__(self, config: Config, device: torch.device, rank: int, world_size: int, dtype, seed: int):
        self.config, self.device, self.dtype = config, device, dtype
        self.rank, self.world_size, self.seed = rank, world_size, seed
        self.utterances, self.dropped = scan(config)
        if rank == 0:
            for number, reason in enumerate(self.dropped[:MAX_NAMED], 1):
                more = "; --record counts further ones" if number == MAX_NAMED else ""
                print(f"data: dropped {reason}{more}", file=sys.stderr)
        step, self.num_samples = config.batch * world_size, len(self.utterances)
        self.num_batches = self.num_samples // step
        if not self.num_batches:
            ranks = f" on {world_size} ranks" if world_size > 1 else ""
            first = f" (the first dropped: {self.dropped[0]})" if self.dropped else ""
            raise ValueError(
                f"--data {config.data}: {self.num_samples} utterances can be trained on{first}, --batch "
                f"{config.batch}{ranks} takes {step}: give more speech or a smaller --batch"
            )
        self._permutation = (None, None)
        self.perturbed = config.speed_perturbation
        longest = resampled(max(one.num_samples for one in self.utterances), SLOWEST if self.perturbed else 1.0)
        self.max_frames, self.max_tokens = spliced(num_frames(longest)), max(len(one.tokens) for one in self.utterances)
        self._max_offset = longest
        self._extract = DaliExtractor(config.batch, longest, config.workers, device)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._thread = concurrent.futures.ThreadPoolExecutor(1)
        self._pending, self._numbers = collections.deque(), itertools.count()

    def next(self) -> Batch:
        """The next batch, ready for work on the current stream."""
        while len(self._pending) < AHEAD + 1:
            self._pending.append(self._thread.submit(self._make_on_stream, next(self._numbers)))
        # An error stays in front: the next call raises it again.
        batch, event = self._pending[0].result()
        self._pending.popleft()
        if event is not None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(event)
            batch.features.record_stream(stream)
        return batch

    def reset(self) -> None:
        for future in self._pending:
            future.cancel()
        concurrent.futures.wait(self._pending)
        self._pending.clear()
        self._numbers = itertools.count()

    def close(self) -> None:
        """End the thread. Can be called again."""
        self.reset()
        self._thread.shutdown()
        self._extract = None

    def batch_shapes(self) -> list[tuple[int, int]]:
        """(T, U) of this rank's first batches: lengths of speech are known only from its features."""
        shapes = [self.next().shape for _ in range(NUM_SCANNED)]
        self.reset()
        return shapes

    def _make_on_stream(self, number):
        if self._stream is None:
            return self.make(number), None
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            batch = self.make(number)
            event = torch.cuda.Event(blocking=True)
            event.record(self._stream)
            # Only this thread waits: afterwards the host memory of the copies may be used again.
            event.synchronize()
        return batch, event

    # -- one batch

    def make(self, number: int) -> Batch:
        """Batch `number`."""
        draws = np.random.default_rng([self.seed, self.rank, number])
        size = self.config.batch
        factors = draws.uniform(FASTEST, SLOWEST, size) if self.perturbed else np.ones(size)
        offsets = draws.integers(self._max_offset, size=size).tolist()
        chosen = [self.utterances[row] for row in self._rows(number)]
        mel, frames = self._extract([one.path for one in chosen], factors.tolist(), offsets)
        lengths, masks = torch.tensor([spliced(count) for count in frames], dtype=torch.int32), None
        if self.config.spec_augment:
            masks = self._upload(torch.from_numpy(draw_masks(draws, frames)))
        finished = finish(self._upload(mel), self._upload(lengths), masks, self.config.features, self.dtype)
        token_lengths = torch.tensor([len(one.tokens) for one in chosen], dtype=torch.int32)
        tokens = torch.nn.utils.rnn.pad_sequence([torch.tensor(one.tokens) for one in chosen], batch_first=True)
        host = (self._pinned(tensor) for tensor in (lengths, tokens, token_lengths))
        return Batch(finished, *host)

    def _rows(self, number):
        """This rank's utterances in batch `number`."""
        batch, (epoch, step) = self.config.batch, divmod(number, self.num_batches)
        start = (step * self.world_size + self.rank) * batch
        if self._permutation[0] != epoch:
            generator = np.random.default_rng([self.seed, epoch])
            self._permutation = epoch, generator.permutation(self.num_samples)
        return self._permutation[1][start : start + batch].tolist()

    def _upload(self, tensor):
        if tensor.device.type == self.device.type:
            return tensor
        return self._pinned(tensor).to(self.device, non_blocking=True)

    def _pinned(self, tensor):
        return tensor.pin_memory() if self._stream is not None else tensor
