"""The ways to run a step that somebody hands over: as it is, in one graph, up to the optimizer, and compiled."""

import contextlib
import functools
import signal
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from graph_worth.compiled import Compiled, require_compiler
from graph_worth.contract import variant
from graph_worth.made_variant import Capture, Unsupported, entered
from graph_worth.parallel.host_messages import is_distributed
from graph_worth.snapshot import storage_id
from graph_worth.your_step.parts import tensors_in
from graph_worth.your_step.state import StepState
from graph_worth.your_step.step_graph import StepGraph


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
        if state.device.type == "cpu" and is_distributed():
            raise Unsupported("host graphs cannot record torch.distributed: several ranks are captured on GPUs alone")
        self.state, self.pool = state, capture.pool()
        for generator in state.snapshot.generators:
            self.pool.register_generator(generator)
        capture.warm_up(eager_step)
        self.graphs: dict[int, tuple[StepGraph, list]] = {}
        for index, kind in enumerate(state.classes):
            if kind not in self.graphs:
                with capture.capturing():
                    self.graphs[kind] = self.captured(index)
        state.reset()

    def captured(self, index: int) -> tuple[StepGraph, list]:
        """Return the graph of the shape of batch `index`, and calls that follow a replay."""
        self.state.reset()
        return StepGraph(self.pool, self.trace, self.state.batch(index), self.state.device), []

    def trace(self, static):
        """Make the step that is captured, and return its loss."""
        return self.state.step(static)

    def step(self, index: int) -> None:
        """Train on batch `index`."""
        graph, calls = self.graphs[self.state.batch_class(index)]
        loss = graph.replay(self.state.batch(index))
        for call in calls:
            call()
        self.state.keep_loss(index, loss)


@variant("graph_fwd_bwd", kind="graph", graphs=None, replays=1, headline=True)
class GraphedForwardBackward(GraphedStep):
    """All up to the optimizer in one graph, optimizer and schedules eager.

    Calls of optimizers, schedules and loss scalers follow each replay: in the capture they are only noted. From the
    first optimizer's step on zero_grad is noted, too, since the optimizer still needs the gradients.
    """

    def __init__(self, state: StepState, capture: Capture):
        if not state.optimizers:
            raise Unsupported("no optimizer was handed over, so nothing says where the backward pass ends")
        groups = [group for optimizer in state.optimizers for group in optimizer.param_groups]
        self._parameters = [parameter for group in groups for parameter in group["params"]]
        super().__init__(state, capture)

    def trace(self, static):
        """See GraphedStep."""
        with self._noted:
            return super().trace(static)

    def captured(self, index: int) -> tuple[StepGraph, list]:
        """See GraphedStep."""
        self._noted = _Noted(self.state.owned, self._parameters)
        graph, _ = super().captured(index)
        if self._noted.uses:
            raise Unsupported(f"it reads parameters or gradients after its optimizer's step, in {self._noted.uses}")
        gradients = [(parameter, parameter.grad if kept is None else kept) for parameter, kept in self._noted.gradients]
        dropped = [(parameter, None) for parameter, _ in gradients if parameter.grad is None]
        calls = [functools.partial(_give, gradients), *self._noted.calls, functools.partial(_give, dropped)]
        return graph, calls


def _give(gradients):
    for parameter, gradient in gradients:
        parameter.grad = gradient


@variant("mine", kind="graph", help="the capture that the file itself makes")
class Mine:
    """The step that build's mine() captures and returns. Its graphs are its own, so none are counted."""

    def __init__(self, state: StepState, capture: Capture):
        if state.make_mine is None:
            raise Unsupported('build hands over no capture of its own: {"eager": step, "mine": make_mine} has one')
        self.state, self._following = state, -1
        try:
            self.mine, self._gradients = state.captured_mine()
        except ValueError as error:
            if state.device.type == "cpu":
                raise Unsupported(f"without a GPU: {error}") from error
            raise

    def enter(self) -> None:
        """See `graph_worth.made_variant`."""
        self._following = -1

    def step(self, index: int) -> None:
        """Train on batch `index`."""
        if index != self._following:
            # A reset, or eager steps, have bound others; an optimizer that follows a replay reads those of the capture.
            for parameter, gradient in self._gradients:
                parameter.grad = gradient
        self._following = index + 1
        self.state.keep_loss(index, self.state.call_mine(self.mine, index))


class _Noted(TorchDispatchMode):
    """Within it, calls of optimizers, schedules and scalers are noted and not made.

    Attributes:
        calls: those that were noted.
        gradients: (parameter, its gradient) at the first of these calls; model.zero_grad() may drop it after it.
        uses: the first operator that reads a parameter or a gradient after that call, or "".
    """

    def __init__(self, owned, parameters):
        super().__init__()
        self.calls: list = []
        self.gradients: list = []
        self.uses = ""
        self._parameters, self._addresses = parameters, set()
        # Optimizers, schedules and loss scalers.
        self._stepped = [item for item in owned if hasattr(item, "step") and not isinstance(item, torch.nn.Module)]
        self._patches = contextlib.ExitStack()

    def __enter__(self):
        for holder in self._stepped:
            for name in ("step", "update", "zero_grad", "unscale_"):
                if hasattr(holder, name):
                    noting = self._noting(name, getattr(holder, name))
                    self._patches.enter_context(mock.patch.object(holder, name, noting))
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self._patches.close()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.calls and not self.uses and not self._addresses.isdisjoint(map(storage_id, tensors_in((args, kwargs)))):
            self.uses = str(func)
        return func(*args, **kwargs)

    def _noting(self, name, original):
        def note(*args, **kwargs):
            if name == "unscale_":
                raise Unsupported("unscale_ comes before what a graph up to the optimizer holds, such as clipping")
            if name == "zero_grad" and not self.calls:
                return original(*args, **kwargs)
            if not self.calls:
                self.gradients = [(parameter, parameter.grad) for parameter in self._parameters]
                tensors = (tensor for pair in self.gradients for tensor in pair if tensor is not None)
                self._addresses = {storage_id(tensor) for tensor in tensors} - {None}
            self.calls.append(functools.partial(original, *args, **kwargs))
            return None

        return note


class _TooLong(BaseException):
    """No Exception: the compiler catches those."""


@contextlib.contextmanager
def deadline(limit_s: float):
    """Interrupt a block of the main thread that takes more than limit_s seconds (0: no limit), which is Unsupported."""
    if not limit_s:
        yield
        return

    def stop(number, frame):
        raise _TooLong

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    except _TooLong:
        raise Unsupported(
            f"torch.compile takes more than {limit_s:g} s; a variant that --variants names waits for it"
        ) from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _forwards(state):
    if not state.modules:
        raise Unsupported("no module was handed over, so there is nothing to compile: give it with build's third value")
    return [(module, "forward") for module in state.modules]


@variant("compile", kind="compile", parity=1e-2, headline=True, apart="compiled")
class CompiledModules(Compiled):
    """torch.compile of the modules, without graphs.

    Random numbers are eager's, in timed blocks, too, whose losses are compared. On a CPU it runs where it is named.
    """

    mode = "default"

    def __init__(self, state: StepState, capture: Capture):
        if state.gave_up_compiling:
            raise Unsupported(state.gave_up_compiling)
        is_named = self.mode == "default" and not state.compile_limit_s
        options = {"fullgraph": False, "options": {"fallback_random": True}, "on_cpu": is_named}
        super().__init__(state, eager_step, _forwards(state), "the modules", mode=self.mode, capture=capture, **options)
        self.numbers = ", with eager's random numbers in timed blocks, too" if state.snapshot.has_drawn() else ""
        self.capture.strategy += self.numbers

    def compile_steps(self) -> None:
        """Make eager steps on batches of each shape until nothing is compiled any more."""
        state = self.state
        indices = [*range(4), *(index for index, kind in enumerate(state.classes) if kind not in state.classes[:4])]
        try:
            with deadline(state.compile_limit_s):
                Capture(strategy="", state=state).warm_up(lambda _, at: self.step(indices[at % len(indices)]), 4)
                for index in indices[4:] * 3:
                    self.step(index)
        except Unsupported as error:
            # Processes that still compile would take the cores of steps that are timed.
            from torch._inductor.async_compile import shutdown_compile_workers

            shutdown_compile_workers()
            torch._dynamo.reset()
            state.gave_up_compiling = str(error)
            raise


@variant("graph_step_compiled", kind="compile", graphs=None, replays=1, parity=1e-2, headline=True, apart="compiled")
class GraphedCompiledStep(GraphedStep):
    """The whole step in one graph, its modules compiled."""

    def __init__(self, state: StepState, capture: Capture):
        if state.device.type == "cpu":
            require_compiler(state.device)
        # It keeps the compiled kernels, which the graph launches.
        self.compiled = CompiledModules(state, capture)
        with entered(self.compiled):
            super().__init__(state, capture)
        capture.strategy = f"the whole step, its modules compiled by torch.compile{self.compiled.numbers}"


@variant("reduce_overhead", kind="compile", graphs=None, parity=1e-2, headline=True, apart="reduce_overhead")
class ReducedOverhead(CompiledModules):
    """torch.compile of the modules, whose mode reduce-overhead captures graphs itself."""

    mode = "reduce-overhead"
