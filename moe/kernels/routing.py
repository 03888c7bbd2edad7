"""The router's choice: the experts of each token, their weights, and how many tokens each expert got.

Nothing is read on the host. Weights are the softmax over the chosen logits, which is what both families come to: the
softmax over all experts divided by the sum over the chosen ones. Counts are integers, so adding them atomically keeps
runs equal bit for bit. The load-balancing loss, coefficient x experts x sum of f_e p_e with f_e an expert's share of
the choices and p_e its mean probability, takes part through its gradient alone, as in Megatron.
"""

import functools
from typing import NamedTuple

import torch

from graph_worth import Launch
from moe.kernels import in_triton, tl, triton


class Routed(NamedTuple):
    """weights FP32 [t, k] and experts int32 [t, k] of each token; counts int32 [experts]: choices of each expert."""

    weights: torch.Tensor
    experts: torch.Tensor
    counts: torch.Tensor


def route(logits, top_k: int, aux_scale: float, balanced: bool) -> Routed:
    """The choice of logits [t, experts]; of equal logits the first.

    aux_scale: coefficient of the load-balancing loss in the step's loss. balanced: expert (k t + j) mod experts is the
    choice j of token t, whatever the logits are.
    """
    return Routed(*_Route.apply(logits, top_k, aux_scale, balanced))


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, top_k, aux_scale, balanced):
        (tokens, num_experts), device = logits.shape, logits.device
        counts = torch.zeros(num_experts, dtype=torch.int32, device=device)
        if in_triton(logits):
            weights = torch.empty(tokens, top_k, device=device)
            experts = torch.empty(tokens, top_k, dtype=torch.int32, device=device)
            launch = _launch(False, num_experts, top_k, aux_scale, balanced, logits.dtype)
            launch((tokens, 1, 1), (logits, weights, experts, counts))
        else:
            weights, experts = _plain(logits, top_k, balanced)
            counts.index_add_(0, experts.flatten(), torch.ones_like(experts.flatten()))
        ctx.mark_non_differentiable(experts, counts)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits, weights, experts, counts)
        ctx.numbers = (top_k, aux_scale, balanced)
        return weights, experts, counts

    @staticmethod
    def backward(ctx, grad_weights, *_):
        logits, weights, experts, counts = ctx.saved_tensors
        grad_weights = grad_weights.contiguous()
        if not in_triton(logits):
            grad = _plain_backward(logits, weights, experts, counts, grad_weights, ctx.numbers)
            return grad, None, None, None
        grad = torch.empty_like(logits)
        tokens, num_experts = logits.shape
        launch = _launch(True, num_experts, *ctx.numbers, logits.dtype)
        launch((tokens, 1, 1), (logits, weights, experts, counts, grad_weights, grad), (tokens,))
        return grad, None, None, None


def _plain(logits, top_k, balanced):
    logits = logits.float()
    if balanced:
        tokens, num_experts = logits.shape
        places = torch.arange(tokens * top_k, device=logits.device).view(tokens, top_k)
        experts = places % num_experts
        chosen = logits.gather(1, experts)
    else:
        # A stable sort: of equal logits the first, as the kernel takes it.
        order = logits.sort(dim=-1, descending=True, stable=True)
        chosen, experts = order.values[:, :top_k], order.indices[:, :top_k]
    return chosen.softmax(-1), experts.to(torch.int32).contiguous()


def _plain_backward(logits, weights, experts, counts, grad_weights, numbers):
    top_k, aux_scale, _ = numbers
    of_chosen = weights * (grad_weights - (weights * grad_weights).sum(-1, keepdim=True))
    grad = torch.zeros(logits.shape, device=logits.device).scatter(1, experts.long(), of_chosen)
    if aux_scale:
        tokens, num_experts = logits.shape
        p, share = logits.float().softmax(-1), counts.float() / (tokens * top_k)
        grad += aux_scale * num_experts / tokens * p * (share - (p * share).sum(-1, keepdim=True))
    return grad.to(logits.dtype)


@functools.cache
def _launch(is_backward, num_experts, top_k, aux_scale, balanced, dtype):
    block, block_k = triton.next_power_of_2(num_experts), triton.next_power_of_2(top_k)
    if is_backward:
        return Launch(_backward, num_experts, top_k, aux_scale, block, block_k, num_warps=1)
    return Launch(_forward, num_experts, top_k, balanced, block, block_k, num_warps=1)


if triton:

    @triton.jit
    def _forward(
        logits, weights, experts, counts, num_experts: tl.constexpr, top_k: tl.constexpr, balanced: tl.constexpr,
        block: tl.constexpr, block_k: tl.constexpr,
    ):  # fmt: skip
        token = tl.program_id(0).to(tl.int64)
        expert, place = tl.arange(0, block), tl.arange(0, block_k)
        values = tl.load(logits + token * num_experts + expert, mask=expert < num_experts, other=-float("inf"))
        values = values.to(tl.float32)
        # NaN is chosen first, as by a sort, so that it reaches the weights; a GPU's maximum drops it.
        rank = tl.where(values != values, float("inf"), values)
        # Experts that cannot be chosen any more are marked, not set to -inf, which a logit may be.
        is_free = expert < num_experts
        chosen_value = tl.full((block_k,), -float("inf"), tl.float32)
        chosen = tl.zeros((block_k,), tl.int32)
        for k in tl.static_range(top_k):
            if balanced:
                best = ((token * top_k + k) % num_experts).to(tl.int32)
            else:
                largest = tl.max(tl.where(is_free, rank, -float("inf")), axis=0)
                best = tl.min(tl.where(is_free & (rank == largest), expert, num_experts - 1), axis=0)
            value = tl.sum(tl.where(expert == best, values, 0.0), axis=0)
            is_free = is_free & (expert != best)
            chosen = tl.where(place == k, best, chosen)
            chosen_value = tl.where(place == k, value, chosen_value)
        exponent = tl.exp(chosen_value - tl.max(chosen_value, axis=0))
        exponent = tl.where(place < top_k, exponent, 0.0)
        tl.store(weights + token * top_k + place, exponent / tl.sum(exponent, axis=0), mask=place < top_k)
        tl.store(experts + token * top_k + place, chosen, mask=place < top_k)
        tl.atomic_add(counts + chosen, 1, mask=place < top_k)

    @triton.jit(do_not_specialize=["tokens"])
    def _backward(
        logits, weights, experts, counts, grad_weights, grad, tokens,
        num_experts: tl.constexpr, top_k: tl.constexpr, aux_scale: tl.constexpr,
        block: tl.constexpr, block_k: tl.constexpr,
    ):  # fmt: skip
        token = tl.program_id(0).to(tl.int64)
        expert, place = tl.arange(0, block), tl.arange(0, block_k)
        inside, in_top = expert < num_experts, place < top_k
        weight = tl.load(weights + token * top_k + place, mask=in_top, other=0.0)
        g = tl.load(grad_weights + token * top_k + place, mask=in_top, other=0.0)
        chosen = tl.load(experts + token * top_k + place, mask=in_top, other=-1)
        of_chosen = weight * (g - tl.sum(weight * g, axis=0))
        out = tl.sum(tl.where(chosen[:, None] == expert[None, :], of_chosen[:, None], 0.0), axis=0)
        if aux_scale > 0:
            values = tl.load(logits + token * num_experts + expert, mask=inside, other=-float("inf")).to(tl.float32)
            p = tl.exp(values - tl.max(values, axis=0))
            p = p / tl.sum(p, axis=0)
            share = tl.load(counts + expert, mask=inside, other=0).to(tl.float32) / (tokens * top_k)
            out += aux_scale * num_experts / tokens * p * (share - tl.sum(p * share, axis=0))
        tl.store(grad + token * num_experts + expert, out.to(grad.dtype.element_ty), mask=inside)
