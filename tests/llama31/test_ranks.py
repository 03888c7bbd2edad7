"""llama31 on several gloo ranks: against one process, and graphed against eager, bit for bit."""

import os

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from graph_worth.parallel import collectives
from llama31 import train
from tests.helpers import contracts, gloo_ranks
from tests.helpers.followed import difference, follow
from tests.helpers.llama31_case import follow_eager, make

# FP32 throughout: what is left is the order of sums.
EXACT = {"precision": "bf16", "main_grad": "fp32", "microbatches": 4}
FP8 = ({"microbatches": 2}, {"microbatches": 2, "weights": "fp8"})
STEPS = 3
SPLITS = {
    "tp2": {"tp": 2},
    "cp2": {"cp": 2},
    "pp2": {"pp": 2},
    "tp2_pp2": {"tp": 2, "pp": 2},
    "tp2_cp2": {"tp": 2, "cp": 2},
}
# Splits of two ranks and variants that are compared with eager in one pair of processes.
GRAPHED = {
    "dp2": ("graph_step", "graph_layer", "graph_microbatch", "graph_fwd_bwd", "graph_optimizer"),
    "tp2": ("graph_fwd_bwd", "graph_step", "graph_mlp"),
    "cp2": ("graph_fwd_bwd", "graph_attn"),
    "pp2": (
        *("graph_layer", "graph_microbatch", "graph_attn", "graph_fwd_bwd"),
        *("graph_step", "graph_mlp", "graph_optimizer"),
    ),
}


def own_rank():
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def trained():
    """Losses and norms in FP32 of the split in $SPLIT."""
    state = make(*own_rank(), torch.float32, **EXACT | SPLITS[os.environ["SPLIT"]])
    # What Transformer Engine's layers communicate over.
    group = collectives.process_group(state.groups.tensor)
    assert (1 if group is None else group.size()) == state.config.tp
    return follow_eager(state, STEPS)[:2]


@pytest.mark.parametrize(
    ("split", "num_ranks"),
    [
        *((split, 2) for split in ("tp2", "cp2", "pp2")),
        *(pytest.param(split, 4, marks=pytest.mark.slow) for split in ("tp2_pp2", "tp2_cp2")),
    ],
)
def test_ranks_of_one_replica_train_as_one_process_does(split, num_ranks, monkeypatch):
    torch.use_deterministic_algorithms(False)
    alone = follow_eager(make(dtype=torch.float32, **EXACT), STEPS)
    monkeypatch.setenv("SPLIT", split)
    for losses, norms in gloo_ranks.run(__name__, "trained", num_ranks):
        assert losses == pytest.approx(alone[0], rel=1e-5)
        assert norms == pytest.approx(alone[1], rel=1e-4)


def fp8_tp2():
    """FP8 emulated around FP32 GEMMs, and weights that are stored in FP8."""
    return [follow_eager(make(*own_rank(), torch.float32, tp=2, **changes), STEPS)[:2] for changes in FP8]


@pytest.mark.slow
def test_two_tensor_ranks_round_to_fp8_as_one_process_does():
    torch.use_deterministic_algorithms(False)
    alone = [follow_eager(make(dtype=torch.float32, **changes), STEPS)[:2] for changes in FP8]
    for ranks in gloo_ranks.run(__name__, "fp8_tp2", 2):
        for (losses, norms), (alone_losses, alone_norms) in zip(ranks, alone, strict=True):
            assert losses == pytest.approx(alone_losses, rel=2e-3)
            assert norms == pytest.approx(alone_norms, rel=2e-2)


def differences_from_eager():
    """By split and variant, on this rank."""
    found = {}
    for split, names in GRAPHED.items():
        changes = {"microbatches": 2, "validate_every": 2, "weights": "fp8", "moments": "bf16"} | SPLITS.get(split, {})
        state = make(*own_rank(), **changes)
        eager = follow_eager(state, STEPS)
        assert len(set(eager[0])) == STEPS and min(eager[0]) > 0
        for name in names:
            variant = contracts.made("llama31", name, state)
            before = variant.capture.num_replays
            found[f"{split} {name}"] = difference(follow(state, variant.step, STEPS), eager, state)
            assert variant.capture.num_replays - before == sum(map(variant.replays_of, range(STEPS)))
            variant.close()
    return found


@pytest.mark.slow
def test_two_ranks_graphed_equal_two_ranks_eager_bit_for_bit():
    for found in gloo_ranks.run(__name__, "differences_from_eager", 2):
        assert len(found) == sum(map(len, GRAPHED.values())) and not any(found.values()), found


def pipeline_ramp():
    """Steps of other numbers of microbatches replay a part of the captured order; layers run again in the backward."""
    changes = {"pp": 2, "layers": 4, "microbatches": 4, "ramp": "3,1,4,2"}
    state = make(*own_rank(), keep="1 all", **changes)
    assert len(set(state.plan.layers)) == 2
    found, eager = {}, follow_eager(state, 8)
    for name in ("graph_layer", "graph_microbatch", "graph_mlp"):
        variant = contracts.made("llama31", name, state)
        found[name] = difference(follow(state, variant.step, 8), eager, state)
        variant.close()
    return found


@pytest.mark.slow
def test_a_ramp_in_a_pipeline_replays_as_many_graphs_as_asked():
    for found in gloo_ranks.run(__name__, "pipeline_ramp", 2):
        assert len(found) == 3 and not any(found.values()), found


@pytest.mark.slow
def test_two_ranks_train_by_the_command_line():
    words = ["--preset", "tiny", "--variant", "graph_fwd_bwd", "--steps", "2", "--tp", "2"]
    first, second = gloo_ranks.run_script("llama31.train", words, 2)
    assert "heads 2 (1 groups)" in first and "2 replays" in first and not second, first + second


class Operators(TorchDispatchMode):
    """Names of the operators that run in it."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, operator, types, arguments=(), named=None):
        self.names.add(operator.name())
        return operator(*arguments, **(named or {}))


def operators_of_a_step():
    state = make(*own_rank(), tp=2, precision="bf16")
    with Operators() as seen:
        train.eager_step(state, 0)
    return sorted(seen.names)


@pytest.mark.slow
def test_no_operator_waits_for_the_gpu_where_algorithms_are_deterministic():
    """On CUDA these become index_put_ then, which reads the largest index on the host in some releases of torch."""
    for names in gloo_ranks.run(__name__, "operators_of_a_step", 2):
        assert "aten::nll_loss_backward" in names
        assert not [name for name in names if name.startswith(("aten::scatter", "aten::index_put", "aten::gather"))]
