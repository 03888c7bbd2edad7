"""The stand-in for an optimizer where a stage of a pipeline runs by itself."""

import torch

NUDGE = 2.0**-10


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
