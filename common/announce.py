"""What a run is waiting for, told to whoever started it: a line of text in a file, while it lasts.

The harness prints it when it takes more than a few seconds (benchmarks/progress.py). Without the variable, and on
ranks other than the first, nothing is written.
"""

import contextlib
import os
from pathlib import Path

VARIABLE = "ANNOUNCE_FILE"


@contextlib.contextmanager
def announced(text: str):
    """While the block runs, the file that VARIABLE names holds `text`, as in: compiles rnnt/lstm_kernel.cu.

    Blocks may be nested; the inner text stands. A file that cannot be written is no reason to fail.
    """
    path = os.environ.get(VARIABLE)
    if not path or os.environ.get("RANK", "0") != "0":
        yield
        return
    before = _write(Path(path), text)
    try:
        yield
    finally:
        _write(Path(path), before)


def _write(path, text):
    """What stood there before."""
    try:
        before = path.read_text() if path.exists() else ""
        path.write_text(text)
    except OSError:
        return ""
    return before
