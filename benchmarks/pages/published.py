"""NVIDIA's published figures of CUDA graphs in training, each with its source, as a model's published.toml declares it.

The figures are other people's: other GPUs, other scale, and a baseline of their own choice. They stand beside
this suite's measurements and are never mixed into them.
"""

import functools
import tomllib
from dataclasses import dataclass, field

from graph_worth.folders import ROOT


@dataclass(frozen=True, kw_only=True)
class Published:
    """One MLPerf submission, or a documented recipe.

    Attributes:
        model: the folder here.
        variant: stands here for NVIDIA's mechanism.
        source: address of the page.
        presets: preset of the model here, the nearest first -> its difference from the submission, in words.
        titles: names of other models, by the beginning of the presets that train them.
        headlines: presets with a line on the front page -> words behind the model's name, or "".
        submitted: MLPerf Training's round of the submission, as v4.1; None for a recipe.
    """

    model: str
    title: str
    mechanism: str
    variant: str
    gain_range: str
    source: str
    presets: dict[str, str]
    titles: dict[str, str] = field(default_factory=dict)
    headlines: dict[str, str] = field(default_factory=lambda: {"bench": ""})
    submitted: str | None = None


@functools.cache
def published() -> tuple[Published, ...]:
    """Return NVIDIA's figures of all models that declare one, by folder."""
    paths = sorted(ROOT.glob("*/published.toml"))
    return tuple(Published(model=path.parent.name, **tomllib.loads(path.read_text())) for path in paths)


def of_model(model: str) -> Published | None:
    """Return NVIDIA's submission of a model; None for a model without one."""
    return next((publication for publication in published() if publication.model == model), None)


def title_of(model: str, preset: str) -> str:
    """Return the name of the model that a preset trains, as in GPT-3 175B; the folder of a model without a name."""
    publication = of_model(model)
    if publication is None:
        return model
    others = [beginning for beginning in publication.titles if preset.startswith(beginning)]
    return publication.titles[max(others, key=len)] if others else publication.title
