"""The variants beside train.py's: padded ones and torch.compile.

Padded: an expert has a fixed number of rows, rows beyond it are dropped, missing ones are zeros. Megatron captures the
experts in this mode alone. It trains another model, so the two are compared with each other.
"""

import functools

from common.variant import Compiled, Eager, require_compiler
from moe.model import ADAPTERS
from moe.state import State

ON_RANKS = "padded experts are all on one rank: take eager_static and graph_static, which drop nothing"
# Matrices whose gradient the compiled parts bring by autograd.
COMPILED = ("qkv", "proj", "router", *ADAPTERS)


class Padded:
    """enter() and leave() around the steps of a variant that pads."""

    state: State

    def enter(self):
        """Give each expert its capacity."""
        self.state.is_padded = True

    def leave(self):
        """Give each expert the rows that chose it, as all other variants do."""
        self.state.is_padded = False


def padded(step):
    """The step with padded experts, with which training by hand compares graphs of the padded variants."""

    @functools.wraps(step)
    def padded_step(state: State, index: int):
        state.is_padded = True
        try:
            step(state, index)
        finally:
            state.is_padded = False

    return padded_step


class EagerPadded(Padded, Eager):
    """Eager with padding."""

    def __init__(self, state: State, step):
        state.exchange.require_no_ranks(ON_RANKS)
        self.state = state
        self.enter()
        try:
            super().__init__(state, step)
        finally:
            self.leave()


class GraphedPadded(Padded):
    """`graph_layer` with padding. parts: the variant that captures it."""

    def __init__(self, state: State, parts):
        state.exchange.require_no_ranks(ON_RANKS)
        self.state = state
        self.enter()
        try:
            self.graphs = parts(state, "layer")
        finally:
            self.leave()
        self.capture = self.graphs.capture
        self.capture.strategy = "layer x microbatch, forward and backward, rows dropped and padded"

    def step(self, index: int):
        """One training step."""
        self.graphs.step(index)

    def replays_of(self, index: int) -> int:
        """Return the replays of a step."""
        return self.graphs.replays_of(index)

    def close(self):
        """Release the graphs."""
        self.graphs.close()


class CompiledParts(Compiled):
    """torch.compile of each layer's attention and router, in plain torch; the experts keep their own kernels.

    The rows' order and the experts stay eager: their kernels are fused already, and write weight gradients into
    main_grad, which a compiled backward cannot. Matrices of the compiled parts get theirs from autograd, in tensors of
    their own that a hook copies. Where attention has windows, sinks or packed documents, its flash kernel is called
    between two compiled pieces.
    """

    def __init__(self, state: State, step, mode: str):
        require_compiler(state.device)
        self.handles: list = []
        functions = [(layer, name) for layer in state.layers for name in ("attention", "route")]
        super().__init__(state, step, functions, "attention and router of each layer", mode, fullgraph=False)

    def enter(self):
        """Put in the compiled functions, and the hooks that take their gradients."""
        super().enter()
        self.handles = self.state.keep_gradients(lambda name: name in COMPILED)

    def leave(self):
        """Take both out."""
        super().leave()
        for handle in self.handles:
            handle.remove()
        self.handles = []
