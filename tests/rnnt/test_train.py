"""rnnt/train and state: every variant against its reference, overflows, pairs, what a run reports, several ranks."""

import json
import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from graph_worth.machine import memory
from rnnt.config import PRESETS, notes, training_flops
from rnnt.data import buckets
from rnnt.state import State, nominal_flops
from rnnt.train import load_batch
from tests.helpers import contracts, forked, gloo_ranks
from tests.helpers.by_hand import trained
from tests.helpers.scaled_steps import assert_equal, steps_of

CPU = torch.device("cpu")
TINY = replace(PRESETS["tiny"], frames=20, tokens=6, max_frames=24, max_tokens=8)
NUM_STEPS, OVERFLOWS = 10, (2, 3, 4, 7)


@pytest.fixture(autouse=True, scope="module")
def deterministic():
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    yield
    torch.use_deterministic_algorithms(False)


def run_steps(name, num_steps, config=TINY, overflow_at=()):
    """The whole state after each step, and the state object; features are infinite at `overflow_at`."""

    def infinite(batch):
        return batch._replace(features=torch.full_like(batch.features, float("inf")))

    state = State(config, CPU)
    return steps_of("rnnt", name, state, state.source, infinite, num_steps, overflow_at), state


def same(one, other):
    """True where both lists are of the same numbers, NaN and infinity included."""
    return torch.equal(torch.tensor(one).nan_to_num(), torch.tensor(other).nan_to_num())


# --- variants against each other


@pytest.fixture(scope="module")
def padded(deterministic):
    return run_steps("eager_padded", NUM_STEPS, overflow_at=OVERFLOWS)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["graph_networks", "graph_step"])
def test_graphs_equal_padded_eager_bit_for_bit_and_skip_the_same_steps(name, padded):
    ours, state = run_steps(name, NUM_STEPS, overflow_at=OVERFLOWS)
    assert_equal(ours, padded[0])
    assert same(state.read_losses(NUM_STEPS), padded[1].read_losses(NUM_STEPS))
    assert same(state.read_grad_norms(NUM_STEPS), padded[1].read_grad_norms(NUM_STEPS))
    # Several shapes came, or no bucket was chosen.
    assert len({shape for _, shape, _, _ in state.tally.steps}) >= 2


def test_an_overflow_changes_the_scale_alone(padded):
    states, state = padded
    for index in OVERFLOWS:
        changed = {name for name in states[index] if not torch.equal(states[index][name], states[index - 1][name])}
        assert changed <= {f"loss_scale.{name}" for name in ("scale", "growth", "tracker", "num_skipped")}
        # torch's GradScaler halves at once: the hysteresis is 1.
        assert states[index]["loss_scale.scale"] == states[index - 1]["loss_scale.scale"] / 2
    assert state.close()["num_skipped_steps"] == len(OVERFLOWS)


def test_a_storm_of_overflows_ends_the_run():
    config = replace(TINY, loss_scale=2.0, max_floor_overflows=4)
    with pytest.raises(FloatingPointError, match="4 steps in a row with the loss scale at 1, from step 1 on"):
        run_steps("eager_padded", 30, config, overflow_at=range(30))


@pytest.mark.slow
def test_without_dropout_padding_changes_little():
    """Padding changes the last frame of a longest utterance of odd length, and the rounding of sums."""
    config = replace(TINY, encoder_dropout=0.0, prediction_dropout=0.0, joint_dropout=0.0, lr=0.0)
    (_, eager), (_, padded) = (run_steps(name, 12, config) for name in ("eager", "eager_padded"))
    assert eager.read_losses(12) == pytest.approx(padded.read_losses(12), rel=0.03)
    assert eager.read_losses(12) != padded.read_losses(12)
    even = replace(config, data="synthetic", frames=20, tokens=5)
    (_, eager), (_, padded) = (run_steps(name, 3, even) for name in ("eager", "eager_padded"))
    # 20 frames are padded to 24; bf16 rounds products to 2^-9.
    assert eager.read_losses(3) == pytest.approx(padded.read_losses(3), rel=1e-3)


# --- buckets and pairs


def test_eager_warms_up_on_the_shapes_of_the_graphs():
    state = State(TINY, CPU)
    contracts.made("rnnt", "eager", state)
    padded = [padded for _, padded, _, _ in state.tally.steps]
    assert len(padded) == 3 and set(padded) <= set(state.plan.pairs)


def test_graph_networks_captures_each_bucket_of_each_network():
    state = State(TINY, CPU)
    variant = contracts.made("rnnt", "graph_networks", state)
    assert (state.plan.audio, state.plan.text) == ([12, 24], [4, 8])
    # Two forward and two backward graphs, one pool for each network.
    assert [len(pool.graphs) for pool in variant.capture.pools] == [4, 4]
    variant.close()


def test_graph_step_refuses_more_pairs_than_it_takes():
    state = State(replace(TINY, buckets="8"), CPU)
    number = len(state.plan.pairs)
    assert number > buckets.MAX_PAIRS
    with pytest.raises(ValueError, match=rf"--buckets 8: {number} pairs of buckets occur, graph_step takes at most 16"):
        contracts.made("rnnt", "graph_step", state)


def test_many_buckets_are_few_pairs_where_lengths_are_alike_and_others_are_refused():
    state = State(replace(TINY, buckets="20", data="synthetic", frames=19, tokens=5), CPU)
    assert len(state.plan.pairs) == 1
    variant = contracts.made("rnnt", "graph_step", state)
    variant.step(0)
    state.plan.fit = lambda *_: (24, 8)
    with pytest.raises(ValueError, match="--buckets 20: no graph is of 24 frames and 8 tokens: take auto"):
        variant.step(0)
    variant.close()


# --- the state


def test_batches_that_never_come_again_have_classes_of_their_own_at_first():
    config = replace(TINY, min_steps=5)
    speech = SimpleNamespace(config=config, source=SimpleNamespace(period=None))
    assert [State.batch_class(speech, index) for index in range(8)] == [0, 1, 2, 3, 4, 5, 5, 5]


def test_memory_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(memory, "free_bytes", lambda device: 1000)
    with pytest.raises(torch.OutOfMemoryError, match="--batch 2 needs .* bytes, 1,000 are free: lower --batch"):
        State(TINY, CPU)


def test_a_run_says_where_cudnn_s_persistent_kernels_cannot_run():
    assert notes(TINY, "cpu") == notes(PRESETS["bench"], "cuda") == []
    # Batch 192.
    assert "runs without" in notes(PRESETS["full"], "cuda")[0]


# --- a whole run


def run_by_hand(config):
    """Return the result of a run of graph_networks by hand."""
    model = contracts.model("rnnt", "--preset", "tiny", "--variant", "graph_networks")
    model.config = config
    result = trained(model)
    assert result["status"] == "pass", result["message"]
    return result


@pytest.mark.slow
def test_a_run_reports_padding_and_compute():
    result = run_by_hand(replace(TINY, min_steps=6))
    assert result["batch_classes"] == result["steps"] == 6
    # As a tally of the same steps alone.
    state = State(replace(TINY, min_steps=6), CPU)
    state.reset()
    for index in range(64):
        load_batch(state, index, state.plan.fit)
        if index == 5:
            assert state.tally.report() == result["said"]
    useful, executed = state.tally.flops_per_step()
    assert useful == pytest.approx(nominal_flops(TINY), rel=0.1) and executed > useful
    assert nominal_flops(replace(TINY, data="synthetic")) == 2 * training_flops(TINY, TINY.frames, TINY.tokens)


def test_a_run_on_speech_trains(tmp_path):
    pytest.importorskip("nvidia.dali", reason="nvidia-dali is not installed: ./setup.sh dali")
    from tests.helpers.speech_files import write_speech

    folder = write_speech(tmp_path, [(0.3 + 0.05 * number, "a bc de"[: 3 + number]) for number in range(5)])
    result = run_by_hand(replace(TINY, data=str(folder), min_steps=3))
    assert len(set(result["losses"])) == result["steps"] == 3


def test_a_folder_that_is_not_there_is_named_in_one_line():
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    answer = forked.run("rnnt.train", ["--data", "corpus"], environment, timeout_s=300)
    assert answer.returncode != 0
    said = answer.stdout + answer.stderr
    assert said.count("--data corpus: ") == 1 and "Traceback" not in said


@pytest.mark.slow
@pytest.mark.parametrize("name", ["eager_padded", "graph_networks", "graph_step"])
def test_two_ranks_train_alike(name, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    arguments = ["--preset", "tiny", "--variant", name, "--parity", "--record", str(tmp_path / name)]
    gloo_ranks.run_script("rnnt.train", arguments, world_size=2)
    result = json.loads((tmp_path / name).read_text())
    assert result["status"] == "pass", result["message"]
    assert result["env"]["world_size"] == 2 and len(result["losses"]) == len(set(result["state_hashes"])) == 20
