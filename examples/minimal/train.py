"""The smallest model here: a two-layer transformer whose whole training step is one CUDA graph. Start yours from it.

for step in range(num_steps):
    batch.copy_(tokens(step))                                 # not captured: each batch lies elsewhere on the host
    loss = cross_entropy(model(batch[:, :-1]), batch[:, 1:])  # captured from here
    loss.backward(); clip(gradients); adamw.step()            # to here

python -m examples.minimal.train --variant graph_step         trains
make bench MODEL=examples/minimal                             measures eager against graph_step
"""

# ruff: noqa: E402 - torch is imported once the command line has been read
from dataclasses import dataclass

from common.config import Timing, option, parse
from common.variant_table import Declared, about, table


@dataclass(frozen=True, kw_only=True)
class Config(Timing):
    width: int = option(64, "width of the model")
    batch: int = option(4, "sequences in a step")
    tokens: int = option(32, "tokens of a sequence")


PRESETS = {"tiny": Config(), "bench": Config(width=512, batch=8, tokens=256)}
EAGER = {"make": "common.variant:Eager", "options": {"step": "examples.minimal.train:eager_step"}}
STEP = {"make": "examples.minimal.train:GraphedStep", "graphs": 1, "replays": 1}
VARIANTS = table(
    Declared("eager", "kernels launched one by one", "eager", parity="bitwise", **EAGER),
    Declared("graph_step", "the whole step in one graph", "graph", parity="bitwise", **STEP),
)

if __name__ == "__main__":
    args = parse("examples.minimal", Config, PRESETS, VARIANTS, about=about(VARIANTS))  # needs no torch

import torch
from torch import nn

from common.capture.pool import Pool
from common.measuring.marks import section
from common.script.main import main
from common.variant import Capture, State, Variant, Workload, warm_up


class Layer(nn.TransformerEncoderLayer):
    def forward(self, x):
        return super().forward(x, nn.Transformer.generate_square_subsequent_mask(x.shape[1], x.device), is_causal=True)


class Training(State):
    """All that a step reads and writes. Tensors stay where they are, for a graph holds their addresses."""

    def __init__(self, config: Config, device: torch.device):
        torch.manual_seed(0)
        layers = [Layer(config.width, 4, 4 * config.width, dropout=0.0, batch_first=True) for _ in range(2)]
        self.model = nn.Sequential(nn.Embedding(256, config.width), *layers, nn.Linear(config.width, 256)).to(device)
        self.device, self.losses, self.parameters = device, {}, list(self.model.parameters())
        self.batch = torch.zeros(config.batch, config.tokens + 1, dtype=torch.int64, device=device)
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-3, fused=True, capturable=device.type == "cuda")
        self.optimizer.step()  # makes its moments
        moments = [tensor.zero_() for own in self.optimizer.state.values() for tensor in own.values()]
        self.tensors = [*(parameter.detach() for parameter in self.parameters), *moments]
        self.start = [tensor.clone() for tensor in self.tensors]

    def reset(self):
        torch._foreach_copy_(self.tensors, self.start)

    def named_state(self):
        return [(str(index), tensor) for index, tensor in enumerate(self.tensors)]

    def read_losses(self, count):
        return [float(self.losses[index]) for index in range(count)]

    def load(self, index):
        with section("data"):  # never in a graph
            self.batch.copy_(torch.randint(256, self.batch.shape, generator=torch.Generator().manual_seed(index)))


def training_step(state: Training):
    """Train one step, from the batch to new weights. `graph_step` captures it; nothing in it waits for the device."""
    state.optimizer.zero_grad(set_to_none=False)  # gradients keep their addresses
    loss = nn.functional.cross_entropy(state.model(state.batch[:, :-1]).flatten(0, 1), state.batch[:, 1:].flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(state.parameters, 1.0)
    state.optimizer.step()
    return loss.detach()


def eager_step(state: Training, index: int):
    state.load(index)
    state.losses[index] = training_step(state)


class GraphedStep(Variant):
    def __init__(self, state: Training):
        self.state, self.pool = state, Pool(state.device)  # as torch.cuda.graph; without a GPU a host graph
        self.capture = Capture(strategy="the whole step", pools=[self.pool])
        warm_up(state, self.capture, eager_step)  # libraries choose their kernels
        with self.capture.timed("capture_s"):
            self.graph, self.loss = self.pool.capture(lambda: training_step(state), (state.batch,))

    def step(self, index: int):
        self.state.load(index)
        self.graph.replay()
        self.state.losses[index] = self.loss.clone()  # the next replay overwrites it

    def close(self):
        self.pool.release()


def workload(args, device: torch.device, rank: int, world_size: int):
    step = {"reference": eager_step, "items_per_step": args.config.batch, "unit": "sequences"}
    return args, Workload(model="examples.minimal", build=Training, variants=VARIANTS, **step)


if __name__ == "__main__":
    main("examples.minimal", args, workload)
