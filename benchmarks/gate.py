"""Newer runs against earlier ones: what became faster or slower, and what no longer passes.

    python -m benchmarks.gate runs --against results

A variant changed where its ratio to its base differs by more than 0.5 % and by more than chance: Welch's t test of the
logarithms, whose 5 % are shared among all variants that are compared. The unit is the run; of a single run its cycles
stand for it, which say nothing of other minutes and hosts. A variant that passed before and is gone, in a workload
that was measured again, is a change. Exit status: 0 where nothing changed, 1 where something did, up or down, 2 where
nothing can be compared.
"""

import math
import sys
from dataclasses import dataclass

from benchmarks.compare import found_in
from benchmarks.frame import Results, Row, timed, where_of
from graph_worth.harness import command, intervals
from graph_worth.harness.command import Mistake
from graph_worth.text import printable


@dataclass(frozen=True)
class Change:
    """A variant on both sides. `change`: new ratio / old ratio - 1; `bound`: the largest change by chance."""

    name: str
    old: Row
    new: Row | None
    change: float | None
    bound: float | None

    @property
    def is_changed(self) -> bool:
        """Return whether the change is more than chance, or the variant passes on one side alone."""
        if self.change is None or self.bound is None:
            return self.new is None or self.old.status != self.new.status
        return abs(self.change) > max(self.bound, intervals.SAME)

    def text(self) -> str:
        """One line."""
        if self.new is None:
            return f"{self.name}: {self.old.status} before, gone now"
        if self.change is None or self.bound is None:
            why = f" ({self.new.reason})" if self.new.reason else ""
            return printable(f"{self.name}: {self.old.status} before, {self.new.status} now{why}")
        hosts = "" if min(self.old.hosts, self.new.hosts) >= intervals.LEAST_HOSTS else ", on few hosts"
        numbers = f"{self.old.gain:.3f}x before, {self.new.gain:.3f}x now"
        chance = f"chance is {100 * self.bound:.1f} %" if self.bound < 10 else "too few cycles to tell"
        return f"{self.name}: {numbers}: {100 * self.change:+.1f} %, {chance}{hosts}"


def changes(old: Results, new: Results) -> list[Change]:
    """Each variant of the workloads that are on both sides, of one kind of GPU; controls left out."""
    # Of several bases the one with most runs stands first.
    before, now = (
        {(where_of(row), row.variant): row for row in reversed(results.records(~results.rows["control"]))}
        for results in (old, new)
    )
    again = {workload for workload, _ in now}
    pairs = [(row, now.get(key)) for key, row in before.items() if key[0] in again and (key in now or row.gain)]
    both = sum(new_row is not None and None not in (row.gain, new_row.gain) for row, new_row in pairs)
    changed = []
    for row, new_row in pairs:
        name = f"{row.workload} {row.variant}"
        if new_row is None or row.gain is None or new_row.gain is None or row.base != new_row.base:
            changed.append(Change(name, row, new_row, None, None))
        else:
            sides = [_spread(old, row), _spread(new, new_row)]
            changed.append(Change(name, row, new_row, new_row.gain / row.gain - 1, _bound(sides, both)))
    return changed


def _bound(sides, both):
    """The change that chance may make of a ratio, of so many on both sides."""
    variance = sum(error**2 for error, _ in sides)
    # Welch and Satterthwaite.
    freedom = variance**2 / sum(error**4 / free for error, free in sides) if variance else 1.0
    factor = intervals.student_t(1 - (1 - intervals.CONFIDENCE) / both / 2, freedom)
    return math.expm1(min(factor * math.sqrt(variance), 50.0))


def _spread(results, row):
    """(standard error of the logarithm of the ratio, degrees of freedom): of its runs, or of one run's cycles."""
    ratios = timed(results.points[results.points["row"] == row.row])
    if len(ratios) > 1:
        logs = [math.log(ratio) for ratio in ratios["ratio"]]
        return intervals.deviation(logs) / math.sqrt(len(logs)), len(logs) - 1
    (ratio,) = ratios.itertuples()
    if ratio.cycles < 2:
        return 50.0, 1
    freedom = ratio.cycles - 1
    return math.log1p(ratio.half_width) / intervals.student_t((1 + intervals.CONFIDENCE) / 2, freedom), freedom


def judge(args) -> int:
    """Print each variant on both sides, changed ones first."""
    old, new = found_in(args.against), found_in(args.root)
    for fault in (*old.faults, *new.faults):
        print(f"left out: {fault}")
    every = changes(old, new)
    if not any(change.change is not None or change.is_changed for change in every):
        raise Mistake(f"{args.root} and {args.against} have no timed variant in common")
    changed = [change for change in every if change.is_changed]
    for change in changed:
        print(f"changed  {change.text()}")
    for change in every:
        if change.change is not None and not change.is_changed:
            print(f"same     {change.text()}")
    return 1 if changed or old.faults or new.faults else 0


def main(argv=None) -> int:
    """Run the program; return its exit status."""
    parser = command.parser_of("gate", "Newer runs against earlier ones.")
    parser.add_argument("root", metavar="DIR", help="the newer runs")
    parser.add_argument("--against", metavar="DIR", required=True, help="the earlier ones")
    args = parser.parse_args(argv)
    return command.exit_status("python -m benchmarks.gate", lambda: judge(args))


if __name__ == "__main__":
    sys.exit(main())
