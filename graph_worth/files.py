"""Files that appear whole: a reader sees the old file or the new one, never a half; and JSON without NaN."""

import errno
import json
import math
import os
import tempfile
from pathlib import Path


def write_whole(path, write) -> int:
    """Let `write(file)` fill a new binary file beside `path`, then move it there; returns its size in bytes.

    Missing folders are made. The filename of an OSError is `path`; what was there is then as it was.
    """
    path, temporary = Path(path), None
    if path.exists() and not (path.is_file() or path.is_dir()):
        # A device such as /dev/null, whose place root could take.
        raise OSError(errno.EINVAL, "this is no regular file", str(path))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
            num_bytes = file.seek(0, os.SEEK_END)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        if isinstance(error, OSError):
            # Errors of an open file name none.
            raise type(error)(error.errno, error.strerror, str(path)) from None
        raise
    return num_bytes


def write_text(path, text: str | bytes) -> None:
    """Write text, or bytes, whole."""
    write_whole(path, lambda file: file.write(text.encode() if isinstance(text, str) else text))


def json_line(value) -> str:
    """One compact line of JSON; NaN and infinity, which JSON does not have, become null."""
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False)
    except ValueError:
        return json.dumps(with_leaves(value, _without_nan), separators=(",", ":"), allow_nan=False)


def with_leaves(value, change):
    """Return a value of JSON with change(leaf) in the place of each text, number, flag and null."""
    if isinstance(value, dict):
        return {key: with_leaves(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [with_leaves(item, change) for item in value]
    return change(value)


def _without_nan(leaf):
    return None if isinstance(leaf, float) and not math.isfinite(leaf) else leaf
