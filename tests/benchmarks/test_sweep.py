"""The sweep: from made runs to table and finding, resume, mistakes, and real runs."""

import itertools
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import ROOT, run, script, sweep
from benchmarks.command import Mistake
from benchmarks.files import run_file
from benchmarks.files.facts import Raised
from benchmarks.processes import launch, supervisor
from tests.benchmarks.sweeps.test_crossover import hard
from tests.helpers import made_run
from tests.helpers.processes import is_running, until

H200 = {"names": ["NVIDIA H200"], "uuids": ["GPU-1"], "driver": "580.1"}
HERE, DESCRIBED = launch.describe_here(), {}
_describe, _ids = script.describe, itertools.count()


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """An H200; --describe without a process for what was asked before."""
    monkeypatch.setattr(launch, "describe_here", lambda: HERE | {"gpus": H200})
    monkeypatch.setattr(script, "describe", described)
    monkeypatch.setattr(sweep.command.signal, "signal", lambda *_: None)


def described(model, flags, preset=None):
    key = (model, *flags, preset)
    if key not in DESCRIBED:
        try:
            DESCRIBED[key] = _describe(model, flags, preset)
        except Mistake as mistake:
            DESCRIBED[key] = mistake
    if isinstance(DESCRIBED[key], Mistake):
        raise DESCRIBED[key]
    return DESCRIBED[key]


class Runner:
    """Stands for benchmarks.run: the run of one point of gpt3 over batch by a law; it counts."""

    def __init__(self, law, oom_from=1000, fails_at=(), stops_at=None, **more):
        self.law, self.oom_from, self.fails_at, self.stops_at = law, oom_from, fails_at, stops_at
        self.more, self.calls = more, []

    def __call__(self, args):
        value = int(args.flags[args.flags.index("--microbatch") + 1])
        self.calls.append(value)
        if value == self.stops_at:
            self.stops_at = None
            raise KeyboardInterrupt
        own = self.made(value, args)
        if value < self.oom_from:
            return [(own, made_run.write(own, Path(args.out) / "h200x1" / f"gpt3-bench-{args.label}"))], False
        for name, each in own.builds[""].variants.items():
            reason = "out of memory" if name == "eager" else "eager did not run"
            each.blocks, each.raised = [], Raised(kind="oom", reason=reason)
        return [(own, None)], False

    def made(self, value, args):
        number = next(_ids)
        source = random.Random(number)
        more = {"flags": args.flags, "id": f"20261125T10{number:04}Z-a7d396c1", "busy": args.host_load} | self.more
        own = made_run.made_run(cycles=args.cycles or 8, **more)
        variants, times = own.builds[""].variants, self.law(value)
        for name, ms in zip(("eager", "graph_layer"), times, strict=True):
            for block in variants[name].blocks:
                # Beside busy processes eager takes twice as long.
                taken = ms * (1 + 0.002 * source.gauss(0, 1))
                taken *= 2 if block.busy_processes and name == "eager" else 1
                block.step_ms, block.issue_ms = [taken] * block.steps, [8.0]
                block.parent_s = block.worker_s = taken * block.steps / 1e3
        for each in variants.values():
            each.profile.busy_ms = float(value)
        if value in self.fails_at:
            variants["graph_layer"].blocks[0].losses = [1.0, 0.9]
        return own


@pytest.fixture
def go(monkeypatch, tmp_path):
    def sweep_with(runner, *arguments, out=tmp_path / "out", model="gpt3", over="batch", flags=()):
        monkeypatch.setattr(run, "measured", runner)
        argv = ["--model", model, "--over", over, "--out", str(out), *arguments]
        try:
            return sweep.main([*argv, *(["--", *flags] if flags else [])])
        except SystemExit as stop:
            return stop.code

    return sweep_with


def nothing(args):
    pytest.fail("nothing may run")


def result(out):
    return json.loads((out / "sweep.json").read_text())


def statuses(out):
    return [(point["value"], point["status"]) for point in result(out)["points"]]


# ------------------------------------------------------------------------------------------------
# From runs to a finding


def test_a_sweep_from_runs_to_its_finding_and_once_more_without_a_run(tmp_path, go, capsys):
    out, runner = tmp_path / "out", Runner(hard(7.0, 0.02))
    assert go(runner) == 0
    assert runner.calls == [1, 2, 4, 8, 6]
    text, found = capsys.readouterr().out, result(out)
    assert [point["value"] for point in found["points"]] == [1, 2, 4, 6, 8]
    assert found["finding"] == "graphs stop paying between batch 6 and 8 on NVIDIA H200" and found["finding"] in text
    assert found["crossover"] == {"low": 6, "high": 8, "unclear": False}
    first = found["points"][0]
    assert first["base_ms"] / first["ms"] == pytest.approx(first["ratio"]) and first["low"] < 7.0 < first["high"]
    assert (first["busy_ms"], first["word"]) == (1.0, "faster") and first["issue_ms"] == pytest.approx(7.0, rel=0.02)
    assert run_file.read(out / first["run"]).flags == ["--microbatch", "1"]
    table = (out / "table.md").read_text()
    assert table in f"{text}\n" or table.strip() in text
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("|")]
    assert rows[0] == ["batch", "base ms", "ms", "ratio", "95 %", "word", "issue ms", "busy ms", "at most"]
    assert [row[0] for row in rows[2:]] == ["1", "2", "4", "6", "8"]
    assert all(float(row[1]) / float(row[2]) == pytest.approx(float(row[3][:-1]), rel=0.01) for row in rows[2:])
    assert max(map(len, table.splitlines())) <= 100
    assert go(runner) == 0
    assert len(runner.calls) == 5 and capsys.readouterr().out.count("was measured before") == 5
    assert result(out) == found


def test_what_was_measured_otherwise_is_measured_again(tmp_path, go, monkeypatch):
    runner = Runner(hard(7.0))
    assert go(runner, "--values", "1", "--cycles", "4") == 0
    assert go(runner, "--values", "1", "--cycles", "3") == 0 and len(runner.calls) == 1
    assert go(runner, "--values", "1") == 0 and len(runner.calls) == 2
    assert result(tmp_path / "out")["points"][0]["cycles"] == 8
    env = HERE["env"] | {"source_hash": "another"}
    monkeypatch.setattr(launch, "describe_here", lambda: HERE | {"gpus": H200, "env": env})
    assert go(runner, "--values", "1") == 0 and len(runner.calls) == 3


def test_a_sweep_that_is_stopped_goes_on(tmp_path, go, capsys):
    runner = Runner(hard(7.0, 0.02), stops_at=4)
    assert go(runner) == 130
    assert "the same command goes on" in capsys.readouterr().err
    assert statuses(tmp_path / "out") == [(1, "pass"), (2, "pass")]
    assert go(runner) == 0 and runner.calls == [1, 2, 4, 4, 8, 6]


def test_memory_that_is_full_ends_the_search(tmp_path, go):
    out = tmp_path / "out"
    assert go(Runner(hard(1000.0), oom_from=8)) == 0
    assert statuses(out) == [(1, "pass"), (2, "pass"), (4, "pass"), (8, "oom")]
    assert result(out)["points"][-1]["message"] == "out of memory"
    assert result(out)["finding"] == "graphs still pay at batch 4 on NVIDIA H200, the largest that fits"
    # Another call does not forget it.
    assert go(Runner(hard(1000.0)), "--values", "3") == 0
    assert statuses(out)[-1] == (8, "oom")


def test_a_model_that_its_script_made_smaller_is_another_one(tmp_path, go):
    class Smaller(Runner):
        def made(self, value, args):
            own = super().made(value, args)
            own.builds[""].config = {"layers": 8 if value < 4 else 6, "microbatch": value}
            return own

    assert go(Smaller(hard(1000.0))) == 0
    last = result(tmp_path / "out")["points"][-1]
    assert (last["value"], last["status"], last["ratio"]) == (4, "oom", None)
    assert "ran with --layers 6 in the place of 8" in last["message"]


def test_a_failing_point_is_a_row_ends_the_search_and_is_run_again(tmp_path, go, capsys):
    out, runner = tmp_path / "out", Runner(hard(1000.0), fails_at=[2])
    assert go(runner) == 1
    assert runner.calls == [1, 2] and statuses(out)[-1] == (2, "failed")
    text = capsys.readouterr().out
    assert "failed: batch 2" in text and "batch 2: its losses in cycle 0 differ" in text
    assert "still pay at batch 1 on NVIDIA H200, and batch 2 is failed" in result(out)["finding"]
    runner.fails_at = ()
    assert go(runner, "--values", "1,2,4") == 0
    assert runner.calls[2:] == [2, 4] and [status for _, status in statuses(out)] == ["pass"] * 3


def test_one_cycle_has_a_ratio_and_no_interval(tmp_path, go):
    assert go(Runner(hard(7.0)), "--values", "1", "--cycles", "1") == 0
    (only,) = result(tmp_path / "out")["points"]
    assert only["ratio"] == pytest.approx(7.0, rel=0.02) and (only["low"], only["word"]) == (None, "unclear")


def test_points_are_of_the_cycles_beside_busy_processes_where_there_are_some(tmp_path, go, capsys):
    assert go(Runner(hard(7.0, 0.02)), "--values", "1", "--host-load", "4") == 0
    assert result(tmp_path / "out")["points"][0]["ratio"] == pytest.approx(14.0, rel=0.02)
    assert "beside 4 busy processes" in capsys.readouterr().out
    assert go(nothing, "--values", "1", "--host-load", "4") == 0


def test_a_value_that_the_script_refuses_is_a_row(tmp_path, go):
    class Refuses(Runner):
        def __call__(self, args):
            if "3" in args.flags:
                raise Mistake("every number but this")
            return super().__call__(args)

    assert go(Refuses(hard(2.5, 0.03))) == 0
    found = result(tmp_path / "out")
    assert statuses(tmp_path / "out")[2] == (3, "unsupported")
    assert found["points"][2]["message"] == "every number but this"
    assert found["finding"] == "graphs stop paying between batch 2 and 4 on NVIDIA H200"


def test_calls_with_other_values_fill_one_folder_and_a_damaged_point_is_measured_again(tmp_path, go):
    out, runner = tmp_path / "out", Runner(hard(7.0, 0.02))
    for value in ("8", "1", "4"):
        assert go(runner, "--values", value) == 0
    assert [value for value, _ in statuses(out)] == [1, 4, 8]
    assert (result(out)["crossover"]["low"], result(out)["crossover"]["high"]) == (4, 8)
    path = out / "batch-8" / "point.json"
    path.write_text(path.read_text()[:100])
    assert go(runner, "--values", "1") == 0 and [value for value, _ in statuses(out)] == [1, 4]
    assert go(runner, "--values", "8") == 0 and runner.calls == [8, 1, 4, 8]


def test_minutes_start_no_point_that_cannot_end(go, capsys, monkeypatch):
    clock = itertools.count(0, 20)
    monkeypatch.setattr(sweep, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    runner = Runner(hard(1000.0))
    assert go(runner, "--minutes", "2") == 0
    assert runner.calls == [1, 2] and "--minutes 2: batch 4 not started" in capsys.readouterr().out


def test_what_a_point_asks_of_benchmarks_run(tmp_path, go):
    seen = []

    def refuses(args):
        seen.append(args)
        raise Mistake("no")

    go(refuses, "--values", "24", "--ngpu", "1", "--cycles", "4", over="width", flags=["--precision", "bf16"])
    assert (seen[0].variants, seen[0].cycles, seen[0].label) == ("eager,graph_layer", 4, "width-24")
    assert seen[0].out == str(tmp_path / "out" / "width-24")
    assert seen[0].flags == ["--precision", "bf16", "--heads", "24", "--ffn", "12288"]
    # The best eager may be another one.
    go(refuses, "--values", "1", out=tmp_path / "b", model="stable_diffusion")
    assert seen[1].variants == "eager,eager_torch,graph_step"


def test_on_a_cpu_points_are_run_and_no_speed_up_is_claimed(tmp_path, go, monkeypatch):
    monkeypatch.setattr(launch, "describe_here", lambda: HERE | {"gpus": {"names": [], "uuids": [], "driver": None}})
    runner = Runner(hard(7.0), gpus=(), device="cpu")
    go(runner)
    assert runner.calls == [1, 2, 4]
    found = result(tmp_path / "out")
    assert (found["finding"], found["crossover"]) == ("CPU: no speed-up is measured here", None)


def test_without_a_variant_it_is_the_first_headline_graph():
    def made(headline, **kinds):
        return {"model": "it", "variants": dict.fromkeys(kinds, ""), "kinds": kinds, "headline": headline}

    kinds = {"eager": "eager", "a": "graph", "b": "compile", "c": "graph", "d": "graph"}
    assert script.first_graph(made(["eager", "b", "d", "c"], **kinds)) == "d"
    assert script.first_graph(made(["eager", "b"], **kinds)) == "a"
    with pytest.raises(Mistake, match="it has no variant of kind graph: name one, --variant"):
        script.first_graph(made(["eager"], eager="eager", b="compile"))


# ------------------------------------------------------------------------------------------------
# Mistakes


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--over", "depth"], ["unknown quantity 'depth'", "batch, sequence, width, layers"]),
        (["--values", "1,2.5"], ["'1,2.5' is not a list of whole numbers", "--values"]),
        (["--values", f"2,{2**60}"], ["--microbatch"]),
        (["--variant", "eager"], ["unknown variant 'eager'", "graph_layer"]),
        (["--variants", "graph_layer"], ["--variants", "--variant"]),
        (["--label=x"], ["--label", "names its folders"]),
        (["--preset", "huge"], ["unknown preset 'huge'"]),
        (["--cycles", "few"], ["'few'"]),
        (["--nonsense", "1"], ["--nonsense"]),
        (["--model", "gtp3"], ["unknown model 'gtp3'"]),
        (["--out", "x" * 300], ["File name too long"]),
        (["--out", "a\nb"], ["'a\\nb'", "cannot be printed"]),
        (["--", "--microbatch", "2"], ["--microbatch after --", "leave it out"]),
        (["--out", str(ROOT / "results" / "x")], ["results/ grows by make publish"]),
    ],
)
def test_a_mistake_is_one_line_and_exit_2(tmp_path, monkeypatch, capsys, arguments, named):
    monkeypatch.setattr(run, "measured", nothing)
    own = {"--model": "gpt3", "--over": "batch", "--out": str(tmp_path / "out")}
    try:
        status = sweep.main([f"{name}={value}" for name, value in own.items() if name not in arguments] + arguments)
    except SystemExit as stop:
        status = stop.code
    error = capsys.readouterr().err
    assert status == 2
    assert error.count("\n") == 1 and all(word in error for word in named), error
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_another_sweeps_or_a_file_is_refused(tmp_path, go, capsys):
    assert go(Runner(hard(1.5))) == 0
    assert go(nothing, "--preset", "full") == 2
    assert "holds a sweep of preset bench" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert go(nothing, out=tmp_path / "file") == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


# ------------------------------------------------------------------------------------------------
# With benchmarks.run itself


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_sweep_leaves_no_process(tmp_path, number):
    out = tmp_path / "out"
    command = ["--model", "tests.lying_model", "--over", "batch", "--variant", "hangs", "--out", str(out)]
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.sweep", *command, "--preset", "tiny", "--no-control"],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert until(lambda: any('"fact":"parity"' in path.read_text() for path in out.rglob("*.partial.jsonl")))
    # The worker and its supervisor.
    family = supervisor.descendants(process.pid)
    assert len(family) >= 2
    process.send_signal(number)
    _, stderr = process.communicate(timeout=240)
    assert until(lambda: not any(map(is_running, family)))
    if number != signal.SIGKILL:
        assert process.returncode == 130
        assert "the same command goes on" in stderr and "Traceback" not in stderr


@pytest.mark.slow
def test_gpt3_over_layers_on_this_machine(tmp_path):
    out = tmp_path / "out"
    command = ["--model", "gpt3", "--over", "layers", "--values", "1,2", "--variant", "graph_layer"]
    command += ["--preset", "tiny", "--cycles", "1", "--no-control"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "benchmarks.sweep", *command, "--out", str(out)]
    for attempt in range(2):
        answer = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert answer.returncode == 0, answer.stdout + answer.stderr
        assert answer.stdout.count("was measured before") == 2 * attempt
    for value, point in zip((1, 2), result(out)["points"], strict=True):
        own = run_file.read(out / point["run"])
        assert (point["value"], point["status"], own.label) == (value, "pass", f"layers-{value}")
        assert own.builds[""].config["layers"] == value and own.builds[""].variants["graph_layer"].blocks
