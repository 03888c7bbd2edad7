"""rnnt/lstm_kernel: its source, run on the CPU, against the same in torch; what is launched; and on a GPU."""

import contextlib
import ctypes
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rnnt import lstm as lstm_module
from rnnt import lstm_kernel
from rnnt.lstm import Common, Layer, Steps, lstm, turns
from tests.lstm_cases import close, random, run_stack, stack_of, torch_lstm, weights_of

ROOT = Path(__file__).resolve().parent.parent
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ to run the kernel's source on the CPU")


# ------------------------------------------------------------------------------------------------
# What is launched


@pytest.mark.parametrize("gpu", [{"major": 8}, {"multi_processor_count": 60}])
def test_a_gpu_that_cannot_hold_all_blocks_is_refused(monkeypatch, gpu):
    h200 = {"name": "GPU", "major": 9, "minor": 0, "multi_processor_count": 132}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**h200))
    lstm_kernel.require(torch.device("cuda"), "persistent", 1024)
    # Two layers at the same time, on two streams.
    lstm_kernel.require(torch.device("cuda"), "persistent", 1024, 512)
    with pytest.raises(
        ValueError, match="^--lstm wavefront: .* and 192 multiprocessors, GPU has 9.0 and 132: take cudnn"
    ):
        lstm_kernel.require(torch.device("cuda"), "wavefront", 2048, 1024)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**h200 | gpu))
    with pytest.raises(ValueError, match="--lstm persistent: takes a GPU of .* and 64 multiprocessors.*: take cudnn"):
        lstm_kernel.require(torch.device("cuda"), "persistent", 1024)


def test_a_kernel_that_gave_up_ends_the_run(monkeypatch):
    status = torch.zeros((), dtype=torch.int32)
    monkeypatch.setattr(lstm_kernel._Device, "of", lambda device: SimpleNamespace(status=status))
    lstm_kernel.check(torch.device("cuda"))
    status.fill_(1)
    with pytest.raises(RuntimeError, match="waited in vain"):
        lstm_kernel.check(torch.device("cuda"))


class Launches:
    """Stands for a GPU: keeps what is launched, and has places for so many clusters of each size."""

    def __init__(self, monkeypatch, places):
        self.kept, self.index = [], 0
        self.status = torch.zeros((), dtype=torch.int32)
        attribute, config = (
            (lambda: SimpleNamespace(value=SimpleNamespace(clusterDim=SimpleNamespace()))),
            SimpleNamespace,
        )
        driver = SimpleNamespace(
            CUlaunchAttribute=attribute,
            CUlaunchAttributeID=SimpleNamespace(CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION=4),
            CUlaunchConfig=config,
            cuOccupancyMaxActiveClusters=lambda kernel, launch: (0, places[launch.attrs[0].value.clusterDim.x]),
        )
        monkeypatch.setitem(sys.modules, "cuda", SimpleNamespace(bindings=SimpleNamespace(driver=driver)))
        monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(driver=driver))
        monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
        monkeypatch.setattr(lstm_kernel._Device, "of", lambda device: self)
        kernels = lambda index, hidden, units, cluster: (("forward", cluster), ("backward", cluster))  # noqa: E731
        monkeypatch.setattr(lstm_kernel, "_kernels", kernels)
        lstm_kernel._cluster.cache_clear()

    def launch(self, kernel, num_blocks, work):
        self.kept.append((*kernel, num_blocks))


@pytest.mark.parametrize(
    "places, one, two",
    [({4: 32, 2: 66}, 4, 4), ({4: 20, 2: 64}, 4, 2), ({4: 20, 2: 40}, 4, 1), ({4: 3, 2: 40}, 2, 1)],
)
def test_launches_have_blocks_for_each_layer_and_clusters_that_fit(monkeypatch, places, one, two):
    gpu = Launches(monkeypatch, places)
    for at_once in (1, 2):
        layers = [Layer(torch.zeros(1).half(), torch.empty(4096, 1024).half()) for _ in range(2)]
        stack = lstm_kernel.bind(layers, Common(9, at_once=at_once))
        for turn in (((0, 0, 4),), ((0, 4, 8), (1, 0, 4)))[:at_once]:
            lstm_kernel.forward(stack, turn)
            lstm_kernel.backward(stack, turn)
    # Sums have one order in all turns of a stack.
    expected = [("forward", one, 64), ("backward", one, 64), ("forward", two, 64), ("backward", two, 64)]
    assert gpu.kept == [*expected, ("forward", two, 128), ("backward", two, 128)]
    lstm_kernel._cluster.cache_clear()


# ------------------------------------------------------------------------------------------------
# The kernel's source on the CPU


class Host:
    """The kernels for one width, as rnnt.lstm_kernel has them, with a status of their own."""

    def __init__(self, folder, hidden, units=16, cluster=4, patience=20_000):
        self.hidden, self.units = hidden, units
        library = folder / f"lstm{hidden}_{units}_{cluster}_{patience}.so"
        defines = f"-DHIDDEN={hidden}", f"-DUNITS={units}", f"-DCLUSTER={cluster}", f"-DPATIENCE={patience}u"
        source = "-Irnnt", "tests/lstm_on_host.cpp", "-o", library
        # Checks of the library would take a jump between the stacks of two fibers for a mistake.
        flags = "-O1", "-w", "-std=c++17", "-shared", "-fPIC", "-pthread", "-U_FORTIFY_SOURCE"
        command = ["g++", *flags, *defines, *source]
        if not library.exists():
            subprocess.run(command, cwd=ROOT, check=True)
        self.library = ctypes.CDLL(library)
        self.run = self.library.run
        self.status = torch.zeros((), dtype=torch.int32)

    def launch(self, stack, turn, is_forward, units, absent=-1):
        layers, common, _ = stack
        addresses = [lstm_kernel.pointers(layer) for layer in layers]
        work = lstm_kernel.pack(addresses, lstm_kernel.shared(common, self.status), turn)
        self.run(work, is_forward, len(turn) * self.hidden // units, absent)

    def forward(self, stack, turn, **how):
        self.launch(stack, turn, True, self.units, **how)

    def backward(self, stack, turn, **how):
        self.launch(stack, turn, False, 16, **how)


EMPTY = -1


def bound_forward(layers, inputs, lengths=None, extra=0, kept=None):
    """A stack of layers that do not feed each other, of what they are given, and nothing of what they compute."""
    num, steps, _, gates = inputs.shape
    shape = num, steps, 8, gates // 4

    def made(*of, like=torch.half):
        return torch.full(of, float("nan"), dtype=like)

    h = torch.full(shape, EMPTY, dtype=torch.int16).view(torch.half)
    cells, all_gates, output, state = (
        made(*shape),
        made(*shape, 4),
        made(*shape),
        made(num, 8, gates // 4, like=torch.float),
    )
    return Steps.bind(
        [
            Layer(
                given=inputs[index],
                weights=w_hh,
                bias=b_hh,
                h=h[index],
                cells=cells[index],
                gates=all_gates[index],
                output=None if kept is None else output[index],
                kept=None if kept is None else kept[index],
                state=state[index],
            )
            for index, (_, w_hh, _, b_hh) in enumerate(layers)
        ],
        Common(steps, lengths, extra, 1.25),
    )


def bound_backward(layers, grads, after, kept=None):
    """The backward of what `bound_forward` gave, after its turns."""
    num, steps, _, hidden = grads.shape
    grad_gates = torch.full((num, steps, 8, 4 * hidden), EMPTY, dtype=torch.int16).view(torch.half)
    grad_bias, state = torch.full((num, 4 * hidden), float("nan")).half(), torch.full((num, 8, hidden), float("nan"))
    sums = torch.full((num, 4 * hidden), float("nan"))
    done, common, _ = after
    return Steps.bind(
        [
            Layer(
                given=grads[index],
                weights=w_hh,
                cells=done[index].cells,
                gates=done[index].gates,
                kept=None if kept is None else kept[index],
                grad_gates=grad_gates[index],
                grad_bias=grad_bias[index],
                state=state[index],
                sums=sums[index],
            )
            for index, (_, w_hh, _, _) in enumerate(layers)
        ],
        common,
    )


def same(found, expected, names, end=None):
    for one, other in zip(found[0], expected[0], strict=True):
        for name in names:
            a, b = getattr(one, name), getattr(other, name)
            close(a if end is None else a[:end], b if end is None else b[:end], 1e-3)


def whole(num, steps):
    """All time steps in one turn."""
    return [tuple((index, 0, steps) for index in range(num))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("lstm")


@needs_compiler
@pytest.mark.parametrize(
    "hidden, units, cluster, steps",
    [
        (256, 16, 4, 4),
        (256, 8, 2, 3),
        (256, 8, 1, 3),
        pytest.param(1024, 16, 1, 3, marks=pytest.mark.slow),
        pytest.param(1024, 16, 4, 3, marks=pytest.mark.slow),
    ],
)
def test_the_kernels_compute_what_torch_does(folder, hidden, units, cluster, steps):
    host, layers = Host(folder, hidden, units, cluster), [weights_of(1, hidden, scale=2.0)]
    inputs, grads = random(1, steps, 8, 4 * hidden), random(1, steps, 8, hidden, seed=1)
    found, expected = (bound_forward(layers, inputs) for _ in range(2))
    host.forward(found, *whole(1, steps))
    Steps.forward(expected, *whole(1, steps))
    same(found, expected, ("h", "cells", "gates"))
    back, expected_back = (bound_backward(layers, grads, expected) for _ in range(2))
    host.backward(back, *whole(1, steps))
    Steps.backward(expected_back, *whole(1, steps))
    same(back, expected_back, ("grad_gates", "grad_bias"))
    assert host.status == 0


STRETCHES = [((0, 0, 2),), ((0, 2, 5), (1, 0, 2)), ((1, 2, 5), (0, 5, 6)), ((1, 5, 6),)]


@needs_compiler
@pytest.mark.parametrize(
    "cluster, longest",
    [(4, None), (4, 5), (4, 0), (1, 2)]
    + [
        pytest.param(*each, marks=pytest.mark.slow)
        for each in ((4, 6), (4, 4), (4, 2), (4, 1), (1, None), (1, 6), (1, 4), (1, 1))
    ],
)
def test_stretches_of_two_layers_side_by_side_change_no_bit(folder, cluster, longest):
    host = Host(folder, 256, 16, cluster)
    layers, inputs, grads = stack_of(2, 1, 256), random(2, 6, 8, 1024), random(2, 6, 8, 256, seed=1)
    lengths = None if longest is None else torch.tensor([0, 0, longest, *[0] * 5], dtype=torch.int32)
    end = 6 if longest is None else longest
    kept = torch.empty(2, 6, 8, 256, dtype=torch.uint8).bernoulli_(0.8, generator=torch.Generator().manual_seed(0))

    def compute(run, order):
        stack = bound_forward(layers, inputs, lengths, kept=kept)
        for turn in order:
            run.forward(stack, turn)
        back = bound_backward(layers, grads, stack, kept=kept)
        for turn in reversed(order):
            run.backward(back, turn)
        return stack, back

    alone = [((0, 0, 6),), ((1, 0, 6),)]
    (found, back), (one, one_back), (torchs, torchs_back) = (
        compute(host, STRETCHES), compute(host, alone), compute(Steps, STRETCHES)
    )  # fmt: skip
    for stack, other, names in ((found, one, ("h", "output")), (back, one_back, ("grad_gates",))):
        for layer, same_layer in zip(stack[0], other[0], strict=True):
            for name in names:
                assert torch.equal(getattr(layer, name), getattr(same_layer, name))
                assert not getattr(layer, name)[end:].any()
    if end:
        # grad_bias sums in another order.
        for stack, stack_back in ((found, back), (torchs, torchs_back)):
            same(stack, one, ("h", "output", "cells", "gates"), end)
            same(stack_back, one_back, ("grad_gates", "grad_bias"))
        assert not torch.equal(found[0][0].output, found[0][0].h)
    else:
        assert not any(layer.grad_bias.any() for layer in (*back[0], *one_back[0], *torchs_back[0]))
    assert host.status == 0


@needs_compiler
@pytest.mark.parametrize("cluster, longest, extra", [(4, 2, 1), (1, 3, 0), (4, 0, 0), (4, 9, 0)])
def test_the_kernels_end_with_the_longest_utterance(folder, cluster, longest, extra):
    host, layers = Host(folder, 256, 16, cluster), [weights_of(1, 256, scale=2.0)]
    inputs, grads = random(1, 5, 8, 1024), random(1, 5, 8, 256, seed=1)
    lengths = torch.tensor([0, 0, longest, 0, 0, 0, 0, max(longest - 1, 0)], dtype=torch.int32)
    end = min(longest + extra, 5)
    found, expected = (bound_forward(layers, inputs, lengths, extra) for _ in range(2))
    host.forward(found, *whole(1, 5))
    Steps.forward(expected, *whole(1, 5))
    assert not found[0][0].h[end:].any() and not expected[0][0].h[end:].any()
    expected[0][0].cells[end:], expected[0][0].gates[end:] = float("nan"), float("nan")
    # What no time step needs must not be read.
    back, alone = bound_backward(layers, grads, expected), bound_backward(layers, grads, expected)
    host.backward(back, *whole(1, 5))
    assert not back[0][0].grad_gates[end:].any()
    if end:
        same(found, expected, ("h", "cells", "gates"), end)
        Steps.backward(Steps.bind(alone[0], Common(end)), *whole(1, end))
        same(back, alone, ("grad_gates",), end)
        same(back, alone, ("grad_bias",))
    else:
        assert not back[0][0].grad_bias.any()
    assert host.status == 0


@needs_compiler
def test_work_is_packed_as_the_kernels_read_it(folder):
    assert Host(folder, 256).library.size_of_work() == lstm_kernel.WORK.size


@needs_compiler
def test_a_stack_by_the_kernels_is_a_stack_by_torch(folder, monkeypatch):
    """From fill to gradients, as on a GPU; what nobody has filled is NaN."""
    host, seen = Host(folder, 256), []

    def launch(name):
        return lambda stack, turn: seen.append((name, len(turn))) or getattr(host, name)(stack, turn)

    kernels = SimpleNamespace(
        prepare=lstm_kernel.prepare, bind=Steps.bind, forward=launch("forward"), backward=launch("backward")
    )
    layers, x, grad = stack_of(3, 24, 256), random(12, 8, 24), random(12, 8, 256, seed=1)
    lengths = torch.tensor([3, 10, *[1] * 6], dtype=torch.int32)
    monkeypatch.setattr(lstm_module, "UNIT", 4)
    monkeypatch.setattr(lstm_module, "TURN_COST", 0)
    turns.cache_clear()
    torch.use_deterministic_algorithms(True)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    try:
        results = []
        for run in (Steps, kernels):
            monkeypatch.setattr(lstm_module, "_kernels", lambda x, run=run: run)
            torch.manual_seed(3)
            results.append(run_stack(x, layers, grad, lengths, 0, 0.3, 2))
    finally:
        turns.cache_clear()
        torch.use_deterministic_algorithms(False)
    assert host.status == 0 and set(seen) == {(name, num) for name in ("forward", "backward") for num in (1, 2)}
    for found, wanted in zip(*reversed(results), strict=True):
        close(found, wanted, 5e-3)


@needs_compiler
def test_the_order_of_blocks_changes_no_bit(folder):
    host, layers, inputs = Host(folder, 256), [weights_of(1, 256)], random(1, 3, 8, 1024)
    first, second = (bound_forward(layers, inputs) for _ in range(2))
    for stack in (first, second):
        host.forward(stack, *whole(1, 3))
    for name in ("h", "cells", "gates"):
        assert torch.equal(getattr(first[0][0], name), getattr(second[0][0], name))


@needs_compiler
def test_gradients_that_overflow_are_passed_on(folder):
    host, layers, grads = Host(folder, 256), [weights_of(1, 256)], random(1, 3, 8, 256)
    stack = bound_forward(layers, random(1, 3, 8, 1024))
    Steps.forward(stack, *whole(1, 3))
    # NaN in the payload of EMPTY: whatever a conversion makes of it, nobody may wait for it.
    grads[0, 2, 0, :16] = torch.tensor(-1, dtype=torch.int16).view(torch.half)
    back = bound_backward(layers, grads, stack)
    host.backward(back, *whole(1, 3))
    grad_gates = back[0][0].grad_gates
    assert host.status == 0
    assert grad_gates[0, 0].isnan().all() and not grad_gates[:, 1:].isnan().any()


@needs_compiler
def test_a_block_that_never_comes_ends_in_a_flag_and_nan(folder):
    host = Host(folder, 256, patience=50)
    stack = bound_forward([weights_of(1, 256)], random(1, 4, 8, 1024))
    host.forward(stack, *whole(1, 4), absent=3)
    assert host.status == 1
    assert stack[0][0].h[1:].isnan().all()


# ------------------------------------------------------------------------------------------------
# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("at_once", [1, 2])
@pytest.mark.parametrize("hidden, steps, padding", [(1024, 37, 0), (512, 57, 0), (1024, 137, 9), (1024, 137, 90)])
def test_the_kernels_on_a_gpu_and_in_a_graph(hidden, steps, padding, at_once):
    layers = stack_of(3, hidden, hidden)

    def compute():
        output = lstm(narrow[0], [narrow[1 + 4 * index :][:4] for index in range(3)], lengths, 1, at_once=at_once)
        return output, *torch.autograd.grad(output, narrow, grad)

    tensors = random(steps, 8, hidden), *(weight for layer in layers for weight in layer)
    narrow = [tensor.cuda().requires_grad_() for tensor in tensors]
    grad = random(steps, 8, hidden, seed=1)
    with torch.cuda.stream(torch.cuda.Stream()):
        grad = grad.cuda()
        lengths = torch.full((8,), steps - padding - 1, dtype=torch.int32, device="cuda")
        eager = compute()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            recorded = compute()
        for _ in range(3):
            graph.replay()
    torch.cuda.synchronize()
    lstm_kernel.check(narrow[0].device)
    networks, wide = [torch_lstm(layer) for layer in layers], tensors[0].double().requires_grad_()
    below = wide[: steps - padding]
    for layer in networks:
        below = layer(below)[0]
    expected = torch.nn.functional.pad(below, (0, 0, 0, 0, 0, padding))
    parameters = [parameter for layer in networks for parameter in layer.parameters()]
    expected = expected, *torch.autograd.grad(expected, (wide, *parameters), grad.double().cpu())
    for one, other, wanted in zip(eager, recorded, expected, strict=True):
        assert torch.equal(one, other)
        close(one.cpu(), wanted.detach(), 2e-2)


@pytest.mark.gpu
def test_layers_side_by_side_drop_out_what_layers_one_by_one_do():
    layers, x, grad = stack_of(3, 1024, 1024), random(205, 8, 1024), random(205, 8, 1024, seed=1)
    with torch.cuda.stream(torch.cuda.Stream()):
        x, grad, lengths = x.cuda(), grad.cuda(), torch.full((8,), 55, dtype=torch.int32, device="cuda")
        layers = [[weight.cuda() for weight in layer] for layer in layers]
        found = []
        for at_once in (1, 2, 2):
            torch.manual_seed(1)
            found.append(run_stack(x, layers, grad, lengths, 0, 0.1, at_once))
    torch.cuda.synchronize()
    assert all(torch.equal(one, other) for one, other in zip(*found[1:], strict=True))
    for one, other in zip(*found[:2], strict=True):
        close(one.detach(), other.detach(), 5e-3)
