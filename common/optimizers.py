"""Adam on FP32 masters of low-precision parameters, with gradient clipping, all without a host read.

Written so that eager and graphed steps share it: the learning rate, the step count and the clip factor
live on the device; nothing calls `.item()`.
"""

import torch


class MasterAdam:
    """AdamW on FP32 master copies; gradients are FP32 accumulation buffers.

    params: parameters of any floating dtype. grads: FP32 buffers of the same shapes, written by the
    backward passes. The update is torch's fused AdamW on the masters; `clip` bounds the global norm
    (Megatron's rule: scale by clip / (norm + 1e-6) where that is below one).
    """

    def __init__(self, params, grads, lr: float, betas, eps: float, weight_decay: float, clip: float):
        self.params, self.grads, self.clip = list(params), list(grads), clip
        assert all(grad.dtype == torch.float32 for grad in self.grads)
        device = self.params[0].device
        self.masters = [param.detach().float().clone() for param in self.params]
        for master, grad in zip(self.masters, self.grads, strict=True):
            master.grad = grad
        self.lr = torch.tensor(lr, dtype=torch.float32, device=device)
        self._initial_lr = lr
        self.grad_norm = torch.zeros((), device=device)
        self._adam = torch.optim.AdamW(
            self.masters, lr=self.lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True
        )
        # The fused kernel divides gradients by grad_scale and skips where found_inf is 1: torch's
        # GradScaler hands both over the same way. Clipping thus costs no pass of its own.
        self._adam.found_inf = torch.zeros((), device=device)
        self._allocate_state()

    @torch.no_grad()
    def step(self) -> None:
        """Clip, update the masters and copy them to the parameters. `grad_norm` is the norm before clipping."""
        norms = torch._foreach_norm(self.grads)
        torch.linalg.vector_norm(torch.stack(norms), out=self.grad_norm)
        self._adam.grad_scale = ((self.grad_norm + 1e-6) / self.clip).clamp_(min=1.0)
        self._adam.step()
        torch._foreach_copy_(self.params, self.masters)

    @torch.no_grad()
    def reset(self) -> None:
        """In place, as after construction from the parameters' present values."""
        torch._foreach_copy_(self.masters, [param.detach() for param in self.params])
        for state in self._adam.state.values():
            for tensor in state.values():
                tensor.zero_()
        self.lr.fill_(self._initial_lr)

    def named_state(self):
        """(name, tensor) of masters and moments, for hashing."""
        for index, master in enumerate(self.masters):
            yield f"optimizer.{index}.master", master
            for key, tensor in self._adam.state[master].items():
                yield f"optimizer.{index}.{key}", tensor

    def _allocate_state(self):
        """Let torch make its state tensors now, not in the first step (which may be inside a capture)."""
        self._adam.grad_scale = torch.ones_like(self.grad_norm)
        torch._foreach_zero_(self.grads)
        self._adam.step()
        self.reset()
