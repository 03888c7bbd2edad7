"""A Hugging Face Llama 3.1 folder as the initial weights: common's llama_checkpoint with Llama 3.1's positions."""

from common.training.data import llama_checkpoint
from llama31.config import ROPE_SCALING, Config


def open_checkpoint(config: Config) -> llama_checkpoint.Checkpoint:
    """The opened folder of --checkpoint. ValueError, one line with the flag, where it does not fit the config."""
    if config.share_tp > 1 or config.share_cp > 1:
        raise ValueError("--checkpoint takes a whole model: --share-tp 1 --share-cp 1")
    return llama_checkpoint.open_checkpoint(config.checkpoint, config, rope_scaling=ROPE_SCALING)
