"""The tables in the READMEs, made from records.

A block in README.md or <folder>/README.md stands between two markers:

    <!-- table: compare results/h200x1/gpt3-bench headline gain -->
    <!-- end -->

`compare FOLDER` takes the parts headline, gain and cost (of CPU records: parity); no part means all of them. Rows of
sessions that did not run all eagers of their model are left out. `model FOLDER NAME` is all that was measured of one
model on GPUs, and its figure where it has one. `front FOLDER` takes the parts of the front page (`benchmarks.front`).
`python -m benchmarks.overview --readme` fills the blocks, and tests/test_readme.py fails where
one is not what its records say.
"""

import os
import re
from pathlib import Path

from benchmarks import ROOT, frame, front, overview_rows, overview_tables, tables
from benchmarks.figures import evidence
from benchmarks.published import rate_of
from benchmarks.rows import missing_base, summarise

BLOCK = re.compile(r"(<!-- table: (.*?) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
BEGIN, END = "<!-- table:", "<!-- end -->"


class ReadmeError(ValueError):
    """A marker that cannot be filled; the message names the file and the marker."""


def files(root=ROOT) -> list[Path]:
    return [path for path in (root / "README.md", *sorted(root.glob("[!.]*/README.md"))) if path.is_file()]


def render(path: Path, root=ROOT) -> str:
    """The file's text with every block made again. Raises ReadmeError."""
    text, name = path.read_text(), path.relative_to(root)
    if not text.count(BEGIN) == text.count(END) == len(BLOCK.findall(text)):
        raise ReadmeError(f"{name}: each '{BEGIN} ... -->' needs its own '{END}'")

    def fill(match):
        try:
            table = _table(match[2].split(), Path(root), path.parent)
        except (ValueError, FileNotFoundError) as error:
            what = str(error).replace(f"{root}/", "")
            raise ReadmeError(f"{name}: <!-- table: {match[2]} -->: {what}") from None
        # The front page has its lines counted.
        gap = "" if match[2].startswith("front") else "\n"
        return f"{match[1]}{gap}{table}\n{gap}{match[4]}"

    return BLOCK.sub(fill, text)


def _table(words, root, place):
    kind, folder, parts = words[0], words[1:2], words[2:]
    kinds = {"compare": _compare, "front": _front, "model": _model}
    if kind not in kinds or not folder or (kind == "model" and len(parts) != 1):
        raise ValueError("takes 'compare FOLDER [part ...]', 'model FOLDER NAME' or 'front FOLDER [part ...]'")
    return kinds[kind](root / folder[0], parts, place)


def _compare(folder, parts, place):
    runs = frame.read(folder)
    if runs.frame["group"].nunique() > 1:
        raise ValueError(f"{folder} holds several groups of sessions: compare takes one of them")
    rows = summarise(runs.frame)
    fault = [*runs.faults, missing_base(runs.frame)][0]
    if fault or not rows:
        raise ValueError(fault or f"no records in {folder}")
    columns = tables.of_folder(rows)
    rows = [row for row in rows if not row["missing_eagers"]]
    if not rows:
        table = os.path.relpath(folder / "table.md", place)
        return f"No session here ran all eagers of its model: its ratios stand in [table.md]({table}) alone."
    _refuse_unknown(parts, ["headline", *columns])
    head = tables.headline(rows)
    texts = {"headline": f"**{head}**" if head else ""}
    texts |= {name: tables.piped(tables.cells(rows, each)) for name, each in columns.items()}
    return _chosen(texts, parts)


def _blocks(folder):
    """Runs and blocks of a folder. Raises ValueError where one is no sound record or there is none."""
    runs = frame.read(folder)
    blocks, faults, refused = overview_rows.blocks_of(runs, folder)
    if faults or refused or not blocks:
        raise ValueError([*refused, *faults, f"no records in or below {folder}"][0])
    return runs, blocks


def _model(folder, parts, place):
    runs, blocks = _blocks(folder)
    (model,) = parts
    own = [block for block in blocks if block.model == model and block.device == "cuda"]
    text = overview_tables.text_of(folder, own, [], parts=("speed",), markdown=True, link_from=place, all_rows=False)
    if not text:
        if own:
            return "Nothing has been measured on a GPU against all eagers yet."
        return "Nothing has been measured on a GPU yet: this code has run on CPUs, at toy widths, with FP8 emulated."
    if rate_of(model) and evidence.rates(runs.frame, model):
        figure = os.path.relpath(folder / "figures" / f"throughput-{model}.svg", place)
        text += f"\n\n![Useful TFLOP/s of its variants against the GiB that they reserve]({figure})"
    return text


def _front(folder, parts, place):
    runs, blocks = _blocks(folder)
    _refuse_unknown(parts, front.PARTS)
    return _chosen({name: front.text_of(name, folder, runs, blocks, place) for name in parts or front.PARTS}, parts)


def _chosen(texts, parts):
    return "\n\n".join(text for name, text in texts.items() if text and name in (parts or texts))


def _refuse_unknown(parts, known):
    unknown = [part for part in parts if part not in known]
    if unknown:
        raise ValueError(f"no part {unknown[0]!r}, takes {', '.join(known)}")


def stale(root=ROOT) -> list[Path]:
    """Files with a block that is not what its records say. Raises ReadmeError."""
    return [path for path in files(root) if render(path, root) != path.read_text()]


def changed(root=ROOT) -> dict[Path, str]:
    """The new text of every stale file. Raises ReadmeError."""
    return {path: render(path, root) for path in stale(root)}
