"""Measure what CUDA graphs are worth for one model: eager against its graphed variants, in paired rounds.

    python -m benchmarks.run --model gpt3
    python -m benchmarks.run --model gpt3 --preset tiny --variants eager,graph --rounds 2
    python -m benchmarks.run --model gpt3 --rounds auto --host-load 16 --minutes 30 -- --layers 4
    python -m benchmarks.run --model gpt3 --close
    python -m benchmarks.run --close --session 20261122T031500Z-13f405-c77b

Round 0 is untimed and asks for parity with deterministic kernels; timed rounds are in ABBA order, each run in a process
of its own. Beyond the preset tiny the first timed round comes right after eager's run of round 0, so that a row is seen
early; a variant that then fails round 0 fails in its timed run, too, and is not timed again.
Records appear one by one in an open session below the output root; the same command
goes on with it for 24 hours, on the same boot, GPUs and source. With all its rounds a session is packed and never
changed again; --close packs one as it stands. Exit status: 0 when every row is pass, oom or unsupported
and something was timed, 1 otherwise, 2 for a mistake on the command line, 130 after Ctrl-C.
"""

import argparse
import contextlib
import re
import shlex
import sys
from collections import Counter
from pathlib import Path

from benchmarks import command, compare, frame, launch, law, locks, open_session, sessions
from benchmarks.command import Mistake, amount, count, positive, shown
from benchmarks.open_session import OpenSession, opened
from benchmarks.request import Request, root_of
from benchmarks.rounds import Rounds
from benchmarks.script import models
from common import config
from common.config import checked

FAILURES = (sessions.Busy, sessions.Refused, sessions.Damaged, locks.GpuBusy, launch.NodesDiffer, compare.Mixed)

# ------------------------------------------------------------------------------------------------
# Command line


_rounds = checked(
    lambda text: text if text == "auto" else int(text),
    lambda number: number == "auto" or number >= 1,
    "a number of rounds from 1 up, or auto",
)
_label = checked(
    str,
    lambda text: re.fullmatch("[A-Za-z0-9][A-Za-z0-9._-]{0,47}", text),
    "a word of letters, digits, '.', '_' and '-', at most 48",
)


def parse(argv=None) -> argparse.Namespace:
    own, flags = command.split_flags(argv)
    parser = command.parser_of(
        "run",
        "Eager against graphed training steps of one model, in paired rounds.",
        f"See python -m MODEL.train --help for its flags. {command.TO_SCRIPT}",
    )
    add = parser.add_argument
    add("--model", metavar="NAME", help=f"one of {', '.join(models())}")
    add("--preset", metavar="NAME", help="bench where a GPU is found, else tiny")
    add("--variants", metavar="A,B", help="eager always runs; all of the script's unless told")
    add("--control", action="store_true", help="eager once more beside eager: what equal runs differ by")
    add("--rounds", metavar="N", type=_rounds, help="timed rounds (5; tiny: 2), or auto: until +-1 %%")
    add("--steps", metavar="N", type=count, default=0, help="at least this many timed steps (preset's)")
    add("--parity-steps", metavar="N", type=count, default=0, help="steps of round 0 (the script's; 3 beyond 0.4 s)")
    add("--ngpu", metavar="N", type=positive, default=1, help="GPUs, or ranks on the CPU (1)")
    add("--host-load", metavar="N", type=count, default=0, help="busy processes beside timed runs (0)")
    add("--minutes", metavar="M", type=amount, help="start no round that cannot end in this time")
    add("--out", metavar="DIR", help="output root: sessions go to DIR/<gpu>x<count>/<kind>/ (runs)")
    add("--label", metavar="WORD", type=_label, help="ends the kind's name (made of flags after --)")
    add("--probe", action="store_true", help="probe the host on a CPU, too")
    add("--close", action="store_true", help="pack the open session of this kind as it stands")
    add("--session", metavar="NAME", help="with --close: this one, whatever boot it is of")
    launch.add_arguments(parser)
    add("--verbose", action="store_true", help="seconds by phase below each run")
    add("--no-table", action="store_true", help="progress only; the table is in table.md")
    add("--limit-s", metavar="S", type=amount, help="kill a run after this long (1800; tiny: 300)")
    args = parser.parse_args(own)
    args.flags = flags
    if not args.model and not (args.close and args.session):
        parser.error(f"--model is missing, takes one of {', '.join(models())}")
    if args.session and not args.close:
        parser.error("--session is for --close")
    try:
        config.require_steps("--steps", args.steps)
        config.require_steps("--parity-steps", args.parity_steps)
    except ValueError as error:
        parser.error(str(error))
    return args


# ------------------------------------------------------------------------------------------------
# What the command does


def close(args) -> int:
    """Pack open sessions as they stand: the named one, or those of this kind on this boot and these GPUs."""
    if args.session:
        root = root_of(args)
        wanted = Path(args.session).name.removesuffix(sessions.OPEN)
        chosen = [path for path, _ in sessions.open_sessions(root) if sessions.session_name(path) == wanted]
    else:
        request = Request(args)
        root = request.root
        chosen = [path for path, meta in sessions.open_sessions(request.group) if request.is_here(meta)]
    if not chosen:
        others = [str(shown(path)) for path, _ in sessions.open_sessions(root)]
        said = f"; open: {', '.join(others)} (--session NAME closes one)" if others else ""
        raise Mistake(f"--close: no such open session{said}")
    done = [open_session.close(path, "as it stands") for path in chosen]
    for group in dict.fromkeys(path.parent for path in chosen):
        compare.write_summary(group)
    return 0 if all(done) else 1


def measure(args) -> int:
    request = Request(args)
    # Said before anything is printed.
    locks.folder()
    print_card(request)
    uuids = [] if request.launch.prefix else [uuid for uuids in request.uuids for uuid in uuids]
    with locks.gpu_locks(uuids, f"{request.model}/{request.preset}"), opened(request) as session:
        print(f"session  {shown(session.out)}")
        for text in locks.others_here():
            print(f"beside   {text}")
        sys.stdout.flush()
        rounds = Rounds(session)
        with contextlib.closing(rounds.runner):
            rounds.measure()
        if not rounds.out_of_time:
            session.pack()
        return finish(session, rounds.out_of_time)


def print_card(request: Request) -> None:
    args, gpus = request.args, request.gpus
    where = f"{gpus.names[0]} x{args.ngpu}" if gpus.names else f"CPU, {request.env['cpu']}"
    where += f"  {args.nnodes} nodes" if args.nnodes > 1 else ""
    load = f"  {args.host_load} busy processes" if args.host_load else ""
    flags = f"  {' '.join(request.flags)}" if request.flags else ""
    print(f"{request.model}/{request.preset}  {where}  torch {request.env['torch']}{load}{flags}")
    print(f"variants {', '.join(request.variants)}  rounds parity + {request.rounds}", flush=True)


def finish(session: OpenSession, out_of_time: bool) -> int:
    """Write and print the tables of a session; the command's exit status."""
    request, args = session.request, session.request.args
    runs = frame.read(session.out)
    text, table = compare.report(runs.frame, runs.faults, metas=runs.metas, doubts=runs.doubts)
    if not args.no_table:
        foretold = "\n".join(law.closing(runs.frame))
        print(f"\n{text}\n\n{foretold}".rstrip())
    try:
        compare.write_summary(request.group)
        print(f"\n{shown(session.out)}/: the session\n{shown(request.group)}/table.md: all sessions of this kind")
    except compare.Mixed as error:
        print(f"\n{shown(session.out)}/: the session\nno table of {shown(request.group)}/: {error}")
    for text, num_runs in beside(session).items():
        print(f"beside   {text}, in {num_runs} of {len(session.records)} runs")
    if out_of_time:
        again = f"CLOSE=1 SESSION={shlex.quote(sessions.session_name(session.out))}"
        print(f"the session stays open: the same command goes on with it for a day, make bench {again} closes it")
    bad = [
        f"{row['variant']} ({row['status']})"
        for row in table
        if row["variant"] in request.variants and row["status"] not in ("pass", "oom", "unsupported")
    ]
    if runs.faults:
        bad.append(f"{len(runs.faults)} left out ({'; '.join(fault.partition(':')[0] for fault in runs.faults)})")
    if bad:
        print(f"not sound: {', '.join(bad)}")
    is_timed = any(compare.timed(session.of(variant)) for variant in request.variants)
    if out_of_time and not is_timed:
        print(f"no timed round fitted into --minutes {args.minutes:g}")
    elif not is_timed:
        print("no timed round: no variant got beyond round 0")
    return 1 if bad or not is_timed else 0


def beside(session: OpenSession) -> Counter:
    """Other sessions on this host, and in how many runs of this one each was there; some began after it."""
    return Counter(text for record in session.records.values() for text in record["conditions"]["other_sessions"])


def main(argv=None) -> int:
    args = parse(argv)
    # Whoever started this with --no-table says that it was stopped.
    stopped = "" if args.no_table else command.STOPPED
    work = close if args.close else measure
    return command.exit_status("python -m benchmarks.run", lambda: work(args), FAILURES, stopped)


if __name__ == "__main__":
    sys.exit(main())
