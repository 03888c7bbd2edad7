"""A quantity that a sweep varies, as in --over batch: the flags of the training script that a value of it sets."""

from dataclasses import dataclass

from benchmarks import script
from benchmarks.command import Mistake
from common.config import flag_of


@dataclass(frozen=True)
class Quantity:
    """A quantity of a preset. The first of `fields` takes the value, the others keep their ratio to it.

    Attributes:
        over: its name.
        fields: of the script's configuration.
        preset: the preset's own value of each field.
    """

    over: str
    fields: list[str]
    preset: dict

    @property
    def first(self) -> int:
        """The preset's own value; 1 where the field is text, such as auto."""
        first = self.preset[self.fields[0]]
        return first if isinstance(first, int) else 1

    def flags(self, value: int) -> list[str]:
        """Return the script's flags for a value. Raises Mistake where another field would be no whole number."""
        start, out = self.preset[self.fields[0]], []
        if isinstance(start, str):
            return [flag_of(self.fields[0]), str(value)]
        for field in self.fields:
            scaled, rest = divmod(self.preset[field] * value, start)
            if rest:
                raise Mistake(f"--over {self.over}: {value} makes {flag_of(field)} no whole number")
            out += [flag_of(field), str(scaled)]
        return out


def find(description: dict, preset: str, over: str, flags: list[str]) -> Quantity:
    """Return a script's quantity. Raises Mistake for an unknown one, or where `flags` sets one of its fields."""
    sweeps = description.get("sweeps", {})
    if over not in sweeps:
        raise Mistake(f"unknown quantity {over!r}, --over takes one of {', '.join(sweeps) or 'none'}")
    for field in sweeps[over]:
        given = next((text for text in flags if text.split("=")[0] == flag_of(field)), None)
        if given:
            raise Mistake(f"{given} after -- is what --over {over} sets, leave it out")
    return Quantity(over, sweeps[over], description["presets"][preset])


def require(model: str, preset: str, quantity: Quantity, flags: list[str], values: list[int]) -> None:
    """Raises Mistake for the first value that the script does not take, before one of them costs minutes."""
    for value in values:
        script.describe(model, [*flags, *quantity.flags(value)], preset)
