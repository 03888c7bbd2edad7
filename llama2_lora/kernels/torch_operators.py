"""The operators that handwritten layers call, in plain PyTorch; triton_operators.py has them in Triton.

All work on [tokens, width] tensors of the stack's main dtype (bf16; FP32 in tests) and write into tensors that are
passed in, so that a layer needs no memory of its own. Arithmetic is FP32 inside. The operand of a frozen weight's GEMM
is rounded to FP8 at its slot's scale, and its amax recorded; without FP8 it stays in the main dtype. Dropout draws from
a hash of (position, key, step), so recomputed tensors and replays see the mask of the forward pass.
"""

import functools
import math

import torch

from llama2_lora.config import Config
from llama2_lora.kernels.scaling import Formats, Scaling, Slot

_GOLDEN, _MASK = 0x9E3779B1, 0xFFFFFFFF


def dropout_key(layer: int, adapter: int) -> int:
    """The key of one adapter's mask, 31 bits. adapter: 0 for q k v, 1 for the projection."""
    return ((2 * layer + adapter + 1) * _GOLDEN) & 0x7FFFFFFF


def rope_angles(config: Config):
    """FP64 [sequence, head_dim / 2] on the host."""
    frequency = config.rope_theta ** (-torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim)
    return torch.arange(config.sequence, dtype=torch.float64)[:, None] * frequency


class Operators:
    """Tables, the step counter of the masks, and the scales of operands, for both implementations.

    step: int32 [1] on the device, counted up once a step by the stack of layers.
    """

    def __init__(self, config: Config, formats: Formats, scaling: Scaling, device):
        self.config, self.formats, self.scaling, self.device = config, formats, scaling, device
        self.step = torch.zeros(1, dtype=torch.int32, device=device)
        angles = rope_angles(config)
        self.cos, self.sin = angles.cos().float().to(device), angles.sin().float().to(device)
        # An element is dropped where 24 bits of its hash are below this; the others are scaled up.
        self.threshold = int(config.dropout * 2**24)
        self.keep_scale = 1.0 / (1.0 - config.dropout)
        self.one, self.unused = torch.ones(1, device=device), torch.zeros(1, device=device)

    def _written(self, tensor, slot: Slot):
        """(tensor, scale, amax, largest) that an operator writes an operand with; None where there is none."""
        if tensor is None:
            return None
        if self.scaling.is_used:
            return tensor, slot.scale, slot.amax, slot.largest
        return tensor, self.one, self.unused, math.inf


def writes_operand(implementation):
    """An operator with keywords `operand` and `slot`, from one that takes `written`, of `Operators._written`."""

    @functools.wraps(implementation)
    def operator(self, *tensors, operand=None, slot=None, **options):
        return implementation(self, *tensors, written=self._written(operand, slot), **options)

    return operator


class TorchOperators(Operators):
    """Plain PyTorch, for any device. FP8 GEMMs are computed in FP32 on the FP8 values."""

    def __init__(self, config, formats, scaling, device):
        super().__init__(config, formats, scaling, device)
        widest = max(config.hidden, config.q_width)
        self._positions = torch.arange(config.tokens * widest, dtype=torch.int64, device=device) * _GOLDEN & _MASK

    def _write(self, written, value):
        """value FP32 -> an operand's tensor; nothing to do if `written` is None."""
        if written is None:
            return
        tensor, scale, amax, largest = written
        torch.maximum(amax, value.abs().amax(), out=amax)
        if tensor is not None:
            tensor.copy_((value * scale).clamp(-largest, largest))

    def _dropout(self, value, key):
        """murmur3's finaliser over position and key; 24 bits of it are compared."""
        h = self._positions[: value.numel()] ^ ((self.step.to(torch.int64) ^ key) & _MASK)
        h = (h ^ (h >> 16)) * 0x85EBCA6B & _MASK
        h = (h ^ (h >> 13)) * 0xC2B2AE35 & _MASK
        h = h ^ (h >> 16)
        return value * ((h >> 8) >= self.threshold).view(value.shape) * self.keep_scale

    @writes_operand
    def norm(self, x, gain, written, add=None, total=None, dropped=None, key=0, plain=None):
        """RMSNorm of x, or of x + add, which then goes to `total`: as operand, dropped out, or as it is.

        x, add, total, dropped, plain [s, h]; gain [h]. The norm is rounded to the main dtype before all three uses.
        """
        value = x.float()
        if add is not None:
            total.copy_(value + add.float())
            value = total.float()
        normed = (value * self._inverse_rms(value) * gain.float()).to(self.formats.main)
        if plain is not None:
            plain.copy_(normed)
        self._write(written, normed.float())
        if dropped is not None:
            dropped.copy_(self._dropout(normed.float(), key))

    def _inverse_rms(self, value):
        return (value.square().mean(1, keepdim=True) + self.config.norm_eps).rsqrt()

    @writes_operand
    def norm_backward(self, grad, x, gain, out, written, through_dropout=None, key=0, residual=None):
        """out = gradient of RMSNorm's input x [s, h], plus `residual`, which may be `out` itself.

        The norm's gradient is grad + dropout(through_dropout) with the mask of `key`. The result is written as an
        operand, too. Gains are frozen and have no gradient.
        """
        value, grad = x.float(), grad.float()
        if through_dropout is not None:
            grad = grad + self._dropout(through_dropout.float(), key)
        inverse_rms = self._inverse_rms(value)
        normed, grad = value * inverse_rms, grad * gain.float()
        result = (grad - normed * (grad * normed).mean(1, keepdim=True)) * inverse_rms
        if residual is not None:
            result = result + residual.float()
        out.copy_(result)
        self._write(written, out.float())

    @writes_operand
    def quantize(self, x, written, dropped=None, key=0):
        """x [s, n] as operand and dropped out."""
        self._write(written, x.float())
        if dropped is not None:
            dropped.copy_(self._dropout(x.float(), key))

    def add_dropout_gradient(self, grad, through_dropout, key):
        """grad += dropout(through_dropout) with the mask of `key`; both [s, n]."""
        grad.copy_(grad.float() + self._dropout(through_dropout.float(), key))

    def rope(self, qkv, positions):
        """q and k of qkv [s, (heads + 2 kv) dim] turned in place. positions: int64 [s], each below `sequence`."""
        c = self.config
        part = qkv[:, : c.q_width + c.kv_width]
        part.copy_(self._turned(part.float().view(c.tokens, -1, c.head_dim), positions, 1.0).view(part.shape))

    def _turned(self, rows, positions, sign):
        """[s, heads, dim] FP32, halves as pairs (Hugging Face's order)."""
        low, high = rows.chunk(2, -1)
        cos, sin = self.cos[positions][:, None], self.sin[positions][:, None] * sign
        return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)

    @writes_operand
    def rope_backward(self, grad_q, grad_k, grad_v, positions, out, written):
        """Strided gradients [heads, s, dim] -> out and operand [s, (heads + 2 kv) dim], q and k turned back."""
        rows = [grad.transpose(0, 1).float() for grad in (grad_q, grad_k, grad_v)]
        rows[:2] = [self._turned(row, positions, -1.0) for row in rows[:2]]
        out.copy_(torch.cat([row.reshape(out.shape[0], -1) for row in rows], 1))
        self._write(written, out.float())

    @writes_operand
    def swiglu(self, fc1, written, stored_slot=None, stored=None):
        """operand = silu(gate) up [s, f] of fc1 [s, 2 f], which has the gate first.

        stored_slot: fc1 is handed on in FP8, so its amax is recorded. stored: FP8 [s, 2 f] to keep it in, or None.
        """
        gate, up = fc1.float().chunk(2, 1)
        value = gate / (1 + (-gate).exp()) * up
        self._write(written, value.to(self.formats.main).float())
        if stored_slot:
            self._write((stored, stored_slot.scale, stored_slot.amax, stored_slot.largest), fc1.float())

    @writes_operand
    def swiglu_backward(self, fc1, grad, written, stored_slot=None):
        """operand [s, 2 f] = gradient of fc1, from grad [s, f] of swiglu's output.

        stored_slot: fc1 is handed on in FP8. A kept fc1 is scaled back; a recomputed one is rounded first, so that
        gradients are the same bits whichever layers keep it.
        """
        value = fc1.float()
        if stored_slot:
            if fc1.dtype != torch.float8_e4m3fn:
                largest = stored_slot.largest
                value = (value * stored_slot.scale).clamp(-largest, largest).to(torch.float8_e4m3fn).float()
            value = value * stored_slot.inverse
        (gate, up), grad = value.chunk(2, 1), grad.float()
        sigmoid = 1 / (1 + (-gate).exp())
        self._write(written, torch.cat((grad * up * sigmoid * (1 + gate * (1 - sigmoid)), grad * gate * sigmoid), 1))

    def cross_entropy(self, logits, targets, weights, losses):
        """losses [s] = -weight log p(target), FP32; logits [s, V] become the gradient of their sum.

        weights: FP32 [s], each token's share of the mean.
        """
        log_p = logits.float().log_softmax(1)
        losses.copy_(-log_p.gather(1, targets[:, None])[:, 0] * weights)
        gradient = log_p.exp()
        gradient.scatter_add_(1, targets[:, None], torch.full_like(weights, -1.0)[:, None])
        logits.copy_(gradient * weights[:, None])

    def transpose(self, weight, out):
        """out [in, out] = weight [out, in]^T."""
        out.copy_(weight.t())

    def gemm(self, a, b, scale_a, scale_b, out, fast):
        """out [s, n] = (scale_a a [s, k]) (scale_b b [k, n]), scales FP32 [1]; b is the transpose of what is stored.

        fast: see the Triton operators.
        """
        if a.dtype == out.dtype:
            torch.mm(a, b, out=out)
        else:
            out.copy_((a.float() * scale_a) @ (b.float() * scale_b))
