"""All figures of a folder of results: those of READMEs as SVG, the others as SVG and PNG.

    python -m benchmarks.plot results
    python -m benchmarks.plot results --readme          those of READMEs alone
    python -m benchmarks.plot runs/h200x1/gpt3-bench --out /tmp/figures

Reads every folder of records (benchmarks.run) and every sweep (benchmarks.sweep) at or below ROOT. README's three
(law, why, steady) and throughput-MODEL, which the model's own README shows, go to ROOT/figures, the others to
ROOT/figures/more. A figure whose data is not there is not drawn,
which is said in one line. CPU records show parity and replays, never a speed-up, and are not drawn. The same records
give the same bytes. Exit status: 0, 1 when a record, a folder or a sweep was refused or nothing was found, 2 for a
mistake on the command line, 130 after Ctrl-C.
"""

import itertools
import signal
import sys
import time
from pathlib import Path

from benchmarks.command import parser_of
from benchmarks.figures import evidence
from benchmarks.published import RATES

MORE = "more"


def readme_figures(collection):
    """(file name, function without arguments that makes the page) of README's three figures, and of the one of each
    model that has a published rate."""
    from benchmarks.figures import front, throughput

    for draw in (front.law, front.why, front.steady):
        yield draw.__name__, lambda draw=draw: draw(collection.blocks)
    for rate in RATES:
        yield f"throughput-{rate.model}", lambda rate=rate: throughput.throughput(collection.blocks, rate)


def more_figures(collection):
    """The same of every other figure that there could be."""
    from benchmarks.figures import cost, speed, steps

    blocks = collection.blocks
    for draw in (speed.speedup, cost.memory):
        yield draw.__name__, lambda draw=draw: draw(blocks)
    for block, draw in itertools.product(blocks, (steps.step_time, steps.jitter, steps.timeline, cost.scope)):
        yield f"{draw.__name__}-{block.key}", lambda draw=draw, block=block: draw(block)
    for key, group in same_model(blocks):
        yield f"scaling-{key}", lambda group=group: speed.scaling(group)
    for key, sweep in collection.sweeps:
        yield f"crossover-{key}", lambda sweep=sweep: speed.crossover(sweep)


def same_model(blocks):
    """(name, blocks) of one model, preset, GPU type and folder suffix, which differ in the number of GPUs."""

    def kind(block):
        return block.what, block.first.gpu_name, block.suffix

    groups = [(key, list(group)) for key, group in itertools.groupby(sorted(blocks, key=kind), key=kind)]
    gpus = {gpu for (_, gpu, _), _ in groups}
    for ((model, preset), gpu, suffix), group in groups:
        words = [model, preset, suffix, gpu.replace(" ", "_") if len(gpus) > 1 else ""]
        yield "-".join(filter(None, words)), group


def draw_all(
    collection, folder: Path, readme_only: bool = False
) -> tuple[list[tuple[str, str]], list[tuple[str, str]], list[Path]]:
    """Write the figures: (name and finding of each, name and reason of those not drawn, files)."""
    from benchmarks.figures import style

    drawn, left_out, files = [], [], []
    parts = [(folder, False, readme_figures(collection))]
    parts += [] if readme_only else [(folder / MORE, True, more_figures(collection))]
    with style.applied():
        for place, has_png, figures in parts if collection.blocks or collection.sweeps else ():
            for name, make in figures:
                try:
                    page = make()
                except evidence.Missing as error:
                    left_out.append((name, str(error)))
                    continue
                files += style.save(page, place, name, has_png)
                drawn.append((name, page.title))
    return drawn, left_out, files


def main(argv=None) -> int:
    parser = parser_of("plot", "All figures of a folder of results.")
    parser.add_argument("root", metavar="ROOT", nargs="?", default="results", help="results, or a folder of records")
    parser.add_argument("--out", metavar="DIR", help="where the figures go (ROOT/figures)")
    parser.add_argument("--readme", action="store_true", help="draw the figures of READMEs alone")
    args = parser.parse_args(argv)
    start = time.monotonic()
    root = Path(args.root)
    folder = Path(args.out) if args.out else root / "figures"
    try:
        collection = evidence.collect(root)
        drawn, left_out, files = draw_all(collection, folder, args.readme)
    except FileNotFoundError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    except ModuleNotFoundError as error:
        parser.exit(2, f"{parser.prog}: no {error.name} here, figures need it: ./setup.sh plots\n")
    except OSError as error:
        parser.exit(2, f"{parser.prog}: {error.filename}: {error.strerror}\n")
    except KeyboardInterrupt:
        print(f"\n{parser.prog}: stopped; figures that are there are whole", file=sys.stderr)
        return 130
    _report(drawn, left_out, collection.num_cpu_folders)
    if files:
        size = sum(path.stat().st_size for path in files)
        print(f"{len(files)} files, {size / 1e3:,.0f} kB in {folder}, {time.monotonic() - start:.1f} s")
        there = folder.glob("*.svg") if args.readme else folder.rglob("*.svg")
        for path in sorted(set(there) - set(files)):
            print(f"from an earlier call: {path}")
    for line in collection.skipped:
        print(f"{parser.prog}: drawn without it: {line}", file=sys.stderr)
    for line in collection.refused:
        print(f"{parser.prog}: refused: {line}", file=sys.stderr)
    if not (collection.blocks or collection.sweeps or collection.num_cpu_folders or collection.refused):
        print(f"{parser.prog}: no records in {root}", file=sys.stderr)
        return 1
    return 1 if collection.refused or collection.skipped else 0


def _report(drawn, left_out, num_cpu_folders):
    """Print a line for each figure with its finding, and one for each reason why some are not drawn."""
    width = max((len(name) for name, _ in drawn), default=0)
    for name, finding in drawn:
        print(f"{name.ljust(width)}  {finding}")
    reasons: dict[tuple[str, str], list[str]] = {}
    for name, reason in left_out:
        kind, _, what = name.partition("-")
        reasons.setdefault((kind, reason), []).append(what)
    for (kind, reason), whats in reasons.items():
        where = ", ".join(filter(None, whats))
        print(f"not drawn: {kind}{f' of {where}' if where else ''}: {reason}")
    if num_cpu_folders:
        folders = f"{num_cpu_folders} folder{'s' if num_cpu_folders > 1 else ''}"
        print(f"not drawn: {folders} of CPU records, which say nothing about a GPU's speed")


if __name__ == "__main__":
    # Of head and the like: all files are written by then.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.exit(main())
