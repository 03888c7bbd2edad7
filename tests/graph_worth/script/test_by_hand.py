"""script/by_hand.py: small trainings on the CPU that pass, lie and fail, and what is printed and written."""

import gc
import json
import math

import pytest
import torch

from graph_worth.capture.pool import CaptureError
from graph_worth.machine import memory
from graph_worth.machine.source import source_hash
from graph_worth.made_variant import Unsupported
from graph_worth.script import by_hand
from tests.helpers.by_hand import DECAY, Config, Graphed, StaleWeights, State, Variant, expected_losses, running

ADVICE = "Times of one run say little: make bench MODEL=tests.small measures what a graph is worth"


@pytest.fixture
def run(tmp_path, capsys):
    return running(tmp_path, capsys)


def names_of(lines):
    return [line.split()[0] for line in lines]


# --- steps


def test_a_run_trains_from_the_seeded_start(run):
    for make in (Variant, Graphed):
        result = run(make).result
        assert result["status"] == "pass" and result["steps"] == 12
        assert result["losses"] == pytest.approx(expected_losses(12), rel=1e-5)
        assert result["grad_norms"] == pytest.approx([2 * loss for loss in expected_losses(12)], rel=1e-5)
    made = run(steps=31, state=lambda: State(classes=2))
    result = made.result
    assert result["batch_classes"] == 2 and result["items_per_s"] == pytest.approx(1e4 / result["ms"])
    assert any("mean over 2 classes of batch" in line for line in made.lines)
    assert result["losses"] == pytest.approx(expected_losses(31), rel=1e-5)
    assert len(result["step_ms"]) == 31 and min(result["step_ms"]) > 0
    # Seconds are rounded to 0.1 ms.
    assert sum(result["step_ms"]) <= 1e3 * result["seconds"] + 0.1


def test_steps_follow_each_other_with_nothing_in_between(run, monkeypatch):
    """No garbage is collected, and nothing waits for the device."""
    collected, waits, made = [], [], []
    monkeypatch.setattr(by_hand.variants, "synchronize", lambda: waits.extend(len(each.indices) for each in made))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *some: pytest.fail("waited"))

    def make(state):
        made.append(Variant(state, before=lambda index: collected.append(gc.isenabled())))
        return made[-1]

    result = run(make)
    assert result.result["status"] == "pass", result.result["message"]
    assert collected == [False] * 12 and gc.isenabled()
    assert waits == [0, 12] and result.variant.indices == list(range(12))


# --- what is printed and written


def test_card_and_table(run):
    lines = run(Graphed).lines
    assert lines[0].startswith("tests.small/tiny  it  CPU, ")
    assert lines[1:5] == ["building tests.small/tiny", "a card", "a note", "making it"]
    assert names_of(lines[5:-1]) == ["steps", "step", "rate", "loss", "graphs", "capture", "memory"]
    assert lines[-1] == ADVICE
    (graphs,) = [line for line in lines if line.startswith("graphs")]
    assert graphs.split()[1:] == ["1", "12", "replays;", "one", "graph"]
    assert any(line.endswith(f"at first, {expected_losses(12)[-1]:.5f} at last") for line in lines)
    assert "graphs" not in names_of(run(Variant).lines)


def test_the_file_of_record(run):
    made = run(Graphed, promise=("graph", 1, 1))
    text = made.path.read_text()
    assert text.count("\n") == 1 and json.loads(text) == made.result
    assert not [line for line in made.lines if line.startswith("{")]
    result = made.result
    what = [result[name] for name in ("model", "preset", "variant", "kind")]
    assert what == ["tests.small", "tiny", "it", "graph"]
    assert (result["status"], result["message"], result["device"]) == ("pass", "", "cpu")
    assert result["env"]["source_hash"] == source_hash()
    assert result["config"] == vars(Config()) and result["notes"] == ["a note"] and result["env"]["torch"]
    counts = [result[name] for name in ("graphs", "replays", "expected_replays", "strategy")]
    assert counts == [1, 12, 12, "one graph"]
    assert result["warmup_s"] > 0 and result["capture_s"] > 0 and result["compile_s"] == 0
    assert result["graph_pool_bytes"] > 0 and result["reserved_bytes"] > 2**20


def test_a_model_may_do_more_after_training(run):
    order = []

    class Saves(State):
        def finish(self):
            order.append(len(self.losses))
            return ["saved in x"]

    made = run(Graphed, state=Saves)
    assert made.result["said"] == ["saved in x"] and made.lines[-2:] == ["saved in x", ADVICE]
    run(Graphed, state=Saves, parity=True)
    # Only of training itself.
    assert order == [12]


def test_a_rank_but_the_first_prints_and_writes_nothing(run):
    made = run(Graphed, rank=1)
    assert made.result["status"] == "pass" and made.lines == [] and not made.path.exists()


# --- graphs that lie


class IgnoresInput(Graphed):
    def captured(self, state):
        self.frozen = state.input.clone()

        def compute():
            state.loss.copy_((state.weight * self.frozen).square().sum())
            state.weight.mul_(DECAY)

        return compute


class FallsBack(Graphed):
    """Right losses, no replay."""

    def compute(self):
        self.state.compute()


def test_too_few_replays_fail(run):
    made = run(lambda state: Graphed(state, promised=2))
    assert (made.result["replays"], made.result["expected_replays"]) == (12, 24)
    assert made.result["status"] == "failed"
    assert made.result["message"] == "12 replays counted, its steps make 24"
    # With its numbers, and without the advice.
    assert "loss" in names_of(made.lines) and made.lines[-1] == f"failed: {made.result['message']}"
    assert run(FallsBack, parity=True).result["message"] == "0 replays counted, its steps make 20"


@pytest.mark.parametrize(
    ("make", "promise", "message"),
    [
        (Graphed, ("graph", 1, 1), ""),
        (Graphed, ("graph", None, None), ""),
        (Graphed, ("graph", 2, 1), "1 graphs made, 2 promised"),
        (Graphed, ("graph", 1, 2), "12 replays in 12 steps, 2 a step promised"),
        (Variant, ("eager", 0, 0), ""),
        (Variant, ("graph", None, None), "0 graphs and 0 replays in a variant that promised some"),
        (Variant, ("compile", None, None), "0 graphs and 0 replays in a variant that promised some"),
    ],
)
def test_graphs_and_replays_are_those_promised(run, make, promise, message):
    result = run(make, promise=promise).result
    assert (result["kind"], result["promised_graphs"], result["promised_replays"]) == promise
    assert result["status"] == ("failed" if message else "pass") and message in result["message"]


@pytest.mark.parametrize("make, step", [(IgnoresInput, 0), (StaleWeights, 1)])
def test_canary_catches_a_replay_of_the_wrong_data(run, make, step):
    made = run(make)
    assert made.result["status"] == "capture_failed" and f"canary: step {step} " in made.result["message"]
    assert made.result["ms"] is None and made.variant.closed == 1


def test_canary_holds_a_changed_model_against_the_unchanged_one(run):
    """A variant that rewrites the model rewrites eager too; `leave` keeps it from being compared with itself."""

    class RewritesForGood(Graphed):
        scale = 1.5

        def step(self, index):
            super().step(index)
            self.state.losses[index] *= self.scale

    class Rewrites(RewritesForGood):
        scale = 1.0

        def enter(self):
            self.scale = 1.5

        def leave(self):
            self.scale = 1.0

    made = []

    def making(kind):
        def make(state):
            made.append(kind(state))
            return made[-1]

        return make

    through_the_variant = lambda state, index: made[-1].step(index)  # noqa: E731
    assert run(making(Rewrites), reference=through_the_variant).result["status"] == "capture_failed"
    assert run(making(RewritesForGood), reference=through_the_variant).result["status"] == "pass"


def test_canary_is_left_out_with_a_line_where_eager_does_not_fit_beside_the_graphs(run, monkeypatch):
    note = "graphs were not compared with eager: no memory for its steps beside them"
    monkeypatch.setattr(memory, "free_bytes", lambda device: 0)
    result = run(StaleWeights, reference=lambda state, index: pytest.fail("eager steps")).result
    assert result["status"] == "pass" and result["said"] == [note]
    monkeypatch.setattr(memory, "free_bytes", lambda device: 2**40)
    assert run(StaleWeights).result["status"] == "capture_failed"


# --- parity


def test_parity_hashes_every_step_with_deterministic_kernels_and_times_nothing(run):
    seen = []

    def note(index):
        seen.append(torch.are_deterministic_algorithms_enabled())

    made = [run(lambda state: Variant(state, before=note), parity=True), run(Graphed, parity=True)]
    for each in made:
        result = each.result
        assert result["status"] == "pass" and result["steps"] == 20
        assert result["ms"] is None and result["step_ms"] == []
        assert each.variant.indices == list(range(20))
        assert len(set(result["state_hashes"])) == 20
        assert result["losses"] == pytest.approx(expected_losses(20), rel=1e-5)
        assert (result["num_tensors"], result["unmoved"]) == (2, ["moment"])
    assert made[0].result["state_hashes"] == made[1].result["state_hashes"]
    assert seen == [True] * 20 and not torch.are_deterministic_algorithms_enabled()
    (line,) = [line for line in made[0].lines if line.startswith("state ")]
    assert (
        made[0].result["state_hashes"][-1] in line and "2 tensors" in line and "1 never moved, such as moment" in line
    )
    assert made[0].lines[-1] != ADVICE


def test_parity_takes_the_steps_that_are_asked_for(run):
    assert run(parity=True, steps=27).result["steps"] == 27
    one = run(parity=True, steps=1).result
    assert one["steps"] == 1 and one["unmoved"] == []


def test_parity_sees_one_bit(run):
    def minus_zero(state):
        def before(index):
            if index == 13:
                state.moment[1] = -0.0

        return Variant(state, before=before)

    ours, theirs = (run(make, parity=True).result["state_hashes"] for make in (Variant, minus_zero))
    assert [a != b for a, b in zip(ours, theirs, strict=True)] == [index >= 13 for index in range(20)]


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


@pytest.mark.parametrize(
    "error, status, message",
    [
        (Unsupported("needs a GPU: make te"), "unsupported", "needs a GPU: make te"),
        (torch.OutOfMemoryError(OOM), "oom", "out of memory: asked for 20.00 GiB, 1.50 GiB free"),
        (CaptureError("aten::item at train.py:3"), "capture_failed", "aten::item at train.py:3"),
        (FloatingPointError("loss is nan at step 5"), "numerics_failed", "loss is nan at step 5"),
        (ValueError("--layers 0: takes more"), "failed", "--layers 0: takes more"),
        (KeyError("slot"), "failed", "KeyError: 'slot'"),
    ],
)
def test_errors_become_statuses(run, error, status, message):
    made = run(failing(error), parity=status == "unsupported")
    assert (made.result["status"], made.result["message"]) == (status, message)
    assert made.variant.closed == 1
    assert json.loads(made.path.read_text()) == made.result
    assert made.lines[-1] == f"{status}: {message}"
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_loss_that_is_not_finite(run, bad):
    class Diverges(State):
        def read_losses(self, count):
            return [bad if index == 4 else loss for index, loss in enumerate(super().read_losses(count))]

    made = run(state=Diverges)
    assert (made.result["status"], made.result["message"]) == ("numerics_failed", f"loss is {bad} at step 4")
    assert made.variant.closed == 1
    # JSON has no such number.
    assert json.loads(made.path.read_text(), parse_constant=pytest.fail)["losses"][4] is None


def test_variant_and_state_are_closed_once_the_variant_first_and_what_they_tell_is_written(run):
    order = []

    class Closes(State):
        def close(self):
            order.append("state")
            return {"num_skipped_steps": 3}

    class Notes(Graphed):
        def close(self):
            order.append("variant")
            super().close()

    result = run(Notes, state=Closes).result
    assert result["status"] == "pass" and result["closing"] == {"num_skipped_steps": 3}
    assert order == ["variant", "state"]


def test_close_that_fails_does_not_lose_the_result(run):
    class Clings(Variant):
        def close(self):
            raise RuntimeError("a graph is still in use")

    made = run(Clings)
    assert made.result["status"] == "failed" and "a graph is still in use" in made.result["message"]
    assert json.loads(made.path.read_text()) == made.result
    # What went wrong first is what is told.
    first = run(lambda state: Clings(state, before=lambda index: {}[index]))
    assert first.result["message"] == "KeyError: 0"


def test_a_fault_of_any_rank_is_named_on_all(run, monkeypatch):
    other = "0 replays counted, its steps make 12"
    monkeypatch.setattr(by_hand, "of_all_ranks", lambda own: [own, other] if isinstance(own, str) else [own])
    result = run(Graphed).result
    assert (result["status"], result["message"]) == ("failed", "rank 1: 0 replays counted, its steps make 12")
