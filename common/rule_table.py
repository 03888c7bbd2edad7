"""Tables of what a CUDA graph cannot hold: a rule has what, why, and what to take instead. No torch here.

TABLE = RuleTable("python -m my_model.capturable", Setting, RULES)
TABLE.refuse(Setting(...))        ValueError, where a rule refuses the setting
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from common.config import Parser, parse_with_fields


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A thing that a graph cannot hold, why, what to take instead, and the settings that it refuses."""

    what: str
    why: str
    instead: str
    refuses: Callable


class RuleTable:
    """Rules about settings of one kind.

    Args:
        prog: the command that prints the table or asks it.
        setting: dataclass of the settings, whose fields are options.
        rules: in the order of the table.
    """

    def __init__(self, prog: str, setting: type, rules: Sequence[Rule]):
        self.prog, self.setting, self.rules = prog, setting, tuple(rules)

    def faults(self, setting) -> list[str]:
        """Return a line for each rule that the setting breaks."""
        return [f"{rule.what}: {rule.why}; take {rule.instead}" for rule in self.rules if rule.refuses(setting)]

    def refuse(self, setting) -> None:
        """Refuse a setting that breaks a rule.

        Raises:
            ValueError: in one line, all rules that it breaks.
        """
        found = self.faults(setting)
        if found:
            raise ValueError(f"cannot capture {'. Nor '.join(found)}")

    def markdown(self) -> str:
        """Return the table as Markdown."""
        rows = [f"| {rule.what} | {rule.why} | {rule.instead} |" for rule in self.rules]
        return "\n".join(["| what | why | take instead |", "| --- | --- | --- |", *rows])

    def main(self, argv=None) -> None:
        """Print the table; with options, say whether it forbids them, and exit with 2 if so."""
        given = sys.argv[1:] if argv is None else argv
        if not given:
            print(self.markdown())
            return
        parser = Parser(prog=self.prog, allow_abbrev=False)
        _, fields = parse_with_fields(parser, self.setting, given)
        try:
            found = self.faults(self.setting(**fields))
        except ValueError as error:
            parser.error(str(error))
        for fault in found:
            print(f"{self.prog}: cannot capture {fault}", file=sys.stderr)
        if found:
            sys.exit(2)
        print("nothing in the table forbids it")
