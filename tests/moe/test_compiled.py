"""moe: torch.compile of attention and router, traced without a GPU (its code is then torch's own operators)."""

import contextlib

import pytest
import torch

from common.variant import Unsupported, leave
from moe import train
from tests.helpers.contracts import made
from tests.helpers.followed import difference, follow
from tests.helpers.moe_case import make


@pytest.fixture
def graphs(monkeypatch):
    """Sizes of the graphs that torch.compile traces, which run as they are."""
    from torch._dynamo.backends.debugging import aot_eager

    sizes, own = [], torch.compile

    def backend(module, inputs):
        sizes.append(len(module.graph.nodes))
        return aot_eager(module, inputs)

    def compiled(fn, mode, dynamic, fullgraph):
        return own(fn, backend=backend, dynamic=dynamic, fullgraph=fullgraph)

    monkeypatch.setattr(torch, "compile", compiled)
    for module in ("common.variant", "moe.other_variants"):
        monkeypatch.setattr(f"{module}.require_compiler", lambda device: None)
    monkeypatch.setattr("common.variant.Pool.adopt", lambda pool, is_borrowed: contextlib.nullcontext())
    yield sizes
    torch._dynamo.reset()


@pytest.mark.parametrize("preset, count", [("tiny", 2), ("tiny_lora", 4)])
def test_compiled_parts_train_as_eager_ones(graphs, preset, count):
    """Layers share the graphs of router and attention; one with a window, or an input without gradient, has its own."""
    state, eager = make(preset, layers=4), make(preset, layers=4)
    expected = follow(eager, made("moe", "eager", eager).step, 3)
    variant = made("moe", "compile", state)
    assert len(graphs) == count
    losses, norms, _ = follow(state, variant.step, 3)
    leave(variant)
    assert len(graphs) == count
    assert losses == pytest.approx(expected[0], rel=1e-3) and norms == pytest.approx(expected[1], rel=2e-2)
    # Eager finds everything as it was.
    again = follow(state, lambda index: train.eager_step(state, index), 3)
    assert difference(again, expected, state) == ""


@pytest.mark.parametrize("name", ["compile", "reduce_overhead"])
def test_compiled_code_is_measured_on_a_gpu_alone(name):
    with pytest.raises(Unsupported, match="on a GPU only"):
        made("moe", name, make("tiny"))


def test_torchs_own_graphs_share_no_memory_with_eager_steps(graphs, monkeypatch):
    monkeypatch.setattr("common.variant.eager_memory", lambda: contextlib.nullcontext())
    with pytest.raises(Unsupported, match="share"):
        made("moe", "reduce_overhead", make("tiny"))
    assert not graphs
