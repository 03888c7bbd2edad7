"""The ways to run a step that somebody hands over: as it is, in one graph, up to the optimizer, and compiled."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from common.contract import variant
from common.training.snapshot import own_part
from common.variant import Capture, Unsupported
from common.your_step.compiled import CompiledModules
from common.your_step.parts import copy_batch, static_copy, tensors_in
from common.your_step.state import StepState


@variant("eager", kind="eager", help="the step as it is", parity="bitwise", headline=True)
def eager_step(state: StepState, index: int) -> None:
    """Train on batch `index` as the file does. Where issue is measured, layers are marked: the queue drains there."""
    state.marked_train(index)


@variant("graph_step", kind="graph", graphs=None, replays=1, headline=True)
class GraphedStep:
    """The whole step in one graph, one for each shape of batch.

    Its batch is copied to where the graph reads it.
    """

    def __init__(self, state: StepState, capture: Capture):
        if state.device.type == "cpu" and _num_ranks() > 1:
            raise Unsupported("host graphs cannot record torch.distributed: several ranks are captured on GPUs alone")
        self.state, self.pool = state, capture.pool()
        for generator in state.snapshot.generators:
            self.pool.register_generator(generator)
        capture.warm_up(eager_step)
        self.graphs: dict[int, tuple] = {}
        for index, kind in enumerate(state.classes):
            if kind not in self.graphs:
                with capture.capturing():
                    self.graphs[kind] = self.captured(index)
        state.reset()

    def captured(self, index: int) -> tuple:
        """Return (graph, what it reads, its loss, calls that follow a replay) for the shape of batch `index`."""
        self.state.reset()
        static = static_copy(self.state.batch(index), self.state.device)
        graph, loss = self.pool.capture(lambda: self.trace(static), tensors_in(static))
        return graph, static, loss, []

    def trace(self, static):
        """Make the step that is captured, and return its loss."""
        return self.state.step(static)

    def step(self, index: int) -> None:
        """Train on batch `index`."""
        graph, static, loss, calls = self.graphs[self.state.batch_class(index)]
        copy_batch(static, self.state.batch(index))
        graph.replay()
        for call in calls:
            call()
        self.state.keep_loss(index, loss)


@variant("graph_fwd_bwd", kind="graph", graphs=None, replays=1, headline=True)
class GraphedForwardBackward(GraphedStep):
    """All up to the optimizer in one graph, optimizer and schedules eager.

    Calls of optimizers, schedules and loss scalers follow each replay.

    In the capture these calls are only noted. From the first optimizer's step on zero_grad is noted, too, since the
    optimizer still needs the gradients.
    """

    def __init__(self, state: StepState, capture: Capture):
        if not state.optimizers:
            raise Unsupported("no optimizer was handed over, so nothing says where the backward pass ends")
        self._noted: _Noted | None = None
        super().__init__(state, capture)

    def trace(self, static):
        """See GraphedStep."""
        with _Seen(self._noted):
            return super().trace(static)

    def captured(self, index: int) -> tuple:
        """See GraphedStep."""
        calls: list = []
        parameters = [
            p for optimizer in self.state.optimizers for group in optimizer.param_groups for p in group["params"]
        ]
        with _Noted(self.state.owned, parameters, calls) as self._noted:
            graph, static, loss, _ = super().captured(index)
            if self._noted.uses:
                raise Unsupported(f"the step reads its parameters after its optimizer's step, in {self._noted.uses}")
        gradients = [(parameter, parameter.grad) for parameter in parameters]

        def give_gradients():
            for parameter, gradient in gradients:
                parameter.grad = gradient

        return graph, static, loss, [give_gradients, *calls]


class _Noted:
    """Within it, calls of optimizers, schedules and scalers are noted and not made.

    Attributes:
        uses: the first operator that reads a parameter after the first of these calls, or "".
    """

    def __init__(self, owned, parameters, calls):
        self.uses = ""
        self._addresses = {own_part(parameter).untyped_storage()._cdata for parameter in parameters}
        self._calls, self._originals = calls, []
        for each in owned:
            names = ("step", "update", "zero_grad", "unscale_") if _is_stepped(each) else ()
            self._originals += [(each, name, vars(each).get(name)) for name in names if hasattr(each, name)]
        self._is_over = False

    def __enter__(self):
        for each, name, _ in self._originals:
            setattr(each, name, self._noting(name, getattr(each, name)))
        return self

    def __exit__(self, *_):
        for each, name, original in self._originals:
            if original is None:
                delattr(each, name)
            else:
                setattr(each, name, original)  # a schedule has put its own there

    def see(self, func, leaves):
        """Look at an operator of the step."""
        if self._is_over and not self.uses:
            tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided]
            if any(own_part(tensor).untyped_storage()._cdata in self._addresses for tensor in tensors):
                self.uses = str(func)

    def _noting(self, name, original):
        def note(*args, **kwargs):
            if name == "unscale_":
                raise Unsupported("unscale_ comes before what a graph up to the optimizer holds, such as clipping")
            if name == "zero_grad" and not self._is_over:
                return original(*args, **kwargs)
            self._is_over = True
            self._calls.append(lambda: original(*args, **kwargs))
            return None

        return note


class _Seen(TorchDispatchMode):
    """Shows each operator to a _Noted."""

    def __init__(self, noted):
        super().__init__()
        self._noted = noted

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self._noted.see(func, tree_leaves((args, kwargs)))
        return func(*args, **(kwargs or {}))


def _num_ranks() -> int:
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def _is_stepped(each):
    """Say whether it is an optimizer, a schedule or a loss scaler: it steps, and it is no module."""
    return hasattr(each, "step") and not isinstance(each, torch.nn.Module)


@variant("reduce_overhead", kind="compile", graphs=None, parity=1e-2, headline=True)
def reduce_overhead(state: StepState, capture: Capture) -> CompiledModules:
    """torch.compile of the modules, whose mode reduce-overhead captures graphs itself."""
    return CompiledModules(state, eager_step, capture)
