"""Expert parallelism: the way of rows to the ranks that hold their experts, and back.

Each rank has sequences and a router of its own, and all of attention; the experts are split over the ranks. A layer
sends each chosen row to the rank of its expert, which multiplies it and sends it back:

    rows by rank -> labels and rows to the ranks -> rows by expert -> grouped GEMMs -> back in the order of arrival
    -> rows to where they came from -> sum of each token's rows

Dropless, the host must know how many rows go where before NCCL can be called, so it waits for the GPU in each layer: no
graph can hold that. Static, each rank sends every rank `capacity` rows, of which some are padding. The host need not
know anything then, and a graph holds the exchange. A rank that chose more rows than that for another one sets
`overflow` on the device: the results of that pass are worth nothing (static_buffers.py).
"""

import contextlib

import torch

from common.training.parallel import collectives
from common.variant import Unsupported
from moe.config import Config
from moe.kernels import rows
from moe.kernels.order import Plan, order_rows
from moe.kernels.routing import Routed

IN_A_GRAPH = (
    "in each layer the host reads how many rows come from each rank, which no graph can hold: take graph_static, or a "
    "scope without the exchange, as graph_attn_router_preprocess"
)


class Exchange:
    """How the experts get their rows. Without ranks and static buffers a layer does without it.

    Attributes:
        is_on: Whether rows go by ranks.
        is_static: Whether each rank sends every rank the same number of rows.
        overflow: int32 [1], 1 where a pass with static buffers left rows out.
    """

    def __init__(self, config: Config, device: torch.device):
        self.size, self.experts, self.capacity = config.ep, config.rank_experts, config.rank_capacity
        self.is_static = False
        self.overflow = torch.zeros(1, dtype=torch.int32, device=device)

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

    def require_no_ranks(self, reason: str) -> None:
        """Unsupported with this reason where there are several ranks."""
        if self.size > 1:
            raise Unsupported(f"--ep {self.size}: {reason}")

    def order(self, routed: Routed) -> Plan:
        """The order in which rows are sent: by rank, each rank's in the order of their choices. All on the device."""
        counts = self._rows_for_ranks(routed)
        if self.is_static:
            self.overflow.copy_(torch.maximum(self.overflow, (counts.amax() > self.capacity).to(torch.int32)))
        rank_of_choice = torch.div(routed.experts, self.experts, rounding_mode="floor")
        return order_rows(rank_of_choice, counts, self.capacity if self.is_static else 0)

    def _rows_for_ranks(self, routed):
        return routed.counts.view(self.size, -1).sum(1, dtype=torch.int32)

    def through_experts(self, y, routed: Routed, plan: Plan, multiply):
        """The experts' outputs of tokens y [t, hidden], in the order of `plan`, [rows, hidden].

        multiply: multiply(rows by expert, weights [rows, 1], their Plan, has_gaps) is the experts of this rank.
            has_gaps: the Plan has more rows than its last offset says, whose contents are undefined.
        """
        sent, received = self._splits(routed)
        labels = _Labels.apply(routed.weights, routed.experts, plan.choice_of_row, plan.row_of_choice, self.experts)
        arrived = _exchanged(rows.gather(y, plan), self.size, sent, received)
        labels = _exchanged(labels, self.size, sent, received)
        weights, experts = labels[:, :1].contiguous(), labels.detach()[:, 1:].to(torch.int32).contiguous()
        own = self._order_by_expert(experts)
        z = multiply(rows.gather(arrived, own), weights, own, self.is_static)
        z = _Reordered.apply(z, own.row_of_choice.flatten(), own.token_of_row)
        return _exchanged(z, self.size, received, sent)

    def _splits(self, routed):
        """(rows that go to each rank, rows that come from each): () and () of static buffers."""
        if self.is_static:
            return (), ()
        sent = self._rows_for_ranks(routed)
        received = torch.empty_like(sent)
        collectives.all_to_all_(received, sent)
        return torch.stack((sent, received)).tolist()  # the host waits for the GPU

    def _order_by_expert(self, experts) -> Plan:
        """The plan of received rows, a choice each. Padding is of an expert behind the last one, without an offset."""
        numbers = torch.arange(self.experts + self.is_static, dtype=torch.int32, device=experts.device)
        plan = order_rows(experts, (experts == numbers).sum(0, dtype=torch.int32))
        if not self.is_static:
            return plan
        return plan._replace(
            expert_of_row=plan.expert_of_row.clamp(max=self.experts - 1), offsets=plan.offsets[: self.experts]
        )


def _exchanged(x, size, sent, received):
    return x if size == 1 else _Exchanged.apply(x, list(sent), list(received))


class _Exchanged(torch.autograd.Function):
    """Rows to the ranks; of the gradient the way back. Nothing received is one row of zeros: no kernel takes none."""

    @staticmethod
    def forward(ctx, x, sent, received):
        ctx.sizes, ctx.num_rows = (received, sent), len(x)
        return _Exchanged.move(x, sent, received, sum(received) if received else len(x))

    @staticmethod
    def backward(ctx, grad):
        return _Exchanged.move(grad.contiguous(), *ctx.sizes, ctx.num_rows), None, None

    @staticmethod
    def move(x, sent, received, num_rows):
        if not sent:
            out = torch.empty_like(x)
            collectives.all_to_all_(out, x)
            return out
        total = sum(received)
        out = x.new_empty(num_rows, x.shape[1]) if total else x.new_zeros(1, x.shape[1])
        collectives.all_to_all_(out[:total], x[: sum(sent)], received, sent)
        return out


class _Labels(torch.autograd.Function):
    """FP32 [rows, 2]: each row's weight and its expert's number on its rank. Padding: 0 and the number of experts."""

    @staticmethod
    def forward(ctx, weights, experts, choice_of_row, row_of_choice, num_experts):
        ctx.save_for_backward(row_of_choice)
        choice, is_padding = choice_of_row.clamp(min=0), choice_of_row < 0
        weight = weights.flatten().index_select(0, choice).masked_fill(is_padding, 0)
        expert = (experts.flatten().index_select(0, choice) % num_experts).masked_fill(is_padding, num_experts)
        return torch.stack((weight, expert.float()), 1)

    @staticmethod
    def backward(ctx, grad):
        (row_of_choice,) = ctx.saved_tensors
        picked = grad[:, 0].index_select(0, row_of_choice.flatten().clamp(min=0)).view(row_of_choice.shape)
        return picked.masked_fill(row_of_choice < 0, 0), None, None, None, None


class _Reordered(torch.autograd.Function):
    """x[index], whose gradient is grad[inverse]: two orders of the same rows."""

    @staticmethod
    def forward(ctx, x, index, inverse):
        ctx.save_for_backward(inverse)
        return rows.gather_rows(x, index)

    @staticmethod
    def backward(ctx, grad):
        return rows.gather_rows(grad.contiguous(), ctx.saved_tensors[0]), None, None
