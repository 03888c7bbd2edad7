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
import os
import re
import signal
import sys
from pathlib import Path

from benchmarks import bench, compare, launch, locks, rounds, sessions
from benchmarks.script import Mistake, Parser, amount, count, models, positive
from common import config

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
    parser.add_argument("--model", metavar="NAME", help=f"one of {', '.join(models())}")
    parser.add_argument("--preset", metavar="NAME", help="bench where a GPU is found, else tiny")
    parser.add_argument("--variants", metavar="A,B", help="eager always runs; all of the script's unless told")
    parser.add_argument(
        "--control", action="store_true", help="eager once more beside eager: what equal runs differ by"
    )
    parser.add_argument("--rounds", metavar="N", type=_rounds, help="timed rounds (5; tiny: 2), or auto: until +-1 %%")
    parser.add_argument("--steps", metavar="N", type=count, default=0, help="at least this many timed steps (preset's)")
    parser.add_argument(
        "--parity-steps", metavar="N", type=count, default=0, help="steps of round 0 (the script's; 3 beyond 0.4 s)"
    )
    parser.add_argument("--ngpu", metavar="N", type=positive, default=1, help="GPUs, or ranks on the CPU (1)")
    parser.add_argument("--host-load", metavar="N", type=count, default=0, help="busy processes beside timed runs (0)")
    parser.add_argument("--minutes", metavar="M", type=amount, help="start no round that cannot end in this time")
    parser.add_argument("--out", metavar="DIR", help="output root: sessions go to DIR/<gpu>x<count>/<kind>/ (runs)")
    parser.add_argument("--label", metavar="WORD", type=_label, help="ends the kind's name (made of flags after --)")
    parser.add_argument("--probe", action="store_true", help="probe the host on a CPU, too")
    parser.add_argument("--close", action="store_true", help="pack the open session of this kind as it stands")
    parser.add_argument("--session", metavar="NAME", help="with --close: this one, whatever boot it is of")
    launch.add_arguments(parser, positive)
    parser.add_argument("--verbose", action="store_true", help="seconds by phase below each run")
    parser.add_argument("--no-table", action="store_true", help="progress only; the table is in table.md")
    parser.add_argument("--limit-s", metavar="S", type=amount, help="kill a run after this long (1800; tiny: 300)")
    args = parser.parse_args(argv[:split])
    args.flags = argv[split + 1 :]
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


def _rounds(text):
    if text == "auto":
        return text
    try:
        return positive(text)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of rounds from 1 up, or auto") from None


def _label(text):
    if not re.fullmatch("[A-Za-z0-9][A-Za-z0-9._-]{0,47}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a word of letters, digits, '.', '_' and '-', at most 48")
    return text


def interrupt(signum, frame):
    raise KeyboardInterrupt


# ------------------------------------------------------------------------------------------------
# What the command does


def close(args) -> int:
    """Pack open sessions as they stand: the named one, or those of this kind on this boot and these GPUs."""
    if args.session:
        root = Path(args.out).resolve() if args.out else rounds.ROOT / "runs"
        wanted = Path(args.session).name.removesuffix(sessions.OPEN)
        chosen = [path for path, _ in sessions.open_sessions(root) if sessions.session_name(path) == wanted]
    else:
        session = bench.Session(args)
        root = session.root
        found = sessions.open_sessions(session.group)
        chosen = [path for path, meta in found if meta.get("nodes") == session.place]
    if not chosen:
        others = [bench.shown(path) for path, _ in sessions.open_sessions(root)]
        said = f"; open: {', '.join(map(str, others))} (--session NAME closes one)" if others else ""
        raise Mistake(f"--close: no such open session{said}")
    done = [bench.close_session(path, "as it stands") for path in chosen]
    for group in dict.fromkeys(path.parent for path in chosen):
        compare.write_summary(group)
    return 0 if all(done) else 1


def _require_locks():
    try:
        locks.folder()
    except ValueError as error:
        raise Mistake(str(error)) from None


def measure(args) -> int:
    session = bench.Session(args)
    _require_locks()
    session.print_card()
    what = f"{session.model}/{session.preset}"
    uuids = [] if session.launch.prefix else [uuid for uuids in session.uuids for uuid in uuids]
    cores = os.sched_getaffinity(0)
    try:
        with locks.gpu_locks(uuids, what):
            session.open()
            session.print_session()
            session.probe()
            session.measure()
            return session.finish()
    finally:
        session.let_go()
        os.sched_setaffinity(0, cores)


def main(argv=None) -> int:
    args = parse(argv)
    prog = "python -m benchmarks.run"
    for number in (signal.SIGTERM, signal.SIGHUP):
        # nohup ignores SIGHUP, and means it.
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, interrupt)
    try:
        return close(args) if args.close else measure(args)
    except OSError as error:
        if error.filename is None:
            raise
        print(f"{prog}: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    except Mistake as mistake:
        print(f"{prog}: {mistake}", file=sys.stderr)
        return 2
    except (sessions.Busy, sessions.Refused, sessions.Damaged, locks.GpuBusy, launch.NodesDiffer) as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 1
    except compare.Mixed as error:
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
