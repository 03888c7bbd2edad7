"""The labels of rows that go to other ranks: each row's weight, and its expert's number on the rank that gets it.

One FP32 tensor [rows, 2] holds both, so that one message to each rank does. Padding has the weight 0 and the number of
experts, which is no expert's number. Counting adds integers atomically, which keeps runs equal bit for bit.
"""

import functools

import torch

from graph_worth import Launch
from moe.kernels import in_triton, tl, triton

BLOCK = 128


def write(weights, experts, choice_of_row, num_experts: int):
    """Labels FP32 [rows, 2] of rows in the order of sending.

    weights FP32 [t, k] and experts int32 [t, k], among those of all ranks, of each choice; choice_of_row int32 [rows],
    -1 is padding; num_experts of a rank.
    """
    labels = torch.empty(len(choice_of_row), 2, device=weights.device)
    if in_triton(weights):
        _launch(_write, num_experts)(_grid(labels), (weights, experts, choice_of_row, labels), (len(labels),))
        return labels
    choice, is_padding = choice_of_row.clamp(min=0), choice_of_row < 0
    labels[:, 0] = weights.flatten().index_select(0, choice).masked_fill(is_padding, 0)
    labels[:, 1] = (experts.flatten().index_select(0, choice) % num_experts).masked_fill(is_padding, num_experts)
    return labels


def read(labels, num_counts: int):
    """(weights FP32 [rows, 1], experts int32 [rows, 1], counts int32 [num_counts]) of labels that arrived.

    counts: rows of each expert's number from 0 on.
    """
    weights = torch.empty(len(labels), 1, device=labels.device)
    experts = torch.empty(len(labels), 1, dtype=torch.int32, device=labels.device)
    if in_triton(labels):
        counts = torch.zeros(num_counts, dtype=torch.int32, device=labels.device)
        _launch(_read, num_counts)(_grid(labels), (labels, weights, experts, counts), (len(labels),))
        return weights, experts, counts
    weights.copy_(labels[:, :1])
    experts.copy_(labels[:, 1:])
    numbers = torch.arange(num_counts, dtype=torch.int32, device=labels.device)
    return weights, experts, (experts == numbers).sum(0, dtype=torch.int32)


def gradient_of_weights(grad, row_of_choice):
    """FP32 [t, k]: of each choice its row's in grad [rows, 1], and 0 where row_of_choice is -1."""
    if in_triton(grad):
        out = torch.empty(row_of_choice.shape, device=grad.device)
        _launch(_pick, 0)(_grid(out.view(-1)), (grad, row_of_choice, out), (out.numel(),))
        return out
    picked = grad.flatten().index_select(0, row_of_choice.flatten().clamp(min=0)).view(row_of_choice.shape)
    return picked.masked_fill(row_of_choice < 0, 0)


def _grid(rows):
    return (triton.cdiv(len(rows), BLOCK), 1, 1)


@functools.cache
def _launch(kernel, count):
    sizes = (count, max(2, triton.next_power_of_2(count)))
    return Launch(kernel, *(() if kernel is _pick else sizes), BLOCK, num_warps=4)


if triton:

    @triton.jit(do_not_specialize=["num_rows"])
    def _write(
        weights, experts, choice_of_row, labels, num_rows, num_experts: tl.constexpr, block_experts: tl.constexpr,
        block: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0) * block + tl.arange(0, block)
        exists = row < num_rows
        choice = tl.load(choice_of_row + row, mask=exists, other=-1)
        weight = tl.load(weights + choice, mask=choice >= 0, other=0.0)
        expert = tl.load(experts + choice, mask=choice >= 0, other=0) % num_experts
        tl.store(labels + 2 * row, weight, mask=exists)
        tl.store(labels + 2 * row + 1, tl.where(choice >= 0, expert, num_experts).to(tl.float32), mask=exists)

    @triton.jit(do_not_specialize=["num_rows"])
    def _read(
        labels, weights, experts, counts, num_rows, num_counts: tl.constexpr, block_counts: tl.constexpr,
        block: tl.constexpr,
    ):  # fmt: skip
        row, number = tl.program_id(0) * block + tl.arange(0, block), tl.arange(0, block_counts)
        exists = row < num_rows
        expert = tl.load(labels + 2 * row + 1, mask=exists, other=-1.0).to(tl.int32)
        tl.store(weights + row, tl.load(labels + 2 * row, mask=exists, other=0.0), mask=exists)
        tl.store(experts + row, expert, mask=exists)
        of_block = tl.sum((expert[:, None] == number[None, :]).to(tl.int32), axis=0)
        tl.atomic_add(counts + number, of_block, mask=number < num_counts)

    @triton.jit(do_not_specialize=["num_rows"])
    def _pick(grad, row_of_choice, out, num_rows, block: tl.constexpr):
        choice = tl.program_id(0) * block + tl.arange(0, block)
        exists = choice < num_rows
        row = tl.load(row_of_choice + choice, mask=exists, other=-1)
        tl.store(out + choice, tl.load(grad + row, mask=row >= 0, other=0.0), mask=exists)
