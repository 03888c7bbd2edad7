"""Which launch of a step started which work of the GPU, read from a profile for common/queue_model.py.

Kineto gives a host call and the work that it started one correlation id, and all kernels of a replay that of the
graph's launch. Which segment between marks a call belongs to is told by time: the host notes time.time_ns() at each
mark, and Kineto's host calls carry times of that clock. That is checked, and corrected to some us, by the calls in
which the host waited for the GPU before and after the profiled steps. The thread that called does not matter: launches
of the backward pass come from autograd's.
"""

import bisect
import math
import statistics
from dataclasses import dataclass, field

import numpy

from common.queue_model import Step
from common.trace import GPU_WORK, HOST_CALLS, Profile, correlation_of

# Calls that return when the GPU has run what was issued. A call that waits for an event does not say for which.
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cuStreamSynchronize", "cuCtxSynchronize")
DEVICE_WAIT = "cudaDeviceSynchronize"
# A gap is the GPU's own where the call of the launch returned this long before the work in front of it ended, us.
QUEUED_US = 10.0
# How much longer a gap of the GPU's own is under the profiler. In 89 timed runs of graphs in results/, issue below 0.3
# of busy, the profile's gap a kernel exceeds the window's by 0.49 us (median; 0.28 to 0.85 in nine of ten).
PROFILER_GAP_US = 0.5
# The gap between two launches of a full queue, for a profile that shows no full queue. Where the host does not hold up
# eager steps, a kernel of the window has 0.75 to 1.06 us (gpt3 bench) and 1.18 to 1.65 us (stable_diffusion full).
LAUNCH_GAP_US = 1.0
MIN_GAPS = 20
# Work without a call in the trace counts as a launch of its own, right after that of the work before it. torch 2.11's
# profiler does not show what Inductor launches, 5 % of the kernels of GPT-3's eager step. With many of them the pace of
# a segment would be a guess.
MAX_UNPLACED = 0.25
# Between the host's clock and the trace's, at the begin of the profiled steps and from there to their end.
MAX_OFFSET_US, MAX_DRIFT_US = 1000.0, 200.0


@dataclass
class _Launch:
    """gap_us: of the GPU's own before it, None where it waited for the host. inner_us: such gaps among its kernels."""

    at_us: float
    returned_us: float
    busy_us: float = 0.0
    gap_us: float | None = None
    inner_us: list[float] = field(default_factory=list)


def queue_steps(profile: Profile, stamps_ns: list[list[int]]) -> list[Step]:
    """The launches of each profiled step for `queue_model.predict`.

    stamps_ns: of each step time.time_ns() at its begin, at each mark and at its end. Time of overlapping kernels is
    shared out as `trace.busy` counts it, so that launches sum to the busy time. Raises ValueError with the reason where
    launches cannot be placed.
    """
    offset_us = _clock_offset_us(profile)
    stamps_us = [[(ns - profile.synced_ns[0]) / 1e3 + offset_us for ns in stamps] for stamps in stamps_ns]
    launches = sorted(_launches(profile.events), key=lambda launch: launch.at_us)
    keep, usual_us = _gaps(launches)
    starts = [stamp for stamps in stamps_us for stamp in stamps[:-1]]
    places = [(step, index) for step, stamps in enumerate(stamps_us) for index in range(len(stamps) - 1)]

    def place_of(at_us):
        # What a thread of its own launched before the first step, or after the last, goes with it.
        return places[max(0, bisect.bisect_right(starts, at_us) - 1)]

    rows: list[list] = [[] for _ in stamps_us]
    for launch in launches:
        step, segment = place_of(launch.at_us)
        gap_us = usual_us if launch.gap_us is None else keep * launch.gap_us
        rows[step].append((launch.at_us, segment, gap_us, launch.busy_us + keep * sum(launch.inner_us)))
    waits: list[list] = [[] for _ in stamps_us]
    for event in profile.events:
        is_wait = event["cat"] in HOST_CALLS and event["name"].startswith(WAITS)
        if is_wait and starts[0] <= event["ts"] < stamps_us[-1][-1]:
            step, segment = place_of(event["ts"])
            waits[step].append((segment, sum(row[0] < event["ts"] for row in rows[step])))
    return [
        Step(
            numpy.array([row[1] for row in own], dtype=int),
            numpy.array([row[2] for row in own], dtype=float),
            numpy.array([row[3] for row in own], dtype=float),
            len(stamps) - 1,
            sorted(of_step),
        )
        for own, stamps, of_step in zip(rows, stamps_us, waits, strict=True)
    ]


def _launches(events):
    """Each call that started work, with its share of the busy time and the gaps before and within it."""
    calls = {correlation_of(event): event for event in events if event["cat"] in HOST_CALLS}
    calls.pop(None, None)
    work = sorted((event for event in events if event["cat"] in GPU_WORK), key=lambda event: event["ts"])
    lost = sum(correlation_of(event) not in calls for event in work)
    if not work or lost > MAX_UNPLACED * len(work):
        raise ValueError(f"{lost} of {len(work)} kernels and copies have no launch in the trace")
    launches: dict = {}
    call, end = None, -math.inf
    for place, event in enumerate(work):
        owner = correlation_of(event)
        if owner in calls:
            call = calls[owner]
        elif call is None:
            continue
        else:
            owner = ("no call", place)
        start, stop = event["ts"], event["ts"] + event["dur"]
        gap_us = max(0.0, start - end)
        if owner in launches:
            launch = launches[owner]
            launch.inner_us.append(gap_us)
        else:
            launch = launches[owner] = _Launch(call["ts"], call["ts"] + call["dur"])
            if gap_us == 0.0 or launch.returned_us + QUEUED_US <= end:
                launch.gap_us = gap_us
        launch.busy_us += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return launches.values()


def _gaps(launches):
    """(share of the GPU's own gaps that is there without the profiler, gap before a launch that waited for the host).

    What the profiler adds is taken off the sum: of a short gap it would take more than all.
    """
    before = [launch.gap_us for launch in launches if launch.gap_us is not None]
    own = before + [gap for launch in launches for gap in launch.inner_us]
    keep = max(0.0, 1.0 - PROFILER_GAP_US * len(own) / sum(own)) if sum(own) else 0.0
    found = [keep * gap for gap in before if gap]
    return keep, statistics.median(found) if len(found) >= MIN_GAPS else LAUNCH_GAP_US


def _clock_offset_us(profile):
    """What to add to the host's own times, counted from the first synced_ns, to get the trace's."""
    ends = [event["ts"] + event["dur"] for event in profile.events if event["name"].startswith(DEVICE_WAIT)]
    span_us = (profile.synced_ns[1] - profile.synced_ns[0]) / 1e3
    # The two calls are as far apart as the host saw them.
    pairs = [(abs(last - first - span_us), first) for first in ends for last in ends if last >= first]
    differs_us, offset_us = min(pairs, default=(math.inf, math.inf))
    if differs_us > MAX_DRIFT_US or abs(offset_us) > MAX_OFFSET_US:
        raise ValueError("the trace does not show where the profiled steps begin and end")
    return offset_us
