"""rnnt/data/synthetic: lengths, features and the source's promises."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from rnnt.config import PRESETS
from rnnt.data.synthetic import MEL_FEATURES, PERIOD, Synthetic, draw_lengths, make_tape

TINY = PRESETS["tiny"]


def source(config=TINY, rank=0, world_size=1, seed=1):
    return Synthetic(config, rank, world_size, torch.bfloat16, seed, pinned=False)


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_lengths_are_spread_as_the_corpus_is():
    frames, tokens = draw_lengths(np.random.default_rng(0), 200_000, 641, 125)
    seconds = 0.03 * frames
    assert seconds.mean() == pytest.approx(12.3, abs=0.15)
    assert frames.max() <= 641 and frames.min() >= 1.5 * 0.85 / 0.03 - 1 and frames.max() > 600
    assert tokens.max() <= 125 and tokens.min() >= 1
    assert tokens.sum() / seconds.sum() == pytest.approx(4.6, abs=0.1)
    assert np.corrcoef(frames, tokens)[0, 1] > 0.8
    # No utterance is longer than 16.7 s before it is slowed down.
    assert (seconds > 16.7 * 1.15 + 0.03).sum() == 0 and (seconds > 16.7).mean() > 0.02


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(641, 125), (16000, 30), (20, 2300)])
def test_utterances_may_have_any_length_that_the_tape_has(shape):
    config = replace(
        TINY, data="synthetic", frames=shape[0], tokens=shape[1], max_frames=shape[0], max_tokens=2400, batch=8
    )
    batches = source(config)
    for _ in range(3):
        features, _, tokens, _ = batches.next()
        assert (len(features), tokens.shape[1]) == shape
    assert batches.batch_shapes() == [shape] and batches.period == 1


@pytest.mark.parametrize("changes", [{"max_frames": 17000}, {"max_tokens": 2400}])
def test_longer_ones_than_the_tape_are_refused_by_name(changes):
    with pytest.raises(ValueError, match="--max-frames, --max-tokens .* takes less than 16384 frames and 2341 tokens"):
        source(replace(TINY, data="lengths", **changes))


def test_batches_are_zero_beyond_their_lengths():
    batches = source()
    for _ in range(10):
        features, frames, tokens, counts = batches.next()
        assert features.dtype == torch.bfloat16 and tokens.dtype == torch.int64
        assert frames.dtype == counts.dtype == torch.int32
        assert features.shape == (frames.max(), TINY.batch, TINY.features)
        assert tokens.shape == (TINY.batch, counts.max())
        for row, (length, count) in enumerate(zip(frames, counts, strict=True)):
            assert (features[length:, row] == 0).all() and (features[:length, row, :MEL_FEATURES] != 0).any(1).all()
            assert (tokens[row, count:] == 0).all()
        assert (features[..., MEL_FEATURES:] == 0).all()
        assert tokens.min() >= 0 and tokens.max() < TINY.vocab - 1


@pytest.mark.parametrize("data", ["lengths", "synthetic"])
def test_reset_gives_the_same_batches_again(data):
    batches = source(replace(TINY, data=data))
    first = [batches.next() for _ in range(5)]
    batches.reset()
    assert all(equal(a, batches.next()) for a in first)
    assert not equal(first[0], first[1])


def test_ranks_and_seeds_draw_their_own():
    for data in ("lengths", "synthetic"):
        config = replace(TINY, data=data)
        first = source(config).next()
        assert equal(first, source(config).next())
        assert not torch.equal(first.features, source(config, seed=2).next().features)
        assert not torch.equal(first.features, source(config, rank=1, world_size=2).next().features)


def test_lengths_come_again_after_a_period_which_the_benchmark_meets_twice():
    assert PRESETS["bench_lengths"].data == "lengths" and PRESETS["bench_lengths"].min_steps >= 2 * PERIOD
    batches = source()
    shapes = [tuple(batches.next().feature_lengths.tolist()) for _ in range(2 * PERIOD)]
    assert shapes[:PERIOD] == shapes[PERIOD:] and len(set(shapes[:PERIOD])) > 3


def test_buckets_are_chosen_by_many_more_batches_than_come():
    batches = source(PRESETS["bench_lengths"])
    maxima = batches.batch_shapes()
    assert len(maxima) > 10 * PERIOD
    for frames, tokens in maxima[:3]:
        batch = batches.next()
        assert (len(batch.features), batch.tokens.shape[1]) == (frames, tokens)


def test_features_look_like_normalised_log_mel_spectra():
    tape, spoken = make_tape(256, 1024, 0)
    features = tape[:, :MEL_FEATURES]
    assert np.abs(features.mean(0)).max() < 1e-3 and np.abs(features.std(0) - 1).max() < 1e-3
    assert (tape[:, MEL_FEATURES:] == 0).all()
    # Neighbouring frames of 30 ms, and neighbouring bands of one frame of 10 ms.
    assert (features[1:] * features[:-1]).mean() > 0.7
    assert (features[:, 1:80] * features[:, :79]).mean() > 0.9
    # Far ones are as good as independent.
    assert abs((features[500:] * features[:-500]).mean()) < 0.05
    assert spoken.max() < 1023 and len(set(spoken[:500])) > 100
