"""Measure what CUDA graphs are worth for one model: eager against its graphed variants, in paired rounds.

    python -m benchmarks.run --model gpt3
    python -m benchmarks.run --model gpt3 --preset tiny --variants eager,graph --rounds 2
    python -m benchmarks.run --model gpt3 --rounds auto --host-load 16 --minutes 30 -- --layers 4

Round 0 is untimed and asks for parity with deterministic kernels; then come timed rounds in ABBA order,
each run in a process of its own. Records appear one by one in the output folder, and the same command
goes on where it was stopped. Exit status: 0 when every row is pass, oom or unsupported
and something was timed, 1 otherwise, 2 for a mistake on the command line, 130 after Ctrl-C.
"""

import argparse
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from benchmarks import compare, intervals, launch, rounds
from common import record as records

GPU_PRESETS = ("bench", "full", "mlperf")
DESCRIBE_LIMIT_S = 120
PARITY_STEPS = 20
PARITY_TOLERANCE = 1e-3
RESERVED_FLAGS = ("--preset", "--variant", "--round", "--steps", "--record", "--parity", "--describe")
RESERVED_FLAGS += ("--mllog", "--profile")
# Variants whose kernels are the compiler's own cannot promise eager's bits.
NOT_BITWISE = ("compile", "reduce_overhead")
LIMIT_S = {"tiny": 300, "other": 1800}
ROUNDS = {"tiny": 2, "other": 5}


class Mistake(ValueError):
    """Something on the command line that cannot be; the message names what can."""


# ------------------------------------------------------------------------------------------------
# Command line


def parse(argv=None) -> argparse.Namespace:
    argv = sys.argv[1:] if argv is None else argv
    split = argv.index("--") if "--" in argv else len(argv)
    parser = Parser(
        prog="python -m benchmarks.run",
        description="Eager against graphed training steps of one model, in paired rounds.",
        epilog="What follows -- goes to the training script; see python -m MODEL.train --help.",
        allow_abbrev=False,
    )
    parser.add_argument("--model", metavar="NAME", required=True, help=f"one of {', '.join(models())}")
    parser.add_argument("--preset", metavar="NAME", help="bench where a GPU is found, else tiny")
    parser.add_argument("--variants", metavar="A,B", help="eager always runs; all of the script's unless told")
    parser.add_argument("--rounds", metavar="N", type=_rounds, help="timed rounds (5; tiny: 2), or auto: until +-1 %%")
    parser.add_argument(
        "--first-round", metavar="N", type=positive, default=1, help="number of the first round made here (1)"
    )
    parser.add_argument("--steps", metavar="N", type=count, default=0, help="at least this many timed steps (preset's)")
    parser.add_argument("--ngpu", metavar="N", type=positive, default=1, help="GPUs, or ranks on the CPU (1)")
    parser.add_argument("--host-load", metavar="N", type=count, default=0, help="busy processes beside timed runs (0)")
    parser.add_argument("--minutes", metavar="M", type=amount, help="start no round that cannot end in this time")
    parser.add_argument("--out", metavar="DIR", help="folder (runs/<gpu>x<count>/<model>-<preset>[-load<N>])")
    launch.add_arguments(parser, positive)
    parser.add_argument("--no-table", action="store_true", help="progress only; the table is in table.md")
    parser.add_argument("--limit-s", metavar="S", type=amount, help="kill a run after this long (1800; tiny: 300)")
    args = parser.parse_args(argv[:split])
    args.flags = argv[split + 1 :]
    return args


class Parser(argparse.ArgumentParser):
    def error(self, message):
        self.exit(2, f"{self.prog}: {message}\n")


def _rounds(text):
    if text == "auto":
        return text
    return _number(text, int, 1, "a number of rounds from 1 up, or auto")


def count(text):
    return _number(text, int, 0, "a number from 0 up")


def positive(text):
    return _number(text, int, 1, "a number from 1 up")


def amount(text):
    return _number(text, float, 0, "a number above 0", above=True)


def _number(text, kind, least, allowed, above=False):
    try:
        value = kind(text)
    except ValueError:
        value = None
    # Written so that NaN, which compares as false, is refused too.
    if value is None or not least <= value < float("inf") or (above and value == least):
        raise argparse.ArgumentTypeError(f"{text!r} is not {allowed}")
    return value


def models() -> list[str]:
    """Top-level folders with a train.py."""
    return sorted(path.parent.name for path in rounds.ROOT.glob("[!.]*/train.py"))


def describe(model: str, flags: list[str], preset: str | None = None) -> dict:
    """What the script says of itself; it checks `flags` on the way. Raises Mistake with the script's own line.

    preset: the one that flags are added to: what one preset allows another may refuse.
    """
    folder = rounds.ROOT.joinpath(*model.split("."))
    if not (all(part.isidentifier() for part in model.split(".")) and (folder / "train.py").exists()):
        raise Mistake(f"unknown model {model!r}, --model takes one of {', '.join(models())}")
    reserved = [flag for flag in flags if flag.split("=")[0] in RESERVED_FLAGS]
    if reserved:
        raise Mistake(f"{reserved[0]} after -- is set by this command, leave it out")
    command = [sys.executable, "-m", f"{model}.train", "--describe", *(["--preset", preset] if preset else []), *flags]
    try:
        answer = subprocess.run(
            command, cwd=rounds.ROOT, capture_output=True, text=True, check=False, timeout=DESCRIBE_LIMIT_S
        )
    except subprocess.TimeoutExpired:
        raise Mistake(f"{' '.join(command[1:])} gives no answer in {DESCRIBE_LIMIT_S} s") from None
    try:
        return json.loads(answer.stdout)
    except json.JSONDecodeError:
        said = (answer.stderr.strip() or answer.stdout.strip() or "nothing").splitlines()[-1]
        raise Mistake(f"{' '.join(command[1:])} answers: {said}") from None


def choose_preset(asked: str | None, presets, gpus: rounds.Gpus) -> str:
    """The preset to run. Raises Mistake for an unknown one, or one that needs a GPU where there is none."""
    name = asked or ("bench" if gpus.names and "bench" in presets else "tiny")
    if name not in presets:
        raise Mistake(f"unknown preset {name!r}, --preset takes one of {', '.join(presets)}")
    if name in GPU_PRESETS and not gpus.names:
        raise Mistake(
            f"preset {name} needs an NVIDIA GPU and nvidia-smi -L lists none; PRESET=tiny (--preset tiny) runs here"
        )
    return name


def choose_variants(asked: str | None, known, references=None) -> list[str]:
    """Variants in order, eager first, each after its reference. Raises Mistake for an unknown one.

    references: variant -> the one that its numbers are compared with, where that is not eager.
    """
    names = [name.strip() for name in asked.split(",") if name.strip()] if asked is not None else list(known)
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise Mistake(f"unknown variant {', '.join(unknown)!r}, --variants takes some of {', '.join(known)}")
    first = [(references or {}).get(name, name) for name in names if name in (references or {})]
    return list(dict.fromkeys(["eager", *first, *names]))


# ------------------------------------------------------------------------------------------------
# The session


class Session:
    """One call of the command: what is asked, what this machine is, and the records so far."""

    def __init__(self, args):
        self.model, self.flags, self.args = args.model, args.flags, args
        self.started = time.strftime("%Y%m%dT%H%M%S")
        self.launch = _parse_launch(args)
        presets = describe(self.model, [])["presets"]
        self.nodes = self._ask_nodes()
        self.gpus = rounds.Gpus(**self.nodes[0]["gpus"])
        self.preset = choose_preset(args.preset, presets, self.gpus)
        self.description = describe(self.model, self.flags, self.preset)
        self.flags = rounds.from_root(self.flags, self.description["flags"])
        self.references = self.description.get("reference", {})
        self.variants = choose_variants(args.variants, self.description["variants"], self.references)
        if self.gpus.names and args.ngpu > len(self.gpus.names):
            raise Mistake(f"--ngpu {args.ngpu}: this machine shows {len(self.gpus.names)}")
        kind = "tiny" if self.preset == "tiny" else "other"
        self.rounds = args.rounds or ROUNDS[kind]
        if args.first_round > 1 and (self.rounds == "auto" or args.first_round > self.rounds):
            raise Mistake(f"--first-round {args.first_round}: the rounds are {self.rounds}, see --rounds")
        self.limit_s = args.limit_s or LIMIT_S[kind]
        self.out = Path(args.out).resolve() if args.out else default_folder(self)
        self.partial = self.out / ".partial"
        self.env = self.nodes[0]["env"] | {"world_size": self.launch.world_size}
        self.request = {
            "config": self.description["presets"][self.preset],
            "flags": self.flags,
            "steps": args.steps,
            "num_gpus": args.ngpu,
        }
        if args.nnodes > 1:
            self.request["nodes"] = {"count": args.nnodes, "which": launch.digest(self.nodes)}
        self.records: dict[tuple[str, int], dict] = {}
        self.parity_seconds: list[float] = []
        self.timed_seconds: list[float] = []
        self.out_of_time = False
        self.start = time.monotonic()

    def _ask_nodes(self):
        """What the nodes are, by rank: this machine, or those that the launcher reaches."""
        if not self.launch.prefix:
            return [launch.describe_here(self.model)]
        self.out = Path(self.args.out).resolve()
        return launch.ask_nodes(self.launch, self.model, self.out, self._environment(0))

    # -- folder

    def open_folder(self):
        """Look at what is there: keep what this session would measure alike, set the rest aside in .stale."""
        found, faults = compare.load(self.out)
        for fault in faults:
            print(f"skipped: {fault}")
        if faults:
            print(f"{len(faults)} files skipped")
        odd = rounds.stale(found, self.variants, self._difference, self.env["boot_id"])
        for (variant, number), why in odd.items():
            print(f"{variant} round {number} is run anew: {why}" if variant in self.variants else f"{variant}: {why}")
            self._set_aside(variant, number)
        self.records = {
            (record["variant"], record["round"]): record
            for record in found
            if (record["variant"], record["round"]) not in odd
        }
        reused = sum(variant in self.variants for variant, _ in self.records)
        if reused:
            print(f"{reused} records of an earlier run are reused")
        self.partial.mkdir(exist_ok=True)
        for path in self.partial.iterdir():
            if not any(path == self._sidecar(base) and (base, 0) in self.records for base in self._bases):
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _difference(self, record):
        return rounds.difference(record, self.env, self.gpus, self.request, self.args.host_load)

    def _set_aside(self, variant, number):
        """Differing records must not stand in the new table, and are still somebody's measurement."""
        stale = self.out / ".stale" / self.started
        stale.mkdir(parents=True, exist_ok=True)
        for path in self.out.glob(f"{variant}.r{number}.*"):
            shutil.move(path, stale / path.name)

    def _base(self, variant):
        """The variant that this one's numbers are compared with."""
        return self.references.get(variant, "eager")

    @property
    def _bases(self):
        return list(dict.fromkeys(["eager", *map(self._base, self.variants)]))

    def _sidecar(self, base):
        return self.partial / f"{base}.r0.parity.npz"

    # -- one child

    def _child(self, variant, number, name):
        """Run a variant once and return the record it left, or one that says what became of it."""
        path, log = self.partial / f"{name}.json", self.out / "logs" / f"{name}.log"
        for left in self.partial.glob(f"{name}.*"):
            left.unlink()
        steps = self.description.get("parity_steps", PARITY_STEPS) if number == 0 else self.args.steps
        script = ["-m", f"{self.model}.train", "--preset", self.preset, "--variant", variant]
        script += ["--round", str(number), "--steps", str(steps), "--record", str(path)]
        script += ["--mllog", str(log.with_suffix(".mllog"))] if number else ["--parity"]
        script += self.flags
        with rounds.HostLoad(self.args.host_load if number else 0):
            outcome = rounds.run_child(
                self.launch.command(script),
                log=log,
                limit_s=self.limit_s,
                environment=self._environment(number),
                is_remote=bool(self.launch.prefix),
            )
        (self.timed_seconds if number else self.parity_seconds).append(outcome.seconds)
        return self._collect(outcome, path, log, variant, number)

    def _environment(self, number):
        cache = self.out / ".cache"
        environment = {
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
            "TRITON_CACHE_DIR": str(cache / "triton"),
        }
        if number == 0:
            environment |= {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
        return environment

    def _collect(self, outcome, path, log, variant, number):
        status, message, record = "failed", "", None
        try:
            record = records.read(path)
        except FileNotFoundError:
            message = f"{outcome.describe()} and no record; its log ends: {rounds.last_lines(log)}"
        except records.RecordError as error:
            message = str(error)
        if outcome.timed_out:
            status = "timeout"
            message = f"killed after {self.limit_s:g} s (--limit-s); its log ends: {rounds.last_lines(log)}"
        elif record and record["status"] == "pass" and outcome.exit_status:
            message = f"{outcome.describe()} after its record was written; its log ends: {rounds.last_lines(log)}"
        elif record and record["status"] == "pass" and compare.self_check(record):
            message = compare.self_check(record)
        elif record and record["status"] == "pass" and record["env"]["world_size"] != self.launch.world_size:
            asked = f"--nnodes {self.args.nnodes} --ngpu {self.args.ngpu}"
            message = f"world size {record['env']['world_size']}, {asked} asks for {self.launch.world_size}"
        if record is None:
            record = rounds.blank_record(
                model=self.model,
                preset=self.preset,
                variant=variant,
                round_index=number,
                device="cuda" if self.gpus.names else "cpu",
                env=self.env | self._gpu_env(),
                status=status,
                message=message,
            )
        elif message:
            record.update(status=status, message=message)
        record.update(variant=variant, round=number, host_load=self.args.host_load if number else 0)
        record["extra"]["request"] = self.request
        capture = record["capture"]
        if record["status"] == "pass" and capture["num_replays"] != capture["expected_replays"]:
            record.update(
                status="failed",
                message=f"{capture['num_replays']} replays counted, {capture['expected_replays']} expected",
            )
        return record

    def _gpu_env(self):
        if not self.gpus.names:
            return {"cuda": None, "driver": None}
        return {"gpu_name": self.gpus.names[0], "gpu_uuid": self.gpus.uuids[0], "num_gpus": len(self.gpus.names)}

    def _twice(self, variant, number, name=None):
        """A run, and once more if it failed or hung."""
        for attempt in (1, 2):
            start = time.monotonic()
            record = self._child(variant, number, name or f"{variant}.r{number}")
            again = attempt == 1 and record["status"] in ("failed", "timeout")
            if name is None and again:
                self._print_line(record, time.monotonic() - start, "once more")
            if not again:
                return record, time.monotonic() - start

    def _publish(self, record):
        """Move a record out of .partial, whole; its trace goes with it. The folder's own path stays out of it."""
        name = f"{record['variant']}.r{record['round']}"
        for path in self.partial.glob(f"{name}.*trace.json.gz"):
            path.replace(self.out / path.name)
        here = str(self.out)
        record["message"] = record["message"].replace(here, "OUT")
        record["argv"] = [text.replace(here, "OUT") for text in record["argv"]]
        record["env"]["variables"] = {
            key: value.replace(here, "OUT") for key, value in record["env"]["variables"].items()
        }
        records.write(self.out / records.file_name(record["variant"], record["round"]), record)
        self.records[record["variant"], record["round"]] = record
        (self.partial / f"{name}.json").unlink(missing_ok=True)

    # -- round 0

    def parity_round(self):
        """Every variant once, deterministic and untimed: eager, eager again, then the others against eager.

        What others are compared with in eager's place is run twice as well, and before them.
        """
        bases, missing = self._bases, [variant for variant in self.variants if (variant, 0) not in self.records]
        for base in bases:
            needed = any(self._base(variant) == base for variant in missing)
            lost = needed and base not in missing and not self._sidecar(base).exists()
            if lost and self.records[base, 0]["status"] in ("pass", "eager_two_runs_differ"):
                print(f"{base} round 0 is run anew: the others need its parity sidecar")
                missing.append(base)
        missing.sort(key=lambda variant: bases.index(variant) if variant in bases else len(bases))
        self.num_left = len(missing) + sum(base in missing for base in bases)
        for variant in missing:
            record, seconds = self._twice(variant, 0)
            self.num_left -= 1
            if variant in bases and record["status"] == "pass":
                seconds += self._control(record)
                self.num_left -= 1
            elif record["status"] == "pass":
                self._judge_parity(record)
            self._publish(record)
            self._print_line(record, seconds)
            if variant not in bases:
                (self.partial / f"{variant}.r0.parity.npz").unlink(missing_ok=True)

    def _control(self, record):
        """Eager, or what stands in its place, a second time. Only the verdict is kept, in the first run's record."""
        base = record["variant"]
        control, seconds = self._twice(base, 0, name=f"{base}.r0.control")
        if control["status"] != "pass":
            record.update(status=control["status"], message=f"{base}'s second run: {control['message']}")
            return seconds
        parity = self._compare_parity(record, f"{base}.r0.control")
        if parity and not parity.bitwise:
            where = parity.first_difference
            record.update(
                status="eager_two_runs_differ",
                message=f"two {base} runs differ from step {where['step']} on, first in {where['tensor']},"
                f" by up to {parity.max_rel_diff:.2g} relative",
            )
        for path in self.partial.glob(f"{base}.r0.control.*"):
            path.unlink()
        return seconds

    def _judge_parity(self, record):
        """Compare a variant's round 0 with eager's: bitwise where it is promised, within its tolerance elsewhere."""
        variant = record["variant"]
        base = self._base(variant)
        eager = self.records.get((base, 0))
        if eager is None or eager["status"] not in ("pass", "eager_two_runs_differ"):
            record["message"] = f"no parity: {base}'s round 0 is {eager['status'] if eager else 'missing'}"
            return
        parity = self._compare_parity(record, f"{variant}.r0")
        if parity is None or parity.bitwise:
            return
        # What eager itself does not repeat cannot be asked of a variant.
        eager_differs = eager["status"] == "eager_two_runs_differ"
        tolerance = self.description.get("tolerance", {}).get(variant, PARITY_TOLERANCE)
        if eager_differs:
            tolerance = max(tolerance, 2 * (eager["extra"].get("loss_rel_diff") or 0.0))
        where = f"first at step {parity.first_difference['step']} in {parity.first_difference['tensor']}"
        if self._promises_bitwise(variant) and not eager_differs:
            record.update(
                status="numerics_failed",
                message=f"not bitwise equal to {base}, {where}, by up to {parity.max_rel_diff:.2g} relative",
            )
        elif not parity.loss_rel_diff <= tolerance:
            record.update(
                status="numerics_failed",
                message=f"losses differ from {base} by {parity.loss_rel_diff:.2g} relative, allowed {tolerance:.2g}, "
                f"{where}",
            )

    def _compare_parity(self, record, name):
        """Fill numerics from the sidecars `name` and its base's; one that is not there or damaged is a failure."""
        try:
            parity = rounds.compare_parity(
                self.partial / f"{name}.parity.npz", self._sidecar(self._base(record["variant"]))
            )
        except ValueError as error:
            record.update(status="failed", message=str(error))
            return None
        record["numerics"].update(
            parity=parity.name, max_rel_diff=parity.max_rel_diff, first_difference=parity.first_difference
        )
        record["extra"]["loss_rel_diff"] = parity.loss_rel_diff
        return parity

    def _promises_bitwise(self, variant):
        if "bitwise" in self.description:
            return variant in self.description["bitwise"]
        return not any(word in variant for word in NOT_BITWISE)

    # -- timed rounds

    def timed_rounds(self):
        """ABBA rounds; says why when it stops before the asked number."""
        longest_s = 0.0
        number, wanted = self.args.first_round - 1, 2 if self.rounds == "auto" else self.rounds
        while True:
            if number == wanted:
                wanted = self._wanted(number)
                if number == wanted:
                    return
            number += 1
            missing = [v for v in rounds.order(self._active(), number) if (v, number) not in self.records]
            if not missing:
                continue
            spent = time.monotonic() - self.start
            # Before the first timed round, a child of round 0 is the best guess at one of it.
            guess = longest_s or len(missing) * max(self.parity_seconds, default=0.0)
            if self.args.minutes and spent + guess > self.args.minutes * 60:
                print(f"--minutes {self.args.minutes:g}: round {number} would take {duration(guess)}, not started")
                self.out_of_time = True
                return
            start = time.monotonic()
            for index, variant in enumerate(missing):
                later = itertools.product(self._active(), range(number + 1, self._at_least(wanted) + 1))
                self.num_left = len(missing) - index - 1 + sum(which not in self.records for which in later)
                record, seconds = self._twice(variant, number)
                self._take_over_parity(record)
                self._publish(record)
                self._print_line(record, seconds)
            self._judge_losses()
            longest_s = max(longest_s, time.monotonic() - start)

    def is_complete(self) -> bool:
        """Whether the records so far are all that this session would measure."""
        number, active = 2 if self.rounds == "auto" else self.rounds, self._active()
        if any((variant, 0) not in self.records for variant in self.variants):
            return False
        first = self.args.first_round
        while all((variant, r) in self.records for variant in active for r in range(first, number + 1)):
            wanted = self._wanted(number)
            if wanted == number:
                return True
            number = wanted
        return False

    def _active(self):
        """Variants that are worth another timed run."""
        return [
            variant
            for variant in self.variants
            # A verdict on timed losses may change with more eager rounds, so it stops nothing.
            if not any(
                record["status"] in rounds.NOT_RUN_AGAIN and not record["message"].startswith(rounds.TIMED_LOSSES)
                for (name, _), record in self.records.items()
                if name == variant
            )
        ]

    def _wanted(self, number):
        if self.rounds != "auto":
            return number
        groups = {variant: self._group(variant) for variant in self._active()}
        ratios = [compare.log_ratios(groups[v], groups.get("eager", [])) for v in groups if v != "eager"]
        return intervals.next_num_rounds([intervals.paired(values) for values in ratios if values], number)

    def _at_least(self, wanted):
        return max(wanted, intervals.AUTO_MIN_ROUNDS) if self.rounds == "auto" else wanted

    def _group(self, variant):
        return [record for (name, _), record in sorted(self.records.items()) if name == variant]

    def _take_over_parity(self, record):
        first = self.records.get((record["variant"], 0))
        if first:
            record["numerics"].update(
                {key: first["numerics"][key] for key in ("parity", "max_rel_diff", "first_difference")}
            )
            record["extra"]["loss_rel_diff"] = first["extra"].get("loss_rel_diff")

    def _judge_losses(self):
        """Timed losses against eager's, all of them again after each round: the spread is known better then."""
        for variant in self.variants:
            base = self._base(variant)
            eager_losses = [r["numerics"]["loss"] for r in compare.timed(self._group(base))]
            for record in self._group(variant):
                judged = record["status"] == "pass" or record["message"].startswith(rounds.TIMED_LOSSES)
                if variant == base or not record["round"] or not judged:
                    continue
                numerics = record["numerics"]
                difference = record["extra"].get("loss_rel_diff")
                floor = rounds.CUDA_FLOOR if record["device"] == "cuda" else 0.0
                fault = rounds.timed_losses_fault(numerics["loss"], eager_losses, difference, floor)
                if (fault or "") != record["message"]:
                    record.update(status="numerics_failed" if fault else "pass", message=fault or "")
                    self._publish(record)
                    print(
                        f"{variant} round {record['round']}: {fault or 'losses are within the eager spread after all'}"
                    )

    # -- what people see

    def print_card(self):
        where = f"{self.gpus.names[0]} x{self.args.ngpu}" if self.gpus.names else f"CPU, {self.env['cpu']}"
        where += f"  {self.args.nnodes} nodes" if self.args.nnodes > 1 else ""
        load = f"  {self.args.host_load} busy processes" if self.args.host_load else ""
        flags = f"  {' '.join(self.flags)}" if self.flags else ""
        print(f"{self.model}/{self.preset}  {where}  torch {self.env['torch']}{load}{flags}")
        print(f"variants {', '.join(self.variants)}  rounds parity + {self.rounds}")
        print(f"folder   {shown(self.out)}", flush=True)

    def _print_line(self, record, seconds, note=""):
        step = f"{record['statistic_ms']:10.2f} ms" if record["statistic_ms"] else f"{'-':>13s}"
        name = "parity " if record["round"] == 0 else f"round {record['round']}"
        status = record["numerics"]["parity"] if record["round"] == 0 and record["status"] == "pass" else None
        width = max(len(variant) for variant in self.variants)
        if not note and self.num_left:
            seen = self.timed_seconds if record["round"] else self.parity_seconds
            mean_s = sum(seen) / len(seen)
            least = "at least" if self.rounds == "auto" else "about"
            note = f"{least} {duration(self.num_left * mean_s)} left"
        line = (
            f"{name:8s}  {record['variant']:{width}s}  {status or record['status']:16s}{step}  {duration(seconds):>7s}"
        )
        print(f"{line}  {note}".rstrip())
        if record["message"]:
            print(f"          {record['message']}")
        sys.stdout.flush()

    def finish(self) -> int:
        """Write summary and table, print the table, and return the exit status."""
        compare.write_summary(self.out)
        found, faults = compare.load(self.out)
        text, rows = compare.report(found, faults)
        if not self.args.no_table:
            print(f"\n{text}\n\n{shown(self.out)}/: records, summary.csv, table.md")
        bad = [
            f"{row['variant']} ({row['status']})"
            for row in rows
            if row["variant"] in self.variants and row["status"] not in ("pass", "oom", "unsupported")
        ]
        if bad:
            print(f"not sound: {', '.join(bad)}")
        is_timed = any(compare.timed(self._group(variant)) for variant in self.variants)
        if self.out_of_time and not is_timed:
            print(f"no timed round fitted into --minutes {self.args.minutes:g}")
        elif not is_timed:
            print("no timed round: no variant got beyond round 0")
        return 1 if bad or not is_timed else 0


def _parse_launch(args):
    try:
        return launch.parse(args)
    except ValueError as error:
        raise Mistake(str(error)) from None


def default_folder(session) -> Path:
    load = f"-load{session.args.host_load}" if session.args.host_load else ""
    device = f"{session.gpus.slug}x{session.args.ngpu}"
    return rounds.ROOT / "runs" / device / f"{session.model}-{session.preset}{load}"


def shown(path):
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def duration(seconds):
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds / 60:.1f} min"


def interrupt(signum, frame):
    raise KeyboardInterrupt


def main(argv=None) -> int:
    args = parse(argv)
    prog = "python -m benchmarks.run"
    for number in (signal.SIGTERM, signal.SIGHUP):
        # nohup ignores SIGHUP, and means it.
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, interrupt)
    try:
        session = Session(args)
        with rounds.lock_folder(session.out):
            session.print_card()
            session.open_folder()
            session.parity_round()
            session.timed_rounds()
            return session.finish()
    except OSError as error:
        if error.filename is None:
            raise
        print(f"{prog}: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    except Mistake as mistake:
        print(f"{prog}: {mistake}", file=sys.stderr)
        return 2
    except (rounds.FolderBusy, launch.NodesDiffer, compare.Mixed) as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        if args.no_table:
            # Whoever started this says it.
            return 130
        print("\nstopped; finished records stay, and the same command goes on from here", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
