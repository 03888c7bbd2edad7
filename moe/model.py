"""The layers, ends and loss of the mixture of experts, in bf16 on [tokens, hidden].

Every trained parameter p has p.main_grad, a buffer of its shape at a fixed address. The backward of a step's first
microbatch writes it, later ones add (`Accumulation`): matrices inside of their GEMM, small parameters by a hook.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from moe.attention import Sequences, attend
from moe.config import LORA_ALPHA, LOSS_TOKENS, Config
from moe.exchange import Exchange
from moe.kernels import activation, rows
from moe.kernels.cross_entropy import cross_entropy_
from moe.kernels.heads import split_heads
from moe.kernels.order import RowPlan, order_rows
from moe.kernels.routing import Routed, route
from moe.kernels.weight_gradient import grouped_sums, grouped_weight_gradient_

# Trained with --lora-rank, in the place of all else.
ADAPTERS = ("qkv_a", "qkv_b", "proj_a", "proj_b")
# GPT-OSS's stretched rotary embedding (config.json, rope_parameters of type yarn).
YARN = {"factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 4096}


@dataclass
class Accumulation:
    """A switch: the backward that runs adds to main_grad, or overwrites what is there."""

    adds: bool = False


class Inputs(NamedTuple):
    """Inputs of layers beside activations: rope is (cos, sin), FP32 [t, head_dim / 2] each."""

    rope: tuple[torch.Tensor, torch.Tensor]
    sequences: Sequences


def rope_table(config: Config) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin) FP32 [sequence, head_dim / 2] on the host; GPT-OSS's by YaRN, scaled for its longer context."""
    c, scale = config, 1.0
    frequency = c.rope_theta ** (-torch.arange(0, c.head_dim, 2, dtype=torch.float64) / c.head_dim)
    if c.family == "gpt_oss":
        # Dimensions that turn often keep their frequency, slow ones have it divided, those between are mixed.
        context, half = YARN["original_max_position_embeddings"], c.head_dim / 2

        def dimension(turns):
            return half * math.log(context / (turns * 2 * math.pi)) / math.log(c.rope_theta)

        low, high = max(dimension(YARN["beta_fast"]), 0), min(dimension(YARN["beta_slow"]), c.head_dim - 1)
        ramp = ((torch.arange(half, dtype=torch.float64) - low) / max(high - low, 1e-3)).clamp(0, 1)
        frequency = frequency * (1 - ramp) + frequency / YARN["factor"] * ramp
        scale = 0.1 * math.log(YARN["factor"]) + 1
    angles = torch.arange(c.sequence, dtype=torch.float64)[:, None] * frequency
    return (angles.cos() * scale).float(), (angles.sin() * scale).float()


# ------------------------------------------------------------------------------------------------
# Products whose weight gradients go to main_grad


class _Linear(torch.autograd.Function):
    """x weight^T + bias."""

    @staticmethod
    def forward(ctx, x, weight, bias, accumulation):
        ctx.save_for_backward(x if weight.requires_grad else None)
        ctx.weight, ctx.accumulation = weight, accumulation
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, grad):
        (x,), (needs_x, needs_weight, needs_bias, _) = ctx.saved_tensors, ctx.needs_input_grad
        if needs_weight and ctx.accumulation.adds:
            ctx.weight.main_grad.addmm_(grad.t(), x)
        elif needs_weight:
            torch.mm(grad.t(), x, out=ctx.weight.main_grad)
        return grad @ ctx.weight if needs_x else None, None, grad.sum(0) if needs_bias else None, None


class _Experts(torch.autograd.Function):
    """activation(x w1) w2 of rows in expert order. The two weight gradients go to main_grad.

    torch._grouped_mm multiplies each expert's rows [rows, m] by its matrix of a weight [experts, m, n].
    """

    @staticmethod
    def forward(ctx, x, weights, bias, w1, w2, plan, accumulation):
        z = torch._grouped_mm(x, w1, offs=plan.offsets)
        ctx.save_for_backward(x if w1.requires_grad else None, z, weights, bias, *plan)
        ctx.w1, ctx.w2, ctx.accumulation = w1, w2, accumulation
        return torch._grouped_mm(activation.activate(z, bias, weights, plan), w2, offs=plan.offsets)

    @staticmethod
    def backward(ctx, grad):
        x, z, weights, bias, *plan = ctx.saved_tensors
        plan, grad = RowPlan(*plan), grad.contiguous()
        grad_out = torch._grouped_mm(grad, ctx.w2.mT, offs=plan.offsets)
        grad_z, out, grad_weights = activation.activate_backward(grad_out, z, bias, weights, plan)
        if ctx.w1.requires_grad:
            grouped_weight_gradient_(ctx.w2.main_grad, out, grad, plan.offsets, ctx.accumulation.adds)
            grouped_weight_gradient_(ctx.w1.main_grad, x, grad_z, plan.offsets, ctx.accumulation.adds)
        grad_bias = grouped_sums(grad_z, plan.offsets, plan.expert_of_row) if ctx.needs_input_grad[2] else None
        grad_x = torch._grouped_mm(grad_z, ctx.w1.mT, offs=plan.offsets)
        return grad_x, grad_weights, grad_bias, None, None, None, None


class _LossOfLogits(torch.autograd.Function):
    """Mean cross-entropy of hidden weight^T, times scale, LOSS_TOKENS tokens at a time: no pass keeps all logits.

    The forward computes the gradients too, so the loss's own gradient must be 1.
    """

    @staticmethod
    def forward(ctx, hidden, weight, targets, scale, accumulation):
        grad, losses = torch.empty_like(hidden), torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        for start in range(0, len(hidden), LOSS_TOKENS):
            part = slice(start, start + LOSS_TOKENS)
            logits = F.linear(hidden[part], weight)
            cross_entropy_(logits, targets[part], losses[part], scale / len(hidden))
            torch.mm(logits, weight, out=grad[part])
            if not weight.requires_grad:
                continue
            if start or accumulation.adds:
                weight.main_grad.addmm_(logits.t(), hidden[part])
            else:
                torch.mm(logits.t(), hidden[part], out=weight.main_grad)
        ctx.save_for_backward(grad)
        return losses.mean() * scale

    @staticmethod
    def backward(ctx, grad):
        return ctx.saved_tensors[0], None, None, None, None


# ------------------------------------------------------------------------------------------------
# Modules


def parameter(*shape, dtype, device):
    """A parameter that `State` fills."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype, device=device))


def freeze(module, config: Config) -> None:
    """With --lora-rank adapters alone are trained."""
    for name, param in module.named_parameters():
        param.requires_grad_(not config.lora_rank or name in ADAPTERS)


class Layer(nn.Module):
    """One decoder layer in four parts, called one after the other; a scope of capture is the first few of them."""

    def __init__(self, config: Config, number: int, accumulation: Accumulation, exchange: Exchange, dtype, device):
        super().__init__()
        c, self.config, self.accumulation, self.exchange = config, config, accumulation, exchange
        self.window = c.window_of(number)
        self.shape = (c.local_heads, c.local_kv_heads, c.head_dim)
        width, rows_of_qkv = c.local_heads * c.head_dim, (c.local_heads + 2 * c.local_kv_heads) * c.head_dim
        experts, rank_experts, shapes = c.local_experts, c.rank_experts, {}
        shapes |= {"norm1": (c.hidden,), "qkv": (rows_of_qkv, c.hidden), "proj": (c.hidden, width)}
        shapes |= {"norm2": (c.hidden,), "router": (experts, c.hidden)}
        shapes |= {"w1": (rank_experts, c.hidden, 2 * c.ffn), "w2": (rank_experts, c.ffn, c.hidden)}
        if c.family == "qwen3":
            shapes |= {"q_norm": (c.head_dim,), "k_norm": (c.head_dim,)}
        else:
            shapes |= {"qkv_bias": (rows_of_qkv,), "proj_bias": (c.hidden,), "sinks": (c.local_heads,)}
            # Each rank adds the second biases of all experts to its own tokens.
            shapes |= {"router_bias": (experts,), "bias1": (rank_experts, 2 * c.ffn), "bias2": (experts, c.hidden)}
        if c.lora_rank:
            shapes |= {"qkv_a": (c.lora_rank, c.hidden), "qkv_b": (rows_of_qkv, c.lora_rank)}
            shapes |= {"proj_a": (c.lora_rank, width), "proj_b": (c.hidden, c.lora_rank)}
        names = (*ADAPTERS, "q_norm", "k_norm", "qkv_bias", "proj_bias", "sinks", "router_bias", "bias1", "bias2")
        for name in (*shapes, *(name for name in names if name not in shapes)):
            param = parameter(*shapes[name], dtype=dtype, device=device) if name in shapes else None
            self.register_parameter(name, param)
        freeze(self, c)

    def forward(self, x, inputs: Inputs):
        """The layer's output, [t, hidden]. A variant with graphs captures the first parts, or all."""
        x = self.attention(x, inputs)
        y, routed = self.route(x)
        return self.mix(x, y, routed, self.preprocess(routed))

    def project(self, x, weight, bias, a, b):
        """x weight^T + bias, and (LORA_ALPHA / rank) x a^T b^T where there are adapters."""
        out = _Linear.apply(x, weight, bias, self.accumulation)
        if a is None:
            return out
        low = _Linear.apply(x, a, None, self.accumulation)
        return torch.add(out, _Linear.apply(low, b, None, self.accumulation), alpha=LORA_ALPHA / len(a))

    def attention(self, x, inputs: Inputs):
        """x plus attention's output, [t, hidden]."""
        y = F.rms_norm(x, self.norm1.shape, self.norm1, self.config.norm_eps)
        qkv = self.project(y, self.qkv, self.qkv_bias, self.qkv_a, self.qkv_b)
        norms = None if self.q_norm is None else (self.q_norm, self.k_norm)
        q, k, v = split_heads(qkv, self.shape, inputs.rope, norms, self.config.norm_eps)
        out = attend(q, k, v, inputs.sequences, self.window, self.sinks)
        return x + self.project(out.flatten(1), self.proj, self.proj_bias, self.proj_a, self.proj_b)

    def route(self, x) -> tuple[torch.Tensor, Routed]:
        """(normalised tokens [t, hidden], their choice of experts)."""
        c = self.config
        routed_x = x if c.share_tp == 1 else x[: c.routed_tokens]
        y = F.rms_norm(routed_x, self.norm2.shape, self.norm2, c.norm_eps)
        logits = _Linear.apply(y, self.router, self.router_bias, self.accumulation)
        return y, route(logits, c.top_k, c.aux_loss / (c.microbatches * c.ep), c.routing == "balanced")

    def preprocess(self, routed: Routed) -> RowPlan:
        """The order of the experts' rows, from integers alone: nothing is differentiated, nothing read on the host."""
        if self.exchange.is_on:
            return self.exchange.order(routed)
        return order_rows(routed.experts, routed.counts)

    def mix(self, x, y, routed: Routed, plan: RowPlan):
        """x plus the output of the experts, [t, hidden]."""
        if self.exchange.is_on:
            z = self.exchange.through_experts(y, routed, plan, self._multiply)
        else:
            z = self._multiply(rows.gather(y, plan), routed.weights, plan)
        # A tensor-parallel share's experts have the first part of the sequence.
        residual = x if len(y) == len(x) else x[: len(y)]
        if self.bias2 is not None:
            residual = residual + self._bias_of_outputs(routed, plan)
        out = rows.combine(z, residual, plan)
        return out if len(y) == len(x) else torch.cat((out, x[len(y) :]))

    def _multiply(self, chosen, weights, plan):
        return _Experts.apply(chosen, weights, self.bias1, self.w1, self.w2, plan, self.accumulation)

    def _bias_of_outputs(self, routed, plan):
        """The chosen experts' second biases by weight, [t, hidden]: a product with the weights of all experts."""
        # Without offsets rows are in static buffers: a choice beyond their capacity has no row.
        weights = routed.weights * (plan.row_of_choice >= 0) if plan.offsets is None else routed.weights
        of_all = torch.zeros(len(weights), len(self.bias2), dtype=weights.dtype, device=weights.device)
        return of_all.scatter(1, routed.experts.long(), weights).to(self.bias2.dtype) @ self.bias2


class Ends(nn.Module):
    """Embedding, final norm, and the head with the loss."""

    def __init__(self, config: Config, accumulation: Accumulation, dtype, device):
        super().__init__()
        c, self.eps, self.accumulation = config, config.norm_eps, accumulation
        self.embedding = parameter(c.local_vocab, c.hidden, dtype=dtype, device=device)
        self.final_norm = parameter(c.hidden, dtype=dtype, device=device)
        self.head = parameter(c.local_vocab, c.hidden, dtype=dtype, device=device)
        freeze(self, c)

    def embed(self, tokens):
        """[t] int64 -> [t, hidden]."""
        return F.embedding(tokens, self.embedding)

    def loss(self, hidden, targets, scale: float):
        """Mean cross-entropy times scale; its backward takes the gradient 1."""
        y = F.rms_norm(hidden, self.final_norm.shape, self.final_norm, self.eps)
        return _LossOfLogits.apply(y, self.head, targets, scale, self.accumulation)
