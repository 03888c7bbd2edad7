"""The search for the size where graphs stop paying: eager against one variant at growing values of a quantity.

    python -m benchmarks.sweep --model gpt3 --over batch
    python -m benchmarks.sweep --model gpt3 --over width --values 3,6,12 --cycles auto -- --precision bf16

The value starts at the preset's own and doubles until the interval of the ratio touches 1, until memory is full, or at
64 times the start. Where graphs do not pay at the start it is halved instead. Then one point narrows the bracket.
Every point is a run of benchmarks.run in a folder of its own, OUT/<over>-<value>; options that this command does not
know (--preset, --cycles, --ngpu, ...) go there. The same command goes on where it was stopped, and commands with other
--values may fill one OUT, at the same time too. OUT/sweep.json and OUT/table.md are written after every point.

Exit status: 0 when every point is pass, oom or unsupported and something was timed, 1 otherwise, 2 for a mistake on
the command line, 130 after Ctrl-C.
"""

import argparse
import sys
import time
from pathlib import Path

from benchmarks import ask, command, judge, run, script
from benchmarks.command import Mistake, shown
from benchmarks.processes import launch
from benchmarks.sweeps import crossover, quantity
from benchmarks.sweeps.points import Points, is_timed, report

OWN = {"--variants": "a sweep compares eager with one variant, --variant", "--label": "a sweep names its folders"}


def parse(argv=None) -> argparse.Namespace:
    """Return the command line; `rest` is for benchmarks.run. Mistakes end the program with one line."""
    own, flags = command.split_flags(argv)
    about = "Where graphs stop paying: eager against one variant over a growing quantity."
    more = f"Other options go to every point: see python -m benchmarks.run --help. {command.TO_SCRIPT}"
    parser = command.parser_of("sweep", about, more)
    add = parser.add_argument
    add("--model", metavar="NAME", required=True, help=f"one of {', '.join(script.models())}")
    add("--over", metavar="QUANTITY", required=True, help="what grows, as in batch; the model's choice")
    add("--variant", metavar="NAME", help="what stands against eager (the model's first graph)")
    add("--values", metavar="1,2,4", type=command.values, help="just these, instead of a search")
    add("--minutes", metavar="M", type=command.amount, help="start no point that cannot end in this time")
    add("--out", metavar="DIR", help="folder (runs/<gpu>x<count>/<model>-<preset>-<over>-<variant>)")
    args, args.rest = parser.parse_known_args(own)
    args.flags = flags
    command.require_printable(parser, [*own, *flags])
    for name in OWN.keys() & {word.partition("=")[0] for word in args.rest}:
        parser.error(f"{name}: {OWN[name]}")
    return args


class OutOfTime(Exception):
    """--minutes are over; the message says what is not started."""


class Sweep:
    """One call of the command.

    Args:
        args: of `parse`.

    Raises:
        Mistake: something cannot be; the text names what can.
    """

    def __init__(self, args: argparse.Namespace):
        self.args, self.start, self.longest_s = args, time.monotonic(), 0.0
        self.model = script.find_model(args.model)
        described = script.describe(self.model, [])
        args.variant = args.variant or script.first_graph(described)
        self.variants = _variants(args.variant, described)
        options = self._options(args.flags, args.out)
        asked = ask.ask_of(options, self.model, launch.describe_here())
        if not any(args.variant in build.variants for build in asked.builds):
            raise Mistake(f"--variant {args.variant}: the flags after -- leave no build of it")
        own = quantity.find(asked.description, asked.preset, args.over, args.flags)
        quantity.require(self.model, asked.preset, own, asked.flags, args.values or [own.first])
        load = options.host_load
        name = "-".join([self.model, asked.preset, args.over, args.variant, *[f"load{load}"] * bool(load)])
        root = Path(args.out).resolve() if args.out else asked.group.parent / name
        least = run.settings_of(options, asked.preset).least_cycles
        self.points = Points(root, asked, own, args.variant, load, least)

    def _options(self, flags, out, *more):
        """The command line of benchmarks.run for one point."""
        words = ["--model", self.model, "--variants", ",".join(self.variants), *self.args.rest, *more]
        return run.parse([*words, *(["--out", str(out)] if out else []), "--", *flags])

    def measure_all(self) -> int:
        """Measure every point that is asked for, print table and finding, and return the exit status."""
        first, values = self.points.quantity.first, self.args.values
        if not (values or self.points.asked.gpus.names):
            values = [first, 2 * first, 4 * first]
        self.points.root.mkdir(parents=True, exist_ok=True)
        try:
            for value in values or []:
                self.measure(value)
            if not values:
                crossover.search(self.measure, first)
        except OutOfTime as stop:
            print(stop)
        result = self.points.write()
        print(f"\n{report(result)}\n\n{shown(self.points.root)}/: a folder a point, sweep.json, table.md")
        bad = [f"{self.args.over} {own['value']}" for own in result["points"] if own["status"] not in judge.FINE]
        if bad:
            print(f"failed: {', '.join(bad)}")
        return 1 if bad or not is_timed(result) else 0

    def measure(self, value: int) -> dict:
        """Measure a point unless it is there, write the result so far, and return the point."""
        over, start, minutes = f"{self.args.over} {value}", time.monotonic(), self.args.minutes
        point = self.points.measured(value)
        if point is not None:
            print(f"\n{over} was measured before")
        elif minutes and 60 * minutes - (start - self.start) <= self.longest_s:
            raise OutOfTime(f"\n--minutes {minutes:g}: {over} not started")
        else:
            try:
                print(flush=True)
                flags = [*self.points.asked.flags, *self.points.quantity.flags(value)]
                folder = self.points.folder(value)
                ((own, path),), _ = run.measured(self._options(flags, folder, "--label", folder.name))
                point = self.points.add(value, flags, own, path)
            except Mistake as mistake:
                print(f"not run: {mistake}")
                point = self.points.add_refused(value, str(mistake))
            self.longest_s = max(self.longest_s, time.monotonic() - start)
        self.points.write()
        interval = f" ({point['low']:.3f} to {point['high']:.3f})" if point["low"] else ""
        said = f"{point['ratio']:.3f}x{interval}  {point['word']}" if point["ratio"] else point["status"]
        print(f"{over}: {said}", flush=True)
        return point


def _variants(variant, described) -> list[str]:
    """eager, the other eagers of the variant's builds, and the variant."""
    known, builds = described["variants"], described.get("variant_builds", {})
    if variant not in known or variant == "eager":
        others = [name for name in known if name != "eager"]
        raise Mistake(f"unknown variant {variant!r}, --variant takes one of {', '.join(others)}")
    own = set(builds.get(variant, [""]))
    others = [name for name in script.eagers_of(described) if own & set(builds.get(name, [""]))]
    return ["eager", *(name for name in others if name not in ("eager", variant)), variant]


def main(argv=None) -> int:
    """Run the program; return its exit status."""
    args = parse(argv)
    return command.exit_status("python -m benchmarks.sweep", lambda: Sweep(args).measure_all(), run.FAILURES)


if __name__ == "__main__":
    sys.exit(main())
