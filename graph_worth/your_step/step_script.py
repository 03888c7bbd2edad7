"""A step that somebody hands over, eager and under graphs: `make measure STEP=my_step.py:build`.

docs/your_step.md shows the file.
python -m graph_worth.your_step.step_script --step my_step.py:build --variant graph_step      trains
"""

from graph_worth.contract import Training, parse
from graph_worth.your_step.config import FACTS, PRESETS, Config

if __name__ == "__main__":
    args = parse("common.your_step", Config, PRESETS, **FACTS)

import contextlib

import torch

from graph_worth.capture.asking import answering
from graph_worth.measuring import flops
from graph_worth.script.session import session
from graph_worth.your_step import step_file
from graph_worth.your_step.state import StepState
from graph_worth.your_step.trial import Trial


def build(config: Config, device: torch.device, ranks) -> Training:
    """Make a Training of the function that --step names."""
    step_file.split(config.step)
    state = StepState(config.step, device, "python -m graph_worth.your_step.step_script", config.size)
    state.compile_limit_s = config.compile_limit_s
    counted, notes = flops.of_step(lambda: state.train(0), state.reset)
    return Training(
        state=state,
        results=state.results,
        named_state=state.named_state,
        reset=state.reset,
        batch_class=state.batch_class,
        compared=answering if config.as_captured else contextlib.nullcontext,
        apart=Trial(state, changes_host=False, as_captured=config.as_captured).apart,
        unit="steps",
        flops=counted,
        flops_convention=flops.CONVENTION,
        flops_notes=notes,
        card=[f"step {config.step}"],
    )


if __name__ == "__main__":
    with session(args, build) as (run, log):
        for index in log.steps():
            run.step(index)
