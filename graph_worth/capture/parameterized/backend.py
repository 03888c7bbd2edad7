"""torch.compile(model, backend="parameterized"): each graph of AOTAutograd is launched on the memory of its caller.

    import graph_worth.capture.parameterized.backend
    model = torch.compile(model, backend="parameterized")

Operators stay eager's, forward and backward. A graph that cannot be launched so runs eagerly; a `collecting` block
lists all with the reason.
"""

import contextlib
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from functorch.compile import default_partition, make_boxed_func
from torch._dynamo import register_backend
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.cudagraphs import find_input_mutations

from graph_worth.capture import tensor_places
from graph_worth.capture.graph_error import CaptureError
from graph_worth.capture.parameterized import sums
from graph_worth.capture.parameterized.region import capture

_RELEASED = "released"
# A user's Triton kernels. Their calls launch kernels as other operators do.
_TRITON = ("triton_kernel_wrapper_functional", "triton_kernel_wrapper_mutation")
_SAVES_RANDOM_STATE = ("run_and_save_rng_state", "run_with_rng_state", "graphsafe_run_with_rng_state")


@dataclass
class Region:
    """A function and its capture.

    name: forward, backward or inference, with a number. state: waiting, parameterized or eager. reason: why it
    runs eagerly. captured: the last capture, which was released where the state is eager.
    """

    name: str
    state: str = "waiting"
    reason: str = ""
    captured: Any = None

    def row(self) -> dict[str, Any]:
        """Return what a table shows: name, state and reason; of a capture also its report."""
        return {"region": self.name, "state": self.state, "reason": self.reason} | self._report()

    def capture(self, fn, inputs: list[torch.Tensor]) -> None:
        """Capture `fn`, as `region.capture` does. Whatever fails leaves the region eager, with the reason.

        CaptureError where this thread captures something already.
        """
        self.captured = None
        try:
            self.captured = capture(fn, inputs)
        except Exception as error:
            if type(error) is CaptureError:
                raise
            self.stop(_in_words(error))
        else:
            self.state, self.reason = "parameterized", ""

    def launch(self, inputs: list[torch.Tensor]):
        """Launch the captured region; return its results, and the memory that holds them.

        None where the launch failed: nothing ran, and the region is eager from now on. CaptureError where it runs
        inside a capture or reads a tensor that was replaced.
        """
        before = self.num_replays
        try:
            return self.captured.launch(inputs)
        except Exception as error:
            if type(error) is CaptureError or self.num_replays != before:
                raise
            self.stop(f"a launch failed: {_in_words(error)}")
            return None

    def stop(self, reason: str) -> None:
        """Free the capture: the region is eager from now on."""
        self.state, self.reason = "eager", reason
        if self.captured is not None:
            self.captured.release()

    def _report(self) -> dict[str, Any]:
        return self.captured.report if self.captured is not None else {}

    @property
    def num_replays(self) -> int:
        """Launches of the captured region."""
        return self._report().get("launches", 0)

    def nodes(self) -> dict[str, int]:
        """Return {kind: number of nodes} of one launch."""
        return self._report().get("nodes", {})


def _in_words(error) -> str:
    text = (str(error).splitlines() or [""])[0]
    # The text of a KeyError is a key.
    return text if text and isinstance(error, RuntimeError) else f"{type(error).__name__}: {text}"


class Regions:
    """The regions that were called inside a `collecting` block, with the interface of a Pool."""

    def __init__(self):
        self.all: list[Region] = []

    @property
    def graphs(self) -> list[Region]:
        """The regions that are launched as graphs."""
        return [region for region in self.all if region.state == "parameterized"]

    @property
    def num_replays(self) -> int:
        """Launches of all regions."""
        return sum(region.num_replays for region in self.all)

    def bytes(self) -> int:
        """Return 0: what a launch needs comes from the caching allocator and goes back to it."""
        return 0

    def release(self) -> None:
        """Free the captures; compiled functions run eagerly from then on."""
        for region in self.all:
            region.stop(_RELEASED)


@contextlib.contextmanager
def collecting(regions: Regions):
    """Gather the regions that are called inside this block. What was released before is captured again."""
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
    # Parameters whose gradients a backward region adds, {index of the forward input: number in the layer}. The first
    # forward call fills it.
    summed: dict[int, int] = {}

    def compiler(direction):
        return lambda graph, inputs: make_boxed_func(_Compiled(graph, inputs, direction, summed))

    compiled = aot_autograd(
        fw_compiler=compiler("forward"),
        bw_compiler=compiler("backward"),
        inference_compiler=compiler("inference"),
        partition_fn=default_partition,
        keep_inference_input_mutations=True,
    )
    return compiled(graph_module, example_inputs)


def _collect(region):
    """Add a region to the open lists. torch keeps compiled functions, so a new variant may call those of an old one."""
    if region.state == "eager" and region.reason == _RELEASED:
        region.state, region.reason, region.captured = "waiting", "", None
    for collector in _collectors:
        if not any(region is known for known in collector.all):
            collector.all.append(region)


class _Compiled:
    """One graph, captured at its first call."""

    def __init__(self, graph: torch.fx.GraphModule, inputs: list[Any], direction: str, summed: dict[int, int]):
        self._graph, self._summed, self._is_backward = graph, summed, direction == "backward"
        # The graph that adds gradients, and what the main_grads of its capture were like.
        self._adding: Any = None
        self._added: list[tuple] = []
        self.region = Region(f"{direction} {_num_made[direction]}")
        _num_made[direction] += 1
        self._written = find_input_mutations(graph.graph)
        self._reason = _reason_against(graph, inputs)

    def __call__(self, *inputs: torch.Tensor):
        region = self.region
        if _collectors:
            _collect(region)
        if region.state == "waiting" and not self._is_backward:
            self._summed.clear()
            self._summed.update(sums.places(inputs) if not self._reason else {})
        totals = self._totals(inputs) if self._is_backward else ()
        graph, inputs = self._adding if totals else self._graph, inputs + totals
        if region.state == "waiting":
            written = {*self._written, *range(len(inputs) - len(totals), len(inputs))}
            reason = self._reason or _reason_against_inputs(inputs, written)
            if reason:
                region.stop(reason)
            else:
                region.capture(graph, [_plain(tensor) for tensor in inputs])
        if region.state == "parameterized":
            launched = region.launch([_plain(tensor) for tensor in inputs])
            if launched is not None:
                return launched[0]
        return graph(*inputs)

    def _totals(self, inputs):
        """The main_grads that a backward region adds to, of the layer whose parameters it reads."""
        layer = sums.layer_of(inputs) if self._summed else []
        totals = sums.totals_of(layer, self._summed.values())
        like = [(total.shape, total.stride(), total.dtype) for total in totals]
        if self.region.state == "waiting":
            self._adding, self._added = sums.adding(self._graph, list(self._summed)) if totals else None, like
        if self._adding is None or (not totals and self.region.state == "eager"):
            return ()
        if like != self._added:
            raise CaptureError(
                "a backward region adds to main_grads of a layer that is not entered, or of another kind"
            )
        return totals


def _plain(tensor):
    """A tensor as bare memory: autograd may hand over gradients that are still to be conjugated or negated."""
    return tensor.resolve_conj().resolve_neg()


def _reason_against_inputs(inputs, written) -> str:
    """The reason why these inputs cannot be launched. Later ones are like them, by Dynamo's guards and `_totals`."""
    if len({tensor.device for tensor in inputs}) > 1:
        # Such as the seeds of attention that ran eagerly, which are on the CPU whatever the compiler says.
        return "its inputs are on several devices"
    if any(inputs[index].is_conj() or inputs[index].is_neg() for index in written):
        return "it writes an input that is lazily conjugated or negated"
    ranges = [(tensor.data_ptr(), tensor.data_ptr() + tensor_places.extent(tensor)) for tensor in inputs]
    for target, (start, end) in ((index, ranges[index]) for index in written):
        for candidate, (first, last) in enumerate(ranges):
            if candidate != target and start < last and first < end:
                # A launch moves each by itself.
                return f"inputs {min(target, candidate)} and {max(target, candidate)} share memory: pass one, or a copy"
    return ""


def _reason_against(graph, inputs) -> str:
    """The reason why a graph cannot be captured, from the graph alone; empty where nothing speaks against it."""
    if not any(node.op == "call_function" for node in graph.graph.nodes):
        return "it has no operator"
    if not inputs:
        return "it has no input that could move"
    for node in graph.graph.nodes:
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            name = node.target.name()
            if name in _TRITON:
                continue
            if name in _SAVES_RANDOM_STATE:
                return f"it saves the random state for a checkpoint ({name}): checkpoint with preserve_rng_state=False"
            return f"it calls {name}, an operator on functions"
    for value in inputs:
        if not isinstance(value, torch.Tensor) or any(not isinstance(size, int) for size in value.shape):
            return "a size or a shape is symbolic: compile with dynamic=False"
    values = [node.meta.get("val") for node in graph.graph.nodes]
    devices = {value.device for value in values if isinstance(value, torch.Tensor)}
    if len(devices) != 1:
        return f"it works on {len(devices)} devices: {', '.join(sorted(map(str, devices)))}"
    device = devices.pop()
    return "" if device.type in ("cuda", "cpu") else f"it works on {device}"
