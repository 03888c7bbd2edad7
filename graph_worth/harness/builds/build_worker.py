"""The worker process of one build, started when it is needed and again after a failure.

A variant that fails or ends its worker is left out by name. Variants that do not fit into memory together share the
graphs' memory first, then get a process for each block.
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from graph_worth.harness.builds.request import BuildRequest, Settings
from graph_worth.harness.command import stop
from graph_worth.harness.files.partial import Partial
from graph_worth.harness.processes.worker_process import WorkerEnded, WorkerProcess

# Facts of a worker that are those of all workers of its build, besides its configuration.
SAME = ("flops_per_step", "items_per_step", "period")
# Facts that are not asked for again.
PROGRESS = ("alone", "parity", "plan", "cycle", "again", "audit", "profile", "course")
# A worker that is silent in a block for so many times its steps' time by the pilot hangs, and not before LEAST_LIMIT_S.
PATIENCE, LEAST_LIMIT_S = 20.0, 60.0


class OutOfVariants(RuntimeError):
    """No variant of a build is left to measure; the text says why."""


class Interrupted(RuntimeError):
    """A run that has cycles cannot go on now, for a reason that lies outside of its variants; the text says which."""


class TryAgain(Exception):
    """A question has no answer: its variant was left out, or gets another worker. The facts say what is still to do."""


class Stopped(Exception):
    """The user stopped the run, and its file does not need what was to be asked."""


class Ahead:
    """A worker that is started while another one works, of its build or of the one before: it imports meanwhile."""

    worker: WorkerProcess | None = None
    _words: tuple = ()

    def start(self, *words) -> None:
        """Start a worker, unless one waits; `words`: of `WorkerProcess`."""
        if self.worker is None:
            self._words, self.worker = words, WorkerProcess(*words)

    def taken(self, *words) -> WorkerProcess:
        """Return the worker that waits, or another one where it was not started by these words."""
        if words != self._words:
            self.end()
        worker, self.worker = self.worker, None
        return worker or WorkerProcess(*words)

    def end(self) -> None:
        """End the worker that waits."""
        if self.worker is not None:
            self.worker.end()
        self.worker = None


class BuildWorker:
    """The worker of a build.

    Attributes:
        ahead: the worker that comes after it.
        facts: what the running worker said of its build, as "period" of the batches.
        captured: variants that the running worker has.
        paces: variant -> its pilot's answer in the running worker.
        apart: each block has a process of its own.
        is_needed: what is asked now is needed after a stop, too.
    """

    def __init__(
        self, request: BuildRequest, settings: Settings, partial: Partial, log: Path, say: Callable[[str], None], ahead
    ):
        self.request, self.settings, self.partial, self.log, self.say = request, settings, partial, log, say
        self.ahead: Ahead = ahead
        self.facts: dict = {}
        self.captured: list[str] = []
        self.paces: dict[str, dict] = {}
        self.apart = bool(partial.of("apart", build=request.name))
        self.is_needed = False
        # True where eager steps take their memory from the graphs' pool.
        self.shares = bool(partial.of("share", build=request.name))
        self._worker: WorkerProcess | None = None
        # Variant -> how far the build was when its worker was ended from outside.
        self._killed: dict[str, list[int]] = {}
        self._stopped: set[str] = set()

    def ask(self, variant: str, command: dict, parity: bool = False) -> dict:
        """Return the worker's answer; start a worker where none runs, with `parity` the one that the build has for it.

        Raises:
            TryAgain: the variant is left out or gets another try.
            WorkerEnded: the worker cannot build its state.
            Interrupted: the worker was ended from outside again, while a variant ran that has run before.
        """
        answer = self._answer(variant, command, parity)
        if answer.pop("say") == "done":
            return answer
        if answer.get("is_from_outside") and self._has_cycle(variant):
            raise Interrupted(answer["reason"])
        if answer["kind"] == "oom" and command["do"] != "parity" and not self.apart:
            self._make_room(variant, answer["reason"])
        else:
            self.leave_out(variant, answer["kind"], answer["reason"])
        raise TryAgain

    def _answer(self, variant, command, parity=False) -> dict:
        """The worker's last message, and where it ended a message that it failed, with "is_from_outside".

        Raises:
            TryAgain: this process was stopped meanwhile, or a signal that the run did not send ended the worker for the
                first time.
            Stopped: see `is_needed`.
        """
        self._require_need()
        worker = self._worker or self._start(parity)
        try:
            answer = worker.call(
                command | {"variant": variant}, self._limit_s(variant, command), self._waiting(variant)
            )
        except WorkerEnded as end:
            self.end()
            if self._has_second_chance(variant, end):
                raise TryAgain from None
            return {"say": "failed", "kind": end.kind, "reason": str(end), "is_from_outside": end.is_from_outside}
        if answer["say"] == "done" and answer.pop("was_stopped", False):
            self._was_stopped(variant)
        if answer.get("fatal"):
            self.end()
        return answer

    def _require_need(self) -> None:
        if stop.signal and not self.is_needed:
            raise Stopped

    def is_fresh(self) -> bool:
        """Start a worker where none runs, and return whether one started, which has nothing but its state."""
        return self._worker is None and bool(self._start(parity=False))

    def _has_second_chance(self, variant, end: WorkerEnded) -> bool:
        """A signal that the run did not send says nothing of the variant: the question is asked once more."""
        progress = [len(self.partial.of(fact, build=self.request.name)) for fact in PROGRESS]
        if not end.is_from_outside or self._killed.get(variant) == progress:
            return False
        self._killed[variant] = progress
        self._note("killed", variant, str(end))
        self.say(f"  {end}; {variant} is tried once more")
        return True

    def _has_cycle(self, variant) -> bool:
        """Return whether a finished cycle has a block of the variant, which can run then."""
        return any(variant in cycle["order"] for cycle in self.partial.of("cycle", build=self.request.name))

    def _limit_s(self, variant, command) -> float:
        """The longest silence of the worker. A pilot has told how long steps and a reset take."""
        pace, limit_s = self.paces.get(variant), self.settings.limit_s
        if command["do"] != "block" or pace is None:
            return limit_s
        steps = sum(command[kind] for kind in ("untimed", "timed", "drained"))
        return min(limit_s, max(LEAST_LIMIT_S, PATIENCE * (steps * pace["ms"] / 1e3 + pace["reset_s"])))

    def _waiting(self, variant) -> Callable[[float], None] | None:
        """Say how long the compiler has worked for a variant that is not made yet."""
        if self.request.variants.get(variant, {}).get("kind") != "compile" or variant in self.captured:
            return None
        return lambda seconds: self.say(f"  {variant} compiles: {seconds:.0f} s")

    def _was_stopped(self, variant):
        """The process that watches the clock was stopped in a block, by a user perhaps; TryAgain."""
        reason = "this process was stopped while it timed a block"
        if stop.signal:
            # `timeout` lets it go on as it ends it.
            raise Stopped
        if variant in self._stopped:
            self.leave_out(variant, "error", reason)
        else:
            self._stopped.add(variant)
            self.say(f"  {reason} of {variant}: the cycle is measured again")
        raise TryAgain

    def _start(self, parity) -> WorkerProcess:
        parity_environment = self.request.parity_environment if parity else None
        how = {"share": self.shares and not parity_environment, "parity": bool(parity_environment)}
        worker, self.facts = self._begun(parity_environment or self.request.environment, how)
        # The facts are those of the process that the blocks run in.
        self.partial.add("worker", build=self.request.name, **self.facts)
        return worker

    def _begun(self, environment, how) -> tuple[WorkerProcess, dict]:
        """A worker that has built its state, and what it says of it. One that ends without a word gets a second try."""
        for tries_left in (1, 0):
            self._worker = worker = self.ahead.taken(*self._words(environment))
            try:
                return worker, self._built(worker, how)
            except WorkerEnded as end:
                self.end()
                if end.is_answer or not tries_left:
                    raise
                self.say(f"  {end}; it is started once more")
        raise AssertionError

    def _built(self, worker, how) -> dict:
        """Let a worker build its state, and return what it says of it."""
        self.partial.add("seconds", phase="import", seconds=round(worker.wait(), 2))
        start = time.monotonic()
        # The first worker of a run measures the host's pace for all of it.
        command = {"do": "build", "pace": not self.partial.of("worker"), **how}
        answer = worker.call(command, self.settings.limit_s)
        if answer.pop("say") == "failed":
            raise WorkerEnded(answer["kind"], answer["reason"], is_answer=True)
        self._require_alike(answer)
        self.partial.add("seconds", phase="build", seconds=round(time.monotonic() - start, 2))
        return answer

    def _require_alike(self, answer) -> None:
        """Every worker of a build has one model: what fits may differ where another program takes memory."""
        (first, *_) = self.partial.of("worker", build=self.request.name) or [answer]
        model, first_model = ({**facts["config"], **{key: facts[key] for key in SAME}} for facts in (answer, first))
        odd = next((key for key in first_model if model.get(key) != first_model[key]), None)
        if odd is not None:
            reason = f"a later worker made another model: {odd} {model.get(odd)} in the place of {first_model[odd]}"
            raise WorkerEnded("error", f"{reason}; does another program use the GPU?", is_answer=True)

    def start_ahead(self) -> None:
        """Start a worker that will be needed: it imports while another one works, and waits to be told to build.

        It makes its CUDA context meanwhile.
        """
        # Several ranks would open their connections beside those at work.
        if self.remaining() and self.request.ranks == 1:
            self.ahead.start(*self._words(self.request.environment))

    def _words(self, environment) -> tuple:
        return self.request.command(self.remaining()[0]), environment, self.log

    def try_ask(self, variant: str, command: dict) -> dict:
        """Return the worker's answer; a variant that fails is not left out.

        Returns:
            The answer, or {"raised": reason}, or {"ended": reason} where a signal that the run did not send ended the
            worker, and ended it again when it was asked once more.

        Raises:
            TryAgain: see `_answer`.
        """
        answer = self._answer(variant, command)
        if answer.pop("say") == "done":
            return answer
        return {"ended" if answer.get("is_from_outside") else "raised": answer["reason"][:400]}

    def alone(self, asks: list[tuple[str, dict]], is_last: bool) -> Iterator[tuple[str, dict, dict]]:
        """Yield (variant, command, answer) of a new worker that gets these alone, but for those without an answer.

        The next worker starts when this one has answered: the driver counts the CUDA context of all on the GPU.
        """
        self._require_need()
        self.end()
        how, done = {"share": False, "parity": False}, 0
        for tries_left in (1, 0):
            try:
                worker, _ = self._begun(self.request.environment, how)
                for number, (variant, command) in enumerate(asks):
                    if number < done and command["do"] != "capture":
                        continue
                    self._require_need()
                    answer = worker.call(command | {"variant": variant}, self.settings.limit_s, self._waiting(variant))
                    done = max(done, number + 1)
                    if command["do"] == "alone":
                        answer["is_only"] = self.ahead.worker is None
                    if number == len(asks) - 1 and not is_last:
                        self.start_ahead()
                    if answer.pop("say") == "done":
                        yield variant, command, answer
                    elif answer["fatal"]:
                        return
                return
            except WorkerEnded as end:
                if not end.is_from_outside or not tries_left:
                    return
            finally:
                self.end()

    def _make_room(self, variant, reason):
        """The variant ran by itself, and does not fit beside the others."""
        if self.shares:
            self.apart, fact, what = True, "apart", "each block has a process of its own"
        else:
            self.shares, fact, what = True, "share", "eager steps share the graphs' memory"
        self._note(fact, variant, reason)
        self.say(f"  {variant}: {reason}; {what} from here on")
        self.end()

    def end(self, is_at_once: bool = False) -> None:
        """End the worker, if there is one."""
        if self._worker is not None:
            self._worker.end(is_at_once)
        self._worker, self.captured, self.paces = None, [], {}

    def remaining(self) -> list[str]:
        """Return the variants that are not left out, without the control."""
        gone = {fact["variant"] for fact in self.partial.of("left_out", build=self.request.name)}
        return [name for name in self.request.variants if name not in gone and name != self.settings.control]

    def leave_out(self, variant: str, kind: str, reason: str, is_said: bool = True) -> None:
        """Note that a variant is not measured any more, with a kind of `facts.Raised`."""
        self._note("left_out", variant, reason, kind=kind)
        if is_said:
            self.say(f"  {variant}: {'failed' if kind == 'error' else kind} ({reason})")

    def _note(self, fact, variant, reason, **more):
        self.partial.add(fact, build=self.request.name, variant=variant, reason=reason, **more)
