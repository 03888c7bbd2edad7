"""Training with an allocator that is shaken between steps: each step finds other free memory."""

import contextlib
import itertools
import random

import torch


def train(model, parameters, num_steps: int, make_input, shakes: bool, streams=(), between=None):
    """Train from one seed with AdamW and random inputs.

    Args:
        model: called with the input; its output is pressed towards zero.
        parameters: of it.
        num_steps: steps.
        make_input: makes a step's input, by torch's generator.
        shakes: between steps tensors of random sizes are made and dropped.
        streams: take turns as the stream of a step; each waits for the one before.
        between: is called before each step.

    Returns:
        losses and gradient norms of all steps, and the addresses of inputs and outputs.
    """
    optimizer, chosen = torch.optim.AdamW(parameters, lr=1e-3), random.Random(0)
    torch.manual_seed(1)
    found, addresses, held = [], set(), []
    turns = itertools.cycle(streams or (None,))
    for _ in range(num_steps):
        if between is not None:
            between()
        with _on(next(turns)):
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


@contextlib.contextmanager
def _on(stream):
    """Make a stream the current one, which waits for it afterwards; None: do nothing."""
    if stream is None:
        yield
        return
    caller = torch.cuda.current_stream()
    stream.wait_stream(caller)
    with torch.cuda.stream(stream):
        yield
    caller.wait_stream(stream)
