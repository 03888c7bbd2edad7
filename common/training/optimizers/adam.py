"""AdamW on FP32 masters of parameters in any format, with clipping, loss scaling or both; and a stand-in without it.

    adam = Adam(params, Hyperparameters(lr=1e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1), main_grads)
    adam.step()

Eager and graphed steps share this code: the learning rate, the count of steps, the clip factor, the loss scale and
whether a step overflowed are numbers on the device, and nothing calls `.item()` unless clip_on_host asks for it.
"""

import math
from collections.abc import Callable, Sequence

import torch

from common.training.optimizers.hyperparameters import Hyperparameters

NUDGE = 2.0**-10


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
        scaler: LossScaler | None = None,
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
            from common.training.optimizers.fused_adam import FusedUpdate

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


class NoAdam:
    """In the place of an optimizer, where forward and backward are measured alone.

    All vectors (biases and norms) and the first row of each matrix take a step of fixed length against their gradients'
    signs, some kilobytes: the weights move, as a graph that read them at its capture would show. The state that is
    compared has the gradients in the place of the moments. grad_norm: of the gradients of vectors and first rows.

    Args:
        parameters: each with its main_grad.
    """

    def __init__(self, parameters):
        self._grads = [parameter.main_grad for parameter in parameters]
        self._moved = [_first_row(parameter.detach()) for parameter in parameters]
        self._moved_grads = [_first_row(grad) for grad in self._grads]
        self._signs = [torch.zeros_like(moved) for moved in self._moved]
        self.grad_norm = torch.zeros((), device=self._grads[0].device)

    @torch.no_grad()
    def step(self) -> None:
        """Compute grad_norm and move vectors and first rows against their gradients' signs."""
        norms = torch._foreach_norm(self._moved_grads, 2, dtype=torch.float32)
        torch.linalg.vector_norm(torch.stack(norms), out=self.grad_norm)
        torch._foreach_copy_(self._signs, torch._foreach_sign(self._moved_grads))
        torch._foreach_add_(self._moved, self._signs, alpha=-NUDGE)

    def reset(self) -> None:
        """Start again."""
        self.grad_norm.zero_()

    def named_state(self):
        """Yield (name, tensor) of the gradients, for hashing."""
        for index, grad in enumerate(self._grads):
            yield f"main_grad.{index}", grad


def _first_row(tensor):
    return tensor[:1] if tensor.ndim > 1 else tensor
