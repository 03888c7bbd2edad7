"""common/flops: published totals, torch's own counter, peaks."""

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from common.training import flops

GPT3 = {"sequence_length": 2048, "hidden": 12288, "q_width": 12288, "kv_width": 12288, "ffn": 49152, "mlp_matrices": 2}
LLAMA2 = {"sequence_length": 8192, "hidden": 8192, "q_width": 8192, "kv_width": 1024, "ffn": 28672, "mlp_matrices": 3}
LLAMA31 = {
    "sequence_length": 8192,
    "hidden": 16384,
    "q_width": 16384,
    "kv_width": 1024,
    "ffn": 53248,
    "mlp_matrices": 3,
}


@pytest.mark.parametrize(
    "widths, options, tflop",
    [
        (GPT3, {}, 22.57),
        (LLAMA2, {}, 45.35),
        (LLAMA2, {"weight_gradients": False}, 31.34),
        (LLAMA31, {}, 163.3),
    ],
)
def test_layer(widths, options, tflop):
    assert flops.transformer_layer(**widths, **options) / 1e12 == pytest.approx(tflop, rel=3e-4)


@pytest.mark.parametrize(
    "widths, num_layers, vocab, options, tflop",
    [
        (GPT3, 96, 51200, {}, 2174.9),
        (GPT3, 96, 51200, {"causal_half": False}, 2204.6),
        (LLAMA2, 80, 32000, {}, 3641.3),
        (LLAMA2, 80, 32000, {"causal_half": False}, 3905.2),
        (LLAMA2, 80, 32000, {"weight_gradients": False}, 2515.5),
        (LLAMA31, 126, 128256, {}, 20676),
        (LLAMA31, 126, 128256, {"causal_half": False}, 21507.5),  # NVIDIA's constant: 21508
        (LLAMA31, 126, 32000, {}, 20599),
    ],
)
def test_whole_model(widths, num_layers, vocab, options, tflop):
    total = flops.gpt(num_layers=num_layers, vocab=vocab, **widths, **options)
    assert total / 1e12 == pytest.approx(tflop, rel=3e-5)


def test_tensor_parallel_shares_add_up_to_the_model():
    local = GPT3 | {name: GPT3[name] // 8 for name in ("q_width", "kv_width", "ffn")}
    share = flops.gpt(num_layers=8, vocab=6400, **local)
    assert 8 * share == pytest.approx(flops.gpt(num_layers=8, vocab=51200, **GPT3), rel=1e-12)


def attention_layer(x, weights, heads, kv_heads, head_dim):
    """A pre-norm layer without the norms: grouped-query attention, then GELU (2 matrices) or SwiGLU (3)."""
    batch, s, _ = x.shape
    q, k, v = (
        (x @ weights[name]).view(batch, s, num, head_dim).transpose(1, 2)
        for name, num in (("q", heads), ("k", kv_heads), ("v", kv_heads))
    )
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    x = x + mixed.transpose(1, 2).reshape(batch, s, heads * head_dim) @ weights["o"]
    up = x @ weights["up"]
    inner = F.silu(x @ weights["gate"]) * up if "gate" in weights else F.gelu(up)
    return x + inner @ weights["down"]


@pytest.mark.parametrize("kv_heads, mlp_matrices", [(4, 2), (2, 3)])
@pytest.mark.parametrize("weight_gradients", [True, False])
def test_formula_agrees_with_torchs_counter(kv_heads, mlp_matrices, weight_gradients):
    s, hidden, heads, head_dim, ffn, vocab = 32, 48, 4, 16, 80, 96
    shapes = {
        "q": (hidden, heads * head_dim),
        "k": (hidden, kv_heads * head_dim),
        "v": (hidden, kv_heads * head_dim),
        "o": (heads * head_dim, hidden),
        "up": (hidden, ffn),
        "down": (ffn, hidden),
        "head": (hidden, vocab),
    } | ({"gate": (hidden, ffn)} if mlp_matrices == 3 else {})
    weights = {name: torch.randn(shape, requires_grad=weight_gradients) for name, shape in shapes.items()}
    x = torch.randn(1, s, hidden, requires_grad=True)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        (attention_layer(x, weights, heads, kv_heads, head_dim) @ weights["head"]).sum().backward()
    expected = flops.gpt(
        num_layers=1,
        sequence_length=s,
        hidden=hidden,
        q_width=heads * head_dim,
        kv_width=kv_heads * head_dim,
        ffn=ffn,
        vocab=vocab,
        mlp_matrices=mlp_matrices,
        causal_half=False,
        weight_gradients=weight_gradients,
    )
    assert counter.get_total_flops() == expected


@pytest.mark.parametrize(
    "gpu_name, precision, peak",
    [
        ("NVIDIA H200", "bf16", 989e12),
        ("NVIDIA H200", "fp8", 1979e12),
        ("NVIDIA H100 80GB HBM3", "fp16", 989e12),
        ("NVIDIA H100 PCIe", "bf16", 756e12),
        ("NVIDIA H100 NVL", "fp8", 1671e12),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312e12),
        ("NVIDIA A100-SXM4-80GB", "fp8", None),
        ("NVIDIA B200", "fp8", 4.5e15),
        ("NVIDIA GB200", "bf16", None),
        ("NVIDIA GeForce RTX 4090", "bf16", None),
        ("NVIDIA H200", "fp32", None),
        (None, "bf16", None),
    ],
)
def test_peak(gpu_name, precision, peak):
    assert flops.peak_flops(gpu_name, precision) == peak
