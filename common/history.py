"""Losses and gradient norms of steps, kept on the device until somebody reads them."""

import torch


class History:
    """Losses and gradient norms of steps, FP32 on the device.

    The first NUM_LOSSES - 1 steps are kept, and runs are compared by them; later steps overwrite the last place.
    """

    NUM_LOSSES = 4096

    def __init__(self, device: torch.device):
        self.losses, self.grad_norms = (torch.zeros(self.NUM_LOSSES, device=device) for _ in range(2))

    def slot(self, index: int) -> int:
        """Return the place of step `index`."""
        return min(index, self.NUM_LOSSES - 1)

    def read_losses(self, count: int) -> list[float]:
        """Return the losses of steps 0 to count - 1; waits for the device."""
        return self.losses[: min(count, self.NUM_LOSSES)].tolist()

    def read_grad_norms(self, count: int) -> list[float]:
        """Return the gradient norms of steps 0 to count - 1, waiting for the device."""
        return self.grad_norms[: min(count, self.NUM_LOSSES)].tolist()
