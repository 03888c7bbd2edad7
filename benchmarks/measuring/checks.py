"""Checks of a variant's blocks, which must pass before its time counts: a wrong benchmark is usually the fastest.

Pure functions of the facts of a run. Each check compares with the base or with the reference in the same cycle, and
names the fault in one line. docs/method.md lists them. A CPU shares its cores with other programs, so there a check of
time accuses a variant only where every block shows the fault, and clearly more than the base's blocks do.
"""

import statistics

from benchmarks.files.run_file import Block, Build, Variant

# A variant of kind "graph" whose graphs launch less than this is not the capture that its name says.
LEAST_GRAPH_SHARE = {"cuda": 0.2, "cpu": 0.05}
MOVED_TOLERANCE = 0.10
LEAK_BYTES = {"cuda": 32 * 2**20, "cpu": 64 * 2**20}
CLOCK_SHARE = 0.05
CLOCK_SLACK_S = {"cuda": 0.015, "cpu": 0.05}
LATE_MS = 10.0
# Medians do not see what a few steps do.
MEAN_OVER_MEDIAN, LEAST_HIDDEN_MS = 1.5, 30.0
# Rounding of a loss that is printed with seven digits.
LEAST_LOSS_DEVIATION = {"cuda": 1e-5, "cpu": 1e-6}
# Kernels whose bits differ once in a few hundred calls, as cuDNN's attention backward, let a single block part from the
# others: in Llama 2 70B by up to 3.4e-3, eager's blocks like graphs'. More than this is no rounding.
LARGEST_OF_ONE_BLOCK = 1e-2


def fault_of(
    name: str, build: Build, device: str, tolerance: float = 0.0, promised: tuple = (None, None), ranks: int = 1
) -> str:
    """Return the reason why the blocks of a variant do not count, or "".

    Args:
        name: of the variant.
        build: its build.
        device: "cuda" or "cpu".
        tolerance: relative difference of losses that the variant declares.
        promised: (graphs, replays a step) that it declares; None is any number from 1 up.
        ranks: of the run.
    """
    variant, base = build.variants[name], build.variants[build.base]
    if not variant.blocks or not base.blocks:
        return ""
    reference = build.variants.get(variant.parity.reference, base) if variant.parity else base
    return (
        _promise_fault(variant, promised)
        or _share_fault(variant, device, promised[0])
        or _clock_fault(variant, base, device, ranks)
        or _late_fault(variant, base)
        or _outlier_fault(variant, base, device)
        or _growth_fault(variant, device)
        or _thread_fault(variant, base)
        or _training_fault(variant, reference if reference.blocks else base, build, device, tolerance)
    )


def _promise_fault(variant: Variant, promised) -> str:
    graphs, replays = promised
    made, is_graph = variant.capture.get("graphs", 0), variant.kind == "graph" and graphs != 0
    if graphs is not None and made != graphs:
        return f"{made} graphs made, {graphs} promised"
    if is_graph and not made:
        return "no graph made by a variant that promised some"
    for block in variant.blocks:
        wanted = block.expected_replays if replays is None else replays * block.steps
        if block.replays != wanted:
            return f"{block.replays} replays in {block.steps} steps of cycle {block.cycle}, {wanted} promised"
        if is_graph and not block.replays:
            return f"no replay in cycle {block.cycle}"
    return ""


def _share_fault(variant, device, promised_graphs) -> str:
    share, least = variant.profile.get("graph_share"), LEAST_GRAPH_SHARE[device]
    launched = "kernels" if device == "cuda" else "operators"
    if share is not None and variant.kind == "eager" and share > 0:
        return f"graphs launch {100 * share:.1f} % of the {launched} of an eager variant"
    if share is not None and variant.kind == "graph" and share < least and promised_graphs != 0:
        return f"graphs launch {100 * share:.1f} % of the {launched}, at least {100 * least:g} % are expected"
    return ""


def _clock_fault(variant, base, device, ranks) -> str:
    gaps = _clock_gaps_s(variant)
    if not gaps:
        return ""
    middle = statistics.median(gaps)
    # With several ranks, the slowest rank of each step counts. Together these steps may take longer than any rank did.
    if ranks > 1 and middle < 0:
        return ""
    least_s, slack_s = abs(middle), CLOCK_SLACK_S[device]
    if device == "cpu":
        # A busy CPU may keep the other process waiting, at the begin or at the end of a block.
        least_s = min(gaps) if middle > 0 else -max(gaps)
        slack_s = max(slack_s, 2 * max(map(abs, _clock_gaps_s(base)), default=0.0))
    parent_s = statistics.median(block.parent_s for block in variant.blocks if not block.busy_processes)
    if least_s <= max(CLOCK_SHARE * parent_s, slack_s):
        return ""
    return f"its steps sum to {parent_s - middle:.3f} s, another process saw {parent_s:.3f} s"


def _clock_gaps_s(variant) -> list[float]:
    """For each quiet block the time of its steps by another process's clock less that by its own."""
    quiet = [block for block in variant.blocks if not block.busy_processes]
    return [block.parent_s - block.mean_ms * block.steps / 1e3 for block in quiet]


def _late_fault(variant, base) -> str:
    if any(block.late_change for block in variant.blocks):
        return "the training state still changed after a block had ended"
    # Work that goes on after a variant's block may reach the base's next block.
    usual = min(block.late_ms for block in base.blocks)
    late = statistics.median(block.late_ms for block in variant.blocks)
    if late > usual + LATE_MS:
        return f"{late:.0f} ms of work went on after a block had ended, {usual:.0f} ms in the base"
    return ""


def _outlier_fault(variant, base, device) -> str:
    # Hidden work hides in every block. A burst of the host may reach every block of a variant and one of the base's.
    cores = max(1.0, *(_cpu_ms(block) / block.ms for block in base.blocks))
    pairs = [(_worked_ms(block, cores, device), block) for block in variant.blocks]
    own = min(ms / block.ms for ms, block in pairs)
    usual = max(block.mean_ms / block.ms for block in base.blocks)
    hidden_ms = min((ms - block.ms) * block.steps for ms, block in pairs)
    if own > MEAN_OVER_MEDIAN * max(1.0, usual) and hidden_ms > LEAST_HIDDEN_MS:
        return f"the mean of its steps is {own:.1f} times their median, {usual:.1f} times in the base"
    return ""


def _worked_ms(block, cores, device) -> float:
    """Mean of a block's steps; on a CPU without the time in which other programs had the cores."""
    return min(block.mean_ms, _cpu_ms(block) / cores) if device == "cpu" else block.mean_ms


def _cpu_ms(block: Block) -> float:
    """Processor time of a step, on all cores."""
    return block.mean_ms if block.cpu_ms is None else block.cpu_ms


def _growth_fault(variant, device) -> str:
    # The first cycle may still allocate memory that stays.
    grown = sum(block.growth_bytes or 0 for block in variant.blocks if block.cycle > 0)
    return f"memory grew by {grown / 2**20:.0f} MiB in its blocks" if grown > LEAK_BYTES[device] else ""


def _thread_fault(variant, base) -> str:
    if variant is base or variant.kind == "compile":
        return ""
    usual = {block.cycle: block.threads for block in base.blocks}
    extra = min((own.threads - usual[own.cycle] for own in variant.blocks if own.cycle in usual), default=0)
    return f"{extra:g} threads more than the base in its blocks" if extra >= 1 else ""


def _training_fault(variant, reference, build, device, tolerance) -> str:
    if reference is variant:
        return ""
    scatter = scatter_of_losses(build)
    bound = max(2 * scatter, tolerance, LEAST_LOSS_DEVIATION[device])
    others: dict[int, Block] = {}
    for block in reference.blocks:
        others.setdefault(block.cycle, block)
    deviations = []
    # Where the base's own blocks part, a single one of the variant may, too, and the median counts.
    of_one_block = max(bound, LARGEST_OF_ONE_BLOCK) if scatter > LEAST_LOSS_DEVIATION[device] else bound
    for own in variant.blocks:
        other = others.get(own.cycle)
        if other is None or not (own.reset and other.reset):
            continue
        deviation = loss_deviation(own.losses, other.losses)
        if deviation is None:
            return f"its losses in cycle {own.cycle} are not those of as many steps"
        if deviation > of_one_block:
            return (
                f"its losses in cycle {own.cycle} differ from the reference's by {deviation:.1e}, "
                f"two eager blocks by {scatter:.1e}"
            )
        deviations.append(deviation)
        moved = [(a, b) for a, b in zip(own.moved, other.moved, strict=False) if b]
        if any(a is None for a, _ in moved):
            return f"a block of cycle {own.cycle} moved the training state to values that are not finite"
        ratio = statistics.median(a / b for a, b in moved) if moved else 1.0
        if abs(ratio - 1) > MOVED_TOLERANCE:
            return f"a block of cycle {own.cycle} moved the training state {ratio:.2f} times as far as the reference"
    middle = statistics.median(deviations) if deviations else 0.0
    if middle > bound:
        return (
            f"its losses differ from the reference's by {middle:.1e} in most cycles, two eager blocks by {scatter:.1e}"
        )
    return ""


def scatter_of_losses(build: Build) -> float:
    """Return the largest relative difference between losses of two blocks of the base, over all cycles."""
    base = build.variants.get(build.base)
    blocks = [block for block in base.blocks if block.reset] if base else []
    deviations = [loss_deviation(block.losses, blocks[0].losses) for block in blocks[1:]]
    return max((each for each in deviations if each is not None), default=0.0)


def loss_deviation(own: list[float | None], other: list[float | None]) -> float | None:
    """Return the largest relative difference of two rows of losses; None where they cannot be compared."""
    pairs = [(a, b) for a, b in zip(own, other, strict=False) if a is not None and b is not None]
    if not len(own) == len(other) == len(pairs):
        return None
    return max((abs(a - b) / max(abs(b), 1e-30) for a, b in pairs), default=0.0)
