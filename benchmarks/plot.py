"""Figures of all runs below a folder.

    python -m benchmarks.plot                    draws into results/figures, as SVG
    python -m benchmarks.plot results --readme   the front page's alone: law, why and models
    python -m benchmarks.plot runs               one's own, into runs/figures, as SVG and PNG

Besides the front page's: blocks and timeline of each workload, throughput of each model. A figure whose data is not
there is not drawn, which is said in a line. Runs on a CPU are drawn where there are no others. The same runs give the
same bytes. Exit status: 0; 1 where no figure could be drawn; 2 for a mistake on the command line.
"""

import importlib.util
import sys
from pathlib import Path

from benchmarks import ROOT, command
from benchmarks.command import Mistake, shown
from benchmarks.files import runs
from benchmarks.pages import published


def parse(argv=None):
    """The command line."""
    parser = command.parser_of("plot", "Figures of all runs below a folder.")
    parser.add_argument("root", metavar="ROOT", nargs="?", default="results", help="a root of runs (results)")
    parser.add_argument("--out", metavar="DIR", help="where the figures go (ROOT/figures)")
    parser.add_argument("--readme", action="store_true", help="the front page's figures alone")
    return parser.parse_args(argv)


def figures(found: runs.Found, readme_only: bool = False):
    """(file name, function that makes the page, its arguments) of every figure that there could be."""
    from benchmarks.figures import choice, front, of_model

    own = choice.shown(found)
    for make in (front.law, front.why, front.models):
        yield make.__name__, make, (own,)
    for workload in () if readme_only else own.workloads:
        for draw_one in (of_model.blocks, of_model.timeline):
            yield of_model.file_name(draw_one.__name__, workload, own), draw_one, (own, workload)
    for model in () if readme_only else sorted({workload.model for workload in own.workloads}):
        if published.rate_of(model) is None:
            continue
        yield of_model.safe(f"throughput-{model}"), of_model.throughput, (own, model)


def draw(found: runs.Found, folder: Path, readme_only: bool = False) -> tuple[dict[str, str], dict[str, str]]:
    """Write the figures: as SVG alone where the folder is results/figures of this repository, else as PNG, too.

    Returns:
        Name -> title of each figure that was drawn, and name -> reason of each that was not.
    """
    from benchmarks.figures import style

    has_png = folder.resolve() != (ROOT / "results" / "figures").resolve()
    drawn, left_out = {}, {}
    with style.applied():
        for name, make, arguments in figures(found, readme_only):
            try:
                page = make(*arguments)
            except style.NotDrawn as reason:
                left_out[name] = str(reason)
                continue
            style.save(page, folder, name, has_png)
            drawn[name] = page.title
    return drawn, left_out


def work(args) -> int:
    """Draw, and say it."""
    root = Path(args.root)
    if not root.is_dir():
        raise Mistake(f"{root}: no such folder")
    if importlib.util.find_spec("matplotlib") is None:
        raise Mistake("no matplotlib here, figures need it: ./setup.sh plots")
    found, folder = runs.read(root), Path(args.out) if args.out else root / "figures"
    for fault in found.faults:
        print(f"left out: {fault}")
    if not found.runs:
        print(f"not drawn: no run is in {root}; make bench MODEL=... makes one", file=sys.stderr)
        return 1
    drawn, left_out = draw(found, folder, args.readme)
    for name, title in drawn.items():
        print(f"{name}: {title}")
    for reason in dict.fromkeys(left_out.values()):
        print(f"not drawn: {', '.join(name for name in left_out if left_out[name] == reason)}: {reason}")
    print(f"{len(drawn)} figure{'s' if len(drawn) != 1 else ''} in {shown(folder)}")
    return 0 if drawn else 1


def main(argv=None) -> int:
    """The program."""
    args = parse(argv)
    stopped = "\nstopped; figures that are there are whole"
    return command.exit_status("python -m benchmarks.plot", lambda: work(args), stopped=stopped)


if __name__ == "__main__":
    sys.exit(main())
