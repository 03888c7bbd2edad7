"""Small mixtures of experts for the tests."""

from dataclasses import replace

import torch
import torch.nn.functional as F

from moe.config import PRESETS
from moe.state import State

CPU = torch.device("cpu")


def make(preset="tiny", dtype=torch.bfloat16, device=CPU, **changes) -> State:
    """The state of a preset with some fields changed."""
    return State(replace(PRESETS[preset], **changes), device, dtype)


def logits(state: State, microbatch: int = 0) -> torch.Tensor:
    """Logits [t, vocab] of a microbatch of the static inputs."""
    with torch.no_grad():
        inputs, hidden = state.inputs_of(microbatch), state.embed(microbatch)
        for layer in state.layers:
            hidden = layer(hidden, inputs)
        ends = state.ends
        return F.linear(F.rms_norm(hidden, ends.final_norm.shape, ends.final_norm, ends.eps), ends.head)
