"""The text that names a step, FILE.py:FUNCTION, without torch."""

import contextlib
import hashlib
import itertools
import re
from pathlib import Path

MOST_FILES = 500
FORM = "FILE.py:FUNCTION, as in my_step.py:build"
# Environment variable: the folder in which the user's command runs, unless it is the root of the repository.
FOLDER = "GRAPH_WORTH_FOLDER"
# Environment variable: the command that the user has typed, such as graph-worth doctor.
PROG = "GRAPH_WORTH_PROG"


def split(text: str, is_sized: bool = False) -> tuple[Path, str]:
    """Return the file and the function of FILE.py:FUNCTION; without a function it is `build`.

    Raises:
        ValueError: there is no such file, or no function of that name in it, or with `is_sized` one of one argument.
    """
    name, colon, function = text.rpartition(":")
    name, function = (name, function) if colon and not function.endswith(".py") else (text, "build")
    path = Path(name)
    try:
        if not path.is_file():
            raise ValueError(f"--step {text}: there is no file {name}, it takes {FORM}")
        source = path.read_text(errors="replace")
    except OSError as error:
        raise ValueError(f"--step {text}: {error.strerror}") from None
    escaped = re.escape(function)
    if not re.search(rf"(?m)^(def {escaped}\s*\(|{escaped}\s*=|from .*\b{escaped}\b)", source):
        raise ValueError(f"--step {text}: {name} has no function {function}(device), it takes {FORM}")
    if is_sized and re.search(rf"(?m)^def {escaped}\s*\([^,)]*,?\s*\)", source):
        raise ValueError(f"--step {text}: {function} takes no size; a sweep calls {function}(device, size)")
    return path, function


def digest(text: str) -> str:
    """Return 16 hex digits of the file that STEP names and of the Python files beside it and in folders beside it."""
    path = split(text)[0].resolve()
    files = {path, *itertools.islice((file for file in path.parent.glob("*.py")), MOST_FILES)}
    files |= set(itertools.islice((file for file in path.parent.glob("[!.]*/*.py")), MOST_FILES))
    total = hashlib.sha256()
    for file in sorted(files):
        with contextlib.suppress(OSError):
            total.update(str(file.relative_to(path.parent)).encode(errors="replace") + b"\0" + file.read_bytes())
    return total.hexdigest()[:16]
