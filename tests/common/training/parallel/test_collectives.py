"""common/training/parallel/collectives.py: operators and buckets on one process, and two gloo processes on loopback."""

import importlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from common.capture.host_graph import HostPool
from common.training.parallel import collectives
from common.training.parallel import differentiable_collectives as regions

ROOT = Path(__file__).resolve().parents[4]


class Recorder(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls.append((function, args, kwargs))
        return function(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3)).double()


def loss_of(net, x):
    return net(x).square().mean()


# --- one process


def test_one_process_needs_no_group_and_still_shows_the_operator():
    bucket = torch.arange(3.0)
    with Recorder() as recorder:
        collectives.all_reduce_mean_(bucket)
        collectives.broadcast_([bucket])
    (reduce, reduce_args, _), (broadcast, _, _) = recorder.calls
    assert reduce is torch.ops.graphs.all_reduce_mean_.default
    assert reduce_args[0][0] is bucket
    assert broadcast is torch.ops.graphs.broadcast_.default
    assert bucket.tolist() == [0, 1, 2]


def test_parts_of_one_process_are_the_whole():
    flat = torch.arange(3.0)
    with Recorder() as recorder:
        collectives.reduce_scatter_mean_(flat)
        collectives.all_gather_(flat)
    assert [str(call[0]) for call in recorder.calls] == [
        "graphs.reduce_scatter_mean_.default",
        "graphs.all_gather_.default",
    ]
    assert flat.tolist() == [0, 1, 2]


def test_one_process_copies_from_buffer_to_buffer():
    source = torch.arange(6.0).view(3, 2)
    for collective in (collectives.reduce_scatter_sum_, collectives.all_gather_into_, collectives.all_to_all_):
        target = torch.zeros(3, 2)
        collective(target, source, collectives.ALONE)
        assert torch.equal(target, source)
    with Recorder() as recorder:
        collectives.exchange_()
    assert not recorder.calls
    assert (collectives.group_size(), collectives.group_rank(collectives.ALONE)) == (1, 0)


WRITTEN = {
    "all_reduce_mean_": ["tensors"],
    "all_reduce_sum_": ["tensors"],
    "all_reduce_max_": ["tensors"],
    "reduce_scatter_mean_": ["flat"],
    "reduce_scatter_sum_": ["own"],
    "all_gather_": ["flat"],
    "all_gather_into_": ["whole"],
    "all_to_all_": ["received"],
    "broadcast_": ["tensors"],
    "exchange_": ["received"],
}


def test_schemas_say_what_is_written():
    mutated = {
        name: [argument.name for argument in operator.default._schema.arguments if argument.is_write]
        for name in WRITTEN
        for operator in [getattr(torch.ops.graphs, name)]
    }
    assert mutated == WRITTEN


def test_shape_inference():
    collectives.all_reduce_mean_(torch.empty(3, device="meta"))


def test_missing_group_is_one_line(monkeypatch):
    tensor = torch.zeros(2)
    with pytest.raises(ValueError, match="no other rank to send to"):
        collectives.exchange_([tensor], [1])
    with pytest.raises(ValueError, match="call collectives.init"):
        collectives.all_reduce_mean_(tensor, "tensor_parallel")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="call collectives.init"):
        collectives.all_reduce_mean_(tensor)


def test_init_without_torchrun():
    assert collectives.init("cpu") == (0, 0, 1)
    assert not torch.distributed.is_initialized()
    collectives.shutdown()


def test_init_names_missing_variables(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ValueError, match="LOCAL_RANK, MASTER_ADDR, MASTER_PORT not set: start .* torchrun"):
        collectives.init("cpu")


def test_init_with_more_processes_than_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match="local rank 0 has no GPU .* lower --nproc-per-node"):
        collectives.init("cuda")


# --- buckets


def test_gradients_are_views_of_buckets():
    net, reference = model(), model()
    buckets = collectives.GradientBuckets(net.parameters(), bucket_bytes=1 << 20)
    x = torch.randn(4, 5, dtype=torch.float64)
    for _ in range(2):
        loss_of(net, x).backward()
        loss_of(reference, x).backward()
    (flat,) = buckets.flats
    storage = flat.untyped_storage().data_ptr()
    for parameter, expected in zip(net.parameters(), reference.parameters(), strict=False):
        assert torch.equal(parameter.grad, expected.grad)
        assert parameter.grad.untyped_storage().data_ptr() == storage
        assert (parameter.grad.data_ptr() - flat.data_ptr()) % 512 == 0
    buckets.zero_()
    assert all(not parameter.grad.any() for parameter in net.parameters())


def test_existing_gradients_keep_their_values():
    net = model()
    loss_of(net, torch.ones(1, 5, dtype=torch.float64)).backward()
    before = [parameter.grad.clone() for parameter in net.parameters()]
    buckets = collectives.GradientBuckets(net.parameters(), bucket_bytes=1 << 20)
    assert all(torch.equal(parameter.grad, value) for parameter, value in zip(net.parameters(), before, strict=False))
    assert all(parameter.grad._base is buckets.flats[0] for parameter in net.parameters())


def test_gradient_tensors_move_into_buckets():
    main_grads = [torch.full((3, 2), 1.0), torch.full((5,), 2.0)]
    buckets = collectives.GradientBuckets(main_grads, bucket_bytes=1 << 20)
    assert main_grads[0].tolist() == [[1, 1]] * 3 and main_grads[1].tolist() == [2] * 5
    main_grads[1].add_(1)
    assert buckets.flats[0].sum().item() == 6 + 15


def test_buckets_hold_one_dtype_and_no_more_than_asked():
    sizes = [100, 128, 4, 1000, 3]
    tensors = [torch.zeros(size) for size in sizes] + [torch.zeros(7, dtype=torch.float64)]
    buckets = collectives.GradientBuckets(tensors, bucket_bytes=1024)
    assert [(flat.dtype, flat.numel()) for flat in buckets.flats] == [
        (torch.float32, 256),  # 100 and 128, each padded to 128
        (torch.float32, 128),  # 4: the next does not fit
        (torch.float32, 1024),  # 1000 alone is more than a bucket
        (torch.float32, 128),
        (torch.float64, 64),
    ]


def test_buckets_are_reduced_in_one_operator_in_order():
    buckets = collectives.GradientBuckets([torch.zeros(300), torch.zeros(300)], bucket_bytes=1)
    with Recorder() as recorder:
        buckets.all_reduce_mean()
    ((function, args, _),) = recorder.calls
    assert function is torch.ops.graphs.all_reduce_mean_.default
    assert [tensor.data_ptr() for tensor in args[0]] == [flat.data_ptr() for flat in buckets.flats]
    assert len(buckets.flats) == 2


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_replaced_gradient_is_an_error(set_to_none):
    net = model()
    buckets = collectives.GradientBuckets(net.parameters(), bucket_bytes=1 << 20)
    loss_of(net, torch.ones(1, 5, dtype=torch.float64)).backward()
    buckets.all_reduce_mean()
    net.zero_grad(set_to_none=set_to_none)
    if set_to_none:
        with pytest.raises(ValueError, match="gradient 0 was replaced.*zero_"):
            buckets.all_reduce_mean()
    else:
        buckets.all_reduce_mean()


def test_strides_are_kept_in_buckets():
    """channels_last gradients stay so; what does not fill its memory is laid out in rows."""
    dense = torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last)
    gaps = torch.randn(6, 8)[:, ::2]
    values = [dense.clone(memory_format=torch.preserve_format), gaps.clone()]
    buckets = collectives.GradientBuckets([dense, gaps], bucket_bytes=1 << 20)
    assert dense.stride() == values[0].stride() and dense.is_contiguous(memory_format=torch.channels_last)
    assert gaps.is_contiguous()
    assert all(map(torch.equal, (dense, gaps), values))
    buckets.flats[0].fill_(2.0)
    assert dense.eq(2).all() and gaps.eq(2).all()


def test_bucket_arguments():
    with pytest.raises(ValueError, match="bucket_bytes"):
        collectives.GradientBuckets([torch.zeros(1)], bucket_bytes=0)
    with pytest.raises(ValueError, match="no tensors"):
        collectives.GradientBuckets([], bucket_bytes=1)


# --- two processes


def worker():
    """One rank: what it saw goes to stdout as JSON."""
    rank, local_rank, world_size = collectives.init("cpu", timeout_s=30)
    importlib.import_module("torch._dynamo")  # as an optimizer does
    net = model()
    x = torch.linspace(-1, 1, 40, dtype=torch.float64).view(8, 5)
    buckets = collectives.GradientBuckets(net.parameters(), bucket_bytes=600)
    loss_of(net, x.chunk(world_size)[rank]).backward()
    buckets.all_reduce_mean()
    result = {"ranks": [rank, local_rank, world_size], "num_buckets": len(buckets.flats)}
    result["grads"] = [parameter.grad.tolist() for parameter in net.parameters()]

    own = torch.full((3,), float(rank))
    with Recorder() as recorder:
        # Both send first, two tensors each, larger than what a socket buffers.
        large = [torch.full((1 << 20,), 10.0 * rank + index) for index in range(2)]
        arrived = [torch.zeros_like(tensor) for tensor in large]
        collectives.exchange_([own + 10], [1 - rank], [own], [1 - rank])
        collectives.exchange_(large, [1 - rank] * 2, arrived, [1 - rank] * 2)
    result["exchanged"] = own.tolist()
    result["in order"] = [tensor.unique().tolist() for tensor in arrived]
    if rank == 0:
        collectives.exchange_(sent=[own], destinations=[1])
    else:
        collectives.exchange_(received=[own], sources=[0])
    result["one way"] = own.tolist()
    result["operators"] = [str(call[0]) for call in recorder.calls if "graphs" in str(call[0])]
    result["foreign"] = [str(call[0]) for call in recorder.calls if "c10d" in str(call[0])]

    weights = [torch.full((2,), rank + 1.0), torch.full((1,), rank + 5.0)]
    collectives.broadcast_(weights, source=1)
    result["broadcast"] = [weight.tolist() for weight in weights]

    # A recorded call does its work again on the same buffer, which is what a host graph's replay is.
    value = torch.full((2,), 2.0 * rank)
    with Recorder() as recorder:
        collectives.all_reduce_mean_(value)
    value.fill_(4.0 * rank)
    function, args, _ = recorder.calls[0]
    function(*args)
    result["replayed"] = value.tolist()

    total, largest = [torch.full((2,), rank + 1.0)], torch.tensor([rank, -rank], dtype=torch.float32)
    collectives.all_reduce_sum_(total)
    collectives.all_reduce_max_(largest)
    result["reduced"] = [total[0].tolist(), largest.tolist()]
    rows = torch.arange(4.0).view(4, 1) + 10 * rank
    part, whole, swapped = torch.zeros(2, 1), torch.zeros(8, 1), torch.zeros(4, 1)
    collectives.reduce_scatter_sum_(part, rows)
    collectives.all_gather_into_(whole, rows)
    collectives.all_to_all_(swapped, rows)
    result["rows"] = [tensor.flatten().tolist() for tensor in (part, whole, swapped)]
    result["regions"] = region_gradients(rank)
    result["replayed regions"] = replayed_regions(rank)

    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        flat = torch.arange(6.0).to(dtype) * (rank + 1)
        collectives.reduce_scatter_mean_(flat)
        own = flat[3 * rank : 3 * rank + 3]
        result[f"scattered {dtype}"] = own.tolist()
        own.add_(10 * rank)
        flat[3 - 3 * rank : 6 - 3 * rank].fill_(-1)
        collectives.all_gather_(flat)
        result[f"gathered {dtype}"] = flat.tolist()
    try:
        collectives.reduce_scatter_mean_(torch.zeros(3))
    except ValueError as error:
        result["uneven"] = str(error)

    lonely = [torch.distributed.new_group([index]) for index in range(world_size)][rank]
    value = torch.full((1,), float(rank))
    collectives.all_reduce_mean_(value, lonely.group_name)
    result["own_group"] = value.tolist()
    half = torch.full((4,), float(rank), dtype=torch.bfloat16)
    collectives.all_reduce_mean_(half)
    result["bfloat16"] = half.tolist()
    try:
        collectives.all_reduce_mean_(value, "nobody")
    except ValueError as error:
        result["unknown_group"] = str(error)
    lonely = None
    result["threads"] = thread_names()
    collectives.shutdown()
    result["threads_left"] = thread_names()
    print(json.dumps(result))


def region_gradients(rank):
    """Differences of a column- and row-parallel pair of matrices, plain and with sequence parallelism, to the whole."""
    generator = torch.Generator().manual_seed(0)
    x, first, second, weight = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((4, 6), (8, 6), (6, 8), (4, 6))
    )
    leaf = x.clone().requires_grad_(True)
    expected = (leaf @ first.T).tanh() @ second.T
    (expected * weight).sum().backward()
    column, row, own = first.chunk(2)[rank], second.chunk(2, dim=1)[rank], slice(2 * rank, 2 * rank + 2)

    def differences(into, out_of, start, shared):
        """start: of x, a leaf. shared: the rows of result and gradient that this rank has."""
        start = start.clone().requires_grad_(True)
        y = out_of((into(start) @ column.T).tanh() @ row.T)
        (y * weight[shared]).sum().backward()
        return [float((a - b).abs().max()) for a, b in ((y, expected[shared]), (start.grad, leaf.grad[shared]))]

    result = {
        "tensor": differences(regions.copy_to_region, regions.reduce_from_region, x, slice(None)),
        "sequence": differences(regions.gather_from_sequence, regions.reduce_scatter_to_sequence, x[own], own),
    }
    # In and out of sequence parallelism around what each rank does for its own tokens.
    start = x.clone().requires_grad_(True)
    y = regions.gather_from_sequence(regions.scatter_to_sequence(start).tanh(), partial_gradients=False)
    (y * weight).sum().backward()
    leaf.grad = None
    (leaf.tanh() * weight).sum().backward()
    result["tokens"] = [float((a - b).abs().max()) for a, b in ((y, leaf.tanh()), (start.grad, leaf.grad))]
    # There and back; the gradient takes the same way.
    start = x.clone().requires_grad_(True)
    y = regions.all_to_all(regions.all_to_all(start) * (rank + 1))
    (y * weight).sum().backward()
    factors = torch.tensor([1.0, 1.0, 2.0, 2.0], dtype=torch.float64).unsqueeze(1)
    result["all to all"] = [float((a - b).abs().max()) for a, b in ((y, x * factors), (start.grad, weight * factors))]
    try:
        regions.reduce_scatter_to_sequence(x[:3])
    except ValueError as error:
        result["uneven"] = str(error)
    return result


def replayed_regions(rank):
    """A host graph of a forward and backward pass through regions and of an exchange, replayed on other values."""
    x, weight = torch.zeros(4, 2, requires_grad=True), torch.tensor([[1.0, 2.0], [rank, 3.0]], requires_grad=True)
    received = torch.zeros(2, 2)

    def step():
        x.grad = weight.grad = None
        whole = regions.gather_from_sequence(regions.copy_to_region(x))
        y = regions.reduce_from_region(regions.reduce_scatter_to_sequence(whole @ weight).square())
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
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    variables = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    variables |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-c", "from tests.common.training.parallel.test_collectives import worker; worker()"]
    children = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=variables | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [child.communicate(timeout=60) for child in children]
    finally:
        for child in children:
            child.kill()
    for child, (_, errors) in zip(children, outputs, strict=False):
        assert child.returncode == 0, errors
    return [json.loads(output.splitlines()[-1]) for output, _ in outputs]


def test_init_under_torchrun(two_ranks):
    assert [result["ranks"] for result in two_ranks] == [[0, 0, 2], [1, 1, 2]]


def test_averaged_gradients_are_those_of_the_whole_batch(two_ranks):
    net = model()
    loss_of(net, torch.linspace(-1, 1, 40, dtype=torch.float64).view(8, 5)).backward()
    for result in two_ranks:
        assert result["num_buckets"] > 1
        for parameter, gradient in zip(net.parameters(), result["grads"], strict=False):
            torch.testing.assert_close(torch.tensor(gradient, dtype=torch.float64), parameter.grad)
    assert two_ranks[0]["grads"] == two_ranks[1]["grads"]


@pytest.mark.parametrize("case", ["tensor", "sequence", "tokens", "all to all"])
def test_regions_are_the_whole_model_forward_and_backward(two_ranks, case):
    for result in two_ranks:
        assert max(result["regions"][case]) < 1e-12
        assert "shape (3, 6) has no equal parts for 2 ranks" in result["regions"]["uneven"]


def test_regions_of_one_rank_are_nothing():
    x = torch.ones(3, requires_grad=True)
    for name in ("copy_to_region", "reduce_from_region", "gather_from_sequence", "scatter_to_sequence", "all_to_all"):
        assert getattr(regions, name)(x) is x


def test_regions_and_exchanges_in_a_host_graph(two_ranks):
    assert [result["replayed regions"] for result in two_ranks] == [True, True]


def test_exchange(two_ranks):
    assert [result["exchanged"] for result in two_ranks] == [[11.0] * 3, [10.0] * 3]
    assert [result["in order"] for result in two_ranks] == [[[10.0], [11.0]], [[0.0], [1.0]]]
    assert [result["one way"] for result in two_ranks] == [[11.0] * 3] * 2
    assert [result["operators"] for result in two_ranks] == [["graphs.exchange_.default"] * 2] * 2
    assert [result["foreign"] for result in two_ranks] == [[], []]


def test_sums_maxima_and_rows(two_ranks):
    assert [result["reduced"] for result in two_ranks] == [[[3.0, 3.0], [1.0, 0.0]]] * 2
    whole = [0.0, 1.0, 2.0, 3.0, 10.0, 11.0, 12.0, 13.0]
    assert two_ranks[0]["rows"] == [[10.0, 12.0], whole, [0.0, 1.0, 10.0, 11.0]]
    assert two_ranks[1]["rows"] == [[14.0, 16.0], whole, [2.0, 3.0, 12.0, 13.0]]


def test_broadcast(two_ranks):
    assert [result["broadcast"] for result in two_ranks] == [[[2.0, 2.0], [6.0]]] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_scattered_means_and_gathered_parts(two_ranks, dtype):
    assert [result[f"scattered {dtype}"] for result in two_ranks] == [[0.0, 1.5, 3.0], [4.5, 6.0, 7.5]]
    assert [result[f"gathered {dtype}"] for result in two_ranks] == [[0.0, 1.5, 3.0, 14.5, 16.0, 17.5]] * 2
    assert all("has no equal parts for 2 ranks" in result["uneven"] for result in two_ranks)


def test_recorded_call_can_be_run_again(two_ranks):
    assert [result["replayed"] for result in two_ranks] == [[2.0, 2.0]] * 2


def test_groups(two_ranks):
    assert [result["own_group"] for result in two_ranks] == [[0.0], [1.0]]
    assert all("no process group named 'nobody'" in result["unknown_group"] for result in two_ranks)


def test_no_thread_outlives_the_process_group(two_ranks):
    """A gloo worker that wakes while the interpreter ends aborts the process after a good run, once in a while."""
    for result in two_ranks:
        assert any("gloo" in name for name in result["threads"])
        assert not any("gloo" in name for name in result["threads_left"])


def test_bfloat16(two_ranks):
    assert [result["bfloat16"] for result in two_ranks] == [[0.5] * 4] * 2
