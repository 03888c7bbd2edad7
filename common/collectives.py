"""Collectives as operators that can be recorded: eagerly, in a CUDA capture (NCCL) and in a host graph (gloo).

torch.ops.graphs.all_reduce_mean_, reduce_scatter_mean_, all_gather_, broadcast_, send and recv_ take the buffers they
work on and have finished with them when they return: the host has waited on gloo, the current stream has been told to
wait on NCCL. torch's own functional collectives return before that and leave a wait behind, which a recorder of
operators cannot place.

A group is named by text (`ProcessGroup.group_name`), "" is all ranks; ranks count within the group. Without a process
group in a run of one process all but send and recv_ do nothing, but remain operators.

    rank, local_rank, world_size = init("cuda")
    buckets = GradientBuckets(model.parameters(), bucket_bytes=64 << 20)
    loss.backward(); buckets.all_reduce_mean(); optimizer.step(); buckets.zero_()
    shutdown()
"""

import datetime
import importlib
import os

import torch
import torch.distributed as dist

# ------------------------------------------------------------------------------------------------
# Operators

_library = torch.library.Library("graphs", "DEF")


def _operator(schema):
    """Decorator: define `schema` in the namespace with the function as its kernel on CPU and CUDA."""

    def register(kernel):
        _library.define(schema)
        name = schema.partition("(")[0]
        for key in ("CPU", "CUDA"):
            _library.impl(name, kernel, key)
        # Shape inference (torch.compile, FakeTensor): nothing is returned and no shape changes.
        _library.impl(name, lambda *arguments: None, "Meta")
        return kernel

    return register


@_operator("all_reduce_mean_(Tensor(a!)[] tensors, str group) -> ()")
def _all_reduce_mean(tensors, group):
    process_group = _resolve(group)
    if process_group is None:
        return
    # NCCL averages while it reduces; gloo can only sum.
    averages = dist.get_backend(process_group) == "nccl"
    for tensor in tensors:
        dist.all_reduce(tensor, dist.ReduceOp.AVG if averages else dist.ReduceOp.SUM, group=process_group)
        if not averages:
            tensor.div_(process_group.size())


@_operator("reduce_scatter_mean_(Tensor(a!) flat, str group) -> ()")
def _reduce_scatter_mean(flat, group):
    process_group = _resolve(group)
    if process_group is None:
        return
    own = _part(flat, process_group)
    if dist.get_backend(process_group) == "nccl":
        dist.reduce_scatter_tensor(own, flat, dist.ReduceOp.AVG, group=process_group)
        return
    # gloo can only sum, and not into a part of its input.
    result = torch.empty_like(own)
    dist.reduce_scatter_tensor(result, flat, dist.ReduceOp.SUM, group=process_group)
    torch.div(result, process_group.size(), out=own)


@_operator("all_gather_(Tensor(a!) flat, str group) -> ()")
def _all_gather(flat, group):
    process_group = _resolve(group)
    if process_group is None:
        return
    own = _part(flat, process_group)
    in_place = dist.get_backend(process_group) == "nccl"
    dist.all_gather_into_tensor(flat, own if in_place else own.clone(), group=process_group)


def _part(flat, process_group):
    """The part of a flat tensor that belongs to this rank."""
    rank, size = process_group.rank(), process_group.size()
    if flat.dim() != 1 or flat.numel() % size:
        raise ValueError(f"a tensor of shape {tuple(flat.shape)} has no equal parts for {size} ranks: pad it")
    length = flat.numel() // size
    return flat[rank * length : (rank + 1) * length]


@_operator("broadcast_(Tensor(a!)[] tensors, int source, str group) -> ()")
def _broadcast(tensors, source, group):
    process_group = _resolve(group)
    if process_group is None:
        return
    for tensor in tensors:
        dist.broadcast(tensor, group=process_group, group_src=source)


@_operator("send(Tensor tensor, int destination, str group) -> ()")
def _send(tensor, destination, group):
    dist.send(tensor, group=_resolve(group, required=True), group_dst=destination)


@_operator("recv_(Tensor(a!) tensor, int source, str group) -> ()")
def _recv(tensor, source, group):
    dist.recv(tensor, group=_resolve(group, required=True), group_src=source)


def _resolve(group, required=False):
    """The process group of that name; None where a single process needs none."""
    if not dist.is_initialized():
        if required or group or int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ValueError("no process group: call collectives.init(device) first, under torchrun --nproc-per-node N")
        return None
    if not group:
        return dist.group.WORLD
    try:
        return dist.distributed_c10d._resolve_process_group(group)
    except RuntimeError:
        raise ValueError(
            f"no process group named {group!r}: pass the group_name of a group made by new_group"
        ) from None


def all_reduce_mean_(tensors, group="") -> None:
    """Replace each tensor by its mean over the ranks of `group`. tensors: a list, or one (a flat bucket)."""
    torch.ops.graphs.all_reduce_mean_([tensors] if isinstance(tensors, torch.Tensor) else list(tensors), group)


def reduce_scatter_mean_(flat, group="") -> None:
    """Replace this rank's part of `flat` by its mean over the ranks of `group`; the other parts are undefined then.

    flat: contiguous [n], n a multiple of the number of ranks; part r, of n / ranks elements, belongs to rank r.
    """
    torch.ops.graphs.reduce_scatter_mean_(flat, group)


def all_gather_(flat, group="") -> None:
    """Replace each part of `flat` by that of the rank it belongs to; parts as for reduce_scatter_mean_."""
    torch.ops.graphs.all_gather_(flat, group)


def broadcast_(tensors, source=0, group="") -> None:
    """Replace each tensor by the one of rank `source` of `group`. tensors: a list, or one."""
    torch.ops.graphs.broadcast_([tensors] if isinstance(tensors, torch.Tensor) else list(tensors), source, group)


def send(tensor, destination, group="") -> None:
    """Send a contiguous tensor to rank `destination` of `group`.

    On gloo it blocks until the other side receives: two ranks that both send first wait for each other for ever.
    """
    torch.ops.graphs.send(tensor, destination, group)


def recv_(tensor, source, group="") -> None:
    """Fill a contiguous tensor with what rank `source` of `group` sends; shape and dtype must be the sender's."""
    torch.ops.graphs.recv_(tensor, source, group)


# ------------------------------------------------------------------------------------------------
# Gradient buckets

# What the CUDA caching allocator gives a tensor of its own, so that kernels choose the same vector width in a bucket.
_ALIGNMENT_BYTES = 512


class GradientBuckets:
    """Gradients laid out in a few contiguous buffers, reduced without a copy.

    tensors: parameters (leaves that require a gradient), whose `.grad` becomes a view of a bucket; or gradient tensors
    themselves, such as an fp32 main_grad, whose storage is moved into a bucket. Values are kept, a missing `.grad`
    becomes zero. A bucket holds tensors of one dtype and device in the given order, at most `bucket_bytes` or one
    tensor; `flats` lists them in the order of reduction, padding between gradients stays zero. group: as for the
    operators.
    """

    def __init__(self, tensors, bucket_bytes, group=""):
        self.tensors = list(tensors)
        if bucket_bytes < 1:
            raise ValueError(f"bucket_bytes is {bucket_bytes}, it must be at least 1")
        if not self.tensors:
            raise ValueError("no tensors to put into buckets: no parameter requires a gradient")
        self.group = group
        self.flats = []
        self._views = {}
        kinds = {}
        for index, tensor in enumerate(self.tensors):
            gradient = tensor if tensor.grad is None or not tensor.requires_grad else tensor.grad
            kinds.setdefault((gradient.dtype, gradient.device), []).append(index)
        for (dtype, device), indices in kinds.items():
            self._fill(indices, bucket_bytes, dtype, device)

    def _fill(self, indices, bucket_bytes, dtype, device):
        unit = _ALIGNMENT_BYTES // dtype.itemsize
        while indices:
            spans, num_elements = [], 0
            for index in indices:
                padded = -(-self.tensors[index].numel() // unit) * unit
                if spans and (num_elements + padded) * dtype.itemsize > bucket_bytes:
                    break
                spans.append((index, num_elements))
                num_elements += padded
            flat = torch.zeros(num_elements, dtype=dtype, device=device)
            self.flats.append(flat)
            for index, start in spans:
                self._move(index, flat[start : start + self.tensors[index].numel()])
            indices = indices[len(spans) :]

    def _move(self, index, view):
        tensor = self.tensors[index]
        # Strides are kept (channels_last): copies between lists of tensors are one kernel only where they agree.
        view = view.as_strided(tensor.shape, tensor.stride()) if _is_dense(tensor) else view.view(tensor.shape)
        if tensor.requires_grad:
            if tensor.grad is not None:
                view.copy_(tensor.grad)
            tensor.grad = view
        else:
            view.copy_(tensor)
            # The tensor object stays, so whoever holds it (param.main_grad) writes into the bucket from now on.
            tensor.data = view
        self._views[index] = view

    def all_reduce_mean(self) -> None:
        """Average all buckets over the group, in the order of `flats`.

        Raises ValueError when a parameter's gradient was replaced and would be left out.
        """
        # By identity, which costs the host less than comparing addresses: this runs in every eager step.
        for index, tensor in enumerate(self.tensors):
            if tensor.requires_grad and tensor.grad is not self._views[index]:
                raise ValueError(
                    f"gradient {index} was replaced and is not in its bucket any more: clear gradients with "
                    "GradientBuckets.zero_(), not with optimizer.zero_grad(set_to_none=True)"
                )
        all_reduce_mean_(self.flats, self.group)

    def zero_(self) -> None:
        """Clear all gradients in place."""
        for flat in self.flats:
            flat.zero_()


def _is_dense(tensor):
    """Whether the elements fill their memory without gaps or overlap, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


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
    return rank, local_rank, world_size


def shutdown() -> None:
    """End the process group, if there is one. Release graphs that hold its collectives before."""
    if dist.is_initialized():
        dist.destroy_process_group()
