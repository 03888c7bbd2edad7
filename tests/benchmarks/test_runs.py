"""Rows over runs and hosts: medians, ranges, hosts of the archive, one base a row."""

import os
from types import SimpleNamespace

import pytest

from benchmarks import runs
from benchmarks.archive import ArchivedHost
from benchmarks.pages import tables
from graph_worth.folders import OWN_STEP, ROOT
from graph_worth.harness.files.facts import Raised
from graph_worth.harness.files.workload import Workload
from graph_worth.harness.pages import run_table
from tests.helpers.made_run import FOLDER, H200, made_run, put, write

EAGERS = ("eager", "eager_twin", "graph_layer")


def row_of(root, variant="graph_layer", busy=0):
    found = runs.read(root)
    assert not found.faults
    (row,) = [row for row in found.rows if row.variant == variant and row.workload.busy == busy]
    return row


def rows_with(archived, **changes):
    """The rows of a made run beside hosts of the archive."""
    run = made_run(**changes)
    where = Workload("NVIDIA H200", 1, "gpt3", "bench", "")
    rows = runs.rows_of([(ROOT / "run.json", run)], {where: archived})
    return {row.variant: row for row in rows}


# ------------------------------------------------------------------------------------------------
# Hosts


def test_of_one_host_the_ratio_is_the_quotient_of_the_printed_times(tmp_path):
    put(tmp_path, 0, ms={"eager": [10.0, 12.0], "graph_layer": [8.0, 8.1]})
    row = row_of(tmp_path)
    assert row.base_ms / row.ms == pytest.approx(row.ratio, rel=1e-12)
    assert row.hosts_text == "one host" and row.cycles == 8 and row.gain_range == (row.ratio, row.ratio)
    assert row.interval == (row.timed[0].ratio.low, row.timed[0].ratio.high) and row.word == "faster"


def test_over_hosts_times_are_medians_with_ranges_and_the_gain_a_geometric_mean(tmp_path):
    for number, (base, ms) in enumerate([(10.0, 8.0), (12.0, 8.1), (30.0, 8.2)]):
        put(tmp_path, number, ms={"eager": base, "graph_layer": ms}, boot=str(number))
    row = row_of(tmp_path)
    assert (row.base_ms, row.ms) == pytest.approx((12.0, 8.1)) and row.hosts_text == "3 hosts"
    assert row.base_ms_range == pytest.approx((10.0, 30.0)) and row.ms_range == pytest.approx((8.0, 8.2))
    assert row.gain_range == pytest.approx((10 / 8, 30 / 8.2))
    assert row.ratio == pytest.approx((10 / 8 * 12 / 8.1 * 30 / 8.2) ** (1 / 3))
    # An interval is of one run on one host.
    assert row.interval is None and row.word == ""


def test_a_host_with_many_runs_counts_once(tmp_path):
    for number in range(3):
        put(tmp_path, number, ms={"graph_layer": 5.0}, boot="a")
    put(tmp_path, 3, ms={"graph_layer": 10.0}, boot="b")
    row = row_of(tmp_path)
    assert row.hosts_text == "two hosts" and row.cycles == 32
    assert row.ratio == pytest.approx(2**0.5) and row.gain_range == pytest.approx((1.0, 2.0))
    assert row.ms == pytest.approx(7.5)


def test_contended_cycles_are_a_row_of_their_own(tmp_path):
    put(tmp_path, 0, busy=16, ms={"eager": [10.0, 20.0], "graph_layer": 8.0})
    assert row_of(tmp_path).ratio == pytest.approx(1.25)
    beside = row_of(tmp_path, busy=16)
    assert beside.ratio == pytest.approx(2.5) and beside.workload.name == "gpt3/bench load16"


def test_the_ceiling_issue_and_busy_of_a_row(tmp_path):
    put(tmp_path, 0, issue=(12.0, 8.0), ms={"eager": 12.0, "graph_layer": 8.1})
    put(tmp_path, 1, issue=(11.0, 8.0), ms={"eager": 16.0, "graph_layer": 8.1}, boot="c")
    row = row_of(tmp_path)
    assert row.median("ceiling") == pytest.approx((1.5 + 2.0) / 2) and row.median("reached") == pytest.approx(8 / 8.1)
    assert row.median("base_issue_ms") == pytest.approx(11.5) and row.median("issue_ms") == 0.5
    assert row.median("busy_ms") == 8.0


# ------------------------------------------------------------------------------------------------
# Bases


def test_a_row_never_mixes_bases(tmp_path):
    """On one host another eager is the base: its ratio stands in a row of its own."""
    names = {"names": EAGERS}
    put(tmp_path, 0, **names, ms={"eager": 10.0, "eager_twin": 11.0, "graph_layer": 5.0}, boot="a")
    put(tmp_path, 1, **names, ms={"eager": 10.0, "eager_twin": 11.0, "graph_layer": 5.0}, boot="b")
    put(tmp_path, 2, **names, ms={"eager": 10.0, "eager_twin": 8.0, "graph_layer": 5.0}, boot="c")
    own = [row for row in runs.read(tmp_path).rows if row.variant == "graph_layer"]
    assert [(row.base, len(row.hosts), round(row.ratio, 3)) for row in own] == [
        ("eager", 2, 2.0),
        ("eager_twin", 1, 1.6),
    ]
    assert "against eager_twin" in tables.note(own[1]) and "against" not in tables.note(own[0])
    for row in own:
        assert {point.judged.base for point in row.points} == {row.base}


def test_a_run_in_which_the_variant_failed_says_nothing_against_a_base(tmp_path):
    put(tmp_path, 0, ms={"graph_layer": 5.0})
    run = made_run(id="20261125T101501Z-a7d396c1", begin_utc="2026-11-25T11:00:00Z")
    own = run.builds[""].variants["graph_layer"]
    own.raised, own.blocks = Raised(kind="oom", reason="too large"), []
    write(run, tmp_path / FOLDER)
    row = row_of(tmp_path)
    assert (row.status, row.ratio, len(row.points), len(row.hosts)) == ("pass", pytest.approx(2.0), 2, 1)


# ------------------------------------------------------------------------------------------------
# Hosts of the archive


def test_hosts_of_the_archive_count_where_eager_makes_the_same_kernels():
    archived = [
        ArchivedHost("x", {"eager": 100.9}, {"eager": 20.0, "graph_layer": 10.0}),
        ArchivedHost("y", {"eager": 101.1}, {"eager": 90.0, "graph_layer": 1.0}),
        ArchivedHost("z", {"eager": 100.0}, {"eager": 40.0}),
        # The host of the run itself.
        ArchivedHost("b", {"eager": 100.0}, {"eager": 90.0, "graph_layer": 1.0}),
    ]
    more = {"issue": (12.0, 8.0), "kernels": 100, "ms": {"eager": 12.0, "graph_layer": 8.1}}
    row = rows_with(archived, **more)["graph_layer"]
    assert [(host.host, host.is_archived) for host in row.hosts] == [("b", False), ("x", True)]
    assert row.hosts_text == "two hosts, 1 archived"
    assert row.gain_range == pytest.approx((12 / 8.1, 2.0)) and row.base_ms == pytest.approx(16.0)
    # One interval would leave the other host out.
    assert row.interval is None and row.cycles == 8
    assert rows_with([], **more)["graph_layer"].interval is not None


@pytest.mark.parametrize(
    "changes", [{"gpus": ({"name": "NVIDIA H100", "uuid": "GPU-2"},)}, {"ranks": 2}, {"label": "x"}]
)
def test_hosts_of_the_archive_are_those_of_the_same_workload(changes):
    archived = [ArchivedHost("x", {"eager": 9}, {"eager": 20.0, "graph_layer": 10.0})]
    own = {"issue": (12.0, 8.0)}
    assert len(rows_with(archived, **own)["graph_layer"].hosts) == 2
    assert len(rows_with(archived, **own, **changes)["graph_layer"].hosts) == 1


@pytest.mark.slow
def test_the_archive_of_this_repository_stands_beside_its_runs():
    found = runs.read(ROOT / "results")
    assert not found.faults and len(found.runs) >= 17
    archived = [row for row in found.rows if row.archived]
    assert archived and all(
        row.workload.gpu == "NVIDIA H200" or row.workload.gpu.startswith("NVIDIA H100") for row in archived
    )
    for row in found.rows:
        assert len({point.judged.base for point in row.timed if not row.control}) <= 1
        for host in row.archived:
            assert host.host not in {own.host for own in row.hosts if not own.is_archived}


# ------------------------------------------------------------------------------------------------
# Workloads


def test_two_files_of_one_step_name_are_two_workloads(tmp_path):
    for number, digest in enumerate(("aaaa", "aaaa", "bbbb")):
        flags = ["--step", "my_step.py:build", "--step-digest", digest]
        more = {"model": OWN_STEP, "label": "mine", "flags": flags, "boot": str(number)}
        write(made_run(id=f"20261125T10150{number}Z-a7d396c{number}", **more), tmp_path / FOLDER)
    own = [row for row in runs.read(tmp_path).rows if row.variant == "graph_layer"]
    assert sorted((row.workload.digest, len(row.hosts)) for row in own) == [("aaaa", 2), ("bbbb", 1)]
    # The one that was measured last has the name alone.
    assert {row.workload.name for row in own if row.workload.digest == "bbbb"} == {"mine"}
    assert {row.workload.name for row in own if row.workload.digest == "aaaa"} == {"mine, earlier file"}
    # The flag of a model that happens to have this name is no digest.
    assert runs.workload_of(made_run(flags=["--step-digest", "aaaa"])).digest == ""


def test_a_run_with_fewer_layers_than_asked_is_a_workload_of_its_own(tmp_path):
    for number, asked in enumerate((6, 8)):
        run = made_run(id=f"20261125T10150{number}Z-a7d396c{number}")
        build = run.builds[""]
        build.asked_layers, build.config = asked, {"layers": 6}
        write(run, tmp_path / FOLDER)
    rows = runs.read(tmp_path).rows
    assert {row.workload.name for row in rows} == {"gpt3/bench", "gpt3/bench-l6"}
    assert all(len(row.points) == 1 for row in rows)


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
        assert runs.workload_of(run).name == name and name in run_table.suite([run])
    run = made_run()
    run.builds[""].config = run.builds[""].fields = {"layer": "torch", "precision": "bf16"}
    assert runs.workload_of(run).name == "gpt3/bench"


# ------------------------------------------------------------------------------------------------
# Notes


def test_equal_programs_are_called_the_same(tmp_path):
    put(tmp_path, 0)
    assert row_of(tmp_path).word == "same" and "same" in tables.note(row_of(tmp_path))


def test_an_eager_that_wanders_is_named_beside_its_graph(tmp_path):
    put(tmp_path, 0, ms={"eager": [10.0, 13.0], "graph_layer": 9.0})
    assert "eager 10.00 to 13.00 ms" in tables.note(row_of(tmp_path))


def test_benchmarks_on_other_gpus_stand_beside_a_row_of_one_host(tmp_path):
    run = made_run()
    for cycle, others in zip(run.builds[""].cycles, (None, 0, 2, 1), strict=False):
        cycle.others = others
    write(run, tmp_path / FOLDER)
    assert "beside 2 benchmarks on other GPUs" in tables.note(row_of(tmp_path))


def test_beside_a_small_effect_stands_the_control(tmp_path):
    names = ("eager", "graph_layer", "control")
    put(tmp_path, 0, names=names, ms={"graph_layer": 9.95, "control": 10.02})
    assert "control 0.998x +- 0.0 %" in tables.note(row_of(tmp_path))
    put(tmp_path / "other", 0, names=names, ms={"graph_layer": 9.0, "control": 10.02})
    assert "control" not in tables.note(row_of(tmp_path / "other"))


def test_memory_alone_and_what_a_graph_adds(tmp_path):
    put(tmp_path, 0, alone={"eager": 4 * 2**30, "graph_layer": 5 * 2**30})
    row = row_of(tmp_path)
    assert tables.CELLS["alone GiB"](row) == "5.0" and "adds 1.0 GiB" in tables.note(row)
    put(tmp_path / "other", 0)
    assert tables.CELLS["alone GiB"](row_of(tmp_path / "other")) == ""


def test_a_row_says_what_belongs_beside_its_rate(tmp_path):
    run = made_run()
    assert "FLOP" not in run_table.report(run)
    run.builds[""].flops_notes, run.builds[""].flops_per_step = ["logits 38 % of FLOP"], 4e12
    write(run, tmp_path / FOLDER)
    assert "logits 38 % of FLOP" in tables.note(row_of(tmp_path))
    assert run_table.report(run).splitlines()[-1].endswith("logits 38 % of FLOP")


def test_uncommitted_source_is_named(tmp_path):
    put(tmp_path, 0, source={"commit": "c", "tree": "t", "clean": False, "hash": "h"})
    assert "uncommitted source" in tables.note(row_of(tmp_path))


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
    found = runs.read(tmp_path)
    assert len(found.runs) == 1 and len(found.faults) == 1 and "have one id" in found.faults[0]


def test_a_variant_that_failed_has_a_row_with_its_reason(tmp_path):
    run = made_run(unsupported=("graph_x",))
    run.builds[""].variants["graph_layer"].capture.graphs = 0
    write(run, tmp_path / FOLDER)
    rows = {row.variant: row for row in runs.read(tmp_path).rows}
    said = {name: (row.status, row.newest.verdict.reason) for name, row in rows.items()}
    assert said["graph_layer"] == ("failed", "0 graphs made, 1 promised")
    assert said["graph_x"] == ("unsupported", "needs a GPU")
    assert rows["graph_layer"].ms is None and rows["graph_layer"].ratio is None
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
    found = runs.read(tmp_path)
    assert len(found.runs) == 1 and found.faults == [f"{tmp_path}/closed: Permission denied"]


def test_machines_with_most_rows_come_first_and_cpus_last(tmp_path):
    many = SimpleNamespace(workload=Workload("NVIDIA H200", 1, "gpt3", "bench", ""))
    two = SimpleNamespace(workload=Workload("NVIDIA H200", 2, "gpt3", "bench", ""))
    cpu = SimpleNamespace(workload=Workload("CPU", 1, "gpt3", "tiny", ""))
    assert list(runs.of_machines([cpu, cpu, cpu, two, many, many])) == ["NVIDIA H200", "NVIDIA H200, 2 GPUs", "CPU"]
    assert H200[0]["name"] == "NVIDIA H200"
