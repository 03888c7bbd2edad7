"""What a region takes, returns and keeps: refused before anything is launched, on the CPU."""

import copy
import dataclasses
import pickle
import threading

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from common.capture.checks import CaptureError
from common.capture.parameterized.errors import RegionRefused
from common.capture.parameterized.region import parameterize
from tests.helpers.host_graph_cases import same


@dataclasses.dataclass
class Result:
    y: torch.Tensor


def ones(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype)


UNUSUAL = {
    "conjugated": (lambda: ones(3, dtype=torch.complex64).conj(), "lazily conjugated"),
    "negated": (lambda: torch._neg_view(ones(3)), "lazily conjugated or negated"),
    "subclass": (lambda: TwoTensor(ones(3), ones(3)), "is a TwoTensor"),
    "sparse": (lambda: ones(3).to_sparse(), "is torch.sparse_coo: a region takes strided tensors"),
    "nested": (lambda: torch.nested.nested_tensor([ones(3), ones(3)]), "is nested"),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(("make", "message"), UNUSUAL.values(), ids=UNUSUAL)
def test_tensors_without_plain_memory_are_no_example_and_no_input(make, message):
    tensor = make()
    with pytest.raises(ValueError, match=f"example 0 .*{message}"):
        parameterize(lambda x: x + 1, [tensor])
    region = parameterize(lambda x: x + 1, [ones(3, dtype=tensor.dtype)])
    with pytest.raises(ValueError, match=f"input 0 .*{message}"):
        region(tensor)
    assert region.report["launches"] == 0


def test_a_region_inside_a_transform_is_refused():
    region = parameterize(lambda x: x * 2, [ones(3)])
    with pytest.raises(ValueError, match=r"transform of torch\.func"):
        torch.func.vmap(region)(ones(2, 3))
    with pytest.raises(ValueError, match=r"transform of torch\.func"):
        torch.func.grad(lambda x: region(x).sum())(ones(3))


@pytest.mark.parametrize(
    ("fn", "examples", "counts", "message"),
    [
        (lambda *rows: rows[0] + 1, ones(2, 3), {}, "example_inputs is a Tensor: pass a list"),
        (lambda x: x + 1, {"x": ones(3)}, {}, "example_inputs is a dict"),
        (lambda x: x + 1, None, {}, "example_inputs is a NoneType"),
        (3, [ones(3)], {}, "fn is a int"),
        (lambda x: x + 1, [ones(3)], {"verify": -1}, "verify is -1"),
        (lambda x: x + 1, [ones(3)], {"verify": None}, "verify is None"),
        (lambda x: x + 1, [ones(3)], {"verify": "all"}, "verify is 'all'"),
    ],
)
def test_bad_arguments_are_one_clear_error(fn, examples, counts, message):
    with pytest.raises(ValueError, match=message):
        parameterize(fn, examples, **counts)


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (lambda x: Result(x + 1), "result 0 is a Result, which may hold tensors"),
        (lambda x: [x, {x + 1}], "result 1 is a set"),
        (lambda x: (x + i for i in range(2)), "result 0 is a generator"),
        (lambda x: x.to_sparse(), "cannot be captured|result 0"),
        (lambda x: x.t_(), "gives input 0 another shape"),
    ],
)
def test_results_that_no_launch_would_make_anew_are_refused(fn, message):
    with pytest.raises(RegionRefused, match=message):
        parameterize(fn, [ones(3, 2)])


def test_an_input_with_other_memory_afterwards_is_refused():
    def swap(x):
        x.data = x + 1
        return x * 2

    with pytest.raises(RegionRefused, match="gives input 0 another shape or other memory"):
        parameterize(swap, [ones(3)])


def test_tensors_that_the_function_keeps_are_refused():
    kept = []
    parameter = torch.nn.Parameter(ones(3))

    def backward(x):
        (parameter * x).sum().backward()
        return x + 1

    for fn in (lambda x: kept.append(x * 2), lambda x: kept.append(x[1:]), kept.append, backward):
        with pytest.raises(RegionRefused, match="keeps 1 tensors beyond its end"):
            parameterize(fn, [ones(3)])
        kept.clear()
    parameter.grad = torch.zeros(3)
    region = parameterize(backward, [ones(3)])
    parameter.grad.zero_()
    region(ones(3))
    assert same([parameter.grad], [ones(3)])


def test_tensors_in_a_cycle_of_objects_are_not_kept():
    def run(x):
        cycle = [x + 1]
        cycle.append(cycle)
        return cycle[0] * 2

    assert same([parameterize(run, [ones(3)])(ones(3))], [ones(3) * 4])


def test_writing_an_input_that_requires_a_gradient_is_refused_where_autograd_would_miss_it():
    region = parameterize(lambda x: x.mul_(2), [ones(3)])
    leaf = ones(3).requires_grad_()
    x = leaf * 1
    with pytest.raises(ValueError, match="input 0 requires a gradient and the region writes it"):
        region(x)
    assert same([x.detach()], [ones(3)]) and region.report["launches"] == 0
    with torch.no_grad():
        region(x)
    assert same([x.detach()], [ones(3) * 2])
    reader = parameterize(lambda x: x * 2, [ones(3)])
    assert not reader(leaf).requires_grad


def test_a_region_is_captured_and_called_in_inference_mode():
    with torch.inference_mode():
        inside = parameterize(lambda x: (x.mul_(2), x + 1), [ones(3)])
        assert same(inside(ones(3)), [ones(3) * 2, ones(3) * 3])
    x = ones(3)
    assert same(inside(x), [ones(3) * 2, ones(3) * 3]) and x._version > 0


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_region_is_not_copied(duplicate):
    region = parameterize(torch.nn.functional.gelu, [ones(3)])
    with pytest.raises(TypeError, match="cannot be copied or pickled"):
        duplicate(region)
    region.release()


def test_a_region_inside_another_is_refused_with_the_users_line():
    inner = parameterize(lambda x: x + 1, [ones(3)])
    with pytest.raises(RegionRefused, match=r"a parameterized region at .*test_checks\.py:\d+ .*runs inside a capture"):
        parameterize(lambda x: inner(x) * 2, [ones(3)])
    with pytest.raises(RegionRefused, match=r"parameterize at .*test_checks\.py:\d+ .*runs inside a capture"):
        parameterize(lambda x: parameterize(lambda y: y + 1, [x])(x), [ones(3)])
    assert same([inner(ones(3))], [ones(3) * 2])


def test_threads_launch_and_capture_while_another_one_captures():
    launched = parameterize(lambda x: x + 1, [ones(3)])
    inside, go_on, failures, results = threading.Event(), threading.Event(), [], []

    def slow(x):
        inside.set()
        assert go_on.wait(30)
        return x * 2

    def other():
        try:
            results.append(parameterize(slow, [ones(3)])(ones(3)))
        except CaptureError as error:
            failures.append(str(error))

    threads = [threading.Thread(target=other) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert inside.wait(30)
    results.append(launched(ones(3)))
    go_on.set()
    for thread in threads:
        thread.join()
    assert not failures
    assert same(results, [ones(3) * 2] * 3)
