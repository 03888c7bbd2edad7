"""Two linear layers, trained by SGD, and variants that are sound, that lie or that break: to test the measurement.

python -m benchmarks.run --model tests.lying_model --variants eager,graph_step,drops
"""

from common.config import parse
from tests.lying_model.config import ABOUT, PRESETS, VARIANTS, Config

if __name__ == "__main__":
    args = parse("tests.lying_model", Config, PRESETS, VARIANTS, about=ABOUT)

from common.script.main import main
from common.variant import Workload
from tests.lying_model.state import State, eager_step


def workload(args, device, rank, world_size):
    return args, Workload(
        model="tests.lying_model",
        build=lambda config, device: State(config, device, rank, world_size),
        variants=VARIANTS,
        reference=eager_step,
        card=["two linear layers"],
        notes=[],
        flops_per_step=1.0,
        flops_convention="none",
        items_per_step=args.config.batch,
        unit="rows",
        kinds=ABOUT["kinds"],
        promises=ABOUT["promises"],
    )


if __name__ == "__main__":
    main("tests.lying_model", args, workload)
