"""Measures how fast this host issues work, in ten seconds: microseconds a call, quiet and beside busy processes.

    python -m benchmarks.host
    python -m benchmarks.host --python PATH --json

A step of many small kernels takes as long as the host needs to issue them, so a slow host is where a graph gains.
Exit status: 0; 1 where the measuring process fails; 2 for a mistake on the command line; 130 after Ctrl-C.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys

from graph_worth.folders import ROOT, START
from graph_worth.harness import command
from graph_worth.harness.command import Mistake, positive
from graph_worth.harness.measure import require_torch
from graph_worth.harness.processes.supervisor import busy_processes

# Of all calls together, once quiet and once beside busy processes.
SECONDS = 3.0
TITLES = {"operator": "eager operator", "linear": "Linear, forward and backward", "graph": "launch of a graph"}


class Failed(RuntimeError):
    """The process that measures has ended. Its reason is on stderr."""


def parse(argv=None) -> argparse.Namespace:
    """Return the command line. Mistakes end the program with one line."""
    parser = command.parser_of("host", "Microseconds of this host's calls, quiet and beside busy processes.")
    add = parser.add_argument
    add("--python", metavar="PATH", help="interpreter with torch 2.6 or newer (this one)")
    add("--host-load", metavar="N", type=positive, help="busy processes (one for each core)")
    add("--json", action="store_true", help="print one line of JSON")
    return parser.parse_args(argv)


def measured(python: str, num_busy: int) -> dict:
    """Return "host", see `describe_host`, and "quiet" and "busy", see `graph_worth.machine.host_pace.calls_us`.

    Raises:
        Failed: the process that measures has ended.
    """
    words = [python, str(START), "graph_worth.machine.host_pace"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        to, back = process.stdin, process.stdout
        assert to is not None and back is not None

        def ask(line: str) -> dict:
            try:
                to.write(line)
                to.flush()
                return json.loads(back.readline())
            except (ValueError, BrokenPipeError):
                raise Failed("the process that measures has ended") from None

        host, quiet = ask(""), ask(f"{SECONDS}\n")
        with busy_processes(num_busy):
            return {"host": host, "busy_processes": num_busy, "quiet": quiet, "busy": ask(f"{SECONDS}\n")}


def table(measurement: dict) -> str:
    """Return the lines for a screen."""
    host, beside = measurement["host"], f"beside {measurement['busy_processes']} busy processes"
    gpus = ", ".join(gpu["name"] for gpu in host["gpus"]) or "no GPU, so there is no graph to launch"
    lines = [f"{host['cpu']}, {gpus}, torch {host['versions']['torch']}"]
    lines += [
        f"{'':30}{'quiet':>20}  {beside:>32}",
        f"{'us of a call':30}{'p50':>10}{'p99':>10}  {'p50':>16}{'p99':>16}",
    ]
    for name, quiet in measurement["quiet"].items():
        busy = measurement["busy"][name]
        times = f"{quiet['p50_us']:10.1f}{quiet['p99_us']:10.1f}  {busy['p50_us']:16.1f}{busy['p99_us']:16.1f}"
        lines.append(f"{TITLES[name]:30}{times}")
    return "\n".join(lines)


def work(args: argparse.Namespace) -> int:
    """Measure, and print as asked; return the exit status."""
    python = shutil.which(args.python or sys.executable)
    if python is None:
        raise Mistake(f"--python {args.python}: no such command")
    python = os.path.abspath(python)
    require_torch(python, args.python is not None)
    measurement = measured(python, args.host_load or len(os.sched_getaffinity(0)))
    print(json.dumps(measurement) if args.json else table(measurement))
    return 0


def main(argv=None) -> int:
    """Run the program; return its exit status."""
    args = parse(argv)
    return command.exit_status(command.prog_of("host"), lambda: work(args), (Failed,), stopped="")


if __name__ == "__main__":
    sys.exit(main())
