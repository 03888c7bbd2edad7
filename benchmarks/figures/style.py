"""One style for all figures: colours, marks, pages measured in inches, and files that are equal run after run."""

import contextlib
import io
import math
import os
import re
import tempfile
from functools import lru_cache
from pathlib import Path

import matplotlib
import numpy
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import text_to_path
from matplotlib.ticker import FixedLocator, NullFormatter, NullLocator
from PIL import Image

from benchmarks.frame import family

DPI = 120
INK, FAINT, BAND, FAILURE = "#222222", "#666666", "#ececec", "#b5402f"

STYLE = {
    "font.family": "sans-serif",
    # The first is the one measured with; the others are no wider.
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"],
    "font.size": 9,
    "text.color": INK,
    # A dollar in a message is no formula.
    "text.parse_math": False,
    # Hinted letters are up to 4 % wider than the unhinted ones that lines are broken with, and that SVG has.
    "text.hinting": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#666666",
    "axes.linewidth": 0.8,
    "axes.axisbelow": True,
    "axes.labelsize": 8.5,
    "axes.labelcolor": "#333333",
    "axes.formatter.useoffset": False,
    "axes.unicode_minus": False,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.7,
    "xtick.major.size": 0,
    "xtick.minor.size": 0,
    "ytick.major.size": 0,
    "ytick.minor.size": 0,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 9,
    "xtick.color": "#333333",
    "ytick.color": "#333333",
    "hatch.linewidth": 0.6,
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

    title states the finding, note says how to read the figure; both are wrapped to the width.
    """

    WIDTH = 8.0
    MARGIN = 0.15

    def __init__(self, title: str, note: str, footer: str, body: float):
        room = self.WIDTH - 2 * self.MARGIN
        heads, notes, feet = balanced(title, room, 10.5, "bold"), wrap(note, room, 8), wrap(footer, room, 7)
        self.top = 0.14 + 0.21 * len(heads) + 0.155 * len(notes)
        self.height = self.top + body + 0.13 * len(feet) + 0.22
        self.title = title
        self.figure = Figure(figsize=(self.WIDTH, self.height))
        FigureCanvasAgg(self.figure)
        y = 0.1
        for lines, step, style in (
            (heads, 0.21, {"fontsize": 10.5, "fontweight": "bold", "color": INK}),
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

    def heading(self, left: float, top: float, text: str):
        """A line of small bold text above axes that begin at `top`."""
        return self.text(left, self.top + top - 0.06, text, va="bottom", fontsize=8.5, fontweight="bold", color=INK)


@lru_cache(maxsize=4096)
def _inches(text, size, weight):
    properties = FontProperties(family="DejaVu Sans", size=size, weight=weight)
    return text_to_path.get_text_width_height_descent(text, properties, ismath=False)[0] / 72


def width_of(texts, size: float = 9.0, weight: str = "normal") -> float:
    """Inches that the longest of these texts takes, with a little air."""
    return max((_inches(text, size, weight) for text in texts), default=0.0) + 0.12


def balanced(text: str, room: float, size: float, weight: str = "normal") -> list[str]:
    """As few lines of at most `room` inches as can be, of about one length: no last line of a single word."""
    lines = wrap(text, room, size, weight)
    while len(lines) > 1 and room > 3:
        room -= 0.1
        narrower = wrap(text, room, size, weight)
        if len(narrower) > len(lines):
            break
        lines = narrower
    return lines


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
# Ratio axes


def ratio_ticks(low: float, high: float, most: int = 7) -> list[float]:
    """Round ratios between low and high, 1 among them where it is inside; steps of one size, or of factor 2."""
    if high / low > 6:
        power = 1 if high / low < 2**most else math.ceil(math.log2(high / low) / most)
        first, last = math.ceil(math.log2(low) / power), math.floor(math.log2(high) / power)
        return [2.0 ** (power * k) for k in range(first, last + 1)]
    for step in (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0):
        first, last = math.ceil((low - 1) / step - 1e-9), math.floor((high - 1) / step + 1e-9)
        if last - first < most:
            return [round(1 + k * step, 6) for k in range(first, last + 1)]
    return [1.0]


def ratio_axis(axis, low, high):
    """A log axis of ratios: 1.00x, 1.02x, ..."""
    ticks = ratio_ticks(low, high)
    digits = max(1, *(len(f"{tick:g}".partition(".")[2]) for tick in ticks))
    axis.set_major_locator(FixedLocator(ticks))
    axis.set_major_formatter(lambda value, _: f"{value:.{digits}f}x")
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())


# ------------------------------------------------------------------------------------------------
# Files


def save(page: Page, folder: Path, name: str) -> list[Path]:
    """Write NAME.svg and NAME.png without date or version: the same numbers give the same bytes.

    A reader, or another call at the same time, sees whole files only.
    """
    svg, png = folder / f"{name}.svg", folder / f"{name}.png"
    drawing, pixels = io.StringIO(), io.BytesIO()
    page.figure.savefig(drawing, format="svg", metadata={"Date": None, "Creator": None})
    _write(svg, _compact(drawing.getvalue()).encode())
    page.figure.set_dpi(DPI)
    page.figure.canvas.draw()
    image = Image.fromarray(numpy.asarray(page.figure.canvas.buffer_rgba())[..., :3])
    image.quantize(palette=_palette(), dither=Image.Dither.NONE).save(pixels, format="png", optimize=True)
    _write(png, pixels.getvalue())
    return [svg, png]


def _write(path, data):
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


@lru_cache(maxsize=1)
def _palette():
    """The style's own colours with two tints of each: files half as large, and no colour is bent."""
    greys = [(value,) * 3 for value in (255, 0x22, 0x44, 0x66, 0x8C, 0xB0, 0xC9, 0xD8, 0xE4, 0xEC)]
    names = [appearance[0] for group in (LOOKS.values(), *MORE.values()) for appearance in group] + [FAILURE]
    colours = [tuple(bytes.fromhex(name[1:])) for name in dict.fromkeys(names)]
    tints = [tuple(round(v + (255 - v) * tint) for v in rgb) for rgb in colours for tint in (0, 0.45, 0.75)]
    values = [value for rgb in dict.fromkeys([*greys, *tints]) for value in rgb]
    image = Image.new("P", (1, 1))
    image.putpalette(values + [255] * (768 - len(values)))
    return image


def _compact(text: str) -> str:
    """The same drawing in fewer bytes: coordinates to 0.01 points, short rectangles, no indentation or empty turns."""

    def rounded(attribute):
        return re.sub(r"(\.\d\d)\d+", r"\1", attribute.group())

    # One rule for the font instead of a list of families in each text.
    family = re.search(r"font-family: ([^;]*);", text)
    if family:
        text = re.sub(r"font-family: [^;]*; ?", "", text)
        text = text.replace("</style>", f"text{{font-family: {family[1]}}}</style>", 1)
    text = re.sub(r' transform="rotate\(-?0 [^"]*\)"', "", text)
    text = re.sub(r' (?:d|x|y|transform)="[^"]*"', rounded, text)
    rectangle = r"M (\S+) (\S+)\s+L (\S+) \2\s+L \3 (\S+)\s+L \1 \4\s+z\s+"
    text = re.sub(rectangle, r"M\1 \2H\3V\4H\1z", text)
    return "\n".join(line.strip() for line in text.splitlines()) + "\n"


@contextlib.contextmanager
def applied():
    """The context in which figures are made and saved; what a user's matplotlibrc says does not count."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        yield
