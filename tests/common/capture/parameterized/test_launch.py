"""GpuRegion over a made-up driver: executables, arenas, random numbers, lifetimes, what fails and what is refused."""

import ctypes
import gc
import struct
import threading
import time
import weakref

import pytest
import torch

from common.capture.checks import CaptureError, RegionRefused
from common.capture.parameterized import analysis, driver, gpu, random_state
from common.capture.parameterized.backend import Region
from tests.helpers import fake_driver
from tests.helpers.fake_driver import CUresult, words_at
from tests.helpers.fake_regions import CPU, Pools, added, address, floats, place


@pytest.fixture
def fake(monkeypatch):
    return fake_driver.install(monkeypatch)


def layer(fake):
    """A temporary tensor, x + w, and a result, twice x + the temporary one; w is a parameter."""

    def program(inputs, seeds, blocks):
        (x, w), (temporary, out) = inputs, blocks
        return [added(temporary, x, w), ("memset", out, 0, 32), added(out, temporary, x, 2.0), ("empty",)]

    return Pools(fake, program, [floats(0), floats(1)], [(0, 512, 32), (1024, 4096, 32)], [place(3)])


def expected(x, w):
    return x + w + 2 * x


def test_a_launch_computes_on_the_memory_of_its_caller_and_results_belong_to_it(fake):
    region = layer(fake).region()
    kept = [(floats(n), floats(n + 1)) for n in range(4)]
    results = [region.launch([x, w])[0][0] for x, w in kept]
    for (x, w), result in zip(kept, results, strict=True):
        assert torch.equal(result, expected(x, w))
    assert region.report["launches"] == 4


def test_each_set_of_addresses_has_an_executable_and_steady_steps_make_none(fake):
    region = layer(fake).region()
    weights = [floats(10 + n) for n in range(3)]
    xs = [floats(20 + n) for n in range(3)]
    # The caching allocator gives a steady step the same memory.
    arenas = [[torch.empty(size, dtype=torch.uint8) for size in region._sizes] for _ in weights]

    def step():
        for index, (x, w) in enumerate(zip(xs, weights, strict=True)):
            region._launch([x, w], arenas[index])
        return region.report["patched"]

    first = step()
    assert region.report["executables"] == len(fake.executables) == 3
    assert region.report["driver_bytes"] == 3 * 1024
    assert first == 3 * 3
    fake.set.clear()
    assert step() == first and not fake.set
    # A new executable sets all of the region's nodes with parameters.
    kept = [xs[1], floats(99), floats(98)]
    for number, count in ((1, 3), (2, 6)):
        xs[1] = kept[number]
        assert step() == first + count and len(fake.set) == count
    assert region.report["executables"] == len(fake.executables) == 5


@pytest.fixture
def turns(fake, monkeypatch):
    """A region of two executables, and launch(x, w), which tells how many nodes it set and executables it made."""
    monkeypatch.setattr(gpu, "_MAX_EXECUTABLES", 2)
    region = layer(fake).region()
    arenas = [torch.empty(size, dtype=torch.uint8) for size in region._sizes]

    def launch(x, w):
        made = region.report["executables"]
        fake.set.clear()
        region._launch([x, w], arenas)
        assert torch.equal(region._result(region._results[0], [x, w], arenas), expected(x, w))
        assert len(fake.executables) <= 2 and len(region._executables) == len(fake.executables)
        return len(fake.set), region.report["executables"] - made

    yield region, launch
    region.release()


def test_more_sets_of_addresses_than_executables_set_what_moved_in_the_nearest_one(fake, turns):
    region, launch = turns
    xs, weights = [floats(n) for n in range(3)], [floats(n + 50) for n in range(3)]
    assert [launch(xs[0], weights[0]), launch(xs[1], weights[1])] == [(3, 1), (3, 1)]
    # The weights are read by one node, x by two. Both layers keep an executable.
    assert [launch(xs[2], weights[0]), launch(xs[2], weights[1])] == [(2, 0), (2, 0)]
    assert [launch(xs[2], weights[0]), launch(xs[0], weights[0])] == [(0, 0), (2, 0)]
    assert [launch(xs[0], weights[2]), launch(xs[2], weights[1])] == [(1, 0), (0, 0)]
    assert region.report["driver_bytes"] == 2 * 1024 and region.report["patched"] == 3 + 3 + 2 + 2 + 2 + 1


def test_an_executable_is_made_anew_where_memory_that_it_was_made_with_may_have_gone(fake, turns):
    _, launch = turns
    xs, w = [floats(n) for n in range(4)], floats(50)
    assert [launch(x, w) for x in xs[:3]] == [(3, 1), (3, 1), (2, 0)]
    fake.num_frees += 1
    # One has the addresses that it was made with, the other one was moved.
    assert [launch(x, w) for x in (xs[1], xs[2], xs[2])] == [(0, 0), (3, 1), (0, 0)]
    fake.num_frees += 1
    assert [launch(xs[3], w), launch(xs[3], w)] == [(3, 1), (0, 0)]


def test_a_failure_while_an_executable_is_moved_drops_it(fake, turns):
    _, launch = turns
    xs, w = [floats(n) for n in range(3)], floats(50)
    assert [launch(x, w) for x in xs[:2]] == [(3, 1), (3, 1)]
    fake.error = {"cuGraphExecKernelNodeSetParams": CUresult.CUDA_ERROR_UNKNOWN}
    with pytest.raises(driver.DriverError, match="cuGraphExecKernelNodeSetParams"):
        launch(xs[2], w)
    assert len(fake.executables) == 1
    fake.error = {}
    assert launch(xs[2], w) == (3, 1)


def test_a_region_that_is_dropped_frees_its_executables_and_release_frees_them_once(fake):
    region, weights = layer(fake).region(), [floats(1), floats(2)]
    for w in weights:
        region.launch([floats(0), w])
    assert len(fake.executables) == 2 and not fake.destroyed
    del region
    gc.collect()
    assert not fake.executables and len(fake.destroyed) == 3
    region = layer(fake).region()
    region.launch([floats(0), floats(1)])
    region.release()
    region.release()
    assert len(fake.destroyed) == 5
    with pytest.raises(CaptureError, match="was released"):
        region.launch([floats(0), floats(1)])


def test_a_region_holds_its_function_until_release_and_a_driver_that_fails_stops_no_release(fake):
    """The graph reads tensors that only the function's closure holds at their addresses."""

    def make():
        three = torch.full((4,), 3.0)
        return layer(fake).region(lambda x: x * three), weakref.ref(three)

    region, three = make()
    gc.collect()
    assert three() is not None
    fake.error = {name: CUresult.CUDA_ERROR_UNKNOWN for name in ("cuGraphExecDestroy", "cuGraphDestroy")}
    region.release()
    gc.collect()
    assert three() is None


def test_a_tensor_that_a_region_reads_besides_its_inputs_is_held_and_no_launch_reads_another_one(fake):
    pools = layer(fake)
    owner = torch.ones(8)
    pools.analysis.read.append(owner.untyped_storage())
    region = pools.region()
    x, w = floats(0), floats(1)
    region.launch([x, w])
    held = owner.untyped_storage()
    owner.data = torch.zeros(8)
    assert held.nbytes() == 32 and held.data_ptr()
    del held
    with pytest.raises(CaptureError, match="besides its inputs was replaced"):
        region.launch([x, w])


def test_only_launches_that_change_a_node_cost_host_seconds_and_a_row_counts_them(fake, monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr(gpu.time, "perf_counter", lambda: next(clock))
    region = Region("forward 0", "parameterized")
    region.captured = layer(fake).region()
    arenas = [torch.empty(size, dtype=torch.uint8) for size in region.captured._sizes]
    x, w, other = floats(0), floats(1), floats(2)
    for inputs in ([x, w], [x, w], [x, other]):
        region.captured._launch(inputs, arenas)
    row = region.row()
    assert (row["launches"], row["patched"], row["patch_s"]) == (3, 3 + 0 + 3, 2.0)
    region.stop("moved")
    assert {**row, "state": "eager", "reason": "moved"} == region.row() and region.num_replays == 3


def results_beside_a_large_temporary(fake, second_offset):
    """A temporary tensor of 32 KiB, freed, and a result of 32 bytes in its memory, in the second capture elsewhere."""

    def program(inputs, seeds, blocks):
        (x,), (temporary, out) = inputs, blocks
        return [("memset", temporary, 0, 1 << 15), added(temporary, temporary, x, 3.0), added(out, temporary, x, 1.0)]

    return Pools(fake, program, [floats(0)], [(0, 0, 1 << 15), (512, second_offset, 32)], [place(2)])


@pytest.mark.parametrize(("second_offset", "copies"), [(1 << 15, 0), (512, 1)])
def test_a_result_never_shares_a_block_with_a_larger_temporary(fake, second_offset, copies):
    """In its bytes alone where two captures tell it from the temporary tensor, else in a copy."""
    pools = results_beside_a_large_temporary(fake, second_offset)
    region = pools.region()
    x = floats(5)
    (result,), arenas = region.launch([x])
    assert torch.equal(result, 4 * x)
    assert result.untyped_storage().nbytes() <= 1.1 * result.nbytes
    assert region.report["copied_results"] == copies
    assert sorted(arena.nbytes for arena in arenas) == [32, 1 << 15]


def drawing(fake):
    """Writes the seed and the offset that it is given into a result, then 8 beside them."""

    def draw(out, state):
        out, seed, offset = struct.unpack("<Q", out)[0], *struct.unpack("<QQ", state)
        words_at(out, 2, ctypes.c_longlong).copy_(
            torch.cat([words_at(seed, 1, ctypes.c_longlong), words_at(offset, 1, ctypes.c_longlong)])
        )

    def program(inputs, seeds, blocks):
        return [("kernel", draw, [address(blocks[0]), address(*seeds)])]

    return Pools(fake, program, [floats(0)], [(0, 0, 16)], [place(1, (2,), dtype=torch.int64)], increment=8)


class Draws:
    """Generator of a GPU, with states that are swapped as Transformer Engine and Megatron do."""

    def __init__(self, seed=7, offset=100):
        self.state = [seed, offset]

    def initial_seed(self):
        return self.state[0]

    def get_offset(self):
        return self.state[1]

    def set_offset(self, offset):
        self.state[1] = offset

    def graphsafe_get_state(self):
        other = type(self)()
        other.state = self.state
        return other

    def graphsafe_set_state(self, other):
        self.state = other.state

    def clone_state(self):
        return type(self)(*self.state)

    def manual_seed(self, seed):
        self.state[:] = seed % 97, 0


@pytest.fixture
def draws(monkeypatch):
    made = Draws()
    monkeypatch.setattr(random_state, "generator", lambda device: made)
    return made


def test_seed_and_offset_belong_to_a_launch_though_it_runs_after_the_next_was_queued(fake, draws, monkeypatch):
    region = drawing(fake).region()
    queue, held, full = [], [], torch.full

    def hold(*arguments, **options):
        # A GPU frees memory in the order of a stream.
        held.append(full(*arguments, **options))
        return held[-1]

    def later(executable, stream):
        kept = dict(fake.executables[executable.value])
        queue.append(lambda: [fake.functions[rest[0]][0](*rest[2]) for kind, *rest in kept.values()])
        return 0

    monkeypatch.setattr(torch, "full", hold)
    monkeypatch.setattr(driver, "_graph_launch", lambda: later)
    results = [region.launch([floats(0)])[0][0] for _ in range(2)]
    for run in reversed(queue):
        run()
    assert [result.tolist() for result in results] == [[7, 100], [7, 108]]
    assert draws.get_offset() == 116


def test_a_launch_draws_from_the_state_that_the_generator_has_now(fake, draws):
    region = drawing(fake).region()
    own, swapped = draws.graphsafe_get_state(), Draws((1 << 64) - 5, 40)
    draws.graphsafe_set_state(swapped)
    assert region.launch([floats(0)])[0][0].tolist() == [-5, 40]
    draws.graphsafe_set_state(own)
    assert region.launch([floats(0)])[0][0].tolist() == [7, 100]
    assert (swapped.get_offset(), own.get_offset()) == (48, 108)


@pytest.mark.parametrize("call", ["cuGraphInstantiate", "cuGraphLaunch", "cuGraphKernelNodeSetParams"])
def test_a_launch_that_fails_draws_nothing_and_the_next_one_is_right(fake, draws, call):
    """An eager run in its place draws the same numbers."""
    region = drawing(fake).region()
    fake.error = {call: CUresult.CUDA_ERROR_UNKNOWN}
    with pytest.raises(driver.DriverError, match="CUDA_ERROR_UNKNOWN|999"):
        region.launch([floats(0)])
    assert (draws.get_offset(), region.report["launches"]) == (100, 0)
    fake.error = {}
    assert region.launch([floats(0)])[0][0].tolist() == [7, 100]


def test_a_capture_puts_the_generators_state_aside_and_other_threads_draw_nothing_meanwhile(fake, draws):
    region, failures = drawing(fake).region(), []

    def other():
        try:
            region.launch([floats(0)])
        except CaptureError as error:
            failures.append(str(error))

    with random_state.aside(CPU):
        assert draws.initial_seed() != 7
        draws.set_offset(4000)
        assert region.launch([floats(0)])[0][0].tolist() == [draws.initial_seed(), 4000]
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert (draws.initial_seed(), draws.get_offset()) == (7, 100)
    assert len(failures) == 1 and "while another thread captures" in failures[0]


def test_a_failure_while_addresses_are_set_leaves_no_node_at_an_old_one(fake):
    region = layer(fake).region()
    x, w = floats(0), floats(1)
    first, second = ([torch.empty(size, dtype=torch.uint8) for size in region._sizes] for _ in range(2))
    region._launch([x, w], first)
    for call, message in (
        ("cuGraphMemsetNodeSetParams", "MemsetNodeSetParams"),
        ("cuGraphInstantiate", "Instantiate"),
    ):
        fake.error = {call: CUresult.CUDA_ERROR_UNKNOWN}
        with pytest.raises(driver.DriverError, match=message):
            region._launch([x, w], second)
    fake.error = {}
    for arena in second:
        arena.fill_(0xFF)
    region._launch([x, w], second)
    assert torch.equal(region._result(region._results[0], [x, w], second), expected(x, w))


def test_whatever_fails_before_a_launch_leaves_the_region_eager_and_an_error_after_it_is_raised(fake, monkeypatch):
    def region_of(captured):
        made = Region("forward 0", "parameterized")
        made.captured = captured
        return made

    def no_memory(*arguments, **options):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")

    region = region_of(layer(fake).region())
    inputs = [floats(0), floats(1)]
    assert region.launch(inputs) is not None
    with monkeypatch.context() as patched:
        patched.setattr(gpu.torch, "empty", no_memory)
        assert region.launch(inputs) is None
    assert (region.state, region.reason) == ("eager", "a launch failed: CUDA out of memory. Tried to allocate")
    assert region.num_replays == 1 and not fake.executables

    region = region_of(layer(fake).region())
    monkeypatch.setattr(gpu.GpuRegion, "_result", no_memory)
    with pytest.raises(torch.OutOfMemoryError):
        region.launch(inputs)
    assert region.state == "parameterized"


def test_an_input_on_another_device_leaves_the_region_eager(fake):
    """Attention that runs eagerly returns its seeds on the CPU, where a kernel would read them in a launch."""
    region = Region("backward 0", "parameterized")
    region.captured = layer(fake).region()
    region.captured._on_gpu = True
    assert region.launch([floats(0), floats(1)]) is None
    assert (region.state, region.reason) == ("eager", "a launch failed: an input is on another device than before")


def test_a_launch_inside_a_capture_is_an_error(fake, monkeypatch):
    region = Region("forward 0", "parameterized")
    region.captured = layer(fake).region()
    monkeypatch.setattr(gpu.torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(CaptureError, match="runs inside a capture"):
        region.launch([floats(0), floats(1)])
    assert region.state == "parameterized" and region.num_replays == 0


def test_a_launch_is_made_with_the_regions_device_as_the_current_one(fake, monkeypatch):
    region, entered = layer(fake).region(), []
    monkeypatch.setattr(gpu.torch.cuda, "device", lambda device: entered.append(device) or torch.no_grad())
    region.launch([floats(0), floats(1)])
    assert entered == [CPU]


def test_threads_launch_one_region_at_a_time(fake, monkeypatch):
    region, wrong = layer(fake).region(), []

    def slow(executable, stream):
        time.sleep(1e-4)
        return fake.launch(executable, stream)

    def work(seed):
        for n in range(20):
            x, w = floats(seed + n), floats(seed + n + 1)
            if not torch.equal(region.launch([x, w])[0][0], expected(x, w)):
                wrong.append(seed)

    monkeypatch.setattr(driver, "_graph_launch", lambda: slow)
    threads = [threading.Thread(target=work, args=(1000 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and region.report["launches"] == 80


def test_a_capture_refuses_memory_history_of_the_user(monkeypatch):
    monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: True, raising=False)
    with pytest.raises(RegionRefused, match="memory history is being recorded"):
        analysis.analyse(None, [], CPU)


@pytest.mark.parametrize("version", [None, 12090])
def test_without_cuda_bindings_13_a_region_is_refused_in_one_line(fake, monkeypatch, version):
    driver.require()
    if version is None:
        monkeypatch.setattr(driver, "cu", None)
    else:
        monkeypatch.setattr(fake, "CUDA_VERSION", version, raising=False)
    with pytest.raises(
        RegionRefused, match="^parameterized launches need cuda-bindings: pip install 'cuda-bindings==13"
    ):
        driver.require()


def test_the_second_capture_holds_what_operators_make_and_finds_what_they_read_besides():
    three, x = torch.full((4,), 3.0), torch.ones(4)
    mode = analysis._Seen(CPU, holds=True)
    with mode:
        addresses = [(x * three + n).data_ptr() for n in range(5)]
    assert len(set(addresses)) == 5 and len(mode.made) == 10
    mode.keep_outside([(x.data_ptr(), x.nbytes)])
    assert [storage.data_ptr() for storage in mode.read.values()] == [three.data_ptr()] and not mode.made
