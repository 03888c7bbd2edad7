"""Python's garbage collection, without what a script has imported.

That is some 300,000 objects: to look through them takes half a second while they are imported, and 0.2 s at each of
the places where a run asks for a collection. None of them is ever garbage. Nor is what a variant was made of, such as
the code that a compiler left, before it is closed.
"""

import contextlib
import gc


def hold() -> None:
    """No collection while a script imports; `of_run` goes on with it."""
    gc.disable()


@contextlib.contextmanager
def of_run():
    """Collection of what is made in this block and after the last `keep`."""
    gc.freeze()
    gc.enable()
    try:
        yield
    finally:
        gc.unfreeze()


def keep() -> None:
    """Collect now, and exempt all objects in use from later collections until the end of the run."""
    gc.collect()
    gc.freeze()
