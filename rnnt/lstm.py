"""LSTM layers whose recurrence is a few launches forwards and a few backwards, for the sizes of RNN-T at batch 8.

At this batch a time step multiplies 8 rows by 8 MiB of weights. Its duration is the time until all thread blocks have
each other's results, not the time of the arithmetic. rnnt/kernels/lstm.cu keeps the weights in registers and exchanges
results through L2. Products that need no order in time are left to cuBLAS, for many time steps at once: those of the
inputs before, the gradients of inputs and weights after.

A layer of width 1024 takes half of an H200, so two run side by side: time is cut into stretches, and while a layer has
one of them the next layer has the one before. That takes three quarters of the time of one layer after the other.

Rounding is as in cuDNN: products in FP16 with FP32 sums, gates and cell computed in FP32; h, gradients and values kept
for the backward in FP16, the input's product too. On the CPU torch's LSTM runs in FP32.
"""

import functools
from typing import NamedTuple

import torch
from torch.autograd.function import once_differentiable

from rnnt.config import LSTM_BATCH

# Layers that run side by side.
AT_ONCE = 2
# Cost of a turn of the wavefront besides its time steps, in time steps: launches, weights loaded into registers, and
# the products between turns. Values from 5 to 20 make a difference of 1 % (results/archive/h200x1/rnnt-lstm).
TURN_COST = 10
# All stretches but the last have a multiple of so many time steps, so that cuBLAS meets few shapes.
UNIT = 8


def lstm(x, layers, lengths=None, extra=0, dropout=0.0):
    """Output [T, 8, H] of a stack of LSTM layers for x [T, 8, I], FP16, from states of zeros; differentiable.

    Args:
        x: input; on a GPU H must be one of LSTM_WIDTHS.
        layers: (w_ih, w_hh, b_ih, b_hh) of each, named as in torch.nn.LSTM, all of one width H.
        lengths: int32 [8], time steps of each utterance, `extra` more for each. Outputs after the longest of them are
            0 and take no time steps. The device decides that, in a graph, too. None: all T.
        extra: see lengths.
        dropout: share of every layer's outputs that is dropped.

    Returns:
        A view, which must not be changed in place.

    Raises:
        ValueError: for another batch size or dtype, or for layers of several widths.
    """
    if x.shape[1] != LSTM_BATCH:
        raise ValueError(f"our LSTM kernels take batches of {LSTM_BATCH}, not of {x.shape[1]}: take --lstm cudnn")
    weights = [weight for layer in layers for weight in layer]
    if any(tensor.dtype != torch.float16 for tensor in (x, *weights)):
        raise ValueError("our LSTM kernels take FP16: take --lstm cudnn")
    if len({w_hh.shape for _, w_hh, _, _ in layers}) > 1:
        raise ValueError("a stack's layers have one width")
    if _kernels(x.device) is None:
        return plain_lstm(x, layers, lengths, extra, dropout)
    return _Stack.apply(x, lengths, extra, dropout, *weights)


def plain_lstm(x, layers, lengths=None, extra=0, dropout=0.0):
    """`lstm` by torch's own in FP32, on any device. It draws the same dropout."""
    hidden, dtype = layers[0][1].shape[1], x.dtype
    kept = torch.ones(len(layers), *x.shape[:2], hidden, dtype=torch.uint8, device=x.device)
    if dropout > 0:
        kept.bernoulli_(1 - dropout)
    if lengths is not None:
        is_needed = torch.arange(len(x), device=x.device) < lengths.max() + extra
        kept *= is_needed.view(-1, 1, 1)
    for weights, mask in zip(layers, kept, strict=True):
        weights = [weight.float() for weight in weights]
        zeros = torch.zeros(1, x.shape[1], hidden, device=x.device)
        x = torch.lstm(x.float(), (zeros, zeros), weights, True, 1, 0.0, False, False, False)[0]
        x = (x * (mask / (1 - dropout))).to(dtype)
    return x


def require(device: torch.device, width: int) -> None:
    """Raises ValueError that names --lstm where a GPU cannot run two layers of this width at the same time."""
    if kernels := _kernels(device):
        kernels.require(device, width)


def check(device: torch.device) -> None:
    """Wait for the current stream. Raises RuntimeError where a kernel gave up, after which all results are NaN."""
    if kernels := _kernels(device):
        kernels.check(device)


def _kernels(device):
    """The module that launches the kernels, None without a GPU."""
    if device.type != "cuda":
        return None
    from rnnt.kernels import lstm as lstm_kernel

    return lstm_kernel


# ------------------------------------------------------------------------------------------------
# The order of work


@functools.lru_cache(4096)
def turns(num_layers: int, num_steps: int) -> tuple[tuple[tuple[int, int, int], ...], ...]:
    """Turns, each of (layer, first time step, end) for up to AT_ONCE layers, in forward order.

    A layer's stretch comes after its stretch before and after the same one of the layer below. Their length is the one
    that takes the least time, if a turn takes as long as its steps and TURN_COST.
    """
    sizes = range(UNIT, num_steps + UNIT, UNIT)
    return min((_cut(num_layers, num_steps, size) for size in sizes), key=_cost)


def _cut(num_layers, num_steps, size):
    """The turns for stretches of `size`: always the layers with the most work behind them."""
    num, done, order = -(-num_steps // size), [0] * num_layers, []
    while done[-1] < num:
        ready = [
            layer for layer in range(num_layers) if done[layer] < num and (not layer or done[layer - 1] > done[layer])
        ]
        ready.sort(key=lambda layer: (done[layer] + layer, layer))
        turn = [(layer, done[layer] * size) for layer in ready[:AT_ONCE]]
        order.append(tuple((layer, first, min(first + size, num_steps)) for layer, first in turn))
        for layer, _ in turn:
            done[layer] += 1
    return tuple(order)


def _cost(order):
    return sum(TURN_COST + max(end - first for _, first, end in turn) for turn in order)


# ------------------------------------------------------------------------------------------------
# Forward and backward


class Layer(NamedTuple):
    """Tensors that a layer's time steps read and write, in the order of rnnt/kernels/lstm.cu, which has the shapes."""

    given: torch.Tensor
    weights: torch.Tensor
    bias: torch.Tensor | None = None
    h: torch.Tensor | None = None
    cells: torch.Tensor | None = None
    gates: torch.Tensor | None = None
    output: torch.Tensor | None = None
    kept: torch.Tensor | None = None
    grad_gates: torch.Tensor | None = None
    grad_bias: torch.Tensor | None = None
    state: torch.Tensor | None = None
    sums: torch.Tensor | None = None


class Common(NamedTuple):
    """Numbers of all layers of a stack; scale: factor on outputs that dropout keeps."""

    num_steps: int
    lengths: torch.Tensor | None = None
    extra: int = 0
    scale: float = 1.0


class _Stack(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, lengths, extra, dropout, *weights):
        w_ih, w_hh, b_ih, b_hh = (weights[index::4] for index in range(4))
        (num_steps, batch), num, hidden = x.shape[:2], len(w_hh), w_hh[0].shape[1]
        run = _kernels(x.device)
        common = Common(num_steps, lengths, extra, 1 / (1 - dropout))
        shape = num, num_steps, batch
        inputs = x.new_empty(*shape, 4 * hidden)
        h, cells, gates = (x.new_empty(*shape, *each) for each in ((hidden,), (hidden,), (hidden, 4)))
        kept, dropped, state = None, None, x.new_empty(num, batch, hidden, dtype=torch.float32)
        if dropout > 0:
            kept = torch.empty(*shape, hidden, dtype=torch.uint8, device=x.device).bernoulli_(1 - dropout)
            dropped = torch.empty_like(h)
        outputs = h if dropped is None else dropped
        run.prepare(h)
        tensors = {"h": h, "cells": cells, "gates": gates, "output": dropped, "kept": kept, "state": state}
        stack = run.bind(_layers(given=inputs, weights=w_hh, bias=b_hh, **tensors), common)
        _products(inputs[0], x, w_ih[0], b_ih[0])
        for turn in turns(num, num_steps):
            for layer, first, end in turn:
                if layer:
                    _products(inputs[layer, first:end], outputs[layer - 1, first:end], w_ih[layer], b_ih[layer])
            run.forward(stack, turn)
        ctx.save_for_backward(x, lengths, kept, h, outputs, cells, gates, *w_ih, *w_hh)
        ctx.common = extra, common.scale
        return outputs[-1]

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, lengths, kept, h, outputs, cells, gates, *weights = ctx.saved_tensors
        num, num_steps, batch, hidden = h.shape
        w_ih, w_hh = weights[:num], weights[num:]
        run, common = _kernels(x.device), Common(num_steps, lengths, *ctx.common)
        # Gradients of each layer's output.
        grads = [*h.new_empty(num - 1, num_steps, batch, hidden), grad.contiguous()]
        grad_gates, grad_bias = h.new_empty(num, num_steps, batch, 4 * hidden), h.new_empty(num, 4 * hidden)
        state = h.new_empty(num, batch, hidden, dtype=torch.float32)
        sums = h.new_empty(num, 4 * hidden, dtype=torch.float32)
        run.prepare(grad_gates)
        tensors = {"cells": cells, "gates": gates, "kept": kept, "grad_gates": grad_gates, "grad_bias": grad_bias}
        stack = run.bind(_layers(given=grads, weights=w_hh, **tensors, state=state, sums=sums), common)
        # The forward's order reversed, from the last stretch of the last layer on.
        for turn in reversed(turns(num, num_steps)):
            for layer, first, end in turn:
                if layer + 1 < num:
                    above = grad_gates[layer + 1, first:end].flatten(0, 1)
                    torch.mm(above, w_ih[layer + 1], out=grads[layer][first:end].flatten(0, 1))
            run.backward(stack, turn)
        # Equal, but each in memory of its own, since gradients are accumulated in place.
        grad_b_ih, grad_b_hh = grad_bias.clone(), grad_bias
        found = []
        for index in range(num):
            gate_rows = grad_gates[index].flatten(0, 1).t()
            below = outputs[index - 1] if index else x
            # Before the first step h was 0.
            grad_w_hh = grad_gates[index, 1:].flatten(0, 1).t() @ h[index, :-1].flatten(0, 1)
            found += [gate_rows @ below.flatten(0, 1), grad_w_hh, grad_b_ih[index], grad_b_hh[index]]
        grad_x = grad_gates[0] @ w_ih[0] if ctx.needs_input_grad[0] else None
        return grad_x, None, None, None, *found


def _layers(**tensors):
    """A Layer for each index of the tensors, [layers, ...] or lists; None is left out."""
    given = {name: each for name, each in tensors.items() if each is not None}
    return [Layer(**dict(zip(given, each, strict=True))) for each in zip(*given.values(), strict=True)]


def _products(inputs, x, w_ih, b_ih):
    """Fill inputs [T, B, 4 H] with W_ih x + b_ih."""
    torch.addmm(b_ih, x.flatten(0, 1), w_ih.t(), out=inputs.flatten(0, 1))
