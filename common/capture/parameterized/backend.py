"""torch.compile(model, backend="parameterized"): each graph of AOTAutograd is launched on the memory of its caller.

    import common.capture.parameterized.backend
    model = torch.compile(model, backend="parameterized")

Operators stay eager's, forward and backward. A graph that cannot be launched so runs eagerly; a `collecting` block
lists all with the reason. Parameters stay at their addresses in the graph, which each call compares; all else moves.
"""

import contextlib
import itertools
import operator
import weakref
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from functorch.compile import default_partition
from torch._dynamo import register_backend
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.cudagraphs import find_input_mutations
from torch.utils._pytree import tree_leaves

from common.capture import memory
from common.capture.checks import RegionRefused
from common.capture.parameterized.driver import DriverError
from common.capture.parameterized.region import capture

_DEVICES = ("cuda", "cpu")
_MAX_CAPTURES = 3
# Results of attention in its schemas.
_SEEDS = ("philox_seed", "philox_offset", "rng_state", "unused")
_RELEASED = "released"
_SAVES_RANDOM_STATE = ("run_and_save_rng_state", "run_with_rng_state", "graphsafe_run_with_rng_state")
# What a captured region counts.
_COUNTS = ("num_launches", "num_patched", "patch_s")


@dataclass
class Region:
    """A graph of AOTAutograd and its capture.

    Attributes:
        name: forward, backward or inference, with a number.
        state: waiting, parameterized or eager.
        reason: why it runs eagerly.
        captures: times that it was captured.
        fixed: indices of the inputs that stay at their addresses.
        addresses: of those.
        earlier: counts of captures that were dropped.
    """

    name: str
    state: str = "waiting"
    reason: str = ""
    captured: Any = None
    captures: int = 0
    fixed: list[int] = field(default_factory=list)
    addresses: list[int] = field(default_factory=list)
    earlier: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_COUNTS, 0))

    def row(self) -> dict[str, Any]:
        """Return what a table shows: name, state and reason.

        Where there is a capture also its report, launches, nodes patched in them and its host seconds.
        """
        row: dict[str, Any] = {"region": self.name, "state": self.state, "reason": self.reason}
        if self.captured is not None:
            counts = self.counts()
            row |= {
                **self.captured.report,
                "launches": counts["num_launches"],
                "patched": counts["num_patched"],
                "patch_s": counts["patch_s"],
            }
        return row

    def launch(self, inputs: list[torch.Tensor]):
        """Launch the captured region on the inputs that are not fixed.

        Returns:
            flat results, and the memory that holds them. None where the driver refused the launch: nothing ran, and the
            region is eager from now on.
        """
        try:
            return self.captured.launch(inputs)
        except DriverError as error:
            # A driver that fails may free nothing either.
            with contextlib.suppress(DriverError):
                self.drop("eager", f"a launch failed: {error}")
            return None

    def counts(self) -> dict[str, Any]:
        """Return num_launches, num_patched and patch_s of the capture and of those before it."""
        return {name: before + getattr(self.captured, name, 0) for name, before in self.earlier.items()}

    @property
    def num_replays(self) -> int:
        """Launches of the captured region."""
        return self.counts()["num_launches"]

    def nodes(self) -> dict[str, int]:
        """Return {kind: number of nodes} of one launch."""
        return self.captured.report["nodes"] if self.captured is not None else {}

    def drop(self, state: str, reason: str) -> None:
        """Free the capture; `state` and `reason` hold from now on."""
        self.earlier = self.counts()
        captured, self.captured, self.state, self.reason = self.captured, None, state, reason
        if captured is not None:
            captured.release()


class Regions:
    """The regions that were called inside a `collecting` block, with the interface of `common.capture.pool.Pool`."""

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
            region.drop("eager", _RELEASED)


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
# Storages that forward regions know to stay: parameters and buffers. Backward regions look for them by address.
_lasting: "weakref.WeakValueDictionary[int, torch.Tensor]" = weakref.WeakValueDictionary()


@register_backend(name="parameterized")
def parameterized(graph_module: torch.fx.GraphModule, example_inputs: list[Any]):
    """Compile a graph of Dynamo; `example_inputs` are fake."""

    def compiler(direction):
        def compile_graph(graph, inputs):
            compiled = _Compiled(graph, inputs, direction)

            # A function: what AOTAutograd wraps around it copies the attributes of functions alone.
            def run(args):
                return compiled(args)

            run._boxed_call = True  # type: ignore[attr-defined]
            return run

        return compile_graph

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
        region.state, region.reason, region.captures = "waiting", "", 0
        region.earlier = dict.fromkeys(_COUNTS, 0)
    for collector in _collectors:
        if not any(region is known for known in collector.all):
            collector.all.append(region)


class _Compiled:
    """One graph, captured at its first call. It takes a list of inputs and empties it, so that they can be freed."""

    def __init__(self, graph: torch.fx.GraphModule, inputs: list[Any], direction: str):
        self._graph = graph
        self.region = Region(f"{direction} {_num_made[direction]}")
        _num_made[direction] += 1
        context = torch._guards.TracingContext.try_get()
        metadata = context.fw_metadata if context is not None else None
        written = find_input_mutations(graph.graph)
        lasting = metadata.static_input_indices if metadata is not None and direction != "backward" else ()
        self.region.fixed = [index for index in lasting if index not in written]
        self._moves = set(written)
        # Autograd may hand over gradients that are still to be conjugated or negated; a launch reads bare memory.
        placeholders = graph.graph.find_nodes(op="placeholder")
        self._tangents = {index for index, node in enumerate(placeholders) if "tangents" in str(node.target)}
        self._lazy: set[int] = set()
        self._reason = _reason_against(graph, inputs)
        if self._reason:
            self.region.state, self.region.reason = "eager", self._reason

    def __call__(self, args: list[Any]):
        region = self.region
        if _collectors:
            _collect(region)
        if region.state == "waiting" and self._reason:
            # It was released with the others.
            region.state, region.reason = "eager", self._reason
        if region.state == "waiting":
            self._capture(args)
        if region.state == "parameterized" and region.addresses != [args[index].data_ptr() for index in region.fixed]:
            self._recapture(args)
        inputs = list(args)
        args.clear()
        if region.state != "parameterized":
            return self._graph(*inputs)
        fixed = set(region.fixed)
        for index in self._lazy:
            inputs[index] = inputs[index].resolve_conj().resolve_neg()
        moving = [tensor for index, tensor in enumerate(inputs) if index not in fixed]
        launched = region.launch(moving)
        return self._graph(*inputs) if launched is None else region.captured.unflatten(launched[0])

    def _recapture(self, args):
        """Capture again where a parameter has moved: from then on it moves."""
        region = self.region
        now = [args[index].data_ptr() for index in region.fixed]
        self._moves |= {index for index, a, b in zip(region.fixed, region.addresses, now, strict=True) if a != b}
        region.drop("eager", f"parameters moved again after {_MAX_CAPTURES} captures")
        if region.captures < _MAX_CAPTURES:
            self._capture(args)

    def _capture(self, args):
        region = self.region
        lasting = {index for index, tensor in enumerate(args) if _lasting.get(tensor.data_ptr()) is not None}
        region.fixed = sorted((lasting | set(region.fixed)) - self._moves)
        for index in region.fixed:
            _lasting[args[index].data_ptr()] = args[index]
        fixed = {index: args[index].detach() for index in region.fixed}
        # Dynamo's guards hold the other inputs to what they are now.
        self._lazy = {index for index, tensor in enumerate(args) if tensor.is_conj() or tensor.is_neg()}
        self._lazy = (self._lazy | self._tangents) - fixed.keys()
        places = [index for index in range(len(args)) if index not in fixed]
        graph, count = self._graph, len(args)

        def run(*moving):
            given = dict(zip(places, moving, strict=True)) | fixed
            return graph(*(given[index] for index in range(count)))

        region.captures += 1
        try:
            if not places:
                raise RegionRefused("all its inputs are parameters: nothing moves")
            moving = [args[index].resolve_conj().resolve_neg() for index in places]
            captured = capture(run, moving, unwritten(self._graph))
            if captured.written:
                _check_separate(args)
                if self._lazy.intersection(places[index] for index in captured.written):
                    raise RegionRefused("it writes an input that may be lazily conjugated or negated")
        except (RegionRefused, DriverError, torch.OutOfMemoryError) as error:
            region.state, region.reason = "eager", str(error).splitlines()[0]
            return
        region.captured, region.state, region.reason = captured, "parameterized", ""
        region.addresses = [args[index].data_ptr() for index in region.fixed]


def _check_separate(inputs):
    """Refuse a region of which two inputs overlap: a launch moves each by itself."""
    ranges = sorted(
        (tensor.data_ptr(), tensor.data_ptr() + memory.extent(tensor), index)
        for index, tensor in enumerate(inputs)
        if tensor.numel()
    )
    for (_, end, one), (start, _, other) in itertools.pairwise(ranges):
        if start < end:
            raise RegionRefused(f"inputs {min(one, other)} and {max(one, other)} share memory: pass one, or a copy")


def unwritten(graph: torch.fx.GraphModule) -> set[int]:
    """Find the seeds of attention without dropout, by index of the result: its kernels leave them as the memory was."""
    (output,) = (node for node in graph.graph.nodes if node.op == "output")
    found = set()
    for index, node in enumerate(tree_leaves(output.args)):
        if not isinstance(node, torch.fx.Node) or node.target is not operator.getitem:
            continue
        source: Any = node.args[0]
        place: Any = node.args[1]
        schema = getattr(source.target, "_schema", None)
        # An operator that returns a list, such as split, has one result in its schema.
        if schema is None or place >= len(schema.returns) or schema.returns[place].name not in _SEEDS:
            continue
        given = dict(zip((argument.name for argument in schema.arguments), source.args, strict=False))
        if not (given | source.kwargs).get("dropout_p", 0.0):
            found.add(index)
    return found


def _reason_against(graph, inputs) -> str:
    """The reason why a graph cannot be captured, from the graph alone; empty where nothing speaks against it."""
    if not any(node.op == "call_function" for node in graph.graph.nodes):
        return "it has no operator"
    for node in graph.graph.nodes:
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            name = node.target.name()
            if name in _SAVES_RANDOM_STATE:
                return f"it saves the random state for a checkpoint ({name}): checkpoint with preserve_rng_state=False"
            if any(isinstance(value, torch.Tensor) and value.device.type == "cpu" for value in inputs):
                return f"it calls {name}, an operator on functions, which no record on the CPU holds"
    for value in inputs:
        if not isinstance(value, torch.Tensor):
            return "a size is symbolic: compile with dynamic=False"
        if any(not isinstance(size, int) for size in value.shape):
            return "a shape is symbolic: compile with dynamic=False"
    devices = {
        value.device
        for node in graph.graph.nodes
        for value in (node.meta.get("val"),)
        if isinstance(value, torch.Tensor)
    }
    if len(devices) != 1:
        return f"it works on {len(devices)} devices: {', '.join(sorted(map(str, devices)))}"
    device = devices.pop()
    return "" if device.type in _DEVICES else f"it works on {device}"
