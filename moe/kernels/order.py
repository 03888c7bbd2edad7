"""The order of the experts' rows: a stable sort of the tokens' choices by expert, in two kernels.

An expert's rows are in the order of their choices, and each choice finds its row by counting those before it. So there
are no atomics, and nothing is read on the host.
"""

import functools
from typing import NamedTuple

import torch

from graph_worth import Launch
from moe.kernels import in_triton, tl, triton

# Choices of a program, and blocks of choices whose counts are added at a time.
BLOCK, STEP = 128, 32


class RowPlan(NamedTuple):
    """The order of the experts' rows, int32 on the device; -1 where there is no row or no token.

    offsets: [experts], the end of each expert's rows; None with a capacity, where each has the same number.
    row_of_choice: [t, k]. token_of_row, choice_of_row (an index of t k choices) and expert_of_row: [rows].
    """

    row_of_choice: torch.Tensor
    token_of_row: torch.Tensor
    choice_of_row: torch.Tensor
    expert_of_row: torch.Tensor
    offsets: torch.Tensor | None


def order_rows(experts, counts, capacity: int = 0) -> RowPlan:
    """The plan of choices experts int32 [t, k], of which each expert has counts int32 [experts].

    capacity: rows of each expert; choices beyond it have no row, rows beyond its choices no token. 0: its choices.
    """
    if not in_triton(experts):
        return _plain(experts, counts, capacity)
    device, num_choices, num_experts = experts.device, experts.numel(), len(counts)
    num_blocks = triton.cdiv(num_choices, BLOCK)
    partial = torch.empty(num_blocks, num_experts, dtype=torch.int32, device=device)
    row_of_choice, offsets = torch.empty_like(experts), torch.empty_like(counts)
    if capacity:
        num_rows = num_experts * capacity
        token_of_row, choice_of_row = (torch.full((num_rows,), -1, dtype=torch.int32, device=device) for _ in range(2))
        expert_of_row = _experts_of_slots(num_rows, capacity, device)
    else:
        token_of_row, choice_of_row, expert_of_row = (experts.new_empty(num_choices) for _ in range(3))
    count_launch, place_launch = _launches(experts.shape[1], num_experts, capacity)
    count_launch((num_blocks, 1, 1), (experts, partial), (num_choices,))
    rows = (row_of_choice, token_of_row, choice_of_row, expert_of_row, offsets)
    place_launch((num_blocks, 1, 1), (experts, counts, partial, *rows), (num_choices, num_blocks))
    return RowPlan(*rows[:4], None if capacity else offsets)


def _plain(experts, counts, capacity):
    top_k, device = experts.shape[1], experts.device
    expert_of_row, choice_of_row = experts.flatten().sort(stable=True)
    choice_of_row = choice_of_row.to(torch.int32)
    row = torch.arange(len(choice_of_row), dtype=torch.int32, device=device)
    ends = counts.cumsum(0, dtype=torch.int32)
    if not capacity:
        row_of_choice = torch.empty_like(row).scatter_(0, choice_of_row.long(), row).view(-1, top_k)
        return RowPlan(row_of_choice, choice_of_row // top_k, choice_of_row, expert_of_row, ends)
    num_rows, expert = len(counts) * capacity, expert_of_row.long()
    rank = row - (ends - counts)[expert]
    # One place more takes what is dropped.
    slot = torch.where(rank < capacity, expert * capacity + rank, num_rows)
    row_of_choice = torch.empty_like(row).scatter_(0, choice_of_row.long(), slot.to(torch.int32))
    row_of_choice = torch.where(row_of_choice < num_rows, row_of_choice, -1).view(-1, top_k)
    choices = torch.full((num_rows + 1,), -1, dtype=torch.int32, device=device)
    choices = choices.scatter_(0, slot, choice_of_row)[:-1].contiguous()
    tokens = torch.where(choices >= 0, choices // top_k, -1)
    return RowPlan(row_of_choice, tokens, choices, _experts_of_slots(num_rows, capacity, device), None)


def _experts_of_slots(num_rows, capacity, device):
    return torch.arange(num_rows, dtype=torch.int32, device=device) // capacity


@functools.cache
def _launches(top_k, num_experts, capacity):
    """Return the kernels. The rows that a rank receives change from step to step, so their number is no constant."""
    block_experts = max(2, triton.next_power_of_2(num_experts))
    return (
        Launch(_count, num_experts, BLOCK, block_experts, num_warps=4),
        Launch(_place, num_experts, top_k, capacity, BLOCK, block_experts, STEP, num_warps=8),
    )


if triton:

    @triton.jit(do_not_specialize=["num_choices"])
    def _count(
        experts, partial, num_choices, num_experts: tl.constexpr, block: tl.constexpr, block_experts: tl.constexpr,
    ):  # fmt: skip
        """partial [blocks, experts]: choices of each expert in each block."""
        choice = tl.program_id(0) * block + tl.arange(0, block)
        chosen = tl.load(experts + choice, mask=choice < num_choices, other=-1)
        expert = tl.arange(0, block_experts)
        counts = tl.sum((chosen[:, None] == expert[None, :]).to(tl.int32), axis=0)
        tl.store(partial + tl.program_id(0) * num_experts + expert, counts, mask=expert < num_experts)

    @triton.jit(do_not_specialize=["num_choices", "num_blocks"])
    def _place(
        experts, counts, partial, row_of_choice, token_of_row, choice_of_row, expert_of_row, offsets,
        num_choices, num_blocks, num_experts: tl.constexpr, top_k: tl.constexpr, capacity: tl.constexpr,
        block: tl.constexpr, block_experts: tl.constexpr, step: tl.constexpr,
    ):  # fmt: skip
        """The row of each choice: rows of earlier experts, and the same expert's of earlier blocks and choices."""
        number, expert = tl.program_id(0), tl.arange(0, block_experts)
        inside = expert < num_experts
        of_all = tl.load(counts + expert, mask=inside, other=0)
        ends = tl.cumsum(of_all, axis=0)
        before = tl.zeros((block_experts,), tl.int32)
        for first in range(0, num_blocks, step):
            earlier = first + tl.arange(0, step)
            mask = (earlier < number)[:, None] & inside[None, :]
            before += tl.sum(tl.load(partial + earlier[:, None] * num_experts + expert[None, :], mask=mask, other=0), 0)
        if number == 0:
            tl.store(offsets + expert, ends, mask=inside)
        choice = number * block + tl.arange(0, block)
        exists = choice < num_choices
        chosen = tl.load(experts + choice, mask=exists, other=-1)
        is_chosen = (chosen[:, None] == expert[None, :]).to(tl.int32)
        rank = tl.sum(is_chosen * (tl.cumsum(is_chosen, axis=0) - 1 + before[None, :]), axis=1)
        if capacity:
            has_row = exists & (rank < capacity)
            row = tl.where(has_row, chosen * capacity + rank, -1)
        else:
            has_row = exists
            row = rank + tl.sum(is_chosen * (ends - of_all)[None, :], axis=1)
            tl.store(expert_of_row + row, chosen, mask=exists)
        tl.store(row_of_choice + choice, row, mask=exists)
        tl.store(choice_of_row + row, choice, mask=has_row)
        tl.store(token_of_row + row, choice // top_k, mask=has_row)
