"""llama2_lora/plan: the predicted bytes are those that are built, and what the presets' layers keep."""

import gc
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from common.fit import gib
from common.memory_plan import GIB, budget_bytes
from llama2_lora import plan as plans
from llama2_lora.config import KEEP, PRESETS
from llama2_lora.state import State
from tests.helpers import gloo_ranks
from tests.helpers.llama2_lora_case import CPU, TINY

ROOT = Path(__file__).resolve().parents[2]
FULL = PRESETS["full"]


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
        elif type(each).__module__.startswith(("llama2_lora", "common", "graph_worth")) and hasattr(each, "__dict__"):
            todo += vars(each).values()
    return sum(storages.values())


def built_and_predicted(**changes):
    """Bytes of a run on a CPU, at widths at which nothing small matters beside the tensors that are counted."""
    config = replace(TINY, hidden=256, ffn=512, sequence=256, batches=1, **changes)
    state = State(config, CPU, "handwritten", int(os.environ.get("RANK", "0")), config.tp)
    # What only the plain operators have: the hash's positions, places of the mask. Host batches are not counted.
    state.stack.operators._positions = state.stack.attention._own = state.stack.attention._keys = None
    state.batches, state.losses, state.grad_norms = [], None, None
    gc.collect()
    built = bytes_of_storages(state.stack, state.adapters, state.adam, state.inputs)
    # Attention's output is allocated by its forward, not at build.
    kept = sum(size for name, size in plans.items(config).items() if name != "attention")
    return built, sum(plans.built_sizes(config)) + config.layers * kept


def tp2():
    return built_and_predicted(precision="fp8", tp=2)


@pytest.mark.slow
def test_predicted_bytes_are_the_built_ones():
    alone = [built_and_predicted(precision=each) for each in ("fp8", "bf16", "nvfp4_emulated")]
    for built, predicted in [*alone, *gloo_ranks.run(__name__, "tp2", 2)]:
        assert built == pytest.approx(predicted, rel=5e-3)


def test_the_whole_model_on_one_h200():
    """As runs reserved it: where all is computed again 81 GiB, where fc1 alone is 113."""
    assert plans.make_plan(FULL, "least").bytes / GIB == pytest.approx(81, rel=0.02)
    assert plans.make_plan(FULL, "80 qkv attention residual").bytes / GIB == pytest.approx(113, rel=0.02)


# GPU: GiB that are free beside CUDA's context, and GB of the card.
GPUS = {"H200": (139.2, 150), "H100": (78.7, 85)}


@pytest.mark.parametrize("gpu, card", [("H200", 141), ("H100", 80)])
@pytest.mark.parametrize("preset", PRESETS)
def test_layers_keep_what_the_preset_says_on_its_cards(gpu, card, preset):
    """The predicted bytes fit, and are not far from all that is free where layers keep less than everything."""
    free_gib, total_gb = GPUS[gpu]
    budget = budget_bytes(int(free_gib * GIB), plans.CONTEXT_BYTES)
    config = plans.fit(PRESETS[preset], budget)
    keep = plans.choose(config, preset, total_gb * 10**9, budget)
    assert keep == KEEP.get(preset, {}).get(card, "all")
    predicted = plans.make_plan(config, keep).bytes
    assert predicted <= budget and (keep == "all" or predicted > budget - GIB)


def test_slice_fits_a_24_gb_gpu():
    small = 22 * GIB - plans.CONTEXT_BYTES
    for precision in ("fp8", "bf16"):
        assert plans.fixed_bytes(replace(PRESETS["slice"], precision=precision)) <= small


def test_fit_takes_the_most_layers_that_fit():
    for layers in (1, 40, 80):
        need = plans.fixed_bytes(replace(FULL, layers=layers))
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


def test_the_documents_table_says_what_layers_keep():
    """The whole model at 1024 and 8192 tokens."""
    rows = []
    for preset in ("bench", "full"):
        for gpu, (free_gib, total_gb) in GPUS.items():
            budget = budget_bytes(int(free_gib * GIB), plans.CONTEXT_BYTES)
            config = plans.fit(PRESETS[preset], budget)
            plan = plans.make_plan(config, plans.choose(config, preset, total_gb * 10**9, budget))
            kept = [sum(name in layer for layer in plan.layers) for name in plan.items]
            cells = [config.tokens, gpu, config.layers, *kept, gib(plan.bytes)]
            rows.append("| " + " | ".join(map(str, cells)) + " |\n")
    assert "".join(rows) in (ROOT / "docs/memory_plan.md").read_text()
