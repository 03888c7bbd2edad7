"""Static inputs that a data source fills, with the next batch on its way while a step runs."""

import torch

from graph_worth.capture.pool import StaticInputs


class DoubleBuffered:
    """Device buffers at fixed addresses that a graph reads, filled from a source of host batches.

    buffers: name -> tensor, all on one device. source: `next()` gives a dict of host tensors of the same names, shapes
    and dtypes (ValueError names the one that does not fit), `reset()` goes back to batch 0.

    On CUDA a batch goes from the host to one of two staging sets on a stream of its own, while the step before runs,
    and from there to the buffers on the caller's stream. Kernels on that stream would slow all replays of the process,
    copies from the host do not (docs/one_stream.md). Only the device waits: the host never does, but for the source.
    Batches should be pinned; torch's allocator of pinned memory keeps theirs until the copy is done.
    On the CPU a batch is copied into the buffers and nothing is read ahead.
    """

    def __init__(self, buffers: dict[str, torch.Tensor], source):
        self._static = StaticInputs(buffers)
        self.buffers = self._static.buffers
        self._source = source
        self._device = next(iter(buffers.values())).device
        if self._device.type == "cuda":
            self._staging = [{name: torch.empty_like(buffer) for name, buffer in buffers.items()} for _ in range(2)]
            self._staged = [torch.cuda.Event() for _ in range(2)]
            self._consumed = [torch.cuda.Event() for _ in range(2)]
            self._stream = torch.cuda.Stream(self._device)
            # The allocator may have given memory that earlier work of the current stream still uses.
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        # The staging set that holds the next batch.
        self._ahead: int | None = None

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.buffers[name]

    def load(self) -> None:
        """The next batch into the buffers, in the order of the current stream."""
        if self._device.type == "cpu":
            self._static.load(self._source.next())
            return
        index = self._stage(0) if self._ahead is None else self._ahead
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(self._staged[index])
        self._static.load(self._staging[index])
        self._consumed[index].record(stream)
        self._stage(1 - index)

    def reset(self) -> None:
        """Begin at batch 0 again; what is staged is thrown away."""
        # Copies on the way are overwritten in order: all are on one stream.
        self._ahead = None
        self._source.reset()

    def skip(self, count: int) -> None:
        """Pass `count` batches over, after a reset."""
        for _ in range(count):
            self._source.next()

    def _stage(self, index: int) -> int:
        """Start copying the source's next batch to staging set `index`, once the device has read what is there.

        Returns `index`.
        """
        batch = self._source.next()
        self._static.check(batch)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._consumed[index])
            for name, staging in self._staging[index].items():
                staging.copy_(batch[name], non_blocking=True)
            self._staged[index].record(self._stream)
        self._ahead = index
        return index
