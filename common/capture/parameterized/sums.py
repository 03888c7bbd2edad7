"""Gradients added to the buffers of a step, those of a layer in one launch.

Models that sum gradients over microbatches have a hook at each parameter: main_grad += grad, a kernel each. Here
the last hook of a layer launches all of its additions as one region.
"""

import torch

from common.capture.parameterized.backend import Region


class Sums:
    """The hooks of some layers, exchanged for one launch a layer between `enter` and `leave`.

    layers: parameters of each layer, all of which get a gradient in each backward pass. Only those with a hook count,
    which must be main_grad.add_(grad) and grad = None. collect: called with each region that is made.
    """

    def __init__(self, layers: list[list[torch.nn.Parameter]], collect):
        self._collect = collect
        self._layers = [own for layer in layers if (own := [p for p in layer if p._post_accumulate_grad_hooks])]
        self._hooks = [[dict(p._post_accumulate_grad_hooks) for p in layer] for layer in self._layers]
        self._num_ready = [0] * len(self._layers)
        # Layers with the same shapes and strides share a region.
        self._regions: dict[tuple, Region] = {}

    def enter(self) -> None:
        """Put the launches in the place of the hooks."""
        for index, layer in enumerate(self._layers):
            self._num_ready[index] = 0
            for parameter in layer:
                _exchange(parameter, {0: self._hook_of(index)})

    def leave(self) -> None:
        """Put the hooks back."""
        for layer, hooks in zip(self._layers, self._hooks, strict=True):
            for parameter, own in zip(layer, hooks, strict=True):
                _exchange(parameter, own)

    def _hook_of(self, index):
        def hook(parameter):
            self._num_ready[index] += 1
            if self._num_ready[index] == len(self._layers[index]):
                self._num_ready[index] = 0
                self._add(self._layers[index])

        return hook

    @torch.no_grad()
    def _add(self, layer):
        tensors = [parameter.main_grad for parameter in layer] + [parameter.grad for parameter in layer]
        shapes = tuple((tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors)
        region = self._regions.get(shapes)
        if region is None:
            region = self._regions[shapes] = Region(f"sums {len(self._regions)}")
            # The sums stay where they are, gradients come in any memory.
            region.capture(_add, tensors, fixed=range(len(layer)))
            self._collect(region)
        if region.state != "parameterized" or region.launch(tensors) is None:
            _add(*tensors)
        for parameter in layer:
            parameter.grad = None


def _add(*tensors):
    half = len(tensors) // 2
    for total, gradient in zip(tensors[:half], tensors[half:], strict=True):
        total.add_(gradient)
    return ()


def _exchange(parameter, hooks):
    """Change a parameter's hooks in place: autograd reads the same dict."""
    parameter._post_accumulate_grad_hooks.clear()
    parameter._post_accumulate_grad_hooks.update(hooks)
