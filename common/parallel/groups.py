"""A model split over several ranks: sizes, places, groups, and initial values that do not depend on the split.

Five words for five numbers: a *world rank* counts all processes; *data rank*, *stage*, *context rank* and *tensor rank*
count within data parallelism (dp), pipeline (pp), context parallelism (cp) and tensor parallelism (tp). World ranks are
Megatron's: the tensor rank counts fastest, then context rank, data rank and stage.

    world rank = ((stage dp + data rank) cp + context rank) tp + tensor rank

    class Config(Parallel, Timing): ...                    --tp, --pp, --cp
    ranks = config.ranks(world_size)                       ValueError before there is a process group
    place, groups = ranks.place(world_rank), make_groups(ranks, device.type)
    all_reduce_sum_(gradients, groups.data)

torch is imported by what needs it: --describe does not.
"""

import hashlib
import math
from dataclasses import dataclass, fields

from graph_worth.config import option, require_fields

# Elements that fill_ draws at a time.
_BLOCK_ELEMENTS = 1 << 22


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """Options of a Config: how many ranks hold a copy of the model together. Several copies are data parallel (dp)."""

    tp: int = option(1, "ranks that share each layer (tensor parallelism, with sequence parallelism)")
    pp: int = option(1, "stages that the layers are split into (pipeline parallelism)")
    cp: int = option(1, "ranks that share each sequence (context parallelism)")

    @property
    def by_itself(self) -> str:
        """Return the flag for which a run has one rank alone, as "--layer megatron runs", or ""."""
        return ""

    def ranks(self, world_size: int) -> "Ranks":
        """Sizes for a run of `world_size` processes. ValueError where it is no multiple of tp x pp x cp."""
        if self.by_itself:
            if world_size != 1:
                raise ValueError(f"{self.by_itself} by itself, this run has {world_size} ranks")
            return Ranks(1)
        require_fields(self, ("tp", "pp", "cp"), lambda size: size >= 1, "a number from 1 up")
        ranks_per_copy = self.tp * self.pp * self.cp
        if world_size % ranks_per_copy:
            given = [f"--{name} {getattr(self, name)}" for name in ("tp", "pp", "cp") if getattr(self, name) > 1]
            raise ValueError(
                f"{' '.join(given)} need{'s' * (len(given) == 1)} a multiple of {ranks_per_copy} ranks, this run has "
                f"{world_size}: change that or torchrun --nproc-per-node"
            )
        return Ranks(world_size // ranks_per_copy, self.tp, self.pp, self.cp)

    def require_ranks(self, world_size: int) -> None:
        """ValueError where a run of `world_size` processes does not hold whole copies of the model."""
        self.ranks(world_size)

    def world_sizes(self) -> dict[str, int]:
        """Return the numbers of ranks that a run takes: multiple_of and at_most of `graph_worth.config.needs`."""
        return {"at_most": 1} if self.by_itself else {"multiple_of": self.tp * self.pp * self.cp}


def require_divisible(flag: str, size: int, by: str, count: int) -> int:
    """Return size / count, or raise a ValueError that names the flags where that is no integer.

    In require_divisible("--heads", 96, "--tp", 5) the size is of --heads and the count of --tp.
    """
    if size % count:
        raise ValueError(f"{flag} {size} is not divisible by {by} {count}")
    return size // count


def require_schedule(pp: int, stage: int, chunks: int, microbatches: int) -> None:
    """ValueError, which names the flag, where a pipeline has no schedule (common/schedule.py)."""
    for flag, value in (("--pp", pp), ("--chunks", chunks), ("--microbatches", microbatches)):
        if value < 1:
            raise ValueError(f"{flag} {value}: takes a number from 1 up")
    if not 0 <= stage < pp:
        raise ValueError(f"--pp-rank {stage}: takes a stage from 0 to {pp - 1} with --pp {pp}")
    if pp > 1 and chunks > 1 and microbatches % pp:
        raise ValueError(
            f"--microbatches {microbatches} is no multiple of --pp {pp}, which an interleaved schedule (--chunks "
            f"{chunks}) needs"
        )


@dataclass(frozen=True)
class Place:
    """The place of one process in the decomposition."""

    world_rank: int
    data_rank: int
    stage: int
    context_rank: int
    tensor_rank: int


@dataclass(frozen=True)
class Ranks:
    """Sizes of a decomposition."""

    dp: int
    tp: int = 1
    pp: int = 1
    cp: int = 1

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.dp * self.tp * self.pp * self.cp

    def place(self, world_rank: int) -> Place:
        """Return the place of the process of this world rank."""
        rest, tensor_rank = divmod(world_rank, self.tp)
        rest, context_rank = divmod(rest, self.cp)
        stage, data_rank = divmod(rest, self.dp)
        return Place(world_rank, data_rank, stage, context_rank, tensor_rank)

    def members(self, *dimensions: str) -> list[list[int]]:
        """World ranks of every group that varies in `dimensions` ("dp", "tp", "pp", "cp") alone, each in rising order.

        members("tp") are the tensor-parallel groups, members("dp", "cp") the groups that average gradients.
        """
        groups: dict[tuple[int, ...], list[int]] = {}
        for world_rank in range(self.world_size):
            place = self.place(world_rank)
            fixed = {"dp": place.data_rank, "tp": place.tensor_rank, "pp": place.stage, "cp": place.context_rank}
            groups.setdefault(tuple(fixed[name] for name in fixed if name not in dimensions), []).append(world_rank)
        return list(groups.values())

    def layers(self, count: int, stage: int, chunks: int = 1) -> list[range]:
        """Global numbers of the layers in each chunk of a stage: chunk c of stage s is part (c - 1) pp + s of them all.

        ValueError where `count` layers cannot be split evenly.
        """
        size = require_divisible("--layers", count, "--pp x --chunks", self.pp * chunks)
        starts = ((chunk * self.pp + stage) * size for chunk in range(chunks))
        return [range(start, start + size) for start in starts]


@dataclass(frozen=True)
class Groups:
    """Names of this process's groups, for collectives.py. A group that has one rank is collectives.ALONE.

    tensor, context, data, pipeline: those that vary in one of the four. replicas (dp x cp): who holds the same shard of
    the parameters; gradients are averaged over them. shards (tp x pp): who holds the shards of one replica; gradients'
    norms and overflow are reduced over them. ends: the first and the last stage of this process's pipeline, who share a
    tied embedding; ALONE on the stages between.
    """

    tensor: str
    context: str
    data: str
    pipeline: str
    replicas: str
    shards: str
    ends: str


def make_groups(ranks: Ranks, device_type: str) -> Groups:
    """Make the groups; every process of the run calls it, after collectives.init. device_type: "cpu" or "cuda".

    Those that vary in one dimension are torch's DeviceMesh's. Each group exists once, whatever its names.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from graph_worth.parallel import collectives

    if collectives.group_size() != ranks.world_size:
        raise ValueError(f"{ranks} are {ranks.world_size} ranks, this run has {collectives.group_size()}")
    sizes = {"pp": ranks.pp, "dp": ranks.dp, "cp": ranks.cp, "tp": ranks.tp}
    split = {name: size for name, size in sizes.items() if size > 1}
    if not split:
        return Groups(*[collectives.ALONE] * len(fields(Groups)))
    mesh = init_device_mesh(device_type, tuple(split.values()), mesh_dim_names=tuple(split))
    names: dict[frozenset[str], str] = {frozenset({name}): mesh.get_group(name).group_name for name in split}
    names |= {frozenset(): collectives.ALONE, frozenset(split): ""}

    def over(*dimensions):
        varied = frozenset(dimensions) & frozenset(split)
        if varied not in names:
            names[varied] = dist.new_subgroups_by_enumeration(ranks.members(*varied))[0].group_name
        return names[varied]

    if ranks.pp > 2:
        place = ranks.place(dist.get_rank())
        pairs = [[pipeline[0], pipeline[-1]] for pipeline in ranks.members("pp")]
        group = dist.new_subgroups_by_enumeration(pairs)[0]
        ends = group.group_name if place.stage in (0, ranks.pp - 1) else collectives.ALONE
    else:
        ends = over("pp")
    return Groups(
        tensor=over("tp"),
        context=over("cp"),
        data=over("dp"),
        pipeline=over("pp"),
        replicas=over("dp", "cp"),
        shards=over("tp", "pp"),
        ends=ends,
    )


def fill_(tensor, name: str, seed: int, full_shape, shard_slices, std: float) -> None:
    """Fill this rank's shard of a parameter with its part of normal numbers that depend on name, seed and full_shape.

    name: the parameter's name in the whole model, with the layer's global number. full_shape: its shape there.
    shard_slices: for each dimension the slice of it that `tensor` is, slice(None) for all of it. A fused matrix whose
    shard is no slice, such as the rows of q, k and v, is given as the view in which it is one:

        fill_(qkv.view(3, own_rows, h), "layers.7.qkv", seed, (3, rows, h), (slice(None), own, slice(None)), std)

    Drawn in FP32 on the tensor's device, whose generator the numbers depend on, and rounded to its dtype; in blocks of
    whole rows of the first dimension, so that no more than a block is there beside the shard.
    """
    import torch

    rows, width = full_shape[0], math.prod(full_shape[1:])
    wanted = range(rows)[shard_slices[0]]
    columns = (slice(None), *shard_slices[1:])
    shape = [len(range(size)[part]) for size, part in zip(full_shape, shard_slices, strict=True)]
    if list(tensor.shape) != shape:
        raise ValueError(f"{name}: a shard {tuple(shard_slices)} of {tuple(full_shape)} is no {tuple(tensor.shape)}")
    generator = torch.Generator(tensor.device)
    block_rows = max(1, _BLOCK_ELEMENTS // width)
    with torch.no_grad():
        for first in range(wanted.start // block_rows * block_rows, wanted.stop, block_rows):
            block = torch.empty(min(block_rows, rows - first), *full_shape[1:], device=tensor.device)
            digest = hashlib.blake2b(f"{seed}/{name}/{first}".encode(), digest_size=8).digest()
            block.normal_(0.0, std, generator=generator.manual_seed(int.from_bytes(digest, "little") >> 1))
            start, stop = max(first, wanted.start), min(first + block_rows, wanted.stop)
            tensor[start - wanted.start : stop - wanted.start].copy_(block[start - first : stop - first][columns])
            del block  # before the next one
