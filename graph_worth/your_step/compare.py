"""Two steps, operator by operator: where they part, in words and with a place."""

from graph_worth.your_step.place import Place
from graph_worth.your_step.record import Operator


def first_difference(a: list[Operator], b: list[Operator]) -> tuple[Operator, Operator | None] | None:
    """Return the operators where two steps part, the second one None where a step has ended; None for equal steps."""
    for mine, theirs in zip(a, b, strict=False):
        if (mine.name, mine.shapes) != (theirs.name, theirs.shapes):
            return mine, theirs
    if len(a) != len(b):
        longer = a if len(a) > len(b) else b
        return longer[min(len(a), len(b))], None
    return None


def told(mine: Operator, theirs: Operator | None) -> str:
    """Return the difference of two steps in words."""
    if theirs is None:
        return f"one goes on with {short(mine.name)} and the other ends"
    if mine.name != theirs.name:
        return f"one runs {short(mine.name)} at {mine.place.own} and the other {short(theirs.name)} there"
    return f"{short(mine.name)} gives shape {_sizes(mine)} in one and {_sizes(theirs)} in the other"


def place(mine: Operator, theirs: Operator | None) -> Place:
    """Return the place where two steps part: of two lines of a file the first, which is the one inside of a branch."""
    if theirs is None:
        return mine.place
    first, second = sorted((mine.place, theirs.place), key=lambda origin: _line_number(origin.own))
    return first if first.own.rpartition(":")[0] == second.own.rpartition(":")[0] else mine.place


def short(name: object) -> str:
    """Return an operator's name as it is printed."""
    return str(name).removesuffix(".default").replace("aten::", "aten.")


def _line_number(where: str) -> int:
    number = where.rpartition(":")[2]
    return int(number) if number.isdigit() else 0


def _sizes(operator):
    return ", ".join(str(list(shape)) for shape in operator.shapes)
