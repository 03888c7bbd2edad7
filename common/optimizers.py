"""Adam on FP32 masters of low-precision parameters, with clipping or loss scaling, all without a host read.

Written so that eager and graphed steps share it: the learning rate, the step count, the clip factor, the
loss scale and whether a step overflowed live on the device; nothing calls `.item()`.
"""

import torch


class _Masters:
    """FP32 masters and moments of low-precision parameters, and AdamW on them; `step` is the subclass's.

    lr, step_count, grad_norm: FP32 0-d on the device. Weight decay is decoupled and the same for all parameters.
    On a GPU norm and update are common/fused_adam.py's, in two passes over memory; elsewhere they are torch's.
    """

    def __init__(self, params, lr: float, betas, eps: float, weight_decay: float, fixed_grads=()):
        """fixed_grads: FP32 buffers that all steps apply; empty where each step brings 16-bit gradients."""
        self.params, self._initial_lr = list(params), lr
        device = self.params[0].device
        self.masters = [param.detach().float().clone() for param in self.params]
        self.exp_avg, self.exp_avg_sq = ([torch.zeros_like(master) for master in self.masters] for _ in range(2))
        self.lr = torch.tensor(lr, dtype=torch.float32, device=device)
        self.step_count, self.grad_norm = (torch.zeros((), device=device) for _ in range(2))
        self._options = {"beta1": betas[0], "beta2": betas[1], "eps": eps, "weight_decay": weight_decay}
        self._fused = None
        if device.type == "cuda":
            from common.fused_adam import FusedUpdate

            states = (self.params, self.masters, self.exp_avg, self.exp_avg_sq)
            self._fused = FusedUpdate(*states, betas, eps, weight_decay, fixed_grads)

    def _fill_norm(self, grads):
        if self._fused:
            self._fused.norm(grads, out=self.grad_norm)
        else:
            norms = torch._foreach_norm(grads, 2, dtype=torch.float32)
            torch.linalg.vector_norm(torch.stack(norms), out=self.grad_norm)

    def _update_by_torch(self, grads, grad_scale, found_inf):
        """Divide FP32 gradients by grad_scale, count the step and apply them; nothing changes where found_inf is 1."""
        self.step_count.add_(1 - found_inf)
        # Each tensor has a count of its own, which the kernel reads; a skipped step leaves it as it is.
        counts = [self.step_count] * len(self.masters)
        torch._fused_adamw_(
            self.masters,
            grads,
            self.exp_avg,
            self.exp_avg_sq,
            [],
            counts,
            lr=self.lr,
            amsgrad=False,
            maximize=False,
            grad_scale=grad_scale,
            found_inf=found_inf,
            **self._options,
        )
        torch._foreach_copy_(self.params, self.masters)

    @torch.no_grad()
    def reset(self) -> None:
        """In place, as after construction from the parameters' present values."""
        torch._foreach_copy_(self.masters, [param.detach() for param in self.params])
        torch._foreach_zero_([*self.exp_avg, *self.exp_avg_sq, self.step_count])
        self.lr.fill_(self._initial_lr)

    def named_state(self):
        """(name, tensor) of masters, moments and the count of steps, for hashing."""
        yield "optimizer.step", self.step_count
        for index, tensors in enumerate(zip(self.masters, self.exp_avg, self.exp_avg_sq, strict=True)):
            for key, tensor in zip(("master", "exp_avg", "exp_avg_sq"), tensors, strict=True):
                yield f"optimizer.{index}.{key}", tensor


class MasterAdam(_Masters):
    """AdamW on FP32 master copies; gradients are FP32 accumulation buffers.

    params: parameters of one floating dtype. grads: FP32 buffers of the same shapes and strides at fixed addresses,
    written by the backward passes. `clip`, FP32 0-d on the device, bounds the global norm (Megatron's rule: gradients
    are multiplied by clip / (norm + 1e-6) where that is below one); on a CPU a step leaves them so in `grads`.
    reduce_norm: called in a step with grad_norm, the norm of `grads`, makes it the norm over several ranks in place.
    """

    def __init__(self, params, grads, lr: float, betas, eps: float, weight_decay: float, clip: float, reduce_norm=None):
        self.grads = list(grads)
        self._reduce_norm = reduce_norm
        assert all(grad.dtype == torch.float32 for grad in self.grads)
        super().__init__(params, lr, betas, eps, weight_decay, self.grads)
        self.clip = torch.full_like(self.grad_norm, clip)
        # A loss without a scale, and no step is skipped.
        self._scale, self._found_inf = torch.ones_like(self.grad_norm), torch.zeros_like(self.grad_norm)

    @torch.no_grad()
    def step(self) -> None:
        """Clip, update the masters and copy them to the parameters. `grad_norm` is the norm before clipping."""
        self._fill_norm(self.grads)
        if self._reduce_norm:
            self._reduce_norm(self.grad_norm)
        if self._fused:
            scalars = (self.step_count, self.lr, self._scale, self._found_inf, self.grad_norm, self.clip)
            self._fused.step(self.grads, *scalars)
        else:
            # torch's kernel divides by grad_scale as it reads a gradient: clipping costs no pass of its own.
            grad_scale = ((self.grad_norm + 1e-6) / self.clip).clamp_(min=1.0)
            self._update_by_torch(self.grads, grad_scale, self._found_inf)


class LossScaler:
    """The loss scale of FP16 training as device numbers, updated without a host read.

    After each step, with found_inf 1.0 where a gradient was not finite: an overflow lowers the hysteresis tracker by
    one; while it is above zero only the growth counter starts again, at zero the scale halves too, but not below
    `floor`. A finite step sets the tracker back to `hysteresis`, and `growth_interval` of them in a row double the
    scale. That is the rule of apex (update_scale_hysteresis), used by the benchmark; the floor is ours.

    scale, found_inf: 0-d FP32; growth, tracker: 0-d int32; floor_overflows: 0-d int32, overflows in a row at the floor;
    num_skipped: 0-d int32, overflows since the start.
    """

    def __init__(self, device, scale: float, growth_interval: int, hysteresis: int, floor: float = 1.0):
        self._initial = (scale, 0.0, 0, hysteresis, 0, 0)
        self.growth_interval, self.hysteresis, self.floor = growth_interval, hysteresis, floor
        self.scale, self.found_inf = (torch.zeros((), device=device) for _ in range(2))
        self.growth, self.tracker, self.floor_overflows, self.num_skipped = (
            torch.zeros((), dtype=torch.int32, device=device) for _ in range(4)
        )
        self.reset()

    def reset(self) -> None:
        tensors = (self.scale, self.found_inf, self.growth, self.tracker, self.floor_overflows, self.num_skipped)
        for tensor, value in zip(tensors, self._initial, strict=True):
            tensor.fill_(value)

    @torch.no_grad()
    def update(self) -> None:
        """What the step that found_inf speaks of means for the next one's scale."""
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
        """(name, tensor) of what goes on from step to step, for hashing."""
        for name in ("scale", "growth", "tracker", "floor_overflows", "num_skipped"):
            yield f"loss_scale.{name}", getattr(self, name)


class ScaledMasterAdam(_Masters):
    """AdamW on FP32 masters for 16-bit gradients of a scaled loss: no clipping, and an overflow skips the step.

    A skipped step changes neither masters nor moments and does not count in Adam's bias correction. `grad_norm` is the
    norm of the unscaled gradients, infinite or NaN where the step was skipped.

    params: dense 16-bit parameters; gradients must have their strides. Elsewhere than on a GPU torch's AdamW works on
    FP32 copies of the gradients.
    """

    def __init__(self, params, scaler: LossScaler, lr: float, betas, eps: float, weight_decay: float):
        super().__init__(params, lr, betas, eps, weight_decay)
        self.scaler = scaler
        self._no_clip = torch.full_like(self.grad_norm, torch.inf)
        self._grads = [] if self._fused else [torch.zeros_like(master) for master in self.masters]

    def step(self, grads) -> None:
        """Check, unscale and apply the 16-bit gradients `grads`, then update the scale."""
        self.check(grads)
        self.apply(grads)
        self.scaler.update()

    @torch.no_grad()
    def check(self, grads) -> None:
        """Fill grad_norm, and found_inf of the scaler: the norm is not finite where a gradient is not."""
        self._fill_norm(grads)
        self.scaler.found_inf.copy_(torch.isfinite(self.grad_norm).logical_not_())
        self.grad_norm.div_(self.scaler.scale)

    @torch.no_grad()
    def apply(self, grads) -> None:
        """Update masters and parameters with gradients that were checked; nothing changes where found_inf is 1."""
        scaler = self.scaler
        if self._fused:
            scalars = (self.step_count, self.lr, scaler.scale, scaler.found_inf, self.grad_norm, self._no_clip)
            self._fused.step(grads, *scalars)
        else:
            torch._foreach_copy_(self._grads, grads)
            self._update_by_torch(self._grads, scaler.scale, scaler.found_inf)
