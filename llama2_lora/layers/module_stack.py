"""Layers as modules under autograd: Transformer Engine's, as most people train, and plain PyTorch's."""

import torch
import torch.nn.functional as F

from common.precision.fp8 import NoScaling
from common.precision.transformer_engine import TransformerEngineScaling
from graph_worth import mark, section
from llama2_lora.config import Config
from llama2_lora.layers import plain, transformer_engine

MARK_EVERY = 8


class ModuleStack:
    """All layers with embedding and head, as one autograd graph.

    kind: "te" or "torch". loss: FP32, 0-d, the last step's. Gradients go to adapters.grads.
    """

    def __init__(self, kind: str, config: Config, weights, adapters, inputs):
        self.config, self.weights, self.adapters, self.inputs = config, weights, adapters, inputs
        device, self.fp8 = weights.device, NoScaling()
        if kind == "te":
            recipe = transformer_engine.recipe_of(config)
            self.layers = transformer_engine.make_layers(config, weights, adapters, recipe)
            if recipe:
                self.fp8 = TransformerEngineScaling(self.layers, given=recipe)
        else:
            self.layers = plain.make_layers(config, weights, adapters, inputs)
        # A step calls these; graph_layer_te puts wrapped layers here.
        self.calls = list(self.layers)
        # The embedding is frozen: nothing needs the gradient of its output, in graphs as little as without.
        self.x = torch.zeros(config.tokens, config.hidden, dtype=weights.embedding.dtype, device=device)
        self.loss = torch.zeros((), device=device)

    def forward_and_backward(self) -> None:
        """Compute `loss` and adapters.grads of the inputs."""
        with section("embedding"):
            self.adapters.grads.zero_()
            torch.index_select(self.weights.embedding, 0, self.inputs["tokens"], out=self.x)
        with section("forward"), self.fp8.forward():
            hidden = self.x
            for index, layer in enumerate(self.calls):
                hidden = layer(hidden)
                if index % MARK_EVERY == 0:
                    mark(hidden)
        mark()
        with section("loss"):
            total = self._loss(hidden)
            del hidden
        with section("backward"), self.fp8.backward():
            total.backward()
        mark()

    def _loss(self, hidden):
        w = self.weights
        normed = F.rms_norm(hidden, w.final_norm.shape, w.final_norm, self.config.norm_eps)
        losses = F.cross_entropy(F.linear(normed, w.head).float(), self.inputs["targets"], reduction="none")
        total = (losses * self.inputs["weights"]).sum()
        self.loss.copy_(total.detach())
        return total

    def update_scales(self) -> None:
        """Transformer Engine updates its scales in the contexts of `fp8`."""

    def reset(self, first_step: int = 0) -> None:
        """first_step: not used, as dropout draws from torch's generator."""
        self.fp8.reset()

    def named_state(self):
        yield from self.fp8.named_state()
