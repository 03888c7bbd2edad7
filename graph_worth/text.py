"""Text from files and from foreign programs, on its way to people: names, labels, exceptions' messages.

It may hold commands of a terminal or markup. Here it becomes what it says, for a terminal, a drawing or HTML (whose
templates escape markup); benchmarks/pages/markdown.py has Markdown.
"""

import contextlib
import re
import sys
from pathlib import PurePosixPath


def printable(text) -> str:
    r"""Return a text in one line of letters that can be printed; others become escapes, as \x1b."""
    text = str(text)
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)


def digits(value: float) -> str:
    """Return a time with three digits or more."""
    return f"{value:.1f}" if value >= 100 else f"{value:.2f}" if value >= 1 else f"{value:.3f}"


_PATH = re.compile(r"""(?:(?<![\w.])|(?<=-[A-Z]))~?/[^:;,="']+""")


def without_folders(text: str) -> str:
    """Return a value of a flag or a variable with the last name of each absolute path in it."""
    return _PATH.sub(name_of, text)


def name_of(match) -> str:
    """Return the last name of a path that a regular expression has found."""
    return PurePosixPath(match[0]).name


def lines(text: str) -> str:
    """Return a text whose lines are printable."""
    return "\n".join(map(printable, text.split("\n")))


class _Shown:
    """A stream of a terminal that takes printable lines."""

    def __init__(self, stream):
        self._stream = stream

    def write(self, text):
        return self._stream.write(lines(text))

    def __getattr__(self, name):
        return getattr(self._stream, name)


@contextlib.contextmanager
def printed_as_text():
    """Within it, all that this process prints is printable lines."""
    with contextlib.redirect_stdout(_Shown(sys.stdout)), contextlib.redirect_stderr(_Shown(sys.stderr)):
        yield
