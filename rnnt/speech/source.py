"""Batches of real speech, made ahead of the step.

Training: every epoch is shuffled anew from (seed, epoch). A step of all ranks takes the next batch * world_size
utterances, and the last ones that do not fill a step are left out. Speed, dither and masks of a batch are drawn from
(seed, rank, its number), so a batch can be made again without those before it.

Evaluation: the same utterances in the order of their names, at their own speed, without masks. Dither is added as in
training, but always the same: the logarithm of samples that are zero would lie far below all values of training. The
last batch of a pass is filled up with further utterances, for which `texts` has no entry.

Files that cannot be decoded, or hold nothing but silence, are found here. In the place of each the batch takes the
rank's next good utterance beyond the batch. So the sequence depends on the files only, and a transcript stays with its
audio.
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
from rnnt.speech.folder import FASTEST, SLOWEST, BadAudio, num_frames, resampled, scan, spliced

# Batches that are made, or being made, before they are asked for.
AHEAD = 3
# Batches that buckets are chosen by.
NUM_SCANNED = 64
# Dropped files that stderr names; `dropped` has all.
MAX_NAMED = 10


class Speech:
    """A source of batches of speech, see rnnt/data/batches.py. Raises ValueError that names the flag to change.

    `texts`: normalised transcripts of the batch that `next` gave last. `dropped`: reasons, a line each. `num_batches`:
    of this rank in one pass over the utterances. `max_frames`, `max_tokens`: longest utterance, at its slowest.

    A thread makes batches ahead, on CUDA on a stream of its own. `next` waits for that thread where no batch is ready,
    and lets the current stream wait for the features.
    """

    # Lengths never come again.
    period = None

    def __init__(
        self, config: Config, device: torch.device, rank: int, world_size: int, dtype, seed: int, training: bool
    ):
        self.config, self.device, self.dtype = config, device, dtype
        self.rank, self.world_size, self.seed, self.training = rank, world_size, seed, training
        # The same for training and evaluation, though evaluation needs no room for slowing down.
        longest = config.max_frames, config.max_tokens
        found = scan(config.data, config.tokenizer, config.vocab, *longest, config.speed_perturbation)
        self.utterances, self.dropped = found[0], []
        # Rows that decoding showed to be bad.
        self._bad: set[int] = set()
        for reason in found[1]:
            self._drop(reason, tell=rank == 0)
        step, count = config.batch * world_size, len(self.utterances)
        self.num_batches = count // step if training else -(-count // step)
        self._require_enough()
        self._permutation = (None, None)
        self.perturbed = training and config.speed_perturbation
        longest = resampled(max(one.num_samples for one in self.utterances), SLOWEST if self.perturbed else 1.0)
        self.max_frames, self.max_tokens = spliced(num_frames(longest)), max(len(one.tokens) for one in self.utterances)
        self._max_offset = longest
        self._extract = DaliExtractor(config.batch, longest, config.workers, device)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._thread = concurrent.futures.ThreadPoolExecutor(1)
        self._pending, self._numbers = collections.deque(), itertools.count()
        self.texts: list[str] = []

    @property
    def num_samples(self) -> int:
        """Utterances to train on."""
        return len(self.utterances) - len(self._bad)

    def next(self) -> Batch:
        """The next batch, ready for work on the current stream."""
        while len(self._pending) < AHEAD + 1:
            self._pending.append(self._thread.submit(self._make_on_stream, next(self._numbers)))
        # An error stays in front: the next call raises it again.
        batch, self.texts, event = self._pending[0].result()
        self._pending.popleft()
        if event is not None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(event)
            batch.features.record_stream(stream)
        return batch

    def reset(self) -> None:
        """Start again at batch 0; batches made ahead are thrown away."""
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
            return *self.make(number), None
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            batch, texts = self.make(number)
            event = torch.cuda.Event(blocking=True)
            event.record(self._stream)
            # Only this thread waits: afterwards the host memory of the copies may be used again.
            event.synchronize()
        return batch, texts, event

    # -- one batch

    def make(self, number: int) -> tuple[Batch, list[str]]:
        """Batch `number` and its transcripts, from (seed, rank, number) and the files."""
        draws = np.random.default_rng([self.seed, self.rank, number])
        size = self.config.batch
        factors = draws.uniform(FASTEST, SLOWEST, size) if self.perturbed else np.ones(size)
        offsets = draws.integers(self._max_offset, size=size).tolist() if self.training else [0] * size
        chosen, num_texts, mel, frames = self._read(number, factors.tolist(), offsets)
        lengths, masks = torch.tensor([spliced(count) for count in frames], dtype=torch.int32), None
        if self.training and self.config.spec_augment:
            masks = self._upload(torch.from_numpy(draw_masks(draws, frames)))
        finished = finish(self._upload(mel), self._upload(lengths), masks, self.config.features, self.dtype)
        token_lengths = torch.tensor([len(one.tokens) for one in chosen], dtype=torch.int32)
        tokens = torch.nn.utils.rnn.pad_sequence([torch.tensor(one.tokens) for one in chosen], batch_first=True)
        host = (self._pinned(tensor) for tensor in (lengths, tokens, token_lengths))
        return Batch(finished, *host), [one.text for one in chosen[:num_texts]]

    def _read(self, number, factors, offsets):
        """(utterances, number of texts, features [B, 80, T], frames of 10 ms of each), all good, of batch `number`."""
        while True:
            rows, num_texts = self._rows(number)
            chosen = [self.utterances[row] for row in rows]
            try:
                return chosen, num_texts, *self._extract([one.path for one in chosen], factors, offsets)
            except BadAudio:
                # DALI does not name the file that it cannot decode, so each is run by itself.
                if not self._drop_bad(rows):
                    raise

    def _drop_bad(self, rows):
        """Drop those that are bad by themselves; return whether any is."""
        before = len(self._bad)
        for row in set(rows):
            try:
                self._extract([self.utterances[row].path], [1.0], [0])
            except BadAudio as error:
                self._bad.add(row)
                self._drop(f"{self.utterances[row].name}: {error}", tell=True)
        self._require_enough()
        return len(self._bad) > before

    def _rows(self, number):
        """(utterances of batch `number` without bad ones, number of them that do not fill up the batch)."""
        count, batch = len(self.utterances), self.config.batch
        if self.training:
            later = itertools.chain.from_iterable(self._indices(after) for after in itertools.count(number))
            good = (index for index in later if index not in self._bad)
            return list(itertools.islice(good, batch)), batch
        start = (number % self.num_batches * self.world_size + self.rank) * batch
        own = [index for index in range(start, min(start + batch, count)) if index not in self._bad]
        filling = (index for index in itertools.cycle(range(count)) if index not in self._bad)
        return own + list(itertools.islice(filling, batch - len(own))), len(own)

    def _indices(self, number):
        """This rank's utterances in training step `number` if all are good."""
        epoch, step = divmod(number, self.num_batches)
        if self._permutation[0] != epoch:
            generator = np.random.default_rng([self.seed, epoch])
            self._permutation = epoch, generator.permutation(len(self.utterances))
        start = (step * self.world_size + self.rank) * self.config.batch
        return self._permutation[1][start : start + self.config.batch].tolist()

    def _upload(self, tensor):
        if tensor.device.type == self.device.type:
            return tensor
        return self._pinned(tensor).to(self.device, non_blocking=True)

    def _pinned(self, tensor):
        return tensor.pin_memory() if self._stream is not None else tensor

    # -- messages

    def _drop(self, reason, tell):
        self.dropped.append(reason)
        # Evaluation finds again what training has named.
        if self.training and tell and len(self.dropped) <= MAX_NAMED:
            more = "; --record counts further ones" if len(self.dropped) == MAX_NAMED else ""
            print(f"data: dropped {reason}{more}", file=sys.stderr)

    def _require_enough(self):
        needed = self.config.batch * self.world_size if self.training else 1
        if self.num_samples < needed:
            ranks = f" on {self.world_size} ranks" if self.world_size > 1 else ""
            first = f" (the first dropped: {self.dropped[0]})" if self.dropped else ""
            raise ValueError(
                f"--data {self.config.data}: {self.num_samples} utterances can be trained on{first}, --batch "
                f"{self.config.batch}{ranks} takes {needed}: give more speech or a smaller --batch"
            )
