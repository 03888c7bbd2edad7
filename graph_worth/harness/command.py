"""Code that all command lines of the harness share: flags and numbers, stopping, exit statuses, shown paths."""

import argparse
import errno
import itertools
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from graph_worth.config import Parser, checked, end_at_once
from graph_worth.folders import CODE, ROOT
from graph_worth.text import printable, printed_as_text

RUNS = ROOT / "runs"
TO_SCRIPT = "What follows -- goes to the training script."
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STOPPED = "\nstopped; what was measured stays, and the same command goes on from here"
# `timeout` sends its signal twice, and a make that was interrupted ends its program within a second.
ONE_STOP_S = 2.0


class Mistake(ValueError):
    """The command line asks for something impossible; the message names the choices."""


def prog_of(module: str) -> str:
    """Return the command that a person types: python -m benchmarks.MODULE, or graph-worth COMMAND in a project."""
    return f"python -m benchmarks.{module}" if ROOT == CODE else f"graph-worth {'bench' if module == 'run' else module}"


def parser_of(module: str, description: str, epilog: str = "") -> Parser:
    """Return a parser for `python -m benchmarks.MODULE` without abbreviated flags."""
    return Parser(prog=prog_of(module), description=description, epilog=epilog, allow_abbrev=False)


def split_flags(argv: list[str] | None) -> tuple[list[str], list[str]]:
    """Return the words of this command, and those of the training script, which follow the first --."""
    argv = sys.argv[1:] if argv is None else argv
    split = argv.index("--") if "--" in argv else len(argv)
    return argv[:split], argv[split + 1 :]


count = checked(int, lambda number: number >= 0, "a number from 0 up")
positive = checked(int, lambda number: number >= 1, "a number from 1 up")
amount = checked(float, lambda number: 0 < number < math.inf, "a number above 0")


def values(text: str) -> list[int]:
    """Return 1,2,4 as sorted numbers, of which none stands twice."""
    words = words_of(text)
    if not words or not all(word.isascii() and word.isdigit() and int(word) for word in words):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers from 1 up, as in 1,2,4")
    numbers = sorted(map(int, words))
    twice = next((number for number, following in itertools.pairwise(numbers) if number == following), None)
    if twice is not None:
        raise argparse.ArgumentTypeError(f"{twice} stands twice in {text!r}")
    return numbers


def words_of(text: str) -> list[str]:
    """Return the words between commas."""
    return [word.strip() for word in text.split(",") if word.strip()]


def require_printable(parser: argparse.ArgumentParser, words: list[str]) -> None:
    """End the program with one line where a word would garble a terminal or a file's name."""
    for word in filter(lambda word: not word.isprintable(), words):
        parser.error(f"{word!a}: has a character that cannot be printed")


def shown(path: Path) -> Path:
    """Return a path for people: from the current folder where it is below that."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


@dataclass
class Stop:
    """A first Ctrl-C or SIGTERM that did not end the program, which then measures no more than its file needs.

    Attributes:
        signal: its name; "" before it.
        can_wait: whether the program could write a file now.
    """

    signal: str = ""
    at_s: float = 0.0
    can_wait: Callable[[], bool] = bool


stop = Stop()


def _stop(number: int, _) -> None:
    """Note a first stop that can wait, or end the program; a shell, a scheduler or make may send several signals."""
    if number != signal.SIGHUP and stop.signal and time.monotonic() - stop.at_s < ONE_STOP_S:
        return
    if number != signal.SIGHUP and not stop.signal and stop.can_wait():
        stop.signal, stop.at_s = signal.Signals(number).name, time.monotonic()
        return
    for number in STOPS[1:]:
        if signal.getsignal(number) != signal.SIG_IGN:
            # A handler is not inherited by what the program still starts.
            signal.signal(number, lambda *_: None)
    raise KeyboardInterrupt


def exit_status(prog: str, work: Callable[[], int], failures: tuple = (), stopped: str = STOPPED) -> int:
    """Run a program and return its exit status. An exception becomes one line on stderr.

    Args:
        prog: name of the program.
        work: its result is the status, 2 for a Mistake or an unusable file.
        failures: exceptions with status 1.
        stopped: text for Ctrl-C, SIGTERM and SIGHUP, whose status is 130.
    """
    stop.signal = ""
    for number in STOPS:
        # nohup ignores SIGHUP, and means it.
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _stop)
    try:
        with printed_as_text():
            status = work()
            sys.stdout.flush()
        return 130 if stop.signal else status
    except BrokenPipeError:
        # As head leaves a pipe; else Python would say so once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        if error.filename is None and error.errno not in (errno.ENOSPC, errno.EIO):
            raise
        message, status = f"{error.filename or 'what is printed'}: {error.strerror}", 2
    except Mistake as mistake:
        message, status = str(mistake), 2
    except failures as failure:
        message, status = str(failure), 1
    except RuntimeError as error:
        # pathlib's, of a path that is resolved; from Python 3.13 on it is an OSError.
        if "Symlink loop" not in str(error):
            raise
        message, status = str(error), 2
    except KeyboardInterrupt:
        if stopped:
            print(stopped, file=sys.stderr)
        return 130
    finally:
        end_at_once()
    print(f"{prog}: {printable(message)}", file=sys.stderr)
    return status
