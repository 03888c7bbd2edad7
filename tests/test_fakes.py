"""Runs that lie about their timed window are caught, and sound ones are not accused: tests/fake_model, seed by seed."""

import gc
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import trust
from common import record as records
from tests.fake_model import liars

ROOT = Path(__file__).resolve().parent.parent
SEEDS = range(2)
MANY_SEEDS = range(50)


@pytest.fixture(scope="module", autouse=True)
def few_objects_to_collect():
    """measure collects garbage around its window, which takes long in a process that has imported much."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    liars.run(liars.Eager, 0)
    gc.collect()
    gc.freeze()
    yield
    torch.set_num_threads(threads)


def accusations(record, base_records):
    """What is said of a run: by itself, by its record, beside one reference run, and beside all of them."""
    by_itself = record["message"] if record["status"] != "pass" else None
    beside = [trust.unproven(record, some) for some in (base_records[:1], base_records)]
    return [by_itself, trust.contradiction(record), *beside]


def is_caught(said):
    return bool(said[0] or said[1] or (said[2] and said[3]))


def reference_runs(seed, count=2, **config):
    made = [liars.run(liars.OtherSums, 100 * seed + index, seed=seed, **config) for index in range(count)]
    for record in made:
        assert accusations(record, []) == [None] * 4
    return made


def missed(seeds):
    found = []
    for seed in seeds:
        bases = reference_runs(seed)
        for name, make in liars.LIARS.items():
            if not is_caught(accusations(liars.run(make, 100 * seed + 50, seed=seed), bases)):
                found.append((name, seed))
    return found


def accused(seeds):
    found = []
    for seed in seeds:
        same = reference_runs(seed)
        for name, (make, config) in liars.SOUND.items():
            # A host graph has to have eager's bits (the canary asks for them), so that its run has no scatter.
            bases = reference_runs(seed, 1, **config) if config else same
            said = accusations(liars.run(make, 100 * seed + 60, seed=seed, **config), bases)
            if any(said):
                found.append((name, seed, said))
    return found


def test_there_are_as_many_as_the_number_to_reach_says():
    assert len(liars.SOUND) >= 10 and len(liars.LIARS) >= 12


def test_every_liar_is_caught():
    assert missed(SEEDS) == []


def test_no_sound_run_is_accused():
    assert accused(SEEDS) == []


@pytest.mark.slow
def test_every_liar_is_caught_in_fifty_seeds():
    assert missed(MANY_SEEDS) == []


@pytest.mark.slow
def test_no_sound_run_is_accused_in_fifty_seeds():
    assert accused(MANY_SEEDS) == []


@pytest.fixture(scope="module")
def honest():
    return liars.run(liars.Eager, 1, parity=True)


@pytest.mark.parametrize("name", liars.LIARS)
def test_liars_are_sound_where_nothing_is_timed(name, honest):
    """Else round 0 would catch them, and the proof of the window would not be what is tested."""
    lying = liars.run(liars.LIARS[name], 2, parity=True)
    assert lying["status"] == "pass", lying["message"]
    assert lying["numerics"]["state_hash"] == honest["numerics"]["state_hash"]
    assert lying["numerics"]["loss"] == honest["numerics"]["loss"]


SAID = {
    "cached_losses": "tensors moved otherwise",
    "lazy": "tensors moved otherwise",
    "frozen_rate": "loss of step",
    "half_batches": "loss of step",
    "leak": "memory grew by",
    "no_norm": "grad_norm of step 0",
    "no_graph": "0 replays in 120 steps, 1 a step promised",
    "burns": "tensors stay as they are after step 49",
}


@pytest.mark.parametrize("name", SAID)
def test_what_is_said_of_a_lie(name):
    said = accusations(liars.run(liars.LIARS[name], 7), reference_runs(0))
    assert SAID[name] in next(fault for fault in said if fault)


def test_a_leak_fails_the_run_itself():
    record = liars.run(liars.Leaks, 3)
    assert record["status"] == "failed" and record["message"].startswith("memory grew by")
    assert record["statistic_ms"] == pytest.approx(1.0, rel=0.05)


def test_late_work_changes_what_was_read():
    record = liars.run(liars.LateThread, 3)
    assert record["proof"]["late_change"] is True
    assert liars.run(liars.Eager, 3)["proof"]["late_change"] is False


def test_what_is_computed_when_it_is_read_takes_its_time_then():
    lazy, eager = liars.run(liars.Lazy, 3), liars.run(liars.Eager, 3)
    assert lazy["proof"]["late_ms"] > 100 and eager["proof"]["late_ms"] < 1


# --- the fake that writes records itself


def fake_record(folder, variant, *flags):
    path = folder / f"{variant}.r1.json"
    command = [sys.executable, "-m", "tests.fake_model.train", "--variant", variant, "--record", str(path), *flags]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return records.read(path)


LIES = {
    "drops": "times as long as they had settled",
    "no_graph": "0 graphs made, 4 promised",
    "no_norm": "grad_norm is missing in 50 of 50 steps",
    "busy_above": "is above statistic_ms",
    "stale": "loss of step 1 is",
    "few_replays": "99 replays counted, its steps make 100",
    "edited": "does not follow from its steps",
}


def test_records_that_lie_are_caught_and_others_are_not(tmp_path):
    flags = ("--pretend-gpu", "true")
    base = fake_record(tmp_path, "eager", *flags)
    for variant in ("eager", "graph", "compile"):
        assert accusations(fake_record(tmp_path, variant, *flags), [base]) == [None] * 4
    for variant, words in LIES.items():
        said = accusations(fake_record(tmp_path, variant, *flags), [base])
        assert is_caught(said) and words in next(fault for fault in said if fault), (variant, said)


def test_what_drops_its_work_looks_like_a_great_success(tmp_path):
    record = fake_record(tmp_path, "drops", "--pretend-gpu", "true")
    assert record["status"] == "pass" and record["statistic_ms"] == 0.03
    assert record["capture"]["num_replays"] == record["capture"]["expected_replays"]
