"""Triton's kernels of the experts against the plain torch that stands beside each."""

import functools
import itertools

import pytest
import torch

from moe.kernels import activation, cross_entropy, heads, labels, order, routing, rows, sinks, weight_gradient
from moe.kernels.order import RowPlan
from tests.helpers.triton_interpreter import DEVICE, on_device, run_interpreted

TOKENS, TOP_K, EXPERTS, HIDDEN, FFN = 12, 3, 5, 24, 16


@pytest.fixture
def plain(monkeypatch):
    """plain(): from here on functions are plain torch."""

    def switch():
        for module in (activation, cross_entropy, heads, labels, order, routing, rows, sinks, weight_gradient):
            monkeypatch.setattr(module, "in_triton", lambda tensor: False)

    return switch


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def plan(drops=0):
    """An order of rows in which expert 1 has none; the last `drops` choices have no row, and as many rows no token."""
    experts = torch.tensor([0, 2, 3, 4])[
        torch.randint(4, (TOKENS * TOP_K,), generator=torch.Generator().manual_seed(3))
    ]
    ordered, choice_of_row = experts.sort(stable=True)
    row_of_choice = torch.empty_like(choice_of_row).scatter_(0, choice_of_row, torch.arange(len(experts)))
    row_of_choice[len(experts) - drops :] = -1
    choice_of_row = torch.where(choice_of_row >= len(experts) - drops, -1, choice_of_row)
    token_of_row = torch.where(choice_of_row < 0, -1, choice_of_row // TOP_K)
    offsets = torch.bincount(ordered, minlength=EXPERTS).cumsum(0)
    made = (row_of_choice.view(TOKENS, TOP_K), token_of_row, choice_of_row, ordered, offsets)
    return RowPlan(*(each.to(torch.int32).to(DEVICE) for each in made))


def gradients(function, *inputs):
    """Outputs of a function and the gradients of its floating inputs."""
    inputs = [each.detach().clone().requires_grad_() for each in inputs]
    outputs = function(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    differentiable = [output for output in outputs if output.requires_grad]
    torch.autograd.backward(differentiable, [numbers(*output.shape, seed=7) for output in differentiable])
    return [*(output.detach() for output in outputs), *(each.grad for each in inputs)]


def assert_alike(function, inputs, plain):
    ours = gradients(function, *inputs)
    plain()
    for own, expected in zip(ours, gradients(function, *inputs), strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-5)


@on_device
@pytest.mark.parametrize("drops", [0, 5])
def test_rows_go_to_the_experts_and_back(plain, drops):
    by_expert = plan(drops)
    assert_alike(lambda y: rows.gather(y, by_expert), [numbers(TOKENS, HIDDEN)], plain)


@on_device
@pytest.mark.parametrize("drops", [0, 5])
def test_rows_are_added_to_the_residual(plain, drops):
    by_expert, inputs = plan(drops), [numbers(TOKENS * TOP_K, HIDDEN), numbers(TOKENS, HIDDEN, seed=1)]
    assert_alike(lambda z, x: rows.combine(z, x, by_expert), inputs, plain)


@on_device
@pytest.mark.parametrize("has_bias", [False, True])
def test_activation_and_its_backward(plain, has_bias):
    by_expert = plan()
    # Large enough that some gates and ups are cut.
    z, grad = 6 * numbers(TOKENS * TOP_K, 2 * FFN), numbers(TOKENS * TOP_K, FFN, seed=1)
    bias = numbers(EXPERTS, 2 * FFN, seed=2) if has_bias else None
    weights = numbers(TOKENS, TOP_K, seed=3).softmax(-1)
    ours = activation.activate(z, bias, weights, by_expert)
    back = activation.activate_backward(grad, z, bias, weights, by_expert)
    plain()
    torch.testing.assert_close(ours, activation.activate(z, bias, weights, by_expert))
    for own, expected in zip(back, activation.activate_backward(grad, z, bias, weights, by_expert), strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-5)
    assert (z.abs() > activation.LIMIT).any()


@on_device
@pytest.mark.parametrize("capacity", [0, 1, 150])
def test_rows_are_sorted_by_expert(plain, capacity):
    """Several blocks of choices, the last one not full, and an expert that nobody chose."""
    experts = torch.tensor([0, 2, 3, 4])[torch.randint(4, (101, 3), generator=torch.Generator().manual_seed(3))]
    counts = torch.bincount(experts.flatten(), minlength=EXPERTS)
    experts, counts = (each.to(torch.int32).to(DEVICE) for each in (experts, counts))
    ours = order.order_rows(experts, counts, capacity)
    plain()
    expected = order.order_rows(experts, counts, capacity)
    for name, own in ours._asdict().items():
        theirs = getattr(expected, name)
        assert (own is None and theirs is None) or torch.equal(own, theirs), name
    rows_with_tokens = int((ours.choice_of_row >= 0).sum())
    assert rows_with_tokens == int(counts.clamp(max=capacity).sum() if capacity else counts.sum())


@on_device
@pytest.mark.parametrize("capacity", [0, 101])
def test_labels_of_rows_for_ranks(plain, capacity):
    """Several blocks of rows of two ranks with three experts each; with a capacity some are padding, some left out."""
    experts = torch.randint(9, (101, 2), generator=torch.Generator().manual_seed(3))
    # Two thirds of the rows are the first rank's.
    experts = torch.where(experts < 6, experts % 3, experts - 3).to(torch.int32).to(DEVICE)
    weights, of_rank = numbers(101, 2), experts // 3
    by_rank = order.order_rows(of_rank, torch.bincount(of_rank.flatten()).to(torch.int32), capacity)
    grad = numbers(len(by_rank.choice_of_row), 1, seed=1)

    def made():
        written = labels.write(weights, experts, by_rank.choice_of_row, 3)
        return (written, *labels.read(written, 4), labels.gradient_of_weights(grad, by_rank.row_of_choice))

    ours = made()
    plain()
    for own, expected in zip(ours, made(), strict=True):
        assert torch.equal(own, expected)
    num_padding = int((by_rank.choice_of_row < 0).sum())
    assert ours[3].tolist()[3] == num_padding and (num_padding == 0) == (capacity == 0)
    assert ours[3].sum() == len(grad)


@on_device
@pytest.mark.parametrize("adds", [False, True])
def test_weight_gradient_of_experts_of_any_number_of_rows(plain, adds):
    by_expert, x, grad = plan(), numbers(TOKENS * TOP_K, HIDDEN), numbers(TOKENS * TOP_K, 2 * FFN, seed=1)
    start = numbers(EXPERTS, HIDDEN, 2 * FFN, seed=2)
    ours = weight_gradient.grouped_weight_gradient_(start.clone(), x, grad, by_expert.offsets, adds)
    expected = start * adds + sums_of_experts(x, grad, by_expert)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
    assert by_expert.offsets[0] == by_expert.offsets[1]


@on_device
def test_sums_of_experts_rows_do_not_depend_on_rows_behind_them(plain):
    """Several tiles of rows and of columns; rows behind the last expert's are undefined."""
    ends, width = [70, 70, 101, 133], 150
    offsets = torch.tensor(ends, dtype=torch.int32, device=DEVICE)
    expert_of_row = torch.tensor([0] * 70 + [2] * 31 + [3] * 72, dtype=torch.int32, device=DEVICE)
    grad = numbers(173, width)
    grad[133:] = torch.nan
    expected = torch.stack([grad[start:end].sum(0) for start, end in zip([0, *ends], ends, strict=False)])
    ours = weight_gradient.grouped_sums(grad, offsets, expert_of_row)
    assert torch.equal(ours, weight_gradient.grouped_sums(grad[:133], offsets, expert_of_row[:133]))
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
    plain()
    of_torch = weight_gradient.grouped_sums(grad, offsets, expert_of_row)
    torch.testing.assert_close(of_torch, expected, rtol=1e-5, atol=1e-5)


@on_device
@pytest.mark.parametrize("has_norms", [False, True])
def test_heads_are_normalised_and_turned(plain, has_norms):
    shape, angles = (5, 2, 8), numbers(TOKENS, 4, seed=5)
    inputs = [numbers(TOKENS, 9 * 8), *(numbers(2, 8, seed=6).unbind() if has_norms else ())]

    def function(qkv, *norms):
        return heads.split_heads(qkv, shape, (angles.cos(), angles.sin()), norms or None, 1e-6)

    assert_alike(function, inputs, plain)


@on_device
@pytest.mark.parametrize("aux, balanced", [(0.0, False), (0.1, False), (0.0, True)])
def test_router_chooses_weighs_and_counts(plain, aux, balanced):
    logits = numbers(TOKENS, EXPERTS)
    logits[0] = 1.0  # equal ones: the first are chosen
    assert_alike(lambda logits: tuple(routing.route(logits, TOP_K, aux, balanced)), [logits], plain)


@on_device
@pytest.mark.parametrize("sequences", [(), (2,)])
def test_sinks_take_their_part_of_the_softmax(plain, sequences):
    """Attention with values as they are, against a softmax with a further logit without a value."""
    heads_, dim, length = 3, 4, 5
    scores = numbers(*sequences, length, heads_, 6).double().requires_grad_()
    values, logits = numbers(6, dim, seed=1).double(), numbers(heads_, seed=2).double().requires_grad_()
    joined = torch.cat((scores, logits[:, None].expand(*scores.shape[:-1], 1)), -1)
    expected, grad = joined.softmax(-1)[..., :6] @ values, numbers(*sequences, length, heads_, dim, seed=3)
    expected.backward(grad.double())
    for is_plain in (False, True):
        if is_plain:
            plain()
        out = (scores.softmax(-1) @ values).detach().float().contiguous()
        own, without = logits.detach().float(), scores.detach().logsumexp(-1).transpose(-1, -2).float().contiguous()
        lse = sinks.add_sinks_(out, without, own)
        torch.testing.assert_close(out, expected.detach().float())
        torch.testing.assert_close(lse, joined.detach().logsumexp(-1).transpose(-1, -2).float())
        torch.testing.assert_close(sinks.sink_gradient(grad, out, lse, own), logits.grad.float())


@on_device
def test_cross_entropy_and_its_gradient():
    logits, targets = numbers(TOKENS, 5000), torch.randint(5000, (TOKENS,)).to(DEVICE)
    losses, ours = torch.empty(TOKENS, device=DEVICE), logits.clone()
    cross_entropy.cross_entropy_(ours, targets, losses, 0.5)
    expected = logits.requires_grad_()
    of_torch = torch.nn.functional.cross_entropy(expected, targets, reduction="none")
    torch.testing.assert_close(losses, of_torch.detach())
    of_torch.sum().mul(0.5).backward()
    torch.testing.assert_close(ours, expected.grad, rtol=1e-4, atol=1e-7)


def sums_of_experts(x, grad, by_expert):
    ends = [0, *by_expert.offsets.tolist()]
    return torch.stack([x[start:end].t() @ grad[start:end] for start, end in itertools.pairwise(ends)])


def with_sinks(out, lse, logits, grad):
    out = out.clone()
    lse = sinks.add_sinks_(out, lse, logits)
    return out, lse, sinks.sink_gradient(grad, out, lse, logits)


def cross_entropies(logits):
    losses, grad = torch.empty(TOKENS, device=DEVICE), logits.clone()
    cross_entropy.cross_entropy_(grad, torch.arange(TOKENS, device=DEVICE), losses, 0.5)
    return losses, grad


def activated(z, weights, grad, bias=None):
    by_expert = plan()
    out = activation.activate(z, bias, weights, by_expert)
    return out, *activation.activate_backward(grad, z, bias, weights, by_expert)


def labelled(weights, grad):
    by_expert = plan(drops=5)
    experts = by_expert.expert_of_row.view(TOKENS, TOP_K)
    written = labels.write(weights, experts, by_expert.choice_of_row, 3)
    return written, *labels.read(written, 4), labels.gradient_of_weights(grad, by_expert.row_of_choice)


def through_heads(qkv, *norms):
    angles = numbers(TOKENS, 4, seed=5)
    return heads.split_heads(qkv, (5, 2, 8), (angles.cos(), angles.sin()), norms or None, 1e-6)


ROWS, WEIGHTS = TOKENS * TOP_K, (TOKENS, TOP_K)
# Kernels and the shapes of their floating-point inputs; the rows' order has none.
WITH_GRADIENTS = {
    "gather": (lambda y: rows.gather(y, plan(5)), (TOKENS, HIDDEN)),
    "combine": (lambda z, x: rows.combine(z, x, plan(5)), (ROWS, HIDDEN), (TOKENS, HIDDEN)),
    "router": (lambda logits: tuple(routing.route(logits, TOP_K, 0.1, False)), (TOKENS, EXPERTS)),
    "balanced router": (lambda logits: tuple(routing.route(logits, TOP_K, 0.0, True)), (TOKENS, EXPERTS)),
    "heads": (through_heads, (TOKENS, 72)),
    "normalised heads": (through_heads, (TOKENS, 72), (8,), (8,)),
}
WITHOUT = {
    "activation": (activated, (ROWS, 2 * FFN), WEIGHTS, (ROWS, FFN)),
    "clamped activation": (activated, (ROWS, 2 * FFN), WEIGHTS, (ROWS, FFN), (EXPERTS, 2 * FFN)),
    "sums of rows": (
        lambda x: (weight_gradient.grouped_sums(x, plan().offsets, plan().expert_of_row),), (ROWS, HIDDEN),
    ),
    "cross-entropy": (cross_entropies, (TOKENS, 5000)),
    "labels": (labelled, WEIGHTS, (ROWS, 1)),
    "sinks": (with_sinks, (TOKENS, 3, 4), (3, TOKENS), (3,), (TOKENS, 3, 4)),
}  # fmt: skip


def spoiled(shapes, number):
    """Inputs of which one has numbers that are not finite."""
    inputs = [numbers(*shape, seed=seed) for seed, shape in enumerate(shapes)]
    flat, bad = inputs[number].view(-1), torch.tensor([torch.nan, torch.inf, -torch.inf])
    flat[[0, len(flat) // 3, 2 * len(flat) // 3]] = bad.to(DEVICE)
    return inputs


@on_device
@pytest.mark.parametrize("name", [*WITH_GRADIENTS, *WITHOUT])
def test_numbers_that_are_not_finite_go_through(plain, name):
    """In each input, as in plain torch."""
    function, *shapes = (WITH_GRADIENTS | WITHOUT)[name]
    if name in WITH_GRADIENTS:
        function = functools.partial(gradients, function)
    ours = [function(*spoiled(shapes, number)) for number in range(len(shapes))]
    plain()
    for number, own in enumerate(ours):
        expected = function(*spoiled(shapes, number))
        assert any(each.isnan().any() for each in own), number
        if name in (
            "clamped activation",
            "normalised heads",
        ):  # plain torch adds inf and -inf where these have one term
            own, expected = ([each.where(each.isfinite(), torch.nan) for each in both] for both in (own, expected))
        for one, other in zip(own, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5, equal_nan=True)


@on_device
@pytest.mark.parametrize("number", [0, 1, 2])
def test_numbers_that_are_not_finite_go_through_the_weight_gradient(number):
    by_expert = plan()
    start, x, grad = spoiled([(EXPERTS, HIDDEN, FFN), (ROWS, HIDDEN), (ROWS, FFN)], number)
    expected = start + sums_of_experts(x, grad, by_expert)
    ours = weight_gradient.grouped_weight_gradient_(start, x, grad, by_expert.offsets, True)
    assert ours.isnan().any()
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.slow
def test_in_the_interpreter():
    run_interpreted(__file__)
