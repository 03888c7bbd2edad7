"""GPT-2 124M by Transformers: 8 sequences of 256 tokens, bf16 autocast, dropout, AdamW, clipping."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel


def build(device):
    torch.manual_seed(0)
    on_gpu = device.type == "cuda"
    tiny = {"vocab_size": 256, "n_positions": 32, "n_embd": 64, "n_layer": 2, "n_head": 2}
    config = GPT2Config(**({} if on_gpu else tiny), bos_token_id=0, eos_token_id=0, use_cache=False)
    model = GPT2LMHeadModel(config).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, weight_decay=0.1, fused=True, capturable=on_gpu)
    shape = (8, 256) if on_gpu else (4, 32)
    batches = [torch.randint(config.vocab_size, shape).to(device) for _ in range(8)]

    def step(input_ids):
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(input_ids=input_ids, labels=input_ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step, batches, [model, optimizer]
