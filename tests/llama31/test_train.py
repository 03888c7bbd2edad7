"""llama31/train on the host graph: graphed steps and validations against eager ones, bit for bit; what they refuse."""

import re
from dataclasses import replace

import pytest
import torch

from graph_worth.made_variant import CaptureError, Unsupported
from llama31 import train
from llama31.config import PRESETS
from llama31.device import card
from tests.helpers import contracts, forked
from tests.helpers.followed import difference, follow
from tests.helpers.llama2_lora_case import write_checkpoint
from tests.helpers.llama31_case import CPU, LLAMA3, TINY, follow_eager, make

SMALL = {"hidden": 64, "head_dim": 16, "ffn": 128, "sequence": 32}
VALIDATING = ("graph_attn", "graph_mlp", "graph_layer", "graph_microbatch", "graph_fwd_bwd", "graph_step")
GRAPHS = (*VALIDATING, "graph_optimizer")


def made(name, state):
    return contracts.made("llama31", name, state)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"weights": "fp8", "moments": "bf16", "validate_every": 2},
        {"microbatches": 1, "layers": 1, "microbatch": 2, "precision": "nvfp4_emulated"},
        {"precision": "bf16", "main_grad": "fp32"},
    ],
    ids=lambda changes: ",".join(f"{name}={value}" for name, value in changes.items()) or "tiny",
)
def test_graphs_equal_eager_bit_for_bit(changes):
    state = make(**SMALL | changes)
    assert [state.validates(index) for index in range(4)] == [False, "validate_every" in changes] * 2
    eager, model = follow_eager(state, 3), contracts.model("llama31")
    model.config = state.config
    for name in GRAPHS:
        variant = made(name, state)
        before = variant.capture.num_replays
        assert difference(follow(state, variant.step, 3), eager, state) == "", name
        replays = variant.capture.num_replays - before
        assert replays == sum(variant.replays_of(index) for index in range(3))
        graphs, each = model.promises(name)
        assert sum(len(pool.graphs) for pool in variant.capture.pools) == graphs
        assert each is None or replays == 3 * each
        variant.close()


@pytest.mark.slow
def test_variants_take_turns_on_one_state():
    state = make(**SMALL, weights="fp8", moments="bf16", layers=1, microbatches=2)
    expected = follow_eager(state, 2)
    made_once = {name: made(name, state) for name in ("eager", *GRAPHS)}
    for _ in range(2):
        for name, variant in made_once.items():
            assert difference(follow(state, variant.step, 2), expected, state) == "", name
    for variant in made_once.values():
        variant.close()
    assert difference(follow_eager(state, 2), expected, state) == ""


def test_forward_and_backward_alone_move_the_weights_and_keep_nothing_of_adam():
    state = make(**SMALL, precision="bf16", layers=1, microbatches=2, optimizer="none")
    expected = follow_eager(state, 3)
    assert expected[0][0] != expected[0][2] and all(norm > 0 for norm in expected[1])
    assert not any("exp_avg" in name or "master" in name for name, _ in state.named_state())
    for name in ("graph_fwd_bwd", "graph_step"):
        variant = made(name, state)
        assert difference(follow(state, variant.step, 3), expected, state) == "", name
        variant.close()


def test_text_too_short_to_hold_out_says_so(tmp_path):
    (tmp_path / "text.txt").write_text("the quick brown fox " * 12)
    make(data=str(tmp_path))
    with pytest.raises(Unsupported, match="too short to hold a batch out"):
        make(data=str(tmp_path), validate_every=2)


def test_a_held_out_batch_is_no_training_batch():
    state = make(layers=1, validate_every=2)

    def rows(batch):
        return {tuple(row) for row in batch["tokens"].transpose(1, 2).flatten(0, 1).tolist()}

    assert not any(rows(state.held_out) & rows(batch) for batch in state.batches)


# --- changing numbers of microbatches


@pytest.mark.parametrize("name", ["graph_attn", "graph_layer", "graph_microbatch", "graph_optimizer"])
def test_a_ramp_replays_as_many_graphs_as_asked(name):
    state = make(**SMALL, microbatches=4, ramp="2,3,4", precision="bf16", layers=1)
    eager = follow_eager(state, 4)
    variant = made(name, state)
    num_graphs = len(variant.capture.pools[0].graphs)
    assert difference(follow(state, variant.step, 4), eager, state) == ""
    assert len(variant.capture.pools[0].graphs) == num_graphs
    per_microbatch = {"graph_microbatch": 1, "graph_optimizer": 0}.get(name, 2)
    replays = [n * per_microbatch or 1 for n in (2, 3, 4, 2)]
    assert [variant.replays_of(index) for index in range(4)] == replays
    assert [state.batch_class(index) for index in range(4)] == [4, 6, 8, 4]
    variant.close()


def test_a_ramp_of_fewer_microbatches_trains_on_those_alone():
    state = make(microbatches=4, ramp="2", precision="bf16", layers=1)
    state.inputs["tokens"][2:].fill_(1)
    train.eager_step(state, 0)
    assert state.microbatch_losses[2:].tolist() == [0, 0] and state.microbatch_losses[:2].min() > 0


@pytest.mark.parametrize("name", ["graph_fwd_bwd", "graph_step"])
def test_a_graph_of_the_whole_schedule_says_what_another_number_costs(name):
    state = make(precision="bf16", layers=1)
    variant = made(name, state)
    state.config = replace(state.config, ramp="2")
    with pytest.raises(ValueError) as caught:
        variant.step(0)
    told = r"a step of 2 microbatches, the graph holds 3: .* took [\d.]+ s and [\d.]+ GiB; take --microbatches 2, or"
    assert re.match(told, str(caught.value)) and "\n" not in str(caught.value)
    variant.close()


# --- NaN


def test_checked_eager_stops_at_nan_and_a_graph_goes_on():
    state = make(precision="bf16", layers=1)
    graphed = made("graph_fwd_bwd", state)
    with torch.no_grad():
        state.head.weight[0, 0] = float("nan")
    graphed.step(0)
    assert state.losses[0].isnan()
    graphed.close()
    state.config = replace(state.config, nan_checks=True)
    with pytest.raises(FloatingPointError, match="loss is nan"):
        train.eager_step(state, 1)


def test_a_nan_check_in_a_capture_is_what_the_table_says():
    state = make(precision="bf16", layers=1, nan_checks=True)
    with pytest.raises(CaptureError, match="reads a value on the host"):
        made("graph_fwd_bwd", state)


def test_clipping_on_the_host_is_close_to_clipping_on_the_device():
    host, device = (follow_eager(make(clip=clip, lr=1e-2, precision="bf16"), 4) for clip in ("host", "device"))
    assert max(host[1]) > 1.0
    assert host[0] == pytest.approx(device[0], rel=1e-2)


def test_compiled_variants_say_what_they_need():
    state = make(precision="bf16", layers=1)
    for name in ("compile", "graph_step_compiled", "reduce_overhead"):
        with pytest.raises(Unsupported):
            made(name, state)


# --- the script


@pytest.mark.parametrize(
    "arguments, told",
    [
        (["--variant", "graph_fwd_bwd", "--nan-checks", "true"], "--nan-checks false"),
        (["--variant", "graph_step", "--clip", "host"], "--clip device"),
        (["--variant", "graph_optimizer", "--clip", "host"], "--clip device"),
        (["--keep", "1 qkv"], "--keep 1 qkv: takes auto, all, least, or numbers of the last layers with items"),
        (["--layer", "te"], "--layer te needs a GPU"),
        (["--layers", "1000000000"], "--layers 1000000000 is too large"),
        (["--checkpoint", "/nowhere/llama", "--share-tp", "2"], "--share-tp 1"),
    ],
)
def test_flags(arguments, told):
    assert told in forked.refusal("llama31", *arguments)


def test_a_checkpoint_that_does_not_fit(tmp_path):
    folder = write_checkpoint(tmp_path / "wide", replace(TINY, ffn=512, layers=1), **LLAMA3)
    line = forked.refusal("llama31", "--checkpoint", str(folder))
    assert "does not fit ffn 128, layers 2: take --ffn 512 --layers 1" in line
    # Llama 2's positions are not stretched.
    folder = write_checkpoint(tmp_path / "llama2", TINY, rope_theta=500000.0)
    assert "has rope_type default, only llama3 is built" in forked.refusal("llama31", "--checkpoint", str(folder))


def test_cards_name_models_shares_and_both_counts():
    text = "\n".join(card(replace(PRESETS["bench"], layer="te"), CPU))
    assert "4 of 126 layers of Llama 3.1 405B, a GPU's share at TP8 CP2" in text and "MLPerf's count" in text
    text = "\n".join(card(replace(PRESETS["full"], layer="te", keep="5 mlp rest"), torch.device("cuda")))
    assert "8,030.3 M parameters: Llama 3.1 8B" in text and "weights fp8, main_grad bf16, moments bf16" in text
    assert "8 of 80 layers of Llama 3.1 70B" in "\n".join(card(PRESETS["slice_70b"], CPU))
    assert re.search(r"\nmlp, rest +5 +27 ", text) and "\npredicted " in text
