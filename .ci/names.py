"""Refuse variables whose names say nothing, with file and line: python .ci/names.py

A variable is called what it is: `for block in blocks`, `faults`, `reference`. Variables, parameters and
targets of loops count; attributes, fields of classes and tests do not.
"""

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORDS = {"own", "each", "found", "made", "told", "said", "asked", "other"}


def bindings(tree: ast.AST) -> list[tuple[int, str]]:
    """Return (line, name) of each variable and parameter in WORDS, in the order of lines."""
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    fields = {id(node.target) for definition in classes for node in definition.body if isinstance(node, ast.AnnAssign)}
    rows = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and id(node) not in fields:
            rows.append((node.lineno, node.id))
        elif isinstance(node, ast.arg):
            rows.append((node.lineno, node.arg))
    return sorted(row for row in rows if row[1] in WORDS)


def main() -> None:
    """Print a line for each; the exit status is 1 if there are any."""
    words = ["git", "ls-files", "-z", "--", "*.py", ":(exclude)tests"]
    names = subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")[:-1]
    lines = []
    for name in names:
        try:
            tree = ast.parse((ROOT / name).read_text())
        except SyntaxError as error:
            sys.exit(f"{name}:{error.lineno}: {error.msg}")
        lines += [
            f"{name}:{line}: a variable is called {word!r}: name it by what it is (CONTRIBUTING.md)"
            for line, word in bindings(tree)
        ]
    print(*lines, sep="\n", end="\n" if lines else "")
    sys.exit(bool(lines))


if __name__ == "__main__":
    main()
