"""Text from files and from foreign programs in Markdown."""

import re

from graph_worth.text import printable


def in_markdown(text) -> str:
    """Return a text in one line as Markdown, also in a table: without a link, HTML or code of its own."""
    text = re.sub(r"([\\`\[\]|])", r"\\\1", printable(text)).replace("&", "&amp;").replace("<", "&lt;")
    # GitHub makes links of bare addresses.
    return re.sub(r"(?i)(?<=:)(?=//)|(?<=www)(?=\.)", r"\\", text)
