"""One style for all figures: colours for light and dark pages, pages in inches, labels apart, equal bytes."""

import contextlib
import io
import re
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import text_to_path
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from common.files import write_text

DPI = 120
INK, FAINT, BAND, GRID = "#222222", "#666666", "#ececec", "#e4e4e4"
EAGER, CONTROL = "#6e6e6e", "#a0a0a0"
# On a light page, and on a dark one. Each model or variant takes the next colour.
PALETTE = ("#1b6ca8", "#b3541e", "#1f7a5c", "#7b5fc0", "#8a6410", "#b03a6b", "#2b7a86")
ON_DARK = ("#4a9fdc", "#e8925c", "#3fc096", "#a892e6", "#d9a441", "#e57aa5", "#55bccb")
MARKS = "oD^vPh*"
DARK = {"#ffffff": "#0d1117", INK: "#e6edf3", FAINT: "#9da7b3", BAND: "#262c36", GRID: "#2d333d"}
DARK |= {EAGER: "#a8aeb6", CONTROL: "#767d87", **dict(zip(PALETTE, ON_DARK, strict=True))}

# Behind a text that stands on lines.
CLEAR = {"facecolor": "#ffffff", "edgecolor": "none", "pad": 0.8}

STYLE = {
    "font.family": "sans-serif",
    # Widths are measured in the first; the others are no wider.
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"],
    "font.size": 8.5,
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
    # A dollar in a name is no formula.
    "text.parse_math": False,
    # Hinted letters are up to 4 % wider than the unhinted ones that SVG has.
    "text.hinting": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": FAINT,
    "axes.formatter.useoffset": False,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    **dict.fromkeys(("xtick.major.size", "xtick.minor.size", "ytick.major.size", "ytick.minor.size"), 0),
    **dict.fromkeys(("axes.labelsize", "xtick.labelsize", "ytick.labelsize", "legend.fontsize"), 8.5),
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "figures",
}


class NotDrawn(ValueError):
    """A figure whose data is not there; the text says in a line what is missing."""


def look(index: int) -> tuple[str, str]:
    """Colour and marker of the model or variant with this place in its order."""
    return PALETTE[index % len(PALETTE)], MARKS[index % len(MARKS)]


class Page:
    """A figure whose parts stand at inches, between a title with a note (how to read it) and a footer.

    `body`: inches between note and footer. A y counts down from the note.
    """

    WIDTH = 8.6  # of a repository's page, 830 pixels
    MARGIN = 0.15

    def __init__(self, title: str, note: str, footer: str, body: float):
        # Another font may be a little wider.
        room = 0.97 * (self.WIDTH - 2 * self.MARGIN)
        heads, notes, feet = wrap(title, room, 10.5, "bold"), wrap(note, room, 8), wrap(footer, room, 7.5)
        self.top = 0.14 + 0.21 * len(heads) + 0.155 * len(notes)
        self.height = self.top + body + 0.14 * len(feet) + 0.1
        self.title, self.figure = title, Figure(figsize=(self.WIDTH, self.height))
        FigureCanvasAgg(self.figure)
        after = 0.1 - self.top + 0.21 * len(heads)
        self._lines(0.1 - self.top, 0.21, heads, fontsize=10.5, fontweight="bold")
        self._lines(after, 0.155, notes, fontsize=8, color=FAINT)
        self._lines(body + 0.04, 0.14, feet, fontsize=7.5, color=FAINT)

    def _lines(self, y, step, lines, **style):
        for index, line in enumerate(lines):
            self.text(self.MARGIN, y + step * index, line, **style)

    def text(self, x: float, y: float, text: str, **style):
        """Text whose top left corner is at inches."""
        where = x / self.WIDTH, 1 - (self.top + y) / self.height
        return self.figure.text(*where, text, **{"va": "top", **style})

    def axes(self, left: float, top: float, width: float, height: float):
        """Axes at inches."""
        bottom = self.height - self.top - top - height
        return self.figure.add_axes((left / self.WIDTH, bottom / self.height, width / self.WIDTH, height / self.height))

    def heading(self, left: float, y: float, text: str, fainter: str = ""):
        """A small bold line, and fainter words behind it."""
        self.text(left, y, text, fontsize=9, fontweight="bold")
        if fainter:
            where = left + width_of(text, 9, "bold") + 0.1, y + 0.01
            self.text(*where, fainter, fontsize=8, color=FAINT, bbox=CLEAR)


@lru_cache(maxsize=4096)
def width_of(text: str, size: float, weight: str = "normal") -> float:
    """Inches that a text takes."""
    properties = FontProperties(family="DejaVu Sans", size=size, weight=weight)
    return text_to_path.get_text_width_height_descent(text, properties, ismath=False)[0] / 72


def wrap(text: str, room: float, size: float, weight: str = "normal") -> list[str]:
    """Lines of at most `room` inches."""
    lines: list[str] = []
    for word in text.split():
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and width_of(longer, size, weight) <= room:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines


def ratio_axis(axes, name: str, low: float, high: float):
    """Make the axis `name` ("x" or "y") a log axis of ratios: 0.9x, 1x, 1.1x, or 1x, 2x, 4x."""
    axes.set(**{f"{name}scale": "log", f"{name}lim": (low, high)})
    axis = axes.xaxis if name == "x" else axes.yaxis
    powers = LogLocator(2, subs=(1.0, 1.5) if high / low < 16 else (1.0,))
    axis.set_major_locator(MaxNLocator(7, steps=[1, 2, 2.5, 5, 10]) if high / low < 3 else powers)
    axis.set_major_formatter(lambda value, _: f"{value:g}x")
    axis.set_minor_locator(NullLocator())


def rows_axes(page: Page, left: float, width: float, height: float):
    """Axes for rows that stand at inches from the top, without a line on the left."""
    axes = page.axes(left, 0.1, width, height)
    axes.set(ylim=(height, 0), yticks=[])
    axes.spines["left"].set_visible(False)
    axes.grid(axis="x")
    return axes


def label_points(axes, points: list[tuple[float, float, str, str]], obstacles=()) -> list[str]:
    """Write a label beside each point, over no other label, point or obstacle; a far one has a thin line.

    Args:
        axes: with its final limits.
        points: x, y, text and colour of each; a point with empty text is kept free only.
        obstacles: (x, y) of further places to keep free, such as those of a line.

    Returns:
        The texts that found a place.
    """
    scale, written = 72 / axes.figure.dpi, []
    labels: list[tuple[float, float, float, float]] = []
    at = [axes.transData.transform((x, y)) * scale for x, y, *_ in points]
    taken = [_box(x, y, 4) for x, y in at]
    taken += [_box(x, y, 1) for x, y in (axes.transData.transform(each) * scale for each in obstacles)]
    (left, bottom), (right, top) = axes.bbox.get_points() * scale
    place = {"textcoords": "offset points", "va": "center", "fontsize": 8}
    for (at_x, at_y), (x, y, text, colour) in sorted(zip(map(tuple, at), points, strict=True)):
        width = 72 * 1.03 * width_of(text, 8)
        for dx, dy in _offsets(width) if text else ():
            box = at_x + dx, at_y + dy - 5, at_x + dx + width, at_y + dy + 5
            end = min(max(0, dx), dx + width)
            line = [_box(at_x + end * step / 16, at_y + dy * step / 16, 0.5) for step in range(17)]
            inside = left <= box[0] and box[2] <= right and bottom <= box[1] and box[3] <= top
            crossed = any(_meet(box, other) for other in taken) or any(_meet(a, b) for a in line for b in labels)
            if inside and not crossed:
                axes.annotate(text, (x, y), (dx, dy), color=colour, **place)
                far = max(abs(end), abs(dy)) > 14
                if far:
                    arrow = {"arrowstyle": "-", "color": FAINT, "linewidth": 0.5, "shrinkA": 1, "shrinkB": 4}
                    axes.annotate("", (x, y), (end, dy - 4 * (dy > 0) + 4 * (dy < 0)), arrowprops=arrow, **place)
                labels.append(box)
                taken += [box, *(line if far else ())]
                written.append(text)
                break
    return written


def _offsets(width):
    """Left ends and middles of a label around its point, in points, the nearest first."""
    for reach in (0, 9, 20, 32, 46, 62):
        for dx in (7 + reach, -width - 7 - reach):
            for dy in sorted({0, reach, -reach}, key=abs):
                yield dx, dy
        yield -width / 2, 11 + reach
        yield -width / 2, -11 - reach


def _box(x, y, half):
    return x - half, y - half, x + half, y + half


def _meet(one, other):
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def apart(values: list[float], gap: float, highest: float) -> list[float]:
    """The values, moved up until they stand `gap` apart, and down where they would end above `highest`."""
    order, moved = sorted(range(len(values)), key=values.__getitem__), list(values)
    for lower, upper in pairwise(order):
        moved[upper] = max(moved[upper], moved[lower] + gap)
    moved[order[-1]] = min(moved[order[-1]], highest)
    for lower, upper in reversed(list(pairwise(order))):
        moved[lower] = min(moved[lower], moved[upper] - gap)
    return moved


def save(page: Page, folder: Path, name: str, has_png: bool) -> None:
    """Write NAME.svg, and NAME.png where wanted, each whole; equal pages give equal bytes.

    Raises:
        OSError: a file could not be written.
    """
    for kind, unset in (("svg", ("Date", "Creator")), ("png", ("Software",)))[: 2 if has_png else 1]:
        drawing = io.BytesIO()
        page.figure.savefig(drawing, format=kind, dpi=DPI, metadata=dict.fromkeys(unset))
        data = drawing.getvalue()
        write_text(folder / f"{name}.{kind}", for_pages(data.decode()) if kind == "svg" else data)


def for_pages(svg: str) -> str:
    """The same drawing, in the colours of a dark page where the reader has one, with coordinates to 0.01 points."""
    # A control character in a name would make the file unreadable.
    svg = re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f]", "", svg)
    svg = re.sub(r' (?:d|x|y|transform)="[^"]*"', lambda match: re.sub(r"(\.\d\d)\d+", r"\1", match.group()), svg)
    # matplotlib's styles stand in each element; only a rule with !important beats them.
    dark = "".join(
        f'[style*="{kind}: {light}"]{{{kind}:{colour}!important}}'
        for light, colour in DARK.items()
        for kind in ("fill", "stroke")
        if f"{kind}: {light}" in svg
    )
    svg = svg.replace("</style>", f"@media (prefers-color-scheme: dark){{{dark}}}</style>", 1)
    return "\n".join(line.strip() for line in svg.splitlines()) + "\n"


@contextlib.contextmanager
def applied():
    """The context in which figures are made and saved; a user's matplotlibrc does not count there."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)  # type: ignore[arg-type]  # the stub takes a Literal of every name
        yield
