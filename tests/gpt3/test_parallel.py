"""GPT-3 over gloo ranks: trained as one process with all shares trains; graphed as eager, bit for bit."""

from dataclasses import replace

import pytest
import torch

from common.training.parallel import collectives
from common.training.parallel.groups import Ranks
from gpt3 import state as gpt3_state
from gpt3.config import PRESETS
from gpt3.model import PlainLayer, initialise, split_dimension
from gpt3.state import State
from tests.helpers import gloo_ranks
from tests.helpers.gpt3_case import CPU, SMALL, SPLITS, STEADY_ADAM, STEPS, eager_step_of, follow, gathered, whole

IN_MAKE_TEST = ("tp2", "pp2x2", "dp2_zero")
EACH = [name if name in IN_MAKE_TEST else pytest.param(name, marks=pytest.mark.slow) for name in SPLITS]


def on_ranks(function, split, monkeypatch, **environment):
    for name, value in {"SPLIT": split, **environment}.items():
        monkeypatch.setenv(name, str(value))
    return gloo_ranks.run("tests.helpers.gpt3_case", function, SPLITS[split][0], timeout_s=120)


def data_ranks(split):
    num_ranks, changes = SPLITS[split]
    return replace(SMALL, **changes).ranks(num_ranks).dp


@pytest.mark.parametrize("split", EACH)
def test_ranks_train_as_one_process_does(split, monkeypatch, tmp_path):
    """FP32: within 1e-5. Bitwise, of a pipeline, is the first loss: sums over ranks have another order elsewhere."""
    results = on_ranks("trained_on_ranks", split, monkeypatch, FOLDER=tmp_path)
    assert all(result == results[0] for result in results), "a rank has other losses or norms"
    monkeypatch.setattr(gpt3_state, "ADAM", STEADY_ADAM)
    changes = SPLITS[split][1]
    reference = whole(replace(SMALL, precision="fp32", **changes), data_ranks(split))
    losses, norms, _ = follow(reference, eager_step_of(reference))
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
    "precision", ["fp8", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fp8_current", "bf16"))]
)
@pytest.mark.parametrize("split", EACH)
def test_graphed_ranks_equal_eager_ones_bit_for_bit(split, precision, monkeypatch):
    results = on_ranks("graphed_on_ranks", split, monkeypatch, PRECISION=precision)
    for result in results:
        assert result["differ"] == [] and result["same"]
        assert result["replays"][0] == result["replays"][1] > 0
        assert result["losses"] == results[0]["losses"]
    if precision != "bf16":
        # All stages as chunks of one process, whose scales are updated as theirs are.
        changes = SPLITS[split][1]
        reference = whole(replace(SMALL, precision=precision, **changes), data_ranks(split))
        num_chunks = changes.get("pp", 1) * changes.get("chunks", 1)
        staged = State(replace(reference.config, chunks=num_chunks), CPU)
        staged.batches = reference.batches
        assert results[0]["losses"] == pytest.approx(follow(staged, eager_step_of(staged))[0], rel=2e-3)


# --- initial values


@pytest.mark.parametrize("tp", [2, 4])
def test_shards_are_parts_of_the_whole(tp):
    """Check shards of a layer and of the embedding, with the names of the whole model."""
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
        ("layers.3.qkv.weight", 0),
        ("layers.3.qkv.bias", 0),
        ("layers.3.fc1.bias", 0),
        ("layers.3.proj.weight", 1),
        ("layers.3.proj.bias", None),
        ("layers.3.fc2.bias", None),
        ("layers.3.norm_1.weight", None),
        ("embedding.tokens", 0),
        ("embedding.positions", 0),
        ("embedding.final_norm.bias", None),
        ("layers.3.self_attention.layernorm_qkv.weight", 0),
        ("layers.3.self_attention.layernorm_qkv.bias", 0),
        ("layers.3.self_attention.layernorm_qkv.layer_norm_weight", None),
        ("layers.3.self_attention.proj.weight", 1),
        ("layers.3.self_attention.proj.bias", None),
        ("layers.3.layernorm_mlp.layer_norm_bias", None),
        ("layers.3.layernorm_mlp.fc1_weight", 0),
        ("layers.3.layernorm_mlp.fc1_bias", 0),
        ("layers.3.layernorm_mlp.fc2_weight", 1),
        ("layers.3.layernorm_mlp.fc2_bias", None),
    ],
)
def test_what_is_split_over_tensor_ranks(name, dimension):
    """Names of both kinds of layer."""
    assert split_dimension(name) == dimension


# --- arguments


@pytest.mark.parametrize(
    "preset, changes, world_size, told",
    [
        ("tiny", {"tp": 2}, 3, "--tp 2 --pp 1 --cp 1 need a multiple of 2 ranks, this run has 3"),
        ("tiny_pp", {}, 1, "need a multiple of 2 ranks, this run has 1"),
        ("mlperf", {}, 8, "--tp 4 --pp 6 --cp 1 need a multiple of 24 ranks, this run has 8"),
        ("rank", {}, 2, "--pp-rank 0 runs one stage by itself, this run has 2 ranks"),
    ],
)
def test_world_sizes_that_are_refused(preset, changes, world_size, told):
    with pytest.raises(ValueError, match=told):
        replace(PRESETS[preset], **changes).ranks(world_size)


def test_world_sizes_that_are_taken():
    sizes = {name: config.world_sizes() for name, config in PRESETS.items()}
    assert sizes["tiny"] == sizes["bench"] == sizes["full"] == {"multiple_of": 1}
    assert (sizes["tiny_pp"], sizes["mlperf"], sizes["rank"]) == (
        {"multiple_of": 2},
        {"multiple_of": 24},
        {"at_most": 1},
    )
    assert PRESETS["mlperf"].ranks(11_616) == Ranks(dp=484, tp=4, pp=6)
    assert PRESETS["rank"].ranks(1) == Ranks(1)


@pytest.mark.parametrize(
    "changes, told",
    [
        ({"pp": 3}, "--layers 4 is not divisible by --pp x --chunks 3"),
        ({"pp": 2, "chunks": 4}, "--layers 4 is not divisible by --pp x --chunks 8"),
        ({"pp": 2, "chunks": 2, "microbatches": 3}, "--microbatches 3 is no multiple of --pp 2"),
        ({"tp": 3}, "--sequence 16 is not divisible by --tp 3"),
        ({"cp": 2}, "--cp 2: takes 1"),
        ({"tp": 0}, "--tp 0: takes a number from 1 up"),
        ({"chunks": 0}, "--chunks 0: takes a number from 1 up"),
        ({"pp": 2, "pp_rank": 2}, "--pp-rank 2: takes a stage from 0 to 1 with --pp 2"),
        ({"pp_rank": -2}, "--pp-rank -2: takes a stage from 0 up, or -1"),
        ({"pp": 2, "pp_rank": 0, "tp": 2}, "--pp-rank 0 needs --tp 1"),
        ({"graph_scope": "attn", "graph_unit": "chunk"}, "--graph-scope attn needs --graph-unit layer"),
        ({"precision": "fp32", "layer": "te"}, "--precision fp32 needs --layer torch"),
    ],
)
def test_mistakes_name_the_flag(changes, told):
    with pytest.raises(ValueError, match=told):
        replace(SMALL, **changes)


def test_a_process_alone_has_no_groups():
    state = State(SMALL, CPU)
    assert set(vars(state.groups).values()) == {collectives.ALONE}
    assert follow(state, eager_step_of(state), STEPS)[0][0] == pytest.approx(3.7, rel=0.05)
