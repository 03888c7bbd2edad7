"""Graphs on either device: capture a callable over static buffers, replay it, count, account, release.

On CUDA a graph is a `torch.cuda.CUDAGraph` (cuda_graph.py beside this file); without a GPU it is a host graph
(host_graph.py) that records the ATen operators and runs them again on the same storages. A script sees one interface:

    pool = Pool(device)
    graph, y = pool.capture(lambda: layer(x))     # y is overwritten by every replay
    x.copy_(new_input); graph.replay()

Rules that hold on both devices, because they hold on the GPU:
- Graphs of one pool are replayed in the order of their capture. Memory that was free when a graph was
  captured may be used by it, whatever an earlier graph left there.
- Captures run on the current stream, which must not be the default one (measuring/torch_settings.py sets a side
  stream for the whole process, for eager variants too), after at least one eager pass over the same code.
- What a replay needs from outside the pool (weights, static inputs, gradient buffers) must stay alive
  at its address; what `fn` returned is valid until the next replay of this graph.
"""

import contextlib
from typing import Any

import torch

from graph_worth.capture.graph_error import CaptureError

__all__ = ["CaptureError", "Pool", "StaticInputs"]


class Pool:
    """Graphs that share memory: host graphs here; on a GPU `Pool(device)` makes a `cuda_graph.CudaPool`.

    Args:
        device: of type cuda or cpu.
    """

    def __new__(cls, device: torch.device):
        """Make the pool of the device's kind; only the code of that kind is loaded."""
        if torch.device(device).type == "cpu":
            return super().__new__(cls)
        from graph_worth.capture.cuda_graph import CudaPool

        return super().__new__(CudaPool)

    def __init__(self, device: torch.device):
        from graph_worth.capture.host_graph import HostPool

        self.device, self._host = torch.device(device), HostPool()
        self.graphs: list[Any] = []

    def register_generator(self, generator: torch.Generator) -> None:
        """Let every replay draw from `generator` of the device. torch's own generator always is registered."""
        self._host.register_generator(generator)

    def capture(self, fn, static_inputs=()):
        """Capture fn() and return (graph, what fn returned).

        static_inputs: tensors that fn reads and that the caller overwrites before replays; every replay
        checks that they still have the shape, dtype, strides and address of the capture. Raises
        CaptureError where fn does what no graph can hold (it names operator and line where it can).
        On CUDA fn's kernels are recorded and not run; on the host they run once.
        """
        graph, result = self._host.capture(fn, static_inputs)
        self.graphs.append(graph)
        return graph, result

    def borrow(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor`, which lies in the pool, without a hold on its memory: what is captured later may use it again.

        For what is read between the replay that writes it and the next one.
        """
        return self._host.borrow(tensor)

    def adopt(self, is_borrowed: bool = False) -> contextlib.AbstractContextManager:
        """Count and own the graphs that another library captures inside this block.

        Args:
            is_borrowed: the library keeps its graphs: `release` forgets them.

        CUDA only: the host graph has no foreign makers.
        """
        raise AssertionError("only CUDA graphs are made by other libraries")

    def fill_free_memory(self) -> None:
        """Fill what is free in the pool with NaN, between steps: no graph may depend on it."""
        self._host.poison_free()

    @property
    def num_replays(self) -> int:
        """Replays of all graphs of the pool since their capture."""
        return sum(graph.num_replays for graph in self.graphs)

    def bytes(self) -> int:
        """Device memory that the pool holds, counted by its allocator segments (host: by storages)."""
        return self._host.bytes()

    def release(self) -> None:
        """Drop the graphs and their memory. Needed before a process group ends: graphs hold its resources."""
        for graph in self.graphs:
            graph.release()
        self.graphs.clear()
        self._host.release()


class StaticInputs:
    """Device buffers at fixed addresses that a step's batch is copied into.

    buffers: name -> tensor on the device. `load(batch)` copies host tensors (pinned, for an asynchronous
    copy) of the same names, shapes and dtypes; ValueError names the one that does not fit. `check(batch)`
    only looks.
    """

    def __init__(self, buffers: dict[str, torch.Tensor]):
        self.buffers = dict(buffers)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.buffers[name]

    def load(self, batch: dict[str, torch.Tensor]) -> None:
        """Copy the batch into the buffers, in the order of the current stream."""
        self.check(batch)
        for name, buffer in self.buffers.items():
            buffer.copy_(batch[name], non_blocking=True)

    def check(self, batch: dict[str, torch.Tensor]) -> None:
        """Raise a ValueError where names, shapes or dtypes of the batch are not those of the buffers."""
        if batch.keys() != self.buffers.keys():
            raise ValueError(f"a batch of {sorted(batch)} where the graph reads {sorted(self.buffers)}")
        for name, buffer in self.buffers.items():
            source = batch[name]
            if source.shape != buffer.shape or source.dtype != buffer.dtype:
                raise ValueError(
                    f"input {name!r} is {tuple(source.shape)} {source.dtype}, "
                    f"captured as {tuple(buffer.shape)} {buffer.dtype}"
                )
