"""The public names of graph_worth, which are imported when they are asked for."""

import subprocess
import sys

import graph_worth
from graph_worth.folders import PACKAGE, ROOT


def test_the_package_alone_imports_no_torch():
    code = "import sys, graph_worth; assert 'torch' not in sys.modules; graph_worth.Pool; assert 'torch' in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_every_name_is_there_and_is_no_module():
    assert all(getattr(graph_worth, name).__name__ == name for name in graph_worth.__all__)
    # `from graph_worth import session` would give a module session.py in the place of the function.
    assert not set(graph_worth.__all__) & {path.stem for path in PACKAGE.iterdir()}
