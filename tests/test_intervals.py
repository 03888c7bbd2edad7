"""Student's t, verdicts, and whole sessions simulated: how often a verdict is false, how often an effect is found."""

import math

import numpy
import pytest

from benchmarks import intervals

NUM_SESSIONS = 2000


def test_student_t_agrees_with_its_definition():
    # The quantile is where the integral of the density from 0 reaches 0.475.
    for degrees in (1, 2, 5, 12, 13, 14, 20, 60, 1000):
        x = numpy.linspace(0, intervals.student_t(degrees), 200_001)
        log_scale = math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2) - 0.5 * math.log(degrees * math.pi)
        density = numpy.exp(log_scale - (degrees + 1) / 2 * numpy.log1p(x**2 / degrees))
        area = numpy.trapezoid(density, x)
        assert abs(area - 0.475) / density[-1] < 1e-3, degrees


def test_student_t_needs_a_degree_of_freedom():
    with pytest.raises(ValueError, match="at least 1"):
        intervals.student_t(0)


def test_paired_is_the_textbook_interval():
    result = intervals.paired([0.1, 0.2, 0.3])
    assert result.mean == pytest.approx(0.2)
    assert result.half_width == pytest.approx(4.30265 * 0.1 / math.sqrt(3), rel=1e-5)
    assert result.ratio == pytest.approx(math.exp(0.2))
    assert result.low == pytest.approx(math.exp(0.2 - result.half_width))
    assert result.high == pytest.approx(math.exp(0.2 + result.half_width))
    with pytest.raises(ValueError, match="no round"):
        intervals.paired([])


@pytest.mark.parametrize(
    ("mean", "half_width", "verdict"),
    [
        (0.05, 0.01, "faster"),
        (-0.05, 0.01, "slower"),
        (0.001, 0.002, "same"),
        (0.003, 0.0029, "faster"),
        (0.004, 0.005, "unclear"),
        (0.0, 0.0, "same"),
        (0.2, None, "one round"),
    ],
)
def test_verdicts(mean, half_width, verdict):
    assert intervals.Paired(mean, half_width, 5).verdict == verdict


def test_a_bound_needs_a_half_width_of_half_the_gain():
    assert intervals.bears(0.02, 0.01)
    assert intervals.bears(-0.02, 0.01)
    assert not intervals.bears(0.02, 0.011)
    assert not intervals.bears(0.02, None)


def test_statistic_is_the_mean_of_each_batch_kinds_median():
    assert intervals.statistic([1, 2, 9], [0, 0, 0]) == 2
    assert intervals.statistic([1, 10, 3, 30, 2, 20], [0, 1, 0, 1, 0, 1]) == 11
    assert intervals.statistic(list(range(11)), [0] * 11, 0.1) == pytest.approx(1.0)
    assert intervals.tail([10, 100] * 10, [0, 1] * 10) == 1.0
    assert intervals.tail([10] * 90 + [15] * 10, [0] * 100) == pytest.approx(1.5)


def test_auto_stops_on_width_and_never_on_sign():
    narrow, wide = intervals.Paired(0.0, 0.009, 8), intervals.Paired(0.5, 0.011, 8)
    assert intervals.next_num_rounds([narrow], 8) == 8
    assert intervals.next_num_rounds([narrow, wide], 8) == 10
    assert intervals.next_num_rounds([narrow], 2) == 4
    assert intervals.next_num_rounds([intervals.Paired(0.5, None, 1)], 14) == 15
    assert intervals.next_num_rounds([wide], 15) == 15


def simulate(seed, *, walk, drift=0.0, noise, effect=0.0, num_rounds=5, num_steps=50):
    """Log-ratios [NUM_SESSIONS, num_rounds] of ABBA sessions of two variants that differ by `effect` (logarithm).

    walk: random walk of the clock per run; drift: rise over the session; noise: of a step. All relative.
    """
    random = numpy.random.default_rng(seed)
    num_runs = 2 * num_rounds
    times = numpy.cumsum(random.normal(0, walk, (NUM_SESSIONS, num_runs)), axis=1) + numpy.linspace(0, drift, num_runs)
    times += numpy.median(random.normal(0, noise, (NUM_SESSIONS, num_runs, num_steps)), axis=2)
    first, second = times[:, 0::2], times[:, 1::2]
    odd = numpy.arange(1, num_rounds + 1) % 2 == 1
    return numpy.where(odd, first - second, second - first) + effect


def share(sessions, verdicts):
    return numpy.mean([intervals.paired(ratios).verdict in verdicts for ratios in sessions])


@pytest.mark.parametrize("weather", [{"walk": 0.005}, {"walk": 0.0, "drift": 0.01}, {"walk": 0.005, "drift": 0.01}])
def test_two_identical_variants_under_drift_are_rarely_told_apart(weather):
    assert share(simulate(1, **weather, noise=0.02), ("faster", "slower")) <= 0.06


def test_without_abba_the_same_drift_fools_the_interval():
    # The same monotone drift with eager always first: what the order of rounds is for.
    sessions = simulate(1, walk=0.0, drift=0.01, noise=0.002)
    sessions[:, 1::2] *= -1
    assert share(sessions, ("faster", "slower")) > 0.5


def test_a_true_effect_of_one_percent_is_found():
    sessions = simulate(2, walk=0.001, noise=0.02, effect=0.01)
    assert share(sessions, ("faster",)) >= 0.90
    assert share(sessions, ("slower",)) == 0.0


def auto(ratios, minimum=None):
    """A session under ROUNDS=auto over prepared rounds; `minimum` in place of AUTO_MIN_ROUNDS."""
    num_rounds = 2
    while True:
        result = intervals.paired(ratios[:num_rounds])
        wanted = intervals.next_num_rounds([result], num_rounds)
        if wanted == num_rounds or (minimum and num_rounds >= minimum and result.half_width <= 0.01):
            return result
        num_rounds = wanted


@pytest.mark.parametrize(("walk", "noise"), [(0.001, 0.02), (0.003, 0.05), (0.01, 0.02)])
def test_stopping_on_width_keeps_false_verdicts_rare(walk, noise):
    # Over walks of 0.1 to 2 % and step noises of 0.5 to 5 %, 20,000 sessions each: 4.9 to 6.2 %. With a minimum
    # of 6 rounds 4.9 to 7.0 %, of 4 rounds 5.0 to 8.3 %, of 2 rounds (2,000 sessions each) 5.8 to 11 %.
    sessions = simulate(3, walk=walk, drift=0.01, noise=noise, num_rounds=intervals.AUTO_MAX_ROUNDS)
    false = [auto(ratios).verdict in ("faster", "slower") for ratios in sessions]
    assert numpy.mean(false) <= 0.06


def test_stopping_early_on_width_would_not():
    sessions = simulate(3, walk=0.01, noise=0.02, num_rounds=intervals.AUTO_MAX_ROUNDS)
    false = [auto(ratios, minimum=2).verdict in ("faster", "slower") for ratios in sessions]
    assert numpy.mean(false) > 0.07
