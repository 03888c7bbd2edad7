"""Expert parallelism: the way of rows to the ranks that hold their experts, and back.

Each rank has sequences and a router of its own, and all of attention; the experts are split over the ranks. A layer
sends each chosen row to the rank of its expert, which multiplies it and sends it back:

    rows by rank -> labels and rows to the ranks -> rows by expert -> grouped GEMMs -> back in the order of arrival
    -> rows to where they came from -> sum of each token's rows

Dropless, the host must know how many rows go where before NCCL can be called, so it waits for the GPU in each layer: no
graph can hold that. Static, each rank sends every rank `capacity` rows, of which some are padding. The host need not
know anything then, and a graph holds the exchange. `most_rows` on the device says how many rows a router chose for a
rank at most. Where that is more than the capacity, the results of that pass are worth nothing (static_buffers.py).
"""

import contextlib
import os

import torch

from common.scope_rules import Setting, refuse
from graph_worth import Unsupported
from graph_worth.machine.allocator import has_expandable_segments, nccl_registers
from graph_worth.parallel import collectives
from moe.config import Config
from moe.kernels import labels, rows
from moe.kernels.order import RowPlan, order_rows
from moe.kernels.routing import Routed


def require_capturable(num_ranks: int, scope: str, environment=os.environ) -> None:
    """Unsupported, with the rule, where a graph of this scope cannot hold the exchange of several ranks.

    scope: as in common/scope_rules.py.
    """
    moves = nccl_registers(environment) and has_expandable_segments(environment)
    try:
        if num_ranks > 1:
            refuse(Setting(model="moe", scope=scope, expandable_segments=moves))
    except ValueError as error:
        raise Unsupported(f"--ep {num_ranks}: {error}") from None


class Exchange:
    """Brings rows to their experts and back. A layer without ranks and static buffers needs none.

    most_rows: int32 [1], the most rows of a layer for one rank since a pass with static buffers began.
    """

    def __init__(self, config: Config, device: torch.device):
        self.size, self.experts, self.capacity = config.ep, config.rank_experts, config.rank_capacity
        self.is_static = False
        self.most_rows = torch.zeros(1, dtype=torch.int32, device=device)

    @property
    def is_on(self) -> bool:
        return self.size > 1 or self.is_static

    @contextlib.contextmanager
    def static_buffers(self):
        """Within it, rows go in static buffers."""
        self.is_static = True
        try:
            yield
        finally:
            self.is_static = False

    def order(self, routed: Routed) -> RowPlan:
        """The order in which rows are sent: by rank, each rank's in the order of their choices. All on the device."""
        counts = self._rows_for_ranks(routed)
        if self.is_static:
            torch.maximum(self.most_rows, counts.amax(), out=self.most_rows)
        rank_of_choice = torch.div(routed.experts, self.experts, rounding_mode="floor")
        return order_rows(rank_of_choice, counts, self.capacity if self.is_static else 0)

    def _rows_for_ranks(self, routed):
        return routed.counts.view(self.size, -1).sum(1, dtype=torch.int32)

    def through_experts(self, y, routed: Routed, plan: RowPlan, multiply):
        """The experts' outputs of tokens y [t, hidden], in the order of `plan`, [rows, hidden].

        multiply: multiply(rows by expert, weights [rows, 1], their RowPlan) is the experts of this rank. With static
            buffers the RowPlan has more rows than its last offset says, whose contents are undefined.
        """
        sent, received = self._splits(routed)
        # Padding is of an expert behind the last one.
        numbers = (self.experts, self.experts + self.is_static)
        weights, experts, counts = _Labelled.apply(
            routed.weights, routed.experts, plan.choice_of_row, plan.row_of_choice, numbers, (self.size, sent, received)
        )
        arrived = self._exchanged(rows.gather(y, plan), sent, received)
        arrived_plan = order_rows(experts, counts)
        if self.is_static:
            # Padding comes last, has no offset, and reads the last expert's bias.
            last = arrived_plan.expert_of_row.clamp(max=self.experts - 1)
            arrived_plan = arrived_plan._replace(expert_of_row=last, offsets=arrived_plan.offsets[: self.experts])
        z = multiply(rows.gather(arrived, arrived_plan), weights, arrived_plan)
        z = _Reordered.apply(z, arrived_plan.row_of_choice.flatten(), arrived_plan.token_of_row)
        return self._exchanged(z, received, sent)

    def _exchanged(self, x, sent, received):
        return x if self.size == 1 else _Exchanged.apply(x, sent, received)

    def _splits(self, routed):
        """(Rows that go to each rank, rows that come from each); empty for static buffers, where both are alike."""
        if self.is_static:
            return [], []
        sent = self._rows_for_ranks(routed)
        received = torch.empty_like(sent)
        collectives.all_to_all_(received, sent)
        return torch.stack((sent, received)).tolist()  # the host waits for the GPU


class _Exchanged(torch.autograd.Function):
    """Rows to the ranks; of the gradient the way back."""

    @staticmethod
    def forward(ctx, x, sent, received):
        ctx.way = (received, sent)
        return _move(x, sent, received)

    @staticmethod
    def backward(ctx, grad):
        return _move(grad.contiguous(), *ctx.way), None, None


class _Labelled(torch.autograd.Function):
    """(weights [rows, 1], experts [rows, 1], counts) of the rows that arrive: kernels/labels.py.

    numbers: experts of a rank, and numbers that are counted. way: (ranks, rows to each, rows from each).
    """

    @staticmethod
    def forward(ctx, weights, experts, choice_of_row, row_of_choice, numbers, way):
        size, sent, received = way
        row_labels = labels.write(weights, experts, choice_of_row, numbers[0])
        ctx.save_for_backward(row_of_choice)
        ctx.way = (size, received, sent)
        of_rows = labels.read(row_labels if size == 1 else _move(row_labels, sent, received), numbers[1])
        ctx.mark_non_differentiable(*of_rows[1:])
        ctx.set_materialize_grads(False)
        return of_rows

    @staticmethod
    def backward(ctx, grad, *_):
        size, sent, received = ctx.way
        grad = grad if size == 1 else _move(grad.contiguous(), sent, received)
        return labels.gradient_of_weights(grad, ctx.saved_tensors[0]), None, None, None, None, None


def _move(x, sent, received):
    """The rows that ranks have for this one, of the x [rows, width] of each. A tensor without rows has one of zeros.

    No kernel takes none. sent, received: rows to and from each rank; empty: all ranks send each other as many.
    """
    if not sent:
        out = torch.empty_like(x)
        collectives.all_to_all_(out, x)
        return out
    total = sum(received)
    out = x.new_empty(total, x.shape[1]) if total else x.new_zeros(1, x.shape[1])
    collectives.all_to_all_(out[:total], x[: sum(sent)], received, sent)
    return out


class _Reordered(torch.autograd.Function):
    """x[index], whose gradient is grad[inverse]: two orders of the same rows."""

    @staticmethod
    def forward(ctx, x, index, inverse):
        ctx.save_for_backward(inverse)
        return rows.gather_rows(x, index)

    @staticmethod
    def backward(ctx, grad):
        return rows.gather_rows(grad.contiguous(), ctx.saved_tensors[0]), None, None
