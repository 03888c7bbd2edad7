"""common/capture/parameterized/sums: the additions of a layer's hooks in one launch, on the CPU."""

import pytest
import torch
from torch import nn

from common.capture.checks import RegionRefused
from common.capture.parameterized import backend, sums
from common.capture.parameterized.driver import DriverError


def model():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4, bias=False)).to(torch.bfloat16)
    for parameter in net.parameters():
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
    # The last layer adds by itself, without a hook.
    for parameter in list(net.parameters())[:-1]:
        parameter.register_post_accumulate_grad_hook(add)
    return net


def add(parameter):
    parameter.main_grad.add_(parameter.grad)
    parameter.grad = None


def passes(net, count=3):
    """main_grads after some passes from zero."""
    torch.manual_seed(1)
    for parameter in net.parameters():
        parameter.main_grad.zero_()
        parameter.grad = None
    for _ in range(count):
        net(torch.randn(2, 4, dtype=torch.bfloat16)).sum().backward()
    assert all(parameter.grad is None for parameter in list(net.parameters())[:-1])
    return [parameter.main_grad.clone() for parameter in net.parameters()]


@pytest.mark.parametrize("error", [None, RegionRefused, DriverError])
def test_the_additions_of_a_layer_are_one_launch_and_the_hooks_come_back(error, monkeypatch):
    def refused(*arguments):
        raise error("as asked\nwith more")

    refuses = error is not None
    if refuses:
        monkeypatch.setattr(backend, "capture", refused)
    net, regions = model(), []
    expected = passes(net)
    exchanged = sums.Sums([list(layer.parameters()) for layer in net], regions.append)
    exchanged.enter()
    assert all(torch.equal(a, b) for a, b in zip(passes(net), expected, strict=True))
    # Two layers with hooks share one region.
    assert [(region.name, region.state, region.reason) for region in regions] == [
        ("sums 0", "eager", "as asked") if refuses else ("sums 0", "parameterized", "")
    ]
    assert regions[0].num_replays == (0 if refuses else 6)
    exchanged.leave()
    assert all(torch.equal(a, b) for a, b in zip(passes(net), expected, strict=True))
    assert regions[0].num_replays == (0 if refuses else 6)


def test_a_launch_that_the_driver_refuses_leaves_the_additions_eager(monkeypatch):
    net, regions = model(), []
    expected = passes(net, 2)
    exchanged = sums.Sums([list(layer.parameters()) for layer in net], regions.append)
    exchanged.enter()
    passes(net, 1)

    def refused(*arguments):
        raise DriverError("launching a graph: CUDA_ERROR_UNKNOWN")

    monkeypatch.setattr(regions[0].captured, "launch", refused)
    assert all(torch.equal(a, b) for a, b in zip(passes(net, 2), expected, strict=True))
    assert regions[0].row()["reason"] == "a launch failed: launching a graph: CUDA_ERROR_UNKNOWN"
    assert (regions[0].state, regions[0].num_replays) == ("eager", 2)


def test_layers_with_other_strides_have_a_region_of_their_own():
    net, regions = model(), []
    net[1].weight.main_grad = torch.zeros(4, 4).t()
    assert net[1].weight.main_grad.stride() == net[0].weight.main_grad.t().stride()
    expected = passes(net)
    sums.Sums([list(layer.parameters()) for layer in net], regions.append).enter()
    assert all(torch.equal(a, b) for a, b in zip(passes(net), expected, strict=True))
    assert [region.num_replays for region in regions] == [3, 3]
