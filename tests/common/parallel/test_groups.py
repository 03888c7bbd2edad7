"""common/parallel: places of ranks, groups of four gloo processes, and initial values of every decomposition."""

import itertools
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from common.parallel import groups
from common.parallel.groups import Parallel, Place, Ranks, fill_, make_groups
from graph_worth.parallel import collectives
from tests.helpers import gloo_ranks

DECOMPOSITIONS = [Ranks(1, tp=2, pp=2), Ranks(2, tp=2), Ranks(1, pp=4), Ranks(2, pp=2), Ranks(2, cp=2), Ranks(4)]


@dataclass(frozen=True, kw_only=True)
class Config(Parallel):
    layers: int = 8


# --- sizes


def test_ranks_from_flags():
    assert Config().ranks(3) == Ranks(dp=3)
    ranks = Config(tp=4, pp=2, cp=2).ranks(48)
    assert ranks == Ranks(dp=3, tp=4, pp=2, cp=2) and ranks.world_size == 48
    assert Config(tp=4, pp=2, cp=2).world_sizes() == {"multiple_of": 16}


@pytest.mark.parametrize(
    ("flags", "world_size", "message"),
    [
        ({"tp": 2, "pp": 3}, 8, "--tp 2 --pp 3 need a multiple of 6 ranks, this run has 8: .*--nproc-per-node"),
        ({"pp": -1}, 1, "--pp -1: takes a number from 1 up"),
    ],
)
def test_a_world_that_does_not_fit(flags, world_size, message):
    with pytest.raises(ValueError, match=message):
        Config(**flags).ranks(world_size)


def test_describe_needs_no_torch():
    code = "import sys, common.parallel.groups; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[3])


def test_tensor_ranks_count_fastest_and_stages_slowest():
    ranks = Ranks(dp=2, tp=2, pp=2, cp=2)
    places = [ranks.place(world_rank) for world_rank in range(16)]
    assert places[1] == Place(1, data_rank=0, stage=0, context_rank=0, tensor_rank=1)
    assert places[2] == Place(2, data_rank=0, stage=0, context_rank=1, tensor_rank=0)
    assert places[4] == Place(4, data_rank=1, stage=0, context_rank=0, tensor_rank=0)
    assert places[8] == Place(8, data_rank=0, stage=1, context_rank=0, tensor_rank=0)
    assert len(set(places)) == 16


def test_members_of_groups():
    ranks = Ranks(dp=2, tp=2, pp=2)
    assert ranks.members("tp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert ranks.members("dp") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert ranks.members("pp") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert ranks.members("tp", "pp") == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert ranks.members("cp") == [[rank] for rank in range(8)]
    assert ranks.members("dp", "tp", "pp", "cp") == [list(range(8))]


def test_layers_of_a_stage():
    assert Ranks(1, pp=4).layers(8, 1) == [range(2, 4)]
    assert Ranks(1, pp=2).layers(8, 1, chunks=2) == [range(2, 4), range(6, 8)]
    with pytest.raises(ValueError, match="--layers 9 is not divisible by --pp x --chunks 4"):
        Ranks(1, pp=2).layers(9, 0, chunks=2)


# --- groups


def test_one_process_is_alone():
    groups = make_groups(Ranks(1), "cpu")
    assert set(vars(groups).values()) == {collectives.ALONE}
    with pytest.raises(ValueError, match="are 2 ranks, this run has 1"):
        make_groups(Ranks(2), "cpu")


def worker():
    """Return each decomposition's group members as this rank finds them, and the names of its groups."""
    results = []
    for ranks in DECOMPOSITIONS:
        groups = make_groups(ranks, "cpu")
        members = {}
        for name, group in vars(groups).items():
            found = torch.zeros(4)
            found[collectives.group_rank()] = 1
            collectives.all_reduce_sum_(found, group)
            members[name] = found.nonzero().flatten().tolist()
        results.append({"members": members, "names": sorted(set(vars(groups).values()))})
    return results


VARIED = {
    "tensor": ("tp",),
    "context": ("cp",),
    "data": ("dp",),
    "pipeline": ("pp",),
    "replicas": ("dp", "cp"),
    "shards": ("tp", "pp"),
}


def test_groups():
    four_ranks = gloo_ranks.run("tests.common.parallel.test_groups", "worker", 4)
    for (world_rank, result), (index, ranks) in itertools.product(enumerate(four_ranks), enumerate(DECOMPOSITIONS)):
        members = result[index]["members"]
        for name, dimensions in VARIED.items():
            (expected,) = [group for group in ranks.members(*dimensions) if world_rank in group]
            assert members[name] == expected, (ranks, name)
        (pipeline,) = [group for group in ranks.members("pp") if world_rank in group]
        at_an_end = world_rank in (pipeline[0], pipeline[-1])
        assert members["ends"] == (sorted({pipeline[0], pipeline[-1]}) if at_an_end else [world_rank]), ranks
    # A group is made once. Data parallelism alone, as all models have it: everyone, and oneself.
    assert [result[-1]["names"] for result in four_ranks] == [["", collectives.ALONE]] * 4


# --- initial values


def filled(shape, slices, name="layers.3.weight", seed=7, dtype=torch.float32):
    sizes = [len(range(size)[part]) for size, part in zip(shape, slices, strict=True)]
    tensor = torch.full(sizes, torch.nan, dtype=dtype)
    fill_(tensor, name, seed, shape, slices, 0.5)
    return tensor


def shard(size, count, rank):
    return slice(rank * size // count, (rank + 1) * size // count)


@pytest.mark.parametrize("block", [1, 100, 1 << 22])
@pytest.mark.parametrize("shape", [(24, 4, 6), (24,)])
def test_shards_are_those_of_the_whole(monkeypatch, shape, block):
    """Rows, columns, both; blocks of one row, of some that end within a shard, of all."""
    monkeypatch.setattr(groups, "_BLOCK_ELEMENTS", block)
    everything = (slice(None),) * len(shape)
    whole = filled(shape, everything)
    assert 0.3 < float(whole.std()) < 0.7 and whole.unique().numel() == whole.numel()
    for rows, columns in ((3, 1), (8, 2), (1, 4)):
        for row, column in itertools.product(range(rows), range(columns if len(shape) > 1 else 1)):
            parts = (shard(shape[0], rows, row), *(shard(size, columns, column) for size in shape[1:2]))
            slices = (*parts, *everything[2:])
            assert torch.equal(filled(shape, slices), whole[slices])


def test_numbers_depend_on_name_seed_and_nothing_else():
    everything = (slice(None), slice(None))
    whole = filled((8, 4), everything)
    torch.manual_seed(3)
    assert torch.equal(filled((8, 4), everything), whole)
    assert not torch.equal(filled((8, 4), everything, name="layers.2.weight"), whole)
    assert not torch.equal(filled((8, 4), everything, seed=8), whole)
    assert torch.equal(filled((8, 4), everything, dtype=torch.bfloat16), whole.bfloat16())


def test_a_fused_matrix_is_filled_through_a_view_and_in_place():
    whole = filled((3, 8, 5), (slice(None),) * 3).view(24, 5)
    own = torch.nn.Parameter(torch.zeros(12, 5))
    fill_(own.view(3, 4, 5), "layers.3.weight", 7, (3, 8, 5), (slice(None), slice(4, 8), slice(None)), 0.5)
    assert torch.equal(own, whole.view(3, 8, 5)[:, 4:].reshape(12, 5)) and own.grad_fn is None
    with pytest.raises(ValueError, match=r"layers.0.weight: a shard .* is no \(3, 4\)"):
        fill_(torch.zeros(3, 4), "layers.0.weight", 0, (8, 4), (slice(0, 4), slice(None)), 1.0)
