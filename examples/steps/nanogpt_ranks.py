"""nanoGPT's training step on several ranks: replicas by DDP, or shards by FSDP2. make measure ... NGPU=2."""

import torch
import torch.distributed as dist
from nanogpt import GPT
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel


def build_ddp(device):
    return build(device, DistributedDataParallel)


def build_fsdp(device):
    def shard(model):
        for block in model.blocks:
            fully_shard(block)
        return fully_shard(model)

    return build(device, shard)


def build(device, parallel):
    torch.manual_seed(1337)
    on_gpu = device.type == "cuda"
    model = parallel((GPT() if on_gpu else GPT(tokens=32, layers=2, heads=2, width=64)).to(device))
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1, fused=True, capturable=on_gpu
    )
    torch.manual_seed(dist.get_rank())  # each rank has its own text
    shape = (64, 257) if on_gpu else (4, 33)
    batches = [torch.randint(65, shape).to(device) for _ in range(8)]

    def step(batch):
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(batch[:, :-1], batch[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    return step, batches, [model, optimizer]
