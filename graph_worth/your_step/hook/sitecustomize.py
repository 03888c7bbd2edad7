"""Python imports this at its start under `benchmarks.watch`: it waits for torch and stays out of the way otherwise.

The interpreter may be any, so nothing here is newer than Python 3.6. The user's own sitecustomize runs, too.
"""

import importlib.util
import os
import runpy
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
FOLDER = os.environ.get("GRAPH_WORTH_WATCH", "")


class _Waiter:
    """A finder of torch: the watch begins when its import has ended."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(_Waiter)
        spec = importlib.util.find_spec(name)
        loader = spec.loader if spec else None
        if loader is not None:
            load = loader.exec_module

            def exec_module(module):
                load(module)
                _watch()

            loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _note(name):
    """A file tells the program that waits for the script how far it came."""
    open(os.path.join(FOLDER, name), "w").close()


def _watch():
    try:
        _note("torch")
        runpy.run_path(os.path.join(os.path.dirname(os.path.dirname(HERE)), "start.py"))["install"]()
        importlib.import_module("graph_worth.your_step.script_watch").ScriptWatch(FOLDER)
    except Exception as error:
        print("graph-worth: no watch over this script:", repr(error), file=sys.stderr)


if os.path.isdir(FOLDER) and sys.version_info >= (3, 11):
    _note("python")
    sys.meta_path.insert(0, _Waiter)
sys.path[:] = [path for path in sys.path if os.path.abspath(path or ".") != HERE]
_own = sys.modules.pop("sitecustomize")
try:
    import sitecustomize  # noqa: F401 - the user's own
except ImportError as error:
    if error.name != "sitecustomize":
        raise
    sys.modules["sitecustomize"] = _own
