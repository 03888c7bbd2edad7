"""common/triton_launch: the same launches as Triton's own, with a driver that notes them and on a GPU."""

import warnings

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is not installed: pip install triton==3.7.1")

import triton.language as tl  # noqa: E402

from graph_worth.capture import triton_launch  # noqa: E402
from graph_worth.capture.triton_launch import Launch  # noqa: E402
from graph_worth.machine.host_pace import measure_us  # noqa: E402
from tests.helpers import triton_driver  # noqa: E402
from tests.helpers.triton_interpreter import DEVICE, INTERPRETED, on_device, run_interpreted  # noqa: E402

compiled = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
BLOCK = 64
GRID = (3, 2, 1)


@triton.jit(do_not_specialize=["n"])
def _scale(x, y, n, factor, WIDTH: tl.constexpr, OFFSET: tl.constexpr):
    at = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    tl.store(y + at, tl.load(x + at, at < n, other=0.0).to(tl.float32) * factor + OFFSET, at < n)


@pytest.fixture
def make_driver(monkeypatch):
    def make(form=triton_driver.Installed):
        fake = triton_driver.Driver(form)
        monkeypatch.setattr(triton.runtime.driver, "_active", fake)
        monkeypatch.setattr(triton_launch, "_current_device", fake.get_current_device)
        monkeypatch.setattr(triton_launch, "_current_stream", fake.get_current_stream)
        _scale.device_caches.clear()
        return fake

    yield make
    _scale.device_caches.clear()


@pytest.fixture
def through_triton(monkeypatch):
    """A list that grows by one at each kernel[grid](...)."""
    calls, run = [], triton_launch.JITFunction.run

    def counted(self, *args, **kwargs):
        calls.append(self)
        return run(self, *args, **kwargs)

    monkeypatch.setattr(triton_launch.JITFunction, "run", counted)
    return calls


@pytest.fixture
def no_allocator():
    yield
    triton.set_allocator(triton.runtime._allocation.NullAllocator())


def tensors(dtype=torch.float16, offset=0):
    """x and y, each `offset` elements behind an address that is divisible by 16."""
    made = [torch.zeros(192 + 16, dtype=dtype), torch.zeros(192 + 16)]
    starts = [(-tensor.data_ptr() // tensor.element_size()) % 16 + offset for tensor in made]
    return [tensor[start:] for tensor, start in zip(made, starts, strict=True)]


@compiled
@pytest.mark.parametrize("form", [triton_driver.Installed, triton_driver.Spliced, triton_driver.InTuple])
def test_c_gets_what_triton_gives_it(make_driver, through_triton, form):
    driver = make_driver(form)
    scale = Launch(_scale, 2.5, WIDTH=BLOCK, OFFSET=3, num_warps=2)
    scale(GRID, tensors(), (100,))
    # Other addresses, grid, stream, and another number of the same kind.
    grid, given, driver.stream = (5, 1, 4), tensors(), 11
    scale(grid, given, (105,))
    assert len(through_triton) == 1
    _scale[grid](*given, 105, 2.5, WIDTH=BLOCK, OFFSET=3, num_warps=2)
    first, prepared, direct = driver.launches
    assert triton_driver.plain(prepared) == triton_driver.plain(direct) != triton_driver.plain(first)
    assert prepared[:5] == (*grid, 11, 1001)
    rest = prepared[-1] if isinstance(prepared[-1], tuple) else prepared[-6:]
    assert rest == (given[0].data_ptr(), given[1].data_ptr(), 105, 2.5, BLOCK, 3)


@compiled
@pytest.mark.parametrize(
    "changed",
    [
        pytest.param({"dtype": torch.bfloat16}, id="dtype"),
        pytest.param({"offset": 1}, id="alignment"),
        pytest.param({"device": 65}, id="device"),
        pytest.param({"fixed": 1}, id="one"),
        pytest.param({"fixed": 2**31 + 1}, id="64-bit"),
        pytest.param({"constexpr": 128}, id="constexpr"),
        pytest.param({"option": 4}, id="option"),
    ],
)
def test_what_triton_compiles_for_is_prepared_again(make_driver, through_triton, changed):
    driver, launches = make_driver(), {}

    def call(dtype=torch.float16, offset=0, device=64, fixed=7, constexpr=BLOCK, option=1):
        driver.device = device
        constants = (fixed, constexpr, option)
        launch = launches.setdefault((dtype, constants), Launch(_scale, fixed, constexpr, 0, num_warps=option))
        launch(GRID, tensors(dtype, offset), (100,))
        return driver.launches[-1][4]

    usual, other = call(), call(**changed)
    assert len(through_triton) == 2 and usual != other
    # Each has its own from now on.
    for _ in range(2):
        assert call() == usual and call(**changed) == other
    assert len(through_triton) == 2


@compiled
def test_any_number_gets_the_kernel_that_triton_takes(make_driver, through_triton):
    driver, scale, num_prepared = make_driver(), Launch(_scale, 2.5, BLOCK, 0), 0
    numbers = [0, 1, 16, 17, 2**31 - 1, 2**31, 2**31 + 1, 2**40]
    for number in numbers:
        given, calls = tensors(), len(through_triton)
        scale(GRID, given, (number,))
        num_prepared += len(through_triton) == calls
        _scale[GRID](*given, number, 2.5, BLOCK, 0)
        ours, theirs = map(triton_driver.plain, driver.launches[-2:])
        assert ours == theirs, number
    # The first goes through Triton, and those of more than 31 bits.
    assert num_prepared == len(numbers) - 4


@compiled
@pytest.mark.parametrize("aligned", [(True, False), (False, True)])
def test_each_pointer_counts(make_driver, aligned):
    """A kernel that assumes an address to be divisible by 16 reads elsewhere if it is not."""
    driver, scale = make_driver(), Launch(_scale, 2.5, BLOCK, 0)
    patterns = [(True, True), aligned, (False, False)]
    for pattern in 2 * patterns:
        given = [tensors(offset=0 if each else 1)[i] for i, each in enumerate(pattern)]
        scale(GRID, given, (100,))
        _scale[GRID](*given, 100, 2.5, BLOCK, 0)
        ours, theirs = map(triton_driver.plain, driver.launches[-2:])
        assert ours == theirs, pattern
    assert driver.num_loaded == len(patterns) and len(scale.prepared) == len(patterns)


@compiled
def test_a_bound_launch_is_the_same(make_driver, through_triton):
    """With a fresh first tensor, on the stream of each call; unaligned ones get the kernel that Triton takes."""
    driver, scale = make_driver(), Launch(_scale, 2.5, BLOCK, 0)
    given = tensors()
    assert scale.bound(GRID, given, (100,)) is None  # nothing is prepared yet
    scale(GRID, given, (100,))
    again, with_fresh = (scale.bound(GRID, given, (100,), num_fresh=count) for count in (0, 1))
    assert scale.bound(GRID, given, (2**31,)) is None
    for stream, offset in ((7, 0), (11, 0), (11, 1)):
        driver.stream, x = stream, tensors(offset=offset)[0]
        for launch, source in ((lambda: again(), given[0]), (lambda: with_fresh(x), x)):  # noqa: B023
            launch()
            _scale[GRID](source, given[1], 100, 2.5, BLOCK, 0)
            ours, theirs = map(triton_driver.plain, driver.launches[-2:])
            assert ours == theirs, (stream, offset)
    # The first, the six that it is compared with, and the unaligned one.
    assert len(through_triton) == 8


@compiled
@pytest.mark.parametrize("form", [triton_driver.Reversed, triton_driver.WithScratch])
def test_another_way_to_launch_is_left_to_triton(make_driver, through_triton, no_allocator, form):
    allocated, driver = [], make_driver(form)
    triton.set_allocator(lambda *size: allocated.append(size))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        for factor in (2.5, 3.5):
            scale = Launch(_scale, factor, BLOCK, 0)
            for _ in range(3):
                scale(GRID, tensors(), (100,))
            assert not scale.direct
    assert len(through_triton) == len(driver.launches) == 6
    assert [str(each.message) for each in said] == [triton_launch.UNKNOWN]
    assert len(allocated) == (6 if form is triton_driver.WithScratch else 0)


@compiled
def test_while_compiling_the_kernel_is_called_as_ever(make_driver, through_triton, monkeypatch):
    make_driver()
    scale = Launch(_scale, 2.5, BLOCK, 0)
    for _ in range(2):
        scale(GRID, tensors(), (100,))
    assert len(through_triton) == 1
    monkeypatch.setattr(triton_launch, "_is_compiling", lambda: True)
    for _ in range(2):
        scale(GRID, tensors(), (100,))
    assert len(through_triton) == 3


@on_device
def test_result_and_who_launches():
    scale = Launch(_scale, 2.5, BLOCK, 7)
    assert scale.direct == (not INTERPRETED)
    for count in (100, 130, 130):
        x, y = torch.arange(192.0, device=DEVICE), torch.zeros(192, device=DEVICE)
        scale(GRID, (x, y), (count,))
        assert torch.equal(y[:count], x[:count] * 2.5 + 7) and not y[count:].any()
    assert len(scale.prepared) == (0 if INTERPRETED else 1)


@pytest.mark.gpu
def test_bitwise_on_streams_in_graphs_and_unaligned(through_triton):
    """On a stream of its own, in a graph, whose replays read new values, and with pointers that are not aligned."""
    from graph_worth.capture.pool import Pool

    with torch.cuda.stream(torch.cuda.Stream()):
        for offset in (0, 1):
            x = torch.randn(1000 + offset, device="cuda").half()[offset:]
            y, expected = (torch.zeros(1000 + offset, device="cuda")[offset:] for _ in range(2))
            scale, grid = Launch(_scale, 1 / 3, BLOCK, 0), (16, 1, 1)
            for _ in range(2):
                scale(grid, (x, y), (999,))
            assert list(scale.prepared.values()) and len(through_triton) == 1
            _scale[grid](x, expected, 999, 1 / 3, BLOCK, 0)
            assert torch.equal(y, expected) and y.count_nonzero() > 900
            pool = Pool("cuda")
            graph, _ = pool.capture(lambda: scale(grid, (x, y), (999,)), static_inputs=(x,))  # noqa: B023
            assert len(through_triton) == 2
            x.normal_()
            y.zero_()
            graph.replay()
            _scale[grid](x, expected, 999, 1 / 3, BLOCK, 0)
            assert torch.equal(y, expected)
            torch.cuda.synchronize()
            pool.release()
            through_triton.clear()


@pytest.mark.gpu
def test_the_order_of_a_stream_is_kept():
    """A launch that went to another stream would read before the long product is there."""
    side = torch.cuda.Stream()
    x, y = torch.zeros(4096, 4096, device="cuda"), torch.zeros(2**24, device="cuda")
    scale = Launch(_scale, 1.0, 1024, 0)
    scale((2**14, 1, 1), (x, y), (2**24,))
    for stream in (torch.cuda.default_stream(), side, side):
        torch.cuda.synchronize()
        x.zero_()
        y.zero_()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            x.fill_(3.0)
            scale((2**14, 1, 1), (x, y), (2**24,))
        stream.synchronize()
        assert (y == 3).all()
    assert len(scale.prepared) == 1


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_on_two_gpus():
    scale, results = Launch(_scale, 1 / 3, BLOCK, 0), []
    for _ in range(2):
        for index in range(2):
            with torch.cuda.device(index):
                x, y = torch.arange(192.0, device="cuda"), torch.zeros(192, device="cuda")
                scale((3, 1, 1), (x, y), (192,))
                results.append(y.cpu())
    assert all(torch.equal(result, results[0]) for result in results) and results[0].any()
    assert len(scale.prepared) == 2


def losses_gradient():
    """Ten pointers and three numbers: the most of all."""
    from rnnt.kernels.loss import _launches

    gradient = _launches(64, 64, 63, torch.float16)[2]
    logits = torch.zeros(1, 2, 2, 64, dtype=torch.float16, device="cuda")
    tokens, lengths = (
        torch.zeros(1, 1, dtype=torch.int64, device="cuda"),
        torch.ones(1, dtype=torch.int32, device="cuda"),
    )
    log_sums, lattice = torch.zeros(1, 2, 2, device="cuda"), torch.zeros(1, 3, 64, device="cuda")
    pointers = (logits, torch.ones(1, device="cuda"), tokens, lengths, lengths, log_sums, *[lattice] * 4)
    return lambda: gradient((1, 1, 1), pointers, (4, 2, 2))


@pytest.mark.gpu
def test_a_launch_costs_the_host_no_more_than_an_eager_operator():
    launch, operand = losses_gradient(), torch.zeros(1, device="cuda")
    issues = {"operator": lambda: operand.add_(1.0), "launch": launch}
    # Interleaved, the fastest of each: other work on the host only adds.
    times = [{name: measure_us(issue, torch.cuda.synchronize, 0.5) for name, issue in issues.items()} for _ in range(5)]
    us = {name: min(each[name] for each in times) for name in issues}
    assert us["launch"] <= us["operator"], us


@pytest.mark.slow
def test_in_the_interpreter():
    run_interpreted(__file__)
