"""The gate: what it lets pass, what it catches, what it refuses to compare, and how often it is wrong."""

import contextlib
import copy
import io
import json
import subprocess
import sys

import numpy
import pytest

from benchmarks import ROOT, gate
from tests.table_records import graphed, make, on_cpu, opened, packed, put, schema_1

GIB = 2**30
STEPS = ((10.0, 8.0), (10.02, 8.01), (9.98, 7.99))


def folder_of(path, steps=STEPS, **changes):
    """Records with memory and kernels, as a GPU's have them, as single files."""
    found = records_of(steps, **changes)
    if path.is_dir():
        for file in path.glob("*.r[1-9].json"):
            file.unlink()
    put(path, *found)
    return found


def records_of(steps=STEPS, **changes):
    found = graphed(steps, **changes)
    for record in found:
        record["memory"].update(peak_reserved_bytes=10 * GIB)
        record.update(num_kernels=1000)
        record["numerics"].update(parity="bitwise")
    return found


class Answer:
    def __init__(self, *arguments):
        """What the command prints and returns, in this process: starting one takes most of a test's time."""
        with (
            contextlib.redirect_stdout(io.StringIO()) as stdout,
            contextlib.redirect_stderr(io.StringIO()) as stderr,
        ):
            try:
                self.returncode = gate.main([*map(str, arguments)])
            except SystemExit as stop:
                self.returncode = stop.code
        self.stdout, self.stderr = stdout.getvalue(), stderr.getvalue()


def run(new, base, *arguments):
    return Answer(new, "--against", base, *arguments)


def judged(new, base, tolerance=0.02):
    return gate.judge(gate.match(gate.read(base), gate.read(new)), tolerance)


def failures(new, base, tolerance=0.02):
    """(row, quantity, verdict) of what does not hold."""
    return [(each.row, each.quantity, each.verdict) for each in judged(new, base, tolerance) if each.verdict != "ok"]


def slower(steps, factor, eager=1.0):
    return tuple((a * eager, b * factor) for a, b in steps)


# ------------------------------------------------------------------------------------------------
# What holds and what does not


def test_equal_results_hold(tmp_path):
    folder_of(tmp_path / "base")
    folder_of(tmp_path / "new", slower(STEPS, 1.005))
    answer = run(tmp_path / "new", tmp_path / "base")
    assert answer.returncode == 0, answer.stdout
    assert "15 quantities of 2 rows: all hold" in answer.stdout
    assert "speed-up" in run(tmp_path / "new", tmp_path / "base", "--all").stdout


@pytest.mark.parametrize("factor", [1.05, 1 / 1.05])
def test_time_of_one_variant_is_caught_both_ways(tmp_path, factor):
    folder_of(tmp_path / "base")
    folder_of(tmp_path / "new", slower(STEPS, factor))
    assert failures(tmp_path / "new", tmp_path / "base") == [
        ("fake/bench graph", "step ms", "changed"),
        ("fake/bench graph", "speed-up", "changed"),
    ]
    answer = run(tmp_path / "new", tmp_path / "base")
    assert answer.returncode == 1 and "2 changed" in answer.stdout
    sign = "+5.00 %" if factor > 1 else "-4.76 %"
    (line,) = [line for line in answer.stdout.splitlines() if "step ms" in line]
    assert sign in line and line.startswith("fake/bench graph")


def test_what_slows_eager_and_graph_alike_is_seen_in_step_time(tmp_path):
    folder_of(tmp_path / "base")
    folder_of(tmp_path / "new", slower(STEPS, 1.05, eager=1.05))
    assert {failure[:2] for failure in failures(tmp_path / "new", tmp_path / "base")} == {
        ("fake/bench eager", "step ms"),
        ("fake/bench graph", "step ms"),
    }


def test_another_gpu_may_be_some_percent_off_but_its_speed_up_may_not(tmp_path):
    folder_of(tmp_path / "base")
    folder_of(tmp_path / "new", slower(STEPS, 1.03, eager=1.03), env={"gpu_uuid": "GPU-1"})
    assert failures(tmp_path / "new", tmp_path / "base") == []
    assert "another GPU of the type" in run(tmp_path / "new", tmp_path / "base").stdout
    folder_of(tmp_path / "new", slower(STEPS, 1.03), env={"gpu_uuid": "GPU-1"})
    assert failures(tmp_path / "new", tmp_path / "base") == [("fake/bench graph", "speed-up", "changed")]
    folder_of(tmp_path / "new", slower(STEPS, 1.08, eager=1.08), env={"gpu_uuid": "GPU-1"})
    assert {failure[1] for failure in failures(tmp_path / "new", tmp_path / "base")} == {"step ms"}


def test_the_tolerance_is_the_users(tmp_path):
    folder_of(tmp_path / "base")
    folder_of(tmp_path / "new", slower(STEPS, 1.015))
    assert run(tmp_path / "new", tmp_path / "base").returncode == 0
    assert run(tmp_path / "new", tmp_path / "base", "--tolerance", "1").returncode == 1
    assert run(tmp_path / "new", tmp_path / "base", "--tolerance", "1 %").returncode == 1
    for wrong in ("0", "-1", "nan", "two", "100"):
        answer = run(tmp_path / "new", tmp_path / "base", f"--tolerance={wrong}")
        assert answer.returncode == 2 and "percentage" in answer.stderr and "Traceback" not in answer.stderr


def test_a_scattered_change_is_unclear_and_not_called_one(tmp_path):
    folder_of(tmp_path / "base", ((10.0, 8.0), (10.0, 9.0)))
    folder_of(tmp_path / "new", ((10.0, 8.5), (10.0, 9.5)))
    assert failures(tmp_path / "new", tmp_path / "base") == [
        ("fake/bench graph", "step ms", "unclear"),
        ("fake/bench graph", "speed-up", "unclear"),
    ]
    answer = run(tmp_path / "new", tmp_path / "base")
    assert answer.returncode == 0 and "2 unclear" in answer.stdout


def test_with_one_round_the_tolerance_alone_decides(tmp_path):
    folder_of(tmp_path / "base", ((10.0, 8.0),))
    folder_of(tmp_path / "new", ((10.0, 8.1),))
    assert failures(tmp_path / "new", tmp_path / "base") == []
    folder_of(tmp_path / "new", ((10.0, 8.4),))
    assert {failure[1] for failure in failures(tmp_path / "new", tmp_path / "base")} == {"step ms", "speed-up"}


@pytest.mark.parametrize(
    ("group", "key", "value", "quantity"),
    [
        ("memory", "peak_reserved_bytes", 11 * GIB, "reserved GiB"),
        ("memory", "peak_reserved_bytes", 9 * GIB, "reserved GiB"),
        ("memory", "peak_reserved_bytes", None, "reserved GiB"),
        (None, "num_kernels", 900, "kernels"),
        ("capture", "num_graphs", 2, "graphs"),
        ("numerics", "parity", "differs", "parity"),
    ],
)
def test_what_is_not_time_is_caught(tmp_path, group, key, value, quantity):
    found = folder_of(tmp_path / "base")
    for record in found:
        if record["variant"] == "graph":
            (record[group] if group else record)[key] = value
    put(tmp_path / "new", *found)
    ((row, what, _),) = failures(tmp_path / "new", tmp_path / "base")
    assert (row, what) == ("fake/bench graph", quantity)
    assert run(tmp_path / "new", tmp_path / "base").returncode == 1


def test_status_may_change_for_the_better_only(tmp_path):
    folder_of(tmp_path / "base")
    folder_of(tmp_path / "new")
    put(tmp_path / "base", make("more", 0))
    put(tmp_path / "new", make("more", 0, status="oom", message="asked 9 GiB"))
    assert failures(tmp_path / "new", tmp_path / "base") == [("fake/bench more", "status", "changed")]
    assert failures(tmp_path / "base", tmp_path / "new") == [("fake/bench more", "status", "better")]
    assert run(tmp_path / "base", tmp_path / "new").returncode == 0


def test_rows_that_are_gone_fail_and_new_ones_are_listed(tmp_path):
    folder_of(tmp_path / "base")
    folder_of(tmp_path / "new")
    put(tmp_path / "base", make("more", 0))
    assert failures(tmp_path / "new", tmp_path / "base") == [("fake/bench more", "row", "missing")]
    answer = run(tmp_path / "new", tmp_path / "base")
    assert answer.returncode == 1 and "fake/bench more" in answer.stdout
    assert failures(tmp_path / "base", tmp_path / "new") == [("fake/bench more", "row", "new")]
    answer = run(tmp_path / "base", tmp_path / "new")
    assert answer.returncode == 0 and "fake/bench more" in answer.stdout and answer.stdout.endswith("rows: 1 new\n")
    folder_of(tmp_path / "root" / "one")
    folder_of(tmp_path / "root" / "two", model="other")
    assert {failure[0] for failure in failures(tmp_path / "new", tmp_path / "root")} == {
        "other/bench eager",
        "other/bench graph",
    }
    folder_of(tmp_path / "base", model="fake")
    (tmp_path / "base" / "more.r0.json").unlink()
    assert failures(tmp_path / "root", tmp_path / "base") == [
        ("other/bench eager", "row", "new"),
        ("other/bench graph", "row", "new"),
    ]


@pytest.mark.parametrize(("status", "code"), [("unsupported", 0), ("oom", 0), ("failed", 1), ("numerics_failed", 1)])
def test_a_new_row_fails_by_its_status_alone(tmp_path, status, code):
    folder_of(tmp_path / "base")
    folder_of(tmp_path / "new")
    put(tmp_path / "new", make("more", 0, status=status, message="no"))
    answer = run(tmp_path / "new", tmp_path / "base")
    (line,) = [line for line in answer.stdout.splitlines() if line.startswith("fake/bench more")]
    assert answer.returncode == code and line.split()[-1] == ("failed" if code else "new") and status in line


@pytest.mark.parametrize("side", ["base", "new"])
def test_a_side_without_eager_is_refused_by_name(tmp_path, side):
    for name in ("base", "new"):
        folder_of(tmp_path / name / "bench")
    for path in (tmp_path / side / "bench").glob("eager.*"):
        path.unlink()
    answer = run(tmp_path / "new", tmp_path / "base")
    assert answer.returncode == 2 and not answer.stdout and answer.stderr.count("\n") == 1
    assert f"{tmp_path / side}: bench: timed records, but none of 'eager'" in answer.stderr


def test_very_different_numbers_of_rounds_are_said(tmp_path):
    folder_of(tmp_path / "base", ((10.0, 8.0), (10.01, 8.01)) * 2)
    folder_of(tmp_path / "new", ((10.0, 8.0), (10.01, 8.01)))
    answer = run(tmp_path / "new", tmp_path / "base")
    assert answer.returncode == 0 and "base graph: rounds 4 -> 2" in answer.stdout
    folder_of(tmp_path / "new")
    assert "rounds" not in run(tmp_path / "new", tmp_path / "base").stdout


@pytest.mark.parametrize(("factor", "verdicts"), [(1.15, []), (1.3, ["changed"]), (0.7, ["changed"])])
def test_issue_time_is_judged_with_much_room_and_on_the_same_gpu_alone(tmp_path, factor, verdicts):
    folder_of(tmp_path / "base", issue_ms=5.0)
    folder_of(tmp_path / "new", issue_ms=5.0 * factor)
    found = failures(tmp_path / "new", tmp_path / "base")
    assert [verdict for _, quantity, verdict in found if quantity == "issue ms"] == verdicts * 2
    assert len(found) == 2 * len(verdicts)
    folder_of(tmp_path / "new", issue_ms=5.0 * factor, env={"gpu_uuid": "GPU-1"})
    assert failures(tmp_path / "new", tmp_path / "base") == []


def test_without_eager_of_the_same_round_the_speed_up_is_missing(tmp_path):
    found = folder_of(tmp_path / "base")
    put(tmp_path / "new", *found)
    for record in copy.deepcopy(found):
        if record["variant"] == "eager":
            record["env"]["boot_id"] = "other"
            put(tmp_path / "new", record)
    assert failures(tmp_path / "new", tmp_path / "base") == [("fake/bench graph", "speed-up", "missing")]


def test_no_time_of_a_cpu_is_judged(tmp_path):
    put(tmp_path / "base", *on_cpu())
    put(tmp_path / "new", *on_cpu(steps=slower(STEPS, 2.0)))
    assert failures(tmp_path / "new", tmp_path / "base") == []
    other = on_cpu()
    for record in other:
        record["env"]["cpu"] = "EPYC, 4 cores"
        record["capture"]["nodes"] = {"operator": 7} if record["variant"] == "graph" else {}
    put(tmp_path / "new", *other)
    assert failures(tmp_path / "new", tmp_path / "base") == [("fake/bench graph", "operators", "changed")]


# ------------------------------------------------------------------------------------------------
# Which folder against which


def test_roots_are_matched_by_what_the_records_say_and_then_by_path(tmp_path):
    folder_of(tmp_path / "base" / "h200x1" / "fake-bench")
    folder_of(tmp_path / "base" / "h200x1" / "fake-bench-overlap", slower(STEPS, 1.2))
    folder_of(tmp_path / "base" / "h200x1" / "fake-bench-load16", slower(STEPS, 1.5), host_load=16)
    folder_of(tmp_path / "new" / "h200x1" / "fake-bench")
    folder_of(tmp_path / "new" / "h200x1" / "fake-bench-overlap", slower(STEPS, 1.2))
    folder_of(tmp_path / "new" / "renamed", slower(STEPS, 1.5), host_load=16)
    assert failures(tmp_path / "new", tmp_path / "base") == []
    folder_of(tmp_path / "new" / "renamed", slower(STEPS, 1.6), host_load=16)
    assert {failure[0] for failure in failures(tmp_path / "new", tmp_path / "base")} == {"fake/bench load 16 graph"}


def test_a_folder_that_may_be_either_is_refused(tmp_path):
    folder_of(tmp_path / "base")
    folder_of(tmp_path / "new" / "one")
    folder_of(tmp_path / "new" / "two")
    answer = run(tmp_path / "new", tmp_path / "base")
    assert answer.returncode == 2 and "one, two" in answer.stderr
    assert run(tmp_path / "new" / "two", tmp_path / "base").returncode == 0


@pytest.mark.parametrize("make_base", [packed, opened])
def test_a_session_a_group_and_a_root_are_sides_alike(tmp_path, make_base):
    base = make_base(tmp_path / "base" / "h200x1" / "fake-bench", records_of())
    new = packed(tmp_path / "new" / "h200x1" / "fake-bench", records_of(slower(STEPS, 1.05)), hour=9)
    for each in (tmp_path / "base", base.parent, base):
        for other in (tmp_path / "new", new.parent, new):
            found = failures(other, each)
            assert {failure[0] for failure in found} == {"fake/bench graph"}, (each, other)
            assert ("fake/bench graph", "speed-up", "changed") in found
    answer = run(new, tmp_path / "base")
    assert answer.returncode == 1 and "speed-up" in answer.stdout
    # Of one root a session against the group that holds it.
    assert run(new, new.parent).returncode == 0


def test_a_row_is_judged_by_the_sessions_it_rests_on(tmp_path):
    """A slow session of schema 1 stands beside, unpooled."""
    packed(tmp_path / "base" / "fake-bench", records_of())
    packed(tmp_path / "new" / "fake-bench", schema_1(records_of(slower(STEPS, 2.0))), hour=2, day=20)
    packed(tmp_path / "new" / "fake-bench", records_of(), hour=9)
    assert failures(tmp_path / "new", tmp_path / "base") == []
    packed(tmp_path / "new" / "fake-bench", records_of(slower(STEPS, 2.0)), hour=10)
    assert failures(tmp_path / "new", tmp_path / "base") != []


# ------------------------------------------------------------------------------------------------
# What cannot be compared


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"env": {"gpu_name": "NVIDIA A100"}}, "the base is of NVIDIA H200, the new results are of NVIDIA A100"),
        ({"model": "other"}, "no row in common: the base has fake/bench x1, the new results have other/bench x1"),
        ({"preset": "bench-l6"}, "no row in common"),
        ({"env": {"world_size": 2}}, "fake/bench x2"),
        ({"host_load": 16}, "no row in common"),
        ({"config": {"layers": 4}}, "layers was 8 and is 4"),
    ],
)
def test_other_work_or_another_machine_is_refused(tmp_path, changes, what):
    folder_of(tmp_path / "base", config={"layers": 8})
    folder_of(tmp_path / "new", **({"config": {"layers": 8}} | changes))
    answer = run(tmp_path / "new", tmp_path / "base")
    assert answer.returncode == 2 and what in answer.stderr
    assert answer.stderr.count("\n") == 1 and not answer.stdout


def test_a_cpu_is_not_compared_with_a_gpu(tmp_path):
    folder_of(tmp_path / "base")
    put(tmp_path / "new", *on_cpu())
    answer = run(tmp_path / "new", tmp_path / "base")
    assert answer.returncode == 2 and "the base is of NVIDIA H200, the new results are of CPU" in answer.stderr


def test_a_new_option_of_the_configuration_is_no_other_work(tmp_path):
    folder_of(tmp_path / "base", config={"layers": 8, "min_steps": 50})
    folder_of(tmp_path / "new", config={"layers": 8, "min_steps": 80, "fresh": True})
    assert failures(tmp_path / "new", tmp_path / "base") == []


@pytest.mark.parametrize("side", ["base", "new"])
def test_unsound_records_on_either_side_are_refused_by_name(tmp_path, side):
    for name in ("base", "new"):
        found = folder_of(tmp_path / name)
    path = tmp_path / side / "graph.r2.json"
    for text, what in (
        (json.dumps(found[3] | {"schema": 7}), "schema 7"),
        (json.dumps(found[3] | {"statistic_ms": 8.1}), "edited by hand"),
        (json.dumps(found[3] | {"statistic_ms": 8.1, "digest": None}), "does not follow"),
        ("", "not a whole JSON document"),
    ):
        path.write_text(text)
        answer = run(tmp_path / "new", tmp_path / "base")
        assert answer.returncode == 2 and "graph.r2.json" in answer.stderr and what in answer.stderr


def test_missing_and_empty_folders_are_one_line(tmp_path):
    folder_of(tmp_path / "base")
    (tmp_path / "empty").mkdir()
    for new, base in (("empty", "base"), ("base", "empty"), ("base", "nothing"), ("base", "base")):
        answer = run(tmp_path / new, tmp_path / base)
        assert answer.returncode == 2 and answer.stderr.count("\n") == 1 and "Traceback" not in answer.stderr


def test_json_holds_every_quantity(tmp_path):
    folder_of(tmp_path / "base")
    folder_of(tmp_path / "new", slower(STEPS, 1.05))
    answer = run(tmp_path / "new", tmp_path / "base", "--json")
    document = json.loads(answer.stdout)
    assert answer.returncode == 1 and document["holds"] is False and len(document["judged"]) == 15
    (step,) = [
        each for each in document["judged"] if (each["row"], each["quantity"]) == ("fake/bench graph", "step ms")
    ]
    assert step["change"] == pytest.approx(0.05) and step["low"] < 0.05 < step["high"] and step["verdict"] == "changed"


# ------------------------------------------------------------------------------------------------
# How often it is wrong

STEP_NOISE = 0.003
GPU_OFFSET = 0.01
SESSION_OFFSET = 0.003
NUM_SESSIONS = 1000


def simulate(num_rounds, offset, allowed, change=0.0):
    """Share of sessions called changed, by absolute step time and by speed-up.

    A session has an offset that eager and graph share (a GPU, a temperature); each run its own scatter.
    change: what really happened to graph, as a logarithm.
    """
    generator = numpy.random.default_rng(0)
    called = numpy.zeros(2)
    for _ in range(NUM_SESSIONS):
        sides = []
        for shift in (0.0, change):
            own = generator.normal(0, offset)
            eager, graph = generator.normal(own, STEP_NOISE, (2, num_rounds))
            graph += shift
            sides.append((list(graph), list(eager - graph)))
        for index, limit in enumerate((allowed, 0.02)):
            called[index] += gate.judge_time(sides[0][index], sides[1][index], limit)[0] == "changed"
    return called / NUM_SESSIONS


@pytest.mark.parametrize("num_rounds", [1, 2, 3, 5, 8])
def test_false_alarms_are_rare(num_rounds):
    """No change: the same GPU in another session, and another GPU that is about 1 % off."""
    same = simulate(num_rounds, SESSION_OFFSET, 0.02)
    other = simulate(num_rounds, GPU_OFFSET, 0.02 + gate.OTHER_GPU_PERCENT / 100)
    assert max(*same, *other) <= 0.01


@pytest.mark.parametrize(("num_rounds", "least"), [(2, 0.98), (3, 0.99), (5, 0.999)])
@pytest.mark.parametrize("change", [0.05, -0.05])
def test_five_percent_are_caught(num_rounds, least, change):
    same = simulate(num_rounds, SESSION_OFFSET, 0.02, change)
    other = simulate(num_rounds, GPU_OFFSET, 0.02 + gate.OTHER_GPU_PERCENT / 100, change)
    assert min(same) >= least
    assert other[1] >= least


def test_why_another_gpu_needs_more_room():
    """With the tolerance alone, absolute times of two GPUs would be called changed far too often."""
    absolute, ratio = simulate(4, GPU_OFFSET, 0.02)
    assert absolute > 0.1 and ratio <= 0.01


def test_the_interval_is_students_of_two_samples():
    mean, half_width = gate.difference([1.0, 2.0, 3.0], [4.0, 6.0, 8.0])
    # Variances 1 and 4, pooled 2.5, of 3 and 3 values: 4 degrees of freedom.
    assert mean == 4.0 and half_width == pytest.approx(2.77645 * (2.5 * 2 / 3) ** 0.5)
    assert gate.difference([1.0], [2.0, 3.0]) == (1.5, None)
    assert gate.difference([1.0, 1.0], [2.0, 2.0]) == (1.0, 0.0)


def test_the_command_as_a_process(tmp_path):
    folder_of(tmp_path / "base")
    folder_of(tmp_path / "new", slower(STEPS, 1.05))
    command = [sys.executable, "-m", "benchmarks.gate", tmp_path / "new", "--against", tmp_path / "base"]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert answer.returncode == 1 and "2 changed" in answer.stdout and not answer.stderr
