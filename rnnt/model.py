"""RNN-T as MLPerf trains it: 49,071,616 parameters in 35 tensors at the benchmark's sizes.

Source: MLPerf training v3.1, NVIDIA's rnnt/model.py and common/rnn.py with baseline_v3-1023sp.yaml and decoupled_rnns:
stacks of single-layer LSTMs with dropout of torch between them, since cuDNN's dropout keeps a state that no graph can
record; kernels of our own have it inside. Nothing is masked: LSTMs run forwards in time, so padding changes only what
comes after an utterance's end, and the loss does not look there. One exception, the benchmark's too: the last frame of
an utterance of odd length is stacked with what follows, which is 0 at the end of the tensor and an LSTM's answer to
padding elsewhere. With kernels of our own LSTMs end with the batch's longest utterance: behind it h is 0, wherever
the tensor ends.
"""

import functools
import math

import torch
import torch.nn.functional as F
from torch import nn

from common.marks import mark
from rnnt.config import Config
from rnnt.loss import joint_hidden
from rnnt.lstm import lstm

STACK = 2


class Encoder(nn.Module):
    """forward(features [T, B, F], lengths int32 [B]) -> (f [B, T2, J], lengths int32 [B] of f), T2 = ceil(T / 2)."""

    def __init__(self, config: Config):
        super().__init__()
        hidden = config.encoder_hidden
        self.run_stack = RUN_STACK[config.lstm]
        self.pre = _stack(config.features, hidden, config.pre_layers)
        self.post = _stack(STACK * hidden, hidden, config.post_layers)
        self.dropout = nn.Dropout(config.encoder_dropout)
        self.linear = nn.Linear(hidden, config.joint_hidden)

    def forward(self, features, lengths):
        stacked_lengths = (lengths + (STACK - 1)) // STACK
        x = stack_time(self.run_stack(self.pre, features, lengths, 0, self.dropout))
        x = self.run_stack(self.post, x, stacked_lengths, 0, self.dropout)
        return self.linear(x.transpose(0, 1)), stacked_lengths


def stack_time(x):
    """[T, B, H] -> [ceil(T / 2), B, 2 H]: pairs of frames side by side, a zero frame after an odd last one."""
    x = F.pad(x, (0, 0, 0, 0, 0, -len(x) % STACK))
    return x.unflatten(0, (-1, STACK)).transpose(1, 2).flatten(2)


class Prediction(nn.Module):
    """forward(tokens int64 [B, U], lengths int32 [B]) -> g [B, U + 1, J]; before the first token is a row of zeros."""

    def __init__(self, config: Config):
        super().__init__()
        hidden = config.prediction_hidden
        self.run_stack = RUN_STACK[config.lstm]
        # No row for the blank, which is never fed back.
        self.embedding = nn.Embedding(config.vocab - 1, hidden)
        self.layers = _stack(hidden, hidden, config.prediction_layers)
        self.dropout = nn.Dropout(config.prediction_dropout)
        self.linear = nn.Linear(hidden, config.joint_hidden)

    def forward(self, tokens, lengths):
        x = F.pad(self.embedding(tokens).transpose(0, 1), (0, 0, 0, 0, 1, 0))
        x = self.run_stack(self.layers, x, lengths, 1, self.dropout)
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
    """The three networks; what calls them decides which parts are graphs."""

    def __init__(self, config: Config):
        super().__init__()
        self.encoder = Encoder(config)
        self.prediction = Prediction(config)
        self.joint = Joint(config)


def _by_cudnn(layers, x, lengths, extra, dropout):
    """Computes padding, too: cuDNN takes lengths from the host only."""
    for layer in layers:
        x = dropout(layer(x)[0])
        _mark(x)
    return x


def _by_own_kernels(layers, x, lengths, extra, dropout, at_once):
    weights = [layer.all_weights[0] for layer in layers]
    x = lstm(x, weights, lengths, extra, dropout.p if dropout.training else 0.0, at_once)
    _mark(x)
    return x


# What --lstm names: the last one's output [T, B, H] of layers with dropout after each, from states of zeros. Utterances
# have `extra` time steps more than lengths says.
RUN_STACK = {
    "cudnn": _by_cudnn,
    "persistent": functools.partial(_by_own_kernels, at_once=1),
    "wavefront": functools.partial(_by_own_kernels, at_once=2),
}


def _stack(input_size, hidden, num_layers):
    return nn.ModuleList(nn.LSTM(hidden if index else input_size, hidden) for index in range(num_layers))


def _mark(x):
    if not torch.compiler.is_compiling():
        mark(x)


def flatten(model: RNNT) -> None:
    """Each LSTM's weights as views of one buffer in cuDNN's order; without that cuDNN copies them at every call.

    After every change of dtype or device and before anything keeps an address; later changes must be in place.
    """
    for module in model.modules():
        if isinstance(module, nn.LSTM):
            module.flatten_parameters()


@torch.no_grad()
def initialise(model: RNNT, config: Config, seed: int) -> None:
    """In place and seeded, on the weights' device: PyTorch's default ranges, those of LSTMs times init_scale.

    Source: facts of the benchmark: weights_init_scale 0.5 applies to all parameters of the LSTMs, so that its forget
    bias, 1 in bias_ih and 0 in bias_hh before, is 0.5: --forget-bias here, at any scale.
    """
    generator = torch.Generator(model.joint.linear.weight.device).manual_seed(seed)
    for module in model.modules():
        if isinstance(module, nn.LSTM):
            bound = config.init_scale / math.sqrt(module.hidden_size)
            for parameter in module.parameters():
                parameter.uniform_(-bound, bound, generator=generator)
            forget = slice(module.hidden_size, 2 * module.hidden_size)
            module.bias_ih_l0[forget].fill_(config.forget_bias)
            module.bias_hh_l0[forget].zero_()
        elif isinstance(module, nn.Linear):
            bound = 1 / math.sqrt(module.in_features)
            for parameter in module.parameters():
                parameter.uniform_(-bound, bound, generator=generator)
        elif isinstance(module, nn.Embedding):
            module.weight.normal_(generator=generator)


def log_prior(transcripts, vocab: int) -> torch.Tensor:
    """FP32 [vocab], an output bias: logarithms of each class's share in token sequences, the blank's being one half.

    Counts are one too high, so that none is 0. Frames and tokens are about as many where tokens are characters and a
    frame of the encoder is 60 ms, hence the half.
    """
    counts = torch.ones(vocab - 1, dtype=torch.int64)
    for tokens in transcripts:
        counts += torch.bincount(torch.tensor(tokens), minlength=vocab - 1)
    return torch.cat((counts / counts.sum(), torch.ones(1))).mul(0.5).log()
