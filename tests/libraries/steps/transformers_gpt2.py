"""Transformers' GPT-2 in the loop of the Hugging Face course: the docs' AdamW and schedule stay Python numbers."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, get_scheduler


def build(device):
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=128, n_positions=32, n_embd=32, n_layer=2, n_head=2)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)  # <- optimizer, learning rate
    lr_scheduler = get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=1000)
    texts = [torch.randint(0, 128, (4, 16)) for _ in range(8)]
    batches = [{"input_ids": text, "attention_mask": torch.ones_like(text), "labels": text} for text in texts]
    model.train()

    def step(batch):
        batch = {k: v.to(device) for k, v in batch.items()}
        outputs = model(**batch)
        loss = outputs.loss
        loss.backward()
        optimizer.step()
        lr_scheduler.step()
        optimizer.zero_grad()
        return loss

    return step, batches, [model, optimizer, lr_scheduler]
