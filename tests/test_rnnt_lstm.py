"""The LSTM of rnnt/lstm.py against torch's, and its kernel's source, run on the CPU, against the same in torch."""

import ctypes
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rnnt import lstm_check, lstm_kernel
from rnnt import model as model_module
from rnnt.config import PRESETS, Config
from rnnt.lstm import Steps, lstm
from rnnt.model import RNNT, initialise

ROOT = Path(__file__).resolve().parent.parent
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ to run the kernel's source on the CPU")


def weights_of(inputs, hidden, seed=0, scale=1.0):
    """w_ih, w_hh, b_ih, b_hh, FP16."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (4 * hidden, inputs), (4 * hidden, hidden), (4 * hidden,), (4 * hidden,)
    bound = scale / hidden**0.5
    return [((torch.rand(shape, generator=generator) * 2 - 1) * bound).half() for shape in shapes]


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).half()


def torch_lstm(weights):
    hidden = weights[1].shape[1]
    layer = torch.nn.LSTM(weights[0].shape[1], hidden, dtype=torch.float64)
    with torch.no_grad():
        for parameter, weight in zip(layer.parameters(), weights, strict=True):
            parameter.copy_(weight)
    return layer


def close(found, expected, bound):
    """By the largest difference, relative to the largest value."""
    scale = expected.double().abs().max()
    assert (found.double() - expected.double()).abs().max() <= bound * scale


# ------------------------------------------------------------------------------------------------
# Against torch's LSTM


def test_outputs_and_all_gradients_are_those_of_torchs_lstm():
    weights, x, grad = weights_of(48, 64, scale=2.0), random(9, 8, 48), random(9, 8, 64, seed=1)
    layer, wide = torch_lstm(weights), x.double().requires_grad_()
    expected = layer(wide)[0]
    expected_grads = torch.autograd.grad(expected, (wide, *layer.parameters()), grad.double())

    narrow = [tensor.clone().requires_grad_() for tensor in (x, *weights)]
    h = lstm(*narrow)
    assert h.dtype == torch.float16
    close(h, expected, 3e-3)
    for found, expected_grad in zip(torch.autograd.grad(h, narrow, grad), expected_grads, strict=True):
        assert found.dtype == torch.float16 and found.shape == expected_grad.shape
        close(found, expected_grad, 5e-3)


def test_one_time_step_has_no_gradient_of_recurrent_weights():
    weights, x = weights_of(8, 8), random(1, 8, 8)
    narrow = [tensor.clone().requires_grad_() for tensor in (x, *weights)]
    grads = torch.autograd.grad(lstm(*narrow), narrow, random(1, 8, 8, seed=1))
    assert grads[2].shape == weights[1].shape and not grads[2].any()
    assert grads[1].any()


def test_another_batch_is_refused_with_the_flag():
    with pytest.raises(ValueError, match="--lstm persistent: takes batches of 8, not of 4: take cudnn"):
        lstm(random(3, 4, 8), *weights_of(8, 8))


# ------------------------------------------------------------------------------------------------
# The switch


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"batch": 16}, "--batch 8"),
        ({"precision": "bf16"}, "--precision fp16"),
        ({"encoder_hidden": 640}, "one of 256, 512, 768, 1024 as --encoder-hidden"),
        ({"batch": 4, "prediction_hidden": 2048}, "--batch 8 and one of 256, 512, 768, 1024 as --prediction-hidden"),
    ],
)
def test_what_the_kernels_cannot_do_is_refused_with_the_flags(change, wanted):
    persistent = replace(PRESETS["bench"], lstm="persistent")
    with pytest.raises(ValueError, match=f"^--lstm persistent: takes {wanted}, or take cudnn$"):
        replace(persistent, **change)


@pytest.mark.parametrize("gpu", [{"major": 8}, {"multi_processor_count": 60}])
def test_a_gpu_that_cannot_hold_all_blocks_is_refused(monkeypatch, gpu):
    h200 = {"name": "GPU", "major": 9, "minor": 0, "multi_processor_count": 132}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**h200))
    lstm_kernel.require(torch.device("cuda"), 1024)
    # Two layers at the same time, on two streams.
    lstm_kernel.require(torch.device("cuda"), 1024, 512)
    with pytest.raises(ValueError, match="and 192 multiprocessors, GPU has 9.0 and 132: take cudnn"):
        lstm_kernel.require(torch.device("cuda"), 2048, 1024)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**h200 | gpu))
    with pytest.raises(ValueError, match="--lstm persistent: takes a GPU of .* and 64 multiprocessors.*: take cudnn"):
        lstm_kernel.require(torch.device("cuda"), 1024)


def test_a_kernel_that_gave_up_ends_the_run(monkeypatch):
    status = torch.zeros((), dtype=torch.int32)
    monkeypatch.setattr(lstm_kernel._Device, "of", lambda device: SimpleNamespace(status=status))
    lstm_kernel.check(torch.device("cuda"))
    status.fill_(1)
    with pytest.raises(RuntimeError, match="waited in vain"):
        lstm_kernel.check(torch.device("cuda"))


def test_both_kinds_of_lstm_give_the_same_networks(monkeypatch):
    calls = []
    monkeypatch.setattr(model_module, "lstm", lambda *arguments: calls.append(0) or lstm(*arguments))
    toy = Config(features=16, encoder_hidden=256, prediction_hidden=256, joint_hidden=16, vocab=16)
    outputs = []
    for config in (toy, replace(toy, lstm="persistent")):
        model = RNNT(config)
        initialise(model, config, seed=0)
        model.half().eval()
        f, lengths = model.encoder(random(7, 8, 16), torch.full((8,), 7, dtype=torch.int32))
        outputs.append((f, model.prediction(torch.arange(24).view(8, 3) % 15, torch.full((8,), 3, dtype=torch.int32))))
        assert f.shape[1] == lengths[0] == 4
    for torchs, ours in zip(*outputs, strict=True):
        close(ours, torchs, 5e-3)
    assert len(calls) == 7


def test_networks_end_with_the_longest_utterance():
    toy = Config(features=16, encoder_hidden=256, prediction_hidden=256, joint_hidden=16, vocab=16, lstm="persistent")
    model = RNNT(toy)
    initialise(model, toy, seed=0)
    model.half().eval()
    features, tokens = random(9, 8, 16), torch.arange(40).view(8, 5) % 15
    lengths, token_lengths = (torch.tensor([longest, *[1] * 7], dtype=torch.int32) for longest in (5, 2))
    (f, _), g = model.encoder(features, lengths), model.prediction(tokens, token_lengths)
    alone = model.encoder(features[:5], lengths)[0], model.prediction(tokens[:, :2], token_lengths)
    for found, wanted, linear in zip((f, g), alone, (model.encoder.linear, model.prediction.linear), strict=True):
        num = wanted.shape[1]
        assert num == 3
        # Before the end what the batch alone gives, the half of a frame after it too; behind it nothing but the bias.
        close(found[:, :num], wanted, 1e-3)
        assert torch.equal(found[:, num:], linear.bias.expand_as(found[:, num:]))
        assert not torch.equal(found[:, num - 1], linear.bias.expand_as(found[:, num - 1]))


@pytest.mark.parametrize("ignores_lengths", [False, True])
def test_the_check_of_padding_finds_what_ignores_it(monkeypatch, ignores_lengths):
    monkeypatch.setattr(lstm_check, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(lstm_check, "PROBLEMS", [])
    if ignores_lengths:
        monkeypatch.setattr(lstm_check, "lstm", lambda *arguments: lstm(*arguments[:5]))
    parameters = [weight.requires_grad_() for weight in weights_of(32, 32)]
    x, grad = random(9, 8, 32).requires_grad_(), random(9, 8, 32, seed=1)
    lstm_check.check_padding(parameters, x, grad, 4)
    expected = [(32, 9, 4)] if ignores_lengths else []
    assert expected == lstm_check.PROBLEMS


# ------------------------------------------------------------------------------------------------
# The kernel's source on the CPU


class Launch(ctypes.Structure):
    _fields_ = [
        ("is_forward", ctypes.c_bool),
        *((name, ctypes.c_void_p) for name in ("inputs", "weights", "bias", "h", "cells", "gates")),
        *((name, ctypes.c_void_p) for name in ("grad_gates", "grad_bias", "lengths")),
        *((name, ctypes.c_int) for name in ("extra", "num_steps")),
        ("status", ctypes.c_void_p),
    ]


class Host:
    """The kernels for one width, as rnnt.lstm_kernel has them, with a status of their own."""

    def __init__(self, folder, hidden, units=16, cluster=4, patience=20_000):
        self.hidden, self.units = hidden, units
        library = folder / f"lstm{hidden}_{units}_{cluster}_{patience}.so"
        defines = f"-DHIDDEN={hidden}", f"-DUNITS={units}", f"-DCLUSTER={cluster}", f"-DPATIENCE={patience}u"
        source = "-Irnnt", "tests/lstm_on_host.cpp", "-o", library
        command = ["g++", "-O1", "-w", "-std=c++17", "-shared", "-fPIC", "-pthread", *defines, *source]
        subprocess.run(command, cwd=ROOT, check=True)
        self.run = ctypes.CDLL(library).run
        self.status = torch.zeros((), dtype=torch.int32)

    def launch(self, num_blocks, absent=-1, lengths=None, extra=0, **tensors):
        sizes = {"num_steps": len(tensors["inputs"]), "extra": extra}
        pointers = {name: tensor.data_ptr() for name, tensor in tensors.items()}
        pointers["lengths"] = None if lengths is None else lengths.data_ptr()
        launch = Launch(**sizes, status=self.status.data_ptr(), is_forward="h" in tensors, **pointers)
        self.run(ctypes.byref(launch), num_blocks, absent)

    def forward(self, inputs, w_hh, b_hh, **how):
        h, cells = (torch.full((len(inputs), 8, self.hidden), -1, dtype=torch.int16).view(torch.half) for _ in range(2))
        gates = torch.zeros(len(inputs), 8, self.hidden, 4, dtype=torch.half)
        tensors = {"inputs": inputs, "weights": w_hh, "bias": b_hh, "h": h, "cells": cells, "gates": gates}
        self.launch(self.hidden // self.units, **tensors, **how)
        return h, cells, gates

    def backward(self, grad, w_hh, cells, gates, **how):
        grad_gates = torch.full((len(grad), 8, 4 * self.hidden), -1, dtype=torch.int16).view(torch.half)
        grad_bias = torch.zeros(4 * self.hidden, dtype=torch.half)
        tensors = {"inputs": grad, "weights": w_hh, "cells": cells, "gates": gates}
        self.launch(self.hidden // 16, **tensors, grad_gates=grad_gates, grad_bias=grad_bias, **how)
        return grad_gates, grad_bias


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
    host = Host(folder, hidden, units, cluster)
    _, w_hh, _, b_hh = weights_of(1, hidden, scale=2.0)
    inputs, grad = random(steps, 8, 4 * hidden), random(steps, 8, hidden, seed=1)
    expected = Steps.forward(inputs, w_hh, b_hh)
    for found, wanted in zip(host.forward(inputs, w_hh, b_hh), expected, strict=True):
        close(found, wanted, 1e-3)
    _, cells, gates = expected
    expected = Steps.backward(grad, w_hh, cells, gates)
    for found, wanted in zip(host.backward(grad, w_hh, cells, gates), expected, strict=True):
        close(found, wanted, 1e-3)
    assert host.status == 0


@needs_compiler
@pytest.mark.parametrize("cluster, longest, extra", [(4, 2, 1), (1, 3, 0), (4, 0, 0), (4, 9, 0)])
def test_the_kernels_end_with_the_longest_utterance(folder, cluster, longest, extra):
    host = Host(folder, 256, 16, cluster)
    _, w_hh, _, b_hh = weights_of(1, 256, scale=2.0)
    inputs, grad = random(5, 8, 1024), random(5, 8, 256, seed=1)
    lengths = torch.tensor([0, 0, longest, 0, 0, 0, 0, max(longest - 1, 0)], dtype=torch.int32)
    padding = {"lengths": lengths, "extra": extra}
    end = min(longest + extra, 5)
    h, _, _ = host.forward(inputs, w_hh, b_hh, **padding)
    expected, wanted_cells, wanted_gates = Steps.forward(inputs, w_hh, b_hh, **padding)
    assert not h[end:].any() and not expected[end:].any()
    if end:
        close(h, expected, 1e-3)
    # What no time step wrote must not be read.
    wanted_cells[end:], wanted_gates[end:] = float("nan"), float("nan")
    grad_gates, grad_bias = host.backward(grad, w_hh, wanted_cells, wanted_gates, **padding)
    assert not grad_gates[end:].any()
    if end:
        alone = Steps.backward(grad[:end], w_hh, wanted_cells[:end], wanted_gates[:end])
        for found, wanted in zip((grad_gates[:end], grad_bias), alone, strict=True):
            close(found, wanted, 1e-3)
    else:
        assert not grad_bias.any()
    assert host.status == 0


def test_padding_changes_nothing():
    weights, x, grad = weights_of(48, 64, scale=2.0), random(9, 8, 48), random(9, 8, 64, seed=1)
    lengths = torch.tensor([3, 5, 1, 0, 2, 5, 4, 4], dtype=torch.int32)

    def compute(x, grad, *padding):
        tensors = [tensor.clone().requires_grad_() for tensor in (x, *weights)]
        h = lstm(*tensors, *padding)
        return h, *torch.autograd.grad(h, tensors, grad)

    h, grad_x, *grads = compute(x, grad, lengths, 1)
    expected_h, expected_grad_x, *expected = compute(x[:6], grad[:6])
    assert torch.equal(h[:6], expected_h) and torch.equal(grad_x[:6], expected_grad_x)
    assert not h[6:].any() and not grad_x[6:].any()
    for found, wanted in zip(grads, expected, strict=True):
        close(found, wanted, 1e-3)


@needs_compiler
def test_the_order_of_blocks_changes_no_bit(folder):
    host = Host(folder, 256)
    _, w_hh, _, b_hh = weights_of(1, 256)
    inputs = random(3, 8, 1024)
    first, second = (host.forward(inputs, w_hh, b_hh) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)


@needs_compiler
def test_gradients_that_overflow_are_passed_on(folder):
    host = Host(folder, 256)
    _, w_hh, _, b_hh = weights_of(1, 256)
    grad = random(3, 8, 256)
    _, cells, gates = Steps.forward(random(3, 8, 1024), w_hh, b_hh)
    # NaN in the payload of EMPTY: whatever a conversion makes of it, nobody may wait for it.
    grad[2, 0, :16] = torch.tensor(-1, dtype=torch.int16).view(torch.half)
    grad_gates, _ = host.backward(grad, w_hh, cells, gates)
    assert host.status == 0
    assert grad_gates[0, 0].isnan().all() and not grad_gates[:, 1:].isnan().any()


@needs_compiler
def test_a_block_that_never_comes_ends_in_a_flag_and_nan(folder):
    host = Host(folder, 256, patience=50)
    _, w_hh, _, b_hh = weights_of(1, 256)
    h, _, _ = host.forward(random(4, 8, 1024), w_hh, b_hh, absent=3)
    assert host.status == 1
    assert h[1:].isnan().all()


# ------------------------------------------------------------------------------------------------
# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("hidden, steps, padding", [(1024, 37, 0), (512, 57, 0), (1024, 37, 9)])
def test_the_kernels_on_a_gpu_and_in_a_graph(hidden, steps, padding):
    def compute():
        h = lstm(*narrow, lengths, 1)
        return h, *torch.autograd.grad(h, narrow, grad)

    tensors = random(steps, 8, hidden), *weights_of(hidden, hidden, scale=2.0)
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
    layer, wide = torch_lstm(tensors[1:]), tensors[0].double().requires_grad_()
    expected = torch.nn.functional.pad(layer(wide[: steps - padding])[0], (0, 0, 0, 0, 0, padding))
    expected = expected, *torch.autograd.grad(expected, (wide, *layer.parameters()), grad.double().cpu())
    for one, other, wanted in zip(eager, recorded, expected, strict=True):
        assert torch.equal(one, other)
        close(one.cpu(), wanted.detach(), 1e-2)
