"""benchmarks/scale: a cluster's step from the steps of single ranks."""

import argparse
import os
import subprocess
import sys

import numpy
import pytest

from benchmarks import ROOT, frame, scale
from benchmarks.figures import scale as figure
from common import record as records
from common import schedule

STEADY = [scale.Run(numpy.full(50, 100.0))]
ALONE = scale.Scale(gpus=1, tp=1, pp=1, dp=1, chunks=1, microbatches=4)
PIPELINE = scale.Scale(gpus=2, tp=1, pp=2, dp=1, chunks=1, microbatches=4)


def runs(*steps_ms):
    return [scale.Run(numpy.array(steps_ms))]


def rng():
    return numpy.random.default_rng(1)


@pytest.mark.parametrize("spread", scale.SPREADS)
def test_one_rank_takes_what_its_steps_take(spread):
    assert scale.cluster_steps(ALONE, STEADY, spread, 3, rng()) == pytest.approx([100.0] * 3)
    drawn = scale.cluster_steps(ALONE, runs(100.0, 130.0), spread, 200, rng())
    assert set(drawn.round(6)) == {100.0, 130.0}


def test_a_pipeline_adds_its_bubble():
    # (PP - 1) / microbatches of the work.
    assert scale.cluster_steps(PIPELINE, STEADY, "spread", 2, rng()) == pytest.approx([125.0] * 2)


def test_the_slowest_of_many_sets_the_pace():
    """Of n ranks that draw 100 or 200 ms, all draw 100 with probability 2 ** -n."""
    jitter = runs(100.0, 200.0)
    for dp, tp in ((4, 1), (1, 4)):
        wide = scale.Scale(gpus=4, tp=tp, pp=1, dp=dp, chunks=1, microbatches=1)
        mean = scale.cluster_steps(wide, jitter, "spread", 20_000, rng()).mean()
        assert mean == pytest.approx(200 - 100 / 2**4, rel=0.01)


def test_a_burst_in_one_stage_delays_the_step_by_at_most_its_length():
    """Of two stages one or both are interrupted for 100 ms, with probability 0.18 and 0.01."""
    jitter = runs(*[100.0] * 9, 200.0)
    steps = scale.cluster_steps(PIPELINE, jitter, "burst", 4000, rng())
    assert steps.min() == pytest.approx(125.0) and steps.max() == pytest.approx(325.0)
    assert 135.0 < steps.mean() < 150.0


@pytest.mark.parametrize("known", scale.SCALES["gpt3"])
def test_without_noise_a_cluster_gains_what_one_gpu_gains(known):
    got = scale.ratios(known, runs(*[110.0] * 9), STEADY, num_steps=1, num_boot=2 if known.chunks == 8 else 0)
    assert got["spread"] == pytest.approx(1.1) and got["burst"] == pytest.approx(1.1)
    if known.chunks == 8:
        assert got["low"] == pytest.approx(1.1) and got["high"] == pytest.approx(1.1)


def test_noise_of_eager_alone_makes_graphs_worth_more_at_scale():
    noisy = runs(*numpy.random.default_rng(3).normal(100.0, 3.0, 200))
    large = next(known for known in scale.SCALES["gpt3"] if known.gpus > 10_000)
    assert scale.ratios(large, noisy, STEADY, num_steps=2, num_boot=0)["spread"] > 1.03


def test_every_action_comes_after_what_it_waits_for():
    known, seen = scale.SCALES["gpt3"][1], set()
    for _, _, waits_for, name in scale.actions(known):
        assert waits_for is None or waits_for in seen
        seen.add(name)
    assert len(seen) == 2 * known.pp * known.chunks * known.microbatches


def test_skew_of_two_ranks():
    assert scale.expected_skew_ms(runs(100.0, 104.0), 2, rng(), 20_001) in (0.0, 4.0)
    assert scale.expected_skew_ms(runs(*numpy.linspace(100, 104, 1001)), 2, rng()) == pytest.approx(
        4 * (1 - 0.5**0.5), rel=0.03
    )


# ------------------------------------------------------------------------------------------------
# Times of microbatches


@pytest.mark.parametrize("known", [*scale.SCALES["gpt3"], PIPELINE])
@pytest.mark.parametrize("num_passes", [0, 1, 4, 6, 48])
def test_all_of_a_measured_time_falls_on_some_pass_of_its_kind(known, num_passes):
    for stage in range(known.pp):
        parts = scale.weights(known, stage, num_passes)
        assert parts.sum(axis=0) == pytest.approx(numpy.ones(2 * num_passes or 1))
        if num_passes:
            is_forward = numpy.array(schedule.order(known.pp, stage, known.chunks, known.microbatches)) > 0
            assert not parts[is_forward, num_passes:].any() and not parts[~is_forward, :num_passes].any()
            # All passes of a cluster's stage are equally large parts of the model.
            assert parts[is_forward].sum(axis=1) == pytest.approx(num_passes / is_forward.sum())


def test_as_many_passes_as_were_measured_take_what_was_measured():
    order = schedule.order(2, 0, 1, 4)
    parts = scale.weights(PIPELINE, 0, 4)
    forward = [time for step, time in zip(order, parts.argmax(axis=1), strict=True) if step > 0]
    backward = [time for step, time in zip(order, parts.argmax(axis=1), strict=True) if step < 0]
    assert forward == [0, 1, 2, 3] and backward == [4, 5, 6, 7] and set(parts.ravel()) == {0.0, 1.0}


def test_a_pipeline_of_measured_passes():
    """Two stages, four microbatches: forward 10 ms, backward 20 ms, and the second microbatch's backward 50 ms."""
    took = numpy.array([[10.0] * 4 + [20.0] * 4, [10.0] * 4 + [20.0, 50.0, 20.0, 20.0]])
    usual, slow = [[scale.Run(numpy.array([160.0]), one[None] / 160.0)] for one in took]
    for spread in scale.SPREADS:
        # (PP - 1) / microbatches of 120 ms are the bubble; 40 ms beside the passes are not simulated.
        assert scale.cluster_steps(PIPELINE, usual, spread, 2, rng()) == pytest.approx([150.0] * 2)
        # Both stages are late by 30 ms in the same microbatch, one after the other.
        assert scale.cluster_steps(PIPELINE, slow, spread, 2, rng()) == pytest.approx([210.0] * 2)
    assert usual[0].passes_ms == pytest.approx(120.0) and usual[0].num_passes == 4


def test_times_of_microbatches_say_where_a_delay_is():
    """Of ten steps one has a microbatch that is late by 80 ms: known, both answers are the same."""
    usual = numpy.array([10.0] * 4 + [20.0] * 4)
    late = usual + 80.0 * (numpy.arange(8) == 6)
    # Steps of the window have the same total, so that delays come from the section pass alone.
    run = scale.Run(numpy.full(20, 120.0), numpy.array([usual] * 9 + [late]) / 120.0)
    answers = [scale.cluster_steps(PIPELINE, [run], spread, 3000, rng()).mean() for spread in scale.SPREADS]
    assert answers[0] == pytest.approx(answers[1], rel=0.01) and 150.0 < answers[0] < 170.0


def a_record(variant, ms, load=0, **more):
    record = records.blank(model="gpt3", preset="bench", variant=variant, device="cuda", round=1, status="pass")
    record.update(optimizer_ms=20.0, statistic_ms=ms, host_load=load, **more)
    record["config"].update(tp=1, pp=1, chunks=1, microbatches=4, zero1=False, layers=8)
    record["steps"].update(gpu_ms=[ms] * 8, batch=[0] * 8)
    return record


def with_microbatches(record, num_passes=4, rest_ms=40.0):
    each_ms = (record["statistic_ms"] - rest_ms) / (3 * num_passes)
    of_step = {"forward_ms": [each_ms] * num_passes, "backward_ms": [2 * each_ms] * num_passes, "rest_ms": rest_ms}
    record["extra"]["microbatches"] = {key: [own] * 3 for key, own in of_step.items()}
    return record


def test_the_table_names_what_there_is_and_what_is_not():
    found = [a_record("eager", 130.0), a_record("graph", 120.0)]
    rows = scale.rows(found, "gpt3", "graph", num_steps=1, num_boot=0)
    lines = scale.table(rows)
    # The optimizer's 20 ms are not in it.
    assert any(line.startswith("| 1 | quiet | 1 + 1, 1 | steps | 1.100x") for line in lines)
    assert any(line.startswith("| 11,616 | quiet |") and line.endswith("| 1.030x |") for line in lines)
    assert lines[-1].startswith("| - | busy | no record")


def test_runs_with_times_of_microbatches_are_preferred_where_both_variants_have_some():
    old = [a_record("eager", 130.0), a_record("graph", 120.0)]
    new = [with_microbatches(a_record("eager", 130.0)), with_microbatches(a_record("graph", 124.0))]
    first = scale.rows([*old, *new], "gpt3", "graph", num_steps=1, num_boot=0)[0]
    # Of 130 and 124 ms the passes take 90 and 84.
    assert (first["times"], first["count"]) == ("microbatches", "1 + 1, 1")
    assert first["ratios"]["burst"] == pytest.approx(90 / 84)
    # One variant alone has them: steps are compared with steps.
    first = scale.rows([*old, new[0]], "gpt3", "graph", num_steps=1, num_boot=0)[0]
    assert (first["times"], first["count"]) == ("steps", "2 + 1, 1") and first["ratios"]["burst"] == pytest.approx(1.1)
    # Other numbers of microbatches are other work.
    eager, graph = scale.comparable(
        scale.runs_of([*new, with_microbatches(a_record("eager", 130.0), 8)], "eager"), scale.runs_of(new, "graph")
    )
    assert [run.num_passes for run in (*eager, *graph)] == [4, 4]


def test_records_of_several_ranks_stand_beside_the_simulation_of_as_many():
    alone = [a_record("graph", 120.0), a_record("eager", 130.0)]
    assert scale.of_several_ranks(alone) == ["no record of several ranks beside records of one"]
    two = a_record("graph", 121.0, rank_skew_ms=0.5)
    two["env"]["world_size"] = 2
    assert scale.of_several_ranks([*alone, two]) == [
        "2 ranks (dp 2, tp 1, pp 1), graph: step 121.00 ms, simulated 120.00 to 120.00 ms; skew 0.50 ms, of "
        "independent steps 0.00 ms"
    ]
    base = a_record("eager", 133.1)
    base["env"]["world_size"] = 2
    assert scale.of_several_ranks([*alone, two, base])[1:] == [
        "2 ranks (dp 2, tp 1, pp 1), eager: step 133.10 ms, simulated 130.00 to 130.00 ms",
        "2 ranks (dp 2, tp 1, pp 1), eager over graph: 1.100x, simulated 1.083x",
    ]
    staged = a_record("graph", 90.0)
    staged["env"]["world_size"], staged["config"]["pp"] = 2, 2
    (line,) = scale.of_several_ranks([with_microbatches(a_record("graph", 120.0)), staged])
    # Half of 80 ms of passes, a quarter more as the bubble, 20 ms of loss and embedding, half of the optimizer.
    assert line == "2 ranks (dp 1, tp 1, pp 2), graph: step 90.00 ms, simulated 80.00 to 80.00 ms"
    other = a_record("graph", 90.0)
    other["env"]["world_size"], other["config"]["layers"] = 2, 16
    assert scale.of_several_ranks([*alone, other]) == ["no record of several ranks beside records of one"]


def run_of_one_and_two_ranks(folder):
    """Records of the toy pipeline: one process that holds all of it, and two ranks."""
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    for name, launch, more in (
        ("one", [sys.executable], ["--pp", "1"]),
        ("two", [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"], []),
    ):
        path = folder / f"{name}.json"
        command = [*launch, "-m", "gpt3.train", "--preset", "tiny_pp", "--variant", "eager", "--record", path, *more]
        subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, timeout=300)
        yield records.read(path)


@pytest.mark.slow
def test_two_ranks_of_a_pipeline_take_what_the_simulation_says(tmp_path):
    """Of the toy on the CPU: sends that are not simulated make the measured step longer, and so does what runs beside
    two ranks on two cores. That has three attempts."""
    ratios = []
    while not ratios or (ratios[-1] >= 3 and len(ratios) < 3):
        one, two = run_of_one_and_two_ranks(tmp_path)
        for record in (one, two):
            # Two chunks and four microbatches; of two ranks those of the first.
            passes = [own for key in ("forward_ms", "backward_ms") for own in record["extra"]["microbatches"][key]]
            assert {len(own) for own in passes} == {8}
        simulated = scale.simulated_step_ms(scale.ranks_of(two), scale.runs_of([one], "eager"), 200, rng())
        ratios.append(two["statistic_ms"] / simulated["spread"])
        assert ratios[-1] > 0.5 and 0.5 < simulated["burst"] / simulated["spread"] < 2
        assert "pp 2), eager: step" in scale.of_several_ranks([one, two])[0]
    assert ratios[-1] < 3, ratios


@pytest.mark.parametrize(
    ("argv", "said"),
    [(["nowhere", "--model", "gpt3"], "no folder nowhere"), ([".", "--model", "rnnt"], "no cluster is known of it")],
)
def test_mistakes_are_one_line(argv, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        scale.main(argv)
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and said in error and error.count("\n") == 1


def test_the_figure_draws_each_row(tmp_path):
    found = [a_record("eager", 130.0), a_record("graph", 120.0)]
    rows = scale.rows(found, "gpt3", "graph", num_steps=1, num_boot=0)
    path = figure.draw(rows, "gpt3", "graph", found, tmp_path)
    drawn = path.read_text()
    assert path.name == "scale-gpt3.svg" and "11,616 GPUs" in drawn and "256 GPUs" in drawn
    assert "1.100x on one GPU of a quiet host would be 1.10x to 1.10x" in drawn


def test_a_page_says_how_it_was_made_and_from_what(tmp_path):
    found = [a_record("eager", 130.0) | {"session": "b"}, a_record("graph", 120.0) | {"session": "a"}]
    lines = scale.table(scale.rows(found, "gpt3", "graph", num_steps=1, num_boot=0))
    args = argparse.Namespace(results=tmp_path, model="gpt3", preset="rank", variant="graph", steps=scale.NUM_STEPS)
    path = scale.write(args, lines, found)
    text = path.read_text()
    assert path.name == "scale-gpt3-rank.md" and "    make scale MODEL=gpt3 PRESET=rank VARIANT=graph ARGS=" in text
    assert "Simulated, not measured" in text and "| 11,616 |" in text and "From the sessions a, b." in text
    # Of another variant, or of fewer steps, it is another page.
    args.variant, args.steps = "graph_te", 10
    assert scale.write(args, lines, found).name == "scale-gpt3-rank-graph_te-steps10.md" and path.read_text() == text


def test_committed_pages_are_of_all_sessions():
    """A new session of a preset makes its page old."""
    pages = sorted((ROOT / "results").glob("scale-*.md"))
    runs = frame.read(ROOT / "results").frame
    timed = runs[(runs["device"] == "cuda") & runs["is_timed"].astype(bool)]
    for page in pages:
        model, preset = page.stem.split("-")[1:3]
        found = frame.timed(frame.records_of(timed[(timed["model"] == model) & (timed["preset"] == preset)]))
        assert f"From the sessions {', '.join(scale.sessions_of(found))}." in page.read_text(), page.name
    assert pages
