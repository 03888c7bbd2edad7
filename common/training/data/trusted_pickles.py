"""Unpickling of files that a user trusts: in a child process of limited memory and time, and nowhere else.

    counts = run("llama2_lora.data.convert_packed_text:write", ["in.npy", "out"], Limits(memory_gib=16, minutes=30))

A pickle is a program, and no list of what it may name makes it safe. So nothing that trains, measures or reads results
unpickles data. A converter does, once, where its user says so.
"""

import importlib
import io
import json
import os
import pickle
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from common.config import Parser, checked
from common.training.data.limits import first_line

FLAG = "--trust-input"
MEANING = (
    "the input is pickled, and a pickle can run any code as you: where you trust who made the file and how it came to "
    f"you, say so by {FLAG}"
)
_ROOT = Path(__file__).resolve().parents[3]
# Whether this process is the child, with its limits set.
_limited = False


class Limits(NamedTuple):
    """The limits of unpickling one file: memory beside the interpreter's own, and wall time."""

    memory_gib: float
    minutes: float


def add_flags(parser: Parser, limits: Limits) -> None:
    """Add --trust-input, --memory-gib and --minutes; `limits` are the defaults."""
    parser.add_argument(FLAG, action="store_true", help="say that the input is trusted: unpickling it can run any code")
    positive = "a number above 0, at most 1,000,000"
    number = checked(float, lambda value: 0 < value <= 1e6, positive)
    told = {"memory-gib": "memory to unpickle one file in", "minutes": "time to unpickle and convert one file in"}
    for (name, text), default in zip(told.items(), limits, strict=True):
        parser.add_argument(f"--{name}", type=number, default=default, metavar="N", help=f"{text} ({default:g})")


def require_trust(args, parser: Parser) -> Limits:
    """The limits of the command line; without --trust-input one line that says what unpickling means, and exit 2."""
    if not args.trust_input:
        parser.error(MEANING)
    return Limits(args.memory_gib, args.minutes)


# ------------------------------------------------------------------------------------------------
# In the parent


def run(function: str, arguments: list, limits: Limits):
    """Call a function in a child process that may unpickle, and wait for it.

    The child's output is thrown away, and whatever it started is killed with it.

    Args:
        function: As "package.module:name".
        arguments: Of the function, plain data.
        limits: Of the child.

    Returns:
        What the function returned, plain data.

    Raises:
        ValueError: In one line: a ValueError of the function's, a file that cannot be unpickled, a limit that was
            reached, or a child that died.
    """
    request = [function, arguments, limits.memory_gib, int(60 * limits.minutes) + 1]
    child = subprocess.Popen(
        [sys.executable, "-c", "from common.training.data import trusted_pickles; trusted_pickles._serve()"],
        cwd=_ROOT,
        # Each thread of numpy's would take memory of its own.
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    with child:
        try:
            said, _ = child.communicate(json.dumps(request).encode(), timeout=60 * limits.minutes)
        except subprocess.TimeoutExpired:
            raise ValueError(f"not converted after {limits.minutes:g} minutes: give a larger --minutes") from None
        finally:
            try:
                os.killpg(child.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass
    try:
        fault, result = json.loads(said)
    except (ValueError, TypeError, RecursionError):
        raise ValueError(f"the process that unpickles died of status {child.returncode}") from None
    if fault is not None:
        raise ValueError(fault)
    return result


# ------------------------------------------------------------------------------------------------
# In the child


def load(file: BinaryIO):
    """Unpickle what begins at the file's place. Only in a child of `run`. ValueError in one line if it is damaged."""
    assert _limited, "only a child of trusted_pickles.run may unpickle"
    try:
        return pickle.load(file)
    except MemoryError:
        raise
    except Exception as error:  # foreign bytes can make it raise anything
        raise ValueError(f"cannot be unpickled: {first_line(error)}") from None


def load_bytes(content: bytes):
    """`load` of bytes."""
    return load(io.BytesIO(content))


def load_npy(file: BinaryIO):
    """The object array of an .npy file. ValueError where it is none, or holds plain numbers."""
    try:
        version = np.lib.format.read_magic(file)
        read_header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        _, _, dtype = read_header[version](file)
    except Exception as error:  # as above
        raise ValueError(f"is damaged, or no .npy: {first_line(error)}") from None
    if not dtype.hasobject:
        raise ValueError("holds no pickled objects")
    return load(file)


def _serve():
    """Answer one request of `run`: read from stdin, answered on stdout, both as JSON."""
    global _limited
    function, arguments, memory_gib, seconds = json.load(sys.stdin)
    with os.fdopen(os.dup(1), "w") as out:
        nowhere = os.open(os.devnull, os.O_RDWR)
        for descriptor in range(3):
            os.dup2(nowhere, descriptor)
        module, name = function.split(":")
        call = getattr(importlib.import_module(module), name)
        _set_limits(int(memory_gib * 2**30), seconds)
        _limited = True
        fault, result = None, None
        try:
            result = call(*arguments)
        except MemoryError:
            fault = f"takes more than {memory_gib:g} GiB to unpickle: give a larger --memory-gib"
        except ValueError as error:
            fault = first_line(error)
        except OSError as error:
            fault = f"{error.filename or 'the output'}: {error.strerror}"
        except BaseException as error:
            fault = f"cannot be converted: {type(error).__name__}: {first_line(error)}"
        json.dump([fault, result], out)


def _set_limits(memory_bytes, seconds):
    # What is there already does not count: the interpreter and numpy.
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limits = {
        resource.RLIMIT_AS: pages * resource.getpagesize() + memory_bytes,
        resource.RLIMIT_CPU: seconds,  # in case that nobody is left to kill it
        resource.RLIMIT_CORE: 0,
    }
    for kind, value in limits.items():
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))
