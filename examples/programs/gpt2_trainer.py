"""GPT-2 (124M) by Transformers' Trainer: 8 sequences of 256 tokens, bf16, logs, a checkpoint at the end of the epoch.

python -m examples.programs.gpt2_trainer --form graphed
"""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from examples.programs.clock import Clock
from examples.programs.plain_loop import tokens_like
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
    torch.manual_seed(0)
    tiny = {"vocab_size": 256, "n_positions": 32, "n_embd": 64, "n_layer": 2, "n_head": 2}
    config = GPT2Config(**({} if clock.on_gpu else tiny), bos_token_id=0, eos_token_id=0, use_cache=False)
    size, length = (8, 256) if clock.on_gpu else (4, 32)
    rows = tokens_like((clock.num_batches * size, length), config.vocab_size)
    args = TrainingArguments(
        folder,
        num_train_epochs=1,
        per_device_train_batch_size=size,
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
    dataset = [{"input_ids": row, "labels": row} for row in rows]
    trainer = kind(GPT2LMHeadModel(config), args, train_dataset=dataset, callbacks=[Ticks(clock)])
    clock.begin()
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    clock.end([float(loss) for loss in losses], getattr(trainer, "num_replays", 0))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(Clock(), folder)
