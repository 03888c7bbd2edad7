"""An endless, reproducible sequence of batches from a folder of shards, read by worker processes.

Batches keep the stored dtype on the way to the device: half precision has steps of 1/64 in means of 16 and more.
"""

import itertools
import sys

import numpy as np
import torch
from torch.utils.data import DataLoader

from stable_diffusion.shards import STORED, BadSample, Dropped, Samples

WORKER_TIMEOUT_S = 300


class Batches:
    """An endless sequence of batches of host tensors, the same in every run with the same arguments.

    batch: samples a rank. num_workers: reading processes, 0 for none. pin_memory: page-locked
    tensors (needs a GPU). Every epoch is shuffled anew from (seed, epoch); step k of all ranks together takes the
    next batch * world_size samples of it, each rank its own, and what does not fill a step is left out.

    Bad samples are found where they are read. Instead of each the batch takes the rank's next good sample beyond the
    batch, which then comes up twice; so no process has to know what another has found, and the sequence depends on
    the files alone. `dropped` lists what this rank has met, each once, and the first few are named on stderr.
    `dtypes`: name -> torch.dtype. ValueError that names --batch and --data where good samples do not fill one step.
    """

    max_named = 10

    def __init__(self, samples: Samples, batch, rank=0, world_size=1, num_workers=0, pin_memory=False, seed=0):
        self.samples, self.dropped, self._bad = samples, [], {}
        self._needed = batch * world_size
        self._needs = f"--batch {batch}" + (f" on {world_size} ranks" if world_size > 1 else "")
        # What the scan found is the same on every rank.
        self._note(samples.dropped, silent=rank != 0)
        self._require_enough()
        self.dtypes = {name: getattr(torch, dtype) for name, dtype in samples.dtypes.items()}
        self._loader = DataLoader(
            _BatchReader(samples, batch, rank, world_size, seed),
            batch_size=None,
            sampler=range(sys.maxsize),
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            # A worker that cannot send what it read says so nowhere else.
            timeout=WORKER_TIMEOUT_S if num_workers else 0,
            pin_memory=pin_memory,
            # DataLoader draws a seed for its workers, from the default generator unless it has its own.
            generator=torch.Generator(),
        )
        self._iterator = iter(self._loader)

    def next(self) -> dict:
        """The next batch: "moments" [batch, 8, size, size] and "context" [batch, tokens, dim] in the stored dtypes."""
        tensors, bad = next(self._iterator)
        for index, reason in bad:
            if index not in self._bad:
                self._bad[index] = reason
                self._note([Dropped(*self.samples.name(index), reason)])
        self._require_enough()
        return tensors

    def reset(self) -> None:
        """Start again at batch 0. Workers stay; what they have read ahead is thrown away."""
        self._iterator = iter(self._loader)

    def close(self) -> None:
        """End the workers, and say how many were dropped without being named. Can be called again."""
        if self._iterator is None:
            return
        if self._loader.num_workers:
            # No public name: DataLoader leaves it to the garbage collector, which may come late.
            self._iterator._shutdown_workers()
        self._iterator = self._loader._iterator = None
        if len(self.dropped) > self.max_named:
            print(f"data: {len(self.dropped)} dropped in all", file=sys.stderr)

    def _note(self, dropped, silent=False):
        for one in dropped:
            self.dropped.append(one)
            if silent or len(self.dropped) > self.max_named:
                continue
            more = "; further ones are counted only" if len(self.dropped) == self.max_named else ""
            print(f"data: dropped {one}{more}", file=sys.stderr)

    def _require_enough(self):
        good = len(self.samples) - len(self._bad)
        if good < self._needed:
            raise ValueError(
                f"--data {self.samples.folder}: {good} good samples of {len(self.samples)}, {self._needs} takes "
                f"{self._needed}: give more shards or a smaller --batch"
            )


class _BatchReader:
    """A dataset whose item k is batch k of one rank, with the bad samples met: (arrays, [(index, reason)])."""

    def __init__(self, samples, batch, rank, world_size, seed):
        self.samples, self.batch, self.rank, self.world_size, self.seed = samples, batch, rank, world_size, seed
        self.steps_per_epoch = len(samples) // (batch * world_size)
        self._bad = {}
        self._permutation = (None, None)

    def __getitem__(self, number: int):
        rows, bad = {}, {}
        for index in itertools.chain.from_iterable(self.indices(later) for later in itertools.count(number)):
            try:
                rows[index] = self._read(index)
            except BadSample as error:
                bad[index] = self._bad[index] = str(error)
                if len(self.samples) - len(self._bad) < self.batch * self.world_size:
                    return None, list(bad.items())
            if len(rows) == self.batch:
                break
        arrays = {name: np.stack([row[name] for row in rows.values()]) for name in STORED}
        return arrays, list(bad.items())

    def indices(self, number: int) -> list[int]:
        """What this rank reads in step `number` if all samples are good."""
        epoch, step = divmod(number, self.steps_per_epoch)
        if self._permutation[0] != epoch:
            generator = np.random.default_rng([self.seed, epoch])
            self._permutation = epoch, generator.permutation(len(self.samples))
        start = (step * self.world_size + self.rank) * self.batch
        return self._permutation[1][start : start + self.batch].tolist()

    def _read(self, index):
        if index in self._bad:
            raise BadSample(self._bad[index])
        return self.samples.read(index)
