"""The sweep: from made runs to its table, resume, mistakes, and real runs."""

import itertools
import os
import random
import re
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from benchmarks import crossing, publish, sweep
from graph_worth.folders import ROOT
from graph_worth.harness import command, judge, run, script
from graph_worth.harness.command import Mistake
from graph_worth.harness.files import partial, run_file
from graph_worth.harness.files.facts import Raised
from graph_worth.harness.processes import launch, supervisor
from graph_worth.your_step import user_file
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


class Facts:
    """The facts of a run on disk, which the sweep removes with its file."""

    def __init__(self, run, path):
        self.facts, self.path = [{"id": run.id}], path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()

    def close(self):
        pass


class Runner:
    """Stands for benchmarks.run: a run of gpt3 over batch, whose host issues a step in 7 ms; it counts."""

    def __init__(self, oom_from=1000, fails_at=(), stops_at=None, **more):
        self.oom_from, self.fails_at, self.stops_at = oom_from, fails_at, stops_at
        self.more, self.calls, self.options = more, [], {}

    def __call__(self, request, options):
        value = options.value
        self.calls.append(value)
        self.options[value] = options
        if value == self.stops_at:
            self.stops_at = None
            raise KeyboardInterrupt
        run = self.made(value, request, options)
        if value >= self.oom_from:
            for name, variant in run.builds[""].variants.items():
                reason = "out of memory" if name == "eager" else "eager did not run"
                variant.blocks, variant.raised = [], Raised(kind="oom", reason=reason)
            run.builds[""].cycles = []
        return Facts(run, request.group / f"{run.id}.partial.jsonl"), run

    def made(self, value, request, options):
        number = next(_ids)
        source = random.Random(number)
        env = request.host["env"]
        more = {"flags": options.flags, "id": f"20261125T10{number:04}Z-a7d396c1", "boot": env["boot_id"]}
        more |= {"label": request.label, "over": options.over, "value": value, "source": {"hash": env["source_hash"]}}
        more |= {"model": request.model, "preset": request.preset}
        more |= {"parity": "blocks" if options.is_light else "courses"} | self.more
        run = made_run.made_run(cycles=options.cycles or 8, **more)
        variants, times = run.builds[""].variants, (max(7.0, value), float(value))
        for name, ms in zip(("eager", [*variants][1]), times, strict=True):
            for block in variants[name].blocks:
                taken = ms * (1 + 0.002 * source.gauss(0, 1))
                block.step_ms, block.issue_ms = [taken] * block.steps, [7.0]
                block.parent_s = block.worker_s = taken * block.steps / 1e3
        for variant in variants.values():
            variant.profile.busy_ms, variant.profile.kernels = float(value), 100.0
        if value in self.fails_at:
            variants["graph_layer"].blocks[0].losses = [1.0, 0.9]
        return run


@pytest.fixture
def go(monkeypatch, tmp_path):
    def sweep_with(runner, values, *arguments, out=tmp_path / "out", model="gpt3", over="batch", flags=()):
        monkeypatch.setattr(run, "begun_run", runner)
        what = ["--model", model] if model else []
        argv = [*what, "--over", over, "--values", values, "--out", str(out), *arguments]
        try:
            return sweep.main([*argv, *(["--", *flags] if flags else [])])
        except SystemExit as stop:
            return stop.code

    return sweep_with


def nothing(*args):
    pytest.fail("nothing may run")


def rows(text):
    """The cells of the last table, one list a point; empty columns are left out."""
    lines = text.splitlines()
    begin = max(index for index, line in enumerate(lines) if " over " in line and " against " in line) + 2
    table = list(itertools.takewhile(lambda line: line.lstrip()[:1].isdigit(), lines[begin:]))
    return [re.split(" {2,}", line.strip()) for line in table]


def values(text):
    return [row[0] for row in rows(text)]


def files(root):
    return sorted(path for path in root.rglob("*.json") if ".cache" not in path.parts)


# ------------------------------------------------------------------------------------------------
# From runs to a table and a file


def test_a_sweep_is_a_table_and_one_file_and_is_not_measured_twice(tmp_path, go, capsys):
    runner = Runner()
    assert go(runner, "4,1,2,16") == 0
    assert runner.calls == [1, 2, 4, 16]
    text = capsys.readouterr().out
    assert text.startswith("4 points to measure (1, 16 in full), about 6 minutes on a GPU\n")
    title, names = next(pair for pair in itertools.pairwise(text.splitlines()) if " over " in pair[0])
    assert title == "gpt3/bench over batch (--microbatch): graph_layer against eager, NVIDIA H200 x1"
    assert re.split(" {2,}", names) == [
        *["batch", "base ms", "ms", "gain", "95 %", "word", "us a kernel", "host us", "at most"]
    ]
    assert values(text) == ["1", "2", "4", "16"]
    assert all(float(row[1]) / float(row[2]) == pytest.approx(float(row[3][:-1]), rel=0.01) for row in rows(text))
    first, *_, last = rows(text)
    low, high = map(float, first[4].split(" to "))
    assert low < 7.0 < high and first[5:7] == ["faster", "10.0"]
    assert float(first[7]) == pytest.approx(70, rel=0.02) and float(first[8][:-1]) == pytest.approx(7.0, rel=0.02)
    assert float(last[3][:-1]) == pytest.approx(1, abs=0.01)
    assert "At batch 16 (160 us a kernel) and above, a gain of 5 % is not certain on a host of 70 us a kernel." in text
    assert max(map(len, text.splitlines())) <= 100 + len(str(tmp_path))
    (path,) = files(tmp_path)
    assert path.parent == tmp_path / "out" / "h200x1" / "gpt3-bench-over-batch" and str(path) in text
    assert path.stat().st_mode & 0o777 == 0o444 and not list(tmp_path.rglob("*.partial.jsonl"))
    content = run_file.read_all(path)
    assert [(point.over, point.value, point.parity) for point in content.runs] == [
        *[("batch", 1, "courses"), ("batch", 2, "blocks"), ("batch", 4, "blocks"), ("batch", 16, "courses")]
    ]
    assert f"\n  {first[1]} / {first[2]} ms, {first[3]} ({first[4]}); the point took " in text
    assert content.runs[1].flags == ["--microbatch", "2"] and content.runs[1].label == "batch-2"
    assert publish.folders_of(content) == path.parts[-3:-1]
    assert go(runner, "4,1,2,16") == 0
    again = capsys.readouterr().out
    assert len(runner.calls) == 4 and again.count("was measured before") == 4 and rows(again) == rows(text)
    assert files(tmp_path) == [path] and str(path) in again


def test_the_ends_are_full_runs_and_the_others_light(go):
    runner = Runner()
    assert go(runner, "1,2,4", "--cycles", "8") == 0
    light, full = runner.options[2], runner.options[4]
    assert (light.is_light, light.no_control, light.cycles) == (True, True, 8)
    assert (full.is_light, full.no_control, full.cycles) == (False, False, 8)
    # At a GPU's power limit steps slow down 0.9 s after a block began: a light block is to end after that, too.
    of_light, of_full = run.settings_of(light, "bench"), run.settings_of(full, "bench")
    assert (of_light.block_s, of_light.most_blocks_s) == (1.0, 2.0)
    assert (of_full.block_s, of_full.most_blocks_s) == (1.0, 4.0)
    # 4 was an end and stays; 2 becomes one.
    assert go(runner, "2,4,8") == 0 and runner.calls == [1, 2, 4, 2, 8]
    assert not runner.options[2].is_light and runner.options[8].cycles is None
    assert go(runner, "3,5", "--light") == 0 and runner.options[5].is_light
    assert (runner.options[3].cycles, sweep.CYCLES) == (3, 3)


def test_a_point_of_fewer_cycles_or_of_another_source_host_or_request_is_measured_again(go, monkeypatch, capsys):
    runner = Runner()
    assert go(runner, "1", "--cycles", "4") == 0
    assert go(runner, "1", "--cycles", "3") == 0 and len(runner.calls) == 1
    assert go(runner, "1") == 0 and len(runner.calls) == 2
    assert go(runner, "2", flags=["--precision", "bf16"]) == 0 and len(runner.calls) == 3
    assert values(capsys.readouterr().out) == ["2"]
    for change in ({"source_hash": "another"}, {"boot_id": "another"}):
        monkeypatch.setattr(launch, "describe_here", lambda env=HERE["env"] | change: HERE | {"gpus": H200, "env": env})
        assert go(runner, "1") == 0
    assert len(runner.calls) == 5


def test_a_sweep_that_is_stopped_goes_on(tmp_path, go, capsys):
    runner = Runner(stops_at=4)
    assert go(runner, "1,2,4,8") == 130
    assert "the same command goes on" in capsys.readouterr().err
    # What was measured before waits beside its log: benchmarks.run goes on with it.
    assert len(list(tmp_path.rglob("*.partial.jsonl"))) == 2 and not files(tmp_path)


def test_a_sweep_whose_point_is_stopped_leaves_a_file_and_measures_the_point_again(tmp_path, go, capsys):
    class Stopped(Runner):
        def made(self, value, *args):
            run = super().made(value, *args)
            run.stopped = command.stop.signal = "SIGTERM" if value == 2 else ""
            return run

    runner = Stopped()
    assert go(runner, "1,2,4") == 130 and runner.calls == [1, 2]
    (path,) = files(tmp_path)
    assert [point.stopped for point in run_file.read_all(path).runs] == ["", "SIGTERM"]
    assert go(Runner(), "1,2,4") == 0 and "batch 1 was measured before" in capsys.readouterr().out
    assert {point.stopped for point in run_file.read_all(files(tmp_path)[-1]).runs} == {""}


def test_a_point_that_has_its_end_starts_no_worker_again(tmp_path, monkeypatch):
    """A sweep that goes on finds the facts of its first points, which are not sealed yet."""
    begun = partial.Partial(tmp_path / f"x{partial.SUFFIX}")
    begun.add("header", **made_run.HEADER)
    begun.add("end", end_utc="2026-11-25T10:18:00Z")
    monkeypatch.setattr(run, "open_run", lambda *_: begun)
    monkeypatch.setattr(run, "measure_run", nothing)
    assert run.begun_run(None, None)[1].whole


def test_memory_that_is_full_is_a_row(tmp_path, go, capsys):
    assert go(Runner(oom_from=8), "4,8,16") == 0
    text = capsys.readouterr().out
    assert [(row[0], row[-1]) for row in rows(text)][1:] == [("8", "oom"), ("16", "oom")]
    assert "oom: batch 8 (out of memory)" in text and "\n  oom: out of memory; the point took " in text
    (path,) = files(tmp_path)
    assert [point.value for point in run_file.read_all(path).runs] == [4, 8, 16]
    assert go(Runner(oom_from=8), "8", out=tmp_path / "b") == 1, "nothing was timed"
    assert files(tmp_path) == [path]


def test_a_model_that_its_script_made_smaller_is_another_one(go, capsys):
    class Smaller(Runner):
        def made(self, value, *args):
            run = super().made(value, *args)
            run.builds[""].config = {"layers": 8 if value < 4 else 6, "microbatch": value}
            run.builds[""].asked_layers = 8
            return run

    assert go(Smaller(), "1,4") == 0
    text = capsys.readouterr().out
    assert rows(text)[1] == ["4", "oom"]
    assert "oom: batch 4 (--layers 8 does not fit, it ran with 6)" in text


def test_losses_that_differ_are_a_row_and_are_measured_again(go, capsys):
    runner = Runner(fails_at=[2])
    assert go(runner, "1,2,4") == 1
    text = capsys.readouterr().out
    assert rows(text)[1] == ["2", "failed"] and "failed: batch 2 (its losses in cycle 0 differ" in text
    runner.fails_at = ()
    assert go(runner, "1,2,4") == 0
    assert runner.calls == [1, 2, 4, 2] and "failed" not in capsys.readouterr().out


def test_one_cycle_has_a_ratio_and_no_interval(go, capsys):
    assert go(Runner(), "1", "--cycles", "1") == 0
    text = capsys.readouterr().out
    ((*_, ratio, word, _, _, _),) = rows(text)
    assert float(ratio[:-1]) == pytest.approx(7.0, rel=0.02) and word == "unclear" and "a graph" not in text


def test_calls_with_other_values_fill_one_folder_and_a_damaged_file_is_measured_again(tmp_path, go, capsys):
    runner = Runner()
    for value in ("8", "1", "4"):
        assert go(runner, value) == 0
    assert values(capsys.readouterr().out) == ["1", "4", "8"]
    assert [len(run_file.read_all(path).runs) for path in files(tmp_path)] == [1, 2, 3]
    for path in files(tmp_path)[1:]:
        path.chmod(0o644)
        path.write_bytes(path.read_bytes()[:100])
    assert go(runner, "8,1") == 0 and values(capsys.readouterr().out) == ["1", "8"]
    assert runner.calls == [8, 1, 4, 1]


def test_sweeps_of_two_requests_share_no_table(go, capsys):
    assert go(Runner(), "1,2") == 0
    assert go(Runner(), "4", "--preset", "full") == 0
    assert values(capsys.readouterr().out) == ["4"]


def test_minutes_start_no_point_that_cannot_end(go, capsys, monkeypatch):
    clock = itertools.count(0, 20)
    monkeypatch.setattr(sweep, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    runner = Runner()
    assert go(runner, "1,2,4,8", "--minutes", "2") == 0
    text = capsys.readouterr().out
    assert runner.calls == [1, 2] == list(map(int, values(text))) and "--minutes 2: batch 4 not started" in text


def test_what_a_point_asks_of_benchmarks_run(tmp_path, go):
    runner = Runner()
    go(runner, "24,48", "--ngpu", "1", "--cycles", "4", over="width", flags=["--precision", "bf16"])
    options = runner.options[24]
    assert (options.variants, options.cycles, options.label) == ("eager,graph_layer", 4, "precision-bf16-width-24")
    assert options.flags == ["--precision", "bf16", "--heads", "24", "--ffn", "12288"]
    # The best eager may be another one.
    go(runner, "1", out=tmp_path / "b", model="stable_diffusion")
    assert runner.options[1].variants == "eager,eager_torch,graph_step"


def test_on_a_cpu_points_are_run_and_no_speed_up_is_claimed(go, monkeypatch, capsys):
    monkeypatch.setattr(launch, "describe_here", lambda: HERE | {"gpus": {"names": [], "uuids": [], "driver": None}})
    runner = Runner(gpus=(), device="cpu")
    assert go(runner, "1,2") == 0 and runner.calls == [1, 2]
    text = capsys.readouterr().out
    assert "CPU x1" in text and "On a CPU this shows that the variants train alike. It says nothing about" in text
    assert "a graph gains" not in text


def test_a_step_of_ones_own_takes_a_size(tmp_path, go, capsys):
    runner = Runner(names=("eager", "graph_step"))
    step = f"{ROOT}/examples/steps/nanogpt.py:build"
    assert go(runner, "1,2,4", "--step", step, model=None) == 0
    assert [runner.options[value].flags[-2:] for value in (1, 2, 4)] == [["--size", f"{value}"] for value in (1, 2, 4)]
    text = capsys.readouterr().out
    assert "nanogpt-build over batch (--size): graph_step against eager, NVIDIA H200 x1" in text
    (path,) = files(tmp_path)
    content = run_file.read_all(path)
    assert path.parent.name == "your_step-bench-nanogpt-build-over-batch"
    assert [point.label for point in content.runs] == [f"nanogpt-build-batch-{value}" for value in (1, 2, 4)]
    assert publish.folders_of(content)[1] == path.parent.name
    assert go(nothing, "1,4", "--step", step, model=None) == 0


def test_the_sizes_of_the_example_steps_reach_their_batches():
    for name, size, of_batch in (("nanogpt", 3, 0), ("muon", 32, 1)):
        handed = user_file.load(f"{ROOT}/examples/steps/{name}.py:build", torch.device("cpu"), size)
        assert {batch.shape[of_batch] for batch in handed.batches} == {size}
        assert torch.isfinite(handed.step(handed.batches[0]))


def test_flags_that_are_too_long_for_a_folder_have_a_digest_in_it(tmp_path, go):
    runner = Runner()
    flags = ["--precision", "bf16", "--layers", "2", "--vocab", "1024", "--amax-history", "8", "--batches", "12"]
    assert go(runner, "1,2", flags=flags) == 0
    assert re.fullmatch("flags-[0-9a-f]{8}-batch-1", runner.options[1].label)
    (path,) = files(tmp_path)
    assert publish.folders_of(run_file.read_all(path)) == path.parts[-3:-1]


def test_without_a_variant_it_is_the_first_headline_graph():
    def made(headline, **kinds):
        return {"model": "it", "variants": dict.fromkeys(kinds, ""), "kinds": kinds, "headline": headline}

    kinds = {"eager": "eager", "a": "graph", "b": "compile", "c": "graph", "d": "graph"}
    assert script.first_graph(made(["eager", "b", "d", "c"], **kinds)) == "d"
    assert script.first_graph(made(["eager", "b"], **kinds)) == "a"
    with pytest.raises(Mistake, match="it has no variant of kind graph: name one, --variant"):
        script.first_graph(made(["eager"], eager="eager", b="compile"))


def test_a_variant_that_stands_apart_is_swept_with_eager_alone(go):
    class Apart(Runner):
        def made(self, value, request, options):
            (build,) = request.builds
            assert (build.apart, {*build.variants} - {"control"}) == ("compiled", {"eager", "compile"})
            run = super().made(value, request, options)
            facts = run.builds.pop("")
            facts.apart, facts.variants["compile"] = "compiled", facts.variants.pop("graph_layer")
            run.builds["torch_bf16+compiled"] = facts
            return run

    runner = Apart()
    assert go(runner, "2,4", "--variant", "compile") == 0
    assert [runner.options[value].variants for value in (2, 4)] == ["eager,compile"] * 2


# ------------------------------------------------------------------------------------------------
# Where the gain ends


@pytest.mark.parametrize(
    ("lows", "end", "text"),
    [
        ([5.0, 1.06, 1.05, 0.9], 3, "At 3 tokens (30 us a kernel) and above, a gain of 5 % is not certain on a host"),
        (
            [5.0, 1.06, 1.051],
            None,
            "A graph still gains at 3 tokens (30 us a kernel), the largest size that passed, on a",
        ),
        ([1.01, 1.0], 1, "Even at 1 tokens (10 us a kernel), the smallest size that passed, a gain of 5 %"),
        ([5.0, 1.0, 1.2], 2, "At 2 tokens (20 us a kernel) and above, a gain of 5 % is not certain on a host of"),
    ],
)
def test_the_gain_ends_at_the_first_value_whose_interval_contains_5_percent(lows, end, text):
    points = [crossing.Point(index + 1, low, 10.0 * (index + 1), 40.0) for index, low in enumerate(lows)]
    crossed = crossing.crossing(reversed(points))
    assert (crossed and crossed.value) == end
    assert crossing.sentence("sequence", reversed(points)).startswith(text)
    assert ("It gains again at 3 tokens." in crossing.sentence("sequence", points)) == (lows[-1] == 1.2)


def test_a_sentence_without_a_profile_or_without_points():
    assert crossing.sentence("batch", [crossing.Point(1, 2.0, None, None)]) == (
        "A graph still gains at batch 1, the largest size that passed."
    )
    assert crossing.sentence("batch", []) == ""


# ------------------------------------------------------------------------------------------------
# Mistakes


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--over", "depth"], ["unknown quantity 'depth'", "batch, sequence, width, layers"]),
        (["--values", "1,2.5"], ["'1,2.5' is not a list of whole numbers", "--values"]),
        (["--values", "4,2,04"], ["4 stands twice in '4,2,04'", "--values"]),
        (["--values", f"2,{2**60}"], ["--microbatch"]),
        (["--variant", "eager"], ["unknown variant 'eager'", "graph_layer"]),
        (["--variants", "graph_layer"], ["--variants", "--variant"]),
        (["--label=x"], ["--label", "names its folders"]),
        (["--host-load", "2"], ["--host-load", "without other work"]),
        (["--step", "my_step.py:build"], ["--model NAME or --step FILE.py:BUILD"]),
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
    monkeypatch.setattr(run, "begun_run", nothing)
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
    command = ["--model", "gpt3", "--over", "layers", "--values", "1,2,3", "--variant", "graph_layer"]
    command += ["--preset", "tiny", "--cycles", "1", "--no-control"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "benchmarks.sweep", *command, "--out", str(out)]
    for attempt in range(2):
        answer = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert answer.returncode == 0, answer.stdout + answer.stderr
        assert answer.stdout.count("was measured before") == 3 * attempt
    assert values(answer.stdout) == ["1", "2", "3"]
    (path,) = files(out)
    for value, point in enumerate(run_file.read_all(path).runs, start=1):
        assert point.value == point.builds[""].config["layers"] == value
        assert point.parity == ("blocks" if value == 2 else "courses")
        (judged,) = judge.judged(point).values()
        assert judged.passed("graph_layer") and judged.build.variants["graph_layer"].blocks


@pytest.mark.gpu
def test_light_points_on_a_gpu(tmp_path):
    words = ["--step", "examples/steps/nanogpt.py:build", "--over", "batch", "--values", "4,8", "--light"]
    words = [sys.executable, "-m", "benchmarks.sweep", *words, "--out", str(tmp_path)]
    answer = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    (path,) = files(tmp_path)
    for point in run_file.read_all(path).runs:
        (judged,) = judge.judged(point).values()
        assert judged.passed("graph_step") and judged.ratio_of("graph_step").cycles == 3
        assert judged.alone_ratio and judged.ceiling("graph_step") and point.parity == "blocks"
    assert "us a kernel" in answer.stdout.splitlines()[-3]
