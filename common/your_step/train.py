"""A step that somebody hands over, eager and under graphs: `make measure STEP=my_step.py:build`.

The file imports nothing of this repository:

    def build(device):
        model, optimizer, batches = ...            # batches: a finite list
        def step(batch): ...; return loss          # a whole eager step
        return step, batches, [model, optimizer]   # what training changes

python -m common.your_step.train --step my_step.py:build --variant graph_step      trains
"""

from common.config import parse
from common.your_step.variants import ABOUT, PRESETS, VARIANTS, Config

MODEL = "common.your_step"

if __name__ == "__main__":
    args = parse(MODEL, Config, PRESETS, VARIANTS, about=ABOUT)

import torch

from common.script.main import main
from common.variant import Workload
from common.your_step import flops, step_file
from common.your_step.graphs import eager_step
from common.your_step.state import StepState


def workload(args, device: torch.device, rank: int, world_size: int):
    """See `common.script.main.train`."""
    prog = f"python -m {MODEL}.train"
    step_file.split(args.config.step)
    made = Workload(model=MODEL, build=None, variants=VARIANTS, reference=eager_step, items_per_step=1.0, unit="steps")

    def build(config, device):
        state = StepState(config.step, device, prog)
        state.compile_limit_s = config.compile_limit_s
        made.flops_per_step, made.flops_notes = flops.of_step(state)
        made.flops_convention = flops.CONVENTION
        return state

    made.build = build
    made.card = [f"step {args.config.step}"]
    return args, made


if __name__ == "__main__":
    main(MODEL, args, workload)
