"""Checks of a drawn figure page: its texts are whole and apart, its colours read on light and dark pages."""

import re
from unittest import mock
from xml.etree import ElementTree

from matplotlib.path import Path
from matplotlib.text import Text
from matplotlib.transforms import Affine2D, BboxTransformTo

from benchmarks.figures import style


def texts(page):
    """Every text that a page shows."""
    return [text for text in page.figure.findobj(Text) if text.get_visible() and text.get_text().strip()]


def words(page):
    return [text.get_text() for text in texts(page)]


def outline(text):
    """The path around a text in pixels, which may be slanted; texts whose edges touch are apart."""
    angle, anchor = text.get_rotation(), text.get_transform().transform(text.get_position())
    text.set_rotation(0)
    level = BboxTransformTo(text.get_window_extent().padded(-0.5, -1))
    text.set_rotation(angle)
    return (level + Affine2D().rotate_deg_around(*anchor, angle)).transform_path(Path.unit_rectangle())


def outlines(page):
    """(text, its outline) of what is really drawn: axes also keep labels of ticks beyond their limits."""
    with style.applied(), mock.patch.object(Text, "draw", autospec=True, side_effect=Text.draw) as draw:
        page.figure.canvas.draw()
        drawn = [call.args[0] for call in draw.call_args_list]
        shown = [text for text in drawn if text.get_visible() and text.get_text().strip()]
        return [(text.get_text(), outline(text)) for text in shown]


def assert_inside_and_apart(page, name):
    drawn = outlines(page)
    for index, (text, path) in enumerate(drawn):
        assert page.figure.bbox.count_contains(path.vertices) == 5, (name, text)
        for second, beside in drawn[index + 1 :]:
            assert not path.intersects_path(beside), (name, text, second)


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
