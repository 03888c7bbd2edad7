"""common/flops: published totals, torch's own counter, peaks."""

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from common.flops import Transformer, peak_flops

GPT3 = Transformer(
    layers=96, sequence=2048, hidden=12288, q_width=12288, kv_width=12288, ffn=49152, mlp_matrices=2, vocab=51200
)
LLAMA2 = Transformer(
    layers=80, sequence=8192, hidden=8192, q_width=8192, kv_width=1024, ffn=28672, mlp_matrices=3, vocab=32000
)
LLAMA31 = Transformer(
    layers=126, sequence=8192, hidden=16384, q_width=16384, kv_width=1024, ffn=53248, mlp_matrices=3, vocab=128256
)


@pytest.mark.parametrize(
    "model, options, tflop",
    [
        (GPT3, {}, 2174.9),
        (GPT3, {"causal_half": False}, 2204.6),
        (LLAMA2, {}, 3641.3),
        (LLAMA2, {"weight_gradients": False}, 2515.5),
        (LLAMA31, {"causal_half": False}, 21507.5),  # NVIDIA's constant: 21508
    ],
)
def test_published_totals(model, options, tflop):
    assert model.flops(**options) / 1e12 == pytest.approx(tflop, rel=3e-5)


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


@pytest.mark.parametrize("kv_heads, mlp_matrices, weight_gradients", [(4, 2, True), (2, 3, False)])
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
    model = Transformer(
        layers=1,
        sequence=s,
        hidden=hidden,
        q_width=heads * head_dim,
        kv_width=kv_heads * head_dim,
        ffn=ffn,
        mlp_matrices=mlp_matrices,
        vocab=vocab,
    )
    assert counter.get_total_flops() == model.flops(causal_half=False, weight_gradients=weight_gradients)


@pytest.mark.parametrize(
    "gpu_name, precision, peak",
    [
        ("NVIDIA H200", "fp8", 1979e12),
        ("NVIDIA H100 80GB HBM3", "fp16", 989e12),
        ("NVIDIA H100 PCIe", "bf16", 756e12),
        ("NVIDIA A100-SXM4-80GB", "fp8", None),
        ("NVIDIA GB200", "bf16", None),
        (None, "bf16", None),
    ],
)
def test_peak(gpu_name, precision, peak):
    assert peak_flops(gpu_name, precision) == peak
