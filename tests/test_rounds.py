"""The order of rounds. Where runs take long, the first timed round comes before the rest of round 0."""

import numpy
import pytest

from benchmarks import compare, frame, rounds, sessions
from common import record as records
from tests.harness import ON_GPU, edited, go, main, names, of, only, quick_children, read, stop_at, watched

pytest_plugins = ["tests.machines"]
pytestmark = pytest.mark.usefixtures("no_gpu", "gpu", "quick")
BENCH = ("--preset", "bench", "--rounds", "2")


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


def bench(out, variants, *arguments):
    return go(out, variants, *BENCH, *arguments, flags=ON_GPU)


def test_the_first_timed_round_is_whole_and_right_after_eagers_run_of_round_0(out, monkeypatch, capsys):
    seen = watched(monkeypatch)
    assert bench(out, "graph,compile") == 0
    first, second = ["eager.r1", "graph.r1", "compile.r1"], ["compile.r2", "graph.r2", "eager.r2"]
    assert seen == ["eager.r0", *first, "eager.r0.control", "graph.r0", "compile.r0", *second]
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("parity ", "round "))]
    assert "its second run comes after round 1" in lines[0]
    assert all("its parity follows" in line for line in lines[1:4])
    assert not any("follows" in line or "comes after" in line for line in lines[4:])
    # What is said of a variant is the same as if its round 0 had come first.
    found = read(only(out))
    assert names(only(out)) == of(["eager", "graph", "compile"], 2)
    for name in ("eager", "graph", "compile"):
        numerics = [found[f"{name}.r{number}"]["numerics"] for number in (0, 1, 2)]
        for key in ("parity", "reference", "max_rel_diff", "first_difference"):
            assert numerics[0][key] == numerics[1][key] == numerics[2][key]
        assert numerics[0]["parity"] is not None


def test_tiny_asks_for_parity_first(out, monkeypatch):
    seen = watched(monkeypatch)
    assert go(out, "graph", "--preset", "tiny", "--rounds", "1", flags=ON_GPU) == 0
    assert seen == ["eager.r0", "eager.r0.control", "graph.r0", "eager.r1", "graph.r1"]


def test_what_fails_round_0_is_not_good_though_it_was_timed(out, capsys):
    assert bench(out, "graph,differs") == 1
    assert names(only(out)) == sorted([*of(["eager", "graph"], 2), "differs.r0", "differs.r1"])
    found = read(only(out))
    timed = found["differs.r1"]
    assert timed["status"] == "numerics_failed" and timed["message"].startswith("round 0: not bitwise equal to eager")
    assert timed["numerics"]["parity"] == "differs" and timed["steps"]["gpu_ms"]
    (row,) = [row for row in compare.summarise(frame.read(only(out)).frame) if row["variant"] == "differs"]
    assert row["status"] == "numerics_failed" and row["speedup"] is None and row["step_ms"] is None
    assert "not sound: differs (numerics_failed)" in capsys.readouterr().out


def test_an_eager_that_does_not_repeat_itself_is_known_after_the_timed_round(out, monkeypatch):
    def after(name, path):
        if name == "eager.r0.control":
            sidecar = path.removesuffix(".json") + ".parity.npz"
            with numpy.load(sidecar) as file:
                arrays = dict(file)
            arrays["hashes"][3] += 1
            numpy.savez(sidecar, **arrays)

    watched(monkeypatch, after=after)
    bench(out, "graph")
    found = read(only(out))
    assert found["eager.r0"]["status"] == "eager_two_runs_differ"
    assert [found[f"eager.r{number}"]["numerics"]["parity"] for number in (0, 1, 2)] == ["differs"] * 3
    assert [found[f"eager.r{number}"]["status"] for number in (1, 2)] == ["pass", "pass"]


def test_what_could_not_be_timed_is_not_asked_for_parity(out, monkeypatch):
    seen = watched(monkeypatch)
    assert bench(out, "graph,unsupported,oom") == 0
    assert [name for name in seen if name.startswith(("unsupported", "oom"))] == ["unsupported.r1", "oom.r1"]
    rows = {row["variant"]: row["status"] for row in compare.summarise(frame.read(only(out)).frame)}
    assert rows == {"eager": "pass", "graph": "pass", "unsupported": "unsupported", "oom": "oom"}


@pytest.mark.parametrize("where", ["graph.r1", "eager.r0.control", "graph.r0", "graph.r2"])
def test_the_next_call_goes_on_where_it_was(out, where, monkeypatch):
    seen = watched(monkeypatch)
    stop_at(monkeypatch, where)
    assert bench(out, "graph") == 130
    assert bench(out, "graph") == 0
    assert names(only(out)) == of(["eager", "graph"], 2) and len(seen) == len(set(seen)) == 7
    assert {record["numerics"]["parity"] for record in read(only(out)).values()} == {"bitwise"}


def test_without_its_sidecar_eagers_round_0_is_run_again_for_its_second_run(out, monkeypatch, capsys):
    seen = watched(monkeypatch)
    stop_at(monkeypatch, "eager.r0.control")
    assert bench(out, "graph") == 130
    (sidecar,) = only(out).rglob("eager.r0.parity.npz")
    sidecar.unlink()
    assert bench(out, "graph") == 0
    assert seen.count("eager.r0") == 2 and "eager round 0 is run anew" in capsys.readouterr().out
    assert read(only(out))["eager.r1"]["numerics"]["parity"] == "bitwise"


def test_a_session_closed_before_its_round_0_has_no_verdict(out, monkeypatch):
    stop_at(monkeypatch, "eager.r0.control")
    assert bench(out, "graph") == 130
    assert main(["--close", "--session", sessions.session_name(only(out)), "--out", out]) == 0
    (row,) = [row for row in compare.summarise(frame.read(only(out)).frame) if row["variant"] == "graph"]
    assert row["parity"] in (None, "-") and row["verdict"] == "one round"


def test_other_references_are_run_in_the_rest_of_round_0(out, monkeypatch):
    seen = watched(monkeypatch)
    assert bench(out, "on_shifted") == 0
    rest = ["eager.r0.control", "shifted.r0", "shifted.r0.control", "on_shifted.r0"]
    assert seen[:8] == ["eager.r0", "eager.r1", "shifted.r1", "on_shifted.r1", *rest]
    assert read(only(out))["on_shifted.r1"]["numerics"]["reference"] == "shifted"


def test_minutes_count_for_the_first_timed_round_too(out, monkeypatch, capsys):
    quick_children(monkeypatch, lambda number, variant: 10.0)
    # 10 s of eager's round 0, and 20 s of round 1 would end after half a minute.
    assert bench(out, "graph", "--minutes", "0.4") == 1
    assert names(only(out)) == ["eager.r0"]
    assert "round 1 would take 20.0 s, not started" in capsys.readouterr().out
    assert bench(out, "graph") == 0
    assert names(only(out)) == of(["eager", "graph"], 2)


def test_a_round_is_expected_to_compile_little(out, monkeypatch, capsys):
    """The first run of a variant that compiles takes two minutes, later ones find its kernels."""

    def edit(name, record):
        if name == "graph.r1":
            record["seconds"]["compile"] = 100.0

    edited(monkeypatch, edit)
    quick_children(monkeypatch, lambda number, variant: 130.0 if variant == "graph" and number == 1 else 30.0)
    # 30 s of eager's round 0, 160 of round 1, 60 of the rest, 60 of round 2, where 30 and 80 are expected.
    assert bench(out, "graph", "--rounds", "3", "--minutes", "6.1") == 0
    text = capsys.readouterr().out
    assert "--minutes 6.1: round 3 would take 60.0 s, not started" in text
    assert names(only(out)) == of(["eager", "graph"], 2)


def test_time_left_counts_the_rest_of_round_0(out, monkeypatch, capsys):
    quick_children(monkeypatch, lambda number, variant: 30.0 if number else 4.0)
    assert bench(out, "graph") == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("round 1")]
    # Three timed runs and two of round 0, then one less.
    assert [line.rpartition("about ")[2] for line in lines] == ["98.0 s left", "68.0 s left"]


def test_a_run_that_did_not_settle_in_the_first_round_is_repeated_before_the_rest_of_round_0(out, monkeypatch):
    def edit(name, record):
        if record["round"]:
            record["conditions"]["settled"] = name != "graph.r1"

    seen = edited(monkeypatch, edit)
    bench(out, "graph")
    assert seen[:5] == ["eager.r0", "eager.r1", "graph.r1", "eager.r1.a2", "graph.r1.a2"]
    found = read(only(out))
    assert found["graph.r1"]["numerics"]["parity"] == found["graph.r1.a2"]["numerics"]["parity"] == "bitwise"


def test_a_variant_whose_repeat_did_not_settle_is_not_repeated_in_later_rounds(out, monkeypatch):
    def edit(name, record):
        if record["round"]:
            record["conditions"]["settled"] = record["variant"] == "graph" and name != "graph.r2"

    seen = edited(monkeypatch, edit)
    assert bench(out, "graph", "--rounds", "3") == 0
    # graph's, which did not settle in round 2, is repeated with eager beside it.
    again = ["eager.r1.a2", "graph.r1.a2", "graph.r2.a2", "eager.r2.a2"]
    assert [name for name in seen if name.endswith(".a2")] == again


def test_records_of_the_first_round_are_sound_when_they_are_written_again(out):
    assert bench(out, "graph") == 0
    assert all(records.check(record) is None for record in read(only(out)).values())


def test_rounds_are_abba():
    assert [rounds.order(["a", "b", "c"], number) for number in (1, 2, 3)] == [
        ["a", "b", "c"],
        ["c", "b", "a"],
        ["a", "b", "c"],
    ]
