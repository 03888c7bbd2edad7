"""GPT-3 over gloo ranks: trained as one process with all shares trains; graphed as eager, bit for bit."""

from dataclasses import replace

import pytest
import torch

from gpt3 import state as gpt3_state
from gpt3.model import PlainLayer, initialise, split_dimension
from gpt3.state import State
from tests.helpers import gloo_ranks
from tests.helpers.followed import follow
from tests.helpers.gpt3_case import CPU, SMALL, SPLITS, STEADY_ADAM, STEPS, eager_step_of, gathered, whole

IN_MAKE_TEST = ("tp2",)
# The others are parts of these.
GRAPHED = ("tp2_dp2_zero", "pp4", "pp2_dp2_zero", "tp2_pp2x2_dp2_zero")
EACH = [name if name in IN_MAKE_TEST else pytest.param(name, marks=pytest.mark.slow) for name in SPLITS]


def on_ranks(function, split, monkeypatch, **environment):
    for name, value in {"SPLIT": split, **environment}.items():
        monkeypatch.setenv(name, str(value))
    return gloo_ranks.run("tests.helpers.gpt3_case", function, SPLITS[split][0])


def data_ranks(split):
    num_ranks, changes = SPLITS[split]
    return replace(SMALL, **changes).ranks(num_ranks).dp


@pytest.mark.slow
@pytest.mark.parametrize("split", EACH)
def test_ranks_train_as_one_process_does(split, monkeypatch, tmp_path):
    """FP32: within 1e-5. Bitwise, of a pipeline, is the first loss: sums over ranks have another order elsewhere."""
    results = on_ranks("trained_on_ranks", split, monkeypatch, FOLDER=tmp_path)
    assert all(result == results[0] for result in results), "a rank has other losses or norms"
    monkeypatch.setattr(gpt3_state, "ADAM", STEADY_ADAM)
    changes = SPLITS[split][1]
    reference = whole(replace(SMALL, precision="fp32", **changes), data_ranks(split))
    losses, norms, _ = follow(reference, eager_step_of(reference), STEPS)
    assert results[0][0] == pytest.approx(losses, rel=1e-5)
    assert results[0][1] == pytest.approx(norms, rel=1e-5)
    if changes.keys() <= {"pp", "chunks"} and data_ranks(split) == 1:
        assert results[0][0][0] == losses[0]
    weights = gathered(tmp_path)
    expected = {name: parameter.detach() for name, parameter in reference.named_parameters()}
    assert weights.keys() == expected.keys()
    for name, weight in expected.items():
        assert float((weights[name] - weight).norm()) <= 1e-5 * float(weight.norm()), name


@pytest.mark.parametrize(
    "split, precision",
    [
        *((split, "fp8") for split in IN_MAKE_TEST),
        *(pytest.param(split, "fp8", marks=pytest.mark.slow) for split in GRAPHED),
        pytest.param("tp2", "bf16", marks=pytest.mark.slow),
    ],
)
def test_graphed_ranks_equal_eager_ones_bit_for_bit(split, precision, monkeypatch):
    results = on_ranks("graphed_on_ranks", split, monkeypatch, PRECISION=precision)
    for result in results:
        assert result["differ"] == ""
        assert result["replays"][0] == result["replays"][1] > 0
        assert result["losses"] == results[0]["losses"]
    if precision != "bf16":
        # All stages as chunks of one process, whose scales are updated as theirs are.
        changes = SPLITS[split][1]
        reference = whole(replace(SMALL, precision=precision, **changes), data_ranks(split))
        num_chunks = changes.get("pp", 1) * changes.get("chunks", 1)
        staged = State(replace(reference.config, chunks=num_chunks), CPU)
        staged.batches = reference.batches
        assert results[0]["losses"] == pytest.approx(follow(staged, eager_step_of(staged), STEPS)[0], rel=2e-3)


# --- initial values


def test_shards_are_parts_of_the_whole():
    tp = 4
    one = State(replace(SMALL, heads=2 * tp, ffn=48 * tp, vocab=40 * tp), CPU)
    expected = dict(one.named_parameters())
    config = replace(SMALL, tp=tp)
    for rank in range(tp):
        for number in range(SMALL.layers):
            own = [(f"layers.{number}.{name}", p) for name, p in PlainLayer(config, one.dtype, CPU).named_parameters()]
            initialise(own, gpt3_state.SEED, rank, tp)
            for name, parameter in own:
                dimension = split_dimension(name)
                part = expected[name] if dimension is None else expected[name].chunk(tp, dimension)[rank]
                assert torch.equal(parameter, part), name


@pytest.mark.parametrize(
    "name, dimension",
    [
        ("layers.3.qkv.bias", 0),
        ("layers.3.proj.weight", 1),
        ("layers.3.proj.bias", None),
        ("layers.3.norm_1.weight", None),
        ("embedding.tokens", 0),
        ("embedding.positions", 0),
        ("embedding.final_norm.bias", None),
        ("layers.3.self_attention.layernorm_qkv.weight", 0),
        ("layers.3.self_attention.layernorm_qkv.layer_norm_weight", None),
        ("layers.3.self_attention.proj.weight", 1),
        ("layers.3.layernorm_mlp.layer_norm_bias", None),
        ("layers.3.layernorm_mlp.fc1_weight", 0),
        ("layers.3.layernorm_mlp.fc2_weight", 1),
        ("layers.3.layernorm_mlp.fc2_bias", None),
    ],
)
def test_what_is_split_over_tensor_ranks(name, dimension):
    """Names of both kinds of layer."""
    assert split_dimension(name) == dimension
