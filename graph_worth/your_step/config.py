"""Settings of a step that somebody hands over (no torch here)."""

from dataclasses import dataclass
from typing import Any

from graph_worth.contract import Timing, needs, option

# A step of which a graph can remove less than this share of the time is not worth a capture.
LEAST_GAIN = 1.01


@dataclass(frozen=True, kw_only=True)
class Config(Timing):
    """Settings of a step that somebody hands over."""

    step: str = option("", "the step: FILE.py:FUNCTION, of a function build(device)")
    step_digest: str = option("", "used by make measure: the file's content")
    size: int = option(0, "used by make sweep: the second argument of build(device, size) (0: it gets none)")
    as_captured: bool = option(False, "used by make measure: compare steps that are told that a stream captures")
    compile_limit_s: float = option(60.0, "seconds after which compiled variants are left out (0: none)")
    min_steps: int = option(10, "steps of a run, unless --steps says otherwise")


PRESETS = {"tiny": Config(), "bench": Config()}

FACTS: dict[str, Any] = {
    "files": ["graphs", "modules"],
    "presets_need": lambda preset, config: needs(preset == "bench"),
}
