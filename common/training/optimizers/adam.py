"""AdamW on FP32 masters of parameters in 16 bits, with clipping or with loss scaling.

Eager and graphed steps share this code: the learning rate, the count of steps, the clip factor, the loss scale and
whether a step overflowed are numbers on the device, and nothing calls `.item()`.
"""

import torch

from common.training.optimizers.hyperparameters import Hyperparameters


class Masters:
    """FP32 masters and moments, and AdamW on them.

    lr, step_count, grad_norm (before clipping) and clip are FP32 0-d tensors on the device. On a GPU norm and update
    are two passes over memory, by the kernels of fused_adam.py; elsewhere they are torch's, which leave the clipped
    gradients in `grads`.

    Args:
        params: Tensors that each step fills with the masters, of one dtype.
        masters: FP32 tensors of the parameters' shapes; the parameters themselves where a subclass writes them.
        hyperparameters: Of all parameters.
        grads: The buffers that all steps apply; empty if each step brings gradients.
        moments: Dtype of the moments.
        reduce_norm: Called in a step with grad_norm; makes it the norm over several ranks, in place.
    """

    def __init__(
        self, params, masters, hyperparameters: Hyperparameters, grads=(), moments=torch.float32, reduce_norm=None
    ):
        self.params, self.masters, self.grads = list(params), list(masters), list(grads)
        self.hyperparameters, self._reduce_norm, self._fused = hyperparameters, reduce_norm, None
        self.exp_avg, self.exp_avg_sq = (
            [torch.zeros_like(master, dtype=moments) for master in self.masters] for _ in range(2)
        )
        device = self.masters[0].device
        self.lr, self.clip = (torch.tensor(x, device=device) for x in (hyperparameters.lr, hyperparameters.clip))
        self.step_count, self.grad_norm, self._found_inf = (torch.zeros((), device=device) for _ in range(3))
        # Of a loss without a scale, no step of which is skipped.
        self._scale = torch.ones((), device=device)
        if device.type == "cuda":
            self._fused = self._make_kernels()

    def _make_kernels(self):
        # Triton is imported where there is a GPU.
        from common.training.optimizers.fused_adam import FusedUpdate

        states = (self.params, self.masters, self.exp_avg, self.exp_avg_sq)
        return FusedUpdate(states, self.hyperparameters, self.grads)

    @torch.no_grad()
    def step(self) -> None:
        """Clip the gradients, update the masters and copy them to the parameters."""
        self._fill_norm(self.grads)
        self._update(self.grads, self._scale, self._found_inf)

    def _fill_norm(self, grads):
        if self._fused:
            self._fused.norm(grads, out=self.grad_norm)
        else:
            norms = torch._foreach_norm(grads, 2, dtype=torch.float32)
            torch.linalg.vector_norm(torch.stack(norms), out=self.grad_norm)
        if self._reduce_norm:
            self._reduce_norm(self.grad_norm)

    def _update(self, grads, scale, found_inf):
        """Divide the gradients by scale, clip and apply them, and count the step. Nothing changes if found_inf is 1."""
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
        if self.params[0] is not self.masters[0]:
            torch._foreach_copy_(self.params, self.masters)

    @torch.no_grad()
    def reset(self) -> None:
        """Start again, in place, from the present values of the parameters."""
        torch._foreach_copy_(self.masters, [param.detach() for param in self.params])
        self._clear()

    def _clear(self):
        torch._foreach_zero_([*self.exp_avg, *self.exp_avg_sq, self.step_count, self.grad_norm])
        self.lr.fill_(self.hyperparameters.lr)

    def named_state(self):
        """Yield (name, tensor) of masters, moments and the count of steps, for hashing."""
        yield "optimizer.step", self.step_count
        for index, tensors in enumerate(zip(self.masters, self.exp_avg, self.exp_avg_sq, strict=True)):
            for key, tensor in zip(("master", "exp_avg", "exp_avg_sq"), tensors, strict=True):
                yield f"optimizer.{index}.{key}", tensor


def fp32_copies(params) -> list[torch.Tensor]:
    """New FP32 tensors with the values and the strides of `params`."""
    return [param.detach().float().clone() for param in params]


class MasterAdam(Masters):
    """AdamW on FP32 copies of the parameters, whose gradients are FP32 buffers that the backward passes fill.

    Args:
        params: Parameters of one floating dtype.
        grads: FP32 buffers of the same shapes and strides, at fixed addresses.
        hyperparameters: Of all parameters.
        reduce_norm: As for `Masters`.
    """

    def __init__(self, params, grads, hyperparameters: Hyperparameters, reduce_norm=None):
        params, grads = list(params), list(grads)
        assert all(grad.dtype == torch.float32 for grad in grads)
        super().__init__(params, fp32_copies(params), hyperparameters, grads, reduce_norm=reduce_norm)


class LossScaler:
    """The loss scale of FP16 training as numbers on the device, updated without a host read.

    An overflow lowers the tracker by one. At zero it also halves the scale, though not below `floor`, and above zero it
    only starts the growth counter again. A finite step sets the tracker back to `hysteresis`, and `growth_interval`
    finite steps in a row double the scale. This is the rule of apex (update_scale_hysteresis), which the benchmark
    uses; the floor of 1 is ours.

    Attributes:
        scale: FP32 0-d.
        found_inf: FP32 0-d, 1 if a gradient of the step was not finite. The optimizer fills it.
        growth: Finite steps since the scale last changed. This and the others are int32 0-d.
        tracker: Overflows left until the scale halves.
        floor_overflows: Overflows in a row at the floor.
        num_skipped: Overflows since the start.
    """

    floor = 1.0
    STATE = ("scale", "growth", "tracker", "floor_overflows", "num_skipped")

    def __init__(self, device, scale: float, growth_interval: int, hysteresis: int):
        self.initial_scale = scale
        self.growth_interval, self.hysteresis = growth_interval, hysteresis
        self.scale, self.found_inf = (torch.zeros((), device=device) for _ in range(2))
        self.growth, self.tracker, self.floor_overflows, self.num_skipped = (
            torch.zeros((), dtype=torch.int32, device=device) for _ in range(4)
        )
        self.reset()

    def reset(self) -> None:
        """Start again, in place."""
        for _, tensor in self.named_state():
            tensor.zero_()
        self.found_inf.zero_()
        self.scale.fill_(self.initial_scale)
        self.tracker.fill_(self.hysteresis)

    @torch.no_grad()
    def update(self) -> None:
        """Set the scale of the next step by found_inf of this one."""
        overflow = self.found_inf > 0
        self.num_skipped.add_(overflow)
        at_floor = overflow & (self.scale <= self.floor)
        self.floor_overflows.copy_(torch.where(at_floor, self.floor_overflows + 1, 0))
        self.tracker.copy_(torch.where(overflow, (self.tracker - 1).clamp_(min=0), self.hysteresis))
        growth = torch.where(overflow, 0, self.growth + 1)
        grows = growth >= self.growth_interval
        self.growth.copy_(torch.where(grows, 0, growth))
        # A scale that would leave FP32 stays.
        grown = torch.where(torch.isfinite(self.scale * 2), self.scale * 2, self.scale)
        lowered = (self.scale / 2).clamp_(min=self.floor)
        lowers = overflow & (self.tracker <= 0)
        self.scale.copy_(torch.where(lowers, lowered, torch.where(grows, grown, self.scale)))

    def named_state(self):
        """Yield (name, tensor) of everything that lasts from step to step, for hashing."""
        for name in self.STATE:
            yield f"loss_scale.{name}", getattr(self, name)


class ScaledMasterAdam(Masters):
    """AdamW on FP32 copies of 16-bit parameters, with gradients of a scaled loss. An overflow skips the step.

    A skipped step changes neither masters nor moments and does not count in Adam's bias correction. `grad_norm` is the
    norm of the unscaled gradients, infinite or NaN if the step was skipped.

    Args:
        params: Dense parameters; gradients must have their strides.
        scaler: Of the loss.
        hyperparameters: Of all parameters.
    """

    def __init__(self, params, scaler: LossScaler, hyperparameters: Hyperparameters):
        params = list(params)
        super().__init__(params, fp32_copies(params), hyperparameters)
        self.scaler = scaler

    def step(self, grads) -> None:  # type: ignore[override]
        """Check, unscale and apply the gradients `grads`, then update the scale."""
        self.check(grads)
        self.apply(grads)
        self.scaler.update()

    @torch.no_grad()
    def check(self, grads) -> None:
        """Fill grad_norm, and found_inf of the scaler: the norm is not finite if a gradient is not."""
        self._fill_norm(grads)
        self.scaler.found_inf.copy_(torch.isfinite(self.grad_norm).logical_not_())
        self.grad_norm.div_(self.scaler.scale)

    @torch.no_grad()
    def apply(self, grads) -> None:
        """Update masters and parameters with checked gradients. Nothing changes if found_inf is 1."""
        self._update(grads, self.scaler.scale, self.scaler.found_inf)
