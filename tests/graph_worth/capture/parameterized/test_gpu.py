"""graph_worth/capture/parameterized on a GPU: launches on other memory against eager, bit for bit."""

import functools
import gc
import subprocess
import sys
import weakref

import pytest
import torch
from torch import nn

from graph_worth.capture import tensor_places
from graph_worth.capture.graph_error import CaptureError, RegionRefused
from graph_worth.capture.parameterized import backend, driver, nodes, random_state
from graph_worth.capture.pool import Pool
from tests.helpers import shaken
from tests.helpers.host_graph_cases import same
from tests.helpers.regions import Captured

F = nn.functional
pytestmark = pytest.mark.gpu
MIB = 2**20


@pytest.fixture
def device():
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(autouse=True)
def deterministic(monkeypatch):
    """Attention's backward adds in any order otherwise, eager's too."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


class Block(nn.Module):
    def __init__(self, width, dropout):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = dropout

    def forward(self, x):
        batch, time, width = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(batch, time, 3, width // 64, 64).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout)
        x = x + F.dropout(self.out(heads.transpose(1, 2).reshape(batch, time, width)), self.dropout)
        return x + F.dropout(self.down(F.gelu(self.up(self.norms[1](x)))), self.dropout)


def training(device, dropout=0.0, width=256, layers=2):
    """Forward and backward of blocks, and a maker of inputs."""
    torch.manual_seed(0)
    net = nn.Sequential(*[Block(width, dropout) for _ in range(layers)]).to(device, torch.bfloat16)
    parameters = list(net.parameters())

    def run(x, gradient):
        x = x.detach().requires_grad_()
        y = net(x)
        return [y.detach(), *torch.autograd.grad(y, [x, *parameters], gradient)]

    def make():
        return [torch.randn(2, 128, width, device=device, dtype=torch.bfloat16) for _ in range(2)]

    return run, make


def assert_like_eager(parameterized, run, make, times=4):
    """Calls on fresh inputs, with the allocator shaken in between; all results are kept."""
    kept, shaken = [], []
    for index in range(times):
        inputs = make()
        copies = [tensor_places.clone(tensor) for tensor in inputs]
        shaken.append(torch.empty((index + 1) * 3 * MIB, dtype=torch.uint8, device=inputs[0].device))
        state = torch.cuda.get_rng_state()
        results = parameterized(*inputs)
        after = torch.cuda.get_rng_state()
        torch.cuda.set_rng_state(state)
        kept.append((results, run(*copies), inputs, copies))
        assert torch.equal(after, torch.cuda.get_rng_state())
    for results, expected, inputs, copies in kept:
        assert same(results, expected)
        assert same(inputs, copies)


def check(run, make):
    parameterized = Captured(run, make())
    assert_like_eager(parameterized, run, make)
    return parameterized


def test_pointwise(device):
    check(lambda x, y: [(x.sin() + 2 * y).relu()], lambda: [torch.randn(1000, 33, device=device) for _ in range(2)])


def test_a_tensor_that_only_the_closure_holds_is_read_as_it_was(device):
    def make():
        three = torch.full((MIB,), 3.0, device=device)
        return Captured(lambda x: x * three, [torch.ones(MIB, device=device)])

    region = make()
    gc.collect()
    # These would take its memory.
    others = [torch.full((MIB,), 5.0, device=device) for _ in range(8)]
    assert region(torch.ones(MIB, device=device)).unique().tolist() == [3.0]
    del others


def test_a_released_region_frees_what_it_held_and_is_refused(device):
    def make():
        three = torch.full((4,), 3.0, device=device)
        return Captured(lambda x: x * three, [torch.ones(4, device=device)]), weakref.ref(three)

    region, three = make()
    result = region(torch.ones(4, device=device))
    for _ in range(2):
        region.region.release()
    gc.collect()
    assert three() is None and result.tolist() == [3.0] * 4
    with pytest.raises(CaptureError, match="was released"):
        region(torch.ones(4, device=device))


def test_linear_with_packed_parameters(device):
    layer = nn.Linear(1024, 1024, device=device, dtype=torch.bfloat16).requires_grad_(False)
    check(lambda x: [layer(x)], lambda: [torch.randn(512, 1024, device=device, dtype=torch.bfloat16)])


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_two_blocks_forward_and_backward(device, dropout):
    parameterized = check(*training(device, dropout))
    assert bool(parameterized.report["random_increment"]) == bool(dropout)


def test_1000_steps_with_dropout_on_a_shaken_allocator_two_streams_and_a_static_graph_are_bitwise_eager(device):
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(nn.Sequential(*[Block(256, 0.1) for _ in range(2)]).to(device, torch.bfloat16))
    eager, model = models
    torch._dynamo.reset()
    regions = backend.Regions()
    try:
        compiled = torch.compile(model, backend="parameterized", fullgraph=True, dynamic=False)

        def make_input():
            return torch.randn(2, 128, 256, device=device, dtype=torch.bfloat16)

        expected, _ = shaken.train(eager, list(eager.parameters()), 1000, make_input, shakes=False)
        a, b, total = (torch.randn(256, 256, device=device) for _ in range(3))
        expected_total = total.clone()
        for _ in range(1000):
            expected_total.add_(a @ b)
        with torch.cuda.stream(torch.cuda.Stream()):
            graph, _ = Pool(device).capture(lambda: total.add_(a @ b))
        streams = [torch.cuda.Stream() for _ in range(2)]
        with backend.collecting(regions):
            found, addresses = shaken.train(
                compiled, list(model.parameters()), 1000, make_input, True, streams, graph.replay
            )
        assert torch.equal(total, expected_total)
        rows = [region.row() for region in regions.graphs]
        assert [row["inexact"] for row in rows] == [[], []]
        assert same(found, expected) and same(model.state_dict().values(), eager.state_dict().values())
        assert len(addresses) > 4 and all(row["patched"] > 100 for row in rows)
    finally:
        regions.release()
        torch._dynamo.reset()


def test_foreach_and_a_fused_optimizer_with_tables_of_addresses(device):
    def run(*inputs):
        weights, gradients, first, second, steps = (list(inputs[i : i + 8]) for i in range(0, 40, 8))
        products = torch._foreach_mul(weights, gradients)
        torch._foreach_add_(steps, 1)
        torch._fused_adamw_(
            weights, gradients, first, second, [], steps,
            lr=1e-3, beta1=0.9, beta2=0.99, weight_decay=0.1, eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip
        return products

    def make():
        large = [torch.rand(1000 + 77 * (index % 8), device=device) for index in range(32)]
        return large + [torch.zeros((), device=device) for _ in range(8)]

    check(run, make)


def test_convolutions_with_group_norm_and_sums_of_gradients(device):
    torch.manual_seed(0)
    layers = [nn.Conv2d(32, 64, 3, padding=1), nn.GroupNorm(32, 64), nn.SiLU(), nn.Conv2d(64, 64, 3, 2, padding=1)]
    net = nn.Sequential(*layers, nn.Upsample(scale_factor=2), nn.Conv2d(64, 4, 1))
    net = net.to(device, torch.float16, memory_format=torch.channels_last)

    def run(x, gradient):
        x = x.detach().requires_grad_()
        y = net(x)
        return [y.detach(), y.float().mean((2, 3)).detach(), *torch.autograd.grad(y, [x, *net.parameters()], gradient)]

    def make():
        images = [torch.randn(2, channels, 32, 32, device=device, dtype=torch.float16) for channels in (32, 4)]
        return [image.to(memory_format=torch.channels_last) for image in images]

    check(run, make)


def test_memsets_and_split_k(device):
    weight = torch.randn(65536, 64, device=device, dtype=torch.bfloat16)

    def run(x):
        return [x @ weight, torch.zeros(1000, device=device) + x.float().sum()]

    parameterized = check(run, lambda: [torch.randn(64, 65536, device=device, dtype=torch.bfloat16)])
    assert parameterized.report["nodes"].get("memset", 0) + parameterized.report["nodes"]["kernel"] > 2


def test_copies_between_tensors_and_inputs_written_in_place(device):
    def run(x, y):
        scratch = torch.empty_like(x)
        scratch.copy_(x)
        y.copy_(scratch)
        x.add_(1)
        return [scratch[2:], x[1:], y.t()]

    parameterized = check(run, lambda: [torch.randn(64, 64, device=device) for _ in range(2)])
    assert parameterized.report["nodes"]["memcpy"] >= 1


def test_launches_on_two_streams_draw_as_eager_does(device):
    x, w = torch.randn(4096, 4096, device=device), torch.randn(4096, 4096, device=device) / 64

    def run(x, w):
        for _ in range(4):
            x = x @ w
        return F.dropout(torch.ones_like(x) + 0 * x, 0.5)

    parameterized = Captured(run, [x, w])
    torch.cuda.manual_seed(7)
    expected = [run(x, w) for _ in range(2)]
    torch.cuda.manual_seed(7)
    torch.cuda.synchronize()
    results = []
    for stream in (torch.cuda.Stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            results.append(parameterized(x, w))
    torch.cuda.synchronize()
    assert same(results, expected) and not torch.equal(*results)


def test_a_launch_draws_from_the_state_that_the_generator_has_now(device):
    """Transformer Engine and Megatron swap the states of torch's generator."""

    def run(x):
        return F.dropout(x, 0.5)

    x, draws = torch.ones(10000, device=device), random_state.generator(device)
    parameterized = Captured(run, [x])
    own, other = draws.graphsafe_get_state(), draws.clone_state()
    # Kept as a number of 64 bits without a sign.
    other.manual_seed(-5)
    found = []
    for function in (parameterized, run):
        draws.manual_seed(5)
        other.manual_seed(-5)
        for state in (own, other, own):
            draws.graphsafe_set_state(state)
            found.append(function(x))
        draws.graphsafe_set_state(own)
        found.append(torch.tensor([own.get_offset(), other.get_offset()]))
    assert same(found[:4], found[4:])


def test_a_launch_that_fails_draws_nothing_and_the_next_one_is_right(device, monkeypatch):
    """An eager run in its place draws the same numbers."""

    def fails(executable, stream):
        raise driver.DriverError("launching a graph: no")

    x = torch.ones(10000, device=device)
    region = Captured(lambda x: F.dropout(x, 0.5), [x])
    state, launches = torch.cuda.get_rng_state(), region.report["launches"]
    with monkeypatch.context() as patched:
        patched.setattr(driver, "launch", fails)
        with pytest.raises(driver.DriverError):
            region(x)
    assert torch.equal(torch.cuda.get_rng_state(), state) and region.report["launches"] == launches
    result = region(x)
    torch.cuda.set_rng_state(state)
    assert torch.equal(result, F.dropout(x, 0.5))


def test_two_streams_take_turns(device):
    run, make = training(device, 0.0)
    parameterized = Captured(run, make())
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    batches = [make() for _ in range(6)]
    torch.cuda.synchronize()
    results = []
    for index, batch in enumerate(batches):
        with torch.cuda.stream(streams[index % 2]):
            results.append(parameterized(*batch))
    torch.cuda.synchronize()
    for batch, result in zip(batches, results, strict=True):
        assert same(result, run(*batch))


def test_an_input_at_an_odd_address_is_copied_and_written_back(device):
    def run(x, y):
        x.mul_(2)
        return [x + y]

    parameterized = Captured(run, [torch.randn(64, 64, device=device) for _ in range(2)])
    x = torch.randn(64 * 64 + 1, device=device)[1:].view(64, 64)
    y = torch.randn(64, 64, device=device)
    assert x.data_ptr() % 16
    doubled = x * 2
    (result,) = parameterized(x, y)
    assert torch.equal(x, doubled)
    assert torch.equal(result, doubled + y)


def test_nothing_is_held_between_calls_but_the_graph(device):
    run, make = training(device, 0.0, width=1024, layers=4)
    inputs = make()
    expected = run(*inputs)
    torch.cuda.synchronize()
    activations = torch.cuda.max_memory_allocated()
    del expected
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    parameterized = Captured(run, inputs)
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() - before[0] < MIB
    assert torch.cuda.memory_reserved() - before[1] <= 40 * MIB
    assert parameterized.report["arena_bytes"] < activations
    parameterized(*inputs)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() - before[0] < MIB


def storages(results):
    return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in results}


def test_results_hold_their_own_bytes_where_larger_temporaries_lay_before(device):
    def run(x):
        large = (x[None] + torch.arange(64, device=x.device)[:, None]).sum()
        return x * large, x + large

    x = torch.ones(4 * MIB, device=device)
    parameterized = Captured(run, [x])
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    results = parameterized(x)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before <= 1.1 * sum(result.nbytes for result in results)
    assert same(results, run(x))


def test_gradients_of_blocks_hold_what_eagers_hold(device):
    run, make = training(device, 0.1, width=512)
    parameterized, inputs = Captured(run, make()), make()
    before = torch.cuda.memory_allocated()
    results = parameterized(*inputs)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before <= 1.1 * sum(storages(results).values())
    assert max(storages(results).values()) < 4 * MIB
    # A copy is for what two captures cannot tell apart.
    assert parameterized.report["copied_results"] <= len(results) // 2


def test_results_are_freed_one_by_one(device):
    parameterized = Captured(lambda x: [x + 1, x + 2], [torch.ones(MIB, device=device)])
    before = torch.cuda.memory_allocated()
    first, second = parameterized(torch.ones(MIB, device=device))
    assert torch.cuda.memory_allocated() - before == 8 * MIB
    del first
    assert torch.cuda.memory_allocated() - before == 4 * MIB
    assert second.max() == 3


def test_addresses_that_stay_are_not_patched_again(device):
    parameterized = Captured(lambda x: [x.sin().cos()], [torch.ones(1000, device=device)])
    x = torch.ones(1000, device=device)
    result = parameterized(x)
    before = parameterized.report
    assert 0 < before["patch_s"] < 1 and before["patched"] > 0
    del result
    result = parameterized(x)
    assert {**parameterized.report, "launches": before["launches"]} == before
    assert torch.equal(result[0], x.sin().cos())


def test_where_there_are_many_the_oldest_executable_gives_way_and_launches_are_bitwise_eager(device, monkeypatch):
    monkeypatch.setattr(nodes, "_MAX_EXECUTABLES", 4)
    run, make = training(device, dropout=0.1, layers=8)
    parameterized = Captured(run, make())
    before = parameterized.report["executables"]
    assert_like_eager(parameterized, run, make, times=24)
    assert len(parameterized.region._graph.executables) == 4
    assert parameterized.report["executables"] - before > 4


PROFILED = """
import sys
import torch
from graph_worth.capture.parameterized import backend, nodes
from graph_worth.measuring import kernel_trace as trace
from tests.graph_worth.capture.parameterized.test_gpu import Block

nodes._MAX_EXECUTABLES = int(sys.argv[1])
device = torch.device("cuda", torch.cuda.current_device())
counter = torch.ones(9, device=device)
trace.profile(lambda count: [counter.add_(1) for _ in range(count)], 4, 2)
blocks = [Block(256, 0.1).to(device, torch.bfloat16) for _ in range(8)]
held = []


@torch.compile(backend="parameterized", fullgraph=True, dynamic=False)
def net(x):
    for block in blocks:
        x = block(x)
    return x


def steps(count):
    for index in range(count):
        held[:] = held[-3:] + [torch.empty(1 + 65536 * (index % 7), device=device)]
        x = torch.randn(2, 128, 256, device=device, dtype=torch.bfloat16, requires_grad=True)
        net(x).float().square().mean().backward()


with backend.collecting(regions := backend.Regions()):
    steps(4)
before = sum(region.row()["patched"] for region in regions.graphs)
for _ in range(2):
    trace.profile(steps, 8, 200)
    torch.cuda.empty_cache()
print(sum(region.row()["patched"] for region in regions.graphs) - before)
"""


@pytest.mark.parametrize("executables", [64, 1])
def test_a_profiler_after_another_one_survives_addresses_that_move(executables):
    """CUPTI 13.0 ended the process where an executable was given other addresses and its first memory had gone."""
    command = [sys.executable, "-c", PROFILED, str(executables)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) > 4


def test_attention_whose_seeds_are_on_the_cpu_is_refused(device):
    """Memory-efficient attention keeps its seeds on the GPU inside a capture alone."""
    torch.use_deterministic_algorithms(False)
    layer = nn.TransformerEncoderLayer(256, 4, batch_first=True, device=device)
    compiled = torch.compile(layer.forward, backend="parameterized", dynamic=False)
    x = torch.randn(8, 128, 256, device=device, requires_grad=True)
    # The forward graph runs eagerly.
    loss = compiled(x).square().mean()
    refused = pytest.raises(RegionRefused, match="its inputs are on several devices")
    with backend.collecting(regions := backend.Regions()), refused:
        loss.backward()
    torch.cuda.synchronize()
    assert not regions.graphs
    torch._dynamo.reset()


def refusals():
    host = torch.randn(64, 64).pin_memory() if torch.cuda.is_available() else torch.ones(1)
    counter = [0]
    before = functools.cache(lambda device: torch.ones(3, device=device))

    def counts(x):
        counter[0] += 1
        return x * counter[0]

    yield "a value read on the host", lambda x: x * x.sum().item(), "capture failed"
    yield "a copy from the host", lambda x: x + host.to(x.device, non_blocking=True), "memory of the host"
    yield "a number that changes", counts, "differs from eager"
    yield "a result from before", lambda x: [x + 1, before(x.device)], "result 1 was made before the region"


@pytest.mark.parametrize(("run", "message"), [case[1:] for case in refusals()], ids=[case[0] for case in refusals()])
def test_a_region_that_would_be_wrong_is_refused_and_torch_goes_on(device, run, message):
    with pytest.raises(RegionRefused, match=message):
        Captured(run, [torch.randn(64, 64, device=device)])
    assert torch.equal(torch.ones(3, device=device) + 1, torch.full((3,), 2.0, device=device))
    check(lambda x: [F.dropout(x, 0.5)], lambda: [torch.randn(64, 64, device=device)])


def test_a_node_that_cannot_move_is_refused_by_name(device):
    graph, child = (driver.call("cuGraphCreate", 0) for _ in range(2))
    driver.call("cuGraphAddEmptyNode", child, None, 0)
    driver.call("cuGraphAddChildGraphNode", graph, None, 0, child)
    with pytest.raises(RegionRefused, match="node 0 is a graph node"):
        nodes.read_nodes(graph)


def test_a_collective_is_refused_by_name(device):
    triton = pytest.importorskip("triton")

    @triton.jit
    def ncclDevKernel_AllReduce(pointer):
        pass

    def run(x):
        ncclDevKernel_AllReduce[(1,)](x)
        return [x + 1]

    with pytest.raises(RegionRefused, match="is a collective, ncclDevKernel_AllReduce"):
        Captured(run, [torch.ones(8, device=device)])


def test_an_input_on_another_device_is_refused(device):
    region = Captured(lambda x: x + 1, [torch.ones(8, device=device)])
    with pytest.raises(RegionRefused, match="an input is on another device than before"):
        region(torch.ones(8))


def test_a_missed_address_is_found_by_the_first_launches(device, monkeypatch):
    from graph_worth.capture.parameterized import words

    original = words.explain

    def without_the_last(*arguments):
        slots, unexplained = original(*arguments)
        return words.Slots(*(column[:-1] for column in slots)), unexplained

    monkeypatch.setattr(words, "explain", without_the_last)
    with pytest.raises(RegionRefused, match="differs from eager|missed"):
        Captured(lambda x: [x.sin().cos()], [torch.randn(1000, device=device)])


def test_the_generator_is_left_as_it_was(device):
    torch.cuda.manual_seed(5)
    before = torch.cuda.get_rng_state()
    Captured(lambda x: [F.dropout(x, 0.5)], [torch.ones(1000, device=device)])
    assert torch.equal(torch.cuda.get_rng_state(), before)
    assert random_state.generator(device).get_offset() == 0


def test_steady_steps_of_a_model_launch_executables_that_are_there(device):
    torch.manual_seed(0)
    net = nn.Sequential(*[Block(256, 0.1) for _ in range(4)]).to(device, torch.bfloat16)
    regions = backend.Regions()
    torch._dynamo.reset()
    try:
        for block in net:
            block.forward = torch.compile(block.forward, backend="parameterized", fullgraph=True, dynamic=False)
        x = torch.randn(2, 128, 256, device=device, dtype=torch.bfloat16)

        def step():
            for parameter in net.parameters():
                parameter.grad = None
            net(x).float().square().mean().backward()
            return sum(region.row()["executables"] for region in regions.graphs)

        with backend.collecting(regions):
            for _ in range(8):
                before = step()
            made = [step() for _ in range(4)][-1] - before
        assert before >= 8
        # Of 32 launches.
        assert made <= 8
    finally:
        regions.release()
        torch._dynamo.reset()


def test_dropped_regions_give_the_drivers_memory_back(device):
    layers = nn.Sequential(*[nn.Linear(64, 64) for _ in range(50)]).to(device).requires_grad_(False)
    x = torch.ones(8, 64, device=device)

    def drop(count):
        for _ in range(count):
            Captured(layers, [x])
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.synchronize()
        return torch.cuda.mem_get_info()[0]

    # Other processes take and free the GPU's memory, too: what these regions kept would be missing each time.
    assert any(drop(3) - drop(20) < 2 * MIB for _ in range(15))


def test_a_region_inside_a_capture_is_an_error_and_works_afterwards(device):
    x = torch.ones(1000, device=device)
    region = Captured(lambda x: x + 1, [x])
    for call in (lambda: region(x), lambda: Captured(lambda x: x + 2, [x])):
        graph = torch.cuda.CUDAGraph()
        with pytest.raises(CaptureError, match="inside a capture"), torch.cuda.graph(graph):
            call()
        torch.cuda.synchronize()
    assert region(x).unique().tolist() == [2.0]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_region_of_another_device_than_the_current_one():
    other = torch.device("cuda", (torch.cuda.current_device() + 1) % torch.cuda.device_count())
    x = torch.randn(64, 64, device=other)
    region = Captured(lambda x: F.dropout(torch.zeros_like(x) + x @ x, 0.5), [x])
    state = torch.cuda.get_rng_state(other)
    result = region(x)
    torch.cuda.set_rng_state(state, other)
    assert torch.equal(result, F.dropout(torch.zeros_like(x) + x @ x, 0.5))


def test_an_out_of_memory_is_an_error_and_the_next_launch_is_right(device):
    regions = backend.Regions()
    torch._dynamo.reset()
    try:
        compiled = torch.compile(lambda x: (x * 2).sin() + x, backend="parameterized")
        x = torch.ones(64 * MIB, device=device)
        with backend.collecting(regions):
            compiled(x)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        taken = torch.cuda.memory_reserved() / torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction(taken + 1e-4)
        (region,) = regions.graphs
        before = region.num_replays
        with pytest.raises(torch.OutOfMemoryError):
            compiled(x)
        torch.cuda.set_per_process_memory_fraction(1.0)
        assert torch.equal(compiled(x), (x * 2).sin() + x)
        assert region.num_replays == before + 1
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        regions.release()
        torch._dynamo.reset()
