"""moe: variants against eager bit for bit, routing and packed sequences."""

import functools
import gc
import weakref

import pytest
import torch

from graph_worth.made_variant import leave
from graph_worth.measuring import torch_settings
from moe import train
from tests.helpers.contracts import made
from tests.helpers.followed import difference, follow
from tests.helpers.moe_case import logits, make


def follow_variant(state, name, count=3):
    variant = made("moe", name, state)
    try:
        return follow(state, variant.step, count)
    finally:
        leave(variant)
        variant.close()


@functools.cache
def eager(preset, **changes):
    return follow_variant(make(preset, **changes), "eager")


@pytest.mark.parametrize("name", ["graph_attn_router", "graph_layer", "graph_step"])
def test_gpt_oss_trains_alike_in_graphs(name):
    state = make("tiny_gpt_oss")
    assert difference(follow_variant(state, name), eager("tiny_gpt_oss"), state) == ""


@pytest.mark.gpu
@pytest.mark.parametrize("preset", ["tiny", "tiny_gpt_oss"])
def test_variants_train_alike_on_a_gpu(preset, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic kernels ask for it
    with torch.cuda.stream(torch.cuda.Stream()), torch_settings.deterministic_kernels():
        state = make(preset, device=torch.device("cuda"))
        expected = follow_variant(state, "eager")
        for name in ("graph_attn_router_preprocess", "graph_layer", "graph_step", "eager_static", "graph_static"):
            assert difference(follow_variant(state, name), expected, state) == "", name


def test_a_share_trains_alike_in_graphs():
    changes = {"share_tp": 2, "share_ep": 2}
    state = make("tiny", **changes)
    assert difference(follow_variant(state, "graph_layer"), eager("tiny", **changes), state) == ""


@pytest.mark.parametrize("preset", ["tiny", "tiny_gpt_oss"])
def test_experts_add_up_for_each_token(preset):
    """Against a loop over choices."""
    state = make(preset, dtype=torch.float32)
    layer, config = state.layers[0], state.config
    for name in ("bias1", "bias2"):
        if getattr(layer, name) is not None:
            getattr(layer, name).data.normal_()
    x = torch.randn(config.tokens, config.hidden, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        y, routed = layer.route(x)
        ours = layer.mix(x, y, routed, layer.preprocess(routed))
        expected = x.clone()
        for token, (weights, experts) in enumerate(zip(routed.weights, routed.experts.tolist(), strict=True)):
            for weight, expert in zip(weights, experts, strict=True):
                expected[token] += weight * of_expert(layer, expert, y[token])
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


def of_expert(layer, expert, y):
    z = y @ layer.w1[expert]
    if layer.bias1 is None:
        gate, up = z.chunk(2)
        return (torch.nn.functional.silu(gate) * up) @ layer.w2[expert]
    gate, up = (z + layer.bias1[expert]).chunk(2)
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return (gate * torch.sigmoid(1.702 * gate) * (up + 1)) @ layer.w2[expert] + layer.bias2[expert]


def test_forward_and_backward_alone_leave_the_weights():
    state = make("tiny", update=False)
    names = [name for name, _ in state.named_state()]
    assert all(name.endswith("main_grad") for name in names)
    assert difference(follow_variant(state, "graph_step"), eager("tiny", update=False), state) == ""
    weights = [parameter.detach().clone() for _, _, parameter in state.parts]
    train.eager_step(state, 0)
    assert all(map(torch.equal, weights, [parameter for _, _, parameter in state.parts]))


def test_balanced_routing_gives_all_experts_as_many_tokens():
    state = make("tiny", routing="balanced")
    with torch.no_grad():
        _, routed = state.layers[0].route(state.embed(0))
    assert routed.counts.tolist() == [64 * 2 // 8] * 8
    torch.testing.assert_close(routed.weights.sum(1), torch.ones(64))


def test_gradients_of_microbatches_add_up():
    """Two microbatches of one sequence are one of two, whose loss is the mean."""
    changes = {"dtype": torch.float32, "update": False, "aux_loss": 0.0}
    split, joined = make("tiny", **changes), make("tiny", microbatches=1, microbatch=2, **changes)
    for state in (split, joined):
        train.eager_step(state, 0)
    assert split.read_losses(1) == pytest.approx(joined.read_losses(1))
    for (name, ours), (_, expected) in zip(split.named_state(), joined.named_state(), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-6, msg=name)


def test_a_wrong_path_is_told_before_a_weight_is_made(monkeypatch):
    monkeypatch.setattr("moe.state.Layer", None)
    with pytest.raises(ValueError, match="--data /nowhere: neither a folder of text"):
        make("tiny", data="/nowhere")


def test_a_state_that_is_gone_holds_no_memory():
    state = make("tiny")
    parameter = weakref.ref(state.layers[0].w1)
    state.close()
    del state
    gc.collect()
    assert parameter() is None


# ------------------------------------------------------------------------------------------------
# Packed sequences


@pytest.mark.parametrize("microbatch", [1, 2])
def test_documents_of_a_packed_sequence_do_not_see_one_another(microbatch):
    state = make("tiny_packed", dtype=torch.float32, microbatch=microbatch)
    bounds = state.inputs["bounds"][0].tolist()
    first = logits(state)
    state.inputs["tokens"][0, : bounds[1]] = 0  # another first document
    changed = logits(state)
    assert bounds[1] < 64 and not torch.equal(changed[: bounds[1]], first[: bounds[1]])
    torch.testing.assert_close(changed[bounds[1] :], first[bounds[1] :])
