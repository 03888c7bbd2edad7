"""Two linear layers, trained by SGD, and variants that are sound, that lie or that break: to test the measurement.

python -m benchmarks.run --model tests.lying_model --variants eager,graph_step,drops
"""

from graph_worth.contract import Training, parse
from tests.lying_model.config import FACTS, PRESETS, Config

if __name__ == "__main__":
    args = parse("tests.lying_model", Config, PRESETS, **FACTS)

from graph_worth.script.session import session
from tests.lying_model.state import State


def build(config, device, ranks):
    state = State(config, device, ranks.rank, ranks.world_size)
    return Training(
        state=state,
        results=state.read_losses,
        grad_norms=state.read_grad_norms,
        named_state=state.named_state,
        reset=state.reset,
        batch_class=state.batch_class,
        card=["two linear layers"],
        flops=1.0,
        flops_convention="none",
        items=config.batch,
        unit="rows",
    )


if __name__ == "__main__":
    with session(args, build) as (run, log):
        for index in log.steps():
            run.step(index)
