"""Transformer Engine: its import, its FP8 with delayed scaling, and what a failed capture of its leaves behind."""

import contextlib
import ctypes
import importlib
import inspect
import os
import sys
from pathlib import Path

import torch

from graph_worth.made_variant import Unsupported
from graph_worth.parallel import collectives


def transformer_engine():
    """transformer_engine.pytorch, imported on torch's own cuDNN. Raises ImportError or OSError where it cannot run.

    TE is linked against cuDNN's parts by name, which the loader may find in the CUDA toolkit in another
    version than torch's; two versions in one process break both ("undefined symbol", "cuDNN version
    incompatibility"). So all parts next to the file that torch has loaded are loaded first.
    """
    if "transformer_engine" not in sys.modules:
        # torch loads it when it is imported; a build that does not is asked, which initialises CUDA.
        loaded = _cudnn() or (_cudnn() if torch.backends.cudnn.version() else None)
        if loaded:
            for part in sorted(loaded.parent.glob("libcudnn*.so.*")):
                ctypes.CDLL(str(part), mode=ctypes.RTLD_GLOBAL)
            os.environ["CUDNN_HOME"] = str(loaded.parent)
    import transformer_engine.pytorch as te

    _unpack_without_copies(te)
    return te


def _unpack_without_copies(te) -> None:
    """Take q, k and v out of a tensor that packs all three by te's own SplitAlongDim.

    TE 2.20 does so by select(), whose gradients autograd fills with zeros, copies and adds: eight kernels a layer and
    backward pass, 2.3 of 130 ms in GPT-3's bench on an H200. SplitAlongDim finds that the three gradients are parts of
    one tensor already, and returns that. Releases without the function that is replaced here split in that way. Where
    torch.compile traces, select() stays: it can see through that.
    """
    try:
        module = importlib.import_module(
            "transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention"
        )
        select, split = module._unpack_packed_qkv, te.utils.SplitAlongDim.apply
    except (ImportError, AttributeError):
        return

    def unpack(  # noqa: PLR0913
        qkv_layer, kv_layer, query_layer, key_layer, value_layer, qkv_format, qkv_interleave_dim, inference_params
    ):
        tensors = (qkv_layer, kv_layer, query_layer, key_layer, value_layer)
        given = (*tensors, qkv_format, qkv_interleave_dim, inference_params)
        if qkv_layer is None or torch.compiler.is_compiling():
            return select(*given)
        with torch.no_grad():  # its checks, and the layout's name
            *_, layout = select(*given)
        return (*[part.squeeze(qkv_interleave_dim) for part in split(qkv_layer, qkv_interleave_dim, (1, 1, 1))], layout)

    # Once, and where its arguments are those of 2.20.
    names = [list(inspect.signature(function).parameters) for function in (select, unpack)]
    if select.__name__ != unpack.__name__ and names[0] == names[1]:
        module._unpack_packed_qkv = unpack  # type: ignore[attr-defined]


def _cudnn() -> Path | None:
    """The file of cuDNN in this process."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return next((Path(line.split()[-1]) for line in lines if "/libcudnn.so" in line), None)


@contextlib.contextmanager
def undone_where_it_fails(layers):
    """Put back what Transformer Engine's make_graphed_callables changes where it raises.

    It then leaves its wrapper on the layers' class, and a mark that a capture goes on.
    """
    layer_class = type(layers[0])
    call = layer_class.__call__
    try:
        yield
    except BaseException:
        from transformer_engine.pytorch.graph import set_capture_end

        layer_class.__call__ = call
        set_capture_end()
        raise


def exchange_flag(flag):
    """Make `flag` the one by which Transformer Engine skips casts of weights; returns the one that was."""
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    kept = FP8GlobalStateManager.quantization_state
    before, kept.skip_fp8_weight_update_tensor = kept.skip_fp8_weight_update_tensor, flag
    return before


# ------------------------------------------------------------------------------------------------
# FP8 with delayed scaling, see fp8.py


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
        """Run the layers of one microbatch in this block. On exit the forward scales are updated."""
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
        """Run the backward pass of one microbatch in this block. replayed: True if graphs ran the layers."""
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
        """Capture layers in this block, without recording an update of the scales."""
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
