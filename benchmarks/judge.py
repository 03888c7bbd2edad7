"""Print the result of each rule for one run file, also of a census or of epochs, with the reason.

    python -m benchmarks.judge results/h200x1/gpt3-bench/20261125T212617Z-f31e7fb0.json

Rows of pages have the same words, from the same functions. Exit status: 0; 2 where the file cannot be read.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks import corrections
from benchmarks.corrections import Corrections
from graph_worth.harness import command, program_epochs, standing
from graph_worth.harness.command import Mistake
from graph_worth.harness.files import run_file
from graph_worth.harness.files.facts import Epochs, Run
from graph_worth.harness.files.workload import workload_of
from graph_worth.harness.judge import PASS, Judged, judged
from graph_worth.harness.pages.cells import NO_CEILING, counted, milliseconds
from graph_worth.harness.pages.run_table import ratio_cells, unchecked
from graph_worth.harness.standing import Standing, standing_of
from graph_worth.text import printable


def lines_of(run: Run, known: Corrections = corrections.NONE) -> Iterator[str]:
    """Yield what each rule says of a run."""
    yield f"{run.id}: {workload_of(run).name} on {workload_of(run).machine}, host {str(run.host.boot)[:6]}"
    for name, build in judged(run).items():
        at = standing_of(build, known.of(run), known.slows(run))
        yield f"  {f'build {name}' if name else 'standing'}: {at.kind}{f' ({at.text})' if at.text else ''}"
        yield from (f"    {line}" for line in _of_build(build))
        yield from (f"    {_of_variant(build, variant, at)}" for variant in build.verdicts)
        yield from (f"    {line}" for line in unchecked(build))


def _of_build(build: Judged) -> Iterator[str]:
    base = build.base
    if not base:
        yield "base: no eager variant passed"
        return
    alone, pace = build.alone_ratio, standing.pace_of(build)
    usual = next((name for name in ("eager", build.build.anchor) if build.passed(name)), "")
    why = "no other eager variant is faster" if base == usual else f"faster than {usual or 'no other'}"
    yield f"base: {base}, {milliseconds(build.ms(base))} ms: {why}"
    process = build.build.variants[base].alone
    steps = "too few steps" if process and process.step_ms else "not measured"
    yield f"alone in a process: {f'step in blocks / step alone {alone:.2f}' if alone else steps}"
    yield f"pace of the host: {f'last half of the cycles / first half {pace:.2f}' if pace else 'a single cycle'}"
    ceiling = build.ceiling_of(base)
    if ceiling.value is None:
        yield f"{NO_CEILING}: {ceiling.note or 'the busy time of the GPU is not known'}"
    else:
        source = f" ({ceiling.note})" if ceiling.note else ""
        busy_ms = milliseconds(build.working(base).value)
        yield f"ceiling: {ceiling.value:.2f}x{source}, the step / {busy_ms} ms in which the GPU works"


def _of_variant(build: Judged, name: str, at: Standing) -> str:
    """A line: passed or not and why, the ratio, and why it is no headline."""
    verdict, ratio = build.verdicts[name], build.ratio_of(name)
    if verdict.status != PASS:
        return f"{name}: {verdict.status} ({verdict.reason})"
    if ratio is None:
        return f"{name}: pass"
    _, _, times, interval = ratio_cells(ratio)
    parts = [f"{name}: pass, {times}{f' ({interval})' if interval else ''}"]
    reached = build.reached(name) if name != build.run.control else None
    parts += [f"{100 * reached:.1f} % of its ceiling"] if reached else []
    parts.append(counted(ratio.cycles, "cycle"))
    is_graph = name != build.run.control and build.build.variants[name].kind != "eager"
    reasons = [] if build.build.variants[name].headline else ["measured where VARIANTS names it"]
    reasons += [] if at.is_counted else [at.text]
    is_light = standing.is_light(build, ratio.cycles)
    text = standing.no_headline("; ".join(reasons), ratio.cycles if is_light else None)
    return ", ".join(parts) + (f"; {text or 'headline'}" if is_graph else "")


def work(args) -> int:
    """Print the lines of a file."""
    try:
        content = run_file.read_all(args.path)
    except run_file.Damaged as damage:
        raise Mistake(str(damage)) from None
    known = corrections.read(args.path.parent)
    for fault in known.unread:
        print(fault, file=sys.stderr)
    if isinstance(content, Epochs):
        print(*map(printable, [*map(program_epochs.line_of, content.runs), *program_epochs.faults(content)]), sep="\n")
    for run in run_file.runs_of(content):
        print("\n".join(map(printable, lines_of(run, known))))
    return 0


def main(argv=None) -> int:
    """Run the program; return its exit status."""
    parser = command.parser_of("judge", "What each rule says of one run file, and why.")
    parser.add_argument("path", metavar="RUN", type=Path, help="a run file, or a census")
    args = parser.parse_args(argv)
    return command.exit_status("python -m benchmarks.judge", lambda: work(args))


if __name__ == "__main__":
    sys.exit(main())
