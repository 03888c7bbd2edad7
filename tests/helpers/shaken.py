"""Training with an allocator that is shaken between steps: each step finds other free memory."""

import random

import torch


def train(model, parameters, num_steps: int, make_input, shakes: bool):
    """Train from one seed with AdamW and random inputs.

    Args:
        model: called with the input; its output is pressed towards zero.
        parameters: of it.
        num_steps: steps.
        make_input: makes a step's input, by torch's generator.
        shakes: between steps tensors of random sizes are made and dropped.

    Returns:
        losses and gradient norms of all steps, and the addresses of inputs and outputs.
    """
    optimizer, chosen = torch.optim.AdamW(parameters, lr=1e-3), random.Random(0)
    torch.manual_seed(1)
    found, addresses, held = [], set(), []
    for _ in range(num_steps):
        x = make_input()
        if shakes:
            held.append(torch.empty(int(2 ** chosen.uniform(9, 22)), dtype=torch.uint8, device=x.device))
            held = [tensor for tensor in held if chosen.random() < 0.9]
        optimizer.zero_grad()
        y = model(x)
        loss = y.float().square().mean()
        loss.backward()
        norm = torch.stack([parameter.grad.float().norm() for parameter in parameters]).norm()
        optimizer.step()
        found += [loss.detach(), norm]
        addresses |= {x.data_ptr(), y.data_ptr()}
    return found, addresses
