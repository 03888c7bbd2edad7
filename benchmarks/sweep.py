"""A loop over values of a quantity: eager against one variant at each value, and a table of all points.

    python -m benchmarks.sweep --model gpt3 --over batch --values 1,2,4
    python -m benchmarks.sweep --model gpt3 --over width --values 3,6,12 --cycles auto -- --precision bf16

Every point is a run of benchmarks.run in a folder of its own, OUT/<over>-<value>; options that this command does not
know (--preset, --cycles, --ngpu, ...) go there. The same command goes on where it was stopped: a point that passed with
today's source and enough cycles is not measured again. Commands with other --values may fill one OUT, at the same time
too, and the table has their points.

Exit status: 0 when every point is pass, oom or unsupported and something was timed, 1 otherwise, 2 for a mistake on
the command line, 130 after Ctrl-C.
"""

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from graph_worth.config import flag_of
from graph_worth.harness import ask, command, intervals, judge, run, script
from graph_worth.harness.command import Mistake, shown
from graph_worth.harness.files import run_file
from graph_worth.harness.files.facts import Run
from graph_worth.harness.judge import FAILED, PASS, Judged
from graph_worth.harness.pages import run_table
from graph_worth.harness.pages.run_table import milliseconds
from graph_worth.harness.processes import launch
from graph_worth.text import printable, without_folders

OWN = {"--variants": "a sweep compares eager with one variant, --variant", "--label": "a sweep names its folders"}
COLUMNS = ("base ms", "ms", "ratio", "95 %", "word", "issue ms", "busy ms", "at most")


def parse(argv=None) -> argparse.Namespace:
    """Return the command line; `rest` is for benchmarks.run. Mistakes end the program with one line."""
    words, flags = command.split_flags(argv)
    about = "Eager against one variant at several values of a quantity."
    more = f"Other options go to every point: see python -m benchmarks.run --help. {command.TO_SCRIPT}"
    parser = command.parser_of("sweep", about, more)
    add = parser.add_argument
    add("--model", metavar="NAME", required=True, help=f"one of {', '.join(script.models())}")
    add("--over", metavar="QUANTITY", required=True, help="what varies, as in batch; the model's choice")
    add("--values", metavar="1,2,4", type=command.values, required=True, help="a point for each")
    add("--variant", metavar="NAME", help="what stands against eager (the model's first graph)")
    add("--minutes", metavar="M", type=command.amount, help="start no point that cannot end in this time")
    add("--out", metavar="DIR", help="folder (runs/<gpu>x<count>/<model>-<preset>-<over>-<variant>)")
    args, args.rest = parser.parse_known_args(words)
    args.flags = flags
    command.require_printable(parser, [*words, *flags])
    for name in OWN.keys() & {word.partition("=")[0] for word in args.rest}:
        parser.error(f"{name}: {OWN[name]}")
    return args


def flags_of(args: argparse.Namespace, model: str, description: dict, preset: str) -> dict[int, list[str]]:
    """Return the script's flags for each value: the quantity's first field takes it, others keep their ratio to it."""
    sweeps = description.get("sweeps", {})
    if args.over not in sweeps:
        raise Mistake(f"unknown quantity {args.over!r}, --over takes one of {', '.join(sweeps) or 'none'}")
    fields = sweeps[args.over]
    for given in args.flags:
        if given.split("=")[0] in map(flag_of, fields):
            raise Mistake(f"{given} after -- is what --over {args.over} sets, leave it out")
    preset_values = {field: description["presets"][preset][field] for field in fields}
    flags_by_value = {value: _flags(args.over, preset_values, value) for value in args.values}
    # Before a point costs minutes.
    for words in flags_by_value.values():
        script.describe(model, [*args.flags, *words], preset)
    return flags_by_value


def _flags(over, preset, value) -> list[str]:
    first, *others = preset
    out = [flag_of(first), str(value)]
    for field in others:
        scaled, rest = divmod(preset[field] * value, preset[first])
        if rest:
            raise Mistake(f"--over {over}: {value} makes {flag_of(field)} no whole number")
        out += [flag_of(field), str(scaled)]
    return out


@dataclass(frozen=True)
class Point:
    """The result at one value. `own`: the build that was compared; None unless the status is pass."""

    value: int
    status: str
    reason: str = ""
    own: Judged | None = None


class Sweep:
    """One call of the command."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.model = args, script.find_model(args.model)
        described = script.describe(self.model, [])
        self.variant = args.variant or script.first_graph(described)
        self.variants = _variants(self.variant, described)
        options = self._options(args.flags, args.out)
        self.asked = ask.ask_of(options, self.model, launch.describe_here())
        if not any(self.variant in build.variants for build in self.asked.builds):
            raise Mistake(f"--variant {self.variant}: the flags after -- leave no build of it")
        args.flags = self.asked.flags
        self.flags = flags_of(args, self.model, self.asked.description, self.asked.preset)
        self.gpu, self.load = next(iter(self.asked.gpus.names), None), options.host_load
        load = [f"load{self.load}"] * bool(self.load)
        name = "-".join([self.model, self.asked.preset, args.over, self.variant, *load])
        self.root = Path(args.out).resolve() if args.out else self.asked.group.parent / name
        self.least_cycles = run.settings_of(options, self.asked.preset).least_cycles

    def _options(self, flags, out, *more):
        """The command line of benchmarks.run for one point."""
        words = ["--model", self.model, "--variants", ",".join(self.variants), *self.args.rest, *more]
        return run.parse([*words, *(["--out", str(out)] if out else []), "--", *flags])

    def measure_all(self) -> int:
        """Measure every point that is asked for, print the table, and return the exit status."""
        over, minutes, begin_s, longest_s = self.args.over, self.args.minutes, time.monotonic(), 0.0
        self.root.mkdir(parents=True, exist_ok=True)
        points, before = {}, self.measured()
        for value in self.flags:
            start_s = time.monotonic()
            if value in before:
                print(f"\n{over} {value} was measured before")
                continue
            if minutes and 60 * minutes - (start_s - begin_s) <= longest_s:
                print(f"\n--minutes {minutes:g}: {over} {value} not started")
                break
            points[value] = self.measure(value)
            longest_s = max(longest_s, time.monotonic() - start_s)
        # Other commands may have added points.
        points = self.measured() | points
        every = [points[value] for value in sorted(points)]
        print(f"\n{self.report(every)}\n\n{shown(self.root)}/: a folder a point", flush=True)
        is_fine = all(point.status in judge.FINE for point in every)
        return 0 if is_fine and any(point.own for point in every) else 1

    def measure(self, value: int) -> Point:
        """Measure a point and return it."""
        name = f"{self.args.over}-{value}"
        print(flush=True)
        try:
            flags = [*self.args.flags, *self.flags[value]]
            ((facts, _),), _ = run.measured(self._options(flags, self.root / name, "--label", name))
        except Mistake as mistake:
            print(f"not run: {mistake}")
            return Point(value, "unsupported", str(mistake))
        return self._point(value, facts)

    def measured(self) -> dict[int, Point]:
        """Return each value whose newest run with this request and today's source passed, with enough cycles."""
        points = {}
        for _, facts in sorted(run_file.find(self.root)[0], key=lambda pair: pair[1].begin_utc):
            over, _, value = facts.label.rpartition("-")
            if over == self.args.over and value.isdecimal() and self._is_asked(facts):
                points[int(value)] = self._point(int(value), facts)
        return {
            value: point
            for value, point in points.items()
            if point.own is not None and len(point.own.build.cycles) >= self.least_cycles
        }

    def _is_asked(self, facts: Run) -> bool:
        """Return whether a run is of this request; its label says which value its last flags set."""
        request, given = self.asked, [without_folders(flag) for flag in self.args.flags]
        gpu = next((device.name for device in facts.host.gpus), None)
        seen = (facts.model, facts.preset, facts.ranks, facts.flags[: len(given)], facts.source.get("hash"), gpu)
        like = (request.model, request.preset, request.ranks, given, request.host["env"]["source_hash"], self.gpu)
        is_alike = len(facts.flags) - len(given) == len(next(iter(self.flags.values())))
        busy = {cycle.busy_processes for build in facts.builds.values() for cycle in build.cycles}
        return seen == like and is_alike and busy <= {0, self.load}

    def _point(self, value: int, facts: Run) -> Point:
        builds = [judged for judged in judge.judged(facts).values() if self.variant in judged.verdicts]
        if not builds:
            return Point(value, FAILED, "nothing was measured")
        best = next((judged for judged in builds if judged.build.variants[self.variant].blocks), builds[0])
        for name in (best.base or best.build.anchor or "eager", self.variant):
            verdict = best.verdicts.get(name)
            if verdict is not None and verdict.status != PASS:
                return Point(value, verdict.status, verdict.reason)
        asked_layers, held = best.build.asked_layers, best.build.config.get("layers")
        if asked_layers is not None and isinstance(held, int) and held < asked_layers:
            return Point(
                value, "oom", f"it ran with --layers {held} in the place of {asked_layers}, which does not fit"
            )
        if best.ratio_of(self.variant, bool(self.load)) is None:
            return Point(value, FAILED, f"no cycle beside {best.base}")
        return Point(value, PASS, own=best)

    def report(self, points: list[Point]) -> str:
        """Return the table of points and its notes."""
        first, *others = (flag_of(field) for field in self.asked.description["sweeps"][self.args.over])
        quantity = f"{self.args.over} ({first}{'; in proportion ' * bool(others)}{', '.join(others)})"
        load = f", beside {self.load} busy processes" if self.load else ""
        title = f"{self.asked.name} over {quantity}: {self.variant} against eager{load}"
        rows = [(self.args.over, *COLUMNS), *map(self._row, points)]
        lines = [f"{title}, {self.gpu or 'CPU'} x{self.asked.ranks}", *run_table.aligned(rows, 0)]
        for point in points:
            lines += [f"{point.status}: {self.args.over} {point.value} ({point.reason})"] if point.reason else []
        timed = [point.own for point in points if point.own]
        lines += [run_table.on_a_cpu(timed)] if timed and self.gpu is None else []
        return "\n".join(map(printable, lines))

    def _row(self, point):
        judged, busy = point.own, bool(self.load)
        ratio = judged.ratio_of(self.variant, busy) if judged else None
        if judged is None or ratio is None:
            return (str(point.value), "", "", "", "", point.status, "", "", "")
        issue_ms, busy_ms = (
            milliseconds(judged.issue_ms(judged.base, busy)),
            milliseconds(judged.working(judged.base).value),
        )
        at_most = run_table.at_most(judged, self.variant, busy)
        return (str(point.value), *run_table.ratio_cells(ratio), intervals.word(ratio), issue_ms, busy_ms, at_most)


def _variants(variant, described) -> list[str]:
    """eager, the other eagers of the variant's builds unless it stands apart, and the variant."""
    known, builds = described["variants"], described.get("variant_builds", {})
    if variant not in known or variant == "eager":
        others = [name for name in known if name != "eager"]
        raise Mistake(f"unknown variant {variant!r}, --variant takes one of {', '.join(others)}")
    if variant in described.get("apart", {}):
        return ["eager", variant]
    builds_of_variant = set(builds.get(variant, [""]))
    others = [name for name in script.eagers_of(described) if builds_of_variant & set(builds.get(name, [""]))]
    return ["eager", *(name for name in others if name not in ("eager", variant)), variant]


def main(argv=None) -> int:
    """Run the program; return its exit status."""
    args = parse(argv)
    return command.exit_status("python -m benchmarks.sweep", lambda: Sweep(args).measure_all(), run.FAILURES)


if __name__ == "__main__":
    sys.exit(main())
