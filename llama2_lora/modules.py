"""The same layers as modules under autograd: Transformer Engine's, as most people train, and their plain PyTorch twin.

Both take the frozen weights and adapters that lean layers take, draw dropout from torch's generator and let autograd
keep what it keeps. The plain twin's FP8 GEMMs are the lean operators', so it runs on any device.
"""

import contextlib
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from common import collectives, nvfp4
from common.context_parallel import places
from common.marks import mark
from common.precision import (
    NoScaling,
    TransformerEngineScaling,
    require_fp8,
    require_nvfp4,
    transformer_engine,
    usable_transformer_engine,
)
from common.variant import Unsupported
from llama2_lora.attention import attention_for
from llama2_lora.config import FP8, Config
from llama2_lora.context import AcrossRanks
from llama2_lora.operators import Operators, TorchOperators, rope_angles
from llama2_lora.scaling import Scaling, restored

MARK_EVERY = 8


class Adapter(nn.Module):
    """alpha / rank * dropout(x) a^T b^T; a and b are parameters in the adapters' flat buffer, grads in theirs.

    name: "qkv" or "proj".
    """

    def __init__(self, config: Config, adapters, layer: int, name: str):
        super().__init__()
        self.dropout, self.ratio = config.dropout, config.alpha / config.rank
        values, grads = adapters.layers[layer], adapters.layer_grads[layer]
        self.a, self.b = nn.Parameter(values[f"{name}.a"]), nn.Parameter(values[f"{name}.b"])
        self.a.grad, self.b.grad = grads[f"{name}.a"], grads[f"{name}.b"]

    def forward(self, x):
        return F.linear(F.linear(F.dropout(x, self.dropout, self.training), self.a), self.b) * self.ratio


# ------------------------------------------------------------------------------------------------
# Plain PyTorch


class _FrozenFP8(torch.autograd.Function):
    """x [s, in] -> x W^T with both operands in FP8; the gradient of x alone, by W^T made for the GEMM."""

    @staticmethod
    def forward(ctx, x, linear):
        ctx.linear = linear
        operand = torch.empty_like(x, dtype=torch.float8_e4m3fn)
        linear.operators.quantize(x, operand, linear.input_slot)
        out = torch.empty(x.shape[0], linear.matrix.value.shape[0], dtype=x.dtype, device=x.device)
        linear.operators.gemm(operand, linear.matrix.value, linear.input_slot.inverse, linear.matrix.inverse, out, True)
        return out

    @staticmethod
    def backward(ctx, grad):
        linear, grad = ctx.linear, grad.contiguous()
        value = linear.matrix.value
        operand = torch.empty_like(grad, dtype=torch.float8_e5m2)
        linear.operators.quantize(grad, operand, linear.grad_slot)
        transposed = torch.empty(value.shape[1], value.shape[0], dtype=value.dtype, device=value.device)
        linear.operators.transpose(value, transposed)
        out = torch.empty(grad.shape[0], value.shape[1], dtype=grad.dtype, device=grad.device)
        linear.operators.gemm(operand, transposed, linear.grad_slot.inverse, linear.matrix.inverse, out, False)
        return out, None


class FrozenLinear(nn.Module):
    """y = x W^T in the config's precision; W has no gradient."""

    def __init__(self, config: Config, matrix, operators: Operators, input_slot, grad_slot):
        super().__init__()
        self.precision, self.matrix, self.operators = config.precision, matrix, operators
        self.input_slot, self.grad_slot = input_slot, grad_slot

    def forward(self, x):
        if self.precision in FP8:
            return _FrozenFP8.apply(x, self)
        if self.precision == "nvfp4_emulated":
            return nvfp4.linear(x, self.matrix.value, self.matrix.backward)
        return F.linear(x, self.matrix.value)


class _AcrossRanks(torch.autograd.Function):
    """Output [s, heads dim] of q [s, heads, dim], k and v [s, kv, dim] by `attention`, an `AcrossRanks`."""

    @staticmethod
    def forward(ctx, attention, q, k, v):
        out, ctx.rest = attention.forward(q, k, v)
        ctx.attention = attention
        ctx.save_for_backward(q, k, v, out)
        return out

    @staticmethod
    def backward(ctx, grad):
        grads = ctx.attention.backward(grad.contiguous(), *ctx.saved_tensors, ctx.rest)
        return None, *(each.transpose(0, 1).to(grad.dtype) for each in grads)


class PlainLayer(nn.Module):
    """[s, hidden] -> [s, hidden]. inputs: name -> static tensor, of which it reads positions, int64 [s].

    across: attention over the ranks that share a window, an `AcrossRanks`; None: this rank has all of it.
    """

    def __init__(self, config: Config, layer: int, weights, adapters, operators: Operators, inputs, across):
        super().__init__()
        self.config, self.norms, self.inputs, self.across = config, weights.norms[layer], inputs, across
        self.cos, self.sin = operators.cos, operators.sin
        for name, matrix in weights.layers[layer].items():
            slots = [operators.scaling.slot(layer, f"{name}_{kind}") for kind in ("in", "grad")]
            setattr(self, name, FrozenLinear(config, matrix, operators, *slots))
        self.qkv_adapter, self.proj_adapter = (Adapter(config, adapters, layer, name) for name in ("qkv", "proj"))

    def forward(self, x):
        c = self.config
        normed = self._norm(x, self.norms[0])
        qkv = (self.qkv(normed) + self.qkv_adapter(normed)).view(c.tokens, -1, c.head_dim)
        q, k, v = qkv.split([c.heads, c.kv_heads, c.kv_heads], 1)
        cos, sin = (table[self.inputs["positions"]][:, None] for table in (self.cos, self.sin))
        out = self._attention(_turned(q, cos, sin), _turned(k, cos, sin), v)
        x = x + (self.proj(out) + self.proj_adapter(out))
        gate, up = self.fc1(self._norm(x, self.norms[1])).chunk(2, 1)
        return x + self.fc2(F.silu(gate) * up)

    def _attention(self, q, k, v):
        c = self.config
        if self.across is not None:
            return _AcrossRanks.apply(self.across, q, k, v)
        q, k, v = (each.transpose(0, 1)[None] for each in (q, k, v))
        if c.documents == "whole":
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            index = torch.arange(c.sequence, device=q.device)
            visible = (index <= index[:, None]) & (index >= (index - self.inputs["positions"])[:, None])
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=True)
        return out[0].transpose(0, 1).reshape(c.sequence, -1)

    def _norm(self, x, gain):
        return F.rms_norm(x, gain.shape, gain, self.config.norm_eps)


def _turned(x, cos, sin):
    low, high = x.float().chunk(2, -1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1).to(x.dtype)


# ------------------------------------------------------------------------------------------------
# Transformer Engine


class TransformerEngineLayer(nn.Module):
    """[s, hidden] -> [s, hidden] of Transformer Engine's modules, version 2.20.2, which take [s, 1, hidden].

    FP8 weights are the bytes and scales that lean layers read. On Hopper TE makes W^T for a dgrad GEMM and keeps it,
    63.75 GiB in all, unless a module is wrapped by FSDP2, whose flag frees it after the GEMM (module/base.py,
    `is_fsdp2`; module/linear.py, `clear_columnwise_cache`): the flag is set here. TE has no public name for it, nor
    for the memory of a weight.

    frequencies: FP32 [s, 1, 1, head_dim], angles of RoPE at the places of this rank's tokens. across: None, or the
    process group that shares a window, and a stream.
    """

    def __init__(self, config: Config, layer: int, weights, adapters, recipe, frequencies, across):
        super().__init__()
        te = transformer_engine()
        c = config
        self.config, self.frequencies = config, frequencies
        options = {"bias": False, "params_dtype": torch.bfloat16, "device": weights.device}
        norm = {"eps": c.norm_eps, "normalization": "RMSNorm"}
        with te.quantized_model_init(enabled=recipe is not None, recipe=recipe), torch.no_grad():
            self.qkv = te.LayerNormLinear(c.hidden, c.qkv_width, return_layernorm_output=True, **norm, **options)
            self.proj = te.Linear(c.q_width, c.hidden, **options)
            self.mlp = te.LayerNormMLP(c.hidden, c.ffn, activation="swiglu", **norm, **options)
        self.attention = te.DotProductAttention(
            c.heads, c.head_dim, num_gqa_groups=c.kv_heads, attn_mask_type="causal", qkv_format="sbhd"
        )
        if across:
            group, stream = across
            ranks = torch.distributed.get_process_group_ranks(group)
            self.attention.set_context_parallel_group(group, ranks, stream, "a2a")
        self.requires_grad_(False)
        norms, matrices = weights.norms[layer], weights.layers[layer]
        with torch.no_grad():
            self.qkv.layer_norm_weight.copy_(norms[0])
            self.mlp.layer_norm_weight.copy_(norms[1])
            parameters = (self.qkv.weight, self.proj.weight, self.mlp.fc1_weight, self.mlp.fc2_weight)
            for parameter, name in zip(parameters, ("qkv", "proj", "fc1", "fc2"), strict=True):
                _take(parameter, matrices[name], fp8=recipe is not None)
        for module in (self.qkv, self.proj, self.mlp):
            module._is_fsdp2 = True
        self.qkv_adapter, self.proj_adapter = (Adapter(config, adapters, layer, name) for name in ("qkv", "proj"))

    def forward(self, x):
        from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb

        c = self.config
        x = x[:, None]
        qkv, normed = self.qkv(x)
        qkv = (qkv + self.qkv_adapter(normed)).view(c.tokens, 1, -1, c.head_dim)
        q, k, v = qkv.split([c.heads, c.kv_heads, c.kv_heads], 2)
        q, k = (
            apply_rotary_pos_emb(each.contiguous(), self.frequencies, tensor_format="sbhd", fused=True)
            for each in (q, k)
        )
        out = self.attention(q, k, v.contiguous())
        x = x + (self.proj(out) + self.proj_adapter(out))
        return (x + self.mlp(x))[:, 0]


def _take(parameter, matrix, fp8: bool):
    """A weight as lean layers have it: in FP8 the same memory, in bf16 the same values."""
    if not fp8:
        parameter.copy_(matrix.value)
        return
    assert parameter._data.shape == matrix.value.shape
    parameter._data = matrix.value.view(torch.uint8)
    parameter._scale_inv = matrix.inverse.view(parameter._scale_inv.shape)
    parameter._transpose, parameter._transpose_invalid = None, True


def _run_again(layer):
    """A call of the layer that keeps its input alone. TE's checkpoint gives the second run the dropout masks and scales
    of the first."""
    return partial(transformer_engine().checkpoint, layer, use_reentrant=False)


def _recipe(config):
    if config.precision == "bf16":
        return None
    from transformer_engine.common import recipe

    return recipe.DelayedScaling(
        fp8_format=recipe.Format.HYBRID, amax_history_len=config.amax_history, amax_compute_algo="max"
    )


def require_kind(kind: str, config: Config, device) -> None:
    """Raises Unsupported where this device does not compute the config with this kind of layer, in Transformer
    Engine's words where it has some."""
    if config.precision == "nvfp4":
        require_nvfp4(device, "lean layers have no NVFP4 GEMM")
    if kind != "te":
        return
    if config.cp > 1 and (config.kv_heads % config.cp or config.kv_heads % 2):
        raise Unsupported(
            f"Transformer Engine's layers share an even number of groups of keys and values out over --cp {config.cp} "
            f"ranks: --kv-heads {config.kv_heads} is no multiple of both"
        )
    if device.type != "cuda":
        raise Unsupported("Transformer Engine's layers need a GPU")
    usable_transformer_engine()
    if config.precision not in ("fp8", "bf16"):
        raise Unsupported(f"Transformer Engine's layers take --precision fp8 or bf16 here, not {config.precision}")
    if config.documents != "whole":
        raise Unsupported("Transformer Engine's layers take --documents whole here")
    if config.precision == "fp8":
        require_fp8()


# ------------------------------------------------------------------------------------------------
# The stack


class ModuleStack:
    """Layers under autograd, with the methods of `lean.LeanStack`.

    forward_all and backward_all are one autograd graph, as anyone would run it. forward(layer) and backward(layer),
    for captures, cut it between layers: hidden states and gradients are chained by memory, and `head_of_chain` is what
    lies between the two halves.

    group, rank: with --cp, the name of the group of ranks that share a window, and this rank's number in it. again: the
    first layers, of Transformer Engine, that run again in the backward of an eager step.
    """

    def __init__(
        self, kind: str, config: Config, weights, adapters, inputs, operators: Operators | None,
        group: str = collectives.ALONE, rank: int = 0, again: int = 0,
    ):  # fmt: skip
        self.config, self.weights, self.adapters, self.inputs = config, weights, adapters, inputs
        device, recipe = weights.device, _recipe(config) if kind == "te" else None
        across = None
        if kind == "te":
            if config.cp > 1:
                across = collectives.process_group(group), torch.cuda.Stream(device)
            # Both halves of a head alike.
            angles = rope_angles(config)[places(config.sequence, config.cp, rank)].repeat(1, 2)
            layer_class, parts = TransformerEngineLayer, (recipe, angles.float().to(device)[:, None, None], across)
        else:
            if config.cp > 1:
                across = AcrossRanks(attention_for(config, device), config, inputs, group, rank)
            layer_class, parts = PlainLayer, (operators, inputs, across)
        self.layers = nn.ModuleList(
            layer_class(config, layer, weights, adapters, *parts) for layer in range(config.layers)
        )
        self.again = again
        # What a step calls; variants put wrapped layers here.
        self.calls = [_run_again(layer) for layer in self.layers[:again]] + list(self.layers[again:])
        self.fp8 = TransformerEngineScaling(self.layers, config.amax_history) if recipe else NoScaling()
        # The plain twin's; Transformer Engine updates its own in the contexts of self.fp8.
        self.scalings = [operators.scaling] if operators else []
        # The embedding is frozen: nothing needs the gradient of its output, in graphs as little as without.
        self.x = torch.zeros(config.tokens, config.hidden, dtype=weights.embedding.dtype, device=device)
        self.grad = torch.zeros_like(self.x)
        self.loss = torch.zeros((), device=device)
        self.saved, self.chain, self.chain_grad = {}, self.x, self.grad
        # Lean layers ask it; autograd keeps what it keeps.
        self.keeps_attention = True

    def embed(self) -> None:
        self.adapters.grads.zero_()
        torch.index_select(self.weights.embedding, 0, self.inputs["tokens"], out=self.x)

    def forward_all(self) -> None:
        hidden = self.x
        with self.fp8.forward():
            for index, layer in enumerate(self.calls):
                hidden = layer(hidden)
                if index % MARK_EVERY == 0:
                    mark(hidden)
        self.hidden = hidden

    def head(self) -> None:
        self.total = self._loss(self.hidden)
        self.hidden = None

    def backward_all(self) -> None:
        with self.fp8.without_update() if self.again else contextlib.nullcontext(), self.fp8.backward():
            self.total.backward()
        self.total = None

    def _loss(self, hidden):
        w = self.weights
        normed = F.rms_norm(hidden, w.final_norm.shape, w.final_norm, self.config.norm_eps)
        losses = F.cross_entropy(F.linear(normed, w.head).float(), self.inputs["targets"], reduction="none")
        total = (losses * self.inputs["weights"]).sum()
        self.loss.copy_(total.detach())
        return total

    # -- by layer, for captures --------------------------------------------------------------------

    def forward(self, layer: int) -> None:
        x = self.x if layer == 0 else self.chain
        output = self.layers[layer](x)
        self.saved[layer] = x, output
        self.chain, self.chain_grad = output.detach().requires_grad_(), self.grad

    def head_of_chain(self) -> None:
        """Loss of what the last layer's forward left, its gradient to `grad`, which the last layer's backward reads."""
        hidden = self.chain.detach().requires_grad_()
        self._loss(hidden).backward()
        self.grad.copy_(hidden.grad)

    def backward(self, layer: int) -> None:
        x, output = self.saved.pop(layer)
        x.grad = None
        output.backward(self.chain_grad)
        self.chain_grad, x.grad = x.grad, None

    def capturing(self):
        """Around captures: no update of scales is recorded."""
        return self.fp8.capturing()

    def replaying_forward(self):
        return self.fp8.forward()

    def replaying_backward(self):
        return self.fp8.backward(replayed=True)

    def update_scales(self) -> None:
        for scaling in self.scalings:
            scaling.update()

    @torch.no_grad()
    def evaluate(self) -> None:
        """`loss` of the inputs without dropout, eager; scales stay as they are."""
        scales = [*self.fp8.named_state(), *(pair for scaling in self.scalings for pair in scaling.named_tensors())]
        self.layers.eval()
        with restored(tensor for _, tensor in scales):
            hidden = F.embedding(self.inputs["tokens"], self.weights.embedding)
            with self.fp8.forward():
                for layer in self.layers:
                    hidden = layer(hidden)
            self._loss(hidden)
        self.layers.train()

    def reset(self, first_step: int = 0) -> None:
        for scaling in (self.fp8, *self.scalings):
            scaling.reset()

    def named_state(self):
        for scaling in (*self.scalings, self.fp8):
            yield from scaling.named_state()


def operators_for(device):
    """The class of operators: Triton's on a GPU."""
    if device.type == "cuda":
        from llama2_lora.kernels import TritonOperators

        return TritonOperators
    return TorchOperators


def plain_operators(config, formats, device):
    """The operators of the plain twin's FP8 GEMMs, with scales of their own."""
    return operators_for(device)(config, formats, Scaling(config, device), device)
