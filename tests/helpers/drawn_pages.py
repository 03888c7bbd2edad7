"""Checks of a drawn figure page: its texts are whole and apart, its colours read on light and dark pages."""

import re
from unittest import mock
from xml.etree import ElementTree

from matplotlib.text import Text

from benchmarks.figures import style


def texts(page):
    """Every text that a page shows."""
    return [text for text in page.figure.findobj(Text) if text.get_visible() and text.get_text().strip()]


def words(page):
    return [text.get_text() for text in texts(page)]


def extents(page):
    """(text, its box in pixels) of what is really drawn: axes also keep labels of ticks beyond their limits."""
    drawn = []
    draw = Text.draw

    def record(text, renderer):
        drawn.append(text)
        draw(text, renderer)

    with style.applied(), mock.patch.object(Text, "draw", record):
        page.figure.canvas.draw()
        shown = [text for text in drawn if text.get_visible() and text.get_text().strip()]
        return [(text.get_text(), text.get_window_extent().extents) for text in shown]


def assert_inside_and_apart(page, name):
    width, height = page.figure.bbox.width, page.figure.bbox.height
    boxes = extents(page)
    for text, (x0, y0, x1, y1) in boxes:
        assert x0 > -1 and x1 < width + 1 and y0 > -1 and y1 < height + 1, (name, text)
    for index, (first, (ax0, ay0, ax1, ay1)) in enumerate(boxes):
        for second, (bx0, by0, bx1, by1) in boxes[index + 1 :]:
            apart = ax1 <= bx0 + 1 or bx1 <= ax0 + 1 or ay1 <= by0 + 2 or by1 <= ay0 + 2
            assert apart, (name, first, second)


def luminance(colour):
    parts = [int(colour[index : index + 2], 16) / 255 for index in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def colours_of(svg):
    """(colours of text, all colours) of an SVG as a light page shows it."""
    texts = [element.get("style") for element in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]
    found = [set(re.findall(r"(?:fill|stroke): (#\w{6})", part)) for part in (" ".join(texts), svg)]
    # matplotlib leaves out black, which no rule would turn light.
    assert all("fill: " in text for text in texts)
    return found


def assert_reads_on_both_pages(svg):
    """Check that a figure's SVG has enough contrast on light and dark pages."""
    of_text, every = colours_of(svg)
    assert len(re.findall("<style", svg)) == 1 and svg.count("@media (prefers-color-scheme: dark)") == 1
    for colour in of_text:
        assert contrast(colour, "#ffffff") > 4.5, colour
        assert contrast(style.DARK[colour], style.DARK["#ffffff"]) > 4.5, colour
        assert f'[style*="fill: {colour}"]' in svg
    faint = {"#ffffff", style.GRID}
    for colour in every - faint:
        assert contrast(colour, "#ffffff") > 1.6, colour
        assert contrast(style.DARK.get(colour, colour), style.DARK["#ffffff"]) > 3, colour
