"""The operators that lean layers are made of, in plain PyTorch; llama2_lora/kernels.py has them in Triton.

All work on [tokens, width] tensors of the stack's main dtype (bf16; FP32 in tests) and write into tensors that are
passed in, so that a layer needs no memory of its own. Arithmetic is FP32 inside. What a GEMM of a frozen weight reads
is written as an operand: rounded to FP8 at its slot's scale, with the amax recorded where it is quantised, or in the
main dtype as it is. Dropout draws from a hash of (position, key, step), so that what is recomputed, and what a graph
replays, sees the mask of the forward pass.
"""

import contextlib
import math

import torch

from common import nvfp4
from llama2_lora.config import Config
from llama2_lora.scaling import Formats, Scaling, Slot, scale_of

_GOLDEN, _MASK = 0x9E3779B1, 0xFFFFFFFF


def dropout_key(layer: int, adapter: int) -> int:
    """The key of one adapter's mask, 31 bits. adapter: 0 for q k v, 1 for the projection."""
    return ((2 * layer + adapter + 1) * _GOLDEN) & 0x7FFFFFFF


def rope_angles(config: Config):
    """FP64 [sequence, head_dim / 2] on the host."""
    frequency = config.rope_theta ** (-torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim)
    return torch.arange(config.sequence, dtype=torch.float64)[:, None] * frequency


class Operators:
    """What both implementations share: tables, the step counter of the masks, and how operands are written.

    step: int32 [1] on the device, counted up once a step by who trains.
    A subclass has the same operators with an underscore, which take for an operand (tensor, scale, amax, largest) or
    None, and those that write no operand.
    """

    def __init__(self, config: Config, formats: Formats, scaling: Scaling, device):
        self.config, self.formats, self.scaling, self.device = config, formats, scaling, device
        self.step = torch.zeros(1, dtype=torch.int32, device=device)
        angles = rope_angles(config)
        self.cos, self.sin = angles.cos().float().to(device), angles.sin().float().to(device)
        # An element is dropped where 24 bits of its hash are below this; what is kept is scaled up.
        self.threshold = int(config.dropout * 2**24)
        self.keep_scale = 1.0 / (1.0 - config.dropout)
        self.one, self.unused = torch.ones(1, device=device), torch.zeros(1, device=device)
        widest = max(config.hidden, config.q_width, config.qkv_width, 2 * config.ffn)
        two_passes = scaling.kind == "current"
        self._unscaled = torch.empty(config.tokens * widest if two_passes else 0, dtype=formats.main, device=device)

    @contextlib.contextmanager
    def no_dropout(self):
        """Within it all elements are kept. Not for captures."""
        saved = self.threshold, self.keep_scale
        self.threshold, self.keep_scale = 0, 1.0
        try:
            yield
        finally:
            self.threshold, self.keep_scale = saved

    def _begin(self, tensor, slot: Slot):
        """What an operator writes an operand to, and with which scale; amaxes are recorded on the way.

        Current scaling takes two passes: the first writes the main dtype and finds the amax.
        """
        if tensor is None:
            return None
        if self.scaling.kind == "delayed":
            return tensor, slot.scale, slot.amax, slot.largest
        if self.scaling.kind == "current":
            slot.amax.zero_()
            unscaled = self._unscaled[: tensor.numel()].view(tensor.shape)
            return unscaled, self.one, slot.amax, math.inf
        return tensor, self.one, self.unused, math.inf

    def _finish(self, tensor, slot: Slot):
        if tensor is None:
            return
        if self.scaling.kind == "current":
            slot.scale.copy_(scale_of(slot.amax, slot.largest, self.one))
            torch.reciprocal(slot.scale, out=slot.inverse)
            unscaled = self._unscaled[: tensor.numel()].view(tensor.shape)
            self._cast(unscaled, (tensor, slot.scale, self.unused, slot.largest))
        elif self.config.precision == "nvfp4_emulated":
            nvfp4.emulate(tensor, out=tensor)

    # -- operators -------------------------------------------------------------------------------

    def norm(self, x, gain, add=None, total=None, operand=None, slot=None, dropped=None, key=0, plain=None):
        """RMSNorm of x, or of x + add, which then goes to `total`: as operand, dropped out, or as it is.

        x, add, total, dropped, plain [s, h]; gain [h]. The norm is rounded to the main dtype before all three uses.
        """
        written = self._begin(operand, slot)
        self._norm(x, gain, add, total, written, dropped, key, plain)
        self._finish(operand, slot)

    def norm_backward(self, grad, x, gain, out, through_dropout=None, key=0, residual=None, operand=None, slot=None):
        """out = gradient of RMSNorm's input x [s, h], plus `residual`, which may be `out` itself.

        The norm's gradient is grad + dropout(through_dropout), the mask that of `key`. The result is written as an
        operand, too. Gains are frozen and have no gradient.
        """
        written = self._begin(operand, slot)
        self._norm_backward(grad, x, gain, out, through_dropout, key, residual, written)
        self._finish(operand, slot)

    def quantize(self, x, operand=None, slot=None, dropped=None, key=0):
        """x [s, n] as operand and dropped out."""
        written = self._begin(operand, slot)
        if written or dropped is not None:
            self._quantize(x, written, dropped, key)
        self._finish(operand, slot)

    def rope_backward(self, grad_q, grad_k, grad_v, positions, out, operand, slot):
        """Strided gradients [heads, s, dim] -> out and operand [s, (heads + 2 kv) dim], q and k turned back."""
        written = self._begin(operand, slot)
        self._rope_backward(grad_q, grad_k, grad_v, positions, out, written)
        self._finish(operand, slot)

    def swiglu(self, fc1, operand, slot, stored_slot=None, stored=None):
        """operand = silu(gate) up [s, f] of fc1 [s, 2 f], which has the gate first.

        stored_slot: fc1 is handed on in FP8, so its amax is recorded; `stored`: to be kept there, FP8 [s, 2 f].
        """
        written = self._begin(operand, slot)
        kept = stored_slot and (stored, stored_slot.scale, stored_slot.amax, stored_slot.largest)
        self._swiglu(fc1, written, kept)
        self._finish(operand, slot)

    def swiglu_backward(self, fc1, grad, operand, slot, stored_slot=None):
        """operand [s, 2 f] = gradient of fc1, from grad [s, f] of swiglu's output.

        stored_slot: fc1 is handed on in FP8. What was kept is scaled back; what was computed again is rounded first,
        so that gradients are the same bits whichever layers keep it.
        """
        written = self._begin(operand, slot)
        self._swiglu_backward(fc1, grad, written, stored_slot)
        self._finish(operand, slot)


class TorchOperators(Operators):
    """Plain PyTorch, for any device. FP8 GEMMs are computed in FP32 on the FP8 values."""

    name = "torch"

    def __init__(self, config, formats, scaling, device):
        super().__init__(config, formats, scaling, device)
        widest = max(config.hidden, config.q_width)
        self._positions = torch.arange(config.tokens * widest, dtype=torch.int64, device=device) * _GOLDEN & _MASK

    def _write(self, written, value):
        """value FP32 -> an operand's tensor."""
        tensor, scale, amax, largest = written
        torch.maximum(amax, value.abs().amax(), out=amax)
        if tensor is not None:
            tensor.copy_((value * scale).clamp(-largest, largest))

    def _cast(self, unscaled, written):
        self._write(written, unscaled.float())

    def _dropout(self, value, key):
        """murmur3's finaliser over position and key; 24 bits of it are compared."""
        h = self._positions[: value.numel()] ^ ((self.step.to(torch.int64) ^ key) & _MASK)
        h = (h ^ (h >> 16)) * 0x85EBCA6B & _MASK
        h = (h ^ (h >> 13)) * 0xC2B2AE35 & _MASK
        h = h ^ (h >> 16)
        return value * ((h >> 8) >= self.threshold).view(value.shape) * self.keep_scale

    def _norm(self, x, gain, add, total, written, dropped, key, plain):
        value = x.float()
        if add is not None:
            total.copy_(value + add.float())
            value = total.float()
        normed = value * self._inverse_rms(value) * gain.float()
        normed = normed.to(self.formats.main)
        if plain is not None:
            plain.copy_(normed)
        if written:
            self._write(written, normed.float())
        if dropped is not None:
            dropped.copy_(self._dropout(normed.float(), key))

    def _inverse_rms(self, value):
        return (value.square().mean(1, keepdim=True) + self.config.norm_eps).rsqrt()

    def _norm_backward(self, grad, x, gain, out, through_dropout, key, residual, written):
        value, grad = x.float(), grad.float()
        if through_dropout is not None:
            grad = grad + self._dropout(through_dropout.float(), key)
        inverse_rms = self._inverse_rms(value)
        normed, grad = value * inverse_rms, grad * gain.float()
        result = (grad - normed * (grad * normed).mean(1, keepdim=True)) * inverse_rms
        if residual is not None:
            result = result + residual.float()
        out.copy_(result)
        if written:
            self._write(written, out.float())

    def _quantize(self, x, written, dropped, key):
        if written:
            self._write(written, x.float())
        if dropped is not None:
            dropped.copy_(self._dropout(x.float(), key))

    def add_dropout_gradient(self, grad, through_dropout, key):
        """grad += dropout(through_dropout), the mask that of `key`; both [s, n]."""
        grad.copy_(grad.float() + self._dropout(through_dropout.float(), key))

    def rope(self, qkv, positions):
        """q and k of qkv [s, (heads + 2 kv) dim] turned in place. positions: int64 [s], each below `sequence`."""
        c = self.config
        part = qkv[:, : (c.heads + c.kv_heads) * c.head_dim]
        part.copy_(self._turned(part.float().view(c.tokens, -1, c.head_dim), positions, 1.0).view(part.shape))

    def _turned(self, rows, positions, sign):
        """[s, heads, dim] FP32, halves as pairs (Hugging Face's order)."""
        low, high = rows.chunk(2, -1)
        cos, sin = self.cos[positions][:, None], self.sin[positions][:, None] * sign
        return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)

    def _rope_backward(self, grad_q, grad_k, grad_v, positions, out, written):
        rows = [grad.transpose(0, 1).float() for grad in (grad_q, grad_k, grad_v)]
        rows[:2] = [self._turned(row, positions, -1.0) for row in rows[:2]]
        out.copy_(torch.cat([row.reshape(out.shape[0], -1) for row in rows], 1))
        self._write(written, out.float())

    def _swiglu(self, fc1, written, kept):
        gate, up = fc1.float().chunk(2, 1)
        value = gate / (1 + (-gate).exp()) * up
        self._write(written, value.to(self.formats.main).float())
        if kept:
            self._write(kept, fc1.float())

    def _swiglu_backward(self, fc1, grad, written, stored_slot):
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
        """out [s, n] = (scale_a a [s, k]) (scale_b b [n, k])^T, scales FP32 [1]. fast: see the Triton operators."""
        if a.dtype == out.dtype:
            torch.mm(a, b.t(), out=out)
        else:
            out.copy_((a.float() * scale_a) @ (b.float() * scale_b).t())
