"""LAMB on FP32 masters of 16-bit parameters, sharded over the ranks, with a moving average and without a host read.

Source: apex's DistributedFusedLAMB as MLPerf training v3.1 configures it for RNN-T. With g the gradient of the unscaled
loss, averaged over the ranks and scaled down where its global norm is above max_grad_norm:

    m = beta1 m + (1 - beta1) g             v = beta2 v + (1 - beta2) g^2
    u = m_hat / (sqrt(v_hat) + eps) + weight_decay p
    p = p - lr (|p16| / |u|) u              norms per tensor, their ratio 1 where one of them is 0
    ema = ema_decay ema + (1 - ema_decay) p

p is the FP32 master and p16 the 16-bit parameter, as in the benchmark. Where a gradient is not finite nothing changes,
not even the average. (The benchmark moves it towards the unchanged parameters.)

All tensors are flat, in blocks of Lamb.BLOCK elements of one tensor each; a rank updates its equal share of the blocks.
On one rank a step moves 58 bytes a parameter: 4 to copy the gradient, 2 for its norm, 22 in `moments`, 26 in `update`,
4 to copy the parameter to its place. For the benchmark's 49 M parameters that is 2.8 GB, 0.66 ms at the 4.3 TB/s of an
H200. Both passes compute u: storing and loading it would move as much.
"""

import itertools
import math

import torch

from common.optimizers.loss_scaler import LossScaler
from graph_worth.parallel import collectives
from rnnt.config import Config


class Lamb:
    """LAMB for params: 16-bit parameters of one dtype and device. Gradients are of the scaled loss on this rank.

    lr: FP32 0-d on the device, to be filled before a step. grad_norm: FP32 0-d, of the averaged, unscaled gradients
    before clipping; infinite or NaN where the step was skipped. steps: FP32 0-d, steps that were not skipped. ema: FP32
    averages in the shapes of params; with several ranks another rank's share is old.
    """

    BLOCK = 2048

    def __init__(self, params, scaler: LossScaler, config: Config, rank: int = 0, world_size: int = 1):
        self.params, self.scaler, self.world_size = list(params), scaler, world_size
        self.betas, self.eps, self.weight_decay = (config.beta1, config.beta2), config.eps, config.weight_decay
        self.max_grad_norm, self.ema_decay, self._initial_lr = config.clip, config.ema, config.lr
        device, dtype = self.params[0].device, self.params[0].dtype
        assert all(param.dtype == dtype and param.device == device for param in self.params)
        starts = list(itertools.accumulate((-(-param.numel() // self.BLOCK) for param in self.params), initial=0))
        num_blocks = -(-starts[-1] // world_size)

        # The whole of it on every rank; this rank's share; and views in the shapes of the parameters.
        size = world_size * num_blocks * self.BLOCK
        self._flat_grads, self._flat_params = (torch.zeros(size, dtype=dtype, device=device) for _ in range(2))
        self._flat_ema = torch.zeros(size, device=device)
        flats = (self._flat_grads, self._flat_params, self._flat_ema)
        self.grad, self.param, self.ema_share = (flat.view(world_size, -1)[rank] for flat in flats)
        self._grads, self._copies, self.ema = (
            [
                flat[start * self.BLOCK :][: param.numel()].view(param.shape)
                for start, param in zip(starts, self.params, strict=False)
            ]
            for flat in flats
        )
        self.master, self.exp_avg, self.exp_avg_sq = (torch.zeros_like(self.ema_share) for _ in range(3))

        # (first, end) block of each tensor within the share, equal where it has none there; and each block's tensor.
        share_starts = [min(max(start - rank * num_blocks, 0), num_blocks) for start in starts]
        self.spans = list(itertools.pairwise(share_starts))
        self.spans_on_device = torch.tensor(self.spans, dtype=torch.int32, device=device)
        owners = [index for index, (first, end) in enumerate(self.spans) for _ in range(end - first)]
        # Padding of the last rank's share is zero and stays so, whatever tensor it counts to.
        owners += [len(self.params) - 1] * (num_blocks - len(owners))
        self.block_owners = torch.tensor(owners, dtype=torch.int32, device=device)
        # For each tensor: sums of squares of p16 and u, in this share and then averaged over the ranks.
        self.squares = torch.zeros(len(self.params), 2, device=device)

        self.lr, self.grad_norm, self.steps = (torch.zeros((), device=device) for _ in range(3))
        self._log_betas = torch.tensor([math.log(beta) if beta else -math.inf for beta in self.betas], device=device)
        # beta^steps - 1, for both betas.
        self.corrections = torch.zeros(2, device=device)
        self.moments, self.update = _passes(device)
        self.reset()

    @torch.no_grad()
    def step(self, grads) -> None:
        """Average the 16-bit gradients over the ranks, apply them unless one overflowed, and update the loss scale."""
        torch._foreach_copy_(self._grads, grads)
        if self.world_size > 1:
            collectives.reduce_scatter_mean_(self._flat_grads)
        torch.linalg.vector_norm(self.grad, dtype=torch.float32, out=self.grad_norm)
        if self.world_size > 1:
            self.grad_norm.square_()
            collectives.all_reduce_mean_(self.grad_norm)
            self.grad_norm.mul_(self.world_size).sqrt_()
        # x * 0 is 0 for a number and NaN for NaN and infinity; isfinite takes four kernels.
        torch.ne(self.grad_norm * 0, 0, out=self.scaler.found_inf)
        self.grad_norm.div_(self.scaler.scale)

        # From here nothing changes where found_inf is 1.
        self.steps.add_(1).sub_(self.scaler.found_inf)
        torch.expm1(self.steps * self._log_betas, out=self.corrections)
        self.moments(self)
        if self.world_size > 1:
            # The mean in the place of the sum: only the ratio of two of them is used.
            collectives.all_reduce_mean_(self.squares)
        self.update(self)
        if self.world_size > 1:
            collectives.all_gather_(self._flat_params)
        torch._foreach_copy_(self.params, self._copies)
        self.scaler.update()

    @torch.no_grad()
    def reset(self) -> None:
        """Start again, in place, from the parameters' present values, which must be the same on all ranks."""
        torch._foreach_copy_(self._copies, self.params)
        self.master.copy_(self.param)
        self._flat_ema.copy_(self._flat_params)
        for tensor in (self.exp_avg, self.exp_avg_sq, self.squares, self.corrections, self.grad_norm, self.steps):
            tensor.zero_()
        self.lr.fill_(self._initial_lr)

    def named_state(self):
        """(name, tensor) of this rank's blocks of masters, moments and averages, and of the count of steps."""
        for index, (first, end) in enumerate(self.spans):
            if first < end:
                elements = slice(first * self.BLOCK, end * self.BLOCK)
                for name in ("master", "exp_avg", "exp_avg_sq"):
                    yield f"optimizer.{index}.{name}", getattr(self, name)[elements]
                yield f"optimizer.{index}.ema", self.ema_share[elements]
        yield "optimizer.steps", self.steps


def _passes(device):
    # Of the GPU, or the two below in plain torch.
    if device.type == "cuda":
        from rnnt.kernels import lamb as lamb_kernels

        return lamb_kernels.moments, lamb_kernels.update
    return moments, update


def moments(lamb: Lamb) -> None:
    """Compute exp_avg and exp_avg_sq from the gradients, and squares from both."""
    beta1, beta2 = lamb.betas
    factor = (lamb.max_grad_norm / (lamb.grad_norm + 1e-6)).clamp(max=1.0) / lamb.scaler.scale
    grad = lamb.grad.float() * factor
    _unless_skipped(lamb, lamb.exp_avg, beta1 * lamb.exp_avg + (1 - beta1) * grad)
    _unless_skipped(lamb, lamb.exp_avg_sq, beta2 * lamb.exp_avg_sq + (1 - beta2) * grad.square())
    both = torch.stack((lamb.master.to(lamb.param.dtype).float(), _direction(lamb))).square()
    sums = both.unflatten(1, (-1, lamb.BLOCK)).sum(2)
    for index, (first, end) in enumerate(lamb.spans):
        torch.sum(sums[:, first:end], 1, out=lamb.squares[index])


def update(lamb: Lamb) -> None:
    """Compute master, param and ema_share from moments and squares."""
    norms = lamb.squares.sqrt()
    ratios = torch.where((norms > 0).all(1), norms[:, 0] / norms[:, 1], 1.0)
    step = lamb.lr * ratios[lamb.block_owners].unsqueeze(1) * _direction(lamb).view(-1, lamb.BLOCK)
    _unless_skipped(lamb, lamb.master, lamb.master - step.flatten())
    lamb.param.copy_(lamb.master)
    decay = lamb.ema_decay
    _unless_skipped(lamb, lamb.ema_share, decay * lamb.ema_share + (1 - decay) * lamb.master)


def _direction(lamb):
    """u, the step before it is scaled by learning rate and ratio."""
    mean, square = lamb.exp_avg / -lamb.corrections[0], lamb.exp_avg_sq / -lamb.corrections[1]
    return mean / (square.sqrt() + lamb.eps) + lamb.weight_decay * lamb.master


def _unless_skipped(lamb, old, new):
    old.copy_(torch.where(lamb.scaler.found_inf > 0, old, new))
