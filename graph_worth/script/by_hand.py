"""Training by hand: `python -m gpt3.train --variant graph_layer` makes one variant, and the script's loop trains it.

    build -> variant (warm-up, capture) -> canary -> the loop: steps, --parity or --profile -> table, --record

It shows that a variant runs, learns and computes eager's bits. What a graph is worth is measured by `make bench`
(measuring/). A variant that cannot run, runs out of memory or fails is a status with a message, no exception.
"""

import contextlib
import functools
import gc
import itertools
import math
import sys
import time
import traceback
from collections.abc import Generator
from typing import Any

import torch

from graph_worth import garbage
from graph_worth import made_variant as variants
from graph_worth.contract import Training
from graph_worth.files import json_line, write_text
from graph_worth.machine import environment, memory
from graph_worth.made_variant import MadeVariant
from graph_worth.measuring import marks, parity, torch_settings
from graph_worth.parallel.host_messages import barrier, of_all_ranks
from graph_worth.script import console
from graph_worth.script.step_checks import broken_promise, compare_with_eager

PARITY_STEPS = 20


def run(model):
    """Build, make the variant, and yield (variant, loop) once for the steps, unless there is nothing to step.

    Args:
        model: `graph_worth.script.session.Model`, not built.

    Returns:
        The object that --record holds. "status" is pass, unsupported, oom, capture_failed, numerics_failed or failed;
        "message" says why.
    """
    result, rank = _blank(model), model.rank
    if rank == 0:
        console.print_head(result)
    end = functools.partial(_end, result, model, rank)
    with _agreement_of(model, end) as ranks:
        loop = Loop(model, ranks, result)
        try:
            with contextlib.ExitStack() as settings:
                settings.enter_context(garbage.of_run())
                # torchrun stops all ranks once one has died: each must be able to say so before one may die.
                ranks.agree()
                torch_settings.prepare(model.device)
                if model.options.parity:
                    settings.enter_context(torch_settings.deterministic_kernels())
                loop.make()
                with loop.phase(loop.name):
                    yield loop.variant, loop
                    loop.read()
                loop.finish()
        except variants.Refused:
            raise
        except Exception as error:
            loop.stop()
            loop.explain(error)
        # Now, since closing may wait for the others.
        ranks.tell(result["status"], result["message"])
        ranks.enter("close")
        loop.close()
        ranks.tell(result["status"], result["message"])
        end()
    return result


class _Nothing:
    """Stands in for the agreement of one rank: every method does nothing."""

    def __getattr__(self, name):
        return lambda *arguments, **named: None


def _agreement_of(model, on_fault):
    if model.world_size == 1:
        return contextlib.nullcontext(_Nothing())
    from graph_worth.measuring.agreement import Agreement

    return Agreement(model.rank, model.world_size, on_fault)


def _blank(model):
    """All keys of the result; what is not known yet is None or empty."""
    unknown = (
        "strategy warmup_s compile_s capture_s graphs replays expected_replays ms seconds items_per_s batch_classes"
    )
    unknown += " num_tensors memory reserved_bytes graph_pool_bytes promised_graphs promised_replays"
    return {
        "status": "failed",
        "message": "",
        "model": model.name,
        "preset": model.options.preset,
        "variant": model.options.variant,
        "kind": model.kinds.get(model.options.variant),
        "device": model.device.type,
        "config": vars(model.config).copy(),
        "argv": sys.argv[1:],
        "env": environment.describe_environment(model.device, model.world_size) | _source(model),
        **dict.fromkeys(unknown.split()),
        **{name: [] for name in ("notes", "step_ms", "losses", "grad_norms", "state_hashes", "unmoved", "said")},
        "steps": 0,
        "failed_rank": None,
        "capture_report": {},
        "closing": {},
    }


def _source(model):
    """The code that runs, for --record alone."""
    if not model.options.record:
        return {}
    from graph_worth.machine.source import describe_source

    return describe_source()


def _end(result, model, rank, fault=None):
    """Print and write the result. fault: the main thread waits for a rank that does not come any more."""
    if fault is not None and result["status"] in ("pass", "failed"):
        result.update(status=fault.status, message=str(fault), failed_rank=fault.rank)
    if rank == 1 and result["failed_rank"] == 0:
        # Rank 0 can say nothing any more.
        print(f"python -m {model.name}.train: {result['message']}", file=sys.stderr, flush=True)
    if rank > 0:
        return
    console.print_end(result, vars(model).get("training"))
    if model.options.record:
        try:
            write_text(model.options.record, json_line(result) + "\n")
        except OSError as error:
            message = f"--record {error.filename}: {error.strerror}"
            result.update(status="failed", message=message)
            print(f"python -m {model.name}.train: {message}", file=sys.stderr)
    sys.stdout.flush()


class Loop:
    """The `log` of a script's loop: the numbers of its steps, and what they came to.

    Attributes:
        variant: of `make`.
        name: the kind of steps: steps, parity or profile.
    """

    training: Training
    variant: MadeVariant

    def __init__(self, model, ranks, result: dict):
        self.model, self.options, self.device = model, model.options, model.device
        self.rank, self.ranks, self.result = model.rank, ranks, result
        self.name = "parity" if self.options.parity else "profile" if self.options.profile else "steps"
        self.count, self.made, self.replays = 0, 0, 0
        self._times: dict[str, Any] = {}
        self._steps: Generator[int] | None = None

    # --- the script's loop

    def steps(self) -> Generator[int]:
        """Yield the numbers of the steps: --steps, or min_steps of the preset. Nothing in between waits for the GPU."""
        self._steps = {"parity": self._parity, "profile": self._profiled, "steps": self._plain}[self.name]()
        return self._steps

    def stop(self) -> None:
        """End a loop that an exception left in the middle: its profiler, and its rest from garbage collection."""
        if self._steps is not None:
            self._steps.close()

    def _plain(self):
        self.count = self.options.steps or self.model.config.min_steps
        gc.collect()
        gc.disable()
        try:
            variants.synchronize()
            barrier()
            start_s = time.monotonic()
            stamps = [_stamp(self.device)]
            for index in range(self.count):
                yield index
                stamps.append(_stamp(self.device))
            variants.synchronize()
            self._times = {"stamps": stamps, "wall_s": time.monotonic() - start_s}
        finally:
            gc.enable()

    def _parity(self):
        from graph_worth.measuring.course import Course

        self.count = self.options.steps or PARITY_STEPS
        course = Course(self.training, hashed=range(self.count))
        yield from course.steps(self.count)
        unmoved = course.unmoved() if self.count > 1 else []
        self.result.update(state_hashes=course.digests(), num_tensors=len(course.names), unmoved=unmoved)

    def _profiled(self):
        from graph_worth.measuring import kernel_trace

        self.count = kernel_trace.UNTRACED_STEPS + kernel_trace.TRACED_STEPS
        with marks.opening_sections(kernel_trace.named_range):
            # All ranks make the same steps; rank 0 writes its own.
            events: dict = {}
            yield from kernel_trace.traced_steps(events, self.device.type == "cuda")
        if self.rank == 0:
            kernel_trace.write(self.options.profile, events)
            kernel_trace.report(self.options.profile, events)

    # --- before and after it

    def make(self) -> None:
        """Build, make the variant, and compare two of its steps with the reference's."""
        model, options = self.model, self.options
        self._tell(f"building {model.name}/{options.preset}")
        with self.phase("build"):
            self.training = training = model.build()
        self.result.update(config=vars(model.config).copy(), notes=[*training.notes, *training.flops_notes])
        for line in [*training.card, *self.result["notes"], f"making {options.variant}"]:
            self._tell(line)
        with self.phase("capture"):
            self.result["promised_graphs"], self.result["promised_replays"] = model.promises(options.variant)
            self.variant = model.make(options.variant)
            variants.enter(self.variant)
            garbage.keep()
        self.ranks.note_steps_of(self.variant)
        capture = self.variant.capture
        seconds = {name: round(getattr(capture, name), 4) for name in ("warmup_s", "compile_s", "capture_s")}
        self.result.update(strategy=capture.strategy, memory=capture.memory, capture_report=capture.report, **seconds)
        if capture.pools and not options.parity:
            with self.phase("canary"):
                reference = model.reference_step(options.variant)
                self.result["said"] += compare_with_eager(training, self.variant, reference, self.device)
        if hasattr(self.variant, "counted"):
            self.variant.counted()  # those of the canary are not the run's
        training.reset()
        self.replays = capture.num_replays
        step = self.variant.step

        def counted(index):
            step(index)
            self.made += 1

        self.variant.step = counted  # type: ignore[method-assign]

    def read(self) -> None:
        """Read what the steps left, once the loop is through."""
        if self.made != self.count or not self.count:
            raise ValueError(f"the loop in {self.model.name}/train.py made {self.made} of {self.count} steps")
        capture, count = self.variant.capture, self.count
        losses, grad_norms = self.training.results(count), self.training.grad_norms(count)
        self.result.update(losses=losses, grad_norms=grad_norms)
        if self._times:
            self._read_times(count)
        self.result.update(
            steps=count,
            graphs=sum(len(pool.graphs) for pool in capture.pools),
            replays=capture.num_replays - self.replays,
            expected_replays=sum(self.variant.replays_of(index) for index in range(count)),
            graph_pool_bytes=sum(pool.bytes() for pool in capture.pools),
            reserved_bytes=memory.reserved_bytes(self.device),
        )

    def _read_times(self, count):
        pairs = itertools.pairwise(self._times["stamps"])
        local_ms = [(b - a) * 1e3 if isinstance(a, float) else a.elapsed_time(b) for a, b in pairs]
        step_ms = [max(at_once) for at_once in zip(*of_all_ranks(local_ms), strict=True)]
        ms, wall_s = round(math.fsum(step_ms) / count, 5), self._times["wall_s"]
        self.result.update(
            ms=ms,
            step_ms=[round(time_ms, 4) for time_ms in step_ms],
            seconds=round(wall_s, 4),
            batch_classes=len({self.training.batch_class(index) for index in range(count)}),
            items_per_s=self.training.items / ms * 1e3,
        )

    def finish(self) -> None:
        """Judge the steps, and do what follows a training: what the script does behind it."""
        parity.require_finite(self.result["losses"])
        if self.name == "steps":
            with self.phase("afterwards"):
                self.result["said"] += self.training.finish() if self.training.finish else []
        faults = of_all_ranks(broken_promise(self.result))
        first = next((rank for rank, fault in enumerate(faults) if fault), None)
        if first is None:
            self.result["status"] = "pass"
            return
        message = f"rank {first}: {faults[first]}" if len(faults) > 1 else faults[first]
        self.result.update(message=message, failed_rank=first)

    def explain(self, error: Exception) -> None:
        """Turn an exception into the result's status and message."""
        status, message = variants.status_of(error, self.device)
        fault = self._fault_of_another(error, status)
        if status is None and fault is not error and not isinstance(error, OSError):
            traceback.print_exception(error)
        if fault is not None:
            status, message, self.result["failed_rank"] = fault.status, str(fault), fault.rank
        self.result.update(status=status or "failed", message=message)

    def _fault_of_another(self, error, status):
        if self.model.world_size == 1:
            return None
        from graph_worth.measuring.agreement import DEAD_S, GRACE_S, RankFault

        if isinstance(error, RankFault):
            return error
        # A connection to a rank that is gone breaks before it is known which one that is.
        return self.ranks.fault_of_another(wait_s=DEAD_S + GRACE_S) if status in (None, "capture_failed") else None

    def close(self) -> None:
        """Release the variant, then the training: graphs end before what they were captured over."""
        for opened in (vars(self).get("variant"), vars(self).get("training")):
            try:
                variants.leave(opened)
                close = getattr(opened, "close", None)
                self.result["closing"].update(close() or {} if close else {})
            except Exception as error:
                traceback.print_exception(error)
                if self.result["status"] == "pass":
                    self.result.update(status="failed", message=f"close: {type(error).__name__}: {str(error)[:300]}")

    @contextlib.contextmanager
    def phase(self, name):
        """A part that all ranks pass, or none."""
        self.ranks.enter(name)
        yield
        self.ranks.agree()

    def _tell(self, text):
        """Print a line at once: on a large model minutes pass before the next one."""
        if self.rank == 0:
            print(text, flush=True)


def _stamp(device):
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
