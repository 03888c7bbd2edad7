"""A layer that runs again in the backward, but for what it has kept: items of llama31/memory/plan.py.

torch.utils.checkpoint keeps a layer's input and runs its forward again. Where the results of some operators are kept
(selective activation checkpointing), the second run takes them in the place of these operators, and computes the rest.
The bits are those of a layer that keeps everything.
"""

import contextlib
from collections import Counter

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

_aten = torch.ops.aten
_ATTENTION = {
    getattr(_aten, name).default
    for name in (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
    )
}
# Of the plain layer, in the order of its forward; nothing reads fc2's result in the backward.
_GEMMS = ("qkv", "residual", "fc1", "fc2")


class _Keeping:
    """The policy of one call of a plain layer, whose runs have equal operators: which results are kept."""

    def __init__(self, kept: frozenset[str], fc1_store: str):
        self.kept, self.fc1_store, self.num_gemms = kept, fc1_store, Counter()

    def __call__(self, context, operator, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if self._keeps(context, operator) else CheckpointPolicy.PREFER_RECOMPUTE

    def _keeps(self, context, operator):
        if operator in _ATTENTION:
            return "attention" in self.kept
        if operator == torch.ops.llama31.to_fp8.default:
            return "fc1" in self.kept
        if operator != _aten.mm.default:
            return False
        gemm = _GEMMS[self.num_gemms[context.is_recompute]]
        self.num_gemms[context.is_recompute] += 1
        if gemm == "fc1" and self.fc1_store == "fp8":
            # Kept as it is rounded.
            return False
        return gemm in self.kept


def run_again(function, scaling, kept: frozenset[str] = frozenset(), fc1_store: str = "bf16"):
    """Return a callable in the place of `function` whose backward runs `function` again, under `scaling()`.

    kept: items of a plain layer that are not computed again. fc1_store: of its config.
    """

    def contexts():
        if not kept:
            return contextlib.nullcontext(), scaling()
        return create_selective_checkpoint_contexts(_Keeping(kept, fc1_store))

    def call(*args, **kwargs):
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts, **kwargs)

    return call
