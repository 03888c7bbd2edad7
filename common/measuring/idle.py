"""The time that the GPU waits in an eager step, and the modules for whose kernels it waits, forward and backward.

Torch's profiler gives every kernel with the host call that launched it. A pause of the GPU counts for the module whose
kernel ends it: that kernel came too late. A launch in the backward pass belongs to the module whose forward made the
node of autograd that runs. The profiler slows the host, so shares are told, and no times.
"""

import bisect
import itertools
import json
import tempfile
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import torch

from common.measuring.module_parts import MODULE, is_inside, naming_modules
from common.measuring.trace import GPU_WORK, HOST_CALLS, correlation_of

_STEP = "whole step"
_NODE = "autograd::engine::evaluate_function"


@dataclass
class Idle:
    """Shares of one step.

    Attributes:
        of_step: share of the step in which the GPU waits.
        of_modules: path of the innermost module -> its share of that time; "" for what belongs to no module.
    """

    of_step: float
    of_modules: dict[str, float] = field(default_factory=dict)

    def inside(self, path: str) -> float:
        """Return the share of a module and those inside of it."""
        return sum(own for name, own in self.of_modules.items() if is_inside(name, path))


def measured(state) -> Idle | None:
    """Return the shares of an eager step, which changes the state; None on a CPU, where nothing waits."""
    return idle_of(profiled(state)) if state.device.type == "cuda" else None


def profiled(state) -> list[dict]:
    """Make two steps; return the events, as of a Chrome trace, of the second one, whose modules are named."""
    kinds = torch.profiler.ProfilerActivity
    on_gpu = state.device.type == "cuda"
    state.reset()
    profiler = torch.profiler.profile(activities=[kinds.CPU, *([kinds.CUDA] if on_gpu else [])])
    with naming_modules(state.modules), profiler:
        # The first step under the profiler is slower.
        for index in range(2):
            with torch.profiler.record_function(_STEP):
                state.step(state.batch(index))
            if on_gpu:
                torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    begins = [event["ts"] for event in events if event.get("name") == _STEP and event.get("cat") == "user_annotation"]
    return [event for event in events if event.get("ph") == "X" and event["ts"] >= max(begins)]


def idle_of(events: list[dict]) -> Idle | None:
    """Return the shares of a step from the events of `profiled`; None where no kernel ran."""
    calls = {correlation_of(event): event for event in events if event.get("cat") in HOST_CALLS}
    work = sorted((event for event in events if event.get("cat") in GPU_WORK), key=lambda event: event["ts"])
    if not work:
        return None
    owners = Owners(events)
    begin = end = work[0]["ts"]
    waits: dict[str, float] = defaultdict(float)
    for event in work:
        if event["ts"] > end:
            call = calls.get(correlation_of(event))
            waits[owners.of(call["tid"], call["ts"]) if call else ""] += event["ts"] - end
        end = max(end, event["ts"] + event["dur"])
    total = sum(waits.values())
    return Idle(total / max(end - begin, 1e-9), {name: own / total for name, own in waits.items()})


class Owners:
    """The innermost module at each moment of a host thread, from the events of `profiled`."""

    def __init__(self, events: list[dict]):
        self._modules = _Spans(
            (each, each["name"].removeprefix(MODULE))
            for each in events
            if each.get("cat") == "user_annotation" and each["name"].startswith(MODULE)
        )
        numbered = [(each, each["args"]["Sequence number"]) for each in events if _has_number(each)]
        self._nodes = _Spans(pair for pair in numbered if pair[0]["name"].startswith(_NODE))
        # Of the operators with one number, the last one has made the node.
        made = sorted((pair for pair in numbered if not pair[0]["name"].startswith(_NODE)), key=lambda p: p[0]["ts"])
        self._makers = {
            number: self._modules.at(each["tid"], each["ts"])
            for each, number in made
            if self._nodes.at(each["tid"], each["ts"]) is None
        }

    def of(self, tid, ts: float) -> str:
        """Return the path of the module to which work belongs that a thread does at a time, or ""."""
        return self._modules.at(tid, ts) or self._makers.get(self._nodes.at(tid, ts)) or ""


class _Spans:
    """Nested intervals of threads, each with a value."""

    def __init__(self, pairs):
        by_thread = defaultdict(list)
        for event, value in pairs:
            by_thread[event["tid"]].append((event["ts"], event["ts"] + event["dur"], value))
        self._threads = {}
        for tid, own in by_thread.items():
            own.sort(key=lambda each: (each[0], -each[1]))
            # The end of all intervals up to one, so that a search backwards knows when to stop.
            ends = list(itertools.accumulate((end for _, end, _ in own), max))
            self._threads[tid] = own, [begin for begin, _, _ in own], ends

    def at(self, tid, ts):
        """The value of the innermost interval around a time, or None."""
        own, starts, ends = self._threads.get(tid, ((), (), ()))
        index = bisect.bisect_right(starts, ts) - 1
        while index >= 0 and ends[index] > ts:
            if own[index][1] > ts:
                return own[index][2]
            index -= 1
        return None


def _has_number(event):
    return event.get("cat") == "cpu_op" and "Sequence number" in event.get("args", {})
