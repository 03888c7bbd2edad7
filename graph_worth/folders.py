"""The folders of this code and of models, and the module of a model's script."""

from pathlib import Path

# The repository, or the folder of an installed package: whose code a run's hash is of.
CODE = Path(__file__).resolve().parents[1]
IS_INSTALLED = CODE.name == "_src"
# Models lie there, and workers start there.
ROOT = CODE
# The model of a step that a user hands over, as run files name it.
OWN_STEP = "common.your_step"
_STEP_SCRIPT = "graph_worth.your_step.step_script"


def script_of(model: str) -> str:
    """Return the module of a model's training script: gpt3.train of gpt3."""
    return _STEP_SCRIPT if model == OWN_STEP else f"{model}.train"
