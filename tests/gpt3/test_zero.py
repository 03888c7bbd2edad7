"""gpt3/zero.py: updates split over gloo ranks against updates of everything on every rank."""

import itertools

import pytest
import torch

from common.optimizers.adam import Adam
from common.optimizers.hyperparameters import Hyperparameters
from common.parallel.buckets import GradientBuckets, reduce_norm_
from common.parallel.groups import Ranks, make_groups
from gpt3 import zero
from graph_worth.capture.host_graph import HostPool
from graph_worth.parallel import collectives
from tests.helpers import gloo_ranks

pytestmark = pytest.mark.slow

NO_CLIP = 1e6
SHAPES = [(7, 5), (300,), (13, 11), (1,), (129, 3)]


def parameters():
    generator = torch.Generator().manual_seed(1)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).bfloat16()) for shape in SHAPES]


def numbers(clip=NO_CLIP):
    return Hyperparameters(lr=0.05, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, clip=clip)


def main_grads():
    return [torch.zeros(shape) for shape in SHAPES]


def fill(grads, step, data_rank, integers=False):
    generator = torch.Generator().manual_seed(100 * step + data_rank)
    for grad in grads:
        grad.copy_(torch.randn(grad.shape, generator=generator))
        if integers:
            grad.mul_(8).round_()


def zero_adam(clip=NO_CLIP, **options):
    params, grads = parameters(), main_grads()
    return zero.ZeroAdam(params, grads, numbers(clip), bucket_bytes=3000, **options), params, grads


def difference(group, data_rank, parts=1, integers=False, clip=NO_CLIP, num_groups=1):
    """Largest differences of parameters and norms after three steps: ZeRO's to those of plain data parallelism.

    The norm is over all groups, whose gradients are alike here.
    """
    sharded, params, grads = zero_adam(clip, group=group)
    whole_params, whole_grads = parameters(), main_grads()
    buckets = GradientBuckets(whole_grads, 3000, group, parts)
    plain = Adam(whole_params, numbers(clip), whole_grads)
    largest, norms = 0.0, 0.0
    for step in range(3):
        for tensors in (grads, whole_grads):
            fill(tensors, step, data_rank, integers)
        sharded.step()
        buckets.all_reduce_mean()
        plain.step()
        norms = max(norms, float((sharded.grad_norm / plain.grad_norm / num_groups**0.5 - 1).abs()))
        for param, expected in zip(params, whole_params, strict=True):
            largest = max(largest, float((param - expected).abs().max()))
    return largest, norms


def replays(data_rank):
    """Return whether an eager and two replayed steps equal three eager steps bitwise, and the graph's collectives."""
    results, operators = [], []
    for captures in (False, True):
        sharded, params, grads = zero_adam(clip=0.5)
        pool, graph = HostPool(), None
        for step in range(3):
            fill(grads, step, data_rank)
            if graph is not None:
                graph.replay()
            elif captures:
                graph, _ = pool.capture(sharded.step)
            else:
                sharded.step()
        results.append([*(param.detach().clone() for param in params), sharded.grad_norm.clone()])
        if graph is not None:
            operators = [name for name in graph.operators() if name.startswith("graphs.")]
    return all(map(torch.equal, *results)), operators


def worker():
    ranks = Ranks(dp=2, tp=2)
    groups, place = make_groups(ranks, "cpu"), ranks.place(collectives.group_rank())
    everyone = place.world_rank
    result = {
        "two": difference(groups.replicas, place.data_rank, num_groups=2),
        "four, one layout": difference("", everyone, parts=4),
        "four, exact sums": difference("", everyone, integers=True),
        "four, clipped": difference("", everyone, clip=0.5),
        "replays": replays(everyone),
    }

    # Parameter 0 is a shard, 1 is alike on all tensor ranks, the others' gradients are zero.
    uncounted = [1] if place.tensor_rank else []
    sharded, params, grads = zero_adam(group=groups.replicas)
    sharded = zero.ZeroAdam(
        params, grads, numbers(), group=groups.replicas, uncounted=[params[index] for index in uncounted]
    )
    grads[0].fill_(1.0 + place.tensor_rank)
    grads[1].fill_(2.0)
    sharded.step()
    result["shared norm"] = float(sharded.grad_norm)
    result["bytes"] = sum(tensor.nbytes for _, tensor in sharded.named_state())

    sharded.reset()
    adam = sharded.adam
    moments = any(bool(tensor.any()) for tensor in (*adam.exp_avg, *adam.exp_avg_sq, sharded.step_count))
    result["reset"] = [moments, all(map(torch.equal, adam.masters, [share.float() for share in adam.params]))]

    return result


@pytest.fixture(scope="module")
def four_ranks():
    return gloo_ranks.run("tests.gpt3.test_zero", "worker", 4)


def test_it_is_plain_data_parallelism(four_ranks):
    """Bitwise; clipped gradients differ by the last bit of the norm."""
    cases = {"two": 0.0, "four, one layout": 0.0, "four, exact sums": 0.0, "four, clipped": 1e-2}
    for result, (case, most) in itertools.product(four_ranks, cases.items()):
        largest, norms = result[case]
        assert largest <= most and norms < 1e-6, case


def test_a_captured_step_is_bitwise_an_eager_one(four_ranks):
    reduces, gathers = (["graphs.reduce_scatter_mean_.default"], ["graphs.all_gather_.default"])
    for result in four_ranks:
        same, operators = result["replays"]
        assert same
        count = operators.count(*reduces)
        assert count > 1 and operators == [*reduces * count, "graphs.all_reduce_sum_.default", *gathers * count]


def test_shared_norm_split_state_and_reset(four_ranks):
    """Parameters that ranks share count once in the norm; masters and moments are shared out."""
    num_elements = sum(torch.Size(shape).numel() for shape in SHAPES)
    padded = sum(-(-torch.Size(shape).numel() // 128) * 128 for shape in SHAPES)
    for result in four_ranks:
        assert result["shared norm"] == pytest.approx((35 * 1 + 35 * 4 + 300 * 4) ** 0.5, rel=1e-6)
        assert 3 * 4 * num_elements / 2 <= result["bytes"] <= 3 * 4 * (padded + 128) / 2 + 4
        assert result["reset"] == [False, True]


def test_one_process_is_bitwise_master_adam():
    sharded, params, grads = zero_adam()
    whole_params, whole_grads = parameters(), main_grads()
    plain = Adam(whole_params, numbers(), whole_grads)
    addresses = [param.data_ptr() for param in params]
    for step in range(2):
        for tensors in (grads, whole_grads):
            fill(tensors, step, 0)
        sharded.step()
        plain.step()
        assert float(sharded.grad_norm) == pytest.approx(float(plain.grad_norm), rel=1e-6)
    assert all(map(torch.equal, params, whole_params))
    assert [param.data_ptr() for param in params] == addresses
    sharded.grads.zero_()
    assert not any(grad.any() for grad in grads)


def test_a_norm_that_is_not_finite_stays_so():
    for value in (torch.inf, torch.nan):
        norm = torch.tensor(value)
        reduce_norm_(norm, uncounted=[torch.ones(2)])
        assert not torch.isfinite(norm)
