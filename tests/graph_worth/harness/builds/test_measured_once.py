"""The processes of `make measure` on a GPU: what is measured once in a run, and how long all of it takes in a model."""

import signal

import pytest

from benchmarks import sweep
from graph_worth.harness import ask, command, judge, measure, run, standing
from graph_worth.harness.builds import build_worker
from graph_worth.harness.builds.request import FEWEST_CYCLES
from graph_worth.harness.files import partial, run_file
from graph_worth.harness.processes import launch
from tests.helpers.modelled_worker import Clock, worker_class

STEP = "def build(device):\n    raise SystemExit\n"
GPU = {"names": ["NVIDIA H200"], "uuids": ["GPU-1"]}
# A guess; no file tells it so far.
DOCTOR_S = 15.0
ALL = ",".join(measure.WHOLE)


def measured(folder, monkeypatch, variants=ALL, **more):
    """The run of a user's step as `measure` asks for it, read back, and the clock of its workers."""
    path, clock = folder / "my_step.py", Clock()
    path.write_text(STEP)
    options = measure.request(measure.parse(["--step", f"{path}:build", "--out", str(folder)]), variants)
    options.cycles_s, options.doctor_s = measure.CYCLES_S, DOCTOR_S
    request = ask.ask_of(options, measure.MODEL, launch.describe_here() | {"gpus": GPU})
    monkeypatch.setattr(build_worker, "WorkerProcess", worker_class(clock, **more))
    monkeypatch.setattr("time.monotonic", lambda: clock.now_s)
    # No handler of this process is to change.
    monkeypatch.setattr(command, "STOPS", ())
    monkeypatch.setattr(command.stop, "signal", "")
    facts = run.open_run(request, options)
    run.measure_run(request, options, facts, folder / "log")
    return run_file.read(partial.seal(facts)), clock


def test_a_run_of_all_variants_takes_four_processes_and_at_most_150_seconds_of_the_model(tmp_path, monkeypatch):
    found, clock = measured(tmp_path, monkeypatch)
    assert [worker.asked[1] for worker in clock.processes] == [
        ("alone", "compile"),
        ("alone", "reduce_overhead"),
        ("alone", "graph_step"),
        ("alone", "eager"),
    ]
    assert ("alone", "graph_step_compiled") in clock.processes[0].asked
    # The last has nothing but eager in it, and repeats the audits of all.
    assert {name for _, name in clock.processes[-1].asked} == {"", "eager"} and clock.calls["repetition"] == 14
    assert {name: len(build.cycles) for name, build in found.builds.items()} == {
        "": 8,
        "+compiled": 5,
        "+reduce_overhead": 5,
    }
    assert [name for name, build in found.builds.items() if "control" in build.variants] == [""]
    assert found.seconds["doctor"] == DOCTOR_S
    assert clock.now_s + DOCTOR_S <= 150 and sum(found.seconds.values()) <= 150


def test_a_light_point_takes_one_process_with_eager_alone_first_and_at_most_45_seconds(tmp_path, monkeypatch):
    path, clock = tmp_path / "my_step.py", Clock()
    path.write_text("def build(device, size):\n    raise SystemExit\n")
    here = launch.describe_here() | {"gpus": GPU}
    monkeypatch.setattr(launch, "describe_here", lambda: here)
    monkeypatch.setattr(build_worker, "WorkerProcess", worker_class(clock))
    monkeypatch.setattr("time.monotonic", lambda: clock.now_s)
    words = ["--step", f"{path}:build", "--over", "batch", "--values", "8", "--light", "--out", str(tmp_path)]
    assert sweep.Sweep(sweep.parse(words)).measure_all() == 0
    ((_, point),) = run_file.find(tmp_path / "h200x1")[0]
    (worker,) = clock.processes
    first = worker.asked[: worker.asked.index(("capture", "graph_step"))]
    assert first == [("build", ""), ("capture", "eager"), ("pilot", "eager"), ("alone", "eager")]
    assert [do for do, name in worker.asked if name == "graph_step"].count("block") == 3 + 2  # two of the pilot
    assert not clock.calls["audit"] + clock.calls["course"] + clock.calls["parity"] and clock.now_s <= 45
    (judged,) = judge.judged(point).values()
    assert judged.passed("graph_step") and judged.ratio_of("graph_step").cycles == 3 and judged.alone_ratio
    assert (point.parity, point.control, point.value, [*point.builds[""].variants]) == (
        *("blocks", "", 8),
        ["eager", "graph_step"],
    )


def test_eager_alone_is_measured_once_and_the_file_says_for_which_builds(tmp_path, monkeypatch):
    found, clock = measured(tmp_path, monkeypatch)
    assert [do for worker in clock.processes for do, name in worker.asked if name == "eager"].count("alone") == 1
    builds = judge.judged(found)
    for judged in builds.values():
        alone = judged.build.variants["eager"].alone
        assert alone.builds == ["+compiled", "+reduce_overhead", ""] and alone.is_only
        # As many steps as in the longest block.
        assert len(alone.step_ms) == max(block.steps for block in judged.build.variants["eager"].blocks)
        assert judged.alone_ratio == pytest.approx(1.0)
        assert {verdict.status for verdict in judged.verdicts.values()} == {judge.PASS}
        # The audits of each process were repeated, and its control is that of the run.
        assert not any(map(judged.unchecked, judged.verdicts))
        assert all(variant.alone for name, variant in judged.build.variants.items() if name != "control")
    is_only = {name: variant.alone.is_only for name, variant in builds["+compiled"].build.variants.items()}
    assert is_only == {"eager": True, "compile": True, "graph_step_compiled": False}


def test_each_process_compares_its_own_eager_with_the_one_alone(tmp_path, monkeypatch):
    found, _ = measured(tmp_path, monkeypatch)
    for block in found.builds["+compiled"].variants["eager"].blocks:
        block.step_ms = [1.2 * ms for ms in block.step_ms]
        block.parent_s, block.worker_s = 1.2 * block.parent_s, 1.2 * block.worker_s
    standings = {name: standing.standing_of(judged) for name, judged in judge.judged(found).items()}
    assert standings["+compiled"].kind == standing.ASIDE
    assert "1.20 times as long as alone" in standings["+compiled"].text
    assert standings[""].kind == standing.QUIET


def test_what_leaves_memory_behind_is_the_only_one_of_its_process_that_is_measured_there(tmp_path, monkeypatch):
    _, clock = measured(tmp_path, monkeypatch, left_bytes=2**21 + 1)
    asked = [[name for do, name in worker.asked if do == "alone"] for worker in clock.processes]
    assert asked == [["compile"], ["graph_step_compiled"], ["reduce_overhead"], ["graph_step"], ["eager"]]


def test_the_only_process_of_variants_has_the_control_and_more_cycles(tmp_path, monkeypatch):
    found, clock = measured(tmp_path, monkeypatch, variants="compile")
    (build,) = found.builds.values()
    assert build.apart == "compiled" and len(build.cycles) > FEWEST_CYCLES and "control" in build.variants
    assert len(clock.processes) == 2


def test_a_run_that_is_stopped_before_eager_is_alone_goes_on_there(tmp_path, monkeypatch):
    # The first run's file is still open in this process.
    monkeypatch.setattr(partial.fcntl, "flock", lambda *words: None)
    with pytest.raises(KeyboardInterrupt):
        measured(tmp_path, monkeypatch, signals={("alone", "eager", 1): signal.SIGHUP})
    found, clock = measured(tmp_path, monkeypatch)
    (alone,) = clock.processes
    assert {name for _, name in alone.asked} == {"", "eager"}
    assert all(build.variants["eager"].alone.builds for build in found.builds.values())


# ------------------------------------------------------------------------------------------------
# A run that is told to stop

# The pilot's two blocks of a variant come first.
THIRD_CYCLE = ("block", "graph_step", 2 + 3)
LINE = "stopped after {} of 8 cycles: profile, then the file; stop again to end at once\n"


def test_a_first_stop_ends_the_block_and_leaves_a_light_run_with_profiles(tmp_path, monkeypatch, capsys):
    # As `timeout` sends it, to the process and to its group.
    once = {THIRD_CYCLE: signal.SIGTERM, ("profile", "eager", 1): signal.SIGTERM}
    monkeypatch.setattr(command, "ONE_STOP_S", 1e3)
    found, clock = measured(tmp_path, monkeypatch, "graph_step", signals=once)
    ((name, judged),) = judge.judged(found).items()
    assert (found.stopped, found.whole, name, len(judged.build.cycles)) == ("SIGTERM", True, "", 2)
    asked = clock.processes[-1].asked
    assert asked[-3:] == [THIRD_CYCLE[:2], ("profile", "eager"), ("profile", "graph_step")]
    assert {block.cycle for variant in judged.build.variants.values() for block in variant.blocks} == {0, 1}
    assert judged.passed("graph_step"), judged.verdicts
    assert judged.ratio_of("graph_step").cycles == 2 and judged.ceiling("eager")
    assert judged.unchecked("graph_step") == "stopped by SIGTERM, no audits"
    printed = capsys.readouterr().out
    assert printed.endswith(LINE.format(2)) and printed.count("profile") == 1


@pytest.mark.parametrize("at", [("block", "graph_step", 2 + 8 + 2), ("course", "eager", 1), ("alone", "eager", 1)])
def test_a_stop_after_all_cycles_leaves_no_full_run(tmp_path, monkeypatch, at):
    found, clock = measured(tmp_path, monkeypatch, "graph_step", signals={at: signal.SIGINT})
    (judged,) = judge.judged(found).values()
    ratio, (*_, last) = judged.ratio_of("graph_step"), [asked for worker in clock.processes for asked in worker.asked]
    assert ratio.cycles == 8 and found.stopped == "SIGINT" and standing.is_light(judged, ratio.cycles)
    assert all(variant.profile.kernels for name, variant in judged.build.variants.items() if name != "control")
    assert last == at[:2] or last[0] == "profile"
    assert "audits" in judged.unchecked("graph_step") and clock.calls["repetition"] == 0


@pytest.mark.parametrize(
    "variants, signals",
    {
        "in the second cycle": ("graph_step", {("block", "graph_step", 2 + 2): signal.SIGTERM}),
        "twice": ("graph_step", {THIRD_CYCLE: signal.SIGINT, ("profile", "eager", 1): signal.SIGINT}),
        "before the usual build": (ALL, {("block", "graph_step_compiled", 2 + 4): signal.SIGTERM}),
    }.values(),
)
def test_a_stop_without_two_cycles_and_a_second_stop_end_the_run_at_once(tmp_path, monkeypatch, variants, signals):
    monkeypatch.setattr(partial.fcntl, "flock", lambda *words: None)
    monkeypatch.setattr(command, "ONE_STOP_S", 0.01)
    with pytest.raises(KeyboardInterrupt):
        measured(tmp_path, monkeypatch, variants, signals=signals)
    found, _ = measured(tmp_path, monkeypatch, variants)
    assert not found.stopped and len(found.builds[""].cycles) == 8
