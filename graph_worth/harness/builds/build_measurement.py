"""Measure one build: parity, capture, cycles of alternating blocks, profiles, parity again. Facts go to a partial file.

The worker knows how to do each of these (graph_worth/measuring/worker.py). The order, and when it is enough, is decided
here. A phase that meets a failure is begun again: the facts on disk say what it still has to do.
"""

import contextlib
import math
import time
from collections import Counter
from collections.abc import Iterator

from graph_worth.harness import checks, intervals, judge
from graph_worth.harness.builds import audit, block_plan
from graph_worth.harness.builds.build_worker import BuildWorker, OutOfVariants, Stopped, TryAgain
from graph_worth.harness.builds.request import FEWEST_CYCLES
from graph_worth.harness.checks import Fault
from graph_worth.harness.command import stop
from graph_worth.harness.files import partial
from graph_worth.harness.processes import locks
from graph_worth.harness.processes.supervisor import busy_processes

# Parity makes PARITY_STEPS, or as many as the first variant makes in PARITY_S of the preset, at least three.
PARITY_STEPS = 20
PARITY_S = {"short": 1.5, "whole": 3.0}
PROFILE_S, LEAST_PROFILE_STEPS, MOST_PROFILE_STEPS = 0.5, 3, 12
AUTO_MINUTES = 10.0
# `auto` looks at all cycles but these: a rule that stops at once stops where the scatter is small by luck.
LATER_CYCLES = 4
STEPS_AFTER_BLOCKS = 5
# A segment of the allocator's small tensors.
MOST_LEFT_BYTES = 2 * 2**20
ALONE = {"do": "alone", "steps": 10, "seconds": 0.5, "keep": True}
PILOT_STEPS = 10
MOST_BLOCKS_AGAIN, MOST_AGAIN_S = 12, 30.0


class BuildMeasurement:
    """The measurement of one build. `measure` does all of it, or the part that the facts do not have yet."""

    def __init__(self, worker: BuildWorker):
        self.worker, self.request, self.settings = worker, worker.request, worker.settings
        self.partial, self.say = worker.partial, worker.say
        self.began_s = time.monotonic()

    def measure(self) -> None:
        """Measure the build; OutOfVariants where eager, or every eager variant, cannot run."""
        phases = [self._measure_eager_alone, self._measure_cycles, self._look_again, self._profile]
        if not self.settings.is_light:
            first = [self._measure_first_alone, self._check_parity]
            # A model with other kernels for parity has a process for it.
            phases = [*first[:: -1 if self.request.parity_environment else 1], self._measure_cycles, self._look_again]
            phases += [self._audit, self._profile, self._check_parity_afterwards, self._measure_memory]
        try:
            for phase in phases:
                # A file needs profiles, and eager's look at itself keeps losses from accusing a variant.
                self.worker.is_needed = phase in (self._look_again, self._profile)
                with contextlib.suppress(Stopped):
                    if self.worker.is_needed or not stop.signal:
                        self._finish(phase)
        except KeyboardInterrupt:
            self.worker.end(is_at_once=True)
            raise
        finally:
            self.worker.end()

    def kind_of_eagers(self) -> str:
        """Return the kind of `Raised` of the eager variants that were left out; "error" where they differ."""
        kinds = {fact["kind"] for fact in self._of("left_out") if self._is_eager(fact["variant"])}
        return kinds.pop() if len(kinds) == 1 else "error"

    def leave_out_rest(self, kind: str, reason: str) -> None:
        """Leave out every variant that remains."""
        names = self.worker.remaining()
        for name in names:
            self.worker.leave_out(name, kind, reason, is_said=False)
        if names:
            self.say(f"  {', '.join(names)}: {'failed' if kind == 'error' else kind} ({reason})")

    def _finish(self, phase):
        while any(map(self._is_eager, self.worker.remaining())):
            with contextlib.suppress(TryAgain):
                return phase()
        raise OutOfVariants("no eager variant is left")

    # --- parity

    def _check_parity(self):
        if "eager" in self.request.variants and "eager" not in self.worker.remaining() and not self._of("parity"):
            raise OutOfVariants("eager did not run")
        with self._timed("parity"):
            missing = self._missing("parity", twice=True)
            if missing:
                self.say(f"  parity of {_counted(missing)}, with deterministic kernels")
            for variant in missing:
                eagers = [fact["hashes"] for fact in self._of("parity") if fact["variant"] == "eager"]
                command = {"do": "parity", "keep": self._is_kept(variant), **self._parity_steps()}
                command["eager"] = eagers[0] if eagers else None
                self._add("parity", variant, **self.worker.ask(variant, command, parity=True))
                if self.request.parity_environment is not None:
                    self.worker.start_ahead()
            if self.request.parity_environment is not None:
                self.worker.end()

    def _is_kept(self, variant) -> bool:
        """Return whether a variant is timed as its parity was checked, since compiling takes long."""
        return self.request.variants[variant]["kind"] == "compile"

    def _parity_steps(self):
        """Steps of a parity check, and the seconds after which the first one stops. All make the same steps."""
        known = self._of("parity")
        if known:
            return {"steps": len(known[0]["hashes"]), "seconds": None}
        seconds = PARITY_S["short" if self.settings.is_short else "whole"]
        return {"steps": PARITY_STEPS, "seconds": seconds}

    def _check_parity_afterwards(self):
        """Train past the steps of a block, on the graphs that were timed."""
        plan = self._of("plan")[-1]
        first = plan["steps"]["untimed"] + plan["steps"]["timed"] + plan["steps"]["drained"]
        if plan["paces"][plan["base"]]["ms"] > block_plan.LONG_STEP_MS:
            first = min(first, 4)
        command = {"do": "course", "first": first, "steps": 2 if self.settings.is_short else STEPS_AFTER_BLOCKS}
        if self.settings.audits or self._has_gpu():
            self.worker.start_ahead()
        with self._timed("parity"):
            for variant in self._missing("course", twice=True):
                self._hold(variant)
                self._add("course", variant, **self.worker.ask(variant, command))

    # --- cycles

    def _measure_cycles(self):
        while not self._is_enough():
            self._measure_cycle(len(self._of("cycle")))

    def _measure_cycle(self, number):
        plan = self._plan()
        base, steps, start = plan["base"], plan["steps"], time.monotonic()
        pace: dict = {}
        beside = {"busy": self.settings.host_load if number % 2 else 0, "others": locks.num_others()}
        others = [name for name in self.worker.remaining() if name != base]
        others += [self.settings.control] if self.settings.control in self.request.variants else []
        seed = f"{self.partial.facts[0]['id']} {self.request.name} {number}"
        order = block_plan.order_of_cycle(base, others, seed)
        first = block_plan.first_step(plan.get("period"), seed)
        with self._timed("blocks"), busy_processes(beside["busy"]):
            for place, name in enumerate(order):
                runs = base if name == self.settings.control else name
                self._hold(runs)
                pace = pace or self.worker.ask(runs, {"do": "pace"})
                command = {"do": "block", **steps, "reset": steps["resets_each"] or place == 0, "first": first}
                answer = self.worker.ask(runs, command)
                self._add("block", name, cycle=number, place=place, busy=beside["busy"], **answer)
        took_s = time.monotonic() - start
        fact = {"cycle": number, "order": order, "seconds": round(took_s, 2), **beside, **pace}
        self.partial.add("cycle", build=self.request.name, **fact)
        self.say(f"  {self._progress(number + 1, took_s)}")

    def _look_again(self):
        """Let the base repeat its block where a variant's losses part from it a little, and it never from itself.

        Kernels with atomic additions part in one block of three to ten, graphs' or eager's. In few cycles the base's
        own may all agree by luck.
        """
        plan, start = self._of("plan")[-1], time.monotonic()
        base, steps = plan["base"], plan["steps"]
        while len(self._of("again")) < MOST_BLOCKS_AGAIN and time.monotonic() - start < MOST_AGAIN_S:
            run = partial.folded(self.partial.facts)
            faults = [checks.fault_of(run, run.builds[self.request.name], name) for name in self.worker.remaining()]
            of_losses = [fault for fault in faults if fault and fault.fault == Fault.LOSSES]
            cycles = [fault.cycle for fault in of_losses if fault.cycle is not None]
            if not cycles or not steps["resets_each"]:
                return
            first = next(block["first"] for block in self._of("block") if block["cycle"] == cycles[0])
            with self._timed("blocks"):
                self._hold(base)
                answer = self.worker.ask(base, {"do": "block", **steps, "reset": True, "first": first})
            self._add("again", base, first=first, **_trained(answer))

    def _plan(self) -> dict:
        """The plan of the blocks. A pilot makes one, and another where its base was left out."""
        if not self.worker.apart:
            self._hold("")
        known, remaining = self._of("plan"), self.worker.remaining()
        if known and known[-1]["base"] in remaining:
            return known[-1]
        self.say(f"  capture and pilot of {_counted(remaining)}")
        with self._timed("pilot"):
            paces = {}
            for variant in remaining:
                self._hold(variant)
                paces[variant] = self.worker.paces[variant]
            steps = block_plan.steps_of_block(paces, self.worker.facts, self.settings)
            steps_of_block = sum(steps[kind] for kind in ("untimed", "timed", "drained"))
            minutes = self.settings.least_cycles * steps_of_block * sum(pace["ms"] for pace in paces.values()) / 60e3
            if minutes > 5:
                self.say(f"  {self.settings.least_cycles} cycles will take about {minutes:.0f} minutes")
            eagers = [name for name in remaining if self._is_eager(name)]
            candidates = [name for name in eagers if name in self.request.eagers] or eagers
            times: dict[str, list[float]] = {name: [] for name in candidates}
            # Two cycles that are not counted warm everything and fix the base. A third of a block is enough.
            few = 2 if self.settings.is_short else max(PILOT_STEPS, steps["timed"] // 3)
            block = steps | {"timed": min(few, steps["timed"])}
            for order in (remaining,) if self.settings.is_short else (remaining, remaining[::-1]):
                for variant in order:
                    self._hold(variant)
                    answer = self.worker.ask(variant, {"do": "block", **block})
                    if variant in times:
                        times[variant].append(math.fsum(answer["step_ms"]) / len(answer["step_ms"]))
        base = block_plan.choose_base(times)
        period = self.worker.facts["period"]
        return self.partial.add("plan", build=self.request.name, base=base, steps=steps, paces=paces, period=period)

    def _hold(self, variant, is_only=False):
        """Have a warm worker with all variants, or with this one where each block has a process of its own."""
        worker = self.worker
        if worker.apart:
            worker.end()
        wanted = [variant] if worker.apart or is_only else worker.remaining()
        for name in wanted:
            if name not in worker.captured:
                with self._timed("capture"):
                    self._add("capture", name, **worker.ask(name, {"do": "capture"}))
                worker.captured.append(name)
        for name in wanted:
            if name not in worker.paces:
                worker.paces[name] = worker.ask(name, {"do": "pilot", "steps": 2 if self.settings.is_short else 4})

    def _is_enough(self) -> bool:
        """Return whether the run has all cycles. `auto` asks for narrow intervals, and never looks at the ratios."""
        is_auto, minutes, cycles = self.settings.cycles == "auto", self.settings.minutes, self._of("cycle")
        most_s = math.inf if self.settings.cycles_s is None else self.settings.cycles_s
        # The clock alone decides, so a run does not end because its result pleases.
        if len(cycles) >= FEWEST_CYCLES and math.fsum(cycle["seconds"] for cycle in [*cycles, cycles[-1]]) > most_s:
            return True
        if len(cycles) < self.settings.least_cycles:
            return False
        limit_s = 60 * (minutes or (AUTO_MINUTES if is_auto else 0.0))
        is_over = time.monotonic() - self.began_s >= limit_s
        return is_over or (is_auto and intervals.enough(list(self._ratios(LATER_CYCLES).values())))

    def _progress(self, number, took_s):
        ratios, known = self._ratios(), self.request.variants
        names = [name for name in ratios if known[name]["kind"] != "eager"]
        names = [name for name in names if known[name]["headline"]] or names
        text = f"cycle {number}"
        if self.settings.cycles == "auto" or self.settings.minutes:
            width = max((ratio.half_width for ratio in ratios.values()), default=math.inf)
            text += f", half-width {100 * width:.2f} %" if width < math.inf else ""
        else:
            left_s = math.ceil((self.settings.least_cycles - number) * took_s)
            text += f" of {self.settings.least_cycles}, about {left_s} s left"
        listing = "  ".join(f"{name} {ratios[name].ratio:.3f}x" for name in names[:3])
        return f"{text}: {listing}" if listing else text

    def _ratios(self, without_last: int = 0) -> dict[str, intervals.Ratio]:
        """Ratios of the variants in the quiet cycles so far, less the last ones, without the control."""
        run = partial.folded(self.partial.facts)
        judged, base = judge.Judged(run, run.builds[self.request.name]), self._of("plan")[-1]["base"]
        ratios = {name: judged.ratio_to(base, name, without_last=without_last) for name in self.worker.remaining()}
        return {name: ratio for name, ratio in ratios.items() if ratio is not None}

    # --- profiles

    def _profile(self):
        paces, is_short = self._of("plan")[-1]["paces"], self.settings.is_short
        missing = self._missing("profile")
        if missing and stop.signal:
            done, least = len(self._of("cycle")), self.settings.least_cycles
            of_least = f" of {least}" if done < least else ""
            self.say(f"  stopped after {done}{of_least} cycles: profile, then the file; stop again to end at once")
        elif missing:
            self.say("  profiles" if self.settings.is_light else "  profiles, and parity on the graphs that were timed")
        with self._timed("profile"):
            for variant in missing:
                self._hold(variant)
                ms = paces.get(variant, {"ms": 100.0})["ms"]
                steps = min(MOST_PROFILE_STEPS, max(LEAST_PROFILE_STEPS, int(PROFILE_S * 1e3 / ms)))
                period = self.worker.facts["period"] or 1
                steps = max(steps, period) if period <= 4 * MOST_PROFILE_STEPS else steps
                command = {"do": "profile", "steps": LEAST_PROFILE_STEPS if is_short else steps, "ms": ms}
                self._add("profile", variant, **self.worker.ask(variant, command))

    def _audit(self):
        """Let each variant train from a state that nobody could know before."""
        # A variant in a process of its own has nobody to copy from.
        if not self.settings.audits or self.worker.apart:
            return
        base = self._of("plan")[-1]["base"]
        with self._timed("blocks"):
            for variant, command in audit.missing(self.partial, self.request.name, self.worker.remaining()):
                if any(fact["variant"] == base and "raised" in fact for fact in self._of("audit")):
                    # A step may refuse a state that is scaled.
                    return
                self._hold(variant)
                answer = self.worker.try_ask(variant, command)
                facts = {key: command[key] for key in ("number", "seed", "first", *audit.STEPS)}
                self._add("audit", variant, **facts, **(_trained(answer) if "losses" in answer else answer))

    def _measure_first_alone(self):
        """Measure memory in the process of the blocks while torch holds nothing there of another variant."""
        if self._of("cycle") or self.worker.apart or self.worker.shares or not self.worker.is_fresh():
            return
        is_only = self.worker.ahead.worker is None
        for variant in self._missing_memory():
            self.say(f"  memory of {variant} by itself")
            with self._timed("alone"):
                answer = self.worker.try_ask(variant, ALONE | {"keep": self._is_kept(variant)})
            if "step_ms" not in answer:
                # Parity says why.
                return
            self._add("alone", variant, is_only=is_only, **answer)
            if answer["left_bytes"] > MOST_LEFT_BYTES:
                return
            # The driver counts kernels that the first one has loaded.
            is_only = False

    def _measure_eager_alone(self):
        """Time eager in the process of the blocks, for a block's seconds and ten steps at least, before any capture."""
        if self._of("cycle") or self.worker.apart or self.worker.shares or not self.worker.is_fresh():
            return
        if not self._has_gpu():
            return
        with self._timed("alone"):
            for variant in filter(self.worker.remaining().__contains__, self.request.eagers):
                self._hold(variant, is_only=True)
                steps = max(judge.LEAST_ALONE, int(1e3 * self.settings.block_s / self.worker.paces[variant]["ms"]))
                command = ALONE | {"steps": steps, "seconds": None}
                self._add("alone", variant, is_only=False, **self.worker.ask(variant, command))

    def _measure_memory(self):
        """Give the other headline variants and graphs a process each, for their memory."""
        missing = self._missing_memory()
        if missing:
            self.say(f"  memory of {_counted(missing)}, each alone in a process")
        with self._timed("alone"):
            for variant in missing:
                for *_, answer in self.worker.alone([(variant, ALONE)], is_last=False):
                    self._add("alone", variant, **answer)

    def _missing_memory(self) -> list[str]:
        """Headline variants and all with graphs, but for the base, whose memory alone is to be measured."""
        known, done = self.request.variants, {fact["variant"] for fact in self._of("alone")}
        done |= {plan["base"] for plan in self._of("plan")[-1:]} or {name for name in known if self._is_eager(name)}
        captured = {fact["variant"] for fact in self._of("capture") if fact.get("graphs")}
        wanted = {name for name in known if known[name]["headline"] or known[name]["kind"] == "graph"} | captured
        return [name for name in self.worker.remaining() if name in wanted - done and self._has_gpu()]

    def _has_gpu(self) -> bool:
        return bool(self._of("worker")[-1]["gpus"])

    @property
    def base(self) -> str:
        """The base of the blocks; "" where there is none, or where it was left out."""
        bases = [plan["base"] for plan in self._of("plan")[-1:]]
        return next((base for base in bases if base in self.worker.remaining()), "")

    def measure_base(self, builds: list["BuildMeasurement"]) -> None:
        """Let the base make the steps of blocks in a process of its own, and eager repeat there the audits of builds.

        builds: of one state and base, this one among them. The process never makes a variant that is no eager.
        """
        asks: list[tuple[str, dict]] = []
        names = [build.request.name for build in builds if build._has_gpu()]
        names = [name for name in names if not self.partial.of("alone", build=name, variant=self.base)]
        if names:
            # As long as in a block: what the others leave behind may slow it there. Their memory does, too.
            steps = max(build._of("plan")[-1]["steps"]["timed"] for build in builds)
            is_shared = any(build.worker.shares for build in builds)
            asks.append((self.base, ALONE if is_shared else ALONE | {"steps": steps, "seconds": None}))
        repetitions = [repetition for build in builds for repetition in build._repetitions()]
        for reference in dict.fromkeys(name for name, _ in repetitions):
            asks.append((reference, {"do": "capture"}))
            asks += [repetition for repetition in repetitions if repetition[0] == reference]
        if not asks:
            return
        what = [f"{self.base} alone"] * bool(names) + ["audits by eager"] * bool(repetitions)
        self.say(f"  {', '.join(what)} in a process of its own")
        with self._timed("alone"):
            for variant, command, answer in self.worker.alone(asks, is_last=True):
                if command["do"] == "alone":
                    for name in names:
                        self.partial.add("alone", build=name, variant=variant, builds=names, **answer)
                elif "seed" in command:
                    of_audit = {key: command[key] for key in ("build", "seed")}
                    self.partial.add("repetition", variant=variant, **of_audit, **_trained(answer))

    def _repetitions(self) -> list[tuple[str, dict]]:
        remaining, known = self.worker.remaining(), self.request.variants
        references = {name: known[name]["reference"] for name in remaining if known[name]["reference"] in remaining}
        return audit.repetitions(self.partial, self.request.name, references)

    # --- facts

    def _of(self, fact) -> list[dict]:
        return self.partial.of(fact, build=self.request.name)

    def _add(self, fact, variant, **values):
        self.partial.add(fact, build=self.request.name, variant=variant, **values)

    def _missing(self, fact, twice: bool = False) -> list[str]:
        """The variants without this fact. With `twice`, a variant that others are compared with has it two times."""
        remaining = self.worker.remaining()
        references = {self.request.variants[name]["reference"] for name in remaining} if twice else set()
        done, missing = Counter(line["variant"] for line in self._of(fact)), []
        for variant in [*remaining, *(name for name in remaining if name in references)]:
            if done[variant] == 0:
                missing.append(variant)
            done[variant] -= done[variant] > 0
        return missing

    def _is_eager(self, name) -> bool:
        return self.request.variants[name]["kind"] == "eager"

    @contextlib.contextmanager
    def _timed(self, phase) -> Iterator[None]:
        start, known = time.monotonic(), self._known_s()
        try:
            yield
        finally:
            # Phases within, as the import of a worker, count by themselves.
            within = self._known_s() - known
            self.partial.add("seconds", phase=phase, seconds=max(0.0, round(time.monotonic() - start - within, 2)))

    def _known_s(self) -> float:
        return math.fsum(fact["seconds"] for fact in self.partial.of("seconds"))


def _trained(answer) -> dict:
    """The part of a block's answer that says what it trained, and how fast."""
    return {key: answer[key] for key in ("step_ms", "losses", "moved")}


def _counted(names) -> str:
    number = len(set(names))
    return f"{number} variant{'s' if number != 1 else ''}"
