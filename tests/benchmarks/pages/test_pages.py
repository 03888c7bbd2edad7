"""README.md, the models' READMEs and results/overview.*: tables as the runs say, links that lead somewhere."""

import re
from pathlib import Path

import pandas as pd
import pytest

from benchmarks import frame, overview
from benchmarks.pages import headlines, readme, tables
from benchmarks.pages.markdown import in_markdown
from graph_worth.folders import OWN_STEP, ROOT
from graph_worth.harness import measure
from graph_worth.harness.files import run_file
from graph_worth.harness.files.facts import Alone, Latency, Profile, Raised, stem
from graph_worth.harness.pages import cells, run_table
from tests.helpers.made_run import FOLDER, made_run, put, put_sweep, with_apart, with_slowing_variable, write

MUON = ROOT / "results/h200x1/your_step-bench-muon-build/20261129T091159Z-6141bf67.json"
NANOGPT = ROOT / "results/h200x1/your_step-bench-nanogpt-build/20261129T091311Z-6141bf28.json"
MUON_IN_CENSUS = "20261129T061933Z-57d471a5"
H100 = ({"name": "NVIDIA H100 80GB HBM3", "uuid": "GPU-2"},)

README = (ROOT / "README.md").read_text()
PAGES = sorted(
    path
    for path in (
        *ROOT.glob("*.md"),
        *ROOT.glob("[!.]*/*.md"),
        *ROOT.glob("results/archive/*.md"),
        *ROOT.glob("*/*/*.md"),
    )
    if "runs" not in path.relative_to(ROOT).parts
)


@pytest.fixture(scope="module")
def found():
    return frame.load(ROOT / "results")


@pytest.mark.slow
def test_pages_and_tables_are_what_the_runs_say(found):
    """make readme makes them so."""
    assert found.faults == [] and overview.wanted(found) == {}


def test_a_page_that_the_runs_contradict_is_written_and_named(tmp_path, monkeypatch, capsys):
    page = tmp_path / "overview.md"
    monkeypatch.setattr(overview, "wanted", lambda found: {page: "as the runs say\n"})
    assert overview.main([]) == 0 and capsys.readouterr().out == f"wrote {page}\n"
    assert page.read_text() == "as the runs say\n"


def headings(path):
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    names = re.findall(r"(?m)^#+ (.*)$", text)
    return {re.sub(r"[^\w\- ]", "", name).strip().lower().replace(" ", "-") for name in names}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```|`[^`]*`", "", page.read_text(), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?://|mailto:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        if anchor and target.suffix == ".md":
            assert anchor in headings(target), link


def test_every_figure_on_the_front_page_has_words():
    figures = re.findall(r"!\[(.+?)\]\((.+?)\)", README, re.DOTALL)
    assert figures and all(len(words.split()) > 4 and (ROOT / path).is_file() for words, path in figures)


def test_the_output_on_the_front_page_is_a_part_of_that_of_the_run():
    (sample,) = re.findall(r"```text\n(variant .*?)```", README, re.DOTALL)
    run = run_file.read(NANOGPT)
    assert set(sample.splitlines()) <= {*run_table.report(run).splitlines(), measure.verdict(run)[1]}
    assert sample.splitlines()[-1] == measure.verdict(run)[1]


def test_the_whole_output_of_a_step_is_that_of_the_run_it_names():
    page = (ROOT / "docs" / "your_step.md").read_text()
    (sample,) = re.findall(r"## The output\n.*?```text\n(.*?)```", page, re.DOTALL)
    run = run_file.read(MUON)
    assert sample == f"{run_table.report(run)}\n{measure.verdict(run)[1]}\n"
    assert MUON.relative_to(ROOT).as_posix() in page


@pytest.mark.parametrize("name", ["README.md", "docs/nvidia_rules.md"])
def test_gains_in_sentences_are_those_of_the_runs_they_name(found, name):
    page = re.sub(r"\s+", " ", (ROOT / name).read_text())
    named = set(re.findall(r"\]\((?:\.\./)?(results/[^)]*\.json)\)", page))
    points = frame.timed(found.points)
    is_named = [Path(path).relative_to(ROOT).as_posix() in named for path in points["path"]]
    gains = re.findall(r"\d\.\d{3}x \(\d\.\d{3} to \d\.\d{3}\)", page)
    ratios = points[is_named].itertuples()
    texts = {f"{ratio.ratio:.3f}x ({ratio.low:.3f} to {ratio.high:.3f})" for ratio in ratios}
    assert gains and set(gains) <= texts


def test_other_numbers_of_the_six_questions_are_those_of_the_runs(found):
    questions = re.sub(r"\s+", " ", README.partition("## Six questions")[2].partition("\n## ")[0])
    points = frame.timed(found.points)
    (muon,) = points[(points["run"] == MUON_IN_CENSUS) & (points["variant"] == "graph_step")].itertuples()
    assert f"| Muon | {muon.base_kernels:.0f} | {muon.kernel_us:.1f} us | {muon.host_us:.0f} us, [" in questions
    gains = {line.words: line.gains[0].text for line in headlines.of(found)}
    assert f"gained {gains['Llama 3.1 8B']} on three archived H200 hosts" in questions
    of_lengths = gains["RNN-T, LibriSpeech's lengths"]
    assert f"gained [{of_lengths} over eager]" in questions


# ------------------------------------------------------------------------------------------------
# Tables of made runs


def table(kind, root, argument=""):
    return readme._TABLES[kind](frame.load(root), root / "README.md", argument)


MS = {"eager": 10.0, "graph_layer": 8.0}


def several_hosts(root):
    """GPT-3 on two H200 and on an H100 with fewer layers, and another model that gains nothing."""
    put(root, 0, ms=MS)
    put(root, 1, ms={"eager": 14.0, "graph_layer": 8.2}, boot="c")
    put(root, 2, ms={"eager": 12.5, "graph_layer": 10.0}, boot="d", gpus=H100, preset="bench-l6")
    put(root, 3, model="mine", ms={"eager": 10.0, "graph_layer": 10.0}, boot="e")


def test_a_workload_has_one_line_with_all_hosts_and_types_of_gpu(tmp_path):
    several_hosts(tmp_path)
    lines = table("front", tmp_path).splitlines()[2:]
    gains = "H200 1.25 to 1.71x<br>H100 1.25x"
    own = (
        f"each layer |  | 8.10 (H200), 10.00 (H100) | 10.00 to 14.00 | {gains} |  | 2 unknown H200, one unknown H100 |"
    )
    assert lines[0].startswith("| [GPT-3 175B](") and "(v4.1), 8 of 96 layers | " in lines[0]
    assert lines[0].endswith(own)
    assert lines[1].startswith("| [mine](") and lines[1].endswith(
        "| each layer |  | 10.00 (H200) | 10.00 | 1.00x |  | one unknown H200 |"
    )
    assert len(lines) == 2


def test_cells_of_the_front_page_are_those_of_the_hosts(found):
    """Recomputed from the rows of each GPU."""
    for line in headlines.of(found):
        if line.page.name != "README.md" or line.page.parent.name == "steps":
            continue
        points = found.points
        points = points[(points["model"] == line.page.parent.name) & (points["variant"] == line.variant)]
        points = points[points["preset"].map(stem).eq("bench") & (points["label"] == "") & (points["ranks"] == 1)]
        old = found.hosts[found.hosts["archived"] & found.hosts["row"].isin(points["row"])]
        points = points[(points["build"] == "") & points["standing"].isin(["quiet", "unknown"])]
        hosts = pd.concat([frame.host_means(points), old])
        assert line.gain == (hosts["gain"].min(), hosts["gain"].max()) and len(line.hosts) == len(hosts)
        assert sum(host.archived for host in line.hosts) == hosts["archived"].sum()
        assert {on_gpu.ms for on_gpu in line.gpus} == {*hosts.groupby("row")["ms"].median()}


def test_a_models_table_names_workload_and_gpu_once_and_leaves_out_base_and_control(tmp_path):
    ms = {"eager": 10.0, "graph_layer": 8.0, "graph_step": 5.0, "control": 10.0}
    put(tmp_path, 0, names=tuple(ms), ms=ms)
    put(tmp_path, 1, ms=MS, boot="c", ranks=2)
    lines = table("model", tmp_path, "gpt3").splitlines()[2:]
    assert [line.split(" | ")[:4] for line in lines] == [
        ["| [bench, H200](h200x1/gpt3-bench)", "graph_layer", "10.00", "8.00"],
        ["| ", "graph_step", "10.00", "5.00"],
        ["| [bench, 2 H200](h200x1/gpt3-bench)", "graph_layer", "10.00", "8.00"],
    ]


@pytest.mark.parametrize("standing", ["beside", "aside"])
def test_a_run_that_does_not_count_stands_beside_the_headline_or_in_a_note(tmp_path, standing):
    put(tmp_path, 0, ms=MS)
    path = put(tmp_path, 1, ms={"eager": 20.0, "graph_layer": 7.0}, boot="c")
    assert "2 unknown H200" in table("front", tmp_path)
    run = run_file.read(path)
    if standing == "beside":
        run.builds[""].cycles[-1].others = 2
    else:
        run.builds[""].variants["eager"].alone = Alone(peak_reserved_bytes=0, step_ms=[10.0] * 20)
    path.unlink()
    write(run, path.parent)
    line, row = table("front", tmp_path).splitlines()[-1], table("model", tmp_path, "gpt3").splitlines()[-1]
    words = "beside other work" if standing == "beside" else "unsteady"
    assert f"| 10.00 | 1.25x; {words} to 2.86x |  | one unknown H200 |" in line
    more = "; beside other work to 2.857x" if standing == "beside" else ""
    note = "no audits, no control, no ceiling"
    note += "" if standing == "beside" else "; not counted: 2.857x (eager in blocks takes 2.00 times as long as alone)"
    gain, fastest = f"1.250x (1.250 to 1.250), one unknown host{more}", "capture each layer; bitwise"
    assert f"| {gain} |  | {fastest} | {note} |" in row


def test_a_workload_of_unsteady_runs_alone_has_a_line_that_says_so_and_none_where_a_correction_takes_them_out(tmp_path):
    run = made_run(ms={"eager": 20.0, "graph_layer": 7.0})
    run.builds[""].variants["eager"].alone = Alone(peak_reserved_bytes=0, step_ms=[10.0] * 20)
    path = write(run, tmp_path / "h200x1/gpt3-bench")
    line = table("front", tmp_path).splitlines()[-1]
    assert "| 20.00 | unsteady 2.86x |  | one H200 |" in line
    files = f'[[published]]\nkind = "unclean"\nwhy = "no engine"\nfile = "{path.name}"\nruns = ["{path.stem}"]\n'
    (tmp_path / "corrections.toml").write_text(f'{files}says = "x"\ncorrect = "y"\n')
    assert table("front", tmp_path) == readme.NOTHING


def test_the_whole_range_beside_other_work_stands_there_where_its_end_is_no_news():
    assert cells.beside(1.42, 3.25, (1.42, 1.86), ".2f") == "beside other work to 3.25x"
    assert cells.beside(1.41, 3.25, (1.42, 1.86), ".2f") == "beside other work 1.41 to 3.25x"
    assert cells.beside(1.42, 1.86, (1.42, 1.86), ".2f") == "beside other work 1.42 to 1.86x"
    assert cells.beside(1.42, 1.861, (1.42, 1.86), ".2f") == "beside other work 1.42 to 1.86x"
    assert cells.beside(None, None, (1.0, 1.86)) == cells.beside(float("nan"), float("nan"), (1.0, 1.86)) == ""


@pytest.mark.parametrize(("ms", "more"), [(9.6, "; gains under 5 %"), (9.5, "")])
def test_a_fastest_graph_that_gains_little_says_so(ms, more, tmp_path):
    write(made_run(ms={"eager": 10.0, "graph_layer": ms}), tmp_path / "h200x1/gpt3-bench")
    assert f"| capture each layer; bitwise{more} |" in table("model", tmp_path, "gpt3").splitlines()[-1]


def test_a_row_of_runs_beside_other_work_says_so_and_is_no_headline(tmp_path):
    run = made_run(ms=MS)
    run.builds[""].cycles[0].others = 1
    write(run, tmp_path / "h200x1/gpt3-bench")
    assert table("front", tmp_path) == readme.NOTHING
    row = table("model", tmp_path, "gpt3").splitlines()[-1]
    assert "| beside other work 1.250x (1.250 to 1.250), one host |" in row
    note = "no headline: beside 1 benchmark on other GPUs; no audits, no control, no ceiling"
    assert f"| beside other work: capture each layer; bitwise | {note} |" in row


def test_gpus_whose_hosts_gain_alike_are_one_range(tmp_path):
    put(tmp_path, 0, ms={"eager": 10.0, "graph_layer": 8.0})
    put(tmp_path, 1, ms={"eager": 10.4, "graph_layer": 8.0}, boot="c", gpus=H100)
    assert "| 1.25 to 1.30x |" in table("front", tmp_path)
    put(tmp_path, 2, ms={"eager": 10.9, "graph_layer": 8.0}, boot="d", gpus=H100)
    assert "| H100 1.30 to 1.36x<br>H200 1.25x |" in table("front", tmp_path)


def test_few_cycles_are_no_headline_and_add_a_host_to_what_a_full_run_opened(tmp_path):
    put(tmp_path, 0, cycles=3, ms=MS)
    assert table("front", tmp_path) == readme.NOTHING
    assert "no headline by itself: 3 cycles, no full run; no audits" in table("model", tmp_path, "gpt3")
    put(tmp_path, 1, ms={"eager": 9.6, "graph_layer": 8.0}, boot="c")
    assert "| 1.20 to 1.25x |  | 2 unknown H200 |" in table("front", tmp_path)
    assert "cycles" not in table("model", tmp_path, "gpt3")


def test_a_light_run_on_another_gpu_counts_where_a_full_run_opened_the_workload(tmp_path):
    put(tmp_path, 0, ms=MS)
    put(tmp_path, 1, cycles=4, parity="blocks", ms=MS, boot="c", gpus=H100)
    assert "| 1.25x |  | one unknown H100 (4 cycles), one unknown H200 |" in table("front", tmp_path)


def test_pages_have_one_range_a_workload(found):
    """The front page and the table of step / busy; NVIDIA's table, the scopes and the models' rows."""
    front, decide, nvidia, scopes = (
        readme._TABLES[kind](found, ROOT / "README.md", "") for kind in ("front", "decide", "nvidia", "scopes")
    )
    rows = [row for row in found.records() if row.gain is not None and not row.control and row.variant != row.base]
    compared = 0
    lines = headlines.of(found)
    for line, cells_of_line in zip(lines, front.splitlines()[2:], strict=True):
        for gain in line.gains:
            assert gain.text in cells_of_line
            assert gain.ceiling is None or f"`{line.variant}`: {gain.text}" in decide
            same = [
                row
                for row in rows
                if len(gain.gpus) == 1 and row.variant == line.variant and headlines.short(row.gpu) == gain.gpus[0].gpu
                if (key := headlines._key(frame.where_of(row))) and headlines._names(key)[:2] == (line.name, line.more)
            ]
            if len(same) == 1:
                compared += 1
                assert tables.gain_range(same[0]) == gain.text.removeprefix(f"{gain.gpu} ").partition("; unsteady")[0]
    assert compared >= 3
    keys = [(row.workload, row.machine, row.variant, row.base) for row in rows]
    assert len(keys) == len(set(keys)), "one row, one range"
    text = overview.page_of(found, ROOT / "results" / "overview.md")
    model_tables = "".join(readme._model(found, ROOT / "README.md", model) for model in {row.model for row in rows})
    for row in (row for row in rows if row.gpu != "CPU"):
        assert in_markdown(tables.CELLS["gain over hosts"](row)) in text
        # Points of a sweep stand in a table of their own, earlier files with a slowed eager in all rows alone.
        is_shown = in_markdown(tables.CELLS["gain, hosts"](row)) in model_tables
        assert row.over or is_shown != ("earlier file" in row.workload and row.standing == "slowed")
    # The range, the hosts and the folder of the run, in all tables that name a variant.
    links = {
        tables.linked(tables.gain_and_hosts(row, headlines.short(row.gpu)), row, ROOT / "README.md") for row in rows
    }
    of_nvidia = re.findall(r"\| (\[[^|]*?\]\([^)]*\)), `", nvidia)
    archived = {f"{link.partition('](')[0]}](results/overview.md)" for link in links if "archived" in link}
    assert len(of_nvidia) >= 6 and set(of_nvidia) <= links | archived
    short = {tables.gain_and_hosts(row, headlines.short(row.gpu)) for row in rows}
    of_scopes = re.findall(r"\]\(results/[^)]*\) (.*?)(?=<br>| \|)", scopes)
    assert len(of_scopes) >= 10 and set(of_scopes) <= {in_markdown(text) for text in short}


def test_an_earlier_file_of_a_step_counts_where_eager_makes_the_same_kernels(tmp_path):
    for number, (kernels, digest) in enumerate(((100, "new"), (100, "old"), (150, "older"))):
        flags = ["--step", "muon.py:build", "--step-digest", digest]
        more = {"begin_utc": f"2026-12-0{5 - number}T00:00:00Z", "issue": (9.0, 7.0), "boot": f"h{number}"}
        put(tmp_path, number, model=OWN_STEP, label="muon-build", flags=flags, kernels=kernels, ms=MS, **more)
    assert [line.hosts_text for line in headlines.of(frame.load(tmp_path))] == ["2 unknown H200"]


def test_a_step_whose_graphs_are_all_of_an_earlier_file_without_a_profile_is_no_headline(tmp_path):
    """The newest file's graph had no memory. The older run ended before its profiles."""
    for number, digest in enumerate(("old", "new")):
        more = {"flags": ["--step", "muon.py:build", "--step-digest", digest], "boot": digest}
        run = made_run(id=f"20261125T10150{number}Z-a7d396c1", model=OWN_STEP, label="muon-build", ms=MS, **more)
        run.begin_utc, run.whole = f"2026-12-0{number + 1}T00:00:00Z", False
        for variant in run.builds[""].variants.values():
            variant.profile = Profile()
        if digest == "new":
            graph = run.builds[""].variants["graph_layer"]
            graph.raised, graph.blocks = Raised(kind="oom", reason="too large"), []
        write(run, tmp_path / "h200x1/your_step-bench")
    assert headlines.of(frame.load(tmp_path)) == [] and table("front", tmp_path) == readme.NOTHING


def test_memory_minutes_and_versions_are_those_of_the_runs(tmp_path):
    run = made_run(alone={"eager": 2**30, "graph_layer": 3 * 2**30}, gpus=H100)
    run.begin_utc, run.end_utc = "2026-12-01T00:00:00Z", "2026-12-01T00:03:30Z"
    write(run, tmp_path / "h100x1/gpt3-bench")
    text = table("needs", tmp_path)
    assert "took 3.5 to 3.5 minutes a model. Measured with torch 2.13." in text
    assert "| 3.0 (H100) | one unknown H100 |" in table("front", tmp_path)
    assert "make measure" not in text
    fits = " fit into 80 GB: they ran on an H100, with the layers that the row names, or need under 70 GiB."
    assert table("fits", tmp_path).endswith(f" All rows{fits}")
    # Of several processes, with the doctor's seconds.
    with_apart(run, "compiled")
    run.seconds = {"doctor": 15.0, "blocks": 124.4}
    write(run, tmp_path / "h100x1/gpt3-bench")
    assert "`make measure` with compiled variants took at most 139 s. Measured with" in table("needs", tmp_path)
    run.end_utc = "a day"
    assert readme.minutes_of(run) == 0
    write(made_run(alone={"eager": 2**30, "graph_layer": 70 * 2**30}), tmp_path / "large/h200x1/gpt3-bench")
    assert table("fits", tmp_path / "large").endswith(f" All rows but GPT-3 175B{fits}")


def test_what_failed_and_the_controls_are_counted(tmp_path):
    put(tmp_path, 0, names=("eager", "graph_layer", "control"))
    run = made_run(id="20261125T101500Z-a7d396c9", boot="c")
    run.builds[""].variants["graph_layer"].raised = Raised(kind="error", reason="it ended")
    write(run, tmp_path / "h200x1/gpt3-bench")
    lines = table("trust", tmp_path).splitlines()
    assert lines[0].startswith(
        "- **Hosts.** 2 runs of 1 workload in 2 files, on 2 hosts. A host is one boot of a machine."
    )
    assert lines[1].startswith("- **Left out.** The headlines count 1 of 1 measurement of a graph. Of the other 0, ")
    assert "1 measurement in 1 run failed with wrong losses, crashes or no memory ([all rows](" in lines[1]
    assert lines[2] == "- **Controls.** Eager against itself: 1.00x; 1 of 1 intervals (95 %) contain 1."
    run.builds[""].variants["graph_layer"].raised, run.builds[""].cycles[0].others = None, 1
    write(run, tmp_path / "h200x1/gpt3-bench")
    left = table("trust", tmp_path).splitlines()[1]
    assert (
        "count 1 of 2 measurements of a graph. Of the other 1, " in left
        and " 1 ran beside other work, and in 0 eager" in left
    )
    assert left.endswith("Nothing failed on a GPU.")


def test_a_model_has_its_headlines_in_a_line_and_the_front_page_has_batch_and_precision(tmp_path):
    several_hosts(tmp_path)
    run = made_run(id="20261125T101509Z-a7d396c1", boot="f", ms=MS)
    run.unit, run.builds[""].items_per_step, run.builds[""].card = "tokens", 8192.0, ["4 x 2048 tokens | te layer, fp8"]
    run.begin_utc = "2026-12-09T00:00:00Z"
    write(run, tmp_path / "h200x1/gpt3-bench")
    assert "| each layer | 8,192 tokens, FP8 | 8.00 (H200)" in table("front", tmp_path)
    line = "Gains of **`graph_layer`** of GPT-3 175B: H200 1.25 to 1.71x; H100 "
    assert table("row", tmp_path, "gpt3").startswith(line)
    assert table("row", tmp_path, "rnnt") == readme.NOTHING


def test_the_rule_on_kernels_has_the_times_of_the_hosts_that_count(tmp_path):
    for number, issue in enumerate((3.0, 4.0, 8.0, 50.0)):
        run = made_run(
            id=f"20261125T10150{number}Z-a7d396c1",
            issue=(issue, 2.0),
            boot=f"h{number}",
            kernels=100,
            ms={"eager": 60.0},
        )
        run.builds[""].cycles[0].others = 1 if issue == 50.0 else None
        write(run, tmp_path / "h200x1/gpt3-bench")
    assert table("launch", tmp_path).startswith(
        "In 3 measurements that count, on 3 hosts, the host took 30 to 80 us to launch a kernel of an eager step, 40"
    )


@pytest.mark.parametrize(("busy", "line"), [(8.0, 0), (9.0, 1), (9.9, 2)])
def test_what_to_do_follows_from_step_and_busy(tmp_path, busy, line):
    put(tmp_path, 0, issue=(5.0, busy))
    lines = table("decide", tmp_path).splitlines()[2:]
    assert [("GPT-3 175B, `graph_layer`: 1.00x" in each) for each in lines] == [index == line for index in range(3)]


def test_beside_nvidia_stands_the_same_mechanism_alone(tmp_path):
    put(tmp_path, 0, ms={"graph_layer": 8.0})
    assert table("nvidia", tmp_path) == readme.NOTHING
    put(tmp_path, 9, ms={"graph_layer_te": 8.0}, names=("eager", "graph_layer_te"))
    line = table("nvidia", tmp_path).splitlines()[2]
    assert "[1.25x, one unknown H200](h200x1/gpt3-bench), `graph_layer_te` | 1 GPU: 8 of 96 layers |" in line


def test_a_capture_that_failed_is_not_called_unmeasured(tmp_path):
    run = made_run(names=("eager", "graph_layer_te"))
    own = run.builds[""].variants
    own["graph_layer_te"].parity[0].hashes, own["graph_layer_te"].parity[0].losses = ["other"], [2.0]
    write(run, tmp_path / "h200x1/gpt3-bench")
    assert "[failed](h200x1/gpt3-bench)" in table("nvidia", tmp_path)


def test_the_ceiling_counts_what_reached_it(tmp_path):
    """Two graphs that could gain 1.5x, of which one does, and one that could gain less and does."""
    later = {"begin_utc": "2026-12-01T00:00:00Z"}
    put(tmp_path, 0, issue=(12.0, 8.0), ms={"eager": 12.0, "graph_layer": 8.1}, **later)
    put(tmp_path, 1, issue=(12.0, 8.0), ms={"eager": 12.0, "graph_layer": 10.0}, boot="c", **later)
    put(tmp_path, 2, issue=(5.0, 9.9), model="other", boot="d", **later)
    put(tmp_path, 3, issue=(12.0, 8.0), ms={"eager": 12.0, "graph_layer": 10.0}, boot="e")
    put(tmp_path, 4, issue=None, ms={"eager": 12.0, "graph_layer": 15.0}, boot="f")
    text = readme.ceiling_text(frame.load(tmp_path).points)
    assert text.startswith("4 of 5 measurements of graphs and compiled code, on 4 hosts, have a ceiling, step / busy.")
    assert "None gained over 0.0 % more." in text
    assert "The worst of all took 1.25 times as long as eager." in text
    assert "1 of 2 graphs that could gain over 5 % and 1 of 1 graphs that could gain less reached it" in text
    lines = readme.misses(frame.load(tmp_path).points)
    assert len(lines) == 2 and "80.0 % of 1.500x; its kernels take +0.0 %" in lines[0]
    assert "its GPU waits for 20.0 % of the step" in lines[0]


@pytest.mark.parametrize(
    ("text", "said"),
    [("<!-- table: trust -->\n", "needs its own"), ("<!-- table: nope -->\n<!-- end -->\n", "no table 'nope'")],
)
def test_a_wrong_marker_is_named(tmp_path, text, said):
    (tmp_path / "README.md").write_text(text)
    with pytest.raises(readme.ReadmeError, match=said):
        readme.changed(frame.load(tmp_path / "none"), tmp_path)


def test_without_any_run_the_tables_say_so(tmp_path):
    # Where nothing was swept, a page has no heading for it.
    assert table("sweeps", tmp_path, "gpt3") == ""
    for kind in readme._TABLES.keys() - {"sweeps"}:
        assert "measured" in table(kind, tmp_path, "gpt3")


def test_a_sweep_has_a_table_a_figure_and_the_size_at_which_its_gain_ends(tmp_path):
    put_sweep(tmp_path, oom=(1024,))
    heading, sentence, figure, _, _, *lines = re.split("\n+", table("sweeps", tmp_path, "llama2_lora"))
    assert heading == "### By sequence: `graph_layer`, slice, H200"
    end = "At 512 tokens (67 us a kernel) and above, a gain of 5 % is not certain on a host of"
    assert sentence == f"{end} 50 us a kernel."
    assert figure.endswith("(figures/sweep-h200-llama2_lora-slice-over-sequence-graph_layer.svg)")
    cells = [line.strip("| ").split(" | ") for line in lines]
    assert [line[0].lstrip("[").partition("]")[0] for line in cells] == ["128", "256", "512", "1,024"]
    assert [line[-1] for line in cells] == ["full run", *["3 cycles, light"] * 2, "out of memory"]
    assert cells[3][3] == "oom" and cells[0][3].startswith("2.974x (2.95") and cells[0][4:6] == ["16.7", "50.0"]
    assert table("sweeps", tmp_path, "gpt3") == ""


def test_a_sweep_of_several_hosts_says_for_each_where_its_gain_ends(tmp_path):
    put_sweep(tmp_path)
    put_sweep(tmp_path, host_ms=60.0, boot="c", number=1)
    text = table("sweeps", tmp_path, "llama2_lora")
    assert "- Host b: At 512 tokens (67 us a kernel) and above, a gain of 5 % is not certain on a" in text
    assert "- Host c: At 1,024 tokens (133 us a kernel) and above, a gain of 5 % is not certain on a" in text
    assert text.count("| b |") == text.count("| c |") == 4


def test_points_of_a_sweep_are_no_headlines_and_stand_in_its_table_alone(tmp_path):
    def of_a_step(runs):
        for run in runs:
            run.model, run.preset, run.label = OWN_STEP, "bench", f"nanogpt-build-sequence-{run.value}"

    put_sweep(tmp_path, change=of_a_step)
    results = frame.load(tmp_path)
    assert len(results.records()) == 8 and headlines.of(results) == []
    assert "nanogpt" not in table("model", tmp_path, OWN_STEP)
    assert table("sweeps", tmp_path, OWN_STEP).startswith("### By sequence: `graph_layer`, nanogpt-build, H200\n")
    # The same run by itself is one.
    put_sweep(tmp_path, change=lambda runs: [of_a_step(runs), *(setattr(run, "over", "") for run in runs)])
    assert len(headlines.of(frame.load(tmp_path))) == 2


def test_the_overview_hides_nothing(tmp_path):
    put(tmp_path, 0, ms={"graph_layer": 8.0}, unsupported=("graph_x",))
    (tmp_path / "h200x1/gpt3-bench/bad.json").write_text("{")
    text = overview.page_of(frame.load(tmp_path), tmp_path / "overview.md")
    assert "graph_x: unsupported (needs a GPU)" in text and "bad.json: no whole JSON" in text
    assert all(line.count("|") <= len(overview.OTHER) + 1 for line in text.splitlines())


def test_the_overview_has_a_table_of_hosts_whose_runs_timed_calls(tmp_path):
    def page(*runs_of):
        for number, (boot, calls) in enumerate(runs_of):
            run = made_run(boot=boot, id=f"20261125T10150{number}Z-a7d396c1")
            run.host.cpu, run.host.calls = f"CPU {boot}", calls
            write(run, tmp_path / "results" / "h200x1/gpt3-bench")
        return overview.page_of(frame.load(tmp_path / "results"), tmp_path / "results" / "overview.md")

    assert "## Hosts" not in page(("a", {}))
    first, second = ({"operator": Latency(p50_us=value, p99_us=3 * value)} for value in (2.0, 4.0))
    text = page(("a", {}), ("b", first), ("b", second))
    assert "- [Hosts](#hosts)" in text and "| CPU b | NVIDIA H200 | 2 | 3.0 (9.0) |  |  |" in text
    assert "| CPU a |" not in text


def test_megatrons_scopes_have_the_gains_of_their_variants(tmp_path):
    put(tmp_path, 0, names=("eager", "graph_layer_te"), ms={"eager": 10.0, "graph_layer_te": 8.0})
    (line,) = table("scopes", tmp_path).splitlines()[2:]
    assert "`graph_layer_te`" in line and "1.25x, one unknown H200" in line


def test_megatrons_builds_stand_beside_ours_of_the_newest_run_alone(tmp_path):
    put(tmp_path, 0, ms=MS)
    assert table("megatron", tmp_path) == "No run has measured it yet."
    run = made_run(id="20261125T101503Z-a7d396c1", ms=MS, alone={"eager": 2**30})
    ms = {"eager": 12.0, "megatron_full": 9.0, "megatron_te": 10.0}
    run.builds["megatron"] = made_run(names=tuple(ms), ms=ms).builds[""]
    write(run, tmp_path / FOLDER)
    eager, layer, *theirs = table("megatron", tmp_path).splitlines()[2:]
    assert eager.endswith("| 10.0 |  |  |  | 1.0 |") and "| 8.0 |  |  | 1.250x (1.250 to 1.250) |" in layer
    assert ["| 12.0 |" in theirs[0], "1.200x" in theirs[1], "1.333x" in theirs[2]] == [True] * 3
    sentence = "In one run on one H200, our `graph_layer` takes 8.0 ms, its eager step 10.0 ms. Megatron-Core's "
    sentence += "`megatron_full` takes 9.0 ms, its eager step 12.0 ms."
    assert table("megatron", tmp_path, "best") == sentence
    assert table("megatron", tmp_path, "llama31") == "No run has measured it yet."


def test_memory_of_parameterized_launches_stands_beside_that_of_the_runs_other_variants(tmp_path):
    ms = {"eager": 10.0, "graph_layer": 9.0, "graph_parameterized": 8.0}
    put(tmp_path, 0, names=tuple(ms), ms=ms, alone={"eager": 2**30, "graph_parameterized": 2**31})
    eager, launched = table("memory", tmp_path).splitlines()[2:]
    assert eager.endswith("| `eager` | 10.00 | base |  | 1.00 |")
    assert launched.endswith("| `graph_parameterized` | 8.00 | 1.250x |  | 2.00 |")
    (slowed := tmp_path / "slowed").mkdir()
    run = made_run(names=tuple(ms), ms=ms, alone={"eager": 2**30, "graph_parameterized": 2**31})
    write(with_slowing_variable(run, slowed), slowed / FOLDER)
    assert table("memory", slowed) == "Not measured on a GPU yet."


def test_memory_of_parameterized_launches_that_stand_apart_stands_beside_that_of_the_preset(tmp_path):
    run = made_run(ms={"graph_layer": 9.0}, alone={"eager": 2**30, "graph_layer": 2**30})
    alone = {"eager": 2**29, "graph_parameterized": 2**31}
    with_apart(run, "parameterized", names=("eager", "graph_parameterized"), ms={"graph_parameterized": 8}, alone=alone)
    write(run, tmp_path / FOLDER)
    eager, layer, launched = table("memory", tmp_path).splitlines()[2:]
    assert eager.endswith("| `eager` | 10.00 | base |  | 1.00 |") and "`graph_layer`" in layer
    assert launched.endswith("| `graph_parameterized` | 8.00 | 1.250x |  | 2.00 |")


def test_memory_alone_is_of_the_newest_run_that_measured_it(tmp_path):
    ms = {"eager": 10.0, "graph_step": 8.0}
    for number, alone in enumerate(({"eager": 2**30, "graph_step": 2**31}, {})):
        put(tmp_path, number, model="llama31", names=tuple(ms), ms=ms, alone=alone)
    rows = frame.load(tmp_path).records()
    assert {row.variant: row.alone_bytes for row in rows} == {"eager": 2**30, "graph_step": 2**31}


@pytest.mark.parametrize(
    ("steps", "note"),
    [(None, "adds 2.0 GiB |"), (2.75, "adds 2.0 GiB |"), (1.5, "adds 2.0 GiB in its capture, 0.5 in steps |")],
)
def test_a_row_tells_memory_of_the_capture_from_that_of_the_steps(tmp_path, steps, note):
    run = made_run(alone={"eager": 2**30, "graph_layer": 3 * 2**30})
    for name, size in (("eager", 1), ("graph_layer", steps)):
        run.builds[""].variants[name].alone.steps_reserved_bytes = size and int(size * 2**30)
    write(run, tmp_path / "h200x1/gpt3-bench")
    assert note in table("model", tmp_path, "gpt3")


def test_the_overview_begins_with_its_contents_and_the_best_rows(found):
    text = overview.page_of(found, ROOT / "results" / "overview.md")
    contents, best = text.index("- [Best rows](#best-rows)"), text.index("\n## Best rows")
    assert contents < best < text.index("\n## NVIDIA H100")
    for name in re.findall(r"(?m)^## (.*)", text):
        assert f"- [{name}](#" in text[:best]


def test_changing_lengths_show_what_padding_costs_and_the_graph_gains(tmp_path):
    names = ("eager", "eager_padded", "graph_step")
    ms = {"eager": 10.0, "eager_padded": 11.0, "graph_step": 10.0}
    put(tmp_path, 0, model="rnnt", preset="bench_lengths", names=names, ms=ms)
    assert table("lengths", tmp_path).splitlines()[2] == "| b | 10.00 | 11.00 | 10.00 | 10.0 % | 1.10x | 1.00x |"


def test_constraints_name_the_versions_that_were_measured(found):
    text = (ROOT / "constraints.txt").read_text()
    for version in {run.versions["torch"] for _, run in found.runs}:
        assert f"torch {version}" in text
