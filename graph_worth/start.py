"""Start a module of this repository so that a user's file may import packages of the same names from its own project.

    python graph_worth/start.py graph_worth.your_step.step_script --step my_step.py:build

Here the package is `_graph_worth.common`: imports of `common` in its files are read as imports of that name, and the
repository is not on sys.path. So `common`, `tests` and `benchmarks` stay free.
"""

import ast
import runpy
import sys
from importlib.machinery import PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
NAME = "_graph_worth"


class _Loader(SourceFileLoader):
    def path_stats(self, path):
        # Bytecode in __pycache__ has the other names.
        raise OSError(path)

    def source_to_code(self, data, path, *more, **options):  # type: ignore[override]
        tree = ast.parse(data, path)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == "common":
                node.module = f"{NAME}.{node.module}"
        return super().source_to_code(tree, path, *more, **options)  # type: ignore[arg-type]


class _Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if not name.startswith(f"{NAME}."):
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


def install() -> None:
    """Let this process import `_graph_worth.common`."""
    package = ModuleType(NAME)
    package.__path__ = [str(ROOT)]
    sys.modules[NAME] = package
    sys.meta_path.insert(0, _Finder)  # type: ignore[arg-type]


def main() -> None:
    """Run the module that the first word names as the program, with the words behind it."""
    if not sys.flags.safe_path:
        # The folder of this file.
        del sys.path[0]
    install()
    module = sys.argv.pop(1)
    # Processes that multiprocessing spawns look at __main__, which stays this file.
    runpy.run_module(f"{NAME}.{module}", run_name="__main__")


if __name__ == "__main__":
    main()
