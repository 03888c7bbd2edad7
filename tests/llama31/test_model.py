"""llama31/model and state: against a Llama 3.1 written from its definition, precisions, shards."""

import math
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from common.parallel import groups
from common.parallel.buckets import GradientBuckets
from common.parallel.groups import Place
from common.precision import nvfp4
from common.precision.fp8 import E4M3_MAX
from graph_worth.made_variant import Unsupported
from graph_worth.parallel import collectives
from llama31 import linears, model, train
from llama31.config import PRESETS, ROPE_SCALING
from llama31.device import require_precision
from tests.helpers.llama2_lora_case import weights, write_checkpoint
from tests.helpers.llama31_case import CPU, LLAMA3, TINY, follow_eager, make


@pytest.fixture
def folder(tmp_path):
    return write_checkpoint(tmp_path / "llama", TINY, small_weights(), **LLAMA3)


def small_weights():
    return {name: tensor / 16 if tensor.ndim == 2 else tensor for name, tensor in weights(TINY).items()}


def reference_loss(tensors, tokens, targets):
    """Llama 3.1 by its definition, one sequence, FP32, from tensors as Hugging Face names them."""
    c, t = TINY, {name: tensor.float() for name, tensor in tensors.items()}
    # As transformers computes it (modeling_rope_utils, _compute_llama3_parameters).
    inverse = 1.0 / c.rope_theta ** (torch.arange(0, c.head_dim, 2).double() / c.head_dim)
    length = 2 * math.pi / inverse
    original, factor = ROPE_SCALING["original_max_position_embeddings"], ROPE_SCALING["factor"]
    scaled = torch.where(length > original, inverse / factor, inverse)
    smooth = (original / length - 1.0) / (4.0 - 1.0)
    between = (length <= original) & (length >= original / 4.0)
    inverse = torch.where(between, (1 - smooth) * inverse / factor + smooth * inverse, scaled)
    angles = (torch.arange(len(tokens)).double()[:, None] * inverse).repeat(1, 2).float()

    def norm(x, gain):
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + c.norm_eps) * gain

    def turned(x):
        half = torch.cat((-x[..., c.head_dim // 2 :], x[..., : c.head_dim // 2]), -1)
        return x * angles.cos()[:, None] + half * angles.sin()[:, None]

    x = t["model.embed_tokens.weight"][tokens]
    hidden_keys = torch.ones(len(tokens), len(tokens), dtype=torch.bool).triu(1)
    for layer in range(c.layers):
        w = {name.split(f"layers.{layer}.")[-1]: value for name, value in t.items() if f"layers.{layer}." in name}
        h = norm(x, w["input_layernorm.weight"])
        q, k, v = (
            (h @ w[f"self_attn.{name}_proj.weight"].t()).view(len(tokens), -1, c.head_dim) for name in ("q", "k", "v")
        )
        q, k = turned(q), turned(k)
        k, v = (each.repeat_interleave(c.heads // c.kv_heads, 1) for each in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(c.head_dim)
        out = torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden_keys, -math.inf).softmax(-1), v).flatten(1)
        x = x + out @ w["self_attn.o_proj.weight"].t()
        h = norm(x, w["post_attention_layernorm.weight"])
        up = F.silu(h @ w["mlp.gate_proj.weight"].t()) * (h @ w["mlp.up_proj.weight"].t())
        x = x + up @ w["mlp.down_proj.weight"].t()
    return F.cross_entropy(norm(x, t["model.norm.weight"]) @ t["lm_head.weight"].t(), targets)


def test_a_checkpoint_computes_what_llama_3_1_is_defined_to(folder):
    state = make(dtype=torch.float32, precision="bf16", main_grad="fp32", checkpoint=str(folder))
    state.inputs.load(state.batches[0])
    for microbatch in range(TINY.microbatches):
        tokens, targets = (state.inputs[name][microbatch][:, 0] for name in ("tokens", "targets"))
        with torch.no_grad():
            hidden = state.run_layers(state.embedding(tokens[:, None]), first=True)
            ours = state.head(hidden, targets[:, None])
        assert float(ours) == pytest.approx(float(reference_loss(small_weights(), tokens, targets)), rel=1e-5)


def test_positions_far_out_are_stretched():
    config = replace(PRESETS["full"], sequence=8192)
    angles = model.rope_angles(config)
    plain = 500000.0 ** (-torch.arange(0, 128, 2).double() / 128)
    assert angles.shape == (8192, 64)
    ratio = angles[1].double() / plain
    assert ratio[0] == pytest.approx(1) and ratio[-1] == pytest.approx(1 / 8, rel=1e-5)
    assert bool((ratio.diff() <= 1e-6).all())


def test_context_ranks_see_equal_numbers_of_keys():
    positions = [model.positions_of(replace(TINY, cp=2), rank) for rank in range(2)]
    assert sorted(torch.cat(positions).tolist()) == list(range(TINY.sequence))
    assert len({int((each + 1).sum()) for each in positions}) == 1


def test_shards_are_parts_of_one_tensor():
    shapes = {"qkv": (128, 64), "proj": (64, 64), "fc1": (256, 64), "fc2": (64, 128), "embedding": (256, 64)}
    for name, (rows, columns) in shapes.items():
        by_columns = name in ("proj", "fc2")
        whole = torch.empty(rows, columns)
        parts = list(torch.empty(2, rows, columns // 2) if by_columns else torch.empty(2, rows // 2, columns))
        model.fill_at_random_(whole, TINY, Place(0, 0, 0, 0, 0), name, 1, 7)
        for rank, part in enumerate(parts):
            model.fill_at_random_(part, replace(TINY, tp=2), Place(0, 0, 0, 0, rank), name, 1, 7)
        if name == "fc1":
            # Gate and up projection are split each.
            expected = [half.reshape(-1, columns) for half in whole.view(2, 128, columns).chunk(2, 1)]
        else:
            expected = whole.chunk(2, 1 if by_columns else 0)
        assert all(torch.equal(part, other) for part, other in zip(parts, expected, strict=True)), name


class Allocated(TorchDispatchMode):
    """The bytes of the largest tensor that is made in it."""

    largest = 0

    def __torch_dispatch__(self, operator, types, arguments=(), named=None):
        result = operator(*arguments, **(named or {}))
        if operator.name().startswith(("aten::empty", "aten::new_", "aten::zeros", "aten::_to_copy")):
            self.largest = max(self.largest, result.untyped_storage().nbytes())
        return result


def test_a_reset_takes_no_memory_for_a_second_copy_of_a_tensor(monkeypatch):
    """An FP32 embedding of the 8B model is 2 GiB, which a GPU full of activations does not have."""
    state = make(precision="bf16", layers=1, vocab=2048)
    monkeypatch.setattr(groups, "_BLOCK_ELEMENTS", 256)
    with Allocated() as allocated:
        state.reset()
    # A block, of a row of fc2 or two of the others.
    assert allocated.largest == 4 * 256


def test_a_validation_has_the_logits_of_a_few_tokens_at_a_time(monkeypatch):
    state = make(dtype=torch.float32, precision="bf16")
    hidden, targets = torch.randn(TINY.sequence, 1, TINY.hidden), state.inputs["targets"][0]
    expected = state.head(hidden, targets).detach()
    monkeypatch.setattr(model, "VALIDATION_TOKENS", 12)  # the last part is smaller
    lengths, cross_entropy = [], model.cross_entropy
    monkeypatch.setattr(model, "cross_entropy", lambda x, *rest: lengths.append(len(x)) or cross_entropy(x, *rest))
    with torch.no_grad():
        torch.testing.assert_close(state.head(hidden, targets), expected)
    assert lengths == [12, 12, 8]


def test_main_grad_gets_its_memory_from_the_buckets():
    part = model.Part(torch.nn.Parameter(torch.empty(64, 32)))
    model.attach_main_grad(part, torch.bfloat16)
    grad = part.parameter.main_grad
    assert grad.shape == (64, 32) and grad.untyped_storage().nbytes() == 2
    GradientBuckets([grad], 2**20, collectives.ALONE)
    assert grad.is_contiguous() and grad.untyped_storage().nbytes() >= 2 * 64 * 32 and not grad.any()


def test_shards_of_a_checkpoint_are_groups_of_heads(folder):
    whole = make(checkpoint=str(folder))
    qkv = whole.layers[0].qkv.weight.detach()
    tensors = small_weights()
    q, k = (tensors[f"model.layers.0.self_attn.{name}_proj.weight"] for name in ("q", "k"))
    # Two q heads of a group, then its k.
    assert torch.equal(qkv[:32], q[:32]) and torch.equal(qkv[32:48], k[:16]) and torch.equal(qkv[64:96], q[32:])


# --- precisions


def test_stored_fp8_weights_are_their_masters_to_fp8():
    state = make(weights="fp8", moments="bf16")
    place = [(name, number) for name, number, _ in state.parts].index(("fc1", 0))
    linear, master = state.layers[0].fc1, state.adam.masters[place]
    assert linear.weight.dtype == torch.float8_e4m3fn and linear.weight.shape == master.shape
    assert float(linear.weight.float().abs().max()) == E4M3_MAX
    # Three bits of mantissa.
    torch.testing.assert_close(
        linear.forward_weight.float(), master, rtol=2**-3, atol=float(master.abs().max()) * 2**-9
    )
    before = linear.weight.float().clone()
    train.eager_step(state, 0)
    assert not torch.equal(linear.weight.float(), before)
    values, inverse = linears.quantize_fp8(master, torch.float8_e4m3fn, E4M3_MAX)
    assert torch.equal(linear.weight.float(), values.float()) and torch.equal(linear.inverse, inverse)


@pytest.mark.parametrize("precision", ["fp8", "nvfp4_emulated"])
def test_operands_of_all_three_gemms_are_rounded(precision):
    config = replace(TINY, precision=precision)
    linear = linears.make_linear(config, 64, 48, torch.float32, CPU)
    torch.manual_seed(0)
    torch.nn.init.normal_(linear.weight)
    linear.weight.main_grad = torch.zeros_like(linear.weight)
    x, grad = torch.randn(32, 1, 64, requires_grad=True), torch.randn(32, 1, 48)
    linear(x, True).backward(grad)
    rows, columns, weight = grad[:, 0], x.detach()[:, 0], linear.weight.detach()
    if precision == "fp8":
        dy = linears.rounded_fp8(rows, torch.float8_e5m2, 57344.0)
        grad_x, grad_w = dy @ linears.rounded_fp8(weight), dy.t() @ linears.rounded_fp8(columns)
        y = linears.rounded_fp8(columns) @ linears.rounded_fp8(weight).t()
    else:
        y = nvfp4.emulate(columns) @ nvfp4.emulate(weight).t()
        grad_x = nvfp4.emulate(rows) @ nvfp4.emulate(weight.t().contiguous()).t()
        grad_w = nvfp4.emulate(rows.t().contiguous()) @ nvfp4.emulate(columns.t().contiguous()).t()
    torch.testing.assert_close(x.grad[:, 0], grad_x)
    torch.testing.assert_close(linear.weight.main_grad, grad_w)
    torch.testing.assert_close(linear(x, False)[:, 0], y)
    assert not torch.equal(y, columns @ weight.t())


def test_nvfp4_says_what_it_needs():
    with pytest.raises(Unsupported, match=r"--precision nvfp4: .*compute capability 10.0.*nvfp4_emulated"):
        require_precision(replace(TINY, precision="nvfp4"), CPU)


@pytest.mark.slow
def test_precisions_differ_and_all_learn():
    losses = {}
    for name, changes in {
        "bf16": {"precision": "bf16"},
        "fp8": {},
        "fp8 stored": {"weights": "fp8"},
        "bf16 moments": {"moments": "bf16"},
        "nvfp4": {"precision": "nvfp4_emulated"},
    }.items():
        losses[name] = tuple(follow_eager(make(**changes, batches=1), 5)[0])
    assert len(set(losses.values())) == len(losses)
    for name, each in losses.items():
        assert each[-1] < each[0] - 0.5, name
        assert each == pytest.approx(losses["bf16"], rel=0.03), name
