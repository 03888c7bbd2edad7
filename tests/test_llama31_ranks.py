"""llama31 on several gloo ranks: against one process, and graphed against eager, bit for bit."""

import os

import pytest
import torch

from common import collectives
from llama31 import train
from tests import gloo_ranks
from tests.llama31_case import difference, follow, follow_eager, make

# FP32 throughout: what is left is the order of sums.
EXACT = {"precision": "bf16", "main_grad": "fp32", "microbatches": 4}
STEPS = 4
SPLITS = {
    "tp2": {"tp": 2},
    "cp2": {"cp": 2},
    "cp2_causal": {"cp": 2, "cp_order": "causal"},
    "pp2": {"pp": 2},
    "dp2_zero": {"zero": True},
    "tp2_pp2": {"tp": 2, "pp": 2},
    "tp2_cp2": {"tp": 2, "cp": 2},
}


def own_rank():
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def fp32_losses(split):
    state = make(*own_rank(), torch.float32, **EXACT, **SPLITS[split])
    # What Transformer Engine's layers communicate over.
    group = collectives.process_group(state.groups.tensor)
    assert (1 if group is None else group.size()) == state.config.tp
    losses, norms, _ = follow_eager(state, STEPS)
    return losses, norms


def tp2():
    return fp32_losses("tp2")


def cp2():
    return fp32_losses("cp2")


def cp2_causal():
    return fp32_losses("cp2_causal")


def pp2():
    return fp32_losses("pp2")


def tp2_pp2():
    return fp32_losses("tp2_pp2")


def tp2_cp2():
    return fp32_losses("tp2_cp2")


@pytest.fixture(scope="module")
def alone():
    torch.use_deterministic_algorithms(False)
    losses, norms, _ = follow_eager(make(dtype=torch.float32, **EXACT), STEPS)
    return losses, norms


@pytest.mark.parametrize("split", ["tp2", "cp2", "cp2_causal", "pp2"])
def test_two_ranks_of_one_replica_train_as_one_process_does(alone, split):
    for losses, norms in gloo_ranks.run(__name__, split, 2):
        assert losses == pytest.approx(alone[0], rel=1e-5)
        assert norms == pytest.approx(alone[1], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("split", ["tp2_pp2", "tp2_cp2"])
def test_four_ranks_of_one_replica_train_as_one_process_does(alone, split):
    for losses, norms in gloo_ranks.run(__name__, split, 4):
        assert losses == pytest.approx(alone[0], rel=1e-5)
        assert norms == pytest.approx(alone[1], rel=1e-4)


def differences(variants):
    """What differs from eager, of the variants of each split, on this rank."""
    found = {}
    for split, names in variants.items():
        changes = SPLITS.get(split, {})
        formats = {"main_grad": "fp32"} if split == "dp2_zero" else {"weights": "fp8", "moments": "bf16"}
        state = make(*own_rank(), microbatches=2, validate_every=2, **formats, **changes)
        eager = follow_eager(state, STEPS)
        assert len(set(eager[0])) == STEPS and min(eager[0]) > 0
        for name in names:
            variant = train.MAKE_VARIANT[name](state)
            before = variant.capture.num_replays
            found[f"{split} {name}"] = difference(follow(state, variant.step, STEPS), eager, state)
            assert variant.capture.num_replays - before == sum(map(variant.replays_of, range(STEPS)))
            variant.close()
    return found


def graphed():
    return differences({"dp2": ("graph", "full_step"), "tp2": ("graph",), "pp2": ("graph",)})


def graphed_otherwise():
    splits = {"dp2": ("layer", "chunk"), "tp2": ("full_step",), "cp2": ("graph",), "pp2": ("full_step",)}
    return differences({**splits, "dp2_zero": ("graph", "full_step")})


@pytest.mark.parametrize("function", ["graphed", pytest.param("graphed_otherwise", marks=pytest.mark.slow)])
def test_two_ranks_graphed_equal_two_ranks_eager_bit_for_bit(function):
    for found in gloo_ranks.run(__name__, function, 2, timeout_s=300):
        assert len(found) > 3 and not any(found.values()), found
