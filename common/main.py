"""The end of every training script: from parsed arguments to a record and an exit status.

if __name__ == "__main__":
    main("gpt3", args, workload)
"""

import os
import sys
from typing import NoReturn

import torch

from common import collectives, measure
from common.config import mistakes_in_one_line
from common.parallel import Parallel


def train(args, workload, require=None) -> dict:
    """Measure one variant in this process, one rank of a job, and return the record.

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
        args, made = workload(args, device, rank, world_size)
        return measure.run(made, args, device, rank, world_size)
    finally:
        collectives.shutdown()


def main(model: str, args, workload, require=None) -> NoReturn:
    """`train`, then exit: 0 where the run passed, or could not run here and says so; 1 where it failed; 2 for a mistake
    in the arguments, which is one line on stderr."""
    with mistakes_in_one_line(model):
        record = train(args, workload, require)
    sys.exit(0 if record["status"] in ("pass", "unsupported", "oom") else 1)
