"""llama2_lora/modules: the plain twin against lean layers, graphs against eager, Transformer Engine on a GPU."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from common import memory_plan
from common.memory_plan import GIB
from common.variant import Unsupported
from llama2_lora import modules, train
from llama2_lora import plan as plans
from llama2_lora.config import PRESETS
from llama2_lora.modules import ModuleStack, plain_operators
from llama2_lora.scaling import Formats
from llama2_lora.state import State
from llama2_lora.trainable import Adapters
from tests.llama2_lora_case import (
    CPU,
    GRAPHED,
    TINY,
    assert_equal,
    follow,
    follow_eager,
    inputs_of,
    make_stack,
    run_step,
    with_fields,
)

PLAIN = replace(TINY, layer="torch")


@pytest.mark.parametrize(
    "changes",
    [
        {"precision": "bf16", "documents": "separate"},
        {"precision": "fp8", "fc1_store": "bf16"},
        {"precision": "fp8_current", "documents": "separate"},
        {"precision": "nvfp4_emulated"},
    ],
    ids=lambda changes: changes["precision"],
)
def test_the_plain_twin_trains_as_lean_layers_do(changes):
    """Without dropout, whose masks differ. They round in other places: norms, adapters, fc1 that lean keeps in FP8."""
    config = replace(PLAIN, dropout=0.0, **changes)
    twin, lean = (State(config, CPU, kind) for kind in ("torch", "lean"))
    (losses, norms, _), (lean_losses, lean_norms, _) = follow_eager(twin, 5), follow_eager(lean, 5)
    assert losses == pytest.approx(lean_losses, rel=2e-3)
    assert norms == pytest.approx(lean_norms, rel=0.05)
    assert len(set(losses)) == 5
    assert twin.evaluate() == pytest.approx(lean.evaluate(), rel=2e-3)


@pytest.mark.parametrize("lengths", [None, [10, 1, 30, 23]], ids=["whole", "separate"])
def test_the_plain_twins_gradients_are_the_same_in_fp32(lengths):
    config = with_fields(precision="bf16", dropout=0.0, documents="separate" if lengths else "whole")
    lean = make_stack(config, main=torch.float32, inputs=inputs_of(config, lengths=lengths))
    loss, grads = run_step(lean)
    adapters = Adapters(config, torch.float32, CPU)
    adapters.values.copy_(lean.adapters.values)
    operators = plain_operators(config, lean.formats, CPU)
    twin = ModuleStack("torch", config, lean.weights, adapters, lean.inputs, operators)
    twin_loss, twin_grads = run_step(twin)
    assert float(twin_loss) == pytest.approx(float(loss), rel=1e-6)
    assert float((twin_grads - grads).norm() / grads.norm()) < 1e-5


@pytest.mark.parametrize("precision", ["fp8", "bf16"])
def test_graphs_of_modules_equal_eager_bit_for_bit(precision):
    state = State(replace(PLAIN, precision=precision), CPU, "torch")
    eager = follow_eager(state, 4)
    assert_equal(follow_eager(state, 4), eager, state)
    for name in GRAPHED:
        variant = train.MAKE_VARIANT[name](state)
        assert_equal(follow(state, variant.step, 4), eager, state)
        before = [tensor.clone() for _, tensor in state.named_state()]
        assert state.evaluate() == state.evaluate()
        assert all(map(torch.equal, before, (tensor for _, tensor in state.named_state())))
        assert_equal(follow(state, variant.step, 4), eager, state)
        variant.close()


def test_no_gradient_is_kept_from_the_step_before():
    state, grads = State(PLAIN, CPU, "torch"), []
    for _ in range(2):
        torch.manual_seed(0)
        state.load_window(0)
        train.forward_and_backward(state)
        grads.append(state.adapters.grads.clone())
    assert torch.equal(*grads) and grads[0].norm() > 0
    # Autograd adds to the flat buffer, not to one of its own.
    for layer in state.stack.layers:
        assert layer.qkv_adapter.a.grad.untyped_storage()._cdata == state.adapters.grads.untyped_storage()._cdata


@pytest.mark.parametrize("name", ["graph_te", "compile", "reduce_overhead"])
def test_what_cannot_run_here_says_so_in_one_line(name):
    state = State(TINY, CPU, "lean")
    with pytest.raises(Unsupported, match="GPU|Transformer Engine's layers") as error:
        train.MAKE_VARIANT[name](state)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("precision", ["fp8", "bf16"])
def test_layers_that_run_again_train_as_those_that_keep_all(monkeypatch, precision):
    """torch's checkpoint in the place of Transformer Engine's, around the plain twin with its dropout."""
    runs = []

    def run_again(layer, x, use_reentrant):
        runs.append(layer)
        return checkpoint(layer, x, use_reentrant=use_reentrant)

    monkeypatch.setattr(modules, "transformer_engine", lambda: SimpleNamespace(checkpoint=run_again))
    state = State(replace(PLAIN, precision=precision), CPU, "torch")
    kept = follow_eager(state, 4)
    made = state.stack
    state.stack = ModuleStack(
        "torch", state.config, made.weights, made.adapters, made.inputs,
        plain_operators(state.config, Formats.of(state.config), CPU), again=2,
    )  # fmt: skip
    assert_equal(follow_eager(state, 4), kept, state)
    assert runs == list(state.stack.layers[:2]) * 4


@pytest.mark.parametrize("name", ["graph", "one_graph", "graph_te"])
def test_layers_that_run_again_are_not_captured(name):
    state = SimpleNamespace(kind="te", config=PRESETS["full"], stack=SimpleNamespace(again=48))
    with pytest.raises(Unsupported, match="^48 of 80 layers of Transformer Engine run again .* lower --sequence"):
        train.MAKE_VARIANT[name](state)


def test_transformer_engines_layers_need_a_gpu():
    with pytest.raises(Unsupported, match="need a GPU"):
        State(TINY, CPU, "te")


@pytest.fixture
def gpu():
    """A side stream, as a run has one."""
    torch.cuda.set_stream(torch.cuda.Stream())
    return torch.device("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("kind, names", [("lean", GRAPHED), ("te", ("graph", "one_graph", "graph_te"))])
def test_gpu_graphs_equal_eager_bit_for_bit(gpu, kind, names):
    config = replace(PRESETS["slice"], layers=2, batches=3, vocab=1024, lr=1e-2, memory_gib=20.0)
    torch.use_deterministic_algorithms(True)
    try:
        state = State(config, gpu, kind)
        # Transformer Engine makes some of its scales in the first step.
        train.eager_step(state, 0)
        eager = follow_eager(state, 6)
        assert_equal(follow_eager(state, 6), eager, state)
        for name in names:
            variant = train.MAKE_VARIANT[name](state)
            assert_equal(follow(state, variant.step, 6), eager, state)
            variant.close()
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
def test_gpu_transformer_engine_trains_as_lean_layers_do(gpu):
    """At 1e-4: from random weights higher learning rates blow any difference up, 1e-2 to 8 % in the third step."""
    config = replace(PRESETS["slice"], layers=4, batches=3, vocab=1024, lr=1e-4, dropout=0.0, memory_gib=20.0)
    te, lean = (follow_eager(State(config, gpu, kind), 8) for kind in ("te", "lean"))
    # Measured on an H200: losses within 0.3 %, norms within 0.35 %.
    assert te[0] == pytest.approx(lean[0], rel=5e-3)
    assert te[1] == pytest.approx(lean[1], rel=1e-2)


@pytest.mark.gpu
def test_gpu_layers_that_run_again_give_the_same_bits(gpu):
    config = replace(PRESETS["slice"], layers=4, batches=3, vocab=1024, lr=1e-2, memory_gib=20.0)
    torch.use_deterministic_algorithms(True)
    try:
        state = State(config, gpu, "te")
        train.eager_step(state, 0)
        kept = follow_eager(state, 6)
        way = state.plan.of(0)
        less = 2 * (way.bytes - min(each.bytes for each in memory_plan.configurations(plans.te_items(config))))
        tight = State(replace(config, memory_gib=(state.plan.bytes - less) / GIB + 1e-3), gpu, "te")
        assert (state.stack.again, tight.stack.again) == (0, 2)
        train.eager_step(tight, 0)
        assert_equal(follow_eager(tight, 6), kept, tight)
        with pytest.raises(Unsupported, match="2 of 4 layers"):
            train.MAKE_VARIANT["graph_te"](tight)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
def test_gpu_transposes_are_freed_after_each_gemm(gpu):
    config = replace(PRESETS["slice"], layers=2, batches=3, vocab=1024, memory_gib=20.0)
    state = State(config, gpu, "te")
    follow_eager(state, 2)
    weights = [p for p in state.stack.layers.parameters() if hasattr(p, "_transpose")]
    assert len(weights) == 8 and all(weight._transpose is None for weight in weights)


@pytest.mark.gpu
def test_gpu_reserves_what_is_predicted(gpu):
    config = replace(PRESETS["slice"], layers=4, batches=1, memory_gib=16.0)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    state = State(config, gpu, "lean")
    follow_eager(state, 3)
    used = torch.cuda.max_memory_reserved() - before
    assert used == pytest.approx(state.plan.bytes, rel=0.05)
