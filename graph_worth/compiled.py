"""The variant of torch.compile that models share."""

import contextlib
import errno
import os

import torch

from graph_worth import made_variant as variants
from graph_worth.made_variant import Capture, Unsupported, entered

# Of one function: each shape has a graph, and those of variants made earlier count, too. torch's default is 8.
MOST_GRAPHS = 64


class Compiled:
    """torch.compile of some functions of the model, called by the eager step.

    With mode="reduce-overhead" torch captures graphs of its own, which are counted; Unsupported where it makes none.
    """

    def __init__(self, state, step, functions, what: str, mode="default", *, capture: Capture, **options):
        """functions: (object, attribute) of each function that is replaced. what: in words, for the strategy.

        capture: the variant's. options: of torch.compile; its own `options` add to those of the mode, and `on_cpu`
        allows a run on a CPU, whose code no host graph records.
        """
        if not options.pop("on_cpu", False):
            require_compiler(state.device)
        if mode == "reduce-overhead" and variants.eager_memory is not contextlib.nullcontext:
            raise Unsupported("torch's own graphs restore all of their pool, so eager steps cannot share it with them")
        options = {"dynamic": False, "fullgraph": True} | options
        if "options" in options:
            from torch._inductor import list_mode_options

            options["options"] = {**list_mode_options(mode), **options["options"]}
        else:
            options["mode"] = mode
        self.replace(state, step, functions, capture, **options)
        self.capture.strategy = f"torch.compile of {what}, mode {mode}"
        self.pool = self.capture.pool()
        with entered(self):
            # reduce-overhead captures in its second and third step; from then on each step makes as many replays.
            on_gpu = state.device.type == "cuda"
            adopted = self.pool.adopt(is_borrowed=True) if on_gpu else contextlib.nullcontext()
            # Of one function each shape is compiled; the models' have more than a user's step may have by default.
            limit: dict = {"recompile_limit": MOST_GRAPHS} if options["fullgraph"] else {}
            limited = torch._dynamo.config.patch(limit)
            with self.capture.timed("compile_s"), adopted, limited, compiling(self.capture):
                self.compile_steps()
            self.count_replays()
        if mode == "reduce-overhead" and not any(self._replays):
            raise Unsupported(f"torch.compile(mode='reduce-overhead') made no graphs of {what}")

    def replace(self, state, step, functions, capture: Capture, **options):
        """Compile the functions, with options of torch.compile, and keep the model's own."""
        self.state, self._step, self.capture = state, step, capture
        self._originals = [(owner, name, getattr(owner, name)) for owner, name in functions]
        self._compiled = [(owner, name, torch.compile(fn, **options)) for owner, name, fn in self._originals]

    def graphed(self, make, strategy: str):
        """Return make(state, capture), a capture of the step with the compiled functions in it."""
        with entered(self):
            captured = make(self.state, self.capture)
        self.capture.strategy = strategy
        captured.compiled = self  # keeps the compiled kernels, which the graphs launch
        return captured

    def compile_steps(self):
        """Make eager steps until nothing is compiled any more."""
        Capture(strategy="", state=self.state).warm_up(lambda state, index: self.step(index), 4)

    def count_replays(self):
        """Make the steps that come in turn (`state.period`; one without it), and promise the graph replays of each."""
        self._replays = []
        for index in range(getattr(self.state, "period", 1)):
            before = self.capture.num_replays
            self.step(index)
            self._replays.append(self.capture.num_replays - before)

    def step(self, index: int):
        """Train on batch `index`."""
        torch.compiler.cudagraph_mark_step_begin()
        self._step(self.state, index)

    def replays_of(self, index: int) -> int:
        """Return the graph replays of a step: those of such a step after compilation."""
        return self._replays[index % len(self._replays)]

    def enter(self):
        """Put the compiled functions in the place of the model's."""
        _put(self._compiled)

    def leave(self):
        """Put the model's own functions back."""
        _put(self._originals)


@contextlib.contextmanager
def compiling(capture: Capture):
    """Count into the capture's report: passes that are compiled in a block, or come from the cache, and breaks.

    Raises:
        Unsupported: the compiler gave up; a line says why and at which line.
    """
    from torch._dynamo.exc import TorchDynamoException
    from torch._dynamo.utils import counters, graph_break_reasons

    def counted():
        return [counters["inductor"][f"fxgraph_cache_{word}"] for word in ("miss", "hit")]

    before, breaks = counted(), len(graph_break_reasons)
    try:
        yield
    except TorchDynamoException as error:
        raise Unsupported(_gave_up(error)) from error
    counts = (after - start for after, start in zip(counted(), before, strict=True))
    capture.report |= dict(zip(("compiled", "from_cache"), counts, strict=True))
    lines = dict.fromkeys(_at(reason.user_stack, reason.reason) for reason in graph_break_reasons[breaks:])
    capture.report |= {"breaks": [*lines]} if lines else {}


def _gave_up(error) -> str:
    """Why the compiler gave up, and at which line."""
    if os.strerror(errno.ENOSPC) in str(error):
        return "torch.compile: no space is left for the compiler's cache (.cache in the root of the runs)"
    text = str(getattr(error, "inner_exception", None) or error)
    return f"torch.compile: {_at(getattr(error, 'real_stack', None), text)}"


def _at(stack, text: str) -> str:
    """The first line of a text, behind the innermost line of a stack."""
    reason = next((line.strip() for line in text.splitlines() if line.strip()), "it gave up")[:200]
    if not stack:
        return reason
    return f"{os.path.basename(stack[-1].filename)}:{stack[-1].lineno}: {reason}"


def require_compiler(device: torch.device) -> None:
    """Unsupported where compiled code cannot be measured."""
    if device.type != "cuda":
        raise Unsupported("torch.compile is measured on a GPU only: the host graph cannot record compiled code")


def _put(functions):
    for owner, name, function in functions:
        setattr(owner, name, function)
