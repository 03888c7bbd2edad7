"""Collectives that a model differentiates through: tensor parallelism, sequence parallelism, all-to-all.

Each is an autograd function of one collective forward and its transpose, another collective, for the gradient. group: a
group's name as in common/collectives.py; with one rank they return x itself. Sequences lie along the first dimension.

    y = reduce_from_region(F.linear(gelu(F.linear(copy_to_region(x, tensor), column)), row), tensor)

computes with the columns of one matrix and the rows of the next split over the ranks of `tensor`. With sequence
parallelism, where each rank has x of its own tokens only, gather_from_sequence stands for the former of the two and
reduce_scatter_to_sequence for the latter.
"""

import torch

from common import collectives


class _Region(torch.autograd.Function):
    """One collective forward, another one, its transpose, for the gradient."""

    @staticmethod
    def forward(ctx, x, group, forward, transpose):
        ctx.group, ctx.transpose = group, transpose
        return forward(x, group)

    @staticmethod
    def backward(ctx, grad):
        return ctx.transpose(grad, ctx.group), None, None, None


def _region(x, group, forward, transpose):
    return x if collectives.group_size(group) == 1 else _Region.apply(x, group, forward, transpose)


def _unchanged(x, group):
    return x.view_as(x)


def _summed(x, group):
    # A copy: autograd may hand a gradient to others too, and a model may have kept its x.
    result = x.clone(memory_format=torch.contiguous_format)
    collectives.all_reduce_sum_(result, group)
    return result


def _gathered(x, group):
    whole = x.new_empty(collectives.group_size(group) * x.shape[0], *x.shape[1:])
    collectives.all_gather_into_(whole, x.contiguous(), group)
    return whole


def _reduce_scattered(x, group):
    own = x.new_empty(_rows(x, group), *x.shape[1:])
    collectives.reduce_scatter_sum_(own, x.contiguous(), group)
    return own


def _own_rows(x, group):
    return x.narrow(0, collectives.group_rank(group) * _rows(x, group), _rows(x, group)).clone()


def _swapped(x, group):
    _rows(x, group)
    received = torch.empty_like(x, memory_format=torch.contiguous_format)
    collectives.all_to_all_(received, x.contiguous(), group)
    return received


def _rows(x, group):
    """The first dimension's share of a rank."""
    size = collectives.group_size(group)
    if x.shape[0] % size:
        raise ValueError(f"a tensor of shape {tuple(x.shape)} has no equal parts for {size} ranks: pad it")
    return x.shape[0] // size


def copy_to_region(x, group=""):
    """x, whose gradient is summed over the ranks: before a column-parallel matrix (Megatron's f)."""
    return _region(x, group, _unchanged, _summed)


def reduce_from_region(x, group=""):
    """The sum of x over the ranks, whose gradient is alike on all: behind a row-parallel matrix (Megatron's g)."""
    return _region(x, group, _summed, _unchanged)


def gather_from_sequence(x, group="", partial_gradients=True):
    """[n, ...] of the [n / ranks, ...] that each rank has: where tensor follows sequence parallelism.

    partial_gradients: each rank's gradient is a summand, as behind a column-parallel matrix; else it is alike on all.
    """
    return _region(x, group, _gathered, _reduce_scattered if partial_gradients else _own_rows)


def reduce_scatter_to_sequence(x, group=""):
    """This rank's [n / ranks, ...] of the sum of x [n, ...]: from tensor into sequence parallelism."""
    return _region(x, group, _reduce_scattered, _gathered)


def scatter_to_sequence(x, group=""):
    """This rank's [n / ranks, ...] of an x [n, ...] that is alike on all ranks: into sequence parallelism."""
    return _region(x, group, _own_rows, _gathered)


def all_to_all(x, group=""):
    """Part r of the result [n, ...] is this rank's part of rank r's x [n, ...]; a part has n / ranks rows."""
    return _region(x, group, _swapped, _swapped)
