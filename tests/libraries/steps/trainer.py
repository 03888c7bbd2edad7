"""Transformers' Trainer: the body of its inner training loop."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, get_linear_schedule_with_warmup


def build(device):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=128, **sizes)
    args = TrainingArguments("out", max_steps=1000, report_to="none", use_cpu=device.type == "cpu")
    texts = [torch.randint(0, 128, (4, 16)) for _ in range(8)]
    batches = [{"input_ids": text, "labels": text} for text in texts]
    model = LlamaForCausalLM(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, capturable=not args.use_cpu)  # <- learning rate
    schedule = get_linear_schedule_with_warmup(optimizer, 10, args.max_steps)
    trainer = Trainer(model, args, train_dataset=[0] * 8000, optimizers=(optimizer, schedule))
    trainer.current_gradient_accumulation_steps = 1

    def step(batch):
        loss = trainer.training_step(model, batch)
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
        trainer.optimizer.step()
        trainer.lr_scheduler.step()
        model.zero_grad()
        return loss

    return step, batches, [model, optimizer, schedule]
