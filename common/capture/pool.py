"""Graphs on either device: capture a callable over static buffers, replay it, count, account, release.

On CUDA a graph is a `torch.cuda.CUDAGraph`; without a GPU it is a host graph (`common/capture/host_graph.py`)
that records the ATen operators and runs them again on the same storages. A script sees one interface:

    pool = Pool(device)
    graph, y = pool.capture(lambda: layer(x))     # y is overwritten by every replay
    x.copy_(new_input); graph.replay()

Rules that hold on both devices, because they hold on the GPU:
- Graphs of one pool are replayed in the order of their capture. Memory that was free when a graph was
  captured may be used by it, whatever an earlier graph left there.
- Captures run on the current stream, which must not be the default one (`common.measuring.torch_settings` sets a side
  stream for the whole process, for eager variants too), after at least one eager pass over the same code.
- What a replay needs from outside the pool (weights, static inputs, gradient buffers) must stay alive
  at its address; what `fn` returned is valid until the next replay of this graph.
"""

import contextlib
import gc
import os

import torch

from common.capture import error_log, memory
from common.capture.checks import CaptureError, check_static_inputs, signature
from common.capture.host_graph import HostGraph, HostPool
from common.capture.host_graph_rules import is_of_library

__all__ = ["CaptureError", "Pool", "StaticInputs"]

_TORCH = os.path.dirname(torch.__file__) + os.sep


class Pool:
    """Graphs that share memory.

    The workspaces of cuBLAS lie in the pool (`new_workspaces`). One has 32 MiB under CUBLAS_WORKSPACE_CONFIG=:4096:8,
    which a run sets; the pool of RNN-T's `graph_step` grew by as much (docs/method.md).

    Args:
        device: of type cuda or cpu.
    """

    def __init__(self, device: torch.device):
        self.device = torch.device(device)
        self.graphs: list[CudaGraph | HostGraph] = []
        self._host = HostPool() if self.device.type == "cpu" else None
        self._handle = torch.cuda.graph_pool_handle() if self._host is None else None
        self._generators: list[torch.Generator] = []
        self._is_borrowed = False

    def register_generator(self, generator: torch.Generator) -> None:
        """Let every replay draw from `generator` of the device. torch's own generator always is registered."""
        if self._host is not None:
            self._host.register_generator(generator)
        else:
            self._generators.append(generator)

    def capture(self, fn, static_inputs=()):
        """Capture fn() and return (graph, what fn returned).

        static_inputs: tensors that fn reads and that the caller overwrites before replays; every replay
        checks that they still have the shape, dtype, strides and address of the capture. Raises
        CaptureError where fn does what no graph can hold (it names operator and line where it can).
        On CUDA fn's kernels are recorded and not run; on the host they run once.
        """
        if self._host is not None:
            graph, result = self._host.capture(fn, static_inputs)
        else:
            graph = CudaGraph(static_inputs)
            # After its capture a workspace is free memory of the pool, like a temporary tensor. A later capture may
            # take it for its workspace or for tensors, so hundreds of graphs need the memory of one. That is as safe
            # as with temporaries: graphs are replayed in the order of their capture, so before an earlier graph runs
            # again, what later ones wrote there has been read.
            with new_workspaces():
                if not self.graphs:
                    _empty_cache()
                result = graph.capture(fn, self._handle, self._generators)
        self.graphs.append(graph)
        return graph, result

    def borrow(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor`, which lies in the pool, without a hold on its memory: what is captured later may use it again.

        For what is read between the replay that writes it and the next one.
        """
        if self._host is not None:
            return self._host.borrow(tensor)
        elements = memory.bytes_at(tensor.data_ptr(), memory.extent(tensor), tensor.device).view(tensor.dtype)
        return elements.as_strided(tensor.shape, tensor.stride())

    @contextlib.contextmanager
    def adopt(self, is_borrowed: bool = False):
        """Count and own the graphs that another library captures inside this block.

        Args:
            is_borrowed: the library keeps its graphs: `release` forgets them.

        It sees every `torch.cuda.CUDAGraph()` made here, whose replays are then counted like ours. Such a library warms
        up on a stream of its own, whose memory is beside what an eager warm-up has cached: that is given back before.
        CUDA only: the host graph has no foreign makers.
        """
        assert self._host is None, "only CUDA graphs are made by other libraries"
        original = torch.cuda.CUDAGraph
        pool = self
        self._is_borrowed = is_borrowed

        class AdoptedGraph(original):  # type: ignore[valid-type,misc]
            def __new__(cls, keep_graph=False):
                return original.__new__(cls, keep_graph=True)

            def __init__(self, keep_graph=False):
                super().__init__(keep_graph=True)
                self.owner = CudaGraph(())

            def capture_end(self):
                super().capture_end()
                # Only now: some libraries make graphs that they never capture.
                self.owner.graph = self
                pool.graphs.append(self.owner)

            def replay(self):
                self.owner.num_replays += 1
                super().replay()

        with new_workspaces():
            _empty_cache()
            torch.cuda.CUDAGraph = AdoptedGraph  # type: ignore[misc]
            try:
                yield
            finally:
                torch.cuda.CUDAGraph = original  # type: ignore[misc]

    def fill_free_memory(self) -> None:
        """Fill what is free in the pool with NaN, between steps: no graph may depend on it."""
        if self._host is not None:
            self._host.poison_free()
            return
        # All bits set is NaN in every format.
        memory.fill_inactive(self._segments(), 0xFF, self.device)

    @property
    def num_replays(self) -> int:
        """Replays of all graphs of the pool since their capture."""
        return sum(graph.num_replays for graph in self.graphs)

    def bytes(self) -> int:
        """Device memory that the pool holds, counted by its allocator segments (host: by storages)."""
        if self._host is not None:
            return self._host.bytes()
        return sum(segment["total_size"] for segment in self._segments())

    def _segments(self) -> list[dict]:
        """The allocator's segments in which the graphs have their memory."""
        graphs = [graph.graph for graph in self.graphs if isinstance(graph, CudaGraph)]
        handles = {graph.pool() for graph in graphs if graph is not None}
        # torch 2.6 takes no mempool_id.
        return [each for each in torch.cuda.memory.memory_snapshot() if each["segment_pool_id"] in handles]

    def release(self) -> None:
        """Drop the graphs and their memory. Needed before a process group ends: graphs hold its resources."""
        for graph in [] if self._is_borrowed else self.graphs:
            graph.release()
        self.graphs.clear()
        if self._host is not None:
            self._host.release()


def _empty_cache():
    """Free the allocator's cache after an eager warm-up: a pool or another stream cannot use it."""
    gc.collect()
    torch.cuda.empty_cache()


@contextlib.contextmanager
def new_workspaces():
    """Let what is captured in this block have cuBLAS workspaces in the memory of its graphs, and eager calls others.

    torch keeps a workspace for each handle (a thread has one) and stream, and allocates it at the first product
    (aten/src/ATen/cuda/CublasHandlePool.cpp). Here all are dropped before and after: the first product of a capture
    allocates one in the graph's pool, and the next eager product one outside.

    Every capture needs this block. A graph that shares the workspace of eager calls writes to memory of others as soon
    as that is freed: by Lightning's Trainer.fit, by torch.compile's mode reduce-overhead, by a parameterized capture,
    and from some version of torch on by the reset of any graph that was captured on the same stream.
    """
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


class CudaGraph:
    """One captured `torch.cuda.CUDAGraph` with a count of its replays."""

    def __init__(self, static_inputs):
        self.graph: torch.cuda.CUDAGraph | None = None
        self.num_replays = 0
        self._static = [(tensor, signature(tensor)) for tensor in static_inputs]

    def capture(self, fn, pool_handle, generators=()):
        """Record fn() on the current stream into memory of the pool, and return what it returned."""
        assert torch.cuda.current_stream() != torch.cuda.default_stream(), "captures need a side stream"
        # torch 2.6 keeps no graph, and instantiates it at the end of the capture.
        keeps = hasattr(torch.cuda.CUDAGraph, "instantiate")
        self.graph = torch.cuda.CUDAGraph(keep_graph=True) if keeps else torch.cuda.CUDAGraph()
        for generator in generators:
            self.graph.register_generator_state(generator)
        torch.cuda.synchronize()
        logged = error_log.end()
        # A collection during capture may free tensors or graphs, which is not allowed then.
        gc_was_on = gc.isenabled()
        gc.disable()
        try:
            # thread_local: a data loader's pin-memory thread or NCCL's watchdog may go on meanwhile.
            self.graph.capture_begin(pool=pool_handle, capture_error_mode="thread_local")
            try:
                result = fn()
            except BaseException:
                # Ending an invalidated capture raises as well; the first error is the one that tells.
                with contextlib.suppress(Exception):
                    self.graph.capture_end()
                raise
            self.graph.capture_end()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            text = str(error) or type(error).__name__
            line = _user_line(error)
            failed = CaptureError(f"{text.splitlines()[0]} (at {line})", place=line, log=error_log.since(logged))
            raise failed from error
        finally:
            if gc_was_on:
                gc.enable()
        if keeps:
            self.graph.instantiate()
        return result

    def replay(self) -> None:
        """Launch the graph on the current stream. Raises CaptureError where a static input is not as captured."""
        if self.graph is None:
            raise CaptureError("replay of a graph that was released")
        check_static_inputs(self._static)
        self.num_replays += 1
        self.graph.replay()

    def release(self) -> None:
        """Drop the graph; it cannot be replayed any more."""
        if self.graph is not None:
            self.graph.reset()
        self.graph = None
        self._static = []


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


def _user_line(error) -> str:
    """File and line of the innermost frame outside torch, Python's library and this file."""
    line, trace = "unknown line", error.__traceback__
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if name != __file__ and not name.startswith(_TORCH) and not is_of_library(name):
            line = f"{name}:{trace.tb_lineno}"
        trace = trace.tb_next
    return line
