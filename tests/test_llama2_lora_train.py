"""llama2_lora/train on the host graph: graphed steps against eager ones, bit for bit; what goes on between runs."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
import torch

from common.config import Arguments, Run
from common.llama_checkpoint import open_checkpoint
from common.memory_plan import GIB
from common.variant import Unsupported
from llama2_lora import adapters, resolve, train
from llama2_lora import plan as plans
from llama2_lora.config import ABOUT, PRESETS, VARIANTS
from llama2_lora.state import ADAM, State, hyperparameters
from tests import forked
from tests.llama2_lora_case import CPU, GRAPHED, TINY, assert_equal, follow, follow_eager, write_checkpoint

ROOT = Path(__file__).resolve().parent.parent


def mixed(config):
    """The config with memory for a plan of several configurations."""
    low = plans.needed_bytes(config)
    high = low + config.layers * sum(item.bytes for item in plans.items(config))
    return replace(config, memory_gib=(low + 0.2 * (high - low)) / GIB)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"precision": "fp8_current", "layers": 2},
        {"precision": "bf16", "layers": 1},
        {"precision": "nvfp4_emulated", "layers": 2},
    ],
    ids=lambda changes: ",".join(f"{name}={value}" for name, value in changes.items()) or "tiny",
)
def test_graphs_equal_eager_bit_for_bit(changes):
    config = mixed(replace(TINY, **changes))
    state = State(config, CPU, "lean")
    if config.layers > 2:
        assert len(state.plan.counts) > 1, state.plan.counts
    eager = follow_eager(state, 5)
    assert_equal(follow_eager(state, 5), eager, state)
    for name in GRAPHED:
        variant = train.MAKE_VARIANT[name](state)
        before = variant.capture.num_replays
        assert_equal(follow(state, variant.step, 5), eager, state)
        promised = sum(variant.replays_of(index) for index in range(5))
        assert variant.capture.num_replays - before == promised == 5 * ABOUT["promises"](config, name)[1]
        assert len(variant.pool.graphs) == ABOUT["promises"](config, name)[0]
        variant.close()


def test_eager_steps_beside_graphs_hold_no_second_set_of_activations():
    state = State(TINY, CPU, "lean")
    expected = follow_eager(state, 2)

    def held_after_forward():
        state.stack.embed()
        state.stack.forward_all()
        held = sum(each is not None for each in state.stack.attended)
        state.stack.attended = [None] * TINY.layers
        return held

    for name in GRAPHED:
        assert held_after_forward() == TINY.layers
        variant = train.MAKE_VARIANT[name](state)
        assert held_after_forward() == 0
        assert_equal(follow_eager(state, 2), expected, state)
        variant.close()


def test_sixteen_packings_replay_without_recapture():
    state = State(mixed(replace(TINY, documents="separate", batches=16)), CPU, "lean")
    layouts = {tuple(batch["cu_seqlens"].tolist()) for batch in state.batches}
    assert len(layouts) == 16
    eager = follow_eager(state, 16)
    for name in GRAPHED:
        variant = train.MAKE_VARIANT[name](state)
        assert_equal(follow(state, variant.step, 16), eager, state)
        variant.close()
    # The layout matters: as one causal sequence the same tokens have another loss.
    whole = State(replace(TINY, batches=16), CPU, "lean")
    assert all(torch.equal(a["tokens"], b["tokens"]) for a, b in zip(state.batches, whole.batches, strict=True))
    assert follow_eager(whole, 2)[0] != eager[0][:2]


@pytest.mark.parametrize("name", ["eager", "graph"])
def test_evaluation_leaves_training_as_it_was(name):
    state = State(mixed(TINY), CPU, "lean")
    variant = train.MAKE_VARIANT[name](state)
    expected = follow(state, variant.step, 6)
    losses = []

    def step(index):
        variant.step(index)
        if index % 3 == 1:
            before = [tensor.clone() for _, tensor in state.named_state()]
            losses.append(state.evaluate())
            assert losses[-1] == state.evaluate()
            assert all(map(torch.equal, before, (tensor for _, tensor in state.named_state())))

    assert_equal(follow(state, step, 6), expected, state)
    assert len(set(losses)) == 2 and all(3 < loss < 7 for loss in losses)
    variant.close()


def test_a_step_is_the_recipes():
    """One step from the gradients that the layers leave: the mean over the unmasked tokens, clipped, AdamW in FP32."""
    state = State(TINY, CPU, "lean")
    state.adapters.values.normal_(0.0, 0.05, generator=torch.Generator().manual_seed(0))
    state.adam.reset()
    master = state.adam.masters[0].clone()
    state.load_window(1)
    mask = state.batches[1]["loss_mask"]
    assert torch.equal(state.weights_of_tokens, mask / mask.sum()) and 0 < mask.sum() < 64
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


def test_training_goes_on_from_a_saved_adapter(tmp_path):
    """Three steps and four more are seven, of windows that rotate by four; bf16, since the scales of FP8 begin anew."""
    config = replace(TINY, precision="bf16", save_adapter=str(tmp_path / "adapter"))
    whole, first = State(config, CPU, "lean"), State(config, CPU, "lean")
    losses, _, hashes = follow_eager(whole, 7)
    follow_eager(first, 3)
    record = {"extra": {"notes": []}}
    first.finish(None, record)
    assert "after 3 steps" in record["extra"]["notes"][0]
    again = State(replace(config, adapter=str(tmp_path / "adapter")), CPU, "lean")
    rest, _, rest_hashes = follow_eager(again, 4)
    assert rest == losses[3:]
    assert (rest_hashes == hashes[3:]).all()


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_weights_of_a_checkpoint_are_trained_on(precision, tmp_path):
    folder = write_checkpoint(tmp_path / "llama", TINY)
    config = replace(TINY, precision=precision, checkpoint=str(folder))
    state, tensors = State(config, CPU, "lean"), open_checkpoint(folder, config)
    frozen = state.stack.weights
    assert torch.equal(frozen.embedding, tensors.embedding()) and torch.equal(frozen.head, tensors.head())
    for index in range(config.layers):
        layer = tensors.layer(index)
        for name, matrix in frozen.layers[index].items():
            weight = matrix.value.float() * matrix.inverse
            torch.testing.assert_close(weight, layer[name].float(), rtol=2**-4 if precision == "fp8" else 0, atol=1e-4)
        assert torch.equal(torch.stack(frozen.norms[index]), torch.stack([layer["norm1"], layer["norm2"]]))
    assert torch.equal(frozen.final_norm, tensors.final_norm())
    assert follow_eager(state, 1)[0] != follow_eager(State(replace(config, checkpoint=""), CPU, "lean"), 1)[0]


@pytest.mark.slow
def test_ranks_average_the_gradients(tmp_path):
    """Two processes: each has windows and masks of its own, and both end with the same adapters."""
    script = tmp_path / "rank.py"
    script.write_text(
        "import json, sys, torch\n"
        "from common import collectives\n"
        "from llama2_lora import train\n"
        "from llama2_lora.state import State\n"
        "from tests.llama2_lora_case import TINY\n"
        "rank, _, size = collectives.init('cpu')\n"
        "state = State(TINY, torch.device('cpu'), 'lean', rank, size)\n"
        "variant = train.MAKE_VARIANT[sys.argv[1]](state)\n"
        "state.reset()\n"
        "grads = []\n"
        "for index in range(2):\n"
        "    variant.step(index)\n"
        "    grads.append(state.adapters.grads.double().sum().item())\n"
        "out = {'tokens': state.batches[0]['tokens'].tolist(), 'own': grads,\n"
        "       'mean': state.adapters.main_grad.double().sum().item(),\n"
        "       'master': state.adam.masters[0].double().sum().item(), 'step': int(state.stack.operators.step)}\n"
        "open(sys.argv[2] + f'/{sys.argv[1]}.{rank}', 'w').write(json.dumps(out))\n"
        "variant.close()\n"
        "collectives.shutdown()\n"
    )
    said = {}
    for name in ("eager", "one_graph"):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        result = subprocess.run(
            [*command, name, str(tmp_path)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=180
        )
        assert result.returncode == 0, result.stderr[-3000:]
        said[name] = [json.loads((tmp_path / f"{name}.{rank}").read_text()) for rank in range(2)]
    first, second = said["eager"]
    assert said["one_graph"] == said["eager"]
    assert first["tokens"] != second["tokens"] and first["step"] != second["step"]
    assert first["own"][1] != second["own"][1]
    assert first["master"] == second["master"] and first["mean"] == second["mean"]


def arguments(**fields):
    return Arguments(config=replace(TINY, **fields), run=Run(preset="tiny", variant="eager"))


def test_resolve_on_the_host():
    resolved, notes = resolve.resolve(arguments(), CPU)
    assert resolved.config == TINY and "emulated" in notes[0]
    assert resolve.resolve(arguments(precision="bf16"), CPU)[1] == []
    with pytest.raises(ValueError, match="--layer te needs a GPU"):
        resolve.resolve(arguments(layer="te"), CPU)
    with pytest.raises(ValueError, match="--preset tiny"):
        resolve.resolve(Arguments(config=PRESETS["full"], run=Run(preset="full", variant="eager")), CPU)


@pytest.fixture
def fake_gpu(monkeypatch):
    """Call it with free GiB and a compute capability: what resolve asks of a GPU."""

    def make(free_gib, capability=(9, 0)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(free_gib * GIB), 141 * GIB))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        return torch.device("cuda")

    return make


def resolve_preset(name, device, **fields):
    run = Run(preset=name, variant="eager")
    return resolve.resolve(Arguments(config=replace(PRESETS[name], **fields), run=run), device)


def test_resolve_on_a_gpu(fake_gpu):
    h200 = fake_gpu(139.2)
    for name in ("bench", "full"):
        resolved, notes = resolve_preset(name, h200)
        assert (resolved.config.layers, resolved.config.memory_gib, resolved.run.preset) == (80, 137.0, name)
        assert notes == []
        card = resolve.card(resolved.config, "lean", h200)
        assert "Llama 2 70B" in card[0] and any(line.startswith("sum, of 137.00 GiB") for line in card)
    with pytest.raises(ValueError, match="--memory-gib 140.0: 139.2 GiB are free, take at most 137"):
        resolve_preset("full", h200, memory_gib=140.0)
    assert resolve_preset("full", h200, memory_gib=115.0)[0].config.memory_gib == 115.0


def test_all_ranks_plan_for_the_least_memory_that_one_has(fake_gpu, monkeypatch):
    monkeypatch.setattr(resolve, "of_all_ranks", lambda value: [value, int(120.9 * GIB)])
    assert resolve_preset("full", fake_gpu(139.2))[0].config.memory_gib == 119.0


def test_resolve_on_smaller_gpus(fake_gpu):
    h100 = fake_gpu(78.6)
    assert resolve_preset("bench", h100)[0].config.layers == 80
    resolved, notes = resolve_preset("full", h100)
    layers = resolved.config.layers
    assert 60 < layers < 80 and resolved.run.preset == f"full-l{layers}" and f"{layers} of 80" in notes[0]
    old, notes = resolve_preset("slice", fake_gpu(23.0, (8, 6)))
    assert (old.config.precision, old.config.layers) == ("bf16", 8) and "no FP8" in notes[0]


def test_layers_are_those_that_a_variant_is_declared_to_have():
    for variant, kind in (("graph_te", "te"), ("eager_te", "te"), ("graph", "torch"), ("compile", "torch")):
        args = Arguments(config=replace(TINY, layer="torch"), run=Run(preset="tiny", variant=variant))
        assert resolve.kind_of_layers(args) == kind


def test_too_little_memory_is_said_before_weights_are_built():
    with pytest.raises(ValueError, match="--memory-gib"):
        State(replace(TINY, memory_gib=0.001), CPU, "lean")


def test_nvfp4_needs_other_hardware():
    with pytest.raises(Unsupported, match="10.0 or higher.*nvfp4_emulated"):
        State(replace(TINY, precision="nvfp4"), CPU, "lean")


def test_every_variant_is_made():
    assert list(train.MAKE_VARIANT) == list(VARIANTS)


def test_hyperparameters_are_those_of_the_step():
    said = hyperparameters(PRESETS["mlperf"], 8)
    assert (said["global_batch_size"], said["max_sequence_length"], said["opt_gradient_clip_norm"]) == (8, 8192, 0.3)


@pytest.mark.parametrize("num_steps", [32, pytest.param(200, marks=pytest.mark.slow)])
def test_nvfp4_emulated_trains_beside_fp8(num_steps):
    """Losses over the same windows: FP4 rounds more, and stays near."""
    losses = {}
    for precision in ("fp8", "nvfp4_emulated"):
        losses[precision] = follow_eager(State(replace(TINY, precision=precision), CPU, "lean"), num_steps)[0]
    first, last = ([numpy.mean(each[part]) for each in losses.values()] for part in (slice(0, 8), slice(-8, None)))
    assert last[0] < first[0] - 0.3 and last[1] < first[1] - 0.3
    assert losses["fp8"] != losses["nvfp4_emulated"]
    assert last[1] == pytest.approx(last[0], rel=0.05)


def run_script(*arguments):
    """The record of a short run of the tiny preset."""
    flags = ["--preset", "tiny", "--steps", "3", "--min-steps", "3", "--min-window-s", "0", "--profile-steps", "0"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    warm_up = ["--warmup-min-s", "0", "--warmup-max-s", "0"]
    answer = forked.run("llama2_lora.train", [*flags, *warm_up, *arguments], environment, timeout_s=200)
    record = json.loads(answer.stdout.splitlines()[-1])
    assert record["status"] == "pass", record["message"]
    return record


def test_a_user_trains_saves_and_goes_on(tmp_path):
    """Packed rows as GovReport has them and a folder of text, on a checkpoint, with an adapter saved and resumed."""
    generator = numpy.random.default_rng(0)
    rows = [{"input_ids": generator.integers(0, 256, 64).tolist(), "labels": [-100] * 32 + [1] * 32} for _ in range(12)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    text = tmp_path / "text"
    text.mkdir()
    for name in "abc":
        (text / f"{name}.txt").write_text(f"{name} line of text that is read as bytes\n" * 40)
    checkpoint, adapter = write_checkpoint(tmp_path / "llama", TINY), tmp_path / "adapter"
    first = run_script("--data", str(tmp_path), "--checkpoint", str(checkpoint), "--save-adapter", str(adapter))
    _, steps = adapters.load_state(adapter)
    assert any(f"adapter after {steps} steps saved in {adapter}" in note for note in first["extra"]["notes"])
    second = run_script(
        "--data", str(text), "--variant", "graph", "--adapter", str(adapter), "--save-adapter", str(adapter)
    )
    assert any("steps saved" in note for note in second["extra"]["notes"]) and adapters.load_state(adapter)[1] > steps
    assert all(numpy.isfinite(first["numerics"]["loss"])) and all(numpy.isfinite(second["numerics"]["loss"]))
