"""Processes that tests start: find them, wait for a condition, and a launcher of two nodes on this machine."""

import contextlib
import os
import socket
import time
from pathlib import Path

# Starts the command twice on this machine, as two nodes, as graph_worth/harness/processes/launch.py asks of a launcher.
TWO_NODES = """#!/bin/bash
trap 'kill -TERM "${pids[@]}"' TERM
pids=()
for rank in ${RANKS:-0 1}; do
    PET_NODE_RANK=$rank "$@" &
    pids+=($!)
done
status=0
for pid in "${pids[@]}"; do
    # One that fails ends the others.
    if ! wait -n; then
        status=1
        kill -TERM "${pids[@]}" 2>/dev/null
    fi
done
wait
exit $status
"""


def processes_with(mark) -> dict[int, list[str]]:
    """Process id -> command of each other process, without zombies, whose command line holds `mark`."""
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            with contextlib.suppress(OSError):
                text = Path(f"/proc/{entry}/cmdline").read_text(errors="replace")
                if mark in text:
                    found[int(entry)] = text.split("\0")
    return found


def is_running(pid):
    """Return whether the process is there and no zombie."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(condition, limit_s=240.0):
    """Wait until condition() is true, for limit_s at most; return its last value."""
    deadline = time.monotonic() + limit_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def program(path, text):
    """Write an executable file; return its path as text."""
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


def free_ports(count: int) -> list[int]:
    """TCP ports of the loopback that were free a moment ago, all different."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
