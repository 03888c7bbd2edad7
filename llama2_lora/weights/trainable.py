"""The adapters of all layers: one flat buffer of values and one of gradients, with a view for each matrix."""

import math

import torch

from llama2_lora.config import Config


class Adapters:
    """values, grads: main dtype, flat. main_grad: FP32, flat, read by the optimizer.

    layers[i], layer_grads[i]: name as in `Config.adapters` -> view. A gradient is written, not added to: a step has
    one microbatch.
    """

    def __init__(self, config: Config, dtype, device):
        self.config = config
        count = config.layers * sum(rows * columns for rows, columns in config.adapters.values())
        self.values, self.grads = (torch.zeros(count, dtype=dtype, device=device) for _ in range(2))
        self.main_grad = torch.zeros(count, device=device)
        self.layers, self.layer_grads = self.views(self.values), self.views(self.grads)

    def views(self, flat) -> list[dict[str, torch.Tensor]]:
        """Views of a flat tensor laid out as `values`: for each layer, name -> matrix."""
        views, place = [], 0
        for _ in range(self.config.layers):
            layer = {}
            for name, (rows, columns) in self.config.adapters.items():
                layer[name] = flat[place : place + rows * columns].view(rows, columns)
                place += rows * columns
            views.append(layer)
        return views

    def named(self, flat):
        """(layers.<i>.<name>, view) of a flat tensor laid out as `values`."""
        for index, layer in enumerate(self.views(flat)):
            for name, view in layer.items():
                yield f"layers.{index}.{name}", view

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
                    bound = 1 / math.sqrt(view.shape[1])
                    view.uniform_(-bound, bound, generator=generator)
