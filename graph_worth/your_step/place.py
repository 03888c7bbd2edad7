"""Places in the user's code: where a call came from."""

import functools
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import FrameType

import torch

from graph_worth.capture import asking

_TORCH = os.path.dirname(torch.__file__) + os.sep
_OPTIM = os.path.join(_TORCH, "optim") + os.sep
# Averaged weights are no optimizer.
_AVERAGES = os.path.join(_OPTIM, "swa_utils.py")
_AMP = os.path.join(_TORCH, "amp") + os.sep
# Others of torch's that a finding names.
_NAMED = {
    os.path.join(_TORCH, "utils", "checkpoint.py"): "checkpoint",
    os.path.join(_TORCH, "distributions") + os.sep: "distribution",
}
_HERE = os.path.dirname(__file__) + os.sep
_COMMON = os.path.dirname(os.path.dirname(__file__)) + os.sep
_STANDARD_LIBRARY = os.path.dirname(os.__file__) + os.sep
PACKAGES = ("site-packages/", "dist-packages/")

# They report: what they count, no loss depends on.
_REPORTING = tuple(f"{where}{name}/" for where in PACKAGES for name in ("tqdm", "wandb", "rich", "loguru", "mlflow"))

UNKNOWN = "unknown line"
# Values of `Place.through` that change with each step.
STEPPED = {"optimizer", "schedule", "loss scaler"}


@dataclass(frozen=True)
class Place:
    """The origin of a call.

    Attributes:
        line: file:line of the innermost frame outside of torch.
        own: file:line of the innermost frame outside of all installed packages, or the same.
        through: one of STEPPED, "checkpoint" or "distribution" where the call comes from one of torch's.
        module: path of the innermost module that is running.
        callers: file:line of the user's frames around `own`, inner ones first.
        function: name of the function that `line` is in.
    """

    line: str
    own: str
    through: str = ""
    module: str = ""
    callers: tuple[str, ...] = ()
    function: str = ""


def place_of_call(module: str = "", has_callers: bool = False) -> Place:
    """Return the place in the user's code that is running, with its callers if they are requested."""
    place = place_of(_frames(sys._getframe(1)), module, has_callers)
    if place.line == UNKNOWN:
        # The backward pass of a GPU runs in a thread of its own, while the user's code waits in the main one.
        place = place_of_thread(threading.main_thread(), module, has_callers)
    return place


def place_of_thread(thread: threading.Thread, module: str = "", has_callers: bool = False) -> Place:
    """Return the place in the user's code at which another thread is."""
    return place_of(_frames(sys._current_frames().get(thread.ident or 0)), module, has_callers)


def _frames(frame: FrameType | None) -> Iterator[tuple[str, int, str]]:
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
        frame = frame.f_back


def place_of(frames: Iterable[tuple[str, int, str]], module: str = "", has_callers: bool = False) -> Place:
    """Return the place of (file, line, function) of frames, the innermost first."""
    line = user_line = through = function = ""
    callers = []
    for path, here, name in frames:
        if user_line and not has_callers:
            break
        is_installed = path.startswith(_COMMON) or any(part in path for part in PACKAGES)
        if user_line:
            if _is_outside(path) and not is_installed and not path.startswith(_STANDARD_LIBRARY):
                callers.append(f"{path}:{here}")
        elif path.startswith(_OPTIM) and path != _AVERAGES:
            # Around an optimizer of another library it is torch's hook alone.
            through = through or ("" if line else "schedule" if "lr_scheduler" in path else "optimizer")
        elif path.startswith(_AMP):
            through = "loss scaler" if "grad_scaler" in path else through
        elif path.startswith(_TORCH):
            through = through or next((part for start, part in _NAMED.items() if path.startswith(start)), "")
        elif _is_outside(path) and (is_installed or not path.startswith(_STANDARD_LIBRARY)):
            line, function = (line, function) if line else (f"{path}:{here}", name)
            user_line = "" if is_installed else f"{path}:{here}"
    return Place(line or UNKNOWN, user_line or line or UNKNOWN, through, module, tuple(callers), function)


@functools.cache
def is_users_file(path: str) -> bool:
    """Return whether a file is the user's: no installed package's, no file of Python or of ours."""
    ours = path.startswith((_TORCH, _COMMON, _STANDARD_LIBRARY, "<frozen"))
    return not ours and not any(part in path for part in PACKAGES)


@functools.cache
def is_noted(path: str) -> bool:
    """Return whether a file is the user's or an installed package's, but torch's and ours."""
    is_package = any(p in path for p in PACKAGES) and not any(p in path for p in _REPORTING)
    return is_users_file(path) or (is_package and not path.startswith((_TORCH, _COMMON)))


def _is_outside(path: str) -> bool:
    """Say whether a file is neither torch's nor the doctor's."""
    return os.sep in path and not path.startswith((_TORCH, _HERE, asking.__file__))
