"""GPT-3's modules: Transformer Engine's layer or a plain one with the same parameters, embedding and tied head.

Activations are [sequence, microbatch, hidden]. Every parameter p has an FP32 buffer p.main_grad. Weights
of te and emulated FP8 linears accumulate into it inside their backward; for all other parameters a hook
adds what autograd just accumulated and drops it: one kernel, FP32 += bf16, eager and captured alike.
"""

import torch
from torch import nn
from torch.nn import functional as F

from common.precision import EmulatedLinear, transformer_engine
from gpt3.config import Config

INIT_STD = 0.006  # MLPerf GPT-3: all weights, no depth scaling
NORM_EPS = 1e-5


class Linear(nn.Linear):
    """nn.Linear that takes and ignores the flag of FP8 linears."""

    def forward(self, x, is_first_microbatch: bool):
        return F.linear(x, self.weight, self.bias)


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

    [s, b, hidden] -> [s, b, hidden]. Parameters as te.TransformerLayer's, q k v interleaved per head.
    """

    def __init__(self, config: Config, dtype, device):
        super().__init__()
        attention = config.heads * config.head_dim
        linear = EmulatedLinear if config.precision == "fp8" else Linear
        self.heads, self.head_dim = config.heads, config.head_dim
        self.norm_1 = LayerNorm1p(config.hidden, dtype, device)
        self.qkv = linear(config.hidden, 3 * attention, dtype=dtype, device=device)
        self.proj = linear(attention, config.hidden, dtype=dtype, device=device)
        self.norm_2 = LayerNorm1p(config.hidden, dtype, device)
        self.fc1 = linear(config.hidden, config.ffn, dtype=dtype, device=device)
        self.fc2 = linear(config.ffn, config.hidden, dtype=dtype, device=device)

    def forward(self, x, is_first_microbatch: bool):
        s, b, _ = x.shape
        qkv = self.qkv(self.norm_1(x), is_first_microbatch).view(s, b, self.heads, 3, self.head_dim)
        q, k, v = qkv.permute(3, 1, 2, 0, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.permute(2, 0, 1, 3).reshape(s, b, -1), is_first_microbatch)
        y = F.gelu(self.fc1(self.norm_2(x), is_first_microbatch), approximate="tanh")
        return x + self.fc2(y, is_first_microbatch)


def te_layer(config: Config, dtype, device):
    """te.TransformerLayer with the same shapes: fused q k v, weight gradients straight into main_grad."""
    return transformer_engine().TransformerLayer(
        config.hidden,
        config.ffn,
        config.heads,
        kv_channels=config.head_dim,
        layernorm_epsilon=NORM_EPS,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        zero_centered_gamma=True,
        fuse_qkv_params=True,
        fuse_wgrad_accumulation=True,
        params_dtype=dtype,
        device=device,
    )


class Embedding(nn.Module):
    """Token and position embedding, and the head tied to the tokens' rows."""

    def __init__(self, config: Config, dtype, device):
        super().__init__()
        self.tokens = nn.Parameter(torch.empty(config.vocab, config.hidden, dtype=dtype, device=device))
        self.positions = nn.Parameter(torch.empty(config.sequence, 1, config.hidden, dtype=dtype, device=device))
        self.final_norm = LayerNorm1p(config.hidden, dtype, device)

    def forward(self, tokens_sb):
        """[s, b] int64 -> [s, b, hidden]."""
        return _EmbedTokens.apply(tokens_sb, self.tokens) + self.positions

    def loss(self, hidden, targets_sb):
        """Mean cross-entropy of [s, b, hidden] against [s, b] over this GPU's rows of the vocabulary, FP32."""
        logits = _TiedHead.apply(self.final_norm(hidden), self.tokens)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets_sb.flatten())


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
        rows = ctx.weight.shape[0]
        ctx.weight.main_grad.add_(torch.ops.aten.embedding_dense_backward(grad, tokens, rows, -1, False))
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
        weight.main_grad.add_(grad.flatten(0, 1).t() @ hidden.flatten(0, 1))
        return grad @ weight, None


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
    if parameter.grad is None:
        return
    parameter.main_grad.add_(parameter.grad)
    parameter.grad = None


@torch.no_grad()
def initialise(named_parameters, seed: int):
    """In place and seeded: matrices normal with INIT_STD, biases and (zero-centred) norms zero."""
    parameters = list(named_parameters)
    generator = torch.Generator(parameters[0][1].device).manual_seed(seed)
    for _, parameter in parameters:
        if parameter.ndim >= 2:
            parameter.normal_(0.0, INIT_STD, generator=generator)
        else:
            parameter.zero_()
