"""Where graphs stop paying: eager against one variant at growing values of a quantity, until nothing is gained.

    python -m benchmarks.sweep --model gpt3 --over batch
    python -m benchmarks.sweep --model gpt3 --over width --values 3,6,12 --rounds auto -- --precision bf16

The value starts at the preset's own and doubles until the interval of the speed-up touches 1, until memory is
full, or at 64 times the start; where graphs do not pay at the start it is halved instead. Then a point or more
between the last two narrows the bracket. Every point is a session of benchmarks.run below a root of its own,
OUT/<over>-<value>; what this command does not know (--preset, --rounds, --ngpu, ...) goes there. The same
command goes on where it was stopped, and commands with other --values may fill one OUT, at the same time too.
What is measured stands in OUT/sweep.json and OUT/table.md after every point.

Exit status: 0 when every point is pass, oom or unsupported and something was timed, 1 otherwise, 2 for a
mistake on the command line, 130 after Ctrl-C.
"""

import argparse
import fcntl
import json
import sys
import time
from pathlib import Path

from benchmarks import children, command, compare, crossover, frame, launch, quantity, run, script, sessions
from benchmarks.command import Mistake, shown
from benchmarks.progress import duration
from benchmarks.request import Request
from benchmarks.sweep_table import UNTIMED, of_point, read_point, report, speedup, unmeasured
from common import record as records

SCHEMA = 1
ENV = ("device", "gpu_name", "world_size", "driver", "cuda", "torch", "transformer_engine", "cpu", "git_sha")
ENV += ("git_dirty", "source_hash")


def run_point(argv: list[str]) -> int:
    """A session of benchmarks.run, its output shown; its exit status."""
    return children.run_shown([sys.executable, "-m", "benchmarks.run", *argv])


def parse(argv=None) -> argparse.Namespace:
    own, flags = command.split_flags(argv)
    parser = command.parser_of(
        "sweep",
        "Where graphs stop paying: eager against one variant over a growing quantity.",
        f"Other options go to every point: see python -m benchmarks.run --help. {command.TO_SCRIPT}",
    )
    add = parser.add_argument
    add("--model", metavar="NAME", required=True, help=f"one of {', '.join(script.models())}")
    add("--over", metavar="QUANTITY", required=True, help="what grows, as in batch; the model's choice")
    add("--variant", metavar="NAME", default="graph", help="what stands against eager (graph)")
    add("--values", metavar="1,2,4", type=command.values, help="just these, instead of a search")
    add("--max", metavar="N", type=command.positive, help=f"no value above this ({crossover.REACH} times the start)")
    add("--refine", metavar="N", type=command.count, help="points between the last two (1)")
    add("--minutes", metavar="M", type=command.amount, help="start no point that cannot end in this time")
    add("--out", metavar="DIR", help="folder (runs/<gpu>x<count>/<model>-<preset>-<over>-<variant>)")
    args, args.rest = parser.parse_known_args(own)
    args.flags = flags
    return args


class OutOfTime(Exception):
    """--minutes are over; the message says what is not started."""


class Sweep:
    """One call of the command: the quantity, the folder, and the points in it.

    request: what benchmarks.run would do without a value. points: value -> point, as in sweep.json. left_out: a line
    for each point in the folder that is not this sweep's.
    """

    def __init__(self, args, runner):
        self.args, self.runner = args, runner
        if any(text.split("=")[0] == "--variants" for text in args.rest):
            raise Mistake("--variants: a sweep compares eager with one variant, --variant")
        described = script.describe(args.model, [])
        known, self.eagers = described["variants"], script.eagers_of(described)
        if args.variant not in known or args.variant == "eager":
            others = [name for name in known if name != "eager"]
            raise Mistake(f"unknown variant {args.variant!r}, --variant takes one of {', '.join(others)}")
        self.kind = script.kind_of(described, args.variant)
        self.request = Request(run.parse(self._argv(args.flags, args.out)))
        self.preset, self.gpu = self.request.preset, next(iter(self.request.gpus.names), None)
        self.quantity = quantity.find(self.request.description, self.preset, args.over, args.flags)
        if args.values and (args.max or args.refine is not None):
            raise Mistake("--max and --refine are for a search, --values says which points: take one of them")
        self.first = self.quantity.first
        self.largest = args.max or crossover.REACH * self.first
        if self.first > self.largest:
            raise Mistake(f"--max {args.max} is below {self.first}, where preset {self.preset} starts")
        values = args.values or [self.first]
        quantity.require(args.model, self.preset, self.quantity, self.request.flags, values)
        load = f"-load{self.request.args.host_load}" if self.request.args.host_load else ""
        name = f"{args.model}-{self.preset}-{args.over}-{args.variant}{load}"
        self.root = Path(args.out).resolve() if args.out else self.request.group.parent / name
        self.points: dict[int, dict] = {}
        self.left_out: list[str] = []
        self.envs: list[dict] = []
        self.start, self.longest_s = time.monotonic(), 0.0
        self._require_own_folder()

    def _argv(self, flags, out, *more):
        """The words of benchmarks.run for one point."""
        argv = ["--model", self.args.model, "--variants", ",".join([*self.eagers, self.args.variant]), *self.args.rest]
        return [*argv, *(["--out", str(out)] if out else []), *more, "--", *flags]

    def _require_own_folder(self):
        try:
            other = dict(json.loads((self.root / "sweep.json").read_text()))
        except (FileNotFoundError, ValueError, TypeError):
            # Nothing is lost where it is damaged: it is made from the records.
            return
        own = {key: getattr(self.args, key) for key in ("model", "over", "variant")} | {"preset": self.preset}
        odd = ", ".join(f"{key} {other.get(key)}" for key in own if other.get(key) != own[key])
        if odd:
            raise Mistake(f"--out {self.root} holds a sweep of {odd}; take another folder")

    def _flags(self, value):
        return [*self.request.flags, *self.quantity.flags(value)]

    def folder(self, value: int) -> Path:
        return self.root / f"{self.args.over}-{value}"

    # -- measuring

    def measure_all(self):
        """Every point that is asked for; says why when it stops before."""
        self.root.mkdir(parents=True, exist_ok=True)
        values = self.args.values
        if not (values or self.gpu):
            values = [value for value in (self.first, 2 * self.first, 4 * self.first) if value <= self.largest]
        try:
            for value in values or []:
                self.measure(value)
            if not values:
                num_refining = 1 if self.args.refine is None else self.args.refine
                crossover.search(self.measure, self.first, self.largest, num_refining)
        except OutOfTime as stop:
            print(stop)

    def measure(self, value: int) -> dict:
        """Run what is missing of a point, read it, and write the result so far."""
        over = f"{self.args.over} {value}"
        try:
            flags = self._flags(value)
            script.describe(self.args.model, flags, self.preset)
        except Mistake as mistake:
            self.points[value] = self._unmeasured(value, "unsupported", str(mistake))
            print(f"\nnot run: {mistake}")
        else:
            if self._is_complete(value, flags):
                print(f"\n{over} was measured before")
            else:
                self._run(value, over, flags)
            self.points.pop(value, None)
            fault = self._take_in(value)
            if value not in self.points:
                message = fault or "benchmarks.run left no record, see above"
                self.points[value] = self._unmeasured(value, "failed", message)
        self.write()
        point = self.points[value]
        print(f"{over}: {speedup(point) or point['status']}  {point['verdict'] or ''}".rstrip(), flush=True)
        return point

    def _run(self, value, over, flags):
        more = ["--no-table"]
        if self.args.minutes:
            left_s = 60 * self.args.minutes - (time.monotonic() - self.start)
            if left_s <= self.longest_s:
                took = f", the longest so far took {duration(self.longest_s)}" if self.longest_s else ""
                raise OutOfTime(f"\n--minutes {self.args.minutes:g}: {over} not started{took}")
            more += ["--minutes", f"{left_s / 60:.3f}"]
        print(flush=True)
        start = time.monotonic()
        if self.runner(self._argv(flags, self.folder(value), *more)) == 130:
            raise KeyboardInterrupt
        self.longest_s = max(self.longest_s, time.monotonic() - start)

    def _is_complete(self, value, flags):
        """Whether a packed session of the point holds all that benchmarks.run would measure there now."""
        folder = self.folder(value)
        return folder.is_dir() and Request(run.parse(self._argv(flags, folder))).finished() is not None

    # -- reading

    def _take_in(self, value):
        """Read the newest session of a point's folder that has any run into `points`, or say, and return, why not."""
        folder = self.folder(value)
        self.left_out = [line for line in self.left_out if not line.startswith(f"{folder.name} ")]
        paths = sorted(sessions.find(folder) if folder.is_dir() else [], key=lambda path: path.name, reverse=True)
        read = ((path, frame.read(path)) for path in paths)
        path, runs = next(((path, runs) for path, runs in read if runs.faults or not runs.frame.empty), (None, None))
        if path is None:
            return None
        found = of_point(runs.frame, self.args.variant)
        fault = self._foreign(frame.records_of(found), value) if len(found) else None
        if fault:
            self.left_out.append(f"{folder.name} is left out: {fault}")
            return fault
        if runs.faults:
            # Without its unsound rounds a point may say anything: it gets no numbers at all.
            others = f" (and {len(runs.faults) - 1} more)" if len(runs.faults) > 1 else ""
            message = f"unsound: {path.relative_to(self.root)}/{runs.faults[0]}{others}"
            self.points[value] = self._unmeasured(value, "failed", message)
            return None
        if found.empty:
            return None
        try:
            point = read_point(found, self.args.variant, self.preset)
        except compare.Mixed as error:
            point = unmeasured("failed", str(error))
        self.points[value] = {"value": value, "flags": self.quantity.flags(value), "folder": folder.name} | point
        timed = compare.timed(frame.records_of(found))
        self.envs += [record["env"] | {"device": record["device"]} for record in timed]
        return None

    def _foreign(self, found, value):
        """Why records are not this sweep's, in words, or None. GPU, boot and source may be those of another call."""
        try:
            asked = self.request.data | {"flags": self._flags(value)}
        except Mistake as mistake:
            return str(mistake)
        for record in found:
            was = record["extra"].get("request") or {}
            odd = next((key for key in ("config", "flags", "steps", "num_gpus") if was.get(key) != asked[key]), None)
            if odd:
                return f"{odd} was {was.get(odd)}"
            if record["round"] and record["host_load"] != self.request.args.host_load:
                return f"host_load was {record['host_load']}"
            if record["status"] == "pass" and record["env"]["gpu_name"] != self.gpu:
                return f"it ran on {record['env']['gpu_name'] or 'a CPU'}"
        return None

    def _unmeasured(self, value, status, message):
        return {"value": value, "flags": [], "folder": self.folder(value).name} | unmeasured(status, message)

    # -- what people see

    def result(self) -> dict:
        """What sweep.json holds."""
        args, points = self.args, [self.points[value] for value in sorted(self.points)]
        seen = {key: {env[key] for env in self.envs} for key in ENV}
        return {
            "schema": SCHEMA,
            "model": args.model,
            "preset": self.preset,
            "over": args.over,
            "fields": self.quantity.fields,
            "variant": args.variant,
            "kind": self.kind,
            "host_load": self.request.args.host_load,
            "points": points,
            **crossover.conclusion(points, args.over, args.variant, self.gpu, self.gpu is None, self.kind),
            "env": {key: next(iter(values)) if len(values) == 1 else None for key, values in seen.items()},
        }

    def write(self):
        """sweep.json and table.md of all points in the folder, those of other calls too."""
        with open(self.root / ".sweep.lock", "a") as lock:
            # Jobs of an array write here too: the last one sees all points.
            fcntl.flock(lock, fcntl.LOCK_EX)
            self.envs = []
            for path in self.root.glob(f"{self.args.over}-*"):
                digits = path.name.removeprefix(f"{self.args.over}-")
                if digits.isdigit() and path.is_dir():
                    self._take_in(int(digits))
            result = self.result()
            records.write(self.root / "sweep.json", result)
            (self.root / "table.md").write_text(f"{report(result, self.left_out, is_markdown=True)}\n")

    def finish(self) -> int:
        result = self.result()
        print(f"\n{report(result, self.left_out)}\n\n{shown(self.root)}/: a folder a point, sweep.json, table.md")
        points = result["points"]
        bad = [
            f"{self.args.over} {point['value']} ({point['status']})"
            for point in points
            if point["status"] not in ("pass", "oom", "unsupported") and not self._is_anothers(point)
        ]
        if bad:
            print(f"not sound: {', '.join(bad)}")
        is_timed = any(point["rounds"] for point in points)
        if not is_timed:
            print("no point has a timed round")
        return 1 if bad or not is_timed else 0

    def _is_anothers(self, point):
        """With --values, a point that is not measured yet may be another call's, going on at this moment."""
        values = self.args.values
        return bool(values) and point["value"] not in values and point["message"].startswith(UNTIMED)


def main(argv=None, runner=run_point) -> int:
    """The command. runner: takes the arguments of benchmarks.run and returns its exit status."""

    def work():
        sweep = Sweep(parse(argv), runner)
        sweep.measure_all()
        return sweep.finish()

    return command.exit_status("python -m benchmarks.sweep", work, (launch.NodesDiffer, sessions.Damaged))


if __name__ == "__main__":
    sys.exit(main())
