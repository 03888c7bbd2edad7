"""RNN-T's settings, presets, and sizes, FLOP and memory computed from them. Imports no torch."""

import math
from dataclasses import dataclass

from common import fit
from graph_worth import Timing, needs, option, require_fields, require_folder_of_its_own
from graph_worth.config import flag_of
from rnnt.data import buckets

CONTEXT_BYTES = 2 * 2**30  # CUDA and its libraries
MAX_WORKERS = 64
MAX_LOSS_SCALE = 2.0**32
# 80 mel bands of three frames side by side; the model takes them padded to a multiple of 32.
MEL_FEATURES = 240
# Three frames of 10 ms make a frame of the encoder.
FRAME_S = 0.03
# Longer than any speech, and than the tape that rnnt/data/synthetic.py cuts utterances from.
MAX_LENGTH = 16384
# Words that --data takes instead of a folder.
GENERATED = ("synthetic", "lengths")


# Fields, the rule for their values, and the same rule in words.
_COUNTS = "batch frames tokens max_frames max_tokens features encoder_hidden pre_layers post_layers prediction_hidden "
_COUNTS += "prediction_layers joint_hidden lr_epoch growth_interval hysteresis max_floor_overflows min_steps"
_RULES = (
    (_COUNTS, lambda value: value >= 1, "a number from 1 up"),
    ("lr_warmup lr_hold", lambda value: value >= 0, "a number from 0 up"),
    ("workers", lambda value: 1 <= value <= MAX_WORKERS, f"a number from 1 to {MAX_WORKERS}"),
    ("frames tokens", lambda value: value <= MAX_LENGTH, f"a number up to {MAX_LENGTH}"),
    ("vocab", lambda value: value >= 2, "a number from 2 up, one class is the blank"),
    ("lr lr_gamma weight_decay", lambda value: 0 <= value <= 1, "a number from 0 to 1"),
    ("beta1 beta2 ema", lambda value: 0 <= value < 1, "a number from 0 up, below 1"),
    ("encoder_dropout prediction_dropout joint_dropout", lambda value: 0 <= value < 1, "a number from 0 up, below 1"),
    ("eps clip init_scale", lambda value: 0 < value < math.inf, "a finite number above 0"),
    ("forget_bias", math.isfinite, "a finite number"),
    ("loss_scale", lambda value: 1 <= value <= MAX_LOSS_SCALE, f"a number from 1 to {MAX_LOSS_SCALE:.0f}"),
)


@dataclass(frozen=True, kw_only=True)
class Config(Timing):
    """RNN-T's sizes, data, kernels and recipe; the defaults are MLPerf's."""

    batch: int = option(8, "utterances on this GPU")
    data: str = option(
        "synthetic",
        "synthetic: all utterances of one length; lengths: lengths spread as LibriSpeech's; or a folder of speech",
    )
    frames: int = option(409, "frames of 30 ms in each utterance of --data synthetic")
    tokens: int = option(56, "tokens in each utterance of --data synthetic")
    max_frames: int = option(641, "longest utterance, in frames of 30 ms")
    max_tokens: int = option(125, "longest transcript, in tokens")
    buckets: str = option("auto", "shapes of graphs: auto, or how many per network, 1 to 50")
    tokenizer: str = option("chars", "for speech: chars or a sentencepiece .model file")
    speed_perturbation: bool = option(True, "resample speech by a random factor from 0.85 to 1.15")
    spec_augment: bool = option(True, "mask mel bands and frames of speech at random")
    workers: int = option(2, "threads that decode speech")
    features: int = option(256, "width of the encoder's input: 240 features, padded")
    encoder_hidden: int = option(1024, "width of the encoder's LSTMs")
    pre_layers: int = option(2, "LSTMs before two frames are stacked")
    post_layers: int = option(3, "LSTMs after two frames are stacked")
    prediction_hidden: int = option(512, "width of the prediction network")
    prediction_layers: int = option(2, "LSTMs of the prediction network")
    joint_hidden: int = option(512, "width of the joint network")
    vocab: int = option(1024, "classes; the last one is the blank")
    encoder_dropout: float = option(0.1, "dropout after each LSTM of the encoder")
    prediction_dropout: float = option(0.3, "dropout after each LSTM of the prediction network")
    joint_dropout: float = option(0.3, "dropout in the joint network")
    init_scale: float = option(0.5, "factor on the LSTMs' initial weights")
    forget_bias: float = option(0.5, "initial bias of the LSTMs' forget gates")
    precision: str = option("fp16", "weights and activations; masters are FP32", ("fp16", "bf16"))
    lr: float = option(0.0062, "learning rate after warm-up")
    lr_warmup: int = option(544, "steps of linear warm-up")
    lr_hold: int = option(5984, "steps at --lr after the warm-up")
    lr_gamma: float = option(0.915, "factor on the learning rate, every --lr-epoch steps after --lr-hold")
    lr_epoch: int = option(544, "steps between two falls of the learning rate")
    beta1: float = option(0.9, "LAMB's decay of the first moment")
    beta2: float = option(0.9985, "LAMB's decay of the second moment")
    eps: float = option(1e-9, "LAMB's epsilon")
    weight_decay: float = option(1e-3, "weight decay of all parameters")
    clip: float = option(1.0, "bound of the global gradient norm")
    ema: float = option(0.994, "decay of the averaged weights")
    loss_scale: float = option(512.0, "loss scale at the start")
    growth_interval: int = option(2000, "finite steps after which the loss scale doubles")
    hysteresis: int = option(1, "overflows in a row after which the loss scale halves")
    max_floor_overflows: int = option(20, "overflows in a row with the loss scale at 1 that end a run")

    def __post_init__(self):
        for names, allowed, takes in _RULES:
            require_fields(self, names.split(), allowed, takes)
        if not self.data:
            raise ValueError(f"--data takes {', '.join(GENERATED)} or a folder of speech")
        require_folder_of_its_own("--data", self.data)
        if self.features < MEL_FEATURES and self.data not in GENERATED:
            raise ValueError(f"--features {self.features}: speech has {MEL_FEATURES}, take as many or more")
        buckets.require_kind(self.buckets)
        for name in ("frames", "tokens"):
            length, longest = getattr(self, name), getattr(self, f"max_{name}")
            if self.data == "synthetic" and length > longest:
                raise ValueError(f"{flag_of(name)} {length}: takes at most {longest}, see {flag_of('max_' + name)}")


# Rows of MLPerf v3.1's table of global batch sizes; an epoch is 278,528 utterances. bench takes the row of the
# smallest batch, which diverges least with the 8 utterances of one GPU. bench_b32 is the share of one of 64 GPUs, full
# of one of 8.
_EPOCH = 278528
_GBS_2048 = {"lr": 0.007, "beta2": 0.999, "ema": 0.995, "lr_gamma": 0.939, "lr_epoch": _EPOCH // 2048}
_GBS_1536 = {"lr": 0.0072, "beta2": 0.999, "ema": 0.995, "lr_gamma": 0.92, "lr_epoch": _EPOCH // 1536}

PRESETS = {
    "tiny": Config(
        batch=2,
        data="lengths",
        buckets="2",
        frames=12,
        tokens=5,
        max_frames=16,
        max_tokens=6,
        encoder_hidden=48,
        pre_layers=1,
        post_layers=2,
        prediction_hidden=32,
        prediction_layers=1,
        joint_hidden=32,
        vocab=32,
        precision="bf16",
        lr=0.05,
        lr_warmup=5,
        growth_interval=20,
        workers=1,
    ),
    "bench": Config(),
    # Lengths come again after 64 batches (rnnt/data/synthetic.py): a run meets each kind of batch twice.
    "bench_lengths": Config(data="lengths", min_steps=128),
    "bench_b32": Config(batch=32, **_GBS_2048, lr_warmup=6 * (_EPOCH // 2048), lr_hold=33 * (_EPOCH // 2048)),
    "full": Config(batch=192, **_GBS_1536, lr_warmup=5 * (_EPOCH // 1536), lr_hold=26 * (_EPOCH // 1536)),
    "mlperf": Config(data="lengths", buckets="50", min_steps=200),
}

FACTS = {
    "parity_steps": 50,
    "sweeps": {"batch": ["batch"], "buckets": ["buckets"]},
    "presets_need": lambda preset, config: needs(preset != "tiny", submitted=(64, 8) if preset == "mlperf" else None),
}

# ------------------------------------------------------------------------------------------------
# Arithmetic


def num_parameters(config: Config) -> int:
    """Parameters of the three networks; 49,071,616 at the benchmark's sizes."""
    c = config
    total = _lstm_parameters(c.features, c.encoder_hidden, c.pre_layers)
    total += _lstm_parameters(2 * c.encoder_hidden, c.encoder_hidden, c.post_layers)
    total += (c.encoder_hidden + 1) * c.joint_hidden
    total += (c.vocab - 1) * c.prediction_hidden
    total += _lstm_parameters(c.prediction_hidden, c.prediction_hidden, c.prediction_layers)
    total += (c.prediction_hidden + 1) * c.joint_hidden
    return total + (c.joint_hidden + 1) * c.vocab


def _lstm_parameters(inputs, hidden, layers):
    return 4 * hidden * (inputs + hidden + 2 + (layers - 1) * (2 * hidden + 2))


def forward_flops(config: Config, frames: int, tokens: int) -> int:
    """FLOP of a forward pass of one utterance, matrix products only; a multiply-add counts as two.

    At the benchmark's sizes: 27.263e6 a frame, 59.769e6 a stacked frame, 8.913e6 a symbol and 1.049e6 a cell of the
    lattice, which is 36.16e9 for 409 frames and 56 tokens. The tests compare it with FlopCounterMode.
    """
    c, stacked, symbols = config, (frames + 1) // 2, tokens + 1
    pre = _lstm_flops(c.features, c.encoder_hidden, c.pre_layers)
    post = _lstm_flops(2 * c.encoder_hidden, c.encoder_hidden, c.post_layers) + 2 * c.encoder_hidden * c.joint_hidden
    step = _lstm_flops(c.prediction_hidden, c.prediction_hidden, c.prediction_layers)
    step += 2 * c.prediction_hidden * c.joint_hidden
    return pre * frames + post * stacked + step * symbols + 2 * c.joint_hidden * c.vocab * stacked * symbols


def _lstm_flops(inputs, hidden, layers):
    return sum(2 * 4 * hidden * ((hidden if index else inputs) + hidden) for index in range(layers))


def training_flops(config: Config, frames: int, tokens: int) -> int:
    """FLOP of forward and backward of one utterance: three times the forward, less the gradient of the features."""
    return 3 * forward_flops(config, frames, tokens) - 2 * 4 * config.encoder_hidden * config.features * frames


def time_steps(config: Config, frames: int, tokens: int) -> int:
    """Sequential time steps of all LSTMs. They set the duration of a training step at small batches."""
    stacked = (frames + 1) // 2
    return config.pre_layers * frames + config.post_layers * stacked + config.prediction_layers * (tokens + 1)


# Cost of a cell of one utterance's lattice in time steps of cuDNN's LSTMs, forward and backward: 8.7 ns / 7.6 us.
# Sources: 6.5 ms for the forward of joint and loss over 192 x 205 x 57 cells, times three
# (results/archive/h200x1/rnnt-full); 11.8 ms for 1547 time steps (results/archive/h200x1/rnnt-lstm).
CELL_COST = 0.00115


def padded_cost(config: Config, frames: int, tokens: int) -> float:
    """Cost of a batch padded to this shape, in LSTM time steps. --buckets auto minimises it."""
    cells = config.batch * ((frames + 1) // 2) * (tokens + 1)
    return time_steps(config, frames, tokens) + CELL_COST * cells


def predicted_bytes(config: Config) -> int:
    """Device memory of an eager step with the longest batch.

    24 bytes a parameter: 16-bit weight and gradient, LAMB's flat copy of both, FP32 master, two moments and average.
    16-bit activations: four gates, cell, output and dropout's output a LSTM and time step; the joint's hidden units
    twice and the logits once a cell of the lattice. 15 % for workspaces, and CONTEXT_BYTES.
    """
    c = config
    frames, tokens = (c.frames, c.tokens) if c.data == "synthetic" else (c.max_frames, c.max_tokens)
    stacked, symbols = (frames + 1) // 2, tokens + 1
    units = frames * (c.features + 8 * c.pre_layers * c.encoder_hidden)
    units += stacked * (8 * c.post_layers + 4) * c.encoder_hidden
    units += symbols * 8 * c.prediction_layers * c.prediction_hidden
    units += stacked * symbols * (2 * c.joint_hidden + c.vocab)
    # Integers, since flags may ask for more than a float holds.
    return (24 * num_parameters(c) + 2 * c.batch * units) * 115 // 100 + CONTEXT_BYTES


def require(config: Config, available_bytes: int | None) -> None:
    """Raises ValueError where the config needs more than available_bytes; None: unknown, nothing is refused."""
    fit.require(config, PRESETS, predicted_bytes, available_bytes)


MIN_LR = 1e-5


def learning_rate(config: Config, index: int) -> float:
    """Linear warm-up, hold, then times gamma each epoch, at least 1e-5: common/optimizers.py of the benchmark."""
    c = config
    if index < c.lr_warmup:
        return c.lr * (index + 1) / (c.lr_warmup + 1)
    epochs = max(0, index - c.lr_warmup - c.lr_hold) // c.lr_epoch
    return max(c.lr * c.lr_gamma**epochs, min(MIN_LR, c.lr))


def persistent_lstms(config: Config) -> bool:
    """True if cuDNN has persistent kernels for all LSTMs: PyTorch's rule in RNN.cpp, get_algo.

    It takes FP16, widths in multiples of 128 up to 1024, a batch in multiples of 8 up to 128. Other LSTMs launch
    kernels for each time step, thousands a training step.
    """
    widths = (config.features, config.encoder_hidden, config.prediction_hidden)
    fits = all(width % 128 == 0 for width in widths) and max(widths[1:]) <= 1024
    return config.precision == "fp16" and fits and config.batch % 8 == 0 and config.batch <= 128


# ------------------------------------------------------------------------------------------------
# Lines that a run prints


def card(config: Config, device: str, flops_per_step: float) -> list[str]:
    """Lines that describe the run. device: cuda or cpu."""
    c = config
    name = "RNN-T of MLPerf" if num_parameters(c) == 49_071_616 else "toy widths"
    memory = f" | memory predicted {predicted_bytes(c) / 2**30:.1f} GiB" if device == "cuda" else ""
    lengths = f"{c.frames} frames, {c.tokens} tokens" if c.data == "synthetic" else f"--data {c.data}"
    return [
        f"{num_parameters(c) / 1e6:,.1f} M parameters: {name}",
        f"batch {c.batch}, {lengths}, buckets {c.buckets} | {c.precision} with FP32 masters | "
        f"{flops_per_step / 1e12:.3g} TFLOP/step{memory}",
    ]


def notes(config: Config, device: str) -> list[str]:
    """Lines that name kernels which these settings rule out. device: cuda or cpu."""
    if device != "cuda" or persistent_lstms(config):
        return []
    kernels = "cuDNN's persistent LSTM kernels"
    return [f"{kernels} take FP16, widths of 128 and batches of 8 to 128: this runs without them"]
