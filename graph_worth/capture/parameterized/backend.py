"""torch.compile(model, backend="parameterized"): each graph of AOTAutograd is launched on the memory of its caller.

    with backend.collecting(regions := backend.Regions()):
        torch.compile(model, backend="parameterized", dynamic=False)(x).sum().backward()

Operators stay eager's, forward and backward. A graph is captured at its first call inside a `collecting` block, and
runs eagerly where none has captured it.
"""

import contextlib
from collections import Counter
from typing import Any

import torch
from functorch.compile import default_partition, make_boxed_func
from torch._dynamo import register_backend
from torch._dynamo.backends.common import aot_autograd

from graph_worth.capture.graph_error import CaptureError, RegionRefused
from graph_worth.capture.parameterized import sums
from graph_worth.capture.parameterized.region import capture


class Region:
    """A function, and its capture while there is one. name: forward or backward, with a number."""

    def __init__(self, name: str):
        self.name = name
        self.captured: Any = None

    def row(self) -> dict[str, Any]:
        """Return the name and the report of the capture."""
        return {"region": self.name} | self.captured.report

    def launch(self, inputs: list[torch.Tensor]):
        """Launch the captured region; return its results, and the memory that holds them.

        A launch that fails raises: an eager run in its place would be measured as a launch.
        """
        return self.captured.launch(inputs)

    def release(self) -> None:
        """Free the capture: the function runs eagerly until it is captured again."""
        if self.captured is not None:
            self.captured.release()
        self.captured = None

    @property
    def num_replays(self) -> int:
        """Launches of the captured region."""
        return 0 if self.captured is None else self.captured.report["launches"]

    def nodes(self) -> dict[str, int]:
        """Return {kind: number of nodes} of one launch."""
        return self.captured.report["nodes"]


class Regions:
    """The regions that were called inside a `collecting` block, with the interface of a Pool."""

    def __init__(self):
        self.graphs: list[Region] = []

    @property
    def num_replays(self) -> int:
        """Launches of all regions."""
        return sum(region.num_replays for region in self.graphs)

    def bytes(self) -> int:
        """Return 0: what a launch needs comes from the caching allocator and goes back to it."""
        return 0

    def release(self) -> None:
        """Free the captures."""
        while self.graphs:
            self.graphs.pop().release()


@contextlib.contextmanager
def collecting(regions: Regions):
    """Capture the graphs that are called inside this block, and list them."""
    _collectors.append(regions)
    try:
        yield
    finally:
        _collectors.remove(regions)


_collectors: list[Regions] = []
# Regions of each direction that were made.
_num_made: Counter[str] = Counter()


@register_backend(name="parameterized")
def parameterized(graph_module: torch.fx.GraphModule, example_inputs: list[Any]):
    """Compile a graph of Dynamo; `example_inputs` are fake."""
    # Parameters whose gradients a backward region adds, {index of the forward input: number in the layer}. The capture
    # of the forward region fills it.
    summed: dict[int, int] = {}

    def compiler(direction):
        return lambda graph, _: make_boxed_func(_Compiled(graph, direction, summed))

    compiled = aot_autograd(
        fw_compiler=compiler("forward"),
        bw_compiler=compiler("backward"),
        partition_fn=default_partition,
        keep_inference_input_mutations=True,
    )
    return compiled(graph_module, example_inputs)


class _Compiled:
    """One graph."""

    def __init__(self, graph: torch.fx.GraphModule, direction: str, summed: dict[int, int]):
        self._graph, self._summed, self._is_backward = graph, summed, direction == "backward"
        # The main_grads of its capture.
        self._added: list[tuple] = []
        self.region = Region(f"{direction} {_num_made[direction]}")
        _num_made[direction] += 1

    def __call__(self, *inputs: torch.Tensor):
        region = self.region
        if region.captured is None:
            if not _collectors:
                return self._graph(*inputs)
            self._capture(inputs)
        # torch keeps compiled functions, so a new variant may call those of an old one.
        for regions in _collectors:
            if region not in regions.graphs:
                regions.graphs.append(region)
        totals = self._totals(inputs)
        if _kinds(totals) != self._added:
            raise CaptureError("a region adds to main_grads of a layer that is not entered, or of another kind")
        return region.launch([_plain(tensor) for tensor in inputs + totals])[0]

    def _capture(self, inputs):
        if not self._is_backward:
            self._summed.clear()
            self._summed.update(sums.places(inputs))
        totals = self._totals(inputs)
        graph = sums.adding(self._graph, list(self._summed)) if totals else self._graph
        self._added = _kinds(totals)
        if len({tensor.device for tensor in inputs}) > 1:
            # Such as the seeds of attention that ran eagerly, which are on the CPU whatever the compiler says.
            raise RegionRefused("its inputs are on several devices")
        self.region.captured = capture(graph, [_plain(tensor) for tensor in inputs + totals])

    def _totals(self, inputs):
        """The main_grads that a backward region adds to, of the layer whose parameters it reads."""
        if not (self._is_backward and self._summed):
            return ()
        return sums.totals_of(sums.layer_of(inputs), self._summed.values())


def _kinds(tensors):
    return [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors]


def _plain(tensor):
    """A tensor as bare memory: autograd may hand over gradients that are still to be conjugated or negated."""
    return tensor.resolve_conj().resolve_neg()
