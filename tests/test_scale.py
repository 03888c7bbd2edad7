"""benchmarks/scale: a cluster's step from the steps of single ranks."""

import numpy
import pytest

from benchmarks import scale
from benchmarks.figures import scale as figure
from common import record as records

STEADY = [numpy.full(50, 100.0)]
ALONE = scale.Scale(gpus=1, tp=1, pp=1, dp=1, chunks=1, microbatches=4)
PIPELINE = scale.Scale(gpus=2, tp=1, pp=2, dp=1, chunks=1, microbatches=4)


def rng():
    return numpy.random.default_rng(1)


@pytest.mark.parametrize("spread", scale.SPREADS)
def test_one_rank_takes_what_its_steps_take(spread):
    assert scale.cluster_steps(ALONE, STEADY, spread, 3, rng()) == pytest.approx([100.0] * 3)
    drawn = scale.cluster_steps(ALONE, [numpy.array([100.0, 130.0])], spread, 200, rng())
    assert set(drawn.round(6)) == {100.0, 130.0}


def test_a_pipeline_adds_its_bubble():
    # (PP - 1) / microbatches of the work.
    assert scale.cluster_steps(PIPELINE, STEADY, "spread", 2, rng()) == pytest.approx([125.0] * 2)


def test_the_slowest_of_many_sets_the_pace():
    """Of n ranks that draw 100 or 200 ms, all draw 100 with probability 2 ** -n."""
    jitter = [numpy.array([100.0, 200.0])]
    for dp, tp in ((4, 1), (1, 4)):
        wide = scale.Scale(gpus=4, tp=tp, pp=1, dp=dp, chunks=1, microbatches=1)
        mean = scale.cluster_steps(wide, jitter, "spread", 20_000, rng()).mean()
        assert mean == pytest.approx(200 - 100 / 2**4, rel=0.01)


def test_a_burst_in_one_stage_delays_the_step_by_at_most_its_length():
    """Of two stages one or both are interrupted for 100 ms, with probability 0.18 and 0.01."""
    jitter = [numpy.array([100.0] * 9 + [200.0])]
    steps = scale.cluster_steps(PIPELINE, jitter, "burst", 4000, rng())
    assert steps.min() == pytest.approx(125.0) and steps.max() == pytest.approx(325.0)
    assert 135.0 < steps.mean() < 150.0


@pytest.mark.parametrize("known", scale.SCALES["gpt3"])
def test_without_noise_a_cluster_gains_what_one_gpu_gains(known):
    got = scale.ratios(known, [numpy.full(9, 110.0)], STEADY, num_steps=1, num_boot=2 if known.chunks == 8 else 0)
    assert got["spread"] == pytest.approx(1.1) and got["burst"] == pytest.approx(1.1)
    if known.chunks == 8:
        assert got["low"] == pytest.approx(1.1) and got["high"] == pytest.approx(1.1)


def test_noise_of_eager_alone_makes_graphs_worth_more_at_scale():
    noisy = [numpy.random.default_rng(3).normal(100.0, 3.0, 200)]
    large = next(known for known in scale.SCALES["gpt3"] if known.gpus > 10_000)
    assert scale.ratios(large, noisy, STEADY, num_steps=2, num_boot=0)["spread"] > 1.03


def test_every_action_comes_after_what_it_waits_for():
    known, seen = scale.SCALES["gpt3"][1], set()
    for _, _, waits_for, name in scale.actions(known):
        assert waits_for is None or waits_for in seen
        seen.add(name)
    assert len(seen) == 2 * known.pp * known.chunks * known.microbatches


def test_skew_of_two_ranks():
    assert scale.expected_skew_ms([numpy.array([100.0, 104.0])], 2, rng(), 20_001) in (0.0, 4.0)
    assert scale.expected_skew_ms([numpy.linspace(100, 104, 1001)], 2, rng()) == pytest.approx(
        4 * (1 - 0.5**0.5), rel=0.03
    )


def a_record(variant, ms, load=0, **more):
    record = records.blank(model="gpt3", preset="bench", variant=variant, device="cuda", round=1, status="pass")
    record.update(optimizer_ms=20.0, statistic_ms=ms, host_load=load, **more)
    record["steps"].update(gpu_ms=[ms] * 8, batch=[0] * 8)
    return record


def test_the_table_names_what_there_is_and_what_is_not():
    found = [a_record("eager", 130.0), a_record("graph", 120.0)]
    rows = scale.rows(found, "gpt3", "graph", num_steps=1, num_boot=0)
    lines = scale.table(rows)
    # The optimizer's 20 ms are not in it.
    assert any(line.startswith("| 1 | quiet | 1 + 1, 1 | 1.100x") for line in lines)
    assert any(line.startswith("| 11,616 | quiet |") and line.endswith("| 1.030x |") for line in lines)
    assert lines[-1].startswith("| - | busy | no record")
    assert scale.skews(found) == ["skew: no record of two ranks beside records of one"]
    two = a_record("graph", 121.0, ranks=[{"rank": 0}, {"rank": 1}], rank_skew_ms=0.5)
    two["env"]["world_size"] = 2
    assert scale.skews([*found, two]) == ["graph: skew of two ranks 0.50 ms, expected 0.00 ms"]


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
