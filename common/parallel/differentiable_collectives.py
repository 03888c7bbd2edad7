"""Collectives that a model differentiates through: tensor parallelism with sequence parallelism.

Each is an autograd function of one collective forward and its transpose, another collective, for the gradient. group: a
group's name as in collectives.py; with one rank they return x itself. Sequences lie along the first dimension.
`look_up` and `cross_entropy`, of a vocabulary that is split over the ranks, are made of them.

    y = reduce_scatter_to_sequence(F.linear(gelu(F.linear(gather_from_sequence(x, tensor), column)), row), tensor)

computes with the columns of one matrix and the rows of the next split over the ranks of `tensor`, each of which has the
x and the y of its own tokens only.
"""

import torch
from torch.nn import functional as F

from graph_worth.parallel import collectives


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
    size = collectives.group_size(group)
    if x.shape[0] % size:
        raise ValueError(f"a tensor of shape {tuple(x.shape)} has no equal parts for {size} ranks: pad it")
    part = x.new_empty(x.shape[0] // size, *x.shape[1:])
    collectives.reduce_scatter_sum_(part, x.contiguous(), group)
    return part


def reduce_from_region(x, group=""):
    """The sum of x over the ranks, whose gradient is alike on all: behind a row-parallel matrix (Megatron's g)."""
    return _region(x, group, _summed, lambda gradient, _: gradient.view_as(gradient))


def gather_from_sequence(x, group=""):
    """[n, ...] of the [n / ranks, ...] that each rank has, before a column-parallel matrix; gradients are summed."""
    return _region(x, group, _gathered, _reduce_scattered)


def reduce_scatter_to_sequence(x, group=""):
    """This rank's [n / ranks, ...] of the sum of x [n, ...]: from tensor into sequence parallelism."""
    return _region(x, group, _reduce_scattered, _gathered)


def look_up(tokens, table, group="", find=F.embedding):
    """[s / ranks, b, h]: this rank's tokens of the rows that `tokens` [s, b] names.

    table: [rows, h], this rank's part of all rows, in the order of ranks. find: find(rows, table) of rows within it.
    """
    if collectives.group_size(group) == 1:
        return find(tokens, table)
    rows, inside = own_rows(tokens, table.shape[0], group)
    return reduce_scatter_to_sequence(find(rows, table) * inside[..., None], group)


def cross_entropy(logits, targets, group=""):
    """Mean cross-entropy, alike on all ranks: logits [n, rows] of each rank's part of the words; targets [n]."""
    if collectives.group_size(group) == 1:
        return F.cross_entropy(logits, targets)
    largest = logits.detach().amax(-1)
    collectives.all_reduce_max_(largest, group)
    logits = logits - largest[:, None]
    log_sum = reduce_from_region(logits.exp().sum(-1), group).log()
    rows, inside = own_rows(targets, logits.shape[1], group)
    # Not gather: where algorithms are deterministic its backward is index_put, which sorts and, in some releases of
    # torch, reads the largest index on the host.
    of_target = -F.nll_loss(logits, rows, reduction="none") * inside
    return (log_sum - reduce_from_region(of_target, group)).mean()


def places(sequence: int, ranks: int, rank: int) -> torch.Tensor:
    """int64 [sequence / ranks]: the places in the sequence of the tokens that a context rank has (context parallelism).

    Of 2 x ranks runs each has one from the front and one from the back, as Transformer Engine wants it, so that under a
    causal mask all see equally many keys.
    """
    every = torch.arange(sequence)
    if ranks == 1:
        return every
    runs = every.chunk(2 * ranks)
    return torch.cat((runs[rank], runs[2 * ranks - 1 - rank]))


def own_rows(rows, count, group):
    """(Rows counted from this rank's first one, 0 where another rank has them; whether this rank has them).

    rows: int64, of all ranks' rows together; count: rows that each rank has.
    """
    rows = rows - collectives.group_rank(group) * count
    inside = (rows >= 0) & (rows < count)
    return torch.where(inside, rows, 0), inside
