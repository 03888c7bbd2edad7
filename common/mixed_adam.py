"""AdamW for weights stored in any format: bf16 or FP32 gradients and moments, FP32 masters, and weights that whoever
knows their format writes, such as FP8 with a scale. Nothing is read on the host, unless clipping is asked to.

    adam = MixedAdam([Weight(p), Weight(fp8, fp8.quantize_)], grads, lr=..., moments=torch.bfloat16, ...)
    ... fill adam.masters
    adam.reset()                         the weights, from the masters
    adam.step()

Bytes a parameter beside its weight and gradient: 8 with bf16 moments, 12 with FP32 ones. On a GPU norm and update are
common/fused_adam.py's kernels; elsewhere torch's operators do the same arithmetic.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch


class Weight(NamedTuple):
    """parameter: what a model multiplies by. write(master): puts an FP32 master of its shape into it; None: a copy."""

    parameter: torch.Tensor
    write: Callable[[torch.Tensor], object] | None = None


class MixedAdam:
    """AdamW with decoupled weight decay, alike for all weights, and Megatron's clipping of the global norm.

    weights: on one device. grads: buffers of one dtype and the weights' shapes, at fixed addresses. moments: the dtype
    of theirs. lr, grad_norm (before clipping), step_count: FP32 0-d on the device. reduce_norm: makes grad_norm the
    norm over several ranks, in place. clip_on_host: the norm is read and gradients are scaled by a number, which no
    capture can hold.
    """

    def __init__(
        self,
        weights: Iterable[Weight],
        grads,
        lr: float,
        betas,
        eps: float,
        weight_decay: float,
        clip: float,
        moments: torch.dtype = torch.float32,
        reduce_norm=None,
        clip_on_host: bool = False,
    ):
        self.weights, self.grads = list(weights), list(grads)
        self._initial_lr, self._reduce_norm, self._clip_on_host = lr, reduce_norm, clip_on_host
        self._betas, self._eps, self._weight_decay = betas, eps, weight_decay
        device = self.grads[0].device
        self.masters = [torch.zeros(grad.shape, device=device) for grad in self.grads]
        self.exp_avg, self.exp_avg_sq = (
            [torch.zeros(grad.shape, dtype=moments, device=device) for grad in self.grads] for _ in range(2)
        )
        self.lr = torch.tensor(lr, device=device)
        self.step_count, self.grad_norm = (torch.zeros((), device=device) for _ in range(2))
        self._bound = clip
        self.clip = torch.full_like(self.grad_norm, torch.inf if clip_on_host else clip)
        self._one, self._zero = torch.ones_like(self.grad_norm), torch.zeros_like(self.grad_norm)
        # Those that the kernel writes: the rest is written after it.
        plain = all(weight.write is None for weight in self.weights)
        self._written_by_kernel, self._fused = plain and device.type == "cuda", None
        if device.type == "cuda":
            from common.fused_adam import FusedUpdate

            params = [weight.parameter for weight in self.weights] if plain else self.masters
            states = (params, self.masters, self.exp_avg, self.exp_avg_sq)
            self._fused = FusedUpdate(*states, betas, eps, weight_decay, self.grads)

    @torch.no_grad()
    def reset(self) -> None:
        """As after construction, with the masters' present values, which the weights get too."""
        torch._foreach_zero_([*self.exp_avg, *self.exp_avg_sq, self.step_count, self.grad_norm])
        self.lr.fill_(self._initial_lr)
        self._write_weights()

    @torch.no_grad()
    def step(self) -> None:
        """Clip, update masters and moments, and write the weights."""
        if self._fused:
            self._fused.norm(self.grads, out=self.grad_norm)
        else:
            norms = torch._foreach_norm(self.grads, 2, dtype=torch.float32)
            torch.linalg.vector_norm(torch.stack(norms), out=self.grad_norm)
        if self._reduce_norm:
            self._reduce_norm(self.grad_norm)
        if self._clip_on_host:
            norm = float(self.grad_norm) + 1e-6
            if norm > self._bound:
                torch._foreach_mul_(self.grads, self._bound / norm)
        if self._fused:
            scalars = (self.step_count, self.lr, self._one, self._zero, self.grad_norm, self.clip)
            self._fused.step(self.grads, *scalars)
        else:
            self._update()
        if not self._written_by_kernel:
            self._write_weights()

    def _update(self):
        """What the kernels of common/fused_adam.py compute, by torch."""
        beta1, beta2 = self._betas
        self.step_count.add_(1)
        factor = (self.clip / (self.grad_norm + 1e-6)).clamp(max=1.0)
        step_size = self.lr / (1 - beta1**self.step_count)
        decay, root = 1 - self.lr * self._weight_decay, (1 - beta2**self.step_count).sqrt()
        for grad, master, *moments in zip(self.grads, self.masters, self.exp_avg, self.exp_avg_sq, strict=True):
            g, m, v = grad.float() * factor, *(moment.float() for moment in moments)
            m = m + (1 - beta1) * (g - m)
            v = beta2 * v + (1 - beta2) * g * g
            master.copy_(master * decay - step_size * m / (v.sqrt() / root + self._eps))
            for moment, value in zip(moments, (m, v), strict=True):
                moment.copy_(value)

    def _write_weights(self):
        copied = [(w.parameter, master) for w, master in zip(self.weights, self.masters, strict=True) if not w.write]
        if copied:
            torch._foreach_copy_(*map(list, zip(*copied, strict=True)))
        for weight, master in zip(self.weights, self.masters, strict=True):
            if weight.write:
                weight.write(master)

    def named_state(self):
        """(name, tensor) of masters, moments and the count of steps, for hashing."""
        yield "optimizer.step", self.step_count
        for index, tensors in enumerate(zip(self.masters, self.exp_avg, self.exp_avg_sq, strict=True)):
            for key, tensor in zip(("master", "exp_avg", "exp_avg_sq"), tensors, strict=True):
                yield f"optimizer.{index}.{key}", tensor
