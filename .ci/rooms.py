"""Refuse imports between models, with file and line: python .ci/rooms.py

A model is any folder with a train.py, a new one too. It imports no other model, not the suite and not the harness;
graph_worth, common and benchmarks import no model. import-linter, which has to be told names, looks at the rest.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("graph_worth", "common", "benchmarks")
# A model's training script knows nothing of these.
CLOSED = ("benchmarks", "graph_worth.harness")


def models() -> dict[str, Path]:
    """Return the folder of each model, by the name of its package."""
    files = [path for pattern in ("[!.]*/train.py", "[!.]*/*/train.py") for path in ROOT.glob(pattern)]
    folders = [path.parent for path in files if path.parts[len(ROOT.parts)] not in ("tests", *ROOMS)]
    return {".".join(folder.relative_to(ROOT).parts): folder for folder in sorted(folders)}


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, module) of each import in a file, those in functions too; of `from a import b` both a and a.b."""
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def main() -> None:
    """Print a line for each; the exit status is 1 if there are any."""
    known, lines = models(), []
    closed = {name: [*CLOSED, *(model for model in known if model != name)] for name in known}
    folders = {**{room: ROOT / room for room in ROOMS}, **known}
    for name, folder in folders.items():
        for path in sorted(folder.rglob("*.py")):
            try:
                imported = list(imports(path))
            except SyntaxError as error:
                sys.exit(f"{path.relative_to(ROOT)}:{error.lineno}: {error.msg}")
            for line, module in imported:
                room = next((room for room in closed.get(name, known) if f"{module}.".startswith(f"{room}.")), None)
                if room is not None:
                    lines.append(f"{path.relative_to(ROOT)}:{line}: {name} imports {room} (docs/architecture.md)")
    print(*dict.fromkeys(lines), sep="\n", end="\n" if lines else "")
    sys.exit(bool(lines))


if __name__ == "__main__":
    main()
