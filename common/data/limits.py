"""Files of data that a user names: regular ones, and no more of them than these limits say.

with open_regular(path, "--data") as file:
    start = file.read(8)
"""

import contextlib
import os
import stat
from collections.abc import Iterator
from typing import BinaryIO

from graph_worth.text import printable

# Of a file that is mapped, or read piece by piece.
MAX_BYTES = 4 * 2**40
# Of a file whose content is copied to memory, and of what comes out of it.
MAX_READ_BYTES = 4 * 2**30
MAX_ROWS = 10_000_000
# JSON of one line, and of one header, is parsed at once and then takes up to 20 times its bytes.
MAX_LINE_BYTES = 8 * 2**20
MAX_HEADER_BYTES = 8 * 2**20


@contextlib.contextmanager
def open_regular(path, flag: str, max_bytes: int = MAX_BYTES) -> Iterator[BinaryIO]:
    """Open a regular file to read bytes; never waits for the other end of a pipe.

    ValueError in one line that begins with `flag`: missing, not readable, a folder, pipe, socket or device, or larger
    than max_bytes; and for an OSError within the block, as of a damaged disk.
    """
    try:
        # Asked before it is opened: opening alone can make a device do something.
        _require_regular(os.stat(path), path, flag)
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            status = os.fstat(file.fileno())
            _require_regular(status, path, flag)
            if status.st_size > max_bytes:
                raise ValueError(
                    f"{flag}: {printable(path)} has {status.st_size:,} bytes, at most {max_bytes:,} are read"
                )
            yield file
    except OSError as error:
        raise ValueError(f"{flag}: cannot read {printable(path)} ({error.strerror})") from None


def _require_regular(status, path, flag):
    if stat.S_ISDIR(status.st_mode):
        raise ValueError(f"{flag}: cannot read {printable(path)} (Is a directory)")
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{flag}: cannot read {printable(path)} (it is a pipe, a socket or a device)")


def first_line(error: BaseException) -> str:
    """Return an exception's message as one printable line; its type where the message is empty."""
    line = (str(error).strip().splitlines() or [""])[0][:300]
    return printable(line) if line else type(error).__name__
