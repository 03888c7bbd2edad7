"""rnnt/kernels/lstm: its source run on the CPU against the same in torch, its launches, and the kernels on a GPU."""

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
from rnnt.kernels import lstm as lstm_kernel
from rnnt.lstm import Common, Layer, lstm, turns
from tests.helpers.lstm_cases import close, random, run_stack, stack_of, torch_lstm

ROOT = Path(__file__).resolve().parents[2]
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ to run the kernel's source on the CPU")


# ------------------------------------------------------------------------------------------------
# Launches


@pytest.mark.parametrize("gpu", [{}, {"major": 8}, {"multi_processor_count": 120}])
def test_a_gpu_that_cannot_hold_all_blocks_is_refused(monkeypatch, gpu):
    found = SimpleNamespace(**{"name": "GPU", "major": 9, "minor": 0, "multi_processor_count": 132} | gpu)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    if not gpu:
        lstm_kernel.require(torch.device("cuda"), 1024)
        return
    with pytest.raises(ValueError, match="^--lstm wavefront: takes a GPU of .* and 128 multiprocessors.*: take cudnn"):
        lstm_kernel.require(torch.device("cuda"), 1024)


def test_a_kernel_that_gave_up_ends_the_run(monkeypatch):
    status = torch.zeros((), dtype=torch.int32)
    monkeypatch.setattr(lstm_kernel._Device, "of", lambda device: SimpleNamespace(status=status))
    lstm_module.check(torch.device("cuda"))
    status.fill_(1)
    with pytest.raises(RuntimeError, match="waited in vain"):
        lstm_module.check(torch.device("cuda"))


class Launches:
    """Stands for a GPU: keeps the launches, and has room for so many clusters of each size."""

    def __init__(self, monkeypatch, room):
        self.kept, self.index, self.status = [], 0, torch.zeros((), dtype=torch.int32)
        driver = SimpleNamespace(
            CUlaunchAttribute=lambda: SimpleNamespace(value=SimpleNamespace(clusterDim=SimpleNamespace())),
            CUlaunchAttributeID=SimpleNamespace(CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION=4),
            CUlaunchConfig=SimpleNamespace,
            cuOccupancyMaxActiveClusters=lambda kernel, launch: (0, room[launch.attrs[0].value.clusterDim.x]),
        )
        monkeypatch.setitem(sys.modules, "cuda", SimpleNamespace(bindings=SimpleNamespace(driver=driver)))
        monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(driver=driver))
        monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
        monkeypatch.setattr(lstm_kernel._Device, "of", lambda device: self)
        kernels = lambda index, hidden, cluster: (("forward", cluster), ("backward", cluster))  # noqa: E731
        monkeypatch.setattr(lstm_kernel, "_kernels", kernels)
        lstm_kernel._cluster.cache_clear()

    def launch(self, kernel, num_blocks, work):
        self.kept.append((*kernel, num_blocks))


@pytest.mark.parametrize("room, cluster", [({4: 32, 2: 66}, 4), ({4: 20, 2: 64}, 2), ({4: 20, 2: 40}, 1)])
def test_launches_have_blocks_for_each_layer_and_clusters_that_fit(monkeypatch, room, cluster):
    gpu = Launches(monkeypatch, room)
    layers = [Layer(torch.zeros(1).half(), torch.empty(4096, 1024).half()) for _ in range(2)]
    stack = lstm_kernel.bind(layers, Common(9))
    for turn in (((0, 0, 4),), ((0, 4, 8), (1, 0, 4))):
        lstm_kernel.forward(stack, turn)
        lstm_kernel.backward(stack, turn)
    # Sums have one order in all turns of a stack.
    assert gpu.kept == [(name, cluster, blocks) for blocks in (64, 128) for name in ("forward", "backward")]
    lstm_kernel._cluster.cache_clear()


# ------------------------------------------------------------------------------------------------
# The kernel's source on the CPU


class Host:
    """Stands for the module rnnt.kernels.lstm, with the kernels for one width on the CPU. absent: see the helper."""

    prepare, bind = staticmethod(lstm_kernel.prepare), staticmethod(lambda layers, common: (layers, common))

    def __init__(self, folder, hidden=256, cluster=4, patience=20_000, absent=-1):
        self.hidden, self.absent, self.turns = hidden, absent, []
        library = folder / f"lstm{hidden}_{cluster}_{patience}.so"
        if not library.exists():
            defines = f"-DHIDDEN={hidden}", f"-DCLUSTER={cluster}", f"-DPATIENCE={patience}u"
            source = "-Irnnt/kernels", "tests/helpers/lstm_on_host.cpp", "-o", library
            # Checks of the library would take a jump between the stacks of two fibers for a mistake.
            flags = "-O1", "-w", "-std=c++17", "-shared", "-fPIC", "-pthread", "-U_FORTIFY_SOURCE"
            subprocess.run(["g++", *flags, *defines, *source], cwd=ROOT, check=True)
        self.library = ctypes.CDLL(library)
        # Work is packed as the kernels read it.
        assert self.library.size_of_work() == lstm_kernel.WORK.size
        self.status = torch.zeros((), dtype=torch.int32)

    def launch(self, stack, turn, is_forward):
        layers, common = stack
        addresses = [lstm_kernel.pointers(layer) for layer in layers]
        work = lstm_kernel.pack(addresses, lstm_kernel.shared(common, self.status), turn)
        self.library.run(work, is_forward, len(turn) * self.hidden // lstm_kernel.UNITS, self.absent)
        self.turns.append((is_forward, turn))

    def forward(self, stack, turn):
        self.launch(stack, turn, True)

    def backward(self, stack, turn):
        self.launch(stack, turn, False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("lstm")


@pytest.fixture
def computed(monkeypatch):
    """computed(kernels, ...): output and gradients of a stack by them. Memory that nobody has written is NaN."""
    torch.use_deterministic_algorithms(True)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)

    def run(kernels, x, layers, grad, lengths=None, extra=0, dropout=0.0):
        monkeypatch.setattr(lstm_module, "_kernels", lambda device: kernels)
        torch.manual_seed(3)
        return run_stack(x, layers, grad, lengths, extra, dropout)

    yield run
    torch.use_deterministic_algorithms(False)


def case(num_layers=1, steps=4, hidden=256):
    """Input, layers and the gradient of their output."""
    return random(steps, 8, 24), stack_of(num_layers, 24, hidden), random(steps, 8, hidden, seed=1)


def longest(length):
    return torch.tensor([0, 0, length, *[0] * 4, max(length - 1, 0)], dtype=torch.int32)


@needs_compiler
@pytest.mark.parametrize(
    ("hidden", "cluster", "num_layers", "steps", "padding"),
    [
        pytest.param(256, 2, 1, 3, {}, id="clusters of 2"),
        pytest.param(256, 1, 1, 4, {"lengths": longest(2), "extra": 1}, id="no clusters, padding"),
        pytest.param(256, 4, 1, 3, {"lengths": longest(0)}, id="nothing but padding"),
        pytest.param(256, 4, 2, 4, {"lengths": longest(9), "dropout": 0.3}, id="two layers, a length beyond the end"),
        pytest.param(256, 1, 3, 12, {"lengths": longest(10)}, id="three layers", marks=pytest.mark.slow),
        pytest.param(1024, 1, 1, 2, {}, id="1024 without clusters", marks=pytest.mark.slow),
        pytest.param(1024, 4, 1, 2, {}, id="1024", marks=pytest.mark.slow),
    ],
)
def test_the_kernels_compute_the_same_as_torch(
    folder, computed, monkeypatch, hidden, cluster, num_layers, steps, padding
):
    monkeypatch.setattr(lstm_module, "UNIT", 2)
    monkeypatch.setattr(lstm_module, "TURN_COST", 0)
    turns.cache_clear()
    host, given = Host(folder, hidden, cluster), case(num_layers, steps, hidden)
    found, wanted, again = (computed(kernels, *given, **padding) for kernels in (host, None, host))
    turns.cache_clear()
    assert host.status == 0
    assert {len(turn) for _, turn in host.turns} == ({1, 2} if num_layers > 1 else {1})
    end = int(padding["lengths"].max()) + padding.get("extra", 0) if "lengths" in padding else steps
    assert not found[0][end:].any() and found[0][:end].any() == (end > 0)
    # Gradients are accumulated in place.
    assert len({gradient.data_ptr() for gradient in found[1:]}) == len(found) - 1
    for one, other, repeated in zip(found, wanted, again, strict=True):
        close(one, other, 5e-3)
        assert torch.equal(one, repeated)


@needs_compiler
@pytest.mark.parametrize("cluster, length", [(4, 6), (1, 4), (4, 2)])
def test_stretches_change_no_bit(folder, computed, monkeypatch, cluster, length):
    host, given = Host(folder, cluster=cluster), case(steps=6)
    whole = computed(host, *given, longest(length), dropout=0.2)
    monkeypatch.setattr(lstm_module, "turns", lambda *_: (((0, 0, 2),), ((0, 2, 5),), ((0, 5, 6),)))
    cut = computed(host, *given, longest(length), dropout=0.2)
    assert host.status == 0
    # Output, gradients of input and weights; biases' gradients are sums in another order.
    assert all(map(torch.equal, whole[:4], cut[:4]))
    close(cut[4], whole[4], 1e-3)


@needs_compiler
def test_gradients_that_overflow_are_passed_on(folder, computed):
    host, (x, layers, grad) = Host(folder), case()
    # NaN in the payload of EMPTY: whatever a conversion makes of it, nobody may wait for it.
    grad[2, 0, :16] = torch.tensor(-1, dtype=torch.int16).view(torch.half)
    grad_x = computed(host, x, layers, grad)[1]
    assert host.status == 0
    assert grad_x[:3, 0].isnan().all() and not grad_x[:, 1:].isnan().any()


@needs_compiler
def test_a_block_that_never_comes_ends_in_a_flag_and_nan(folder, monkeypatch):
    host, (x, layers, _) = Host(folder, patience=50, absent=3), case()
    monkeypatch.setattr(lstm_module, "_kernels", lambda device: host)
    output = lstm(x, layers)
    assert host.status == 1
    assert output[1:].isnan().all()


# ------------------------------------------------------------------------------------------------
# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("hidden, steps, padding", [(1024, 37, 0), (512, 57, 0), (1024, 137, 9), (1024, 137, 90)])
def test_the_kernels_on_a_gpu_and_in_a_graph(hidden, steps, padding):
    layers = stack_of(3, hidden, hidden)

    def compute():
        output = lstm(narrow[0], [narrow[1 + 4 * index :][:4] for index in range(3)], lengths, 1)
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
def test_dropout_is_the_same_run_after_run():
    layers, x, grad = stack_of(3, 1024, 1024), random(205, 8, 1024), random(205, 8, 1024, seed=1)
    with torch.cuda.stream(torch.cuda.Stream()):
        x, grad, lengths = x.cuda(), grad.cuda(), torch.full((8,), 55, dtype=torch.int32, device="cuda")
        layers = [[weight.cuda() for weight in layer] for layer in layers]
        found = []
        for _ in range(2):
            torch.manual_seed(1)
            found.append(run_stack(x, layers, grad, lengths, 0, 0.1))
    torch.cuda.synchronize()
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
