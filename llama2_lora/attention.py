"""Causal attention as two calls, forward and backward, so that a layer may compute q k v again between them.

q [s, heads, dim], k and v [s, kv, dim] are views of one tensor; with --cp there are more keys and values than queries
(llama2_lora/context.py). inputs: name -> static tensor, as of LeanStack. own, keys: int64, places in the window of the
queries and of the keys; None: both are all of it. The forward returns the output [s, heads dim] and what
the backward needs besides, a tuple; the backward returns gradients [heads, s, dim] and [kv, s, dim], strided.
"""

import math

import torch

from llama2_lora.config import Config


def split_qkv(config: Config, qkv):
    """[s, (heads + 2 kv) dim] -> views q, k, v."""
    c = config
    parts = qkv.split([c.q_width, c.kv_heads * c.head_dim, c.kv_heads * c.head_dim], 1)
    return [part.view(qkv.shape[0], -1, c.head_dim) for part in parts]


class PlainAttention:
    """Matrix products and a softmax in FP32, for any device: scores of all pairs, memory s^2 heads.

    inputs: of them positions, int64 [s], the place of a token in its document; a token sees its own document up to
    itself.
    """

    name = "plain"

    def __init__(self, config: Config, inputs, own=None, keys=None):
        self.config, self.positions = config, inputs["positions"]
        every = torch.arange(config.sequence, device=self.positions.device)
        self._own, self._keys = (every if own is None else own)[:, None], every if keys is None else keys

    def forward(self, q, k, v):
        scores = self._scores(q, k)
        log_sum = scores.logsumexp(-1, keepdim=True)
        probability = (scores - log_sum).exp()
        out = probability @ _heads_first(v)[:, None]
        return self._tokens_first(out).to(q.dtype), (log_sum,)

    def backward(self, grad, q, k, v, out, rest):
        (log_sum,) = rest
        c = self.config
        grad, out = (tensor.view(c.tokens, c.heads, c.head_dim) for tensor in (grad, out))
        # The row sums of grad_probability * probability, from the output as it was rounded.
        row = (grad.float() * out.float()).sum(-1).t().reshape(c.kv_heads, -1, c.tokens, 1)
        probability = (self._scores(q, k) - log_sum).exp()
        grad = self._grouped(grad)
        grad_v = (probability.transpose(-1, -2) @ grad).sum(1)
        grad_scores = probability * (grad @ _heads_first(v)[:, None].transpose(-1, -2) - row) / math.sqrt(c.head_dim)
        grad_q = (grad_scores @ _heads_first(k)[:, None]).flatten(0, 1)
        grad_k = (grad_scores.transpose(-1, -2) @ self._grouped(q)).sum(1)
        return grad_q, grad_k, grad_v

    def _grouped(self, tensor):
        """[s, heads, dim] -> FP32 [kv, heads / kv, s, dim]."""
        c = self.config
        return _heads_first(tensor).view(c.kv_heads, -1, c.tokens, c.head_dim)

    def _scores(self, q, k):
        scores = self._grouped(q) @ _heads_first(k)[:, None].transpose(-1, -2) / math.sqrt(self.config.head_dim)
        start = self._own - self.positions[:, None]
        hidden = (self._keys > self._own) | (self._keys < start)
        return scores.masked_fill(hidden, -math.inf)

    def _tokens_first(self, out):
        return out.flatten(0, 1).transpose(0, 1).reshape(self.config.tokens, -1)


def _heads_first(tensor):
    return tensor.float().transpose(0, 1)


class CudnnAttention:
    """cuDNN's fused attention over the whole window: one causal sequence, grouped heads. CUDA, bf16."""

    name = "cudnn"

    def __init__(self, config: Config, inputs):
        self.config = config

    def forward(self, q, k, v):
        q, k, v = (tensor.transpose(0, 1)[None] for tensor in (q, k, v))
        # With the logarithms of the sums, no dropout, causal, no debug mask.
        result = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True, False)
        out = result[0]
        return out.transpose(1, 2).reshape(out.shape[2], -1), result[1:8]

    def backward(self, grad, q, k, v, out, rest):
        log_sum, cum_q, cum_k, max_q, max_k, seed, offset = rest
        q, k, v = (tensor.transpose(0, 1)[None] for tensor in (q, k, v))
        grad, out = (t.view(1, -1, self.config.heads, self.config.head_dim).transpose(1, 2) for t in (grad, out))
        grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            grad, q, k, v, out, log_sum, seed, offset, None, cum_q, cum_k, max_q, max_k, 0.0, True
        )
        return [each[0] for each in grads]


class FlashAttention:
    """Flash attention of torch over documents of changing lengths: their bounds are read on the device. CUDA, bf16.

    inputs: of them cu_seqlens, int32 [documents + 1], padded with s, so that a captured launch serves every packing;
    cu_seqlens_k: the same of the keys, where they are others. Of a document's queries the last one sees all its keys.
    """

    name = "flash"

    def __init__(self, config: Config, inputs, own=None, keys=None):
        self.config, bounds = config, inputs["cu_seqlens"]
        self._documents = bounds, inputs.get("cu_seqlens_k", bounds), config.tokens, config.sequence

    def forward(self, q, k, v):
        # No dropout, causal, no debug mask.
        out, *rest = torch.ops.aten._flash_attention_forward(q, k, v, *self._documents, 0.0, True, False)
        return out.view(self.config.tokens, -1), tuple(rest[:3])

    def backward(self, grad, q, k, v, out, rest):
        log_sum, state, unused = rest
        grad, out = (tensor.view(-1, self.config.heads, self.config.head_dim) for tensor in (grad, out))
        grads = torch.ops.aten._flash_attention_backward(
            grad, q, k, v, out, log_sum, *self._documents, 0.0, True, state, unused
        )
        return [each.transpose(0, 1) for each in grads]


def attention_for(config: Config, device):
    """The class for a device: on a GPU cuDNN's for whole windows, which is the faster one, flash for packed ones and
    where ranks share a window.

    cuDNN's backward is not deterministic (torch's own selection leaves it out under deterministic algorithms, in
    sdp_utils.cpp). Where these are asked for, as in round 0, flash attention takes its place.
    """
    if device.type == "cpu":
        return PlainAttention
    if config.documents == "whole" and config.cp == 1 and not torch.are_deterministic_algorithms_enabled():
        return CudnnAttention
    return FlashAttention
