"""Verdicts on a run, made from its facts when it is read: which variants count, and what they gain.

Pure functions: nothing is measured, read or written. A rule that is mended here mends every run file of schema 4. Files
of schema 3 hold verdicts; their failures stay as they were sealed. docs/method.md lists the checks.

Each check compares with the base or with the reference in the same cycle, names its `Fault`, and says it in one line. A
wrong benchmark is usually the fastest. On a GPU every block counts. A CPU shares its cores with other programs: there a
check of time or threads accuses a variant only where three blocks of eight show the fault, and never fewer than three.
"""

import enum
import itertools
import math
import statistics as plain
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from benchmarks import statistics
from benchmarks.files.run_file import Block, Build, Course, Run, Variant
from benchmarks.statistics import Ratio

# A variant of kind "graph" whose graphs launch less than this is not the capture that its name says.
LEAST_GRAPH_SHARE = {"cuda": 0.2, "cpu": 0.05}
MOVED_TOLERANCE = 0.10
LEAK_BYTES = {"cuda": 32 * 2**20, "cpu": 64 * 2**20}
CLOCK_SHARE = 0.05
CLOCK_SLACK_S = {"cuda": 0.015, "cpu": 0.05}
LATE_MS = 10.0
# Rounding of a loss that is printed with seven digits.
LEAST_LOSS_DEVIATION = {"cuda": 1e-5, "cpu": 1e-6}
# After the blocks losses are compared further along, where rounding has grown.
LEAST_DEVIATION_AFTER = 1e-5
SCATTER_FACTOR = 2.0
# Blocks on a CPU that have to show a fault of time or threads.
LEAST_CPU_BLOCKS, CPU_SHARE = 3, 3 / 8
# Kernels whose bits differ once in a few hundred calls, as cuDNN's attention backward, let a single block part from the
# others: in Llama 2 70B by up to 3.4e-3, eager's blocks like graphs'. More than this is no rounding.
LARGEST_OF_ONE_BLOCK = 1e-2

PASS, FAILED = "pass", "failed"
# Statuses without a fault of the variant.
FINE = (PASS, "oom", "unsupported")


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
    LATE_WORK = "late work"
    LATE_CHANGE = "late change"
    GROWTH = "growth"
    THREADS = "threads"
    LOSSES = "losses"
    MOVEMENT = "movement"
    NOT_WATCHED = "not watched"


# Faults of what was computed, not of how.
OF_NUMBERS = {Fault.PARITY, Fault.PARITY_AFTER, Fault.LOSSES, Fault.MOVEMENT, Fault.LATE_CHANGE, Fault.NOT_WATCHED}


@dataclass(frozen=True)
class Found:
    """A fault and its sentence."""

    fault: Fault
    reason: str


@dataclass(frozen=True)
class Agreement:
    """How near two courses are.

    Attributes:
        is_bitwise: all hashes are equal.
        deviation: the largest relative difference of their losses; None where they cannot be compared.
        step: the first step whose hashes differ.
    """

    is_bitwise: bool
    deviation: float | None
    step: int = 0

    def is_within(self, allowed: float) -> bool:
        """Return whether the losses differ by no more than is allowed; without an allowance only equal bits do."""
        return self.is_bitwise or (allowed > 0 and self.deviation is not None and self.deviation <= allowed)

    def __str__(self) -> str:
        if self.is_bitwise:
            return "bitwise"
        return "no losses" if self.deviation is None else f"{self.deviation:.1e}"


@dataclass(frozen=True)
class Verdict:
    """What the facts of a variant come to.

    Attributes:
        status: "pass", "failed", or what the worker raised: unsupported, oom, capture_failed, numerics_failed, timeout.
        fault, reason: why it did not pass; None and "" where it did.
        parity, after: agreement with the reference before and after the blocks in a word or a number; "" where nothing
            was compared.
    """

    status: str
    fault: Fault | None = None
    reason: str = ""
    parity: str = ""
    after: str = ""

    @property
    def is_wrong_numbers(self) -> bool:
        """Return whether the variant computed other numbers than its reference."""
        return self.fault in OF_NUMBERS or self.status == "numerics_failed"


class Judged:
    """A build of a run with its verdicts.

    Attributes:
        run, build: the facts.
        verdicts: of each variant.
        base: the eager variant that ratios compare with; "" where none passed.
    """

    def __init__(self, run: Run, build: Build):
        self.run, self.build = run, build
        self.verdicts = {name: _verdict(run, build, name) for name in build.variants}
        self.base = self._base()

    def _base(self) -> str:
        """`eager`, unless another passing eager is faster with an interval that excludes 1."""
        eagers = [
            name
            for name, own in self.build.variants.items()
            if own.kind == "eager" and self.passed(name) and name != self.run.control and "extra_work" not in own.traits
        ]
        usual = [name for name in ("eager", self.build.anchor) if name in eagers]
        if not eagers:
            return ""
        base = usual[0] if usual else eagers[0]
        faster = {name: ratio for name in eagers if (ratio := self.ratio_to(base, name)) is not None and ratio.low > 1}
        return max(faster, key=lambda name: faster[name].ratio, default=base)

    def passed(self, name: str) -> bool:
        """Return whether a variant is there and passed."""
        return name in self.verdicts and self.verdicts[name].status == PASS

    def is_headline(self, name: str) -> bool:
        """Return whether a variant is a passing graph among those that `make bench` measures by default."""
        own = self.build.variants[name]
        return own.headline and own.kind != "eager" and self.passed(name)

    def blocks(self, name: str, busy: bool = False) -> list[Block]:
        """Return the blocks of a variant in quiet cycles, or in those beside busy processes."""
        own = self.build.variants.get(name)
        return [block for block in own.blocks if bool(block.busy_processes) == busy] if own else []

    def ratio_of(self, name: str, busy: bool = False, without_last: int = 0) -> Ratio | None:
        """Return the ratio of a variant to the base; of the control to the variant that it repeats.

        Args:
            name: of the variant.
            busy: of the cycles beside busy processes, instead of the quiet ones.
            without_last: so many last cycles do not count.

        Returns:
            None for the base, for a variant that did not pass, and where no cycle has both.
        """
        base = self.build.anchor if name == self.run.control else self.base
        if not base or name == base or not self.passed(name):
            return None
        return self.ratio_to(base, name, busy, without_last)

    def ratio_to(self, base: str, name: str, busy: bool = False, without_last: int = 0) -> Ratio | None:
        """Return the ratio of two variants, whether they passed or not; None where no cycle has both."""
        if base == name:
            return None
        bases: dict[int, list[float]] = {}
        for block in self.blocks(base, busy):
            bases.setdefault(block.cycle, []).append(block.mean_ms)
        counted = sorted(bases)[: len(bases) - without_last]
        rows = [(bases[block.cycle], block.mean_ms) for block in self.blocks(name, busy) if block.cycle in counted]
        return statistics.ratio_of(rows) if rows else None

    def ms(self, name: str, busy: bool = False) -> float | None:
        """Return the mean step of a variant: the geometric mean over its blocks; None without a block."""
        return _geometric([block.mean_ms for block in self.blocks(name, busy)])

    def typical_ms(self, name: str, busy: bool = False) -> float | None:
        """Return the typical step: the geometric mean over blocks of each block's median."""
        return _geometric([block.typical_ms for block in self.blocks(name, busy)])

    def issue_ms(self, name: str, busy: bool = False) -> float | None:
        """Return the host's time to issue a step: the median over blocks, each at most the block's step."""
        found = [issued for block in self.blocks(name, busy) if (issued := block.issued_ms) is not None]
        return plain.median(found) if found else None

    def busy_ms(self, name: str) -> float | None:
        """Return the GPU's busy time in a step."""
        own = self.build.variants.get(name)
        return own.profile.busy_ms if own else None

    def uncaptured(self, name: str) -> str:
        """Return the variant that runs the same program without graphs; "" where none is measured."""
        own = self.build.variants[name]
        if name == self.run.control or own.kind == "eager":
            return self.base if name == self.base else ""
        if own.kind == "compile":
            return "compile" if own.capture.graphs and self.passed("compile") else ""
        return self.base

    def ceiling(self, name: str, busy: bool = False) -> float | None:
        """Return the most that a graph can gain: the base's step / busy time of the uncaptured program.

        A graph runs as fast as the GPU works. Of the base, the most that any graph of it can gain.
        """
        uncaptured = self.uncaptured(name) if self.base and self.run.device == "cuda" else ""
        busy_ms = self.busy_ms(uncaptured) if uncaptured else None
        ratio = self.ratio_of(name, busy)
        base_ms = ratio.base_ms if ratio else self.ms(self.base, busy)
        return base_ms / busy_ms if busy_ms and base_ms else None

    def reached(self, name: str, busy: bool = False) -> float | None:
        """Return the share of its ceiling that a variant reached: busy time of the uncaptured program / its step."""
        ratio, ceiling = self.ratio_of(name, busy), self.ceiling(name, busy)
        return ratio.ratio / ceiling if ratio and ceiling else None

    def tflops(self, name: str, busy: bool = False) -> float | None:
        """Return the useful TFLOP/s of a rank; None if unknown, or if steps differ in kind."""
        flops, ms, blocks = self.build.flops_per_step, self.ms(name, busy), self.blocks(name, busy)
        is_alike = all(block.num_classes < 2 for block in blocks)
        return flops / ms / 1e9 if flops and ms and is_alike and self.run.device == "cuda" else None

    def joules(self, name: str, busy: bool = False) -> float | None:
        """Return the energy of a step: power times the mean step, of the GPU that is sampled."""
        found = [block for block in self.blocks(name, busy) if block.gpu and block.gpu.power_w]
        if not found:
            return None
        return plain.fmean(
            block.gpu.power_w * block.mean_ms / 1e3 for block in found if block.gpu and block.gpu.power_w
        )

    def sm_mhz(self, name: str, busy: bool = False) -> float | None:
        """Return the median clock over the blocks of a variant."""
        found = [block.gpu.sm_mhz for block in self.blocks(name, busy) if block.gpu and block.gpu.sm_mhz]
        return plain.median(found) if found else None

    def alone_bytes(self, name: str) -> int | None:
        """Return the memory that a variant needs as the only one of its process."""
        own = self.build.variants.get(name)
        return own.alone.peak_reserved_bytes if own and own.alone else None

    def added_bytes(self, name: str) -> int | None:
        """Return what a variant needs alone less what the base needs alone."""
        own, base = self.alone_bytes(name), self.alone_bytes(self.base)
        return own - base if own is not None and base is not None else None

    @cached_property
    def quiet_cycles(self) -> int:
        """Whole cycles without busy processes: of the passing variant that has fewest."""
        numbers = [len({block.cycle for block in self.blocks(name)}) for name in self.verdicts if self.passed(name)]
        quiet = sum(not cycle.busy_processes for cycle in self.build.cycles)
        return min([quiet, *numbers])


def judged(run: Run) -> dict[str, Judged]:
    """Return the builds of a run with their verdicts."""
    return {name: Judged(run, build) for name, build in run.builds.items()}


def is_sound(run: Run) -> bool:
    """Return whether no variant failed and something was timed."""
    builds = judged(run).values()
    statuses = [own.status for each in builds for own in each.verdicts.values()]
    return PASS in statuses and all(status in FINE for status in statuses)


# ------------------------------------------------------------------------------------------------
# The verdict on a variant


def _verdict(run: Run, build: Build, name: str) -> Verdict:
    own = build.variants[name]
    before = after = None
    texts = (own.sealed.parity, own.sealed.parity_after) if own.sealed else ("", "")
    if own.sealed is None and name != run.control:
        before, after = _agreements(build, name)
        texts = _text(before), _text(after)
    if own.raised:
        status = own.raised.kind if own.raised.kind not in ("error", "changed_settings", "moved_state") else FAILED
        return Verdict(status, Fault.RAISED, own.raised.reason, *texts)
    if own.sealed and own.sealed.status != PASS:
        return Verdict(FAILED, Fault.SEALED, own.sealed.reason, *texts)
    if name == run.control and not build.cycles:
        return Verdict(PASS)  # there was no base to repeat
    if not own.blocks:
        return Verdict(FAILED, Fault.NOT_TIMED, "no block of it was measured", *texts)
    found = _parity_fault(run, build, name, before, after) or fault_of(run, build, name)
    return Verdict(FAILED, found.fault, found.reason, *texts) if found else Verdict(PASS, None, "", *texts)


def _text(agreement: Agreement | None) -> str:
    return "" if agreement is None else str(agreement)


def _agreements(build, name) -> tuple[Agreement | None, Agreement | None]:
    """Before and after the blocks; a reference is compared with another run of itself."""
    own = build.variants[name]
    reference = build.variants.get(own.reference, own)
    pairs = [(own.parity, reference.parity), (own.after, reference.after)]
    if reference is own:
        return tuple(agreement(a[0], a[-1]) if len(a) > 1 else None for a, _ in pairs)  # type: ignore[return-value]
    return tuple(agreement(a[0], b[0]) if a and b else None for a, b in pairs)  # type: ignore[return-value]


def agreement(own: Course, other: Course) -> Agreement:
    """Return how near two courses are."""
    pairs = list(zip(own.hashes, other.hashes, strict=False))
    first = next((index for index, (a, b) in enumerate(pairs) if a != b), 0)
    is_bitwise = own.hashes == other.hashes and len(own.hashes) > 0
    return Agreement(is_bitwise, loss_deviation(own.losses, other.losses), first)


def _parity_fault(run, build, name, before, after) -> Found | None:
    own = build.variants[name]
    if name == run.control or own.reference == name or run.parity == "blocks":
        return None
    if own.sealed:
        is_compared = bool(own.sealed.parity)
        return None if is_compared else Found(Fault.NOT_COMPARED, "nothing compares its training with the reference's")
    reference = build.variants.get(own.reference)
    if before is None or after is None or reference is None:
        when = "before" if before is None else "after"
        return Found(Fault.NOT_COMPARED, f"nothing compares its training with the reference's {when} its blocks")
    if not before.is_within(_allowed_before(own, reference)):
        return Found(Fault.PARITY, f"parity: differs by {before} from step {before.step}")
    scatter = max(_scatter(reference.after), scatter_of_losses(build))
    allowed = max(SCATTER_FACTOR * scatter, own.tolerance or 0.0, LEAST_DEVIATION_AFTER)
    if not after.is_within(allowed):
        return Found(Fault.PARITY_AFTER, f"parity after its blocks: differs by {after}, eager runs by {scatter:.1e}")
    return None


def _allowed_before(own: Variant, reference: Variant) -> float:
    """The declared difference of losses, or twice that of two runs of the reference, which are mostly equal."""
    if isinstance(own.promise, float):
        return own.promise
    return SCATTER_FACTOR * _scatter(reference.parity)


def _scatter(courses: Sequence[Course]) -> float:
    """The deviation of two equal runs; 0 where there is one."""
    return (loss_deviation(courses[0].losses, courses[1].losses) or 0.0) if len(courses) > 1 else 0.0


# ------------------------------------------------------------------------------------------------
# Checks of blocks


def fault_of(run: Run, build: Build, name: str) -> Found | None:
    """Return the reason why the blocks of a variant do not count, or None.

    Raises:
        KeyError: the build has no variant of this name.
    """
    variant = build.variants[name]
    base = _anchor_of(build) or variant
    reference = base if name == run.control else build.variants.get(variant.reference, base)
    if not reference.blocks:
        reference = base
    checks: Iterator[Found | None] = iter(
        (
            _promise_fault(variant),
            _share_fault(variant, run.device),
            _clock_fault(variant, base, run),
            _late_fault(variant, base, run.device),
            _growth_fault(build, name, run.device),
            _thread_fault(variant, base, run.device),
            _training_fault(variant, reference, build, run.device),
        )
    )
    return next(filter(None, checks), None)


def _anchor_of(build: Build) -> Variant | None:
    own = build.variants.get(build.anchor)
    return own if own is not None and own.blocks else None


def _shows(flags: Sequence[bool], device: str) -> bool:
    """Whether enough blocks show a fault: one on a GPU, three of eight on a CPU and no fewer than three.

    One or two blocks on a CPU show nothing: any other program may have taken the core in them.
    """
    return sum(flags) >= (1 if device == "cuda" else max(LEAST_CPU_BLOCKS, math.ceil(CPU_SHARE * len(flags))))


def _quiet(variant: Variant) -> list[Block]:
    return [block for block in variant.blocks if not block.busy_processes]


def _promise_fault(variant: Variant) -> Found | None:
    promised, replays, made = (
        variant.capture.promised_graphs,
        variant.capture.promised_replays,
        variant.capture.graphs,
    )
    is_graph = variant.kind == "graph" and promised != 0
    if promised is not None and made != promised:
        return Found(Fault.GRAPHS, f"{made} graphs made, {promised} promised")
    if is_graph and not made:
        return Found(Fault.GRAPHS, "no graph made by a variant that promised some")
    for block in variant.blocks:
        wanted = block.expected_replays if replays is None else replays * block.steps
        if block.replays != wanted:
            said = f"{block.replays} replays in {block.steps} steps of cycle {block.cycle}, {wanted} promised"
            return Found(Fault.REPLAYS, said)
        if is_graph and not block.replays:
            return Found(Fault.REPLAYS, f"no replay in cycle {block.cycle}")
    return None


def _share_fault(variant, device) -> Found | None:
    share, least = variant.profile.graph_share, LEAST_GRAPH_SHARE[device]
    launched = "kernels" if device == "cuda" else "operators"
    if share is None:
        return None
    if variant.kind == "eager" and share > 0:
        return Found(Fault.GRAPH_SHARE, f"graphs launch {100 * share:.1f} % of the {launched} of an eager variant")
    if variant.kind == "graph" and share < least and variant.capture.promised_graphs != 0:
        said = f"graphs launch {100 * share:.1f} % of the {launched}, at least {100 * least:g} % are expected"
        return Found(Fault.GRAPH_SHARE, said)
    return None


def _clock_fault(variant, base, run) -> Found | None:
    quiet, slack_s = _quiet(variant), CLOCK_SLACK_S[run.device]
    if run.device == "cpu":
        # A busy CPU may keep the other process waiting, at the begin or at the end of a block.
        slack_s = max([slack_s, *(2 * abs(_clock_gap_s(block)) for block in _quiet(base))])
    wrong = [_is_other_time(block, slack_s, run.ranks) for block in quiet]
    if not _shows(wrong, run.device):
        return None
    block = next(block for block, is_wrong in zip(quiet, wrong, strict=True) if is_wrong)
    own_s = block.mean_ms * block.steps / 1e3
    said = f"its steps in cycle {block.cycle} sum to {own_s:.3f} s, another process saw {block.parent_s:.3f} s"
    return Found(Fault.CLOCK, said)


def _clock_gap_s(block: Block) -> float:
    """The time of a block's steps by another process's clock less that by its own."""
    return block.parent_s - block.mean_ms * block.steps / 1e3


def _is_other_time(block, slack_s, ranks) -> bool:
    gap_s = _clock_gap_s(block)
    # With several ranks, the slowest rank of each step counts. Together these steps may take longer than any rank did.
    if ranks > 1 and gap_s < 0:
        return False
    return abs(gap_s) > max(CLOCK_SHARE * block.parent_s, slack_s)


def _late_fault(variant, base, device) -> Found | None:
    if any(block.late_change for block in variant.blocks):
        return Found(Fault.LATE_CHANGE, "the training state still changed after a block had ended")
    # Work that goes on after a variant's block may reach the base's next block. Busy processes delay the look itself.
    usual, quiet = min(block.late_ms for block in base.blocks), _quiet(variant)
    if not _shows([block.late_ms > usual + LATE_MS for block in quiet], device):
        return None
    most = max(block.late_ms for block in quiet)
    return Found(Fault.LATE_WORK, f"{most:.0f} ms of work went on after a block had ended, {usual:.0f} ms in the base")


def _growth_fault(build, name, device) -> Found | None:
    variant, bound = build.variants[name], LEAK_BYTES[device]
    # The first cycle may still allocate memory that stays.
    grown = sum(block.growth_bytes or 0 for block in variant.blocks if block.cycle > 0)
    if grown <= bound:
        total, own = growth_over_cycles(build), growth_over_cycles(build, name)
        grown = own if total > bound else 0
    if grown <= bound:
        return None
    return Found(Fault.GROWTH, f"memory grew by {grown / 2**20:.0f} MiB from the second cycle to the last")


def growth_over_cycles(build: Build, name: str = "") -> int:
    """Return how memory in use grew from the begin of the second cycle to that of the last, in one process.

    Args:
        build: with blocks.
        name: the part that grew from the begin of this variant's blocks to the begin of the next block; "" for all.

    Returns:
        Bytes; 0 where blocks do not tell.
    """
    placed = [(block.cycle, block.place, each, block) for each, own in build.variants.items() for block in own.blocks]
    placed.sort(key=lambda item: item[:2])
    last = max((cycle for cycle, *_ in placed), default=0)
    total = 0
    for (cycle, _, each, block), (after, place, _, following) in itertools.pairwise(placed):
        is_counted = 1 <= cycle < last and (after < last or place == 0) and block.process == following.process
        if is_counted and name in ("", each) and block.held_bytes is not None and following.held_bytes is not None:
            total += following.held_bytes - block.held_bytes
    return total


def _thread_fault(variant, base, device) -> Found | None:
    if variant is base or variant.kind == "compile":
        return None
    usual = {block.cycle: block.threads for block in base.blocks}
    extra = [own.threads - usual[own.cycle] for own in variant.blocks if own.cycle in usual]
    if not extra or not _shows([number >= 1 for number in extra], device):
        return None
    return Found(Fault.THREADS, f"{max(extra):g} threads more than the base in its blocks")


def _training_fault(variant, reference, build, device) -> Found | None:
    if not any(moved is None or moved > 0 for block in variant.blocks for moved in block.moved):
        return Found(Fault.NOT_WATCHED, "no watched tensor of the training state moved in its blocks")
    if reference is variant:
        return None
    scatter = scatter_of_losses(build)
    bound = max(SCATTER_FACTOR * scatter, variant.tolerance or 0.0, LEAST_LOSS_DEVIATION[device])
    others: dict[int, Block] = {}
    for block in reference.blocks:
        others.setdefault(block.cycle, block)
    deviations, pairs = [], []
    # Where the base's own blocks part, a single one of the variant may, too, and the median counts.
    of_one_block = max(bound, LARGEST_OF_ONE_BLOCK) if scatter > LEAST_LOSS_DEVIATION[device] else bound
    for own in variant.blocks:
        other = others.get(own.cycle)
        if other is None or not (own.reset and other.reset):
            continue
        deviation = loss_deviation(own.losses, other.losses)
        if deviation is None:
            return Found(Fault.LOSSES, f"its losses in cycle {own.cycle} are not those of as many steps")
        if deviation > of_one_block:
            said = f"its losses in cycle {own.cycle} differ from the reference's by {deviation:.1e}"
            return Found(Fault.LOSSES, f"{said}, two eager blocks by {scatter:.1e}")
        deviations.append(deviation)
        pairs.append((own, other))
        found = _movement_fault(own, other)
        if found:
            return found
    still = _still_tensors(pairs)
    if still:
        said = f"{still} watched tensors of the training state never moved in its blocks, in the reference's always"
        return Found(Fault.MOVEMENT, said)
    middle = plain.median(deviations) if deviations else 0.0
    if middle > bound:
        said = f"its losses differ from the reference's by {middle:.1e} in most cycles"
        return Found(Fault.LOSSES, f"{said}, two eager blocks by {scatter:.1e}")
    return None


def _movement_fault(own: Block, other: Block) -> Found | None:
    where = f"a block of cycle {own.cycle} moved"
    moved = [(a, b) for a, b in zip(own.moved, other.moved, strict=False) if b]
    if any(a is None for a, _ in moved):
        return Found(Fault.MOVEMENT, f"{where} the training state to values that are not finite")
    ratio = plain.median(a / b for a, b in moved if a is not None) if moved else 1.0
    if abs(ratio - 1) > MOVED_TOLERANCE:
        return Found(Fault.MOVEMENT, f"{where} the training state {ratio:.2f} times as far as the reference")
    return None


def _still_tensors(pairs: Sequence[tuple[Block, Block]]) -> int:
    """Number of watched tensors that moved in every block of the reference and in no block of a variant.

    A single block says nothing: in bfloat16 a small tensor may stay where it is.
    """
    tensors = zip(*([*zip(own.moved, other.moved, strict=False)] for own, other in pairs), strict=False)
    return sum(all(b and a == 0 for a, b in tensor) for tensor in tensors) if pairs else 0


def scatter_of_losses(build: Build) -> float:
    """Return the largest relative difference between losses of two blocks of the base, over all cycles."""
    base = _anchor_of(build)
    blocks = [block for block in base.blocks if block.reset] if base else []
    deviations = [loss_deviation(block.losses, blocks[0].losses) for block in blocks[1:]]
    return max((each for each in deviations if each is not None), default=0.0)


def loss_deviation(own: Sequence[float | None], other: Sequence[float | None]) -> float | None:
    """Return the largest relative difference of two rows of losses; None where they cannot be compared."""
    pairs = [(a, b) for a, b in zip(own, other, strict=False) if a is not None and b is not None]
    if not len(own) == len(other) == len(pairs):
        return None
    return max((abs(a - b) / max(abs(b), 1e-30) for a, b in pairs), default=0.0)


def _geometric(values: Sequence[float]) -> float | None:
    return math.exp(math.fsum(map(math.log, values)) / len(values)) if values else None
