"""The page about a run: whole, one file, safe with any name, and without an error in a browser."""

import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest

from benchmarks import ROOT, report
from tests.helpers.made_run import made_run, put

TIMELINE = {"timeline_us": [[0, 40], [60, 90]], "timeline_step_us": 100}


def made(**changes):
    run = made_run(ms={"graph_layer": 8.0}, issue=(12.0, 8.0), **changes)
    for own in run.builds[""].variants.values():
        own.profile |= TIMELINE
    return run


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.links = [], []

    def handle_starttag(self, tag, attributes):
        self.open += [tag] if tag not in ("meta", "link", "br", "rect", "line", "circle", "polyline") else []
        self.links += [value for name, value in attributes if name in ("src", "href")]

    def handle_endtag(self, tag):
        if tag in self.open:
            while self.open.pop() != tag:
                raise AssertionError(f"</{tag}> closes nothing")


def test_the_page_says_verdict_reason_blocks_and_steps_in_one_file():
    page = report.page_of(made(), findings="my_step.py:9: host read")
    tags = Tags()
    tags.feed(page)
    assert tags.open == [] and tags.links == ["data:,"]
    assert "graph_layer is faster than eager: 1.250x" in page and "issue / busy is 1.50" in page
    assert page.count("<circle") == 24 and "my_step.py:9: host read" in page
    assert len(re.findall("under the profiler", page)) == 2


def test_a_run_on_a_cpu_claims_no_speed():
    page = report.page_of(made_run(preset="tiny", gpus=(), device="cpu", ms={"graph_layer": 5.0}))
    assert "nothing about the speed of a GPU" in page and "faster than" not in page


def test_names_of_a_run_are_text_and_never_markup():
    run = made(label="<script>alert(1)</script>")
    run.builds[""].variants["graph_layer"].help = '"><img src=x>'
    page = report.page_of(run, findings="<b>")
    assert "<script>" not in page and "<img" not in page and "&lt;b&gt;" in page


def test_the_command_writes_the_page_beside_the_run(tmp_path, capsys):
    path = put(tmp_path, 0, ms={"graph_layer": 8.0})
    assert report.main([str(path)]) == 0
    assert path.with_suffix(".html").is_file()
    assert report.main([str(tmp_path / "none.json")]) == 2 and capsys.readouterr().err.count("\n") == 1


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
@pytest.mark.parametrize("width", [360, 1200])
def test_a_browser_shows_published_runs_without_an_error_or_a_wide_page(tmp_path, width):
    found = sorted(ROOT.glob("results/h200x1/*/*.json"))
    page = tmp_path / "page.html"
    probe = "<script>document.title = 'wide ' + (document.documentElement.scrollWidth > innerWidth)</script>"
    for path in found[:3]:
        report.write(path, page)
        page.write_text(page.read_text().replace("</body>", f"{probe}</body>"))
        options = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--enable-logging=stderr",
            f"--window-size={width},900",
        ]
        done = subprocess.run(
            ["chromium", *options, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=120
        )
        assert "<title>wide false</title>" in done.stdout and "CONSOLE" not in done.stderr, done.stderr
