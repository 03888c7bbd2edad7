"""CUDA's error log: the calls that failed in a capture, each with its thread (drivers of CUDA 12.9 and newer).

The driver keeps its last 100 messages, whether CUDA_LOG_FILE is set or not. `cuLogsCurrent` gives the end of the log,
`cuLogsDumpToMemory` what has followed since (CUDA programming guide, "Error Log Management").
"""

import ctypes
import re
import threading

# A dump has no more.
_MOST_BYTES = 25600
MOST_LINES = 4
# [time][thread][source][severity][call] message; drivers from 13.4 on name the call in a message of its own.
_LINE = re.compile(r"\[[^]]*\]\[(\d+)\]\[[^]]*\]\[\w\](?:\[(\w+)\])?\s*(.*)")
_RETURNS = re.compile(r"Returning \d+ \((\w+)\) from (\w+)")


def _driver():
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def end() -> int | None:
    """Return where the log ends now; None without a driver that keeps one."""
    driver, place = _driver(), ctypes.c_uint()
    call = getattr(driver, "cuLogsCurrent", None)
    return place.value if call is not None and call(ctypes.byref(place), 0) == 0 else None


def since(place: int | None) -> list[str]:
    """Return what the log has had since an `end`, one text for each failed call; none where that was None."""
    if place is None:
        return []
    buffer, size = ctypes.create_string_buffer(_MOST_BYTES), ctypes.c_size_t(_MOST_BYTES)
    status = _driver().cuLogsDumpToMemory(ctypes.byref(ctypes.c_uint(place)), buffer, ctypes.byref(size), 0)
    return told(buffer.value.decode(errors="replace")) if status == 0 else []


def told(log: str) -> list[str]:
    """Return the first lines of a log, each as CALL in THREAD: MESSAGE."""
    main = threading.main_thread()
    # Some drivers write the system's number of a thread, others pthread's.
    names = {key: thread.name for thread in threading.enumerate() for key in (thread.native_id, thread.ident)}
    names |= dict.fromkeys((main.native_id, main.ident), "the main thread")
    lines = []
    for number, call, message in _LINE.findall(log):
        returned = _RETURNS.search(message)
        if returned:
            message, call = returned.groups()
        name = names.get(int(number), f"thread {number}, which is none of Python's")
        lines.append(f"{call} in {name}: {message}" if call else f"{name}: {message}")
    return list(dict.fromkeys(lines))[:MOST_LINES]
