"""LAMB's two passes as Triton kernels: `moments` and `update` of rnnt/lamb.py without temporaries in memory.

A program has one block of one tensor. Sums go through memory and are added in a fixed order, so a step repeats bit for
bit.
"""

import functools

import torch
import triton
import triton.language as tl

from graph_worth import Launch

NUM_WARPS = 4
SUM_TILE = 1024


def moments(lamb) -> None:
    num_blocks = len(lamb.block_owners)
    partial = torch.empty(2, num_blocks, device=lamb.master.device)
    scaler = lamb.scaler
    numbers = (*lamb.betas, lamb.eps, lamb.weight_decay, lamb.max_grad_norm)
    of_blocks, of_tensors = _moments_of(lamb.grad.dtype, lamb.BLOCK, num_blocks, *numbers)
    of_blocks((num_blocks, 1, 1), (
        lamb.grad, lamb.master, lamb.exp_avg, lamb.exp_avg_sq, partial,
        lamb.grad_norm, scaler.scale, scaler.found_inf, lamb.corrections,
    ))  # fmt: skip
    of_tensors((len(lamb.spans), 1, 1), (partial, lamb.spans_on_device, lamb.squares))


def update(lamb) -> None:
    launch = _update_of(lamb.param.dtype, lamb.BLOCK, lamb.eps, lamb.weight_decay, lamb.ema_decay)
    launch((len(lamb.block_owners), 1, 1), (
        lamb.master, lamb.exp_avg, lamb.exp_avg_sq, lamb.param, lamb.ema_share, lamb.squares, lamb.block_owners,
        lamb.lr, lamb.scaler.found_inf, lamb.corrections,
    ))  # fmt: skip


@functools.cache
def _moments_of(dtype, block, num_blocks, beta1, beta2, eps, weight_decay, max_grad_norm):
    numbers = (beta1, 1 - beta1, beta2, 1 - beta2, eps, weight_decay, max_grad_norm)
    of_blocks = Launch(_moments, *numbers, BLOCK=block, num_warps=NUM_WARPS)
    return of_blocks, Launch(_add_partial, num_blocks, TILE=SUM_TILE)


@functools.cache
def _update_of(dtype, block, eps, weight_decay, ema_decay):
    return Launch(_update, eps, weight_decay, ema_decay, 1 - ema_decay, BLOCK=block, num_warps=NUM_WARPS)


@triton.jit
def _direction(mean, square, master, corrections, eps, weight_decay):
    mean = mean / -tl.load(corrections)
    square = square / -tl.load(corrections + 1)
    return mean / (tl.sqrt(square) + eps) + weight_decay * master


@triton.jit
def _moments(
    grads, masters, exp_avgs, exp_avg_sqs, partial, grad_norm, scale, found_inf, corrections,
    beta1, rest1, beta2, rest2, eps, weight_decay, max_grad_norm,
    BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(found_inf) == 0:
        block = tl.program_id(0)
        place = block * BLOCK + tl.arange(0, BLOCK)
        factor = tl.minimum(max_grad_norm / (tl.load(grad_norm) + 1e-6), 1.0) / tl.load(scale)
        grad = tl.load(grads + place).to(tl.float32) * factor
        master = tl.load(masters + place)
        exp_avg = beta1 * tl.load(exp_avgs + place) + rest1 * grad
        exp_avg_sq = beta2 * tl.load(exp_avg_sqs + place) + rest2 * grad * grad
        tl.store(exp_avgs + place, exp_avg)
        tl.store(exp_avg_sqs + place, exp_avg_sq)
        direction = _direction(exp_avg, exp_avg_sq, master, corrections, eps, weight_decay)
        rounded = master.to(grads.dtype.element_ty).to(tl.float32)
        tl.store(partial + block, tl.sum(rounded * rounded, 0))
        tl.store(partial + tl.num_programs(0) + block, tl.sum(direction * direction, 0))


@triton.jit
def _add_partial(partial, spans, squares, num_blocks, TILE: tl.constexpr):
    tensor = tl.program_id(0)
    first = tl.load(spans + 2 * tensor)
    end = tl.load(spans + 2 * tensor + 1)
    of_param = tl.zeros([TILE], tl.float32)
    of_direction = tl.zeros([TILE], tl.float32)
    for start in range(first, end, TILE):
        block = start + tl.arange(0, TILE)
        of_param += tl.load(partial + block, block < end, other=0.0)
        of_direction += tl.load(partial + num_blocks + block, block < end, other=0.0)
    tl.store(squares + 2 * tensor, tl.sum(of_param, 0))
    tl.store(squares + 2 * tensor + 1, tl.sum(of_direction, 0))


@triton.jit
def _update(
    masters, exp_avgs, exp_avg_sqs, parameters, emas, squares, owners, lr, found_inf, corrections,
    eps, weight_decay, decay, rest,
    BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(found_inf) == 0:
        block = tl.program_id(0)
        place = block * BLOCK + tl.arange(0, BLOCK)
        tensor = tl.load(owners + block)
        of_param = tl.sqrt(tl.load(squares + 2 * tensor))
        of_direction = tl.sqrt(tl.load(squares + 2 * tensor + 1))
        ratio = 1.0
        if (of_param > 0) & (of_direction > 0):
            ratio = of_param / of_direction
        master = tl.load(masters + place)
        exp_avg, exp_avg_sq = tl.load(exp_avgs + place), tl.load(exp_avg_sqs + place)
        direction = _direction(exp_avg, exp_avg_sq, master, corrections, eps, weight_decay)
        master -= tl.load(lr) * ratio * direction
        tl.store(masters + place, master)
        tl.store(parameters + place, master.to(parameters.dtype.element_ty))
        tl.store(emas + place, decay * tl.load(emas + place) + rest * master)
