"""A queue between host and GPU: how long a step takes in a running loop, from what the passes measured apart.

The host issues the launches of a step one after another, at the pace that the issue pass measured in each segment
between marks (the segment's host time over its launches). The GPU runs them in the order of issue: each begins when it
is issued and the one before it has ended, and not earlier than the GPU's own gap after it. The host is at most
QUEUE_LAUNCHES ahead, and waits where the step itself reads from the device. Steps follow each other until the period is
steady. A replayed graph is one launch that runs as long as all of its kernels.

The GPU is one server. Where kernels of several streams overlap, the union of their intervals counts: a launch adds the
time in which it alone kept the GPU busy, so that launches sum to the busy time.

What the model does not know: that a stream may overtake another one; waits for an event, of which a trace does not tell
the event (they are not counted as waits; a step that waits for the one before it is then predicted too fast); how the
host's time is spread within a segment; and a host that changes speed within a pass. The drains of the issue pass stand
between segments, so what a cold start of a segment costs the host is in its pace.

Plain NumPy: times are microseconds unless a name ends in another unit.
"""

from dataclasses import dataclass, field

import numpy

# What the driver's launch queue holds; a host that is further ahead waits in its launch call.
QUEUE_LAUNCHES = 1024
# The period is steady when the host's lead repeats to this.
STEADY_US = 1e-3
MAX_LAUNCHES = 4_000_000
MAX_CYCLES = 2000


@dataclass(frozen=True)
class Step:
    """The launches of one step in the order of issue, as a profile shows them.

    segment: int [n], which segment of the step each is in, from 0, rising. gap_us, duration_us: float [n], the least
    time between the end of the one before and its begin, and how long it alone keeps the GPU busy. num_segments: of
    the step, those without a launch counted. waits: (segment, number of launches issued before) of each place where
    the host waits until the GPU has run all that was issued.
    """

    segment: numpy.ndarray
    gap_us: numpy.ndarray
    duration_us: numpy.ndarray
    num_segments: int
    waits: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self):
        assert len(self.segment) == len(self.gap_us) == len(self.duration_us)
        assert (numpy.diff(self.segment) >= 0).all() and (self.segment < self.num_segments).all()

    @property
    def num_launches(self) -> numpy.ndarray:
        """Of each segment, int [num_segments]."""
        return numpy.bincount(self.segment, minlength=self.num_segments)

    @property
    def gpu_us(self) -> float:
        return float(self.gap_us.sum() + self.duration_us.sum())


@dataclass(frozen=True)
class Prediction:
    """step_ms: period of a step, mean over the steps. host_bound_fraction: share of it in which the GPU had nothing
    to run because the host had issued nothing."""

    step_ms: float
    host_bound_fraction: float


class _Loop:
    """Host and GPU between two launches: when the host is free, and when the last launches ended (oldest first)."""

    def __init__(self, queue: int):
        self.host, self.queue = 0.0, queue
        self.ends = numpy.full(queue, -numpy.inf)
        self.end = 0.0

    def run(self, host_us, gap_us, duration_us):
        """Issue launches, each host_us after the one before, without a wait between them."""
        for first in range(0, len(host_us), self.queue):
            part = slice(first, first + self.queue)
            host, gap, duration = host_us[part], gap_us[part], duration_us[part]
            ready = self.host + numpy.cumsum(host)
            # Launch i may be issued once launch i - queue has ended.
            late = numpy.maximum.accumulate(numpy.maximum(self.ends[: len(host)] - ready, 0.0))
            issued = ready + late
            work = numpy.cumsum(gap + duration)
            begin = numpy.maximum(numpy.maximum.accumulate(issued - (work - duration)), self.end)
            ends = work + begin
            self.host, self.end = float(issued[-1]), float(ends[-1])
            self.ends = numpy.concatenate([self.ends, ends])[-self.queue :]

    def wait(self):
        self.host = max(self.host, self.end)

    def state(self):
        """What the next step depends on, counted from the end of this one."""
        return numpy.concatenate([[self.host], self.ends]) - self.end


def segments(steps: list[Step]) -> dict | None:
    """Of each segment, means over steps: launches, and gpu_ms, their time on the GPU with its own gaps.

    None where steps differ in number of segments.
    """
    if len({step.num_segments for step in steps}) != 1:
        return None
    gpu_us = [
        numpy.bincount(step.segment, step.gap_us + step.duration_us, minlength=step.num_segments) for step in steps
    ]
    return {
        "launches": [round(float(number), 2) for number in numpy.mean([step.num_launches for step in steps], axis=0)],
        "gpu_ms": [round(float(us) / 1e3, 4) for us in numpy.mean(gpu_us, axis=0)],
    }


def predict(steps: list[Step], segment_ms: list[float] | None, queue: int = QUEUE_LAUNCHES) -> Prediction:
    """The steady period of a loop over `steps`, whose segments take the host segment_ms (median over steps).

    Raises ValueError where steps differ in number of segments (segment_ms None: those of the issue pass did), or where
    nothing is launched.
    """
    if segment_ms is None:
        raise ValueError("steps of the issue pass differ in number of marks")
    odd = sorted({step.num_segments for step in steps} - {len(segment_ms)})
    if odd:
        raise ValueError(f"the issue pass saw {len(segment_ms)} segments a step, the profile {odd[0]}")
    gpu_us = sum(step.gpu_us for step in steps)
    if not any(len(step.segment) for step in steps):
        raise ValueError("nothing was launched")
    stretches = [stretch for step in steps for stretch in _stretches(step, _host_us(step, steps, segment_ms))]
    loop, marks, previous = _Loop(queue), [0.0], None
    num_launches = sum(len(step.segment) for step in steps)
    for _ in range(max(3, min(MAX_CYCLES, MAX_LAUNCHES // num_launches))):
        lead = loop.end - loop.host
        for host_us, gap_us, duration_us, tail_us, waits in stretches:
            loop.run(host_us, gap_us, duration_us)
            loop.host += tail_us
            if waits:
                loop.wait()
        marks.append(loop.end)
        state = loop.state()
        if previous is not None and _is_equal(state, previous):
            return _prediction(marks[-1] - marks[-2], gpu_us, len(steps))
        # The GPU never waited, and the host is no less ahead than before: it will not wait later.
        if len(marks) > 3 and marks[-1] - marks[-2] <= gpu_us + STEADY_US and loop.end - loop.host >= lead - STEADY_US:
            return _prediction(gpu_us, gpu_us, len(steps))
        previous = state
    half = len(marks) // 2
    return _prediction((marks[-1] - marks[half]) / (len(marks) - 1 - half), gpu_us, len(steps))


def _prediction(cycle_us, gpu_us, num_steps):
    return Prediction(cycle_us / num_steps / 1e3, max(0.0, 1.0 - gpu_us / cycle_us))


def _is_equal(a, b):
    known = numpy.isfinite(a)
    return bool((known == numpy.isfinite(b)).all()) and bool((numpy.abs(a[known] - b[known]) <= STEADY_US).all())


def _host_us(step, steps, segment_ms):
    """Host time of each segment of this step: by its share of launches, as steps of other batches may have more."""
    mean = numpy.mean([each.num_launches for each in steps], axis=0)
    share = numpy.divide(step.num_launches, mean, out=numpy.ones(step.num_segments), where=mean > 0)
    return numpy.asarray(segment_ms, dtype=float) * 1e3 * share


def _stretches(step, host_us):
    """What lies between the waits of a step: (host_us, gap_us, duration_us of each launch, host time after the last
    of them, whether a wait follows)."""
    # What a segment's waits took is no work of the host's; it was waiting for this segment's launches alone.
    host_us = numpy.array(
        [
            _own_us(step, index, us) if any(index == segment for segment, _ in step.waits) else us
            for index, us in enumerate(host_us)
        ]
    )
    found, place = [], 0
    counts, ends = step.num_launches, numpy.cumsum(step.num_launches)
    paces = host_us / numpy.maximum(counts, 1)
    # Segments without a launch delay the next one, or end the step.
    tail = 0.0
    pieces: list[float] = []
    waits = sorted(step.waits)
    for index in range(step.num_segments):
        own = [count for segment, count in waits if segment == index]
        for stop in [*own, None]:
            until = ends[index] if stop is None else min(max(stop, place), ends[index])
            for _ in range(place, until):
                pieces.append(tail + paces[index])
                tail = 0.0
            place = int(until)
            if stop is not None:
                found.append(_stretch(step, place, pieces, tail, True))
                pieces, tail = [], 0.0
        if not counts[index]:
            tail += host_us[index]
    found.append(_stretch(step, place, pieces, tail, False))
    return found


def _stretch(step, place, pieces, tail, waits):
    part = slice(place - len(pieces), place)
    return numpy.array(pieces, dtype=float), step.gap_us[part], step.duration_us[part], tail, waits


def _own_us(step, index, measured_us):
    """The host's own time of a segment with waits, such that the segment alone, from an idle GPU, takes measured_us."""
    part = step.segment == index
    first = int((step.segment < index).sum())
    places = sorted(count - first for segment, count in step.waits if segment == index)
    gap, duration = step.gap_us[part], step.duration_us[part]

    def takes(own_us):
        loop = _Loop(QUEUE_LAUNCHES)
        pace = own_us / max(1, len(gap))
        begin = 0
        for end in places:
            loop.run(numpy.full(end - begin, pace), gap[begin:end], duration[begin:end])
            loop.wait()
            begin = end
        return loop.host + (len(gap) - begin) * pace

    low, high = 0.0, float(measured_us)
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if takes(middle) < measured_us else (low, middle)
    return low
