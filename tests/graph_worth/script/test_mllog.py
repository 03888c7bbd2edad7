"""graph_worth/script/mllog.py: what the lines say and when; the official checker on whole and on broken logs."""

import json
import logging
import math
import os
import time
from pathlib import Path

import pytest

from graph_worth.made_variant import Unsupported
from graph_worth.script import mllog
from tests.helpers import by_hand as by_hand_helpers
from tests.helpers import forked
from tests.helpers.by_hand import Variant

ROOT = Path(__file__).resolve().parents[3]
RULES = ROOT / "graph_worth" / "script" / "mllog_rules.yaml"
HYPERPARAMETERS = {
    "seed": 7,
    "global_batch_size": 4,
    "gradient_accumulation_steps": 1,
    "train_samples": 16,
    "eval_samples": 8,
    "opt_name": "sgd",
    "opt_base_learning_rate": 0.5,
}


def parse(text):
    lines = [line.removeprefix(mllog.TOKEN + " ") for line in text.splitlines() if line.startswith(mllog.TOKEN)]
    return [json.loads(line) for line in lines]


def keys(lines):
    return [line["key"] for line in lines]


def of(lines, key):
    """The one line of that key."""
    (line,) = [line for line in lines if line["key"] == key]
    return line


def step_lines(lines):
    return [line for line in lines if line["key"] == "tracked_stats" and "train_step_time" in line["value"]]


def passes(path):
    """Return the official checker's verdict by our rules; skip the test where it is not installed."""
    mlp_compliance = pytest.importorskip("mlperf_logging.compliance_checker.mlp_compliance")
    logging.disable()
    try:
        checker = mlp_compliance.make_checker("training", "5.1.0", quiet=False, werror=False)
        return mlp_compliance.main(str(path), str(RULES), checker)[0]
    finally:
        logging.disable(logging.NOTSET)


# --- a real run, whole and broken


@pytest.fixture(scope="module")
def gpt3_log(tmp_path_factory):
    path = tmp_path_factory.mktemp("mllog") / "new folder" / "graph.mllog"
    result = path.with_name("result.json")
    flags = ["--preset", "tiny", "--variant", "graph_layer", "--steps", "8", "--mllog", str(path)]
    flags += ["--record", str(result)]
    run = forked.run("gpt3.train", flags, os.environ | {"CUDA_VISIBLE_DEVICES": ""}, timeout_s=300)
    assert run.returncode == 0, run.stderr
    return path, json.loads(result.read_text())


def test_log_of_a_run_says_what_its_result_says(gpt3_log):
    path, result = gpt3_log
    assert passes(path)
    lines = parse(path.read_text())
    assert len(lines) == len(path.read_text().splitlines())
    times_ms = [line["time_ms"] for line in lines]
    # Of the clock on the wall: the program had made the folder before them.
    begin_ms, end_ms = path.parents[1].stat().st_mtime * 1e3, time.time() * 1e3
    assert times_ms == sorted(times_ms) and begin_ms - 1 <= times_ms[0] and times_ms[-1] <= end_ms + 1
    stats = step_lines(lines)
    seconds = [ms / 1e3 for ms in result["step_ms"]]
    assert [line["value"]["train_step_time"] for line in stats] == pytest.approx(seconds, abs=2e-7)
    assert len(stats) == 8 and [line["value"]["reduced_train_loss"] for line in stats] == result["losses"]
    assert [line["metadata"]["samples_count"] for line in stats] == [2 * (i + 1) for i in range(len(stats))]
    first, last = of(lines, "run_start")["time_ms"], of(lines, "block_stop")["time_ms"]
    assert last - first == pytest.approx(1e3 * result["seconds"], abs=1.1)
    warm_up = lines[keys(lines).index("init_stop") - 1]["value"]
    assert warm_up["capture_time"] == pytest.approx(result["capture_s"], abs=1e-3)
    assert warm_up["warmup_time"] == pytest.approx(result["warmup_s"] + result["capture_s"], abs=1e-3)
    assert "submission_division" not in keys(lines) and "not a submission" in of(lines, "submission_org")["value"]
    assert str(ROOT) not in path.read_text()
    # A model that knows nothing says log(256) of a byte; eight steps teach it something of text it has not seen.
    accuracy = of(lines, "eval_accuracy")["value"]
    assert accuracy == result["eval_loss"] and 2 < accuracy < math.log(256)


def without(*names):
    return lambda lines: [line for line in lines if line["key"] not in names]


def replaced(name, which=0, **changes):
    def change(lines):
        place = [index for index, key in enumerate(keys(lines)) if key == name][which]
        line = lines[place]
        value = changes.pop("value", line["value"])
        time_ms = line["time_ms"] + changes.pop("later_ms", 0)
        line = line | {"value": value, "time_ms": time_ms, "metadata": line["metadata"] | changes}
        return [*lines[:place], line, *lines[place + 1 :]]

    return change


BROKEN = {
    "no run_start": without("run_start"),
    "no evaluation": without("eval_start", "eval_accuracy", "eval_stop"),
    "no seed": without("seed"),
    "no steps": lambda lines: [line for line in lines if line not in step_lines(lines)],
    "no capture_time": replaced("tracked_stats", value={"warmup_time": 1.0}),
    "time runs backwards": replaced("tracked_stats", which=3, later_ms=-100_000),
    "aborted": replaced("run_stop", status="aborted"),
    "samples miscounted": replaced("block_stop", samples_count=1),
    "it ends early": lambda lines: lines[: len(lines) // 2],
}


@pytest.mark.parametrize("name", BROKEN)
def test_official_checker_fails_a_broken_log(gpt3_log, tmp_path, name):
    lines = parse(gpt3_log[0].read_text())
    path = tmp_path / "broken.mllog"
    path.write_text("".join(f"{mllog.TOKEN} {json.dumps(line)}\n" for line in BROKEN[name](lines)))
    assert not passes(path)


# --- the lines of steps


def logged(num_steps, losses=None, wall_ms=None, samples=4):
    """Lines of steps of 10, 11, 12, 10, ... ms that began at 5 s on the monotonic clock."""
    step_ms = [10.0 + index % 3 for index in range(num_steps)]
    log = mllog.Log("-")
    log.say({"global_batch_size": samples})
    log.origin_s, log.file = 1000.0, Lines()
    wall_s = (wall_ms or sum(step_ms)) / 1e3
    log.steps(step_ms, losses or [float(index) for index in range(num_steps)], 5.0, wall_s)
    return step_ms, parse("".join(log.file))


class Lines(list):
    """A file that is a list of what was written to it."""

    write = list.append

    def flush(self):
        """Nothing to do."""


@pytest.mark.parametrize("num_steps, num_lines", [(1, 1), (200, 200), (201, 101), (1001, 167)])
def test_at_most_two_hundred_step_lines_that_hold_every_step(num_steps, num_lines):
    step_ms, lines = logged(num_steps)
    stats = step_lines(lines)
    assert len(stats) == num_lines
    ends = [line["metadata"]["step"] for line in stats]
    assert ends == sorted(set(ends)) and ends[-1] == num_steps
    counts = [b - a for a, b in zip([0, *ends], ends, strict=False)]
    assert len(set(counts[:-1])) <= 1 and counts[-1] <= counts[0]
    total = sum(line["value"]["train_step_time"] * count for line, count in zip(stats, counts, strict=True))
    assert total * 1e3 == pytest.approx(sum(step_ms), rel=1e-5)
    for line, count in zip(stats, counts, strict=True):
        assert line["value"]["throughput"] == pytest.approx(4 / line["value"]["train_step_time"], abs=1e-3), count


def test_a_step_is_dated_where_it_ended():
    _, lines = logged(6)
    assert [line["time_ms"] for line in step_lines(lines)] == [1005010, 1005021, 1005033, 1005043, 1005054, 1005066]
    assert of(lines, "run_start")["time_ms"] == of(lines, "block_start")["time_ms"] == 1005000
    assert of(lines, "block_stop")["time_ms"] == 1005066
    _, lines = logged(6, wall_ms=660)
    assert of(lines, "block_stop")["time_ms"] == step_lines(lines)[-1]["time_ms"] == 1005660
    assert step_lines(lines)[0]["time_ms"] == 1005100


def test_losses_that_a_script_did_not_keep_are_left_out_and_the_last_is_the_last_steps():
    _, lines = logged(10, losses=[9.0, 8.0, math.nan, 1.0])
    losses = [line["value"].get("reduced_train_loss") for line in step_lines(lines)]
    assert losses == [9.0, 8.0, None, None, None, None, None, None, None, 1.0]


# --- when training by hand writes them


class State(by_hand_helpers.State):
    def evaluate(self):
        return 0.25


def run(make=Variant, path="", rank=0, state=State, **options):
    options["mllog"] = str(path)
    return by_hand_helpers.trained(
        by_hand_helpers.Model(make, options, state=state, rank=rank, hyperparameters=HYPERPARAMETERS)
    )


def test_any_script_that_says_its_hyperparameters_and_evaluates_passes(tmp_path):
    result = run(path=tmp_path / "x")
    assert result["status"] == "pass" and passes(tmp_path / "x")
    lines = parse((tmp_path / "x").read_text())
    assert of(lines, "eval_accuracy")["value"] == result["eval_loss"] == 0.25
    assert of(lines, "opt_base_learning_rate")["value"] == 0.5


def test_nothing_is_written_while_it_trains(tmp_path):
    path, sizes = tmp_path / "x", []
    run(lambda state: Variant(state, lambda index: sizes.append(path.stat().st_size)), path, steps=40)
    assert len(sizes) == 40 and len(set(sizes)) == 1 and sizes[0] < path.stat().st_size
    assert path.read_text()[: sizes[0]].rstrip().splitlines()[-1].count('"init_stop"') == 1


def test_without_a_path_nothing_is_written_or_evaluated(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(State, "evaluate", lambda self: pytest.fail("evaluated"))
    result = run()
    assert result["status"] == "pass" and not list(tmp_path.iterdir())


def test_on_stdout_the_log_stands_before_the_table(capsys):
    capsys.readouterr()
    run(path="-")
    out = capsys.readouterr().out
    assert keys(parse(out))[0] == "init_start" and keys(parse(out))[-1] == "run_stop"
    last = max(index for index, line in enumerate(out.splitlines()) if line.startswith(mllog.TOKEN))
    assert out.splitlines()[last + 1].startswith("steps ")


def test_only_rank_zero_writes_and_every_rank_evaluates(tmp_path, monkeypatch):
    evaluated = []
    monkeypatch.setattr(State, "evaluate", lambda self: evaluated.append(1) or 0.25)
    run(path=tmp_path / "x", rank=1)
    assert not (tmp_path / "x").exists() and evaluated == [1]


def test_a_run_that_ends_early_says_so_and_fails_the_check(tmp_path):
    def make(state):
        raise Unsupported("needs a GPU")

    run(make, tmp_path / "x")
    lines = parse((tmp_path / "x").read_text())
    assert keys(lines)[0] == "init_start" and keys(lines)[-1] == "run_stop" and "run_start" not in keys(lines)
    assert lines[-1]["metadata"] | {"status": "aborted", "reason": "unsupported: needs a GPU"} == lines[-1]["metadata"]
    assert not passes(tmp_path / "x")


def test_an_evaluation_that_cannot_be_is_a_note(tmp_path, monkeypatch):
    def evaluate(self):
        raise Unsupported("too little text")

    monkeypatch.setattr(State, "evaluate", evaluate)
    result = run(path=tmp_path / "x")
    assert result["status"] == "pass" and result["said"] == ["no evaluation: too little text"]
    assert "eval_start" not in keys(parse((tmp_path / "x").read_text())) and not passes(tmp_path / "x")


def test_a_variant_that_changed_the_model_is_evaluated_eager(tmp_path, monkeypatch):
    seen = []

    class Changed(Variant):
        def enter(self):
            seen.append("changed")

        def leave(self):
            seen.append("eager")

    monkeypatch.setattr(State, "evaluate", lambda self: seen.append("evaluated") or 0.25)
    run(Changed, tmp_path / "x")
    assert seen == ["changed", "eager", "evaluated", "changed", "eager"]
