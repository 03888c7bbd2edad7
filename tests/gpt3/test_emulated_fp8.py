"""gpt3/emulated_fp8.py: the FP8 stand-in's state machine against a reference written by hand in float64."""

import numpy
import pytest
import torch

from common.precision.fp8 import E4M3_MAX, E5M2_MAX
from gpt3.emulated_fp8 import EmulatedLinear, EmulatedScaling
from graph_worth.capture.host_graph import HostPool

# (mantissa bits, smallest exponent, largest value)
E4M3, E5M2 = (3, -6, 448.0), (2, -14, 57344.0)
# Not monotonic, so that the length of the history decides about the scale.
MAGNITUDES = [1.0, 8.0, 2.0, 0.5, 4.0, 0.25]


def fp8(values, scale, form):
    """float64 array: `values` rounded to nearest even in the FP8 format at a scale, saturated, and scaled back."""
    mantissa, smallest, largest = form
    scaled = numpy.clip(values.astype(numpy.float32) * numpy.float32(scale), -largest, largest).astype(numpy.float64)
    exponent = numpy.floor(numpy.log2(numpy.maximum(numpy.abs(scaled), 2.0**smallest)))
    unit = 2.0 ** (exponent - mantissa)
    rounded = numpy.rint(scaled / unit) * unit
    return (rounded.astype(numpy.float32) / numpy.float32(scale)).astype(numpy.float64)


class Operand:
    """Scale and amaxes of one GEMM operand."""

    def __init__(self, form, history):
        self.form, self.length, self.scale, self.amax, self.amaxes = form, history, numpy.float32(1), 0, []

    def quantize(self, values):
        self.amax = numpy.float32(numpy.abs(values).max())
        return fp8(values, self.scale, self.form)

    def update(self):
        self.amaxes.append(self.amax)
        self.amax = numpy.float32(0)
        largest = max(self.amaxes[-self.length :])
        if largest > 0:
            self.scale = numpy.float32(self.form[2]) / largest

    def history(self):
        """The column of amax_history: row 0 for the next microbatch, the newest amax in the last row."""
        return [0.0, *([0.0] * self.length + self.amaxes)[len(self.amaxes) + 1 :]]


def make(history=16, in_features=6, out_features=4, dtype=torch.float32, num_linears=1):
    """(linears, their scaling)."""
    generator = torch.Generator().manual_seed(0)
    linears = [EmulatedLinear(in_features, out_features, dtype, torch.device("cpu")) for _ in range(num_linears)]
    for linear in linears:
        with torch.no_grad():
            linear.weight.copy_(torch.randn(out_features, in_features, generator=generator))
            linear.bias.copy_(torch.randn(out_features, generator=generator))
        linear.weight.main_grad = torch.full((out_features, in_features), 1e6)
    layers = [torch.nn.ModuleList(linears)]
    return linears, EmulatedScaling(layers, history)


def inputs(index, in_features=6, out_features=4):
    generator = torch.Generator().manual_seed(100 + index)
    x = torch.randn(2, 3, in_features, generator=generator) * MAGNITUDES[index % 6]
    grad = torch.randn(2, 3, out_features, generator=generator) * MAGNITUDES[(index + 2) % 6] * 1e-3
    return x, grad


def microbatch(linear, fp8_state, x, grad, is_first):
    x = x.clone().requires_grad_()
    with fp8_state.forward():
        y = linear(x, is_first)
    with fp8_state.backward():
        y.backward(grad)
    return y.detach(), x.grad


def flat(tensor):
    return tensor.double().numpy().reshape(-1, tensor.shape[-1])


@pytest.mark.parametrize("history", [1, 3, 16])
def test_three_steps_of_two_microbatches_against_the_reference(history):
    (linear,), scaling = make(history)
    x_operand, weight_operand, grad_operand = (Operand(form, history) for form in (E4M3, E4M3, E5M2))
    bias_grad, main_grad = numpy.zeros(4), numpy.zeros((4, 6))
    for index in range(6):
        x, grad = inputs(index)
        weight = linear.weight.detach().double().numpy().copy()
        y, x_grad = microbatch(linear, scaling, x, grad, is_first=index % 2 == 0)

        if index % 2 == 0:
            cache = weight_operand.quantize(weight)
            main_grad = 0
        rounded_x, rounded_grad = x_operand.quantize(flat(x)), grad_operand.quantize(flat(grad))
        main_grad = rounded_grad.T @ rounded_x + main_grad
        bias_grad += flat(grad).sum(0)
        numpy.testing.assert_allclose(linear.weight_cache.double().numpy(), cache, rtol=1e-6)
        numpy.testing.assert_allclose(flat(y), rounded_x @ cache.T + linear.bias.detach().numpy(), rtol=1e-5, atol=1e-6)
        numpy.testing.assert_allclose(flat(x_grad), rounded_grad @ cache, rtol=1e-5, atol=1e-9)
        numpy.testing.assert_allclose(linear.weight.main_grad.numpy(), main_grad, rtol=1e-5, atol=1e-8)
        numpy.testing.assert_allclose(linear.bias.grad.numpy(), bias_grad, rtol=1e-5, atol=1e-8)
        assert linear.weight.grad is None
        for operand in (x_operand, weight_operand, grad_operand):
            operand.update()
        compare(scaling, {"forward": [x_operand, weight_operand], "backward": [grad_operand]})
        # The optimizer moves weights after every step, and here after every microbatch: the cache must stay.
        with torch.no_grad():
            linear.weight.mul_(1.5)


def compare(scaling, operands):
    """Scales and histories."""
    state = dict(scaling.named_state())
    for direction, columns in operands.items():
        for operand, scale in zip(columns, state[f"fp8.{direction}.scale"].numpy(), strict=True):
            assert scale == pytest.approx(operand.scale, rel=2e-7), direction
            operand.scale = scale  # torch multiplies by a rounded reciprocal: the last bit may differ
        expected = numpy.array([operand.history() for operand in columns]).T
        numpy.testing.assert_array_equal(state[f"fp8.{direction}.amax_history"].numpy(), expected)


@pytest.mark.parametrize(
    ("name", "form", "fp8_dtype", "dtype"),
    [
        ("forward", E4M3, torch.float8_e4m3fn, torch.bfloat16),
        ("backward", E5M2, torch.float8_e5m2, torch.float32),
    ],
)
def test_every_quantised_value_is_an_fp8_value_at_the_scale(name, form, fp8_dtype, dtype):
    _, scaling = make()
    table = torch.arange(256, dtype=torch.uint8).view(fp8_dtype).float()
    table = set(table[table.isfinite()].tolist())
    assert max(table) == form[2]
    state = getattr(scaling, f"_{name}")
    tensor = (torch.randn(4000, generator=torch.Generator().manual_seed(1)) * 3).to(dtype)
    tensor[:3] = torch.tensor([0.0, 1e-9, -700.0])
    for scale in (1.0, 64.0, 2.0**-9):
        state.scale[0] = scale
        result = state.quantize(tensor, 0, fp8_dtype)
        assert result.dtype == dtype
        assert set((result.float() * scale).tolist()) <= table
        reference = fp8(tensor.float().numpy(), scale, form)
        numpy.testing.assert_array_equal(result.double().numpy(), reference)


def test_both_formats_saturate_and_the_amax_does_not():
    """Without the clamp E4M3 gives NaN and E5M2 infinity."""
    assert (E4M3_MAX, E5M2_MAX) == (448.0, 57344.0)
    (linear,), scaling = make(in_features=4)
    with torch.no_grad():
        linear.weight.copy_(torch.eye(4))
        linear.bias.zero_()
    x = torch.tensor([[[1e4, -1e4, 500.0, 1.0]]])
    grad = torch.tensor([[[1e6, -1e6, 6e4, 1.0]]])
    y, x_grad = microbatch(linear, scaling, x, grad, True)
    assert y.flatten().tolist() == [448.0, -448.0, 448.0, 1.0]
    assert x_grad.flatten().tolist() == [57344.0, -57344.0, 57344.0, 1.0]
    state = dict(scaling.named_state())
    assert state["fp8.forward.scale"].tolist() == pytest.approx([448 / 1e4, 448.0])
    assert state["fp8.backward.scale"].tolist() == pytest.approx([57344 / 1e6])


@pytest.mark.parametrize("bad", [0.0, float("inf"), float("nan")])
def test_an_amax_of_zero_or_not_finite_keeps_the_scale(bad):
    (linear,), scaling = make(history=1)
    state = dict(scaling.named_state())
    microbatch(linear, scaling, torch.full((1, 1, 6), 2.0), torch.full((1, 1, 4), 4.0), True)
    before = {name: tensor.clone() for name, tensor in state.items() if name.endswith("scale")}
    assert before["fp8.forward.scale"][0] == 224 and before["fp8.backward.scale"][0] == 14336
    microbatch(linear, scaling, torch.full((1, 1, 6), bad), torch.full((1, 1, 4), bad), False)
    for name, tensor in before.items():
        assert torch.equal(state[name], tensor), name


def test_a_tiny_amax_does_not_make_an_infinite_scale():
    """448 / 1e-38 is over FP32's range; 0 times infinity would be NaN in the next microbatch."""
    (linear,), scaling = make()
    scales = [tensor for name, tensor in scaling.named_state() if name.endswith("scale")]
    x, grad = torch.full((1, 1, 6), 1e-38), torch.full((1, 1, 4), 1e-38)
    microbatch(linear, scaling, x, grad, True)
    assert all(scale.isfinite().all() for scale in scales)
    y, x_grad = microbatch(linear, scaling, torch.zeros(1, 1, 6), torch.zeros(1, 1, 4), False)
    assert y.isfinite().all() and x_grad.isfinite().all()


def test_each_linear_has_rows_of_its_own():
    linears, scaling = make(num_linears=2)
    for linear, size in zip(linears, (2.0, 32.0), strict=True):
        with torch.no_grad():
            linear.weight.fill_(size)
    with scaling.forward():
        outputs = [linear(torch.full((1, 1, 6), size), True) for linear, size in zip(linears, (4.0, 16.0), strict=True)]
    with scaling.backward():
        outputs[0].backward(torch.full((1, 1, 4), 1.0))
        outputs[1].backward(torch.full((1, 1, 4), 8.0))
    state = dict(scaling.named_state())
    assert state["fp8.forward.scale"].tolist() == [448 / 4, 448 / 2, 448 / 16, 448 / 32]
    assert state["fp8.backward.scale"].tolist() == [57344.0, 57344 / 8]


def test_one_amax_covers_all_calls_of_a_microbatch():
    """A larger call is not forgotten because a smaller one follows it."""
    (linear,), scaling = make()
    with scaling.forward():
        for size in (2.0, 7.0, 1.0):
            linear(torch.full((1, 1, 6), size), False)
    assert dict(scaling.named_state())["fp8.forward.scale"][0] == 64


def test_reset_is_in_place_and_makes_the_same_run_again():
    (linear,), scaling = make(history=3)
    names = [f"fp8.{direction}.{what}" for direction in ("forward", "backward") for what in ("scale", "amax_history")]
    assert [name for name, _ in scaling.named_state()] == names
    addresses = [tensor.data_ptr() for _, tensor in scaling.named_state()]

    def run():
        results = [microbatch(linear, scaling, *inputs(index), index % 2 == 0) for index in range(4)]
        results = [tensor.clone() for pair in results for tensor in pair]
        return results + [tensor.clone() for _, tensor in scaling.named_state()] + [linear.weight.main_grad.clone()]

    first = run()
    scaling.reset()
    assert [tensor.data_ptr() for _, tensor in scaling.named_state()] == addresses
    for name, tensor in scaling.named_state():
        assert (tensor == (1 if name.endswith("scale") else 0)).all()
    assert all(map(torch.equal, run(), first))


def test_captured_layers_with_eager_updates_between_are_bitwise_eager():
    """A first-microbatch graph and a later one, in turn, for three steps with moving weights."""
    results = []
    for graphed in (False, True):
        (linear,), scaling = make(3, dtype=torch.bfloat16)
        x = torch.zeros(2, 3, 6, dtype=torch.bfloat16)
        grad = torch.zeros(2, 3, 4, dtype=torch.bfloat16)

        def layer(is_first, linear=linear, x=x, grad=grad):
            leaf = x.detach().requires_grad_()
            y = linear(leaf, is_first)
            return y.detach(), torch.autograd.grad(y, leaf, grad)[0]

        graphs = {}
        for is_first in (True, False) if graphed else ():
            with scaling.capturing():
                graphs[is_first] = HostPool().capture(lambda is_first=is_first, layer=layer: layer(is_first))
        scaling.reset()
        seen = []
        for index in range(6):
            is_first = index % 2 == 0
            for static, value in zip((x, grad), inputs(index), strict=True):
                static.copy_(value)
            with scaling.forward(), scaling.backward(replayed=graphed):
                if graphed:
                    graph, outputs = graphs[is_first]
                    graph.replay()
                else:
                    outputs = layer(is_first)
            with torch.no_grad():
                linear.weight.mul_(1.25)
            seen += [output.clone() for output in outputs]
            seen += [linear.weight.main_grad.clone(), *(tensor.clone() for _, tensor in scaling.named_state())]
        results.append(seen)
    assert all(map(torch.equal, *results))
