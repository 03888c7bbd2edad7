"""That the timed window did its work: what a run promises, and what it shows of its training afterwards.

Plain functions on numbers need no torch; the samples of tensors import it where they are taken.
"""

import os
import time


def broken_promise(capture: dict, num_steps: int | None, promised: dict, kind: str | None) -> str | None:
    """Why the graphs and replays that a run counted are not those that its script promised, in words, or None.

    capture: the record's. num_steps: None where it is not known. promised: graphs and replays_per_step; null is any
    number from 1 up, where the kind ("eager", "graph", "compile") is known.
    """
    graphs, replays = capture["num_graphs"], capture["num_replays"]
    if promised["graphs"] is not None and graphs != promised["graphs"]:
        return f"{graphs} graphs made, {promised['graphs']} promised"
    wanted = promised["replays_per_step"]
    if None not in (wanted, num_steps) and replays != wanted * num_steps:
        return f"{replays} replays in {num_steps} steps, {wanted} a step promised"
    at_least_one = kind == "graph" or (kind == "compile" and None in (promised["graphs"], wanted))
    if at_least_one and not (graphs and replays):
        return f"{graphs} graphs and {replays} replays in a variant that promised some"
    return None


# ------------------------------------------------------------------------------------------------
# Steps that are kept as proof
FIRST_STEPS = 50
STEP_RATIO = 1.15
STATE_STEP = 49
NUM_TENSORS, NUM_ELEMENTS = 16, 8
# Longer than anything but a step itself should still take after the window.
PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0


def proof_steps(num_steps: int) -> list[int]:
    """Which steps of a window are kept: the first 50, then each 15 % later than the one before, and the last.

    All but the last are the same in windows of any length, so that runs have most of them in common.
    """
    steps, position = list(range(min(FIRST_STEPS, num_steps))), float(FIRST_STEPS)
    while round(position) < num_steps:
        steps.append(round(position))
        position *= STEP_RATIO
    return steps if steps[-1] == num_steps - 1 else [*steps, num_steps - 1]


def fill_series(proof: dict, num_steps: int, losses: list, grad_norms: list) -> None:
    """Put steps, loss and grad_norm of a window into a record's proof.

    losses, grad_norms: of steps 0, 1, ...; where there are fewer than steps, the last one is the last step's. What is
    not finite becomes None, as in a record.
    """
    series = [_by_step(values, num_steps) for values in (losses, grad_norms)]
    steps = [step for step in proof_steps(num_steps) if any(step in values for values in series)]
    proof["steps"] = steps
    proof["loss"], proof["grad_norm"] = ([_finite(values.get(step)) for step in steps] for values in series)


def _by_step(values, num_steps):
    if len(values) == num_steps:
        return dict(enumerate(values))
    return dict(enumerate(values[:-1])) | ({num_steps - 1: values[-1]} if values else {})


def _finite(value):
    return value if value is not None and abs(value) < float("inf") else None


# ------------------------------------------------------------------------------------------------
# The state after a fixed step


class StateSample:
    """A few elements of up to NUM_TENSORS tensors that training moves, copied in the window without waiting.

    named_state: (name, tensor) pairs; the tensors must be updated in place from step to step. The copies are the same
    in every variant: a tiny one for each tensor, in one step of the window.
    """

    def __init__(self, named_state, device):
        import torch

        tensors = [(name, tensor.detach()) for name, tensor in named_state if tensor.is_floating_point()]
        # What lies on the host could only be copied to a GPU with a wait.
        tensors = [(name, tensor) for name, tensor in tensors if tensor.numel() and tensor.device.type == device.type]
        # Counters and scales say less than what is trained.
        tensors = [pair for pair in tensors if pair[1].numel() >= NUM_ELEMENTS] or tensors
        count = min(NUM_TENSORS, len(tensors))
        tensors = [tensors[index * len(tensors) // count] for index in range(count)]
        self.names = [name for name, _ in tensors]
        self.views = [_few_elements(tensor) for _, tensor in tensors]
        self.start, self.after, self.late = (torch.zeros(count, NUM_ELEMENTS, device=device) for _ in range(3))
        self.end = []

    def take(self, where) -> None:
        """Start the copies into `where`: self.start, self.after or self.late."""
        for row, view in zip(where, self.views, strict=True):
            row[: view.numel()].copy_(view)

    def report(self) -> list[dict]:
        """name, start, after and end of each tensor, elements as FP32; waits for the device.

        They are of the beginning of the window, after the sampled step, and of the first call of `values`.
        """
        taken = (self.start.tolist(), self.after.tolist(), self.end)
        return [
            {"name": name}
            | {key: _short(each[: view.numel()]) for key, each in zip(("start", "after", "end"), rows, strict=True)}
            for name, view, *rows in zip(self.names, self.views, *taken, strict=True)
        ]

    def values(self) -> list:
        """The elements as they are now; waits for the device."""
        self.take(self.late)
        values = self.late.tolist()
        self.end = self.end or values
        return values


def _few_elements(tensor):
    """A view of NUM_ELEMENTS evenly spaced elements, or of as many as there are."""
    import torch

    formats = [torch.contiguous_format] + [torch.channels_last] * (tensor.dim() == 4)
    if not any(tensor.is_contiguous(memory_format=each) for each in formats):
        # Some other layout: along its last dimension.
        tensor = tensor[(0,) * (tensor.dim() - 1)]
        return tensor[:: max(1, tensor.numel() // NUM_ELEMENTS)][:NUM_ELEMENTS]
    flat = tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    return flat[:: max(1, flat.numel() // NUM_ELEMENTS)][:NUM_ELEMENTS]


def _short(values):
    return [None if _finite(value) is None else float(f"{value:.7g}") for value in values]


# ------------------------------------------------------------------------------------------------
# What goes on after the window, and what it leaves behind

# A steady loop allocates what it frees. On a GPU the allocator counts exactly; what may be left is what the last step
# holds and the first one did not. The resident set of a host moves by what its allocators and libraries keep.
GROWTH_BYTES = {"cuda": 64 * 2**20, "cpu": 128 * 2**20}
GROWTH_SHARE = 0.01


def held_bytes(device) -> int | None:
    """Bytes that tensors hold on the GPU; on the CPU the resident set, None where the system does not tell."""
    if device.type == "cuda":
        import torch

        return torch.cuda.memory_allocated(device)
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None


def leaked(record: dict) -> str | None:
    """Why memory grew more in a window than a steady loop's may, in words, or None: 1 % of the peak, and GROWTH_BYTES.

    A real training run makes a thousand windows: what grows by 1 % in each has no memory left.
    """
    growth = record["proof"]["growth_bytes"]
    if growth is None:
        return None
    peak = record["memory"]["peak_allocated_bytes"] or 0
    bound = max(GROWTH_BYTES.get(record["device"], GROWTH_BYTES["cpu"]), GROWTH_SHARE * peak)
    if growth <= bound:
        return None
    return f"memory grew by {growth / 2**20:.0f} MiB in the timed window, at most {bound / 2**20:.0f} MiB are usual"


def wrong_share(share: float | None, promised: dict, kind: str | None) -> str | None:
    """Why the share of kernels that graphs launched is not that of a variant of this kind, in words, or None."""
    if share is None or kind is None:
        return None
    if kind == "eager" and share > 0:
        return f"{100 * share:.1f} % of the kernels of an eager variant are launched by graphs"
    if kind == "graph" and not share and promised["graphs"] != 0:
        return "none of the profiled kernels is launched by a graph"
    return None


def look_again(read, sample, device, step_ms: float) -> dict:
    """What still goes on after the window: late_ms and late_change for a record's proof, and what `read` gave first.

    read: reads losses and gradient norms. Losses, norms and the sampled state are read, and again after a pause of
    50 ms or the time of a step and a half, at most 1 s; late_change says whether any of it has changed. late_ms is the
    processor time of this process for the first reading and, on the CPU, the pause (on a GPU threads may read data
    meanwhile, and what the device still does shows in the window's wall time).
    """
    start_s = time.process_time()
    first = read(), sample.values()
    read_s = time.process_time() - start_s
    start_s = time.process_time()
    time.sleep(min(max(PAUSE_S, 1.5e-3 * step_ms), LONGEST_PAUSE_S))
    pause_s = time.process_time() - start_s
    second = read(), sample.values()
    # As text: NaN, which is a fault of its own, is not a change.
    changed = repr(first) != repr(second)
    late_s = read_s + (pause_s if device.type == "cpu" else 0.0)
    return {"late_ms": round(late_s * 1e3, 3), "late_change": changed, "read": first[0]}
