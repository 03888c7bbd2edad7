"""Start a module of this package in any interpreter, with nothing but the package itself on top of what it can import.

    python graph_worth/start.py graph_worth.your_step.step_script --step my_step.py:build

Neither the repository nor the environment that graph-worth is installed in comes on sys.path, so a user's file imports
its own `common`, `tests` and `benchmarks`, and its own torch.
"""

import importlib.util
import runpy
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent


def install() -> None:
    """Let this process import graph_worth from here, whatever it has installed by that name."""
    if "graph_worth" in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(
        "graph_worth", PACKAGE / "__init__.py", submodule_search_locations=[str(PACKAGE)]
    )
    assert spec is not None and spec.loader is not None
    sys.modules["graph_worth"] = package = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)


def main() -> None:
    """Run the module that the first word names as the program, with the words behind it."""
    if not sys.flags.safe_path:
        # The folder of this file.
        del sys.path[0]
    install()
    module = sys.argv.pop(1)
    # Processes that multiprocessing spawns look at __main__, which stays this file.
    runpy.run_module(module, run_name="__main__")


if __name__ == "__main__":
    main()
