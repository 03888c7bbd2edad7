"""Causal attention as two calls, forward and backward, so that a layer may compute q k v again between them.

q [s, heads, dim], k and v [s, kv, dim] are views of one tensor, which `split` makes; with --cp there are more keys and
values than queries (llama2_lora/layers/context.py). inputs: name -> static tensor, as in HandwrittenStack. queries,
keys: int64, places in the window of the queries and of the keys; None: both are all of it. The forward returns the
output [s, heads dim] and a tuple of other tensors for the backward; the backward returns gradients [heads, s, dim] and
[kv, s, dim], strided.
"""

import torch
import torch.nn.functional as F

from llama2_lora.config import Config


class Attention:
    def __init__(self, config: Config, inputs=None):
        self.config = config

    def split(self, qkv):
        """q, k, v as forward and backward take them: views of [s, (heads + 2 kv) dim]."""
        c = self.config
        parts = qkv.split([c.q_width, c.kv_width, c.kv_width], 1)
        return [part.view(qkv.shape[0], -1, c.head_dim) for part in parts]


class PlainAttention(Attention):
    """torch's scaled_dot_product_attention in FP32 with a mask of all pairs, for any device.

    inputs: it reads positions, int64 [s], the place of a token in its document; a token sees its own document up to
    itself. The backward computes the forward again under autograd.
    """

    def __init__(self, config: Config, inputs, queries=None, keys=None):
        super().__init__(config)
        self.positions = inputs["positions"]
        every = torch.arange(config.sequence, device=self.positions.device)
        self._own, self._keys = (every if queries is None else queries)[:, None], every if keys is None else keys

    def _attend(self, *heads_first):
        visible = (self._keys <= self._own) & (self._keys >= self._own - self.positions[:, None])
        q, k, v = (tensor[None] for tensor in heads_first)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=True)[0]

    def forward(self, q, k, v):
        out = self._attend(*(tensor.float().transpose(0, 1) for tensor in (q, k, v)))
        return out.transpose(0, 1).flatten(1).to(q.dtype), ()

    def backward(self, grad, q, k, v, out, rest):
        with torch.enable_grad():
            leaves = [tensor.detach().float().transpose(0, 1).requires_grad_() for tensor in (q, k, v)]
            again = self._attend(*leaves)
        return torch.autograd.grad(again, leaves, grad.view(q.shape).float().transpose(0, 1))


class CudnnAttention(Attention):
    """cuDNN's fused attention over the whole window: one causal sequence, grouped heads. CUDA, bf16.

    q, k, v are [1, heads, s, dim] here, as cuDNN takes them.
    """

    # The overload itself: looking it up by its arguments, as calls of the packet do, costs the host 4 us.
    _backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default

    def split(self, qkv):
        return [tensor.transpose(0, 1)[None] for tensor in super().split(qkv)]

    def forward(self, q, k, v):
        # With the logarithms of the sums, no dropout, causal, no debug mask.
        result = torch._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True, False)
        out = result[0]
        return out.transpose(1, 2).reshape(out.shape[2], -1), result[1:8]

    def backward(self, grad, q, k, v, out, rest):
        log_sum, cum_q, cum_k, max_q, max_k, seed, offset = rest
        grad, out = (t.view(1, -1, self.config.heads, self.config.head_dim).transpose(1, 2) for t in (grad, out))
        grads = self._backward(grad, q, k, v, out, log_sum, seed, offset, None, cum_q, cum_k, max_q, max_k, 0.0, True)
        return [gradient[0] for gradient in grads]


class FlashAttention(Attention):
    """Flash attention of torch over documents of changing lengths: their bounds are read on the device. CUDA, bf16.

    inputs: of them cu_seqlens, int32 [documents + 1], padded with s, so that a captured launch serves every packing;
    cu_seqlens_k: the same of the keys, where they are others. Of a document's queries the last one sees all its keys.
    """

    def __init__(self, config: Config, inputs, queries=None, keys=None):
        super().__init__(config)
        bounds = inputs["cu_seqlens"]
        self._documents = bounds, inputs.get("cu_seqlens_k", bounds), config.tokens, config.sequence

    def forward(self, q, k, v):
        # No dropout, causal, no debug mask.
        out, *rest = torch.ops.aten._flash_attention_forward.default(q, k, v, *self._documents, 0.0, True, False)
        return out.view(self.config.tokens, -1), tuple(rest[:3])

    def backward(self, grad, q, k, v, out, rest):
        log_sum, state, unused = rest
        grad, out = (tensor.view(-1, self.config.heads, self.config.head_dim) for tensor in (grad, out))
        grads = torch.ops.aten._flash_attention_backward.default(
            grad, q, k, v, out, log_sum, *self._documents, 0.0, True, state, unused
        )
        return [gradient.transpose(0, 1) for gradient in grads]


def attention_for(config: Config, device):
    """The class for a device: on a GPU cuDNN's for whole windows, which is the faster one, flash for packed ones and
    where ranks share a window.

    cuDNN's backward is not deterministic (torch's own selection leaves it out under deterministic algorithms, in
    sdp_utils.cpp). Where these are asked for, as for parity, flash attention takes its place.
    """
    if device.type == "cpu":
        return PlainAttention
    if config.documents == "whole" and config.cp == 1 and not torch.are_deterministic_algorithms_enabled():
        return CudnnAttention
    return FlashAttention
