"""AdamW on FP32 masters of parameters in any format, with clipping, loss scaling or both.

    adam = Adam(params, Hyperparameters(lr=1e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1), main_grads)
    adam.step()

Eager and graphed steps share this code: the learning rate, the count of steps, the clip factor, the loss scale and
whether a step overflowed are numbers on the device, and nothing calls `.item()` unless clip_on_host asks for it.
"""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from common.optimizers.hyperparameters import Hyperparameters

if TYPE_CHECKING:
    from common.optimizers.loss_scaler import LossScaler


class Adam:
    """AdamW on FP32 masters. Bytes a parameter beside parameter and gradient: 12, or 8 with 16-bit moments.

    lr, step_count, grad_norm (before clipping) and clip are FP32 0-d tensors on the device. On a GPU norm and update
    are two passes over memory, by the kernels of fused_adam.py; elsewhere they are torch's, which leave the clipped
    gradients in `grads`.

    With a scaler gradients are of the scaled loss, and an overflow skips the step: neither masters nor moments change,
    and it does not count in the bias correction. grad_norm is then that of the unscaled gradients, not finite in a
    skipped step.

    Args:
        params: Tensors that each step fills with the masters, of one dtype, dense.
        hyperparameters: Of all parameters.
        grads: Buffers of one dtype and of the parameters' shapes, at fixed addresses, which all steps apply. Empty:
            each step brings gradients with the parameters' strides.
        writes: For each parameter write(master), which puts a master into it, such as FP8 with a scale, or None: the
            master is copied. Where it is given the caller fills `masters`, and `reset` writes the parameters; else the
            masters are FP32 copies of the parameters.
        moments: Dtype of the moments.
        reduce_norm: Called in a step with grad_norm; makes it the norm over several ranks, in place.
        scaler: Of the loss.
        clip_on_host: Read the norm and scale the gradients by a number, which no graph can capture.
    """

    def __init__(  # noqa: PLR0913
        self,
        params,
        hyperparameters: Hyperparameters,
        grads=(),
        *,
        writes: Sequence[Callable[[torch.Tensor], object] | None] | None = None,
        moments: torch.dtype = torch.float32,
        reduce_norm=None,
        scaler: "LossScaler | None" = None,
        clip_on_host: bool = False,
    ):
        self.params, self.grads, self.scaler = list(params), list(grads), scaler
        self.hyperparameters, self._reduce_norm, self._fused = hyperparameters, reduce_norm, None
        self._writes, self._clip_on_host = writes, clip_on_host
        if writes is None:
            self.masters = [param.detach().float().clone() for param in self.params]
        else:
            self.masters = [torch.zeros(grad.shape, device=grad.device) for grad in self.grads]
        # The update writes the parameters itself if all are plain tensors.
        self._is_plain = not any(writes or ())
        self._written = self.params if self._is_plain else self.masters
        self.exp_avg, self.exp_avg_sq = (
            [torch.zeros_like(master, dtype=moments) for master in self.masters] for _ in range(2)
        )
        device = self.masters[0].device
        clip = math.inf if clip_on_host else hyperparameters.clip
        self.lr, self.clip = (torch.tensor(x, device=device) for x in (hyperparameters.lr, clip))
        self.step_count, self.grad_norm, self._found_inf = (torch.zeros((), device=device) for _ in range(3))
        # Of a loss without a scale, no step of which is skipped.
        self._scale = torch.ones((), device=device)
        if scaler is not None:
            self._scale, self._found_inf = scaler.scale, scaler.found_inf
        if device.type == "cuda":
            # Triton is imported where there is a GPU.
            from common.optimizers.fused_adam import FusedUpdate

            states = (self._written, self.masters, self.exp_avg, self.exp_avg_sq)
            self._fused = FusedUpdate(states, hyperparameters, self.grads)

    @torch.no_grad()
    def step(self, grads=None) -> None:
        """Clip the gradients, update masters and moments, and write the parameters; then update the loss scale.

        grads: where there are no buffers. Nothing but the loss scale changes if one of them is not finite.
        """
        grads = self.grads if grads is None else grads
        self._fill_norm(grads)
        if self.scaler is not None:
            # The norm is not finite if a gradient is not.
            self._found_inf.copy_(torch.isfinite(self.grad_norm).logical_not_())
            self.grad_norm.div_(self._scale)
        if self._clip_on_host:
            norm = float(self.grad_norm) + 1e-6
            if norm > self.hyperparameters.clip:
                torch._foreach_mul_(grads, self.hyperparameters.clip / norm)
        self._update(grads)
        if not self._is_plain:
            self._write()
        if self.scaler is not None:
            self.scaler.update()

    def _fill_norm(self, grads):
        if self._fused:
            self._fused.norm(grads, out=self.grad_norm)
        else:
            norms = torch._foreach_norm(grads, 2, dtype=torch.float32)
            torch.linalg.vector_norm(torch.stack(norms), out=self.grad_norm)
        if self._reduce_norm:
            self._reduce_norm(self.grad_norm)

    def _update(self, grads):
        """Divide the gradients by the scale, clip and apply them, and count the step; nothing if found_inf is 1."""
        scale, found_inf = self._scale, self._found_inf
        if self._fused:
            self._fused.step(grads, (self.step_count, self.lr, scale, found_inf, self.grad_norm, self.clip))
            return
        self.step_count.add_(1 - found_inf)
        numbers = self.hyperparameters
        # torch's kernel wants FP32 throughout; of FP32 tensors these are no copies.
        grads, first, second = ([t.float() for t in tensors] for tensors in (grads, self.exp_avg, self.exp_avg_sq))
        torch._fused_adamw_(
            self.masters,
            grads,
            first,
            second,
            [],
            # Each tensor has a count of its own, which the kernel reads; a skipped step leaves it as it is.
            [self.step_count] * len(self.masters),
            lr=self.lr,
            beta1=numbers.betas[0],
            beta2=numbers.betas[1],
            weight_decay=numbers.weight_decay,
            eps=numbers.eps,
            amsgrad=False,
            maximize=False,
            # The kernel divides by it as it reads a gradient: clipping costs no pass of its own.
            grad_scale=((self.grad_norm + 1e-6) / self.clip).clamp_(min=1.0) * scale,
            found_inf=found_inf,
        )
        if self.exp_avg[0].dtype != torch.float32:
            torch._foreach_copy_([*self.exp_avg, *self.exp_avg_sq], first + second)
        if self._is_plain:
            torch._foreach_copy_(self.params, self.masters)

    def _write(self):
        """Write the masters to the parameters."""
        params, masters = [], []
        for param, master, write in zip(self.params, self.masters, self._writes or (), strict=True):
            if write:
                write(master)
            else:
                params.append(param)
                masters.append(master)
        if params:
            torch._foreach_copy_(params, masters)

    @torch.no_grad()
    def reset(self) -> None:
        """Start again, in place, from the present values of the parameters, or of the masters where these are filled.

        The parameters are written then.
        """
        if self._writes is None:
            torch._foreach_copy_(self.masters, [param.detach() for param in self.params])
        torch._foreach_zero_([*self.exp_avg, *self.exp_avg_sq, self.step_count, self.grad_norm])
        self.lr.fill_(self.hyperparameters.lr)
        if self._writes is not None:
            self._write()

    def named_state(self):
        """Yield (name, tensor) of masters, moments and the count of steps, for hashing."""
        yield "optimizer.step", self.step_count
        for index, tensors in enumerate(zip(self.masters, self.exp_avg, self.exp_avg_sq, strict=True)):
            for key, tensor in zip(("master", "exp_avg", "exp_avg_sq"), tensors, strict=True):
                yield f"optimizer.{index}.{key}", tensor
