"""Epochs of real programs, eager, graphed and compiled: a loader, a log every 10 steps, a checkpoint at the end.

    python -m benchmarks.epochs
    python -m benchmarks.publish runs/h200x1/epochs/ID.json

The programs lie in examples/programs. Each epoch has a process of its own. Eager and graphed epochs take turns, and
compiled epochs come after them. The compiler's cache is empty at first. One file holds all epochs.

Exit status: 0; 1 where one failed, or its losses are not eager's; 2 for a mistake; 130 after Ctrl-C.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

import msgspec

from graph_worth.files import write_text
from graph_worth.harness import command, program_epochs
from graph_worth.harness.command import RUNS, amount, positive, shown
from graph_worth.harness.files import partial, run_file
from graph_worth.harness.files.facts import Epoch, Epochs
from graph_worth.harness.processes import launch, locks, supervisor
from graph_worth.harness.processes.gpus import Gpus
from graph_worth.harness.run import SOURCE, new_id
from graph_worth.text import printable

# Name: words behind python -m examples.programs., and the label of the runs in which `measure` timed the same step.
PROGRAMS = {
    "gpt2_trainer": (["gpt2_trainer"], "gpt2-transformers-build"),
    "nanogpt_lightning": (["nanogpt_lightning"], "nanogpt-build"),
    "nanogpt": (["plain_loop", "--model", "nanogpt"], "nanogpt-build"),
    "muon": (["plain_loop", "--model", "muon"], "muon-build"),
}
FORMS = "eager", "graphed", "compile"
STEPS, ROUNDS, LIMIT_MINUTES, LIMIT_S = 100, 2, 8.0, 240.0
PACKAGES = "torch", "transformers", "accelerate", "lightning"


def turns(args: argparse.Namespace) -> list[tuple[int, str, str]]:
    """Return (round, program, form) of each epoch. Compiled ones come last, since a file needs the others."""
    every = [
        (number, program, form)
        for number in range(args.rounds)
        for program in args.programs
        for form in (args.forms if number % 2 == 0 else args.forms[::-1])
    ]
    return sorted(every, key=lambda turn: (turn[2] == "compile", turn[0]))


def epoch(turn: tuple[int, str, str], steps: int, log: Path, environment: dict) -> Epoch:
    """Let a program train one epoch in a process, and return its numbers."""
    number, program, form = turn
    words, step = PROGRAMS[program]
    command_words = [sys.executable, "-m", f"examples.programs.{words[0]}", *words[1:], "--form", form]
    before = log.stat().st_size if log.exists() else 0
    status = supervisor.run_logged([*command_words, "--steps", str(steps)], log, LIMIT_S, environment)
    printed = [line for line in log.read_bytes()[before:].decode(errors="replace").split("\n") if line.strip()]
    numbers = [json.loads(line) for line in printed if line.startswith('{"epoch_s"')]
    fields = {"program": program, "step": step, "form": form, "round": number, "steps": steps}
    if status == 0 and numbers:
        fields |= numbers[-1]
    else:
        last = partial.prose_without_folders(printed[-1]) if printed else ""
        number = 0 if status is None else status - 128 if status > 128 else -status
        ended = f"ended by {supervisor.name_of_signal(number)}" if number > 0 else f"status {status}: {last}"
        fields["raised"] = (f"longer than {LIMIT_S:.0f} s" if status is None else ended)[:400]
    return msgspec.convert(fields, Epoch)


def measure(args: argparse.Namespace) -> int:
    """Let all programs train, write one file, and return the exit status."""
    begin_s, begin_utc, machine = time.monotonic(), partial.utc(), launch.describe_here()
    env, gpus = machine["env"], Gpus(**machine["gpus"])
    run_id, longest_s, others = new_id(env), 0.0, 0
    path = (Path(args.out) if args.out else RUNS) / f"{gpus.slug}x1" / run_file.EPOCHS / f"{run_id}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    runs: list[Epoch] = []
    print(f"{len(turns(args))} epochs, each in a process; none begins after {args.minutes:g} minutes", flush=True)
    with locks.gpu_locks(gpus.uuids[:1], "epochs"), tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": f"{cache}/triton"}
        if len(gpus.uuids) > 1:
            # Trainer would take all.
            environment["CUDA_VISIBLE_DEVICES"] = gpus.uuids[0]
        for turn in turns(args):
            start_s = time.monotonic()
            if start_s - begin_s + longest_s > 60 * args.minutes and runs:
                print(f"left out: {turn[1]} {turn[2]} {turn[0] + 1}: might pass {args.minutes:g} minutes")
                continue
            runs.append(epoch(turn, args.steps, path.with_suffix(".log"), environment))
            others = max(others, locks.num_others())
            longest_s = max(longest_s, time.monotonic() - start_s)
            print(printable(program_epochs.line_of(runs[-1])), flush=True)
    versions = {package.name: package.version for package in metadata.distributions() if package.name in PACKAGES}
    found_gpus = [{"name": name, "uuid": uuid} for name, uuid in zip(gpus.names[:1], gpus.uuids[:1], strict=True)]
    host = {key: env[key] for key in ("host", "cpu", "variables", "slurm", "driver")}
    fields = {
        "schema": run_file.SCHEMA,
        "epochs": True,
        "id": run_id,
        "source": {key: env[name] for key, name in SOURCE.items()} | {"clean": env["git_dirty"] is False},
        "versions": versions | {"python": env["python"]},
        "host": host | {"boot": env["boot_id"], "cores": len(os.sched_getaffinity(0)), "gpus": found_gpus},
        "begin_utc": begin_utc,
        "end_utc": partial.utc(),
        "others": others,
        "runs": runs,
    }
    content = msgspec.convert(fields, Epochs)
    write_text(path, run_file.as_bytes(content))
    path.chmod(0o444)
    faults = program_epochs.faults(content)
    print(*map(printable, faults), f"{shown(path)}  ({time.monotonic() - begin_s:.0f} s)", sep="\n")
    return 1 if faults or any(run.raised for run in runs) else 0


def parse(argv=None) -> argparse.Namespace:
    """Return the command line. Mistakes end the program with one line."""
    parser = command.parser_of("epochs", "Epochs of real programs, eager, graphed and compiled.")
    add = parser.add_argument
    add("--programs", nargs="+", choices=PROGRAMS, default=[*PROGRAMS], help="some of them (all)")
    add("--forms", nargs="+", choices=FORMS, default=FORMS, help="some of them (all)")
    add("--steps", metavar="N", type=positive, default=STEPS, help=f"of an epoch ({STEPS})")
    add("--rounds", metavar="N", type=positive, default=ROUNDS, help=f"epochs of each form ({ROUNDS})")
    add("--minutes", metavar="M", type=amount, default=LIMIT_MINUTES, help=f"begin none late ({LIMIT_MINUTES:g})")
    add("--out", metavar="DIR", help="root of the runs (runs)")
    return parser.parse_args(argv)


def main(argv=None) -> int:
    """Run the program; return its exit status."""
    args = parse(argv)
    stopped = "\nstopped; no file was written"
    return command.exit_status("python -m benchmarks.epochs", lambda: measure(args), (locks.GpuBusy,), stopped)


if __name__ == "__main__":
    sys.exit(main())
