"""graph_worth.harness.intervals: ratios of a run, their intervals and words, and the stopping rule."""

import itertools
import math

import pytest

from graph_worth.harness import intervals as numbers

CYCLES = [((100.0, 104.0), 81.0), ((99.0, 107.5), 80.0), ((103.0, 98.0), 79.3), ((101.7, 102.1), 80.9)]


def ratio(low, high, cycles=8):
    """A Ratio with these ends."""
    middle = math.sqrt(low * high)
    return numbers.Ratio(middle, low, high, high / middle - 1, cycles, 10 * middle, 10.0)


def test_base_ms_over_variant_ms_is_the_ratio_exactly():
    for count in range(1, 5):
        found = numbers.ratio_of(CYCLES[:count])
        assert found.base_ms / found.variant_ms == found.ratio
        assert found.cycles == count


def test_ms_are_geometric_means_in_which_each_cycle_counts_the_same():
    found = numbers.ratio_of([((2.0, 8.0), 1.0), ((9.0,), 4.0)])
    assert (found.base_ms, found.variant_ms) == pytest.approx((6.0, 2.0))


def test_interval_is_students_t_on_the_log_ratios_of_cycles():
    # Log ratios 0, 0.01, 0.02, 0.03: standard error 0.0129099 / 2; t of 3 degrees of freedom, from a printed table.
    found = numbers.ratio_of([((100.0, 100.0), 100 * math.exp(-0.01 * place)) for place in range(4)])
    half = 3.182446 * 0.01290994 / 2
    assert found.half_width == pytest.approx(math.expm1(half), rel=1e-6)
    assert (found.low, found.high) == pytest.approx((math.exp(0.015 - half), math.exp(0.015 + half)), rel=1e-6)


def test_exchanging_base_and_variant_inverts_ratio_and_interval():
    one = numbers.ratio_of([((base[0],), variant) for base, variant in CYCLES])
    other = numbers.ratio_of([((variant,), base[0]) for base, variant in CYCLES])
    assert (1 / other.ratio, 1 / other.high, 1 / other.low) == pytest.approx((one.ratio, one.low, one.high))


def test_one_cycle_has_an_interval_without_bounds():
    found = numbers.ratio_of(CYCLES[:1])
    assert (found.low, found.high, found.half_width) == (0, math.inf, math.inf)
    assert numbers.word(found) == "unclear"


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.996, 1.004, "same"),
        (1.001, 1.004, "same"),  # before faster
        (0.996, 0.999, "same"),  # before slower
        (1.001, 1.006, "faster"),
        (0.994, 0.999, "slower"),
        (0.996, 1.006, "unclear"),
        (0.994, 1.004, "unclear"),
    ],
)
def test_words(low, high, expected):
    assert numbers.word(ratio(low, high)) == expected
    exchanged = {"faster": "slower", "slower": "faster"}.get(expected, expected)
    assert numbers.word(ratio(1 / high, 1 / low)) == exchanged


def test_auto_goes_on_until_every_ratio_is_narrow_and_has_eight_cycles():
    narrow, wide = ratio(1.999, 2.001), ratio(1.97, 2.03)
    assert numbers.enough([narrow, narrow])
    assert not numbers.enough([narrow, wide])
    assert not numbers.enough([narrow, ratio(1.999, 2.001, cycles=7)])
    assert not numbers.enough([])


def test_auto_never_looks_at_the_sign():
    for width, middle in itertools.product((0.004, 0.006), (0.5, 0.99, 1.0, 1.01, 2.0)):
        assert numbers.enough([ratio(middle / (1 + width), middle * (1 + width))]) == (width < 0.005)
