"""The text that names a step, FILE.py:FUNCTION, without torch."""

import hashlib
import re
from pathlib import Path

FORM = "FILE.py:FUNCTION, as in my_step.py:build"


def split(text: str) -> tuple[Path, str]:
    """Return the file and the function that STEP names.

    Args:
        text: FILE.py:FUNCTION. Without a function it is `build`.

    Raises:
        ValueError: there is no such file, or no function of that name in it.
    """
    name, colon, function = text.rpartition(":")
    name, function = (name, function) if colon and not function.endswith(".py") else (text, "build")
    path = Path(name)
    if not path.is_file():
        raise ValueError(f"--step {text}: there is no file {name}, it takes {FORM}")
    source = path.read_text(errors="replace")
    if not re.search(rf"(?m)^(def {re.escape(function)}\s*\(|{re.escape(function)}\s*=)", source):
        raise ValueError(f"--step {text}: {name} has no function {function}(device), it takes {FORM}")
    return path, function


def digest(text: str) -> str:
    """Return 16 hex digits of the content of the file that STEP names."""
    return hashlib.sha256(split(text)[0].read_bytes()).hexdigest()[:16]
