"""The rounds of a session: round 0 for parity, timed rounds in ABBA order, and what becomes of a run in each.

Round 0 is untimed: eager, eager again, then the others against eager. A timed run that did not settle is made once more
with eager beside it. A run that failed or hung is made once more too, and its first try stays in the session.
"""

import itertools
import statistics
import sys
import time

from benchmarks import compare, frame, intervals, parity, progress, rows, script, trust
from benchmarks.command import shown
from benchmarks.open_session import OpenSession, key_of, name_of
from benchmarks.progress import duration
from benchmarks.runner import Runner
from benchmarks.script import CONTROL

# What a variant cannot do in one run it cannot do in the next: its record stands as its row. failed and
# timeout have had their second try by then.
NOT_RUN_AGAIN = ("unsupported", "oom", "capture_failed", "numerics_failed", "failed", "timeout")
# A step waits for its host if it takes at most HOST_BOUND times what its host needs to issue it, and its kernels take
# at most MOST_BUSY of it. A host's pace changes between the passes and the window: of the 20 runs that were repeated in
# the sessions under results/ eight had such steps, at 1.01 to 1.28 times the issue time, and three repeats settled.
HOST_BOUND, MOST_BUSY = 1.35, 0.9
# Of the first compilation, what one takes at most that finds its kernels in a cache. On H200s, compile_graph of Stable
# Diffusion: 16 of 104 s, and half of 98 to 110 s before autograd's traces were kept, too.
FROM_CACHE = 0.5
# What round 0 says of a variant stands in its timed records too.
PARITY = ("parity", "reference", "max_rel_diff", "first_difference")


def order(variants: list[str], round_index: int) -> list[str]:
    """ABBA: odd rounds in the given order, even rounds backwards, so that a drift falls on both sides."""
    return list(variants) if round_index % 2 else list(reversed(variants))


class Rounds:
    """The rounds that one call adds to a session. out_of_time: --minutes ended it before its last round."""

    def __init__(self, session: OpenSession):
        self.session, self.request = session, session.request
        self.runner = Runner(session, self._say)
        self.out_of_time = False
        # Rounds that the session gets at least, and repeats to come of runs of this round that did not settle.
        self.least_rounds = intervals.AUTO_MIN_ROUNDS if self.request.rounds == "auto" else self.request.rounds
        self.num_repeats = 0
        self.start = time.monotonic()

    def measure(self) -> None:
        """Round 0 and the timed rounds.

        Where runs take long the first timed round comes right after eager's run of round 0, which the others are
        compared with, so that rows are seen after minutes. It is whole and in its order; what fails the rest of round 0
        fails in that timed round, too (`_take_over_parity`).
        """
        self.runner.probe("begin")
        if self.request.preset != "tiny":
            self._parity_round(["eager"], with_controls=False)
            self._timed_rounds(last=1)
        if not self.out_of_time:
            self._parity_round(self.request.variants)
            self._timed_rounds()
        if not self.out_of_time:
            self.runner.probe("end")

    def _record(self, variant, number=0, attempt=1):
        return self.session.records.get((variant, number, attempt))

    def _run(self, variant, number, attempt=1, name=None):
        """(record, seconds) of a run, made once more if it failed or hung. name: of a second run of round 0."""
        start = time.monotonic()
        stem = name or name_of({"variant": variant, "round": number, "attempt": attempt})
        record = self.runner.run(variant, number, attempt, stem)
        if record["status"] in ("failed", "timeout"):
            if name is None:
                self._print_line(record, time.monotonic() - start, "once more", with_left=False)
                self.session.keep(record)
                self.session.supersede(key_of(record))
            start = time.monotonic()
            record = self.runner.run(variant, number, attempt, stem)
        return record, time.monotonic() - start

    # -- round 0

    def _parity_round(self, variants, with_controls=True):
        """These variants once, deterministic and untimed: eager, eager again, then the others against eager.

        What others are compared with in eager's place is run twice as well, and before them. Who could not run in a
        timed round is not asked. Without controls no second run is made, and a later call makes it.
        """
        request, bases = self.request, self.request.bases
        missing = [v for v in variants if v in self._active() and v != CONTROL and self._record(v) is None]
        for base in bases:
            needed = any(request.base(variant) == base for variant in missing) or self._lacks_control(base)
            lost = needed and base not in missing and not self.session.sidecar(base).exists()
            if lost and self._record(base) and self._record(base)["status"] in ("pass", "eager_two_runs_differ"):
                print(f"{base} round 0 is run anew: the others need its parity sidecar")
                self.session.supersede((base, 0, 1))
                missing.append(base)
        missing.sort(key=lambda variant: bases.index(variant) if variant in bases else len(bases))
        unsure = [base for base in bases if with_controls and (base in missing or self._lacks_control(base))]
        for variant in dict.fromkeys([*unsure, *missing]):
            record, seconds, note = self._record(variant), 0.0, ""
            if record is None:
                record, seconds = self._run(variant, 0)
                record["numerics"]["reference"] = request.base(variant)
            if record["status"] == "pass" and variant in bases and not with_controls:
                note = "its second run comes after round 1"
            elif record["status"] == "pass" and parity.is_run_twice(request.description, variant):
                seconds += self._control(record)
            if record["status"] == "pass" and variant not in bases:
                base = request.base(variant)
                sidecars = self.session.sidecar(variant), self.session.sidecar(base)
                parity.judge(record, self._record(base), *sidecars, request.description)
            self.session.keep(record)
            self._print_line(record, seconds, note)
            if variant not in bases:
                self.session.sidecar(variant).unlink(missing_ok=True)
            for timed in self.session.of(variant):
                if timed["round"] and self._take_over_parity(timed):
                    self.session.keep(timed)

    def _without_parity(self):
        """Variants whose round 0 is to come, before the second timed round at the latest."""
        return [v for v in self._active() if (v != CONTROL and self._record(v) is None) or self._lacks_control(v)]

    def _lacks_control(self, base):
        """Its round 0 was run and not yet compared with a second run."""
        record = self._record(base)
        return record is not None and record["status"] == "pass" and record["numerics"]["parity"] is None

    def _control(self, record):
        """Eager, or what stands in its place, a second time. Only the verdict is kept, in the first run's record."""
        base = record["variant"]
        # It makes the steps of the first run.
        self.session.records[key_of(record)] = record
        control, seconds = self._run(base, 0, name=f"{base}.r0.control")
        sidecars = self.session.sidecar(base, "r0.control"), self.session.sidecar(base)
        parity.judge_control(record, control, *sidecars)
        for path in self.session.partial.glob(f"{base}.r0.control.*"):
            path.unlink()
        return seconds

    def _take_over_parity(self, record):
        """What round 0 says of a timed run's variant, if it was made; whether that changed the record.

        A run that was timed before its round 0 failed fails with it.
        """
        first = self._record(record["variant"])
        if first is None:
            return False
        taken = {key: first["numerics"][key] for key in PARITY}
        fails = record["status"] == "pass" and first["status"] in NOT_RUN_AGAIN
        is_new = fails or taken != {key: record["numerics"][key] for key in PARITY}
        record["numerics"].update(taken)
        record["extra"]["loss_rel_diff"] = first["extra"].get("loss_rel_diff")
        if fails:
            record.update(status=first["status"], message=f"round 0: {first['message']}")
        return is_new

    # -- timed rounds

    def _timed_rounds(self, last=None):
        """ABBA rounds, up to the last one; says why when it stops before the asked number."""
        number = 0
        wanted = 2 if self.request.rounds == "auto" else self.request.rounds
        while number != last:
            if number == wanted:
                wanted = self._wanted(number)
                if number == wanted:
                    return
            number += 1
            missing = [v for v in order(self._active(), number) if self._record(v, number) is None]
            if not missing and not self._unsettled(number):
                continue
            guess = sum(map(self._next_run_s, missing))
            minutes = self.request.args.minutes
            if minutes and time.monotonic() - self.start + guess > minutes * 60:
                print(f"--minutes {minutes:g}: round {number} would take {duration(guess)}, not started")
                self.out_of_time = True
                return
            self._run_all(missing, number, 1, wanted)
            self._run_all(self._unsettled(number), number, 2, wanted)

    def _next_run_s(self, variant):
        """What one more timed run of a variant takes: its longest in this call, or any variant's where it has none.

        A variant's first run may have compiled what later ones find in a cache, so it counts where there is no other.
        Before the first timed round, a run of round 0 is the best guess.
        """
        known = {name: self._timed_s(name) for name in self._active()}
        first = {name: own[0] for name, own in known.items() if own}
        if not first:
            return max(self.runner.seconds[True] or self.runner.seconds[False], default=0.0)
        own = known.get(variant)
        return max(own[1:] or own[:1]) if own else max(first.values())

    def _timed_s(self, variant):
        """Seconds of a variant's timed runs in this call, of round 1 less what it need not compile again."""
        took = []
        for record in self.session.of(variant):
            seconds = self.runner.took_s.get(name_of(record))
            if record["round"] and seconds is not None:
                compiled = record["seconds"].get("compile") or 0.0
                took.append(seconds - (1 - FROM_CACHE) * compiled if record["round"] == 1 else seconds)
        return took

    def _run_all(self, names, number, attempt, wanted):
        for index, variant in enumerate(names):
            self.least_rounds = max(wanted, self.least_rounds)
            self.num_repeats = len(names) - index - 1 if attempt > 1 else 0
            record, seconds = self._run(variant, number, attempt)
            self._take_over_parity(record)
            self.session.keep(record)
            waits = variant in self._without_parity() and record["status"] == "pass"
            notes = [attempt_note(record), "its parity follows" if waits else ""]
            self._print_line(record, seconds, ", ".join(filter(None, notes)))
        self._judge_work()

    def _unsettled(self, number) -> list[str]:
        """Who runs once more in this round: what did not settle, and eager beside it; all, where eager did not.

        Not a step that waits for its host: it changes as the host does, not as the GPU warms up. Nor a variant whose
        repeat in an earlier round did not settle either.
        """
        if self.request.preset == "tiny":
            return []
        made = {name: self._record(name, number) for name in self._active()}
        odd = {
            name
            for name, record in made.items()
            if record and frame.is_timed(record) and record["conditions"]["settled"] is False
            if not (_waits_for_its_host(record) or self._was_repeated_in_vain(name, number))
        }
        if not odd:
            return []
        eagers = {name for name in made if script.kind_of(self.request.description, name) == "eager"}
        names = list(made) if odd & eagers else [name for name in made if name in eagers | odd]
        return [name for name in order(names, number) if self._record(name, number, 2) is None]

    def _was_repeated_in_vain(self, variant, number):
        """Whether a repeat of the variant before this round did not settle."""
        repeats = (self._record(variant, earlier, 2) for earlier in range(1, number))
        return any(record and record["conditions"]["settled"] is False for record in repeats)

    def _active(self):
        """Variants that are worth another timed run."""
        # A verdict on timed work may change with more eager rounds, so it stops nothing.
        ended = {
            record["variant"]
            for record in self.session.records.values()
            if record["status"] in NOT_RUN_AGAIN and not _is_of_timed_work(record)
        }
        return [variant for variant in self.request.variants if variant not in ended]

    def _wanted(self, number):
        """How many rounds the session gets, after `number` of them."""
        if self.request.rounds != "auto":
            return number
        sound = [record for record in self.session.records.values() if trust.contradiction(record) is None]
        group, results = rows.group_of(sound), []
        for session, name in itertools.product(group.order, self._active()):
            base = group.base(session, name)
            if base not in (None, name):
                pairs = rows.pairs(group, session, name, base)
                ratios = rows.log_ratios(pairs, lambda record: record["statistic_ms"])
                results += [intervals.interval(ratios)] if ratios else []
        return intervals.next_num_rounds(results, number)

    def _judge_work(self):
        """Whether timed runs prove their work against eager's; all of them again after each round, as the spread is
        known better then."""
        for variant in self.request.variants:
            base = self.request.base(variant)
            eager = compare.timed(self.session.of(base))
            for record in self.session.of(variant):
                if not record["round"] or not (record["status"] == "pass" or _is_of_timed_work(record)):
                    continue
                beside = [other for other in eager if other is not record]
                beside.sort(key=lambda other, own=record: [other[key] != own[key] for key in ("round", "attempt")])
                fault = trust.unproven(record, beside if variant != base else [])
                if (fault or "") != record["message"].removeprefix(trust.TIMED_WORK):
                    status = "numerics_failed" if fault else "pass"
                    record.update(status=status, message=f"{trust.TIMED_WORK}{fault}" if fault else "")
                    self.session.keep(record)
                    print(f"{frame.short_name(record)}: {fault or 'its work is proven after all'}")

    # -- what people see

    def _print_line(self, record, seconds, note="", with_left=True):
        is_timed = bool(record["round"])
        step = f"{record['statistic_ms']:10.2f} ms" if record["statistic_ms"] else f"{'-':>13s}"
        name = f"round {record['round']}" if is_timed else "parity "
        status = record["numerics"]["parity"] if not is_timed and record["status"] == "pass" else None
        width = max(len(variant) for variant in self.request.variants)
        left = self._left() if with_left else ""
        line = f"{name:8s}  {record['variant']:{width}s}  {status or record['status']:16s}{step}"
        print(f"{line}  {duration(seconds):>7s}  {', '.join(filter(None, [note, left]))}".rstrip())
        phases = progress.phases(record, self.runner.took_s.get(name_of(record))) if self.request.args.verbose else ""
        for text in filter(None, [record["message"], phases]):
            print(f"          {text}")
        sys.stdout.flush()

    def _left(self):
        """How long all runs to come take, of round 0 and timed; nothing after the last one."""
        num_parity, timed = self._num_parity_left(), self._timed_left()
        if not num_parity + self.num_repeats + len(timed):
            return ""
        means = {is_timed: statistics.fmean(own) for is_timed, own in self.runner.seconds.items() if own}
        any_mean = next(iter(means.values()), 0.0)
        # A timed run takes longer than one of round 0.
        is_guess = (timed or self.num_repeats) and True not in means
        left_s = num_parity * means.get(False, any_mean) + self.num_repeats * means.get(True, any_mean)
        left_s += sum(means.get(False, 0.0) if is_guess else self._next_run_s(variant) for variant in timed)
        return f"{'at least' if is_guess or self.request.rounds == 'auto' else 'about'} {duration(left_s)} left"

    def _num_parity_left(self):
        """Runs of round 0 to come, second ones of what others are compared with among them."""
        missing = [v for v in self._active() if v != CONTROL and self._record(v) is None]
        twice = [v for v in missing if parity.is_run_twice(self.request.description, v)]
        return len(missing) + len(twice) + sum(map(self._lacks_control, self.request.bases))

    def _timed_left(self):
        """The variants of timed runs to come, without repeats."""
        every = itertools.product(self._active(), range(1, self.least_rounds + 1))
        return [variant for variant, number in every if self._record(variant, number) is None]

    def _say(self, text):
        root = self.request.root
        print(text.replace(str(root), str(shown(root))), flush=True)


def _is_of_timed_work(record):
    return record["message"].startswith(trust.TIMED_WORK)


def _waits_for_its_host(record):
    step_ms, issue_ms, busy_ms = record["statistic_ms"], record["issue_ms"], record["busy_ms"]
    if None in (step_ms, issue_ms, busy_ms):
        return False
    return step_ms <= HOST_BOUND * issue_ms and busy_ms <= MOST_BUSY * step_ms


def attempt_note(record: dict) -> str:
    if record["conditions"]["settled"] is not False or not record["round"] or record["preset"] == "tiny":
        return ""
    if record["attempt"] == 1 and _waits_for_its_host(record):
        return "not settled, it waits for its host"
    return "not settled" if record["attempt"] == 1 else "not settled again, it stands"
