"""Weights, inputs and comparisons for the tests of LSTMs."""

import torch

from rnnt.lstm import lstm


def weights_of(inputs, hidden, seed=0, scale=1.0):
    """w_ih, w_hh, b_ih, b_hh, FP16."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (4 * hidden, inputs), (4 * hidden, hidden), (4 * hidden,), (4 * hidden,)
    bound = scale / hidden**0.5
    return [((torch.rand(shape, generator=generator) * 2 - 1) * bound).half() for shape in shapes]


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).half()


def torch_lstm(weights):
    hidden = weights[1].shape[1]
    layer = torch.nn.LSTM(weights[0].shape[1], hidden, dtype=torch.float64)
    with torch.no_grad():
        for parameter, weight in zip(layer.parameters(), weights, strict=True):
            parameter.copy_(weight)
    return layer


def close(found, expected, bound):
    """By the largest difference, relative to the largest value."""
    scale = expected.double().abs().max()
    assert (found.double() - expected.double()).abs().max() <= bound * scale


def stack_of(num_layers, inputs, hidden):
    return [weights_of(hidden if index else inputs, hidden, seed=index, scale=2.0) for index in range(num_layers)]


def run_stack(x, layers, grad, *how, **more):
    """Output and gradients of x and all weights."""
    narrow = [tensor.clone().requires_grad_() for tensor in (x, *(weight for layer in layers for weight in layer))]
    output = lstm(narrow[0], [narrow[1 + 4 * index :][:4] for index in range(len(layers))], *how, **more)
    return output, *torch.autograd.grad(output, narrow, grad)
