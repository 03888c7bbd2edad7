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
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from benchmarks import bench, compare, crossover, frame, launch, rounds, run, script, sessions, tables
from common import record as records

SCHEMA = 1
UNTIMED = "no timed round of"
ENV = ("gpu_name", "world_size", "driver", "cuda", "torch", "transformer_engine", "cpu", "git_sha", "git_dirty")
ENV += ("source_hash",)

# ------------------------------------------------------------------------------------------------
# One point


def read_point(found: list[dict], variant: str, preset: str) -> dict:
    """The numbers of a point from the runs of its folder, a frame or records; what is not known is None."""
    runs = frame.of(found)
    own = runs[(runs["variant"] == variant) | (runs["kind"] == "eager")]
    rows = {row["variant"]: row for row in compare.summarise(own)}
    empty = dict.fromkeys(("speedup", "speedup_low", "speedup_high", "verdict", "step_ms", "ceiling", "issue_ms"))
    empty |= {"busy_ms": None, "parity": None, "replays": None, "num_rounds": 0, "num_pairs": 0, "message": ""}
    empty |= {"scope": None}
    base = (rows.get(variant) or {}).get("base") or "eager"
    eager, row = (rows.get(name) or empty for name in (base, variant))
    failed = next((one for one in (row, eager) if one.get("status") not in ("pass", None)), None)
    untimed = " and ".join(name for name in (base, variant) if not (rows.get(name) or empty)["num_rounds"])
    point = {
        "speedup": row["speedup"],
        "low": row["speedup_low"],
        "high": row["speedup_high"],
        "verdict": row["verdict"],
        "scope": row["scope"],
        "ceiling": row["ceiling"],
        "issue_ms": eager["issue_ms"],
        "busy_ms": eager["busy_ms"],
        "eager_ms": eager["step_ms"],
        "graph_ms": row["step_ms"],
        "rounds": row["num_pairs"] or row["num_rounds"],
        "parity": row["parity"],
        "replays": row["replays"],
        "report": row.get("report", {}),
        "status": failed["status"] if failed else "failed" if untimed else "pass",
        "message": failed["message"] if failed else f"{UNTIMED} {untimed}" if untimed else "",
    }
    timed = compare.timed(frame.records_of(runs))
    shrunk = next((record["preset"] for record in timed if record["preset"] != preset), None)
    if shrunk:
        # The script made the model smaller: a step of another model, which says nothing about this value.
        unknown = ("speedup", "low", "high", "verdict", "ceiling", "issue_ms", "busy_ms", "eager_ms", "graph_ms")
        point.update(dict.fromkeys(unknown), report={}, status="oom", message=f"ran as {shrunk}: {preset} does not fit")
    return point


def run_point(argv: list[str]) -> int:
    """A session of benchmarks.run under the launcher, its output shown; its exit status. It ends when this does."""
    launcher = [sys.executable, "-m", "benchmarks.rounds", "--child", str(os.getpid()), "--ask", "--"]
    process = subprocess.Popen(
        [*launcher, sys.executable, "-m", "benchmarks.run", *argv],
        cwd=rounds.ROOT,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        return process.wait()
    finally:
        if process.poll() is None:
            process.terminate()
            # The session asks its own children in turn.
            process.wait(rounds.TERMINATE_S + 2 * rounds.ASK_S)


# ------------------------------------------------------------------------------------------------
# Command line


def parse(argv=None) -> argparse.Namespace:
    argv = sys.argv[1:] if argv is None else argv
    split = argv.index("--") if "--" in argv else len(argv)
    parser = script.Parser(
        prog="python -m benchmarks.sweep",
        description="Where graphs stop paying: eager against one variant over a growing quantity.",
        epilog="Other options go to every point: see python -m benchmarks.run --help. What follows -- goes to the "
        "training script.",
        allow_abbrev=False,
    )
    parser.add_argument("--model", metavar="NAME", required=True, help=f"one of {', '.join(script.models())}")
    parser.add_argument("--over", metavar="QUANTITY", required=True, help="what grows, as in batch; the model's choice")
    parser.add_argument("--variant", metavar="NAME", default="graph", help="what stands against eager (graph)")
    parser.add_argument("--values", metavar="1,2,4", type=_values, help="just these, instead of a search")
    parser.add_argument(
        "--max", metavar="N", type=script.positive, help=f"no value above this ({crossover.REACH} times the start)"
    )
    parser.add_argument("--refine", metavar="N", type=script.count, help="points between the last two (1)")
    parser.add_argument(
        "--minutes", metavar="M", type=script.amount, help="start no point that cannot end in this time"
    )
    parser.add_argument("--out", metavar="DIR", help="folder (runs/<gpu>x<count>/<model>-<preset>-<over>-<variant>)")
    args, args.rest = parser.parse_known_args(argv[:split])
    args.flags = argv[split + 1 :]
    return args


def _values(text):
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and int(word) for word in words):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers from 1 up, as in 1,2,4")
    return sorted({int(word) for word in words})


class OutOfTime(Exception):
    """--minutes are over; the message says what is not started."""


# ------------------------------------------------------------------------------------------------
# The sweep


class Sweep:
    """One call of the command: the quantity, the folder, and the points in it."""

    def __init__(self, args, runner):
        self.args, self.runner = args, runner
        if any(text.split("=")[0] == "--variants" for text in args.rest):
            raise script.Mistake("--variants: a sweep compares eager with one variant, --variant")
        plain = script.describe(args.model, [])
        known, self.eagers = plain["variants"], script.eagers_of(plain)
        if args.variant not in known or args.variant == "eager":
            others = [name for name in known if name != "eager"]
            raise script.Mistake(f"unknown variant {args.variant!r}, --variant takes one of {', '.join(others)}")
        self.session = self._session(args.flags, args.out)
        self.preset, described = self.session.preset, self.session.description
        self.session.variants = script.choose_variants(args.variant, described["variants"], described.get("reference"))
        self.fields = self._fields(described.get("sweeps", {}))
        if args.values and (args.max or args.refine is not None):
            raise script.Mistake("--max and --refine are for a search, --values says which points: take one of them")
        first = described["presets"][self.preset][self.fields[0]]
        # A field that is text may hold a word such as auto.
        self.first = first if isinstance(first, int) else 1
        self.largest = args.max or crossover.REACH * self.first
        if self.first > self.largest:
            raise script.Mistake(f"--max {args.max} is below {self.first}, where preset {self.preset} starts")
        # Before the first of them costs minutes.
        for value in args.values or [self.first]:
            script.describe(args.model, self._flags(value), self.preset)
        load = f"-load{self.session.args.host_load}" if self.session.args.host_load else ""
        name = f"{args.model}-{self.preset}-{args.over}-{args.variant}{load}"
        self.root = Path(args.out).resolve() if args.out else self.session.group.parent / name
        self.points: dict[int, dict] = {}
        self.left_out: list[str] = []
        self.envs: list[dict] = []
        self.start, self.longest_s = time.monotonic(), 0.0
        self._require_own_folder()

    def _session(self, flags, out=None):
        """What one call of benchmarks.run would be."""
        argv = ["--model", self.args.model, "--variants", ",".join([*self.eagers, self.args.variant]), *self.args.rest]
        argv += ["--out", str(out)] if out else []
        return bench.Session(run.parse([*argv, "--", *flags]))

    def _fields(self, sweeps):
        over = self.args.over
        if over not in sweeps:
            raise script.Mistake(f"unknown quantity {over!r}, --over takes one of {', '.join(sweeps) or 'none'}")
        for field in sweeps[over]:
            given = next((text for text in self.args.flags if text.split("=")[0] == _flag(field)), None)
            if given:
                raise script.Mistake(f"{given} after -- is what --over {over} sets, leave it out")
        return sweeps[over]

    def _require_own_folder(self):
        path = self.root / "sweep.json"
        if not path.exists():
            return
        own = {key: getattr(self.args, key) for key in ("model", "over", "variant")} | {"preset": self.preset}
        try:
            other = dict(json.loads(path.read_text()))
        except (ValueError, TypeError):
            # Nothing is lost: it is made from the records.
            return
        odd = [key for key in own if other.get(key) != own[key]]
        if odd:
            said = ", ".join(f"{key} {other.get(key)}" for key in odd)
            raise script.Mistake(f"--out {self.root} holds a sweep of {said}; take another folder")

    def swept(self, value: int) -> list[str]:
        """The script's flags for a value. Raises Mistake where a field that keeps its ratio gets no whole number."""
        preset, out = self.session.description["presets"][self.preset], []
        if isinstance(preset[self.fields[0]], str):
            return [_flag(self.fields[0]), str(value)]
        for field in self.fields:
            scaled, rest = divmod(preset[field] * value, preset[self.fields[0]])
            if rest:
                raise script.Mistake(f"--over {self.args.over}: {value} makes {_flag(field)} no whole number")
            out += [_flag(field), str(scaled)]
        return out

    def _flags(self, value):
        return [*self.session.flags, *self.swept(value)]

    def folder(self, value: int) -> Path:
        return self.root / f"{self.args.over}-{value}"

    # -- measuring

    def measure_all(self):
        """Every point that is asked for; says why when it stops before."""
        self.root.mkdir(parents=True, exist_ok=True)
        try:
            if self.args.values or not self.session.gpus.names:
                some = [value for value in (self.first, 2 * self.first, 4 * self.first) if value <= self.largest]
                for value in self.args.values or some:
                    self.measure(value)
            else:
                crossover.search(
                    self.measure, self.first, self.largest, 1 if self.args.refine is None else self.args.refine
                )
        except OutOfTime as stop:
            print(stop)

    def measure(self, value: int) -> dict:
        """Run what is missing of a point, read it, and write the result so far."""
        over = f"{self.args.over} {value}"
        try:
            flags = self._flags(value)
            script.describe(self.args.model, flags, self.preset)
        except script.Mistake as mistake:
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
        print(f"{over}: {_speedup(point) or point['status']}  {point['verdict'] or ''}".rstrip(), flush=True)
        return point

    def _run(self, value, over, flags):
        argv = ["--model", self.args.model, "--variants", ",".join([*self.eagers, self.args.variant]), *self.args.rest]
        argv += ["--out", str(self.folder(value)), "--no-table"]
        if self.args.minutes:
            left_s = 60 * self.args.minutes - (time.monotonic() - self.start)
            if left_s <= self.longest_s:
                took = f", the longest so far took {bench.duration(self.longest_s)}" if self.longest_s else ""
                raise OutOfTime(f"\n--minutes {self.args.minutes:g}: {over} not started{took}")
            argv += ["--minutes", f"{left_s / 60:.3f}"]
        print(flush=True)
        start = time.monotonic()
        if self.runner([*argv, "--", *flags]) == 130:
            raise KeyboardInterrupt
        self.longest_s = max(self.longest_s, time.monotonic() - start)

    def _is_complete(self, value, flags):
        """Whether a packed session of the point holds all that benchmarks.run would measure there now."""
        folder = self.folder(value)
        return folder.is_dir() and self._session(flags, folder).finished() is not None

    # -- reading

    def _take_in(self, value):
        """Read a point's folder into `points`, or say, and return, why it is left out."""
        folder = self.folder(value)
        self.left_out = [line for line in self.left_out if not line.startswith(f"{folder.name} ")]
        path, runs = self._newest(folder)
        if runs is None:
            return None
        found = runs.frame[(runs.frame["variant"] == self.args.variant) | (runs.frame["kind"] == "eager")]
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
            point = self._unmeasured(value, "failed", str(error))
        self.points[value] = {"value": value, "flags": self.swept(value), "folder": folder.name} | point
        timed = compare.timed(frame.records_of(found))
        self.envs += [record["env"] | {"device": record["device"]} for record in timed]
        return None

    def _newest(self, folder):
        """(path, runs) of the point's newest session that has any: it is the point, whatever older ones hold."""
        found = sessions.find(folder) if folder.is_dir() else []
        for path in sorted(found, key=lambda path: path.name, reverse=True):
            runs = frame.read(path)
            if runs.faults or not runs.frame.empty:
                return path, runs
        return None, None

    def _foreign(self, found, value):
        """Why records are not this sweep's, in words, or None. GPU, boot and source may be those of another call."""
        gpu = next(iter(self.session.gpus.names), None)
        try:
            flags = self._flags(value)
        except script.Mistake as mistake:
            return str(mistake)
        asked = self.session.request | {"flags": flags}
        for record in found:
            was = record["extra"].get("request") or {}
            odd = next((key for key in ("config", "flags", "steps", "num_gpus") if was.get(key) != asked[key]), None)
            if odd:
                return f"{odd} was {was.get(odd)}"
            if record["round"] and record["host_load"] != self.session.args.host_load:
                return f"host_load was {record['host_load']}"
            if record["status"] == "pass" and record["env"]["gpu_name"] != gpu:
                return f"it ran on {record['env']['gpu_name'] or 'a CPU'}"
        return None

    def _unmeasured(self, value, status, message):
        nothing = dict.fromkeys(("speedup", "low", "high", "verdict", "ceiling", "issue_ms", "busy_ms", "eager_ms"))
        nothing |= {"graph_ms": None, "scope": None, "rounds": 0, "parity": None, "replays": None, "report": {}}
        head = {"value": value, "flags": [], "folder": self.folder(value).name}
        return head | nothing | {"status": status, "message": message}

    # -- what people see

    def result(self) -> dict:
        """What sweep.json holds."""
        points = [self.points[value] for value in sorted(self.points)]
        gpu = next(iter(self.session.gpus.names), None)
        return {
            "schema": SCHEMA,
            "model": self.args.model,
            "preset": self.preset,
            "over": self.args.over,
            "fields": self.fields,
            "variant": self.args.variant,
            "host_load": self.session.args.host_load,
            "points": points,
            **crossover.conclusion(points, self.args.over, self.args.variant, gpu, is_cpu=gpu is None),
            "env": {key: self._common(key) for key in ("device", *ENV)},
        }

    def _common(self, key):
        values = {env[key] for env in self.envs}
        return values.pop() if len(values) == 1 else None

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
        print(f"\n{report(result, self.left_out)}\n\n{bench.shown(self.root)}/: a folder a point, sweep.json, table.md")
        points = result["points"]
        bad = [point for point in points if point["status"] not in ("pass", "oom", "unsupported")]
        # With --values, a point that is not measured yet may be another call's, going on at this moment.
        bad = [point for point in bad if not (self._is_foreign(point) and point["message"].startswith(UNTIMED))]
        if bad:
            named = [f"{self.args.over} {point['value']} ({point['status']})" for point in bad]
            print(f"not sound: {', '.join(named)}")
        is_timed = any(point["rounds"] for point in points)
        if not is_timed:
            print("no point has a timed round")
        return 1 if bad or not is_timed else 0

    def _is_foreign(self, point):
        return bool(self.args.values) and point["value"] not in self.args.values


def _flag(field):
    return "--" + field.replace("_", "-")


# ------------------------------------------------------------------------------------------------
# Tables


def _columns(over, variant):
    return (
        (over, tables.field("value")),
        ("rounds", tables.field("rounds")),
        ("eager ms", tables.field("eager_ms", tables.number(2))),
        (f"{variant} ms", tables.field("graph_ms", tables.number(2))),
        ("ceiling", tables.field("ceiling", lambda value: f"{value:.2f}x")),
        ("issue/busy", _issue_over_busy),
        ("speed-up", _speedup),
        ("verdict, 99 %", tables.verdict),
        ("parity", tables.field("parity")),
        ("replays", tables.field("replays")),
        ("status", tables.field("status")),
    )


def _issue_over_busy(point):
    return f"{point['issue_ms'] / point['busy_ms']:.2f}" if point["issue_ms"] and point["busy_ms"] else None


def _speedup(point):
    if point["speedup"] is None:
        return None
    text = f"{point['speedup']:.3f}x"
    return text if point["low"] is None else f"{text} [{point['low']:.3f}, {point['high']:.3f}]"


def report(result: dict, left_out: list[str], is_markdown: bool = False) -> str:
    """Finding, table and notes of what `Sweep.result` gives."""
    over, env, points = result["over"], result["env"], result["points"]
    found = [tables.cells(points, _columns(over, result["variant"]))]
    own = tables.of_report(points)
    if own:
        # Of the variant, not of eager.
        found.append(tables.cells(points, ((over, tables.field("value")), *own)))
    first, *others = map(_flag, result["fields"])
    what = f"{over} is {first} of {result['model']}, preset {result['preset']}"
    what += f"; {', '.join(others)} in proportion" if others else ""
    what += f"; {result['host_load']} busy processes beside each run" if result["host_load"] else ""
    where = f"{env['gpu_name']} x{env['world_size']}" if env["gpu_name"] else f"CPU ({env['cpu']})"
    named = (("torch", "torch"), ("cuda", "CUDA"), ("transformer_engine", "Transformer Engine"), ("driver", "driver"))
    versions = [f"{name} {env[key]}" for key, name in named if env[key]]
    sha = f"git {env['git_sha'][:12]}{' (changed)' if env['git_dirty'] else ''}, " if env["git_sha"] else ""
    notes = [f"{over} {point['value']}: {tables.short(point['message'])}" for point in points if point["message"]]
    notes += [what]
    if versions:
        source = f"source {env['source_hash']}" if env["source_hash"] else "points of several sources"
        notes += [", ".join([where, *versions]), sha + source]
    if any(point["verdict"] in ("unclear", "one round") for point in points):
        notes += ["unclear: the interval holds 1 and is wider than +-0.5 %; --rounds auto narrows it to +-1 %"]
    notes += left_out
    text = result["finding"]
    if is_markdown:
        shown = [tables.piped(lines) for lines in found]
        return "\n\n".join([f"**{text}**", *shown, "\n".join(f"- {note}" for note in notes)])
    return "\n\n".join([*(tables.aligned(lines, num_left=0) for lines in found), "\n".join(notes), text])


def main(argv=None, runner=run_point) -> int:
    """The command. runner: takes the arguments of benchmarks.run and returns its exit status."""
    prog = "python -m benchmarks.sweep"
    for number in (signal.SIGTERM, signal.SIGHUP):
        # nohup ignores SIGHUP, and means it.
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, run.interrupt)
    try:
        sweep = Sweep(parse(argv), runner)
        sweep.measure_all()
        return sweep.finish()
    except OSError as error:
        if error.filename is None:
            raise
        print(f"{prog}: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    except script.Mistake as mistake:
        print(f"{prog}: {mistake}", file=sys.stderr)
        return 2
    except (launch.NodesDiffer, sessions.Damaged) as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nstopped; finished records stay, and the same command goes on from here", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
