"""Figures of all runs below a folder.

    python -m benchmarks.plot                    draws into results/figures
    python -m benchmarks.plot runs               your runs, into runs/figures

Only runs on a GPU are drawn. If the data of a figure is missing, a line says so, and an earlier drawing is removed. The
same runs give the same bytes. Exit status: 0; 1 where no figure could be drawn; 2 for a mistake.
"""

import importlib.util
import sys
from pathlib import Path

from benchmarks import frame
from graph_worth.files import write_text
from graph_worth.harness import command
from graph_worth.harness.command import Mistake, shown
from graph_worth.harness.pages.cells import counted


def draw(results: frame.Results, folder: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Write the figures as SVG; return the title of each that was drawn, and the reason of each that was not."""
    from benchmarks.figures import roofline, style, sweep

    drawn, left_out = {}, {}
    figures = {"roofline": roofline.draw, **sweep.figures(results)}
    for path in folder.glob("sweep-*.svg"):
        if path.stem not in figures:
            path.unlink()
    with style.applied():
        for name, make in figures.items():
            try:
                page = make(results)
            except style.NotDrawn as reason:
                left_out[name] = str(reason)
                (folder / f"{name}.svg").unlink(missing_ok=True)
                continue
            write_text(folder / f"{name}.svg", style.as_svg(page))
            drawn[name] = page.title
    return drawn, left_out


def work(args) -> int:
    """Draw the figures and print their titles."""
    root = Path(args.root)
    if not root.is_dir():
        raise Mistake(f"{root}: no such folder")
    if importlib.util.find_spec("matplotlib") is None:
        raise Mistake("no matplotlib here, figures need it: ./setup.sh plots")
    results, folder = frame.load(root), Path(args.out) if args.out else root / "figures"
    for fault in results.faults:
        print(f"left out: {fault}")
    if not results.runs:
        print(f"not drawn: no run is in {root}; make bench MODEL=... makes one", file=sys.stderr)
        return 1
    drawn, left_out = draw(results, folder)
    for name, title in drawn.items():
        print(f"{name}: {title}")
    for name, reason in left_out.items():
        print(f"not drawn: {name}: {reason}")
    print(f"{counted(len(drawn), 'figure')} in {shown(folder)}")
    return 0 if drawn else 1


def main(argv=None) -> int:
    """Run the program; return its exit status."""
    parser = command.parser_of("plot", "Figures of all runs below a folder.")
    parser.add_argument("root", metavar="ROOT", nargs="?", default="results", help="a root of runs (results)")
    parser.add_argument("--out", metavar="DIR", help="where the figures go (ROOT/figures)")
    args = parser.parse_args(argv)
    stopped = "\nstopped; figures that are there are whole"
    return command.exit_status("python -m benchmarks.plot", lambda: work(args), stopped=stopped)


if __name__ == "__main__":
    sys.exit(main())
