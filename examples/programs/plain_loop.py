"""nanoGPT or Muon in a loop of its own: a loader, a log every 10 steps, a checkpoint at the end.

python -m examples.programs.plain_loop --model muon --form graphed
"""

import tempfile
from importlib import import_module

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from examples.programs.clock import Clock
from graph_worth import graphed, one_stream


def tokens_like(shape, vocabulary):
    """Return made tokens, of which some are more frequent, so that there is something to learn."""
    return (torch.rand(shape) ** 3 * vocabulary).long()


def loader_of(data, batch_size, device):
    """Return a loader that takes whole batches from a tensor, in processes of its own."""
    sampler = BatchSampler(RandomSampler(data), batch_size, drop_last=True)
    pinned = device.type == "cuda"
    return DataLoader(TensorDataset(data), sampler=sampler, batch_size=None, num_workers=2, pin_memory=pinned)


def main(clock, folder):
    if clock.form == "graphed":
        one_stream()
    device = clock.device
    train, (batch, *_), owned = import_module(f"examples.steps.{clock.args.model}").build(device)
    shape = clock.num_batches * len(batch), *batch.shape[1:]
    data = torch.randn(shape) if batch.is_floating_point() else tokens_like(shape, 65)
    loader, losses = loader_of(data, len(batch), device), []
    if clock.form == "compile":
        owned[0].compile()

    def step(batch):
        (rows,) = batch
        return train(rows.to(device, non_blocking=True))

    eager = step
    if clock.form == "graphed":
        step = graphed(step, owned)
    clock.begin()
    for index, batch in enumerate(loader, 1):
        loss = step(batch)
        if index % 10 == 0:
            losses.append(loss.item())
        clock.step()
    torch.save([part.state_dict() for part in owned], f"{folder}/checkpoint.pt")
    clock.end(losses, 0 if step is eager else step.replays)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(Clock(model=("nanogpt", "muon")), folder)
