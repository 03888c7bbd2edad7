"""AdamW for weights stored in any format: bf16 or FP32 gradients and moments, and FP32 masters.

    adam = MixedAdam([Weight(p), Weight(fp8, fp8.quantize_)], grads, hyperparameters, moments=torch.bfloat16)
    ... fill adam.masters
    adam.reset()                         writes the weights from the masters
    adam.step()

Whoever knows the format of a weight writes it, for example FP8 with a scale. Bytes a parameter beside its weight and
gradient: 8 with bf16 moments, 12 with FP32 ones.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from common.training.optimizers.adam import Masters
from common.training.optimizers.hyperparameters import Hyperparameters


class Weight(NamedTuple):
    """A weight of the model. write(master) puts an FP32 master into it; None: the master is copied."""

    parameter: torch.Tensor
    write: Callable[[torch.Tensor], object] | None = None


class MixedAdam(Masters):
    """AdamW on FP32 masters, which the caller fills and which each step writes to the weights.

    Nothing is read on the host, unless clip_on_host asks for that.

    Args:
        weights: On one device.
        grads: Buffers of one dtype and of the masters' shapes, at fixed addresses.
        hyperparameters: Of all weights.
        moments: Dtype of the moments.
        reduce_norm: As for `Masters`.
        clip_on_host: Read the norm and scale the gradients by a number, which no graph can capture.
    """

    def __init__(
        self,
        weights: Iterable[Weight],
        grads,
        hyperparameters: Hyperparameters,
        moments: torch.dtype = torch.float32,
        reduce_norm=None,
        clip_on_host: bool = False,
    ):
        self.weights, grads = list(weights), list(grads)
        masters = [torch.zeros(grad.shape, device=grad.device) for grad in grads]
        # The update writes the weights itself if all are plain tensors.
        self._is_plain = all(weight.write is None for weight in self.weights)
        params = [weight.parameter for weight in self.weights] if self._is_plain else masters
        super().__init__(params, masters, hyperparameters, grads, moments, reduce_norm)
        self._clip_on_host = clip_on_host
        if clip_on_host:
            self.clip.fill_(torch.inf)

    @torch.no_grad()
    def reset(self) -> None:
        """Start again, in place, from the present values of the masters, which are written to the weights."""
        self._clear()
        self._write_weights()

    @torch.no_grad()
    def step(self) -> None:
        """Clip, update masters and moments, and write the weights."""
        self._fill_norm(self.grads)
        if self._clip_on_host:
            norm = float(self.grad_norm) + 1e-6
            if norm > self.hyperparameters.clip:
                torch._foreach_mul_(self.grads, self.hyperparameters.clip / norm)
        self._update(self.grads, self._scale, self._found_inf)
        if not self._is_plain:
            self._write_weights()

    def _write_weights(self):
        for weight, master in zip(self.weights, self.masters, strict=True):
            if weight.write:
                weight.write(master)
        plain = [pair for pair in zip(self.weights, self.masters, strict=True) if not pair[0].write]
        if plain:
            torch._foreach_copy_([weight.parameter for weight, _ in plain], [master for _, master in plain])
