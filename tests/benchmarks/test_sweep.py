"""The sweep: from runs to table and finding with a runner that writes made run files, resume, mistakes, real runs."""

import itertools
import json
import os
import random
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from benchmarks import ROOT, run, script, sweep
from benchmarks.command import Mistake
from benchmarks.files import run_file
from benchmarks.processes import launch, supervisor
from tests.benchmarks.sweeps.test_crossover import hard
from tests.helpers import made_run
from tests.helpers.processes import is_running, until

H200 = {"names": ["NVIDIA H200"], "uuids": ["GPU-1"], "driver": "580.1"}
HERE, DESCRIBED = launch.describe_here(), {}
_describe, _ids = script.describe, itertools.count()


@pytest.fixture
def gpu(monkeypatch):
    """An H200; --describe without a process for what was asked before."""
    monkeypatch.setattr(launch, "describe_here", lambda: HERE | {"gpus": H200})
    monkeypatch.setattr(script, "describe", described)


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
    """Stands for benchmarks.run: writes the run of one point of gpt3 over batch by a law, and counts."""

    def __init__(self, law, oom_from=1000, fails_at=(), stops_at=None, gpu="NVIDIA H200", **more):
        self.law, self.oom_from, self.fails_at, self.stops_at = law, oom_from, fails_at, stops_at
        self.gpu, self.more, self.calls = gpu, more, []

    def __call__(self, argv):
        args = run.parse(argv)
        value = int(args.flags[args.flags.index("--microbatch") + 1])
        self.calls.append(value)
        self.argv = argv
        if value == self.stops_at:
            self.stops_at = None
            return 130, ""
        if value >= self.oom_from:
            # What benchmarks.run prints where nothing fits; it leaves no file.
            return 1, "a card\n  eager: oom (out of memory)\n  graph_layer: failed (eager did not run)\n"
        own = self.made(value, args)
        folder = f"{args.out}/{'h200' if self.gpu else 'cpu'}x1/gpt3-bench-{args.label}"
        folder += f"-load{args.host_load}" if args.host_load else ""
        made_run.write(own, type(ROOT)(folder))
        return 0, ""

    def made(self, value, args):
        number = next(_ids)
        source = random.Random(number)
        more = {"gpus": ({"name": self.gpu, "uuid": "GPU-1"},) if self.gpu else (), "flags": args.flags} | self.more
        more |= {"id": f"20261125T10{number:04}Z-a7d396c1", "busy": args.host_load, "cycles": args.cycles or 8}
        own = made_run.made_run(source={"hash": HERE["env"]["source_hash"]}, **more)
        variants, times = own.builds[""].variants, self.law(value)
        for name, ms in zip(("eager", "graph_layer"), times, strict=True):
            for block in variants[name].blocks:
                # Beside busy processes eager takes twice as long.
                block.ms = ms * (1 + 0.002 * source.gauss(0, 1))
                block.ms *= 2 if block.busy_processes and name == "eager" else 1
                block.issue_ms = 8.0
        for each in variants.values():
            each.profile["busy_ms"] = float(value)
        if value in self.fails_at:
            variants["graph_layer"].status, variants["graph_layer"].reason = "failed", "losses differ"
        return own


def go(out, runner, *arguments, model="gpt3", over="batch", flags=()):
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


def statuses(out):
    return [(point["value"], point["status"]) for point in result(out)["points"]]


# ------------------------------------------------------------------------------------------------
# From runs to a finding


def test_a_sweep_from_runs_to_its_finding_and_once_more_without_a_run(tmp_path, gpu, capsys):
    out, runner = tmp_path / "out", Runner(hard(7.0, 0.02))
    assert go(out, runner) == 0
    assert runner.calls == [1, 2, 4, 8, 6]
    text, found = capsys.readouterr().out, result(out)
    assert [point["value"] for point in found["points"]] == [1, 2, 4, 6, 8]
    assert found["finding"] == "graphs stop paying between batch 6 and 8 on NVIDIA H200" and found["finding"] in text
    assert found["crossover"] == {"low": 6, "high": 8, "unclear": False}
    first = found["points"][0]
    assert first["base_ms"] / first["ms"] == pytest.approx(first["ratio"]) and first["low"] < 7.0 < first["high"]
    assert (first["issue_ms"], first["busy_ms"], first["predicted"], first["word"]) == (8.0, 1.0, 8.0, "faster")
    assert run_file.read(out / first["run"]).flags == ["--microbatch", "1"]
    header, *rows = (line.split() for line in text[text.rindex("batch  base ms") :].splitlines()[:6])
    assert header == ["batch", "base", "ms", "ms", "ratio", "95", "%", "word", "issue", "ms", "busy", "ms", "predicted"]
    assert [row[0] for row in rows] == ["1", "2", "4", "6", "8"]
    assert all(float(row[1]) / float(row[2]) == pytest.approx(float(row[3][:-1]), rel=0.01) for row in rows)
    table = (out / "table.md").read_text()
    assert table.startswith(f"**{found['finding']}**") and "| batch | base ms |" in table
    lines = [*text.splitlines(), *table.splitlines()]
    assert max(len(line) for line in lines if str(tmp_path) not in line) <= 100
    assert go(out, runner) == 0
    assert len(runner.calls) == 5 and capsys.readouterr().out.count("was measured before") == 5
    assert result(out) == found


def test_what_was_measured_otherwise_is_measured_again(tmp_path, gpu, monkeypatch):
    out, runner = tmp_path / "out", Runner(hard(7.0))
    assert go(out, runner, "--values", "1", "--cycles", "4") == 0
    assert go(out, runner, "--values", "1", "--cycles", "3") == 0 and len(runner.calls) == 1
    assert go(out, runner, "--values", "1") == 0 and len(runner.calls) == 2
    assert len(list(out.rglob("2026*.json"))) == 2 and result(out)["points"][0]["cycles"] == 8
    env = HERE["env"] | {"source_hash": "another"}
    monkeypatch.setattr(launch, "describe_here", lambda: HERE | {"gpus": H200, "env": env})
    assert go(out, runner, "--values", "1") == 0 and len(runner.calls) == 3


def test_a_sweep_that_is_stopped_goes_on(tmp_path, gpu, capsys):
    out, runner = tmp_path / "out", Runner(hard(7.0, 0.02), stops_at=4)
    assert go(out, runner) == 130
    assert "the same command goes on" in capsys.readouterr().err
    assert statuses(out) == [(1, "pass"), (2, "pass")]
    assert go(out, runner) == 0
    assert runner.calls == [1, 2, 4, 4, 8, 6]


def test_memory_that_is_full_ends_the_search(tmp_path, gpu):
    out = tmp_path / "out"
    assert go(out, Runner(hard(1000.0), oom_from=8)) == 0
    assert statuses(out) == [(1, "pass"), (2, "pass"), (4, "pass"), (8, "oom")]
    assert result(out)["points"][-1]["message"] == "out of memory"
    assert result(out)["finding"] == "graphs still pay at batch 4 on NVIDIA H200, the largest that fits"
    # Another call does not forget it.
    assert go(out, Runner(hard(1000.0)), "--values", "3") == 0
    assert statuses(out)[-1] == (8, "oom")


def test_a_model_that_its_script_made_smaller_is_another_one(tmp_path, gpu):
    class Smaller(Runner):
        def made(self, value, args):
            own = super().made(value, args)
            own.builds[""].config = {"layers": 8 if value < 4 else 6, "microbatch": value}
            return own

    out = tmp_path / "out"
    assert go(out, Smaller(hard(1000.0))) == 0
    last = result(out)["points"][-1]
    assert (last["value"], last["status"], last["ratio"]) == (4, "oom", None)
    assert "ran with --layers 6 in the place of 8" in last["message"]


def test_a_failing_point_is_a_row_ends_the_search_and_is_run_again(tmp_path, gpu, capsys):
    out, runner = tmp_path / "out", Runner(hard(1000.0), fails_at=[2])
    assert go(out, runner) == 1
    assert runner.calls == [1, 2] and statuses(out)[-1] == (2, "failed")
    text = capsys.readouterr().out
    assert "failed: batch 2" in text and "batch 2: losses differ" in text
    assert "still pay at batch 1 on NVIDIA H200, and batch 2 is failed" in result(out)["finding"]
    runner.fails_at = ()
    assert go(out, runner, "--values", "1,2,4") == 0
    assert runner.calls[2:] == [2, 4] and [status for _, status in statuses(out)] == ["pass"] * 3


@pytest.mark.parametrize(
    ("said", "status", "message"),
    [("  eager: unsupported (needs 9 GPUs)\n", "unsupported", "needs 9 GPUs"), ("", "failed", "left no run")],
)
def test_a_run_that_leaves_no_file_is_a_row_whatever_was_there(tmp_path, gpu, monkeypatch, said, status, message):
    out = tmp_path / "out"
    assert go(out, lambda argv: (1, said), "--values", "1") == 1
    assert statuses(out) == [(1, status)] and message in result(out)["points"][0]["message"]
    # Nor does a run of other source speak for this one.
    env = HERE["env"] | {"source_hash": "another"}
    assert go(out, Runner(hard(7.0)), "--values", "1,2") == 0
    monkeypatch.setattr(launch, "describe_here", lambda: HERE | {"gpus": H200, "env": env})
    assert go(out, lambda argv: (1, said), "--values", "1,2") == 1
    assert statuses(out) == [(1, status), (2, status)]


def test_one_cycle_has_a_ratio_and_no_interval(tmp_path, gpu, capsys):
    out = tmp_path / "out"
    assert go(out, Runner(hard(7.0)), "--values", "1", "--cycles", "1") == 0
    (only,) = result(out)["points"]
    assert only["ratio"] == pytest.approx(7.0, rel=0.02) and (only["low"], only["word"]) == (None, "unclear")


def test_points_are_of_the_cycles_beside_busy_processes_where_there_are_some(tmp_path, gpu, capsys):
    out = tmp_path / "out"
    assert go(out, Runner(hard(7.0, 0.02)), "--values", "1", "--host-load", "4") == 0
    assert result(out)["points"][0]["ratio"] == pytest.approx(14.0, rel=0.02)
    assert "beside 4 busy processes" in capsys.readouterr().out
    assert go(out, lambda argv: pytest.fail("it is there"), "--values", "1", "--host-load", "4") == 0


def test_a_value_that_the_script_refuses_is_a_row_and_not_run(tmp_path, gpu, monkeypatch):
    def refuses(model, flags, preset=None):
        if "3" in flags:
            raise Mistake("every number but this")
        return described(model, flags, preset)

    monkeypatch.setattr(script, "describe", refuses)
    out, runner = tmp_path / "out", Runner(hard(2.5, 0.03))
    assert go(out, runner) == 0
    assert runner.calls == [1, 2, 4] and statuses(out)[2] == (3, "unsupported")
    assert result(out)["points"][2]["message"] == "every number but this"
    assert result(out)["finding"] == "graphs stop paying between batch 2 and 4 on NVIDIA H200"


def test_calls_with_other_values_fill_one_folder(tmp_path, gpu, capsys):
    out, runner = tmp_path / "out", Runner(hard(7.0, 0.02))
    for value in ("8", "1", "4"):
        assert go(out, runner, "--values", value) == 0
    assert [value for value, _ in statuses(out)] == [1, 4, 8]
    assert (result(out)["crossover"]["low"], result(out)["crossover"]["high"]) == (4, 8)
    # Runs of another GPU of that kind, or with other flags, and damaged files stay out of it.
    words = ["--model", "gpt3", "--cycles", "9"]
    for value, kind, flags in ((2, "NVIDIA H200 NVL", []), (5, "NVIDIA H200", ["--tp", "2"])):
        own = [*words, "--out", str(out / f"batch-{value}"), "--label", f"batch-{value}", "--"]
        Runner(hard(7.0), gpu=kind)([*own, *flags, "--microbatch", str(value)])
    (path,) = (out / "batch-8").rglob("2026*.json")
    path.chmod(0o644)
    path.write_text(path.read_text()[:100])
    capsys.readouterr()
    assert go(out, runner, "--values", "1") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "is left out: flags --microbatch 2, on NVIDIA H200 NVL" in text and "flags --tp 2" in text
    assert "no whole JSON" in text and [value for value, _ in statuses(out)] == [1, 4]


def test_minutes_start_no_point_that_cannot_end(tmp_path, gpu, capsys, monkeypatch):
    clock = itertools.count(0, 20)
    monkeypatch.setattr(sweep, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    runner = Runner(hard(1000.0))
    assert go(tmp_path / "out", runner, "--minutes", "2") == 0
    assert runner.calls == [1, 2] and "--minutes" not in runner.argv
    assert "--minutes 2: batch 4 not started, the longest so far took 20 s" in capsys.readouterr().out
    # benchmarks.run with cycles of its own choice must end in time too.
    seen = []
    go(tmp_path / "auto", lambda argv: seen.append(argv) or (2, ""), "--minutes", "5", "--cycles", "auto")
    assert float(seen[0][seen[0].index("--minutes") + 1]) < 5


def test_what_a_point_asks_of_benchmarks_run(tmp_path, gpu):
    seen, more = [], ["--values", "24", "--ngpu", "1", "--cycles", "4"]
    go(tmp_path / "a", lambda argv: seen.append(argv) or (2, ""), *more, over="width", flags=["--precision", "bf16"])
    assert seen[0] == [
        *["--model", "gpt3", "--variants", "eager,graph_layer", "--ngpu", "1", "--cycles", "4", "--label", "width-24"],
        *["--out", str(tmp_path / "a" / "width-24"), "--", "--precision", "bf16", "--heads", "24", "--ffn", "12288"],
    ]
    # The best eager may be another one.
    go(tmp_path / "b", lambda argv: seen.append(argv) or (2, ""), "--values", "1", model="stable_diffusion")
    assert seen[1][3] == "eager,eager_torch,graph_step"


def test_on_a_cpu_points_are_run_and_no_speed_up_is_claimed(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "describe_here", lambda: HERE | {"gpus": {"names": [], "uuids": [], "driver": None}})
    seen = []
    go(tmp_path / "out", lambda argv: seen.append(argv[-1]) or (2, ""))
    assert seen == ["1", "2", "4"]
    assert (result(tmp_path / "out")["finding"], result(tmp_path / "out")["crossover"]) == (
        "CPU: no speed-up is measured here",
        None,
    )


def test_without_a_variant_it_is_the_first_headline_graph():
    def described(headline, **kinds):
        return {"model": "it", "variants": dict.fromkeys(kinds, ""), "kinds": kinds, "headline": headline}

    kinds = {"eager": "eager", "a": "graph", "b": "compile", "c": "graph", "d": "graph"}
    assert script.first_graph(described(["eager", "b", "d", "c"], **kinds)) == "d"
    assert script.first_graph(described(["eager", "b"], **kinds)) == "a"
    with pytest.raises(Mistake, match="it has no variant of kind graph: name one, --variant"):
        script.first_graph(described(["eager"], eager="eager", b="compile"))


# ------------------------------------------------------------------------------------------------
# Mistakes


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--over", "depth"], ["unknown quantity 'depth'", "batch, sequence, width, layers"]),
        (["--values", "1,2.5"], ["'1,2.5' is not a list of whole numbers", "--values"]),
        (["--values", "0"], ["--values"]),
        (["--values", ""], ["--values"]),
        (["--values", f"2,{2**60}"], ["--microbatch"]),
        (["--model", "tests.lying_model", "--over=size", "--values", "2,3"], ["3 makes --batch no whole number"]),
        (["--variant", "eager"], ["unknown variant 'eager'", "graph_layer"]),
        (["--variant", "grpah"], ["--variant takes one of graph_layer"]),
        (["--variants", "graph_layer"], ["--variants", "--variant"]),
        (["--label=x"], ["--label", "names its folders"]),
        (["--max", "0"], ["--max"]),
        (["--values", "1", "--refine", "2"], ["take one of them"]),
        (["--over", "width", "--max", "3"], ["--max 3 is below 12"]),
        (["--preset", "huge"], ["unknown preset 'huge'"]),
        (["--cycles", "few"], ["'few'"]),
        (["--rounds", "5"], ["--rounds"]),
        (["--nonsense", "1"], ["--nonsense"]),
        (["--model", "gtp3"], ["unknown model 'gtp3'"]),
        (["--model", "x" * 300], ["File name too long"]),
        (["--out", "x" * 300], ["File name too long"]),
        (["--out", "a\nb"], ["'a\\nb'", "cannot be printed"]),
        (["--out", "a\udcff"], ["'a\\udcff'", "cannot be printed"]),
        (["--", "--microbatch", "2"], ["--microbatch after --", "leave it out"]),
        (["--", "--layerz", "2"], ["--layerz"]),
        (["--over=--"], ["--over", "'--'"]),
        (["--cycles=--"], ["--cycles", "'--'"]),
        (["--out", str(ROOT / "results" / "x")], ["results/ grows by make publish"]),
    ],
)
def test_a_mistake_is_one_line_and_exit_2(tmp_path, gpu, capsys, arguments, named):
    given = {word.partition("=")[0] for word in arguments}
    own = [
        word
        for name, value in (("--model", "gpt3"), ("--over", "batch"))
        if name not in given
        for word in (name, value)
    ]
    own += [] if "--out" in given else ["--out", str(tmp_path / "out")]
    try:
        status = sweep.main([*own, *arguments], runner=lambda argv: pytest.fail("nothing may run"))
    except SystemExit as stop:
        status = stop.code
    error = capsys.readouterr().err
    assert status == 2
    assert error.count("\n") == 1 and all(word in error for word in named), error
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_another_sweeps_or_a_file_is_refused_and_a_half_written_file_is_not(tmp_path, gpu, capsys):
    out, runner = tmp_path / "out", Runner(hard(1.5))
    out.mkdir()
    (out / "sweep.json").write_text('{"schema": 2, "mod')
    assert go(out, runner) == 0
    assert go(out, runner, over="width") == 2
    assert "holds a sweep of over batch" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert go(tmp_path / "file", lambda argv: pytest.fail("nothing may run")) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_help_needs_no_torch():
    code = "import sys\nimport benchmarks.sweep as m\ntry:\n    m.main(['--help'])\nexcept SystemExit as s:\n"
    code += "    assert s.code == 0\nassert 'torch' not in sys.modules"
    answer = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr


# ------------------------------------------------------------------------------------------------
# With benchmarks.run itself


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
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
    assert until(lambda: any('"fact":"parity"' in path.read_text() for path in out.rglob("*.partial.jsonl")), 60)
    # A run and its worker, and a supervisor of each.
    family = supervisor.descendants(process.pid)
    assert len(family) >= 4
    process.send_signal(number)
    _, stderr = process.communicate(timeout=60)
    assert until(lambda: not any(map(is_running, family)), 40)
    if number != signal.SIGKILL:
        assert process.returncode == 130
        assert "the same command goes on" in stderr and "Traceback" not in stderr


@pytest.mark.slow
def test_gpt3_over_layers_on_this_machine(tmp_path):
    out = tmp_path / "out"
    command = ["--model", "gpt3", "--over", "layers", "--values", "1,2", "--preset", "tiny", "--cycles", "2"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    for attempt in range(2):
        answer = subprocess.run(
            [sys.executable, "-m", "benchmarks.sweep", *command, "--variant", "graph_layer", "--out", str(out)],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert answer.returncode == 0, answer.stdout + answer.stderr
        assert answer.stdout.count("was measured before") == 2 * attempt
    for value, point in zip((1, 2), result(out)["points"], strict=True):
        own = run_file.read(out / point["run"])
        assert (point["value"], point["status"], own.label) == (value, "pass", f"layers-{value}")
        assert own.builds[""].config["layers"] == value and own.builds[""].variants["graph_layer"].blocks
