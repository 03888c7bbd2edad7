"""The page of all runs: its data are those of the rows, names are text, and a browser shows it without an error."""

import re
import time
from urllib.parse import unquote

import pytest

from benchmarks import runs, site
from benchmarks.files.facts import Raised
from benchmarks.pages import tables
from common.folders import ROOT
from tests.helpers import browser
from tests.helpers.made_run import FOLDER, made_run, put, write

TAG = "</script><script>hacked = 1</script><img src=x onerror=hacked=1>"
GRAPH = {"ms": {"graph_layer": 8.0}, "issue": (12.0, 7.5)}


def page_of(root):
    assert site.main([str(root), "--out", str(root / "pages" / "site.html")]) == 0
    return (root / "pages" / "site.html").read_text()


def test_a_row_has_the_texts_of_the_tables_and_a_point_its_gain_and_ceiling(tmp_path):
    put(tmp_path, 0, **GRAPH)
    put(tmp_path, 1, boot="c", **GRAPH | {"ms": {"graph_layer": 7.75}})
    data = browser.data_of(page_of(tmp_path))
    rows = {row.variant: row for row in runs.read(tmp_path).rows}
    assert [row["variant"] for row in data["rows"]] == list(rows) == ["eager", "graph_layer"]
    for own in data["rows"]:
        texts = [tables.CELLS[name](rows[own["variant"]]) for name in (*site.CELLS, "hosts")]
        assert [*own["cells"][3:], own["hosts"]] == texts and own["cells"][:3] == ["gpt3/bench", own["variant"], "H200"]
    assert [mark["x"] for mark in data["marks"]] == pytest.approx([10 / 7.5] * 2)
    assert sorted(mark["y"] for mark in data["marks"]) == pytest.approx([10 / 8, 10 / 7.75])
    assert {mark["row"] for mark in data["marks"]} == {1}
    assert all(mark["base"] == pytest.approx(10) and mark["busy"] == pytest.approx(7.5) for mark in data["marks"])
    assert "10.00 to 8.00 ms: 1.250x (1.250 to 1.250) of 1.333x at most" in {
        line for mark in data["marks"] for line in mark["text"].split("\n")
    }


def test_blocks_are_in_the_order_of_time_and_a_run_has_a_link(tmp_path):
    path = put(tmp_path, 0, busy=4, cycles=2, **GRAPH)
    (own,) = browser.data_of(page_of(tmp_path))["runs"]
    eager, graph = own["blocks"]["lines"]
    assert eager["x"] == [0, 2, 3, 5, 6, 8, 9, 11] and graph["x"] == [1, 4, 7, 10] and graph["y"] == [8.0] * 4
    assert own["blocks"]["cycles"] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert own["blocks"]["busy"] == [0, 0, 0, 4, 4, 4] * 2
    assert (tmp_path / "pages" / unquote(own["href"])).resolve() == path.resolve() and own["path"].endswith(path.name)


@pytest.mark.slow
def test_the_page_of_published_runs_is_small_links_each_file_and_loads_nothing(tmp_path):
    page = tmp_path / "site.html"
    begin_s = time.process_time()
    assert site.main([str(ROOT / "results"), "--out", str(page)]) == 0
    assert time.process_time() - begin_s < 5 and page.stat().st_size < 2**20
    text = page.read_text()
    data = browser.data_of(text)
    found = runs.read(ROOT / "results")
    linked = {(tmp_path / unquote(own["href"])).resolve() for own in data["runs"]}
    assert linked == {path.resolve() for path, _ in found.runs}
    assert all(own["path"].startswith("results/") and (ROOT / own["path"]).is_file() for own in data["runs"])
    assert len(data["rows"]) == len(found.rows) and len(data["marks"]) == len(runs.reached(found.rows))
    assert re.findall(r"""(?:src|href)=["']?([^"' >]+)""", text.split('id="data"')[0]) == ["data:,"]
    assert "default-src 'none'" in text and "@import" not in text and "url(" not in text


def test_without_a_run_there_is_one_line_and_no_page(tmp_path, capsys):
    page = tmp_path / "site.html"
    (tmp_path / "runs").mkdir()
    assert site.main([str(tmp_path / "runs"), "--out", str(page)]) == 1
    assert site.main([str(tmp_path / "none"), "--out", str(page)]) == 2
    assert capsys.readouterr().err.count("\n") == 2 and not page.exists()


def test_one_run_is_a_page(tmp_path):
    put(tmp_path, 0, **GRAPH)
    page = page_of(tmp_path)
    assert "1 run on 1 host" in page and len(browser.data_of(page)["runs"]) == 1


def test_a_run_without_a_gpu_has_rows_and_no_point(tmp_path):
    write(made_run(preset="tiny", gpus=(), **GRAPH), tmp_path / FOLDER)
    data = browser.data_of(page_of(tmp_path))
    assert data["marks"] == [] and {row["gpu"] for row in data["rows"]} == {"CPU"}
    assert data["runs"][0]["name"].startswith("gpt3/tiny, CPU, ")


def test_a_model_that_is_gone_is_named_by_its_run(tmp_path):
    put(tmp_path, 0, model="gone", **GRAPH)
    data = browser.data_of(page_of(tmp_path))
    assert {row["model"] for row in data["rows"]} == {"gone"} and data["rows"][0]["cells"][0] == "gone/bench"


def test_a_variant_without_a_time_has_its_reason_and_no_line(tmp_path):
    run = made_run(**GRAPH)
    for own in run.builds[""].variants.values():
        own.raised = Raised(kind="error", reason="it ended")
    write(run, tmp_path / FOLDER)
    data = browser.data_of(page_of(tmp_path))
    assert [row["note"] for row in data["rows"]] == ["failed: it ended"] * 2
    assert data["runs"][0]["blocks"] == {"lines": [], "cycles": [], "busy": []}


def test_a_damaged_file_is_named_on_the_page(tmp_path, capsys):
    put(tmp_path, 0, **GRAPH)
    (tmp_path / FOLDER / "20261125T101509Z-a7d396c9.json").write_text("{")
    assert "Left out" in page_of(tmp_path) and "20261125T101509Z-a7d396c9.json" in capsys.readouterr().out


def with_tags(root):
    run = made_run(label=TAG, model=TAG, **GRAPH)
    run.host.gpus[0].name = f"GPU {TAG}"
    variants = run.builds[""].variants
    variants["graph_layer"].help = TAG
    variants[TAG] = variants.pop("graph_layer")
    for cycle in run.builds[""].cycles:
        cycle.order = [TAG if name == "graph_layer" else name for name in cycle.order]
    write(run, root / FOLDER)
    return page_of(root)


def test_names_are_text_and_never_markup(tmp_path):
    page = with_tags(tmp_path)
    assert page.count("<script") == page.count("</script>") == 2 and "<img" not in page
    row = browser.data_of(page)["rows"][1]
    assert row["model"] == TAG and row["variant"] == TAG


# ------------------------------------------------------------------------------------------------
# In a browser

TYPE = """const type = (id, value, name) => { part(id).value = value; part(id).dispatchEvent(new Event(name)); };
const press = key => part("figure").dispatchEvent(new KeyboardEvent("keydown", {key, cancelable: true}));
const texts = (id, tag) => [...part(id).querySelectorAll(tag)].map(each => each.textContent);
"""


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    page = tmp_path_factory.mktemp("site") / "site.html"
    assert site.main([str(ROOT / "results"), "--out", str(page)]) == 0
    return page


@pytest.mark.slow
@browser.needs_chromium
@pytest.mark.parametrize("width", [400, 1200])
def test_filters_leave_rows_and_points_of_a_machine(published, width):
    data = browser.data_of(published.read_text())
    script = f"""{TYPE} const before = figure.data[2].filter(Boolean).length + figure.data[3].filter(Boolean).length;
      type("gpu", "H200", "change"); type("variant", "graph_step", "change"); const rows = texts("rows", "tr");
      const marks = figure.data.slice(2).flat().filter(Boolean).length, count = part("count").textContent;
      type("model", "moe", "change"); type("ranks", "2", "change"); const none = part("count").textContent;
      return {{before, rows: rows.length, marks, count, none, left: texts("rows", "tr").length}};"""
    seen = browser.seen_by(published, width, script)
    rows = [row["gpu"] == "H200" and row["variant"] == "graph_step" for row in data["rows"]]
    marks = sum(rows[mark["row"]] for mark in data["marks"])
    assert (seen["before"], seen["rows"], seen["marks"]) == (len(data["marks"]), sum(rows), marks)
    assert seen["count"] == f"{sum(rows)} of {len(rows)} rows, {marks} of {len(data['marks'])} points"
    assert seen["none"] == "No row is like this." and seen["left"] == 0


@pytest.mark.slow
@browser.needs_chromium
@pytest.mark.parametrize("width", [400, 1200])
def test_a_step_that_is_typed_has_a_mark_and_its_neighbours(published, width):
    data = browser.data_of(published.read_text())
    script = f"""{TYPE} type("step", "20", "input"); const half = part("said").textContent; type("busy", "14", "input");
      const said = part("said").textContent, near = texts("neighbours", "tr td:nth-child(4)"), at = mine;
      await new Promise(done => setTimeout(done));
      const [x, y] = ["x", "y"].map(axis => Math.round(figure.valToPos(mine, axis, true)));
      const pixel = [...figure.ctx.getImageData(x, y, 1, 1).data].slice(0, 3);
      type("busy", "30", "input"); const longer = part("said").textContent;
      type("step", "-1", "input"); return {{half, said, near, at, pixel, longer, wrong: part("said").textContent,
        hidden: part("near").hidden, left: mine}};"""
    seen = browser.seen_by(published, width, script)
    assert seen["said"].startswith("A graph of your step can gain 1.43x at most.") and seen["at"] == pytest.approx(
        20 / 14
    )
    nearest = sorted((max(mark["x"] * 0.7, 1 / mark["x"] / 0.7), mark["x"]) for mark in data["marks"])[:5]
    assert [float(text[:-1]) for text in seen["near"]] == pytest.approx([x for _, x in nearest], abs=0.005)
    assert seen["pixel"] == [0x22] * 3 and seen["half"] == seen["wrong"] == "Type both times in ms, above 0."
    assert "cannot be busy" in seen["longer"] and seen["hidden"] and seen["left"] == 0


@pytest.mark.slow
@browser.needs_chromium
@pytest.mark.parametrize("width", [400, 1200])
def test_keys_reach_points_and_show_their_run(published, width):
    data = browser.data_of(published.read_text())
    script = f"""{TYPE} part("figure").focus(); const focused = document.activeElement.id;
      press("End"); press("ArrowRight"); press("ArrowLeft"); const tip = document.querySelector("#figure .tip");
      const text = tip.textContent, box = tip.getBoundingClientRect(); press("Enter"); const run = part("run").value;
      const link = part("point").querySelector("a").getAttribute("href"), about = part("about").textContent;
      const drawn = shown.data.length; press("Escape"); const hidden = tip.hidden;
      part("rows").querySelector("button").click();
      return {{focused, text, inside: box.left >= 0 && box.right <= innerWidth, run, link, about, drawn, hidden,
        chosen: part("run").value, now: document.activeElement.id, charts: charts.length}};"""
    seen = browser.seen_by(published, width, script)
    mark = data["marks"][-2]
    run = data["runs"][mark["run"]]
    assert seen["focused"] == "figure" and seen["text"] == mark["text"] and seen["inside"] and seen["hidden"]
    assert (int(seen["run"]), seen["link"]) == (mark["run"], run["href"]) and run["path"] in seen["about"]
    assert seen["drawn"] == 1 + len(run["blocks"]["lines"])
    assert int(seen["chosen"]) == data["rows"][0]["run"] and seen["now"] == "run" and seen["charts"] == 2


@pytest.mark.slow
@browser.needs_chromium
def test_a_pointer_names_the_nearest_point(published):
    script = """const box = figure.over.getBoundingClientRect(), mark = marks.at(-1);
      const tip = document.querySelector(".tip");
      const move = (x, y) => figure.over.dispatchEvent(new PointerEvent("pointermove", {clientX: x, clientY: y}));
      move(box.left + figure.valToPos(mark.x, "x") - 3, box.top + figure.valToPos(mark.y, "y") + 3);
      const text = tip.textContent; move(box.left + 2, box.top + 2); return {text, hidden: tip.hidden};"""
    seen = browser.seen_by(published, 1200, script)
    assert seen["text"] == browser.data_of(published.read_text())["marks"][-1]["text"] and seen["hidden"]


@pytest.mark.slow
@browser.needs_chromium
def test_the_page_is_light_or_dark_as_the_reader_has_it(published):
    script = "return {paper: getComputedStyle(document.body).backgroundColor, inks: inks(figure)};"
    light, dark = (browser.seen_by(published, 1200, script, is_dark) for is_dark in (False, True))
    assert light["paper"] == "rgb(255, 255, 255)" and dark["paper"] == "rgb(13, 17, 23)"
    assert "27,108,168" in light["inks"] and "74,159,220" in dark["inks"] and "27,108,168" not in dark["inks"]


@pytest.mark.slow
@browser.needs_chromium
def test_the_page_opens_within_a_second(published):
    own = published.with_name("timed.html")
    probe = "<script>document.body.offsetHeight; document.title = `after ${performance.now()}`</script></body>"
    own.write_text(published.read_text().replace("</body>", probe))
    # The other tests run beside it.
    taken_ms = (float(re.search("<title>after ([0-9.]+)<", browser.chromium(own))[1]) for _ in range(10))
    assert any(0 < ms < 1000 for ms in taken_ms)


@pytest.mark.slow
@browser.needs_chromium
def test_a_browser_shows_odd_runs(tmp_path):
    for name in ("tags", "cpu", "failed"):
        (tmp_path / name).mkdir()
    with_tags(tmp_path / "tags")
    write(made_run(preset="tiny", gpus=(), **GRAPH), tmp_path / "cpu" / FOLDER)
    run = made_run(**GRAPH)
    for own in run.builds[""].variants.values():
        own.raised = Raised(kind="error", reason="it ended")
    write(run, tmp_path / "failed" / FOLDER)
    for name in ("cpu", "failed"):
        page_of(tmp_path / name)
    script = """return {text: document.body.innerText, hacked: typeof hacked, images: document.images.length,
      figure: part("figure").innerText, blocks: part("blocks").innerText};"""
    seen = {
        name: browser.seen_by(tmp_path / name / "pages" / "site.html", 400, script)
        for name in ("tags", "cpu", "failed")
    }
    assert seen["tags"]["hacked"] == "undefined" and seen["tags"]["images"] == 0 and TAG in seen["tags"]["text"]
    assert all(seen[name]["figure"] == "No graph on a GPU has a gain and a busy time." for name in ("cpu", "failed"))
    assert seen["failed"]["blocks"] == "No variant of this run has a time." and "it ended" in seen["failed"]["text"]
