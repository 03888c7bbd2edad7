"""LoRA by peft on a Llama of Llama 3.2 1B's shape, in bf16: 2 sequences of 256 tokens, AdamW on the adapters."""

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM


def build(device):
    torch.manual_seed(0)
    on_gpu = device.type == "cuda"
    sizes = {"vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": True}
    if not on_gpu:
        sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, use_cache=False)).to(device, torch.bfloat16)
    lora = LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, lora_dropout=0.1, target_modules=["q_proj", "v_proj"])
    model = get_peft_model(model, lora).train()
    adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=2e-4, fused=True, capturable=on_gpu)
    batches = [torch.randint(sizes["vocab_size"], (2, 256) if on_gpu else (2, 32)).to(device) for _ in range(8)]

    def step(input_ids):
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(input_ids=input_ids, labels=input_ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step, batches, [model, optimizer]
