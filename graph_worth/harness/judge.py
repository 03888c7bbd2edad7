"""Verdicts on a run, made from its facts when it is read: which variants count, and what they gain.

Pure functions: nothing is measured, read or written. A rule that is mended here mends every run file of schema 4. Files
of schema 3 hold verdicts; their failures stay as they were sealed. `graph_worth.measuring.parity` compares courses, and
`graph_worth.harness.checks` blocks; docs/method.md lists all.
"""

import math
import statistics as plain
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from graph_worth.harness import checks, intervals
from graph_worth.harness.checks import LARGEST_OF_ONE_BLOCK, OF_NUMBERS, Fault, Found, fault_of, scatter_of_losses
from graph_worth.harness.files.facts import Block, Build, Course, Profile, Run, Variant
from graph_worth.harness.intervals import Ratio
from graph_worth.measuring.parity import SCATTER_FACTOR, ParityOfRuns, agreement, amount, loss_deviation
from graph_worth.text import digits

PASS, FAILED = "pass", "failed"
# A base whose blocks differ by more than this from itself alone in a process is no headline.
AGREES = 0.05
# The base alone counts from so many steps on, or from a block's steps where a block has fewer.
LEAST_ALONE = 10
# After the blocks losses are compared further along, where rounding has grown.
LEAST_DEVIATION_AFTER = 1e-5
# The profiler holds kernels up by up to 2 %: a GPU that is busy for a little longer than a step is busy all the time.
LEAST_CEILING = 0.98
# The fences, on a GPU: the least step over its busy time, and the most share of its ceiling that a graph of the same
# program reaches. Programs are the same where their kernels differ little in number; hashes cannot tell, since a graph
# may hold other copies. Of another program, a larger share says that it is not its ceiling.
LEAST_OF_BUSY, MOST_REACHED, SAME_PROGRAM = 0.95, 1.05, 0.05
# Variants whose steps have as many kernels, to within this, have the same collectives.
SAME_KERNELS = 0.01
ESTIMATED = "estimated"
# Statuses without a fault of the variant.
FINE = (PASS, "oom", "unsupported")


@dataclass(frozen=True)
class Verdict:
    """The verdict on the facts of a variant.

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


@dataclass(frozen=True)
class Noted:
    """A number, and what belongs beside it: "", ESTIMATED, or the reason why there is none."""

    value: float | None = None
    note: str = ""


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
        # A second pass, for what needs other variants' verdicts or the base.
        self._fail(self._reference_fault)
        self._fail(self._busy_fault)
        self.base = self._base()
        self._fail(self._ceiling_fault)

    def _fail(self, check: Callable[[str], Found | None]):
        faults = {name: check(name) for name in self.verdicts if self.passed(name)}
        for name, fault in faults.items():
            if fault is not None:
                verdict = self.verdicts[name]
                self.verdicts[name] = replace(verdict, status=FAILED, fault=fault.fault, reason=fault.reason)

    def _reference_fault(self, name: str) -> Found | None:
        reference = self.build.variants[name].reference
        verdict = self.verdicts.get(reference)
        if name == self.run.control or verdict is None or not verdict.is_wrong_numbers:
            return None
        return Found(Fault.NOT_COMPARED, f"nothing compares its training: its reference {reference} failed")

    def _busy_fault(self, name: str) -> Found | None:
        """A step that is shorter than the time in which its own kernels keep the GPU busy."""
        working_ms = self._measured_working_ms(name) if self.run.device == "cuda" else None
        steps_ms = [step_ms for is_busy in (False, True) if (step_ms := self.ms(name, is_busy)) is not None]
        if working_ms is None or not steps_ms or min(steps_ms) >= LEAST_OF_BUSY * working_ms:
            return None
        reason = f"a step takes {digits(min(steps_ms))} ms, its kernels keep the GPU busy for {digits(working_ms)} ms"
        return Found(Fault.BELOW_BUSY, reason)

    def _ceiling_fault(self, name: str) -> Found | None:
        """A graph that gains more than its ceiling, or whose profile cannot tell."""
        variant, run = self.build.variants[name], self.run
        is_graph = variant.kind == "graph" or (variant.kind == "compile" and variant.capture.graphs > 0)
        if run.device != "cuda" or not self.base or not is_graph:
            return None
        program = self.uncaptured(name)
        profiles = {known: self.build.variants[known].profile for known in filter(None, (name, program))}
        for known, profile in profiles.items():
            if not profile.kernels and (run.whole or profile.steps):
                return Found(Fault.NO_KERNELS, f"the profile of {known} has no kernels, so nothing bounds its gain")
        if not self.is_same_program(name):
            return None
        working_ms = self._measured_working_ms(program)
        for ratio in filter(None, (self.ratio_of(name), self.ratio_of(name, busy=True))):
            most = max(1.0, ratio.base_ms / working_ms) if working_ms else math.inf
            if ratio.ratio > MOST_REACHED * most:
                reason = f"it gains {ratio.ratio:.2f}x with the kernels of {program}, which allow {most:.2f}x at most"
                return Found(Fault.ABOVE_CEILING, reason)
        return None

    def is_same_program(self, name: str) -> bool:
        """Return True if a graph has about the kernels of the program that it captures, so that a ceiling bounds it."""
        programs = [self.build.variants[known] for known in (name, self.uncaptured(name)) if known]
        kernels = [variant.profile.kernels or 0.0 for variant in programs]
        return max(kernels) <= (1 + SAME_PROGRAM) * min(kernels)

    def _base(self) -> str:
        """`eager`, unless another passing eager is faster with an interval that excludes 1."""
        variants = self.build.variants
        eagers = [name for name in variants if variants[name].kind == "eager" and self.passed(name)]
        eagers = [name for name in eagers if name != self.run.control and "extra_work" not in variants[name].traits]
        usual = [name for name in ("eager", self.build.anchor) if name in eagers]
        if not eagers:
            return ""
        base = usual[0] if usual else eagers[0]
        faster = {name: ratio for name in eagers if (ratio := self.ratio_to(base, name)) is not None and ratio.low > 1}
        return max(faster, key=lambda name: faster[name].ratio, default=base)

    def _measured_working_ms(self, name: str) -> float | None:
        """An estimate accuses nobody: all variants of an older file may have waited for another rank."""
        working = self.working(name)
        return None if working.note else working.value

    def unchecked(self, name: str) -> str:
        """Return the checks that a variant did not have, as "stopped by SIGTERM, no audits"; "" if it had all."""
        build, variant = self.build, self.build.variants[name]
        anchor, control = build.variants.get(build.anchor, variant), self.run.control
        raised = next((audit.raised for audit in (*variant.audits, *anchor.audits) if audit.raised), "")
        reason = f": {' '.join(raised.split())[:100]}" if raised else ""
        missing = [f"stopped by {self.run.stopped}"] if self.run.stopped else []
        number = len(variant.audits) - len(checks.repeated(variant))
        if name == self.run.control or not variant.blocks:
            return ""
        if not variant.audits:
            missing.append(f"no audits, for {build.anchor} raised{reason}" if raised else "no audits")
        elif number:
            missing.append(f"{number} of {len(variant.audits)} audits not compared{reason}")
        reference = build.variants.get(checks.reference_of(build, name), anchor)
        if variant is not anchor and not checks.compared(variant, reference):
            missing.append("no losses of blocks compared")
        for last in dict.fromkeys((name, variant.reference)):
            drawing = build.variants.get(last)
            if drawing is not None and "draws" in drawing.traits and checks.reference_of(build, last) == last:
                missing.append(f"the losses of {last}, which draws other random numbers than {build.anchor}")
        # A run has it in one of the processes of a state.
        alike = [known.variants for known in self.run.builds.values() if known.fields == build.fields]
        if not any(variants[control].blocks for variants in alike if control in variants):
            missing.append("no control")
        if self.run.device == "cuda" and variant.kind == "graph" and self.ceiling_of(name) == Noted():
            missing.append("no ceiling")
        elif self.run.device == "cuda" and variant.kind != "eager" and self.base and not self.is_same_program(name):
            missing.append(f"no bound on its gain, for its kernels are not those of {self.uncaptured(name)}")
        return ", ".join(missing)

    def passed(self, name: str) -> bool:
        """Return whether a variant is there and passed."""
        return name in self.verdicts and self.verdicts[name].status == PASS

    def blocks(self, name: str, busy: bool = False) -> list[Block]:
        """Return the blocks of a variant in quiet cycles, or in those beside busy processes."""
        variant = self.build.variants.get(name)
        return [block for block in variant.blocks if bool(block.busy_processes) == busy] if variant else []

    def ratio_of(self, name: str, busy: bool = False) -> Ratio | None:
        """Return the ratio of a variant to the base; of the control to the variant that it repeats.

        `busy`: in the cycles beside busy processes. None for the base, for a variant that did not pass, and where no
        cycle has both.
        """
        base = self.build.anchor if name == self.run.control else self.base
        if not base or name == base or not self.passed(name) or not self.passed(base):
            return None
        return self.ratio_to(base, name, busy)

    def ratio_to(self, base: str, name: str, busy: bool = False, without_last: int = 0) -> Ratio | None:
        """Return the ratio of two variants, whether they passed or not; None where no cycle has both.

        `without_last`: so many last cycles do not count.
        """
        if base == name:
            return None
        bases: dict[int, list[float]] = {}
        for block in self.blocks(base, busy):
            bases.setdefault(block.cycle, []).append(block.mean_ms)
        counted = set(sorted(bases)[: len(bases) - without_last])
        rows = [(bases[block.cycle], block.mean_ms) for block in self.blocks(name, busy) if block.cycle in counted]
        return intervals.ratio_of(rows) if rows else None

    def ms(self, name: str, busy: bool = False) -> float | None:
        """Return the mean step of a variant: the geometric mean over its blocks; None without a block."""
        return _geometric([block.mean_ms for block in self.blocks(name, busy)])

    def typical_ms(self, name: str, busy: bool = False) -> float | None:
        """Return the typical step: the geometric mean over blocks of each block's median."""
        return _geometric([block.typical_ms for block in self.blocks(name, busy)])

    def issue_ms(self, name: str, busy: bool = False) -> float | None:
        """Return the host's time to issue a step: the median over blocks, each at most the block's step."""
        times_ms = [issued for block in self.blocks(name, busy) if (issued := block.issued_ms) is not None]
        return plain.median(times_ms) if times_ms else None

    @cached_property
    def alone_ratio(self) -> float | None:
        """Return the base's mean step in its blocks / its mean step alone in a process; None with too few steps alone.

        On a CPU the processes share their cores, and it is None.
        """
        base, blocks = self.build.variants.get(self.base), self.blocks(self.base)
        alone = base.alone.step_ms if base and base.alone else []
        if self.run.device == "cpu" or not blocks or len(alone) < min(LEAST_ALONE, blocks[0].steps):
            return None
        ms = self.ms(self.base)
        return ms / plain.fmean(alone) if ms and alone else None

    @property
    def disagrees_with_alone(self) -> str:
        """Return a sentence where the base differs between its blocks and alone by more than `AGREES`; else ""."""
        ratio = self.alone_ratio
        if ratio is None or 1 / (1 + AGREES) <= ratio <= 1 + AGREES:
            return ""
        if ratio > 1:
            return f"{self.base} in blocks takes {ratio:.2f} times as long as alone"
        return f"{self.base} takes {1 / ratio:.2f} times as long alone as in blocks"

    def busy_ms(self, name: str) -> float | None:
        """Return the GPU's busy time in a step; of several ranks rank 0's, which counts waiting for others as busy."""
        variant = self.build.variants.get(name)
        return variant.profile.busy_ms if variant else None

    def working(self, name: str) -> Noted:
        """Return the GPU's busy time in a step in ms, without waiting for other ranks, of the rank with most of it.

        Of older files of several ranks it is estimated: collectives as short as in the variant of the same kernels that
        waits least. Collectives that other kernels hide make the estimate too small, and the ceiling too large.
        """
        variant = self.build.variants.get(name)
        profile = variant.profile if variant else None
        if profile is None or profile.busy_ms is None:
            return Noted()
        if self.run.ranks == 1:
            return Noted(profile.busy_ms)
        if profile.working_ms:
            return Noted(max(profile.working_ms))
        if profile.unmatched:
            return Noted(None, profile.unmatched)
        if profile.collective_ms is None:
            return Noted(None, "the file does not tell how long collectives take")
        profiles = [neighbour.profile for neighbour in self.build.variants.values() if neighbour is not variant]
        times = [candidate.collective_ms for candidate in profiles if _has_same_kernels(profile, candidate)]
        alike = [ms for ms in times if ms is not None]
        least_ms = min([profile.collective_ms, *alike])
        working_ms = profile.busy_ms - profile.collective_ms + least_ms
        if not alike:
            return Noted(None, "rank 0 alone was profiled, and no other variant has the same kernels")
        if working_ms <= 0:
            return Noted(None, "rank 0 alone was profiled, and its collectives run beside other kernels")
        return Noted(working_ms, ESTIMATED)

    def waiting_ms(self, name: str) -> float | None:
        """Return the longest time that a rank waits for others in the collectives of a step; None for one rank."""
        profile = self.build.variants[name].profile
        if profile.waiting_ms:
            return max(profile.waiting_ms)
        working = self.working(name)
        is_estimated = working.note == ESTIMATED and working.value is not None and profile.busy_ms is not None
        return profile.busy_ms - working.value if is_estimated else None  # type: ignore[operator]

    def skew_ms(self, name: str, busy: bool = False) -> float | None:
        """Return the difference between the steps of the slowest and the fastest rank; None for one rank."""
        blocks = [block for block in self.blocks(name, busy) if block.fastest_ms]
        pairs = [pair for block in blocks for pair in zip(block.step_ms, block.fastest_ms, strict=False)]
        return plain.fmean(slowest - fastest for slowest, fastest in pairs) if pairs else None

    def uncaptured(self, name: str) -> str:
        """Return the variant that runs the same program without graphs; "" where none is measured."""
        variant = self.build.variants[name]
        if name == self.run.control or variant.kind == "eager":
            return self.base if name == self.base else ""
        if variant.kind == "compile":
            return "compile" if variant.capture.graphs and self.passed("compile") else ""
        return self.base

    def ceiling_of(self, name: str, busy: bool = False) -> Noted:
        """Return the most that a graph can gain: the base's step / working time of the uncaptured program.

        A graph runs as fast as the GPU works. Of the base, the most that any graph of it can gain.
        """
        uncaptured = self.uncaptured(name) if self.base and self.run.device == "cuda" else ""
        working, ratio = self.working(uncaptured), self.ratio_of(name, busy)
        base_ms = ratio.base_ms if ratio else self.ms(self.base, busy)
        if not working.value or not base_ms:
            return Noted(None, working.note)
        if base_ms < LEAST_CEILING * working.value:
            return Noted(None, f"{uncaptured} keeps the GPU busy for longer than its step in the blocks takes")
        return Noted(max(1.0, base_ms / working.value), working.note)

    def ceiling(self, name: str, busy: bool = False) -> float | None:
        """Return the value of `ceiling_of`: 1 or more."""
        return self.ceiling_of(name, busy).value

    def reached(self, name: str, busy: bool = False) -> float | None:
        """Return the share of its ceiling that a variant reached; None above MOST_REACHED."""
        ratio, ceiling = self.ratio_of(name, busy), self.ceiling(name, busy)
        reached = ratio.ratio / ceiling if ratio and ceiling else None
        return reached if reached is not None and reached <= MOST_REACHED else None

    def made_s(self, name: str) -> float | None:
        """Return the seconds of warm-up, compiler and capture of a variant, as if it were the only one.

        Of the compiled variants of a process the first one compiles what the others use, too.
        """
        capture, variants = self.build.variants[name].capture, self.build.variants.values()
        if capture.made_s is None or self.build.variants[name].kind != "compile":
            return capture.made_s
        longest_s = max(variant.capture.compile_s or 0.0 for variant in variants if variant.kind == "compile")
        return capture.made_s + longest_s - (capture.compile_s or 0.0)

    def paid_back(self, name: str, busy: bool = False) -> int | None:
        """Return the number of steps after which a faster variant has gained the seconds that it took to make.

        None where the interval of its ratio contains 1, or where the seconds are not known.
        """
        ratio, made_s = self.ratio_of(name, busy), self.made_s(name)
        if ratio is None or made_s is None or ratio.cycles < 2 or not ratio.low > 1:
            return None
        return math.ceil(1e3 * made_s / (ratio.base_ms - ratio.variant_ms))

    def tflops(self, name: str, busy: bool = False) -> float | None:
        """Return the useful TFLOP/s of a rank; None if unknown, or if steps differ in kind."""
        flops, ms, blocks = self.build.flops_per_step, self.ms(name, busy), self.blocks(name, busy)
        is_alike = all(block.num_classes < 2 for block in blocks)
        return flops / ms / 1e9 if flops and ms and is_alike and self.run.device == "cuda" else None

    def joules(self, name: str, busy: bool = False) -> float | None:
        """Return the energy of a step: power times the mean step, of the GPU that is sampled."""
        blocks = self.blocks(name, busy)
        energies = [block.gpu.power_w * block.mean_ms / 1e3 for block in blocks if block.gpu and block.gpu.power_w]
        return plain.fmean(energies) if energies else None

    def sm_mhz(self, name: str, busy: bool = False) -> float | None:
        """Return the median clock over the blocks of a variant."""
        clocks = [block.gpu.sm_mhz for block in self.blocks(name, busy) if block.gpu and block.gpu.sm_mhz]
        return plain.median(clocks) if clocks else None

    def alone_bytes(self, name: str) -> int | None:
        """Return the memory that a variant needs as the only one of its process."""
        variant = self.build.variants.get(name)
        return variant.alone.peak_reserved_bytes if variant and variant.alone else None

    def added_bytes(self, name: str) -> int | None:
        """Return what a variant needs alone less what the base needs alone."""
        variant_bytes, base_bytes = self.alone_bytes(name), self.alone_bytes(self.base)
        return variant_bytes - base_bytes if variant_bytes is not None and base_bytes is not None else None

    def added_bytes_in_steps(self, name: str) -> int | None:
        """Return `added_bytes` without the moment of the capture; None for a file that does not tell."""
        variants = (self.build.variants.get(variant_name) for variant_name in (name, self.base))
        known = [variant.alone.steps_reserved_bytes for variant in variants if variant and variant.alone]
        return known[0] - known[1] if len(known) == 2 and None not in known else None  # type: ignore[operator]

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
    statuses = [verdict.status for build in builds for verdict in build.verdicts.values()]
    return PASS in statuses and all(status in FINE for status in statuses)


# ------------------------------------------------------------------------------------------------
# The verdict on a variant


def _verdict(run: Run, build: Build, name: str) -> Verdict:
    variant = build.variants[name]
    before = after = None
    texts = (variant.sealed.parity if variant.sealed else "", "")
    if variant.sealed is None and name != run.control:
        before, after = _agreements(build, name)
        texts = str(before or ""), str(after or "")
    if variant.raised:
        kind = variant.raised.kind
        status = FAILED if kind in ("error", "changed_settings", "moved_state") else kind
        return Verdict(status, Fault.RAISED, variant.raised.reason, *texts)
    if variant.sealed and variant.sealed.status != PASS:
        return Verdict(FAILED, Fault.SEALED, variant.sealed.reason, *texts)
    if name == run.control and not build.cycles:
        return Verdict(PASS)  # there was no base to repeat
    if not variant.blocks:
        return Verdict(FAILED, Fault.NOT_TIMED, "no block of it was measured", *texts)
    fault = _parity_fault(run, build, name, before, after) or fault_of(run, build, name)
    return Verdict(FAILED, fault.fault, fault.reason, *texts) if fault else Verdict(PASS, None, "", *texts)


def _agreements(build, name) -> list[ParityOfRuns | None]:
    """Before and after the blocks; a reference is compared with another run of itself."""
    variant = build.variants[name]
    reference = build.variants.get(checks.reference_of(build, name), variant)
    agreements: list[ParityOfRuns | None] = []
    for courses, reference_courses in ((variant.parity, reference.parity), (variant.after, reference.after)):
        counterpart = courses[1:][-1:] if reference is variant else reference_courses[:1]
        agreements.append(agreement(courses[0], counterpart[0]) if courses and counterpart else None)
    return agreements


def _parity_fault(run, build, name, before, after) -> Found | None:
    variant, compared_with = build.variants[name], checks.reference_of(build, name)
    if name in (run.control, compared_with) or run.parity == "blocks":
        return None
    if variant.sealed:
        is_compared = bool(variant.sealed.parity)
        return None if is_compared else Found(Fault.NOT_COMPARED, "nothing compares its training with the reference's")
    reference = build.variants.get(compared_with)
    # A run that was stopped is light.
    if before is None or (after is None and not run.stopped) or reference is None:
        when = "before" if before is None else "after"
        return Found(Fault.NOT_COMPARED, f"nothing compares its training with the reference's {when} its blocks")
    # Two runs of the reference are mostly equal.
    allowed = variant.promise if isinstance(variant.promise, float) else SCATTER_FACTOR * _scatter(reference.parity)
    if variant.reference == name:
        # It promises to repeat itself, and of the anchor as much as blocks are held to.
        allowed = max(allowed, variant.tolerance or 0.0, LEAST_DEVIATION_AFTER)
    # The doctor's judge has looked at copies of the state, so that it knows roundings from frozen tensors.
    course = variant.parity[0]
    if variant.promise is None and course.apart is not None:
        if course.apart:
            return Found(Fault.PARITY, f"parity: {course.apart}")
    elif not before.is_within(allowed):
        what = f"differs by {before}" if before.deviation else f"{before}, but not all bits of the state,"
        name = f": {course.tensor} is the first" if course.tensor else ""
        return Found(Fault.PARITY, f"parity: {what} from step {before.step}{name}")
    anchor = build.variants.get(build.anchor, reference)
    scatter = min(max(_scatter(reference.after), scatter_of_losses(anchor)), LARGEST_OF_ONE_BLOCK)
    allowed = max(SCATTER_FACTOR * scatter, variant.tolerance or 0.0, LEAST_DEVIATION_AFTER)
    if scatter > LEAST_DEVIATION_AFTER:
        # One course is as much as one block, of which eager's own part now and then.
        allowed = max(allowed, LARGEST_OF_ONE_BLOCK)
    if after is not None and not after.is_within(allowed):
        reason = f"parity after its blocks: differs by {after}, eager runs by {amount(scatter)}"
        return Found(Fault.PARITY_AFTER, reason)
    return None


def of_itself(reference: Variant) -> float:
    """Return by how much the losses of a reference differ between its own courses and blocks."""
    return max(_scatter(reference.parity), _scatter(reference.after), scatter_of_losses(reference))


def _scatter(courses: Sequence[Course]) -> float:
    """The deviation of two equal runs; 0 where there is one."""
    return (loss_deviation(courses[0].losses, courses[1].losses) or 0.0) if len(courses) > 1 else 0.0


def _has_same_kernels(profile: Profile, candidate: Profile) -> bool:
    if profile.kernels_hash is not None and profile.kernels_hash == candidate.kernels_hash:
        return True
    return bool(profile.kernels and candidate.kernels and abs(candidate.kernels / profile.kernels - 1) <= SAME_KERNELS)


def _geometric(values: Sequence[float]) -> float | None:
    return plain.geometric_mean(values) if values else None
