"""gpt3/other_variants: what is asked of Transformer Engine, and steps over a stand-in for its graphs, by its rules."""

import contextlib
import functools
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import ClassVar

import pytest
import torch

from common import variant as common_variant
from common.capture.pool import Pool
from common.training.parallel import collectives
from common.training.precision.transformer_engine import TransformerEngineScaling
from common.training.schedule import numbered
from common.variant import enter, leave
from gpt3 import other_variants, train
from gpt3.config import PRESETS
from gpt3.emulated_fp8 import EmulatedLinear
from gpt3.pipeline import stage as pipeline
from gpt3.state import State
from tests.helpers import contracts
from tests.helpers.followed import difference, follow

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
CONFIG = replace(PRESETS["tiny"], layer="torch", layers=2, microbatches=3)
REUSED = {"clone_param_grads_on_return": False, "_reuse_graph_input_output_buffers": True}


class Graphs:
    """make_graphed_callables of version 2.20.2 without graphs: the same checks, order, flag and sums, run eagerly.

    A callable for each chunk, microbatch (slot) and layer, in this order. It runs the real layer, which always adds to
    main_grad; weights are cast where a chunk's first layer says so. `passes` are those that were run, as (step, slot).
    """

    def __init__(self, state):
        self.state = state
        self.asked, self.passes, self.num_reset, self.capturing = None, [], 0, False

    def __call__(self, modules, sample_args, _order, _num_layers_per_chunk, cache_quantized_params, **flags):
        self.asked = SimpleNamespace(sample_args=sample_args, order=_order, cached=cache_quantized_params, flags=flags)
        if cache_quantized_params and flag() is None:
            Manager.quantization_state.skip_fp8_weight_update_tensor = torch.zeros(1)
        self.flag = flag()
        # graph.py, lines 232 to 295.
        num_chunks, size = max(_order), _num_layers_per_chunk
        num_slots = len(_order) // num_chunks // 2
        assert len(modules) == num_chunks * size and len(sample_args) == len(modules) * num_slots
        assert all(isinstance(args, tuple) and all(arg.requires_grad for arg in args) for args in sample_args)
        self.places = [
            self._graphed(modules[chunk * size + layer], (chunk + 1, slot), layer, layer == size - 1)
            for chunk in range(num_chunks)
            for slot in range(num_slots)
            for layer in range(size)
        ]
        return tuple(self.places)

    def _update_backward_scales(self, grad):
        with self.state.fp8.backward():
            pass

    def _graphed(self, module, place, layer, is_last):
        def forward(x, is_first_microbatch):
            assert type(is_first_microbatch) is bool, "graph.py, line 1162"
            assert flag() is self.flag, "it sets another flag than its graphs read"
            if layer == 0:
                self.casts = is_first_microbatch
                self.passes.append(place)
                if not self.state.config.staged:
                    # After the first layer's backward, where TE does so.
                    x.register_hook(self._update_backward_scales)
            if self.casts:
                for linear in (part for part in module.modules() if isinstance(part, EmulatedLinear)):
                    state, row = linear.forward_state, linear.forward_row + 1
                    cast = state.quantize(linear.weight.detach(), row, torch.float8_e4m3fn)
                    linear.weight_cache.copy_(cast)
            y = module(x, is_first_microbatch=False)
            if is_last:
                y.register_hook(lambda grad: self.passes.append((-place[0], place[1])))
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
    install(monkeypatch, graph_module, quantization)


def install(monkeypatch, *modules):
    for module in (*map(ModuleType, ("transformer_engine", "transformer_engine.pytorch")), *modules):
        monkeypatch.setitem(sys.modules, module.__name__, module)


def put_in(monkeypatch, state, graphs):
    """Make variants of `state` by `graphs` in the place of Transformer Engine."""
    fake_modules(monkeypatch, graphs)
    monkeypatch.setattr(other_variants, "require", lambda state: graphs)
    monkeypatch.setattr(common_variant, "Pool", NoPool)
    state.fp8.recipe = "the recipe"


def construct(name, state):
    """A variant that is not entered."""
    return contracts.model_of("gpt3", state).make(name)


def make(name, monkeypatch, config=CONFIG):
    state = State(config, CPU)
    graphs = Graphs(state)
    put_in(monkeypatch, state, graphs)
    made = construct(name, state)
    assert flag() is None, "the constructor leaves the flag to nobody"
    return state, graphs, made


def require_eager(state, variant, step):
    """Three steps are eager's, bit for bit; `step` is the eager one."""
    eager = follow(state, lambda index: step(state, index), 3)
    variant.enter()
    assert (flag() is not None) == (state.config.precision != "bf16")
    assert difference(follow(state, variant.step, 3), eager, state) == ""
    # What is in main_grad before a step must not matter, although every slot adds to it.
    for parameter in state.parameters:
        parameter.main_grad.fill_(1e6)
    variant.step(3)
    assert float(state.adam.grad_norm) < 100
    variant.leave()
    assert flag() is None


@pytest.mark.parametrize("precision", ["fp8", "bf16"])
def test_a_step_equals_eager_and_takes_the_slots_in_the_order_of_capture(precision, monkeypatch):
    state, graphs, variant = make("graph_layer_te", monkeypatch, replace(CONFIG, precision=precision))
    asked, fp8, num_slots = graphs.asked, precision != "bf16", CONFIG.microbatches
    assert asked.order == [1, -1] * num_slots and asked.cached is fp8
    assert asked.flags == {"enabled": fp8, "recipe": "the recipe" if fp8 else None, **REUSED}
    assert variant.pool.adopted and variant.capture.pools == [variant.pool]
    # Layers never share an input, microbatches do.
    addresses = [args[0].data_ptr() for args in asked.sample_args]
    assert len(addresses) == CONFIG.layers * num_slots and len(set(addresses)) == CONFIG.layers
    assert len(set(addresses[: CONFIG.layers])) == CONFIG.layers
    require_eager(state, variant, train.eager_step)
    # Four steps, each in the order of the capture.
    assert graphs.passes == numbered(asked.order) * 4
    replays = len(graphs.passes) * CONFIG.layers // 4
    assert variant.replays_of(0) == replays
    assert (2 * len(graphs.places), replays) == contracts.model_of("gpt3", state).promises("graph_layer_te")
    variant.close()
    assert graphs.num_reset == len(graphs.places) and variant.pool.released


def test_variants_take_turns_on_one_state(monkeypatch):
    """Each with the flag of its own graphs, while eager steps and other captures see none."""
    state, graphs, variant = make("graph_layer_te", monkeypatch)
    other = Graphs(state)
    monkeypatch.setattr(other_variants, "require", lambda state: other)
    made = [variant, construct("graph_layer_te", state)]
    assert graphs.flag is not other.flag and None not in (graphs.flag, other.flag)
    monkeypatch.setattr(common_variant, "Pool", Pool)
    made.append(construct("graph_layer", state))

    def eager(index):
        train.eager_step(state, index)

    expected = follow(state, eager, 2)
    for variant in made * 2:
        enter(variant)
        assert difference(follow(state, variant.step, 2), expected, state) == ""
        leave(variant)
        assert flag() is None
    assert difference(follow(state, eager, 2), expected, state) == ""
    for variant in made:
        # A run that ends leaves what it has left already.
        leave(variant)
        variant.close()


def test_a_capture_that_fails_leaves_nothing(monkeypatch):
    state = State(CONFIG, CPU)
    graphs = Graphs(state)
    layer_class = type(state.layers[0])
    call = layer_class.__call__

    def fails(modules, *arguments, **flags):
        graphs.capturing = True
        Manager.quantization_state.skip_fp8_weight_update_tensor = torch.zeros(1)
        type(modules[0]).__call__ = lambda self, *arguments: None
        raise torch.OutOfMemoryError("no memory")

    put_in(monkeypatch, state, graphs)
    monkeypatch.setattr(other_variants, "require", lambda state: fails)
    with pytest.raises(torch.OutOfMemoryError):
        construct("graph_layer_te", state)
    assert layer_class.__call__ is call and not graphs.capturing and flag() is None


# --- over a stage of a pipeline


@pytest.mark.parametrize(
    "precision, changes",
    [("fp8", {}), ("bf16", {"pp": 2, "pp_rank": 0, "layers": 8}), ("fp8", {"pp": 2, "pp_rank": 1})],
)
def test_a_stage_equals_eager_in_the_order_of_its_schedule(precision, changes, monkeypatch):
    config = replace(CONFIG, **{"layers": 4, "microbatches": 4, "chunks": 2, "precision": precision, **changes})
    state, graphs, variant = make("graph_layer_te", monkeypatch, config)
    fp8 = precision != "bf16"
    assert graphs.asked.order == [step for step, _ in state.steps] and graphs.asked.cached is fp8
    recipe = "the recipe" if fp8 else None
    assert graphs.asked.flags == {"enabled": fp8, "recipe": recipe, "amax_reduction_group": None, **REUSED}
    # Transformer Engine finds out itself which slots may share memory.
    assert len({args[0].data_ptr() for args in graphs.asked.sample_args}) == 4 * len(state.layers)
    require_eager(state, variant, pipeline.eager_step)
    assert graphs.passes == state.steps * 4
    replays = 2 * 4 * len(state.layers)
    assert variant.replays_of(0) == replays
    assert contracts.model_of("gpt3", state).promises("graph_layer_te") == (2 * len(variant.callables), replays)
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
    install(monkeypatch, quantization, common)
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
@pytest.mark.parametrize("name", ["graph_layer_te", "graph_layer_optimizer"])
def test_on_a_gpu_twenty_steps_equal_eager_bit_for_bit(name):
    """--parity counts graphs and replays, too, and fails where they are not the promised ones."""
    if name == "graph_layer_te" and importlib.util.find_spec("transformer_engine") is None:
        pytest.skip("no Transformer Engine: make te")
    eager, graphs = hashes_of("eager"), hashes_of(name)
    assert len(set(eager)) == 20 and eager == graphs


@functools.cache
def hashes_of(variant):
    """Hashes of the state after each of 20 steps, by hand; eager's are asked for by each test."""
    settings = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "record.json"
        flags = ("--preset", "tiny", "--variant", variant, "--microbatches", "4", "--parity", "--record", str(path))
        command = [sys.executable, "-m", "gpt3.train", *flags]
        answer = subprocess.run(
            command, cwd=ROOT, env=os.environ | settings, capture_output=True, text=True, timeout=300
        )
        assert answer.returncode == 0, answer.stdout[-2000:] + answer.stderr[-2000:]
        result = json.loads(path.read_text())
    assert result["status"] == "pass", answer.stdout[-500:]
    return result["state_hashes"]
