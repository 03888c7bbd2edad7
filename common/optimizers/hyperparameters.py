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

    def mllog(self, *, seed: int, samples: int, microbatches: int, sequence: int, batches: int, held_out: int) -> dict:
        """Return the hyperparameters of a training at a constant learning rate by the names of an MLPerf log.

        Args:
            seed: Of the training.
            samples: Sequences of a step, over all ranks.
            microbatches: Of a step.
            sequence: Tokens of a sequence.
            batches: Batches that rotate.
            held_out: Sequences of an evaluation.
        """
        return {
            "seed": seed,
            "global_batch_size": samples,
            "gradient_accumulation_steps": microbatches,
            "max_sequence_length": sequence,
            "train_samples": samples * batches,
            "eval_samples": held_out,
            "opt_name": "adamw",
            "opt_base_learning_rate": self.lr,
            "opt_learning_rate_decay_schedule": "constant",
            "opt_adamw_beta_1": self.betas[0],
            "opt_adamw_beta_2": self.betas[1],
            "opt_adamw_epsilon": self.eps,
            "opt_adamw_weight_decay": self.weight_decay,
            "opt_gradient_clip_norm": self.clip,
        }
