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
from common.training.optimizers.low_byte_format import BLOCK, decode, encode_, random_bits, rounded_to_bf16


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
