"""Configuration of the lying model."""

from dataclasses import dataclass

from common.parallel.groups import Parallel
from graph_worth.config import Timing, needs, option


@dataclass(frozen=True, kw_only=True)
class Config(Parallel, Timing):
    width: int = option(64, "of both layers")
    batch: int = option(32, "rows of a batch")
    period: int = option(1, "batches of so many sizes rotate")
    pause_ms: int = option(0, "a step sleeps for so long: runs that last and leave the processor to others")
    die_rank: int = option(-1, "this rank breaks in its 21st step")
    die_how: str = option("exits", "how", choices=("exits", "refuses", "killed", "hangs", "out_of_memory"))
    too_large: bool = option(False, "the state does not fit into memory")


PRESETS = {"tiny": Config(), "bench": Config()}
FACTS = {
    "files": ["state", "sound", "liars", "breaks"],
    "builds": {"too_large": {"too_large": True}},
    "sweeps": {"batch": ["batch"], "size": ["width", "batch"]},
    "presets_need": lambda preset, config: needs(preset == "bench"),
}
