"""common/te_import: how q, k and v leave the tensor that packs them, with a stand-in for Transformer Engine."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from common.training.precision import transformer_engine as te_import

MODULE = "transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention"


class Joined(torch.autograd.Function):
    """As te.utils.SplitAlongDim: gradients are joined along the dimension that was split."""

    @staticmethod
    def forward(ctx, x, dim, sizes):
        ctx.dim = dim
        return torch.split(x, sizes, dim)

    @staticmethod
    def backward(ctx, *grads):
        return torch.cat(grads, ctx.dim), None, None


def by_select(
    qkv_layer, kv_layer, query_layer, key_layer, value_layer, qkv_format, qkv_interleave_dim, inference_params
):
    if qkv_layer is None:
        return query_layer, key_layer, value_layer, None
    parts = [qkv_layer.select(qkv_interleave_dim, index) for index in range(3)]
    return *parts, f"{qkv_format}{qkv_interleave_dim}"


@pytest.fixture
def te(monkeypatch):
    parts = MODULE.split(".")
    for end in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(".".join(parts[:end])))
    package = sys.modules["transformer_engine.pytorch"]
    package.utils = SimpleNamespace(SplitAlongDim=Joined)
    sys.modules["transformer_engine"].pytorch = package
    return package


@pytest.mark.parametrize(("dim", "shape"), [(-2, (5, 2, 4, 3, 8)), (-3, (5, 2, 3, 4, 8)), (-2, (5, 4, 3, 8))])
def test_q_k_and_v_are_the_same_views_and_no_select_is_differentiated(dim, shape, te):
    core = sys.modules[MODULE]
    core._unpack_packed_qkv = by_select
    # Asked for twice, replaced once.
    assert te_import.transformer_engine() is te and te_import.transformer_engine() is te
    packed = torch.randn(shape, requires_grad=True)
    *qkv, layout = core._unpack_packed_qkv(packed, None, None, None, None, "form", dim, None)
    assert layout == f"form{dim}"
    for index, part in enumerate(qkv):
        expected = packed.select(dim, index)
        assert part.data_ptr() == expected.data_ptr() and part.stride() == expected.stride()
        assert "Select" not in str(part.grad_fn) and "Joined" in str(part.grad_fn.next_functions)
    q, k, v = qkv
    (grad,) = torch.autograd.grad((q + 2 * k + 3 * v).sum(), packed)
    assert torch.equal(grad, torch.tensor([1.0, 2.0, 3.0]).view(3, *[1] * (-1 - dim)).expand(shape))
    given = core._unpack_packed_qkv(None, None, "q", "k", "v", "form", dim, None)
    assert given == ("q", "k", "v", None)


def test_a_release_without_that_function_is_left_as_it_is(te):
    before = dict(vars(sys.modules[MODULE]))
    assert te_import.transformer_engine() is te
    assert dict(vars(sys.modules[MODULE])) == before
