"""The folders of this code and of models, and the module of a model's script."""

from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
# Of all copies the wheel alone has the table of operators inside (pyproject.toml); a clone has results/ beside it.
IS_INSTALLED = (PACKAGE / "results").is_dir()
# Whose code a run's hash is of: the repository, or the installed package.
CODE = PACKAGE if IS_INSTALLED else PACKAGE.parent
# Models lie there, and workers start there: the repository, or the project of who has installed the package.
ROOT = Path.cwd() if IS_INSTALLED else CODE
# The model of a step that a user hands over, as run files name it.
OWN_STEP = "common.your_step"
_STEP_SCRIPT = "graph_worth.your_step.step_script"


def script_of(model: str) -> str:
    """Return the module of a model's training script: gpt3.train of gpt3."""
    return _STEP_SCRIPT if model == OWN_STEP else f"{model}.train"
