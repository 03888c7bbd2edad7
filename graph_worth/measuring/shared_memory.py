"""Eager steps in the memory of graphs, where a GPU cannot hold both: they never run at the same time.

torch.cuda.use_mem_pool takes the allocations of the calling thread alone, and autograd runs a backward on a thread of
its own. So this process runs it on the calling thread, in captures too: what a thread uses for the first time, as a
handle of cuBLAS, must not come to exist in a capture.
"""

import contextlib
import sys
from typing import Any

import torch

from graph_worth import made_variant as variants


def share() -> torch.cuda.MemPool:
    """Let all graphs and eager steps from now on have one pool, which is returned and must be kept."""
    torch._C._set_multithreading_enabled(False)
    pool = torch.cuda.MemPool()
    torch.cuda.graph_pool_handle = lambda: pool.id  # type: ignore[assignment,return-value]
    # Transformer Engine asks below torch's public name, which it may have imported already.
    torch._C._graph_pool_handle = lambda: pool.id
    if "transformer_engine.pytorch.graph" in sys.modules:
        te_graph: Any = sys.modules["transformer_engine.pytorch.graph"]
        te_graph._graph_pool_handle = lambda: pool.id
    variants.eager_memory = once_at_a_time(lambda: torch.cuda.use_mem_pool(pool))
    return pool


def once_at_a_time(make):
    """Return a maker of contexts of which one inside another does nothing: torch refuses a pool that is in use."""
    is_in_use = False

    @contextlib.contextmanager
    def context():
        nonlocal is_in_use
        if is_in_use:
            yield
            return
        is_in_use = True
        try:
            with make():
                yield
        finally:
            is_in_use = False

    return context
