"""Text of others: no command of a terminal, no link and no markup of its own, wherever it is shown."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from benchmarks import compare, frame, overview, plot
from benchmarks.pages.markdown import in_markdown
from graph_worth.harness import command, report
from graph_worth.harness.files import run_file
from graph_worth.harness.files.partial import prose_without_folders
from graph_worth.harness.pages import run_table
from graph_worth.text import lines, printable
from tests.helpers.made_run import FOLDER, made_run, write

ROOT = Path(__file__).resolve().parents[2]
HOSTILE = ["\x1b[2J", "a\nb\r", "\x9b1m", "\u202egpj", "\udcff", "\ufffe"]


def test_what_cannot_be_printed_becomes_an_escape():
    assert printable("Qwen3 \u00fc") == "Qwen3 \u00fc" and printable("a\x1b[2J\n\udcff") == r"a\x1b[2J\n\udcff"
    assert all(printable(text).isprintable() for text in HOSTILE)
    assert lines("a\nb\r\n") == "a\nb\\r\n"


@pytest.mark.parametrize(
    ("sentence", "said"),
    [
        ("no file in /home/me/data/shards, make it", "no file in shards, make it"),
        ("cannot read '/home/me/a.bin' (Errno 2)", "cannot read 'a.bin' (Errno 2)"),
        ("--data=/scratch/me/shards/ is empty", "--data=shards is empty"),
        ("1,024 tokens/s at 3 / 4 of /8 a/b/c", "1,024 tokens/s at 3 / 4 of /8 a/b/c"),
        ("https://example.org/a/b", "https://example.org/a/b"),
    ],
)
def test_of_a_path_in_a_sentence_its_last_name_stays(sentence, said):
    assert prose_without_folders(sentence) == said


@pytest.mark.parametrize(
    "text",
    [
        *(
            "[x](javascript:alert(1))",
            "\\[x](javascript:1)",
            "![x](y)",
            "<img src=x>",
            "<!-- end -->",
            "`a` | b",
            "&lt;b>",
        ),
        *("<javascript:1>", "[x]: javascript:1", "a\n# b", "https://evil.example", "WWW.evil.example"),
    ],
)
def test_text_in_markdown_is_text(text):
    markdown_it = pytest.importorskip("markdown_it")
    made = in_markdown(text)
    html = markdown_it.MarkdownIt("commonmark", {"html": True}).enable("table").render(f"| a |\n|---|\n| {made} |\n")
    assert html.count("<td>") == 1 and not any(tag in html for tag in ("<a", "<img", "<code", "<h1", "<!--"))
    assert "://" not in made and "www." not in made.lower()


def hostile_run(number=0):
    """A run whose names are links and markup, and whose texts are commands of a terminal."""
    text = run_file.as_bytes(made_run(cycles=8, issue=(12.0, 8.0), unsupported=("graph_x",))).decode()
    name = "[x](javascript:alert(1))<script>|"
    data = json.loads(text.replace("graph_layer", name).replace("NVIDIA H200", "[H200](javascript:1)<b>"))
    data |= {"flags": ["\x1b[2J"], "label": "<i>[y](javascript:2)", "preset": "bench"}
    build = data["builds"][""]
    build |= {"fields": {"a": "\x1b[2J"}, "flops_notes": ["\x1b[2J"], "notes": ["\x1b[2J"]}
    build["variants"][name]["help"] = "[z](javascript:3)\x1b[2J"
    build["variants"]["graph_x"]["raised"]["reason"] = "`\x1b[2J\n- [r](javascript:4)"
    data["versions"]["torch"] = "\x1b[2J<b>\ufffe"
    data["builds"] = {"": build, "\u00fc": build}
    return run_file.parsed(json.dumps(data).encode())


def test_a_run_of_others_is_text_on_every_page(tmp_path, capsys):
    run = hostile_run()
    path = write(run, tmp_path / FOLDER / "[f](javascript:5)")
    found = frame.load(tmp_path)
    assert not found.faults and len(found.rows)
    pages = overview.page_of(found, tmp_path / "overview.md")
    unescaped = pages.replace("\\[", "").replace("\\]", "")
    assert "javascript:" in pages and "](javascript" not in unescaped and "<" not in pages.replace("<br>", "")
    html = report.page_of(run)
    # The figure has no rows of labels.
    plain = replace(run, id=f"{run.id[:-1]}0", label="", builds={"": replace(run.builds[""], fields={})})
    write(plain, tmp_path / "plain" / FOLDER)
    assert plot.draw(frame.load(tmp_path / "plain"), tmp_path)[0]
    drawn = [(tmp_path / "roofline.svg").read_text()]
    assert all(line.isprintable() for text in (pages, html, *drawn) for line in text.splitlines())
    assert all(tag not in text for text in (html, *drawn) for tag in ("<script>|", "<b>", "<i>"))
    assert "javascript:" in html and not re.search("href=[^>]*javascript", html)
    assert compare.main([str(tmp_path)]) == 0
    assert report.main([str(path)]) == 0
    assert "\x1b" in run_table.report(run) and not command.exit_status("p", lambda: print(run_table.report(run)))
    assert all(line.isprintable() for line in capsys.readouterr().out.splitlines())


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["benchmarks.compare", "no\x1b[2J"],
        ["benchmarks.report", "no\x1b[2J\n.json"],
        ["benchmarks.run", "--model", "no\x1b[2J"],
        ["benchmarks.publish", "no\x1b[2J.json"],
        ["graph_worth.your_step.doctor", "no\x1b[2J.py:build"],
        ["gpt3.train", "--preset", "no\x1b[2J"],
        ["gpt3.train", "--data", "no\x1b[2J\n", "--preset", "tiny"],
    ],
)
def test_no_program_prints_what_was_typed_or_named_as_commands(words):
    done = subprocess.run([sys.executable, "-m", *words], cwd=ROOT, capture_output=True, timeout=120)
    said = (done.stdout + done.stderr).decode()
    assert done.returncode and all(line.isprintable() for line in said.splitlines()) and "2J" in said
