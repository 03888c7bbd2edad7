"""The library whose loop makes the steps of an optimizer, as the watch sees it."""

import contextlib
import sys

from torch.optim.optimizer import register_optimizer_step_post_hook

from graph_worth.your_step.script_watch import loop_of


@contextlib.contextmanager
def seen_loops():
    """Yield the set of names of `loop_of`, filled within it at each step of an optimizer."""
    loops = set()
    handle = register_optimizer_step_post_hook(lambda *_: loops.add(loop_of(sys._getframe())))
    try:
        yield loops
    finally:
        handle.remove()
