"""The sweep: crossovers of known laws, the session around it with a recorded runner, resume, mistakes, real runs."""

import json
import math
import os
import random
import re
import signal
import statistics
import subprocess
import sys
from types import SimpleNamespace

import pytest

from benchmarks import ROOT, crossover, intervals, run, sessions, sweep
from benchmarks.open_session import opened
from benchmarks.request import Request
from common import record as records
from tests.harness import MODEL, newest, only, processes_with, read, until

pytest_plugins = ["tests.machines"]


# ------------------------------------------------------------------------------------------------
# Laws with a known crossover


def hard(cross, extra=0.005):
    """value -> (eager, graph), ms: the host issues an eager step as fast as the GPU runs a graphed one at `cross`."""
    issue = cross * (1 + extra)
    return lambda value: (max(issue, value), value * (1 + extra))


def soft(cross, extra=0.01):
    """As hard, with a rounded knee: (issue^8 + busy^8)^(1/8) = busy x (1 + extra) at `cross`."""
    issue = cross * ((1 + extra) ** 8 - 1) ** (1 / 8)
    return lambda value: ((issue**8 + value**8) ** (1 / 8), value * (1 + extra))


def law_points(law, noise, seed, num_rounds=5, oom_from=math.inf):
    """measure(value) for `search`: paired rounds of runs whose times scatter by `noise`."""
    source = random.Random(seed)

    def measure(value):
        point = dict.fromkeys(("speedup", "low", "high", "verdict")) | {"value": value, "status": "oom"}
        if value >= oom_from:
            return point
        eager, graph = law(value)
        both = range(num_rounds)
        result = intervals.interval(
            [math.log(eager / graph) + noise * (source.gauss(0, 1) - source.gauss(0, 1)) for _ in both]
        )
        numbers = {"speedup": result.ratio, "low": result.low, "high": result.high, "verdict": result.verdict}
        return point | numbers | {"status": "pass"}

    return measure


def searched(measure, first=1, largest=64, num_refining=0):
    points = []

    def keep(value):
        points.append(measure(value))
        return points[-1]

    crossover.search(keep, first, largest, num_refining)
    return points


def said(points, over="batch", variant="graph"):
    return crossover.finding(points, over, variant, "NVIDIA H200", variant)


@pytest.mark.parametrize("noise", [0.003, 0.01])
@pytest.mark.parametrize("make", [hard, soft])
@pytest.mark.parametrize("cross", [1.5, 3.0, 8.0, 21.0])
def test_a_known_crossover_is_found_within_one_point(make, cross, noise):
    interval = math.floor(math.log2(cross))
    misses = 0
    for seed in range(200):
        found = crossover.bracket(searched(law_points(make(cross), noise, seed)))
        misses += found is None or abs(round(math.log2(found["low"])) - interval) > 1
    assert misses <= 10


@pytest.mark.parametrize("cross", [3.0, 11.0])
def test_refining_narrows_the_bracket_around_the_crossover(cross):
    hits = 0
    for seed in range(100):
        found = crossover.bracket(searched(law_points(hard(cross), 0.003, seed), num_refining=2))
        is_narrow = found["high"] - found["low"] <= 2 ** math.floor(math.log2(cross)) / 2
        hits += is_narrow and found["low"] <= cross <= found["high"]
    assert hits >= 95


@pytest.mark.parametrize("noise", [0.003, 0.01])
def test_graphs_that_never_pay_and_that_always_pay(noise):
    never = [searched(law_points(hard(0.5), noise, seed)) for seed in range(200)]
    assert sum(crossover.bracket(points) is not None or len(points) > 1 for points in never) <= 10
    assert all(re.match("graphs never paid at batch 1|unclear whether", said(points)) for points in never[:5])
    ends = ((math.inf, "64 on NVIDIA H200, the largest measured"), (32, "16 on NVIDIA H200, the largest that fits"))
    for oom_from, end in ends:
        points = searched(law_points(hard(1000), noise, 0, oom_from=oom_from))
        assert crossover.bracket(points) is None
        assert said(points, "batch", "graph") == f"graphs still pay at batch {end}"


def test_where_graphs_do_not_pay_at_the_start_smaller_values_are_measured():
    points = searched(law_points(hard(300), 0.003, 1), first=2048, largest=2**17)
    assert [point["value"] for point in points] == [2048, 1024, 512, 256]
    assert crossover.bracket(points) == {"low": 256, "high": 512, "unclear": False}
    points = searched(law_points(hard(1), 0.003, 2), first=2048, largest=2**17)
    assert [point["value"] for point in points][-1] == 2048 // crossover.REACH
    points = searched(law_points(hard(1000), 0.003, 1, oom_from=4), first=16, largest=64)
    assert [point["value"] for point in points] == [16, 8, 4, 2]
    assert said(points, "batch", "graph").endswith("2 on NVIDIA H200, the largest that fits")


def point(value, speedup=None, half_width=0.01, status="pass"):
    if speedup is None:
        return {"value": value, "status": status} | dict.fromkeys(("speedup", "low", "high", "verdict"))
    result = intervals.Interval(math.log(speedup), half_width, 5)
    numbers = {"speedup": result.ratio, "low": result.low, "high": result.high, "verdict": result.verdict}
    return {"value": value, "status": status} | numbers


def scripted(points):
    by_value = {one["value"]: one for one in points}
    return [one["value"] for one in searched(by_value.__getitem__)]


def test_what_is_too_wide_to_say_settles_nothing():
    wide = [point(1, 1.5), point(2, 1.1, 0.3), point(4, 1.2), point(8, 1.0, 0.002)]
    assert scripted(wide) == [1, 2, 4, 8]
    assert crossover.bracket(wide) == {"low": 4, "high": 8, "unclear": False}
    two = [point(1, 1.5), point(2, 1.1, 0.3), point(4, 0.9, 0.3)]
    assert scripted(two) == [1, 2, 4]
    assert crossover.bracket(two) is None
    assert "batch 2 is too noisy to say (1.100x +-30.0 %)" in said(two, "batch", "graph")
    # However wide, an interval below 1 is a loss.
    assert crossover.kind(point(2, 0.7, 0.2)) == "touches"
    one_round = point(1, 1.5, None)
    assert crossover.kind(one_round) == "wide"


@pytest.mark.parametrize(
    ("points", "bracket", "words"),
    [
        ([point(4, 1.2), point(8, 1.0, 0.004)], (4, 8, False), "graphs stop paying between batch 4 and 8"),
        ([point(4, 1.2), point(8, 0.9)], (4, 8, False), "graphs stop paying between batch 4 and 8"),
        (
            [point(4, 1.2), point(8, 1.0, 0.02)],
            (4, 8, True),
            "8 on NVIDIA H200 (8 is unclear, 1.000x +-2.0 %)",
        ),
        ([point(1, 1.0, 0.004)], None, "graphs never paid at batch 1 on NVIDIA H200"),
        ([point(2, 0.9), point(1, 0.8)], None, "graphs never paid at batch 1 to 2"),
        ([point(1, 1.0, 0.02)], None, "unclear whether graphs pay at batch 1 on NVIDIA H200: every interval holds 1"),
        (
            [point(1, 1.2), point(2, 0.9), point(4, 1.1)],
            None,
            "not monotone: graphs pay at batch 1, 4, not at 2",
        ),
        ([point(1, 0.9), point(2, 1.2), point(4, 0.9)], None, "not monotone: graphs pay at batch 2, not at 1"),
        ([point(1, 0.9), point(2, 1.2)], None, "not monotone: graphs pay at batch 2, not at 1"),
        (
            [point(1, 1.2), point(2, status="failed")],
            None,
            "graphs still pay at batch 1 on NVIDIA H200, and batch 2 is failed",
        ),
        ([point(1, status="oom")], None, "no point has a speed-up: batch 1 oom"),
    ],
)
def test_the_finding_follows_the_numbers(points, bracket, words):
    found = crossover.bracket(points)
    assert (found and (found["low"], found["high"], found["unclear"])) == bracket
    assert words in said(points, "batch", "graph")


def test_another_variant_is_named():
    assert said([point(1, 1.2)], "width", "compile").startswith("compile still pays at width 1")


def test_points_between_are_round_numbers():
    assert [crossover.between(*pair) for pair in ((1, 2), (2, 4), (4, 8), (8, 16), (12, 24))] == [None, 3, 6, 11, 17]
    middle = crossover.between(1024, 2048)
    assert middle % 128 == 0 and crossover.between(middle, 2048) % 128 == 0


# ------------------------------------------------------------------------------------------------
# The session, with a runner that writes records


class Runner:
    """Stands for benchmarks.run: makes the session of one point by a law, and counts."""

    def __init__(self, law, oom_from=math.inf, fails_at=(), stops_at=None, preset=None, gpu="NVIDIA H200"):
        self.law, self.oom_from, self.fails_at, self.stops_at = law, oom_from, fails_at, stops_at
        self.preset, self.gpu, self.calls = preset or (lambda value: "bench"), gpu, []
        self.reports = {}

    def __call__(self, argv):
        args = run.parse(argv)
        value = int(args.flags[args.flags.index("--batch") + 1])
        self.calls.append(value)
        self.argv = argv
        with opened(Request(args)) as session:
            for number in range(session.request.rounds + 1):
                for variant in ("eager", "graph"):
                    if number == 2 and value == self.stops_at:
                        self.stops_at = None
                        return 130
                    status = "failed" if value in self.fails_at else "oom" if value >= self.oom_from else "pass"
                    if (status == "pass" or number == 0) and (variant, number, 1) not in session.records:
                        self.write(session, value, variant, number, status)
            session.pack()
        return 1 if value in self.fails_at else 0

    def write(self, session, value, variant, number, status):
        source = random.Random(f"{len(self.calls)} {value} {variant} {number}")
        kind = "eager" if variant == "eager" else "graph"
        record = records.blank(
            model=MODEL, preset=self.preset(value), variant=variant, round=number, device="cuda", status=status
        )
        env = session.request.env | {"gpu_name": self.gpu, "gpu_uuid": "GPU-0", "num_gpus": 1, "driver": "580.1"}
        record.update(session=session.meta["session"], env=env)
        record["extra"].update(request=session.request.data, kind=kind)
        record["numerics"]["parity"] = "bitwise"
        if value in self.reports:
            record["extra"]["report"] = {"padding %": self.reports[value] if variant == "graph" else 0.0}
        if number and status == "pass":
            eager, graph = self.law(value)
            mean = (eager if variant == "eager" else graph) * (1 + 0.002 * source.gauss(0, 1))
            times = [mean * (1 + 0.01 * source.gauss(0, 1)) for _ in range(11)]
            record["steps"].update(gpu_ms=times, batch=[0] * 11, wall_ms=sum(times))
            record.update(statistic_ms=statistics.median(times), issue_ms=8.0)
            record["busy_ms"] = min(float(value), record["statistic_ms"])
            record["idle_fraction"] = max(0.0, 1 - record["busy_ms"] / record["statistic_ms"])
        if variant == "graph" and status == "pass":
            record["capture"].update(num_graphs=1, num_replays=11, expected_replays=11)
        records.write(session.out / records.file_name(variant, number), record)


def session_of(out, value, over="batch"):
    """The newest session of a point."""
    return newest(out / f"{over}-{value}")


def rewrite(session, edit):
    """Other records in a packed session: edit(record) returns it changed, None for none."""
    found = [edit(record) for record in read(session).values()]
    lines = []
    for record in filter(None, found):
        record["digest"] = records.digest_of(record)
        lines.append(records.dumps(record) + "\n")
    (session / sessions.RECORDS).write_bytes(sessions.compress("".join(lines).encode()))


def go(out, runner, *arguments, model=MODEL, over="batch", flags=()):
    argv = ["--model", model, "--over", over, "--out", str(out), *arguments]
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        return sweep.main([*argv, *(["--", *flags] if flags else [])], runner)
    except SystemExit as stop:
        return stop.code
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def result(out):
    return json.loads((out / "sweep.json").read_text())


# Fewer rounds give no verdict.
FAST = ("--rounds", "5")


def test_a_sweep_from_records_to_its_finding_and_once_more_without_a_run(tmp_path, gpu, quick, capsys):
    out, runner = tmp_path / "out", Runner(hard(7.0, 0.02))
    assert go(out, runner, *FAST) == 0
    assert runner.calls == [1, 2, 4, 8, 6]
    text = capsys.readouterr().out
    found = result(out)
    assert found["schema"] == 1 and (found["model"], found["over"], found["variant"]) == (MODEL, "batch", "graph")
    assert found["crossover"] == {"low": 6, "high": 8, "unclear": False}
    assert found["finding"] == "graphs stop paying between batch 6 and 8 on NVIDIA H200"
    assert found["env"]["gpu_name"] == "NVIDIA H200" and found["env"]["source_hash"]
    first = found["points"][0]
    assert first["speedup"] == pytest.approx(7, rel=0.02) and first["low"] < first["speedup"] < first["high"]
    assert (first["value"], first["folder"], first["flags"]) == (1, "batch-1", ["--batch", "1"])
    assert first["ceiling"] == pytest.approx(7, rel=0.03) and first["issue_ms"] == 8
    assert (first["rounds"], first["status"], first["verdict"]) == (5, "pass", "faster")
    assert text.rstrip().split("\n")[-3] == found["finding"]
    assert "**graphs stop paying" in (out / "table.md").read_text()
    before = (out / "sweep.json").read_bytes()
    assert go(out, runner, *FAST) == 0
    assert len(runner.calls) == len(set(runner.calls)), "no point is run twice"
    assert (out / "sweep.json").read_bytes() == before
    # More rounds than there are is another matter.
    assert go(out, runner, "--rounds", "6", "--values", "2") == 0
    assert runner.calls[-1] == 2


def test_what_a_model_reports_stands_below_the_points(tmp_path, gpu, quick, capsys):
    out, runner = tmp_path / "out", Runner(hard(7.0, 0.02))
    runner.reports = {2: 12.345}
    assert go(out, runner, *FAST, "--values", "1,2") == 0
    table = capsys.readouterr().out.split("\n\n")
    own = next(part.splitlines() for part in table if "padding %" in part)
    assert [line.split() for line in own] == [["batch", "padding", "%"], ["1", "-"], ["2", "12.3"]]
    assert "| batch | padding % |\n| ---: | ---: |" in (out / "table.md").read_text().replace("| --- |", "| ---: |")
    assert go(tmp_path / "other", Runner(hard(7.0, 0.02)), *FAST, "--values", "1") == 0
    assert "padding" not in capsys.readouterr().out


def test_a_stopped_sweep_goes_on_at_the_point_where_it_was(tmp_path, gpu, quick, capsys):
    out, runner = tmp_path / "out", Runner(hard(7.0, 0.02), stops_at=4)
    assert go(out, runner, *FAST) == 130
    assert runner.calls == [1, 2, 4]
    stopped = only(out / "batch-4")
    assert sessions.is_open(stopped) and len(read(stopped)) == 4
    assert [one["value"] for one in result(out)["points"]] == [1, 2]
    assert "still pay at batch 2" in result(out)["finding"]
    assert "the same command goes on" in capsys.readouterr().err
    assert go(out, runner, *FAST) == 0
    assert runner.calls == [1, 2, 4, 4, 8, 6]
    # It went on with the open session, and each point is one session below a root of its own.
    assert only(out / "batch-4").name == sessions.session_name(stopped)
    assert [len(sessions.find(out / f"batch-{value}")) for value in (1, 2, 4, 6, 8)] == [1] * 5
    assert (result(out)["crossover"]["low"], result(out)["crossover"]["high"]) == (6, 8)


def test_full_memory_ends_the_range_and_is_a_row(tmp_path, gpu, quick, capsys):
    out, runner = tmp_path / "out", Runner(hard(1000.0), oom_from=4)
    assert go(out, runner, *FAST) == 0
    assert runner.calls == [1, 2, 4]
    assert result(out)["points"][-1]["status"] == "oom" and result(out)["crossover"] is None
    assert result(out)["finding"] == "graphs still pay at batch 2 on NVIDIA H200, the largest that fits"
    assert "oom" in capsys.readouterr().out.rstrip().split("\n\n")[-4].split("\n")[-1]


def test_a_model_that_was_made_smaller_to_fit_is_no_point(tmp_path, gpu, quick):
    out = tmp_path / "out"
    runner = Runner(hard(1000.0), preset=lambda value: "bench" if value < 4 else "bench-l6")
    assert go(out, runner, *FAST) == 0
    last = result(out)["points"][-1]
    assert (last["value"], last["status"], last["speedup"]) == (4, "oom", None)
    assert "ran as bench-l6" in last["message"]


def test_a_failing_point_is_a_row_ends_the_search_and_is_run_again(tmp_path, gpu, quick, capsys):
    out, runner = tmp_path / "out", Runner(hard(1000.0), fails_at=[2])
    assert go(out, runner, *FAST) == 1
    assert runner.calls == [1, 2]
    assert result(out)["points"][-1]["status"] == "failed"
    assert "not sound: batch 2 (failed)" in capsys.readouterr().out
    assert "still pay at batch 1 on NVIDIA H200, and batch 2 is failed" in result(out)["finding"]
    assert go(out, runner, *FAST, "--values", "1,2,4") == 1
    assert runner.calls[2:] == [2, 4]
    runner.fails_at = ()
    assert go(out, runner, *FAST, "--values", "2") == 0
    assert [one["status"] for one in result(out)["points"]] == ["pass"] * 3


@pytest.mark.parametrize("num_bad", [1, 2])
def test_an_unsound_record_takes_the_numbers_from_its_point(tmp_path, gpu, quick, capsys, num_bad):
    out, runner = tmp_path / "out", Runner(hard(7.0, 0.02))
    assert go(out, runner, *FAST, "--values", "1,2") == 0

    def edit(record):
        is_bad = record["variant"] == "graph" and 1 <= record["round"] <= num_bad
        return record | {"statistic_ms": 99.0} if is_bad else record

    session = session_of(out, 2)
    rewrite(session, edit)
    capsys.readouterr()
    # benchmarks.run would measure it again; this one runs nothing.
    assert go(out, lambda argv: 0, *FAST, "--values", "2") == 1
    text = capsys.readouterr().out
    bad = next(one for one in result(out)["points"] if one["value"] == 2)
    assert (bad["status"], bad["speedup"], bad["rounds"]) == ("failed", None, 0)
    path = f"{session.relative_to(out)}/records.jsonl.xz:"
    assert bad["message"].startswith(f"unsound: {path}") and "statistic_ms 99.0 does not follow" in bad["message"]
    assert bad["message"].endswith("(and 1 more)") == (num_bad == 2)
    assert "batch 2: unsound: batch-2/" in text and "not sound: batch 2 (failed)" in text
    # And it is the newest session that counts.
    assert go(out, runner, *FAST, "--values", "2") == 0
    assert [one["status"] for one in result(out)["points"]] == ["pass", "pass"]
    assert len(sessions.find(out / "batch-2")) == 2


def test_a_point_with_only_unsound_records_is_a_row_of_every_call(tmp_path, gpu, quick):
    out = tmp_path / "out"
    assert go(out, Runner(hard(7.0)), *FAST, "--values", "1,2") == 0
    (session_of(out, 1) / sessions.RECORDS).write_bytes(b"")
    assert go(out, Runner(hard(7.0)), *FAST, "--values", "2") == 1
    assert [(one["value"], one["status"]) for one in result(out)["points"]] == [(1, "failed"), (2, "pass")]


@pytest.mark.parametrize(
    ("untimed", "message"),
    [(["graph"], "no timed round of graph"), (["eager", "graph"], "no timed round of eager and graph")],
)
def test_a_point_without_a_timed_round_does_not_pass(tmp_path, gpu, quick, untimed, message):
    out, whole = tmp_path / "out", Runner(hard(7.0))

    def runner(argv):
        whole(argv)
        rewrite(session_of(out, 1), lambda record: None if record["round"] and record["variant"] in untimed else record)
        return 0

    assert go(out, runner, *FAST, "--values", "1") == 1
    (only,) = result(out)["points"]
    assert (only["status"], only["speedup"], only["message"]) == ("failed", None, message)


def test_a_point_that_another_call_still_measures_is_not_this_call_s_failure(tmp_path, gpu, quick):
    out = tmp_path / "out"
    assert go(out, Runner(hard(7.0)), *FAST, "--values", "2") == 0
    rewrite(session_of(out, 2), lambda record: None if record["round"] else record)
    assert go(out, Runner(hard(7.0)), *FAST, "--values", "1") == 0
    assert [(one["value"], one["status"]) for one in result(out)["points"]] == [(1, "pass"), (2, "failed")]


def test_a_session_that_leaves_no_record_is_a_row(tmp_path, gpu, quick):
    assert go(tmp_path / "out", lambda argv: 2, *FAST) == 1
    (only,) = result(tmp_path / "out")["points"]
    assert (only["status"], only["speedup"]) == ("failed", None) and "no record" in only["message"]


def test_records_of_a_cpu_where_there_is_a_gpu_are_a_failure(tmp_path, gpu, quick):
    assert go(tmp_path / "out", Runner(hard(7.0), gpu=None), *FAST) == 1
    (only,) = result(tmp_path / "out")["points"]
    assert (only["status"], only["message"]) == ("failed", "it ran on a CPU")


def test_a_folder_that_cannot_be_is_one_line(tmp_path, gpu, quick, capsys):
    (tmp_path / "file").write_text("")
    assert go(tmp_path / "file", lambda argv: pytest.fail("nothing may run")) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_value_that_the_script_refuses_is_a_row_and_not_run(tmp_path, gpu, quick):
    out, runner = tmp_path / "out", Runner(hard(2.5, 0.03))
    # Between 2 and 4 lies 3, which the fake does not take.
    assert go(out, runner, *FAST) == 0
    assert runner.calls == [1, 2, 4]
    refused = next(one for one in result(out)["points"] if one["value"] == 3)
    assert refused["status"] == "unsupported" and "every number but this" in refused["message"]
    assert result(out)["finding"] == "graphs stop paying between batch 2 and 4 on NVIDIA H200"


def test_calls_with_other_values_fill_one_folder(tmp_path, gpu, quick, capsys):
    out, runner = tmp_path / "out", Runner(hard(7.0, 0.02))
    for value in ("8", "1", "4"):
        assert go(out, runner, *FAST, "--values", value) == 0
    assert [one["value"] for one in result(out)["points"]] == [1, 4, 8]
    assert (result(out)["crossover"]["low"], result(out)["crossover"]["high"]) == (4, 8)
    # Another GPU's point stays out of it, and so does one of other flags.
    both = ["--model", MODEL, "--variants", "graph", *FAST]
    Runner(hard(7.0, 0.02), gpu="NVIDIA A100")([*both, "--out", str(out / "batch-2"), "--", "--batch", "2"])
    Runner(hard(7.0, 0.02))([*both, "--out", str(out / "batch-5"), "--", "--noise", "0", "--batch", "5"])
    capsys.readouterr()
    assert go(out, runner, *FAST, "--values", "1") == 0
    text = capsys.readouterr().out
    assert "batch-2 is left out: it ran on NVIDIA A100" in text and "batch-5 is left out: flags was" in text
    assert [one["value"] for one in result(out)["points"]] == [1, 4, 8]


def test_minutes_start_no_point_that_cannot_end(tmp_path, gpu, quick, capsys, monkeypatch):
    clock = iter(range(0, 10**6, 20))
    monkeypatch.setattr(sweep, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    runner = Runner(hard(1000.0))
    assert go(tmp_path / "out", runner, *FAST, "--minutes", "2.4") == 0
    assert runner.calls == [1, 2]
    assert "--minutes 2.4: batch 4 not started, the longest so far took 20.0 s" in capsys.readouterr().out
    assert float(runner.argv[runner.argv.index("--minutes") + 1]) < 2.4


def test_a_swept_field_and_what_keeps_its_ratio_to_it(tmp_path, gpu, quick):
    seen = []
    go(tmp_path / "out", lambda argv: seen.append(argv) or 2, "--values", "8", over="width", flags=["--noise", "0"])
    assert seen[0][seen[0].index("--") + 1 :] == ["--noise", "0", "--width", "8", "--inner", "12"]
    assert seen[0][seen[0].index("--out") + 1] == str(tmp_path / "out" / "width-8")


def test_a_swept_field_of_text_takes_the_value_as_it_is(tmp_path, gpu, quick):
    seen = []
    go(tmp_path / "out", lambda argv: seen.append(argv) or 2, "--values", "1,50", over="kind")
    assert [argv[argv.index("--kind") + 1] for argv in seen] == ["1", "50"]


def test_on_a_cpu_points_are_run_and_no_speed_up_is_claimed(tmp_path, no_gpu, quick, capsys):
    seen = []
    go(tmp_path / "out", lambda argv: seen.append(argv[-1]) or 2)
    assert seen == ["1", "2", "4"]
    assert result(tmp_path / "out")["finding"] == "CPU: no speed-up is measured here"
    assert result(tmp_path / "out")["crossover"] is None


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--over", "depth"], ["unknown quantity 'depth'", "batch, width, kind"]),
        (["--values", "1,2.5"], ["'1,2.5' is not a list of whole numbers", "--values"]),
        (["--values", "0"], ["--values"]),
        (["--values", ""], ["--values"]),
        (["--values", "2,3"], ["every number but this"]),
        (["--over", "width", "--values", "4,5"], ["5 makes --inner no whole number"]),
        (["--variant", "eager"], ["unknown variant 'eager'", "graph, compile"]),
        (["--variant", "grpah"], ["--variant takes one of graph, compile"]),
        (["--variants", "graph"], ["--variants", "--variant"]),
        (["--max", "0"], ["--max"]),
        (["--values", "1", "--refine", "2"], ["take one of them"]),
        (["--over", "width", "--max", "3"], ["--max 3 is below 4"]),
        (["--preset", "huge"], ["unknown preset 'huge'"]),
        (["--rounds", "few"], ["'few'"]),
        (["--nonsense", "1"], ["--nonsense"]),
        (["--model", "gtp3"], ["unknown model 'gtp3'"]),
        (["--", "--batch", "2"], ["--batch after --", "leave it out"]),
        (["--", "--nois", "2"], ["--nois"]),
        (["--over=--"], ["--over", "'--'"]),
        (["--values=--"], ["--values", "'--'"]),
        (["--rounds=--"], ["--rounds", "'--'"]),
        (["--model=--"], ["--model", "'--'"]),
    ],
)
def test_a_mistake_is_one_line_and_exit_2(tmp_path, gpu, quick, capsys, arguments, named):
    own = ["--out", str(tmp_path / "out")]
    given = {word.partition("=")[0] for word in arguments}
    own += [] if "--model" in given else ["--model", MODEL]
    own += [] if "--over" in given else ["--over", "batch"]
    try:
        status = sweep.main([*own, *arguments], runner=lambda argv: pytest.fail("nothing may run"))
    except SystemExit as stop:
        status = stop.code
    error = capsys.readouterr().err
    assert status == 2
    assert error.count("\n") == 1 and all(word in error for word in named), error
    assert not (tmp_path / "out").exists()


def test_a_folder_of_another_sweep_is_refused_and_a_half_written_file_is_not(tmp_path, gpu, quick, capsys):
    out, runner = tmp_path / "out", Runner(hard(1.5))
    out.mkdir()
    (out / "sweep.json").write_text('{"schema": 1, "mod')
    assert go(out, runner, *FAST) == 0
    assert go(out, runner, *FAST, over="width") == 2
    assert "holds a sweep of over batch" in capsys.readouterr().err


def test_help_needs_no_torch():
    code = "import sys\nimport benchmarks.sweep as m\ntry:\n    m.main(['--help'])\nexcept SystemExit as s:\n"
    code += "    assert s.code == 0\nassert 'torch' not in sys.modules"
    answer = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr


# ------------------------------------------------------------------------------------------------
# With benchmarks.run itself


def test_real_sessions_are_found_complete_and_not_run_again(tmp_path, gpu, quick, capsys):
    out, calls = tmp_path / "out", []

    def runner(argv):
        calls.append(argv)
        return run.main(argv)

    flags = ["--pretend-gpu", "true", "--issue-ms", "15", "--run-noise", "0.0005", "--noise", "0.001"]
    assert go(out, runner, "--rounds", "1", "--values", "1", flags=flags) == 0
    assert len(calls) == 1
    assert result(out)["points"][0]["speedup"] == pytest.approx(1.5, rel=0.01)
    assert go(out, runner, "--rounds", "1", "--values", "1", flags=flags) == 0
    assert len(calls) == 1
    assert "batch 1 was measured before" in capsys.readouterr().out
    # Of another source it is not that.
    meta = sessions.read_meta(only(out))
    sessions.write_meta(only(out), meta | {"source": meta["source"] | {"source_hash": "other"}})
    assert go(out, runner, "--rounds", "1", "--values", "1", flags=flags) == 0
    assert len(calls) == 2


@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, *(pytest.param(one, marks=pytest.mark.slow) for one in (signal.SIGINT, signal.SIGKILL))],
)
def test_an_interrupted_sweep_leaves_no_process(tmp_path, no_gpu, number):
    out = tmp_path / "out"
    command = ["--model", MODEL, "--over", "batch", "--variant", "hang", "--out", str(out)]
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.sweep", *command],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert until(lambda: list(out.glob("batch-1/cpux1/*/*/logs/hang.r0.log")), 30)
    assert until(lambda: len(processes_with(str(out / "batch-1"))) >= 4)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=30)
    assert until(lambda: processes_with(str(out)) == [], 20)
    if number != signal.SIGKILL:
        assert process.returncode == 130
        assert stderr.count("the same command goes on") == 1 and "Traceback" not in stderr


@pytest.mark.slow
def test_gpt3_over_layers_on_this_machine(tmp_path):
    out = tmp_path / "out"
    command = ["--model", "gpt3", "--over", "layers", "--values", "1,2", "--preset", "tiny", "--rounds", "1"]
    flags = ["--min-window-s", "0.2", "--warmup-min-s", "0", "--warmup-max-s", "0.2"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    for attempt in range(2):
        answer = subprocess.run(
            [sys.executable, "-m", "benchmarks.sweep", *command, "--out", str(out), "--", *flags],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert answer.returncode == 0, answer.stdout + answer.stderr
        assert answer.stdout.count("was measured before") == 2 * attempt
    points = result(out)["points"]
    assert [(one["value"], one["parity"], one["replays"], one["speedup"]) for one in points] == [
        (1, "bitwise", "ok", None),
        (2, "bitwise", "ok", None),
    ]
    for value in (1, 2):
        assert read(only(out / f"layers-{value}"))["graph.r1"]["config"]["layers"] == value


def test_results_take_no_sweep(quick, gpu, capsys):
    assert go(ROOT / "results" / "x", lambda argv: pytest.fail("nothing may run")) == 2
    error = capsys.readouterr().err
    assert "results/ grows by make publish" in error and error.count("\n") == 1
