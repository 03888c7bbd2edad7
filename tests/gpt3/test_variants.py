"""gpt3/other_variants: what is asked of Transformer Engine, and steps over a stand-in for its graphs, by its rules."""

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import ClassVar

import pytest
import torch

from common.measuring.state_hash import StateHasher
from common.training.parallel import collectives
from common.training.precision.fp8 import EmulatedLinear, TransformerEngineScaling
from common.variant import enter, leave
from common.variant_table import construct
from gpt3 import other_variants, train
from gpt3.config import PRESETS
from gpt3.pipeline import stage as pipeline
from gpt3.state import State
from gpt3.variants import VARIANTS

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
CONFIG = replace(PRESETS["tiny"], layer="torch", layers=2, microbatches=3)
FORMS = ("graph_layer_te", "graph_layer_te_slot", "graph_layer_te_default")


class Graphs:
    """make_graphed_callables of version 2.20.2 without graphs: the same checks, order, flag and sums, run eagerly.

    A layer called for a slot runs the real layer, which always adds to main_grad; weights are cast where the first
    layer called in a microbatch says so. `passes` are those that were run, as (sign, layer's place in the order of
    sample inputs), `wanted` what `_order` says of a step.
    """

    def __init__(self, state):
        self.state = state
        self.asked, self.passes, self.num_reset, self.capturing = None, [], 0, False

    def __call__(self, modules, sample_args, _order, _num_layers_per_chunk, cache_quantized_params, **flags):
        self.asked = SimpleNamespace(sample_args=sample_args, order=_order, cached=cache_quantized_params, flags=flags)
        if cache_quantized_params and flag() is None:
            Manager.quantization_state.skip_fp8_weight_update_tensor = torch.zeros(1)
        self.flag = flag()
        # graph.py, lines 232 to 295: one chunk, since the largest number in the order is 1.
        assert max(_order) == 1 and len(modules) == _num_layers_per_chunk
        self.num_slots = len(_order) // 2
        if len(sample_args) != len(modules) * self.num_slots:
            raise ValueError(f"Expected {len(modules) * self.num_slots} args tuple, but got {len(sample_args)}.")
        assert all(isinstance(args, tuple) and all(arg.requires_grad for arg in args) for args in sample_args)
        self.wanted, forward, backward = [], 0, 0
        for chunk in _order:
            layers = range(len(modules))
            if chunk > 0:
                self.wanted += [(1, forward * len(modules) + layer) for layer in layers]
                forward += 1
            else:
                self.wanted += [(-1, backward * len(modules) + layer) for layer in reversed(layers)]
                backward += 1
        self.places = [self._graphed(modules[i % len(modules)], i, i % len(modules)) for i in range(len(sample_args))]
        return tuple(self.places)

    def _update_backward_scales(self, grad):
        """After the first layer's backward, where TE does so."""
        with self.state.fp8.backward():
            pass

    def _graphed(self, module, place, layer):
        def forward(x, is_first_microbatch):
            assert type(is_first_microbatch) is bool, "graph.py, line 1162"
            assert flag() is self.flag, "it sets another flag than its graphs read"
            static = self.asked.sample_args[place][0]
            assert (x.shape, x.dtype) == (static.shape, static.dtype)
            if layer == 0:
                self.casts = is_first_microbatch
            if self.casts:
                for linear in (part for part in module.modules() if isinstance(part, EmulatedLinear)):
                    state, row = linear.forward_state, linear.forward_row + 1
                    cast = state.quantize(linear.weight.detach(), row, torch.float8_e4m3fn)
                    linear.weight_cache.copy_(cast)
            self.passes.append((1, place))
            if layer == 0:
                x.register_hook(self._update_backward_scales)
            y = module(x, is_first_microbatch=False)
            y.register_hook(lambda grad: self.passes.append((-1, place)))
            return y

        def reset():
            self.num_reset += 1

        forward.reset = reset
        return forward


class NoPool:
    """Counts nothing: on a GPU the graphs that Transformer Engine makes."""

    def __init__(self, device):
        self.graphs, self.num_replays, self.adopted, self.released = [], 0, False, False

    @contextlib.contextmanager
    def adopt(self):
        self.adopted = True
        yield

    def release(self):
        self.released = True


class Manager:
    """The lasting part of FP8GlobalStateManager: the flag by which captured layers skip the casts of their weights."""

    quantization_state = SimpleNamespace(skip_fp8_weight_update_tensor=None)


def flag():
    return Manager.quantization_state.skip_fp8_weight_update_tensor


def fake_modules(monkeypatch, graphs):
    """Install fakes of the Transformer Engine modules that gpt3/other_variants.py imports."""
    graph_module = ModuleType("transformer_engine.pytorch.graph")
    graph_module.is_graph_capturing = lambda: graphs.capturing
    graph_module.set_capture_end = lambda: setattr(graphs, "capturing", False)
    quantization = ModuleType("transformer_engine.pytorch.quantization")
    quantization.FP8GlobalStateManager = Manager
    monkeypatch.setattr(Manager.quantization_state, "skip_fp8_weight_update_tensor", None)
    names = ("transformer_engine", "transformer_engine.pytorch")
    for module in (*map(ModuleType, names), graph_module, quantization):
        monkeypatch.setitem(sys.modules, module.__name__, module)


def make(name, monkeypatch, config=CONFIG):
    state = State(config, CPU)
    graphs = Graphs(state)
    fake_modules(monkeypatch, graphs)
    monkeypatch.setattr(other_variants, "require", lambda state, asked: graphs)
    monkeypatch.setattr(other_variants, "Pool", NoPool)
    state.fp8.recipe = "the recipe"
    variant = construct(VARIANTS[name], state)
    return state, graphs, variant


def follow(state, step, count=3):
    state.reset()
    hasher = StateHasher(state.named_state())
    for index in range(count):
        step(index)
        hasher.update()
    return state.read_losses(count), state.read_grad_norms(count), hasher.hashes()


@pytest.mark.parametrize("name, precision", [*((name, "fp8") for name in FORMS), ("graph_layer_te", "fp8_current")])
def test_a_step_equals_eager_and_takes_the_slots_in_the_order_of_capture(name, precision, monkeypatch):
    state, graphs, variant = make(name, monkeypatch, replace(CONFIG, precision=precision))
    eager = follow(state, lambda index: train.eager_step(state, index))
    graphs.passes.clear()
    assert flag() is None, "the constructor leaves the flag to nobody"
    variant.enter()
    assert (flag() is not None) == (precision != "bf16")
    graphed = follow(state, variant.step)
    assert eager[:2] == graphed[:2] and (eager[2] == graphed[2]).all()
    # One slot is run by each microbatch; with a slot for each a step is the order as it was captured.
    assert graphs.passes == graphs.wanted * (3 * CONFIG.microbatches // graphs.num_slots)
    assert len(graphs.passes) == sum(variant.replays_of(index) for index in range(3))
    assert (2 * len(graphs.places), len(graphs.passes) // 3) == VARIANTS[name].promised(CONFIG)
    # What is in main_grad before a step must not matter, although every slot adds to it.
    for parameter in state.parameters:
        parameter.main_grad.fill_(1e6)
    variant.step(3)
    assert float(state.adam.grad_norm) < 100


@pytest.mark.parametrize(
    "name, num_slots, flags",
    [
        ("graph_layer_te", 3, {"clone_param_grads_on_return": False, "_reuse_graph_input_output_buffers": True}),
        ("graph_layer_te_slot", 1, {"clone_param_grads_on_return": False}),
        ("graph_layer_te_default", 3, {}),
    ],
)
def test_what_is_asked_of_transformer_engine(name, num_slots, flags, monkeypatch):
    _, graphs, variant = make(name, monkeypatch)
    asked = graphs.asked
    assert asked.order == [1, -1] * num_slots
    assert asked.cached is True
    assert asked.flags == {"enabled": True, "recipe": "the recipe", **flags}
    assert variant.pool.adopted and variant.capture.pools == [variant.pool]
    assert variant.capture.strategy.endswith("x 3") == (num_slots == 3)
    # Layers never share an input; microbatches do where buffers are reused.
    addresses = [args[0].data_ptr() for args in asked.sample_args]
    assert len(addresses) == CONFIG.layers * num_slots
    shared = flags.get("_reuse_graph_input_output_buffers", False)
    assert len(set(addresses)) == (CONFIG.layers if shared else len(addresses))
    for slot in range(num_slots):
        assert len(set(addresses[slot * CONFIG.layers :][: CONFIG.layers])) == CONFIG.layers


@pytest.mark.parametrize("name", FORMS)
def test_bf16_layers_have_no_recipe_and_no_cached_weights(name, monkeypatch):
    _, graphs, _ = make(name, monkeypatch, replace(CONFIG, precision="bf16"))
    assert graphs.asked.cached is False
    assert (graphs.asked.flags["enabled"], graphs.asked.flags["recipe"]) == (False, None)


@pytest.mark.parametrize("name", FORMS)
def test_closing_resets_every_slot(name, monkeypatch):
    _, graphs, variant = make(name, monkeypatch)
    variant.close()
    assert graphs.num_reset == len(graphs.places) and variant.pool.released


def test_variants_take_turns_on_one_state(monkeypatch):
    """Each with the flag of its own graphs, while eager steps and other captures see none."""
    first = make("graph_layer_te", monkeypatch)
    state = first[0]
    others = []
    for name in ("graph_layer_te_slot", "graph_layer_te_default"):
        graphs = Graphs(state)
        monkeypatch.setattr(other_variants, "require", lambda state, asked: graphs)  # noqa: B023
        others.append((graphs, construct(VARIANTS[name], state)))
    own = construct(VARIANTS["graph_layer"], state)
    expected = follow(state, lambda index: train.eager_step(state, index))
    made = [first[2], *(variant for _, variant in others), own]
    for _ in range(2):
        for variant in made:
            enter(variant)
            found = follow(state, variant.step)
            leave(variant)
            assert found[:2] == expected[:2] and (found[2] == expected[2]).all()
            assert flag() is None and not any(hasattr(each, "grad_added_to_main_grad") for each in state.overwritten)
            after = follow(state, lambda index: train.eager_step(state, index))
            assert after[:2] == expected[:2] and (after[2] == expected[2]).all()
    flags = {first[1].flag, *(graphs.flag for graphs, _ in others)}
    assert len(flags) == 3 and None not in flags
    for variant in made:
        # A run that ends leaves what it has left already.
        leave(variant)
        variant.close()


@pytest.mark.parametrize("name", FORMS)
def test_a_capture_that_fails_leaves_nothing(name, monkeypatch):
    state = State(CONFIG, CPU)
    graphs = Graphs(state)
    fake_modules(monkeypatch, graphs)
    layer_class = type(state.layers[0])
    call = layer_class.__call__

    def fails(modules, *arguments, **flags):
        graphs.capturing = True
        Manager.quantization_state.skip_fp8_weight_update_tensor = torch.zeros(1)
        type(modules[0]).__call__ = lambda self, *arguments: None
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(other_variants, "require", lambda state, asked: fails)
    monkeypatch.setattr(other_variants, "Pool", NoPool)
    state.fp8.recipe = "the recipe"
    with pytest.raises(torch.OutOfMemoryError):
        construct(VARIANTS[name], state)
    assert layer_class.__call__ is call and not graphs.capturing and flag() is None
    assert not any(hasattr(each, "grad_added_to_main_grad") for each in state.overwritten)


def test_the_default_marks_weights_and_drops_the_placeholders_outside_of_captures(monkeypatch):
    """A weight without the mark would have no gradient to clone; one that kept it would hold its memory."""
    state, graphs, variant = make("graph_layer_te_default", monkeypatch)
    weight = state.overwritten[0]
    assert len(state.overwritten) == 4 * CONFIG.layers
    assert not any(hasattr(each, "grad_added_to_main_grad") for each in state.overwritten)
    variant.enter()
    assert all(hasattr(each, "grad_added_to_main_grad") for each in state.overwritten)

    def returns_a_gradient():
        weight.grad = None
        (weight.float().sum() * 1.0).backward()
        return weight.grad is not None

    graphs.capturing = True
    assert returns_a_gradient(), "Transformer Engine finds it in the capture"
    graphs.capturing = False
    assert not returns_a_gradient()
    variant.leave()
    assert not any(hasattr(each, "grad_added_to_main_grad") for each in state.overwritten)
    assert returns_a_gradient(), "the hook is gone"
    for name in ("graph_layer_te", "graph_layer_te_slot"):
        state, _, _ = make(name, monkeypatch)
        assert not any(hasattr(each, "grad_added_to_main_grad") for each in state.overwritten)


# --- over a stage of a pipeline


class StageGraphs:
    """As `Graphs` for several chunks: a callable for each chunk, microbatch and layer, in this order.

    Which layers cast their weights is each call's own flag here; on a GPU it is set for a whole chunk and microbatch.
    """

    def __init__(self):
        self.asked, self.passes, self.num_reset = None, [], 0

    def __call__(self, modules, sample_args, _order, _num_layers_per_chunk, **flags):
        self.asked = SimpleNamespace(sample_args=sample_args, order=_order, flags=flags)
        # graph.py of version 2.20.2.
        num_chunks = max(_order)
        num_microbatches = len(_order) // num_chunks // 2
        assert num_chunks * num_microbatches * 2 == len(_order)
        assert len(modules) == num_chunks * _num_layers_per_chunk
        assert len(sample_args) == len(modules) * num_microbatches
        size = _num_layers_per_chunk
        return tuple(
            self._graphed(modules[chunk * size + layer], (chunk + 1, microbatch, layer), layer == size - 1)
            for chunk in range(num_chunks)
            for microbatch in range(num_microbatches)
            for layer in range(size)
        )

    def _graphed(self, module, place, is_last):
        def forward(x, is_first_microbatch):
            if is_first_microbatch:
                for linear in (part for part in module.modules() if isinstance(part, EmulatedLinear)):
                    state, row = linear.forward_state, linear.forward_row + 1
                    linear.weight_cache.copy_(state.quantize(linear.weight.detach(), row, torch.float8_e4m3fn))
            y = module(x, is_first_microbatch=False)
            if place[2] == 0:
                self.passes.append((place[0], place[1]))
            if is_last:
                y.register_hook(lambda grad: self.passes.append((-place[0], place[1])))
            return y

        def reset():
            self.num_reset += 1

        forward.reset = reset
        return forward


@pytest.mark.parametrize("changes", [{"chunks": 2}, {"pp": 2, "chunks": 2, "pp_rank": 0, "layers": 8}])
@pytest.mark.parametrize("precision", ["fp8", "fp8_current", "bf16"])
def test_a_stage_equals_eager_in_the_order_of_its_schedule(changes, precision, monkeypatch):
    state = State(replace(CONFIG, **{"layers": 4, "microbatches": 4, "precision": precision, **changes}), CPU)
    graphs = StageGraphs()
    fake_modules(monkeypatch, graphs)
    monkeypatch.setattr(other_variants, "require", lambda state, asked: graphs)
    monkeypatch.setattr(other_variants, "Pool", NoPool)
    state.fp8.recipe = "the recipe"
    variant = other_variants.StageAsSubmitted(state)
    assert flag() is None
    assert graphs.asked.order == [step for step, _ in state.steps]
    fp8 = precision != "bf16"
    assert graphs.asked.flags == {
        "enabled": fp8,
        "recipe": "the recipe" if fp8 else None,
        "amax_reduction_group": None,
        "cache_quantized_params": fp8,
        "clone_param_grads_on_return": False,
        "_reuse_graph_input_output_buffers": True,
    }
    # Transformer Engine finds out itself which slots may share memory.
    assert len({args[0].data_ptr() for args in graphs.asked.sample_args}) == 4 * len(state.layers)
    eager = follow(state, lambda index: pipeline.eager_step(state, index))
    graphs.passes.clear()
    variant.enter()
    graphed = follow(state, variant.step)
    assert eager[:2] == graphed[:2] and (eager[2] == graphed[2]).all()
    assert graphs.passes == state.steps * 3
    variant.leave()
    assert variant.replays_of(0) == 2 * 4 * len(state.layers) == VARIANTS["graph_layer_te"].promised(state.config)[1]
    variant.close()
    assert graphs.num_reset == len(graphs.asked.sample_args) and variant.pool.released


class FakeManager:
    """FP8GlobalStateManager's part in a region of layers, with a log of what was asked."""

    log: ClassVar = []
    skip = None

    @classmethod
    def is_first_fp8_module(cls):
        cls.log.append("first module taken")

    @classmethod
    def get_skip_fp8_weight_update_tensor(cls):
        return cls.skip

    @classmethod
    def set_skip_fp8_weight_update_tensor(cls, skip):
        cls.log.append(f"skip {skip}")

    @classmethod
    def reduce_and_update_fp8_tensors(cls, forward):
        cls.log.append(f"update {'forward' if forward else 'backward'}")


class FakeRegion:
    def __enter__(self):
        FakeManager.log.append("enter")

    def __exit__(self, *error):
        FakeManager.log.append(f"exit, gradients {torch.is_grad_enabled()}")


def test_scales_of_a_stage_are_updated_once_a_step(monkeypatch):
    """Not where a region ends: Transformer Engine updates there where gradients are recorded."""
    quantization = ModuleType("transformer_engine.pytorch.quantization")
    quantization.FP8GlobalStateManager = FakeManager
    common = ModuleType("transformer_engine.common")
    common.recipe = SimpleNamespace(DelayedScaling=SimpleNamespace, Format=SimpleNamespace(HYBRID="hybrid"))
    names = ("transformer_engine", "transformer_engine.pytorch")
    for module in (*map(ModuleType, names), quantization, common):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(FakeManager, "log", [])
    scaling = TransformerEngineScaling([], group=collectives.ALONE)
    assert scaling.recipe.reduce_amax is False and TransformerEngineScaling([]).recipe.reduce_amax is True
    monkeypatch.setattr(TransformerEngineScaling, "_autocast", lambda self: FakeRegion())
    region = ["enter", "first module taken", "exit, gradients False"]
    with scaling.layers(first=True):
        assert torch.is_grad_enabled()
    assert FakeManager.log == region
    # Where graphs of Transformer Engine exist, a flag on the device says whether they cast the weights.
    monkeypatch.setattr(FakeManager, "skip", torch.zeros(1))
    for first in (True, False):
        FakeManager.log.clear()
        with scaling.layers(first=first):
            pass
        assert FakeManager.log == [*region[:2], f"skip {not first}", region[2]]
    FakeManager.log.clear()
    scaling.update()
    assert FakeManager.log == ["update forward", "update backward"]


# --- the real one


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*FORMS, "graph_layer_optimizer"])
def test_on_a_gpu_twenty_steps_equal_eager_bit_for_bit(name, tmp_path):
    """--parity counts graphs and replays, too, and fails where they are not the promised ones."""
    if name in FORMS and importlib.util.find_spec("transformer_engine") is None:
        pytest.skip("no Transformer Engine: make te")
    settings = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
    hashes = []
    for variant in ("eager", name):
        path = tmp_path / f"{variant}.json"
        flags = ("--preset", "tiny", "--variant", variant, "--microbatches", "4", "--parity", "--record", str(path))
        command = [sys.executable, "-m", "gpt3.train", *flags]
        answer = subprocess.run(
            command, cwd=ROOT, env=os.environ | settings, capture_output=True, text=True, timeout=300
        )
        assert answer.returncode == 0, answer.stdout[-2000:] + answer.stderr[-2000:]
        result = json.loads(path.read_text())
        assert result["status"] == "pass", answer.stdout[-500:]
        hashes.append(result["state_hashes"])
    assert len(set(hashes[0])) == 20 and hashes[0] == hashes[1]
