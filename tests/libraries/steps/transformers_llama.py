"""Transformers' Llama under bf16 autocast, the first sequence padded."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def build(device):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=128, **sizes)
    model = LlamaForCausalLM(config).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, capturable=device.type == "cuda")
    texts = [torch.randint(0, 128, (4, 16)) for _ in range(8)]
    mask = torch.ones(4, 16, dtype=torch.long, device=device)
    mask[0, 12:] = 0

    def step(input_ids):
        input_ids = input_ids.to(device)
        with torch.autocast(device.type, torch.bfloat16):
            labels = input_ids.masked_fill(mask == 0, -100)
            loss = model(input_ids, attention_mask=mask, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step, texts, [model, optimizer]
