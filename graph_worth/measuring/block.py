"""One block: a variant's steps from the seeded state, timed without any synchronisation in between.

A block has three parts, on consecutive batches: a few untimed steps, the timed steps, and one to three steps that are
drained at each mark, which give the host's issue time in the same seconds. Afterwards it looks at what training did.
"""

import gc
import itertools
import math
import os
import random
import time
from dataclasses import dataclass

import torch

from graph_worth.machine import memory
from graph_worth.made_variant import synchronize
from graph_worth.measuring import marks
from graph_worth.parallel.host_messages import barrier, is_distributed, of_all_ranks

# Elements of each tensor, and tensors, whose movement over a block is compared with eager's.
NUM_TENSORS, NUM_ELEMENTS = 16, 4096
NUM_LOSSES = 8
# Tensors with fewer elements are counters and rates. Where none has more, those that require gradients are watched.
LEAST_ELEMENTS = 8
SCALED_DTYPES, SCALED_BY = (torch.float64, torch.float32, torch.bfloat16, torch.float16), (0.025, 0.05)
PAUSE_S = 0.03


@dataclass(frozen=True)
class Steps:
    """Steps of a block; alike for all variants of a cycle, so that they train on the same batches.

    Attributes:
        untimed, timed, drained: numbers of steps.
        first: the number of the first step, so of its batch.
        seed: of `scale_state`, after the untimed steps; None where it is not scaled.
    """

    untimed: int
    timed: int
    drained: int
    first: int = 0
    seed: int | None = None

    @property
    def total(self) -> int:
        """Steps of the whole block."""
        return self.untimed + self.timed + self.drained


class Watched:
    """A fixed choice of elements of the training state on a device, to say how far a block has moved it."""

    def __init__(self, named_state, device: torch.device):
        self.device = device
        tensors = [tensor.detach() for _, tensor in _of_training(named_state) if tensor.device.type == device.type]
        count = min(NUM_TENSORS, len(tensors))
        self._views = [_few(tensors[index * len(tensors) // count]) for index in range(count)]

    def values(self) -> list[torch.Tensor]:
        """Copies of the elements, FP32."""
        return [view.float().clone() for view in self._views]

    @staticmethod
    def moved(before: list[torch.Tensor], after: list[torch.Tensor]) -> list[float | None]:
        """The norm of each tensor's movement; None where it is not finite. Waits for the device."""
        norms = [(b - a).double().norm() for a, b in zip(before, after, strict=True)]
        return [finite(value) for value in torch.stack(norms).tolist()] if norms else []


def _of_training(named_state) -> list[tuple[str, torch.Tensor]]:
    """The floating-point tensors of a state that training moves, by name, without counters and rates."""
    floating = [(name, tensor) for name, tensor in named_state if tensor.is_floating_point()]
    large = [(name, tensor) for name, tensor in floating if tensor.numel() >= LEAST_ELEMENTS]
    return large or [(name, tensor) for name, tensor in floating if tensor.requires_grad and tensor.numel()]


def _few(tensor):
    """Evenly spaced elements of a tensor in memory order; of one with gaps, of its last dimension."""
    formats = [torch.contiguous_format] + [torch.channels_last] * (tensor.dim() == 4)
    if not any(tensor.is_contiguous(memory_format=memory_format) for memory_format in formats):
        tensor = tensor[(0,) * (tensor.dim() - 1)]
        return tensor[:: max(1, tensor.numel() // NUM_ELEMENTS)][:NUM_ELEMENTS]
    flat = tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    return flat[:: max(1, flat.numel() // NUM_ELEMENTS)][:NUM_ELEMENTS]


def scale_state(named_state, seed: int) -> None:
    """Scale floating-point tensors of the state in place by 2.5 to 5 % up or down, by `seed` and the tensor's name.

    Left alone are DTensors, tensors of FP8, counters and rates. Shards of one tensor have one name, so one factor.
    """
    for name, tensor in _of_training(named_state):
        detached = tensor.detach()
        # DTensors and quantized tensors stay as they are.
        if type(detached) is torch.Tensor and detached.dtype in SCALED_DTYPES:
            draw = random.Random(f"{seed} {name}")
            detached.mul_(1 + draw.choice((-1, 1)) * draw.uniform(*SCALED_BY))


def run(variant, training, watched: Watched, steps: Steps, tell) -> dict:
    """Run one block of an entered variant and return its facts, JSON-able; times in ms.

    tell: tell(text) passes "timed_begin" and "timed_end" on, so that another process can time the timed steps.
    """
    device, first = watched.device, steps.first
    gc.collect()
    gc.disable()
    try:
        before = watched.values()
        held = held_bytes(device)
        index = itertools.count(first)
        for number in range(steps.untimed):
            variant.step(next(index))
            if number == 0:
                # A reset may have dropped gradients, which this step has made again.
                held = held_bytes(device)
        if hasattr(variant, "counted"):
            variant.counted()
        if steps.seed is not None:
            scale_state(training.named_state(), steps.seed)
            before = watched.values()
        step_ms, facts = _timed(variant, index, steps.timed, device, tell)
        reruns = variant.counted() if hasattr(variant, "counted") else None
        if reruns is not None and not reruns.get("steps"):
            raise ValueError("counted() tells no steps of a block that made some")
        issue_ms = [ms for _ in range(steps.drained) if (ms := issue_ms_of(variant, next(index), device)) is not None]
        synchronize()
        after = watched.values()
    finally:
        gc.enable()
    growth_bytes = held_bytes(device) - held
    timed = range(first + steps.untimed, first + steps.untimed + steps.timed)
    facts |= {
        "untimed_steps": steps.untimed,
        "drained_steps": steps.drained,
        "step_ms": [round(ms, 5) for ms in step_ms],
        "classes": class_numbers([training.batch_class(step) for step in timed]),
        "issue_ms": [round(ms, 4) for ms in issue_ms],
        "process": os.getpid(),
        "threads": num_threads(),
        "reserved_bytes": memory.reserved_bytes(device),
        "growth_bytes": growth_bytes,
        "expected_replays": sum(variant.replays_of(step) for step in timed),
        "moved": watched.moved(before, after),
        "reruns": reruns,
    }
    return facts | _afterwards(training, watched, after, range(first, first + steps.total), device)


def _timed(variant, index, count, device, tell):
    """(ms of each timed step, facts of all of them)."""
    replays = variant.capture.num_replays
    synchronize()
    barrier()
    tell("timed_begin")
    start_s = time.monotonic()
    step_ms, fastest_ms = timed_steps(variant, index, count, device)
    end_s = time.monotonic()
    tell("timed_end")
    replays = variant.capture.num_replays - replays
    return step_ms, {
        "replays": replays,
        "begin_s": start_s,
        "end_s": end_s,
        "fastest_ms": [round(ms, 5) for ms in fastest_ms] if is_distributed() else [],
    }


def timed_steps(variant, index, count: int, device: torch.device) -> tuple[list[float], list[float]]:
    """Make `count` steps without waiting for the device in between. index: iterator over their numbers.

    Returns:
        Ms of each step between boundaries: events on a GPU, wall time on the CPU. First those of the slowest rank at
        each step, then those of the fastest.
    """
    if device.type == "cuda":
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        events[0].record()
        for event in events[1:]:
            variant.step(next(index))
            event.record()
        torch.cuda.synchronize(device)
        local_ms = [a.elapsed_time(b) for a, b in itertools.pairwise(events)]
    else:
        stamps = [time.perf_counter()]
        for _ in range(count):
            variant.step(next(index))
            stamps.append(time.perf_counter())
        local_ms = [(b - a) * 1e3 for a, b in itertools.pairwise(stamps)]
    at_once = list(zip(*of_all_ranks(local_ms), strict=True))
    return [max(times) for times in at_once], [min(times) for times in at_once]


def issue_ms_of(variant, index: int, device: torch.device) -> float | None:
    """Return the host's ms to issue a step; None on the CPU.

    The queue is drained at each mark, and the drains are not counted: it holds about 1,024 launches, and a host that
    runs further ahead waits for the GPU.
    """
    if device.type != "cuda":
        variant.step(index)
        return None
    spent, last = 0.0, 0.0

    def drain():
        nonlocal spent, last
        spent += time.perf_counter() - last
        torch.cuda.synchronize()
        last = time.perf_counter()

    torch.cuda.synchronize()
    with marks.watching_marks(drain):
        last = time.perf_counter()
        variant.step(index)
        drain()
    return spent * 1e3


def class_numbers(classes: list) -> list[int]:
    """Return the number of each step's class of batch, in the order of their first steps; [] where all are of one."""
    numbers = {kind: number for number, kind in enumerate(dict.fromkeys(classes))}
    return [numbers[kind] for kind in classes] if len(numbers) > 1 else []


def period_of(batch_class, most: int = 256) -> int | None:
    """Steps after which the classes of batches come again, or None where they do not within `most` steps."""
    classes = [batch_class(index) for index in range(2 * most)]
    for period in range(1, most + 1):
        if all(classes[index] == classes[index + period] for index in range(most)):
            return period
    return None


def _afterwards(training, watched, after, steps, device):
    """Losses of the block's steps, and whether anything still works or changes after a pause.

    On the CPU `late_ms` is the processor time of the pause, on a GPU the time until the device is idle after it.
    """
    try:
        losses = training.results(steps.stop)[steps.start :]
        fault = ""
    except FloatingPointError as error:
        losses, fault = [], str(error)
    sleep_cpu_s = time.process_time()
    time.sleep(PAUSE_S)
    late_s = time.process_time() - sleep_cpu_s
    if device.type == "cuda":
        start = time.perf_counter()
        torch.cuda.synchronize(device)
        late_s = time.perf_counter() - start
    changed = any(not torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(after, watched.values(), strict=True))
    count = len(losses)
    chosen = sorted({round(number * (count - 1) / (NUM_LOSSES - 1)) for number in range(NUM_LOSSES)}) if count else []
    return {
        "losses": [finite(losses[index]) for index in chosen],
        "finite": not fault and all(math.isfinite(loss) for loss in losses),
        "late_ms": round(late_s * 1e3, 3),
        "late_change": changed,
    }


def finite(value: float) -> float | None:
    """The value with seven digits; None where it is not finite."""
    return float(f"{value:.7g}") if math.isfinite(value) else None


def num_threads() -> int:
    """Threads of this process."""
    return len(os.listdir("/proc/self/task"))


def held_bytes(device: torch.device) -> int:
    """Bytes of live tensors on the GPU; on the CPU the resident set."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else memory.reserved_bytes(device)


def forget_peak(device: torch.device) -> None:
    """Let `peak` count from now on."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak(device: torch.device) -> dict[str, int]:
    """Return the GPU's memory since `forget_peak`; {} on the CPU.

    peak_reserved_bytes: most that torch's allocator held; driver_bytes: what the driver says is taken now, by all
    processes, with CUDA's context and the kernels that are loaded.
    """
    if device.type != "cuda":
        return {}
    free, total = torch.cuda.mem_get_info(device)
    return {"peak_reserved_bytes": torch.cuda.max_memory_reserved(device), "driver_bytes": total - free}
