"""The page of a run for a browser: one file with style, plots and data inside, that loads nothing.

`web/uplot` is uPlot as npm has it; `npm pack uplot@VERSION` brings another version.
"""

from collections import Counter
from pathlib import Path

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from graph_worth.files import with_leaves
from graph_worth.harness.judge import Judged
from graph_worth.harness.pages.run_table import cells_of
from graph_worth.text import lines, printable

WEB = Path(__file__).parent / "web"
# Tints of a kind's color, for several variants of a kind.
NUM_TINTS = 4


def page(data: dict, **facts) -> str:
    """Return the text of the page.

    Args:
        data: read by report.js as `data`.
        facts: read by the template.
    """
    environment = Environment(
        loader=FileSystemLoader(WEB), autoescape=True, trim_blocks=True, lstrip_blocks=True, finalize=_shown
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    style, script = (
        Markup("\n".join((WEB / name).read_text() for name in names))
        for names in (["uplot/uPlot.min.css", "page.css"], ["uplot/uPlot.iife.min.js", "report.js"])
    )
    template = environment.get_template("report.html.j2")
    return template.render(facts, style=style, script=script, data=with_leaves(data, _shown))


def _shown(value):
    """A text without commands of a terminal; jinja2 escapes markup, in data for scripts, too."""
    return lines(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def timed(judged: Judged) -> dict[str, str]:
    """Return the passing variants that have quiet blocks, each with the name of its color in page.css."""
    names = [name for name in judged.build.variants if judged.passed(name) and judged.blocks(name)]
    tints: Counter[str] = Counter()
    colors = {}
    for name in names:
        kind = judged.build.variants[name].kind
        colors[name] = "control" if name == judged.run.control else f"{kind}{tints[kind] % NUM_TINTS}"
        tints[kind] += name != judged.run.control
    return colors


def blocks(judged: Judged) -> dict:
    """Return the mean step of each block of the timed variants in the order of time, as report.js draws it.

    `cycles` and `busy` have the cycle and the number of busy processes of each place; a line's `x` are places.
    """
    colors = timed(judged)
    blocks_by_variant = {name: judged.build.variants[name].blocks for name in colors}
    order = sorted(
        {
            (block.cycle, block.place): block.busy_processes
            for variant_blocks in blocks_by_variant.values()
            for block in variant_blocks
        }.items()
    )
    places = {where: place for place, (where, _) in enumerate(order)}
    drawn = []
    for name, color in colors.items():
        cells = cells_of(judged, name)
        label = ", ".join(filter(None, [cells["variant"], f"{cells['ms']} ms", cells["ratio"]]))
        points = sorted(
            (places[block.cycle, block.place], float(f"{block.mean_ms:.5g}")) for block in blocks_by_variant[name]
        )
        xs, ys = ([*values] for values in zip(*points, strict=True))
        drawn.append({"name": printable(name), "label": label, "color": color, "x": xs, "y": ys})
    return {"lines": drawn, "cycles": [cycle for (cycle, _), _ in order], "busy": [number for _, number in order]}
