"""One style for all figures: colours for light and dark pages, pages in inches, equal bytes."""

import contextlib
import io
import re
from functools import lru_cache

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import text_to_path

from graph_worth.text import lines, printable

DPI = 120
INK, FAINT, PALE, GRID = "#222222", "#666666", "#b4b4b4", "#e4e4e4"
# A marker for each type of GPU, and that of compiled code on any.
MARKS, COMPILED = "oD^vPh*", "s"
# The colours on a dark page.
DARK = {"#ffffff": "#0d1117", INK: "#e6edf3", FAINT: "#9da7b3", PALE: "#5f6771", GRID: "#2d333d"}

SMALL = 8.5  # points: labels of marks

STYLE = {
    "font.family": "sans-serif",
    # Widths are measured in the first; the others are no wider.
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"],
    "font.size": 9.5,
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
    **dict.fromkeys(("axes.labelsize", "xtick.labelsize", "ytick.labelsize", "legend.fontsize"), 9.5),
    "legend.frameon": False,
    "axes.axisbelow": True,
    "svg.fonttype": "none",
    "svg.hashsalt": "figures",
}


class NotDrawn(ValueError):
    """A figure whose data is not there; the text says in a line what is missing."""


class Page:
    """A figure whose parts stand at inches, between a title with a note (how to read it) and a footer.

    `body`: inches between note and footer. A y counts down from the note.
    """

    WIDTH = 5.4  # inches; narrow, so that its letters can still be read on a telephone
    MARGIN = 0.15

    def __init__(self, title: str, note: str, footer: str, body: float):
        title, note, footer = map(printable, (title, note, footer))
        # Another font may be a little wider.
        room = 0.97 * (self.WIDTH - 2 * self.MARGIN)
        heads, notes, feet = wrap(title, room, 11.5, "bold"), wrap(note, room, 9), wrap(footer, room, 8)
        self.top = 0.16 + 0.225 * len(heads) + 0.17 * len(notes)
        self.height = self.top + body + 0.15 * len(feet) + 0.1
        self.title, self.figure = title, Figure(figsize=(self.WIDTH, self.height))
        FigureCanvasAgg(self.figure)
        after = 0.12 - self.top + 0.225 * len(heads)
        self._lines(0.1 - self.top, 0.225, heads, fontsize=11.5, fontweight="bold")
        self._lines(after, 0.17, notes, fontsize=9, color=FAINT)
        self._lines(body + 0.04, 0.15, feet, fontsize=8, color=FAINT)

    def _lines(self, y, step, lines, **style):
        for index, line in enumerate(lines):
            up = 1 - (self.top + y + step * index) / self.height
            self.figure.text(self.MARGIN / self.WIDTH, up, line, va="top", **style)

    def axes(self, left: float, top: float, width: float, height: float):
        """Axes at inches."""
        bottom = self.height - self.top - top - height
        return self.figure.add_axes((left / self.WIDTH, bottom / self.height, width / self.WIDTH, height / self.height))


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


def as_svg(page: Page) -> str:
    """The drawing, in the colours of a dark page where the reader has one; equal pages give equal text."""
    drawing = io.StringIO()
    page.figure.savefig(drawing, format="svg", dpi=DPI, metadata={"Date": None, "Creator": None})
    # A control character in a name would make the file unreadable.
    svg = lines(drawing.getvalue())
    # Coordinates to 0.01 points.
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
