"""Transformer Engine's import. It uses nothing of this repository: benchmarks/importer.py calls it before runs do."""

import ctypes
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

    return te


def _cudnn() -> Path | None:
    """The file of cuDNN in this process."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return next((Path(line.split()[-1]) for line in lines if "/libcudnn.so" in line), None)
