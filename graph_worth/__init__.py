"""Measures how much CUDA graphs gain in training, in this suite's scripts and in yours.

    from graph_worth import Pool, session, variant

Names are imported on first use: `import graph_worth` costs no torch. No module in this folder has one of
these names: `import graph_worth.pool` would put the module in the place of what `from graph_worth import pool` gives.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from graph_worth.capture.pool import CaptureError as CaptureError
    from graph_worth.capture.pool import Pool as Pool
    from graph_worth.capture.pool import StaticInputs as StaticInputs
    from graph_worth.capture.static_inputs import DoubleBuffered as DoubleBuffered
    from graph_worth.capture.triton_launch import Launch as Launch
    from graph_worth.compiled import Compiled as Compiled
    from graph_worth.compiled import require_compiler as require_compiler
    from graph_worth.config import needs as needs
    from graph_worth.config import option as option
    from graph_worth.config import require_fields as require_fields
    from graph_worth.config import require_folder_of_its_own as require_folder_of_its_own
    from graph_worth.contract import Timing as Timing
    from graph_worth.contract import Training as Training
    from graph_worth.contract import parse as parse
    from graph_worth.contract import variant as variant
    from graph_worth.lightning import CUDAGraphCallback as CUDAGraphCallback
    from graph_worth.made_variant import Capture as Capture
    from graph_worth.made_variant import Unsupported as Unsupported
    from graph_worth.measuring.marks import mark as mark
    from graph_worth.measuring.marks import section as section
    from graph_worth.script.session import session as session
    from graph_worth.variant_parameterized import Parameterized as Parameterized
    from graph_worth.your_step.graphed import graphed as graphed
    from graph_worth.your_step.step_graph import StepGraph as StepGraph
    from graph_worth.your_step.step_graph import one_stream as one_stream

# Module of this package -> its public names.
_NAMES = {
    "capture.pool": "CaptureError Pool StaticInputs",
    "capture.static_inputs": "DoubleBuffered",
    "capture.triton_launch": "Launch",
    "compiled": "Compiled require_compiler",
    "config": "needs option require_fields require_folder_of_its_own",
    "contract": "Timing Training parse variant",
    "lightning": "CUDAGraphCallback",
    "made_variant": "Capture Unsupported",
    "measuring.marks": "mark section",
    "script.session": "session",
    "variant_parameterized": "Parameterized",
    "your_step.graphed": "graphed",
    "your_step.step_graph": "StepGraph one_stream",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = list(_MODULES)


def __getattr__(name: str):
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__():
    return sorted([*globals(), *_MODULES])
