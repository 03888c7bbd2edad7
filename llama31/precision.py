"""Precisions in Transformer Engine's words, and what cannot run on a device."""

import torch

from common.training.precision.fp8 import require_fp8, require_nvfp4, usable_transformer_engine
from common.variant import Unsupported
from llama31.config import Config


def recipe_of(config: Config):
    """Transformer Engine's recipe of a config with its layers; None for bf16 and for plain layers.

    fp8: current scaling by tensor, E4M3 forward and E5M2 backward. nvfp4: without Hadamard transform, stochastic
    rounding and two-dimensional blocks, as in MLPerf v5.1.
    """
    if config.layer != "te" or config.precision == "bf16":
        return None
    from transformer_engine.common import recipe

    if config.precision == "fp8":
        return recipe.Float8CurrentScaling(fp8_format=recipe.Format.HYBRID)
    return recipe.NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True, disable_2d_quantization=True)


def require_precision(config: Config, device: torch.device) -> None:
    """Unsupported, in Transformer Engine's words where it has some, where this device does not compute the config."""
    if config.layer == "te":
        usable_transformer_engine()
        if config.precision == "nvfp4_emulated":
            raise Unsupported("--precision nvfp4_emulated needs --layer torch")
        if config.precision == "fp8":
            require_fp8()
    if config.precision == "nvfp4":
        require_nvfp4(device, "" if config.layer == "te" else "plain layers have no NVFP4 GEMM, take --layer te")
