"""RNN-T as MLPerf trains it: 49,071,616 parameters in 35 tensors at the benchmark's sizes.

Source: MLPerf training v3.1, NVIDIA's rnnt/model.py and common/rnn.py with baseline_v3-1023sp.yaml and decoupled_rnns.
Stacks consist of single-layer LSTMs with torch's dropout between them: cuDNN's own dropout keeps a state that no graph
can record.

Nothing is masked. LSTMs run forwards in time, so padding changes only values after an utterance's end, and the loss
does not read those. One exception, as in the benchmark: the last frame of an utterance of odd length is stacked with
the frame after it. That is 0 at the end of the tensor, and an LSTM's output for padding elsewhere.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

from graph_worth import mark
from rnnt.config import Config
from rnnt.loss import joint_hidden

STACK = 2


class Encoder(nn.Module):
    """forward(features [T, B, F], lengths int32 [B]) -> (f [B, T2, J], lengths int32 [B] of f), T2 = ceil(T / 2)."""

    def __init__(self, config: Config):
        super().__init__()
        hidden = config.encoder_hidden
        self.pre = _stack(config.features, hidden, config.pre_layers)
        self.post = _stack(STACK * hidden, hidden, config.post_layers)
        self.dropout = nn.Dropout(config.encoder_dropout)
        self.linear = nn.Linear(hidden, config.joint_hidden)

    def forward(self, features, lengths):
        x = stack_time(_run_stack(self.pre, features, self.dropout))
        x = _run_stack(self.post, x, self.dropout)
        return self.linear(x.transpose(0, 1)), (lengths + (STACK - 1)) // STACK


def stack_time(x):
    """[T, B, H] -> [ceil(T / 2), B, 2 H]: pairs of frames side by side, a zero frame after an odd last one."""
    x = F.pad(x, (0, 0, 0, 0, 0, -len(x) % STACK))
    return x.unflatten(0, (-1, STACK)).transpose(1, 2).flatten(2)


class Prediction(nn.Module):
    """forward(tokens int64 [B, U]) -> g [B, U + 1, J]; before the first token is a row of zeros."""

    def __init__(self, config: Config):
        super().__init__()
        hidden = config.prediction_hidden
        # No row for the blank, which is never fed back.
        self.embedding = nn.Embedding(config.vocab - 1, hidden)
        self.layers = _stack(hidden, hidden, config.prediction_layers)
        self.dropout = nn.Dropout(config.prediction_dropout)
        self.linear = nn.Linear(hidden, config.joint_hidden)

    def forward(self, tokens):
        x = F.pad(self.embedding(tokens).transpose(0, 1), (0, 0, 0, 0, 1, 0))
        x = _run_stack(self.layers, x, self.dropout)
        return self.linear(x.transpose(0, 1))


class Joint(nn.Module):
    """forward(f [B, T2, J], g [B, U1, J]) -> logits [B, T2, U1, V]; the last class is the blank."""

    def __init__(self, config: Config):
        super().__init__()
        self.dropout = config.joint_dropout
        self.linear = nn.Linear(config.joint_hidden, config.vocab)

    def forward(self, f, g):
        return self.linear(joint_hidden(f, g, self.dropout, self.training))


class RNNT(nn.Module):
    """The three networks. train.py calls each by itself, since a graph may hold one of them."""

    def __init__(self, config: Config):
        super().__init__()
        self.encoder = Encoder(config)
        self.prediction = Prediction(config)
        self.joint = Joint(config)


def _stack(input_size, hidden, num_layers):
    return nn.ModuleList(nn.LSTM(hidden if index else input_size, hidden) for index in range(num_layers))


def _run_stack(layers, x, dropout):
    """x [T, B, I] -> output [T, B, H] of the LSTMs, from states of zeros, with dropout after each layer."""
    # cuDNN takes lengths from the host only, so it computes padding, too.
    for layer in layers:
        x = dropout(layer(x)[0])
        mark(x)
    return x


def flatten(model: RNNT) -> None:
    """Move each LSTM's weights into one buffer in cuDNN's order. Without that cuDNN copies them at every call.

    Call it after a change of dtype or device and before anything keeps an address.
    """
    for module in model.modules():
        if isinstance(module, nn.LSTM):
            module.flatten_parameters()


@torch.no_grad()
def initialise(model: RNNT, config: Config, seed: int) -> None:
    """Draw the weights in place: PyTorch's default ranges, for LSTMs times init_scale.

    The benchmark's weights_init_scale of 0.5 also scales its forget bias from 1 to 0.5: --forget-bias, at any scale.
    """
    generator = torch.Generator(model.joint.linear.weight.device).manual_seed(seed)
    for module in model.modules():
        if isinstance(module, nn.LSTM):
            _draw_uniform(module, config.init_scale / math.sqrt(module.hidden_size), generator)
            forget = slice(module.hidden_size, 2 * module.hidden_size)
            module.bias_ih_l0[forget].fill_(config.forget_bias)
            module.bias_hh_l0[forget].zero_()
        elif isinstance(module, nn.Linear):
            _draw_uniform(module, 1 / math.sqrt(module.in_features), generator)
        elif isinstance(module, nn.Embedding):
            module.weight.normal_(generator=generator)


def _draw_uniform(module, bound, generator):
    for parameter in module.parameters():
        parameter.uniform_(-bound, bound, generator=generator)
