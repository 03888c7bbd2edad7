"""Measure what CUDA graphs are worth for a model: eager and graphed variants in alternating blocks of one process.

    python -m benchmarks.run --model gpt3
    python -m benchmarks.run --model gpt3 --variants all --host-load 16
    python -m benchmarks.run --model all --cycles auto --minutes 5
    python -m benchmarks.run --model gpt3 -- --layers 4

A run takes about three minutes on a GPU. It checks that all variants train alike (parity), captures them, measures
cycles of blocks, base first and last, profiles each variant, and checks parity once more on the graphs that were timed.
Facts are on disk as they come; after a kill the same command goes on. At the end stands one file, which never changes,
and beside it a page about the run for a browser, whose path is printed last.

Exit status: 0 when every variant passed, ran out of memory or is unsupported here and something was timed; 1
otherwise; 2 for a mistake on the command line; 130 after Ctrl-C. After two cycles a first Ctrl-C or SIGTERM skips the
rest and still writes the file, which says so; a second one ends at once.
"""

import contextlib
import hashlib
import itertools
import json
import os
import re
import secrets
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from graph_worth.files import write_text
from graph_worth.folders import OWN_STEP
from graph_worth.harness import ask, command, judge
from graph_worth.harness.ask import Options
from graph_worth.harness.builds.build_measurement import BuildMeasurement
from graph_worth.harness.builds.build_worker import Ahead, BuildWorker, Interrupted, OutOfVariants, Stopped
from graph_worth.harness.builds.request import FEWEST_CYCLES, Settings
from graph_worth.harness.command import Mistake, shown, stop
from graph_worth.harness.files import partial, run_file
from graph_worth.harness.files.facts import Run
from graph_worth.harness.files.partial import Partial
from graph_worth.harness.pages import run_table
from graph_worth.harness.processes import launch, locks
from graph_worth.harness.processes.worker_process import WorkerEnded
from graph_worth.harness.report import write as write_page
from graph_worth.harness.script import CONTROL, find_model, models

ALL = "all"
FAILURES = (locks.GpuBusy, launch.NodesDiffer, partial.Busy, Interrupted)
CYCLES = {"tiny": 3, "other": 8}
BLOCK_S = {"tiny": 0.1, "other": 1.0}
# From so many quiet cycles on a first stop leaves a file.
STOPPABLE_CYCLES = 2
# A step of somebody's own gets its verdict within minutes (graph_worth/harness/measure.py).
OWN_BLOCK_S = 0.5
SOURCE = {"commit": "git_sha", "tree": "git_tree", "hash": "source_hash"}


def parse(argv=None) -> Options:
    """Return the command line. Mistakes end the program with one line."""
    arguments, flags = command.split_flags(argv)
    parser = command.parser_of(
        "run",
        "Eager against graphed training steps, in alternating blocks of one process.",
        f"See python -m MODEL.train --help for the flags of a script. {command.TO_SCRIPT} After two cycles "
        "a first Ctrl-C or SIGTERM still writes the file.",
    )
    known = f"one of {', '.join(models())}, some with commas, or all"
    parser.add_argument("--model", metavar="NAME", required=True, help=known)
    ask.add_flags(parser, "run")
    args, unknown = parser.parse_known_args(arguments)
    if unknown:
        hint = f": flags of the training script come after --, as in -- {' '.join(unknown[:2])}"
        parser.error(f"unknown argument {unknown[0]!r}{hint if unknown[0].startswith('--') else ''}")
    return Options(**vars(args), flags=flags)


# ------------------------------------------------------------------------------------------------
# One model


def open_run(request: ask.Ask, args: Options) -> Partial:
    """Return the run that was begun with the same request, machine and source, else a new one."""
    header, unique_keys = _header(request, args), ("id", "begin_utc")
    for path in partial.find(request.group):
        with contextlib.suppress(partial.Busy):
            begun = Partial(path)
            if begun.facts and all(begun.facts[0].get(key) == header[key] for key in header if key not in unique_keys):
                _require_sound(begun)
                print(f"goes on with {shown(path)}, cycles so far: {len(begun.of('cycle'))}")
                return begun
            begun.close()
    fresh = Partial(request.group / f"{header['id']}{partial.SUFFIX}")
    fresh.add("header", **header)
    if args.doctor_s:
        fresh.add("seconds", phase="doctor", seconds=args.doctor_s)
    return fresh


def _require_sound(begun: Partial) -> None:
    try:
        partial.folded(begun.facts)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise Mistake(f"{shown(begun.path)} is damaged ({reason}): move it away to begin anew") from None


def _header(request, args) -> dict:
    env = request.host["env"]
    # A worker that runs says more of them.
    pairs = list(zip(request.gpus.names, request.gpus.uuids, strict=True))[: args.ngpu]
    gpus = [{"name": name, "uuid": uuid} for name, uuid in pairs]
    return {
        "schema": run_file.SCHEMA,
        "id": new_id(env),
        **{key: getattr(request, key) for key in ("model", "preset", "label", "flags", "ranks")},
        **{key: getattr(args, key) for key in ("over", "value")},
        "source": {key: env[name] for key, name in SOURCE.items()} | {"clean": env["git_dirty"] is False},
        "begin_utc": partial.utc(),
        "control": "" if args.no_control else CONTROL,
        "parity": "blocks" if args.is_light else "courses",
        "request": {"gpus": list(request.gpus.uuids[: args.ngpu])}
        | {key: getattr(args, key) for key in ask.flags_for("header")},
        "host": {"boot": env["boot_id"], "cpu": env["cpu"], "gpus": gpus, "versions": {"torch": env["torch"]}},
        "builds": {
            build.name: {key: getattr(build, key) for key in ("apart", "fields", "variants", "asked_layers")}
            for build in request.builds
        },
    }


def new_id(env: dict) -> str:
    """Return the id of a run that begins now on the host of an environment."""
    boot = re.sub("[^0-9a-f]", "", (env["boot_id"] or "").lower())[:6].ljust(6, "0")
    return f"{datetime.now(UTC).strftime('%Y%m%dT%H%M%SZ')}-{boot}{secrets.token_hex(1)}"


def settings_of(args: Options, preset: str) -> Settings:
    """Return how long to measure a preset."""
    size = "tiny" if preset.startswith("tiny") else "other"
    is_own = args.model == OWN_STEP
    block_s = min(OWN_BLOCK_S, BLOCK_S[size]) if is_own else BLOCK_S[size]
    most_blocks_s = args.most_blocks_s or (1.0 if is_own else 4.0)
    given = {"cycles": args.cycles or CYCLES[size], "block_s": block_s, "most_blocks_s": most_blocks_s}
    return Settings(
        **ask.values_for(Settings, args) | given,
        control="" if args.no_control else CONTROL,
        audits=not args.no_audit,
    )


def measure_run(request: ask.Ask, args: Options, facts: Partial, log: Path) -> None:
    """Measure all builds of a model. A variant that cannot run is a fact, not an exception.

    Raises:
        Interrupted: there are cycles, and the worker of a build that ran does not start, or was ended from outside.
    """
    settings, ahead, number = settings_of(args, request.preset), Ahead(), 0
    fewest = settings.cycles if settings.cycles_s is None else min(FEWEST_CYCLES, settings.least_cycles)
    measured: list[BuildMeasurement] = []
    # The first build is the usual one of the preset as it is.
    stop.can_wait = lambda: all(
        len(facts.of("cycle", build=build.name, busy=0)) >= STOPPABLE_CYCLES
        for build in (request.builds[0], *(last.request for last in measured[-1:]))
    )
    try:
        for _, builds in itertools.groupby(request.builds, key=lambda build: build.fields):
            usual, *apart = builds
            measured = []
            # The usual build is the last: its blocks, and the base alone, are to be near each other in time.
            for build in [] if stop.signal else [*apart, usual]:
                number += 1
                if len(request.builds) > 1:
                    names = ", ".join(name for name in build.variants if name != CONTROL)
                    title = run_table.build_title(build.name, build.fields, build.apart) or "the preset as it is"
                    _say(f"{number} of {len(request.builds)}: {title}: {names}")
                of_build = settings if build is usual else replace(settings, cycles=fewest)
                measured.append(BuildMeasurement(BuildWorker(build, of_build, facts, log, _say, ahead)))
                _measure_build(measured[-1], facts)
            if settings.is_light or stop.signal:
                continue
            with contextlib.suppress(Stopped):
                for base in dict.fromkeys(build.base for build in measured if build.base):
                    alike = [build for build in measured if build.base == base]
                    alike[-1].measure_base(alike)
    finally:
        stop.can_wait = bool
        ahead.end()
    facts.add("end", end_utc=partial.utc(), stopped=stop.signal)


def log_of(facts: Partial) -> Path:
    """Return the file of what the training script prints."""
    return facts.path.with_name(facts.path.name.removesuffix(partial.SUFFIX) + ".log")


def begun_run(request: ask.Ask, args: Options) -> tuple[Partial, Run]:
    """Measure all builds of a model, and return the facts, not sealed yet, with the run that they make."""
    facts = open_run(request, args)
    if not facts.of("end"):
        measure_run(request, args, facts, log_of(facts))
    return facts, partial.folded(facts.facts)


def _measure_build(measurement: BuildMeasurement, facts: Partial) -> None:
    try:
        measurement.measure()
    except OutOfVariants as end:
        measurement.leave_out_rest(measurement.kind_of_eagers(), str(end))
    except Interrupted as end:
        raise Interrupted(_goes_on(end, facts)) from None
    except WorkerEnded as end:
        is_of_host = facts.of("worker", build=measurement.request.name) or end.is_from_outside
        if is_of_host and facts.of("cycle"):
            raise Interrupted(_goes_on(end, facts)) from None
        measurement.leave_out_rest(*(("unsupported", end.reason) if end.is_refusal else (end.kind, str(end))))


def _goes_on(end, facts) -> str:
    return f"{end}; {shown(facts.path)} stays, and the same command goes on from there"


def _say(text):
    print(text, flush=True)


# ------------------------------------------------------------------------------------------------
# The command


def chosen_models(text: str) -> list[str]:
    """Return names of models between commas, or all."""
    names = models() if text == ALL else list(dict.fromkeys(map(find_model, command.words_of(text))))
    if not names:
        raise Mistake(f"--model takes one of {', '.join(models())}, or all")
    return names


def measured(args: Options) -> tuple[list[tuple[Run, Path | None]], bool]:
    """Measure every model that the command line names.

    Returns:
        The run of each, and its file, None where nothing could be timed; and whether one of several was refused.
    """
    names, machine = chosen_models(args.model), launch.machine(args)
    requests, refused = [], []
    for name in names:
        try:
            requests.append(ask.ask_of(args, name, machine))
        except Mistake as mistake:
            if len(names) == 1:
                raise
            refused.append(f"{name}: {mistake}")
            print(f"refused: {refused[-1]}")
    if not requests:
        raise Mistake("no model is left to measure")
    uuids = [] if args.nnodes > 1 else list(requests[0].gpus.uuids[: args.ngpu])
    with locks.gpu_locks(uuids, ",".join(request.name for request in requests)) as others:
        for text in others:
            print(f"beside   {text}")
        suite = Suite(requests, args)
        done = []
        for request in requests:
            if not stop.signal:
                done.append(suite.measured(request) or suite.note(request, _measure_one(request, args)))
        suite.end()
        return done, bool(refused)


def measure(args: Options) -> int:
    """Measure every model that the command line names; return the exit status."""
    done, is_refused = measured(args)
    runs = [run for run, path in done if path is not None]
    if len(done) > 1 and runs:
        print(run_table.suite(runs))
    # Of all models some may be refused: not every machine has a GPU for each.
    bad = (is_refused and args.model != ALL) or len(runs) < len(done)
    return 1 if bad or not all(map(judge.is_sound, runs)) else 0


def _measure_one(request, args) -> tuple[Run, Path | None]:
    """Measure and seal one model's run; where nothing could be timed there is no file."""
    start, gpus = time.monotonic(), request.gpus
    where = f"{gpus.names[0]} x{request.ranks}" if gpus.names else f"CPU ({os.cpu_count()} cores)"
    is_own, torch = request.model == OWN_STEP, request.host["env"]["torch"]
    # A step of somebody's own may run in an interpreter with another torch.
    words = [] if is_own else [f"torch {torch}", " ".join(request.flags)]
    _say("  ".join(filter(None, [request.name, where, *words])))
    facts, run = begun_run(request, args)
    log = log_of(facts)
    if not facts.of("cycle"):
        facts.close()
        facts.path.unlink()
        printed = f"; what the script printed is in {shown(log)}" if log.is_file() and log.stat().st_size else ""
        _say(f"\n{run_table.report(run)}\nnothing was timed{printed}\n")
        return run, None
    path = partial.seal(facts)
    run = run_file.read(path)
    took = f"({time.monotonic() - start:.0f} s)"
    _say(f"\n{run_table.report(run)}\n{shown(path)}  {took}")
    # Of a user's own step benchmarks.measure writes the page, with its verdict.
    if request.model != OWN_STEP:
        _say(page_line(path))
    _say("")
    return run, path


def page_line(path: Path, findings: str = "", verdict: str = "") -> str:
    """Write the page about a run beside its file; return the page's path, or why there is none, as a line."""
    try:
        return str(shown(write_page(path, findings=findings, verdict=verdict)))
    except OSError as error:
        return f"no page about the run: {error.strerror}"


class Suite:
    """The sealed runs of a command for several models, noted on disk: after a stop the same command goes on."""

    def __init__(self, requests: list[ask.Ask], args: Options):
        env = requests[0].host["env"]
        options = {key: str(value) for key, value in sorted(vars(args).items())}
        options |= {"boot": env["boot_id"], "source": env["source_hash"]}
        digest = hashlib.sha256(json.dumps(options).encode()).hexdigest()[:16]
        self._path = requests[0].root / f".suite-{digest}.json" if len(requests) > 1 else None
        self._files: dict[str, str] = {}
        if self._path:
            with contextlib.suppress(ValueError, OSError):
                self._files = dict(json.loads(self._path.read_text()))

    def measured(self, request: ask.Ask) -> tuple[Run, Path] | None:
        """Return the run of a model that was sealed before the command was stopped, and its file."""
        path = Path(self._files.get(request.name, ""))
        if not path.is_file():
            return None
        run = run_file.read(path)
        _say(f"{request.name}  was measured before: {shown(path)}\n\n{run_table.report(run)}\n")
        return run, path

    def note(self, request: ask.Ask, done: tuple[Run, Path | None]) -> tuple[Run, Path | None]:
        """Note the run of a model, and return it."""
        if self._path and done[1] and not stop.signal:
            self._files[request.name] = str(done[1])
            write_text(self._path, json.dumps(self._files))
        return done

    def end(self) -> None:
        """Forget all runs, so that the next call measures again."""
        if self._path and not stop.signal:
            self._path.unlink(missing_ok=True)


def main(argv=None) -> int:
    """Run the program; return its exit status."""
    args = parse(argv)
    return command.exit_status(command.prog_of("run"), lambda: measure(args), FAILURES)


if __name__ == "__main__":
    sys.exit(main())
