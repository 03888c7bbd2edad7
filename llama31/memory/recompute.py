"""A layer that runs again in the backward, but for what it has kept: items of llama31/memory/plan.py.

torch.utils.checkpoint keeps a layer's input and runs its forward again. Where the results of some operators are kept
(selective activation checkpointing), the second run takes them in the place of these operators, and computes the rest.
The bits are those of a layer that keeps everything.
"""

import contextlib
from collections import Counter

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from common.training.memory_plan import Configuration

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

    def __init__(self, way: Configuration):
        self.way, self.num_gemms = way, Counter()

    def __call__(self, context, operator, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if self._keeps(context, operator) else CheckpointPolicy.PREFER_RECOMPUTE

    def _keeps(self, context, operator):
        if operator in _ATTENTION:
            return "attention" in self.way.keeps
        if operator == torch.ops.llama31.to_fp8.default:
            return "fc1" in self.way.keeps_fp8
        if operator != _aten.mm.default:
            return False
        gemm = _GEMMS[self.num_gemms[context.is_recompute]]
        self.num_gemms[context.is_recompute] += 1
        return gemm in self.way.keeps


def run_again(function, scaling, way: Configuration | None = None):
    """Return a callable in the place of `function` whose backward runs `function` again, under `scaling()`.

    way: configuration of a plain layer; the items that it keeps are not computed again. None: everything is.
    """

    def contexts():
        if way is None:
            return contextlib.nullcontext(), scaling()
        return create_selective_checkpoint_contexts(_Keeping(way))

    def call(*args, **kwargs):
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts, **kwargs)

    return call
