"""Busy processes beside a measurement."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

from graph_worth.harness.processes.supervisor import set_parent_death_signal


@contextlib.contextmanager
def busy_processes(number: int) -> Iterator[None]:
    """Keep `number` processes busy for as long as the block lasts. They end when the calling thread ends, too."""
    command, parent = [sys.executable, "-I", "-S", "-c", "while True: pass"], os.getpid()

    def end_with_parent():
        set_parent_death_signal(signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    with contextlib.ExitStack() as stack:
        for _ in range(number):
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=end_with_parent
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
        yield
