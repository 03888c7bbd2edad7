"""FP8 training with delayed scaling as Transformer Engine runs it.

Delayed scaling keeps a state per GEMM operand: quantise with the scale at hand, record the largest magnitude (amax) of
what was quantised, and after a microbatch make a new scale from the amax history. The scale update is not part of a
layer: a graphed layer only fills amaxes, and the update runs eagerly between graphs. Weights are quantised once per
step, in the first microbatch, into a cache.

A script uses `NoScaling`, `TransformerEngineScaling`, or a stand-in without FP8 hardware (gpt3/emulated_fp8.py):

    with fp8.forward():                   the layers of one microbatch, called or replayed; scales updated on exit
    with fp8.backward(replayed=False):    their backward pass
    with fp8.layers(first=True):          the layers of one chunk and microbatch of a pipeline; no update
    fp8.update()                          all scales once, after a step's last pass, where layers() was used
    with fp8.capturing():                 around captures: no update is recorded
    fp8.reset(), fp8.named_state()        in place; for hashing
"""

import contextlib

import torch

from common.training.parallel import collectives
from common.training.precision.transformer_engine import transformer_engine
from common.variant import Unsupported

E4M3_MAX, E5M2_MAX = 448.0, 57344.0


class NoScaling:
    """bf16 layers: nothing to scale, every part does nothing."""

    def _nothing(self, *arguments, **flags):
        return contextlib.nullcontext()

    forward = backward = layers = without_update = capturing = _nothing

    def update(self):
        """Nothing to update."""

    reset = update

    def named_state(self):
        """Nothing: bf16 layers have no scales."""
        return iter(())


# ------------------------------------------------------------------------------------------------
# Transformer Engine


def usable_transformer_engine():
    """`transformer_engine()`; Unsupported where it cannot run."""
    try:
        return transformer_engine()
    except (ImportError, OSError) as error:
        raise Unsupported(f"Transformer Engine is not usable ({str(error).splitlines()[0][:120]}): make te") from None


def te_fault(fp8: bool) -> str | None:
    """Return the reason why te.TransformerLayer cannot run on this GPU, or None. fp8: whether it computes in FP8."""
    try:
        engine = usable_transformer_engine()
    except Unsupported as error:
        return str(error)
    available, reason = engine.is_fp8_available(return_reason=True) if fp8 else (True, "")
    return None if available else f"no FP8 on this GPU ({reason})"


def require_fp8() -> None:
    """Unsupported, in Transformer Engine's words, where it has no FP8 on this GPU."""
    if fault := te_fault(fp8=True):
        raise Unsupported(fault)


class TransformerEngineScaling:
    """FP8 in hybrid formats: E4M3 forward, E5M2 for gradients.

    Delayed scaling as NVIDIA's GPT-3 submission sets it: history 1024, "max", margin 0.

    layers: the te modules. Their scales are registered with TE by their first eager call. group: name of the ranks
    over which amaxes are reduced; None: TE's choice, all ranks. given: another recipe of TE.
    """

    def __init__(self, layers, amax_history_len: int = 1024, group: str | None = None, given=None):
        from transformer_engine.common import recipe

        self._modules = layers
        self.group = None if group is None else collectives.process_group(group)
        self.recipe = given or recipe.DelayedScaling(
            margin=0,
            fp8_format=recipe.Format.HYBRID,
            amax_history_len=amax_history_len,
            amax_compute_algo="max",
            reduce_amax=group is None or self.group is not None,
        )

    def _autocast(self, **flags):
        options = {"enabled": True, "recipe": self.recipe, "amax_reduction_group": self.group}
        return transformer_engine().autocast(**options, **flags)

    @contextlib.contextmanager
    def forward(self):
        """Run the layers of one microbatch inside of it; on exit the forward scales are updated."""
        # On exit TE updates the forward scales from the amaxes, whether layers were called or replayed.
        with self._autocast():
            yield

    @contextlib.contextmanager
    def without_update(self):
        """An FP8 region that ends without an update of the scales.

        Around a backward in which layers run again by TE's checkpoint, too: such a run opens a region of its own, whose
        end would update all scales unless it is inside of another.
        """
        region = self._autocast()
        region.__enter__()
        try:
            yield
        finally:
            # The exit updates where gradients are recorded.
            with torch.no_grad():
                region.__exit__(None, None, None)

    @contextlib.contextmanager
    def backward(self, replayed: bool = False):
        """Run the backward pass of one microbatch inside of it. replayed: whether graphs ran the layers."""
        from transformer_engine.pytorch.quantization import FP8GlobalStateManager

        yield
        # Called layers update in the backward of the region's first module; replayed ones cannot.
        if replayed:
            FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=False)

    @contextlib.contextmanager
    def layers(self, first: bool):
        """TE alone would update the scales of all chunks whenever one of them has run.

        first: whether graphs that TE made cast the weights.
        """
        from transformer_engine.pytorch.quantization import FP8GlobalStateManager

        with self.without_update():
            # Whose backward would update the scales; TE's graphs would set the flag of the cast there, too.
            FP8GlobalStateManager.is_first_fp8_module()
            if FP8GlobalStateManager.get_skip_fp8_weight_update_tensor() is not None:
                FP8GlobalStateManager.set_skip_fp8_weight_update_tensor(not first)
            yield

    def update(self):
        """Make new scales from the amaxes, once for the layers of both passes."""
        from transformer_engine.pytorch.quantization import FP8GlobalStateManager

        for forward in (True, False):
            FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=forward)

    @contextlib.contextmanager
    def capturing(self):
        """Capture layers inside of it: no update of the scales is recorded."""
        from transformer_engine.pytorch.graph import set_capture_end, set_capture_start

        set_capture_start()
        try:
            with self._autocast(_graph=True):
                yield
        finally:
            set_capture_end()

    def reset(self):
        """Set all scales to 1 and all amax histories to 0, in place."""
        for _, tensor in self._tensors("scale"):
            tensor.fill_(1.0)
        for _, tensor in self._tensors("amax_history"):
            tensor.zero_()

    def named_state(self):
        """Yield (name, tensor) of the scales and of the amax histories."""
        yield from self._tensors("scale")
        yield from self._tensors("amax_history")

    def _tensors(self, what):
        """Yield (name, tensor)."""
        from transformer_engine.pytorch.module.base import TransformerEngineBaseModule
        from transformer_engine.pytorch.quantization import DelayedScalingRecipeState

        for index, layer in enumerate(self._modules):
            for name, module in layer.named_modules():
                meta = module.fp8_meta if isinstance(module, TransformerEngineBaseModule) else {}
                for key in ("scaling_fwd", "scaling_bwd"):
                    if isinstance(meta.get(key), DelayedScalingRecipeState):
                        yield f"layers.{index}.{name}.{key}.{what}", getattr(meta[key], what)
