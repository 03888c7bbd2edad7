"""common/measure: small workloads on the CPU that sleep, jitter, leak, lie and fail, and what the record says of it."""

import contextlib
import gc
import json
import math
import os
import random
import statistics
from types import SimpleNamespace

import numpy
import pytest
import torch

from benchmarks.intervals import tail
from common import measure, passes
from common import record as records
from common.capture import CaptureError
from tests import forked
from tests.measured import (
    DECAY,
    Clock,
    Config,
    Graphed,
    State,
    Variant,
    expected_losses,
    measuring,
    sleeping,
)


@pytest.fixture
def run(tmp_path, capsys):
    return measuring(tmp_path, capsys)


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


class IgnoresInput(Graphed):
    def captured(self, state):
        state.input, original = state.input.clone(), state.input
        frozen, state.input = state.input, original

        def compute():
            state.loss.copy_((state.weight * frozen).square().sum())
            state.weight.mul_(DECAY)

        self.frozen = frozen
        return compute


class StaleWeights(Graphed):
    def captured(self, state):
        self.cache = torch.ones(8)

        def compute():
            state.loss.copy_((self.cache * state.input).square().sum())
            state.weight.mul_(DECAY)

        return compute


class FallsBack(Graphed):
    """Right losses, no replay."""

    def compute(self):
        self.state.compute()


# --- known times


def test_known_sleep_is_measured_within_two_percent(run):
    record = run(sleeping(lambda index: 0.008), config=Config(min_steps=30)).record
    # A host that takes the processor away makes steps longer, hardly all of them.
    assert min(record["steps"]["gpu_ms"]) == pytest.approx(8.0, rel=0.02)
    assert record["steps"]["wall_ms"] == pytest.approx(sum(record["steps"]["gpu_ms"]), rel=0.02)
    assert record["extra"]["items_per_s"] == pytest.approx(10e3 / record["statistic_ms"], rel=1e-3)


def test_known_jitter_shows_in_median_and_tail(run, clock):
    generator = random.Random(3)
    # Every eighth step or so takes half as long again, so that the 95th percentile is the slow kind.
    ms = [generator.uniform(5.7, 6.3) * (1.5 if generator.random() < 0.12 else 1) for _ in range(160)]
    steps_of = clock.steps_of(lambda index: 0.006 if index is None else ms[index] / 1e3)
    record = run(steps_of, config=Config(min_steps=160)).record
    steps = record["steps"]
    assert record["statistic_ms"] == pytest.approx(statistics.median(ms), rel=1e-4)
    wanted = numpy.percentile(ms, 95) / statistics.median(ms)
    assert wanted > 1.4
    assert tail(steps["gpu_ms"], steps["batch"]) == pytest.approx(wanted, rel=1e-4)
    assert numpy.percentile(steps["gpu_ms"], 95) == pytest.approx(numpy.percentile(ms, 95), rel=1e-4)


def test_batches_of_different_length_give_the_mean_of_their_medians(run, clock):
    length_ms = (3.0, 5.0, 13.0)

    def seconds_of(index):
        # One slow step of each kind, which medians ignore.
        return 0.005 if index is None else 1e-3 * length_ms[index % 3] * (3 if 9 <= index < 12 else 1)

    result = run(clock.steps_of(seconds_of), config=Config(min_steps=33), state=lambda: State(classes=3))
    assert result.record["steps"]["batch"] == [index % 3 for index in range(33)]
    assert result.record["statistic_ms"] == pytest.approx(7.0)


def test_statistic():
    assert measure.statistic([1, 9, 2], [0, 0, 0]) == 2
    # The kinds weigh the same, however often each came.
    assert measure.statistic([1, 10, 1, 1, 30, 1], "abaaba") == (1 + 20) / 2


def test_window_has_the_steps_and_the_seconds_asked_for(run):
    config = Config(min_steps=5, min_window_s=0.2, warmup_max_s=0.05)
    record = run(sleeping(lambda index: 0.004), config=config).record
    num_steps = len(record["steps"]["gpu_ms"])
    assert record["steps"]["wall_ms"] >= max(200, num_steps * 4)
    assert sum(record["steps"]["gpu_ms"]) >= 200 and record["conditions"]["window_s"] >= 0.2
    assert len(run(config=Config(min_steps=7)).record["steps"]["gpu_ms"]) == 7
    assert len(run(config=Config(min_steps=7), steps=31).record["steps"]["gpu_ms"]) == 31


def test_slow_first_steps_are_warmed_up_away(run, clock, monkeypatch):
    """Steps are slow, and evenly so, for a tenth of a second: the floor keeps them out of the window."""
    monkeypatch.setattr(passes, "SETTLE_BLOCK_S", 0.02)

    start = clock.now
    steps_of = clock.steps_of(lambda index: 0.012 if clock.now - start < 0.1 else 0.003)
    record = run(steps_of, config=Config(warmup_min_s=0.2, warmup_max_s=2.0)).record
    assert record["extra"]["settle"]["seconds"] >= 0.2
    assert record["extra"]["settle"]["settled"]
    assert record["steps"]["gpu_ms"] == pytest.approx([3.0] * 12)


def test_warm_up_that_never_settles_ends_at_its_ceiling(run, clock):
    length = iter(0.002 * 1.05**index for index in range(1000))
    config = Config(warmup_min_s=0.05, warmup_max_s=0.3)
    settle = run(clock.steps_of(lambda index: next(length)), config=config).record["extra"]["settle"]
    assert not settle["settled"]
    assert 0.3 <= settle["seconds"] < 0.6


def test_leak_shows_in_peak_memory_within_two_percent(tmp_path):
    # In a process of its own, whose peak is its own.
    answer = forked.run("tests.fake_model.leaks", [str(tmp_path)], os.environ, timeout_s=60)
    assert answer.returncode == 0, answer.stderr
    grown, leaked = json.loads(answer.stdout.splitlines()[-1])
    assert leaked >= 400 * 2**20
    assert grown == pytest.approx(leaked, rel=0.02)


# --- graphs that lie


def test_graph_is_measured_and_its_replays_are_counted(run):
    result = run(Graphed)
    capture = result.record["capture"]
    assert result.record["status"] == "pass"
    assert capture["num_replays"] == capture["expected_replays"] == 12
    assert (capture["strategy"], capture["num_graphs"]) == ("one graph", 1)
    assert capture["warmup_s"] > 0 and capture["capture_s"] > 0 and capture["compile_s"] == 0
    assert result.record["capture"]["nodes"]
    assert result.record["memory"]["graph_pool_bytes"] > 0


def test_too_few_replays_fail(run):
    made = run(lambda state: Graphed(state, promised=2)).record
    assert (made["capture"]["num_replays"], made["capture"]["expected_replays"]) == (12, 24)
    assert (made["status"], made["message"]) == ("failed", "12 replays counted, its steps make 24")
    fallback = run(FallsBack).record
    assert (fallback["capture"]["num_replays"], fallback["capture"]["expected_replays"]) == (0, 12)
    assert fallback["status"] == "failed" and fallback["statistic_ms"] > 0
    in_parity = run(FallsBack, parity=True).record
    assert (in_parity["capture"]["num_replays"], in_parity["capture"]["expected_replays"]) == (0, 20)
    assert in_parity["status"] == "failed"


@pytest.mark.parametrize("parity", [False, True])
@pytest.mark.parametrize(
    ("make", "promise", "message"),
    [
        (Graphed, ("graph", 1, 1), ""),
        (Graphed, ("graph", None, None), ""),
        (Graphed, ("graph", 2, 1), "1 graphs made, 2 promised"),
        (Graphed, ("graph", 1, 2), "replays in"),
        (Graphed, ("eager", 0, 0), "1 graphs made, 0 promised"),
        (Variant, ("eager", 0, 0), ""),
        (Variant, ("compile", 0, 0), ""),
        (Variant, ("graph", None, None), "0 graphs and 0 replays in a variant that promised some"),
        (Variant, ("compile", None, None), "0 graphs and 0 replays in a variant that promised some"),
        (Variant, ("graph", 1, 1), "0 graphs made, 1 promised"),
    ],
)
def test_graphs_and_replays_are_those_promised(run, make, promise, message, parity):
    record = run(make, promise=promise, parity=parity).record
    assert record["promised"] == {"graphs": promise[1], "replays_per_step": promise[2]}
    assert record["extra"]["kind"] == promise[0]
    assert record["status"] == ("failed" if message else "pass") and message in record["message"]


@pytest.mark.parametrize("make, step", [(IgnoresInput, 0), (StaleWeights, 1)])
def test_canary_catches_a_replay_of_the_wrong_data(run, make, step):
    result = run(make)
    assert result.record["status"] == "capture_failed"
    assert f"canary: step {step} " in result.record["message"]
    assert result.record["statistic_ms"] is None
    assert result.variant.closed == 1


def test_canary_holds_a_changed_model_against_the_unchanged_one(run):
    """A variant that rewrites the model rewrites eager too; `as_eager` keeps it from being compared with itself."""

    class RewritesForGood(Graphed):
        scale = 1.0

        def step(self, index):
            super().step(index)
            self.state.losses[index] *= self.scale

    class Rewrites(RewritesForGood):
        @contextlib.contextmanager
        def as_eager(self):
            self.scale, kept = 1.0, self.scale
            yield
            self.scale = kept

    made = []

    def making(kind):
        def make(state):
            made.append(kind(state))
            made[-1].scale = 1.5
            return made[-1]

        return make

    through_the_variant = lambda state, index: made[-1].step(index)  # noqa: E731
    assert run(making(Rewrites), reference=through_the_variant).record["status"] == "capture_failed"
    assert run(making(RewritesForGood), reference=through_the_variant).record["status"] == "pass"


def test_a_state_that_has_more_to_say_says_it_after_the_window(run, monkeypatch):
    said = []

    def finish(state, variant, record):
        said.append((type(variant), record["statistic_ms"] is not None, len(record["steps"]["gpu_ms"])))
        record["extra"]["more"] = 1

    monkeypatch.setattr(State, "finish", finish, raising=False)
    record = run(Graphed).record
    assert record["status"] == "pass" and record["extra"]["more"] == 1
    assert said == [(Graphed, True, len(record["steps"]["gpu_ms"]))]
    # Parity times nothing.
    run(Graphed, parity=True)
    assert len(said) == 1


def test_warm_up_and_capture_leave_no_trace(run):
    for make in (Variant, Graphed):
        result = run(make, config=Config(warmup_min_s=0.02, warmup_max_s=0.02))
        assert result.record["numerics"]["loss"] == pytest.approx(expected_losses(12), rel=1e-5)
        assert result.record["numerics"]["grad_norm"] == pytest.approx([2 * x for x in expected_losses(12)], rel=1e-5)
        parity = run(make, parity=True)
        assert parity.record["numerics"]["loss"] == pytest.approx(expected_losses(20), rel=1e-5)


# --- passes


def test_parity_hashes_every_step_and_times_nothing(run):
    seen = []

    def note(index):
        seen.append(torch.are_deterministic_algorithms_enabled())

    runs = [run(lambda state: Variant(state, before=note), parity=True), run(Graphed, parity=True)]
    arrays = []
    for result in runs:
        record = result.record
        assert record["status"] == "pass"
        assert record["statistic_ms"] is None and record["steps"] == {"gpu_ms": [], "batch": [], "wall_ms": None}
        assert result.variant.indices == list(range(20))
        with numpy.load(result.path.with_suffix(".parity.npz")) as sidecar:
            arrays.append({name: sidecar[name] for name in sidecar.files})
        assert arrays[-1]["loss"].tolist() == record["numerics"]["loss"]
        assert len(set(arrays[-1]["hashes"][:, 0].tolist())) == 20
    assert runs[0].record["numerics"]["state_hash"] == runs[1].record["numerics"]["state_hash"]
    assert (arrays[0]["hashes"] == arrays[1]["hashes"]).all()
    assert seen == [True] * 20
    assert not torch.are_deterministic_algorithms_enabled()


def test_parity_takes_more_than_twenty_steps_when_asked(run):
    assert len(run(parity=True, steps=27).record["numerics"]["loss"]) == 27


def test_parity_hash_sees_one_bit(run):
    def minus_zero(state):
        def before(index):
            if index == 13:
                state.moment[1] = -0.0

        return Variant(state, before=before)

    hashes, digests = [], []
    for make in (Variant, minus_zero):
        result = run(make, parity=True)
        digests.append(result.record["numerics"]["state_hash"])
        with numpy.load(result.path.with_suffix(".parity.npz")) as sidecar:
            hashes.append(sidecar["hashes"])
            assert sidecar["names"].tolist() == ["weight", "moment"]
    assert digests[0] != digests[1]
    assert (hashes[0] != hashes[1]).tolist() == [[False, index >= 13] for index in range(20)]


def test_marks_and_sections_do_nothing_outside_their_passes(run):
    entered = []

    def before(index):
        measure.mark()
        with measure.section("optimizer"):
            entered.append(index)
        measure.mark()

    record = run(lambda state: Variant(state, before=before)).record
    assert record["status"] == "pass" and len(entered) >= 12
    assert record["issue_ms"] is None and record["optimizer_ms"] is None
    assert "num_marks" not in record["extra"] and "sections_ms" not in record["extra"]


def test_section_lets_errors_through():
    with pytest.raises(KeyError), measure.section("optimizer"):
        raise KeyError("x")


def test_no_garbage_is_collected_in_the_window(run):
    enabled = []
    result = run(lambda state: Variant(state, before=lambda index: enabled.append(gc.isenabled())))
    # Of the window and of no other pass.
    assert enabled.count(False) == 12
    assert gc.isenabled()
    assert result.record["status"] == "pass"


# --- faults


def failing(error, at=5):
    def before(index):
        if index == at:
            raise error

    return lambda state: Variant(state, before=before)


OOM = (
    "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 139.81 GiB of which 1.50 GiB is "
    "free. Of the allocated memory 130.00 GiB is allocated by PyTorch."
)


@pytest.mark.parametrize("parity", [False, True])
@pytest.mark.parametrize(
    "error, status, message",
    [
        (measure.Unsupported("needs a GPU: make te"), "unsupported", "needs a GPU: make te"),
        (torch.OutOfMemoryError(OOM), "oom", "out of memory: asked for 20.00 GiB, 1.50 GiB free"),
        (CaptureError("aten::item at train.py:3"), "capture_failed", "aten::item at train.py:3"),
        (FloatingPointError("loss is nan at step 5"), "numerics_failed", "loss is nan at step 5"),
        (ValueError("--layers 0: takes more"), "failed", "--layers 0: takes more"),
        (KeyError("slot"), "failed", "KeyError: 'slot'"),
    ],
)
def test_errors_become_statuses(run, error, status, message, parity):
    result = run(failing(error), parity=parity)
    assert (result.record["status"], result.record["message"]) == (status, message)
    assert result.variant.closed == 1
    assert records.check(result.record) is None
    assert json.loads(result.lines[-1]) == records.read(result.path)
    assert f"{status}: {message}" in result.lines


def test_error_while_a_variant_is_made(run):
    def make(state):
        raise measure.Unsupported("no compiler here")

    result = run(make)
    assert (result.record["status"], result.record["message"]) == ("unsupported", "no compiler here")
    assert json.loads(result.lines[-1])["status"] == "unsupported"


@pytest.mark.parametrize("parity", [False, True])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_loss_that_is_not_finite(run, bad, parity):
    class Diverges(State):
        def read_losses(self, count):
            return [bad if index == 4 else loss for index, loss in enumerate(super().read_losses(count))]

    result = run(state=Diverges, parity=parity)
    assert result.record["status"] == "numerics_failed"
    assert result.record["message"] == f"loss is {bad} at step 4"
    assert result.variant.closed == 1
    assert json.loads(result.lines[-1])["status"] == "numerics_failed"


def test_loss_that_is_nan_in_eager_and_graph_alike_is_not_the_captures_fault(run):
    class Diverges(State):
        def __init__(self):
            super().__init__()
            self.batches[1] = math.nan

    assert run(Graphed, state=Diverges).record["status"] == "numerics_failed"


def test_window_shorter_than_the_presets_has_as_many_norms_as_losses(run):
    class Logged(State):
        """Losses and norms in buffers of fixed length, as the models keep them."""

        def read_losses(self, count):
            return [self.losses.get(index, 0.0) for index in range(count)]

        read_grad_norms = read_losses

    numerics = run(state=Logged, steps=5).record["numerics"]
    assert len(numerics["loss"]) == len(numerics["grad_norm"]) == 5


# --- the record


def test_record_is_valid_and_the_last_line_on_stdout(run):
    result = run(Graphed)
    assert records.check(result.record) is None
    written = records.read(result.path)
    assert json.loads(result.lines[-1]) == written
    assert written["status"] == "pass"
    assert written["config"] == vars(Config())
    assert written["extra"]["notes"] == ["a note"]
    assert (written["flops_per_step"], written["items_per_step"], written["unit"]) == (1e9, 10, "samples")
    assert {"a card", "a note"} <= set(result.lines)
    assert any(line.startswith("replays") and "12 of 12" in line for line in result.lines)


def test_closed_once_after_a_pass(run):
    for parity in (False, True):
        assert run(Graphed, parity=parity).variant.closed == 1


def test_close_that_fails_does_not_lose_the_record(run):
    class Clings(Variant):
        def close(self):
            raise RuntimeError("a graph is still in use")

    result = run(Clings)
    assert result.record["status"] == "failed"
    assert "a graph is still in use" in result.record["message"]
    assert json.loads(result.lines[-1]) == records.read(result.path)
    # What went wrong first is what is told.
    first = run(lambda state: Clings(state, before=lambda index: {}[index]))
    assert first.record["message"] == "KeyError: 0"


def test_seeds_are_set_before_the_build(run):
    drawn = []

    class Draws(State):
        def __init__(self):
            super().__init__()
            drawn.append(torch.rand(()).item())

    run(state=Draws)
    torch.manual_seed(7)
    run(state=Draws)
    assert drawn[0] == drawn[1]


def test_the_profile_has_every_kind_of_batch(monkeypatch):
    """Busy time of a few short batches says nothing beside a statistic over all of them."""
    profiled = []

    def profile(run_steps, num_steps, num_heat_steps):
        profiled.append(num_steps)
        return passes.trace.Profile()

    monkeypatch.setattr(passes.trace, "profile", profile)
    sampler = SimpleNamespace(between=lambda start, end: {"sm_mhz": None})
    kinds = list(range(7)) * 3
    # Long steps are few, but never fewer than five or than there are kinds; what is asked for is the most.
    cases = [(10.0, [0] * 50, 12, 12), (10.0, [0] * 50, 3, 3), (10.0, kinds, 5, 7)]
    cases += [(100.0, [0] * 50, 12, 7), (400.0, [0] * 50, 12, 5), (400.0, kinds, 12, 7)]
    for step_ms, batch, asked, _ in cases:
        record = {"statistic_ms": step_ms, "steps": {"batch": batch}, "extra": {}}
        passes.profile_pass(record, None, SimpleNamespace(profile_steps=asked), sampler)
    assert profiled == [wanted for *_, wanted in cases]
