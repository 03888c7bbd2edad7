"""The course of a training: losses of its steps, and hashes or copies of its state, for `common.measuring.parity`.

A tensor's hash is a position-weighted sum of its raw bits in 64-bit integers that wrap around: exact,
independent of the order of summation, different when one bit or two elements' places differ, and the
same on every device.
"""

import hashlib
from array import array
from collections.abc import Callable, Container, Generator

import torch

from common.training.parallel.host_messages import of_all_ranks

CHUNK = 1 << 24
NUM_KEPT_WEIGHTS = 1 << 19
_ODD = 0x1E3779B97F4A7C15  # an odd multiplier spreads neighbouring positions over all 64 bits
_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}  # narrower than the sum: .to() below copies


def tensor_hash(tensor: torch.Tensor) -> torch.Tensor:
    """0-d int64 tensor on the tensor's device; no host read. Bits are hashed, so -0.0 differs from 0.0."""
    bits = tensor.detach().contiguous().reshape(-1).view(_INTEGER[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    if tensor.is_cuda:
        # Triton is imported where there is a GPU, and not where nothing needs it.
        from common.measuring.hash_kernels import add_hash_

        add_hash_(total, bits, _ODD)
        return total
    for start in range(0, bits.numel(), CHUNK):
        part = bits[start : start + CHUNK].to(torch.int64)
        if part.is_cpu and start + part.numel() <= NUM_KEPT_WEIGHTS:
            weight = _FIRST_WEIGHTS[start : start + part.numel()]
        else:
            weight = _weights(start, part.numel(), tensor.device)
        total += part.add_(1).mul_(weight).sum()
    return total


def _weights(start, count, device):
    """int64 [count]: the odd weights of positions start, start + 1, ..."""
    weight = torch.arange(start, start + count, device=device, dtype=torch.int64)
    return weight.mul_(_ODD).add_(_ODD).bitwise_or_(1)


# A host spends more time on weights than on the sums of small tensors, of which a state has thousands.
_FIRST_WEIGHTS = _weights(0, NUM_KEPT_WEIGHTS, "cpu")


class Course:
    """Losses of a training from its start, and its state after some of the steps.

    Args:
        training: a `common.contract.Training`, or another object with its `reset`, `results` and `named_state`.
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
    made = Course(training, **looks)
    for index in made.steps(count):
        step(index)
    return made
