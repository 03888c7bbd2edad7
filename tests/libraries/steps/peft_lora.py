"""peft's LoRA, with dropout, on Transformers' Llama."""

import torch
from peft import LoraConfig, TaskType, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM


def build(device):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=128, **sizes)
    lora = LoraConfig(task_type=TaskType.CAUSAL_LM, r=8, lora_alpha=32, lora_dropout=0.1)
    model = get_peft_model(LlamaForCausalLM(config), lora).to(device).train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, fused=True, capturable=device.type == "cuda")
    texts = [torch.randint(0, 128, (4, 16)) for _ in range(8)]
    batches = [{"input_ids": text, "attention_mask": torch.ones_like(text), "labels": text} for text in texts]

    def step(batch):
        batch = {k: v.to(device) for k, v in batch.items()}
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step, batches, [model, optimizer]
