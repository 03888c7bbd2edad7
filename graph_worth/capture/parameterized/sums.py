"""Gradients that backward regions add to the buffers of a step, each as soon as it is there.

Models that sum gradients over microbatches have a hook at each parameter: main_grad += grad, a kernel each, once the
whole backward region has returned. Here the region itself adds, and returns no gradient: none waits for the others.
"""

import copy
from collections.abc import Iterable, Sequence

import torch

from graph_worth.capture.graph_error import CaptureError

# The layer that each parameter belongs to, by address.
_layers: dict[int, list[torch.nn.Parameter]] = {}


def enter(layers: Iterable[list[torch.nn.Parameter]]) -> None:
    """Let backward regions that are captured from now on add the gradients of these layers.

    layers: parameters of each; none belongs to two. Those with a hook count, which must be main_grad.add_(grad) and
    grad = None, and nothing without a gradient: autograd calls it nevertheless. A pass uses each once and is
    loss.backward(): torch.autograd.grad would add, too, and get none.
    """
    for layer in layers:
        _layers.update({parameter.data_ptr(): layer for parameter in layer if parameter.numel()})


def leave(layers: Iterable[list[torch.nn.Parameter]]) -> None:
    """Undo `enter`."""
    for layer in layers:
        for parameter in layer:
            _layers.pop(parameter.data_ptr(), None)


def layer_of(inputs: Iterable[torch.Tensor]) -> list[torch.nn.Parameter]:
    """Return the parameters of the one layer that tensors belong to; empty where none does, or two layers have some."""
    layers = {id(layer): layer for tensor in inputs if (layer := _layers.get(tensor.data_ptr())) is not None}
    return layers.popitem()[1] if len(layers) == 1 else []


def places(inputs: Sequence[torch.Tensor]) -> dict[int, int]:
    """Return {index of the input: number in its layer} of the parameters whose gradients are to be added."""
    hooked = [(number, p) for number, p in enumerate(layer_of(inputs)) if p._post_accumulate_grad_hooks]
    numbers = {parameter.data_ptr(): number for number, parameter in hooked}
    if len(numbers) < len(hooked):
        # Two parameters at one address.
        return {}
    return {index: numbers[at] for index, tensor in enumerate(inputs) if (at := tensor.data_ptr()) in numbers}


def totals_of(layer: list[torch.nn.Parameter], numbers: Iterable[int]) -> tuple[torch.Tensor, ...]:
    """Return the main_grads of some of a layer's parameters. CaptureError where one has no hook."""
    parameters = [layer[number] for number in numbers if number < len(layer)]
    if not all(parameter._post_accumulate_grad_hooks for parameter in parameters):
        raise CaptureError("a backward region adds gradients of parameters that have no hook: capture it with these")
    return tuple([parameter.main_grad for parameter in parameters])  # type: ignore[attr-defined]


def adding(module: torch.fx.GraphModule, results: Sequence[int]) -> torch.fx.GraphModule:
    """Return the graph with main_grads as further inputs: it adds gradients to them, and returns None in their place.

    results: of which results, in the order of the main_grads.
    """
    graph = copy.deepcopy(module.graph)
    (output,) = graph.find_nodes(op="output")
    returned, last = list(output.args[0]), graph.find_nodes(op="placeholder")[-1]
    totals = []
    for index in results:
        with graph.inserting_after(last):
            last = graph.placeholder(f"main_grad_{index}")
        totals.append(last)
    for index, total in zip(results, totals, strict=True):
        gradient, returned[index] = returned[index], None
        if gradient is not None:
            with graph.inserting_after(last if gradient.op == "placeholder" else gradient):
                graph.call_function(torch.ops.aten.add_.Tensor, (total, gradient))
    output.args = (tuple(returned),)
    return torch.fx.GraphModule(module, graph)
