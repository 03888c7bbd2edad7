"""graph_worth/parallel/collectives.py: operators and buckets on one process, and two gloo processes on loopback."""

import importlib
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from common.parallel import differentiable_collectives as regions
from common.parallel.buckets import GradientBuckets
from graph_worth.capture.host_graph import HostPool
from graph_worth.parallel import collectives, host_messages
from tests.helpers import gloo_ranks


class Recorder(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls.append((function, args, kwargs))
        return function(*args, **(kwargs or {}))

    def named(self, text):
        return [str(call[0]) for call in self.calls if text in str(call[0])]


@pytest.fixture
def no_launcher(monkeypatch):
    for name in gloo_ranks.NAMES:
        monkeypatch.delenv(name, raising=False)


# --- one process


def test_one_process_needs_no_group_and_still_shows_the_operators(no_launcher):
    bucket, source, arrived = torch.arange(4.0), torch.arange(6.0).view(3, 2), torch.zeros(3, 2)
    with Recorder() as recorder:
        collectives.all_reduce_mean_(bucket)
        collectives.reduce_scatter_mean_(bucket)
        collectives.all_gather_(bucket)
        collectives.all_to_all_(arrived, source)
        collectives.exchange_()
    assert recorder.calls[0][1][0][0] is bucket and bucket.tolist() == [0, 1, 2, 3]
    names = ("all_reduce_mean_", "reduce_scatter_mean_", "all_gather_", "all_to_all_")
    assert recorder.named("") == [f"graphs.{name}.default" for name in names]
    for collective in (collectives.reduce_scatter_sum_, collectives.all_gather_into_, collectives.all_to_all_):
        target = torch.zeros(3, 2)
        collective(target, source, group=collectives.ALONE)
        assert torch.equal(target, source)
    x = torch.ones(3, requires_grad=True)
    assert regions.gather_from_sequence(x) is regions.reduce_scatter_to_sequence(x) is x
    assert (collectives.group_size(), collectives.group_rank(collectives.ALONE)) == (1, 0)
    collectives.all_reduce_mean_(torch.empty(3, device="meta"))  # shape inference


def test_schemas_say_what_is_written():
    written = {
        "all_reduce_mean_": "tensors",
        "all_reduce_sum_": "tensors",
        "all_reduce_max_": "tensors",
        "reduce_scatter_mean_": "flat",
        "reduce_scatter_sum_": "part",
        "all_gather_": "flat",
        "all_gather_into_": "whole",
        "all_to_all_": "received",
        "exchange_": "received",
    }
    for name, expected in written.items():
        arguments = getattr(torch.ops.graphs, name).default._schema.arguments
        assert [argument.name for argument in arguments if argument.is_write] == [expected]


def test_mistakes_are_one_line(no_launcher, monkeypatch):
    tensor = torch.zeros(2)
    with pytest.raises(ValueError, match="no other rank to send to"):
        collectives.exchange_([tensor], [1])
    with pytest.raises(ValueError, match="call collectives.init"):
        collectives.all_reduce_mean_(tensor, "tensor_parallel")
    assert collectives.init("cpu") == (0, 0, 1) and not torch.distributed.is_initialized()
    collectives.shutdown()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match="local rank 0 has no GPU .* lower --nproc-per-node"):
        collectives.init("cuda")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="call collectives.init"):
        collectives.all_reduce_mean_(tensor)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ValueError, match="LOCAL_RANK, MASTER_ADDR, MASTER_PORT not set: start .* torchrun"):
        collectives.init("cpu")


# --- buckets


def test_gradients_move_into_buckets_and_keep_values_and_strides():
    dense = torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last)
    tensors = [dense, torch.randn(6, 8)[:, ::2], torch.zeros(()).expand(7)]
    values = [tensor.clone(memory_format=torch.preserve_format) for tensor in tensors]
    buckets = GradientBuckets(tensors, bucket_bytes=1 << 20)
    (flat,) = buckets.flats
    for tensor, value in zip(tensors, values, strict=True):
        assert torch.equal(tensor, value) and (tensor.data_ptr() - flat.data_ptr()) % 512 == 0
    # channels_last gradients stay so; what does not fill its memory is laid out in rows.
    assert dense.is_contiguous(memory_format=torch.channels_last)
    assert tensors[1].is_contiguous() and tensors[2].is_contiguous()
    flat.fill_(2.0)
    assert all(tensor.eq(2).all() for tensor in tensors)
    with Recorder() as recorder:
        buckets.all_reduce_mean()
    assert recorder.named("graphs") == ["graphs.all_reduce_mean_.default"]
    buckets.zero_()
    assert not any(tensor.any() for tensor in tensors)


def test_buckets_hold_one_dtype_and_no_more_than_asked():
    sizes = [100, 128, 4, 1000, 3]
    tensors = [torch.zeros(size) for size in sizes] + [torch.zeros(7, dtype=torch.float64)]
    buckets = GradientBuckets(tensors, bucket_bytes=1024)
    assert [(flat.dtype, flat.numel()) for flat in buckets.flats] == [
        (torch.float32, 256),  # 100 and 128, each padded to 128
        (torch.float32, 128),  # 4: the next does not fit
        (torch.float32, 1024),  # 1000 alone is more than a bucket
        (torch.float32, 128),
        (torch.float64, 64),
    ]


# --- two processes


def worker():
    """One rank: what it saw, by the name of a case."""
    rank = collectives.group_rank()
    importlib.import_module("torch._dynamo")  # as an optimizer does
    result = {"reduced": reduced(rank), "rows": rows(rank), "regions": region_gradients(rank)}
    result |= {
        "all to all": all_to_all(rank),
        "exchanged": exchanged(rank),
        "replayed": replayed(rank),
        "scattered": scattered(rank),
    }
    try:
        regions.reduce_scatter_to_sequence(torch.zeros(3, 6))
    except ValueError as error:
        result["uneven"] = str(error)
    result["threads"] = thread_names()
    collectives.shutdown()
    result["threads left"] = thread_names()
    return result


def reduced(rank):
    """Sums, maxima and means, over all ranks and over this one alone; a call run again, as a replay does."""
    total, largest = [torch.full((2,), rank + 1.0)], torch.tensor([rank, -rank], dtype=torch.float32)
    collectives.all_reduce_sum_(total)
    collectives.all_reduce_max_(largest)
    half = torch.full((2,), float(rank), dtype=torch.bfloat16)
    with Recorder() as recorder:
        collectives.all_reduce_mean_(half)
    again = half.clone().fill_(4.0 * rank)
    recorder.calls[0][0]([again])
    lonely = [torch.distributed.new_group([index]) for index in range(2)][rank]
    alone = torch.full((1,), float(rank))
    collectives.all_reduce_mean_(alone, lonely.group_name)
    return [tensor.tolist() for tensor in (total[0], largest, half, again, alone)]


def exchanged(rank):
    own = torch.full((3,), float(rank))
    with Recorder() as recorder:
        # Both send first, two tensors each, larger than what a socket buffers.
        large = [torch.full((1 << 20,), 10.0 * rank + index) for index in range(2)]
        arrived = [torch.zeros_like(tensor) for tensor in large]
        collectives.exchange_([own + 10], [1 - rank], [own], [1 - rank])
        collectives.exchange_(large, [1 - rank] * 2, arrived, [1 - rank] * 2)
    found = [own.tolist(), [tensor.unique().tolist() for tensor in arrived]]
    if rank == 0:
        collectives.exchange_(sent=[own], destinations=[1])
    else:
        collectives.exchange_(received=[own], sources=[0])
    return [*found, own.tolist(), recorder.named("graphs"), recorder.named("c10d")]


def all_to_all(rank):
    """Equal parts, and rank r's r + 1 rows for each rank."""
    equal, own = torch.zeros(2, 1), torch.tensor([[10.0], [11.0]]) + 10 * rank
    collectives.all_to_all_(equal, own)
    uneven, own = torch.zeros(3, 2), torch.arange(4.0 * (rank + 1)).view(-1, 2) + 10 * rank
    collectives.all_to_all_(uneven, own, [1, 2], [rank + 1] * 2)
    return [tensor.tolist() for tensor in (equal, uneven)]


def rows(rank):
    own = torch.arange(4.0).view(4, 1) + 10 * rank
    part, whole = torch.zeros(2, 1), torch.zeros(8, 1)
    collectives.reduce_scatter_sum_(part, own)
    collectives.all_gather_into_(whole, own)
    return [tensor.flatten().tolist() for tensor in (part, whole)]


def scattered(rank):
    found = []
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        flat = torch.arange(6.0).to(dtype) * (rank + 1)
        collectives.reduce_scatter_mean_(flat)
        own = flat[3 * rank : 3 * rank + 3]
        found.append(own.tolist())
        own.add_(10 * rank)
        flat[3 - 3 * rank : 6 - 3 * rank].fill_(-1)
        collectives.all_gather_(flat)
        found.append(flat.tolist())
    return found


def region_gradients(rank):
    """Largest difference of a column- and row-parallel pair of matrices, and of its gradients, to the whole."""
    generator = torch.Generator().manual_seed(0)
    x, first, second, weight = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((4, 6), (8, 6), (6, 8), (4, 6))
    )
    leaf, own = x.clone().requires_grad_(True), slice(2 * rank, 2 * rank + 2)
    expected = (leaf @ first.T).tanh() @ second.T
    (expected * weight).sum().backward()
    start = x[own].clone().requires_grad_(True)
    wide = regions.gather_from_sequence(start) @ first.chunk(2)[rank].T
    y = regions.reduce_scatter_to_sequence(wide.tanh() @ second.chunk(2, dim=1)[rank].T)
    (y * weight[own]).sum().backward()
    return max(float((a - b).abs().max()) for a, b in ((y, expected[own]), (start.grad, leaf.grad[own])))


def replayed(rank):
    """A host graph of a forward and backward pass through regions and of an exchange, replayed on other values."""
    x, weight = torch.zeros(2, 2, requires_grad=True), torch.tensor([[1.0, 2.0], [rank, 3.0]], requires_grad=True)
    received = torch.zeros(2, 2)

    def step():
        x.grad = weight.grad = None
        y = regions.reduce_from_region((regions.gather_from_sequence(x) @ weight).square())
        y.sum().backward()
        collectives.exchange_([weight.grad], [1 - rank], [received], [1 - rank])
        return y.detach(), x.grad, weight.grad, received

    def values(results):
        return [tensor.tolist() for tensor in results]

    with torch.no_grad():
        x.fill_(rank + 1.0)
    expected = values(step())
    with torch.no_grad():
        x.zero_()
    graph, results = HostPool().capture(step, static_inputs=(x,))
    with torch.no_grad():
        x.fill_(rank + 1.0)
    graph.replay()
    return values(results) == expected and received.any().item()


def thread_names():
    return [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]


@pytest.fixture(scope="module")
def two_ranks():
    return gloo_ranks.run("tests.graph_worth.parallel.test_collectives", "worker", 2)


@pytest.mark.slow
def test_reductions(two_ranks):
    for rank, result in enumerate(two_ranks):
        assert result["reduced"] == [[3.0, 3.0], [1.0, 0.0], [0.5, 0.5], [2.0, 2.0], [float(rank)]]


def test_rows_and_parts(two_ranks):
    whole = [0.0, 1.0, 2.0, 3.0, 10.0, 11.0, 12.0, 13.0]
    assert [result["rows"] for result in two_ranks] == [[[10.0, 12.0], whole], [[14.0, 16.0], whole]]
    gathered = [0.0, 1.5, 3.0, 14.5, 16.0, 17.5]
    assert two_ranks[0]["scattered"] == [[0.0, 1.5, 3.0], gathered] * 3
    assert two_ranks[1]["scattered"] == [[4.5, 6.0, 7.5], gathered] * 3


def test_all_to_all(two_ranks):
    assert two_ranks[0]["all to all"] == [[[10.0], [20.0]], [[0.0, 1.0], [10.0, 11.0], [12.0, 13.0]]]
    assert two_ranks[1]["all to all"] == [[[11.0], [21.0]], [[2.0, 3.0], [14.0, 15.0], [16.0, 17.0]]]


def test_exchange(two_ranks):
    operators = ["graphs.exchange_.default"] * 2
    assert two_ranks[0]["exchanged"] == [[11.0] * 3, [[10.0], [11.0]], [11.0] * 3, operators, []]
    assert two_ranks[1]["exchanged"] == [[10.0] * 3, [[0.0], [1.0]], [11.0] * 3, operators, []]


def test_regions_are_the_whole_model_and_can_be_captured(two_ranks):
    for result in two_ranks:
        assert result["regions"] < 1e-12 and result["replayed"] is True
        assert "shape (3, 6) has no equal parts for 2 ranks" in result["uneven"]


def test_no_thread_outlives_the_process_group(two_ranks):
    """A gloo worker that wakes while the interpreter ends aborts the process after a good run, once in a while."""
    for result in two_ranks:
        assert any("gloo" in name for name in result["threads"])
        assert not any("gloo" in name for name in result["threads left"])


def test_in_a_group_of_one_rank_nobody_is_talked_to(monkeypatch):
    """As Megatron-Core makes one: with NCCL a message would be work for the GPU."""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    assert host_messages.of_all_ranks("value") == ["value"] and not host_messages.is_distributed()
