"""Model FLOPs of a training step by closed formula, and the peaks to hold them against.

A multiply-add counts as 2 FLOP; matrix multiplications only (no norms, activations, embedding look-ups,
optimizer), nothing recomputed. Formulas: `num_floating_point_operations` in Megatron-LM
(megatron/training/training.py), which counts the causal half of attention; torchtitan and MLPerf's
MODEL_TFLOP_PER_SAMPLE count attention in full. A record names its convention.

torch.utils.flop_counter.FlopCounterMode agrees with the full count when SDPA runs as plain matrix products
(SDPBackend.MATH). It does not see SDPA's fused CPU kernel at all, and counts five products instead of four in the
backward of the fused CUDA kernels, which compute the scores again.
"""

import re
from dataclasses import dataclass

CAUSAL_HALF = "causal half counted"
FULL_ATTENTION = "full attention counted"


@dataclass(frozen=True, kw_only=True)
class Transformer:
    """Sizes of a decoder. A slice of the model has fewer layers; a tensor-parallel share has local widths and vocab.

    q_width, kv_width: heads, or key-value heads, times the size of a head. mlp_matrices: 2 for GELU, 3 for SwiGLU.
    vocab: rows of the output projection, padding included.
    """

    layers: int
    sequence: int
    hidden: int
    q_width: int
    kv_width: int
    ffn: int
    mlp_matrices: int
    vocab: int

    def flops(self, causal_half: bool = True, weight_gradients: bool = True) -> float:
        """FLOP of the layers and the head, forward and backward, for one sequence.

        With s tokens and W weights a layer's forward takes 2 s W, and attention 4 s^2 q_width (half of it with
        causal_half). Backward costs twice the forward: gradients of inputs and of weights. weight_gradients=False are
        frozen weights (LoRA's base): 4 s W in all, while attention, which has no weights, stays at 3 times.
        GPT-3 175B, s 2048, vocab 51,200: 2,174.9 TFLOP with the causal half counted, 2,204.6 with full attention.
        """
        s, q = self.sequence, self.q_width
        weights = self.hidden * (2 * q + 2 * self.kv_width + self.mlp_matrices * self.ffn)
        attention = (2 if causal_half else 4) * s * s * q
        passes = 3 if weight_gradients else 2
        return float(passes * 2 * s * (self.layers * weights + self.hidden * self.vocab) + 3 * self.layers * attention)


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
