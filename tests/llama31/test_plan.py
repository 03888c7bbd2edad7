"""llama31/plan and recompute: items, what fits, and layers that keep what is planned and give the same bits."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

import common.training.precision.fp8
from common.config import Arguments, Run
from common.training.memory_plan import GIB
from common.variant import Unsupported
from llama31 import workload
from llama31.config import PRESETS, num_parameters
from llama31.memory.plan import (
    CONTEXT_BYTES,
    budget_bytes,
    fit,
    fixed_bytes,
    items,
    make_plan,
    needed_bytes,
    require,
    state_bytes,
    ways,
)
from llama31.variants import VARIANTS
from tests.helpers.followed import difference, follow
from tests.helpers.llama31_case import TINY, follow_eager, make
from tests.helpers.made import made

FULL, BENCH = (replace(PRESETS[name], layer="te") for name in ("full", "bench"))


def with_ways(names, **changes):
    """A state whose layers run in the ways of these names."""
    state = make(**changes)
    found = {way.name: way for way in ways(state.config)}
    state.calls = [
        layer.keep(found[name], state.scaling) if found[name].recomputes else layer
        for layer, name in zip(state.layers, names, strict=True)
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


def test_ways_are_those_that_layers_can_run_in():
    assert [way.name for way in ways(FULL)] == [
        "x attention mlp rest",
        "x attention rest",
        "x mlp rest",
        "x rest",
        "x",
    ]
    plain = ways(TINY)
    # All subsets of four operators' results, and everything.
    assert len(plain) == 17 and plain[0].recomputes == () and plain[-1].name == "x"
    stored = ways(replace(TINY, fc1_store="fp8"))
    assert all("fc1" not in way.keeps for way in stored) and sum("fc1" in way.keeps_fp8 for way in stored) == 9


def test_a_te_layer_keeps_the_inputs_of_its_gemms_and_norms():
    """8B, MiB: two residuals, q k v, attention's output and its softmax statistics, fc1's output, and inputs of GEMMs,
    in FP8 a byte each, fc1's with its transposed copy; in bf16 the projection reads attention's output itself."""
    fp8, bf16 = (items(replace(FULL, precision=name, weights=name, layer="te")) for name in ("fp8", "bf16"))
    common = 64 + 64 + 96 + 64 + 1 + 448
    assert sum(item.bytes for item in fp8) == (common + 32 + 32 + 2 * 32 + 112) * 2**20
    assert sum(item.bytes for item in bf16) == (common + 64 + 64 + 224) * 2**20


def test_a_stage_keeps_its_microbatches_in_flight():
    one, four = (ways(replace(BENCH, pp=pp)) for pp in (1, 4))
    assert [4 * way.bytes for way in one] == [way.bytes for way in four]
    assert sum(item.bytes for item in items(BENCH)) > 4096 * 16384 * 8
    # Interleaved, four stages of two chunks hold 11 of their passes, each of half of the layers.
    (interleaved, *_) = ways(replace(BENCH, pp=4, chunks=2, layers=8))
    assert interleaved.bytes == 6 * one[0].bytes


def test_memory_is_filled_with_what_saves_most():
    assert make_plan(FULL, 200 * GIB).counts == {"x attention mlp rest": 32}
    tight = make_plan(FULL, 110 * GIB)
    assert 109 * GIB < tight.bytes <= 110 * GIB and len(tight.counts) > 1
    # A millisecond of the MLP takes more bytes than one of attention and its projections.
    assert tight.items()["mlp"]["recomputed"] > tight.items()["attention"]["recomputed"]
    with pytest.raises(ValueError, match=r"--memory-gib [\d.]+ is enough"):
        make_plan(FULL, 100 * GIB)


def test_data_ranks_share_masters_and_moments_with_zero():
    alone = replace(FULL, main_grad="fp32", moments="fp32", weights="bf16")
    split = replace(alone, zero=True)
    # A master and two moments, in FP32.
    shared = 12 * num_parameters(FULL)
    assert fixed_bytes(alone, dp=8) == fixed_bytes(alone) == fixed_bytes(split)
    assert fixed_bytes(split) - fixed_bytes(split, dp=8) == pytest.approx(shared * 7 / 8, rel=1e-6)
    assert fit(split, 137 * GIB).layers < 32 == fit(split, 137 * GIB, dp=8).layers
    assert make_plan(split, 137 * GIB, dp=8).bytes <= 137 * GIB
    with pytest.raises(ValueError, match="--memory-gib"):
        make_plan(split, 137 * GIB)


def test_all_ranks_plan_for_the_least_memory_that_one_has(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(139.1 * GIB), 141 * GIB))
    monkeypatch.setattr(workload, "of_all_ranks", lambda value: [value, int(120.9 * GIB)])
    config = replace(FULL, layer="torch", precision="bf16", weights="bf16")
    args = Arguments(config=config, run=Run(preset="full", variant="eager"))
    assert workload.resolve(args, torch.device("cuda"))[0].config.memory_gib == 118.0


def test_fit_recomputes_before_it_leaves_layers_out():
    assert fit(FULL, 200 * GIB).layers == fit(FULL, 110 * GIB).layers == 32
    small = fit(FULL, 60 * GIB)
    assert 0 < small.layers < 32
    assert needed_bytes(small) <= 60 * GIB < needed_bytes(replace(small, layers=small.layers + 1))
    assert budget_bytes(139 * GIB + 5) == 139 * GIB - CONTEXT_BYTES
    with pytest.raises(ValueError, match="GiB are free"):
        fit(FULL, 4 * GIB)
    with pytest.raises(ValueError, match="--layers 1000000000"):
        require(replace(PRESETS["bench"], layers=10**9), 60 * GIB)


# --- layers


@pytest.mark.parametrize(
    "changes",
    [
        {"fc1_store": "fp8", "weights": "fp8"},
        {"precision": "bf16"},
        pytest.param({"precision": "nvfp4_emulated"}, marks=pytest.mark.slow),
    ],
    ids=lambda changes: ",".join(f"{name}={value}" for name, value in changes.items()),
)
def test_whatever_layers_keep_the_bits_are_the_same(changes):
    found = [way.name for way in ways(replace(TINY, **changes))]
    state = with_ways([found[0]] * 2, **changes)
    expected = follow_eager(state, 2)
    for names in zip(found[1::2], found[2::2], strict=True):
        assert difference(follow_eager(with_ways(names, **changes), 2), expected, state) == "", names


def test_graphs_of_a_plan_of_several_ways_equal_eager():
    low = needed_bytes(TINY)
    config = replace(TINY, memory_gib=(low + 0.6 * (make_plan(TINY).bytes - low)) / GIB)
    state = make(memory_gib=config.memory_gib)
    assert len(state.plan.counts) > 1 and any(way.recomputes for way in state.plan.configurations.values())
    everything = follow_eager(make(), 2)
    assert difference(follow_eager(state, 2), everything, state) == ""
    for name in ("graph_layer", "graph_fwd_bwd"):
        variant = made(VARIANTS, name, state)
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
        planned = sum(item.bytes for item in items(state.config) if item.name in way.keeps)
        assert sum(size for place, size in kept.items() if place not in own) == planned, way.name
        with Calls() as calls:
            y.sum().backward()
        again = {"qkv", "residual", "fc1"} & set(way.recomputes)
        assert calls.counts[torch.ops.aten.mm.default] == 8 + len(again), way.name
        assert calls.counts[attention] == ("attention" in way.recomputes)


def test_fc1_in_fp8_is_rounded_before_swiglu():
    losses = [follow_eager(make(precision="bf16", fc1_store=store), 3)[0] for store in ("bf16", "fp8")]
    assert losses[0] != losses[1] and losses[0] == pytest.approx(losses[1], rel=1e-2)


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
    monkeypatch.setattr(common.training.precision.fp8, "usable_transformer_engine", engine)
    args = Arguments(config=replace(PRESETS["bench"], **config), run=Run(preset="bench", variant="eager"))
    resolved, notes = workload.resolve(args, torch.device("cuda"))
    assert (resolved.config.layer, resolved.config.precision) == (layer, precision)
    reason = "no FP8 on this GPU (needs 8.9)" if usable else "Transformer Engine is not usable"
    said = [] if layer == "te" else [f"plain-PyTorch layer in {precision}: {reason}"]
    assert [note for note in notes if "layer in" in note] == said
