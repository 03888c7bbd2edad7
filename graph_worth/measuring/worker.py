"""The worker: one process (on several GPUs one a rank) that makes a model's variants and runs what it is told to.

`python -m gpt3.train --preset bench --worker SOCKET` connects to the process that listens at SOCKET and answers its
commands until that process hangs up. Each command is an object with "do", each answer ends with one whose "say" is
"done" or "failed":

    build                                      the training, from the seeded start
    parity   variant, steps, seconds, keep     alone, deterministic kernels, the state hashed after each step; with
                                               `keep` the kernels of blocks, for which the variant is kept; `eager`:
                                               hashes of eager's parity, from which others are told apart
    capture  variant                           keeps it for blocks
    pilot    variant, steps                    ms of a step and of a reset
    pace                                       the host's time for one small operator
    block    variant, untimed, timed, drained  see graph_worth/measuring/block.py
    profile  variant, steps                    kernels, busy time, share launched by graphs, waiting for other ranks
    course   variant, first, steps             losses and hash of untimed steps from the seeded start
    alone    variant, steps, seconds, keep     memory and times of steps beside no other variant; with `seconds` of as
                                               many steps as take that long

Rank 0 is told; the other ranks follow it. All variants share one training, so each is entered before its steps and left
after them.
"""

import contextlib
import gc
import itertools
import math
import time
import traceback
from typing import Any

import torch

from graph_worth import garbage
from graph_worth import made_variant as variants
from graph_worth.contract import Training
from graph_worth.machine import memory
from graph_worth.machine.environment import describe_host
from graph_worth.machine.gpu_state import GpuSampler
from graph_worth.machine.host_pace import operator_us, pace_of_host
from graph_worth.made_variant import Capture, MadeVariant
from graph_worth.measuring import (
    block,
    kernel_trace,
    left_running,
    operator_count,
    parity,
    shared_memory,
    torch_settings,
)
from graph_worth.measuring.agreement import Agreement
from graph_worth.measuring.channel import Channel, Closed
from graph_worth.measuring.course import Course
from graph_worth.parallel.host_messages import barrier, of_all_ranks, of_first_rank

PROFILE_HEAT_S, LEAST_COURSE, LEAST_ALONE, PACE_S = 0.5, 3, 2, 0.05


def serve(model, device: torch.device, rank: int = 0, world_size: int = 1, fault: str = "") -> None:
    """Answer commands until the other end hangs up.

    model: `graph_worth.script.session.Model`, not built. fault: of the script's loop, the answer to the first command.
    """
    channel = Channel.connect(model.options.worker) if rank == 0 else None
    left_running.adopt_orphans()

    def give_up(fault):
        if channel is not None:
            with contextlib.suppress(Closed):
                channel.send({"say": "failed", "kind": _kind(fault.status), "reason": str(fault), "fatal": True})

    with garbage.of_run(), Agreement(rank, world_size, give_up) as ranks:
        worker = Worker(model, device, channel, ranks)
        worker.fault = fault
        try:
            worker.run()
        finally:
            worker.close()


class Worker:
    """The training, which the command build makes, the variants that are kept, and an answer to each command."""

    training: Training
    watched: block.Watched

    def __init__(self, model, device, channel: Channel | None, ranks: Agreement):
        self.model, self.device = model, device
        self.rank, self.world_size, self.channel, self.ranks = ranks.rank, ranks.world_size, channel, ranks
        self.fault = ""
        self.sampler: GpuSampler | None = None
        self.pool: torch.cuda.MemPool | None = None
        self.kept: dict[str, MadeVariant] = {}
        self.made: dict[str, dict] = {}
        self.places: dict[str, tuple[str, int]] = {}
        self.flags: dict[str, str] = {}
        # Of eager's parity, where this process has made it.
        self.of_eager: Course | None = None

    # --- commands

    def run(self) -> None:
        """Answer commands until the other end hangs up or a fault ends the worker."""
        while True:
            command = of_first_rank(self._next())
            if command is None or not self._answer(command):
                return

    def _next(self):
        if self.channel is None:
            return None
        try:
            return self.channel.receive()
        except Closed:
            return None

    def _answer(self, command) -> bool:
        """Do what the command says and tell how it went. Whether the worker can go on."""
        self.ranks.enter(command["do"])
        before = left_running.Before()
        try:
            facts = getattr(self, f"do_{command['do']}")(command)
            self.ranks.agree()
            changed, moved = _changes(self.flags, _settings()), self._moved()
            faults = {
                "changed_settings": changed and f"left torch changed: {changed}",
                "moved_state": moved and f"moved the training state: {moved}",
                "error": self._outlived(command, before),
            }
            for rank, rank_faults in enumerate(of_all_ranks(faults)):
                for kind, reason in rank_faults.items():
                    if reason:
                        where = f"rank {rank}: " if self.world_size > 1 else ""
                        self.say({"say": "failed", "kind": kind, "reason": f"{where}{reason}", "fatal": True})
                        return False
            self.say({"say": "done", **facts})
            return True
        except Closed:
            return False
        except Exception as error:
            status, reason = variants.status_of(error, self.device)
            if status is None:
                traceback.print_exc()
            may_go_on = status == "unsupported" or (status == "oom" and command["do"] in ("alone", "capture", "parity"))
            # The frames hold tensors.
            error.__traceback__ = None
        is_fatal = not may_go_on or self.world_size > 1 or self._outlived(command, before)
        status, fatal = status or "failed", bool(is_fatal)
        self.ranks.tell(status, reason)
        if not fatal:
            self.kept.pop(command.get("variant"), None)
            self._settle_memory()
        line = (str(reason).strip() or "no reason given").splitlines()[0][:400]
        with contextlib.suppress(Closed):
            self.say({"say": "failed", "kind": _kind(status), "reason": line, "fatal": fatal})
        return not fatal

    def _moved(self):
        """The first tensor of the state that is not where it was after the build, or ""."""
        if not hasattr(self, "training"):
            return ""
        named: Any = self.training.named_state
        now = {name: (str(tensor.device), tensor.data_ptr()) for name, tensor in named()}
        self.places = self.places or now
        return next((name for name, place in self.places.items() if now.get(name) != place), "")

    def _outlived(self, command, before) -> str:
        """Threads and processes that a graph left running, in a line, or ""."""
        return before.left() if self.model.kinds.get(command.get("variant")) == "graph" else ""

    def say(self, message):
        """Send a message to the other end, from rank 0."""
        if self.channel is not None:
            self.channel.send(message)

    def do_build(self, command):
        """Build the training. No worker touches the GPU before.

        "pace": measure how fast the host issues work, which takes seconds. "share": eager steps take their memory from
        the graphs' pool. "parity": nothing but parity follows, so a model that chooses kernels when it is built takes
        deterministic ones.
        """
        if self.fault:
            raise ValueError(self.fault)
        start = time.monotonic()
        torch_settings.prepare(self.device)
        if command.get("share") and self.device.type == "cuda":
            self.pool = shared_memory.share()
        with torch_settings.deterministic_kernels() if command.get("parity") else contextlib.nullcontext():
            try:
                self.training = training = self.model.build()
            except variants.Refused as error:
                raise variants.Unsupported(str(error)) from error
        named: Any = training.named_state
        self.watched = block.Watched(named(), self.device)
        host = describe_host(self.device)
        if self.device.type == "cuda":
            self.sampler = GpuSampler(host["gpus"][0]["uuid"], interval_ms=100)
            self.sampler.start()
        garbage.keep()
        self.flags = _settings()
        config = self.model.config
        return {
            "build_s": round(time.monotonic() - start, 3),
            "host": host | (pace_of_host() if command.get("pace") else {}),
            "gpus": [gpu for gpus in of_all_ranks(host["gpus"]) for gpu in gpus],
            "config": {key: value for key, value in vars(config).items() if _is_plain(value)},
            "card": list(training.card),
            "notes": list(training.notes),
            "flops_per_step": training.flops,
            "flops_convention": training.flops_convention,
            "flops_notes": list(training.flops_notes),
            "items_per_step": training.items,
            "unit": training.unit,
            "period": block.period_of(training.batch_class),
            "least_steps": getattr(config, "min_steps", 0),
            "free_bytes": memory.free_bytes(self.device),
        }

    def do_parity(self, command):
        """Steps of one variant from the seeded start with deterministic kernels; the variant is not kept.

        With "keep" it has the kernels of blocks and is kept: what is compiled for others would be compiled again.
        """
        name, count, seconds = command["variant"], command["steps"], command.get("seconds")
        if command.get("keep"):
            self.made[name] = self.do_capture(command)
            with self._entered(name, self.kept[name]):
                return self.made[name] | self._course(self.kept[name], 0, count, every_step=True, seconds=seconds)
        with torch_settings.deterministic_kernels():
            variant, facts = self._make(name)
            try:
                with self._entered(command["variant"], variant):
                    facts |= self._course(variant, 0, count, True, seconds)
                    return facts | self._beside_eager(command, variant, facts)
            finally:
                self._release(variant)
                del variant

    def do_capture(self, command):
        """Make a variant and keep it for blocks, where parity has not kept it."""
        name = command["variant"]
        if name not in self.kept:
            self.kept[name], self.made[name] = self._make(name)
        return self.made[name]

    def do_pilot(self, command):
        """Time a reset, and single steps from the seeded start, each with the device drained after it."""
        variant = self.kept[command["variant"]]
        with self._entered(command["variant"], variant):
            start = time.monotonic()
            self.training.reset()
            variants.synchronize()
            reset_s = time.monotonic() - start
            times = []
            for index in range(command["steps"]):
                start = time.monotonic()
                variant.step(index)
                variants.synchronize()
                times.append((time.monotonic() - start) * 1e3)
        return of_first_rank({"ms": round(min(times), 4), "reset_s": round(reset_s, 4)})

    def do_block(self, command):
        """Run one block of a kept variant, see graph_worth/measuring/block.py."""
        variant = self.kept[command["variant"]]
        more = {"first": command.get("first", 0), "seed": command.get("seed")}
        steps = block.Steps(command["untimed"], command["timed"], command["drained"], **more)

        def tell(text):
            self.say({"say": text})

        reset, held = command.get("reset", True), block.held_bytes(self.device)
        with self._entered(command["variant"], variant):
            if reset:
                self.training.reset()
                self.training.skip(steps.first)
            facts = block.run(variant, self.training, self.watched, steps, tell)
        gpu = self.sampler.state(facts["begin_s"], facts["end_s"]) if self.sampler else None
        facts |= {"reset": reset, "first": steps.first, "held_bytes": held, "gpu": gpu}
        if not facts["finite"] and "seed" not in command:
            raise FloatingPointError("loss is not finite in a block")
        return facts

    def do_profile(self, command):
        """Profile steps of a kept variant from the seeded start."""
        variant = self.kept[command["variant"]]
        with self._entered(command["variant"], variant):
            self.training.reset()
            return self._profile(variant, command["steps"], command["ms"])

    def do_course(self, command):
        """Untimed steps as they run in blocks: from the seeded start `first` go by, then `steps` are looked at."""
        variant = self.kept[command["variant"]]
        with self._entered(command["variant"], variant):
            return self._course(variant, command["first"], command["steps"], every_step=False)

    def do_pace(self, command):
        """Sample the host's pace."""
        return of_first_rank({"operator_us": operator_us(PACE_S)})

    def do_alone(self, command):
        """Make steps of a variant beside which torch holds nothing but the state, and tell the memory that it needs.

        "left_bytes": what torch's allocator still holds of it at the end.
        """
        name, before = command["variant"], self._settled_bytes()
        block.forget_peak(self.device)
        self.do_capture(command)
        capture = block.peak(self.device).get("peak_reserved_bytes", 0)
        block.forget_peak(self.device)
        index, steps = itertools.count(), command["steps"]
        with self._entered(name, self.kept[name]):
            self.training.reset()
            if command["seconds"]:
                start_s = time.monotonic()
                self.kept[name].step(next(index))
                variants.synchronize()
                fitting = command["seconds"] / (time.monotonic() - start_s)
                steps = of_first_rank(max(LEAST_ALONE, min(steps, int(fitting))))
            step_ms, _ = block.timed_steps(self.kept[name], index, steps, self.device)
        peaks = block.peak(self.device)
        if peaks:
            peaks["steps_reserved_bytes"] = peaks["peak_reserved_bytes"]
            peaks["peak_reserved_bytes"] = max(capture, peaks["peak_reserved_bytes"])
        if not command["keep"]:
            self._release(self.kept.pop(name))
        left = self._settled_bytes() - before
        return {"step_ms": [round(ms, 5) for ms in step_ms], "left_bytes": left, **peaks}

    # --- parts

    def _make(self, name):
        """(the variant, what its capture came to), the state as eager needs it."""
        self._settle_memory()
        reserved, threads, start = memory.reserved_bytes(self.device), block.num_threads(), time.monotonic()
        with self._memory_of(name):
            variant = self.model.make(name)
        self.ranks.note_steps_of(variant)
        variants.synchronize()
        self._settle_memory()
        capture: Capture = variant.capture
        graphs, replays = self.model.promises(name)
        self.say({"say": "made"})
        return variant, {
            "strategy": capture.strategy,
            "graphs": sum(len(pool.graphs) for pool in capture.pools),
            "promised_graphs": graphs,
            "promised_replays": replays,
            "made_s": round(time.monotonic() - start, 3),
            "warmup_s": round(capture.warmup_s, 3),
            "compile_s": round(capture.compile_s, 3),
            "capture_s": round(capture.capture_s, 3),
            "bytes_added": memory.reserved_bytes(self.device) - reserved,
            "pool_bytes": sum(pool.bytes() for pool in capture.pools),
            "memory": capture.memory,
            "threads_added": block.num_threads() - threads,
            **({"report": capture.report} if capture.report else {}),
        }

    def _course(self, variant, first, count, every_step, seconds=None):
        """seconds: after so many it makes no further step, but LEAST_COURSE at least."""
        start_s, every = time.monotonic(), range(first + count)

        def is_over(index):
            if seconds is None:
                return False
            variants.synchronize()
            return of_first_rank(index + 1 >= LEAST_COURSE and time.monotonic() - start_s > seconds)

        self.course = course = Course(self.training, hashed=every if every_step else every[-1:])
        with self.training.compared():
            for index in course.steps(first + count, is_over):
                variant.step(index)
        parity.require_finite(course.losses)
        norms = self.training.grad_norms(course.count)
        return {
            "hashes": course.digests(),
            "losses": [block.finite(loss) for loss in course.losses[-count:]],
            "grad_norms": [block.finite(norm) for norm in norms[-count:]],
        }

    def _beside_eager(self, command, variant, facts) -> dict:
        """The tensor whose bits leave eager's first, and how far the state does, of a variant whose hashes differ."""
        name, differs = command["variant"], command.get("eager") not in (None, facts["hashes"])
        if name == "eager":
            self.of_eager = self.of_eager or self.course
        answer: dict = {}
        if differs and self.of_eager is not None:
            rows = zip(self.course.hashes(), self.of_eager.hashes(), strict=False)
            changed: list[bool] = next(filter(any, ((mine != eagers).tolist() for mine, eagers in rows)), [])
            names = itertools.compress(self.course.names, changed)
            answer["tensor"] = next(filter(None, of_all_ranks(next(names, ""))), "")
        if differs and self.training.apart is not None and self.model.declared[name].parity is None:
            answer["apart"] = self.training.apart(variant)
        return answer

    def _profile(self, variant, num_steps, ms):
        if self.device.type != "cuda":
            return operator_count.profile(variant, num_steps)
        index = iter(range(10**9))

        def run_steps(count):
            for _ in range(count):
                variant.step(next(index))

        heat = min(200, int(PROFILE_HEAT_S * 1e3 / ms) + 1)
        profile = kernel_trace.profile(run_steps, num_steps, heat, barrier)
        several = kernel_trace.over_ranks(profile.events, num_steps, of_all_ranks) if self.world_size > 1 else {}
        gpu = self.sampler.state(profile.start_s - 0.3, profile.end_s) if self.sampler else None
        clock = gpu["sm_mhz"] if gpu else None
        return kernel_trace.facts(profile.events, num_steps) | several | {"sm_mhz": clock, "steps": num_steps}

    def _memory_of(self, name):
        """Within it, an eager variant takes its memory from the graphs' pool, where they share it."""
        is_eager = self.model.kinds.get(name) == "eager"
        return variants.eager_memory() if is_eager else contextlib.nullcontext()

    @contextlib.contextmanager
    def _entered(self, name, variant):
        with self._memory_of(name), variants.entered(variant):
            yield

    def _settle_memory(self):
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _settled_bytes(self):
        """Return the bytes that torch's allocator holds, without its cache, after a reset, which drops gradients."""
        self.training.reset()
        self._settle_memory()
        return memory.reserved_bytes(self.device)

    def _release(self, variant):
        variants.leave(variant)
        variant.close()
        self._settle_memory()

    def close(self):
        """Release graphs before what they were captured over."""
        for variant in self.kept.values():
            with contextlib.suppress(Exception):
                self._release(variant)
        self.kept.clear()
        close = getattr(vars(self).get("training"), "close", None)
        if close is not None:
            with contextlib.suppress(Exception):
                close()
        if self.sampler:
            self.sampler.stop()


def _kind(status):
    """The kind of `graph_worth.harness.files.facts.Raised`: a file of a run holds no "failed"."""
    return "error" if status == "failed" else status


def _is_plain(value):
    return value is None or isinstance(value, (bool, int, str)) or (isinstance(value, float) and math.isfinite(value))


def _settings() -> dict:
    """Settings of torch that change what later steps compute or how fast they are; text, to be compared."""
    backends = torch.backends
    flags = {
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "cudnn.benchmark": backends.cudnn.benchmark,
        "cudnn.deterministic": backends.cudnn.deterministic,
        "float32 matmul precision": torch.get_float32_matmul_precision(),
        "cudnn.allow_tf32": backends.cudnn.allow_tf32,
        "reduced precision in bf16": backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "anomaly detection": torch.is_anomaly_enabled(),
        "default dtype": torch.get_default_dtype(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")),
        "threads": torch.get_num_threads(),
        "flash attention": backends.cuda.flash_sdp_enabled(),
        "efficient attention": backends.cuda.mem_efficient_sdp_enabled(),
        "math attention": backends.cuda.math_sdp_enabled(),
        "cudnn attention": backends.cuda.cudnn_sdp_enabled(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        flags["stream"] = torch.cuda.current_stream().cuda_stream
    return {name: str(value) for name, value in flags.items()}


def _changes(before: dict, after: dict) -> str:
    """The settings that differ, in words, or ""."""
    return ", ".join(
        f"{name} {value} -> {after.get(name)}" for name, value in before.items() if after.get(name) != value
    )
