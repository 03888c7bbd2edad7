"""Pairs, refusals, rows and tables, from records made by hand."""

import csv
import json
import subprocess
import sys

import pytest

from benchmarks import compare, rounds
from common import environment
from common import record as records


def make(variant="eager", number=1, step_ms=10.0, num_steps=20, **changes):
    """A sound CUDA record; changes: top-level keys, or dicts that update a group."""
    record = records.blank(
        model="fake", preset="bench", variant=variant, round=number, status="pass", device="cuda", message=""
    )
    record["env"].update(gpu_name="NVIDIA H200", gpu_uuid="GPU-0", boot_id="boot", source_hash="abc", num_gpus=1)
    if number:
        times = [step_ms * (1 + 0.001 * (index % 5 - 2)) for index in range(num_steps)]
        record["steps"].update(gpu_ms=times, batch=[0] * num_steps, wall_ms=sum(times))
        record.update(statistic_ms=step_ms, busy_ms=8.0, optimizer_ms=1.0)
    for key, value in changes.items():
        record[key].update(value) if isinstance(value, dict) else record.__setitem__(key, value)
    return record


def session(steps=((10.0, 8.0), (10.1, 8.1), (9.9, 8.0)), **changes):
    found = []
    for number, (eager, graph) in enumerate(steps, 1):
        found += [make("eager", number, eager, **changes), make("graph", number, graph, **changes)]
    return found


def row_of(found, variant="graph", base="eager"):
    return next(row for row in compare.summarise(found, base) if row["variant"] == variant)


def put(folder, *found):
    for record in found:
        records.write(folder / records.file_name(record["variant"], record["round"]), record)


def test_speed_up_is_the_mean_of_paired_log_ratios():
    row = row_of(session())
    expected = (10.0 / 8.0 * 10.1 / 8.1 * 9.9 / 8.0) ** (1 / 3)
    assert row["speedup"] == pytest.approx(expected)
    assert row["speedup_low"] < expected < row["speedup_high"]
    assert (row["verdict"], row["num_rounds"], row["num_pairs"]) == ("faster", 3, 3)
    assert row["quiet_speedup"] == pytest.approx(expected, rel=1e-6)
    assert row["model_speedup"] == pytest.approx((9.0 / 7.0 * 9.1 / 7.1 * 8.9 / 7.0) ** (1 / 3))
    assert row["step_ms"] == 8.0
    assert f"{expected:.3f}x [1.2" in compare.console_table(compare.summarise(session()))


def test_beside_an_eager_that_synchronises_stand_two_ratios():
    found = [*session(), *(make("eager_sync", number, 12.0) for number in (1, 2, 3))]
    row, eager = row_of(found), row_of(found, "eager")
    assert row["sync_speedup"] == pytest.approx((12.0 / 8.0 * 12.0 / 8.1 * 12.0 / 8.0) ** (1 / 3))
    assert eager["sync_speedup"] == pytest.approx((12.0 / 10.0 * 12.0 / 10.1 * 12.0 / 9.9) ** (1 / 3))
    assert row["speedup"] == row_of(session())["speedup"]
    assert row_of(found, "eager_sync")["sync_speedup"] is None
    assert "over eager_sync" in compare.console_table(compare.summarise(found))
    assert "over eager_sync" not in compare.console_table(compare.summarise(session()))


def test_the_base_can_be_chosen():
    row = row_of(session(), "eager", base="graph")
    assert row["speedup"] == pytest.approx(1 / row_of(session())["speedup"])
    assert row["verdict"] == "slower"


@pytest.mark.parametrize("key", ["gpu_uuid", "boot_id", "source_hash"])
def test_only_runs_of_one_gpu_boot_and_source_are_paired(key):
    found = session()
    found[1]["env"][key] = "other"
    row = row_of(found)
    assert row["num_pairs"] == 2
    assert row["speedup"] == pytest.approx((10.1 / 8.1 * 9.9 / 8.0) ** 0.5)
    assert any("1 of 3 rounds have no base" in note for note in compare.notes(found, compare.summarise(found), []))


def test_one_round_has_a_ratio_without_interval():
    rows = compare.summarise(session([(10.0, 8.0)]))
    assert rows[1]["verdict"] == "one round"
    table = compare.console_table(rows)
    assert "1.250x  one round" in table and "[" not in table


def test_an_unsettled_size_is_noted():
    found = session([(10.0, 9.98), (10.0, 9.90), (10.0, 9.94)])
    rows = compare.summarise(found)
    assert rows[1]["verdict"] == "unclear"
    found = session([(10.0, 9.94), (10.0, 9.90), (10.0, 9.92), (10.0, 9.85)])
    rows = compare.summarise(found)
    assert rows[1]["verdict"] == "faster"
    assert any("not settled" in note for note in compare.notes(found, rows, []))
    assert not any("not settled" in note for note in compare.notes(session(), compare.summarise(session()), []))


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
    for text in (compare.console_table(rows), compare.markdown_table(rows), compare.headline(rows)):
        assert "speed-up" not in text and "faster" not in text and "x" not in text.replace("x to", "")
    assert "parity" in compare.console_table(rows) and "bitwise" in compare.console_table(rows)


def test_the_ceiling_stands_first_and_needs_the_same_clock():
    text, _ = compare.report(session(), [])
    assert text.startswith("eager: step 10.0 ms, busy 8.0 ms -> at most 1.25x to gain")
    found = session(extra={"profiled_clock_ratio": 1.02})
    assert row_of(found, "eager")["ceiling"] is None
    assert "no ceiling" in compare.headline(compare.summarise(found))
    assert row_of(session(extra={"profiled_clock_ratio": 0.995}), "eager")["ceiling"] == pytest.approx(1.25)
    assert row_of(session())["ceiling"] is None


def test_rows_without_pass_keep_their_status_and_message():
    found = session()
    found.append(make("compile", 0, status="unsupported", message="needs\na compiler"))
    rows = compare.summarise(found)
    table = compare.console_table(rows)
    assert "compile: unsupported: needs a compiler" in table
    assert row_of(found, "compile")["num_rounds"] == 0
    assert "| compile | 0 |" in compare.markdown_table(rows)


def test_replays_parity_compile_and_memory_columns():
    found = session(capture={"num_replays": 40, "expected_replays": 40, "num_graphs": 2, "compile_s": 3.0})
    found.append(make("graph", 0, capture={"compile_s": 30.0}, numerics={"parity": "bitwise"}))
    found[1]["memory"].update(peak_reserved_bytes=3 * 2**30, graph_pool_bytes=2**29)
    found[1].update(energy_j=100.0)
    row = row_of(found)
    assert (row["replays"], row["parity"], row["compile_cold_s"], row["compile_warm_s"]) == ("ok", "bitwise", 30.0, 3.0)
    assert (row["peak_reserved_gib"], row["pool_gib"], row["energy_j"]) == (3.0, 0.5, 5.0)
    found[1]["capture"]["num_replays"] = 39
    assert row_of(found)["replays"] == "39 of 40"
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
    record = make(steps={"gpu_ms": times, "batch": batch, "wall_ms": sum(times)}, statistic_ms=5.5)
    assert compare.self_check(record) is None
    assert row_of([record], "eager")["tail"] == 1.0
    record["statistic_ms"] = 1.0
    assert "edited by hand" in compare.self_check(record)


def test_a_record_edited_by_hand_is_named_and_refused(tmp_path):
    found = session()
    found[1]["statistic_ms"] *= 0.998
    put(tmp_path, *found)
    kept, faults = compare.load(tmp_path)
    assert len(kept) == 5
    assert len(faults) == 1 and "graph.r1.json" in faults[0] and "edited by hand" in faults[0]
    found[1]["statistic_ms"] = found[1]["statistic_ms"] / 0.998 * 1.0005
    put(tmp_path, found[1])
    assert compare.load(tmp_path)[1] == []


def test_foreign_and_half_written_files_are_named_and_counted(tmp_path):
    put(tmp_path, *session())
    (tmp_path / "foreign.json").write_text('{"a": 1}')
    (tmp_path / "half.r1.json").write_text('{"schema": 1, "mod')
    (tmp_path / "copy.json").write_text((tmp_path / "graph.r1.json").read_text())
    wrong = make("wrong", 1)
    wrong["steps"]["gpu_ms"] = "fast"
    put(tmp_path, wrong)
    found, faults = compare.load(tmp_path)
    assert len(found) == 6 and len(faults) == 4
    text, _ = compare.report(found, faults)
    for name in ("foreign.json", "half.r1.json", "copy.json", "wrong.r1.json", "4 files skipped"):
        assert name in text
    with pytest.raises(FileNotFoundError):
        compare.load(tmp_path / "nothing")


def test_summary_files(tmp_path):
    put(tmp_path, *session(), make("graph", 0), make("compile", 0, status="oom", message="a, b"))
    rows = compare.write_summary(tmp_path)
    assert [row["variant"] for row in rows] == ["eager", "compile", "graph"]
    with open(tmp_path / "summary.csv") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 8
    line = next(line for line in lines if line["variant"] == "graph" and line["round"] == "2")
    assert float(line["statistic_ms"]) == 8.1 and line["status"] == "pass"
    table = (tmp_path / "table.md").read_text()
    assert table.startswith("eager: step") and "| graph |" in table
    assert str(tmp_path) not in table and table.isascii()


def test_a_source_that_is_not_its_commits_is_noted(monkeypatch):
    monkeypatch.setattr(environment, "source_hash_of_commit", lambda model, sha: {"good": "abc", "bad": "def"}.get(sha))

    def doubts(**env):
        found = session(env=env)
        return [note for note in compare.notes(found, compare.summarise(found), []) if "is not that of" in note]

    assert doubts(git_sha="good") == []
    assert doubts(git_sha="unknown") == []
    assert "do not belong" in doubts(git_sha="bad")[0]
    assert "uncommitted" in doubts(git_sha="bad", git_dirty=True)[0]


def test_notes_name_machine_rounds_and_host():
    found = session(host_load=16, extra={"host": {"steal_fraction": 0.02, "busy_fraction": 0.5, "load_1m_end": 3.0}})
    text = "\n".join(compare.notes(found, compare.summarise(found), []))
    assert "NVIDIA H200 x1" in text and "source abc" in text
    assert "3 rounds x 20 steps, 16 busy processes" in text
    assert "steal up to 2.0 %" in text


def test_what_a_model_reports_is_a_table_of_its_own():
    found = session()
    for record, rate in zip(found, (1000.0, 5.0, 3000.0, 7.0, 1500.0, 6.123), strict=True):
        record["extra"]["report"] = {"heard/s": rate, "labels equal": rate != 7.0}
    found[1]["extra"]["report"]["padding %"] = 12.345
    found.append(make("compile", 1))
    rows = compare.summarise(found)
    _, _, own = compare.console_table(rows).split("\n\n")
    assert [line.split() for line in own.splitlines()[1:]] == [
        ["eager", "1,500", "yes", "-"],
        ["graph", "6.12", "no", "12.3"],
        ["compile", "-", "-", "-"],
    ]
    assert own.split("\n")[0].split("  ")[-3:] == ["heard/s", "labels equal", "padding %"]
    assert "| variant | heard/s | labels equal | padding % |" in compare.markdown_table(rows)
    # Records without it print as before.
    assert compare.console_table(compare.summarise(session())).count("\n\n") == 1
    cpu = [make(device="cpu", extra={"report": {"heard/s": 2.5}})]
    assert compare.console_table(compare.summarise(cpu)).splitlines()[-1].split() == ["eager", "2.50"]


def test_tables_are_aligned_and_ascii():
    table = compare.console_table(compare.summarise(session())).split("\n\n")[0].splitlines()
    end = table[0].index("step ms") + len("step ms")
    assert all(line[end - 1].isdigit() and line[end] == " " for line in table[1:])
    assert "\n".join(table).isascii()


def command(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.compare", *arguments],
        cwd=rounds.ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_command(tmp_path):
    put(tmp_path, *session())
    assert "1.245x" in command(str(tmp_path)).stdout
    assert command(str(tmp_path), "--markdown", "--base", "graph").stdout.count("| eager |") == 2
    answer = command(str(tmp_path), "--base", "grpah")
    assert answer.returncode == 2 and "eager, graph" in answer.stderr and answer.stderr.count("\n") == 1
    answer = command(str(tmp_path / "nothing"))
    assert answer.returncode == 2 and "no folder" in answer.stderr
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "x.json").write_text(json.dumps([]))
    answer = command(str(tmp_path / "empty"))
    assert answer.returncode == 1 and "x.json" in answer.stdout


def test_idle_is_one_formula_and_a_long_profile_widens_the_ceiling():
    found = session()
    for record in found:
        record.update(busy_ms=8.0, statistic_ms=record["statistic_ms"])
    graph = [record for record in found if record["variant"] == "graph"]
    for record in graph:
        record["capture"].update(num_replays=4, expected_replays=4)
        record["extra"]["profile"] = {"span_ms": 1.1 * record["statistic_ms"]}
        record["idle_fraction"] = 0.07
    row = row_of(found)
    assert row["idle_fraction"] == pytest.approx(max(0.0, 1 - 8.0 / row["step_ms"]))
    assert row["profiled_idle_fraction"] == pytest.approx(0.07)
    assert row_of(found, "eager")["profiled_idle_fraction"] is None
    head = compare.headline(compare.summarise(found))
    assert "at most 1.25x to gain, 1.38x if busy reads 10.0 % long" in head


def test_runs_that_had_not_settled_are_named():
    found = session()
    found[0]["extra"]["settle"] = {"settled": False}
    lines = compare.notes(found, compare.summarise(found), [])
    assert any("had not settled" in line and f"{found[0]['variant']} r{found[0]['round']}" in line for line in lines)


# ------------------------------------------------------------------------------------------------
# Records that contradict themselves, and rows without a base


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda record: record["steps"].update(wall_ms=300.0), "wall_ms 300.0 is not the time of its steps"),
        (lambda record: record["steps"]["gpu_ms"].__setitem__(3, -1.0), "a step of -1.0 ms"),
        (lambda record: record["steps"]["gpu_ms"].__setitem__(3, float("inf")), "a step of inf ms"),
        (lambda record: record["steps"]["gpu_ms"].__setitem__(3, float("nan")), "a step of nan ms"),
        (lambda record: record.update(statistic_ms=float("nan")), "does not follow"),
        (lambda record: record["extra"].update(items_per_s=90.0), "items_per_s 90.0 does not follow"),
        (lambda record: record.update(busy_ms=6.0), "idle_fraction 0.2 does not follow from busy_ms 6.0"),
        (lambda record: record["steps"]["batch"].pop(), "20 step times and 19 batch kinds"),
        (lambda record: record["steps"].update(gpu_ms=[], batch=[]), "without any step"),
    ],
)
def test_contradictions_in_a_record_are_found(change, what):
    record = make(idle_fraction=0.2, items_per_step=1, extra={"items_per_s": 100.0})
    assert compare.self_check(record) is None
    change(record)
    assert what in compare.self_check(record)


def test_what_need_not_agree_is_not_asked():
    many_ranks = make(steps={"wall_ms": 150.0}, env={"world_size": 2})
    replayed = make("graph", idle_fraction=0.05, capture={"num_replays": 20})
    for record in (many_ranks, replayed, make(steps={"wall_ms": None})):
        assert compare.self_check(record) is None


@pytest.mark.parametrize("lost", [lambda found: found[1::2], lambda found: [found[0], found[3]]])
def test_without_eager_of_the_same_round_there_is_no_ratio(lost):
    """No eager at all, and eager of another round."""
    found = lost(session())
    row = row_of(found)
    assert (row["speedup"], row["quiet_speedup"], row["model_speedup"], row["num_pairs"]) == (None, None, None, 0)
    assert row["verdict"] == "no eager of the same round"
    assert "no eager of the same round" in compare.console_table(compare.summarise(found))
    assert any("rounds have no base" in note for note in compare.notes(found, compare.summarise(found), []))


def test_a_variant_without_timed_rounds_misses_no_base():
    assert row_of([*session(), make("graph_te", 0)], "graph_te")["verdict"] is None


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda record: record.update(issue_ms="fast"), "issue_ms is 'fast', not a number"),
        (lambda record: record.update(busy_ms=float("nan")), "busy_ms is nan, not a number"),
        (lambda record: record["memory"].update(graph_pool_bytes=[1]), "memory.graph_pool_bytes is [1], not a number"),
        (lambda record: record["env"].update(world_size="2"), "env.world_size is '2', not a number"),
        (lambda record: record.update(model=None), "model is None, not text"),
        (lambda record: record["steps"].update(gpu_ms=[None] * 20), "steps.gpu_ms holds None, not a number"),
        (lambda record: record["steps"].update(gpu_ms="fast"), "steps.gpu_ms is 'fast', not a list"),
        (lambda record: record["steps"].update(batch=[[1]] * 20), "steps.batch holds [1]"),
        (lambda record: record["env"].update(gpu_name=5), "env.gpu_name is 5, not text"),
        (lambda record: record["capture"].update(strategy=5), "capture.strategy is 5, not text"),
        (lambda record: record["capture"].update(nodes={"kernel": "x"}), "capture.nodes holds 'x'"),
        (lambda record: record["capture"].update(nodes=None), "capture.nodes is None, not an object"),
        (lambda record: record.update(host_load=None), "host_load is None, not a number"),
        (lambda record: record.update(host_load=1.5), "host_load is 1.5, not a whole number"),
        (lambda record: record.update(optimizer_ms=True), "optimizer_ms is True, not a number"),
        (lambda record: record.update(optimizer_ms=10**400), "optimizer_ms is , not a number"),
        (lambda record: record["extra"].update(profile="x"), "extra.profile is 'x', not an object"),
        (lambda record: record["extra"].update(profile={"span_ms": "x"}), "extra.profile.span_ms is 'x', not a number"),
        (lambda record: record["extra"].update(notes=5), "extra.notes is 5, not a list"),
        (lambda record: record["extra"].update(notes=[5]), "extra.notes is [5], not a list of text"),
        (lambda record: record["extra"].update(settle=3), "extra.settle is 3, not an object"),
        (lambda record: record["extra"].update(host={"steal_fraction": "x"}), "extra.host.steal_fraction is 'x'"),
        (lambda record: record["extra"].update(host={"load_1m_end": "x"}), "extra.host.load_1m_end is 'x'"),
        (lambda record: record["extra"].update(profiled_clock_ratio="x"), "extra.profiled_clock_ratio is 'x'"),
        (lambda record: record["extra"].update(items_per_s="x"), "extra.items_per_s is 'x'"),
        (lambda record: record["extra"].update(report=[1]), "extra.report is [1], not an object"),
        (lambda record: record["extra"].update(report={"a": "x"}), "extra.report.a is 'x', not a number, true or"),
        (lambda record: record["extra"].update(report={"a": float("nan")}), "extra.report.a is nan, not a number"),
        (lambda record: record["numerics"].update(first_difference="x"), "numerics.first_difference is 'x'"),
        (
            lambda record: record["numerics"].update(first_difference={"step": 3}),
            "numerics.first_difference is {'step': 3}",
        ),
        (lambda record: record.update(busy_ms=-1.0), "busy_ms is -1.0, less than 0"),
        (lambda record: record.update(issue_ms=-1.0), "issue_ms is -1.0, less than 0"),
        (lambda record: record.update(optimizer_ms=-1.0), "optimizer_ms is -1.0, less than 0"),
        (lambda record: record.update(num_kernels=-1), "num_kernels is -1, less than 0"),
        (lambda record: record.update(energy_j=-1.0), "energy_j is -1.0, less than 0"),
        (lambda record: record["memory"].update(graph_pool_bytes=-1), "memory.graph_pool_bytes is -1, less than 0"),
        (lambda record: record["capture"].update(warmup_s=-1.0), "capture.warmup_s is -1.0, less than 0"),
        (lambda record: record["env"].update(world_size=0), "env.world_size is 0, less than 1"),
    ],
)
def test_a_value_of_the_wrong_type_is_named_and_not_a_traceback(tmp_path, change, what):
    record = make("graph", 1)
    change(record)
    put(tmp_path, *session())
    (tmp_path / "graph.r1.json").write_text(json.dumps(record))
    found, faults = compare.load(tmp_path)
    assert len(found) == 5 and len(faults) == 1 and f"graph.r1.json: {what}" in faults[0].replace(f"{10**400}", "")


def test_null_and_words_stand_where_a_run_may_leave_them(tmp_path):
    """A profile that saw no kernels, a ratio that was not measured, another program's request."""
    extra = {"profile": "the profiler saw no kernels", "profiled_clock_ratio": None, "host": None, "settle": None}
    found = session(busy_ms=None, extra=extra | {"notes": None, "request": {"limit_s": "none"}}, energy_j=None)
    put(tmp_path, *found)
    kept, faults = compare.load(tmp_path)
    assert len(kept) == 6 and not faults
    compare.report(kept, faults)


def test_a_fraction_may_read_a_hair_below_nothing():
    assert compare._wrong_type(make(idle_fraction=-1e-16)) is None
    assert "idle_fraction is -0.5" in compare._wrong_type(make(idle_fraction=-0.5))


@pytest.mark.parametrize("text", ["[" * 200_000, "1" * 5000, "\udcff"])
def test_no_file_brings_the_reader_down(tmp_path, text):
    put(tmp_path, *session())
    (tmp_path / "graph.r1.json").write_bytes(text.encode(errors="surrogateescape"))
    found, faults = compare.load(tmp_path)
    assert len(found) == 5 and "graph.r1.json: not a whole JSON document" in faults[0]


def test_files_of_other_commands_are_no_faulty_records(tmp_path):
    put(tmp_path, *session())
    for name in compare.OTHER_FILES:
        (tmp_path / name).write_text("{}")
    assert compare.load(tmp_path)[1] == []


def test_an_unsound_record_fails_and_the_rest_is_shown(tmp_path):
    put(tmp_path, *session())
    assert command(str(tmp_path)).returncode == 0
    record = make("graph", 1, 8.0)
    put(tmp_path, record | {"statistic_ms": 99.0})
    answer = command(str(tmp_path))
    assert answer.returncode == 1 and "1.242x" in answer.stdout
    assert "unsound:" in answer.stderr and "statistic_ms 99.0 does not follow" in answer.stderr


@pytest.mark.parametrize("kept", [[], ["eager.r0"]])
def test_a_folder_without_timed_eager_is_refused_by_name(tmp_path, kept):
    put(tmp_path, *session(), make("eager", 0))
    for path in tmp_path.glob("eager.*"):
        if path.stem not in kept:
            path.unlink()
    answer = command(str(tmp_path))
    assert answer.returncode == 2 and not answer.stdout and answer.stderr.count("\n") == 1
    assert str(tmp_path) in answer.stderr and "of 'eager', --base takes one of graph" in answer.stderr
    assert command(str(tmp_path), "--base", "graph").returncode == 0


def test_eager_that_came_to_nothing_is_a_row_and_not_missing():
    found = [*session()[1::2], make("eager", 0, status="oom", message="asked 9 GiB")]
    assert compare.missing_base(found) is None and compare.missing_base(found[:-1])
    assert compare.missing_base([make("eager", 0), make("graph", 0)]) is None


def test_the_committed_results_are_shown_in_every_form():
    """Their root holds overview.json beside the folders of records."""
    root = rounds.ROOT / "results"
    assert (root / "overview.json").is_file()
    answer = command(str(root))
    assert answer.returncode == 0 and "NVIDIA H200" in answer.stdout and "skipped" not in answer.stdout + answer.stderr
    rows = json.loads(command(str(root), "--json").stdout)["rows"]
    assert len(list(csv.DictReader(command(str(root), "--csv").stdout.splitlines()))) == len(rows) > 4
    assert command(str(root), "--markdown").stdout.startswith("**NVIDIA H200**")
    answer = command(str(root), "--base", "graph")
    assert answer.returncode == 2 and "one folder" in answer.stderr
    assert len(json.loads(command(str(root / "h200x1" / "gpt3-bench"), "--json").stdout)["rows"]) == 4
