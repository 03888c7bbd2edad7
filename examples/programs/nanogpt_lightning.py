"""nanoGPT by Lightning: bf16, clipping, a log every 10 steps, a checkpoint at the end of the epoch.

python -m examples.programs.nanogpt_lightning --form graphed
"""

import csv
import tempfile
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from examples.programs.clock import Clock
from examples.programs.plain_loop import loader_like
from examples.steps.nanogpt import build
from graph_worth import one_stream
from graph_worth.lightning import CUDAGraphCallback


class Module(L.LightningModule):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def training_step(self, batch, batch_idx):
        loss = self.model(batch[0][:, :-1], batch[0][:, 1:])
        self.log("loss", loss)
        return loss

    def configure_gradient_clipping(self, *args, **kwargs):
        torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)

    def configure_optimizers(self):
        rate, options = torch.tensor(1e-3, device=self.device), {"fused": True, "capturable": True}
        return torch.optim.AdamW(self.parameters(), lr=rate, betas=(0.9, 0.99), weight_decay=0.1, **options)


def main(clock, folder):
    if clock.form == "graphed":
        one_stream()
    _, batches, (model, _) = build(clock.device)
    if clock.form == "compile":
        model.compile()
    graphs, logger = CUDAGraphCallback(), CSVLogger(folder)
    callbacks = [ModelCheckpoint(folder), LambdaCallback(on_train_batch_end=lambda *args: clock.step())]
    callbacks += [graphs] if clock.form == "graphed" else []
    logs = {"logger": logger, "log_every_n_steps": 10, "enable_progress_bar": False}
    trainer = L.Trainer(devices=1, max_epochs=1, precision="bf16-mixed", callbacks=callbacks, **logs)
    clock.begin()
    trainer.fit(Module(model), loader_like(batches[0], clock))
    rows = csv.DictReader(Path(logger.log_dir, "metrics.csv").read_text().splitlines())
    clock.end([float(row["loss"]) for row in rows if row["loss"]], graphs.num_replays)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(Clock(), folder)
