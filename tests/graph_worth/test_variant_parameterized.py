"""variant_parameterized.py over the models' own layers, on the host graph: eager's bits, and what is refused."""

import importlib
from dataclasses import replace

import pytest
import torch

from graph_worth.capture.graph_error import CaptureError
from graph_worth.made_variant import Capture, Unsupported, leave
from graph_worth.variant_parameterized import Parameterized
from tests.helpers import contracts, gpt3_case, llama2_lora_case, llama31_case
from tests.helpers.followed import difference, follow

CPU = torch.device("cpu")
NUM_STEPS = 3


@pytest.fixture(autouse=True)
def fresh():
    yield
    torch._dynamo.reset()


def gpt3_state(**changes):
    from gpt3.state import State

    return State(replace(gpt3_case.SMALL, layers=2, microbatches=2, **{"precision": "bf16", **changes}), CPU)


def llama31_state(**changes):
    small = {"hidden": 64, "head_dim": 16, "ffn": 128, "sequence": 32, "microbatches": 2}
    return llama31_case.make(**{**small, "precision": "bf16", **changes})


def llama2_lora_state(precision="bf16"):
    from llama2_lora.state import State

    kind = "torch" if precision == "bf16" else "handwritten"
    config = replace(llama2_lora_case.TINY, layers=2, dropout=0.1, layer=kind, precision=precision)
    return State(config, CPU, kind)


# Model: (makes a state, graphs, launches a step). Llama 3.1 launches its head, too. Layers with the same shapes share
# their graphs; below Llama 2's first layer nothing needs a gradient, so its graphs are its own.
MODELS = {
    "gpt3": (gpt3_state, {"forward", "backward"}, 8),
    "llama31": (llama31_state, {"forward", "backward"}, 12),
    "llama2_lora": (llama2_lora_state, {"forward", "backward"}, 4),
}


def parameterized(model, state):
    return contracts.made(model, "graph_parameterized", state)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_a_models_layers_give_eagers_bits_and_take_turns_with_it(model):
    make, directions, launches = MODELS[model]
    state, eager_step = make(), importlib.import_module(f"{model}.train").eager_step
    eager = follow(state, lambda index: eager_step(state, index), NUM_STEPS)
    variant = parameterized(model, state)
    try:
        before = variant.capture.num_replays
        assert difference(follow(state, variant.step, NUM_STEPS), eager, state) == ""
        assert variant.capture.num_replays - before == NUM_STEPS * launches == NUM_STEPS * variant.replays_of(0)
        assert {region.name.split()[0] for region in variant.regions.graphs} == directions
        report = variant.capture.report
        assert 0.3 < report["coverage"] < 1
        # On the CPU no node is patched.
        assert (report["patched_per_launch"], report["patch_us_per_node"]) == (0, None)
        assert len(report["regions"]) == len(variant.regions.graphs)
        leave(variant)
        assert difference(follow(state, lambda index: eager_step(state, index), NUM_STEPS), eager, state) == ""
        assert variant.capture.num_replays - before == NUM_STEPS * launches
    finally:
        leave(variant)
        variant.close()


def test_a_variant_that_is_made_again_captures_again():
    state = gpt3_state()
    for _ in range(2):
        variant = parameterized("gpt3", state)
        before = variant.capture.num_replays
        variant.step(0)
        assert variant.capture.num_replays - before == 8
        leave(variant)
        variant.close()
        assert not variant.regions.graphs


@pytest.mark.parametrize("model", MODELS)
def test_layers_that_leave_the_compiler_are_unsupported(model):
    with pytest.raises(Unsupported, match="--layer torch --precision bf16"):
        parameterized(model, MODELS[model][0](precision="fp8"))


class Reads:
    """A model that no graph can hold."""

    config = None

    def forward(self, x):
        return x * x.nonzero().shape[0]


def test_a_function_that_no_graph_can_hold_is_a_failed_capture_with_the_reason():
    model = Reads()
    with pytest.raises(CaptureError, match="shape that depends"):
        Parameterized(
            model,
            lambda model, index: model.forward(torch.ones(4)),
            [(model, "forward")],
            "the model",
            capture=Capture(strategy=""),
        )
    assert model.forward.__func__ is Reads.forward


@pytest.mark.slow
def test_a_ramp_promises_the_launches_of_each_steps_microbatches():
    state = llama31_state(microbatches=3, ramp="1,3")
    variant = parameterized("llama31", state)
    try:
        for index in (0, 1, 2, 5):
            before = variant.capture.num_replays
            variant.step(index)
            assert variant.capture.num_replays - before == variant.replays_of(index)
        assert variant.replays_of(1) == 3 * variant.replays_of(0) == 3 * variant.replays_of(2)
    finally:
        leave(variant)
        variant.close()
