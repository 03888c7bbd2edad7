"""The doctor on a model of the suite: `python -m MODEL.train --doctor`.

The model's eager step is looked at as a step of a user's file is. Its sections "data" and "report", which no variant
captures, are left out. The graphs that are tried are the model's own, each beside its reference.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch

from common import variant as variants
from common.contract import Training
from common.measuring import torch_settings
from common.measuring.block import period_of
from common.your_step.doctor import Diagnosis, Graph, diagnosed, prepare

# Where batches never come again.
NUM_CLASSES = 64


class ModelState:
    """The state of a model, as the doctor needs it; see `common.your_step.state.StepState`.

    Batches come in the order of the steps, so steps before the one that is asked for are made.
    """

    binds_gradients, parity_steps, text, warm_losses = False, 4, "", ()
    threads, moved_by_build = (), ""

    def __init__(self, training: Training, eager_step: Callable, device: torch.device, path: Path):
        self.training, self._eager_step, self.device, self.path = training, eager_step, device, path
        self._next = 0
        self.batch_class, self.read_losses = training.batch_class, training.results
        self.classes = [self.batch_class(index) for index in range(period_of(self.batch_class) or NUM_CLASSES)]
        self.batches = list(range(len(self.classes)))
        own = list(vars(training.state).values())
        self.modules = [each for each in own if isinstance(each, torch.nn.Module)]
        self.optimizers = [each for each in own if isinstance(each, torch.optim.Optimizer)]
        self.owned = [*self.modules, *self.optimizers]

    @property
    def snapshot(self) -> SimpleNamespace:
        """The tensors that training carries from step to step."""
        return SimpleNamespace(tensors=list(self.training.named_state()), generators=[])

    def reset(self) -> None:
        """Put everything back to the seeded start."""
        self.training.reset()
        self._next = 0

    def batch(self, index: int) -> int:
        """Make the steps before a step, and return its index."""
        while self._next < index:
            self.step(self._next)
        return index

    def step(self, index: int) -> None:
        """Make the next step."""
        self._eager_step(index)
        self._next = index + 1

    train = marked_train = step


def run(model, prog: str) -> int:
    """Print the diagnosis of the eager step of a `common.session.Model`, not built; return the exit status."""
    prepare(model.device)
    torch_settings.prepare(model.device)
    try:
        training = model.build()
        found = _diagnosed(model, training)
    except Exception as error:
        status, message = variants.status_of(error, model.device)
        if status is None or isinstance(error, ValueError):
            raise
        print(f"{prog}: {status}: {message}", file=sys.stderr)
        return 0 if status in ("unsupported", "oom") else 1
    print(found.text())
    if training.close:
        training.close()
    return found.status


def _diagnosed(model, training) -> Diagnosis:
    made = ModelState(training, model.reference_step("eager"), model.device, Path(model.path))
    kinds, declared = model.kinds, model.declared
    chosen = [name for name, kind in kinds.items() if kind == "graph"]
    chosen = [name for name in chosen if declared[name].headline] or chosen
    references = {declared[name].reference for name in chosen} - {"eager"}
    steps = {name: model.make(name).step for name in sorted(references)}
    graphs = [
        Graph(name, lambda _, name=name: model.make(name), (), steps.get(declared[name].reference)) for name in chosen
    ]
    return diagnosed(made, graphs)  # type: ignore[arg-type]
