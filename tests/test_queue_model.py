"""common/queue_model: steps whose period is known, and what holds for every step."""

import random

import numpy
import pytest

from common.queue_model import QUEUE_LAUNCHES, Step, predict


def step_of(segments, waits=(), gap_us=0.0):
    """A step whose segment i launches kernels of segments[i] us; waits: (segment, kernels launched before)."""
    segment = [index for index, kernels in enumerate(segments) for _ in kernels]
    duration = [float(us) for kernels in segments for us in kernels]
    return Step(
        numpy.array(segment, dtype=int),
        numpy.full(len(segment), float(gap_us)),
        numpy.array(duration),
        len(segments),
        list(waits),
    )


def plain(step, segment_us, queue=QUEUE_LAUNCHES, num_steps=400):
    """Launch by launch, without waits: the same rules in plain Python."""
    host, ends, last = 0.0, [], [0.0]
    counts = step.num_launches
    for _ in range(num_steps):
        late = 0.0
        for index in range(step.num_segments):
            if not counts[index]:
                late += segment_us[index]
            for place in numpy.flatnonzero(step.segment == index):
                host += late + segment_us[index] / counts[index]
                late = 0.0
                if len(ends) >= queue:
                    host = max(host, ends[len(ends) - queue])
                begin = max(host, (ends[-1] if ends else 0.0) + step.gap_us[place])
                ends.append(begin + step.duration_us[place])
        host += late
        last.append(ends[-1])
    return (last[-1] - last[num_steps // 2]) / (num_steps - num_steps // 2)


def test_a_gpu_that_is_slower_than_the_host_sets_the_period():
    found = predict([step_of([[10.0] * 100])], [0.4])
    assert (found.step_ms, found.host_bound_fraction) == (pytest.approx(1.0), 0.0)


def test_a_host_that_is_slower_than_the_gpu_sets_the_period():
    found = predict([step_of([[10.0] * 100])], [3.0])
    assert (found.step_ms, found.host_bound_fraction) == (pytest.approx(3.0), pytest.approx(2 / 3))


def test_gaps_of_the_gpu_lengthen_what_it_sets_and_nothing_else():
    assert predict([step_of([[10.0] * 100], gap_us=1.5)], [0.4]).step_ms == pytest.approx(1.15)
    assert predict([step_of([[10.0] * 100], gap_us=1.5)], [3.0]).step_ms == pytest.approx(3.0)


def test_a_graph_is_one_launch():
    """However slow its one launch, as long as it is shorter than the kernels."""
    assert predict([step_of([[40_000.0]])], [1.5]).step_ms == pytest.approx(40.0)
    assert predict([step_of([[40_000.0]])], [50.0]).step_ms == pytest.approx(50.0)


def test_bursts_beyond_the_queue_starve_the_gpu():
    """4,096 long kernels that the host issues at once and 4,096 short ones that it issues slowly: the host may be only
    1,024 launches ahead, so the GPU has run the long ones when 3,072 short ones are still to be issued."""
    burst = step_of([[20.0] * 4096, [2.0] * 4096])
    host_ms = [4096 * 1e-3, 4096 * 15e-3]
    issue_ms, busy_ms = sum(host_ms), burst.gpu_us / 1e3
    assert issue_ms / busy_ms < 0.75
    found = predict([burst], host_ms)
    assert found.step_ms == pytest.approx(4096 * 20e-3 + 3072 * 15e-3, rel=1e-3)
    assert found.step_ms > 1.3 * max(issue_ms, busy_ms)
    assert found.step_ms == pytest.approx(plain(burst, [1e3 * ms for ms in host_ms], num_steps=20) / 1e3, rel=1e-6)
    assert found.host_bound_fraction == pytest.approx(1 - busy_ms / found.step_ms)


def test_bursts_within_the_queue_cost_nothing():
    burst = step_of([[20.0] * 400, [2.0] * 400])
    found = predict([burst], [0.4, 6.0])
    assert found.step_ms == pytest.approx(burst.gpu_us / 1e3) and found.host_bound_fraction == 0.0


def test_a_shorter_queue_lets_fewer_launches_wait():
    burst = step_of([[20.0] * 400, [2.0] * 400])
    times = [predict([burst], [0.4, 6.0], queue=queue).step_ms for queue in (50, 200, 1024)]
    assert times[0] > times[1] + 1 > times[2] + 1
    assert times[0] == pytest.approx(plain(burst, [400.0, 6000.0], 50) / 1e3, rel=1e-6)


def test_the_lead_of_many_steps_counts():
    """A host that is 1 % faster than the GPU gets ahead step by step until bursts do not matter."""
    burst = step_of([[20.0] * 100, [2.0] * 100])
    busy_ms = burst.gpu_us / 1e3
    assert predict([burst], [0.01, 0.99 * busy_ms - 0.01]).step_ms == pytest.approx(busy_ms)
    assert predict([burst], [0.01, 1.01 * busy_ms - 0.01]).step_ms == pytest.approx(1.01 * busy_ms)


def test_host_work_without_launches_counts():
    quiet = step_of([[10.0] * 10, [], [10.0] * 10, []])
    assert predict([quiet], [0.1, 2.0, 0.1, 1.0]).step_ms == pytest.approx(3.2)


def test_steps_of_several_kinds_take_turns():
    short, long = step_of([[10.0] * 100]), step_of([[10.0] * 300])
    # The pace is that of a launch: the host's 2 ms are the mean over both.
    assert predict([short, long], [2.0]).step_ms == pytest.approx(2.0)
    assert predict([short, long], [4.0]).step_ms == pytest.approx(4.0)
    assert predict([short, long], [0.5]).step_ms == pytest.approx(2.0)
    # Host and GPU take turns where nothing may wait: 10 us a launch for both, whichever step it is of.
    assert predict([short, long], [2.0], queue=1).step_ms == pytest.approx(2.0, rel=1e-3)


def test_a_step_that_reads_from_the_device_waits_for_it():
    """Half of the kernels, a wait, the other half, a wait at the end: neither host nor GPU is ever ahead."""
    waits = [(0, 50), (1, 100)]
    step = step_of([[10.0] * 50, [10.0] * 50], waits)
    # A host that needs no time of its own: measured is what it waited.
    assert predict([step], [0.5, 0.5]).step_ms == pytest.approx(1.0, rel=1e-3)
    # A host of 4 us a launch: the GPU runs beside it, and the first kernel of each half waits for its launch.
    assert predict([step], [0.504, 0.504]).step_ms == pytest.approx(1.008, rel=1e-3)
    # Slower than the GPU: 20 us a launch, and the last kernel behind the last launch.
    assert predict([step], [1.01, 1.01]).step_ms == pytest.approx(2.02, rel=1e-3)
    # Without the wait in the middle the host has its time for the second half while the first runs.
    ahead = step_of([[10.0] * 50, [10.0] * 50])
    assert predict([ahead], [0.504, 0.504]).step_ms == pytest.approx(1.008)
    assert predict([ahead], [0.2, 0.2]).step_ms == pytest.approx(1.0)


def test_a_wait_takes_away_the_lead():
    """A burst that the queue would hold costs its whole wait where the host reads from the device in each step."""
    segments = [[20.0] * 400, [2.0] * 400]
    without = predict([step_of(segments)], [0.4, 6.0]).step_ms
    with_wait = predict([step_of(segments, [(1, 800)])], [0.4, 6.002]).step_ms
    assert without == pytest.approx(8.8)
    # The host issues the long ones in 0.4 ms and the short ones in 6: the GPU ends with the long ones at 8.02, then
    # runs 400 short ones.
    assert with_wait == pytest.approx(8.801, abs=0.01)
    slow = predict([step_of(segments, [(0, 400)])], [8.02, 6.0]).step_ms
    assert slow == pytest.approx(8.001 + 0.02 + 6.0, abs=0.1)


@pytest.mark.parametrize("seed", range(12))
def test_any_step_takes_what_plain_python_says_and_no_less_than_host_or_gpu(seed):
    generator = random.Random(seed)
    segments = [
        [generator.expovariate(1 / generator.choice([2.0, 20.0])) for _ in range(generator.randrange(1, 60))]
        for _ in range(generator.randrange(1, 6))
    ]
    step = step_of(segments, gap_us=generator.choice([0.0, 1.0]))
    segment_us = [generator.uniform(1, 25) * len(kernels) for kernels in segments]
    queue = generator.choice([7, 40, 1024])
    found = predict([step], [us / 1e3 for us in segment_us], queue)
    assert found.step_ms == pytest.approx(plain(step, segment_us, queue) / 1e3, rel=1e-3)
    assert found.step_ms * 1e3 >= max(sum(segment_us), step.gpu_us) * (1 - 1e-9)
    assert found.step_ms * 1e3 <= (sum(segment_us) + step.gpu_us) * (1 + 1e-9)
    # A longer queue never costs time.
    assert predict([step], [us / 1e3 for us in segment_us], 10 * queue).step_ms <= found.step_ms * (1 + 1e-9)


def test_passes_that_saw_other_segments_predict_nothing():
    with pytest.raises(ValueError, match="the issue pass saw 2 segments a step, the profile 1"):
        predict([step_of([[1.0]])], [1.0, 2.0])
    with pytest.raises(ValueError, match="nothing was launched"):
        predict([step_of([[]])], [1.0])
