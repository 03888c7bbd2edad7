"""Host graphs: the stand-in for CUDA graphs on a machine without a GPU.

A capture runs a function once for real and records the ATen operators that it runs, forward, backward and
optimizer; a replay runs them again, in order, on the same storages. It is a test bed and slower than eager: what
a CUDA capture refuses is refused here, and what a CUDA replay gets wrong goes wrong here, visibly.

    pool = HostPool()
    graph, y = pool.capture(lambda: layer(x), static_inputs=(x,))
    x.copy_(new_input); graph.replay()            # y now holds layer(new_input)

Graphs of one pool share fate. On a GPU a graph may use memory that was free when it was captured, so before a
replay every storage of the other graphs that was free then is filled with NaN (integers: 0x5A bytes, booleans:
true), and those that were freed during the capture are filled after it.

What cannot be seen, and is frozen into the graph or missed:
- Python: attributes that are bound anew, control flow, numbers, `data_ptr()`, reads of a generator's own state.
  A parameter whose old storage lives on elsewhere is read where it was; name it in `static_inputs` to see that.
- Devices: all is on the host, so a missing `.to(device)` or a copy from unpinned memory passes.
- What is not an operator: NumPy and C++ code that hold a tensor's memory, and code compiled by torch.compile.
  torch's DDP reduces from C++ hooks; use graph_worth/parallel/collectives.py.
Refused although CUDA could: x[mask] = number in the backward of a custom autograd.Function (masked_fill_ goes).
"""

import torch

from graph_worth.capture.graph_error import CaptureError, check_static_inputs, signature
from graph_worth.capture.host_graph_memory import ExternalStorage, OwnedStorage, View
from graph_worth.capture.host_graph_recorder import Recorder, copy_results, refuse_inside_capture, replaying


class HostGraph:
    """A recorded run. Made by `HostPool.capture`."""

    def __init__(self, pool, recorder, static_inputs, owned):
        self.num_replays = 0
        self._pool = pool
        self._static = static_inputs
        self.owned = list(owned.values())
        for storage in self.owned:
            storage.owner = self
        externals = {
            address: ExternalStorage(recorder.storages[address], operator, line)
            for address, (operator, line) in recorder.read.items()
        }
        self._externals = list(externals.values())
        places = pool.owned | owned | externals

        def tensor_of(leaf):
            return places[leaf.storage].tensor(leaf) if isinstance(leaf, View) else leaf

        self._spent = False
        self._free_before = []
        self._freed_after = []
        self._lines = [(str(call.func), call.line) for call in recorder.calls]
        # The grad mode is set where it changes: under another one nn.LSTM would leave out what backward reads.
        self._runs: list[tuple[bool, list[tuple]]] = []
        written = {storage.address: storage for storage in self.owned}
        for call in recorder.calls:
            if not self._runs or self._runs[-1][0] != call.grad_enabled:
                self._runs.append((call.grad_enabled, []))
            args, kwargs = call.arguments([tensor_of(leaf) for leaf in call.leaves])
            results = [tensor_of(view) for view in call.results]
            self._runs[-1][1].append((call.func, args, kwargs, results))
            for address in call.written():
                if address in pool.owned:
                    written[address] = pool.owned[address]
        self._written = list(written.values())
        self._writers = list({id(storage.owner): storage.owner for storage in self._written}.values())

    def replay(self) -> None:
        """Run the operators again. Raises CaptureError when that would not compute what was captured."""
        if self._pool is None:
            raise CaptureError("replay of a graph that was released")
        refuse_inside_capture("HostGraph.replay", "runs inside a capture")
        check_static_inputs(self._static)
        for external in self._externals:
            external.check()
        num_done = 0
        try:
            with replaying():
                self._poison_others()
                for mode, calls in self._runs:
                    torch._C._set_grad_enabled(mode)
                    for func, args, kwargs, results in calls:
                        value = func(*args, **kwargs)
                        if results:
                            copy_results(results, value)
                        num_done += 1
                for storage in self._freed_after:
                    storage.poison()
        except Exception as error:
            if num_done == len(self._lines):
                raise
            operator, line = self._lines[num_done]
            reason = error.reason if isinstance(error, CaptureError) else ""
            raise CaptureError(f"{operator} at {line} failed at replay: {error}", reason, line) from error
        self.num_replays += 1

    def nodes(self) -> dict[str, int]:
        """{"operator": number of operators that one replay runs}."""
        return {"operator": len(self._lines)}

    def operators(self) -> list[str]:
        """Names of the operators in the order of a replay, such as aten.addmm.default."""
        return [operator for operator, _ in self._lines]

    def release(self) -> None:
        """Give the storages back; those of the tensors that fn returned live as long as these do."""
        if self._pool is not None:
            self._pool._forget(self)
        self._pool = None
        self._static = []
        self._runs, self._externals = [], []
        self.owned, self._written, self._writers, self._free_before, self._freed_after = [], [], [], [], []

    def _poison_others(self):
        graphs = self._pool.graphs
        for graph in graphs[graphs.index(self) + 1 :]:
            if not graph._spent:
                for storage in graph.owned:
                    storage.poison()
                graph._spent = True
        for storage in self._free_before:
            storage.poison()
        for storage in self._written:
            storage.poisoned = False
        for graph in self._writers:
            graph._spent = False


class HostPool:
    """Graphs that share fate: they are replayed in the order of their capture."""

    def __init__(self):
        self.graphs = []
        self.owned = {}
        self._generators = [torch.default_generator]

    def register_generator(self, generator: torch.Generator) -> None:
        """Allow `generator` in captures from now on; every replay draws from it. The default one always is allowed."""
        self._generators.append(generator)

    def capture(self, fn, static_inputs=()):
        """Run fn() once, recording, and return (HostGraph, what fn returned).

        The returned tensors stay, their contents are overwritten by each replay. static_inputs: tensors that are
        overwritten in place before replays, kept alive until release; each replay checks that shape, stride, dtype
        and address are those of the capture. Raises CaptureError for what a graph cannot hold; then, as after an
        error of fn itself, the pool is as before, though fn's own effects stand.
        """
        static_inputs = [(tensor, signature(tensor)) for tensor in static_inputs]
        held = [storage for storage in self.owned.values() if storage.held_outside()]
        free = [storage for storage in self.owned.values() if not storage.held_outside()]
        recorder = Recorder(self.owned, self._generators)
        result = recorder.run(fn)
        # Tensors made under inference mode could not be written outside of it.
        with torch.inference_mode(False):
            owned = {
                address: OwnedStorage(recorder.storages[address], *kind) for address, kind in recorder.produced.items()
            }
            graph = HostGraph(self, recorder, static_inputs, owned)
        graph._free_before = free
        graph._freed_after = [storage for storage in held if not storage.held_outside()]
        self.owned |= owned
        self.graphs.append(graph)
        return graph, result

    def borrow(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` as the pool itself refers to it: its memory counts as free once nobody else holds it."""
        address = tensor.untyped_storage()._cdata
        view = View(address, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        return self.owned[address].tensor(view)

    def poison_free(self) -> None:
        """Fill every storage of the graphs that nobody outside holds."""
        for storage in self.owned.values():
            if not storage.held_outside():
                storage.poison()

    def bytes(self) -> int:
        """Bytes of the storages that the graphs produced, each once."""
        return sum(storage.num_bytes for storage in self.owned.values())

    def release(self) -> None:
        """Release all graphs."""
        for graph in list(self.graphs):
            graph.release()

    def _forget(self, graph):
        self.graphs.remove(graph)
        for kept_graph in self.graphs:
            kept_graph._free_before = [storage for storage in kept_graph._free_before if storage.owner is not graph]
            kept_graph._freed_after = [storage for storage in kept_graph._freed_after if storage.owner is not graph]
        self.owned = {address: storage for address, storage in self.owned.items() if storage.owner is not graph}
