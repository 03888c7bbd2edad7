"""GPT-3's modules: Transformer Engine's layer or a plain one with the same parameters, embedding and tied head.

Activations are [sequence, microbatch, hidden]; where several tensor ranks share each layer, every one has its part of
the sequence between attention and feed-forward (sequence parallelism), [sequence / tp, microbatch, hidden].

Every parameter p has an FP32 buffer p.main_grad. Weights of te and emulated FP8 linears accumulate into it inside their
backward; for all other parameters a hook adds what autograd just accumulated and drops it: one kernel, FP32 += bf16,
eager and captured alike.
"""

import re

import torch
from torch import nn
from torch.nn import functional as F

from common.parallel.differentiable_collectives import (
    cross_entropy,
    gather_from_sequence,
    look_up,
    reduce_scatter_to_sequence,
)
from common.parallel.groups import fill_
from gpt3.config import Config
from gpt3.emulated_fp8 import EmulatedLinear
from graph_worth.parallel import collectives

INIT_STD = 0.006  # MLPerf GPT-3: all weights, no depth scaling
NORM_EPS = 1e-5


class Linear(nn.Linear):
    """nn.Linear called as an EmulatedLinear is; there is no weight to cast."""

    def forward(self, x, is_first_microbatch: bool, add_bias: bool = True):
        return F.linear(x, self.weight, self.bias if add_bias else None)


class LayerNorm1p(nn.Module):
    """LayerNorm whose weight is stored less one ("layernorm1p"), so that zero is the identity."""

    def __init__(self, hidden, dtype, device):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.empty(hidden, dtype=dtype, device=device))

    def forward(self, x):
        return F.layer_norm(x, self.weight.shape, self.weight + 1, self.bias, NORM_EPS)


class PlainLayer(nn.Module):
    """The decoder layer in plain PyTorch: pre-norm attention and GELU feed-forward, biases everywhere, no dropout.

    [s / tp, b, hidden] -> the same. Parameters as te.TransformerLayer's, q k v interleaved per head. tensor: name of
    the group of ranks that have the other heads and the other columns of the feed-forward.
    """

    def __init__(self, config: Config, dtype, device, tensor: str = collectives.ALONE):
        super().__init__()
        attention = config.heads * config.head_dim
        linear = EmulatedLinear if config.precision == "fp8" else Linear
        self.heads, self.head_dim = config.heads, config.head_dim
        self.tensor, self.is_split = tensor, collectives.group_size(tensor) > 1
        self.norm_1 = LayerNorm1p(config.hidden, dtype, device)
        self.qkv = linear(config.hidden, 3 * attention, dtype=dtype, device=device)
        self.proj = linear(attention, config.hidden, dtype=dtype, device=device)
        self.norm_2 = LayerNorm1p(config.hidden, dtype, device)
        self.fc1 = linear(config.hidden, config.ffn, dtype=dtype, device=device)
        self.fc2 = linear(config.ffn, config.hidden, dtype=dtype, device=device)

    def forward(self, x, is_first_microbatch: bool):
        x = self._attention(x, is_first_microbatch)
        wide = self.fc1(gather_from_sequence(self.norm_2(x), self.tensor), is_first_microbatch)
        return x + self._sum(self.fc2, F.gelu(wide, approximate="tanh"), is_first_microbatch)

    def _attention(self, x, is_first_microbatch):
        qkv = self.qkv(gather_from_sequence(self.norm_1(x), self.tensor), is_first_microbatch)
        s, b, _ = qkv.shape
        q, k, v = qkv.view(s, b, self.heads, 3, self.head_dim).permute(3, 1, 2, 0, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self._sum(self.proj, y.permute(2, 0, 1, 3).reshape(s, b, -1), is_first_microbatch)

    def _sum(self, linear, x, is_first_microbatch):
        """`linear`, of whose columns the other ranks have the rest: this rank's part of the sequence."""
        if not self.is_split:
            return linear(x, is_first_microbatch)
        part = linear(x, is_first_microbatch, add_bias=False)
        return reduce_scatter_to_sequence(part, self.tensor) + linear.bias


def te_layer(config: Config, dtype, device, tensor: str = collectives.ALONE):
    """te.TransformerLayer with the same shapes: fused q k v, weight gradients straight into main_grad.

    Its widths are those of all tensor ranks together.
    """
    from common.precision.transformer_engine import transformer_engine
    from gpt3.kernels.bias_add import AddBias

    parallel = {}
    if config.tp > 1:
        group = collectives.process_group(tensor)
        parallel = {"tp_group": group, "tp_size": config.tp, "set_parallel_mode": True, "sequence_parallel": True}
    layer = transformer_engine().TransformerLayer(
        config.hidden,
        config.ffn * config.tp,
        config.heads * config.tp,
        kv_channels=config.head_dim,
        layernorm_epsilon=NORM_EPS,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        fuse_qkv_params=True,
        zero_centered_gamma=True,
        fuse_wgrad_accumulation=True,
        params_dtype=dtype,
        device=device,
        **parallel,
    )
    # Nothing is dropped, and drop_path is None.
    layer._bias_dropout_add = lambda x, bias, residual, drop_path=None: AddBias.apply(x, bias, residual)
    return layer


class Embedding(nn.Module):
    """Token and position embedding, and the head tied to the tokens' rows.

    Rows are split over the ranks of the group `tensor`, positions by their part of the sequence. Of a pipeline the
    first stage has tokens and positions, the last one tokens and the final norm.
    """

    def __init__(self, config: Config, dtype, device, tensor=collectives.ALONE, first=True, last=True):
        super().__init__()
        self.tensor = tensor
        positions = (config.sequence // config.tp, 1, config.hidden)
        self.tokens = nn.Parameter(torch.empty(config.vocab, config.hidden, dtype=dtype, device=device))
        if first:
            self.positions = nn.Parameter(torch.empty(positions, dtype=dtype, device=device))
        if last:
            self.final_norm = LayerNorm1p(config.hidden, dtype, device)

    def forward(self, tokens_sb):
        """[s, b] int64 -> [s / tp, b, hidden]."""
        return look_up(tokens_sb, self.tokens, self.tensor, _EmbedTokens.apply) + self.positions

    def loss(self, hidden, targets_sb):
        """Mean cross-entropy, FP32, of [s / tp, b, hidden] against [s, b] over the vocabulary of all tensor ranks."""
        logits = _TiedHead.apply(gather_from_sequence(self.final_norm(hidden), self.tensor), self.tokens)
        return cross_entropy(logits.flatten(0, 1).float(), targets_sb.flatten(), self.tensor)


class _EmbedTokens(torch.autograd.Function):
    """F.embedding whose gradient goes to main_grad at once.

    The rows are the head's weights too. Autograd would sum both gradients before it accumulates them
    where one backward pass makes both, but not where two do, as in the graphed step: the two could
    not be equal bit for bit.
    """

    @staticmethod
    def forward(ctx, tokens, weight):
        ctx.save_for_backward(tokens)
        ctx.weight = weight
        return F.embedding(tokens, weight)

    @staticmethod
    def backward(ctx, grad):
        (tokens,) = ctx.saved_tensors
        total = ctx.weight.main_grad
        if total.is_cuda and grad.dtype != torch.float32:
            # With Triton, which a machine without a GPU need not have.
            from gpt3.kernels.embedding_gradient import add_rows_

            add_rows_(total, tokens, grad)
        else:
            total.add_(torch.ops.aten.embedding_dense_backward(grad, tokens, len(total), -1, False))
        return None, None


class _TiedHead(torch.autograd.Function):
    """F.linear without bias whose weight gradient goes to main_grad at once; see _EmbedTokens."""

    @staticmethod
    def forward(ctx, hidden, weight):
        ctx.save_for_backward(hidden, weight)
        return F.linear(hidden, weight)

    @staticmethod
    def backward(ctx, grad):
        hidden, weight = ctx.saved_tensors
        add_product_(weight.main_grad, grad.flatten(0, 1).t(), hidden.flatten(0, 1))
        return grad @ weight, None


def add_product_(total, a, b):
    """total += a @ b. On a GPU in one GEMM, which adds 16-bit products in total's FP32."""
    if total.is_cuda and a.dtype != total.dtype:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.add_(a @ b)


def attach_main_grads(modules):
    """Give every parameter its zeroed FP32 main_grad.

    Returns the parameters whose main_grad the first microbatch overwrites; all others must be zeroed
    before a step.
    """
    overwritten = []
    for module in modules:
        for owner in module.modules():
            fused = isinstance(owner, EmulatedLinear) or getattr(owner, "fuse_wgrad_accumulation", False)
            for name, parameter in owner.named_parameters(recurse=False):
                parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
                if fused and parameter.ndim == 2 and "norm" not in name:
                    overwritten.append(parameter)
                else:
                    parameter.register_post_accumulate_grad_hook(_add_to_main_grad)
    return overwritten


def _add_to_main_grad(parameter):
    # Autograd calls the hook of a used parameter even where its gradient is None (the tokens' rows, above).
    if (grad := parameter.grad) is None:
        return
    parameter.main_grad.add_(grad)
    parameter.grad = None


def split_dimension(name: str) -> int | None:
    """Return the dimension of a parameter that is split over the tensor ranks; None: each rank has all of it.

    name: a parameter of PlainLayer, te.TransformerLayer or Embedding, with any prefix.
    """
    if re.search(r"(qkv|fc1)[._](weight|bias)$|(^|\.)(tokens|positions)$", name):
        return 0
    return 1 if re.search(r"(proj|fc2)[._]weight$", name) else None


def initialise(named_parameters, seed: int, tensor_rank: int = 0, tp: int = 1):
    """In place and seeded: matrices normal with INIT_STD, biases and (zero-centred) norms zero.

    named_parameters: by names in the whole model. Values are those that the model has in one process, of which this
    rank takes its part.
    """
    for name, parameter in named_parameters:
        if parameter.ndim < 2:
            parameter.detach().zero_()
            continue
        shape, slices = list(parameter.shape), [slice(None)] * parameter.ndim
        dimension = split_dimension(name)
        if dimension is not None:
            size = shape[dimension]
            shape[dimension] *= tp
            slices[dimension] = slice(tensor_rank * size, (tensor_rank + 1) * size)
        fill_(parameter, name, seed, shape, slices, INIT_STD)
