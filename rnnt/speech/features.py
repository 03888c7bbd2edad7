"""Features of a batch, from DALI's frames of 10 ms to the encoder's input: masks, three frames spliced, padding.

Source of all numbers: NVIDIA's submission to MLPerf v3.1, RNN-T, common/data/features.py. The caller seeds the random
numbers, so that a batch can be made again.
"""

import numpy as np
import torch
import torch.nn.functional as F

from rnnt.speech.folder import STACK, spliced

NUM_MELS = 80
NUM_BAND_MASKS, MAX_BANDS = 2, 20
NUM_TIME_MASKS, MAX_TIME_SHARE = 10, 0.03


def draw_masks(generator: np.random.Generator, lengths: list[int]) -> np.ndarray:
    """SpecAugment's masks, int32 [B, 12, 2]: begin and end of 2 over mel bands, then of 10 over frames of 10 ms.

    lengths: frames of each utterance. A mask covers 0 to 20 bands, or 0 to 3 % of the length, all equally likely.
    """
    # The room that each mask has and its largest width, [B, 12, 2].
    bands = NUM_BAND_MASKS * [[NUM_MELS, MAX_BANDS]]
    limits = np.array([bands + NUM_TIME_MASKS * [[length, int(MAX_TIME_SHARE * length)]] for length in lengths])
    widths = generator.integers(0, limits[..., 1], endpoint=True)
    begins = generator.integers(0, limits[..., 0] - widths, endpoint=True)
    return np.stack((begins, begins + widths), axis=2).astype(np.int32)


def finish(features, lengths: torch.Tensor, masks: torch.Tensor | None, width: int, dtype: torch.dtype):
    """The encoder's input, [T, B, width] in `dtype`, from features [B, 80, frames of 10 ms], FP32.

    lengths: int32 [B], spliced frames; all is 0 beyond them. masks: see draw_masks; None masks nothing. Both are on the
    features' device. width: 240 or more.
    """
    if masks is not None:
        bands = _covered(masks[:, :NUM_BAND_MASKS], features.shape[1])
        times = _covered(masks[:, NUM_BAND_MASKS:], features.shape[2])
        features = features.masked_fill(bands[:, :, None] | times[:, None, :], 0.0)
    features = splice(features)
    beyond = torch.arange(features.shape[2], device=features.device) >= lengths[:, None]
    features = features.masked_fill(beyond[:, None, :], 0.0)
    return F.pad(features, (0, 0, 0, width - features.shape[1])).permute(2, 0, 1).to(dtype).contiguous()


def _covered(masks, size):
    place = torch.arange(size, device=masks.device)
    return ((place >= masks[..., :1]) & (place < masks[..., 1:])).any(dim=1)


def splice(features: torch.Tensor) -> torch.Tensor:
    """[B, 240, ceil(T / 3)] from features [B, 80, T]: three frames above each other; 0 beyond the end."""
    size, bands, length = features.shape
    stacked = spliced(length)
    features = F.pad(features, (0, STACK * stacked - length))
    return features.view(size, bands, stacked, STACK).permute(0, 3, 1, 2).reshape(size, STACK * bands, stacked)
