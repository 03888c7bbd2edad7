"""The numbers of AdamW, which all its implementations here take."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Hyperparameters:
    """The numbers of AdamW.

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

    def mllog(self) -> dict:
        """Return the numbers at a constant learning rate by the names of an MLPerf log."""
        return {
            "opt_name": "adamw",
            "opt_base_learning_rate": self.lr,
            "opt_learning_rate_decay_schedule": "constant",
            "opt_adamw_beta_1": self.betas[0],
            "opt_adamw_beta_2": self.betas[1],
            "opt_adamw_epsilon": self.eps,
            "opt_adamw_weight_decay": self.weight_decay,
            "opt_gradient_clip_norm": self.clip,
        }
