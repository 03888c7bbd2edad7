"""Print lines and statements of the source and of the tests; fail where they are more than docs/log.md allows.

    python .ci/size.py

The last row of the table under "## Size" in docs/log.md holds the numbers. A change that makes one larger adds a row
with its reason. Lines are those of Python, CUDA and C++ files; statements are Python's, without docstrings.
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOG = ROOT / "docs" / "log.md"
ROW = re.compile(r"\| *([\d,]+) *\| *([\d,]+) *\| *([\d,]+) *\| *(.*?) *\|")
NAMES = ("lines of source", "statements of source", "lines of tests")


def statements(text: str) -> int:
    """Return the number of statements in a Python file."""
    count = 0
    for node in ast.walk(ast.parse(text)):
        # A docstring, or a text on a line of its own, is an expression that is a constant.
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        count += isinstance(node, ast.stmt) and not is_text
    return count


def measured() -> tuple[int, int, int]:
    """Return NAMES of the files that git tracks."""
    words = ["git", "ls-files", "-z", "--", "*.py", "*.cu", "*.cpp"]
    names = subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")[:-1]
    lines = {True: 0, False: 0}
    count = 0
    for name in names:
        if name.startswith("."):
            continue
        text, is_test = (ROOT / name).read_text(), name.startswith("tests/")
        lines[is_test] += len(text.splitlines())
        if not is_test and name.endswith(".py"):
            try:
                count += statements(text)
            except SyntaxError as error:
                sys.exit(f"{name}:{error.lineno}: {error.msg}")
    return lines[False], count, lines[True]


def allowed(text: str) -> tuple[int, ...]:
    """Return the numbers in the last row of the log's table."""
    section = text.partition("\n## Size\n")[2].partition("\n## ")[0]
    rows = ROW.findall(section)
    if not rows:
        sys.exit("docs/log.md has no table of numbers under ## Size")
    *numbers, reason = rows[-1]
    if not reason:
        sys.exit(f"docs/log.md: the row {' | '.join(numbers)} has no reason")
    return tuple(int(number.replace(",", "")) for number in numbers)


def main() -> None:
    """Compare and print; the exit status is 1 where a number has grown."""
    most, now = allowed(LOG.read_text()), measured()
    too_many = []
    for name, number, limit in zip(NAMES, now, most, strict=True):
        print(f"{number:,} {name}, {limit:,} allowed")
        if number > limit:
            too_many.append(f"{number - limit:,} {name} too many")
    if too_many:
        sys.exit(f"{'; '.join(too_many)}: delete some, or add a row with the reason to docs/log.md")


if __name__ == "__main__":
    main()
