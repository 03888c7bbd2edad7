"""The folders of this code and of models, and the module of a model's script."""

from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
# Starts a module of this package in an interpreter that has not installed it.
START = PACKAGE / "start.py"
# Of all copies the wheel alone has the table of operators inside (pyproject.toml); a clone has results/ beside it.
IS_INSTALLED = (PACKAGE / "results").is_dir()
# Whose code a run's hash is of: the repository, or the installed package.
CODE = PACKAGE if IS_INSTALLED else PACKAGE.parent


def models_below(folder: Path) -> list[Path]:
    """Return the folders with a train.py below a folder, as gpt3/ and examples/minimal/, sorted."""
    folders = [path.parent for pattern in ("[!.]*/train.py", "[!.]*/*/train.py") for path in folder.glob(pattern)]
    return sorted(path for path in folders if path.parent.name != "tests")


_HERE = Path.cwd()
# Models lie there, and workers start there: the repository, or somebody's project that is the current folder.
ROOT = _HERE if IS_INSTALLED or (not _HERE.is_relative_to(CODE) and models_below(_HERE)) else CODE
# The model of a step that a user hands over, as run files name it.
OWN_STEP = "common.your_step"
_STEP_SCRIPT = "graph_worth.your_step.step_script"
# Environment variable: the process id of the supervisor of a worker on this machine.
SUPERVISOR = "GRAPH_SUPERVISOR"


def script_of(model: str) -> str:
    """Return the module of a model's training script: gpt3.train of gpt3."""
    return _STEP_SCRIPT if model == OWN_STEP else f"{model}.train"
