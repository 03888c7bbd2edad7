"""Buckets: the few lengths that batches are padded to, so that a graph of that length can run them (no torch here).

ladder("4", "audio", 641)            [161, 321, 481, 641]
plan = make_plan("auto", ...)        ladders of both networks, and the pairs that occur
plan.fit(409, 56)                    the shape that a batch of 409 frames and 56 tokens is padded to
"""

import bisect
import functools
from collections import Counter

MAX_COUNT = 50
MAX_PAIRS = 16
AUTO_WASTE = 0.02
# NVIDIA's guide to CUDA graphs, RNN-T: largest lengths 1600 and 600, four buckets. Its audio lengths are taken as
# frames of 10 ms, three of which make one frame of the encoder.
_GUIDE = {"audio": [-(-frames // 3) for frames in (400, 800, 1200, 1600)], "text": [150, 300, 450, 600]}


def require_kind(kind: str) -> None:
    """ValueError where --buckets is neither auto nor guide nor a number from 1 to 50."""
    if kind not in ("auto", "guide") and not (kind.isascii() and kind.isdigit() and 1 <= int(kind) <= MAX_COUNT):
        raise ValueError(f"--buckets {kind}: takes auto, guide or a number from 1 to {MAX_COUNT}")


def largest(kind: str, network: str, max_length: int) -> int:
    """The longest length that the ladder of `network` ("audio" or "text") takes."""
    return _GUIDE[network][-1] if kind == "guide" else max_length


def ladder(kind: str, network: str, max_length: int) -> list[int]:
    """Ascending lengths of "guide", or of a number of buckets: the submission's, evenly spaced down from max_length.

    Source: rnnt/rnnt_graph.py of MLPerf v3.1: max - i * max // n. More buckets than lengths leave out equal ones.
    """
    if kind == "guide":
        return list(_GUIDE[network])
    count = int(kind)
    return sorted({max_length - index * max_length // count for index in range(count)})


def fit(lengths: list[int], length: int) -> int:
    """The smallest bucket that holds `length`. ValueError where none does."""
    place = bisect.bisect_left(lengths, length)
    if place == len(lengths):
        raise ValueError(f"a batch is {length} long and the largest bucket {lengths[-1]}: raise the largest length")
    return lengths[place]


def auto_pairs(maxima, max_frames: int, max_tokens: int, cost_of) -> list[tuple[int, int]]:
    """The fewest (frames, tokens) to pad to that cost at most AUTO_WASTE more; MAX_PAIRS at most.

    maxima: (frames, tokens) of batches; (max_frames, max_tokens), the most that a batch may have, is always a pair.
    cost_of(frames, tokens): what a batch of this shape costs, in any unit (rnnt.config.padded_cost); it takes arrays
    too. Candidates are quantiles of the maxima. Greedy: the pair that saves most, then another; to move them afterwards
    would save 0.1 % more. MAX_PAIRS pairs may cost more than AUTO_WASTE.
    """
    import numpy

    maxima = numpy.array(maxima)
    frames, tokens = (
        sorted({*numpy.quantile(maxima[:, column], _places(count), method="higher").tolist(), largest_one})
        for column, count, largest_one in ((0, 32, max_frames), (1, 16, max_tokens))
    )
    candidates = numpy.array([(a, t) for a in frames for t in tokens])
    needed = cost_of(maxima[:, 0], maxima[:, 1])
    holds = (maxima[None] <= candidates[:, None]).all(2)
    # cost[i, j]: of batch j where candidate i is what it is padded to.
    cost = numpy.where(holds, cost_of(candidates[:, 0], candidates[:, 1])[:, None], 2**30)
    chosen, executed = [len(candidates) - 1], cost[-1]
    while executed.sum() > (1 + AUTO_WASTE) * needed.sum() and len(chosen) < MAX_PAIRS:
        chosen.append(int(numpy.minimum(cost, executed).sum(1).argmin()))
        executed = numpy.minimum(executed, cost[chosen[-1]])
    return sorted({tuple(candidates[index].tolist()) for index in chosen})


def _places(count):
    return [(index + 1) / count for index in range(count)]


# ------------------------------------------------------------------------------------------------
# What a run pads to


class Plan:
    """The lengths that each network is padded to, ascending, and the pairs of both, cheapest first.

    A batch is padded to the smallest bucket of each network, chosen apart; with --buckets auto to the cheapest pair
    that holds it. One choice for all variants, so that they execute the same shapes: what is not in `pairs` has no
    graph of the full iteration.
    """

    def __init__(self, kind: str, audio: list[int], text: list[int], pairs, cost_of):
        self.audio, self.text, self.kind = audio, text, kind
        self.pairs = sorted(pairs, key=lambda pair: (cost_of(*pair), pair))
        self._choice = self.pairs if kind == "auto" else []
        self._known: dict[tuple[int, int], tuple[int, int]] = {}

    def fit(self, frames: int, tokens: int) -> tuple[int, int]:
        """The shape that a batch of these maxima is padded to. ValueError where no bucket holds it."""
        if (frames, tokens) not in self._known:
            pairs = (pair for pair in self._choice if frames <= pair[0] and tokens <= pair[1])
            self._known[frames, tokens] = next(pairs, None) or (fit(self.audio, frames), fit(self.text, tokens))
        return self._known[frames, tokens]

    def require_few_pairs(self, variant: str) -> list[tuple[int, int]]:
        """All shapes that a batch is padded to. ValueError where they are too many to make each one ready."""
        if len(self.pairs) > MAX_PAIRS:
            raise ValueError(
                f"--buckets {self.kind}: {len(self.pairs)} pairs of buckets occur, {variant} takes at most "
                f"{MAX_PAIRS}: take fewer, or auto"
            )
        return self.pairs

    def unseen(self, shape: tuple[int, int]) -> str:
        """What is wrong where a batch is padded to a pair that is not among `pairs`."""
        return (
            f"--buckets {self.kind}: a batch is padded to {shape[0]} frames and {shape[1]} tokens, a pair that was not "
            "seen before: take auto, or 4 and fewer"
        )


def make_plan(kind: str, maxima, max_frames: int, max_tokens: int, cost_of) -> Plan:
    """The plan for --buckets `kind` and batches whose (frames, tokens) are `maxima`, at most (max_frames, max_tokens).

    auto chooses pairs, ladders fit each network apart. Of ladders with few enough buckets all pairs are in it, whether
    they have been seen or not, else those of `maxima`.
    """
    if kind == "auto":
        pairs = auto_pairs(maxima, max_frames, max_tokens, cost_of)
        audio, text = (sorted(set(lengths)) for lengths in zip(*pairs, strict=True))
    else:
        audio, text = ladder(kind, "audio", max_frames), ladder(kind, "text", max_tokens)
        pairs = [(a, t) for a in audio for t in text]
        if len(pairs) > MAX_PAIRS:
            pairs = {(fit(audio, frames), fit(text, tokens)) for frames, tokens in maxima}
    return Plan(kind, audio, text, pairs, cost_of)


# ------------------------------------------------------------------------------------------------
# The report


class Tally:
    """What a run's steps were padded to; `report` says what that cost.

    skips_padding: LSTMs end with a batch's longest utterance, whatever it is padded to.
    """

    def __init__(self, skips_padding: bool = False):
        self.skips_padding = skips_padding
        self.reset()

    def reset(self):
        self.steps = []

    def add(self, shape, padded, frames, tokens) -> None:
        """A batch whose maxima are `shape`, executed as `padded`; frames, tokens: lists of its utterances' lengths."""
        self.steps.append((shape, padded, frames, tokens))

    def report(self, flops, time_steps) -> dict:
        """Steps per shape and bucket; padding as fractions; FLOP a step.

        flops(frames, tokens): of one utterance. time_steps(frames, tokens): sequential LSTM steps of a batch.
        padding: executed over what batches that end with their longest utterance execute, less 1, for frames, symbols
        (tokens and start), cells of the joint lattice and time steps of the LSTMs. useful: what the utterances' true
        lengths need, as a share of what is executed.
        """
        flops = functools.cache(flops)
        batch, executed, useful = (Counter() for _ in range(3))
        for shape, padded, frames, tokens in self.steps:
            for pair in zip(frames, tokens, strict=True):
                useful.update(_needs(*pair, flops))
            for sums, pair in ((batch, shape), (executed, padded)):
                sums.update({what: len(frames) * value for what, value in _needs(*pair, flops).items()})
                sums["time_steps"] += time_steps(*(shape if self.skips_padding else pair))
        padded = Counter(padded for _, padded, _, _ in self.steps)
        whats = ("frames", "symbols", "cells")
        return {
            "steps_per_shape": {f"{a}x{t}": count for (a, t), count in sorted(padded.items())},
            "steps_per_audio_bucket": _per_bucket(padded, 0),
            "steps_per_text_bucket": _per_bucket(padded, 1),
            "padding": {what: executed[what] / batch[what] - 1 for what in (*whats, "time_steps")},
            "useful": {what: useful[what] / executed[what] for what in whats},
            "useful_flops_per_step": useful["flops"] / len(self.steps),
            "executed_flops_per_step": executed["flops"] / len(self.steps),
        }


def _needs(frames, tokens, flops):
    cells = ((frames + 1) // 2) * (tokens + 1)
    return {"frames": frames, "symbols": tokens + 1, "cells": cells, "flops": flops(frames, tokens)}


def _per_bucket(padded, place):
    counts = Counter()
    for shape, count in padded.items():
        counts[shape[place]] += count
    return {str(length): count for length, count in sorted(counts.items())}
