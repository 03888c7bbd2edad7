"""The neighbours of a pipeline stage that runs without them (--pp-rank)."""

import torch

EDGE_SEED = 4321


class Edges:
    """The neighbour stages' tensors for a stage without the others: an activation and a gradient a microbatch.

    They are equal in each step and chunk, seeded: activations of unit variance, gradients whose norm over a step is 1.
    Such a stage has no optimizer (`NoAdam`): the run that it is part of splits Adam over all its data ranks, so that
    one rank's share is next to nothing.
    """

    def __init__(self, like: torch.Tensor, microbatches: int):
        generator = torch.Generator(like.device).manual_seed(EDGE_SEED)

        def recorded(std):
            return [torch.empty_like(like).normal_(0.0, std, generator=generator) for _ in range(microbatches)]

        self.activations = recorded(1.0)
        self.gradients = recorded(1.0 / (like.numel() * microbatches) ** 0.5)

    @torch.no_grad()
    def feed(self, sent, transfers, received) -> torch.Tensor:
        """Stand in for an exchange: fill `received`, in the order of the receives among `transfers`.

        Returns the sum of the sent tensors' root mean squares over the number of microbatches.
        """
        receives = (transfer for transfer in transfers if not transfer.sends)
        for tensor, transfer in zip(received, receives, strict=True):
            edges = self.activations if transfer.step > 0 else self.gradients
            tensor.copy_(edges[transfer.microbatch])
        total = torch.zeros((), device=self.activations[0].device)
        for tensor in sent:
            share = 1.0 / (tensor.numel() ** 0.5 * len(self.activations))
            total.add_(torch.linalg.vector_norm(tensor, dtype=torch.float32), alpha=share)
        return total
