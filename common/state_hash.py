"""Hashes of training state, computed where the state lives, so that two runs can be compared step by step.

A tensor's hash is a position-weighted sum of its raw bits in 64-bit integers that wrap around: exact,
independent of the order of summation, different when one bit or two elements' places differ, and the
same on every device. Besides, a few elements of each tensor are kept, to say how large a difference is.
"""

import hashlib
from pathlib import Path

import torch

CHUNK = 1 << 24
NUM_KEPT_WEIGHTS = 1 << 19
NUM_SAMPLES = 256
_ODD = 0x1E3779B97F4A7C15  # an odd multiplier spreads neighbouring positions over all 64 bits
_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}  # narrower than the sum: .to() below copies


def tensor_hash(tensor: torch.Tensor) -> torch.Tensor:
    """0-d int64 tensor on the tensor's device; no host read. Bits are hashed, so -0.0 differs from 0.0."""
    bits = tensor.detach().contiguous().reshape(-1).view(_INTEGER[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    if tensor.is_cuda:
        # Triton is imported where there is a GPU, and not where nothing needs it.
        from common.hash_kernels import add_hash_

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


class StateHasher:
    """Hashes named tensors after each step, without a host read until the end.

    named: iterable of (name, tensor); the tensors must be updated in place from step to step.
    """

    def __init__(self, named):
        self.names, self.tensors = zip(*((name, tensor) for name, tensor in named), strict=True)
        self._steps = []

    def update(self) -> None:
        self._steps.append(torch.stack([tensor_hash(tensor) for tensor in self.tensors]))

    def hashes(self):
        """uint64 array [steps, tensors]."""
        return torch.stack(self._steps).cpu().numpy().view("uint64")

    def digest(self) -> str:
        """16 hex digits over the hashes after the last step."""
        return hashlib.sha256(self.hashes()[-1].tobytes()).hexdigest()[:16]

    def samples(self):
        """float32 array [tensors, NUM_SAMPLES] of evenly spaced elements after the last step, padded with NaN."""
        rows = torch.full((len(self.tensors), NUM_SAMPLES), float("nan"))
        for row, tensor in zip(rows, self.tensors, strict=True):
            flat = tensor.detach().reshape(-1)
            stride = max(1, -(-flat.numel() // NUM_SAMPLES))
            picked = flat[::stride][:NUM_SAMPLES].float().cpu()
            row[: picked.numel()] = picked
        return rows.numpy()

    def seen(self) -> dict:
        """names [T], hashes uint64 [steps, T] and samples float32 [T, NUM_SAMPLES]."""
        return {"names": list(self.names), "hashes": self.hashes(), "samples": self.samples()}


def write_sidecar(path: Path, ranks: list[dict], losses, grad_norms) -> None:
    """What the harness compares, compressed .npz: names, hashes, samples, loss, grad_norm.

    ranks: what the hasher of each rank has seen. Tensors of the ranks from 1 on are named after their rank.
    """
    import numpy

    names = [name if rank == 0 else f"rank {rank}: {name}" for rank, own in enumerate(ranks) for name in own["names"]]
    path.parent.mkdir(parents=True, exist_ok=True)
    numpy.savez_compressed(
        path,
        names=numpy.array(names),
        hashes=numpy.concatenate([own["hashes"] for own in ranks], axis=1),
        samples=numpy.concatenate([own["samples"] for own in ranks]),
        loss=numpy.array(losses, dtype=numpy.float64),
        grad_norm=numpy.array(grad_norms, dtype=numpy.float64),
    )
