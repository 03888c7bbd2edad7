"""moe: all kernels compiled for an H100, without one: no thread reads what another thread of its program wrote."""

import re

import pytest
import torch

pytest.importorskip("triton")

from moe.kernels import activation, cross_entropy, heads, labels, order, routing, rows, sinks, weight_gradient
from moe.kernels.order import RowPlan
from tests.helpers.triton_compiling import Compiling
from tests.helpers.triton_interpreter import INTERPRETED

MODULES = (activation, cross_entropy, heads, labels, order, routing, rows, sinks, weight_gradient)
TOKENS, TOP_K, EXPERTS, HIDDEN, FFN, HEADS, DIM = 8, 4, 32, 2880, 2880, 64, 64
# Of a tensor's address, these make the addresses of its elements.
MAKES_ADDRESSES = ("tt.addptr", "tt.splat", "tt.broadcast", "tt.expand_dims", "ttg.convert_layout")


def call_all_kernels():
    """At the widths of GPT-OSS-20B, forward and backward."""
    num_rows = TOKENS * TOP_K

    def floats(*shape, dtype=torch.bfloat16):
        return torch.zeros(shape, dtype=dtype, requires_grad=dtype == torch.bfloat16)

    def ints(*shape):
        return torch.zeros(shape, dtype=torch.int32)

    weights, offsets = floats(TOKENS, TOP_K, dtype=torch.float32), ints(EXPERTS)
    plan = RowPlan(ints(TOKENS, TOP_K), ints(num_rows), ints(num_rows), ints(num_rows), offsets)
    x, z = floats(TOKENS, HIDDEN), floats(num_rows, 2 * FFN)
    rows.combine(rows.gather(x, plan), x, plan).sum().backward()
    for bias in (None, floats(EXPERTS, 2 * FFN)):
        activation.activate(z, bias, weights, plan)
        activation.activate_backward(floats(num_rows, FFN), z, bias, weights, plan)
    for balanced in (False, True):
        routing.route(floats(TOKENS, EXPERTS), TOP_K, 0.001, balanced).weights.sum().backward()
    for capacity in (0, 8):
        order.order_rows(ints(TOKENS, TOP_K), ints(EXPERTS), capacity)
    for adds in (False, True):
        out = floats(EXPERTS, HIDDEN, FFN)
        weight_gradient.grouped_weight_gradient_(out, floats(num_rows, HIDDEN), floats(num_rows, FFN), offsets, adds)
    weight_gradient.grouped_sums(z, offsets, ints(num_rows))
    rope = [floats(TOKENS, DIM // 2, dtype=torch.float32) for _ in range(2)]
    for norms in (None, (floats(DIM), floats(DIM))):
        split = heads.split_heads(floats(TOKENS, (HEADS + 16) * DIM), (HEADS, 8, DIM), rope, norms, 1e-6)
        sum(each.sum() for each in split).backward()
    cross_entropy.cross_entropy_(floats(TOKENS, 201088), torch.zeros(TOKENS, dtype=torch.int64), weights[:, 0], 1.0)
    labels.read(labels.write(weights, plan.row_of_choice, plan.choice_of_row, EXPERTS), EXPERTS)
    labels.gradient_of_weights(floats(num_rows, 1, dtype=torch.float32), plan.row_of_choice)
    out, lse, logits = floats(TOKENS, HEADS, DIM), floats(HEADS, TOKENS, dtype=torch.float32), floats(HEADS)
    sinks.add_sinks_(out, lse, logits)
    sinks.sink_gradient(out, out, lse, logits)


@pytest.fixture
def compiled(monkeypatch):
    """The compiled kernels by name and constants."""
    monkeypatch.setattr(Compiling, "compiled", {})
    cached = [each for module in MODULES for each in vars(module).values() if hasattr(each, "cache_clear")]
    for module in MODULES:
        monkeypatch.setattr(module, "Launch", Compiling)
        monkeypatch.setattr(module, "in_triton", lambda tensor: True)
    for each in cached:
        each.cache_clear()
    call_all_kernels()
    yield Compiling.compiled
    for each in cached:
        each.cache_clear()


def races(ttgir: str) -> list[str]:
    """Tensors of which a program loads elements and stores them, at other addresses, without a barrier between.

    The addresses of a load and of a store are the same to the compiler if the same threads have them.
    """
    base_of, loaded, found = {}, {}, []
    for line in ttgir.splitlines():
        made = re.match(r"\s*(%\w+) = (\S+) (%\w+)", line)
        if made and made[2] in MAKES_ADDRESSES:
            base_of[made[1]] = base_of.get(made[3], made[3])
        elif made and made[2] == "tt.load":
            loaded.setdefault(base_of.get(made[3], made[3]), set()).add(made[3])
        elif "barrier" in line:
            loaded.clear()
        elif stored := re.match(r"\s*tt\.store (%\w+)", line):
            base = base_of.get(stored[1], stored[1])
            found += [base] if loaded.get(base, set()) - {stored[1]} else []
    return found


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
def test_no_program_stores_where_another_of_its_threads_may_still_load(compiled):
    found = {key: races(each.asm["ttgir"]) for key, each in compiled.items()}
    assert len(found) == 26 and {key: tensors for key, tensors in found.items() if tensors} == {}
