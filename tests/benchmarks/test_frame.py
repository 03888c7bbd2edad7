"""The frame: points of runs, rows over hosts, hosts of the archive, one base a row."""

import os
import re
from unittest import mock

import msgspec
import pandas as pd
import pytest

from benchmarks import frame
from benchmarks.archive import ArchivedHost
from benchmarks.pages import tables
from graph_worth.folders import OWN_STEP, ROOT
from graph_worth.harness.files import run_file
from graph_worth.harness.files.facts import Raised
from graph_worth.harness.files.workload import Workload, workload_of
from graph_worth.harness.pages import run_table
from tests.helpers.made_run import FOLDER, H200, made_run, put, with_apart, write

EAGERS = ("eager", "eager_twin", "graph_layer")


def row_of(root, variant="graph_layer", busy=0):
    results = frame.load(root)
    assert not results.faults
    rows = results.rows
    (row,) = results.records((rows["variant"] == variant) & (rows["busy_processes"] == busy))
    return row


def note_of(root):
    return row_of(root).note


def put_archive(root, archived):
    """Write hosts of the archive."""
    (root / "archive").mkdir(parents=True)
    entry = {"workload": Workload("NVIDIA H200", 1, "gpt3", "bench", ""), "hosts": archived}
    (root / "archive" / "hosts.json").write_bytes(msgspec.json.encode([entry], enc_hook=str))


# ------------------------------------------------------------------------------------------------
# Hosts


def test_of_one_host_the_ratio_is_the_quotient_of_the_printed_times(tmp_path):
    put(tmp_path, 0, ms={"eager": [10.0, 12.0], "graph_layer": [8.0, 8.1]})
    row = row_of(tmp_path)
    assert row.base_ms / row.ms == pytest.approx(row.gain, rel=1e-12)
    assert row.hosts == 1 and row.cycles == 8 and row.gain_low == row.gain_high == pytest.approx(row.gain)
    points = frame.measured(frame.read(tmp_path))
    (point,) = frame.timed(points)[["low", "high"]].itertuples(index=False)
    assert (row.interval_low, row.interval_high) == point and point.low > 1 and "same" not in row.note


def test_over_hosts_times_are_medians_with_ranges_and_the_gain_a_geometric_mean(tmp_path):
    for number, (base, ms) in enumerate([(10.0, 8.0), (12.0, 8.1), (30.0, 8.2)]):
        put(tmp_path, number, ms={"eager": base, "graph_layer": ms}, boot=str(number))
    row = row_of(tmp_path)
    assert (row.base_ms, row.ms) == pytest.approx((12.0, 8.1)) and row.hosts == 3
    assert (row.base_ms_low, row.base_ms_high) == pytest.approx((10.0, 30.0))
    assert (row.ms_low, row.ms_high) == pytest.approx((8.0, 8.2))
    assert (row.gain_low, row.gain_high) == pytest.approx((10 / 8, 30 / 8.2))
    assert row.gain == pytest.approx((10 / 8 * 12 / 8.1 * 30 / 8.2) ** (1 / 3))
    # An interval is of one run on one host.
    assert row.interval_low is None and row.interval_high is None and row.note == "no audits, no control, no ceiling"


def test_a_host_with_many_runs_counts_once(tmp_path):
    for number in range(3):
        put(tmp_path, number, ms={"graph_layer": 5.0}, boot="a")
    put(tmp_path, 3, ms={"graph_layer": 10.0}, boot="b")
    row = row_of(tmp_path)
    assert row.hosts == 2 and row.cycles == 32
    assert row.gain == pytest.approx(2**0.5) and (row.gain_low, row.gain_high) == pytest.approx((1.0, 2.0))
    assert row.ms == pytest.approx(7.5)


def test_contended_cycles_are_a_row_of_their_own(tmp_path):
    put(tmp_path, 0, busy=16, ms={"eager": [10.0, 20.0], "graph_layer": 8.0})
    assert row_of(tmp_path).gain == pytest.approx(1.25)
    beside = row_of(tmp_path, busy=16)
    assert beside.gain == pytest.approx(2.5) and beside.workload == "gpt3/bench load16"


def test_the_ceiling_issue_and_busy_of_a_row(tmp_path):
    put(tmp_path, 0, issue=(12.0, 8.0), ms={"eager": 12.0, "graph_layer": 8.1})
    put(tmp_path, 1, issue=(11.0, 8.0), ms={"eager": 16.0, "graph_layer": 8.1}, boot="c")
    row = row_of(tmp_path)
    assert row.ceiling == pytest.approx((1.5 + 2.0) / 2) and row.reached == pytest.approx(8 / 8.1)
    assert (row.ceiling_low, row.ceiling_high) == pytest.approx((1.5, 2.0))
    assert row.base_issue_ms == pytest.approx(11.5) and row.issue_ms == 0.5
    assert row.busy_ms == 8.0


def test_a_ceiling_over_ranks_is_marked_where_it_is_estimated_or_missing(tmp_path):
    """Each of two GPUs; rank 0's collectives in eager wait for 234.1 ms more than in the graph."""
    run = made_run(ranks=2, gpus=H200 * 2, issue=(9.0, 393.7), ms={"eager": 347.5, "graph_layer": 171.2})
    profiles = [variant.profile for variant in run.builds[""].variants.values()]
    profiles[0].collective_ms, profiles[1].collective_ms, profiles[1].busy_ms = 263.1, 29.0, 170.5
    write(run, tmp_path / "a" / FOLDER)
    points, (_, row) = frame.read(tmp_path / "a"), frame.load(tmp_path / "a").records()
    assert list(points["uncaptured_busy_ms"]) == pytest.approx([159.6] * 2)
    assert list(points["waiting_ms"]) == pytest.approx([234.1, 0.0])
    assert tables.CELLS["at most"](row) == "2.177x (estimated)" and row.reached == pytest.approx(0.932, abs=1e-3)
    profiles[1].kernels = 20
    write(run, tmp_path / "b" / FOLDER)
    _, row = frame.load(tmp_path / "b").records()
    assert tables.CELLS["at most"](row) == tables.CELLS["most"](row) == "no ceiling" and row.reached is None
    assert "no ceiling: rank 0 alone was profiled, and no other variant has the same kernels" in row.note


# ------------------------------------------------------------------------------------------------
# Bases


def test_a_row_never_mixes_bases(tmp_path):
    """On one host another eager is the base: its ratio stands in a row of its own."""
    names = {"names": EAGERS}
    put(tmp_path, 0, **names, ms={"eager": 10.0, "eager_twin": 11.0, "graph_layer": 5.0}, boot="a")
    put(tmp_path, 1, **names, ms={"eager": 10.0, "eager_twin": 11.0, "graph_layer": 5.0}, boot="b")
    put(tmp_path, 2, **names, ms={"eager": 10.0, "eager_twin": 8.0, "graph_layer": 5.0}, boot="c")
    results = frame.load(tmp_path)
    rows = results.records(results.rows["variant"] == "graph_layer")
    assert [(row.base, row.hosts, round(row.gain, 3)) for row in rows] == [("eager", 2, 2.0), ("eager_twin", 1, 1.6)]
    assert "against eager_twin" in rows[1].note and "against" not in rows[0].note
    for row in rows:
        points = results.points[results.points["row"] == row.row]
        assert {results.judged[point.run, point.build].base for point in points.itertuples()} == {row.base}


def test_a_run_in_which_the_variant_failed_says_nothing_against_a_base(tmp_path):
    put(tmp_path, 0, ms={"graph_layer": 5.0})
    run = made_run(id="20261125T101501Z-a7d396c1", begin_utc="2026-11-25T11:00:00Z")
    own = run.builds[""].variants["graph_layer"]
    own.raised, own.blocks = Raised(kind="oom", reason="too large"), []
    write(run, tmp_path / FOLDER)
    row = row_of(tmp_path)
    assert (row.status, row.gain, row.runs, row.hosts) == ("pass", pytest.approx(2.0), 1, 1)
    points = frame.measured(frame.read(tmp_path))
    assert [*points["status"][points["row"] == row.row]] == ["pass", "oom"]


# ------------------------------------------------------------------------------------------------
# Hosts of the archive


def test_hosts_of_the_archive_count_where_eager_makes_the_same_kernels(tmp_path):
    archived = [
        ArchivedHost("x", {"eager": 100.9}, {"eager": 20.0, "graph_layer": 10.0}),
        ArchivedHost("y", {"eager": 101.1}, {"eager": 90.0, "graph_layer": 1.0}),
        ArchivedHost("z", {"eager": 100.0}, {"eager": 40.0}),
        # The host of the run itself.
        ArchivedHost("b", {"eager": 100.0}, {"eager": 90.0, "graph_layer": 1.0}),
    ]
    put(tmp_path, 0, issue=(12.0, 8.0), kernels=100, ms={"eager": 12.0, "graph_layer": 8.1})
    assert row_of(tmp_path).interval_low is not None
    put_archive(tmp_path, archived)
    row, results = row_of(tmp_path), frame.load(tmp_path)
    hosts = results.hosts[results.hosts["row"] == row.row]
    assert [*zip(hosts["host"], hosts["archived"], strict=True)] == [("b", False), ("x", True)]
    assert (row.hosts, row.archived_hosts) == (2, 1) and tables.CELLS["hosts"](
        row
    ) == "two hosts (1 archived, 1 unknown)"
    assert (row.gain_low, row.gain_high) == pytest.approx((12 / 8.1, 2.0)) and row.base_ms == pytest.approx(16.0)
    # One interval would leave the other host out.
    assert row.interval_low is None and row.cycles == 8


@pytest.mark.parametrize(
    "changes", [{"gpus": ({"name": "NVIDIA H100", "uuid": "GPU-2"},)}, {"ranks": 2}, {"label": "x"}]
)
def test_hosts_of_the_archive_are_those_of_the_same_workload(tmp_path, changes):
    for folder, more in (("same", {}), ("another", changes)):
        put(tmp_path / folder, 0, issue=(12.0, 8.0), **more)
        put_archive(tmp_path / folder, [ArchivedHost("x", {"eager": 9}, {"eager": 20.0, "graph_layer": 10.0})])
    assert row_of(tmp_path / "same").hosts == 2
    assert row_of(tmp_path / "another").hosts == 1


@pytest.mark.slow
def test_the_archive_of_this_repository_stands_beside_its_runs():
    results = frame.load(ROOT / "results")
    assert not results.faults and len(results.runs) >= 17
    archived = results.rows[results.rows["archived_hosts"] > 0]
    assert len(archived) and archived["gpu"].str.match("NVIDIA H[12]00").all()
    points = frame.timed(results.points)
    assert (points.groupby("row")["base"].nunique() == 1).all()
    assert not results.hosts.duplicated(["row", "host"]).any()


# ------------------------------------------------------------------------------------------------
# Workloads


def test_two_files_of_one_step_name_are_two_workloads(tmp_path):
    for number, digest in enumerate(("aaaa", "aaaa", "bbbb")):
        flags = ["--step", "my_step.py:build", "--step-digest", digest]
        more = {"model": OWN_STEP, "label": "mine", "flags": flags, "boot": str(number)}
        write(made_run(id=f"20261125T10150{number}Z-a7d396c{number}", **more), tmp_path / FOLDER)
    rows = [row for row in frame.load(tmp_path).records() if row.variant == "graph_layer"]
    assert sorted((row.digest, row.hosts) for row in rows) == [("aaaa", 2), ("bbbb", 1)]
    # The one that was measured last has the name alone.
    assert {(row.digest, row.workload) for row in rows} == {("bbbb", "mine"), ("aaaa", "mine, earlier file aaaa")}
    # The flag of a model that happens to have this name is no digest.
    assert workload_of(made_run(flags=["--step-digest", "aaaa"])).digest == ""


def test_a_run_with_fewer_layers_than_asked_is_a_workload_of_its_own(tmp_path):
    for number, asked in enumerate((6, 8)):
        run = made_run(id=f"20261125T10150{number}Z-a7d396c{number}")
        build = run.builds[""]
        build.asked_layers, build.config = asked, {"layers": 6}
        write(run, tmp_path / FOLDER)
    results = frame.load(tmp_path)
    assert {*results.rows["workload"]} == {"gpt3/bench", "gpt3/bench-l6"}
    assert (results.points["row"].value_counts() == 1).all()


def test_torchs_layers_in_the_place_of_transformer_engines_are_a_workload_of_their_own(tmp_path):
    asked = {"flags": ["--layer=torch"], "label": "layer-torch"}
    cases = [
        ({}, "te", "fp8", "gpt3/bench"),
        ({}, "torch", "bf16", "gpt3/bench layer-torch-precision-bf16"),
        ({}, "handwritten", "fp8", "gpt3/bench"),
        (asked, "torch", "bf16", "gpt3/bench layer-torch"),
        ({"flags": ["--precision", "fp32"], "label": "precision-fp32"}, "torch", "fp32", "gpt3/bench precision-fp32"),
        ({"device": "cpu"}, "torch", "bf16", "gpt3/bench"),
        ({"preset": "slice_70b"}, "torch", "bf16", "gpt3/slice_70b"),
    ]
    for header, layer, precision, name in cases:
        run = made_run()
        for key, value in header.items():
            setattr(run, key, value)
        run.builds[""].config = {"layer": layer, "precision": precision}
        assert workload_of(run).name == name and name in run_table.suite([run])
    run = made_run()
    run.builds[""].config = run.builds[""].fields = {"layer": "torch", "precision": "bf16"}
    assert workload_of(run).name == "gpt3/bench"


# ------------------------------------------------------------------------------------------------
# Notes


def test_equal_programs_are_called_the_same(tmp_path):
    put(tmp_path, 0)
    assert "same" in note_of(tmp_path)


def test_an_eager_that_wanders_is_named_beside_its_graph(tmp_path):
    put(tmp_path, 0, ms={"eager": [10.0, 13.0], "graph_layer": 9.0})
    assert "eager 10.00 to 13.00 ms" in note_of(tmp_path)


def test_benchmarks_on_other_gpus_stand_beside_a_row_of_one_host(tmp_path):
    run = made_run()
    for cycle, others in zip(run.builds[""].cycles, (None, 0, 2, 1), strict=False):
        cycle.others = others
    write(run, tmp_path / FOLDER)
    assert "beside 2 benchmarks on other GPUs" in note_of(tmp_path)


def test_beside_a_small_effect_stands_the_control(tmp_path):
    names = ("eager", "graph_layer", "control")
    put(tmp_path, 0, names=names, ms={"graph_layer": 9.95, "control": 10.02})
    assert "control 0.998x +- 0.0 %" in note_of(tmp_path)
    put(tmp_path / "other", 0, names=names, ms={"graph_layer": 9.0, "control": 10.02})
    assert "control" not in note_of(tmp_path / "other")
    # It is that of the run for a process without one, too.
    run = made_run(names=names, ms={"graph_layer": 9.95, "control": 10.02})
    write(with_apart(run, "swift", names=("eager", "graph_swift"), ms={"graph_swift": 9.96}), tmp_path / "apart")
    (row,) = [row for row in frame.load(tmp_path / "apart").records() if row.variant == "graph_swift"]
    assert "control 0.998x +- 0.0 %" in row.note and "no control" not in row.note


def test_memory_alone_and_what_a_graph_adds(tmp_path):
    put(tmp_path, 0, alone={"eager": 4 * 2**30, "graph_layer": 5 * 2**30})
    row = row_of(tmp_path)
    assert tables.CELLS["alone GiB"](row) == "5.0" and "adds 1.0 GiB" in row.note
    put(tmp_path / "other", 0)
    assert tables.CELLS["alone GiB"](row_of(tmp_path / "other")) == ""


def test_a_row_says_what_belongs_beside_its_rate(tmp_path):
    run = made_run()
    assert "FLOP" not in run_table.report(run)
    run.builds[""].flops_notes, run.builds[""].flops_per_step = ["logits 38 % of FLOP"], 4e12
    write(run, tmp_path / FOLDER)
    assert "logits 38 % of FLOP" in note_of(tmp_path)
    assert "logits 38 % of FLOP\nSame: leave it eager." in run_table.report(run)


def test_uncommitted_source_is_named(tmp_path):
    put(tmp_path, 0, source={"commit": "c", "tree": "t", "clean": False, "hash": "h"})
    assert "uncommitted source" in note_of(tmp_path)


# ------------------------------------------------------------------------------------------------
# Bad input


def test_a_run_that_is_there_twice_counts_once(tmp_path):
    put(tmp_path, 0)
    write(made_run(id="20261125T101500Z-a7d396c0"), tmp_path / "copy" / FOLDER)
    assert row_of(tmp_path).cycles == 8


def test_two_runs_of_one_id_are_left_out_by_name(tmp_path):
    put(tmp_path, 0)
    put(tmp_path, 1)
    write(made_run(id="20261125T101500Z-a7d396c0", cycles=9), tmp_path / "other" / FOLDER)
    results = frame.load(tmp_path)
    assert len(results.runs) == 1 and len(results.faults) == 1 and "have one id" in results.faults[0]


def test_a_variant_that_failed_has_a_row_with_its_reason(tmp_path):
    run = made_run(unsupported=("graph_x",))
    run.builds[""].variants["graph_layer"].capture.graphs = 0
    write(run, tmp_path / FOLDER)
    rows = {row.variant: row for row in frame.load(tmp_path).records()}
    reasons = {name: (row.status, row.reason) for name, row in rows.items()}
    assert reasons["graph_layer"] == ("failed", "0 graphs made, 1 promised")
    assert reasons["graph_x"] == ("unsupported", "needs a GPU")
    assert rows["graph_layer"].ms is None and rows["graph_layer"].gain is None
    assert rows["eager"].ms == pytest.approx(10.0)


def test_a_folder_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    put(tmp_path, 0)
    (tmp_path / "closed").mkdir()
    scan = os.scandir

    def refuse(path):
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    # Tests may run as root, who can read any folder.
    monkeypatch.setattr(os, "scandir", refuse)
    results = frame.load(tmp_path)
    assert len(results.runs) == 1 and results.faults == [f"{tmp_path}/closed: Permission denied"]


def test_machines_with_most_rows_come_first_and_cpus_last():
    machines = ["CPU", "CPU", "CPU", "NVIDIA H200, 2 GPUs", "NVIDIA H200", "NVIDIA H200"]
    grouped = tables.by_machine(pd.DataFrame({"machine": machines, "row": range(6)}))
    assert list(grouped) == ["NVIDIA H200", "NVIDIA H200, 2 GPUs", "CPU"]
    assert [*grouped["NVIDIA H200"]["row"]] == [4, 5]


# ------------------------------------------------------------------------------------------------
# The tables that others read


def test_a_point_has_every_column_with_its_type(tmp_path):
    put(tmp_path, 0, busy=16, ms={"eager": [10.0, 20.0], "graph_layer": 8.0}, unsupported=("graph_x",))
    (tmp_path / "none").mkdir()
    for root in (tmp_path, tmp_path / "none"):
        points = frame.read(root)
        assert {name: str(points[name].dtype) for name in points} == {
            name: column.type for name, column in frame.COLUMNS.items()
        }
    points = frame.read(tmp_path)
    # One for each number of busy processes; what failed has no block beside them.
    keys = [*zip(points["variant"], points["busy_processes"], points["base"].fillna("-"), strict=True)]
    quiet = [("eager", 0, "eager"), ("graph_layer", 0, "eager"), ("graph_x", 0, "-")]
    assert keys == [*quiet, ("eager", 16, "eager"), ("graph_layer", 16, "eager")]


def test_without_any_run_the_tables_are_empty(tmp_path):
    points = frame.measured(frame.read(tmp_path))
    assert [len(table) for table in (points, frame.rows(points), frame.archive(tmp_path), frame.faults(tmp_path))] == [
        0
    ] * 4
    assert list(frame.rows(points)) == list(frame.Row._fields)


def test_a_file_of_another_schema_is_a_fault_that_says_what_is_missing(tmp_path):
    put(tmp_path, 0)
    (tmp_path / "old.json").write_text('{"schema": 9}')
    faults = frame.faults(tmp_path)
    assert faults.to_numpy().tolist() == [[f"{tmp_path}/old.json", "schema 9, this version reads 3 and 4"]]
    assert frame.read(tmp_path)["run"].nunique() == 1


@pytest.mark.parametrize("table", ["points", "rows", "archive", "faults"])
def test_make_frame_writes_every_table(tmp_path, capsys, table):
    put(tmp_path, 0, ms={"eager": 10.0, "graph_layer": 8.0})
    put_archive(tmp_path, [ArchivedHost("x", {"eager": 9}, {"eager": 20.0, "graph_layer": 10.0})])
    target = tmp_path / "out" / "table.csv"
    assert frame.main([str(tmp_path), "--table", table, "--to", str(target)]) == 0
    number = {"points": 2, "rows": 2, "archive": 2, "faults": 0}[table]
    assert len(pd.read_csv(target)) == number and capsys.readouterr().out == f"{target}: {number} lines\n"


def test_the_example_of_the_page_runs(monkeypatch, capsys):
    """Its output has the lines of the page but for numbers, which new runs change."""
    monkeypatch.chdir(ROOT)
    page = (ROOT / "docs" / "frame.md").read_text()
    code, output = re.search(r"```python\n(.*?)```\n\n```text\n(.*?)```", page, re.DOTALL).groups()
    exec(code, {})
    printed = capsys.readouterr().out
    assert printed.splitlines()[0].split() == output.splitlines()[0].split()
    assert printed.splitlines()[-4:][0].split() == output.splitlines()[-4:][0].split()


def test_parquet_keeps_types(tmp_path):
    pytest.importorskip("pyarrow")
    put(tmp_path, 0)
    assert frame.main([str(tmp_path), "--to", str(tmp_path / "points.parquet")]) == 0
    points = pd.read_parquet(tmp_path / "points.parquet")
    assert points["cycles"].dtype == "Int64" and points["headline"].dtype == "boolean"


def test_a_table_of_another_kind_of_file_is_a_mistake(tmp_path, capsys, monkeypatch):
    put(tmp_path, 0)
    monkeypatch.setattr(pd.DataFrame, "to_parquet", mock.Mock(side_effect=ImportError))
    assert frame.main([str(tmp_path), "--to", str(tmp_path / "points.parquet")]) == 2
    assert "parquet needs pyarrow: ./setup.sh parquet" in capsys.readouterr().err
    assert frame.main([str(tmp_path), "--to", "points.xls"]) == 2
    assert frame.main([str(tmp_path / "none")]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert "ends in .csv or .parquet" in lines[0] and "no such folder" in lines[1]


def test_a_folder_that_is_not_there_is_no_empty_table(tmp_path, capsys):
    with pytest.raises(FileNotFoundError, match="No such folder"):
        frame.read(tmp_path / "none")
    assert frame.read(tmp_path).empty


def test_the_counted_run_with_most_variants_says_what_is_fastest_in_one_row_of_a_workload(tmp_path):
    ms = {"graph_layer": 9.0, "graph_step": 5.0}
    put(tmp_path, 0, ms=ms, names=("eager", "graph_layer", "graph_step"))
    put(tmp_path, 1, ms=ms, begin_utc="2026-11-26T10:15:00Z", boot="c")
    beside = put(tmp_path, 2, ms={"graph_layer": 2.0}, names=("eager", "graph_layer", "graph_step", "graph_other"))
    run = run_file.read(beside)
    run.builds[""].cycles[0].others = 1
    beside.unlink()
    write(run, beside.parent)
    fastest = {row.variant: row.fastest for row in frame.load(tmp_path).records()}
    assert fastest == {
        "eager": "",
        "graph_layer": "",
        "graph_step": "capture the whole step; bitwise",
        "graph_other": "",
    }


@pytest.mark.parametrize(
    ("hosts", "layer", "step"),
    [
        # (ms of graph_layer, of graph_step) on each host; eager takes 10 ms. The last run of both decides.
        ([(9.8, 9.6), (9.8, 9.7)], "", "capture the whole step; bitwise"),
        ([(9.8, 9.95), (9.8, 9.6)], "", "unclear: runs differ"),
        ([(9.8, 9.7), (9.95, 9.96)], "unclear: runs differ", ""),
        ([(9.97, 9.96), (9.95, 9.96)], "leave it eager", ""),
    ],
)
def test_advice_that_the_hosts_of_a_row_do_not_bear_out_is_none(tmp_path, hosts, layer, step):
    for number, (layer_ms, step_ms) in enumerate(hosts):
        ms, day = {"graph_layer": layer_ms, "graph_step": step_ms}, 25 + number
        names = ("eager", "graph_layer", "graph_step")
        put(tmp_path, number, ms=ms, names=names, boot=f"b{number}", begin_utc=f"2026-11-{day}T10:15:00Z")
    fastest = {row.variant: row.fastest for row in frame.load(tmp_path).records()}
    assert (fastest["graph_layer"], fastest["graph_step"]) == (layer, step)
