"""Llama 3.1's modules: Transformer Engine's layer or a plain one with the same parameters, embedding, head and loss.

Activations are [sequence, microbatch, hidden]; with several tensor ranks each has its part of the sequence outside of
attention and MLP (sequence parallelism). Every parameter p has a buffer p.main_grad that backward passes add to: te
and FP8 or FP4 linears inside of their GEMMs' backward, all others by a hook that adds what autograd accumulated.
"""

import contextlib
import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from common.parallel.differentiable_collectives import (
    cross_entropy,
    gather_from_sequence,
    look_up,
    places,
    reduce_scatter_to_sequence,
)
from common.parallel.groups import Groups, Place, fill_
from graph_worth.parallel import collectives
from llama31.config import ROPE_SCALING, Config
from llama31.linears import SwiGLU, make_linear

INIT_STD = 0.02
# Tokens whose logits a validation has at a time.
VALIDATION_TOKENS = 1024

# ------------------------------------------------------------------------------------------------
# Positions


def rope_angles(config: Config) -> torch.Tensor:
    """FP32 [sequence, head_dim / 2] on the host: each token's angles, with Llama 3.1's stretched low frequencies."""
    c, scaling = config, ROPE_SCALING
    frequency = c.rope_theta ** (-torch.arange(0, c.head_dim, 2, dtype=torch.float64) / c.head_dim)
    turns = scaling["original_max_position_embeddings"] * frequency / (2 * math.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    # 1: as they are, from `high` turns in the original context up; 0: divided by the factor, up to `low` turns.
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    frequency = frequency * (smooth + (1 - smooth) / scaling["factor"])
    positions = torch.arange(c.sequence // c.share_cp, dtype=torch.float64)
    return (positions[:, None] * frequency).float()


def positions_of(config: Config, context_rank: int) -> torch.Tensor:
    """int64 [local_sequence]: the places in the sequence of the tokens that a context rank has."""
    return places(config.sequence // config.share_cp, config.cp, context_rank)


# ------------------------------------------------------------------------------------------------
# Layers


class Part(NamedTuple):
    """A parameter, whether its backward adds to main_grad itself, and how Adam's master is written (None: a copy)."""

    parameter: nn.Parameter
    adds_to_main_grad: bool = False
    write: Callable[[torch.Tensor], object] | None = None


def run_again(function, scaling):
    """Return a callable in the place of `function` whose backward runs `function` again, under `scaling()`."""

    def call(*args, **kwargs):
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        return checkpoint(
            function, *args, use_reentrant=False, preserve_rng_state=False,
            context_fn=lambda: (contextlib.nullcontext(), scaling()), **kwargs,
        )  # fmt: skip

    return call


class PlainLayer(nn.Module):
    """The decoder layer in plain PyTorch, [s, b, hidden] -> [s, b, hidden], with te.TransformerLayer's parameters.

    Rows of qkv come by group of heads: its q heads, its k, its v. fc1 has the gate's rows, then the up projection's.
    """

    def __init__(self, config: Config, groups: Groups, place: Place, rope, dtype, device):
        super().__init__()
        c, heads = config, config.local_heads * config.head_dim
        self.config, self.groups = config, groups
        self.norm1, self.norm2 = (nn.Parameter(torch.empty(c.hidden, dtype=dtype, device=device)) for _ in range(2))
        self.qkv = make_linear(c, c.hidden, heads + 2 * c.local_kv_heads * c.head_dim, dtype, device, groups.tensor)
        self.proj = make_linear(c, heads, c.hidden, dtype, device, groups.tensor)
        self.fc1 = make_linear(c, c.hidden, 2 * c.local_ffn, dtype, device, groups.tensor)
        self.fc2 = make_linear(c, c.local_ffn, c.hidden, dtype, device, groups.tensor)
        self.cos, self.sin = rope
        # Which keys of all context ranks, in their order, a token of this one sees; one causal run without ranks.
        self.visible = None
        if c.cp > 1:
            keys = torch.cat([positions_of(c, rank) for rank in range(c.cp)])
            self.visible = (keys[None] <= positions_of(c, place.context_rank)[:, None]).to(device)

    def parts(self) -> dict[str, Part]:
        """By the names that common/data/checkpoint.py gives them."""
        linears = {"qkv": self.qkv, "proj": self.proj, "fc1": self.fc1, "fc2": self.fc2}
        parts = {name: Part(linear.weight, linear.adds_to_main_grad, linear.write) for name, linear in linears.items()}
        return parts | {"norm1": Part(self.norm1), "norm2": Part(self.norm2)}

    def forward(self, x, is_first_microbatch: bool):
        return self.mlp(self.attention(x, is_first_microbatch), is_first_microbatch)

    def attention(self, x, is_first_microbatch: bool):
        """The layer's first half: norm, attention, residual."""
        first, group = is_first_microbatch, self.groups.tensor
        out = self._attend(self.qkv(gather_from_sequence(self._norm(x, self.norm1), group), first))
        return x + reduce_scatter_to_sequence(self.proj(out, first), group)

    def mlp(self, x, is_first_microbatch: bool):
        """The layer's second half: norm, MLP, residual."""
        first, group = is_first_microbatch, self.groups.tensor
        up = self.fc1(gather_from_sequence(self._norm(x, self.norm2), group), first)
        return x + reduce_scatter_to_sequence(self.fc2(SwiGLU.apply(up), first), group)

    def keep(self, kept: frozenset[str], scaling):
        """Return a callable in the place of this layer that keeps these items (llama31/memory/plan.py), not all."""
        return run_again(self, scaling)

    def _norm(self, x, gain):
        return F.rms_norm(x, gain.shape, gain, self.config.norm_eps)

    def _attend(self, qkv):
        """[s, b, qkv rows] -> [s, b, heads head_dim]."""
        c, (s, b, _) = self.config, qkv.shape
        q, k, v = qkv.view(s, b, c.local_kv_heads, -1, c.head_dim).split([c.heads // c.kv_heads, 1, 1], 3)
        q, k, v = self._turned(q.flatten(2, 3)), self._turned(k.flatten(2, 3)), v.flatten(2, 3)
        k, v = (gather_from_sequence(tensor, self.groups.context) for tensor in (k, v))
        q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (q, k, v))
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=self.visible, is_causal=self.visible is None, enable_gqa=True
        )
        return y.permute(2, 0, 1, 3).reshape(s, b, -1)

    def _turned(self, x):
        low, high = x.float().chunk(2, -1)
        return torch.cat((low * self.cos - high * self.sin, high * self.cos + low * self.sin), -1).to(x.dtype)


@functools.cache
def context_stream(device: torch.device) -> torch.cuda.Stream:
    """The second stream of attention over context ranks: of all layers, since memory of one stream is not used on
    another, and since torch hands out 32 different ones."""
    return torch.cuda.Stream(device)


class TransformerEngineLayer(nn.Module):
    """te.TransformerLayer of the same shapes: weight gradients straight into main_grad, its own collectives."""

    def __init__(self, config: Config, groups: Groups, place: Place, rope, dtype, device, recipe):
        super().__init__()
        from common.precision.transformer_engine import transformer_engine

        te, c = transformer_engine(), config
        self.stored, parallel = c.weights == "fp8", {}
        if c.tp > 1:
            group = collectives.process_group(groups.tensor)
            parallel = {"tp_group": group, "tp_size": c.tp, "sequence_parallel": True, "set_parallel_mode": True}
        with te.quantized_model_init(enabled=self.stored, recipe=recipe):
            self.layer = te.TransformerLayer(
                c.hidden,
                c.ffn // c.share,
                c.heads // c.share,
                num_gqa_groups=c.kv_heads // c.share,
                kv_channels=c.head_dim,
                layernorm_epsilon=c.norm_eps,
                hidden_dropout=0.0,
                attention_dropout=0.0,
                normalization="RMSNorm",
                activation="swiglu",
                bias=False,
                fuse_qkv_params=True,
                fuse_wgrad_accumulation=True,
                self_attn_mask_type="causal",
                params_dtype=dtype,
                device=device,
                **parallel,
            )
        if c.cp > 1:
            context = collectives.process_group(groups.context)
            ranks = torch.distributed.get_process_group_ranks(context)
            self.layer.set_context_parallel_group(context, ranks, context_stream(device), "p2p")
        # Both halves of a head turn by the same angles.
        self.angles = rope.repeat(1, 2).to(device)[:, None, None]

    def parts(self) -> dict[str, Part]:
        """As PlainLayer.parts."""
        attention, mlp = self.layer.self_attention, self.layer.layernorm_mlp
        matrices = {
            "qkv": attention.layernorm_qkv.weight,
            "proj": attention.proj.weight,
            "fc1": mlp.fc1_weight,
            "fc2": mlp.fc2_weight,
        }
        # A stored FP8 weight quantises a master with a scale of its own, into the memory that it has and, since it was
        # made with gradients on, into its transposed copy: a captured graph reads both at their addresses.
        parts = {name: Part(value, True, value.quantize_ if self.stored else None) for name, value in matrices.items()}
        norms = {"norm1": attention.layernorm_qkv.layer_norm_weight, "norm2": mlp.layer_norm_weight}
        return parts | {name: Part(norm) for name, norm in norms.items()}

    def forward(self, x, is_first_microbatch: bool):
        return self.layer(x, rotary_pos_emb=self.angles, is_first_microbatch=is_first_microbatch)

    def attention(self, x, is_first_microbatch: bool):
        """As PlainLayer.attention: what te.TransformerLayer calls of it, version 2.20.2, without bias and dropout."""
        self_attention, flags = self.layer.self_attention, {"is_first_microbatch": is_first_microbatch}
        return x + self_attention(x, attn_mask_type="causal", rotary_pos_emb=self.angles, **flags)[0]

    def mlp(self, x, is_first_microbatch: bool):
        """As PlainLayer.mlp."""
        return x + self.layer.layernorm_mlp(x, is_first_microbatch=is_first_microbatch)[0]

    def keep(self, kept: frozenset[str], scaling):
        """As PlainLayer.keep."""
        if kept == {"x"}:
            return run_again(self, scaling)
        self.layer.layernorm_mlp.checkpoint = "mlp" not in kept
        if "attention" not in kept:
            attention = self.layer.self_attention.core_attention
            attention.forward = run_again(attention.forward, scaling)
        return self


# ------------------------------------------------------------------------------------------------
# Ends


class Embedding(nn.Module):
    """Rows of this tensor rank. [s, b] int64 -> [s / tp, b, hidden]."""

    def __init__(self, config: Config, groups: Groups, dtype, device):
        super().__init__()
        self.group = groups.tensor
        self.weight = nn.Parameter(torch.empty(config.local_vocab, config.hidden, dtype=dtype, device=device))

    def forward(self, tokens_sb):
        return look_up(tokens_sb, self.weight, self.group)


class Head(nn.Module):
    """Final norm, this tensor rank's rows of the output matrix, and the loss over the rows of all tensor ranks."""

    def __init__(self, config: Config, groups: Groups, dtype, device):
        super().__init__()
        self.group, self.norm_eps = groups.tensor, config.norm_eps
        self.norm = nn.Parameter(torch.empty(config.hidden, dtype=dtype, device=device))
        self.weight = nn.Parameter(torch.empty(config.local_vocab, config.hidden, dtype=dtype, device=device))

    def forward(self, hidden, targets_sb):
        """Mean cross-entropy, FP32, of [s / tp, b, hidden] against [s, b]; alike on all tensor ranks."""
        normed = F.rms_norm(hidden, self.norm.shape, self.norm, self.norm_eps)
        normed, targets = gather_from_sequence(normed, self.group).flatten(0, 1), targets_sb.flatten()
        if torch.is_grad_enabled():
            return self._loss(normed, targets)
        # A validation's logits take no memory beside those of a training whose loss is eager.
        parts = zip(normed.split(VALIDATION_TOKENS), targets.split(VALIDATION_TOKENS), strict=True)
        return sum(self._loss(*part) * (len(part[1]) / len(targets)) for part in parts)

    def _loss(self, normed, targets):
        return cross_entropy(F.linear(normed, self.weight).float(), targets, self.group)


# ------------------------------------------------------------------------------------------------
# Gradients and initial values


def attach_main_grad(part: Part, dtype) -> None:
    """Give a parameter its main_grad, whose memory comes from GradientBuckets, and a hook where nothing else adds."""
    parameter = part.parameter
    parameter.main_grad = torch.zeros((), dtype=dtype, device=parameter.device).expand(parameter.shape)
    if not part.adds_to_main_grad:
        parameter.register_post_accumulate_grad_hook(_add_to_main_grad)


def _add_to_main_grad(parameter):
    if parameter.grad is None:
        return
    parameter.main_grad.add_(parameter.grad)
    parameter.grad = None


@torch.no_grad()
def fill_at_random_(value, config: Config, place: Place, name: str, layer: int | None, seed: int) -> None:
    """Fill this rank's part of a parameter with its seeded initial value, in place.

    Norms are one, matrices normal, those that add to the residual stream divided by sqrt(2 layers). It depends on the
    name, the layer's global number and the shard alone. name: "embedding", "head", "final_norm", or a layer's.
    """
    c, rank, (num_rows, num_columns) = config, place.tensor_rank, (*value.shape, 1)[:2]
    if "norm" in name:
        value.fill_(1.0)
        return
    std = INIT_STD / math.sqrt(2 * c.layers) if name in ("proj", "fc2") else INIT_STD
    shard = slice(rank * num_rows, (rank + 1) * num_rows)
    full = f"{name}" if layer is None else f"layers.{layer}.{name}"
    if name in ("embedding", "head", "qkv"):
        fill_(value, full, seed, (num_rows * c.tp, num_columns), (shard, slice(None)), std)
    elif name == "fc1":
        rows = slice(rank * c.local_ffn, (rank + 1) * c.local_ffn)
        for half, part in zip(("gate", "up"), value.view(2, c.local_ffn, c.hidden), strict=True):
            fill_(part, f"{full}.{half}", seed, (c.local_ffn * c.tp, c.hidden), (rows, slice(None)), std)
    else:
        columns = slice(rank * num_columns, (rank + 1) * num_columns)
        fill_(value, full, seed, (num_rows, num_columns * c.tp), (slice(None), columns), std)


def checkpoint_part(config: Config, place: Place, name: str, whole):
    """This rank's part of a checkpoint's tensor: q, k, v rows come by group here, fc1's in halves."""
    c, rank = config, place.tensor_rank
    if name == "qkv":
        dim, groups = c.head_dim, c.kv_heads
        q, k, v = whole.split([c.q_width, groups * dim, groups * dim])
        by_group = torch.cat([part.view(groups, -1, dim, c.hidden) for part in (q, k, v)], 1)
        return by_group.chunk(c.tp)[rank].reshape(-1, c.hidden)
    if name == "fc1":
        return whole.view(2, c.ffn, c.hidden).chunk(c.tp, 1)[rank].reshape(-1, c.hidden)
    if name in ("proj", "fc2"):
        return whole.chunk(c.tp, 1)[rank]
    return whole if "norm" in name else whole.chunk(c.tp)[rank]
