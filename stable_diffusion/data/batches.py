"""An endless, reproducible sequence of batches from a folder of shards, read by worker processes.

Batches keep the stored dtype on the way to the device: half precision has steps of 1/64 in means of 16 and more.
"""

import sys

import numpy as np
import torch
from torch.utils.data import DataLoader

from stable_diffusion.data.shards import NAMES, Samples

WORKER_TIMEOUT_S = 300


class Batches:
    """An endless sequence of batches of host tensors, the same in every run with the same arguments.

    Every epoch is shuffled anew from (seed, epoch). Step k of all ranks together takes the next batch * world_size
    samples of the epoch, each rank its own. Samples that do not fill a step are left out. `dtypes` has the torch.dtype
    of each tensor by name. num_workers: processes that read, 0 for none. Raises ValueError where the samples do not
    fill one step.
    """

    def __init__(self, samples: Samples, batch, rank=0, world_size=1, num_workers=0, pin_memory=False, seed=0):
        if len(samples) < batch * world_size:
            raise ValueError(
                f"--data {samples.folder}: {len(samples)} samples, --batch {batch} on {world_size} ranks takes "
                f"{batch * world_size}: give more shards or a smaller --batch"
            )
        self.dtypes = {name: getattr(torch, dtype) for name, dtype in samples.dtypes.items()}
        self._loader = DataLoader(
            _BatchReader(samples, batch, rank, world_size, seed),
            batch_size=None,
            sampler=range(sys.maxsize),
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            # A worker that cannot send its batch ends only by this.
            timeout=WORKER_TIMEOUT_S if num_workers else 0,
            pin_memory=pin_memory,
            # DataLoader draws a seed for its workers, from the default generator unless it has its own.
            generator=torch.Generator(),
        )
        self._iterator = iter(self._loader)

    def next(self) -> dict:
        """The next batch: "moments" [batch, 8, size, size] and "context" [batch, tokens, dim] in the stored dtypes.

        Raises ValueError that names a bad sample.
        """
        batch = next(self._iterator)
        if isinstance(batch, str):
            raise ValueError(batch)
        return batch

    def reset(self) -> None:
        """Start again at batch 0. Workers stay; batches that they have read ahead are thrown away."""
        self._iterator = iter(self._loader)

    def close(self) -> None:
        """End the workers. Can be called again."""
        if self._iterator is not None and self._loader.num_workers:
            # No public name: DataLoader leaves it to the garbage collector, which may come late.
            self._iterator._shutdown_workers()
        self._iterator = self._loader._iterator = None


class _BatchReader:
    """A dataset whose item k is batch k of one rank, or the text of a ValueError: a worker's own has many lines."""

    def __init__(self, samples, batch, rank, world_size, seed):
        self.samples, self.batch, self.rank, self.world_size, self.seed = samples, batch, rank, world_size, seed
        self._epoch, self._permutation = None, None

    def __getitem__(self, number: int):
        epoch, step = divmod(number, len(self.samples) // (self.batch * self.world_size))
        if epoch != self._epoch:
            order = np.random.default_rng([self.seed, epoch]).permutation(len(self.samples))
            self._epoch, self._permutation = epoch, order
        start = (step * self.world_size + self.rank) * self.batch
        try:
            rows = [self.samples.read(index) for index in self._permutation[start : start + self.batch].tolist()]
        except ValueError as error:
            return str(error)
        return {name: np.stack([row[name] for row in rows]) for name in NAMES}
