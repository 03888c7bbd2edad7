"""A training script's session: it builds the training, makes the variant, and gives both to the loop in the script.

    with session(args, build) as (run, log):
        for index in log.steps():
            run.step(index)

With --worker the harness makes the steps (graph_worth/measuring/worker.py). The loop gets a `run` that does
nothing, and shows that it makes all steps, as it has to by hand.
"""

import contextlib
import functools
import gc
import importlib
import math
import sys
import traceback
from types import SimpleNamespace
from typing import Any

import torch

from graph_worth import contract
from graph_worth.config import EXIT_STATUS, Arguments, mistakes_in_one_line
from graph_worth.contract import Training, variants_of
from graph_worth.folders import script_of
from graph_worth.made_variant import Capture, Refused, Unsupported, complete_variant
from graph_worth.measuring.marks import mark, section
from graph_worth.parallel import collectives
from graph_worth.script import by_hand
from graph_worth.text import printed_as_text

__all__ = ["Model", "mark", "section", "session"]


class Model:
    """A script's training and the makers of its variants.

    Args:
        args: of `graph_worth.contract.parse`.
        build: build(config, device, ranks) returns a `contract.Training`. ranks has rank, world_size, preset,
            the preset's name, and traits, those of the variant on the command line.
        device: of this rank.
        rank: of this process in the process group.
        world_size: ranks of the process group.

    Attributes:
        training: of `build`, complete.
        kinds: variant -> eager, graph or compile.
        config: as it can run here, once the training is built.
    """

    training: Training

    def __init__(self, args: Arguments, build, device: torch.device, rank: int = 0, world_size: int = 1):
        self.name, self.options, self.config = args.model, args.run, args.config
        self.device, self.rank, self.world_size = device, rank, world_size
        self.declared, self.path = args.variants, contract.path_of(script_of(args.model))
        self.kinds = {name: declared.kind for name, declared in args.variants.items()}
        self._build = build

    def build(self) -> Training:
        """Build the training, torch seeded, so that two builds give one start; Refused for a ValueError."""
        torch.manual_seed(0)
        try:
            ranks = SimpleNamespace(rank=self.rank, world_size=self.world_size, preset=self.options.preset)
            ranks.traits = self.declared[self.options.variant].traits
            training = self._build(self.config, self.device, ranks)
            if not isinstance(training, Training):
                raise ValueError(f"build returned a {type(training).__name__}, not a graph_worth.contract.Training")
            self.config = training.config or self.config
            self.training = complete_training(training, self.device)
        except ValueError as error:
            raise Refused(str(error)) from error
        return self.training

    def make(self, name: str) -> Any:
        """Make a variant (`made_variant.Variant`) from the training; Unsupported where it cannot run here."""
        declared, code = self.declared[name], self._code_of(name)
        capture = Capture(strategy=declared.help, state=self.training.state, device=self.device)
        if declared.takes_index:
            capture.strategy = "none"
            variant: Any = SimpleNamespace(step=functools.partial(code.code, self.training.state))
            capture.warm_up(code.warm_up)
        else:
            variant = code.code(self.training.state, capture)
        return complete_variant(variant, capture, code.promised(self.config)[1])

    def promises(self, name: str) -> tuple[int | None, int | None]:
        """(graphs, replays a step) of a variant; None: 1 or more."""
        return self._code_of(name).promised(self.config)

    def reference_step(self, name: str):
        """Return step(index) of the variant that parity of `name` compares with."""
        return functools.partial(self._code_of(self.declared[name].reference).code, self.training.state)

    def _code_of(self, name) -> contract.VariantCode:
        code = self._find(name)
        if code is None:
            others = ", ".join(variant for variant in self.declared if self._find(variant))
            raise Unsupported(f"{name} has no code for these settings; {others} have")
        return code

    def _find(self, name):
        for module in self.declared[name].modules:
            for code in variants_of(importlib.import_module(module)):
                if code.name == name and (code.when is None or code.when(self.config)):
                    return code
        return None


def complete_training(training: Training, device: torch.device) -> Training:
    """Derive results, named_state and reset where the script leaves them to us."""
    if not callable(training.results):
        kept = training.results
        training.results = lambda count: [float(kept.get(index, math.nan)) for index in range(count)]
    if training.reset is None or training.named_state is None:
        from graph_worth.snapshot import Snapshot

        if device.type == "cuda":
            modules = [item for item in training.owned if isinstance(item, torch.nn.Module)]
            taken = sum(t.numel() * t.element_size() for module in modules for t in module.state_dict().values())
            if taken > torch.cuda.mem_get_info(device)[0] / 2:
                raise ValueError("a copy of the start takes over half of the free memory: Training needs a `reset`")
        snapshot = Snapshot(list(training.owned), device)
        training.reset = training.reset or snapshot.restore
        training.named_state = training.named_state or (lambda: snapshot.tensors)
    return training


@contextlib.contextmanager
def session(args: Arguments, build):
    """Build, make the variant, and give (run, log) to the script's loop; then exit.

    The exit status is that of EXIT_STATUS, 1 where the run failed, and 2 for a mistake in the arguments, which is one
    line on stderr. build: as of `Model`.
    """
    with (
        printed_as_text(),
        mistakes_in_one_line(f"python -m {script_of(args.model)}"),
        process_group() as (device, rank, world_size),
    ):
        model = Model(args, build, device, rank, world_size)
        if args.run.worker:
            from graph_worth.measuring import worker

            loop = _EmptyLoop(args.config.min_steps)
            try:
                yield loop, loop
            except Exception as error:
                traceback.print_exc()
                loop.error = f" and raised {type(error).__name__}: {error}"
            worker.serve(model, device, rank, world_size, fault=loop.fault(args.model))
            status = "pass"
        else:
            status = (yield from by_hand.run(model))["status"]
    # At its end Python would look through all that was imported, which takes a second.
    gc.freeze()
    sys.exit(EXIT_STATUS.get(status, 1))


class _EmptyLoop:
    """Stands for `run` and `log` of the script's loop: it counts the steps."""

    def __init__(self, count: int):
        self.count, self.num_steps, self.error = count, 0, ""

    def __getattr__(self, name):
        return lambda *arguments, **named: None

    def steps(self):
        return range(self.count)

    def step(self, index):
        self.num_steps += 1

    def fault(self, model) -> str:
        """The reason why the loop would fail by hand, or ""."""
        if self.num_steps == self.count and not self.error:
            return ""
        return f"the loop in {model}/train.py made {self.num_steps} of {self.count} steps{self.error}"


@contextlib.contextmanager
def process_group():
    """(device, rank, ranks) of this process, in a process group where torchrun started several."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    rank, local_rank, world_size = collectives.init(kind)
    try:
        yield (torch.device(kind, local_rank) if kind == "cuda" else torch.device(kind)), rank, world_size
    finally:
        collectives.shutdown()
