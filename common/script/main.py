"""The end of every training script: from parsed arguments to trained steps and an exit status.

if __name__ == "__main__":
    main("gpt3", args, workload)
"""

import gc
import os
import sys
from typing import NoReturn

import torch

from common.config import mistakes_in_one_line
from common.measuring import worker
from common.script import by_hand
from common.training.parallel import collectives
from common.training.parallel.groups import Parallel


def train(args, workload, require=None) -> dict:
    """Train one variant in this process, one rank of a job, or do what --worker's other end says.

    args: `common.config.Arguments`. workload(args, device, rank, world_size): gives (args as they can run here,
    `common.variant.Workload`); a ValueError of it is a mistake of the user's. require(args): raises one that no device
    needs to be known for, so before any process group.
    """
    if isinstance(args.config, Parallel):
        # Before any rank waits for the others.
        args.config.ranks(int(os.environ.get("WORLD_SIZE", "1")))
    if require is not None:
        require(args)
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    rank, local_rank, world_size = collectives.init(kind)
    device = torch.device(kind, local_rank) if kind == "cuda" else torch.device(kind)
    try:
        if args.run.worker:
            # It asks what fits when it is told to build: until then another process may have the GPU.
            worker.serve(lambda: workload(args, device, rank, world_size), args, device, rank, world_size)
            return {"status": "pass"}
        args, made = workload(args, device, rank, world_size)
        if args.run.doctor:
            # Imported where it is asked for: no training needs it.
            from common.your_step import of_model

            if world_size > 1:
                raise ValueError("--doctor looks at one process: start it without torchrun")
            return of_model.run(made, args.config, device, f"python -m {made.model}.train")
        return by_hand.run(made, args, device, rank, world_size)
    finally:
        collectives.shutdown()


def main(model: str, args, workload, require=None) -> NoReturn:
    """Call `train`, then exit.

    The status is 0 where the run passed, or could not run here and says so; 1 where it failed; 2 for a mistake in the
    arguments, which is one line on stderr. With --doctor it is the doctor's.
    """
    with mistakes_in_one_line(model):
        result = train(args, workload, require)
    # At its end Python would look through all that was imported, which takes a second.
    gc.freeze()
    if "exit_status" in result:
        sys.exit(result["exit_status"])
    sys.exit(0 if result["status"] in ("pass", "unsupported", "oom") else 1)
