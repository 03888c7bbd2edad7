"""The sweep: from made runs to its table, resume, mistakes, and real runs."""

import itertools
import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import sweep
from graph_worth.folders import ROOT
from graph_worth.harness import run, script
from graph_worth.harness.command import Mistake
from graph_worth.harness.files import run_file
from graph_worth.harness.files.facts import Raised
from graph_worth.harness.processes import launch, supervisor
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
    """Stands for benchmarks.run: a run of gpt3 over batch, whose host issues a step in 7 ms; it counts."""

    def __init__(self, oom_from=1000, fails_at=(), stops_at=None, **more):
        self.oom_from, self.fails_at, self.stops_at = oom_from, fails_at, stops_at
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
        more |= {"label": args.label, "source": {"hash": launch.describe_here()["env"]["source_hash"]}}
        own = made_run.made_run(cycles=args.cycles or 8, **more)
        variants, times = own.builds[""].variants, (max(7.0, value), float(value))
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
    def sweep_with(runner, values, *arguments, out=tmp_path / "out", model="gpt3", over="batch", flags=()):
        monkeypatch.setattr(run, "measured", runner)
        argv = ["--model", model, "--over", over, "--values", values, "--out", str(out), *arguments]
        try:
            return sweep.main([*argv, *(["--", *flags] if flags else [])])
        except SystemExit as stop:
            return stop.code

    return sweep_with


def nothing(args):
    pytest.fail("nothing may run")


def rows(text):
    """The cells of the last table, one list a point; empty columns are left out."""
    lines = text.splitlines()
    begin = max(index for index, line in enumerate(lines) if " over " in line and " against " in line) + 2
    table = list(itertools.takewhile(lambda line: line.lstrip()[:1].isdigit(), lines[begin:]))
    return [re.split(" {2,}", line.strip()) for line in table]


def values(text):
    return [row[0] for row in rows(text)]


# ------------------------------------------------------------------------------------------------
# From runs to a table


def test_a_sweep_measures_each_value_and_once_more_without_a_run(tmp_path, go, capsys):
    out, runner = tmp_path / "out", Runner()
    assert go(runner, "4,1,2,8") == 0
    assert runner.calls == [1, 2, 4, 8]
    text = capsys.readouterr().out
    title, names = next(pair for pair in itertools.pairwise(text.splitlines()) if " over " in pair[0])
    assert title == "gpt3/bench over batch (--microbatch): graph_layer against eager, NVIDIA H200 x1"
    assert re.split(" {2,}", names) == [
        *["batch", "base ms", "ms", "ratio", "95 %", "word", "issue ms", "busy ms", "at most"]
    ]
    assert values(text) == ["1", "2", "4", "8"]
    assert all(float(row[1]) / float(row[2]) == pytest.approx(float(row[3][:-1]), rel=0.01) for row in rows(text))
    first, *_, last = rows(text)
    low, high = map(float, first[4].split(" to "))
    assert low < 7.0 < high and (first[5], first[7]) == ("faster", "1.00")
    assert float(first[6]) == pytest.approx(7.0, rel=0.02) and float(first[8][:-1]) == pytest.approx(7.0, rel=0.02)
    assert last[5] == "same"
    assert max(map(len, text.splitlines())) <= 100 + len(str(tmp_path))
    (path,) = (out / "batch-1").rglob("*.json")
    assert run_file.read(path).flags == ["--microbatch", "1"]
    assert go(runner, "4,1,2,8") == 0
    again = capsys.readouterr().out
    assert len(runner.calls) == 4 and again.count("was measured before") == 4 and rows(again) == rows(text)


def test_a_point_of_fewer_cycles_or_of_another_source_or_request_is_measured_again(go, monkeypatch, capsys):
    runner = Runner()
    assert go(runner, "1", "--cycles", "4") == 0
    assert go(runner, "1", "--cycles", "3") == 0 and len(runner.calls) == 1
    assert go(runner, "1") == 0 and len(runner.calls) == 2
    assert go(runner, "1", "--host-load", "4") == 0 and len(runner.calls) == 3
    # The newest run of the folder is beside busy processes.
    assert go(runner, "1") == 0 and len(runner.calls) == 3
    assert go(runner, "2", flags=["--precision", "bf16"]) == 0 and len(runner.calls) == 4
    assert values(capsys.readouterr().out) == ["2"]
    env = HERE["env"] | {"source_hash": "another"}
    monkeypatch.setattr(launch, "describe_here", lambda: HERE | {"gpus": H200, "env": env})
    assert go(runner, "1") == 0 and len(runner.calls) == 5


def test_a_sweep_that_is_stopped_goes_on(go, capsys):
    runner = Runner(stops_at=4)
    assert go(runner, "1,2,4,8") == 130
    assert "the same command goes on" in capsys.readouterr().err
    assert go(runner, "1,2,4,8") == 0 and runner.calls == [1, 2, 4, 4, 8]


def test_memory_that_is_full_is_a_row(tmp_path, go, capsys):
    assert go(Runner(oom_from=8), "4,8,16") == 0
    text = capsys.readouterr().out
    assert [(row[0], row[-1]) for row in rows(text)][1:] == [("8", "oom"), ("16", "oom")]
    assert "oom: batch 8 (out of memory)" in text
    assert go(Runner(oom_from=8), "8", out=tmp_path / "b") == 1, "nothing was timed"


def test_a_model_that_its_script_made_smaller_is_another_one(go, capsys):
    class Smaller(Runner):
        def made(self, value, args):
            own = super().made(value, args)
            own.builds[""].config = {"layers": 8 if value < 4 else 6, "microbatch": value}
            own.builds[""].asked_layers = 8
            return own

    assert go(Smaller(), "1,4") == 0
    text = capsys.readouterr().out
    assert rows(text)[1] == ["4", "oom"]
    assert "oom: batch 4 (it ran with --layers 6 in the place of 8, which does not fit)" in text


def test_a_failing_point_is_a_row_and_is_measured_again(go, capsys):
    runner = Runner(fails_at=[2])
    assert go(runner, "1,2,4") == 1
    text = capsys.readouterr().out
    assert rows(text)[1] == ["2", "failed"] and "failed: batch 2 (its losses in cycle 0 differ" in text
    runner.fails_at = ()
    assert go(runner, "1,2,4") == 0
    assert runner.calls == [1, 2, 4, 2] and "failed" not in capsys.readouterr().out


def test_one_cycle_has_a_ratio_and_no_interval(go, capsys):
    assert go(Runner(), "1", "--cycles", "1") == 0
    ((*_, ratio, word, _, _, _),) = rows(capsys.readouterr().out)
    assert float(ratio[:-1]) == pytest.approx(7.0, rel=0.02) and word == "unclear"


def test_points_are_of_the_cycles_beside_busy_processes_where_there_are_some(go, capsys):
    assert go(Runner(), "1", "--host-load", "4") == 0
    text = capsys.readouterr().out
    assert float(rows(text)[0][3][:-1]) == pytest.approx(14.0, rel=0.02) and "beside 4 busy processes" in text
    assert go(nothing, "1", "--host-load", "4") == 0


def test_a_value_that_the_run_refuses_is_a_row(go, capsys):
    class Refuses(Runner):
        def __call__(self, args):
            if "3" in args.flags:
                raise Mistake("every number but this")
            return super().__call__(args)

    assert go(Refuses(), "2,3,4") == 0
    text = capsys.readouterr().out
    assert rows(text)[1] == ["3", "unsupported"] and "unsupported: batch 3 (every number but this)" in text


def test_calls_with_other_values_fill_one_folder_and_a_damaged_run_is_measured_again(tmp_path, go, capsys):
    out, runner = tmp_path / "out", Runner()
    for value in ("8", "1", "4"):
        assert go(runner, value) == 0
    assert values(capsys.readouterr().out) == ["1", "4", "8"]
    (path,) = (out / "batch-8").rglob("*.json")
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:100])
    assert go(runner, "1") == 0 and values(capsys.readouterr().out) == ["1", "4"]
    assert go(runner, "8") == 0 and runner.calls == [8, 1, 4, 8]


def test_sweeps_of_two_requests_share_a_folder_and_no_table(go, capsys):
    assert go(Runner(), "1,2") == 0
    assert go(Runner(preset="full"), "4", "--preset", "full") == 0
    assert values(capsys.readouterr().out) == ["4"]


def test_minutes_start_no_point_that_cannot_end(go, capsys, monkeypatch):
    clock = itertools.count(0, 20)
    monkeypatch.setattr(sweep, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    runner = Runner()
    assert go(runner, "1,2,4,8", "--minutes", "2") == 0
    text = capsys.readouterr().out
    assert runner.calls == [1, 2] == list(map(int, values(text))) and "--minutes 2: batch 4 not started" in text


def test_what_a_point_asks_of_benchmarks_run(tmp_path, go):
    seen = []

    def refuses(args):
        seen.append(args)
        raise Mistake("no")

    go(refuses, "24", "--ngpu", "1", "--cycles", "4", over="width", flags=["--precision", "bf16"])
    assert (seen[0].variants, seen[0].cycles, seen[0].label) == ("eager,graph_layer", 4, "width-24")
    assert seen[0].out == str(tmp_path / "out" / "width-24")
    assert seen[0].flags == ["--precision", "bf16", "--heads", "24", "--ffn", "12288"]
    # The best eager may be another one.
    go(refuses, "1", out=tmp_path / "b", model="stable_diffusion")
    assert seen[1].variants == "eager,eager_torch,graph_step"


def test_on_a_cpu_points_are_run_and_no_speed_up_is_claimed(go, monkeypatch, capsys):
    monkeypatch.setattr(launch, "describe_here", lambda: HERE | {"gpus": {"names": [], "uuids": [], "driver": None}})
    runner = Runner(gpus=(), device="cpu", preset="tiny")
    assert go(runner, "1,2") == 0 and runner.calls == [1, 2]
    text = capsys.readouterr().out
    assert "CPU x1" in text and "On a CPU this shows that the variants train alike. It says nothing about" in text


def test_without_a_variant_it_is_the_first_headline_graph():
    def made(headline, **kinds):
        return {"model": "it", "variants": dict.fromkeys(kinds, ""), "kinds": kinds, "headline": headline}

    kinds = {"eager": "eager", "a": "graph", "b": "compile", "c": "graph", "d": "graph"}
    assert script.first_graph(made(["eager", "b", "d", "c"], **kinds)) == "d"
    assert script.first_graph(made(["eager", "b"], **kinds)) == "a"
    with pytest.raises(Mistake, match="it has no variant of kind graph: name one, --variant"):
        script.first_graph(made(["eager"], eager="eager", b="compile"))


def test_a_variant_that_stands_apart_is_swept_with_eager_alone(go):
    runner = Runner(names=("eager", "graph_layer"))
    asked = []

    def stands_apart(args):
        asked.append(args.variants)
        ((own, path),), is_refused = runner(args)
        build = own.builds.pop("")
        build.apart, build.variants["compile"] = "compiled", build.variants.pop("graph_layer")
        own.builds["torch_bf16+compiled"] = build
        return [(own, path)], is_refused

    assert go(stands_apart, "2,4", "--variant", "compile") == 0
    assert asked == ["eager,compile"] * 2


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
    own = {"--model": "gpt3", "--over": "batch", "--values": "1", "--out": str(tmp_path / "out")}
    try:
        status = sweep.main([f"{name}={value}" for name, value in own.items() if name not in arguments] + arguments)
    except SystemExit as stop:
        status = stop.code
    error = capsys.readouterr().err
    assert status == 2
    assert error.count("\n") == 1 and all(word in error for word in named), error
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_a_file_is_refused(tmp_path, go, capsys):
    (tmp_path / "file").write_text("")
    assert go(nothing, "1", out=tmp_path / "file") == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


# ------------------------------------------------------------------------------------------------
# With benchmarks.run itself


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_sweep_leaves_no_process(tmp_path, number):
    out = tmp_path / "out"
    command = ["--model", "tests.lying_model", "--over", "batch", "--values", "32,64", "--variant", "hangs"]
    command += ["--out", str(out)]
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
    assert values(answer.stdout) == ["1", "2"]
    for value in (1, 2):
        (path,) = (out / f"layers-{value}").rglob("*.json")
        own = run_file.read(path)
        assert own.label == f"layers-{value}" and own.builds[""].config["layers"] == value
        assert own.builds[""].variants["graph_layer"].blocks
