"""What a source of batches hands out."""

from typing import NamedTuple

import torch


class Batch(NamedTuple):
    """One batch of utterances. T and U are the longest of the batch; what lies beyond a length is 0.

    features: [T, B, F] in the model's dtype, in pinned host memory or on the device. feature_lengths: int32 [B],
    token_lengths: int32 [B], tokens: int64 [B, U], all in host memory.
    """

    features: torch.Tensor
    feature_lengths: torch.Tensor
    tokens: torch.Tensor
    token_lengths: torch.Tensor
