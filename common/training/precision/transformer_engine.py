"""Transformer Engine's import, and what a failed capture of its leaves behind.

It uses nothing of this repository: benchmarks/importer.py calls it before runs do.
"""

import contextlib
import ctypes
import importlib
import inspect
import os
import sys
from pathlib import Path

import torch


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
