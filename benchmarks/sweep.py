"""The search for the size where graphs stop paying: eager against one variant at growing values of a quantity.

    python -m benchmarks.sweep --model gpt3 --over batch
    python -m benchmarks.sweep --model gpt3 --over width --values 3,6,12 --cycles auto -- --precision bf16

The value starts at the preset's own and doubles until the interval of the ratio touches 1, until memory is full, or at
64 times the start. Where graphs do not pay at the start it is halved instead. Then a point or more between the last two
narrows the bracket. Every point is a run of benchmarks.run in a folder of its own, OUT/<over>-<value>; options that
this command does not know (--preset, --cycles, --ngpu, ...) go there. The same command goes on where it was stopped,
and commands with other --values may fill one OUT, at the same time too. OUT/sweep.json and OUT/table.md are
written after every point.

Exit status: 0 when every point is pass, oom or unsupported and something was timed, 1 otherwise, 2 for a mistake on
the command line, 130 after Ctrl-C.
"""

import argparse
import re
import sys
import time
from pathlib import Path

from benchmarks import ask, command, run, script
from benchmarks.command import Mistake, shown
from benchmarks.files.run_file import STATUSES
from benchmarks.pages import run_table
from benchmarks.processes import children, launch
from benchmarks.sweeps import crossover, quantity
from benchmarks.sweeps.sweep_points import Points, unmeasured
from benchmarks.sweeps.sweep_table import ratio, report

OWN = {"--variants": "a sweep compares eager with one variant, --variant", "--label": "a sweep names its folders"}
AUTO_MINUTES = 10.0  # --cycles auto ends by itself after so long


def run_point(argv: list[str]) -> tuple[int, str]:
    """Run benchmarks.run with these words, its output shown; return its exit status and output."""
    return children.run_shown([sys.executable, "-m", "benchmarks.run", *argv])


def parse(argv=None) -> argparse.Namespace:
    """Return the command line; `rest` is for benchmarks.run. Mistakes end the program with one line."""
    own, flags = command.split_flags(argv)
    about = "Where graphs stop paying: eager against one variant over a growing quantity."
    more = f"Other options go to every point: see python -m benchmarks.run --help. {command.TO_SCRIPT}"
    parser = command.parser_of("sweep", about, more)
    add = parser.add_argument
    add("--model", metavar="NAME", type=command.model_name, required=True, help=f"one of {', '.join(script.models())}")
    add("--over", metavar="QUANTITY", required=True, help="what grows, as in batch; the model's choice")
    add("--variant", metavar="NAME", help="what stands against eager (the model's first graph)")
    add("--values", metavar="1,2,4", type=command.values, help="just these, instead of a search")
    add("--max", metavar="N", type=command.positive, help=f"no value above this ({crossover.REACH} times the start)")
    add("--refine", metavar="N", type=command.count, help="points between the last two (1)")
    add("--minutes", metavar="M", type=command.amount, help="start no point that cannot end in this time")
    add("--out", metavar="DIR", help="folder (runs/<gpu>x<count>/<model>-<preset>-<over>-<variant>)")
    args, args.rest = parser.parse_known_args(own)
    args.flags = flags
    for word in filter(lambda word: not word.isprintable(), [*own, *flags]):
        parser.error(f"{word!a}: has a character that cannot be printed")
    for name in OWN.keys() & {word.partition("=")[0] for word in args.rest}:
        parser.error(f"{name}: {OWN[name]}")
    return args


class OutOfTime(Exception):
    """--minutes are over; the message says what is not started."""


class Sweep:
    """One call of the command.

    Args:
        args: of `parse`.
        runner: takes the words of benchmarks.run, and returns its exit status and what it printed.

    Raises:
        Mistake: something cannot be; the text names what can.
    """

    def __init__(self, args, runner):
        self.args, self.runner, self.result, self.failed = args, runner, None, {}
        self.start, self.longest_s, described = time.monotonic(), 0.0, script.describe(args.model, [])
        self.variants = self._variants(described)
        self.options = run.parse(self._words(args.flags, args.out))
        asked = self.asked = ask.ask_of(self.options, args.model, launch.describe_here())
        if not any(args.variant in build.variants for build in asked.builds):
            raise Mistake(f"--variant {args.variant}: the flags after -- leave no build of it")
        own = self.quantity = quantity.find(asked.description, asked.preset, args.over, args.flags)
        if args.values and (args.max or args.refine is not None):
            raise Mistake("--max and --refine are for a search, --values says which points: take one of them")
        args.refine = 1 if args.refine is None else args.refine
        self.largest = args.max or crossover.REACH * own.first
        if own.first > self.largest:
            raise Mistake(f"--max {args.max} is below {own.first}, where preset {asked.preset} starts")
        quantity.require(args.model, asked.preset, own, asked.flags, args.values or [own.first])
        load = self.options.host_load
        name = "-".join([args.model, asked.preset, args.over, args.variant, *[f"load{load}"] * bool(load)])
        root = Path(args.out).resolve() if args.out else asked.group.parent / name
        self.points = Points(root, asked, own, args.variant, script.kind_of(described, args.variant), load)
        head, other = self.points.head, self.points.on_disk()
        odd = ", ".join(f"{key} {other.get(key)}" for key in head if other and other.get(key) != head[key])
        if odd:
            raise Mistake(f"--out {root} holds a sweep of {odd}; take another folder")

    def _variants(self, described):
        """eager, the other eagers of the variant's builds, and the variant."""
        args, known, builds = self.args, described["variants"], described.get("variant_builds", {})
        args.variant = args.variant or script.first_graph(described)
        if args.variant not in known or args.variant == "eager":
            others = [name for name in known if name != "eager"]
            raise Mistake(f"unknown variant {args.variant!r}, --variant takes one of {', '.join(others)}")
        own = set(builds.get(args.variant, [""]))
        others = [name for name in script.eagers_of(described) if own & set(builds.get(name, [""]))]
        return ["eager", *(name for name in others if name not in ("eager", args.variant)), args.variant]

    def _words(self, flags, out, *more):
        """The words of benchmarks.run for one point."""
        words = ["--model", self.args.model, "--variants", ",".join(self.variants), *self.args.rest, *more]
        return [*words, *(["--out", str(out)] if out else []), "--", *flags]

    def measure_all(self) -> None:
        """Measure every point that is asked for; say why where it ends before."""
        first, values = self.quantity.first, self.args.values
        self.points.root.mkdir(parents=True, exist_ok=True)
        if not (values or self.points.gpu):
            values = [value for value in (first, 2 * first, 4 * first) if value <= self.largest]
        try:
            for value in values or []:
                self.measure(value)
            if not values:
                crossover.search(self.measure, first, self.largest, self.args.refine)
        except OutOfTime as stop:
            print(stop)

    def measure(self, value: int) -> dict:
        """Measure a point unless it is there, write the result so far, and return the point."""
        over = f"{self.args.over} {value}"
        why: tuple[str, str] | None = ("failed", "benchmarks.run left no run, see above")
        try:
            flags = [*self.asked.flags, *self.quantity.flags(value)]
            script.describe(self.args.model, flags, self.asked.preset)
            if self.points.is_measured(value, self.options.cycles):
                print(f"\n{over} was measured before")
                why = None
            else:
                before, said = self.points.newest(value)[0], self._run(value, over, flags)
                # benchmarks.run keeps no file of a run that timed nothing; it says why.
                found = re.search(rf"^  \S+: ({'|'.join(STATUSES)}) \((.*)\)$", said, re.MULTILINE)
                why = ((found[1], found[2]) if found else why) if self.points.newest(value)[0] == before else None
        except Mistake as mistake:
            print(f"\nnot run: {mistake}")
            why = ("unsupported", str(mistake))
        self.failed |= {value: unmeasured(*why)} if why else {}
        self.result, self.left_out = self.points.write(self.failed)
        point = next(each for each in self.result["points"] if each["value"] == value)
        print(f"{over}: {ratio(point)}", flush=True)
        return point

    def _run(self, value, over, flags):
        """Run benchmarks.run for one point and return its output."""
        folder, start, minutes = self.points.folder(value), time.monotonic(), self.args.minutes
        more = ["--label", folder.name]
        if minutes:
            left_s = 60 * minutes - (start - self.start)
            if left_s <= self.longest_s:
                took = f", the longest so far took {self.longest_s:.0f} s" if self.longest_s else ""
                raise OutOfTime(f"\n--minutes {minutes:g}: {over} not started{took}")
            more += ["--minutes", f"{min(left_s / 60, AUTO_MINUTES):.3f}"] if self.options.cycles == "auto" else []
        print(flush=True)
        status, said = self.runner(self._words(flags, folder, *more))
        if status == 130:
            raise KeyboardInterrupt
        self.longest_s = max(self.longest_s, time.monotonic() - start)
        return said

    def finish(self) -> int:
        """Print table and finding; return the exit status."""
        if self.result is None:
            self.result, self.left_out = self.points.write({})
        print(f"\n{report(self.result, self.left_out)}\n")
        print(f"{shown(self.points.root)}/: a folder a point, sweep.json, table.md")
        points = self.result["points"]
        bad = [f"{self.args.over} {each['value']}" for each in points if each["status"] not in run_table.FINE]
        if bad:
            print(f"failed: {', '.join(bad)}")
        is_timed = any(each["cycles"] for each in points)
        if not is_timed:
            print("no point was timed")
        return 1 if bad or not is_timed else 0


def main(argv=None, runner=run_point) -> int:
    """The program."""

    def work():
        sweep = Sweep(parse(argv), runner)
        sweep.measure_all()
        return sweep.finish()

    return command.exit_status("python -m benchmarks.sweep", work, run.FAILURES, command.STOPPED)


if __name__ == "__main__":
    sys.exit(main())
