"""nanoGPT by Lightning: bf16, clipping, a log every 10 steps, a checkpoint at the end of the epoch.

python -m examples.programs.nanogpt_lightning --form graphed
"""

import csv
import tempfile
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from examples.programs.clock import Clock
from examples.programs.plain_loop import loader_of, tokens_like
from examples.steps.nanogpt import GPT
from graph_worth import one_stream
from graph_worth.lightning import CUDAGraphCallback


class Module(L.LightningModule):
    def __init__(self, model, is_graphed):
        super().__init__()
        self.model, self.is_graphed = model, is_graphed

    def training_step(self, batch, batch_idx):
        (tokens,) = batch
        loss = self.model(tokens[:, :-1], tokens[:, 1:])
        self.log("loss", loss)
        return loss

    def configure_gradient_clipping(self, *args, **kwargs):
        torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)

    def configure_optimizers(self):
        options = {"betas": (0.9, 0.99), "weight_decay": 0.1, "fused": True, "capturable": self.is_graphed}
        rate = torch.tensor(1e-3, device=self.device) if self.is_graphed else 1e-3
        return torch.optim.AdamW(self.parameters(), lr=rate, **options)


class Ticks(L.Callback):
    def __init__(self, clock):
        self.clock = clock

    def on_train_batch_end(self, *args):
        self.clock.step()


def main(clock, folder):
    if clock.form == "graphed":
        one_stream()
    L.seed_everything(1337)
    module = Module(GPT() if clock.on_gpu else GPT(tokens=32, layers=2, heads=2, width=64), clock.form == "graphed")
    size, length = (64, 257) if clock.on_gpu else (4, 33)
    loader = loader_of(tokens_like((clock.num_batches * size, length), 65), size, clock.device)
    if clock.form == "compile":
        module.model.compile()
    graphs, logger = CUDAGraphCallback(), CSVLogger(folder)
    callbacks = [ModelCheckpoint(folder), Ticks(clock), *([graphs] if clock.form == "graphed" else [])]
    trainer = L.Trainer(
        accelerator="auto",
        devices=1,
        max_epochs=1,
        precision="bf16-mixed",
        log_every_n_steps=10,
        logger=logger,
        callbacks=callbacks,
        enable_progress_bar=False,
    )
    clock.begin()
    trainer.fit(module, loader)
    rows = csv.DictReader(Path(logger.log_dir, "metrics.csv").read_text().splitlines())
    clock.end([float(row["loss"]) for row in rows if row["loss"]], graphs.num_replays)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(Clock(), folder)
