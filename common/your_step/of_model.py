"""The doctor on a model of the suite: `python -m MODEL.train --doctor`.

The model's eager step is looked at as a step of a user's file is. Its sections "data" and "report", which no variant
captures, are left out. The graphs that are tried are the model's own, each beside its reference.
"""

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch

from common import variant as variants
from common import variant_table
from common.measuring import torch_settings
from common.measuring.block import period_of
from common.your_step.doctor import Diagnosis, Graph, diagnosed, prepare

# Where batches never come again.
NUM_CLASSES = 64


class ModelState:
    """The state of a model, as the doctor needs it; see `common.your_step.state.StepState`.

    Batches come in the order of the steps, so steps before the one that is asked for are made.

    Args:
        state: of the model.
        eager_step: eager_step(state, index).
        device: that the step runs on.
        path: of the model's train.py.
    """

    binds_gradients, parity_steps, text = False, 4, ""

    def __init__(self, state: variants.State, eager_step: Callable, device: torch.device, path: Path):
        self.model_state, self._eager_step, self.device, self.path = state, eager_step, device, path
        self._next = 0
        self.classes = [state.batch_class(index) for index in range(period_of(state.batch_class) or NUM_CLASSES)]
        self.batches = list(range(len(self.classes)))
        own = list(vars(state).values())
        self.modules = [each for each in own if isinstance(each, torch.nn.Module)]
        self.optimizers = [each for each in own if isinstance(each, torch.optim.Optimizer)]
        self.owned = [*self.modules, *self.optimizers]
        self.batch_class, self.read_losses = state.batch_class, state.read_losses

    @property
    def snapshot(self) -> SimpleNamespace:
        """The tensors that training carries from step to step."""
        return SimpleNamespace(tensors=list(self.model_state.named_state()), generators=[])

    def reset(self) -> None:
        """Put everything back to the seeded start."""
        self.model_state.reset()
        self._next = 0

    def batch(self, index: int) -> int:
        """Make the steps before a step, and return its index."""
        while self._next < index:
            self.step(self._next)
        return index

    def step(self, index: int) -> None:
        """Make the next step."""
        self._eager_step(self.model_state, index)
        self._next = index + 1

    train = step


def run(workload: variants.Workload, config, device: torch.device, prog: str) -> dict:
    """Print the diagnosis of a model's eager step.

    Args:
        workload: of the model.
        config: of the training.
        device: that it runs on.
        prog: name of the program.

    Returns:
        "status" as of a training by hand, and "exit_status".
    """
    prepare(device)
    torch_settings.prepare(device)
    try:
        state = workload.build(config, device)  # type: ignore[operator]
        found = _diagnosed(workload, state, device)
    except Exception as error:
        status, message = variants.status_of(error, device)
        if status is None or isinstance(error, ValueError):
            raise
        print(f"{prog}: {status}: {message}", file=sys.stderr)
        return {"status": status}
    print(found.text())
    if isinstance(state, variants.Closes):
        state.close()
    return {"status": "pass", "exit_status": found.status}


def _diagnosed(workload, state, device) -> Diagnosis:
    path = Path(sys.modules[workload.reference.__module__].__file__ or "")
    made = ModelState(state, workload.reference, device, path)
    declared = [each for each in workload.variants.values() if each.kind == "graph"]
    declared = [each for each in declared if each.headline] or declared
    references = {each.reference for each in declared} - {"eager"}
    steps = {name: variant_table.construct(workload.variants[name], state).step for name in sorted(references)}

    def make(variant, made):
        return variant_table.construct(variant, made.model_state)

    graphs = [Graph(each.name, functools.partial(make, each), (), steps.get(each.reference)) for each in declared]
    return diagnosed(made, graphs)  # type: ignore[arg-type]
