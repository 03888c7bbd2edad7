"""The end of the training scripts that declare their variants in a table of their own (`common.variant.Workload`).

if __name__ == "__main__":
    main("gpt3", args, workload)
"""

import functools
import gc
import sys
from pathlib import Path
from typing import Any, NoReturn

from common import session, variant_table
from common.config import mistakes_in_one_line
from common.contract import Training
from common.measuring import worker
from common.script import by_hand
from common.variant import Refused


class TableModel(session.Model):
    """A `common.session.Model` of a script's Workload.

    Args:
        name: the package.
        args: `common.config.Arguments`.
        workload: workload(args, device, rank, world_size) gives (args as they can run here, Workload).
        device: of this rank.
        rank: of this process in the process group.
        world_size: ranks of the process group.
    """

    workload: Any

    def __init__(self, name: str, args, workload, device, rank: int = 0, world_size: int = 1):
        self.args, self.name, self.options, self.config = args, name, args.run, args.config
        self.device, self.rank, self.world_size = device, rank, world_size
        self.kinds: dict = {}
        self.path = Path(sys.modules["__main__"].__file__ or "")
        self._workload = workload

    def build(self) -> Training:
        """See `common.session.Model`."""
        try:
            args, made = self._workload(self.args, self.device, self.rank, self.world_size)
        except ValueError as error:
            raise Refused(str(error)) from error
        self.workload, self.config, self.kinds, self.declared = made, args.config, made.kinds, made.variants
        state = made.build(self.config, self.device)
        self.training = Training(
            state=state,
            results=state.read_losses,
            grad_norms=state.read_grad_norms,
            named_state=state.named_state,
            reset=state.reset,
            batch_class=state.batch_class,
            evaluate=getattr(state, "evaluate", None),
            finish=getattr(state, "finish", None),
            close=getattr(state, "close", None),
            items=made.items_per_step,
            unit=made.unit,
            flops=made.flops_per_step,
            flops_convention=made.flops_convention,
            flops_notes=made.flops_notes,
            peak_flops=made.peak_flops,
            card=made.card,
            notes=made.notes,
            hyperparameters=made.hyperparameters | getattr(state, "hyperparameters", {}),
        )
        return self.training

    def make(self, name: str):
        """See `common.session.Model`."""
        return variant_table.construct(self.workload.variants[name], self.training.state)

    def promises(self, name: str) -> tuple[int | None, int | None]:
        """See `common.session.Model`."""
        return self.workload.promises(self.config, name) if self.workload.promises else (None, None)

    def reference_step(self, name: str):
        """See `common.session.Model`."""
        return functools.partial(self.workload.reference, self.training.state)


def main(model: str, args, workload, require=None) -> NoReturn:
    """Train one variant in this process, one rank of a job, or do what --worker's other end says; then exit.

    Args:
        model: the package.
        args: `common.config.Arguments`.
        workload: see TableModel.
        require: require(args) raises a ValueError that no device needs to be known for, so before any process group.
    """
    with mistakes_in_one_line(model):
        if require is not None:
            require(args)
        with session.process_group(args.config) as (device, rank, world_size):
            made = TableModel(model, args, workload, device, rank, world_size)
            if args.run.worker:
                worker.serve(made, device, rank, world_size)
                status = 0
            elif args.run.doctor:
                # Imported where it is asked for: no training needs it.
                from common.your_step import of_model

                if world_size > 1:
                    raise ValueError("--doctor looks at one process: start it without torchrun")
                status = of_model.run(made, f"python -m {model}.train")
            else:
                status = session.exit_status(by_hand.trained(made)["status"])
    # At its end Python would look through all that was imported, which takes a second.
    gc.freeze()
    sys.exit(status)
