"""Synthetic batches: all utterances of one length (NVIDIA's synthetic shape), or lengths spread as LibriSpeech's.

Features are cut out of one long seeded tape of artificial speech. Each token has a spectrum, held for a few frames and
blended into the next, with slow and smooth noise. As in log-mel spectra, neighbouring frames and bands are correlated,
and every feature has mean 0 and variance 1.
"""

import functools

import numpy as np
import torch

from rnnt.config import FRAME_S, MEL_FEATURES, Config
from rnnt.data.batches import Batch

TAPE_FRAMES = 16384
BANDS = MEL_FEATURES // 3
# At 4.6 word pieces a second a piece has 7.2 frames.
TOKEN_FRAMES = 7
NUM_SPOKEN = TAPE_FRAMES // TOKEN_FRAMES + 1
PERIOD = 64
NUM_KEPT = 16
NUM_SCANNED = 4096


class Synthetic:
    """Synthetic batches for one rank, see `rnnt.state.State`.

    Lengths repeat after `period` batches, so that a run meets each length several times. Features and tokens repeat
    with --data synthetic; with --data lengths they are cut anew from the tape.
    """

    dropped = ()

    def __init__(self, config: Config, rank: int, world_size: int, dtype: torch.dtype, seed: int, pinned: bool):
        self.config, self.rank, self.world_size, self.seed, self.pinned = config, rank, world_size, seed, pinned
        self.period = 1 if config.data == "synthetic" else PERIOD
        self.num_samples = max(self.period, NUM_KEPT) * config.batch * world_size
        self.max_frames, self.max_tokens = config.max_frames, config.max_tokens
        if config.data == "synthetic":
            self.max_frames, self.max_tokens = config.frames, config.tokens
        # An utterance begins at any token of the tape from where its frames and its tokens still are on it.
        self._num_starts = min((TAPE_FRAMES - self.max_frames) // TOKEN_FRAMES, NUM_SPOKEN - self.max_tokens)
        if self._num_starts < 1:
            flags = "--frames, --tokens" if config.data == "synthetic" else "--max-frames, --max-tokens"
            raise ValueError(
                f"{flags} {self.max_frames}, {self.max_tokens}: --data {config.data} takes less than {TAPE_FRAMES} "
                f"frames and {NUM_SPOKEN} tokens"
            )
        tape, self._spoken = make_tape(config.features, config.vocab, seed)
        # numpy copies rows ten times as fast as torch, but has no bfloat16: both work on its bytes.
        self._dtype, self._tape = dtype, torch.from_numpy(tape).to(dtype).view(torch.int16).numpy()
        self._kept: list[Batch] = []
        self.reset()

    def reset(self) -> None:
        self._index = 0

    def close(self) -> None:
        """Nothing is open."""

    def next(self) -> Batch:
        index, self._index = self._index, self._index + 1
        if self.config.data != "synthetic":
            return self._make(index)
        if not self._kept:
            self._kept = [self._make(number) for number in range(NUM_KEPT)]
        return self._kept[index % NUM_KEPT]

    def batch_shapes(self) -> list[tuple[int, int]]:
        """Return shapes of all ranks' batches, of far more than come: buckets must not follow the period's batches."""
        if self.config.data == "synthetic":
            return [(self.config.frames, self.config.tokens)]
        lengths = (self._lengths(index, rank) for index in range(NUM_SCANNED) for rank in range(self.world_size))
        return [(int(frames.max()), int(tokens.max())) for frames, tokens in lengths]

    def _lengths(self, index, rank):
        if self.config.data == "synthetic":
            return np.full(self.config.batch, self.config.frames), np.full(self.config.batch, self.config.tokens)
        generator = np.random.default_rng([self.seed, 1, rank, index])
        return draw_lengths(generator, self.config.batch, self.max_frames, self.max_tokens)

    def _make(self, index):
        frames, tokens = self._lengths(index % self.period, self.rank)
        generator = np.random.default_rng([self.seed, 2, self.rank, index])
        starts = TOKEN_FRAMES * generator.integers(self._num_starts, size=len(frames))
        size = (int(frames.max()), len(frames), self.config.features)
        features = torch.empty(size, dtype=self._dtype, pin_memory=self.pinned)
        rows = features.view(torch.int16).numpy()
        ids = torch.zeros(len(frames), int(tokens.max()), dtype=torch.int64)
        for row, (start, length, count) in enumerate(zip(starts, frames, tokens, strict=True)):
            rows[:length, row] = self._tape[start : start + length]
            rows[length:, row] = 0
            first = start // TOKEN_FRAMES
            ids[row, :count] = torch.from_numpy(self._spoken[first : first + count])
        frame_lengths, token_lengths = (torch.from_numpy(values.astype(np.int32)) for values in (frames, tokens))
        others = frame_lengths, ids, token_lengths
        return Batch(features, *(tensor.pin_memory() if self.pinned else tensor for tensor in others))


def draw_lengths(generator, count: int, max_frames: int, max_tokens: int):
    """(frames, tokens) int64 [count], spread as in LibriSpeech's 960 h of training speech.

    Seconds: 72 % normal around 14.4 with deviation 1.4, since most segments were cut shortly before 16 s; 28 % uniform
    from 1.5 to 12; none over 16.7. Their mean is 12.3, as in the corpus. Frames: seconds times a resampling factor,
    uniform from 0.85 to 1.15. Tokens: 4.6 word pieces a second before resampling; speakers differ by 12 %. All lengths
    shrink alike where the model takes less than the benchmark's 641 frames and 125 tokens.
    """
    near_limit = generator.random(count) < 0.72
    seconds = np.where(near_limit, generator.normal(14.4, 1.4, count), generator.uniform(1.5, 12.0, count))
    seconds = np.clip(seconds, 1.5, 16.7)
    frames = seconds * generator.uniform(0.85, 1.15, count) / FRAME_S * min(1.0, max_frames / 641)
    rate = 4.6 * np.exp(0.12 * generator.standard_normal(count))
    tokens = seconds * rate * min(1.0, max_tokens / 125)
    frames = np.clip(np.rint(frames), 1, max_frames).astype(np.int64)
    return frames, np.clip(np.rint(tokens), 1, np.minimum(max_tokens, frames)).astype(np.int64)


def typical_lengths(seed: int, max_frames: int, max_tokens: int) -> list[tuple[int, int]]:
    """(frames, tokens) of 4096 utterances."""
    frames, tokens = draw_lengths(np.random.default_rng(seed), 4096, max_frames, max_tokens)
    return list(zip(frames.tolist(), tokens.tolist(), strict=True))


@functools.lru_cache(maxsize=2)
def make_tape(width: int, vocab: int, seed: int):
    """(features float32 [TAPE_FRAMES, width], tokens int64): TOKEN_FRAMES frames for each token. Nobody writes to them.

    There are MEL_FEATURES features; a larger width is filled with zeros, a smaller one cuts them off.
    """
    generator = np.random.default_rng([seed, 0])
    # Tokens are as frequent as words are by Zipf's law. The blank is never spoken.
    weights = 1 / np.arange(3, vocab + 2)
    spoken = generator.choice(vocab - 1, NUM_SPOKEN, p=weights / weights.sum())
    # Spectra: three bumps each, as formants are, on an axis of BANDS bands.
    centers = generator.uniform(0, BANDS, (vocab - 1, 3, 1))
    widths = generator.uniform(3, 10, (vocab - 1, 3, 1))
    spectra = np.exp(-0.5 * ((np.arange(BANDS) - centers) / widths) ** 2).sum(1)
    # Three frames of 10 ms in each of 30 ms.
    fine = np.repeat(spectra[spoken], 3 * TOKEN_FRAMES, axis=0)[: 3 * TAPE_FRAMES]
    noise = _smooth(generator.standard_normal((len(fine), 1)), 60)[:, 0]
    fine = _smooth(fine, 9) * (1 + 0.3 * (noise / noise.std())[:, None])
    bands = generator.standard_normal((len(fine), BANDS + 8))
    fine += 0.15 * np.stack([_smooth(column[:, None], 5)[:, 0] for column in _smooth(bands.T, 9)[4:-4]], axis=1)
    tape = fine.reshape(TAPE_FRAMES, MEL_FEATURES)
    tape = (tape - tape.mean(0)) / tape.std(0)
    padded = np.zeros((TAPE_FRAMES, width), np.float32)
    padded[:, :MEL_FEATURES] = tape[:, :width]
    return padded, spoken.astype(np.int64)


def _smooth(rows, size):
    """A running mean of `size` along the first axis, of the same length; the edges repeat."""
    padded = np.pad(rows, ((size // 2, size - size // 2), (0, 0)), mode="edge")
    sums = np.cumsum(padded, axis=0)
    return (sums[size:] - sums[:-size]) / size
