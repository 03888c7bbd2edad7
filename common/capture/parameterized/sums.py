"""Gradients that backward regions add to the buffers of a step, each as soon as it is there.

Models that sum gradients over microbatches have a hook at each parameter: main_grad += grad, a kernel each, once the
whole backward region has returned. Here the region itself adds, and returns no gradient: none waits for the others.
"""

import copy
from collections.abc import Iterable, Sequence

import torch

# Parameters with a hook of the layer that an address belongs to, by address of each.
_layers: dict[int, list[torch.nn.Parameter]] = {}


def enter(layers: Iterable[list[torch.nn.Parameter]]) -> None:
    """Let backward regions that are captured from now on add the gradients of these layers.

    layers: parameters of each; none belongs to two. Those with a hook count, which must be main_grad.add_(grad) and
    grad = None, and nothing without a gradient: autograd calls it nevertheless.
    """
    for layer in layers:
        own = [parameter for parameter in layer if parameter._post_accumulate_grad_hooks]
        _layers.update({parameter.data_ptr(): own for parameter in own})


def leave(layers: Iterable[list[torch.nn.Parameter]]) -> None:
    """Undo `enter`."""
    for layer in layers:
        for parameter in layer:
            _layers.pop(parameter.data_ptr(), None)


def layer_of(inputs: Iterable[torch.Tensor]) -> list[torch.nn.Parameter]:
    """Return the parameters whose layer one of the tensors belongs to; empty where none does."""
    return next((_layers[address] for tensor in inputs if (address := tensor.data_ptr()) in _layers), [])


def places(inputs: Sequence[torch.Tensor]) -> dict[int, int]:
    """Return {index of the input: number in its layer} of the parameters whose gradients are to be added."""
    numbers = {parameter.data_ptr(): number for number, parameter in enumerate(layer_of(inputs))}
    return {index: numbers[at] for index, tensor in enumerate(inputs) if (at := tensor.data_ptr()) in numbers}


def adding(module: torch.fx.GraphModule, results: dict[int, int]) -> torch.fx.GraphModule:
    """Return the graph with main_grads as further inputs: it adds gradients to them, and returns None in their place.

    results: {index of the result: index of its main_grad}.
    """
    graph = copy.deepcopy(module.graph)
    (output,) = graph.find_nodes(op="output")
    returned, last = list(output.args[0]), graph.find_nodes(op="placeholder")[-1]
    totals = []
    for index in range(len(results)):
        with graph.inserting_after(last):
            last = graph.placeholder(f"main_grad_{index}")
        totals.append(last)
    for index, total in results.items():
        gradient, returned[index] = returned[index], None
        if gradient is not None:
            with graph.inserting_after(last if gradient.op == "placeholder" else gradient):
                graph.call_function(torch.ops.aten.add_.Tensor, (totals[total], gradient))
    output.args = (tuple(returned),)
    return torch.fx.GraphModule(module, graph)
