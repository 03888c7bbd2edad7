"""The numbers of AdamW."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Hyperparameters:
    """Numbers of AdamW that do not change while it trains, and the learning rate at the start.

    Attributes:
        lr: The learning rate at the start.
        betas: Decay of the first and the second moment.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled, and the same for all parameters.
        clip: The largest global norm of the gradients. Beyond it they are multiplied by clip / (norm + 1e-6), as
            Megatron does.
    """

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    clip: float = math.inf
