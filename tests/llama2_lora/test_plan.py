"""llama2_lora/plan: the predicted bytes are those that are built, and the plans of the presets."""

import gc
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from common.training.memory_fit import gib
from common.training.memory_plan import GIB
from llama2_lora import plan as plans
from llama2_lora.config import PRESETS
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


@pytest.mark.parametrize("precision", ["fp8", "bf16"])
def test_predicted_bytes_are_the_built_ones(precision):
    # Widths at which nothing small matters beside the tensors that are counted.
    config = replace(TINY, precision=precision, hidden=256, ffn=512, sequence=256, batches=1)
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


@pytest.mark.parametrize("name, value", [("hidden", 2**40), ("vocab", 10**9), ("batches", 2**40)])
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


def test_the_documents_table_has_the_plans():
    """Plans of the whole model at 1024 and 8192 tokens."""
    rows = []
    for preset in ("bench", "full"):
        for gpu, free_gib in (("H200", 139), ("H100", 78)):
            budget = plans.budget_bytes(free_gib * GIB)
            config = plans.fit(PRESETS[preset], budget)
            plan = plans.make_plan(config, budget)
            kept = [row["kept"] + row["fp8"] for row in plan.items().values()]
            cells = [config.tokens, f"{free_gib} ({gpu})", config.layers, *kept, gib(plan.bytes), f"{plan.ms:.0f}"]
            rows.append("| " + " | ".join(map(str, cells)) + " |\n")
    assert "".join(rows) in (ROOT / "docs/memory_plan.md").read_text()
