"""Nothing that trains, measures or reads results can run what a file of data says."""

import ast

import pytest

from graph_worth.folders import ROOT
from graph_worth.machine.source import code_files

MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "shelve", "marshal", "joblib", "jsonpickle"}
# Methods of these names load a pickle, whatever the module is called there; torch's with weights_only=True does not.
METHODS = {"Unpickler", "read_pickle", "full_load", "unsafe_load", "load_all"}
CODE = [path for path in code_files() if path.endswith(".py")]


def faults(text):
    """(line, what) of all that unpickles or evaluates."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, name.name) for name in node.names if name.name.split(".")[0] in MODULES]
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in MODULES:
            found.append((node.lineno, node.module))
        if isinstance(node, (ast.Name, ast.Attribute)):
            name = node.id if isinstance(node, ast.Name) else node.attr
            if name in METHODS or (isinstance(node, ast.Name) and name in ("eval", "exec", "__import__")):
                found.append((node.lineno, name))
        if isinstance(node, ast.Call):
            found += [(node.lineno, fault) for fault in faults_of_call(node)]
    return found


def faults_of_call(node):
    options = {option.arg: ast.unparse(option.value) for option in node.keywords}
    called = ast.unparse(node.func)
    if options.get("allow_pickle", "False") != "False":
        yield "allow_pickle"
    if called in ("np.load", "numpy.load") and len(node.args) > 2:
        yield "allow_pickle"
    if called == "torch.load" and options.get("weights_only") != "True":
        yield "torch.load"
    if called == "yaml.load":
        yield called


def test_there_is_code_to_look_at():
    assert {
        "llama2_lora/data/rows.py",
        "stable_diffusion/data/shards.py",
        "graph_worth/harness/files/run_file.py",
    } <= set(CODE)


def test_no_code_unpickles_or_evaluates_data():
    assert {path: found for path in CODE if (found := faults((ROOT / path).read_text()))} == {}


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from pickle import load as read",
        "from joblib import load",
        "pandas.read_pickle(path)",
        "np.load(path, allow_pickle=True)",
        "np.load(path, None, True)",
        "numpy.lib.format.read_array(file, allow_pickle=trusted)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "yaml.unsafe_load(text)",
        "eval(text)",
        "class Ours(module.Unpickler): pass",
    ],
)
def test_the_rule_finds_it(text):
    assert faults(text)


@pytest.mark.parametrize(
    "text",
    ["model.eval()", "np.load(path)", "torch.load(path, weights_only=True)", "yaml.safe_load(text)", "re.compile(a)"],
)
def test_the_rule_allows_it(text):
    assert faults(text) == []
