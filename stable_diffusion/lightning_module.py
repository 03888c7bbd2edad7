"""Stable Diffusion's state as a LightningModule: the same UNet, draws, loss, scaling and update as the other variants.

Imports lightning; stable_diffusion/lightning_variant.py imports this where the variant is asked for.
"""

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule

from common.measure import mark, section


class UpdateOptimizer(torch.optim.Optimizer):
    """`State.update` as an optimizer for Lightning: all-reduce, overflow check, AdamW on the masters, loss scale.

    Its state lives in the State, not in `state_dict()`: a checkpoint of Lightning's would hold the weights alone.
    """

    def __init__(self, module):
        self.module = module
        training = module.training_state
        super().__init__(training.parameters, {"lr": training.adam.lr, "capturable": True})

    def step(self, closure):
        with torch.enable_grad():
            loss = closure()
        with section("optimizer"):
            self.module.training_state.update(loss, self.module.grads)
        return loss


class DiffusionModule(LightningModule):
    """The eager step of `stable_diffusion.train`, cut where Lightning cuts it. `index`: that of the step at hand."""

    def __init__(self, state):
        super().__init__()
        self.training_state, self.unet = state, state.unet
        self.index, self.grads = 0, None

    def training_step(self, batch, batch_idx):
        state = self.training_state
        with section("noise"):
            x, t, target = state.noisy_latents(batch["moments"])
        with section("forward"):
            loss = F.mse_loss(state.model(x, t, batch["context"]), target)
        mark()
        return loss

    def backward(self, loss):
        state = self.training_state
        with section("backward"):
            # Not loss.backward(): the gradients are those of the other variants, in memory format too.
            grads = torch.autograd.grad(state.scaled(loss), state.parameters)
            self.grads = state.reduce(grads)
        mark()

    def configure_optimizers(self):
        return UpdateOptimizer(self)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.training_state.end_step(self.index)
