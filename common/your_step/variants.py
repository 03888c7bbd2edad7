"""The ways to run a step that somebody hands over, and what is measured of it (no torch here)."""

from dataclasses import dataclass

from common.config import Timing, needs, option
from common.variant_table import Declared, about, table

GRAPHS = "common.your_step.graphs"
# A step of which a graph can remove less than this share of the time is not worth a capture.
LEAST_GAIN = 1.01


@dataclass(frozen=True, kw_only=True)
class Config(Timing):
    """Settings of a step that somebody hands over."""

    step: str = option("", "the step: FILE.py:FUNCTION, of a function build(device)")
    step_digest: str = option("", "used by make measure: the file's content")
    compile_limit_s: float = option(60.0, "seconds after which reduce_overhead is left out (0: none)")
    min_steps: int = option(10, "steps of a run, unless --steps says otherwise")


PRESETS = {"tiny": Config(), "bench": Config()}

VARIANTS = table(
    Declared("eager", "the step as it is", "eager", f"{GRAPHS}:EagerStep", parity="bitwise", headline=True),
    Declared(
        "graph_step",
        "the whole step in one graph, one for each shape of batch",
        "graph",
        f"{GRAPHS}:GraphedStep",
        graphs=None,
        replays=1,
        headline=True,
    ),
    Declared(
        "graph_fwd_bwd",
        "all up to the optimizer in one graph, optimizer and schedules eager",
        "graph",
        f"{GRAPHS}:GraphedForwardBackward",
        graphs=None,
        replays=1,
        headline=True,
    ),
    Declared(
        "graph_modules",
        "the largest modules that can be captured, a forward and a backward graph each",
        "graph",
        "common.your_step.modules:GraphedModules",
        graphs=None,
        replays=None,
        headline=True,
    ),
    Declared(
        "reduce_overhead",
        "torch.compile of the modules, whose mode reduce-overhead captures graphs itself",
        "compile",
        f"{GRAPHS}:reduce_overhead",
        graphs=None,
        replays=None,
        parity=1e-2,
        headline=True,
    ),
)
ABOUT = about(VARIANTS) | {"presets_need": lambda preset, config: needs(preset == "bench")}
