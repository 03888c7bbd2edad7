"""Layers as modules under autograd: Transformer Engine's, as most people train, and plain PyTorch's."""

import torch
import torch.nn.functional as F

from common.measuring.marks import mark
from common.training.parallel import collectives
from common.training.precision.fp8 import NoScaling, TransformerEngineScaling
from llama2_lora.config import Config
from llama2_lora.kernels.scaling import restored
from llama2_lora.layers import plain, transformer_engine

MARK_EVERY = 8


class ModuleStack:
    """Layers under autograd, with the methods of `handwritten.HandwrittenStack`.

    forward_all and backward_all are one autograd graph, as anyone would run it. forward(layer) and backward(layer),
    for captures, cut it between layers: hidden states and gradients are chained by memory, and `head_of_chain` lies
    between the two halves.

    kind: "te" or "torch". group, rank: with --cp, the name of the group of ranks that share a window, and this rank's
    number in it.
    """

    def __init__(self, kind: str, config: Config, weights, adapters, inputs, group=collectives.ALONE, rank: int = 0):
        self.config, self.weights, self.adapters, self.inputs = config, weights, adapters, inputs
        device, self.fp8 = weights.device, NoScaling()
        if kind == "te":
            recipe = transformer_engine.recipe_of(config)
            self.layers = transformer_engine.make_layers(config, weights, adapters, recipe, group, rank)
            if recipe:
                self.fp8 = TransformerEngineScaling(self.layers, config.amax_history)
        else:
            self.layers = plain.make_layers(config, weights, adapters, inputs, group, rank)
        # A step calls these; graph_layer_te puts wrapped layers here.
        self.calls = list(self.layers)
        # The embedding is frozen: nothing needs the gradient of its output, in graphs as little as without.
        self.x = torch.zeros(config.tokens, config.hidden, dtype=weights.embedding.dtype, device=device)
        self.grad = torch.zeros_like(self.x)
        self.loss = torch.zeros((), device=device)
        self.saved, self.chain, self.chain_grad = {}, self.x, self.grad

    def embed(self) -> None:
        self.adapters.grads.zero_()
        torch.index_select(self.weights.embedding, 0, self.inputs["tokens"], out=self.x)

    def forward_all(self) -> None:
        hidden = self.x
        with self.fp8.forward():
            for index, layer in enumerate(self.calls):
                hidden = layer(hidden)
                if index % MARK_EVERY == 0:
                    mark(hidden)
        self.hidden = hidden

    def head(self) -> None:
        self.total = self._loss(self.hidden)
        self.hidden = None

    def backward_all(self) -> None:
        with self.fp8.backward():
            self.total.backward()
        self.total = None

    def _loss(self, hidden):
        w = self.weights
        normed = F.rms_norm(hidden, w.final_norm.shape, w.final_norm, self.config.norm_eps)
        losses = F.cross_entropy(F.linear(normed, w.head).float(), self.inputs["targets"], reduction="none")
        total = (losses * self.inputs["weights"]).sum()
        self.loss.copy_(total.detach())
        return total

    # -- by layer, for captures --------------------------------------------------------------------

    def forward(self, layer: int) -> None:
        x = self.x if layer == 0 else self.chain
        output = self.layers[layer](x)
        self.saved[layer] = x, output
        self.chain, self.chain_grad = output.detach().requires_grad_(), self.grad

    def head_of_chain(self) -> None:
        """Loss of the last layer's output. Its gradient goes to `grad`, which the last layer's backward reads."""
        hidden = self.chain.detach().requires_grad_()
        self._loss(hidden).backward()
        self.grad.copy_(hidden.grad)

    def backward(self, layer: int) -> None:
        x, output = self.saved.pop(layer)
        x.grad = None
        output.backward(self.chain_grad)
        self.chain_grad, x.grad = x.grad, None

    def capturing(self):
        """Around captures: no update of scales is recorded."""
        return self.fp8.capturing()

    def replaying_forward(self):
        return self.fp8.forward()

    def replaying_backward(self):
        return self.fp8.backward(replayed=True)

    def update_scales(self) -> None:
        """Transformer Engine updates its scales in the contexts of `fp8`."""

    @torch.no_grad()
    def evaluate(self) -> None:
        """`loss` of the inputs without dropout, eager; scales stay as they are."""
        self.layers.eval()
        with restored(tensor for _, tensor in self.fp8.named_state()):
            hidden = F.embedding(self.inputs["tokens"], self.weights.embedding)
            with self.fp8.forward():
                for layer in self.layers:
                    hidden = layer(hidden)
            self._loss(hidden)
        self.layers.train()

    def reset(self, first_step: int = 0) -> None:
        """first_step: not used, as dropout draws from torch's generator."""
        self.fp8.reset()

    def named_state(self):
        yield from self.fp8.named_state()
