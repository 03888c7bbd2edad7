"""What the command lines of the harness share: flags and numbers, stopping, exit statuses, paths as people see them."""

import argparse
import math
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks import ROOT
from common.config import Parser, checked

RUNS = ROOT / "runs"
TO_SCRIPT = "What follows -- goes to the training script."
STOPPED = "\nstopped; finished records stay, and the same command goes on from here"


class Mistake(ValueError):
    """Something on the command line that cannot be; the message names what can."""


def parser_of(module: str, description: str, epilog: str = "") -> Parser:
    """A parser for `python -m benchmarks.MODULE` without abbreviated flags."""
    return Parser(prog=f"python -m benchmarks.{module}", description=description, epilog=epilog, allow_abbrev=False)


def split_flags(argv: list[str] | None) -> tuple[list[str], list[str]]:
    """(words of this command, words of the training script), which follow the first --."""
    argv = sys.argv[1:] if argv is None else argv
    split = argv.index("--") if "--" in argv else len(argv)
    return argv[:split], argv[split + 1 :]


count = checked(int, lambda number: number >= 0, "a number from 0 up")
positive = checked(int, lambda number: number >= 1, "a number from 1 up")
amount = checked(float, lambda number: 0 < number < math.inf, "a number above 0")


def values(text: str) -> list[int]:
    """1,2,4 as sorted numbers without doubles."""
    words = words_of(text)
    if not words or not all(word.isascii() and word.isdigit() and int(word) for word in words):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers from 1 up, as in 1,2,4")
    return sorted({int(word) for word in words})


def words_of(text: str) -> list[str]:
    """Words between commas."""
    return [word.strip() for word in text.split(",") if word.strip()]


def shown(path: Path) -> Path:
    """A path as people see it: from the current folder where it is below that."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def exit_status(prog: str, work: Callable[[], int], failures: tuple = (), stopped: str = STOPPED) -> int:
    """What work() returns; for an exception one line on stderr, and 2 for a Mistake or an unusable file, 1 for one of
    `failures`, 130 where Ctrl-C, SIGTERM or SIGHUP stopped it."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        # nohup ignores SIGHUP, and means it.
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)
    try:
        return work()
    except OSError as error:
        if error.filename is None:
            raise
        said, status = f"{error.filename}: {error.strerror}", 2
    except Mistake as mistake:
        said, status = mistake, 2
    except failures as failure:
        said, status = failure, 1
    except KeyboardInterrupt:
        if stopped:
            print(stopped, file=sys.stderr)
        return 130
    print(f"{prog}: {said}", file=sys.stderr)
    return status
