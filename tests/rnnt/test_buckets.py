"""rnnt/data/buckets: ladders, the automatic choice, what a batch is padded to, and the report of it."""

import functools
import itertools
import random
from dataclasses import replace

import pytest

from rnnt.config import PRESETS, padded_cost, time_steps
from rnnt.data import buckets


def steps(frames, tokens):
    return 2 * frames + 3 * ((frames + 1) // 2) + 2 * (tokens + 1)


def drawn(count, seed=0):
    source = random.Random(seed)
    frames = [max(source.randint(300, 641) for _ in range(8)) for _ in range(count)]
    return [(length, min(125, max(20, round(0.14 * length + source.gauss(0, 6))))) for length in frames]


def test_ladders_are_the_submissions():
    assert buckets.ladder(4, 641) == [161, 321, 481, 641] and buckets.ladder(4, 125) == [32, 63, 94, 125]
    assert len(buckets.ladder(50, 641)) == len(buckets.ladder(50, 125)) == 50
    assert buckets.ladder(1, 125) == [125] and buckets.ladder(50, 8) == list(range(1, 9))


def test_the_smallest_bucket_that_holds_a_length():
    lengths = [161, 321, 481, 641]
    for length in range(1, 642):
        assert buckets.fit(lengths, length) == min(bucket for bucket in lengths if bucket >= length)
    with pytest.raises(ValueError, match="642 long and the largest bucket 641"):
        buckets.fit(lengths, 642)


@pytest.mark.parametrize("kind", ["1", "4"])
def test_few_buckets_make_all_their_pairs(kind):
    plan = buckets.make_plan(kind, [(100, 20)], 641, 125, steps)
    assert set(plan.pairs) == set(itertools.product(plan.audio, plan.text))
    assert plan.fit(100, 20) == (plan.audio[0], plan.text[0])


def test_pairs_of_many_buckets_are_those_that_occur():
    plan = buckets.make_plan("50", [(409, 56)], 641, 125, steps)
    assert plan.pairs == [(411, 58)] and plan.fit(409, 56) == (411, 58)
    # One that was not seen before takes its own buckets, not a larger pair that was.
    for frames, tokens in [*drawn(50, seed=1), (1, 1), (641, 1), (1, 125), (641, 125)]:
        assert plan.fit(frames, tokens) == (buckets.fit(plan.audio, frames), buckets.fit(plan.text, tokens))
    assert len(buckets.make_plan("50", drawn(500), 641, 125, steps).pairs) > buckets.MAX_PAIRS


def waste(plan, maxima, cost=steps):
    return sum(cost(*plan.fit(*pair)) for pair in maxima) / sum(cost(*pair) for pair in maxima) - 1


def test_auto_keeps_padding_below_two_percent_with_few_pairs():
    equal = buckets.make_plan("auto", [(409, 56)] * 3, 409, 56, steps)
    assert (equal.audio, equal.text, equal.pairs) == ([409], [56], [(409, 56)])
    # Four clusters and a little spread: four pairs are enough, and three are not.
    source = random.Random(3)
    centers = [(200, 30), (300, 40), (400, 55), (600, 100)]
    maxima = [
        (a + source.randint(-3, 0), t + source.randint(-1, 0)) for a, t in (source.choice(centers) for _ in range(999))
    ]
    plan = buckets.make_plan("auto", maxima, 600, 100, steps)
    assert waste(plan, maxima) <= buckets.AUTO_WASTE
    assert len(plan.pairs) == 4


def test_auto_takes_few_pairs_and_the_cheapest_that_holds_a_batch():
    maxima, fresh = drawn(2000), drawn(2000, seed=1)
    plan = buckets.make_plan("auto", maxima, 641, 125, steps)
    assert len(plan.pairs) <= buckets.MAX_PAIRS and (641, 125) in plan.pairs
    # On other batches than it was chosen by, and against the evenly spaced ladder of as many pairs.
    assert waste(plan, fresh) < 0.03 < waste(buckets.make_plan("4", maxima, 641, 125, steps), fresh)
    for frames, tokens in fresh[:300]:
        holding = [pair for pair in plan.pairs if pair[0] >= frames and pair[1] >= tokens]
        assert steps(*plan.fit(frames, tokens)) == min(steps(*pair) for pair in holding)


def test_auto_weighs_the_lattice_against_time_steps():
    maxima, config = drawn(2000), PRESETS["bench_lengths"]
    both = functools.partial(padded_cost, config)
    by_steps, by_both = (buckets.make_plan("auto", maxima, 641, 125, cost) for cost in (steps, both))
    assert waste(by_both, maxima, both) < 0.95 * waste(by_steps, maxima, both)
    # In a batch of one utterance there is next to no lattice.
    assert padded_cost(replace(config, batch=1), 409, 56) == pytest.approx(time_steps(config, 409, 56), rel=0.01)


@pytest.mark.parametrize("kind", ["0", "51", "4.0", "", "\u0664"])
def test_other_kinds_are_refused(kind):
    with pytest.raises(ValueError, match="--buckets .*auto or a number from 1 to 50"):
        buckets.require_kind(kind)


def two_batches():
    """The tally of a batch of 10 frames and 4 tokens and one of 11 and 3, both padded to 12 and 6."""
    tally = buckets.Tally(lambda frames, tokens: 100 * frames + tokens, lambda f, t: 2 * f + t)
    tally.add((10, 4), (12, 6), [10, 5], [2, 4])
    tally.add((11, 3), (12, 6), [11, 11], [3, 3])
    return tally


def test_padding_is_what_is_executed_over_the_longest_of_each_batch():
    padding = two_batches().padding()
    assert padding["frames"] == pytest.approx(24 / 21 - 1)
    assert padding["symbols"] == pytest.approx(14 / 9 - 1)
    assert padding["cells"] == pytest.approx(2 * 6 * 7 / (5 * 5 + 6 * 4) - 1)
    # Of a batch, however many utterances it has.
    assert padding["time steps"] == pytest.approx(2 * (2 * 12 + 6) / (24 + 25) - 1)


def test_report_and_flops_are_of_the_steps_since_the_reset():
    tally = two_batches()
    assert tally.flops_per_step() == (pytest.approx((1002 + 504 + 1103 + 1103) / 2), pytest.approx(2 * 1206))
    assert tally.report() == [
        "padding    frames 14.3 %, symbols 55.6 %, cells 71.4 %, time steps 22.4 % over the longest of each batch, "
        "1 shapes",
        "compute    1.86e-09 TFLOP/step useful, 2.41e-09 executed",
    ]
    tally.reset()
    tally.add((1, 1), (2, 2), [1], [1])
    tally.add((1, 1), (1, 1), [1], [1])
    assert tally.report()[0].endswith(" 2 shapes")
    assert tally.flops_per_step() == (101, (202 + 101) / 2)
