"""Measure one build: parity, capture, cycles of alternating blocks, profiles, parity again. Facts go to a partial file.

The worker knows how to do each of these (graph_worth/measuring/worker.py). The order, and when it is enough, is decided
here. A phase that meets a failure is begun again: the facts on disk say what it still has to do.
"""

import contextlib
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from graph_worth.harness import checks, intervals, judge
from graph_worth.harness.builds import audit, block_plan
from graph_worth.harness.builds.build_worker import BuildWorker, OutOfVariants, TryAgain
from graph_worth.harness.builds.request import FEWEST_CYCLES, BuildRequest, Settings
from graph_worth.harness.checks import Fault
from graph_worth.harness.files import partial
from graph_worth.harness.files.partial import Partial
from graph_worth.harness.processes import locks
from graph_worth.harness.processes.host_load import busy_processes

# Parity makes PARITY_STEPS, or as many as the first variant makes in PARITY_S of the preset, at least three.
PARITY_STEPS = 20
PARITY_S = {"short": 1.5, "whole": 3.0}
PROFILE_S, LEAST_PROFILE_STEPS, MOST_PROFILE_STEPS = 0.5, 3, 12
AUTO_MINUTES = 10.0
# `auto` looks at all cycles but these: a rule that stops at once stops where the scatter is small by luck.
LATER_CYCLES = 4
STEPS_AFTER_BLOCKS = 5
ALONE_S, MOST_ALONE_STEPS = 0.5, 10
PILOT_STEPS = 10
MOST_BLOCKS_AGAIN, MOST_AGAIN_S = 12, 30.0


class BuildMeasurement:
    """The measurement of one build. `measure` does all of it, or the part that the facts do not have yet."""

    def __init__(
        self, request: BuildRequest, settings: Settings, facts: Partial, log: Path, say: Callable[[str], None]
    ):
        self.request, self.settings, self.partial, self.say = request, settings, facts, say
        self.worker = BuildWorker(request, settings, facts, log, say)
        self.began_s = time.monotonic()

    def measure(self) -> None:
        """Measure the build; OutOfVariants where eager, or every eager variant, cannot run."""
        phases = [self._measure_cycles, self._look_again, self._profile]
        if not self.settings.is_census:
            phases = [self._check_parity, self._measure_cycles, self._look_again, self._audit, self._profile]
            phases += [self._check_parity_afterwards, self._measure_alone]
        try:
            for phase in phases:
                self._finish(phase)
        except KeyboardInterrupt:
            self.worker.close(is_at_once=True)
            raise
        finally:
            self.worker.close()

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
                is_kept = self.settings.compiles_once and self.request.variants[variant]["kind"] == "compile"
                command = {"do": "parity", "keep": is_kept, **self._parity_steps()}
                self._add("parity", variant, **self.worker.ask(variant, command, parity=True))
                if self.request.parity_environment is not None:
                    self.worker.start_ahead()
            if self.request.parity_environment is not None:
                self.worker.end()

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
        if self._alone():
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
        others += [self.settings.control] if self.settings.control else []
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

    def _hold(self, variant):
        """Have a warm worker with all variants, or with this one where each block has a process of its own."""
        worker = self.worker
        if worker.apart:
            worker.end()
        wanted = [variant] if worker.apart else worker.remaining()
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
        end_s = math.inf if self.settings.end_s is None else self.settings.end_s
        # The clock alone decides, so a run does not end because its result pleases.
        if len(cycles) >= FEWEST_CYCLES and time.monotonic() + cycles[-1]["seconds"] > end_s:
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
        if missing:
            self.say(
                "  profiles" if self.settings.is_census else "  profiles, and parity on the graphs that were timed"
            )
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

    def _measure_alone(self):
        """Give headline variants and graphs a process each, for memory, and let eager repeat the audits in one."""
        asks_of_processes = self._alone()
        if not asks_of_processes:
            return
        names = [name for name, asks in asks_of_processes.items() if asks[0][1]["do"] == "alone"]
        what = [f"memory of {_counted(names)}, each alone in a process"] if names else []
        is_repeated = any("seed" in command for asks in asks_of_processes.values() for _, command in asks)
        what += ["audits by eager in a process of its own"] if is_repeated else []
        self.say(f"  {', '.join(what)}")
        with self._timed("alone"):
            for index, asks in enumerate(asks_of_processes.values()):
                is_last = index == len(asks_of_processes) - 1
                for variant, command, answer in self.worker.alone(asks, is_last):
                    if command["do"] == "alone":
                        self._add("alone", variant, **answer)
                    elif "seed" in command:
                        self._add("repetition", variant, seed=command["seed"], **_trained(answer))

    def _alone(self) -> dict[str, list[tuple[str, dict]]]:
        """First variant of a separate process -> the (variant, command) pairs that this process still has to answer.

        The base's has nothing but eager in it, so it also repeats the audits.
        """
        plan, known = self._of("plan")[-1], self.request.variants
        asks_of_processes: dict[str, list[tuple[str, dict]]] = {}
        for variant in self._missing_alone():
            ms = plan["paces"].get(variant, {"ms": 100.0})["ms"]
            few = min(MOST_ALONE_STEPS, max(2, int(ALONE_S * 1e3 / ms)))
            # The base as long as in a block: what the others leave behind may slow it there. Their memory does, too.
            is_like_in_blocks = variant == plan["base"] and not self.worker.shares
            steps = plan["steps"]["timed"] if is_like_in_blocks else few
            asks_of_processes[variant] = [(variant, {"do": "alone", "steps": steps})]
        remaining = self.worker.remaining()
        references = {name: known[name]["reference"] for name in remaining if known[name]["reference"] in remaining}
        repetitions = audit.repetitions(self.partial, self.request.name, references)
        asks_of_base = asks_of_processes.pop(plan["base"], [])
        for reference in dict.fromkeys(name for name, _ in repetitions):
            asks_of_base.append((reference, {"do": "capture"}))
            asks_of_base += [repetition for repetition in repetitions if repetition[0] == reference]
        return {plan["base"]: asks_of_base, **asks_of_processes} if asks_of_base else asks_of_processes

    def _missing_alone(self) -> list[str]:
        """The base, headline variants and all with graphs whose memory alone is to be measured; none on a CPU."""
        if not self._of("worker")[-1]["gpus"]:
            return []
        names = [self._of("plan")[-1]["base"]]
        known = self.request.variants
        captured = {fact["variant"] for fact in self._of("capture") if fact.get("graphs")}
        wanted = {name for name in known if known[name]["headline"] or known[name]["kind"] == "graph"} | captured
        names += [name for name in self.worker.remaining() if name in wanted]
        done = {fact["variant"] for fact in self._of("alone")}
        return [name for name in dict.fromkeys(names) if name not in done]

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
