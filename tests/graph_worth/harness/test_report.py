"""The page about a run: whole, one file, safe with any name, and without an error in a browser."""

import re
from html.parser import HTMLParser

import pytest

from graph_worth.folders import ROOT
from graph_worth.harness import report
from graph_worth.harness.files.facts import Alone, Raised
from graph_worth.harness.pages import run_table
from tests.helpers import browser
from tests.helpers.made_run import H200, made_run, put


def made(**changes):
    """A run with timelines: eager's profiled step is longer than its step in blocks, 10 ms."""
    run = made_run(ms={"graph_layer": 8.0}, issue=(12.0, 7.5), **changes)
    for own in run.builds[""].variants.values():
        own.profile.timeline_us, own.profile.timeline_step_us = [[0.0, 4_000.0], [6_000.0, 9_000.0]], 15_000.0
    return run


def lines_of(page, name):
    """Name of a variant -> a line of the blocks, or of the timelines, of the only build."""
    (build,) = browser.data_of(page)["builds"]
    lines = build["blocks"]["lines"] if name == "blocks" else build["timelines"]
    return {line["name"]: line for line in lines}


def rows_of(page):
    """The cells of a page's tables, row by row."""
    rows = re.findall(r"<tr.*?>(.*?)</tr>", page, re.DOTALL)
    return [[cell.strip() for cell in re.findall(r"<t[hd]>(.*?)</t[hd]>", row, re.DOTALL)] for row in rows]


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.links = [], []

    def handle_starttag(self, tag, attributes):
        self.open += [tag] if tag not in ("meta", "link", "br") else []
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
    assert "Faster: capture each layer (graph_layer): 1.250x" in page
    assert "my_step.py:9: host read" in page
    blocks, spans = lines_of(page, "blocks"), [[0.0, 4.0], [6.0, 9.0]]
    assert blocks["eager"]["y"] == [10.0] * 16 and blocks["graph_layer"]["y"] == [8.0] * 8
    assert blocks["graph_layer"]["label"] == "graph_layer, 8.00 ms, 1.250x"
    assert [line["spans"] for line in lines_of(page, "timelines").values()] == [spans] * 2


def test_the_table_has_ceiling_typical_step_and_memory():
    run = made()
    header = ["variant", "ms", "ratio", "95 %", "at most", "typical ms", "parity"]
    assert rows_of(report.page_of(run))[0] == header
    variants = run.builds[""].variants
    variants["graph_layer"].alone = Alone(peak_reserved_bytes=3 * 2**29)
    for block in variants["graph_layer"].blocks:
        block.step_ms = [7.0] * 12 + [9.5] * 8
    found = rows_of(report.page_of(run))
    assert found == [
        [*header, "GiB alone"],
        ["eager", "10.00", "base", "", "1.333x", "10.00", "bitwise", "-"],
        ["graph_layer", "8.00", "1.250x", "1.250 to 1.250", "1.333x", "7.00", "bitwise", "1.5"],
    ]


def test_why_is_step_and_busy_and_what_the_graph_reached():
    page = report.page_of(made())
    assert "A step of eager takes 10.00 ms and keeps the GPU busy for 7.50: a graph can gain 1.33x at most" in page
    assert "graph_layer reached 93.8 % of that" in page and "issue / busy" not in page
    assert "833.3 us a kernel at a host of 1111.1 us" in page, "at most the step of 10 ms"


def drawing(page):
    """The roofline's drawing: its circles as (x, y, fill), and its texts."""
    (svg,) = re.findall(r'<svg class="roofline".*?</svg>', page, re.DOTALL)
    circles = re.findall(r'<circle cx="(.*?)" cy="(.*?)".*?fill: var\(--(.*?)\)', svg)
    return [(float(x), float(y), fill) for x, y, fill in circles], re.findall(r"<text.*?>(.*?)</text>", svg)


def place(page, name):
    """The x of a tick of the drawing, or its y."""
    return float(
        re.search(rf'<text (?:class="name" )?x="([0-9.]*)" y="([0-9.]*)"[^>]*>{name}<', page)[1 + ("x" in name)]
    )


def test_the_roofline_has_the_points_of_the_run_and_lines_of_hosts():
    """10 ms of the host's and 5 ms of the GPU's for 100 kernels, so 100 and 50 us."""
    run = made_run(ms={"graph_layer": 5.0}, issue=(10.0, 5.0), kernels=100)
    page = report.page_of(run)
    sentence = "50.00 us a kernel at a host of 100.0 us: the roofline says up to 2.00x; graph_layer measured 2.00x."
    assert sentence in page and page.count('class="host"') == 4 and page.count('class="here"') == 1
    [(x, y, fill)], texts = drawing(page)
    assert (
        fill == "graph0" and {"10 us", "20 us", "40 us", "80 us"} <= set(texts) and ">graph_layer, 2.00x</span>" in page
    )
    assert x == pytest.approx(place(page, "50"), abs=0.1) and y == pytest.approx(place(page, "2x") - 4, abs=0.1)
    # The corner of this host's line lies at 100 us and a gain of 1.
    _, foot, _ = re.search(r'class="here" points="(.*?)"', page)[1].split()
    assert [*map(float, foot.split(","))] == pytest.approx([place(page, "100"), place(page, "1x") - 4], abs=0.1)
    assert sentence in run_table.report(run) and "expected" not in page


def test_without_a_graph_the_roofline_has_the_step_where_it_is_expected():
    run = made_run(ms={"graph_layer": 5.0}, issue=(10.0, 5.0), kernels=100)
    del run.builds[""].variants["graph_layer"]
    page = report.page_of(run)
    [(_, y, fill)], _ = drawing(page)
    assert fill == "paper" and y == pytest.approx(place(page, "2x") - 4, abs=0.1)
    assert "says up to 2.00x." in page and "eager, 2.00x, expected</span>" in page
    assert "50.00 us a kernel at a host of 100.0 us: the roofline says up to 2.00x.\n" in f"{run_table.report(run)}\n"


@pytest.mark.parametrize("kind", ["cpu", "no kernels", "zero busy", "no issue", "no profile", "no eager"])
def test_without_kernels_or_times_there_is_no_roofline(kind):
    run = made_run(ms={"graph_layer": 5.0}, issue=(10.0, 5.0), gpus=() if kind == "cpu" else H200)
    eager = run.builds[""].variants["eager"]
    if kind == "no kernels":
        eager.profile.kernels = 0.0
    elif kind == "zero busy":
        eager.profile.busy_ms = 0.0
    elif kind == "no issue":
        for block in eager.blocks:
            block.issue_ms = []
    elif kind == "no profile":
        eager.profile.kernels = eager.profile.busy_ms = None
    elif kind == "no eager":
        eager.raised = Raised(kind="error", reason="it ended")
    page = report.page_of(run)
    assert "<svg" not in page and "roofline</h2>" not in page and "us a kernel" not in run_table.report(run)


def test_over_several_gpus_a_kernel_does_not_wait_for_other_ranks():
    """Busy for 8 ms, of which 3 wait; without a count of that there is no point."""
    run = made_run(ms={"graph_layer": 5.0}, issue=(10.0, 8.0), kernels=100, ranks=2, gpus=H200 * 2)
    profile = run.builds[""].variants["eager"].profile
    profile.working_ms, profile.waiting_ms = [5.0, 4.0], [3.0, 4.0]
    assert "50.00 us a kernel at a host of 100.0 us" in report.page_of(run)
    profile.working_ms = profile.waiting_ms = []
    assert "<svg" not in report.page_of(run)


def test_a_graph_of_compiled_code_has_a_line_and_a_gain_of_that_code():
    names = ("eager", "compile", "graph_compiled")
    run = made_run(names=names, ms={"compile": 8.0, "graph_compiled": 2.0}, issue=(10.0, 2.0), kernels=100)
    for name in names[1:]:
        variant = run.builds[""].variants[name]
        variant.kind, variant.capture.graphs, variant.capture.promised_graphs = "compile", int("graph" in name), None
        for block in variant.blocks:
            block.issue_ms = [6.0]
    sentence = (
        "20.00 us a kernel at a host of 60.00 us: the roofline says up to 3.00x; graph_compiled measured 4.00x over"
    )
    page = report.page_of(run)
    assert f"{sentence} compile." in page and "graph_compiled, 4.00x</span>" in page


def test_idle_is_1_less_busy_by_the_step_of_the_blocks():
    page = report.page_of(made())
    # Not 53 %, which is the share in the profiled step.
    assert page.count("the GPU is idle for 25 % of it") == 2
    assert "graph_layer: 8.00 ms, the GPU is idle for 6 % of it (15.00 ms under the profiler, as drawn)" in page


def test_a_failed_variant_is_in_the_list_of_reasons_alone():
    run = made()
    run.builds[""].variants["graph_layer"].raised = Raised(kind="error", reason="it ended")
    page = report.page_of(run)
    assert "graph_layer: failed (it ended)" in page and page.count("graph_layer") == 1
    assert "No graph has a time." in page
    assert [[*lines_of(page, name)] for name in ("blocks", "timelines")] == [["eager"]] * 2


def test_a_build_without_a_passing_eager_has_no_ratio():
    run = made()
    run.builds[""].variants["eager"].raised = Raised(kind="error", reason="it ended")
    page = report.page_of(run)
    assert "eager: failed (it ended)" in page and "Why" not in page and "No graph has a time" in page


def test_contended_cycles_are_shaded_and_count_in_no_ratio():
    run = made(busy=4)
    for block in run.builds[""].variants["eager"].blocks:
        block.step_ms = [40.0 if block.busy_processes else 10.0] * block.steps
    page = report.page_of(run)
    assert browser.data_of(page)["builds"][0]["blocks"]["busy"] == [0, 0, 0, 4, 4, 4] * 8
    assert "Faster: capture each layer (graph_layer): 1.250x" in page


def test_a_run_on_a_cpu_claims_no_speed():
    run = made_run(preset="tiny", gpus=(), ms={"graph_layer": 5.0}, issue=(9.0, 5.0))
    page = report.page_of(run)
    assert "the variants train alike. It says nothing about the speed of a GPU." in page
    assert "faster than" not in page and "at most;" not in page and "2.000x" not in rows_of(page)[1]


def test_a_run_on_a_cpu_that_failed_says_so():
    run = made_run(preset="tiny", gpus=())
    run.builds[""].variants["graph_layer"].parity[0].hashes[0] = "other"
    run.builds[""].variants["graph_layer"].parity[0].losses[0] = 2.0
    page = report.page_of(run)
    assert "On a CPU this shows that not all variants train alike: graph_layer." in page


def test_names_of_a_run_are_text_and_never_markup():
    run = made(label="<script>alert(1)</script>")
    run.builds[""].variants["graph_layer"].help = '"><img src=x>'
    run.builds[""].variants["<img src=y>"] = run.builds[""].variants["graph_layer"]
    page = report.page_of(run, findings="<b>")
    assert page.count("&lt;img src=y&gt;, 1.25x") == 3, "in the drawing's title and label, and below it"
    assert page.count("<script") == page.count("</script>") == 2 and "<img" not in page and "&lt;b&gt;" in page


def test_the_command_writes_the_page_beside_the_run(tmp_path, capsys):
    path = put(tmp_path, 0, ms={"graph_layer": 8.0})
    assert report.main([str(path)]) == 0
    assert path.with_suffix(".html").is_file()
    assert report.main([str(tmp_path / "none.json")]) == 2 and capsys.readouterr().err.count("\n") == 1


@pytest.mark.slow
@browser.needs_chromium
@pytest.mark.parametrize("width", [360, 1200])
def test_a_browser_shows_published_runs_without_an_error_or_a_wide_page(tmp_path, width):
    several = {"census", "epochs"}
    found = [path for path in sorted(ROOT.glob("results/h200x1/*/*.json")) if path.parent.name not in several]
    page = tmp_path / "page.html"
    for path in found[:3]:
        report.write(path, page, findings="a line without an end " * 30 + "x" * 500)
        drawn = browser.seen_by(page, width, "return {charts: charts.length, inks: charts.map(inks)};")
        builds = browser.data_of(page.read_text())["builds"]
        assert drawn["charts"] == sum(bool(own["blocks"]["lines"]) + len(own["timelines"]) for own in builds)
        assert "110,110,110" in drawn["inks"][0], "eager's color"


@pytest.mark.slow
@browser.needs_chromium
@pytest.mark.parametrize("is_dark", [False, True])
def test_keys_and_the_pointer_name_a_block_on_a_light_and_a_dark_page(tmp_path, is_dark):
    page = tmp_path / "page.html"
    page.write_text(report.page_of(made()))
    script = """const [made] = charts, tip = made.over.querySelector(".tip");
      const box = () => made.over.getBoundingClientRect();
      const where = document.querySelector(".chart");
      const press = key => where.dispatchEvent(new KeyboardEvent("keydown", {key, cancelable: true}));
      const move = (x, y) => made.over.dispatchEvent(
        new PointerEvent("pointermove", {clientX: box().left + x, clientY: box().top + y}));
      where.focus(); press("End"); const last = tip.textContent; press("Home"); const first = tip.textContent;
      press("Escape"); const escaped = tip.hidden;
      move(made.valToPos(1, "x") - 3, made.valToPos(8, "y") + 3); const near = tip.textContent;
      move(made.valToPos(1, "x"), 2); const far = tip.hidden;
      return {first, last, escaped, near, far, paper: getComputedStyle(document.body).backgroundColor,
        inks: inks(made)};"""
    seen = browser.seen_by(page, 1200, script, is_dark)
    assert seen["first"] == "eager, cycle 1: 10.00 ms" and seen["last"] == "eager, cycle 8: 10.00 ms"
    assert seen["near"] == "graph_layer, cycle 1: 8.00 ms" and seen["escaped"] and seen["far"]
    assert seen["paper"] == ("rgb(13, 17, 23)" if is_dark else "rgb(255, 255, 255)")
    assert ("74,159,220" in seen["inks"], "27,108,168" in seen["inks"]) == (is_dark, not is_dark)


def test_a_file_without_its_cycles_has_a_table():
    run = made_run()
    run.builds[""].cycles = []
    assert ">not checked: eager (no audits, no control)<" in report.page_of(run)
    assert run_table.report(run).startswith("not checked: eager (no audits, no control)\n")
