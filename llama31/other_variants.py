"""The variants beside train.py's: torch.compile, with parameterized launches too, and eager with checks on the host.

Each is made of a state and of train.py's eager step.
"""

from common.variant import Compiled, Eager, Unsupported, require_compiler
from common.variant_parameterized import Parameterized
from llama31.state import State


class CheckedEager(Eager):
    """Eager with Megatron's NaN checks: each microbatch's loss and the gradient norm are read on the host."""

    def __init__(self, state: State, step):
        self.state = state
        self.enter()
        try:
            super().__init__(state, step)
        finally:
            self.leave()

    def enter(self):
        """Check."""
        self.state.nan_checks = True

    def leave(self):
        """Check as the config says, as all other variants do."""
        self.state.nan_checks = self.state.config.nan_checks


def compiled(state: State, step, mode: str) -> Compiled:
    """torch.compile of each layer, called by the eager step."""
    require_compiler(state.device)
    return Compiled(state, step, _layers(state), "each layer", mode)


def parameterized(state: State, step) -> Parameterized:
    """Each layer's forward and backward as parameterized launches, called by the eager step."""
    functions = _layers(state)
    return Parameterized(state, step, functions, "each layer", [list(layer.parameters()) for layer in state.layers])


def _layers(state):
    """The functions that the compiler takes."""
    if state.config.layer != "torch" or state.config.precision != "bf16":
        raise Unsupported(
            "te, FP8 and FP4 modules leave the compiler: compare all variants with --layer torch --precision bf16"
        )
    if any({"x"} < kept < state.plan.items.keys() for kept in state.plan.layers):
        raise Unsupported("the compiler takes layers that keep everything or nothing: give --keep all or least")
    return [(layer, "forward") for layer in state.layers]
