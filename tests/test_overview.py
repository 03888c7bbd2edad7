"""Folders of records, their rows and tables: what is set side by side, what never is, and what is refused."""

import csv
import io
import json
import subprocess
import sys

import pytest

from benchmarks import ROOT, overview, overview_rows, overview_tables
from benchmarks.published import PUBLISHED
from tests.table_records import (
    SPEEDUP,
    STEPS,
    STRATEGY,
    graphed,
    make,
    mean_ratio,
    on_cpu,
    opened,
    packed,
    put,
    schema_1,
)

RESULTS = ROOT / "results"


def rows_of(root):
    blocks, faults, refused = overview_rows.read(root)
    assert not faults and not refused
    return overview_rows.rows_of(blocks)


def text_of(root, **options):
    blocks, faults, _ = overview_rows.read(root)
    return overview_tables.text_of(root, blocks, faults, **options)


def command(*arguments, module="overview"):
    return subprocess.run(
        [sys.executable, "-m", f"benchmarks.{module}", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


# ------------------------------------------------------------------------------------------------
# Blocks


def test_folders_are_found_at_any_depth_and_by_their_records_alone(tmp_path):
    put(tmp_path / "a" / "b" / "c", *graphed())
    put(tmp_path / ".partial", *graphed())
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "overview.json").write_text("{}")
    put(tmp_path / "sweep" / "batch-1", *graphed())
    (tmp_path / "sweep" / "sweep.json").write_text("{}")
    assert [row["folder"] for row in rows_of(tmp_path)] == ["a/b/c"]
    assert "sweep: a sweep, left out" in command(tmp_path).stdout
    assert [row["folder"] for row in rows_of(tmp_path / "sweep")] == ["batch-1"]
    with pytest.raises(FileNotFoundError, match="no folder"):
        overview_rows.read(tmp_path / "nothing")


def test_a_group_is_a_block_and_so_is_a_session_by_itself(tmp_path):
    group = tmp_path / "h200x1" / "fake-bench"
    one = packed(group, graphed())
    two = opened(group, graphed(((9.0, 8.0), (9.0, 8.1))), hour=5)
    (row,) = rows_of(tmp_path)
    assert (row["folder"], row["num_pairs"], row["num_hosts"]) == ("h200x1/fake-bench", 5, 1)
    assert (row["num_sessions"], row["label"]) == (2, "fake/bench")
    for place, pairs in ((one, 5), (two, 2)):
        (row,) = rows_of(place)
        assert (row["folder"], row["num_pairs"], row["label"]) == ("fake-bench", pairs, "fake/bench")


def test_older_sessions_and_what_a_row_lacks_stand_beside_it(tmp_path):
    packed(tmp_path / "fake-bench", schema_1(graphed(env={"git_sha": "c" * 40})), day=20)
    packed(tmp_path / "fake-bench", graphed(env={"git_sha": "b" * 40}))
    packed(tmp_path / "fake-full", schema_1(graphed(preset="full", env={"git_sha": "a" * 40})), day=20, hour=9)
    bench, full = rows_of(tmp_path)
    assert (bench["num_older"], bench["lacks"]) == (1, "")
    assert (full["num_older"], full["lacks"]) == (0, "schema 1, 5/5 windows short")
    text = text_of(tmp_path)
    assert "older: sessions of other code" in text and "schema 1, 5/5 windows short" in text
    assert "fake/bench: fake-bench, x1, 2 sessions, 20 timed runs, git bbbbbbbbbbbb, cccccccccccc" in text


def test_one_row_for_each_variant_that_is_not_eager_with_eager_of_the_same_folder(tmp_path):
    put(tmp_path / "one", *graphed())
    put(tmp_path / "two", *graphed(((20.0, 10.0), (20.2, 10.01)), model="other"))
    first, second = rows_of(tmp_path)
    assert (first["model"], first["variant"], first["base_ms"], first["step_ms"]) == ("fake", "graph", 10.0, 8.0)
    assert (second["model"], second["base_ms"], second["step_ms"]) == ("other", 20.1, pytest.approx(10.005))
    assert second["speedup"] == pytest.approx(mean_ratio([(20.0, 10.0), (20.2, 10.01)]))


def test_folders_of_one_model_are_never_paired_with_each_other(tmp_path):
    """graph of the second folder has no eager of its own round; that of the first would make it 2.5x."""
    put(tmp_path / "one", *graphed())
    lost = make("eager", 0, status="oom", message="asked 9 GiB")
    found = [record for record in graphed(((9.0, 4.0), (9.0, 4.0))) if record["variant"] == "graph"]
    put(tmp_path / "two", *found, lost)
    first, second = rows_of(tmp_path)
    assert first["speedup"] == pytest.approx(SPEEDUP)
    assert second["speedup"] is None and second["base_ms"] is None and second["break_even_steps"] is None
    assert second["verdict"] == "no eager of the same round"
    assert "no eager of the same round" in text_of(tmp_path)


def test_labels_tell_folders_of_one_model_apart(tmp_path):
    for name in ("fake-bench", "fake-bench-overlap", "x/again", "y/again"):
        put(tmp_path / name, *graphed())
    put(tmp_path / "two", *graphed(env={"world_size": 2}))
    labels = [row["label"] for row in rows_of(tmp_path)]
    assert labels == [
        "fake/bench",
        "fake/bench overlap",
        "fake/bench again (x/again)",
        "fake/bench again (y/again)",
        "fake/bench x2",
    ]


# ------------------------------------------------------------------------------------------------
# Quiet and busy


def test_the_folder_under_load_is_a_column_found_by_its_records_not_by_its_name(tmp_path):
    put(tmp_path / "quiet", *graphed())
    put(tmp_path / "any name", *graphed(((12.0, 8.0), (12.2, 8.1)), host_load=4))
    put(tmp_path / "busiest", *graphed(((14.0, 8.0), (14.2, 8.1)), host_load=16))
    (row,) = rows_of(tmp_path)
    assert (row["host_load"], row["contended_host_load"], row["contended_folder"]) == (0, 16, "busiest")
    assert row["contended_speedup"] == pytest.approx((14.0 / 8.0 * 14.2 / 8.1) ** 0.5)
    assert row["speedup"] == pytest.approx(SPEEDUP)
    assert (row["contended_verdict"], row["contended_scope"]) == ("two pairs", "")
    assert (row["step_ms"], row["contended_step_ms"]) == (8.0, pytest.approx(8.05))
    heading, line = text_of(tmp_path, parts=("host",)).splitlines()[-2:]
    assert "step ms, there" in heading and " 8.00 -> 8.05 " in line


@pytest.mark.parametrize(
    "changes",
    [{"preset": "tiny"}, {"env": {"gpu_name": "NVIDIA A100"}}, {"env": {"world_size": 2}}, {"config": {"layers": 2}}],
)
def test_load_on_other_work_or_another_machine_is_a_block_of_its_own(tmp_path, changes):
    put(tmp_path / "quiet", *graphed(config={"layers": 1, "min_steps": 50}))
    changes = {"config": {"layers": 1}} | changes
    put(tmp_path / "loaded", *graphed(host_load=16, **changes))
    rows = rows_of(tmp_path)
    assert [row["contended_host_load"] for row in rows] == [None, None]
    assert sorted(row["host_load"] for row in rows) == [0, 16]
    assert any("load 16" in row["label"] for row in rows)


def test_how_a_run_is_measured_does_not_make_other_work_of_it(tmp_path):
    put(tmp_path / "quiet", *graphed(config={"layers": 1, "min_steps": 50}))
    put(tmp_path / "loaded", *graphed(config={"layers": 1, "min_steps": 80}, host_load=16))
    assert [row["contended_host_load"] for row in rows_of(tmp_path)] == [16]


def test_load_belongs_to_the_row_that_was_configured_alike(tmp_path):
    """Not to the folder's newest session, which has too few pairs for a row."""
    group = tmp_path / "fake-bench"
    packed(group, graphed(config={"layers": 1}))
    opened(group, graphed(((9.0, 8.0),), config={"layers": 1, "new": 2}), hour=5)
    put(tmp_path / "loaded", *graphed(config={"layers": 1}, host_load=16))
    assert [row["contended_host_load"] for row in rows_of(tmp_path)] == [16]


def test_load_belongs_to_the_folder_of_its_source(tmp_path):
    put(tmp_path / "new", *graphed())
    put(tmp_path / "old", *graphed(env={"source_hash": "old"}))
    put(tmp_path / "loaded", *graphed(env={"source_hash": "old"}, host_load=16))
    assert {row["folder"]: row["contended_host_load"] for row in rows_of(tmp_path)} == {"new": None, "old": 16}


# ------------------------------------------------------------------------------------------------
# Figures of a row


def test_break_even_is_setup_over_gain_and_never_without_one(tmp_path):
    put(tmp_path / "faster", *graphed(((10.0, 8.0),) * 4 + ((10.0, 8.001),)))
    (row,) = rows_of(tmp_path)
    assert row["break_even_steps"] == pytest.approx(3500 / 2, rel=1e-3) and not row["break_even_never"]
    put(tmp_path / "faster", *graphed(((8.0, 10.0),) * 4 + ((8.0, 10.001),)))
    (row,) = rows_of(tmp_path)
    assert row["break_even_steps"] is None and row["break_even_never"]
    assert " never " in text_of(tmp_path, parts=("capture",))
    put(tmp_path / "faster", *graphed(((10.0, 8.0), (10.0, 11.0), (10.0, 9.0), (10.0, 9.5), (10.0, 10.5))))
    (row,) = rows_of(tmp_path)
    assert row["verdict"] == "unclear" and row["break_even_steps"] is None and not row["break_even_never"]


def test_compile_time_is_part_of_break_even(tmp_path):
    found = graphed(((10.0, 8.0),) * 4 + ((10.0, 8.001),))
    cold = make("graph", 0, capture={**STRATEGY, "compile_s": 60.0})
    put(tmp_path / "one", *found, cold)
    (row,) = rows_of(tmp_path)
    assert row["compile_cold_s"] == 60.0 and row["break_even_steps"] == pytest.approx(63500 / 2, rel=1e-3)


def test_a_status_other_than_pass_stands_where_the_verdict_would(tmp_path):
    put(tmp_path / "one", *graphed(), make("big", 0, status="oom", message="asked 9 GiB, 2 free"))
    text = text_of(tmp_path, parts=("speed", "notes"))
    (line,) = [line for line in text.splitlines() if line.startswith("fake/bench  big")]
    assert "oom" in line.split()
    assert "fake/bench big: oom: asked 9 GiB, 2 free" in text
    assert "big" not in text_of(tmp_path, parts=("cost",))


# ------------------------------------------------------------------------------------------------
# What is never in one table


def test_gpu_types_and_cpus_have_headings_of_their_own_and_cpus_no_speed_up(tmp_path):
    put(tmp_path / "a", *graphed())
    put(tmp_path / "b", *graphed(env={"gpu_name": "NVIDIA A100"}))
    put(tmp_path / "c", *on_cpu(numerics={"parity": "bitwise"}))
    text = text_of(tmp_path, parts=("speed",))
    parts = text.split("\n\n")
    assert [part.splitlines()[0] for part in parts[::2]] == ["NVIDIA A100", "NVIDIA H200", "CPU: Xeon, 2 cores"]
    assert len([line for line in text.splitlines() if line.startswith("fake/bench")]) == 3
    assert "speed-up" not in parts[-1] and "bitwise" in parts[-1] and "bitwise" not in parts[1]
    assert rows_of(tmp_path)[-1]["speedup"] is None


def test_a_folder_that_mixes_is_refused_by_name_and_the_others_are_shown(tmp_path):
    put(tmp_path / "good", *graphed())
    put(tmp_path / "bad", *graphed(), make("other", 1, device="cpu"))
    put(tmp_path / "worse", *graphed(), make("other", 1, env={"gpu_name": "NVIDIA A100"}))
    answer = command(tmp_path, "--write")
    assert answer.returncode == 1 and "nothing written" in answer.stderr and not list(tmp_path.glob("overview*"))
    answer = command(tmp_path)
    assert answer.returncode == 1 and answer.stdout.count("fake/bench  graph") == 4
    assert "refused: bad: a table cannot mix cpu and cuda records" in answer.stderr
    assert "refused: worse: a table cannot mix GPU types: NVIDIA A100, NVIDIA H200" in answer.stderr


def test_unsound_files_are_named_and_left_out(tmp_path):
    found = graphed(STEPS[:3])
    found[1]["statistic_ms"] *= 1.01
    put(tmp_path / "one", *found)
    other = json.loads((tmp_path / "one" / "eager.r3.json").read_text()) | {"issue_ms": 1.0}
    (tmp_path / "one" / "eager.r3.json").write_text(json.dumps(other))
    (tmp_path / "one" / "graph.r3.json").write_text('{"schema": 1, "mod')
    text = text_of(tmp_path)
    assert "left out: one/eager.r3.json: its digest is not that of its content: edited by hand?" in text
    assert "left out: one/graph.r1.json: statistic_ms 8.08 does not follow" in text
    assert "left out: one/graph.r3.json: not a whole JSON document" in text
    (row,) = overview_rows.rows_of(overview_rows.read(tmp_path)[0])
    assert row["num_pairs"] == 1
    for form in ((), ("--csv",), ("--json",)):
        answer = command(tmp_path, *form)
        assert answer.returncode == 1 and answer.stderr.count("left out: one/") == 3 and "graph" in answer.stdout


def test_a_folder_without_eager_is_refused_by_name_and_the_others_are_shown(tmp_path):
    put(tmp_path / "good", *graphed())
    put(tmp_path / "bad", *(record for record in graphed(model="other") if record["variant"] == "graph"))
    answer = command(tmp_path)
    assert answer.returncode == 1 and "fake/bench  graph" in answer.stdout and "other/bench" not in answer.stdout
    assert "refused: bad: timed records, but none of 'eager'" in answer.stderr
    assert command(tmp_path, "--write").returncode == 1 and not list(tmp_path.glob("overview*"))
    answer = command(tmp_path / "bad", "--json")
    assert answer.returncode == 1 and not answer.stdout and "refused: bad" in answer.stderr


# ------------------------------------------------------------------------------------------------
# NVIDIA's table


def test_strategies_have_a_row_for_each_submission_measured_or_not(tmp_path):
    put(tmp_path / "tiny", *graphed(model="gpt3", preset="tiny"))
    put(tmp_path / "bench", *graphed(((10.0, 9.0), (10.0, 9.1), (10.0, 9.2)), model="gpt3"))
    loaded = ((20.0, 9.0), (20.0, 9.1), (20.0, 9.2))
    put(tmp_path / "load", *graphed(loaded, model="gpt3", preset="full", host_load=16))
    rows = overview_rows.strategies(rows_of(tmp_path))
    assert [row["published"].model for row in rows] == ["gpt3"] + [published.model for published in PUBLISHED]
    here = rows[1]["here"]
    assert (here["preset"], here["folder"]) == ("bench", "bench") and not rows[1]["is_nvidias"]
    assert [row["here"] for row in rows if row["is_nvidias"]] == [None] * 5
    text = text_of(tmp_path, parts=("measured", "sources"))
    assert text.count("not measured yet") == 5
    nvidias, ours = [line for line in text.splitlines() if line.startswith("GPT-3 175B")]
    assert "NVIDIA's" in nvidias and "not measured yet" in nvidias and "1.022x to 1.030x" in nvidias
    assert "our best" in ours and "bench graph" in ours and "1.069 to 1.129" in ours and "1.022x" not in ours
    for published in PUBLISHED:
        assert published.source in text


def test_nvidias_mechanism_has_its_own_row_and_ours_is_the_best_of_the_rest(tmp_path):
    def more(variant, *steps):
        found = [record for record in graphed(steps, model="gpt3") if record["variant"] == "graph"]
        return [record | {"variant": variant} for record in found]

    def five(ms):
        return [(1.0, ms), (1.0, 1.01 * ms), (1.0, ms), (1.0, ms), (1.0, ms)]

    put(tmp_path / "one", *graphed(model="gpt3"), *more("graph_te", *five(11.0)))
    put(tmp_path / "two", *graphed(model="gpt3"), *more("graph_overlap", *five(7.0)))
    put(tmp_path / "two", *more("graph_te", (1.0, 9.0)), *more("reduce_overhead", *five(5.0)))
    # A higher ratio with an interval that says nothing.
    put(tmp_path / "three", *graphed(model="gpt3"), *more("wild", (1.0, 3.0), (1.0, 12.0), (1.0, 3.0)))
    nvidias, ours, *rest = overview_rows.strategies(rows_of(tmp_path))
    assert nvidias["is_nvidias"] and nvidias["here"]["variant"] == "graph_te" and nvidias["here"]["folder"] == "one"
    assert nvidias["here"]["verdict"] == "slower"
    assert not ours["is_nvidias"] and ours["here"]["variant"] == "graph_overlap"
    assert [row["published"] for row in rest] == [*PUBLISHED[1:]]


def test_our_best_on_two_hosts_stands_beside_nvidias_on_one(tmp_path):
    def renamed(found):
        return [record | {"variant": "lightning_graph"} for record in found if record["variant"] == "graph"]

    def of(preset, ratio):
        return graphed([(ratio, 1.0), (ratio, 1.01), (ratio, 1.0)], model="stable_diffusion", preset=preset)

    first = of("bench", 1.5)
    packed(tmp_path / "bench", [*first, *renamed(first)], boot="11aaaa", gpu="0001")
    packed(tmp_path / "bench", of("bench", 1.6), boot="22bbbb", gpu="0002", hour=4)
    # One host gives an interval, two give none.
    packed(tmp_path / "full", of("full", 1.1), boot="11aaaa", gpu="0001", hour=5)
    rows = rows_of(tmp_path)
    assert {(row["folder"], row["num_hosts"], row["speedup_low"] is None) for row in rows} >= {
        ("bench", 2, True),
        ("full", 1, False),
    }
    nvidias, ours = [row["here"] for row in overview_rows.strategies(rows) if row["here"]]
    assert (nvidias["variant"], ours["variant"], ours["folder"]) == ("lightning_graph", "graph", "bench")


def test_labels_have_what_a_folders_name_adds_once(tmp_path):
    for name in ("one/fake-bench-shared", "two/fake-bench-shared", "fake-bench"):
        put(tmp_path / name, *graphed())
    labels = sorted({row["label"] for row in rows_of(tmp_path)})
    assert labels == [
        "fake/bench",
        "fake/bench shared (one/fake-bench-shared)",
        "fake/bench shared (two/fake-bench-shared)",
    ]


def test_a_label_has_the_values_of_flags_without_their_names(tmp_path):
    config = {"layer": "torch", "precision": "bf16", "overlap": True}
    put(tmp_path / "fake-bench-layer-torch-precision-bf16", *graphed(config=config))
    put(tmp_path / "fake-bench-layer-torch-overlap", *graphed(config=config | {"precision": "fp8"}))
    put(tmp_path / "fake-bench-overlap-layer-te", *graphed(config=config | {"layer": "te"}))
    labels = sorted(row["label"] for row in rows_of(tmp_path))
    assert labels == ["fake/bench overlap-te", "fake/bench torch-bf16", "fake/bench torch-overlap"]


def test_the_label_of_fewer_layers_than_asked_for_has_no_preset_twice(tmp_path):
    """A GPU that holds 6 layers names its preset bench-l6, in the folder of what was asked for."""
    put(tmp_path / "fake-bench", *graphed(preset="bench-l6"))
    put(tmp_path / "fake-bench-memory-gib-9", *graphed(preset="bench-l6", config={"memory_gib": 9}))
    assert [row["label"] for row in rows_of(tmp_path)] == ["fake/bench-l6", "fake/bench-l6 memory-gib-9"]


def test_published_gains_stand_beside_presets_of_the_same_model(tmp_path):
    for preset in ("bench", "full"):
        put(tmp_path / preset, *graphed(model="llama31", preset=preset))
    assert [row["published_gain_range"] for row in rows_of(tmp_path)] == ["FP4 1.15x to 1.79x", None]


def test_our_best_is_of_the_preset_at_which_nvidias_mechanism_was_measured(tmp_path):
    lightning = [record for record in graphed(model="stable_diffusion") if record["variant"] == "graph"]
    put(tmp_path / "bench", *graphed(model="stable_diffusion"))
    put(tmp_path / "bench", *(record | {"variant": "lightning_graph"} for record in lightning))
    put(tmp_path / "full", *graphed(model="stable_diffusion", preset="full"))

    def ours():
        rows = overview_rows.strategies(rows_of(tmp_path))
        return [
            row["here"]["preset"]
            for row in rows
            if row["published"].model == "stable_diffusion" and not row["is_nvidias"]
        ]

    assert ours() == ["bench"]
    for path in (tmp_path / "bench").glob("graph.*"):
        path.unlink()
    assert ours() == ["full"]


def test_a_mechanism_is_shown_where_it_has_an_interval(tmp_path):
    put(tmp_path / "full", *graphed(((10.0, 5.0),), model="rnnt", preset="full"))

    def presets():
        return [row["here"]["preset"] for row in overview_rows.strategies(rows_of(tmp_path)) if row["here"]]

    assert presets() == ["full"]
    put(tmp_path / "bench", *graphed(model="rnnt"))
    assert presets() == ["bench"]


def test_a_model_whose_own_capture_is_nvidias_has_one_row(tmp_path):
    put(tmp_path / "one", *graphed(model="rnnt"))
    rows = [row for row in overview_rows.strategies(rows_of(tmp_path)) if row["published"].model == "rnnt"]
    assert [(row["is_nvidias"], row["here"]["variant"]) for row in rows] == [(True, "graph")]


def test_strategies_of_a_cpu_show_no_speed_up(tmp_path):
    put(tmp_path / "tiny", *on_cpu(model="rnnt", preset="tiny"))
    text = text_of(tmp_path, parts=("measured",))
    assert "tiny graph" in text and "speed-up" not in text


def test_published_figures_stand_beside_graphs_alone(tmp_path):
    put(tmp_path / "one", *graphed(model="gpt3"), make("compile", 0, model="gpt3", status="unsupported"))
    lines = [line for line in text_of(tmp_path, parts=("capture",)).splitlines() if line.startswith("gpt3/bench")]
    assert ["1.022x to 1.030x" in line for line in lines] == [False, True]


# ------------------------------------------------------------------------------------------------
# Forms


def test_json_and_csv_hold_what_the_tables_show_with_full_precision(tmp_path):
    put(tmp_path / "one", *graphed(model="gpt3"))
    document = json.loads(command(tmp_path, "--json").stdout)
    assert document["schema"] == overview.SCHEMA and len(document["published"]) == 5
    (row,) = document["rows"]
    assert row["speedup"] == pytest.approx(SPEEDUP, rel=1e-12)
    assert (row["verdict"], row["scope"], row["num_hosts"]) == ("faster", "on this host", 1)
    assert row["published_source"].startswith("https://")
    (folder,) = document["folders"]
    assert (folder["folder"], folder["num_records"], folder["gpu_uuids"]) == ("one", 10, ["GPU-0"])
    assert folder["sessions"] == ["loose-boot-0"] and folder["git_shas"] == []
    (line,) = csv.DictReader(io.StringIO(command(tmp_path, "--csv").stdout))
    assert set(line) == set(row) and float(line["speedup"]) == row["speedup"] and line["contended_speedup"] == ""


def test_written_files_are_stable_ascii_and_without_this_machines_paths(tmp_path):
    put(tmp_path / "one", *graphed(model="gpt3"))
    assert command(tmp_path, "--write").returncode == 0
    names = ("overview.md", "overview.csv", "overview.json")
    first = [(tmp_path / name).read_text() for name in names]
    assert command(tmp_path, "--write").returncode == 0
    assert first == [(tmp_path / name).read_text() for name in names]
    for text in first:
        assert text.isascii() and str(tmp_path) not in text and text.endswith("\n") and not text.endswith("\n\n")
    assert "| [gpt3/bench](one) | graph |" in first[0]


def test_markdown_tables_have_one_number_of_cells(tmp_path):
    put(tmp_path / "one", *graphed(capture={"strategy": "a | b"}))
    for block in text_of(tmp_path, markdown=True, parts=overview_tables.PARTS).split("\n\n"):
        lines = [line.replace("\\|", "") for line in block.splitlines() if line.startswith("|")]
        assert len({line.count("|") for line in lines}) <= 1


def test_console_text_fits_a_wide_screen():
    blocks, faults, _ = overview_rows.read(RESULTS)
    text = overview_tables.text_of(RESULTS, blocks, faults, parts=("speed", "host", "capture", "cost", "measured"))
    assert blocks and max(map(len, text.splitlines())) <= 250 and text.isascii()


def test_wrong_folders_are_one_line(tmp_path):
    answer = command(tmp_path / "nothing")
    assert answer.returncode == 2 and "no folder" in answer.stderr and answer.stderr.count("\n") == 1
    answer = command(tmp_path)
    assert answer.returncode == 1 and "no records in or below" in answer.stderr and answer.stderr.count("\n") == 1
    put(tmp_path / "eager-only", make("eager", 1), make("eager", 2))
    answer = command(tmp_path)
    assert answer.returncode == 0 and "the base alone, nothing to compare" in answer.stdout
    for form in ("--json", "--csv", "--markdown"):
        assert command(tmp_path, form).returncode == 0


def test_compare_of_folders_of_records_is_the_overview(tmp_path):
    for name in ("one", "two"):
        put(tmp_path / name, *graphed())
    assert command(tmp_path, module="compare").stdout == command(tmp_path).stdout
    assert "p95/p50" in command(tmp_path / "one", module="compare").stdout.splitlines()[2]
    (tmp_path / "empty").mkdir()
    answer = command(tmp_path / "empty", module="compare")
    assert answer.returncode == 1 and "no records" in answer.stderr


def test_files_of_the_overview_and_of_a_sweep_hide_no_folder(tmp_path):
    for name in ("one", "two"):
        put(tmp_path / name, *graphed())
    for name in ("overview.json", "sweep.json"):
        (tmp_path / name).write_text("{}")
    answer = command(tmp_path, module="compare")
    assert answer.returncode == 0 and "fake/bench two  graph" in answer.stdout and not answer.stderr
    assert len(json.loads(command(tmp_path, "--json", module="compare").stdout)["rows"]) == 2
    assert len(command(tmp_path, "--csv", module="compare").stdout.splitlines()) == 3


@pytest.mark.parametrize("module", ["compare", "overview"])
def test_a_root_of_sweeps_alone_says_so(tmp_path, module):
    put(tmp_path / "sweep" / "batch-1", *graphed())
    (tmp_path / "sweep" / "sweep.json").write_text("{}")
    answer = command(tmp_path, module=module)
    assert answer.returncode == 1 and not answer.stdout and answer.stderr.count("\n") == 1
    assert "sweeps alone" in answer.stderr and str(tmp_path / "sweep") in answer.stderr
    assert command(tmp_path / "sweep", module=module).returncode == 0


def test_the_command_needs_no_torch(tmp_path):
    packed(tmp_path / "one", graphed())
    code = (
        "import sys; from benchmarks import overview\n"
        f"assert overview.main([{str(tmp_path)!r}]) == 0\n"
        "assert 'torch' not in sys.modules and 'matplotlib' not in sys.modules\n"
    )
    answer = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr


def test_schema_of_the_document_is_its_own():
    assert overview.document([], [])["schema"] == overview.SCHEMA
