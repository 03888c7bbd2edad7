"""The ways to run a step that somebody hands over: as it is, in one graph, up to the optimizer, and compiled."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from common.capture.pool import Pool
from common.variant import Capture, Unsupported, warm_up
from common.your_step.compiled import CompiledModules
from common.your_step.snapshot import own_part
from common.your_step.state import StepState, copy_batch, static_copy


def eager_step(state: StepState, index: int) -> None:
    """Train on batch `index` as the file does."""
    state.train(index)


class EagerStep:
    """The step as it is. In steps that measure issue, layers are marked, so that the queue may be drained there."""

    def __init__(self, state: StepState):
        self.state, self.capture = state, Capture(strategy="none")
        warm_up(state, self.capture, eager_step)

    def step(self, index: int) -> None:
        """Train on batch `index`."""
        self.state.marked_train(index)

    def replays_of(self, index: int) -> int:
        """Return 0: no graph is replayed."""
        return 0

    def close(self) -> None:
        """Nothing to release."""


class GraphedStep:
    """The whole step in one graph for each shape of batch. Its batch is copied to where the graph reads it."""

    strategy = "the whole step"

    def __init__(self, state: StepState):
        if state.device.type == "cpu" and _num_ranks() > 1:
            raise Unsupported("host graphs cannot record torch.distributed: several ranks are captured on GPUs alone")
        self.state, self.pool = state, Pool(state.device)
        for generator in state.snapshot.generators:
            self.pool.register_generator(generator)
        self.capture = Capture(strategy=self.strategy, pools=[self.pool])
        warm_up(state, self.capture, eager_step)
        self.graphs: dict[int, tuple] = {}
        for index, kind in enumerate(state.classes):
            if kind not in self.graphs:
                with self.capture.timed("capture_s"):
                    self.graphs[kind] = self.captured(index)
        state.reset()

    def captured(self, index: int) -> tuple:
        """Return (graph, what it reads, its loss, calls that follow a replay) for the shape of batch `index`."""
        self.state.reset()
        static = static_copy(self.state.batch(index), self.state.device)
        tensors = [leaf for leaf in tree_leaves(static) if isinstance(leaf, torch.Tensor)]
        graph, loss = self.pool.capture(lambda: self.trace(static), tensors)
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

    def replays_of(self, index: int) -> int:
        """Return 1: a graph holds a whole step."""
        return 1

    def close(self) -> None:
        """Release the graphs."""
        self.graphs.clear()
        self.pool.release()


class GraphedForwardBackward(GraphedStep):
    """All of the step but the calls of optimizers, schedules and loss scalers, which follow each replay eagerly.

    In the capture these calls are only noted. From the first optimizer's step on zero_grad is noted, too, since the
    optimizer still needs the gradients.
    """

    strategy = "all up to the optimizer"

    def __init__(self, state: StepState):
        if not state.optimizers:
            raise Unsupported("no optimizer was handed over, so nothing says where the backward pass ends")
        self._noted: _Noted | None = None
        super().__init__(state)

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


def reduce_overhead(state: StepState) -> CompiledModules:
    """torch.compile, whose mode reduce-overhead captures graphs itself."""
    return CompiledModules(state, eager_step)
