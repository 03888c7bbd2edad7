"""The variant that launches compiled regions of a model on the memory of their callers."""

import torch

from graph_worth.capture.graph_error import CaptureError
from graph_worth.capture.parameterized import sums
from graph_worth.compiled import MOST_GRAPHS, Compiled
from graph_worth.made_variant import Capture, entered
from graph_worth.measuring import coverage


class Parameterized(Compiled):
    """torch.compile(backend="parameterized") of some functions of the model, called by the eager step.

    The operators are eager's. No region has a pool or a static input. `capture.report` has a row for each region, the
    share of forward and backward that they cover, and what new addresses cost.

    Args:
        state: of the run.
        step: step(state, index), the eager step.
        functions: (object, attribute) of each function that is replaced.
        what: the functions in words, for the strategy.
        capture: the variant's.
        summed: parameters of each layer whose hooks add gradients to main_grad (capture/parameterized/sums.py).
            The step uses each once in a backward pass, which is loss.backward().

    Raises:
        CaptureError: a region cannot be launched on other memory, or the compiler made none.
    """

    def __init__(self, state, step, functions, what: str, summed=(), *, capture: Capture):
        # Imports the compiler, which takes seconds.
        from graph_worth.capture.parameterized import backend

        self.regions = backend.Regions()
        self._summed = list(summed)
        self.replace(state, step, functions, capture, backend="parameterized", dynamic=False, fullgraph=True)
        self.capture.strategy = f"parameterized launches of {what}, no pool and no static inputs"
        self.capture.pools.append(self.regions)
        with entered(self):
            with (
                self.capture.timed("capture_s"),
                backend.collecting(self.regions),
                torch._dynamo.config.patch(recompile_limit=MOST_GRAPHS),
            ):
                self.compile_steps()
            if not self.regions.graphs:
                raise CaptureError(f"the compiler made no graph of {what}")
            self.count_replays()
            counted = coverage.measure(self.step, self.regions.graphs, state.device.type == "cuda")
            counted |= coverage.patching(self.step, self.regions.graphs)
            self.capture.report = {**counted, "regions": [region.row() for region in self.regions.graphs]}

    def enter(self):
        """Put the compiled functions in the place of the model's."""
        super().enter()
        sums.enter(self._summed)

    def leave(self):
        """Put the model's own functions back."""
        sums.leave(self._summed)
        super().leave()
