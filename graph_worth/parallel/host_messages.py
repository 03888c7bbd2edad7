"""Messages between ranks from host to host: Python values over gloo, beside the collectives of a step.

With NCCL these would be work for the GPUs, and a rank that asks how long to go on would wait for its own queue.
"""

import torch.distributed as dist

# The gloo group of all ranks, where the default one is NCCL's; made by `start`, after the process group.
_group = None


def start() -> None:
    """Make the group; every rank calls it once, after dist.init_process_group."""
    global _group
    _group = dist.new_group(backend="gloo") if dist.get_backend() != "gloo" else None


def stop() -> None:
    """Forget the group, which ends with the process group."""
    global _group
    _group = None


def is_distributed() -> bool:
    """Say whether this process is in a process group with others. A library may have made one of a single rank."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def barrier() -> None:
    """Wait until every rank's host is here, but not until its GPU has finished."""
    if is_distributed():
        dist.barrier(group=_group)


def of_first_rank(value):
    """Rank 0's value on every rank: clocks differ, and ranks that take different numbers of steps wait for ever."""
    if not is_distributed():
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0, group=_group)
    return values[0]


def of_all_ranks(value) -> list:
    """Every rank's value, by rank."""
    if not is_distributed():
        return [value]
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, value, group=_group)
    return every
