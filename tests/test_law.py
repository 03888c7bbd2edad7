"""benchmarks/law: points of sessions made by hand, and how often the law holds over them."""

import statistics

import pytest

from benchmarks import law
from tests.figure_records import both, make, put
from tests.table_records import packed, schema_1

MODELS = ("gpt3", "rnnt", "stable_diffusion")


def test_a_point_is_issue_of_the_base_over_busy_of_the_graph():
    (point,) = law.points(both(26.0, 10.4, 25.0, 10.0, rounds=(1, 2, 3)))
    assert (point.variant, point.base, point.num_pairs, point.is_main) == ("graph", "eager", 3, True)
    assert (point.x, point.first) == (2.5, 2.5)
    assert point.median == pytest.approx(2.5) and point.quiet == pytest.approx(2.5, rel=0.01)
    assert point.off == pytest.approx(0.0, abs=0.01) and point.is_explained
    assert (point.queue, point.queue_off, point.base_step, point.variant_step) == (None,) * 4


def test_below_one_the_gpu_sets_the_pace():
    (point,) = law.points(both(10.1, 10.0, 5.0, 10.0))
    assert (point.x, point.first) == (0.5, 1.0) and point.off == pytest.approx(0.01, abs=0.001)


def test_long_steps_are_judged_by_their_median():
    (point,) = law.points(both(900.0, 500.0, 800.0, 490.0))
    assert point.quiet is None and point.median == pytest.approx(1.8)


def test_the_median_and_the_quiet_host_are_told_apart():
    records = both(20.0, 10.0, 20.0, 10.0)
    slow = records[0]["steps"]["gpu_ms"]
    slow[:] = [ms if index % 4 else 16.0 for index, ms in enumerate(slow)]
    records[0]["steps"]["wall_ms"] = sum(slow)
    records[0]["statistic_ms"] = statistics.median(slow)
    (point,) = law.points(records)
    assert point.quiet == pytest.approx(1.6, rel=0.01) and point.median == pytest.approx(2.0, rel=0.01)
    # Issue time is a median, so that it is the medians that it predicts.
    assert point.x == pytest.approx(2.0) and point.off == pytest.approx(0.0, abs=0.01)
    assert "(by 10th percentiles 0 within 10 %)" in law.counts([point])[0]


def test_the_queue_models_ratio_and_its_errors():
    (point,) = law.points(both(12.0, 10.0, 8.5, 10.0, rounds=(1, 2), predicted=(12.6, 10.0)))
    assert point.queue == pytest.approx(1.26) and point.first == 1.0
    assert point.base_step == pytest.approx(0.05) and point.variant_step == pytest.approx(0.0)
    assert abs(point.off) > law.NEAR and abs(point.queue_off) < law.NEAR and point.is_explained
    (wrong,) = law.points(both(12.0, 10.0, 8.5, 10.0, predicted=(16.0, 10.0)))
    assert not wrong.is_explained


@pytest.mark.parametrize("said", [None, "fast", True, -1.0, 0, float("inf")])
def test_what_is_no_prediction_is_none(said):
    records = both(12.0, 10.0, 8.5, 10.0)
    for record in records:
        record["extra"]["queue_model"] = {"step_ms": said}
    (point,) = law.points(records)
    assert point.queue is None and point.base_step is None
    records[0]["extra"]["queue_model"] = "no"
    assert law.points(records)[0].queue is None


def test_no_point_without_replays_a_pair_or_both_times():
    records = both(12.0, 10.0, 8.5, 10.0)
    assert law.points([record | {"device": "cpu"} for record in records]) == []
    assert law.points(records[1:]) == []
    for key, which in (("issue_ms", 0), ("busy_ms", 1)):
        lacking = [dict(record) for record in records]
        lacking[which][key] = None
        assert law.points(lacking) == []
    records[1]["capture"].update(num_replays=0, expected_replays=0)
    assert law.points(records) == []


def test_no_point_where_a_run_computed_other_numbers():
    records = both(26.0, 10.4, 25.0, 10.0, rounds=(1, 2, 3))
    records[-1].update(status="numerics_failed", message="timed work: loss of step 5")
    assert records[-1]["variant"] == "graph" and law.points(records) == []


def test_one_variant_a_session_is_counted_as_its_main_one():
    found = [
        make("eager", 1, 20.0, issue_ms=20.0, busy_ms=8.0),
        *(make(name, 1, 10.0, busy_ms=10.0) for name in ("graph_te", "graph", "graph_overlap")),
    ]
    points = law.points(found)
    assert [(point.variant, point.is_main) for point in points] == [
        ("graph", True),
        ("graph_overlap", False),
        ("graph_te", False),
    ]
    assert law.counts(points)[0].startswith("max(1, x): 3 within 5 %, 3 within 10 %, of 3 points")
    assert law.counts(points)[1].startswith("max(1, x): 1 within 5 %, 1 within 10 %, of 1 sessions")


def test_graphs_of_compiled_kernels_never_stand_for_a_session():
    base = make("eager", 1, 20.0, issue_ms=20.0, busy_ms=8.0)
    compiled = make("compile_graph", 1, 10.0, busy_ms=10.0)
    compiled["extra"]["kind"] = "compile"
    plain = make("layer", 1, 10.0, busy_ms=10.0)
    assert [point.is_main for point in law.points([base, compiled])] == [False]
    points = {point.variant: point.is_main for point in law.points([base, compiled, plain])}
    assert points == {"compile_graph": False, "layer": True}


def test_counts_are_of_both_predictions(monkeypatch):
    found = law.points(both(12.0, 10.0, 8.5, 10.0, predicted=(12.1, 10.0)))
    found += law.points(both(10.7, 10.0, 8.5, 10.0))
    found += law.points(both(10.2, 10.0, 8.5, 10.0, predicted=(14.0, 10.0)))
    words = "\n".join(law.counts(found))
    assert "max(1, x): 1 within 5 %, 2 within 10 %, of 3 points" in words
    assert "queue model: 1 within 5 %, 1 within 10 %, of the 2 that have one; 2 within 10 % of it or of" in words
    assert law.counts([]) == []


def test_what_a_bench_ends_with():
    (line,) = law.closing(both(26.0, 10.4, 25.0, 10.0, rounds=(1, 2), predicted=(25.2, 10.5)))
    assert line == (
        "graph over eager: predicted max(1, x) = 2.50x (eager takes the host 25.0 ms to issue, graph's kernels take "
        "10.0 ms: x = 2.50), queue model 2.40x, measured 2.50x by medians (2.50x by 10th percentiles)"
    )
    (line,) = law.closing(both(26.0, 10.4, 25.0, 10.0))
    assert "queue model -, measured" in line
    assert law.closing([record | {"device": "cpu"} for record in both(26.0, 10.4, 25.0, 10.0)]) == []


def test_the_command_reads_packed_sessions_and_old_folders(tmp_path, capsys):
    packed(tmp_path / "h200x1" / "gpt3-bench", both(26.0, 10.4, 25.0, 10.0, rounds=(1, 2)))
    put(tmp_path / "old" / "rnnt-bench", *schema_1(both(10.1, 10.0, 5.0, 10.0, model="rnnt")))
    assert law.main([str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:4] == ["group", "session", "GPU", "variant"] and len(lines) == 3 + 1 + 2
    assert {line.split()[0] for line in lines[1:3]} == {"h200x1/gpt3-bench", "old/rnnt-bench"}
    assert law.main([str(tmp_path / "old")]) == 0
    (tmp_path / "empty").mkdir()
    assert law.main([str(tmp_path / "empty")]) == 1
    assert "no graph beside its base" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stopped:
        law.main([str(tmp_path / "nothing")])
    assert stopped.value.code == 2


def test_the_published_sessions_of_schema_1_have_points():
    from benchmarks import frame

    points = [point for point in law.points(frame.read("results").frame) if point.is_main]
    assert len(points) >= 44 and {point.model for point in points} >= set(MODELS)
    assert len({(point.group, point.session) for point in points}) == len(points)
    assert all(point.x > 0 and point.median > 0 for point in points)
