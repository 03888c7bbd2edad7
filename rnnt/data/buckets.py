"""Buckets: the few lengths that batches are padded to, so that graphs can run them. Imports no torch."""

import bisect
import functools
from collections import Counter

MAX_COUNT = 50
MAX_PAIRS = 16
AUTO_WASTE = 0.02


def require_kind(kind: str) -> None:
    """Raises ValueError where --buckets is neither auto nor a number from 1 to 50."""
    if kind != "auto" and not (kind.isascii() and kind.isdigit() and 1 <= int(kind) <= MAX_COUNT):
        raise ValueError(f"--buckets {kind}: takes auto or a number from 1 to {MAX_COUNT}")


def ladder(count: int, max_length: int) -> list[int]:
    """Ascending buckets, evenly spaced down from max_length: ladder(4, 641) is [161, 321, 481, 641].

    Source: rnnt/rnnt_graph.py of MLPerf v3.1: max - i * max // n.
    """
    return sorted({max_length - index * max_length // count for index in range(count)})


def fit(lengths: list[int], length: int) -> int:
    """The smallest bucket that holds `length`. Raises ValueError where none does."""
    place = bisect.bisect_left(lengths, length)
    if place == len(lengths):
        raise ValueError(f"a batch is {length} long and the largest bucket {lengths[-1]}: raise the largest length")
    return lengths[place]


def auto_pairs(maxima, max_frames: int, max_tokens: int, cost_of) -> list[tuple[int, int]]:
    """The fewest (frames, tokens) to pad to whose padding costs at most AUTO_WASTE; at most MAX_PAIRS, at any cost.

    maxima: (frames, tokens) of batches; (max_frames, max_tokens), the most that a batch may have, is always a pair.
    cost_of(frames, tokens): cost of a batch of this shape, in any unit; takes arrays, too. Candidates are quantiles of
    the maxima. Greedy: the pair that saves most, then the next one.
    """
    import numpy

    maxima = numpy.array(maxima)
    frames, tokens = (
        sorted({*numpy.quantile(maxima[:, column], numpy.arange(1, count + 1) / count, method="higher").tolist(), most})
        for column, count, most in ((0, 32, max_frames), (1, 16, max_tokens))
    )
    candidates = numpy.array([(a, t) for a in frames for t in tokens])
    needed = cost_of(maxima[:, 0], maxima[:, 1])
    holds = (maxima[None] <= candidates[:, None]).all(2)
    # cost[i, j]: of batch j padded to candidate i.
    cost = numpy.where(holds, cost_of(candidates[:, 0], candidates[:, 1])[:, None], 2**30)
    chosen, executed = [len(candidates) - 1], cost[-1]
    while executed.sum() > (1 + AUTO_WASTE) * needed.sum() and len(chosen) < MAX_PAIRS:
        chosen.append(int(numpy.minimum(cost, executed).sum(1).argmin()))
        executed = numpy.minimum(executed, cost[chosen[-1]])
    return sorted({tuple(candidates[index].tolist()) for index in chosen})


class BucketPlan:
    """The buckets of both networks, ascending, and the pairs of buckets that occur, cheapest first.

    A batch is padded to the smallest bucket of each network; with --buckets auto to the cheapest pair that holds it.
    All variants use the same plan, so that they execute the same shapes.
    """

    def __init__(self, kind: str, audio: list[int], text: list[int], pairs, cost_of):
        self.audio, self.text, self.kind = audio, text, kind
        self.pairs = sorted(pairs, key=lambda pair: (cost_of(*pair), pair))
        self.fit = functools.cache(self._fit)

    def _fit(self, frames, tokens):
        """The shape that a batch of this shape is padded to. Raises ValueError where no bucket holds it."""
        if self.kind == "auto":
            for pair in self.pairs:
                if frames <= pair[0] and tokens <= pair[1]:
                    return pair
        return fit(self.audio, frames), fit(self.text, tokens)

    def require_few_pairs(self, variant: str) -> list[tuple[int, int]]:
        """All pairs. Raises ValueError where they are more than MAX_PAIRS, which are too many to capture."""
        if len(self.pairs) > MAX_PAIRS:
            raise ValueError(
                f"--buckets {self.kind}: {len(self.pairs)} pairs of buckets occur, {variant} takes at most "
                f"{MAX_PAIRS}: take fewer, or auto"
            )
        return self.pairs


def make_plan(kind: str, maxima, max_frames: int, max_tokens: int, cost_of) -> BucketPlan:
    """The plan for --buckets `kind` and batches whose (frames, tokens) are `maxima`, at most (max_frames, max_tokens).

    auto chooses pairs, see `auto_pairs`. A ladder's plan has all pairs of its buckets; where these are more than
    MAX_PAIRS, those of `maxima`.
    """
    if kind == "auto":
        pairs = auto_pairs(maxima, max_frames, max_tokens, cost_of)
        audio, text = (sorted(set(lengths)) for lengths in zip(*pairs, strict=True))
    else:
        audio, text = ladder(int(kind), max_frames), ladder(int(kind), max_tokens)
        pairs = [(a, t) for a in audio for t in text]
        if len(pairs) > MAX_PAIRS:
            pairs = {(fit(audio, frames), fit(text, tokens)) for frames, tokens in maxima}
    return BucketPlan(kind, audio, text, pairs, cost_of)


class Tally:
    """Shapes and padding of a run's steps."""

    def __init__(self, flops, time_steps):
        """flops(frames, tokens): FLOP of one utterance. time_steps(frames, tokens): LSTM steps of a batch."""
        self.flops, self.time_steps = functools.cache(flops), time_steps
        self.reset()

    def reset(self):
        self.steps = []

    def add(self, shape, padded, frames, tokens) -> None:
        """A batch of (frames, tokens) `shape`, executed as `padded`; frames, tokens: its utterances' lengths.

        Only kept: counting would add to the host's time in each step.
        """
        self.steps.append((shape, padded, frames, tokens))

    def padding(self) -> dict[str, float]:
        """Work that padding adds, as a share of batches that end with their longest utterance.

        For frames, symbols (tokens and the start), cells of the joint's lattice and LSTM time steps.
        """
        needed, executed = Counter(), Counter()
        for shape, padded, frames, _ in self.steps:
            needed.update(self._work(shape, len(frames)))
            executed.update(self._work(padded, len(frames)))
        return {name: executed[name] / needed[name] - 1 for name in needed}

    def _work(self, shape, batch):
        frames, symbols = shape[0], shape[1] + 1
        cells, steps = batch * ((frames + 1) // 2) * symbols, self.time_steps(*shape)
        return {"frames": batch * frames, "symbols": batch * symbols, "cells": cells, "time steps": steps}

    def flops_per_step(self) -> tuple[float, float]:
        """FLOP that the utterances' own lengths need, and FLOP executed."""
        useful = sum(sum(map(self.flops, frames, tokens)) for _, _, frames, tokens in self.steps)
        executed = sum(len(frames) * self.flops(*padded) for _, padded, frames, _ in self.steps)
        return useful / len(self.steps), executed / len(self.steps)

    def report(self) -> list[str]:
        padding = ", ".join(f"{name} {100 * share:.1f} %" for name, share in self.padding().items())
        useful, executed = self.flops_per_step()
        num_shapes = len({padded for _, padded, _, _ in self.steps})
        return [
            f"padding    {padding} over the longest of each batch, {num_shapes} shapes",
            f"compute    {useful / 1e12:.3g} TFLOP/step useful, {executed / 1e12:.3g} executed",
        ]
