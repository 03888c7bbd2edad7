"""What a run measures, in passes that do not disturb each other, and the record it writes.

A training script hands over how to build its state and its variants; `run` does the rest:

    build -> variant (warm-up and capture, timed apart) -> canary -> issue pass -> settle -> timed window
          -> proof of its work -> issue pass -> section pass -> profile pass -> record

The passes are in common/passes.py, the proof in common/proof.py.

Window and parity start from the same seeded state (`state.reset()`), so that warm-up and capture leave
no trace. In the timed window nothing synchronises and nothing is printed. With --profile the steps after
settling are traced for people to look at, and nothing is timed. A run whose graphs, replays, memory or clocks are not
what its script promised has status `failed`, with its numbers.

What a script hands over, its state and its variants, is described in common/variant.py.
"""

import contextlib
import dataclasses
import errno
import functools
import gc
import sys
import time
import traceback
from pathlib import Path

import torch

from common import console, environment, garbage, marks, memory, mllog, passes, phases, proof, trace
from common import record as records
from common.agreement import DEAD_S, GRACE_S, Agreement, RankFault
from common.gpu_state import GpuSampler
from common.host_messages import of_all_ranks, of_first_rank
from common.host_state import HostActivity
from common.marks import mark, section
from common.passes import statistic
from common.source import run_hash
from common.state_hash import StateHasher, write_sidecar
from common.variant import (
    Capture,
    CaptureError,
    Closes,
    Evaluates,
    Finishes,
    HasHyperparameters,
    ReplacesModel,
    Unsupported,
    Workload,
    synchronize,
)

__all__ = ["Capture", "Unsupported", "Workload", "mark", "process_settings", "run", "section", "statistic"]
__all__ += ["synchronize"]

PARITY_STEPS, LONG_PARITY_STEPS = 20, 3
CAPTURE_PHASES = ("warmup", "compile", "capture")
# What a disk says that is full, over its quota, read-only or broken.
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EIO)


# ------------------------------------------------------------------------------------------------
# The run


def run(workload: Workload, args, device: torch.device, rank: int = 0, world_size: int = 1) -> dict:
    """Measure one variant once, write the record (rank 0) and return it.

    args: `common.config.Arguments`. A variant that cannot run, that runs out of memory or whose capture
    fails is a record with that status, not an exception; so is a disk that is full.
    """
    config, options = args.config, args.run
    if rank > 0:
        # Ranks share the path; two that write one file at once leave neither.
        options = dataclasses.replace(options, record="")
    record = records.blank(
        model=workload.model,
        preset=options.preset,
        variant=options.variant,
        round=options.round,
        device=device.type,
        config=vars(config).copy(),
        argv=sys.argv[1:],
        env=environment.describe_environment(device, world_size),
        flops_per_step=workload.flops_per_step,
        flops_convention=workload.flops_convention,
        items_per_step=workload.items_per_step,
        unit=workload.unit,
    )
    clock = phases.Phases(record)
    record["conditions"]["cores"] = passes.own_cores()
    record["extra"]["notes"] = list(workload.notes)
    _promise(record, workload, config)
    log = mllog.Log(options.mllog if rank == 0 else "", workload.hyperparameters)
    if rank == 0:
        console.print_card(record, workload)
    log.begin(record)
    with Agreement(rank, world_size, functools.partial(_give_up, record, workload, options, rank)) as ranks:
        clock.ranks = ranks
        _measure(record, workload, config, options, device, rank, log, clock)
        ranks.tell(record["status"], record["message"])
        if rank == 0:
            _hand_over(record, workload, options)
        elif rank == 1:
            _speak_for_first_rank(workload, record["message"])
    return record


def _speak_for_first_rank(workload, message):
    """Say what became of rank 0, which can neither write a record nor say so itself."""
    if message.startswith("rank 0: "):
        print(f"python -m {workload.model}.train: {message}", file=sys.stderr, flush=True)


def _give_up(record, workload, options, rank, fault):
    """The end of a run whose main thread waits for a rank that does not come any more."""
    if record["status"] in ("pass", "failed"):
        record.update(status=fault.status, message=str(fault))
    if rank == 0:
        _hand_over(record, workload, options)
    elif rank == 1:
        _speak_for_first_rank(workload, str(fault))


def _measure(record, workload, config, options, device, rank, log, clock):
    """Build, capture and all passes; what goes wrong becomes the record's status and message."""
    # opened: the variant, until it is closed.
    state = variant = opened = compare = None
    try:
        with contextlib.ExitStack() as settings:
            settings.enter_context(garbage.of_run())
            # torchrun stops all ranks once one has died: each must be able to say so before one may die.
            clock.ranks.agree()
            with clock.phase("build"):
                settings.enter_context(process_settings(device, options.parity))
                state = workload.build(config, device)
            log.say(state.hyperparameters if isinstance(state, HasHyperparameters) else {})
            with clock.phase("prepare"):
                variant = opened = workload.variants[options.variant](state)
                garbage.keep()
            for name in CAPTURE_PHASES:
                clock.add("prepare", -getattr(variant.capture, f"{name}_s"))
            clock.ranks.note_steps_of(variant)
            record["status"] = "pass"
            if options.parity:
                with clock.phase("parity"):
                    _parity_pass(record, state, variant, config, options)
                _gather_ranks(record, workload, rank)
            elif options.profile:
                with clock.phase("canary"):
                    compare = _canary(state, variant, workload.reference, device)
                with clock.phase("profile"):
                    _traced_pass(record, state, variant, config, options, device, rank)
            else:
                peaks = memory.Peaks(device)
                # Its eager steps beside a graph's memory are no part of the variant.
                with clock.phase("canary"), peaks.set_aside():
                    compare = _canary(state, variant, workload.reference, device)
                _timed_passes(record, workload, state, variant, config, options, device, log, peaks, clock, rank)
                _gather_ranks(record, workload, rank)
            if compare is not None:
                with clock.phase("canary"):
                    opened = None
                    _close(variant, record)
                    garbage.collect_all()
                    if device.type == "cuda":
                        torch.cuda.empty_cache()
                    compare()
    except RankFault as fault:
        record.update(status=fault.status, message=str(fault))
    except Unsupported as error:
        record.update(status="unsupported", message=str(error))
    except torch.OutOfMemoryError as error:
        record.update(status="oom", message=memory.explain_oom(error, device))
    except CaptureError as error:
        record.update(status="capture_failed", message=str(error))
        _blame_another(record, clock.ranks)
    except FloatingPointError as error:
        record.update(status="numerics_failed", message=str(error))
    except ValueError as error:
        # A user's mistake that only building could show; the message names the flag.
        record.update(status="failed", message=str(error))
    except Exception as error:
        if not (isinstance(error, OSError) and error.errno in DISK_ERRORS):
            traceback.print_exc()
        record.update(status="failed", message=f"{type(error).__name__}: {str(error)[:300]}")
        _blame_another(record, clock.ranks)
    # Now, since closing may wait for the others.
    clock.ranks.tell(record["status"], record["message"])
    with clock.phase("close", agree=False):
        # Graphs end before what they were captured over.
        _close(opened, record)
        _close(state, record)
        log.finish(record)
        record["env"]["run_hash"] = run_hash()
    if variant is not None:
        for name in CAPTURE_PHASES:
            record["seconds"][name] = round(getattr(variant.capture, f"{name}_s"), 3)
    clock.end()


def _blame_another(record, ranks):
    """A connection to a rank that is gone breaks before it is known which one that is."""
    fault = ranks.fault_of_another(wait_s=DEAD_S + GRACE_S)
    if fault is not None:
        record.update(status=fault.status, message=str(fault))


def _promise(record, workload, config):
    record["extra"]["kind"] = workload.kinds.get(record["variant"])
    if workload.promises is not None:
        graphs, replays = workload.promises(config, record["variant"])
        record["promised"].update(graphs=graphs, replays_per_step=replays)


def _hand_over(record, workload, options):
    """Print the end, write the record, and print it as the last line. A disk that takes no record is one line."""
    console.print_end(record, workload)
    if options.record:
        try:
            records.write(options.record, record)
        except OSError as error:
            message = f"--record {error.filename}: {error.strerror}"
            record.update(status="failed", message=message)
            print(f"python -m {workload.model}.train: {message}", file=sys.stderr)
    print(records.dumps(record), flush=True)


def _fail(record, fault):
    """Status failed with the reason; the first one stands."""
    if fault and record["status"] == "pass":
        record.update(status="failed", message=fault)


def _judge_promise(record, num_steps):
    """A run that does not make the graphs and replays that were promised is not what its name says."""
    capture = record["capture"]
    _fail(record, proof.broken_promise(capture, num_steps, record["promised"], record["extra"]["kind"]))
    if capture["num_replays"] != capture["expected_replays"]:
        _fail(record, f"{capture['num_replays']} replays counted, its steps make {capture['expected_replays']}")


def _close(opened, record):
    if not isinstance(opened, Closes):
        return
    try:
        record["extra"].update(opened.close() or {})
    except Exception as error:
        traceback.print_exc()
        if record["status"] == "pass":
            record.update(status="failed", message=f"close: {type(error).__name__}: {str(error)[:300]}")


@contextlib.contextmanager
def process_settings(device, parity):
    """A side stream for everything (captures need one, and eager must not differ), seeds, kernel choice."""
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = not parity
    # It imports torch's compiler, which takes seconds. A CPU's peak memory is the process's, and a host graph imports
    # the compiler: there all variants do.
    if parity or device.type == "cpu":
        torch.use_deterministic_algorithms(parity)
    torch.utils.deterministic.fill_uninitialized_memory = False
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.set_stream(torch.cuda.Stream(device))
    try:
        yield
    finally:
        if parity or device.type == "cpu":
            torch.use_deterministic_algorithms(False)


# ------------------------------------------------------------------------------------------------
# Passes


def _parity_pass(record, state, variant, config, options):
    """Deterministic steps from the seeded start, the whole state hashed after each; nothing is recorded as timed.

    --parity-steps, or --steps but at least 20; where the second step takes longer than 0.4 s, 3 unless --parity-steps
    asks for more.
    """
    num_steps = options.parity_steps or max(PARITY_STEPS, options.steps)
    state.reset()
    hasher = StateHasher(state.named_state())
    replays_before = variant.capture.num_replays
    index = 0
    while index < num_steps:
        synchronize()
        start = time.perf_counter()
        variant.step(index)
        synchronize()
        step_ms = (time.perf_counter() - start) * 1e3
        hasher.update()
        if index == 1 and not options.parity_steps and of_first_rank(passes.is_long(step_ms, config)):
            num_steps = LONG_PARITY_STEPS
        index += 1
    passes.fill_capture(record, variant, variant.capture.num_replays - replays_before, num_steps)
    _judge_promise(record, num_steps)
    losses, norms = state.read_losses(num_steps), state.read_grad_norms(num_steps)
    record["numerics"].update(loss=losses, grad_norm=norms, state_hash=hasher.digest())
    ranks = of_all_ranks(hasher.seen())
    if options.record:
        write_sidecar(Path(options.record).with_suffix(".parity.npz"), ranks, losses, norms)
    _require_finite(losses)


def _canary(state, variant, reference, device):
    """New inputs and moved weights: two steps of the variant against two eager ones in this process.

    A replay that ignores its input, or reads weights of the capture, is the fastest wrong benchmark.
    Raises CaptureError. On the host the losses must be equal. On a GPU timed runs use the fastest kernels,
    which may reorder sums, so they must agree to 1e-3 relative (round 0 asks for bitwise equality there);
    a replay of stale data misses that by far.

    Where a rank's GPU has no memory for eager steps beside the graphs, it returns what runs and compares them, to be
    called when the variant is closed; else None.
    """
    if not variant.capture.pools:
        return None
    ours = _two_losses(state, variant.step)
    compare = functools.partial(_compare_with_eager, state, variant, reference, device, ours)
    free = memory.free_bytes(device)
    # An eager step needs about what the graphs hold.
    fits = free is None or sum(pool.bytes() for pool in variant.capture.pools) < free
    if not all(of_all_ranks(fits)):
        return compare
    compare()
    return None


def _compare_with_eager(state, variant, reference, device, ours):
    # A variant that changes the layers themselves, as torch.compile does, changes them back for the reference.
    with variant.as_eager() if isinstance(variant, ReplacesModel) else contextlib.nullcontext():
        losses = _two_losses(state, functools.partial(reference, state))
    # Where eager diverges as well, the capture is not to blame.
    _require_finite(losses)
    tolerance = 0.0 if device.type == "cpu" else 1e-3
    for index, (our, eager) in enumerate(zip(ours, losses, strict=True)):
        if not abs(our - eager) <= tolerance * abs(eager):
            raise CaptureError(f"canary: step {index} replayed gives loss {our:.6g}, eager {eager:.6g}")


def _two_losses(state, step):
    state.reset()
    for index in range(2):
        step(index)
    return state.read_losses(2)


def _timed_passes(record, workload, state, variant, config, options, device, log, peaks, clock, rank):
    host = HostActivity()
    host.start()
    sampler = GpuSampler(record["env"]["gpu_uuid"]) if device.type == "cuda" else None
    if sampler:
        sampler.start()
    try:
        if device.type == "cuda":
            # The settling that follows brings the GPU's clock back to that of undrained steps.
            with clock.phase("reset"):
                state.reset()
            with clock.phase("issue"):
                passes.issue_pass(record, variant, "before", passes.num_warm_steps(state.batch_class))
        with clock.phase("reset"):
            state.reset()
        sample = proof.StateSample(state.named_state(), device)
        with clock.phase("settle"):
            settle, settled_ms = passes.settle(variant, config, device, sampler, state.batch_class)
        record["conditions"]["settled"], record["proof"]["settled_ms"] = settle["settled"], settled_ms
        held = proof.held_bytes(device)
        log.end_init(variant.capture, settle["seconds"])
        with clock.phase("window"):
            window_start = passes.windows(
                record, state, variant, config, options, device, sampler, settle["step_ms"], sample, clock
            )
        with clock.phase("proof"):
            losses = _prove(record, state, device, sample)
            # After a pause: autograd's thread may let go of the last gradients a little later than the step ends.
            gc.collect()
            now_held = proof.held_bytes(device)
            record["proof"]["growth_bytes"] = None if None in (held, now_held) else now_held - held
        log.window(record, losses, window_start)
        _require_finite(losses)
        rate = record["items_per_step"] / record["statistic_ms"] * 1e3
        record["extra"].update(settle=settle, host=host.stop(), items_per_s=rate)
        # Before an evaluation, whose activations are not the step's.
        record["memory"] = memory.account(device, variant.capture.pools, peaks)
        record["extra"]["allocator"] = memory.allocator_events(device)
        _judge(record)
        with clock.phase("passes"):
            if options.mllog and isinstance(state, Evaluates):
                _evaluate(record, state, variant, log)
            if isinstance(state, Finishes):
                state.finish(variant, record)
        if device.type == "cuda":
            with clock.phase("issue"):
                passes.issue_pass(record, variant, "after")
        with clock.phase("sections"):
            num_section_steps = passes.num_section_steps(record)
            passes.section_pass(record, variant, num_section_steps)
            passes.report_layers(record, workload.layers_flops)
        if device.type == "cuda" and options.profile_steps:
            with clock.phase("profile"):
                passes.profile_pass(record, variant, options, sampler, num_section_steps)
            share = record["proof"]["graph_kernel_share"]
            _fail(record, proof.wrong_share(share, record["promised"], record["extra"]["kind"]))
    finally:
        if sampler:
            sampler.stop()
    record["capture"]["nodes"] = passes.nodes(variant)


def _prove(record, state, device, sample):
    """Fill in numerics and proof from what the window left behind, and return its losses."""
    num_steps, num_compared = len(record["steps"]["gpu_ms"]), record["config"]["min_steps"]

    def read():
        return state.read_losses(num_steps), state.read_grad_norms(num_steps)

    seen = proof.look_again(read, sample, device, record["statistic_ms"])
    losses, norms = seen.pop("read")
    record["proof"].update(seen, state_sample=sample.report())
    record["numerics"].update(loss=losses[:num_compared], grad_norm=norms[:num_compared])
    proof.fill_series(record["proof"], num_steps, losses, norms)
    return losses


def _judge(record):
    """What a run that lies about its window is told by itself; see benchmarks/trust.py for what eager tells of it."""
    _judge_promise(record, len(record["steps"]["gpu_ms"]))
    _fail(record, passes.wrong_wall(record))
    _fail(record, proof.leaked(record))


def _gather_ranks(record, workload, rank):
    """record["ranks"]: what each rank has to say of itself. What one lacks, the run lacks."""
    if record["env"]["world_size"] == 1:
        return
    own = {"rank": rank, "stage": workload.stage, "gpu_uuid": record["env"]["gpu_uuid"]}
    own |= {name: record[name] for name in ("busy_ms", "idle_fraction", "memory", "clocks")}
    own |= {"statistic_ms": record["extra"].pop("own_statistic_ms", None)}
    own |= {"num_replays": record["capture"]["num_replays"], "state_hash": record["numerics"]["state_hash"]}
    record["ranks"] = of_all_ranks(own | {"status": record["status"], "message": record["message"]})
    for other in record["ranks"]:
        status, message = other.pop("status"), other.pop("message")
        if status != "pass" and record["status"] == "pass":
            record.update(status=status, message=f"rank {other['rank']}: {message}")


def _evaluate(record, state, variant, log):
    """Mean loss over held-out batches after the window, for the log and as extra.eval_loss.

    What was timed stands, whether an evaluation is possible or not.
    """
    start = time.monotonic()
    try:
        with variant.as_eager() if isinstance(variant, ReplacesModel) else contextlib.nullcontext():
            # A variant may have a graph for it.
            record["extra"]["eval_loss"] = (variant if isinstance(variant, Evaluates) else state).evaluate()
    except (Unsupported, torch.OutOfMemoryError) as error:
        record["extra"]["notes"].append(f"no evaluation: {str(error).splitlines()[0]}")
    else:
        log.evaluation(record["extra"]["eval_loss"], len(record["steps"]["gpu_ms"]), start)


def _traced_pass(record, state, variant, config, options, device, rank):
    """With --profile: a few steady steps as a Chrome trace, each section a range in it; nothing is timed."""
    sampler = GpuSampler(record["env"]["gpu_uuid"]) if device.type == "cuda" else None
    if sampler:
        sampler.start()
    try:
        state.reset()
        record["extra"]["settle"], _ = passes.settle(variant, config, device, sampler)
        record["conditions"]["settled"] = record["extra"]["settle"]["settled"]
    finally:
        if sampler:
            sampler.stop()
    state.reset()
    replays_before = variant.capture.num_replays
    with marks.opening_sections(trace.named_range):
        # All ranks make the same steps; rank 0 traces its own.
        events = trace.trace_steps(variant.step, device.type == "cuda")
    num_steps = trace.UNTRACED_STEPS + trace.TRACED_STEPS
    passes.fill_capture(record, variant, variant.capture.num_replays - replays_before, num_steps)
    _judge_promise(record, num_steps)
    losses, norms = state.read_losses(num_steps), state.read_grad_norms(num_steps)
    record["numerics"].update(loss=losses, grad_norm=norms)
    _require_finite(losses)
    if rank == 0:
        trace.write(options.profile, events)
        trace.report(options.profile, events)


def _require_finite(losses):
    for index, loss in enumerate(losses):
        if not abs(loss) < float("inf"):
            raise FloatingPointError(f"loss is {loss} at step {index}")
