"""Processes that tests start: find them, wait for a condition, and a launcher of two nodes on this machine."""

import os
import time

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


def processes_with(mark):
    """Return ids of processes, without zombies, whose command line holds `mark`."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            try:
                with open(f"/proc/{entry}/cmdline", "rb") as file:
                    if mark.encode() in file.read():
                        found.append(int(entry))
            except OSError:
                continue
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
