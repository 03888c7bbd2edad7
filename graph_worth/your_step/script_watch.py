"""The watch over the training steps of any script, inside of its process; see graph_worth/harness/watch.py.

A step goes from one call of an optimizer's step() to the next. Of several optimizers the one that is called least often
counts, so the critic of a GAN may take several steps in one. Microbatches whose gradients add up are one step. After
AFTER steps ten are timed, and the reads on the host of the next ten are noted, five of them under a GPU's profiler. The
other five begin on an idle GPU, so that the host's time to issue a step is seen.
"""

import atexit
import contextlib
import itertools
import json
import os
import statistics
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import FrameType
from unittest import mock

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils._pytree import tree_leaves

from graph_worth.files import write_text
from graph_worth.your_step.place import place_of_call

AFTER, TIMED, HEAT, PROFILED, READ = 10, 10, 2, 3, 5
# Calls of the busiest optimizer after which the one that is called least often need not have AFTER.
MOST_WAITED = 10 * AFTER
MOST_SHAPES = 8
# Libraries whose loops call the step, and the modules of these loops.
LOOPS = {"transformers": "transformers.trainer", "lightning": "lightning.pytorch."}
# Microseconds. A graph of shorter kernels gains where the process keeps to one stream.
SHORT_US = 20


class ScriptWatch:
    """The watch of this process, from the first step of an optimizer on; it never raises into the script.

    Args:
        folder: gets a JSON file of what is known so far: "steps" that have ended, "num_calls" of other optimizers in a
            step, "step_ms"; on a GPU "busy_ms", "kernels", "collective_ms", "graph_share", "second_streams" (lines) and
            "issue_ms", the host's; "reads" (line, call, number in a step, what removes it or why no graph makes it),
            "differ": steps differ in their reads, "shapes", and "loop": of LOOPS, the library that calls the step.
    """

    def __init__(self, folder: str):
        self._folder = Path(folder)
        self._begin()
        os.register_at_fork(after_in_child=self._forked)
        atexit.register(self._exits)

    def _begin(self):
        self._calls: Counter[Optimizer] = Counter()
        self._pace: Optimizer | None = None
        self._places: dict[Optimizer, str] = {}
        self._look = self._steps()
        self._told: dict = {"pid": os.getpid(), "rank": int(os.environ.get("RANK", "0")), "steps": 0}
        self._handle = register_optimizer_step_post_hook(self._called)

    def _forked(self):
        """A child has a watch of its own, unless its parent was being looked at."""
        is_fresh = self._told["steps"] < AFTER
        self._stop()
        self._told["steps"] = 0
        if is_fresh:
            self._begin()

    def _stop(self):
        self._handle.remove()
        # The script's optimizers end where it lets go of them.
        self._pace = None
        self._calls.clear()
        self._places.clear()

    def _exits(self):
        if self._told["steps"] and "reads" not in self._told:
            self._write()

    def _write(self):
        with contextlib.suppress(OSError):
            write_text(self._folder / f"steps-{os.getpid()}.json", json.dumps(self._told))

    def _called(self, optimizer, args, kwargs):
        try:
            self._calls[optimizer] += 1
            self._told["steps"] = max(self._calls.values())
            if self._pace is None:
                self._places.setdefault(optimizer, place_of_call().own)
                if self._calls.total() == 1:
                    self._told["loop"] = loop_of(sys._getframe())
                    self._write()
                self._choose()
            if optimizer is self._pace:
                next(self._look)
        except StopIteration:
            self._write()
            self._stop()
        except Exception as error:
            self._told["error"] = f"{type(error).__name__}: {error}"
            self._write()
            self._stop()

    def _choose(self):
        """Choose the optimizer that ends a step: the one called least often, of equals the last."""
        least = min(reversed(self._calls), key=self._calls.__getitem__)
        if self._calls[least] < AFTER and max(self._calls.values()) >= MOST_WAITED:
            # It may never be called again.
            called_again = [optimizer for optimizer in reversed(self._calls) if self._calls[optimizer] > 1]
            least = min(called_again, key=self._calls.__getitem__)
        elif self._calls[least] < AFTER:
            return
        self._pace, self._told["optimizer"] = least, f"{type(least).__name__} at {self._places[least]}"

    def _steps(self):
        """Advances at the end of each step."""
        from graph_worth.your_step.libraries import argument_for, with_library
        from graph_worth.your_step.step_watch import reads_noted

        on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
        drain = torch.cuda.synchronize if on_gpu else lambda: None
        before = Counter(self._calls)
        drain()
        start = time.perf_counter()
        for _ in range(TIMED):
            yield
        drain()
        self._told["step_ms"] = (time.perf_counter() - start) * 1e3 / TIMED
        self._told["num_calls"] = {
            f"{type(optimizer).__name__} at {self._places.get(optimizer, '?')}": number / TIMED
            for optimizer, number in (self._calls - before).items()
            if optimizer is not self._pace
        }
        self._told["on_gpu"] = on_gpu
        self._write()
        with _shapes() as shapes:
            # Other optimizers' steps read numbers of the host alone.
            known = {"loss scaler"} | ({"optimizer"} if any(map(_is_lbfgs, self._calls)) else set())
            steps: list[Counter[tuple[str, str, str]]] = []
            issued_ms = []
            for _ in itertools.chain(self._profiled() if on_gpu else range(HEAT + PROFILED), range(READ)):
                drain()
                start = time.perf_counter()
                # A line that waits for the GPU is in the record of a step once.
                with reads_noted() as record:
                    yield
                issued_ms.append((time.perf_counter() - start) * 1e3)
                calls = [call for call in record.refused if not call.place.through or call.place.through in known]
                notes = [call.why_not or argument_for(call.place) for call in calls]
                rows = [(with_library(call.place), call.name) for call in calls]
                steps.append(Counter((*row, note) for row, note in zip(rows, notes, strict=True)))
        if on_gpu:
            self._told["issue_ms"] = min(statistics.median(issued_ms[-READ:]), self._told["step_ms"])
        reads = sum(steps, Counter())
        self._told["reads"] = [[line, name, number / len(steps), note] for (line, name, note), number in reads.items()]
        self._told["differ"] = any(step != steps[0] for step in steps)
        self._told["shapes"] = {name: sorted(class_shapes)[:MOST_SHAPES] for name, class_shapes in shapes.items()}

    def _profiled(self):
        from graph_worth.measuring import kernel_trace

        profile = kernel_trace.Profile()
        with _streams_set() as lines:
            yield from kernel_trace.profiled(profile, PROFILED, HEAT)
        self._told["second_streams"] = second_streams(kernel_trace.gpu_work(profile.events), lines)
        facts = kernel_trace.facts(profile.events, PROFILED)
        self._told |= {name: facts.get(name) for name in ("busy_ms", "graph_share", "kernels", "collective_ms")}
        self._write()


def loop_of(frame: FrameType | None) -> str:
    """Return which of LOOPS calls a frame, "" for a loop of the script's."""
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        for loop, start in LOOPS.items():
            if module.startswith(start):
                return loop
        frame = frame.f_back
    return ""


def second_streams(work: list[dict], lines) -> list[str]:
    """Return the lines that set a stream if short kernels run on several streams; [""] if no line did.

    work: of `kernel_trace.gpu_work`. Streams within a graph count as one.
    """
    kernels = [event for event in work if event["is_kernel"]]
    streams = {"graph" if event["by_graph"] else event["stream"] for event in kernels}
    in_graphs = Counter(event["stream"] for event in kernels if event["by_graph"])
    if streams & {stream for stream, _ in in_graphs.most_common(1)}:
        streams.discard("graph")
    is_long = sum(event["duration_us"] for event in kernels) >= SHORT_US * len(kernels)
    return [] if is_long or len(streams) < 2 else sorted(lines) or [""]


@contextlib.contextmanager
def _streams_set():
    """Yield the lines of the user's code that set another stream."""
    lines: set[str] = set()
    original = torch.cuda.set_stream

    def set_stream(stream):
        lines.add(place_of_call().own)
        original(stream)

    with mock.patch.object(torch.cuda, "set_stream", set_stream):
        yield lines


def _is_lbfgs(optimizer) -> bool:
    return isinstance(getattr(optimizer, "optimizer", optimizer), torch.optim.LBFGS)


@contextlib.contextmanager
def _shapes():
    """Yield class -> shapes of the tensors that modules get, where they train and no other module calls them."""
    shapes_by_class: dict[str, set] = {}
    original, inside = torch.nn.Module.__call__, threading.local()

    def call(module, *args, **kwargs):
        if getattr(inside, "depth", 0) or not module.training:
            return original(module, *args, **kwargs)
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if len(shapes_by_class.setdefault(type(module).__name__, set())) < MOST_SHAPES:
            shapes_by_class[type(module).__name__].add(tuple(tuple(leaf.shape) for leaf in leaves))
        inside.depth = 1
        try:
            return original(module, *args, **kwargs)
        finally:
            inside.depth = 0

    with mock.patch.object(torch.nn.Module, "__call__", call):
        yield shapes_by_class
