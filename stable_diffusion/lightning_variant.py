"""The variant `graph_step_lightning`: the full iteration replayed inside the loop of Lightning's Trainer.

A timed step is one turn of Trainer.fit's own loop: fetch the batch, hooks, replay, progress, hooks. The loop runs in a
greenlet, which hands control back whenever it asks for a batch. There is no second thread, so stream and host time are
those of the other variants, and a switch costs less than a microsecond. The parts of the step are eager's.
"""

import logging
import signal
import warnings

import greenlet
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.environments import LightningEnvironment

from graph_worth import CUDAGraphCallback, mark, section

WARMUP_STEPS = 3


class UpdateOptimizer(torch.optim.Optimizer):
    """`State.update` as an optimizer for Lightning. Its state lives in the State, so no checkpoint would hold it."""

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
    """The training step of one batch. `index` is the step's, `grads` are its gradients."""

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
            self.grads = state.reduce(torch.autograd.grad(loss * state.scaler.scale, state.parameters))
        mark()

    def configure_optimizers(self):
        return UpdateOptimizer(self)

    def cpu(self):
        """Stays where it is. Trainer.fit moves its module to the CPU at its end; these weights are the State's."""
        return self

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.training_state.end_step(self.index)


class LightningGraph:
    """`graph_step` under Lightning: the capture is CUDAGraphCallback's, in the fourth step of Trainer.fit."""

    def __init__(self, state, capture):
        # Its remarks on devices and services are no part of a table.
        logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
        self.state, self.module = state, DiffusionModule(state)
        tensors = [tensor for _, tensor in state.named_state()]
        # Audits compare the losses; here a step is made once.
        self.callback = CUDAGraphCallback(tensors, warm_up=WARMUP_STEPS, verify=0, cpu="host_graph")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.trainer = _trainer(state.device, self.callback)
            self.loop = greenlet.greenlet(lambda: self.trainer.fit(self.module, StepLoader(self)))
            # Lightning takes SIGTERM for its own purposes; it must go on ending this process.
            handler = signal.getsignal(signal.SIGTERM)
            self.loop.switch()
            signal.signal(signal.SIGTERM, handler)
        state.inputs.reset()
        with capture.timed("warmup_s"):
            for index in range(WARMUP_STEPS):
                self.step(index)
        with capture.capturing():
            self.step(WARMUP_STEPS)
        capture.pools.append(self.callback.pool)

    def step(self, index: int):
        if self.loop.dead:
            raise RuntimeError("Trainer.fit has ended, after an error in an earlier step")
        self.loop.switch(index)

    def close(self):
        """Let Trainer.fit end as it does after its last batch; the graph is released then."""
        if not self.loop.dead:
            self.loop.switch(None)


def _trainer(device, callback):
    return Trainer(
        accelerator=device.type,
        devices=[device.index or 0] if device.type == "cuda" else 1,
        # Not the environment of torchrun or Slurm: this trainer has one process.
        plugins=[LightningEnvironment()],
        max_epochs=1,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback],
    )


class StepLoader:
    """The batches of Trainer.fit: each waits for the next `step(i)`, which loads batch i."""

    def __init__(self, variant):
        self.variant, self.outside = variant, variant.loop.parent

    def __len__(self):
        """Endless: where Lightning knows no length it fetches a batch ahead."""
        return 2**31

    def __iter__(self):
        while (index := self.outside.switch()) is not None:
            self.variant.module.index = index
            self.variant.state.begin_step(index)
            yield dict(self.variant.state.inputs.buffers)
