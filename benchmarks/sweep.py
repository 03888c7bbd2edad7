"""Eager against one graph at several values of a quantity: one file, a table, and the value at which the gain ends.

    python -m benchmarks.sweep --model llama2_lora --preset slice --over sequence --values 128,256,512,1024
    python -m benchmarks.sweep --model gpt3 --over width --values 3,6,12 -- --precision bf16
    python -m benchmarks.sweep --step examples/steps/nanogpt.py:build --over batch --values 16,32,64
    python -m benchmarks.publish runs/h200x1/llama2_lora-slice-over-sequence/ID.json

The smallest and the largest value are full runs, as benchmarks.run makes them. A point between them is light: three
cycles of eager and the graph in a full run's blocks, profiles, eager alone, and the losses of the blocks as parity.
Options that this command does not know (--preset, --cycles, --ngpu, ...) are those of benchmarks.run. A step's file has
build(device, size). The same command goes on where it was stopped. A point that passed on this host with today's
source is not measured again, also with other --values.

Exit status: 0 when every point is pass, oom or unsupported and something was timed, 1 otherwise, 2 for a mistake on
the command line, 130 after Ctrl-C.
"""

import argparse
import hashlib
import re
import sys
import time
from dataclasses import dataclass

from benchmarks import crossing
from graph_worth.config import flag_of
from graph_worth.folders import OWN_STEP
from graph_worth.harness import ask, command, intervals, judge, measure, run, script
from graph_worth.harness.ask import Ask, Options
from graph_worth.harness.command import Mistake, shown
from graph_worth.harness.files import partial, run_file
from graph_worth.harness.files.facts import Run, folder_of_sweep
from graph_worth.harness.judge import FAILED, PASS, Judged
from graph_worth.harness.pages import cells, roofline, run_table
from graph_worth.harness.processes import launch, locks
from graph_worth.text import printable, without_folders

REFUSED = {
    "--variants": "a sweep compares eager with one variant, --variant",
    "--label": "a sweep names its folders",
    "--host-load": "a sweep is measured without other work",
}
# Eager's blocks take at most so many times as long as a full run's least, where a graph gains much.
CYCLES, MOST_BLOCKS = 3, 2.0
# Seconds of a point until one has been measured.
LIGHT_S, FULL_S = 45.0, 150.0
COLUMNS = ("base ms", "ms", "gain", "95 %", "word", "us a kernel", "host us", "at most")


def parse(argv=None) -> argparse.Namespace:
    """Return the command line; `rest` is for benchmarks.run. Mistakes end the program with one line."""
    words, flags = command.split_flags(argv)
    about = "Eager against one variant at several values of a quantity."
    more = f"Other options go to every point: see python -m benchmarks.run --help. {command.TO_SCRIPT}"
    parser = command.parser_of("sweep", about, more)
    add = parser.add_argument
    add("--model", metavar="NAME", help=f"one of {', '.join(script.models())}")
    add("--step", metavar="FILE.py:BUILD", help="your own step, of a function build(device, size)")
    add("--over", metavar="QUANTITY", required=True, help="what varies, as in batch; the model's choice")
    add("--values", metavar="1,2,4", type=command.values, required=True, help="a point for each")
    add("--variant", metavar="NAME", help="what stands against eager (the model's first graph)")
    add("--minutes", metavar="M", type=command.amount, help="start no point that cannot end in this time")
    add("--light", action="store_true", help="no full runs: the ends are light, too, and open no row")
    args, args.rest = parser.parse_known_args(words)
    args.flags = flags
    command.require_printable(parser, [*words, *flags])
    for name in REFUSED.keys() & {word.partition("=")[0] for word in args.rest}:
        parser.error(f"{name}: {REFUSED[name]}")
    return args


def flags_of(args: argparse.Namespace, model: str, description: dict, preset: str) -> dict[int, list[str]]:
    """Return the script's flags for each value: the quantity's first field takes it, others keep their ratio to it."""
    if model == OWN_STEP and not re.fullmatch("[a-z][a-z0-9]{0,15}", args.over):
        raise Mistake(f"--over {args.over}: of a step it is a word of at most 16 small letters and digits, as in batch")
    sweeps = {args.over: ["size"]} if model == OWN_STEP else description.get("sweeps", {})
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
    """The result at one value. `judged`: the build that was compared; None unless the status is pass."""

    run: Run
    status: str
    reason: str = ""
    judged: Judged | None = None


class Sweep:
    """One call of the command."""

    def __init__(self, args: argparse.Namespace):
        if bool(args.model) == bool(args.step):
            raise Mistake("a sweep takes --model NAME or --step FILE.py:BUILD, one of both")
        self.args = args
        self.model, self.name = script.find_model(args.model or OWN_STEP), ""
        if args.step:
            self.name, step_flags = measure.named_step(args.step, is_sized=True)
            args.flags = [*step_flags, *args.flags]
        described = script.describe(self.model, [])
        self.variant = args.variant or script.first_graph(described)
        self.variants = _variants(self.variant, described)
        self.machine = launch.machine(self._options(args.flags))
        self.request = ask.ask_of(self._options(args.flags), self.model, self.machine)
        if not any(self.variant in build.variants for build in self.request.builds):
            raise Mistake(f"--variant {self.variant}: the flags after -- leave no build of it")
        args.flags = self.request.flags
        self.flags = flags_of(args, self.model, self.request.description, self.request.preset)
        self.gpu = next(iter(self.request.gpus.names), None)
        self.label = ask.label_of([self.name] if self.name else self.request.flags, 0)
        longest = ask.LONGEST_LABEL - len(f"-{args.over}-{args.values[-1]}")
        if len(self.label) > longest:
            self.label = f"flags-{hashlib.sha256(self.label.encode()).hexdigest()[:8]}"
        # Before a point costs minutes, as well.
        self.asks = {value: self._point_of(value) for value in self.flags}
        folder = folder_of_sweep(self.model, self.request.preset, self.label, args.over)
        self.root = self.request.group.parent / folder

    def _options(self, flags) -> Options:
        words = ["--model", self.model, "--variants", ",".join(self.variants), *self.args.rest]
        return run.parse([*words, "--", *flags])

    def _point_of(self, value: int) -> tuple[Ask, Options]:
        """The request of a point, with the build of the variant alone."""
        options = self._options([*self.args.flags, *self.flags[value]])
        options.over, options.value = self.args.over, value
        options.label = "-".join(filter(None, [self.label, f"{self.args.over}-{value}"]))
        if not self._is_full(value):
            options.is_light, options.no_control, options.most_blocks_s = True, True, MOST_BLOCKS
            options.cycles = options.cycles or CYCLES
        request = ask.ask_of(options, self.model, self.machine)
        request.builds = [build for build in request.builds if self.variant in build.variants][:1]
        return request, options

    def _is_full(self, value: int) -> bool:
        return not self.args.light and value in (self.args.values[0], self.args.values[-1])

    def measure_all(self) -> int:
        """Measure every point that is asked for, write the file, print the table, and return the exit status."""
        minutes, begin_s, longest_s = self.args.minutes, time.monotonic(), 0.0
        self.root.mkdir(parents=True, exist_ok=True)
        before, done = self.measured(), []
        points = {value: point for value, (_, point) in before.items()}
        missing = [value for value in self.flags if value not in before]
        for value in sorted(self.flags.keys() & before.keys()):
            print(f"{self.args.over} {value} was measured before")
        full = [value for value in missing if self._is_full(value)]
        left_s = FULL_S * len(full) + LIGHT_S * (len(missing) - len(full))
        in_full = f" ({', '.join(map(str, full))} in full)" if full else ""
        number = cells.counted(len(missing), "point")
        print(f"{number} to measure{in_full}, about {left_s / 60:.0f} minutes on a GPU", flush=True)
        uuids = [] if self.request.launch.nnodes > 1 else list(self.request.gpus.uuids[: self.request.launch.ngpu])
        with locks.gpu_locks(uuids, self.request.name) as others:
            for text in others:
                print(f"beside   {text}")
            for value in missing:
                if command.stop.signal:
                    break
                start_s = time.monotonic()
                if minutes and 60 * minutes - (start_s - begin_s) <= longest_s:
                    print(f"\n--minutes {minutes:g}: {self.args.over} {value} not started")
                    break
                print(f"\n{self.args.over} {value}", flush=True)
                facts, measured = run.begun_run(*self.asks[value])
                done.append(facts)
                points[value] = self._point(measured)
                took_s = time.monotonic() - start_s
                longest_s = max(longest_s, took_s)
                _, base_ms, ms, gain, interval, word, *_ = self._row(points[value])
                text = f"{base_ms} / {ms} ms, {gain} ({interval})" if ms else f"{word}: {points[value].reason}"
                print(printable(f"  {text}; the point took {took_s:.0f} s"), flush=True)
        ordered = [points[value] for value in sorted(points)]
        path = self._sealed(ordered, done, before)
        print(f"\n{self.report(ordered)}\n\n{shown(path) if path else 'nothing was measured'}", flush=True)
        is_fine = all(point.status in judge.FINE for point in ordered)
        return 0 if is_fine and any(point.judged for point in ordered) else 1

    def _sealed(self, points, done, before):
        """The file of all points, of which a call that measured nothing makes no other one."""
        path = max((path for path, _ in before.values()), default=None)
        if done and any(point.judged for point in points):
            newest = max(facts.facts[0]["id"] for facts in done)
            path = partial.seal_together(self.root, newest, [point.run for point in points], {})
        for facts in done:
            facts.close()
            facts.path.unlink()
        return path

    def measured(self) -> dict:
        """Return each value with a run of this request, this host and today's source that passed, and its file."""
        points = {}
        for path, facts in sorted(run_file.find(self.root)[0], key=lambda pair: pair[1].begin_utc):
            point = self._point(facts) if self._is_asked(facts) else None
            request = self.asks.get(facts.value)
            least = run.settings_of(request[1], self.request.preset).least_cycles if request else 1
            if point is not None and point.judged is not None and len(point.judged.build.cycles) >= least:
                points[facts.value] = path, point
        return points

    def _is_asked(self, facts: Run) -> bool:
        """Return whether a run is a point of this sweep, and a full run where one is asked for."""
        request, given = self.request, [without_folders(flag) for flag in self.args.flags]
        env, gpu = request.host["env"], next((device.name for device in facts.host.gpus), None)
        seen = (facts.over, facts.model, facts.preset, facts.ranks, facts.flags[: len(given)], gpu, facts.host.boot)
        like = (self.args.over, request.model, request.preset, request.ranks, given, self.gpu, env["boot_id"])
        is_alike = not facts.stopped and len(facts.flags) - len(given) == len(next(iter(self.flags.values())))
        is_enough = facts.parity == "courses" or not (facts.value in self.asks and self._is_full(facts.value))
        return seen == like and is_alike and is_enough and facts.source.get("hash") == env["source_hash"]

    def _point(self, facts: Run) -> Point:
        builds = [judged for judged in judge.judged(facts).values() if self.variant in judged.verdicts]
        if not builds:
            return Point(facts, FAILED, "nothing was measured")
        (best, *_) = builds
        for name in (best.base or best.build.anchor or "eager", self.variant):
            verdict = best.verdicts.get(name)
            if verdict is not None and verdict.status != PASS:
                return Point(facts, verdict.status, verdict.reason)
        asked_layers, held = best.build.asked_layers, best.build.config.get("layers")
        if asked_layers is not None and isinstance(held, int) and held < asked_layers:
            return Point(facts, "oom", f"--layers {asked_layers} does not fit, it ran with {held}")
        if best.ratio_of(self.variant) is None:
            return Point(facts, FAILED, f"no cycle beside {best.base}")
        return Point(facts, PASS, judged=best)

    def report(self, points: list[Point]) -> str:
        """Return the table of points, its notes, and the value at which the gain ends."""
        fields = self.request.description.get("sweeps", {}).get(self.args.over, ["size"])
        first, *others = map(flag_of, fields)
        quantity = f"{self.args.over} ({first}{'; in proportion ' * bool(others)}{', '.join(others)})"
        title = f"{self.name or self.request.name} over {quantity}: {self.variant} against eager"
        rows = [(self.args.over, *COLUMNS), *map(self._row, points)]
        lines = [f"{title}, {self.gpu or 'CPU'} x{self.request.ranks}", *run_table.aligned(rows, 0)]
        for point in points:
            lines += [f"{point.status}: {self.args.over} {point.run.value} ({point.reason})"] if point.reason else []
        timed = [point.judged for point in points if point.judged]
        lines += [run_table.on_a_cpu(timed)] if timed and self.gpu is None else []
        lines += [crossing.sentence(self.args.over, filter(None, map(self._of_crossing, points)))] * bool(self.gpu)
        return "\n".join(map(printable, lines))

    def _of_crossing(self, point: Point) -> crossing.Point | None:
        ratio = point.judged.ratio_of(self.variant) if point.judged else None
        if point.judged is None or ratio is None or ratio.cycles < 2:
            return None
        return crossing.Point(point.run.value, ratio.low, *_microseconds(point.judged))

    def _row(self, point):
        judged = point.judged
        ratio = judged.ratio_of(self.variant) if judged else None
        if judged is None or ratio is None:
            return (str(point.run.value), "", "", "", "", point.status, "", "", "")
        us = [cells.cell(value, ".1f") for value in _microseconds(judged)]
        at_most = run_table.at_most(judged, self.variant)
        return (str(point.run.value), *run_table.ratio_cells(ratio), intervals.word(ratio), *us, at_most)


def _microseconds(judged: Judged) -> tuple[float | None, float | None]:
    """The mean kernel of the base, and the host's time to issue one."""
    point = roofline.point_of(judged, judged.base)
    return (point.kernel_us, point.host_us) if point else (None, None)


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
