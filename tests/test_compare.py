"""Tables of groups and sessions: rows as text, notes, refusals and files, from records made by hand."""

import csv
import json
import subprocess
import sys

import pytest

from benchmarks import ROOT, compare, frame, sessions, tables
from benchmarks.rows import missing_base
from common import source
from tests.table_records import SPEEDUP, STEPS, make, mean_ratio, opened, packed, put, schema_1, session


def row_of(found, variant="graph", base=None):
    return next(row for row in compare.summarise(found, base) if row["variant"] == variant)


def test_beside_an_eager_that_synchronises_stand_two_ratios():
    found = [*session(), *(make("eager_sync", number, 12.0) for number in range(1, 6))]
    row, eager = row_of(found), row_of(found, "eager")
    assert row["sync_speedup"] == pytest.approx(mean_ratio([(12.0, graph) for _, graph in STEPS]))
    assert eager["sync_speedup"] == pytest.approx(mean_ratio([(12.0, own) for own, _ in STEPS]))
    assert row["speedup"] == row_of(session())["speedup"]
    assert row_of(found, "eager_sync")["sync_speedup"] is None
    assert "over eager_sync" in tables.folder_text(compare.summarise(found))
    assert "over eager_sync" not in tables.folder_text(compare.summarise(session()))


def test_an_unsettled_size_is_noted():
    def notes(*graph):
        found = session([(10.0, ms) for ms in graph])
        table = compare.summarise(found)
        return table[1]["verdict"], [note for note in compare.notes(found, table, []) if "is not settled" in note]

    assert notes(9.98, 9.90, 9.94, 10.05, 9.92) == ("unclear", [])
    verdict, lines = notes(9.95, 9.89, 9.93, 9.83, 9.89)
    assert verdict == "faster" and lines == [
        "graph: faster, but how much is not settled: see its interval and range"
    ], compare.summarise(session([(10.0, ms) for ms in (9.95, 9.89, 9.93, 9.83, 9.89)]))[1]
    assert notes(9.01, 9.0, 9.02, 9.0, 9.01) == ("faster", [])


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"device": "cpu"}, "cpu and cuda"),
        ({"env": {"gpu_name": "NVIDIA A100"}}, "GPU types"),
        ({"model": "other"}, "models"),
        ({"host_load": 16}, "host loads"),
    ],
)
def test_mixtures_are_refused(changes, what):
    with pytest.raises(compare.Mixed, match=what):
        compare.summarise([*session(), make("other", 1, **changes)])


def test_a_run_that_came_to_nothing_mixes_with_all():
    lost = make("other", 0, status="oom", message="asked 9 GiB", preset="bench-l6", host_load=16)
    assert row_of([*session(), lost], "other")["status"] == "oom"


def test_cpu_tables_have_no_speed_up():
    found = session(device="cpu", env={"gpu_name": None, "gpu_uuid": None}, numerics={"parity": "bitwise"})
    rows = compare.summarise(found)
    assert rows[1]["speedup"] is None and rows[1]["verdict"] is None
    for text in (tables.folder_text(rows), tables.folder_text(rows, markdown=True), tables.headline(rows)):
        assert "speed-up" not in text and "faster" not in text and "x" not in text.replace("x to", "")
    assert "parity" in tables.folder_text(rows) and "bitwise" in tables.folder_text(rows)


def test_the_ceiling_stands_first_and_needs_the_same_clock():
    text, _ = compare.report(session(), [])
    assert text.startswith("eager: step 10.0 ms, busy 8.0 ms -> at most 1.25x to gain")
    found = session(extra={"profiled_clock_ratio": 1.02})
    assert row_of(found, "eager")["ceiling"] is None
    assert "no ceiling" in tables.headline(compare.summarise(found))
    assert row_of(session(extra={"profiled_clock_ratio": 0.995}), "eager")["ceiling"] == pytest.approx(1.25)
    # Of another variant: the base's step over the busy time of that variant's own kernels.
    found = session()
    for record in found[1::2]:
        record.update(busy_ms=5.0)
    row = row_of(found)
    assert row["ceiling"] == pytest.approx(10.0 / 5.0) and row_of(found, "eager")["ceiling"] == pytest.approx(1.25)
    head = tables.headline(compare.summarise(found))
    assert head.endswith("at most 1.25x to gain with these kernels, 2.00x with those of graph")
    for record in found[1::2]:
        record["extra"].update(profiled_clock_ratio=1.02)
    assert row_of(found)["ceiling"] is None
    cost = tables.folder_text(compare.summarise(session())).split("\n\n")[1].splitlines()
    assert "busy ms  ceiling" in cost[0] and cost[2].split()[:3] == ["graph", "8.00", "1.25x"]


@pytest.mark.parametrize("step_ms, ceiling", [(10.1, 1.25), (16.0, None)])
def test_the_ceiling_is_not_that_of_unusual_runs(step_ms, ceiling):
    """Where all runs but one were profiled at another clock, that one may be slow for a reason of its own."""
    found = session([(step_ms, 8.0), *[(10.0, 8.0)] * 4])
    for record in found[2:]:
        record["extra"]["profiled_clock_ratio"] = 1.1
    assert row_of(found, "eager")["ceiling"] == (ceiling and pytest.approx(ceiling))


def test_a_ceiling_of_some_runs_says_of_how_many():
    found = session()
    for record in found[4:]:
        record["extra"]["profiled_clock_ratio"] = 1.1
    _, cost = (part.splitlines() for part in tables.folder_text(compare.summarise(found)).split("\n\n")[:2])
    assert "busy ms  at another clock      ceiling" in cost[0]
    assert all("3/5  1.25x (2/5)" in line for line in cost[1:3])
    whole = tables.folder_text(compare.summarise(session()))
    assert "at another clock" not in whole and "1.25x (" not in whole


def test_the_ceiling_of_kernels_is_that_of_the_same_sessions():
    """A variant that ran in an older session alone, of other code, had another base there."""
    old = [make(name, 1, 20.0) for name in ("eager", "other")]
    for record in old:
        record.update(busy_ms=4.0, begin_utc="2026-01-01T00:00:00Z")
        record["env"].update(run_hash="older", boot_id="older", source_hash="older")
    assert "5.00x" in tables.headline(compare.summarise(old))
    head = tables.headline(compare.summarise([*old, *session(begin_utc="2026-02-01T00:00:00Z")]))
    assert head.startswith("eager: step 10.0 ms") and head.endswith("at most 1.25x to gain")


def test_rows_without_pass_keep_their_status_and_message():
    found = session()
    found.append(make("compile", 0, status="unsupported", message="needs\na compiler"))
    rows = compare.summarise(found)
    table = tables.folder_text(rows)
    assert "compile: unsupported: needs a compiler" in table
    assert row_of(found, "compile")["num_rounds"] == 0
    assert "| compile | 0 |" in tables.folder_text(rows, markdown=True)


def test_replays_parity_compile_and_memory_columns():
    found = session(capture={"num_replays": 40, "expected_replays": 40, "num_graphs": 2, "compile_s": 3.0})
    found.append(make("graph", 0, capture={"compile_s": 30.0}, numerics={"parity": "bitwise"}))
    found[1]["memory"].update(peak_reserved_bytes=3 * 2**30, graph_pool_bytes=2**29)
    found[1].update(energy_j=100.0)
    row = row_of(found)
    assert (row["replays"], row["parity"], row["compile_cold_s"], row["compile_warm_s"]) == ("ok", "bitwise", 30.0, 3.0)
    assert (row["peak_reserved_gib"], row["pool_gib"], row["energy_j"]) == (3.0, 0.5, 5.0)
    found[-1]["numerics"].update(
        parity="differs", max_rel_diff=1e-5, first_difference={"step": 3, "tensor": "layers.0.weight"}
    )
    assert row_of(found)["parity"] == "differs"
    found[-1]["extra"]["loss_rel_diff"] = 2e-6
    rows = compare.summarise(found)
    assert row_of(found)["parity"] == "loss 2.0e-06"
    assert "graph: differs first at step 3 in layers.0.weight" in compare.notes(found, rows, [])


def test_several_kinds_of_batch():
    times, batch = [1.0, 10.0] * 10, ["short", "long"] * 10
    record = make(steps={"gpu_ms": times, "batch": batch, "wall_ms": sum(times)}, statistic_ms=5.5, busy_ms=4.0)
    assert row_of([record], "eager")["tail"] == 1.0


def test_what_is_left_out_is_named_below_the_table(tmp_path):
    found = session()
    found[1]["statistic_ms"] *= 0.998
    put(tmp_path, *found)
    (tmp_path / "half.r1.json").write_text('{"schema": 1, "mod')
    runs = frame.read(tmp_path)
    kept, faults = runs.frame, runs.faults
    assert len(kept) == 9 and len(faults) == 2
    text, _ = compare.report(kept, faults)
    assert "left out: graph.r1.json: statistic_ms 7.984 does not follow from its steps" in text
    assert "left out: half.r1.json: not a whole JSON document" in text and "2 records are left out" in text
    with pytest.raises(FileNotFoundError):
        frame.read(tmp_path / "nothing")


def test_summary_files(tmp_path):
    packed(tmp_path, [*session(), make("graph", 0), make("compile", 0, status="oom", message="a, b")])
    packed(tmp_path, session(), hour=5)
    rows = compare.write_summary(tmp_path)
    assert [row["variant"] for row in rows] == ["eager", "compile", "graph"]
    with open(tmp_path / "summary.csv") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 22
    line = next(line for line in lines if line["variant"] == "graph" and line["round"] == "2")
    assert float(line["statistic_ms"]) == 8.1 and line["status"] == "pass" and line["attempt"] == "1"
    assert (line["session"], line["begin"]) == ("20261122T030000Z-13f405-c77b", "2026-11-22T03:00:00Z")
    assert (line["boot_id"], line["gpu_uuid"], line["run_hash"]) == ("13f405", "GPU-c77b", "run")
    table = (tmp_path / "table.md").read_text()
    assert table.startswith("eager: step") and "| graph |" in table
    assert str(tmp_path) not in table and table.isascii()
    assert compare.write_summary(tmp_path) == rows and (tmp_path / "table.md").read_text() == table
    (tmp_path / "empty").mkdir()
    assert compare.write_summary(tmp_path / "empty") == [] and not list((tmp_path / "empty").iterdir())


# ------------------------------------------------------------------------------------------------
# Notes


def notes_of(root):
    """Notes below the table of a folder."""
    runs = frame.read(root)
    table = compare.summarise(runs.frame)
    return compare.notes(runs.frame, table, runs.faults, runs.metas, runs.doubts)


def test_notes_name_machine_base_and_a_line_for_each_session(tmp_path):
    host = {"host": {"steal_fraction": 0.02, "busy_fraction": 0.5, "load_1m_end": 3.0}}
    found = session(host_load=16, extra=host, env={"torch": "2.11.0", "driver": "580", "nccl": "2.29"})
    for record in found:
        record["conditions"]["window_s"] = record["steps"]["wall_ms"] / 1e3
    probes = [
        {"at": "begin", "us_per_operator": 3.21, "us_per_launch": 2.0},
        {"at": "end", "us_per_operator": 3.42, "us_per_launch": 2.0},
    ]
    packed(tmp_path, found, probes=probes, closed="the source has changed since")
    lines = notes_of(tmp_path)
    assert lines[0] == "NVIDIA H200 x1, fake preset bench, torch 2.11.0, driver 580"
    assert lines[1] == "base: eager"
    assert lines[2] == (
        "20261122T030000Z-13f405-c77b: 5 rounds x 20 steps, windows of 0.2 s, 16 busy processes beside each, "
        "steal up to 2.0 %, host busy 50 %, load 3.0, 3.2 then 3.4 us to issue an operator, 2.0 us for a bare launch, "
        "closed: the source has changed since"
    )


def test_notes_name_what_else_was_on_the_gpu_and_the_host(tmp_path):
    found = session()
    found[0]["conditions"]["others_on_gpu"] = ["python 4711, 3 GiB"]
    found[3]["conditions"]["other_sessions"] = ["20261122T040000Z-13f405-8b89 (process 12)"]
    packed(tmp_path, found)
    (line,) = [line for line in notes_of(tmp_path) if "beside" in line]
    assert line.endswith("beside 20261122T040000Z-13f405-8b89 (process 12); python 4711, 3 GiB")


def test_a_session_that_ended_before_a_parity_run_is_noted(tmp_path):
    first = [make("eager", 0), make("graph", 0)]
    packed(tmp_path / "whole", [*first, *session(), make("control", 1)])
    assert not any("parity run" in line for line in notes_of(tmp_path / "whole"))
    packed(tmp_path / "part", [*first[:1], *session()])
    (line,) = [line for line in notes_of(tmp_path / "part") if "parity run" in line]
    assert line.endswith("ended before the parity run of graph")


def test_notes_of_schema_1_and_of_sessions_beside(tmp_path):
    packed(tmp_path, schema_1(session()), day=20, superseded="all were removed", closed="packed later")
    packed(tmp_path, session())
    text = "\n".join(notes_of(tmp_path))
    assert "20261120T030000Z-13f405-c77b: schema 1: no times, no probe, 5 rounds x 20 steps" in text
    assert "; all were removed" in text and "closed" not in text
    why = "of other code, configuration, versions or schema, or with fewer eagers: not pooled"
    assert f"eager, graph: 1 other session beside, {why}" in text


def test_copies_and_failed_tries_are_noted(tmp_path):
    found = session()
    folder = opened(tmp_path, [*found, found[1] | {"round": 9}])
    records_of = make("graph", 2, 8.0, status="failed", message="killed", extra={"superseded": True})
    (folder / "graph.r2.t1.json").write_text(json.dumps(records_of))
    text = "\n".join(notes_of(tmp_path))
    assert "graph round 9 of 20261122T030000Z-13f405-c77b has the steps of graph round 1" in text
    assert "graph r2 of 20261122T030000Z-13f405-c77b failed at first: killed" in text


def test_all_commits_are_printed_and_one_whose_source_is_another_is_noted(tmp_path, monkeypatch):
    hashes = {"good": "abc", "bad": "def"}
    monkeypatch.setattr(source, "source_hash_of_commit", hashes.get)
    monkeypatch.setattr(source, "source_hash_1_of_commit", lambda model, sha: {"old": "abc"}.get(sha))

    def lines(*found, **env):
        compare.hash_of_commit.cache_clear()
        found = found or session(env=env)
        return [note for note in compare.notes(found, compare.summarise(found), []) if "source" in note]

    assert lines(git_sha="good") == ["git good, source abc"]
    assert lines(git_sha="unknown") == ["git unknown, source abc, a commit that is not in this history"]
    assert lines() == ["no commit, source abc"]
    assert "do not belong" in lines(git_sha="bad")[0]
    assert (
        "uncommitted" in lines(git_sha="bad", git_dirty=True)[0]
        and "bad (changed)" in lines(git_sha="bad", git_dirty=True)[0]
    )
    assert lines(*schema_1(session(env={"git_sha": "old"}))) == ["git old, source abc"]
    packed(tmp_path, session(env={"git_sha": "good"}))
    packed(tmp_path, session(env={"git_sha": "later", "source_hash": "xyz"}), hour=5)
    compare.hash_of_commit.cache_clear()
    assert [line for line in notes_of(tmp_path) if line.startswith("git ")] == [
        "git good, source abc",
        "git later, source xyz, a commit that is not in this history",
    ]
    compare.hash_of_commit.cache_clear()


def test_runs_that_had_not_settled_are_named():
    found = session()
    found[0]["conditions"]["settled"] = False
    found.append(make("graph", 3, 8.0, attempt=2, conditions={"settled": False}))
    (line,) = [line for line in compare.notes(found, compare.summarise(found), []) if "had not settled" in line]
    assert line.endswith("when the window began: eager r1, graph r3 attempt 2")


# ------------------------------------------------------------------------------------------------
# Tables


def test_what_a_model_reports_is_a_table_of_its_own():
    found = session()
    rates = (1000.0, 5.0, 3000.0, 7.0, 1500.0, 6.123, 1000.0, 6.2, 2000.0, 6.1)
    for record, rate in zip(found, rates, strict=True):
        record["extra"]["report"] = {"heard/s": rate, "labels equal": rate != 7.0}
    found[1]["extra"]["report"]["padding %"] = 12.345
    found.append(make("compile", 1))
    rows = compare.summarise(found)
    _, _, own = tables.folder_text(rows).split("\n\n")
    assert [line.split() for line in own.splitlines()[1:]] == [
        ["eager", "1,500", "yes", "-"],
        ["compile", "-", "-", "-"],
        ["graph", "6.12", "no", "12.3"],
    ]
    assert own.split("\n")[0].split("  ")[-3:] == ["heard/s", "labels equal", "padding %"]
    assert "| variant | heard/s | labels equal | padding % |" in tables.folder_text(rows, markdown=True)
    # Records without it print as before.
    assert tables.folder_text(compare.summarise(session())).count("\n\n") == 1
    cpu = [make(device="cpu", extra={"report": {"heard/s": 2.5}})]
    assert tables.folder_text(compare.summarise(cpu)).splitlines()[-1].split() == ["eager", "2.50"]


def test_tables_are_aligned_and_ascii():
    table = tables.folder_text(compare.summarise(session())).split("\n\n")[0].splitlines()
    end = table[0].index("step ms") + len("step ms")
    assert all(line[end - 1].isdigit() and line[end] == " " for line in table[1:])
    assert "\n".join(table).isascii()


def command(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.compare", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_group_a_session_and_a_folder_of_records_are_one_command(tmp_path, capsys):
    group = tmp_path / "h200x1" / "fake-bench"
    one, two = packed(group, session()), opened(group, session(((9.0, 8.0), (9.1, 8.1))), hour=5)

    def shown(path, *flags):
        code = compare.main([str(path), *flags])
        return code, capsys.readouterr().out

    code, text = shown(one)
    assert code == 0 and f"{SPEEDUP:.3f}x" in text and one.name in text and two.name not in text
    code, text = shown(two)
    assert code == 0 and "two pairs" in text and "1.124x" in text
    code, text = shown(group)
    assert code == 0 and "1, 5" in text and one.name in text and two.name.removesuffix(".open") in text
    # A root of one group is that group.
    assert shown(tmp_path)[1] == text
    put(tmp_path / "other", *session())
    code, text = shown(tmp_path)
    assert code == 0 and text.startswith("NVIDIA H200\n-----------") and "NVIDIA's submissions" in text
    assert shown(one, "--markdown", "--base", "graph")[1].count("| eager |") == 2
    assert len(json.loads(shown(one, "--json")[1])["rows"]) == 1
    assert len(shown(group, "--csv")[1].splitlines()) == 2


def test_a_mistake_is_one_line(tmp_path, capsys):
    def mistake(*arguments):
        with pytest.raises(SystemExit) as stop:
            compare.main([*map(str, arguments)])
        out, err = capsys.readouterr()
        assert stop.value.code == 2 and not out and err.count("\n") == 1
        return err

    packed(tmp_path / "one", session())
    assert "no records of 'grpah', --base takes one of eager, graph" in mistake(tmp_path / "one", "--base", "grpah")
    assert "no folder" in mistake(tmp_path / "nothing")
    put(tmp_path / "two", *session())
    assert "--base graph is for the table of one group of sessions" in mistake(tmp_path, "--base", "graph")
    put(tmp_path / "two", make("other", 1, env={"gpu_name": "NVIDIA A100"}))
    assert "a table cannot mix GPU types" in mistake(tmp_path / "two")
    (tmp_path / "empty").mkdir()
    assert compare.main([str(tmp_path / "empty")]) == 1
    assert capsys.readouterr().err.endswith(f"no records in {tmp_path / 'empty'}\n")


def test_the_command_as_a_process(tmp_path):
    packed(tmp_path, session())
    answer = command(str(tmp_path))
    assert answer.returncode == 0 and not answer.stderr and f"{SPEEDUP:.3f}x" in answer.stdout


def test_idle_is_one_formula_and_a_long_profile_widens_the_ceiling():
    found = session()
    for record in found:
        record.update(busy_ms=8.0)
    graph = [record for record in found if record["variant"] == "graph"]
    for record in graph:
        record["capture"].update(num_replays=4, expected_replays=4, num_graphs=1)
        record["extra"]["profile"] = {"span_ms": 1.1 * record["statistic_ms"]}
        record["idle_fraction"] = 0.07
    row = row_of(found)
    assert row["idle_fraction"] == pytest.approx(max(0.0, 1 - 8.0 / row["step_ms"]))
    assert row["profiled_idle_fraction"] == pytest.approx(0.07)
    assert row_of(found, "eager")["profiled_idle_fraction"] is None
    head = tables.headline(compare.summarise(found))
    assert "at most 1.25x to gain, 1.38x if busy reads 10.0 % long" in head


# ------------------------------------------------------------------------------------------------
# Rows without a base, and records of wrong types


@pytest.mark.parametrize("lost", [lambda found: found[1::2], lambda found: [found[0], found[3]]])
def test_without_eager_of_the_same_round_there_is_no_ratio(lost):
    """No eager at all, and eager of another round."""
    found = lost(session())
    row = row_of(found)
    assert (row["speedup"], row["quiet_speedup"], row["model_speedup"], row["num_pairs"]) == (None, None, None, 0)
    assert row["verdict"] == "no eager of the same round"
    assert "no eager of the same round" in tables.folder_text(compare.summarise(found))


def test_a_variant_without_timed_rounds_misses_no_base():
    assert row_of([*session(), make("graph_te", 0)], "graph_te")["verdict"] is None


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"issue_ms": "fast"}, "issue_ms is 'fast', not a number"),
        ({"memory": {"graph_pool_bytes": [1]}}, "memory.graph_pool_bytes is [1], not a number"),
        ({"env": {"world_size": "2"}}, "env.world_size is '2', not a number"),
        ({"env": {"world_size": 0}}, "env.world_size is 0, less than 1"),
        ({"env": {"gpu_uuid": 5}}, "env.gpu_uuid is 5, not text"),
        ({"model": None}, "model is None, not text"),
        ({"steps": {"gpu_ms": "fast"}}, "steps.gpu_ms is 'fast', not a list"),
        ({"steps": {"batch": [[1]] * 20}}, "steps.batch holds [1]"),
        ({"capture": {"nodes": None}}, "capture.nodes is None, not an object"),
        ({"host_load": None}, "host_load is None, not a number"),
        ({"optimizer_ms": 10**400}, "optimizer_ms is 1"),
        ({"extra": {"profile": "x"}}, "extra.profile is 'x', not an object"),
        ({"extra": {"profile": {"span_ms": "x"}}}, "extra.profile.span_ms is 'x', not a number"),
        ({"extra": {"notes": [5]}}, "extra.notes is [5], not a list of text"),
        ({"extra": {"host": {"steal_fraction": "x"}}}, "extra.host.steal_fraction is 'x'"),
        ({"extra": {"profiled_clock_ratio": "x"}}, "extra.profiled_clock_ratio is 'x'"),
        ({"extra": {"report": [1]}}, "extra.report is [1], not an object"),
        ({"numerics": {"first_difference": {"step": 3}}}, "numerics.first_difference is {'step': 3}"),
    ],
)
def test_a_value_of_the_wrong_type_is_named_and_not_a_traceback(tmp_path, change, what):
    put(tmp_path, *session())
    (tmp_path / "graph.r1.json").write_text(json.dumps(make("graph", 1, 8.0, **change)))
    runs = frame.read(tmp_path)
    found, faults = runs.frame, runs.faults
    (fault,) = faults
    assert len(found) == 9 and fault.startswith(f"graph.r1.json: {what}")


def test_null_and_words_stand_where_a_run_may_leave_them(tmp_path):
    """A profile that saw no kernels, a ratio that was not measured, another program's request."""
    extra = {"profile": "the profiler saw no kernels", "profiled_clock_ratio": None, "host": None, "settle": None}
    found = session(busy_ms=None, extra=extra | {"notes": None, "request": {"limit_s": "none"}}, energy_j=None)
    put(tmp_path, *found)
    runs = frame.read(tmp_path)
    kept, faults = runs.frame, runs.faults
    assert len(kept) == 10 and not faults
    compare.report(kept, faults)


def test_a_record_that_contradicts_itself_fails_the_command_and_the_rest_is_shown(tmp_path, capsys):
    path = packed(tmp_path, session())
    assert compare.main([str(tmp_path)]) == 0
    capsys.readouterr()
    found = session()
    found[1] = make("graph", 1, 8.0, statistic_ms=99.0)
    packed(tmp_path, found, hour=5)
    assert compare.main([str(tmp_path)]) == 1
    out, err = capsys.readouterr()
    fault = f"left out: {path.name.replace('T03', 'T05')}/{sessions.RECORDS}:2: statistic_ms 99.0 does not follow"
    assert "1, 9" in out and fault in out and "1 record is left out" in out
    assert err.count("\n") == 1 and fault in err


@pytest.mark.parametrize("kept", [[], ["eager.r0"]])
def test_a_folder_without_timed_eager_is_refused_by_name(tmp_path, capsys, kept):
    put(tmp_path, *session(), make("eager", 0))
    for path in tmp_path.glob("eager.*"):
        if path.stem not in kept:
            path.unlink()
    with pytest.raises(SystemExit, match="2"):
        compare.main([str(tmp_path)])
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1
    assert str(tmp_path) in err and "of 'eager', --base takes one of graph" in err
    assert compare.main([str(tmp_path), "--base", "graph"]) == 0


def test_eager_that_came_to_nothing_is_a_row_and_not_missing():
    found = [*session()[1::2], make("eager", 0, status="oom", message="asked 9 GiB")]
    assert missing_base(found) is None and missing_base(found[:-1])
    assert missing_base([make("eager", 0), make("graph", 0)]) is None


def test_the_committed_results_are_shown_in_every_form(capsys):
    """Their root holds overview.json and figures beside the sessions."""
    root = ROOT / "results"
    assert (root / "overview.json").is_file()

    def shown(*arguments):
        assert compare.main([*map(str, arguments)]) == 0
        out, err = capsys.readouterr()
        assert not err
        return out

    text = shown(root)
    assert "NVIDIA H200" in text and "left out" not in text
    rows = json.loads(shown(root, "--json"))["rows"]
    assert len(list(csv.DictReader(shown(root, "--csv").splitlines()))) == len(rows) > 4
    assert shown(root, "--markdown").startswith("**NVIDIA H")
    assert len(json.loads(shown(root / "h200x1" / "gpt3-bench", "--json"))["rows"]) >= 4
