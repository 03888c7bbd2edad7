"""How often the verdicts of benchmarks.intervals are false, and how often they find an effect, by simulation.

    python -m benchmarks.simulate [--runs N] [--seed S] [--resample SESSION ...] [--write docs/method.md]

Prints Markdown tables; --write puts them between the two markers of a file. A row of a table is simulated from
the run upwards: each run's log time has scatter, a host adds an effect of mean zero to its eager runs, the base is
chosen for the row among one or two equally fast eager variants, a session's value is the mean over its rounds of
log(base / variant), and a unit is one session. The plain verdict is then asked for at 3, 6 and 12 units, with the base
chosen anew over the sessions that there are by then. Scatter is independent, AR(1) with 0.3 from round to round of a
variant, or resampled from packed sessions that timed `eager` and `control`, which is eager again: --resample takes
their folders or their records.jsonl.xz.
"""

import shlex
import sys
from pathlib import Path

import numpy

from benchmarks import scatter, verdict_rates
from benchmarks.command import count, parser_of
from benchmarks.intervals import LOOKS
from benchmarks.verdict_rates import EFFECTS, NUM_UNITS, PAIRS_ON_HOST, RULES, UNEQUAL, kinds_of

NUM_RUNS, SEED = 50_000, 1
ABOUT = "How often verdicts are false, and how often they find an effect, as Markdown tables."
BEGIN, END = "<!-- simulation: written by benchmarks.simulate -->", "<!-- end of simulation -->"

# ------------------------------------------------------------------------------------------------
# Tables


def _size(share):
    return "as measured" if share is None else f"{100 * share:g} %"


def _false(rates, must_hold=True):
    text = f"{100 * rates.false:.1f} ({100 * rates.faster:.1f})"
    return f"**{text}**" if must_hold and not rates.holds else text


def _powers(shares):
    return " / ".join(f"{100 * share:.0f}" for share in shares)


def _table(head, lines):
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, ["---"] * len(head), *lines])


def _plain_table(cells):
    """A line for each kind of runs, host effect and scatter: false verdicts and power, with one eager and with two."""
    lines: dict = {}
    for cell in cells:
        host = f"{cell.shape}, {100 * cell.host:g} %" if cell.host else "none"
        line = lines.setdefault(
            (cell.kind, cell.shape, cell.host, cell.scatter), [cell.kind, host, _size(cell.scatter)]
        )
        line += [_false(cell.rates, cell.is_bound), *map(_powers, cell.rates.power)]
    effects = [_size(effect) for effect in EFFECTS]
    head = ["runs", "host effect", "scatter", "1 eager: false", *effects, "2 eagers: false", *effects]
    return _table(head, lines.values())


def _host_table(cases):
    head = ["runs", "eagers", "scatter", *(f"false, {num} pairs" for num in PAIRS_ON_HOST), "false, auto"]
    head += [*(f"effect {_size(effect)}" for effect in EFFECTS), "rounds of auto"]
    lines = []
    for kind, num_eagers, size, rates, num_rounds in cases:
        power = numpy.hstack([each.power for each in rates])
        lines.append([kind, str(num_eagers), _size(size), *map(_false, rates), *map(_powers, power)])
        lines[-1].append(f"{num_rounds:.1f}")
    return _table(head, lines)


def _about(measured):
    if not measured:
        return "No session of eager against eager was given to resample."
    parts = []
    for each in measured:
        second = f", {each.num_second} of second attempts" if each.num_second else ""
        size = 100 * each.log_ratios[:, 0].std()
        parts.append(f"`{each.path}` ({len(each.log_ratios)} pairs{second}, scatter of their log ratios {size:.2f} %)")
    return f"Resampled: {', '.join(parts)}."


def report(num_runs, seed, measured=()) -> str:
    """All tables as Markdown, with the command that writes them. measured: of `scatter.read_measured`."""
    log_ratios = [each.log_ratios for each in measured]
    kinds = [kind for kind, _ in kinds_of(log_ratios)]
    cells = verdict_rates.plain_cells(num_runs, seed, log_ratios)
    bound = [cell for cell in cells if cell.is_bound]
    num_broken = sum(not cell.rates.holds for cell in bound)
    above = max(cell.rates.upper - cell.rates.false for cell in cells)
    command = f"python -m benchmarks.simulate --runs {num_runs} --seed {seed}"
    if measured:
        command += f" --resample {shlex.join(each.path for each in measured)}"
    looks, pairs = " / ".join(map(str, LOOKS)), " / ".join(map(str, PAIRS_ON_HOST))

    def ever(kind, num_eagers):
        return _false(verdict_rates.ever_rates(num_runs, seed, kind, num_eagers, log_ratios))

    def between(kind, speed):
        unit = numpy.mean([each[:, 0].std() for each in log_ratios]) if kind == scatter.RESAMPLED else 1.0
        return _false(verdict_rates.between_rates(max(num_runs // 2, 100), seed, kind, unit * speed, log_ratios))

    rules = [
        [RULES[rule], _false(rates), f"{shift:+.2f}", f"{max(excess, 0.0):.2f}"]
        for rule, (rates, shift, excess) in verdict_rates.rule_rates(num_runs, seed).items()
    ]
    return "\n\n".join(
        [
            f"`{command}`",
            "**Plain.** `false`: without an effect, % of rows whose verdict is faster or slower at any of "
            f"{looks} units (in parentheses: ever faster). {_size(EFFECTS[0])} and so on: with that effect, % of rows "
            f"found faster at {looks} units. Bold: a normal or resampled case above the bound, {num_broken} of "
            f"{len(bound)}. The 95 % interval of a rate of this simulation ends at most {100 * above:.2f} above it. "
            + _about(measured),
            _plain_table(cells),
            "**On this host.** One session, and the base chosen over its rounds. `false`: without an effect, % of "
            "sessions whose verdict is faster or slower (in parentheses: faster), bold above the bound. "
            f"{_size(EFFECTS[0])} and so on: with that effect, % found faster after {pairs} pairs / under ROUNDS=auto.",
            _host_table(verdict_rates.host_rows(num_runs, seed, log_ratios)),
            "**Both.** Hosts have no effect, and a row is judged with each session that it gains: the first on this "
            f"host, two on this host, then {looks} plainly. % of rows where any of these verdicts is false.",
            _table(["runs", "1 eager", "2 eagers"], [[kind, ever(kind, 1), ever(kind, 2)] for kind in kinds]),
            "**Between looks.** Two eagers, hosts have no effect, and the plain verdict is asked for with each unit "
            f"from {LOOKS[0]} to {NUM_UNITS}. It is that of the last look, but with the base that is chosen by then. "
            "`false`: as in the first table.",
            _table(
                ["runs", "hosts of equal speed", "hosts that differ in speed far more than runs do"],
                [[kind, between(kind, 0.0), between(kind, UNEQUAL)] for kind in kinds],
            ),
            "**Ways to choose between two eagers**, with independent runs and no host effect. `false`: as in the "
            "first table. Shift: what the choice adds to the mean log ratio of 3 sessions where both are equally fast. "
            "Excess: the most by which it exceeds that against the faster eager, over differences of up to 5 "
            "scatters. Both in units of a run's scatter.",
            _table(["the base is chosen", "false", "shift", "excess"], rules),
        ]
    )


def write(path, text):
    """Replace what stands between the markers of a file. Raises ValueError where it has none."""
    before, begin, rest = Path(path).read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"--write {path}: no line {BEGIN!r} with a line {END!r} after it")
    Path(path).write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}", encoding="utf-8")


# ------------------------------------------------------------------------------------------------
# Command


def main(argv=None) -> int:
    parser = parser_of("simulate", ABOUT)
    add = parser.add_argument
    add("--runs", type=count, default=NUM_RUNS, metavar="N", help=f"simulated rows, 100 at least ({NUM_RUNS})")
    add("--seed", type=count, default=SEED, metavar="S", help=f"of the random numbers ({SEED})")
    add("--resample", nargs="+", default=[], metavar="SESSION", help="packed sessions with runs of eager and control")
    add("--write", metavar="FILE", help="put the tables between the markers of this file")
    args = parser.parse_args(argv)
    if args.runs < 100:
        parser.error(f"--runs {args.runs}: takes 100 at least")
    try:
        measured = scatter.read_all_measured(args.resample)
        for each in measured:
            for fault in each.faults:
                print(f"{parser.prog}: left out of {each.path}: {fault}", file=sys.stderr)
        text = report(args.runs, args.seed, measured)
        if args.write:
            write(args.write, text)
        else:
            print(text)
    except (ValueError, OSError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
