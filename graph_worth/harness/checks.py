"""Checks of a variant's blocks, which must pass before its time counts: a wrong benchmark is usually the fastest.

Pure functions of the facts of a run. Each check compares with the base or with the reference in the same cycle, names
its `Fault`, and says it in one line. On a GPU every block counts. A CPU shares its cores with other programs: no time
that was taken there accuses a variant, and threads do only where three blocks of eight show them, never fewer.
"""

import enum
import itertools
import math
import statistics as plain
from collections.abc import Sequence
from dataclasses import dataclass

from graph_worth.harness.files.facts import Again, Block, Build, Run, Trained, Variant
from graph_worth.measuring.parity import SCATTER_FACTOR, amount, loss_deviation

# A variant of kind "graph" whose graphs launch less than this is not the capture that its name says, unless its traits
# name the small part that it holds. Such graphs launch something all the same.
LEAST_GRAPH_SHARE = {"cuda": 0.2, "cpu": 0.05}
# Of 1,232 pairs of published blocks of one cycle none parts by more than 0.5 %; a learning rate x 0.95 does by 5 %.
MOVED_TOLERANCE = 0.02
LEAK_BYTES = {"cuda": 32 * 2**20, "cpu": 64 * 2**20}
CLOCK_SHARE = 0.05
# What a block takes outside of its timed steps, over the base's: of a single block, and of most blocks.
OUTSIDE_SHARE, OUTSIDE_SHARE_OF_MOST, OUTSIDE_SLACK_S = 1.0, 0.25, 0.1
# A drained step may take twice a timed one. Taken off the base twice, too, the steps of a slow base would hide its own
# time outside, and a graph that is faster would be accused of the difference.
STEPS_OF_VARIANT, STEPS_OF_BASE = 2, 1
CLOCK_SLACK_S = 0.015
LATE_MS = 10.0
# Rounding of a loss that is printed with seven digits.
LEAST_LOSS_DEVIATION = {"cuda": 1e-5, "cpu": 1e-6}
# Blocks on a CPU that have to show more threads.
LEAST_CPU_BLOCKS, CPU_SHARE = 3, 3 / 8
# Kernels whose bits differ once in a few hundred calls, as cuDNN's attention backward, let a single block part from the
# others: in Llama 2 70B by up to 3.4e-3, eager's blocks like graphs'. More than this is no rounding.
LARGEST_OF_ONE_BLOCK = 1e-2
# Of audits, which a process repeats that may have chosen other kernels: relative differences of losses, those of eager
# itself, and of how far the state moved. Two draws differ by several percent.
AUDIT_TOLERANCE, AUDIT_TOLERANCE_OF_BASE, AUDIT_MOVED_TOLERANCE = 1e-3, 0.05, 0.05


class Fault(enum.Enum):
    """The kind of a fault, beside the sentence that says it."""

    RAISED = "raised"
    SEALED = "sealed"
    NOT_TIMED = "not timed"
    NOT_COMPARED = "not compared"
    PARITY = "parity"
    PARITY_AFTER = "parity after its blocks"
    GRAPHS = "graphs"
    REPLAYS = "replays"
    GRAPH_SHARE = "graph share"
    CLOCK = "clock"
    OUTSIDE = "work outside of the timed steps"
    LATE_WORK = "late work"
    LATE_CHANGE = "late change"
    GROWTH = "growth"
    THREADS = "threads"
    LOSSES = "losses"
    MOVEMENT = "movement"
    NOT_WATCHED = "not watched"
    AUDIT = "audit"
    BELOW_BUSY = "step below its busy time"
    ABOVE_CEILING = "gain above the ceiling"
    NO_KERNELS = "no kernels in the profile"


# Faults of what was computed, not of how.
OF_NUMBERS = {Fault.PARITY, Fault.PARITY_AFTER, Fault.LOSSES, Fault.MOVEMENT, Fault.LATE_CHANGE, Fault.NOT_WATCHED}
OF_NUMBERS |= {Fault.AUDIT}
# A profile bounds how fast a GPU can be (judge.Judged).
FENCES = {Fault.BELOW_BUSY, Fault.ABOVE_CEILING, Fault.NO_KERNELS}


@dataclass(frozen=True)
class Found:
    """A fault and its sentence.

    Attributes:
        cycle: where losses parted, if so little that eager, too, might have parted from itself there.
    """

    fault: Fault
    reason: str
    cycle: int | None = None


def fault_of(run: Run, build: Build, name: str) -> Found | None:
    """Return the reason why the blocks of a variant do not count, or None."""
    variant, anchor = build.variants[name], build.variants.get(build.anchor)
    base = anchor if anchor is not None and anchor.blocks else variant
    reference = base if name == run.control else build.variants.get(reference_of(build, name), base)
    return (
        _promise_fault(variant)
        or _share_fault(variant, run.device)
        or _clock_fault(variant, run)
        or _outside_fault(variant, base, run.device)
        or _late_fault(variant, base, run.device)
        or _growth_fault(build, name, run.device)
        or _thread_fault(variant, base, run.device)
        or _training_fault(variant, reference if reference.blocks else base, base, run, build.variants.get(run.control))
        or _audit_fault(variant, build.variants.get(variant.reference, base), base)
    )


def reference_of(build: Build, name: str) -> str:
    """Return the variant that a variant's training is compared with: the declared one, or the anchor for a reference.

    A reference that declares that it draws other random numbers, and does, is compared with itself; judge.py says so.
    """
    variant, anchor = build.variants[name], build.variants.get(build.anchor)
    is_last = build.variants.get(variant.reference, variant).reference == name
    if not is_last or anchor is None or anchor is variant or anchor.reference == name:
        return variant.reference
    deviations = [loss_deviation(a.losses, b.losses) for a, b in compared(variant, anchor)]
    for courses, others in ((variant.parity, anchor.parity), (variant.after, anchor.after)):
        deviations += [loss_deviation(a.losses, b.losses) for a, b in zip(courses[:1], others[:1], strict=False)]
    is_other = any(deviation is None or deviation > LARGEST_OF_ONE_BLOCK for deviation in deviations)
    return variant.reference if is_other and "draws" in variant.traits else build.anchor


def _quiet(variant: Variant) -> list[Block]:
    return [block for block in variant.blocks if not block.busy_processes]


def _promise_fault(variant: Variant) -> Found | None:
    capture = variant.capture
    is_graph, replays = variant.kind == "graph" and capture.promised_graphs != 0, capture.promised_replays
    if capture.promised_graphs is not None and capture.graphs != capture.promised_graphs:
        return Found(Fault.GRAPHS, f"{capture.graphs} graphs made, {capture.promised_graphs} promised")
    if is_graph and not capture.graphs:
        return Found(Fault.GRAPHS, "no graph made by a variant that promised some")
    for block in variant.blocks:
        wanted = block.expected_replays if replays is None else replays * block.steps
        if block.replays != wanted:
            reason = f"{block.replays} replays in {block.steps} steps of cycle {block.cycle}, {wanted} promised"
            return Found(Fault.REPLAYS, reason)
        if is_graph and not block.replays:
            return Found(Fault.REPLAYS, f"no replay in cycle {block.cycle}")
    return None


def _share_fault(variant, device) -> Found | None:
    share, least = variant.profile.graph_share, 0.0 if "part" in variant.traits else LEAST_GRAPH_SHARE[device]
    launched = "kernels" if device == "cuda" else "operators"
    if share is None:
        return None
    if variant.kind == "eager" and share > 0:
        return Found(Fault.GRAPH_SHARE, f"graphs launch {100 * share:.1f} % of the {launched} of an eager variant")
    if variant.kind == "graph" and (share < least or not share) and variant.capture.promised_graphs != 0:
        wanted = f"at least {100 * least:g} %" if least else "some"
        reason = f"graphs launch {100 * share:.1f} % of the {launched}, {wanted} are expected"
        return Found(Fault.GRAPH_SHARE, reason)
    return None


def _clock_fault(variant, run) -> Found | None:
    for block in _quiet(variant) if run.device == "cuda" else ():
        own_s = block.mean_ms * block.steps / 1e3
        # With several ranks the slowest rank of each step counts. Together they may take longer than any rank did.
        seen = [seen_s for seen_s in (block.parent_s, block.worker_s) if run.ranks == 1 or seen_s >= own_s]
        if any(abs(seen_s - own_s) > max(CLOCK_SHARE * seen_s, CLOCK_SLACK_S) for seen_s in seen):
            reason = f"its steps in cycle {block.cycle} sum to {own_s:.3f} s, another process saw"
            reason += f" {block.parent_s:.3f} s, and another clock of its own {block.worker_s:.3f} s"
            return Found(Fault.CLOCK, reason)
    return None


def _outside_fault(variant, base, device) -> Found | None:
    """Work in the untimed or drained steps, or where the variant is entered or left, by the other process's clock."""
    usual = [outside_s for outside_s, _ in _outside(base, STEPS_OF_BASE)]
    if device != "cuda" or variant is base or not usual:
        return None
    extra = [(outside_s - plain.median(usual), block) for outside_s, block in _outside(variant, STEPS_OF_VARIANT)]
    over = [s > max(OUTSIDE_SHARE * block.parent_s, OUTSIDE_SLACK_S, max(usual)) for s, block in extra]
    slightly = [s > max(OUTSIDE_SHARE_OF_MOST * block.parent_s, OUTSIDE_SLACK_S) for s, block in extra]
    if not any(over) and 2 * sum(slightly) <= len(extra):
        return None
    s, block = max(extra, key=lambda pair: pair[0])
    reason = f"{s:.2f} s of work outside of the {block.parent_s:.2f} s of its timed steps in cycle {block.cycle}"
    return Found(Fault.OUTSIDE, reason)


def _outside(variant, factor) -> list[tuple[float, Block]]:
    """(seconds beside a block's timed steps, less `factor` times its other steps', block). [] for older files."""
    blocks = [(block.whole_s, block) for block in _quiet(variant) if block.whole_s is not None]
    steps_s = [factor * (block.untimed_steps + block.drained_steps) * block.mean_ms / 1e3 for _, block in blocks]
    return [(whole_s - block.parent_s - s, block) for (whole_s, block), s in zip(blocks, steps_s, strict=True)]


def _late_fault(variant, base, device) -> Found | None:
    """Work that goes on after a variant's block may reach the base's next block."""
    if any(block.late_change for block in variant.blocks):
        return Found(Fault.LATE_CHANGE, "the training state still changed after a block had ended")
    usual = min(block.late_ms for block in base.blocks)
    # Busy processes delay the look itself.
    most = max((block.late_ms for block in _quiet(variant)), default=0.0)
    if device != "cuda" or most <= usual + LATE_MS:
        return None
    return Found(Fault.LATE_WORK, f"{most:.0f} ms of work went on after a block had ended, {usual:.0f} ms in the base")


def _growth_fault(build, name, device) -> Found | None:
    variant, bound = build.variants[name], LEAK_BYTES[device]
    # On a CPU the first cycle may still allocate memory that stays; on a GPU two cycles before it have done so.
    begin = 0 if device == "cuda" else 1
    grown = sum(block.growth_bytes or 0 for block in variant.blocks if block.cycle >= begin)
    if grown <= bound < growth_over_cycles(build, begin=begin):
        grown = growth_over_cycles(build, name, begin)
    if grown <= bound:
        return None
    since = "first" if begin == 0 else "second"
    return Found(Fault.GROWTH, f"memory grew by {grown / 2**20:.0f} MiB from the {since} cycle to the last")


def growth_over_cycles(build: Build, name: str = "", begin: int = 0) -> int:
    """Return by how many bytes memory in use grew from the begin of cycle `begin` to that of the last.

    `name`: the growth from the begin of this variant's blocks to the begin of the next block; "" for all. Only blocks
    of one process that tell their memory count.
    """
    items = build.variants.items()
    placed = [(block.cycle, block.place, owner, block) for owner, variant in items for block in variant.blocks]
    placed.sort(key=lambda item: item[:2])
    last = max((cycle for cycle, *_ in placed), default=0)
    total = 0
    for (cycle, _, owner, block), (after, place, _, following) in itertools.pairwise(placed):
        is_counted = begin <= cycle < last and (after < last or place == 0) and block.process == following.process
        before, now = block.held_bytes, following.held_bytes
        if is_counted and name in ("", owner) and before is not None and now is not None:
            total += now - before
    return total


def _thread_fault(variant, base, device) -> Found | None:
    if variant is base or variant.kind == "compile":
        return None
    usual = {block.cycle: block.threads for block in sorted(base.blocks, key=lambda block: block.threads)}
    extra = [block.threads - usual[block.cycle] for block in variant.blocks if block.cycle in usual]
    # On a CPU another program may have taken the core in a block or two.
    least = 1 if device == "cuda" else max(LEAST_CPU_BLOCKS, math.ceil(CPU_SHARE * len(extra)))
    if sum(number >= 1 for number in extra) < least:
        return None
    return Found(Fault.THREADS, f"{max(extra):g} threads more than the base in its blocks")


def _training_fault(variant, reference, base, run, control) -> Found | None:
    if not any(moved is None or moved > 0 for block in variant.blocks for moved in block.moved):
        return Found(Fault.NOT_WATCHED, "no watched tensor of the training state moved in its blocks")
    if reference is variant:
        return None
    pairs = compared(variant, reference)
    if run.parity == "blocks" and not pairs:
        return Found(Fault.NOT_COMPARED, "nothing compares its training with the reference's in its blocks")
    # What a reference that does not repeat widens is no more than the largest rounding that was seen.
    least = LEAST_LOSS_DEVIATION[run.device]
    scatter = min(scatter_of_losses(base, control), LARGEST_OF_ONE_BLOCK)
    bound = max(SCATTER_FACTOR * scatter, variant.tolerance or 0.0, least)
    # Where the base's own blocks part, a single one of the variant may, too, and the median counts.
    of_one_block = max(bound, LARGEST_OF_ONE_BLOCK) if scatter > least else bound
    deviations = []
    for block, reference_block in pairs:
        deviation = loss_deviation(block.losses, reference_block.losses)
        if deviation is None:
            return Found(Fault.LOSSES, f"its losses in cycle {block.cycle} are not those of as many steps")
        if deviation > of_one_block:
            reason = f"its losses in cycle {block.cycle} differ from the reference's by {deviation:.1e}"
            cycle = block.cycle if deviation <= LARGEST_OF_ONE_BLOCK else None
            return Found(Fault.LOSSES, f"{reason}, two eager blocks by {amount(scatter)}", cycle)
        deviations.append(deviation)
        where = f"a block of cycle {block.cycle} moved"
        fault = _other_movement(block, reference_block, Fault.MOVEMENT, where, MOVED_TOLERANCE)
        if fault:
            return fault
    still = _still_tensors(pairs)
    if still:
        reason = f"{still} watched tensors of the training state never moved in its blocks, in the reference's always"
        return Found(Fault.MOVEMENT, reason)
    middle = plain.median(deviations) if deviations else 0.0
    if middle > bound:
        reason = f"its losses differ from the reference's by {middle:.1e} in most cycles"
        return Found(Fault.LOSSES, f"{reason}, two eager blocks by {amount(scatter)}", variant.blocks[-1].cycle)
    return None


def compared(variant: Variant, reference: Variant) -> list[tuple[Block, Block]]:
    """Return (the variant's block, the reference's first one) of all cycles where both began at the seeded state."""
    firsts = {block.cycle: block for block in reversed(reference.blocks)}
    pairs = [(block, firsts[block.cycle]) for block in variant.blocks if block.cycle in firsts]
    return [(block, first) for block, first in pairs if block.reset and first.reset]


def _other_movement(block: Block | Trained, reference_block: Block | Trained, fault, where, tolerance) -> Found | None:
    moved = [(a, b) for a, b in zip(block.moved, reference_block.moved, strict=False) if b]
    if any(a is None for a, _ in moved):
        return Found(fault, f"{where} the training state to values that are not finite")
    ratio = plain.median(a / b for a, b in moved if a is not None) if moved else 1.0
    if abs(ratio - 1) > tolerance:
        return Found(fault, f"{where} the training state {ratio:.2f} times as far as the reference")
    return None


def _audit_fault(variant, reference, base) -> Found | None:
    """Another training than the reference's in a process of its own, from a state that a secret draw has scaled."""
    where = "from a state that a secret draw had scaled"
    for audit in variant.audits:
        if audit.raised and _is_finite(audit.repetition) and variant is not base:
            return Found(Fault.AUDIT, f"{where} it raised {audit.raised[:200]}, where eager trained")
    pairs = repeated(variant)
    if not pairs:
        return None
    scatters = [scatter_of_losses(base)]
    scatters += [_difference(*pair) for baseline in (base, reference) for pair in repeated(baseline)]
    scatter = min(max(scatters), AUDIT_TOLERANCE_OF_BASE)
    allowed = max(AUDIT_TOLERANCE, variant.tolerance or 0.0, SCATTER_FACTOR * scatter)
    of_one = max(allowed, LARGEST_OF_ONE_BLOCK)
    is_eager = variant is base or variant is reference
    if is_eager:
        allowed, of_one = AUDIT_TOLERANCE_OF_BASE, math.inf
    differences = [_difference(*pair) for pair in pairs]
    if min(differences) > allowed or max(differences) > of_one:
        reason = f"its losses differ by {max(differences):.1e} from those of eager in a process of its own"
        return Found(Fault.AUDIT, f"{reason}, {where}")
    if is_eager:
        return None
    faults = [_other_movement(*pair, Fault.AUDIT, f"{where} it moved", AUDIT_MOVED_TOLERANCE) for pair in pairs]
    return faults[0] if all(faults) else None


def repeated(variant: Variant) -> list[tuple[Trained, Trained]]:
    """Return (the variant's block, its repetition) of the audits that were repeated to their end."""
    audits = [audit for audit in variant.audits if _is_finite(audit.repetition)]
    return [(audit.own, audit.repetition) for audit in audits if audit.own and audit.repetition]


def _is_finite(trained: Trained | None) -> bool:
    return trained is not None and len(trained.losses) > 0 and None not in (*trained.losses, *trained.moved)


def _difference(first: Trained, second: Trained) -> float:
    """The largest relative difference of their losses; infinite where one of them is not finite."""
    difference = loss_deviation(first.losses, second.losses)
    return math.inf if difference is None else difference


def _still_tensors(pairs: Sequence[tuple[Block, Block]]) -> int:
    """Number of watched tensors that moved in every block of the reference and in no block of a variant.

    A single block says nothing: in bfloat16 a small tensor may stay where it is.
    """
    movements = ([*zip(block.moved, reference_block.moved, strict=False)] for block, reference_block in pairs)
    tensors = zip(*movements, strict=False)
    return sum(all(b and a == 0 for a, b in tensor) for tensor in tensors) if pairs else 0


def scatter_of_losses(reference: Variant, control: Variant | None = None) -> float:
    """Return the largest relative difference between losses of two blocks of a reference that begin alike.

    control: the reference once more, where the run has it.
    """
    firsts: dict[int, Block | Again] = {}
    blocks: list[Block | Again] = [block for block in reference.blocks if block.reset]
    blocks += [*reference.again, *(block for block in (control.blocks if control else []) if block.reset)]
    deviations = [loss_deviation(block.losses, firsts.setdefault(block.first, block).losses) for block in blocks]
    return max((deviation for deviation in deviations if deviation is not None), default=0.0)
