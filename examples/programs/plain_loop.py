"""nanoGPT or Muon in a loop of its own: a loader, a log every 10 steps, a checkpoint at the end.

python -m examples.programs.plain_loop --model muon --form graphed
"""

import tempfile
from importlib import import_module

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from examples.programs.clock import Clock
from graph_worth import graphed, one_stream


def data_like(batch, number):
    """Return the rows of so many batches: noise, or tokens of which some are frequent, so that a model can learn."""
    shape = number * len(batch), *batch.shape[1:]
    return (
        torch.randn(shape) if batch.is_floating_point() else (torch.rand(shape) ** 3 * (1 + batch.max().item())).long()
    )


def loader_like(batch, clock):
    """Return a loader whose processes take whole batches."""
    data = TensorDataset(data_like(batch, clock.num_batches))
    sampler = BatchSampler(RandomSampler(data), len(batch), drop_last=True)
    return DataLoader(data, sampler=sampler, batch_size=None, num_workers=2, pin_memory=clock.on_gpu)


def main(clock, folder):
    if clock.form == "graphed":
        one_stream()
    device = clock.device
    train, batches, owned = import_module(f"examples.steps.{clock.model}").build(device)
    loader, losses = loader_like(batches[0], clock), []
    if clock.form == "compile":
        owned[0].compile()

    def step(batch):
        return train(batch[0].to(device, non_blocking=True))

    if clock.form == "graphed":
        step = graphed(step, owned)
    clock.begin()
    for index, batch in enumerate(loader, 1):
        loss = step(batch)
        if index % 10 == 0:
            losses.append(loss.item())
        clock.step()
    torch.save([part.state_dict() for part in owned], f"{folder}/checkpoint.pt")
    clock.end(losses, getattr(step, "replays", 0))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(Clock(("nanogpt", "muon")), folder)
