"""Small Llamas for the tests, and how a variant's steps are followed."""

from dataclasses import replace

import torch

from llama31 import train
from llama31.config import PRESETS, ROPE_SCALING
from llama31.state import State
from tests.helpers.followed import follow

CPU = torch.device("cpu")
TINY = replace(PRESETS["tiny"], layer="torch")
# What config.json of a Llama 3.1 says beside what Llama 2's does.
LLAMA3 = {"rope_theta": 500000.0, "rope_scaling": {**ROPE_SCALING, "rope_type": "llama3"}}


def make(rank=0, world_size=1, dtype=torch.bfloat16, **changes) -> State:
    """The tiny preset's state with some fields changed."""
    return State(replace(TINY, **changes), CPU, rank, world_size, dtype)


def follow_eager(state, count):
    return follow(state, lambda index: train.eager_step(state, index), count)
