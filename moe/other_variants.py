"""The variants beside train.py's: padded ones and torch.compile.

Padded: an expert has a fixed number of rows, rows beyond it are dropped, missing ones are zeros. Megatron captures the
experts in this mode alone. It trains another model, so the two are compared with each other.
"""

import contextlib

from common.contract import variant
from common.variant import Compiled, require_compiler
from moe.model import ADAPTERS
from moe.state import State
from moe.train import GraphedLayers, eager_step

ON_RANKS = "padded experts are all on one rank: take eager_static and graph_static, which drop nothing"
# Matrices whose gradient the compiled parts bring by autograd.
COMPILED = ("qkv", "proj", "router", *ADAPTERS)


@variant(
    "compile",
    kind="compile",
    help="torch.compile of each layer's attention and router; experts in their own kernels, no graphs",
    parity=1e-3,  # compiled kernels round otherwise
)
def compiled(state: State, capture):
    return CompiledParts(state, capture, "default")


@variant(
    "reduce_overhead",
    kind="compile",
    help="the same with torch.compile(mode='reduce-overhead'): graphs as torch makes them",
    graphs=None,
    parity=1e-3,  # compiled kernels round otherwise
)
def reduce_overhead(state: State, capture):
    return CompiledParts(state, capture, "reduce-overhead")


class CompiledParts(Compiled):
    """torch.compile of each layer's attention and router, in plain torch; the experts keep their own kernels.

    The rows' order and the experts stay eager: their kernels are fused already, and write weight gradients into
    main_grad, which a compiled backward cannot. Matrices of the compiled parts get theirs from autograd, in tensors of
    their own that a hook copies. Where attention has windows, sinks or packed documents, its flash kernel is called
    between two compiled pieces.
    """

    def __init__(self, state: State, capture, mode: str):
        require_compiler(state.device)
        self.handles: list = []
        functions = [(layer, name) for layer in state.layers for name in ("attention", "route")]
        what = "attention and router of each layer"
        super().__init__(state, eager_step, functions, what, mode, capture=capture, fullgraph=False)

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


@contextlib.contextmanager
def padded(state: State):
    """Within it each expert has its capacity of rows; else the rows that chose it, as all other variants need it."""
    state.is_padded = True
    try:
        yield
    finally:
        state.is_padded = False


@variant(
    "eager_padded",
    kind="eager",
    help="eager with a fixed number of rows for each expert: rows are dropped and padded",
    reference="eager_padded",
    parity="bitwise",
    traits={"extra_work": "pads experts to their capacity, and drops what is beyond it"},
)
def eager_padded_step(state: State, index: int):
    state.exchange.require_no_ranks(ON_RANKS)
    with padded(state):
        eager_step(state, index)


@variant(
    "graph_moe_padded",
    kind="graph",
    help="each layer whole in graphs as Megatron takes it, rows dropped and padded to a capacity",
    graphs=lambda config: config.layer_passes,
    reference="eager_padded",
    parity="bitwise",
)
class GraphedPaddedLayers(GraphedLayers):
    """A replay pads whatever the switch says, so only the capture needs it."""

    def __init__(self, state: State, capture):
        state.exchange.require_no_ranks(ON_RANKS)
        with padded(state):
            super().__init__(state, capture)
