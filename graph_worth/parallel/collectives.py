"""Collectives as operators that can be recorded: eagerly, in a CUDA capture (NCCL) and in a host graph (gloo).

The operators below torch.ops.graphs have finished with their buffers when they return: the host has waited on gloo, the
current stream has been told to wait on NCCL. torch's own functional collectives return before that and leave a wait
behind, which a recorder of operators cannot place.

A group is named by text (`ProcessGroup.group_name`); "" is all ranks, ALONE this rank by itself. Ranks count within the
group. In a group of one rank, and in a run of one process, reductions leave their tensors as they are and the others
copy, but remain operators.

    rank, local_rank, world_size = init("cuda")
    loss.backward(); all_reduce_mean_(gradients); optimizer.step()
    shutdown()

Beside it, buckets.py has gradients in flat buffers, and differentiable_collectives.py what a model differentiates
through.
"""

import datetime
import functools
import importlib
import os

import torch
import torch.distributed as dist

from graph_worth.parallel import host_messages

# The name of the group that this rank alone makes up.
ALONE = "alone"

# ------------------------------------------------------------------------------------------------
# Operators

_library = torch.library.Library("graphs", "DEF")


def _operator(schema):
    """Decorator: the function becomes the kernel of an operator of this schema, on CPU and CUDA, and its call.

    Where the schema takes a list of tensors, the call takes one tensor, too.
    """

    def register(kernel):
        _library.define(schema)
        name = schema.partition("(")[0]
        for key in ("CPU", "CUDA"):
            _library.impl(name, kernel, key)
        # Shape inference (torch.compile, FakeTensor): nothing is returned and no shape changes.
        _library.impl(name, lambda *arguments: None, "Meta")
        operator, takes_list = getattr(torch.ops.graphs, name), "[] tensors" in schema

        @functools.wraps(kernel)
        def call(first, *others, **named):
            return operator([first] if takes_list and isinstance(first, torch.Tensor) else first, *others, **named)

        return call

    return register


@_operator("all_reduce_mean_(Tensor(a!)[] tensors, str group='') -> ()")
def all_reduce_mean_(tensors, group="") -> None:
    """Replace each tensor by its mean over the ranks of `group`. tensors: a list, or one (a flat bucket)."""
    process_group = _resolve(group)
    if process_group is None:
        return
    averages = _averages(process_group)
    for tensor in tensors:
        dist.all_reduce(tensor, dist.ReduceOp.AVG if averages else dist.ReduceOp.SUM, group=process_group)
        if not averages:
            tensor.div_(process_group.size())


@_operator("all_reduce_sum_(Tensor(a!)[] tensors, str group='') -> ()")
def all_reduce_sum_(tensors, group="") -> None:
    """Replace each tensor by its sum over the ranks of `group`. tensors: a list, or one."""
    _all_reduce(tensors, dist.ReduceOp.SUM, group)


@_operator("all_reduce_max_(Tensor(a!)[] tensors, str group='') -> ()")
def all_reduce_max_(tensors, group="") -> None:
    """Replace each element of each tensor by its maximum over the ranks of `group`. tensors: a list, or one."""
    _all_reduce(tensors, dist.ReduceOp.MAX, group)


def _all_reduce(tensors, operation, group):
    process_group = _resolve(group)
    if process_group is not None:
        for tensor in tensors:
            dist.all_reduce(tensor, operation, group=process_group)


@_operator("reduce_scatter_mean_(Tensor(a!) flat, str group='') -> ()")
def reduce_scatter_mean_(flat, group="") -> None:
    """Replace this rank's part of `flat` by its mean over the ranks of `group`; the other parts are undefined then.

    flat: contiguous [n], n a multiple of the number of ranks; part r, of n / ranks elements, belongs to rank r.
    """
    process_group = _resolve(group)
    if process_group is None:
        return
    part = _part(flat, process_group)
    if _averages(process_group):
        dist.reduce_scatter_tensor(part, flat, dist.ReduceOp.AVG, group=process_group)
        return
    # gloo cannot reduce into a part of its input.
    result = torch.empty_like(part)
    dist.reduce_scatter_tensor(result, flat, dist.ReduceOp.SUM, group=process_group)
    torch.div(result, process_group.size(), out=part)


@_operator("reduce_scatter_sum_(Tensor(a!) part, Tensor whole, str group='') -> ()")
def reduce_scatter_sum_(part, whole, group="") -> None:
    """Fill `part` with this rank's part of the sum of `whole` over the ranks of `group`.

    whole: contiguous [n, ...]; part: contiguous [n / ranks, ...], rank r's rows from r n / ranks on.
    """
    _fill(part, whole, group, dist.reduce_scatter_tensor)


@_operator("all_gather_(Tensor(a!) flat, str group='') -> ()")
def all_gather_(flat, group="") -> None:
    """Replace each part of `flat` by that of the rank it belongs to; parts as for reduce_scatter_mean_."""
    process_group = _resolve(group)
    if process_group is None:
        return
    part = _part(flat, process_group)
    in_place = dist.get_backend(process_group) == "nccl"
    dist.all_gather_into_tensor(flat, part if in_place else part.clone(), group=process_group)


@_operator("all_gather_into_(Tensor(a!) whole, Tensor part, str group='') -> ()")
def all_gather_into_(whole, part, group="") -> None:
    """Fill `whole` [n, ...] with the `part` [n / ranks, ...] of all ranks, in their order; both are contiguous."""
    _fill(whole, part, group, dist.all_gather_into_tensor)


def _fill(target, source, group, collective):
    process_group = _resolve(group)
    if process_group is None:
        target.copy_(source)
    else:
        collective(target, source, group=process_group)


@_operator(
    "all_to_all_(Tensor(a!) received, Tensor sent, int[] received_rows=[], int[] sent_rows=[], str group='') -> ()"
)
def all_to_all_(received, sent, received_rows=(), sent_rows=(), group="") -> None:
    """Send each rank of `group` its rows of `sent`, and fill `received` with those that the ranks send to this one.

    Rows lie in the order of the ranks; both tensors are contiguous. sent_rows[i]: rows for rank i, received_rows[i]:
    rows from it, as the host knows them. Empty: all ranks send each other as many rows, which a graph can hold.
    """
    process_group = _resolve(group)
    if process_group is None:
        received.copy_(sent)
        return
    sizes = (list(received_rows) or None, list(sent_rows) or None)
    dist.all_to_all_single(received, sent, sizes[0], sizes[1], group=process_group)


@_operator("exchange_(Tensor[] sent, int[] destinations, Tensor(a!)[] received, int[] sources, str group) -> ()")
def _exchange(sent, destinations, received, sources, group):
    process_group = _resolve(group)
    if process_group is None:
        raise ValueError("exchange_ has no other rank to send to in a group of one")
    operations = [
        dist.P2POp(operation, tensor, group=process_group, group_peer=peer)
        for operation, tensors, peers in ((dist.isend, sent, destinations), (dist.irecv, received, sources))
        for tensor, peer in zip(tensors, peers, strict=True)
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def exchange_(sent=(), destinations=(), received=(), sources=(), group="") -> None:
    """Send contiguous tensors and fill others with what is received, all at once; nothing to do is no operator.

    sent[i] goes to rank destinations[i] of `group`, received[i] comes from rank sources[i] and must have the sender's
    shape and dtype. All are posted before one is waited for, so ranks that send to each other do not wait for ever.
    Tensors from one rank to another arrive in the order of their sending, over all calls.
    """
    if len(sent) or len(received):
        _exchange(list(sent), list(destinations), list(received), list(sources), group)


def _averages(process_group):
    """Return whether the backend averages while it reduces: NCCL does, gloo can only sum."""
    return dist.get_backend(process_group) == "nccl"


def _part(flat, process_group):
    """The part of a flat tensor that belongs to this rank."""
    rank, size = process_group.rank(), process_group.size()
    if flat.dim() != 1 or flat.numel() % size:
        raise ValueError(f"a tensor of shape {tuple(flat.shape)} has no equal parts for {size} ranks: pad it")
    length = flat.numel() // size
    return flat[rank * length : (rank + 1) * length]


def _resolve(group):
    """The process group of that name; None where it has one rank and there is nothing to communicate."""
    if group == ALONE:
        return None
    if not dist.is_initialized():
        if group or int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ValueError("no process group: call collectives.init(device) first, under torchrun --nproc-per-node N")
        return None
    process_group = dist.distributed_c10d._resolve_process_group(group) if group else dist.group.WORLD
    assert process_group is not None, "torch.distributed is initialised"
    return process_group if process_group.size() > 1 else None


def process_group(group=""):
    """The torch ProcessGroup of that name, for libraries that communicate themselves; None where it has one rank."""
    return _resolve(group)


def group_size(group="") -> int:
    """Return the number of ranks in `group`."""
    process_group = _resolve(group)
    return 1 if process_group is None else process_group.size()


def group_rank(group="") -> int:
    """This process's rank in `group`."""
    process_group = _resolve(group)
    return 0 if process_group is None else process_group.rank()


# ------------------------------------------------------------------------------------------------
# Process group


def init(device, timeout_s=300) -> tuple[int, int, int]:
    """(rank, local_rank, world_size) from torchrun's variables; starts the process group when there are several ranks.

    device: "cpu" (gloo) or "cuda" (NCCL; GPU local_rank becomes the current one). Without torchrun: (0, 0, 1) and no
    group. timeout_s: how long the start, and each gloo collective, waits for the other ranks. Raises ValueError for
    half a set of variables and for more processes than GPUs.
    """
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if name not in os.environ]
    if "WORLD_SIZE" not in os.environ and "RANK" not in os.environ:
        rank, local_rank, world_size = 0, 0, 1
    elif missing:
        raise ValueError(f"{', '.join(missing)} not set: start several ranks with torchrun --nproc-per-node N")
    else:
        rank, local_rank, world_size = (int(os.environ[name]) for name in names[:3])
    on_cuda = str(device).startswith("cuda")
    if on_cuda:
        if local_rank >= torch.cuda.device_count():
            raise ValueError(
                f"local rank {local_rank} has no GPU of its own, this host shows {torch.cuda.device_count()}: "
                "lower --nproc-per-node"
            )
        torch.cuda.set_device(local_rank)
    if world_size > 1:
        # Its functions take the default group as a default argument, bound when the module is imported. Imported later
        # (torch._dynamo does, an optimizer imports that), it would hold the group beyond shutdown, and a worker
        # thread of gloo that outlives the interpreter aborts the process (pytorch issue 190489).
        importlib.import_module("torch.distributed.nn.functional")
        dist.init_process_group(
            "nccl" if on_cuda else "gloo",
            timeout=datetime.timedelta(seconds=timeout_s),
            # Given a device, NCCL connects now and not inside the first timed step or capture.
            device_id=torch.device("cuda", local_rank) if on_cuda else None,
        )
        host_messages.start()
    return rank, local_rank, world_size


def shutdown() -> None:
    """End the process group, if there is one. Release graphs that hold its collectives before."""
    if dist.is_initialized():
        host_messages.stop()
        dist.destroy_process_group()
