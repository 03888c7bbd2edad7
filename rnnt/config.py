"""RNN-T: what can be set, the presets, and arithmetic on them (no torch here)."""

import math
from dataclasses import dataclass
from typing import NamedTuple

from common.config import TINY_TIMING, Timing, flag_of, needs, option, require_fields, require_folder_of_its_own
from common.fitting import require_batch
from rnnt import buckets

CONTEXT_BYTES = 2 * 2**30
MAX_WORKERS = 64
MAX_LOSS_SCALE = 2.0**32
# 80 mel bands of three frames side by side; the model takes them padded to a multiple of 32.
MEL_FEATURES = 240
# Of 30 ms, after splicing three frames of 10 ms.
FRAME_S = 0.03
# What rnnt/lstm_kernel.cu is written for: one operand's columns, weights of 16 units in the registers of a block.
LSTM_BATCH = 8
LSTM_WIDTHS = (256, 512, 768, 1024)
# Longer than any speech, and than what rnnt/synthetic.py cuts utterances from.
MAX_LENGTH = 16384
# Words that --data takes instead of a folder.
GENERATED = ("synthetic", "lengths")
DATA = (*GENERATED, "corpus")


# Fields, what their values must be, and the same in words.
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
    ("audio", lambda value: value in ("dali", "torch"), "dali or torch"),
)


@dataclass(frozen=True, kw_only=True)
class Config(Timing):
    """RNN-T as MLPerf trains it, and how a step trains it."""

    batch: int = option(8, "utterances on this GPU")
    data: str = option(
        "synthetic",
        "synthetic: all utterances of one length; lengths: lengths spread as LibriSpeech's; corpus: the repository's "
        "speech; or a folder of speech",
        is_path=True,
        words=DATA,
    )
    frames: int = option(409, "frames of 30 ms in each utterance of --data synthetic")
    tokens: int = option(56, "tokens in each utterance of --data synthetic")
    max_frames: int = option(641, "longest utterance, in frames of 30 ms")
    max_tokens: int = option(125, "longest transcript, in tokens")
    buckets: str = option(
        "auto", "shapes of graphs: auto, guide (the ladder of NVIDIA's guide), or how many per network, 1 to 50"
    )
    tokenizer: str = option("chars", "of speech: chars or a sentencepiece .model file", is_path=True, words=("chars",))
    audio: str = option("dali", "what makes features of speech: dali, or torch where it is not installed")
    speed_perturbation: bool = option(True, "resample speech by a random factor from 0.85 to 1.15")
    spec_augment: bool = option(True, "mask mel bands and frames of speech at random")
    workers: int = option(2, "threads that decode speech")
    features: int = option(256, "width of the encoder's input: 240 features, padded")
    encoder_hidden: int = option(1024, "width of the encoder's LSTMs")
    pre_layers: int = option(2, "LSTMs before two frames are stacked")
    post_layers: int = option(3, "LSTMs after it")
    prediction_hidden: int = option(512, "width of the prediction network")
    prediction_layers: int = option(2, "its LSTMs")
    joint_hidden: int = option(512, "width of the joint network")
    vocab: int = option(1024, "classes; the last one is the blank")
    encoder_dropout: float = option(0.1, "dropout after each LSTM of the encoder")
    prediction_dropout: float = option(0.3, "dropout after each LSTM of the prediction network")
    joint_dropout: float = option(0.3, "dropout in the joint network")
    init_scale: float = option(0.5, "factor on the LSTMs' initial weights")
    forget_bias: float = option(0.5, "initial bias of the LSTMs' forget gates")
    prior_bias: bool = option(False, "begin with the output bias at each class's share in the transcripts")
    precision: str = option("fp16", "weights and activations; masters are FP32", ("fp16", "bf16"))
    lstm: str = option(
        "cudnn",
        "cudnn, or kernels of our own, for FP16 and a batch of 8: persistent, a layer after the other, or wavefront, "
        "two side by side",
        ("cudnn", "persistent", "wavefront"),
    )
    streams: int = option(1, "2: the prediction network beside the encoder on a GPU, but in graph", (1, 2))
    lr: float = option(0.0062, "learning rate after warm-up")
    lr_warmup: int = option(544, "steps of linear warm-up")
    lr_hold: int = option(5984, "steps at --lr after it")
    lr_gamma: float = option(0.915, "factor on the learning rate every --lr-epoch steps after that")
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
            raise ValueError(f"--data takes {', '.join(DATA)} or a folder of speech")
        require_folder_of_its_own("--data", self.data)
        if self.features < MEL_FEATURES and self.data not in GENERATED:
            raise ValueError(f"--features {self.features}: speech has {MEL_FEATURES}, take as many or more")
        if self.lstm != "cudnn":
            self._require_own_lstm()
        if self.prior_bias and self.data in GENERATED:
            raise ValueError(f"--prior-bias true: --data {self.data} has no transcripts, take corpus or a folder")
        buckets.require_kind(self.buckets)
        max_frames, max_tokens = limits(self)
        for name, longest in (("frames", max_frames), ("tokens", max_tokens)):
            if self.data == "synthetic" and getattr(self, name) > longest:
                raise ValueError(
                    f"{flag_of(name)} {getattr(self, name)}: the largest bucket has {longest}: "
                    f"see {flag_of('max_' + name)} and --buckets"
                )

    def _require_own_lstm(self):
        wrong = [] if self.precision == "fp16" else ["--precision fp16"]
        wrong += [] if self.batch == LSTM_BATCH else [f"--batch {LSTM_BATCH}"]
        widths = ", ".join(map(str, LSTM_WIDTHS))
        for name in ("encoder_hidden", "prediction_hidden"):
            wrong += [] if getattr(self, name) in LSTM_WIDTHS else [f"one of {widths} as {flag_of(name)}"]
        if wrong:
            raise ValueError(f"--lstm {self.lstm}: takes {' and '.join(wrong)}, or take cudnn")
        if self.lstm == "wavefront" and self.streams == 2:
            raise ValueError("--streams 2: --lstm wavefront leaves no room beside the encoder, take 1")


def limits(config: Config) -> tuple[int, int]:
    """(frames, tokens) of the longest utterance trained on: --max-frames and --max-tokens, or guide's ends."""
    return (
        min(config.max_frames, buckets.largest(config.buckets, "audio", config.max_frames)),
        min(config.max_tokens, buckets.largest(config.buckets, "text", config.max_tokens)),
    )


# Rows of MLPerf v3.1's table of global batch sizes. A warm-up epoch and so on is 278,528 utterances. bench trains with
# the row of the smallest batch, which diverges least with the 8 utterances of one GPU; bench_b32 is one of 64 GPUs,
# full one of 8.
_EPOCH = 278528
_GBS_2048 = {"lr": 0.007, "beta2": 0.999, "ema": 0.995, "lr_gamma": 0.939, "lr_epoch": _EPOCH // 2048}
_GBS_1536 = {"lr": 0.0072, "beta2": 0.999, "ema": 0.995, "lr_gamma": 0.92, "lr_epoch": _EPOCH // 1536}

# A recipe that learns a few minutes of speech by heart (python -m rnnt.wer_curves). The benchmark's recipe is made for
# 960 hours: at its start the top LSTM answers the input with a deviation of 3e-5, which FP16 does not resolve, and the
# first hundred steps, which separate unused classes and rare characters from the others, saturate the LSTMs. Then the
# prediction network learns the texts without the speech, and most words stay wrong. Hence the differences: LSTM weights
# four times as large, so that the input passes all five LSTMs; the benchmark's forget bias, since one of 2 lets a
# character blur into the next; an output bias at each class's share. LAMB's steps are relative and all elements agree
# at first, so that they count for more in wide layers: the learning rate goes with one over the root of the width
# (0.007 at 128 and 0.0049 at 384 were tried). Nothing is drawn but dropout and dither, and the average is short.
_BY_HEART = {
    "data": "corpus",
    "max_frames": 300,
    "speed_perturbation": False,
    "spec_augment": False,
    "init_scale": 2.0,
    "prior_bias": True,
    "joint_dropout": 0.0,
    "lr_gamma": 0.9,
    "ema": 0.98,
}
# Runs on any machine.
_TOY = {
    "buckets": "2",
    "audio": "torch",
    "pre_layers": 1,
    "post_layers": 2,
    "prediction_hidden": 32,
    "prediction_layers": 1,
    "vocab": 32,
    "precision": "bf16",
    **TINY_TIMING,
}
PRESETS = {
    "tiny": Config(
        **_TOY,
        batch=2,
        data="lengths",
        max_frames=24,
        max_tokens=8,
        frames=20,
        tokens=6,
        encoder_hidden=48,
        joint_hidden=32,
        lr=0.05,
        lr_warmup=5,
        growth_interval=20,
        workers=1,
    ),
    "bench": Config(),
    # Twice the period after which lengths come again (rnnt/synthetic.py): the window meets each kind of batch twice.
    "bench_lengths": Config(data="lengths", min_steps=128),
    "bench_b32": Config(batch=32, **_GBS_2048, lr_warmup=6 * (_EPOCH // 2048), lr_hold=33 * (_EPOCH // 2048)),
    "full": Config(batch=192, **_GBS_1536, lr_warmup=5 * (_EPOCH // 1536), lr_hold=26 * (_EPOCH // 1536)),
    "mlperf": Config(data="lengths", buckets="50", min_steps=200),
    "corpus": Config(**_BY_HEART, lr=0.003, lr_warmup=100, lr_hold=900, lr_epoch=25),
    "corpus_tiny": Config(
        **_BY_HEART,
        **_TOY,
        batch=4,
        encoder_hidden=64,
        joint_hidden=64,
        encoder_dropout=0.0,
        lr=0.008,
        lr_warmup=20,
        lr_hold=350,
        lr_epoch=15,
    ),
}

VARIANTS = {
    "eager": "kernels launched one by one, nothing waits for the GPU, batches as long as they are",
    "eager_sync": "eager with the usual host reads: loss, overflow, lengths for the loss",
    "eager_padded": "eager with batches padded to the graphs' shapes: what graph and full must equal",
    "graph": "a forward and a backward graph per bucket of encoder and prediction network; the rest eager",
    "full": "the full iteration as one graph per pair of buckets, 16 at most",
    "compile": "torch.compile of the three networks around their LSTMs, no graphs",
}

# There is no eager with torch's own kernels in place of ours. torch has neither a transducer loss nor LAMB. Of torch
# operators the loss takes three launches for each diagonal of the lattice (rnnt/loss.py): 780 a step at bench's sizes,
# where ours takes a few, so that eager could only become slower. The joint alone would save no launch (seven of
# torch's for our five, and four times the memory traffic), and would draw another dropout mask, so that its losses
# could not be compared.
KINDS = dict.fromkeys(VARIANTS, "eager") | {"graph": "graph", "full": "graph", "compile": "compile"}
CPU_PRESETS = ("tiny", "corpus_tiny")


def promises(config: Config, variant: str) -> tuple[int | None, int | None]:
    """(graphs, replays a step) of a variant; None: at least one, known only once the data has been seen."""
    return {"graph": (None, 4), "full": (None, 1)}.get(variant, (0, 0))


ABOUT = {
    "bitwise": ["eager", "eager_sync", "eager_padded", "graph"],
    # Shapes decide which numbers are drawn and how sums are rounded: padded is compared with padded.
    "reference": {"eager_padded": "eager_padded", "graph": "eager_padded", "full": "eager_padded"},
    # Compiled code cannot call the joint's kernel and draws another dropout mask in its place.
    "tolerance": {"full": 1e-3, "compile": 0.1},
    "parity_steps": 50,
    "sweeps": {"batch": ["batch"], "buckets": ["buckets"]},
    "kinds": KINDS,
    # Both train the very samples that eager does.
    "traits": {
        "eager_sync": {"extra_work": "reads loss, overflow and lengths on the host"},
        "eager_padded": {"extra_work": "computes the padding of the graphs' shapes"},
    },
    "promises": promises,
    "presets_need": lambda preset, config: needs(
        preset not in CPU_PRESETS, submitted=(64, 8) if preset == "mlperf" else None
    ),
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


class Flops(NamedTuple):
    """FLOP of one forward pass, by network. A multiply-add counts as two; matrix products only."""

    encoder: float
    prediction: float
    joint: float


def forward_flops(config: Config, frames: int, tokens: int) -> Flops:
    """Of one utterance (or one row of a padded batch) of `frames` and `tokens`.

    Source: facts of the benchmark: at its sizes 27.263e6 a frame and 59.769e6 a stacked frame, 8.913e6 a symbol,
    1.049e6 a cell of the lattice, 36.16e9 for 409 frames and 56 tokens; checked with FlopCounterMode in the tests.
    """
    c, stacked, symbols = config, (frames + 1) // 2, tokens + 1
    pre = _lstm_flops(c.features, c.encoder_hidden, c.pre_layers)
    post = _lstm_flops(2 * c.encoder_hidden, c.encoder_hidden, c.post_layers) + 2 * c.encoder_hidden * c.joint_hidden
    step = _lstm_flops(c.prediction_hidden, c.prediction_hidden, c.prediction_layers)
    step += 2 * c.prediction_hidden * c.joint_hidden
    return Flops(
        float(pre * frames + post * stacked), float(step * symbols), 2.0 * c.joint_hidden * c.vocab * stacked * symbols
    )


def _lstm_flops(inputs, hidden, layers):
    return sum(2 * 4 * hidden * ((hidden if index else inputs) + hidden) for index in range(layers))


def training_flops(config: Config, frames: int, tokens: int) -> float:
    """FLOP of forward and backward of one utterance: three times the forward, less the features' gradient."""
    unneeded = 2 * 4 * config.encoder_hidden * config.features * frames
    return 3 * sum(forward_flops(config, frames, tokens)) - unneeded


def time_steps(config: Config, frames: int, tokens: int) -> int:
    """Sequential steps of all LSTMs: at small batches a training step takes about as long as these do."""
    stacked = (frames + 1) // 2
    return config.pre_layers * frames + config.post_layers * stacked + config.prediction_layers * (tokens + 1)


# What a cell of one utterance's lattice costs in time steps of cuDNN's LSTMs, forward and backward: 8.7 ns in 7.6 us.
# Sources: three times the forward of joint and loss, 6.5 ms over 192 x 205 x 57 cells (results/h200x1/rnnt-full);
# 11.8 ms over 1547 time steps, 12.0 when measured again (results/h200x1/rnnt-lstm).
CELL_COST = 0.00115


def padded_cost(config: Config, frames: int, tokens: int) -> float:
    """What a batch of this shape costs by its padding, in time steps: --buckets auto makes little of that.

    LSTM kernels of our own end with the longest utterance, which leaves the lattice's cells. What wavefront loses by
    stretches that are cut for the padded length is left out.
    """
    cells = config.batch * ((frames + 1) // 2) * (tokens + 1)
    steps = 0 if config.lstm != "cudnn" else time_steps(config, frames, tokens)
    return steps + CELL_COST * cells


def predicted_bytes(config: Config) -> int:
    """Device memory that an eager step with the longest batch needs, from sizes alone.

    Per parameter 24 bytes: 16-bit weight and gradient, LAMB's flat copy of both, FP32 master, two moments and average.
    Activations for the backward in 16 bits: per LSTM and time step four gates, cell, output and dropout's output; per
    cell of the lattice the joint's hidden units twice and the logits once (their gradient takes their place). Fifteen
    percent for workspaces, and CONTEXT_BYTES for CUDA and its libraries.
    """
    c = config
    frames, tokens = (c.frames, c.tokens) if c.data == "synthetic" else limits(c)
    stacked, symbols = (frames + 1) // 2, tokens + 1
    units = frames * (c.features + 8 * c.pre_layers * c.encoder_hidden)
    units += stacked * (8 * c.post_layers + 4) * c.encoder_hidden
    units += symbols * 8 * c.prediction_layers * c.prediction_hidden
    units += stacked * symbols * (2 * c.joint_hidden + c.vocab)
    # In integers: a float does not hold what some flags ask for.
    return (24 * num_parameters(c) + 2 * c.batch * units) * 115 // 100 + CONTEXT_BYTES


def require(config: Config, available_bytes: int | None) -> None:
    """ValueError where the config cannot fit; None: the machine does not tell."""
    require_batch(config, PRESETS, predicted_bytes, available_bytes)


MIN_LR = 1e-5


def learning_rate(config: Config, index: int) -> float:
    """Linear warm-up, hold, then a factor gamma each epoch, not below 1e-5 (common/optimizers.py of the benchmark)."""
    c = config
    if index < c.lr_warmup:
        return c.lr * (index + 1) / (c.lr_warmup + 1)
    epochs = max(0, index - c.lr_warmup - c.lr_hold) // c.lr_epoch
    return max(c.lr * c.lr_gamma**epochs, min(MIN_LR, c.lr))


def persistent_lstms(config: Config) -> bool:
    """Whether all LSTMs can run as cuDNN's persistent kernels; PyTorch's rule in RNN.cpp, get_algo.

    FP16, widths in multiples of 128 up to 1024, a batch in multiples of 8 up to 128. Others run time step by time step,
    with thousands of launches.
    """
    widths = (config.features, config.encoder_hidden, config.prediction_hidden)
    fits = all(width % 128 == 0 for width in widths) and max(widths[1:]) <= 1024
    return config.precision == "fp16" and fits and config.batch % 8 == 0 and config.batch <= 128


# ------------------------------------------------------------------------------------------------
# What a run prints of itself


def card(config: Config, device: str, flops_per_step: float) -> list[str]:
    """What runs. device: cuda or cpu."""
    c = config
    name = "RNN-T of MLPerf" if num_parameters(c) == 49_071_616 else "toy widths"
    memory = f" | memory predicted {predicted_bytes(c) / 2**30:.1f} GiB" if device == "cuda" else ""
    lengths = f"{c.frames} frames, {c.tokens} tokens" if c.data == "synthetic" else f"--data {c.data}"
    return [
        f"{num_parameters(c) / 1e6:,.1f} M parameters: {name}",
        f"batch {c.batch}, {lengths}, buckets {c.buckets} | {c.precision} with FP32 masters | "
        f"{flops_per_step / 1e12:.3g} TFLOP/step{memory}",
        f"LSTMs: {c.lstm}, streams: {c.streams}",
    ]


def notes(config: Config, device: str, variant: str) -> list[str]:
    """Settings that do nothing here. device: cuda or cpu."""
    found = []
    if device == "cpu" and config.lstm != "cudnn":
        found.append(f"--lstm {config.lstm}: on a CPU plain torch computes what the kernels do, slowly")
    if config.streams == 2 and (device == "cpu" or variant == "graph"):
        found.append("--streams 2 changes nothing on a CPU and in graph")
    if device == "cuda" and config.lstm == "cudnn" and not persistent_lstms(config):
        kernels = "cuDNN's persistent LSTM kernels"
        found.append(f"{kernels} take FP16, widths of 128 and batches of 8 to 128: this runs without them")
    return found
