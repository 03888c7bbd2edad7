"""All figures of a folder of results, as SVG and PNG.

    python -m benchmarks.plot results
    python -m benchmarks.plot runs/h200x1/gpt3-bench --out /tmp/figures

Reads every folder of records (benchmarks.run) and every sweep (benchmarks.sweep) at or below ROOT and writes to
ROOT/figures. A figure whose data is not there is not drawn, which is said in one line. CPU records show
parity and replays, never a speed-up, and are not drawn. The same records give the same bytes. Exit status:
0, 1 when a record, a folder or a sweep was refused or nothing was found, 2 for a mistake on the command line, 130 after
Ctrl-C.
"""

import argparse
import itertools
import signal
import sys
import time
from pathlib import Path

from benchmarks.figures import evidence


def figures(collection):
    """(file name, function without arguments that makes the page) of every figure there could be."""
    from benchmarks.figures import cost, law, speed, steps

    blocks = collection.blocks
    of_all = (("speedup", speed.speedup), ("law", law.law), ("memory", cost.memory), ("break_even", cost.break_even))
    for name, draw in of_all:
        yield name, lambda draw=draw: draw(blocks)
    for block in blocks:
        for name, draw in (
            ("step_time", steps.step_time),
            ("jitter", steps.jitter),
            ("timeline", steps.timeline),
            ("scope", cost.scope),
        ):
            yield f"{name}-{block.key}", lambda draw=draw, block=block: draw(block)
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


def draw_all(collection, folder: Path) -> tuple[list[tuple[str, str]], list[tuple[str, str]], list[Path]]:
    """Write all figures: (name and finding of each, name and reason of those not drawn, files)."""
    from benchmarks.figures import style

    drawn, left_out, files = [], [], []
    with style.applied():
        for name, make in figures(collection):
            try:
                page = make()
            except evidence.Missing as error:
                left_out.append((name, str(error)))
                continue
            folder.mkdir(parents=True, exist_ok=True)
            files += style.save(page, folder, name)
            drawn.append((name, page.title))
    return drawn, left_out, files


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.plot", description="All figures of a folder of results.", allow_abbrev=False
    )
    parser.add_argument("root", metavar="ROOT", nargs="?", default="results", help="results, or a folder of records")
    parser.add_argument("--out", metavar="DIR", help="where the figures go (ROOT/figures)")
    args = parser.parse_args(argv)
    start = time.monotonic()
    root = Path(args.root)
    folder = Path(args.out) if args.out else root / "figures"
    try:
        collection = evidence.collect(root)
        drawn, left_out, files = (
            draw_all(collection, folder) if collection.blocks or collection.sweeps else ([], [], [])
        )
    except FileNotFoundError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    except ModuleNotFoundError as error:
        parser.exit(2, f"{parser.prog}: no {error.name} here, figures need it: ./setup.sh plots\n")
    except OSError as error:
        parser.exit(2, f"{parser.prog}: {error.filename}: {error.strerror}\n")
    except KeyboardInterrupt:
        print(f"\n{parser.prog}: stopped; figures that are there are whole", file=sys.stderr)
        return 130
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
    if collection.num_cpu_folders:
        count = collection.num_cpu_folders
        print(
            f"not drawn: {count} folder{'s' if count > 1 else ''} of CPU records, which say nothing about a GPU's speed"
        )
    if files:
        size = sum(path.stat().st_size for path in files)
        print(f"{len(files)} files, {size / 1e3:,.0f} kB in {folder}, {time.monotonic() - start:.1f} s")
        for path in _earlier(folder, files):
            print(f"from an earlier call: {path}")
    for line in collection.skipped:
        print(f"{parser.prog}: drawn without it: {line}", file=sys.stderr)
    for line in collection.refused:
        print(f"{parser.prog}: refused: {line}", file=sys.stderr)
    if not (collection.blocks or collection.sweeps or collection.num_cpu_folders or collection.refused):
        print(f"{parser.prog}: no records in {root}", file=sys.stderr)
        return 1
    return 1 if collection.refused or collection.skipped else 0


def _earlier(folder, files):
    return sorted(set(folder.glob("*.svg")) - set(files))


if __name__ == "__main__":
    # Of head and the like: all files are written by then.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.exit(main())
