"""The adapters of all layers: one flat buffer of values and one of gradients, with a view for each matrix."""

import math

import torch

from llama2_lora.config import REPLICATED, Config
from llama2_lora.weights import shards


class Adapters:
    """values, grads: main dtype, flat. main_grad: FP32, flat, read by the optimizer.

    layers[i], layer_grads[i]: name as in `Config.adapters` -> view. A gradient is written, not added to: a step has
    one microbatch. With --tp these are the shards of tensor rank `rank`.
    """

    def __init__(self, config: Config, dtype, device, rank: int = 0):
        self.config, self.rank = config, rank
        count = config.layers * sum(rows * columns for rows, columns in config.shard.adapters.values())
        self.values, self.grads = (torch.zeros(count, dtype=dtype, device=device) for _ in range(2))
        self.main_grad = torch.zeros(count, device=device)
        self.layers, self.layer_grads = self.views(self.values), self.views(self.grads)

    def views(self, flat) -> list[dict[str, torch.Tensor]]:
        """Views of a flat tensor laid out as `values`: for each layer, name -> matrix."""
        place = 0
        views: list[dict[str, torch.Tensor]] = [{} for _ in range(self.config.layers)]
        # Replicated matrices of all layers come first: one collective sums their gradients.
        for is_replicated in (True, False):
            for layer in views:
                for name, (rows, columns) in self.config.shard.adapters.items():
                    if (name in REPLICATED) is is_replicated:
                        layer[name] = flat[place : place + rows * columns].view(rows, columns)
                        place += rows * columns
        return views

    def replicated(self, flat) -> torch.Tensor:
        """View of the replicated matrices in a flat tensor laid out as `values`: the same on all tensor ranks."""
        shapes = self.config.adapters
        return flat[: self.config.layers * sum(math.prod(shapes[name]) for name in REPLICATED)]

    def named(self, flat):
        """(layers.<i>.<name>, view) of a flat tensor laid out as `values`."""
        for index, layer in enumerate(self.views(flat)):
            for name, view in layer.items():
                yield f"layers.{index}.{name}", view

    def named_whole(self, flats):
        """(layers.<i>.<name>, matrix of the whole model) of the flat tensors of all tensor ranks, in their order."""
        for named in zip(*map(self.named, flats), strict=True):
            path = named[0][0]
            yield path, shards.unsharded(self.config, path.split(".", 2)[2], [part for _, part in named])

    def collect(self) -> None:
        """main_grad = grads, in FP32."""
        self.main_grad.copy_(self.grads)

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """In place and seeded: a uniform within 1 / sqrt(inputs), b zero, as in PEFT and NeMo."""
        generator = torch.Generator(self.values.device).manual_seed(seed)
        self.values.zero_()
        for layer in self.layers:
            for name, view in layer.items():
                if name.endswith(".a"):
                    whole = view.new_empty(self.config.adapters[name])
                    bound = 1 / math.sqrt(whole.shape[1])
                    whole.uniform_(-bound, bound, generator=generator)
                    view.copy_(shards.shard_of(self.config, name, whole, self.rank))
