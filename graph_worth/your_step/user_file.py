"""Calling a file's build(device), and checking what it returns."""

import contextlib
import importlib.util
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
from torch.utils._pytree import tree_leaves

from graph_worth.capture.errors import explained
from graph_worth.your_step.parts import register_nests, tensors_in
from graph_worth.your_step.step_file import FOLDER, split

FIRST_STEP_LIMIT_S = 60.0
# Variables of torchrun, and what torch says where they or a process group are not there.
OF_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
NO_RANKS = ("process group has not been initialized", "environment variable RANK expected")
STARTS_NO_STEP = "no step has ended within 60 s: build smaller shapes or fewer layers"


@dataclass
class Handed:
    """The values that build(device) returned: step(batch) -> loss, batches, and the objects that training changes.

    make_mine: captures the step and returns what replays it, mine(batch) -> loss; None where none was handed over.
    """

    step: Callable
    batches: list
    owned: list
    make_mine: Callable | None = None


def load(text: str, device: torch.device, size: int = 0) -> Handed:
    """Import the file of FILE.py:FUNCTION, call its function, with a size unless it is 0, and check what it returns.

    The folder of FOLDER is the current one from then on, and is on sys.path behind the file's.

    Raises:
        ValueError: the file, the function or what it returns cannot be used; the text says why.
    """
    path, name = split(text)
    path = path.resolve()
    folders = [str(path.parent)]
    if FOLDER in os.environ:
        folders.append(os.environ[FOLDER])
        os.chdir(folders[-1])
    sys.path[:0] = [folder for folder in dict.fromkeys(folders) if folder not in sys.path]
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    # The second name is its own, whatever else is imported.
    sys.modules.setdefault(path.stem, module)
    sys.modules[str(path)] = module
    try:
        with mock.patch.object(sys, "argv", [str(path)]):
            spec.loader.exec_module(module)
            returned = getattr(module, name)(device, *([size] if size else []))
    except torch.OutOfMemoryError:
        raise
    except (Exception, SystemExit) as error:
        raise ValueError(f"{where(error, path)}: {name}(device) raised {said(error)}") from error
    return _checked(returned, f"{path.name}: {name}(device)", device)


def where(error: BaseException, path: Path) -> str:
    """Return FILE:LINE of the innermost frame of the user's file in a traceback, or its name."""
    line, trace = "", error.__traceback__
    while trace is not None:
        if os.path.realpath(trace.tb_frame.f_code.co_filename) == os.path.realpath(path):
            line = f":{trace.tb_lineno}"
        trace = trace.tb_next
    return f"{path.name}{line}"


def said(error: BaseException) -> str:
    """Return an error's type and first line, and what helps where that is known."""
    first = (str(error).strip() or "nothing").splitlines()[0][:200]
    return f"{type(error).__name__}: {first}{_remedy(error, first)}"


def _remedy(error, text) -> str:
    if "CUDAGraphs" in text or "graph recording" in text:
        return ": " + "; ".join(explained(text))
    if isinstance(error, ModuleNotFoundError):
        return ": PYTHON=PATH (--python PATH) runs the step in your own interpreter"
    needs_ranks = isinstance(error, KeyError) and error.args[:1] and error.args[0] in OF_RANKS
    if "RANK" not in os.environ and (needs_ranks or any(words in text for words in NO_RANKS)):
        return ": the step needs ranks, NGPU=2 (--ngpu 2) starts two"
    return ""


def _checked(returned, name, device):
    if not isinstance(returned, (tuple, list)) or len(returned) != 3:
        kind = type(returned).__name__ + (f" of {len(returned)}" if isinstance(returned, (tuple, list)) else "")
        raise ValueError(f"{name} returned a {kind}; it has to return step, batches, [what training changes]")
    step, batches, owned = returned
    make_mine = None
    if isinstance(step, dict):
        if "eager" not in step or not step.keys() <= {"eager", "mine"}:
            keys = ", ".join(map(repr, step)) or "nothing"
            raise ValueError(f'{name}: the dict in the step\'s place has {keys}; it takes "eager" and "mine"')
        step, make_mine = step["eager"], step.get("mine")
        if make_mine is not None and not callable(make_mine):
            kind = type(make_mine).__name__
            raise ValueError(f'{name}: "mine" is a {kind}, it has to be a function that captures and returns a step')
    if not callable(step):
        raise ValueError(f"{name}: the first value is a {type(step).__name__}, it has to be a function step(batch)")
    if not isinstance(batches, (list, tuple)) or not batches:
        kind = type(batches).__name__ + (" of none" if isinstance(batches, (list, tuple)) else "")
        raise ValueError(f"{name}: the second value has to be a list of batches, at least one, not {kind}")
    for index, batch in enumerate(batches):
        try:
            register_nests(batch)
            hidden = next((leaf for leaf in tree_leaves(batch) if _hides_tensors(leaf)), None)
        except RecursionError:
            raise ValueError(f"{name}: batch {index} contains itself: make it a nest of tensors") from None
        if hidden is not None:
            text = f"batch {index} has a {type(hidden).__name__}, whose tensors a graph's copy of the batch would miss"
            raise ValueError(f"{name}: {text}: make it a dict, a list or a tuple")
        if not tensors_in(batch):
            raise ValueError(f"{name}: batch {index} has no tensor; a batch is a tensor or a nest of tensors")
    owned = list(owned) if isinstance(owned, (list, tuple)) else [owned]
    for holder in owned:
        if isinstance(holder, torch.nn.Module):
            for parameter_name, parameter in holder.named_parameters():
                if parameter.device.type != device.type:
                    text = f"parameter {parameter_name} lies on {parameter.device}, the step is to run on {device}"
                    raise ValueError(f"{name}: {text}: build the model with .to(device)")
    return Handed(step, list(batches), owned, make_mine)


def _hides_tensors(leaf) -> bool:
    """Say whether a leaf is an object with tensors inside, such as one of a class of the user's."""
    if isinstance(leaf, torch.Tensor):
        return False
    inner = list(getattr(leaf, "__dict__", {}).values())
    inner += [getattr(leaf, name, None) for name in getattr(type(leaf), "__slots__", ()) if isinstance(name, str)]
    return bool(tensors_in(inner))


@contextlib.contextmanager
def exits_are_errors():
    """In this block, os._exit of this thread raises like sys.exit, so that a step that ends its process is reported."""
    real, this_thread = os._exit, (os.getpid(), threading.get_ident())

    def ended(status):
        # Children of multiprocessing end so, and the watchdog.
        if (os.getpid(), threading.get_ident()) != this_thread:
            real(status)
        raise SystemExit(f"os._exit({status})")

    with mock.patch.object(os, "_exit", ended):
        yield


@contextlib.contextmanager
def watchdog(prog: str, limit_s: float = FIRST_STEP_LIMIT_S):
    """End the process where the block takes longer than a limit: the first step of a build that hangs."""

    def end():
        os.write(2, f"{prog}: {STARTS_NO_STEP}\n".encode())
        os._exit(2)

    timer = threading.Timer(limit_s, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
