"""The padded variants: an expert has a fixed number of rows, rows beyond it are dropped, missing ones are zeros.

Megatron captures the experts in this mode alone. It trains another model, so the two are compared with each other.
"""

import contextlib

from common.contract import variant
from moe.state import State
from moe.train import GraphedLayers, eager_step

ON_RANKS = "padded experts are all on one rank: take eager_static and graph_static, which drop nothing"


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
