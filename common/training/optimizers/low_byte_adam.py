"""AdamW in 6 bytes a parameter: bf16 weights and gradients, two moments of 8 bits, no FP32 masters.

    adam = LowByteAdam(params, grads, hyperparameters)
    ... fill params
    adam.reset()
    adam.step()

A step changes a weight by less than the spacing of bf16, so weights are rounded stochastically: up with the probability
that makes the rounded weight right on average. Moments are E4M3 codes with an FP32 scale for each block of BLOCK
elements: the first moment, and the root of the second one, which needs half as many powers of two. They are rounded
stochastically too: a root that decays by 2.5 % a step (beta2 0.95) would never change by the nearest of 3 bits. A root
that is not zero never becomes zero, which would divide the first moment by eps.

The random bits are a hash of the step's count and of the element's tensor and place: a replay of a graph draws the
same bits as the eager step. Each block's arithmetic is FP32.
"""

import torch

from common.training.optimizers.adam import Masters
from common.training.optimizers.hyperparameters import Hyperparameters

# Elements that share a scale. A chunk of the kernels (fused_adam.TILES) has several.
BLOCK = 1024
LARGEST = 448.0  # of E4M3
SMALLEST_NORMAL = 2.0**-6
# The exponent's bias of FP32 less that of E4M3, in units of E4M3's last bit.
BIAS = (127 - 7) << 3
# Multipliers of the hash "lowbias32" (Chris Wellons, hash-prospector), and of what goes into it.
MIX = (0x7FEB352D, 0x846CA68B)
SPREAD = (0x9E3779B1, 0x85EBCA77)


class LowByteAdam(Masters):
    """AdamW on the parameters themselves. Nothing is read on the host.

    exp_avg, exp_avg_root: uint8, sign and E4M3 magnitude; exp_avg_scale, exp_avg_root_scale: FP32, one a block.

    Args:
        params: bf16 or FP32, on one device, dense. FP32 ones are not rounded.
        grads: Buffers of one dtype and of the parameters' shapes, at fixed addresses.
        hyperparameters: Of all parameters.
        reduce_norm: As for `Masters`.
    """

    def __init__(self, params, grads, hyperparameters: Hyperparameters, reduce_norm=None):
        params = [param.detach() for param in params]
        self.exp_avg_scale, self.exp_avg_root_scale = (
            [torch.zeros(-(-param.numel() // BLOCK), device=param.device) for param in params] for _ in range(2)
        )
        super().__init__(params, params, hyperparameters, grads, torch.uint8, reduce_norm)
        self.exp_avg_root = self.exp_avg_sq

    @property
    def states(self):
        """Lists of the tensors that a step updates, in the order of the kernels' table."""
        return (self.params, self.exp_avg, self.exp_avg_sq, self.exp_avg_scale, self.exp_avg_root_scale)

    def _make_kernels(self):
        from common.training.optimizers.low_byte_kernels import LowByteUpdate

        return LowByteUpdate(self.states, self.hyperparameters, self.grads)

    def _update(self, grads, scale, found_inf):
        if self._fused:
            super()._update(grads, scale, found_inf)
            return
        numbers, (beta1, beta2) = self.hyperparameters, self.hyperparameters.betas
        self.step_count.add_(1)
        factor = 1.0 / ((self.grad_norm + 1e-6) / self.clip).clamp(min=1.0)
        bias1, bias2 = (1.0 - torch.pow(beta, self.step_count.double()) for beta in (beta1, beta2))
        step_size, root_bias2 = (self.lr / bias1).float(), bias2.sqrt().float()
        for number, (tensors, grad) in enumerate(zip(zip(*self.states, strict=True), grads, strict=True)):
            param, first, root, *scales = tensors
            bits = random_bits(self.step_count, number, param)
            g = grad.float() * factor
            m, r = decode(first, scales[0]), decode(root, scales[1])
            m = m + (1.0 - beta1) * (g - m)
            v = beta2 * r * r + (1.0 - beta2) * g * g
            r = v.sqrt()
            p = param.float() * (1.0 - self.lr * numbers.weight_decay) - step_size * m / (r / root_bias2 + numbers.eps)
            param.copy_(p if param.dtype == torch.float32 else rounded_to_bf16(p, bits & 0xFFFF))
            encode_(first, scales[0], m, bits >> 16 & 0xFF)
            encode_(root, scales[1], r, bits >> 24)
            # Rounded to zero, though it is none.
            root.copy_(torch.where((r > 0) & (root == 0), 1, root))

    @torch.no_grad()
    def reset(self) -> None:
        """Start again, in place, from the present values of the parameters."""
        self._clear()
        torch._foreach_zero_([*self.exp_avg_scale, *self.exp_avg_root_scale])

    def named_state(self):
        """Yield (name, tensor) of moments, scales and the count of steps, for hashing."""
        yield "optimizer.step", self.step_count
        names = ("exp_avg", "exp_avg_root", "exp_avg_scale", "exp_avg_root_scale")
        for index, (_, *tensors) in enumerate(zip(*self.states, strict=True)):
            for name, tensor in zip(names, tensors, strict=True):
                yield f"optimizer.{index}.{name}", tensor


# ------------------------------------------------------------------------------------------------
# In plain torch; low_byte_kernels.py has the same in Triton


def random_bits(step_count, number: int, like):
    """int64 with 32 random bits for each element of `like`, tensor `number`, in a step."""
    key = _mixed(step_count.long() * SPREAD[0] + number * SPREAD[1])
    return _mixed(torch.arange(like.numel(), device=like.device).view(like.shape) ^ key)


def _mixed(x):
    x = x & 0xFFFFFFFF
    for multiplier in MIX:
        x = x ^ (x >> (16 if multiplier == MIX[0] else 15))
        x = (x * multiplier) & 0xFFFFFFFF
    return x ^ (x >> 16)


def rounded_to_bf16(x, bits):
    """FP32 x with the bits that bf16 has, up where `bits`, 0 to 0xFFFF, carry over. Inf and NaN stay."""
    rounded = (x.view(torch.int32) + bits.to(torch.int32)) & -0x10000
    return torch.where(x.isfinite(), rounded.view(torch.float32), x)


def decode(codes, scales):
    """FP32 values of uint8 codes."""
    magnitude = (codes & 0x7F).to(torch.int32)
    small = (magnitude < 8).to(torch.int32)
    value = ((magnitude + BIAS + small * 8) << 20).view(torch.float32) - small * SMALLEST_NORMAL
    value = torch.where(magnitude == 0x7F, torch.nan, value) * torch.where(codes > 0x7F, -1.0, 1.0)
    return (_in_blocks(value) * scales[:, None]).flatten()[: codes.numel()].view(codes.shape)


def encode_(codes, scales, values, bits):
    """Fill codes and scales from FP32 values; bits: 0 to 0xFF, random."""
    blocks = _in_blocks(values)
    torch.div(blocks.abs().amax(1), LARGEST, out=scales)
    scaled = torch.where(scales[:, None] == 0, 0.0, blocks.abs() / scales[:, None]).clamp(max=LARGEST)
    scaled = scaled.flatten()[: values.numel()].view(values.shape)
    # Below the normal numbers the spacing is that of the smallest ones.
    small = (scaled < SMALLEST_NORMAL).to(torch.int32)
    raw = (scaled + small * SMALLEST_NORMAL).view(torch.int32) + (bits.to(torch.int32) << 12) + 0x800
    magnitude = torch.where(scaled.isnan(), 0x7F, (raw >> 20) - BIAS - small * 8)
    codes.copy_(magnitude | torch.where(values < 0, 0x80, 0))


def _in_blocks(values):
    """[blocks, BLOCK] with zeros at the end."""
    flat = values.flatten()
    return torch.nn.functional.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)
