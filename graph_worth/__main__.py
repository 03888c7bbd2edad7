"""The command graph-worth, or python -m graph_worth.

    graph-worth measure my_step.py:build --python .venv/bin/python     eager against graphs
    graph-worth bench --model my_model                                 variants of my_model/train.py, by the contract
    graph-worth doctor my_step.py:build --python .venv/bin/python      the lines that a graph cannot hold
    graph-worth watch -- python train.py                               what a graph could gain in a script as it is
    graph-worth host                                                   microseconds of this host's operators
    graph-worth report runs/.../ID.json                                a run as a page for a browser

This interpreter needs no torch. `graph-worth COMMAND --help` lists flags and exit statuses.
"""

import importlib
import sys

# Command -> its module, and words before those of the command line.
COMMANDS = {
    "measure": ("measure", []),
    "bench": ("run", []),
    "doctor": ("measure", ["--doctor"]),
    "watch": ("watch", []),
    "host": ("host", []),
    "report": ("report", []),
}
OF_STEP = ("measure", "doctor")


def main() -> int:
    """Run a command of graph-worth; return its exit status."""
    name, words = "".join(sys.argv[1:2]), sys.argv[2:]
    if name not in COMMANDS:
        if name in ("-h", "--help"):
            print(__doc__)
            return 0
        print(f"graph-worth: takes one of {', '.join(COMMANDS)}, not {name!a}", file=sys.stderr)
        return 2
    module, before = COMMANDS[name]
    if name in OF_STEP and words and not words[0].startswith("-"):
        words = ["--step", *words]
    return importlib.import_module(f"graph_worth.harness.{module}").main([*before, *words])


if __name__ == "__main__":
    sys.exit(main())
