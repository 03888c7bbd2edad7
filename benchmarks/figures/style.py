"""One style for all figures: colours for light and dark pages, marks, pages in inches, files equal run after run."""

import contextlib
import io
import math
import re
from functools import lru_cache
from pathlib import Path

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import text_to_path
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator
from PIL import Image

from benchmarks.frame import family
from common.files import write_text

DPI = 120
INK, FAINT, BAND, GRID, FAILURE = "#222222", "#666666", "#ececec", "#e4e4e4", "#b5402f"

# Colour on a light page -> colour on a dark one. What is not here reads well on both.
DARK = {
    "#ffffff": "#0d1117",
    INK: "#e6edf3",
    FAINT: "#9da7b3",
    BAND: "#262c36",
    GRID: "#262c36",
    FAILURE: "#f0806e",
    "#1b6ca8": "#4a9fdc",
    "#0072b2": "#4a9fdc",
    "#009e73": "#2dbd95",
    "#7b5fc0": "#a892e6",
    "#0d3c61": "#b4d8f4",
    "#12507f": "#7fbcec",
    "#d2d2d2": "#5a5f66",
}

STYLE = {
    "font.family": "sans-serif",
    # The first is the one measured with; the others are no wider.
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"],
    "font.size": 9,
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
    # A dollar in a message is no formula.
    "text.parse_math": False,
    # Hinted letters are up to 4 % wider than the unhinted ones that lines are broken with, and that SVG has.
    "text.hinting": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": FAINT,
    "axes.linewidth": 0.8,
    "axes.axisbelow": True,
    "axes.labelsize": 8.5,
    "axes.formatter.useoffset": False,
    "axes.unicode_minus": False,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    **dict.fromkeys(("xtick.major.size", "xtick.minor.size", "ytick.major.size", "ytick.minor.size"), 0),
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 9,
    "hatch.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "legend.borderaxespad": 0,
    "lines.linewidth": 1.6,
    "svg.fonttype": "none",
    "svg.hashsalt": "figures",
    "path.simplify_threshold": 0.2,
}

# Looks of a variant: colour, hatch of its bars, marker, dashes of its line. Hatch, marker and dashes tell
# variants apart in grey print; dots as a hatch would cost 45 kB in a drawing. No marker is a diamond: those
# are rows under host load.
LOOKS = {
    "eager": ("#8c8c8c", "", "s", "-"),
    "eager_sync": ("#bdbdbd", "|", "X", (0, (1, 1))),
    "control": ("#d2d2d2", "-", ">", (0, (2, 1))),
    "graph": ("#1b6ca8", "", "o", "-"),
    "graph_te": ("#5f9ccb", "//", "d", (0, (6, 1.5))),
    "graph_te_slot": ("#7fb0d6", "//", "^", (0, (4, 1.5))),
    "graph_overlap": ("#0d3c61", "xx", "p", (0, (1, 1))),
    "partial": ("#a9cbe6", "\\\\", "v", (0, (5, 1.5, 1, 1.5))),
    "compile": ("#d9a441", "", "P", "-"),
    "reduce_overhead": ("#a87618", "//", "*", (0, (4, 1.5))),
    "compile_graph": ("#f0cf94", "xx", "h", (0, (1, 1))),
}
# For names that are not above, in turn.
MORE = {
    "eager": [("#a8a8a8", "--", "8", (0, (3, 2)))],
    "compile": [("#c08a2b", "\\\\", (3, 1, 0), (0, (3, 2)))],
    "graph": [
        ("#4a8fc4", "--", "<", (0, (3, 2))),
        ("#12507f", "++", (6, 1, 0), (0, (6, 2))),
        ("#c5dcef", "\\\\\\\\", (4, 1, 0), (0, (2, 2))),
        ("#2f7db8", "||", "H", (0, (7, 1, 2, 1))),
    ],
}


def look(variant: str, variants=()) -> tuple:
    """(colour, hatch, marker, dashes). `variants`: all in the figure, so that unknown ones differ from each other."""
    if variant in LOOKS:
        return LOOKS[variant]
    kind = family(variant)
    unknown = sorted({name for name in variants if name not in LOOKS and family(name) == kind} | {variant})
    return MORE[kind][unknown.index(variant) % len(MORE[kind])]


# ------------------------------------------------------------------------------------------------
# Pages


class Page:
    """A figure whose parts are placed in inches from its top left corner, under a title and above a footer.

    title states the finding, note says how to read the figure; both are wrapped to the width, which is that of a
    repository's page, 830 pixels. top: inches above the body; foot: inches below it.
    """

    WIDTH = 8.6
    MARGIN = 0.15

    def __init__(self, title: str, note: str, footer: str, body: float):
        # Another font may be a little wider.
        room = 0.97 * (self.WIDTH - 2 * self.MARGIN)
        heads, notes, feet = wrap(title, room, 10.5, "bold"), wrap(note, room, 8), wrap(footer, room, 7)
        self.top = 0.14 + 0.21 * len(heads) + 0.155 * len(notes)
        self.height = self.top + body + 0.13 * len(feet) + 0.22
        self.foot = self.height - self.top - body
        self.title = title
        self.figure = Figure(figsize=(self.WIDTH, self.height))
        FigureCanvasAgg(self.figure)
        y = 0.1
        for lines, step, style in (
            (heads, 0.21, {"fontsize": 10.5, "fontweight": "bold"}),
            (notes, 0.155, {"fontsize": 8, "color": FAINT}),
        ):
            for line in lines:
                self.text(self.MARGIN, y, line, va="top", **style)
                y += step
        for index, line in enumerate(feet):
            below = self.height - 0.08 - 0.13 * (len(feet) - 1 - index)
            self.text(self.MARGIN, below, line, va="bottom", fontsize=7, color=FAINT)

    def text(self, x: float, y: float, text: str, **style):
        """Text at inches from the page's top left corner."""
        return self.figure.text(x / self.WIDTH, 1 - y / self.height, text, **style)

    def axes(self, left: float, top: float, width: float, height: float):
        """Axes at inches; top counts from below title and note."""
        bottom = self.height - self.top - top - height
        return self.figure.add_axes((left / self.WIDTH, bottom / self.height, width / self.WIDTH, height / self.height))

    def heading(self, left: float, top: float, text: str, fainter: str = ""):
        """A line of small bold text above axes that begin at `top`, and fainter words after it."""
        style = {"va": "bottom", "fontsize": 8.5}
        self.text(left, self.top + top - 0.06, text, fontweight="bold", **style)
        self.text(left + width_of([text], 8.5, "bold"), self.top + top - 0.06, fainter, color=FAINT, **style)


def rows_page(title, note, footer, panels, label: str, right=(), row: float = 0.27, below: float = 0.0):
    """(page, axes of each panel): panels of named rows below each other, the first row on top, with one axis below.

    panels: (heading, fainter words after it, names of the rows) of each. right: the texts that stand right of the axes
    (`beside`). row: inches. below: inches left free under the axis.
    """
    heights = [row * len(names) for *_, names in panels]
    page = Page(title, note, footer, sum(heights) + 0.42 * len(panels) + 0.36 + below)
    left = width_of([name for *_, names in panels for name in names]) + page.MARGIN
    width = page.WIDTH - left - width_of(right, 8.5) - page.MARGIN
    top, every = 0.34, []
    for (heading, fainter, names), height in zip(panels, heights, strict=True):
        axes = page.axes(left, top, width, height)
        page.heading(left, top, heading, fainter)
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(len(names) - 0.45, -0.55)
        axes.spines[["left", "bottom"]].set_visible(False)
        axes.tick_params(labelbottom=False)
        axes.grid(axis="x")
        every.append(axes)
        top += height + 0.42
    every[-1].spines["bottom"].set_visible(True)
    every[-1].tick_params(labelbottom=True)
    every[-1].set_xlabel(label)
    return page, every


def beside(axes, y: float, text: str, color: str = INK):
    """Text right of the axes at a row."""
    axes.annotate(
        text, (1, y), (8, 0), axes.get_yaxis_transform(), "offset points", va="center", fontsize=8.5, color=color
    )


def in_row(axes, y: float, text: str, x: float = 0.0, size: float = 8.0, color: str = FAILURE):
    """Text right of x, in data units, in a row: what came to nothing and why, or the number of a bar."""
    axes.annotate(text, (x, y), (4, 0), textcoords="offset points", va="center", fontsize=size, color=color)


def legend(page: Page, signs, left: float, top: float):
    """A legend of these artists, in as many rows as it takes, at inches from the page's left and top."""
    page.figure.legend(
        handles=signs,
        loc="upper left",
        bbox_to_anchor=(left / page.WIDTH, 1 - top / page.height),
        ncols=_legend_columns([sign.get_label() for sign in signs], left),
        fontsize=8,
        handletextpad=0.1,
        columnspacing=0.9,
        borderpad=0,
    )


def legend_height(names: list[str], left: float) -> float:
    """Inches that a legend with these names takes."""
    return 0.19 * math.ceil(len(names) / _legend_columns(names, left))


def _legend_columns(names, left):
    return max(1, int((Page.WIDTH - left - Page.MARGIN) / (width_of(names, 8) + 0.3)))


def bar(axes, y: float, value: float, appearance: tuple, height: float = 0.62):
    colour, hatch, _, _ = appearance
    axes.barh(y, value, height=height, color=colour, hatch=hatch, edgecolor="white", linewidth=0)


@lru_cache(maxsize=4096)
def _inches(text, size, weight):
    properties = FontProperties(family="DejaVu Sans", size=size, weight=weight)
    return text_to_path.get_text_width_height_descent(text, properties, ismath=False)[0] / 72


def width_of(texts, size: float = 9.0, weight: str = "normal") -> float:
    """Inches that the longest of these texts takes, with a little air."""
    return max((_inches(text, size, weight) for text in texts), default=0.0) + 0.12


def wrap(text: str, room: float, size: float, weight: str = "normal") -> list[str]:
    """Lines of at most `room` inches."""
    lines: list[str] = []
    for word in text.split():
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and _inches(longer, size, weight) <= room:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines


# ------------------------------------------------------------------------------------------------
# Axes


def ratio_axis(axes, name: str, low: float, high: float, unit: str = "x"):
    """Make the axis `name` ("x" or "y") a log axis of ratios from low to high: 0.98x, 1x, 1.02x, or 1x, 1.5x, 2x."""
    # From a factor of 64 on, halves would crowd.
    powers = LogLocator(2, subs=(1.0, 1.5) if high / low < 64 else (1.0,))
    log_axis(axes, name, low, high, powers if high / low > 4 else MaxNLocator(6, steps=[1, 2, 5, 10]), unit)


def log_axis(axes, name: str, low: float, high: float, locator, unit: str = ""):
    """Make the axis `name` ("x" or "y") a log axis from low to high with the locator's ticks alone."""
    axes.set(**{f"{name}scale": "log", f"{name}lim": (low, high)})
    axis = axes.xaxis if name == "x" else axes.yaxis
    axis.set_major_locator(locator)
    axis.set_major_formatter(lambda value, _: f"{value:g}{unit}")
    axis.set_minor_locator(NullLocator())


# ------------------------------------------------------------------------------------------------
# Files


def save(page: Page, folder: Path, name: str, has_png: bool = True) -> list[Path]:
    """Write NAME.svg and NAME.png without date or version: the same numbers give the same bytes.

    A reader, or another call at the same time, sees whole files only.
    """
    files = [folder / f"{name}.{suffix}" for suffix in (("svg", "png") if has_png else ("svg",))]
    for path, metadata in zip(files, ({"Date": None, "Creator": None}, {"Software": None}), strict=False):
        drawing = io.BytesIO()
        page.figure.savefig(drawing, format=path.suffix[1:], dpi=DPI, metadata=metadata)
        data = drawing.getvalue()
        write_text(path, for_pages(data.decode()) if path.suffix == ".svg" else in_few_colours(data))
    return files


def in_few_colours(png: bytes) -> bytes:
    """The same picture without transparency and with 32 levels of each colour: within 4 of 255, in 0.6 of the bytes."""
    small, levels = io.BytesIO(), [round(round(value / 255 * 31) * 255 / 31) for value in range(256)]
    Image.open(io.BytesIO(png)).convert("RGB").point(levels * 3).save(small, "PNG", optimize=True)
    return small.getvalue()


def for_pages(svg: str) -> str:
    """The same drawing, in the colours of a dark page where the reader has one, and in fewer bytes: coordinates to
    0.01 points, one rule for the font, no indentation."""
    font = re.search(r"font-family: ([^;]*);", svg)
    rules = f"text{{font-family: {font[1]}}}" if font else ""
    svg = re.sub(r"font-family: [^;]*; ?", "", svg)
    svg = re.sub(r' (?:d|x|y|transform)="[^"]*"', lambda match: re.sub(r"(\.\d\d)\d+", r"\1", match.group()), svg)
    # What matplotlib writes into each element gives way to a rule with !important. Patterns of hatches have attributes.
    dark = "".join(
        f'[style*="{kind}: {light}"],[{kind}="{light}"]{{{kind}:{colour}!important}}'
        for light, colour in DARK.items()
        for kind in ("fill", "stroke")
        if f"{kind}: {light}" in svg or f'{kind}="{light}"' in svg
    )
    rules += f"@media (prefers-color-scheme: dark){{{dark}}}"
    svg = svg.replace("</style>", f"{rules}</style>", 1)
    return "\n".join(line.strip() for line in svg.splitlines()) + "\n"


@contextlib.contextmanager
def applied():
    """The context in which figures are made and saved; what a user's matplotlibrc says does not count."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        yield
