"""The course of a training: losses of its steps, and hashes or copies of its state, for parity.py."""

import hashlib
from array import array
from collections.abc import Callable, Container, Generator

import torch

from graph_worth.parallel.host_messages import of_all_ranks


class Course:
    """Losses of a training from its start, and its state after some of the steps.

    Args:
        training: a `graph_worth.contract.Training`, or another object with its `reset`, `results` and `named_state`.
        hashed: steps after which the state is hashed, without a host read until the end.
        copied: steps after which the state is copied to `device`.

    Attributes:
        names: of the tensors, unless neither is asked for.
        copies: step -> values of the tensors.
        count, losses: steps that were made, and their losses.
    """

    def __init__(self, training, hashed: Container[int] = (), copied: Container[int] = (), device="cpu"):
        self.training, self._hashed, self._copied, self._device = training, hashed, copied, device
        named = list(training.named_state()) if hashed or copied else []
        self.names, self._tensors = [name for name, _ in named], [tensor for _, tensor in named]
        self._rows: list[torch.Tensor] = []
        self.copies: dict[int, list[torch.Tensor]] = {}
        self.losses: list[float] = []
        self.count = 0

    def steps(self, count: int, is_over: Callable[[int], bool] = lambda index: False) -> Generator[int]:
        """Yield the numbers of steps from the start, which all ranks make; is_over(index) ends them before `count`."""
        self.training.reset()
        for index in range(count):
            yield index
            self.look(index)
            self.count += 1
            if is_over(index):
                break
        self.losses = self.training.results(self.count)

    def look(self, index: int) -> None:
        """Hash or copy the state as it is now, after a step, in the order of the current stream."""
        if index in self._hashed:
            from graph_worth.measuring.tensor_hash import tensor_hash

            self._rows.append(torch.stack([tensor_hash(tensor) for tensor in self._tensors]))
        if index in self._copied:
            self.copies[index] = [tensor.detach().to(self._device, copy=True) for tensor in self._tensors]

    def hashes(self) -> torch.Tensor:
        """int64 tensor [hashed steps, tensors] on the CPU."""
        return torch.stack(self._rows).cpu()

    def digests(self) -> list[str]:
        """Return 16 hex digits for each hashed step, over all tensors on all ranks; every rank calls it."""
        every = of_all_ranks([array("q", row).tobytes() for row in self.hashes().tolist()])
        return [hashlib.sha256(b"".join(at_once)).hexdigest()[:16] for at_once in zip(*every, strict=True)]

    def unmoved(self) -> list[str]:
        """Names of the tensors whose bits are the same after all hashed steps."""
        hashes = self.hashes()
        still = (hashes == hashes[:1]).all(dim=0)
        return [name for name, is_still in zip(self.names, still.tolist(), strict=True) if is_still]


def course(training, step: Callable[[int], None], count: int, **looks) -> Course:
    """Train from the start; step(index) trains on a batch. looks: of `Course`."""
    record = Course(training, **looks)
    for index in record.steps(count):
        step(index)
    return record
