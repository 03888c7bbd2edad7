"""llama2_lora/plan: the predicted bytes are those that are built, and the plans of the presets."""

import gc
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from common.training.memory_plan import GIB
from common.training.precision import nvfp4
from llama2_lora import plan as plans
from llama2_lora.config import PRESETS, layer_weights
from llama2_lora.state import State
from tests.helpers.llama2_lora_case import CPU, TINY

ROOT = Path(__file__).resolve().parents[2]
BENCH, FULL = PRESETS["bench"], PRESETS["full"]


def bytes_of_storages(*roots):
    """Bytes of all tensors that are reachable from these objects, each storage once."""
    seen, storages, todo = set(), {}, list(roots)
    while todo:
        each = todo.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, torch.Tensor):
            storages[each.untyped_storage()._cdata] = each.untyped_storage().nbytes()
        elif isinstance(each, dict):
            todo += each.values()
        elif isinstance(each, (list, tuple)):
            todo += each
        elif type(each).__module__.startswith(("llama2_lora", "common")) and hasattr(each, "__dict__"):
            todo += vars(each).values()
    return sum(storages.values())


@pytest.mark.parametrize(
    "precision, transposes",
    [("fp8", "inline"), ("fp8", "beside"), ("fp8", "own"), ("fp8_current", "inline"), ("bf16", "inline"),
     ("nvfp4_emulated", "inline")],
)  # fmt: skip
def test_predicted_bytes_are_the_built_ones(precision, transposes):
    # Widths at which nothing small matters beside the tensors that are counted.
    config = replace(TINY, precision=precision, transposes=transposes, hidden=256, ffn=512, sequence=256, batches=1)
    state = State(config, CPU, "handwritten")
    # What only the plain operators have: the hash's positions, places of the mask. Host batches are not counted.
    state.stack.operators._positions = state.stack.attention._own = state.stack.attention._keys = None
    state.batches, state.losses, state.grad_norms = [], None, None
    gc.collect()
    built = bytes_of_storages(state.stack, state.adapters, state.adam, state.inputs, state.weights_of_tokens)
    # Attention's output is allocated by its forward, not at build.
    kept = sum(
        item.fp8_bytes if item.name == "fc1" and config.fc1_fp8 else item.bytes
        for item in plans.items(config)
        if item.name != "attention"
    )
    assert built == pytest.approx(sum(plans.built_sizes(config)) + config.layers * kept, rel=5e-3)


def test_a_plan_has_room_for_what_rounds_to_nvfp4():
    """In a graph's pool and beside it."""
    assert plans.NVFP4_CHUNK == nvfp4.CHUNK
    bf16, emulated = (replace(BENCH, layers=4, precision=precision) for precision in ("bf16", "nvfp4_emulated"))
    weights_of_backward = 2 * 4 * layer_weights(BENCH)
    more = plans.fixed_bytes(emulated) - plans.fixed_bytes(bf16) - weights_of_backward
    assert more == pytest.approx(2 * plans.NVFP4_COPIES * 4 * nvfp4.CHUNK, rel=0.01)


def test_the_whole_model_on_one_h200():
    """Plans as those that ran: full recompute reserved 81 GiB, recompute of fc1 alone 113."""
    assert plans.needed_bytes(FULL) / GIB == pytest.approx(81, rel=0.02)
    everything_but_fc1 = plans.fixed_bytes(FULL) + 80 * sum(item.bytes for item in plans.items(FULL)[:3])
    assert everything_but_fc1 / GIB == pytest.approx(113, rel=0.02)
    items = plans.make_plan(FULL, 115 * GIB).items()
    assert items["attention"]["kept"] >= 75 and 50 <= items["fc1"]["fp8"] <= 60
    most = plans.make_plan(FULL, 137 * GIB)
    assert most.bytes <= 137 * GIB and most.items()["fc1"]["fp8"] == 80
    held = plans.make_plan(BENCH, 137 * GIB).items()["transpose"]["kept"]
    assert 69 <= held <= 78


def test_h100_holds_all_layers_at_1024_tokens():
    assert plans.make_plan(BENCH, 78 * GIB).bytes <= 78 * GIB
    assert plans.fit(FULL, 77 * GIB).layers < 80


def test_memory_of_flash_attention_in_round_0_is_counted():
    """FP32 sums of q's gradient with 128 rows beside each of 16 documents, and gradients of k and v of all 64 heads."""
    one = 4 * (8192 + 16 * 128) * 8192 + 2 * 2 * 8192 * 8192
    bytes_of = plans.fixed_bytes(FULL) - plans.memory_plan.reserved_bytes(plans.built_sizes(FULL))
    assert 2 * one < bytes_of < 2 * one + 1.2 * GIB


def test_slice_fits_a_24_gb_gpu():
    small = 22 * GIB - plans.CONTEXT_BYTES
    for precision in ("fp8", "bf16"):
        assert plans.needed_bytes(replace(PRESETS["slice"], precision=precision)) <= small


def test_too_little_memory_is_said_with_the_bytes():
    with pytest.raises(ValueError, match=r"--memory-gib \d+\.\d") as error:
        plans.make_plan(FULL, 60 * GIB)
    assert f"{plans.needed_bytes(FULL):,}" in str(error.value)


def test_fit_takes_the_most_layers_that_fit():
    for layers in (1, 40, 80):
        need = plans.needed_bytes(replace(FULL, layers=layers))
        assert plans.fit(FULL, need) == replace(FULL, layers=layers)
        if layers > 1:
            assert plans.fit(FULL, need - 1).layers == layers - 1
    with pytest.raises(ValueError, match="--sequence"):
        plans.fit(replace(FULL, sequence=32768), 2 * GIB)


@pytest.mark.parametrize("value", [10**9, 2**40])
@pytest.mark.parametrize("name", ["layers", "hidden", "heads", "ffn", "vocab", "sequence", "batches", "amax_history"])
def test_a_shape_too_large_blames_its_flag(name, value):
    flag, before = "--" + name.replace("_", "-"), getattr(TINY, name)
    told = rf"^{flag} {value} is too large: .* GiB are needed, 24.0 GiB are free; {flag} {before}, as in preset tiny"
    with pytest.raises(ValueError, match=told):
        plans.require(replace(TINY, **{name: value}), 24 * GIB)


def test_a_tensor_of_too_many_elements_for_a_kernel():
    wide = replace(TINY, sequence=1 << 20, ffn=1024)
    for ask in (plans.require, plans.fit):
        with pytest.raises(ValueError, match=r"--sequence 1048576 with --ffn 1024: takes fewer, .* 2\^31 elements"):
            ask(wide, 1 << 60)


def test_the_documents_table_is_what_the_command_prints():
    printed = subprocess.run(
        [sys.executable, "-m", "llama2_lora.plan"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert printed == plans.table() + "\n"
    assert printed in (ROOT / "docs/memory_plan.md").read_text()
    assert [line.split(" | ")[2] for line in printed.splitlines()[2:]] == ["80", "80", "80", "74"]


def test_transposes_in_memory_of_their_own_are_counted():
    """The weights once more, and none are held: an H200 has room for that at 1024 tokens."""
    own = replace(BENCH, transposes="own")
    assert [item.name for item in plans.items(own)] == ["qkv", "attention", "residual", "fc1"]
    more = plans.needed_bytes(own) - plans.needed_bytes(BENCH)
    assert more / GIB == pytest.approx(63.75 - 0.44, abs=0.01)
    assert plans.needed_bytes(own) < 137 * GIB


def test_no_transposes_without_fp8():
    names = [item.name for item in plans.items(replace(FULL, precision="bf16"))]
    assert names == ["qkv", "attention", "residual", "fc1"]
    assert "transpose" not in plans.workspace(replace(FULL, precision="bf16"))
