"""Pools of CUDA graphs, see pool.py beside this file."""

import contextlib
import gc
import os

import torch

from graph_worth.capture import error_log, tensor_places
from graph_worth.capture.graph_error import CaptureError, check_static_inputs, signature
from graph_worth.capture.host_graph_rules import is_of_library
from graph_worth.capture.pool import Pool

_TORCH = os.path.dirname(torch.__file__) + os.sep


class CudaPool(Pool):
    """Graphs of CUDA that share memory.

    The workspaces of cuBLAS lie in the pool (`new_workspaces`). One has 32 MiB on a Hopper GPU; the
    pool of RNN-T's `graph_step` grew by as much (docs/method.md).
    """

    graphs: "list[CudaGraph]"

    def __init__(self, device: torch.device):
        self.device, self.graphs = torch.device(device), []
        self._handle = torch.cuda.graph_pool_handle()
        self._generators: list[torch.Generator] = []
        self._is_borrowed = False

    def register_generator(self, generator: torch.Generator) -> None:
        """See `Pool`."""
        self._generators.append(generator)

    def capture(self, fn, static_inputs=()):
        """See `Pool`."""
        graph = CudaGraph(static_inputs)
        # After its capture a workspace is free memory of the pool, like a temporary tensor. A later capture may take it
        # for its workspace or for tensors, so hundreds of graphs need the memory of one. That is as safe as with
        # temporaries: graphs are replayed in the order of their capture, so before an earlier graph runs again, what
        # later ones wrote there has been read.
        with new_workspaces():
            if not self.graphs:
                _empty_cache()
            result = graph.capture(fn, self._handle, self._generators)
        self.graphs.append(graph)
        return graph, result

    def borrow(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Pool`."""
        elements = tensor_places.bytes_at(tensor.data_ptr(), tensor_places.extent(tensor), tensor.device).view(
            tensor.dtype
        )
        return elements.as_strided(tensor.shape, tensor.stride())

    @contextlib.contextmanager
    def adopt(self, is_borrowed: bool = False):
        """See `Pool`.

        It sees every `torch.cuda.CUDAGraph()` that is made here and counts its replays like ours. Such a library warms
        up on a stream of its own, whose memory is beside what an eager warm-up has cached: that is given back before.
        """
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
        """See `Pool`."""
        # All bits set is NaN in every format.
        tensor_places.fill_inactive(self._segments(), 0xFF, self.device)

    def bytes(self) -> int:
        """See `Pool`."""
        return sum(segment["total_size"] for segment in self._segments())

    def _segments(self) -> list[dict]:
        """The allocator's segments in which the graphs have their memory."""
        handles = {graph.graph.pool() for graph in self.graphs if graph.graph is not None}
        # torch 2.6 takes no mempool_id.
        return [segment for segment in torch.cuda.memory.memory_snapshot() if segment["segment_pool_id"] in handles]

    def release(self) -> None:
        """See `Pool`."""
        for graph in [] if self._is_borrowed else self.graphs:
            graph.release()
        self.graphs.clear()


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


def _user_line(error) -> str:
    """File and line of the innermost frame outside torch, Python's library and this file."""
    line, trace = "unknown line", error.__traceback__
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if name != __file__ and not name.startswith(_TORCH) and not is_of_library(name):
            line = f"{name}:{trace.tb_lineno}"
        trace = trace.tb_next
    return line
