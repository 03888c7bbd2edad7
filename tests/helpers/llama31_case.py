"""Small Llamas for the tests, and how a variant's steps are followed."""

from dataclasses import replace

import numpy
import torch

from common.measuring.state_hash import StateHasher
from llama31 import train
from llama31.config import PRESETS, ROPE_SCALING
from llama31.state import State

CPU = torch.device("cpu")
TINY = replace(PRESETS["tiny"], layer="torch")
# What config.json of a Llama 3.1 says beside what Llama 2's does.
LLAMA3 = {"rope_theta": 500000.0, "rope_scaling": {**ROPE_SCALING, "rope_type": "llama3"}}


def make(rank=0, world_size=1, dtype=torch.bfloat16, **changes) -> State:
    """The tiny preset's state with some fields changed."""
    return State(replace(TINY, **changes), CPU, rank, world_size, dtype)


def follow(state, step, count):
    """Losses, gradient norms and hashes of all state after each of `count` steps from the seeded start."""
    state.reset()
    hasher = StateHasher(state.named_state())
    for index in range(count):
        step(index)
        hasher.update()
    return state.read_losses(count), state.read_grad_norms(count), hasher.hashes()


def follow_eager(state, count):
    return follow(state, lambda index: train.eager_step(state, index), count)


def difference(ours, eager, state) -> str:
    """In words, where two results of `follow` differ bit for bit first; "" where they do not."""
    names = [name for name, _ in state.named_state()]
    differ = numpy.argwhere(ours[2] != eager[2])
    if len(differ):
        return f"step {differ[0][0]}: {names[differ[0][1]]}"
    return "" if ours[:2] == eager[:2] else f"losses {ours[0]} {eager[0]}, norms {ours[1]} {eager[1]}"
