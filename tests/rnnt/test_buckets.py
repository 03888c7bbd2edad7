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


def drawn(count, seed=0, most=(641, 125)):
    source = random.Random(seed)
    frames = [max(source.randint(300, most[0]) for _ in range(8)) for _ in range(count)]
    return [(length, min(most[1], max(20, round(0.14 * length + source.gauss(0, 6))))) for length in frames]


def test_ladders_are_the_published_ones():
    assert buckets.ladder("4", "audio", 641) == [161, 321, 481, 641]
    assert buckets.ladder("4", "text", 125) == [32, 63, 94, 125]
    # 400, 800, 1200 and 1600 frames of 10 ms, three of which are one of the encoder.
    assert buckets.ladder("guide", "audio", 641) == [134, 267, 400, 534]
    assert buckets.ladder("guide", "text", 125) == [150, 300, 450, 600]
    assert len(buckets.ladder("50", "audio", 641)) == len(buckets.ladder("50", "text", 125)) == 50
    assert buckets.ladder("1", "text", 125) == [125] and buckets.ladder("50", "text", 8) == list(range(1, 9))


def test_the_smallest_bucket_that_holds_a_length():
    ladder = [161, 321, 481, 641]
    for length in range(1, 642):
        assert buckets.fit(ladder, length) == min(bucket for bucket in ladder if bucket >= length)
    with pytest.raises(ValueError, match="642 long and the largest bucket 641"):
        buckets.fit(ladder, 642)


def test_networks_are_padded_apart():
    plan = buckets.make_plan("50", drawn(500), 641, 125, steps)
    for frames, tokens in [*drawn(50, seed=1), (1, 1), (641, 1), (1, 125), (641, 125)]:
        expected = buckets.fit(plan.audio, frames), buckets.fit(plan.text, tokens)
        assert plan.fit(frames, tokens) == expected
    assert len(plan.pairs) > buckets.MAX_PAIRS


@pytest.mark.parametrize("kind", ["1", "3", "4", "guide"])
def test_few_buckets_make_all_their_pairs(kind):
    plan = buckets.make_plan(kind, [(100, 20)], 641, 125, steps)
    assert set(plan.pairs) == set(itertools.product(plan.audio, plan.text))
    assert plan.fit(100, 20) == (plan.audio[0], plan.text[0])


def test_pairs_of_many_buckets_are_those_that_occur():
    plan = buckets.make_plan("50", [(409, 56)], 641, 125, steps)
    assert plan.pairs == [(411, 58)] and plan.fit(409, 56) == (411, 58)
    # One that was not seen before takes its own buckets, not a larger pair that was.
    assert plan.fit(300, 50) == (308, 50) and plan.fit(412, 50) == (424, 50)


def test_what_was_seen_before_changes_no_ladders_choice():
    seen = [(100, 10), (600, 120), (620, 124)]
    for kind in ("8", "5", "50", "4"):
        plan = buckets.make_plan(kind, seen, 641, 125, steps)
        for frames, tokens in [(100, 60), (350, 5), *drawn(50)]:
            assert plan.fit(frames, tokens) == (buckets.fit(plan.audio, frames), buckets.fit(plan.text, tokens))
    assert buckets.make_plan("8", seen, 641, 125, steps).fit(100, 60) == (161, 63)


def test_auto_of_equal_batches_pads_nothing():
    plan = buckets.make_plan("auto", [(409, 56)] * 3, 409, 56, steps)
    assert (plan.audio, plan.text, plan.pairs) == ([409], [56], [(409, 56)])


def waste(plan, maxima):
    return sum(steps(*plan.fit(*pair)) for pair in maxima) / sum(steps(*pair) for pair in maxima) - 1


def test_auto_keeps_padding_below_two_percent_with_few_pairs():
    # Two clusters and a little spread: four pairs are enough, and three are not.
    source = random.Random(3)
    centers = [(200, 30), (300, 40), (400, 55), (600, 100)]
    maxima = [
        (a + source.randint(-3, 0), t + source.randint(-1, 0)) for a, t in (source.choice(centers) for _ in range(999))
    ]
    plan = buckets.make_plan("auto", maxima, 600, 100, steps)
    assert waste(plan, maxima) <= buckets.AUTO_WASTE
    assert len(plan.pairs) == 4


def test_auto_never_takes_more_pairs_than_a_full_graph_has():
    maxima = drawn(2000)
    plan = buckets.make_plan("auto", maxima, 641, 125, steps)
    assert len(plan.pairs) <= buckets.MAX_PAIRS and (641, 125) in plan.pairs
    # On other batches than it was chosen by, and against the evenly spaced ladder of as many pairs.
    fresh = drawn(2000, seed=1)
    even = buckets.make_plan("4", maxima, 641, 125, steps)
    assert waste(plan, fresh) < 0.03 < waste(even, fresh)


def test_auto_weighs_the_lattice_against_time_steps():
    maxima = drawn(2000)

    def waste_of(what, cost_of):
        plan = buckets.make_plan("auto", maxima, 641, 125, cost_of)
        return sum(what(*plan.fit(*pair)) for pair in maxima) / sum(what(*pair) for pair in maxima) - 1

    config = PRESETS["bench_lengths"]
    both = functools.partial(padded_cost, config)
    lattice = functools.partial(padded_cost, replace(config, lstm="wavefront"))
    assert waste_of(both, both) < 0.95 * waste_of(both, steps)
    assert waste_of(lattice, lattice) < 0.8 * waste_of(lattice, both)
    # In a batch of one utterance there is next to no lattice.
    assert padded_cost(replace(config, batch=1), 409, 56) == pytest.approx(time_steps(config, 409, 56), rel=0.01)


def test_a_batch_is_padded_to_the_cheapest_pair_that_holds_it():
    plan = buckets.make_plan("auto", drawn(2000), 641, 125, steps)
    for frames, tokens in drawn(300, seed=2):
        holding = [pair for pair in plan.pairs if pair[0] >= frames and pair[1] >= tokens]
        assert steps(*plan.fit(frames, tokens)) == min(steps(*pair) for pair in holding)


@pytest.mark.parametrize("kind", ["0", "51", "-1", "4.0", "", "Auto", "\u0664"])
def test_other_kinds_are_refused(kind):
    with pytest.raises(ValueError, match="--buckets .*auto, guide or a number from 1 to 50"):
        buckets.require_kind(kind)


def time_steps_of(frames, tokens):
    return 2 * frames + tokens


def two_batches(**options):
    """The tally of a batch of 10 frames and 4 tokens and one of 11 and 3, both padded to 12 and 6."""
    tally = buckets.Tally(lambda frames, tokens: 100 * frames + tokens, time_steps_of, **options)
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
    # LSTMs that end with the longest utterance skip the padding, and nothing else does.
    assert two_batches(skips_padding=True).padding() == padding | {"time steps": 0}


def test_flops_are_those_of_the_utterances_and_those_executed():
    useful, executed = two_batches().flops_per_step()
    assert useful == pytest.approx((1002 + 504 + 1103 + 1103) / 2)
    assert executed == pytest.approx(2 * 1206)


def test_report_is_of_the_steps_since_the_reset():
    tally = two_batches()
    padding, compute = tally.report()
    assert padding == (
        "padding    frames 14.3 %, symbols 55.6 %, cells 71.4 %, time steps 22.4 % over the longest of each batch, "
        "1 shapes"
    )
    assert compute == "compute    1.86e-09 TFLOP/step useful, 2.41e-09 executed"
    tally.reset()
    tally.add((1, 1), (2, 2), [1], [1])
    tally.add((1, 1), (1, 1), [1], [1])
    assert tally.report()[0].endswith(" 2 shapes")
    assert tally.flops_per_step() == (101, (202 + 101) / 2)
