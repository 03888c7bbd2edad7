"""moe: fine-tuning on packed sequences, whole and by adapters."""

import pytest
import torch

from graph_worth.measuring import torch_settings
from moe import train
from moe.config import num_parameters, state_bytes, trained_parameters
from moe.model import ADAPTERS
from tests.helpers.contracts import made
from tests.helpers.followed import difference, follow
from tests.helpers.moe_case import CPU, make

# Sixteen packings in eight steps. The window is shorter than most documents.
PACKED = {"batches": 8, "layers": 1, "documents": 8}
TUNING = {
    "sft": {"preset": "tiny_packed"},
    "sft_gpt_oss": {"preset": "tiny_gpt_oss"},
    "lora": {"preset": "tiny_lora"},
}


def replay_packings(device, tuning, name):
    """Sixteen packings, one after the other, by the graphs of one capture."""
    state, by_eager = (make(device=device, **TUNING[tuning], **PACKED) for _ in range(2))
    packings = {tuple(row.tolist()) for batch in state.batches for row in batch["bounds"]}
    assert len(packings) == 16
    expected = follow(by_eager, made("moe", "eager", by_eager).step, 8)
    variant = made("moe", name, state)
    (pool,) = variant.capture.pools
    graphs = list(pool.graphs)
    result = follow(state, variant.step, 8)
    assert pool.graphs == graphs and pool.num_replays == 8 * variant.replays_of(0)
    assert difference(result, expected, state) == ""
    variant.close()


@pytest.mark.parametrize("tuning, name", [
    ("sft", "graph_attn"),
    ("sft", "graph_step"),
    ("sft_gpt_oss", "graph_step"),
    ("lora", "graph_attn"),
    ("lora", "graph_layer"),
    ("lora", "graph_step"),
])  # fmt: skip
def test_changing_packings_are_replayed_without_another_capture(tuning, name):
    replay_packings(CPU, tuning, name)


@pytest.mark.gpu
@pytest.mark.parametrize("tuning", TUNING)
@pytest.mark.parametrize("name", ["graph_attn", "graph_layer", "graph_step"])
def test_changing_packings_are_replayed_on_a_gpu(tuning, name, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic kernels ask for it
    with torch.cuda.stream(torch.cuda.Stream()), torch_settings.deterministic_kernels():
        replay_packings(torch.device("cuda"), tuning, name)


def test_adapters_alone_are_trained():
    state = make("tiny_lora")
    trained = {name for name, _, _ in state.trained}
    before = {id(each): each.detach().clone() for _, _, each in state.parts}
    for index in range(3):
        train.eager_step(state, index)
    assert trained == set(ADAPTERS)
    for name, _, each in state.parts:
        assert torch.equal(each, before[id(each)]) == (name not in ADAPTERS), name
        assert hasattr(each, "main_grad") == (name in ADAPTERS), name


def test_adapters_start_as_the_model_without_them():
    lora, whole = make("tiny_lora", dtype=torch.float32), make("tiny_lora", dtype=torch.float32, lora_rank=0)
    for state in (lora, whole):
        train.eager_step(state, 0)
    assert lora.read_losses(1) == whole.read_losses(1)
    assert float(lora.grad_norms[0]) < float(whole.grad_norms[0])


def test_an_adapter_is_a_product_of_two_matrices():
    """The gradients of a and b follow from those of the matrix that they are added to."""
    lora, whole = (make("tiny_lora", dtype=torch.float32, update=False, lora_rank=rank) for rank in (4, 0))
    a, b, scale = lora.layers[1].proj_a, lora.layers[1].proj_b, 32.0 / 4
    torch.nn.init.normal_(b, std=0.02)
    whole.layers[1].proj.data += scale * (b @ a).detach()
    for state in (lora, whole):
        train.eager_step(state, 0)
    grad = whole.layers[1].proj.main_grad
    torch.testing.assert_close(b.main_grad, scale * grad @ a.detach().t(), rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(a.main_grad, scale * b.detach().t() @ grad, rtol=1e-3, atol=1e-6)


def test_frozen_experts_have_no_weight_gradients(monkeypatch):
    def refuse(*_):
        raise AssertionError("a weight gradient of frozen experts")

    monkeypatch.setattr("moe.model.grouped_weight_gradient_", refuse)
    train.eager_step(make("tiny_lora"), 0)
    with pytest.raises(AssertionError, match="frozen experts"):
        train.eager_step(make("tiny_lora", lora_rank=0), 0)


@pytest.mark.parametrize("preset, changes", [("tiny", {}), ("tiny", {"moments": "fp32"}), ("tiny_lora", {})])
def test_the_state_has_the_predicted_bytes(preset, changes):
    state = make(preset, **changes)
    config, adam = state.config, state.adam
    held = [each for _, _, each in state.parts] + [each.main_grad for _, _, each in state.trained]
    held += [tensor for name, tensor in adam.named_state() if name != "optimizer.step"]
    assert sum(each.numel() for _, _, each in state.trained) == trained_parameters(config)
    assert sum(each.nbytes for each in held) == state_bytes(config)
    assert num_parameters(config) == sum(each.numel() for name, _, each in state.parts if name not in ADAPTERS)


@pytest.mark.parametrize("rank, kept", [(4, False), (0, True)])
def test_frozen_experts_do_not_keep_their_rows(rank, kept):
    state, shapes = make("tiny_lora", lora_rank=rank, ffn=40), []
    inputs = state.inputs_of(0)
    hidden = state.layers[0](state.embed(0), inputs)
    with torch.autograd.graph.saved_tensors_hooks(lambda each: shapes.append(each.shape) or each, lambda each: each):
        state.layers[1](hidden, inputs)
    config = state.config
    assert ((config.rows, config.hidden) in shapes) == kept and (config.rows, 2 * config.ffn) in shapes
