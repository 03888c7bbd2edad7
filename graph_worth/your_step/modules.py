"""graph_modules: the largest modules that a graph can hold, each with a graph for its forward and one for its backward.

For a step that reads a value on the host between two networks, or that matches on the host, this is what remains. The
rest of the step runs as it does eagerly.
"""

from collections import Counter
from dataclasses import dataclass

import torch

from graph_worth.capture.pool import CaptureError, Pool
from graph_worth.contract import variant
from graph_worth.made_variant import Capture, Unsupported
from graph_worth.measuring.module_parts import hooked, is_inside, named_parts, shown
from graph_worth.your_step.state import StepState
from graph_worth.your_step.step_watch import watch

# A module of fewer operators costs more in copies than its graph gains.
LEAST_OPERATORS = 8
# That are looked at for modules whose arguments change their shapes.
NUM_STEPS = 5


@dataclass
class Call:
    """The first call of a module in a step.

    Attributes:
        casts_to: dtype of the autocast that it ran under, or None.
        is_plain: its arguments, at least one, and its results are tensors.
        number: calls in all steps that were looked at.
        in_step: calls in the first of them.
        is_of_one_shape: its arguments have the shapes and dtypes of this call in all steps that were looked at.
    """

    path: str
    module: torch.nn.Module
    args: tuple
    casts_to: torch.dtype | None
    is_plain: bool
    number: int = 1
    in_step: int = 1
    is_of_one_shape: bool = True

    def is_repeatable(self) -> bool:
        """Return whether one graph can stand for the calls of the module in all steps."""
        return self.is_plain and self.in_step == 1 and self.is_of_one_shape

    def is_like(self, args) -> bool:
        """Return whether other arguments fit into copies of these."""
        return list(map(_shape_of, args)) == list(map(_shape_of, self.args))


def _shape_of(argument):
    return (argument.shape, argument.dtype) if isinstance(argument, torch.Tensor) else None


@variant("graph_modules", kind="graph", graphs=None, headline=True)
class GraphedModules:
    """The largest modules that can be captured, a forward and a backward graph each.

    Raises:
        Unsupported: batches have several shapes, or no module can be captured.
    """

    def __init__(self, state: StepState, capture: Capture):
        if len(set(state.classes)) > 1:
            raise Unsupported("batches of several shapes: graphs of modules have one")
        if not state.modules:
            raise Unsupported("no module was handed over")
        if any(hasattr(parameter, "to_local") for module in state.modules for parameter in module.parameters()):
            raise Unsupported("FSDP gathers a module's weights around its forward, and a graph of the module has none")
        self.state, self.pool = state, capture.pool()
        capture.warm_up(StepState.train)
        chosen = _chosen(state)
        if not chosen:
            raise Unsupported("no module is large enough, is called once, and makes no call that a graph cannot hold")
        # Of a Sequential a number alone says nothing.
        names = {path: name for path, name in shown(state.modules).items() if path.isdigit()}
        capture.strategy = f"forward and backward of {', '.join(names.get(call.path, call.path) for call in chosen)}"
        state.reset()
        with capture.capturing():
            self._graphs = [(call.module, _Graphs(self.pool, call)) for call in chosen]
            # The last forward is the first backward: memory that one frees, the next may use.
            for _, graphs in reversed(self._graphs):
                graphs.capture_backward(self.pool)
        state.reset()

    # A gradient that is copied into a graph may lie otherwise in memory, for which kernels add in another order.
    may_round = True

    def enter(self) -> None:
        """Replace the modules' forward."""
        for module, graphs in self._graphs:
            module.forward = graphs

    def leave(self) -> None:
        """Put the modules' own forward back."""
        for module, _ in self._graphs:
            vars(module).pop("forward", None)

    def step(self, index: int) -> None:
        """Train on batch `index`."""
        self.state.train(index)

    def replays_of(self, index: int) -> int:
        """Return the graphs of all modules: each is replayed once in a step."""
        return len(self.pool.graphs)

    def close(self) -> None:
        """Give the modules their own forward."""
        self.leave()
        self._graphs = []


class _Graphs:
    """The graphs of one module; called in the place of its forward."""

    def __init__(self, pool: Pool, call: Call):
        self.call, self.forward = call, call.module.forward
        self.static = [argument.detach().clone().requires_grad_(argument.requires_grad) for argument in call.args]
        self.parameters = [parameter for parameter in call.module.parameters() if parameter.requires_grad]
        # Casts of an eager step that are cached would be missing in a graph.
        cast = torch.autocast(pool.device.type, call.casts_to, call.casts_to is not None, cache_enabled=False)
        with torch.enable_grad(), cast:
            self.forward_graph, result = pool.capture(lambda: self.forward(*self.static), self.static)
        self.is_single = isinstance(result, torch.Tensor)
        self.outputs = [result] if self.is_single else list(result)
        self.backward_graph = None

    def capture_backward(self, pool: Pool):
        needed = [output for output in self.outputs if output.requires_grad]
        self.wanted = [tensor for tensor in [*self.static, *self.parameters] if tensor.requires_grad]
        if not needed or not self.wanted:
            return
        self.incoming = [torch.zeros_like(output) for output in needed]

        def gradients():
            return torch.autograd.grad(needed, self.wanted, self.incoming, allow_unused=True)

        self.backward_graph, self.gradients = pool.capture(gradients, self.incoming)

    def __call__(self, *arguments):
        if not self.call.is_like(arguments):
            shapes = ", ".join(str(list(argument.shape)) for argument in arguments)
            raise CaptureError(f"{self.call.path} gets arguments of other shapes than in its capture: {shapes}")
        outputs = _Replay.apply(self, len(arguments), *arguments, *self.parameters)
        return outputs[0] if self.is_single else outputs


class _Replay(torch.autograd.Function):
    """Replays in the place of a module. What a graph wrote is copied: the next replay overwrites it."""

    @staticmethod
    def forward(ctx, graphs, count, *tensors):
        ctx.graphs, ctx.count = graphs, count
        with torch.no_grad():
            for static, tensor in zip(graphs.static, tensors[:count], strict=True):
                static.copy_(tensor)
        graphs.forward_graph.replay()
        return tuple(output.detach().clone() for output in graphs.outputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *incoming):
        graphs = ctx.graphs
        needed = [given for given, output in zip(incoming, graphs.outputs, strict=True) if output.requires_grad]
        for static, given in zip(graphs.incoming, needed, strict=True):
            static.copy_(given) if given is not None else static.zero_()
        graphs.backward_graph.replay()
        # An optimizer may keep them as .grad, so they are not the graph's own.
        gradients = iter(None if gradient is None else gradient.clone() for gradient in graphs.gradients)
        inputs = [*graphs.static, *graphs.parameters]
        return None, None, *(next(gradients) if tensor.requires_grad else None for tensor in inputs)


def _chosen(state: StepState) -> list[Call]:
    """The largest modules that a graph can hold, in the order in which they end."""
    calls: dict[torch.nn.Module, Call] = {}
    kind = state.device.type

    def note(path, module, args, kwargs, output):
        if module in calls:
            calls[module].number += 1
            calls[module].is_of_one_shape &= calls[module].is_like(args)
            return
        casts_to = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        results = output if isinstance(output, (list, tuple)) else [output]
        is_plain = bool(args) and not kwargs and all(isinstance(value, torch.Tensor) for value in [*args, *results])
        calls[module] = Call(path, module, args, casts_to, is_plain)

    state.reset()
    with hooked(named_parts(state.modules), note):
        watched = watch(state.step, state.batch(0), state.modules)
        for call in calls.values():
            call.in_step = call.number
        # Shapes may follow values, as those of a detector's proposals.
        for index in range(1, min(len(state.batches), NUM_STEPS)):
            state.train(index)
    bad = {refused.place.module for refused in watched.refused}
    sizes = Counter(operator.place.module for operator in watched.operators)

    def largest(path, module):
        call = calls.get(module)
        size = sum(count for name, count in sizes.items() if is_inside(name, path))
        is_whole = call is not None and call.is_repeatable() and size >= LEAST_OPERATORS
        is_trained = any(parameter.requires_grad for parameter in module.parameters())
        if is_whole and is_trained and not any(is_inside(name, path) for name in bad):
            yield module
            return
        for name, child in module.named_children():
            yield from largest(f"{path}.{name}" if path else name, child)

    chosen = {part for module in state.modules for part in largest("", module)}
    return [call for call in calls.values() if call.module in chosen]
