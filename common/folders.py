"""Where this code lies."""

from pathlib import Path

# The repository, or the folder of an installed package: whose code a run's hash is of.
CODE = Path(__file__).resolve().parents[1]
IS_INSTALLED = CODE.name == "_src"
# Models lie there, and workers start there.
ROOT = CODE
