"""Training by hand: `python -m gpt3.train --variant graph_layer` makes one variant, trains and says what came of it.

    build -> variant (warm-up, capture) -> canary -> one of: steps, --parity, --profile -> table, --record

It shows that a variant runs, learns and computes eager's bits. What a graph is worth is measured by `make bench`
(common/measuring). A variant that cannot run, runs out of memory or fails is a status with a message, no exception.
"""

import contextlib
import functools
import gc
import itertools
import math
import sys
import time
import traceback

import torch

from common import garbage, variant_table
from common import variant as variants
from common.files import json_line, write_text
from common.machine import environment
from common.measuring import block, marks, torch_settings, trace
from common.measuring.agreement import DEAD_S, GRACE_S, Agreement, RankFault
from common.measuring.state_hash import StateHasher
from common.script import console, mllog
from common.script.step_checks import as_eager, broken_promise, compare_with_eager, require_finite
from common.training.parallel.host_messages import barrier, of_all_ranks
from common.variant import State, Unsupported, Variant

PARITY_STEPS = 20


def run(workload, args, device: torch.device, rank: int = 0, world_size: int = 1) -> dict:
    """Train one variant, print a card and a table, and write --record (rank 0).

    Args:
        workload: `common.variant.Workload`.
        args: `common.config.Arguments`.
        device: of this rank.
        rank: of this process in the process group.
        world_size: ranks of the process group.

    Returns:
        What --record holds. "status" is pass, unsupported, oom, capture_failed, numerics_failed or failed; "message"
        says why.
    """
    result = _blank(workload, args, device, world_size)
    log = mllog.Log(args.run.mllog if rank == 0 else "", workload.hyperparameters)
    if rank == 0:
        console.print_card(result, workload)
    log.begin(result)
    end = functools.partial(_end, result, workload, args.run, rank)
    with Agreement(rank, world_size, end) as ranks:
        Training(workload, args, device, ranks, log, result).go()
        ranks.tell(result["status"], result["message"])
        end()
    return result


def _blank(workload, args, device, world_size):
    """All keys of the result; what is not known yet is None or empty."""
    options, config = args.run, args.config
    graphs, replays = workload.promises(config, options.variant) if workload.promises else (None, None)
    unknown = (
        "strategy warmup_s compile_s capture_s graphs replays expected_replays ms seconds items_per_s batch_classes"
    )
    unknown += " eval_loss num_tensors memory reserved_bytes graph_pool_bytes"
    return {
        "status": "failed",
        "message": "",
        "model": workload.model,
        "preset": options.preset,
        "variant": options.variant,
        "kind": workload.kinds.get(options.variant),
        "device": device.type,
        "config": vars(config).copy(),
        "argv": sys.argv[1:],
        "notes": [*workload.notes, *workload.flops_notes],
        "env": environment.describe_environment(device, world_size),
        "promised_graphs": graphs,
        "promised_replays": replays,
        **dict.fromkeys(unknown.split()),
        **{name: [] for name in ("step_ms", "losses", "grad_norms", "state_hashes", "unmoved", "said")},
        "steps": 0,
        "failed_rank": None,
        "capture_report": {},
        "closing": {},
    }


def _end(result, workload, options, rank, fault=None):
    """Print and write the result. fault: the main thread waits for a rank that does not come any more."""
    if fault is not None and result["status"] in ("pass", "failed"):
        result.update(status=fault.status, message=str(fault), failed_rank=fault.rank)
    if rank == 1 and result["failed_rank"] == 0:
        # Rank 0 can say nothing any more.
        print(f"python -m {workload.model}.train: {result['message']}", file=sys.stderr, flush=True)
    if rank > 0:
        return
    console.print_end(result, workload)
    if options.record:
        try:
            write_text(options.record, json_line(result) + "\n")
        except OSError as error:
            message = f"--record {error.filename}: {error.strerror}"
            result.update(status="failed", message=message)
            print(f"python -m {workload.model}.train: {message}", file=sys.stderr)
    sys.stdout.flush()


class Training:
    """State and variant of one run, which `_make` makes, and their steps."""

    state: State
    variant: Variant

    def __init__(self, workload, args, device, ranks: Agreement, log: mllog.Log, result: dict):
        self.workload, self.config, self.options, self.device = workload, args.config, args.run, device
        self.rank, self.ranks, self.log, self.result = ranks.rank, ranks, log, result

    def go(self) -> None:
        """Build, capture and train; what goes wrong becomes the result's status and message."""
        try:
            with contextlib.ExitStack() as settings:
                settings.enter_context(garbage.of_run())
                # torchrun stops all ranks once one has died: each must be able to say so before one may die.
                self.ranks.agree()
                torch_settings.prepare(self.device)
                if self.options.parity:
                    settings.enter_context(torch_settings.deterministic_kernels())
                self._make()
                fault = self._steps()
            faults = of_all_ranks(fault)
            first = next((rank for rank, own in enumerate(faults) if own), None)
            if first is None:
                self.result["status"] = "pass"
            else:
                self.result["message"] = f"rank {first}: {faults[first]}" if len(faults) > 1 else faults[first]
                self.result["failed_rank"] = first
        except Exception as error:
            self._explain(error)
        # Now, since closing may wait for the others.
        self.ranks.tell(self.result["status"], self.result["message"])
        self.ranks.enter("close")
        # Graphs end before what they were captured over.
        self._close(vars(self).get("variant"))
        self._close(vars(self).get("state"))
        self.log.finish(self.result)

    def _explain(self, error):
        status, message = variants.status_of(error, self.device)
        if isinstance(error, RankFault):
            status, message, self.result["failed_rank"] = error.status, str(error), error.rank
        if status is None and not isinstance(error, OSError):
            traceback.print_exception(error)
        if status in (None, "capture_failed"):
            # A connection to a rank that is gone breaks before it is known which one that is.
            fault = self.ranks.fault_of_another(wait_s=DEAD_S + GRACE_S)
            if fault is not None:
                status, message, self.result["failed_rank"] = fault.status, str(fault), fault.rank
        self.result.update(status=status or "failed", message=message)

    def _close(self, opened):
        if not isinstance(opened, variants.Closes):
            return
        try:
            variants.leave(opened)
            self.result["closing"].update(opened.close() or {})
        except Exception as error:
            traceback.print_exception(error)
            if self.result["status"] == "pass":
                self.result.update(status="failed", message=f"close: {type(error).__name__}: {str(error)[:300]}")

    @contextlib.contextmanager
    def _phase(self, name):
        """A part that all ranks pass, or none."""
        self.ranks.enter(name)
        yield
        self.ranks.agree()

    def _tell(self, text):
        """Print a line at once: on a large model minutes pass before the next one."""
        if self.rank == 0:
            print(text, flush=True)

    def _make(self):
        workload, options = self.workload, self.options
        self._tell(f"building {workload.model}/{options.preset}")
        with self._phase("build"):
            self.state = workload.build(self.config, self.device)
        self.log.say(getattr(self.state, "hyperparameters", {}))
        self._tell(f"making {options.variant}")
        with self._phase("capture"):
            self.variant = variant_table.construct(workload.variants[options.variant], self.state)
            variants.enter(self.variant)
            garbage.keep()
        self.ranks.note_steps_of(self.variant)
        capture = self.variant.capture
        seconds = {name: round(getattr(capture, name), 4) for name in ("warmup_s", "compile_s", "capture_s")}
        self.result.update(strategy=capture.strategy, memory=capture.memory, capture_report=capture.report, **seconds)

    def _steps(self):
        """Make the steps that the flags ask for. Returns why they are not what was promised, or ""."""
        options, capture = self.options, self.variant.capture
        if capture.pools and not options.parity:
            with self._phase("canary"):
                reference = self.workload.reference
                self.result["said"] += compare_with_eager(self.state, self.variant, reference, self.device)
        if isinstance(self.variant, variants.Reruns):
            self.variant.counted()  # those of the canary are not the run's
        self.state.reset()
        replays = capture.num_replays
        with self._phase("parity" if options.parity else "profile" if options.profile else "steps"):
            make = self._parity if options.parity else self._profiled if options.profile else self._plain
            num_steps = make()
        self.result.update(
            steps=num_steps,
            graphs=sum(len(pool.graphs) for pool in capture.pools),
            replays=capture.num_replays - replays,
            expected_replays=sum(self.variant.replays_of(index) for index in range(num_steps)),
            graph_pool_bytes=sum(pool.bytes() for pool in capture.pools),
            reserved_bytes=block.reserved_bytes(self.device),
        )
        require_finite(self.result["losses"])
        if not (options.parity or options.profile):
            with self._phase("afterwards"):
                self._afterwards(num_steps)
        return broken_promise(self.result)

    def _plain(self):
        num_steps = self.options.steps or self.config.min_steps
        self.log.end_init(self.variant.capture)
        gc.collect()
        gc.disable()
        try:
            block.synchronize(self.device)
            barrier()
            start_s = time.monotonic()
            step_ms = block.timed_steps(self.variant, itertools.count(), num_steps, self.device)
            wall_s = time.monotonic() - start_s
        finally:
            gc.enable()
        self._read(num_steps)
        classes = [self.state.batch_class(index) for index in range(num_steps)]
        ms = round(math.fsum(step_ms) / len(step_ms), 5)
        self.result.update(
            ms=ms,
            step_ms=[round(each, 4) for each in step_ms],
            seconds=round(wall_s, 4),
            batch_classes=len(set(classes)),
            items_per_s=self.workload.items_per_step / ms * 1e3,
        )
        self.log.steps(step_ms, self.result["losses"], start_s, wall_s)
        return num_steps

    def _parity(self):
        num_steps = self.options.steps or PARITY_STEPS
        hasher = StateHasher(self.state.named_state())
        for index in range(num_steps):
            self.variant.step(index)
            hasher.update()
        self._read(num_steps)
        self.result.update(
            state_hashes=hasher.digests(),
            num_tensors=len(hasher.names),
            unmoved=hasher.unmoved() if num_steps > 1 else [],
        )
        return num_steps

    def _profiled(self):
        with marks.opening_sections(trace.named_range):
            # All ranks make the same steps; rank 0 writes its own.
            events = trace.trace_steps(self.variant.step, self.device.type == "cuda")
        num_steps = trace.UNTRACED_STEPS + trace.TRACED_STEPS
        self._read(num_steps)
        if self.rank == 0:
            trace.write(self.options.profile, events)
            trace.report(self.options.profile, events)
        return num_steps

    def _read(self, num_steps):
        self.result["losses"] = self.state.read_losses(num_steps)
        self.result["grad_norms"] = self.state.read_grad_norms(num_steps)

    def _afterwards(self, num_steps):
        """An evaluation for the log, and what the model does after training."""
        if self.options.mllog and isinstance(self.state, variants.Evaluates):
            start_s = time.monotonic()
            try:
                with as_eager(self.variant):
                    # A variant may have a graph for it.
                    evaluates = self.variant if isinstance(self.variant, variants.Evaluates) else self.state
                    self.result["eval_loss"] = evaluates.evaluate()
            except (Unsupported, torch.OutOfMemoryError) as error:
                self.result["said"].append(f"no evaluation: {str(error).splitlines()[0]}")
            else:
                self.log.evaluation(self.result["eval_loss"], num_steps, start_s)
        if isinstance(self.state, variants.Finishes):
            self.result["said"] += self.state.finish()
