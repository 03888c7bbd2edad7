"""Measure eager and one graph of eight workloads on this machine, in at most eight minutes: a host more for each row.

    python -m benchmarks.census
    python -m benchmarks.publish runs/h200x1/census/ID.json

The workloads are the models' preset and two steps of examples/steps; the graph is `graph_step`, or the first headline
graph. A run has four cycles without control; the losses of its blocks show that the graph trains as eager does. What
does not fit or cannot run is left out by name. One file holds all runs. After a stop the same command goes on.

Exit status: 0 when something was timed and no graph failed; 1 otherwise; 2 for a mistake on the command line; 130 after
Ctrl-C.
"""

import argparse
import sys
import time
from pathlib import Path

from graph_worth.folders import OWN_STEP
from graph_worth.harness import ask, command, judge, measure, run, script
from graph_worth.harness.ask import Options
from graph_worth.harness.command import Mistake, amount, positive, shown
from graph_worth.harness.files import partial, run_file
from graph_worth.harness.files.facts import Run
from graph_worth.harness.pages import run_table
from graph_worth.harness.processes import launch, locks
from graph_worth.text import printable

CYCLES, LIMIT_MINUTES = 4, 8.0
# What a first workload takes, with kernels that are compiled; none begins that would probably end after the limit.
LONGEST_S = 60.0
STEPS = ("examples/steps/muon.py:build", "examples/steps/nanogpt.py:build")
USUAL = "graph_step"


def requests(args: argparse.Namespace, machine: dict) -> list[tuple[str, ask.Ask | str, Options]]:
    """Return (name, request or the reason why it is refused, options of the run) of each workload."""
    shared = {"cycles": args.cycles, "preset": args.preset, "out": args.out, "no_control": True, "is_light": True}
    named_options = [(name, Options(model=name, **shared)) for name in run.chosen_models(args.model)]
    for step in STEPS if args.model == run.ALL else ():
        label, flags = measure.named_step(step)
        named_options.append(
            (Path(step.partition(":")[0]).stem, Options(model=OWN_STEP, label=label, flags=flags, **shared))
        )
    return [(name, _request(options, machine), options) for name, options in named_options]


def _request(options, machine) -> ask.Ask | str:
    try:
        described = ask.ask_of(options, options.model, machine).description
        is_usual = USUAL in described["headline"] and described["kinds"][USUAL] == "graph"
        options.variants = f"eager,{USUAL if is_usual else script.first_graph(described)}"
        chosen = ask.ask_of(options, options.model, machine)
    except Mistake as mistake:
        return str(mistake)
    chosen.builds = chosen.builds[:1]
    return chosen


def census(args: argparse.Namespace) -> int:
    """Measure every workload, write one file, and return the exit status."""
    begin_s, machine = time.monotonic(), launch.describe_here()
    wanted = requests(args, machine)
    left_out = {name: refusal for name, refusal, _ in wanted if isinstance(refusal, str)}
    asks = [(name, request, options) for name, request, options in wanted if isinstance(request, ask.Ask)]
    if not asks:
        raise Mistake(f"no workload can be measured here: {'; '.join(f'{k}: {v}' for k, v in left_out.items())}")
    print(f"census of {len(asks)} workloads, at most {args.minutes:g} minutes", flush=True)
    longest_s = LONGEST_S
    done: list[tuple[partial.Partial, Run]] = []
    with locks.gpu_locks(list(asks[0][1].gpus.uuids[:1]), "census") as others:
        for text in others:
            print(f"beside   {text}")
        for name, request, options in asks:
            start_s = time.monotonic()
            if command.stop.signal:
                left_out[name] = f"stopped by {command.stop.signal}"
                continue
            if start_s - begin_s > 60 * args.minutes - longest_s and done:
                left_out[name] = f"might pass {args.minutes:g} minutes: another took {longest_s:.0f} s"
                continue
            print(f"{request.name}", flush=True)
            facts, measured = run.begun_run(request, options)
            for note in sorted({note for build in measured.builds.values() for note in build.notes}):
                print(printable(f"  {note}"))
            verdicts = [verdict for build in judge.judged(measured).values() for verdict in build.verdicts.values()]
            reason = next(
                (f"{verdict.status}: {verdict.reason}" for verdict in verdicts if verdict.status != judge.PASS), ""
            )
            if reason:
                # A run that is kept says it by its facts.
                print(printable(f"  {reason}"))
            if not _has_base(measured):
                left_out[name] = reason
            done.append((facts, measured))
            longest_s = max(longest_s, time.monotonic() - start_s)
    return _sealed(args, asks[0][1], done, left_out, time.monotonic() - begin_s)


def _has_base(measured: Run) -> bool:
    return any(judged.base for judged in judge.judged(measured).values())


def _sealed(args, first, done, left_out, took_s) -> int:
    """Print and write what was measured; return the exit status."""
    runs = [measured for _, measured in done if _has_base(measured)]
    for name, reason in left_out.items():
        print(printable(f"left out: {name}: {reason}"))
    if runs:
        path = partial.seal_together(first.group.parent / run_file.CENSUS, runs[0].id, runs, left_out)
        caveat = run_table.on_a_cpu([judged for measured in runs for judged in judge.judged(measured).values()])
        text = run_table.suite(runs) if runs[0].device == "cuda" else f"{run_table.suite(runs)}\n{caveat}"
        print(f"\n{text}\n{shown(path)}  ({took_s:.0f} s)")
    for facts, _ in done:
        facts.close()
        facts.path.unlink()
    failed = [measured for measured in runs if not judge.is_sound(measured)]
    return 1 if failed or not runs else 0


def parse(argv=None) -> argparse.Namespace:
    """Return the command line. Mistakes end the program with one line."""
    parser = command.parser_of("census", "Eager and one graph of eight workloads, for hosts.")
    add = parser.add_argument
    add("--model", metavar="A,B", default=run.ALL, help="some of the models, without the steps (all)")
    add("--preset", metavar="NAME", help="bench where a GPU is found, else tiny")
    add("--cycles", metavar="N", type=positive, default=CYCLES, help=f"cycles ({CYCLES})")
    add(
        "--minutes", metavar="M", type=amount, default=LIMIT_MINUTES, help=f"begin no workload late ({LIMIT_MINUTES:g})"
    )
    add("--out", metavar="DIR", help="root of the runs (runs)")
    return parser.parse_args(argv)


def main(argv=None) -> int:
    """Run the program; return its exit status."""
    args = parse(argv)
    return command.exit_status("python -m benchmarks.census", lambda: census(args), run.FAILURES)


if __name__ == "__main__":
    sys.exit(main())
