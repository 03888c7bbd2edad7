"""Validation: the forward pass over a held-out batch, eager, or in a graph of its own beside the training's.

state: a llama31.state.State.
"""

from graph_worth import Pool, section
from llama31.pipeline.stage import forward_only


def validate(state) -> None:
    """The mean loss of the held-out batch into state.validation_loss, kernels launched one by one."""
    state.begin_validation()
    forward_only(state)
    state.mean_loss(state.validation_losses, state.validation_loss)


class GraphedValidation:
    """`validate` with `forward_only` in one graph, captured behind the graphs of the training in their pool: nothing
    that one leaves there is read after a replay of the other."""

    def __init__(self, state, pool: Pool):
        self.state = state
        self.graph, _ = pool.capture(lambda: forward_only(state), state.static)

    def run(self) -> None:
        """The loss into state.validation_loss."""
        self.state.begin_validation()
        with section("validation"):
            self.graph.replay()
        self.state.mean_loss(self.state.validation_losses, self.state.validation_loss)
