"""stable_diffusion/lightning_variant: the whole step in a graph under Lightning's own loop equals eager."""

import contextlib
import logging
import signal
import sys
from dataclasses import replace

import pytest
import torch

pytest.importorskip("lightning", reason="an extra: ./setup.sh lightning")

from graph_worth.capture.pool import CaptureError
from graph_worth.contract import Training
from graph_worth.made_variant import Unsupported
from graph_worth.measuring.course import course
from graph_worth.script.step_checks import compare_with_eager
from graph_worth.your_step.step_graph import StepGraph
from stable_diffusion.config import PRESETS
from stable_diffusion.data import synthetic
from stable_diffusion.state import State
from stable_diffusion.train import eager_step
from tests.helpers import contracts

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

# Lightning's hints at what else one could use, and at its own future.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning", "ignore::FutureWarning:lightning")


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    pytest.importorskip("greenlet", reason="an extra: ./setup.sh lightning")
    folder = tmp_path_factory.mktemp("shards")
    synthetic.write(folder, 1, 16, 0, 8, 8, 64)
    return replace(PRESETS["tiny"], batch=2, latent_size=8, workers=0, data=str(folder))


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    yield
    torch.use_deterministic_algorithms(False)


def made(state):
    return contracts.made("stable_diffusion", "graph_step_lightning", state)


def compare(state, variant):
    training = Training(state=state, results=state.report.read_losses, reset=state.reset)
    return compare_with_eager(training, variant, lambda index: eager_step(state, index), torch.device("cpu"))


def steps_of(state, step, count):
    """Losses, gradient norms and a hash of the whole state after `count` steps from the seeded start."""
    training = Training(state=state, results=state.report.read_losses, reset=state.reset, named_state=state.named_state)
    made = course(training, step, count, hashed=(count - 1,))
    return made.losses, state.report.read_grad_norms(count), made.digests()


def with_overflows(state, steps):
    """Moments of infinity in the batches of these steps, counted from each reset."""
    original, reset, count = state.batches.next, state.batches.reset, [0]

    def next_batch():
        batch = dict(original())
        if count[0] in steps:
            batch["moments"] = torch.full_like(batch["moments"], float("inf"))
        count[0] += 1
        return batch

    def start_again():
        count[0] = 0
        reset()

    state.batches.next, state.batches.reset = next_batch, start_again


@pytest.mark.slow
def test_variant_equals_eager_bit_for_bit_with_draws_and_overflows(config, deterministic, monkeypatch):
    eager = State(config, torch.device("cpu"))
    with_overflows(eager, (2, 3))
    expected = steps_of(eager, lambda index: eager_step(eager, index), 5)
    eager.close()
    handler = signal.getsignal(signal.SIGTERM)
    state = State(config, torch.device("cpu"))
    variant = made(state)
    assert signal.getsignal(signal.SIGTERM) is handler
    # After a canary: it leaves no trace in the steps that follow.
    assert compare(state, variant) == []
    with_overflows(state, (2, 3))
    before = variant.capture.num_replays
    # As text: a loss that is not a number is then equal to itself.
    assert repr(steps_of(state, variant.step, 5)) == repr(expected)
    assert variant.capture.num_replays - before == sum(map(variant.replays_of, range(5))) == 5
    assert variant.capture.warmup_s > 0 and variant.capture.capture_s > 0 and variant.capture.pools
    # Three steps of warm-up, the capture's, two of the canary, five: it is Lightning's loop that steps.
    assert variant.trainer.global_step == 3 + 1 + 2 + 5
    # As if the batch were not copied into the static inputs.
    replay = StepGraph.replay
    monkeypatch.setattr(StepGraph, "replay", lambda graph, batch: replay(graph, graph.static))
    with pytest.raises(CaptureError, match="canary: step 0 replayed"):
        compare(state, variant)
    for _ in range(2):
        variant.close()
        assert variant.loop.dead and variant.callback.pool is None and variant.callback.num_replays == 10
    state.close()


@pytest.mark.slow
def test_variant_passes_an_error_of_a_step_on_and_closes_after_it(config):
    state = State(config, torch.device("cpu"))
    variant = made(state)

    def storm(index):
        raise FloatingPointError("overflow storm")

    state.end_step = storm
    state.inputs.reset()
    with pytest.raises(FloatingPointError, match="overflow storm"):
        variant.step(0)
    with pytest.raises(RuntimeError, match="Trainer.fit has ended"):
        variant.step(1)
    variant.close()
    state.close()


def test_variant_is_unsupported_without_lightning_and_over_several_ranks(config, monkeypatch):
    state = State(config, torch.device("cpu"))
    for missing in ("lightning.pytorch", "greenlet"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, missing, None)
            patch.delitem(sys.modules, "stable_diffusion.lightning_variant", raising=False)
            with pytest.raises(Unsupported, match=r"graph_step_lightning needs lightning .*: ./setup.sh lightning"):
                made(state)
    state.buckets = object()
    with contextlib.closing(state), pytest.raises(Unsupported, match="one GPU"):
        made(state)
