"""llama2_lora/train on the host graph: graphed steps equal eager ones bit for bit; what resolve makes of arguments."""

import json
import os
from dataclasses import replace

import numpy
import pytest
import torch

from common.data.checkpoint import open_checkpoint
from common.data.safetensors_file import open_file
from common.memory_plan import GIB
from graph_worth.made_variant import Unsupported
from llama2_lora import plan, train
from llama2_lora import state as states
from llama2_lora.config import KEEP, PRESETS
from llama2_lora.state import ADAM, State
from tests.helpers import forked, gloo_ranks
from tests.helpers.contracts import made, model
from tests.helpers.llama2_lora_case import CPU, GRAPHED, TINY, assert_equal, follow, follow_eager, write_checkpoint

# What three layers keep: nothing, and each of four tensors in one.
MIXED = "1 qkv residual, 1 attention fc1"
B_OF_Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"


def assert_replays_as_promised(variant, name, config, num_replays, num_steps):
    own = model("llama2_lora", "--layers", str(config.layers))
    num_graphs, promised = own.promises(name)
    assert num_replays == sum(map(variant.replays_of, range(num_steps))) == num_steps * promised
    assert len(variant.capture.pools[0].graphs) == num_graphs


@pytest.mark.parametrize(
    "changes",
    [
        {"documents": "separate"},
        {"precision": "bf16", "layers": 1},
        {"precision": "nvfp4_emulated", "layers": 1},
    ],
    ids=["fp8", "bf16", "nvfp4"],
)
def test_graphs_equal_eager_bit_for_bit(changes):
    config = replace(TINY, keep=MIXED, **changes)
    state, num_steps = State(config, CPU, "handwritten"), 4
    if config.layers > 2:
        assert len(set(state.plan.layers)) == 3
        # Every step has another packing, and no graph is captured again.
        assert len({tuple(batch["cu_seqlens"].tolist()) for batch in state.batches}) == num_steps
    eager = follow_eager(state, num_steps)
    assert_equal(follow_eager(state, num_steps), eager, state)
    names = (*GRAPHED, "graph_step_nvfp4") if "nvfp4" in config.precision else GRAPHED
    for name in names:
        variant = made("llama2_lora", name, state)
        before = variant.capture.num_replays
        assert_equal(follow(state, variant.step, num_steps), eager, state)
        assert_replays_as_promised(variant, name, config, variant.capture.num_replays - before, num_steps)
        variant.close()


def test_training_in_fp4s_numbers_lowers_the_loss():
    losses = {}
    for precision in ("bf16", "nvfp4_emulated"):
        state = State(replace(TINY, precision=precision, layers=1, batches=1, keep="all"), CPU, "handwritten")
        losses[precision] = follow_eager(state, 8)[0]
    ours, near = losses["nvfp4_emulated"], losses["bf16"]
    assert ours != near and ours[-1] < ours[0] - 0.2
    assert ours == pytest.approx(near, rel=0.05)


def test_variants_take_turns_on_one_state():
    state = State(TINY, CPU, "handwritten")
    expected = follow_eager(state, 2)

    def held_after_forward():
        hidden = state.stack.embed()
        for layer in range(TINY.layers):
            hidden = state.stack.forward(layer, *hidden)
        held = sum(each is not None for each in state.stack.attended)
        state.stack.attended = [None] * TINY.layers
        return held

    variants = [made("llama2_lora", name, state) for name in ("eager", *GRAPHED)]
    for variant in variants * 2:
        assert_equal(follow(state, variant.step, 2), expected, state)
    # A capture leaves eager steps the attention outputs that they keep.
    assert held_after_forward() == TINY.layers
    for variant in variants:
        variant.close()
    assert_equal(follow_eager(state, 2), expected, state)


def test_a_step_is_the_recipes():
    """One step from the gradients that the layers leave: the mean over the unmasked tokens, clipped, AdamW in FP32."""
    state = State(TINY, CPU, "handwritten")
    state.adapters.values.normal_(0.0, 0.05, generator=torch.Generator().manual_seed(0))
    state.adam.reset()
    master = state.adam.masters[0].clone()
    state.load_window(1)
    mask = state.windows.batch(1).loss_mask
    assert torch.equal(state.inputs["weights"], mask / mask.sum()) and 0 < mask.sum() < 64
    train.forward_and_backward(state)
    grad = state.adapters.grads.float()
    train.update(state)
    norm = grad.norm()
    assert float(state.adam.grad_norm) == pytest.approx(float(norm), rel=1e-6)
    leaf = torch.nn.Parameter(master)
    leaf.grad = grad * min(1.0, ADAM["clip"] / (float(norm) + 1e-6))
    torch.testing.assert_close(state.adapters.main_grad, leaf.grad, rtol=1e-5, atol=1e-9)
    torch.optim.AdamW([leaf], lr=TINY.lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-4).step()
    torch.testing.assert_close(state.adam.masters[0], leaf.detach(), rtol=1e-5, atol=1e-7)
    assert torch.equal(state.adapters.values, state.adam.masters[0].bfloat16())


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_weights_of_a_checkpoint_are_trained_on(precision, tmp_path):
    folder = write_checkpoint(tmp_path / "llama", TINY)
    config = replace(TINY, precision=precision, checkpoint=str(folder))
    frozen, tensors = State(config, CPU, "handwritten").stack.weights, open_checkpoint(folder, config)
    assert torch.equal(frozen.embedding, tensors.read("embedding")) and torch.equal(frozen.head, tensors.read("head"))
    for index in range(config.layers):
        for name, matrix in frozen.layers[index].items():
            weight = matrix.value.float() * matrix.inverse
            torch.testing.assert_close(
                weight, tensors.read(name, index).float(), rtol=2**-4 if precision == "fp8" else 0, atol=1e-4
            )
        assert torch.equal(
            torch.stack(frozen.norms[index]), torch.stack([tensors.read("norm1", index), tensors.read("norm2", index)])
        )
    assert torch.equal(frozen.final_norm, tensors.read("final_norm"))


def data_rank():
    """Facts of two steps on this rank, by variant."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    state, facts = State(TINY, CPU, "handwritten", rank, size), {}
    for name in ("eager", "graph_step"):
        variant = made("llama2_lora", name, state)
        follow(state, variant.step, 2)
        sums = {"own": state.adapters.grads, "mean": state.adapters.main_grad, "master": state.adam.masters[0]}
        facts[name] = {each: tensor.double().sum().item() for each, tensor in sums.items()}
        facts[name] |= {"tokens": state.batches[0]["tokens"].tolist(), "step": int(state.stack.operators.step)}
        variant.close()
    return facts


@pytest.mark.slow
def test_ranks_average_the_gradients():
    """Each of two ranks has windows and masks of its own, and both end with the same adapters."""
    first, second = gloo_ranks.run(__name__, "data_rank", 2)
    assert first["eager"] == first["graph_step"] and second["eager"] == second["graph_step"]
    first, second = first["eager"], second["eager"]
    assert all(first[name] != second[name] for name in ("tokens", "step", "own"))
    assert first["master"] == second["master"] and first["mean"] == second["mean"]


def resolve(device, preset="tiny", kind="handwritten", **fields):
    return states.resolve(replace(PRESETS[preset], **fields), preset, kind, device)


def test_configs_on_the_host():
    config, notes = resolve(CPU)
    assert config == TINY and "emulated" in notes[0]
    assert resolve(CPU, precision="bf16")[1] == []
    with pytest.raises(ValueError, match="--layer te needs a GPU"):
        resolve(CPU, layer="te")
    with pytest.raises(ValueError, match="--preset tiny"):
        resolve(CPU, "full")


@pytest.fixture
def fake_gpu(monkeypatch):
    """Call it with free GiB and a compute capability: all that resolve asks of a GPU."""

    def make(free_gib, capability=(9, 0)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(free_gib * GIB), 141 * GIB))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        return torch.device("cuda")

    return make


def test_configs_on_a_gpu(fake_gpu, monkeypatch):
    h200 = fake_gpu(139.2)
    for name, predicted in (("bench", 136.50), ("full", 137.00)):
        config, notes = resolve(h200, name)
        assert (config.layers, config.keep) == (80, KEEP[name][141]) and notes == []
        card = plan.card(config, "handwritten", on_gpu=True)
        assert "Llama 2 70B" in card[0] and card[-1].split() == ["predicted", f"{predicted:.2f}"]
    with pytest.raises(ValueError, match=r"--keep all: \d+\.\d GiB are predicted, 137.0 GiB are free: keep less"):
        resolve(h200, "full", keep="all")
    assert resolve(h200, "full", keep="80 attention")[0].keep == "80 attention"
    # Transformer Engine's layers keep what autograd keeps.
    assert resolve(h200, "bench", kind="te")[0].keep == "auto"
    # All ranks keep what fits into the least memory that one has.
    monkeypatch.setattr(states, "of_all_ranks", lambda value: [value, int(120.9 * GIB)])
    assert resolve(h200, "full")[0].keep == KEEP["full"][80]


def test_configs_on_smaller_gpus(fake_gpu):
    h100 = fake_gpu(78.6)
    config = resolve(h100, "bench")[0]
    assert (config.layers, config.keep) == (80, KEEP["bench"][80])
    config, notes = resolve(h100, "full")
    assert config.keep == KEEP["full"][80]
    assert 60 < config.layers < 80 and f"{config.layers} of 80" in notes[0]
    old, notes = resolve(fake_gpu(23.0, (8, 6)), "slice")
    assert (old.precision, old.layers, old.keep) == ("bf16", 8, "all") and "no FP8" in notes[0]


def test_layers_are_those_that_a_variant_is_declared_to_have(monkeypatch):
    built = []

    def stop(config, device, kind, rank, world_size):
        built.append(kind)
        raise Unsupported

    monkeypatch.setattr(train, "State", stop)
    for variant in ("graph_layer_te", "eager_te", "graph_layer", "compile"):
        with pytest.raises(Unsupported):
            model("llama2_lora", "--variant", variant, "--layer", "torch", "--precision", "bf16").build()
    assert built == ["te", "te", "torch", "torch"]


def test_a_user_trains_on_packed_rows_and_a_checkpoint_and_saves_the_adapter(tmp_path):
    """Packed rows as GovReport has them."""
    generator = numpy.random.default_rng(0)
    rows = [{"input_ids": generator.integers(0, 256, 64).tolist(), "labels": [-100] * 32 + [1] * 32} for _ in range(12)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    checkpoint, adapter = write_checkpoint(tmp_path / "llama", TINY), tmp_path / "adapter"
    flags = ["--data", str(tmp_path), "--checkpoint", str(checkpoint), "--save-adapter", str(adapter)]
    flags += ["--preset", "tiny", "--steps", "3", "--variant", "graph_layer", "--record", str(tmp_path / "result.json")]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    answer = forked.run("llama2_lora.train", flags, environment, timeout_s=300)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["status"] == "pass" and len(set(result["losses"])) == 3, result["message"]
    assert result["said"] == [f"adapter after 3 steps saved in {adapter}"]
    assert open_file(adapter / "adapter_model.safetensors", "").read(B_OF_Q).any()
