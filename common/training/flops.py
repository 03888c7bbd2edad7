"""Model FLOPs of a training step by closed formula, and the peaks to hold them against.

A multiply-add counts as 2 FLOP; matrix multiplications only (no norms, activations, embedding look-ups,
optimizer), nothing recomputed. Formulas: `num_floating_point_operations` in Megatron-LM
(megatron/training/training.py), which counts the causal half of attention; torchtitan and MLPerf's
MODEL_TFLOP_PER_SAMPLE count attention in full. A record names its convention.

torch.utils.flop_counter.FlopCounterMode agrees with the full count when SDPA runs as plain matrix products
(SDPBackend.MATH). It does not see SDPA's fused CPU kernel at all, and counts five products instead of four in the
backward of the fused CUDA kernels, which compute the scores again.

Widths may be local ones: with q_width, kv_width, ffn and vocab of one tensor-parallel rank the result is
that rank's share.
"""

import re

CAUSAL_HALF = "causal half counted"
FULL_ATTENTION = "full attention counted"


def transformer_layer(  # noqa: PLR0913
    sequence_length, hidden, q_width, kv_width, ffn, mlp_matrices, causal_half=True, weight_gradients=True
) -> float:
    """FLOP of one layer, forward and backward, for one sequence of `sequence_length` tokens.

    With s tokens, h hidden, q = heads * head_dim, kv = key-value heads * head_dim, f ffn, m mlp_matrices (2 for
    GELU, 3 for SwiGLU): W = h (q + 2 kv) + q h + m h f weights, forward 2 s W + 4 s^2 q (2 s^2 q with the causal
    half only). Backward costs twice the forward: gradients of inputs and of weights. weight_gradients=False is a
    layer with frozen weights (LoRA's base): 4 s W in all, while attention, which has no weights, stays at 3 times.
    """
    s = sequence_length
    num_weights = hidden * (q_width + 2 * kv_width) + q_width * hidden + mlp_matrices * hidden * ffn
    attention = (2 if causal_half else 4) * s * s * q_width
    return float((3 if weight_gradients else 2) * 2 * s * num_weights + 3 * attention)


def lm_head(sequence_length, hidden, vocab, weight_gradients=True) -> float:
    """FLOP of the output projection, forward and backward, for one sequence: 6 s h V, 4 s h V if frozen.

    vocab: rows that are multiplied, padding included.
    """
    return float((6 if weight_gradients else 4) * sequence_length * hidden * vocab)


def gpt(num_layers, sequence_length, hidden, vocab, weight_gradients=True, **layer) -> float:
    """FLOP of `num_layers` layers and the head, forward and backward, for one sequence; multiply by sequences a step.

    layer: the other arguments of `transformer_layer`. A slice is fewer layers, a tensor-parallel share is local
    q_width, kv_width, ffn and vocab.
    GPT-3 175B, s 2048, vocab 51,200: 2,174.9 TFLOP with the causal half counted, 2,204.6 with full attention.
    """
    each = transformer_layer(sequence_length, hidden, weight_gradients=weight_gradients, **layer)
    return num_layers * each + lm_head(sequence_length, hidden, vocab, weight_gradients)


# Dense tensor-core peaks in FLOP/s from NVIDIA's data sheets (half of the figure "with sparsity"). Cards of one name
# differ by form factor, so the longer name comes first.
_PEAKS = (
    (("H100", "PCIE"), {"bf16": 756e12, "fp8": 1513e12}),
    (("H100", "NVL"), {"bf16": 835e12, "fp8": 1671e12}),
    (("H200", "NVL"), {"bf16": 835e12, "fp8": 1671e12}),
    (("H100",), {"bf16": 989e12, "fp8": 1979e12}),
    (("H200",), {"bf16": 989e12, "fp8": 1979e12}),
    (("A100",), {"bf16": 312e12}),
    (("B200",), {"bf16": 2.25e15, "fp8": 4.5e15}),
)


def peak_flops(gpu_name, precision) -> float | None:
    """Dense peak in FLOP/s, or None for a GPU or a precision without a named peak.

    gpu_name: as torch reports it ("NVIDIA H100 80GB HBM3"). precision: "bf16", "fp16" (same peak) or "fp8".
    """
    words = set(re.split(r"[^A-Z0-9]+", (gpu_name or "").upper()))
    for name, peaks in _PEAKS:
        if words.issuperset(name):
            return peaks.get("bf16" if precision == "fp16" else precision)
    return None
