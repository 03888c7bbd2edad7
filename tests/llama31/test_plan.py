"""llama31/plan and recompute: items, what fits, and layers that keep what they are told and give the same bits."""

import itertools
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

import common.precision.transformer_engine
from common.memory_plan import GIB, budget_bytes
from graph_worth.made_variant import Unsupported
from llama31 import device, train
from llama31.config import KEEP, PRESETS
from llama31.memory.plan import (
    CONTEXT_BYTES,
    can_keep,
    choose,
    fit,
    fixed_bytes,
    items,
    kept_bytes,
    make_plan,
    needed_bytes,
    require,
    state_bytes,
)
from tests.helpers import contracts
from tests.helpers.followed import difference, follow
from tests.helpers.llama31_case import TINY, follow_eager, make

FULL, BENCH = (replace(PRESETS[name], layer="te") for name in ("full", "bench"))


def ways(config):
    """All sets of items that a layer can keep, everything first, x alone last."""
    names = list(items(config))
    sets = (frozenset(way) for count in range(len(names), 0, -1) for way in itertools.combinations(names, count))
    return [kept for kept in sets if "x" in kept and can_keep(kept)]


def with_ways(keeps, **changes):
    """A state whose layers keep these sets."""
    state = make(**changes)
    state.calls = [
        layer if kept == items(state.config).keys() else layer.keep(kept, state.scaling)
        for layer, kept in zip(state.layers, keeps, strict=True)
    ]
    return state


# --- sizes


def test_eight_billion_parameters_take_twelve_bytes_each():
    assert sum(state_bytes(FULL).values()) == 12
    assert sum(state_bytes(replace(FULL, moments="fp32")).values()) == 16
    assert sum(state_bytes(replace(BENCH, precision="bf16")).values()) == 2 + 2 + 4 + 8
    # Emulated NVFP4 rounds a bf16 matrix in blocks along its inputs, and once more along its outputs.
    linear = make(precision="nvfp4_emulated", layers=1).layers[0].fc1
    held = sum(each.nbytes for each in (linear.weight, linear.forward_weight, linear.backward_weight))
    assert held == linear.weight.numel() * state_bytes(replace(BENCH, precision="nvfp4_emulated"))["weight"]
    assert 130 * GIB < make_plan(FULL).bytes < 145 * GIB


@pytest.mark.parametrize("changes", [{"moments": "bf16"}, {"precision": "bf16", "main_grad": "fp32"}])
def test_bytes_of_the_parameters_are_those_allocated(changes):
    """But for the copy that Hopper's GEMMs read, which plain layers do not have, and for rounding in buckets."""
    state = make(**changes)
    of_parameter = state_bytes(state.config)
    num = sum(grad.numel() for grad in state.main_grads)
    optimizer = sum(t.nbytes for name, t in state.adam.named_state() if name != "optimizer.step")
    assert optimizer == num * (of_parameter["master"] + of_parameter["moments"])
    grads = sum(flat.nbytes for flat in state.buckets.flats)
    assert num * of_parameter["main_grad"] <= grads <= num * of_parameter["main_grad"] * 1.05
    assert fixed_bytes(state.config) > grads + optimizer


def test_layers_can_keep_what_they_can_run_with():
    found = [{"x", "attention", "mlp", "rest"}, {"x", "attention", "rest"}, {"x", "mlp", "rest"}, {"x", "rest"}, {"x"}]
    assert ways(FULL) == found
    assert ways(TINY) == [{"x", "rest"}, {"x"}]
    with pytest.raises(ValueError, match="--keep 1 attention: a te layer keeps attention and mlp with rest only"):
        make_plan(replace(FULL, keep="1 attention"))


def test_a_te_layer_keeps_the_inputs_of_its_gemms_and_norms():
    """8B, MiB: two residuals, q k v, attention's output and its softmax statistics, fc1's output, and inputs of GEMMs,
    in FP8 a byte each, fc1's with its transposed copy; in bf16 the projection reads attention's output itself."""
    fp8, bf16 = (items(replace(FULL, precision=name, weights=name, layer="te")) for name in ("fp8", "bf16"))
    common = 64 + 64 + 96 + 64 + 1 + 448
    assert sum(fp8.values()) == (common + 32 + 32 + 2 * 32 + 112) * 2**20
    assert sum(bf16.values()) == (common + 64 + 64 + 224) * 2**20


def test_a_stage_keeps_its_microbatches_in_flight():
    one, four = (kept_bytes(replace(BENCH, pp=pp)) for pp in (1, 4))
    assert {name: 4 * size for name, size in one.items()} == four
    assert sum(items(BENCH).values()) > 4096 * 16384 * 8


TORCH_BF16 = {"layer": "torch", "precision": "bf16", "weights": "bf16"}


@pytest.mark.parametrize("free_gib, total_gb, card", [(139.2, 150, 141), (78.7, 85, 80)])
@pytest.mark.parametrize("changes", [{"layer": "te"}, TORCH_BF16], ids=["te", "torch"])
@pytest.mark.parametrize("preset", PRESETS)
def test_layers_keep_what_the_preset_says_on_its_cards(free_gib, total_gb, card, changes, preset):
    """The predicted bytes fit, and are not far from all that is free where layers keep less than everything."""
    budget = budget_bytes(int(free_gib * GIB), CONTEXT_BYTES)
    config = fit(replace(PRESETS[preset], **changes), budget)
    keep = choose(config, preset, total_gb * 10**9, budget)
    predicted = make_plan(config, keep=keep).bytes
    assert predicted <= budget
    if (preset, changes["layer"], card) == ("full", "te", 141):
        # 136.4 of 137 GiB. The choice is for an H200 with one GiB less free.
        assert keep == "all" and choose(config, preset, total_gb * 10**9, 136 * GIB) == KEEP["full", "te"][141]
    else:
        tight = KEEP.get((preset, changes["layer"]), {}).get(card)
        assert keep == tight or (tight is None and keep in ("all", "least"))
        assert tight is None or predicted > budget - GIB


def test_layers_that_are_told_what_to_keep_must_fit():
    with pytest.raises(ValueError, match=r"--keep all: \d+\.\d GiB are predicted, 120.0 GiB are free: keep less"):
        choose(replace(FULL, keep="all"), "full", 150 * 10**9, 120 * GIB)


def test_a_build_chooses_by_the_presets_name(monkeypatch):
    def resolve(config, preset, *where):
        raise ValueError(f"{preset} with {config.microbatches}")

    monkeypatch.setattr(train, "resolve", resolve)
    with pytest.raises(ValueError, match="^full with 3$"):
        contracts.model("llama31", "--preset", "full", "--microbatches", "3").build()


def test_all_ranks_keep_what_fits_into_the_least_memory_that_one_has(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(139.1 * GIB), 141 * GIB))
    monkeypatch.setattr(device, "of_all_ranks", lambda value: [value, int(120.9 * GIB)])
    config, _ = device.resolve(replace(FULL, **TORCH_BF16), "full", torch.device("cuda"))
    assert config.keep == "least" and make_plan(config).bytes <= 118 * GIB


def test_fit_recomputes_before_it_leaves_layers_out():
    assert fit(FULL, 200 * GIB).layers == fit(FULL, 110 * GIB).layers == 32
    small = fit(FULL, 60 * GIB)
    assert 0 < small.layers < 32
    assert needed_bytes(small) <= 60 * GIB < needed_bytes(replace(small, layers=small.layers + 1))
    assert budget_bytes(139 * GIB + 5, CONTEXT_BYTES) == 139 * GIB - CONTEXT_BYTES
    with pytest.raises(ValueError, match="GiB are free"):
        fit(FULL, 4 * GIB)
    with pytest.raises(ValueError, match="--layers 1000000000"):
        require(replace(PRESETS["bench"], layers=10**9), 60 * GIB)


# --- layers


@pytest.mark.parametrize(
    "changes",
    [
        {"weights": "fp8"},
        {"precision": "bf16"},
        pytest.param({"precision": "nvfp4_emulated"}, marks=pytest.mark.slow),
    ],
    ids=lambda changes: ",".join(f"{name}={value}" for name, value in changes.items()),
)
def test_whatever_layers_keep_the_bits_are_the_same(changes):
    everything, least = ways(TINY)
    state = with_ways([everything] * 2, **changes)
    expected = follow_eager(state, 2)
    for keeps in ((least, everything), (least, least)):
        assert difference(follow_eager(with_ways(keeps, **changes), 2), expected, state) == "", keeps


@pytest.mark.slow
def test_graphs_of_layers_that_keep_different_items_equal_eager():
    state = make(keep="1 all")
    assert len(set(state.plan.layers)) == 2
    everything = follow_eager(make(), 2)
    assert difference(follow_eager(state, 2), everything, state) == ""
    for name in ("graph_layer", "graph_fwd_bwd"):
        variant = contracts.made("llama31", name, state)
        assert difference(follow(state, variant.step, 2), everything, state) == "", name
        variant.close()


class Calls(TorchDispatchMode):
    """How often each operator runs."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func] += 1
        return func(*args, **(kwargs or {}))


def test_a_layer_keeps_and_computes_again_what_its_way_says(monkeypatch):
    state = make(precision="bf16", layers=1)
    layer, attention = state.layers[0], torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    own = {p.data_ptr() for p in [*layer.parameters(), layer.cos, layer.sin]}
    wrapper = torch.utils.checkpoint._VersionWrapper
    for way in ways(state.config)[1:]:
        kept = {}

        def note(tensor, kept=kept):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        monkeypatch.setattr(torch.utils.checkpoint, "_VersionWrapper", lambda x, note=note: wrapper(note(x)))
        with saved_tensors_hooks(note, lambda tensor: tensor):
            x = state.empty_hidden().zero_().requires_grad_()
            y = layer.keep(way, state.scaling)(x, is_first_microbatch=True)
        planned = sum(size for name, size in items(state.config).items() if name in way)
        assert sum(size for place, size in kept.items() if place not in own) == planned, way
        with Calls() as calls:
            y.sum().backward()
        # fc2 is not computed again: nothing reads its result.
        assert calls.counts[torch.ops.aten.mm.default] == 8 + 3
        assert calls.counts[attention] == 1


@pytest.mark.parametrize(
    "config, usable, fp8, layer, precision",
    [
        # A GPU without FP8 runs Transformer Engine's layers in bf16.
        ({"precision": "bf16", "weights": "bf16"}, True, False, "te", "bf16"),
        ({}, True, True, "te", "fp8"),
        ({}, True, False, "torch", "bf16"),
        ({}, False, False, "torch", "bf16"),
    ],
)
def test_a_layer_of_the_gpus_own_choice_is_noted(monkeypatch, config, usable, fp8, layer, precision):
    def engine():
        if not usable:
            raise Unsupported("Transformer Engine is not usable")
        return SimpleNamespace(is_fp8_available=lambda return_reason: (fp8, "needs 8.9"))

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(139.1 * GIB), 141 * GIB))
    monkeypatch.setattr(common.precision.transformer_engine, "usable_transformer_engine", engine)
    resolved, notes = device.resolve(replace(PRESETS["bench"], **config), "bench", torch.device("cuda"))
    assert (resolved.layer, resolved.precision) == (layer, precision)
    reason = "no FP8 on this GPU (needs 8.9)" if usable else "Transformer Engine is not usable"
    said = [] if layer == "te" else [f"plain-PyTorch layer in {precision}: {reason}"]
    assert [note for note in notes if "layer in" in note] == said
