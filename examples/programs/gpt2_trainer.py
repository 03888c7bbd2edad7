"""GPT-2 (124M) by Transformers' Trainer: 8 sequences of 256 tokens, bf16, logs, a checkpoint at the end of the epoch.

python -m examples.programs.gpt2_trainer --form graphed
"""

import tempfile

from transformers import Trainer, TrainerCallback, TrainingArguments

from examples.programs.clock import Clock
from examples.programs.plain_loop import data_like
from examples.steps.gpt2_transformers import build
from graph_worth import one_stream
from graph_worth.transformers import GraphedTrainer


class Ticks(TrainerCallback):
    def __init__(self, clock):
        self.clock = clock

    def on_step_end(self, *args, **kwargs):
        self.clock.step()


def main(clock, folder):
    if clock.form == "graphed":
        one_stream()
    _, batches, (model, _) = build(clock.device)
    rows = [{"input_ids": row, "labels": row} for row in data_like(batches[0], clock.num_batches)]
    args = TrainingArguments(
        folder,
        num_train_epochs=1,
        per_device_train_batch_size=len(batches[0]),
        bf16=True,
        learning_rate=6e-4,
        weight_decay=0.1,
        optim="adamw_torch_fused",
        logging_steps=10,
        save_strategy="epoch",
        dataloader_num_workers=2,
        torch_compile=clock.form == "compile",
        report_to=[],
        disable_tqdm=True,
        use_cpu=not clock.on_gpu,
    )
    kind = GraphedTrainer if clock.form == "graphed" else Trainer
    trainer = kind(model, args, train_dataset=rows, callbacks=[Ticks(clock)])
    clock.begin()
    trainer.train()
    losses = [float(row["loss"]) for row in trainer.state.log_history if "loss" in row]
    clock.end(losses, getattr(trainer, "num_replays", 0))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(Clock(), folder)
