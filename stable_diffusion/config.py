"""Stable Diffusion v2: what can be set, the presets, the UNet's plan, and arithmetic on it (no torch here)."""

from dataclasses import dataclass
from typing import NamedTuple

from common import fit
from graph_worth import Timing, needs, option, require_fields, require_folder_of_its_own

TIMESTEPS = 1000
LATENT_SCALE = 0.18215  # times latents of the VAE: variance one
CONTEXT_BYTES = 2 * 2**30
MAX_WORKERS = 64


@dataclass(frozen=True, kw_only=True)
class Config(Timing):
    """The UNet of Stable Diffusion v2 as MLPerf trains it, and how a step trains it."""

    batch: int = option(4, "samples on this GPU")
    channels: int = option(320, "channels of the first level")
    multipliers: str = option(
        "1,2,4,4", "channels of the four levels, as multiples of --channels", ("1,2,4,4", "1,1,1,1")
    )
    res_blocks: int = option(2, "residual blocks of a level on the way down; on the way up there is one more")
    latent_size: int = option(64, "height and width of the latents")
    context_tokens: int = option(77, "tokens of a text encoding")
    context_dim: int = option(1024, "width of a text encoding")
    head_dim: int = option(64, "size of one attention head")
    precision: str = option("fp16", "weights and activations; masters are FP32", ("fp16", "bf16"))
    zero_init: bool = option(False, "start with the benchmark's zero weights, which draw less power than training")
    lr: float = option(7.168e-5, "learning rate after warm-up")
    lr_warmup: int = option(1000, "steps of linear warm-up")
    loss_scale: float = option(65536.0, "loss scale at the start")
    growth_interval: int = option(1000, "finite steps after which the loss scale doubles")
    hysteresis: int = option(2, "overflows in a row after which the loss scale halves")
    max_floor_overflows: int = option(20, "overflows in a row with the loss scale at 1 that end a run")
    data: str = option("", "folder of shards (.safetensors) (empty: realistic ones are written once)")
    workers: int = option(2, "processes that read data (0: none)")

    def __post_init__(self):
        counts = ("batch", "channels", "latent_size", "context_tokens", "context_dim", "head_dim")
        counts += ("growth_interval", "hysteresis", "max_floor_overflows", "min_steps")
        require_fields(self, counts, lambda value: value >= 1, "a number from 1 up")
        require_fields(self, ("lr_warmup",), lambda value: value >= 0, "a number from 0 up")
        require_fields(self, ("workers",), lambda value: 0 <= value <= MAX_WORKERS, f"a number from 0 to {MAX_WORKERS}")
        require_fields(self, ("res_blocks",), lambda value: 1 <= value <= 16, "a number from 1 to 16")
        require_fields(self, ("lr",), lambda value: 0 <= value <= 1, "a number from 0 to 1")
        require_fields(self, ("loss_scale",), lambda value: 1 <= value <= 2.0**32, f"a number from 1 to {2**32}")
        require_folder_of_its_own("--data", self.data)
        if self.latent_size % 8:
            raise ValueError(f"--latent-size {self.latent_size}: takes a multiple of 8, it is halved three times")
        if self.channels % 32 or self.channels % self.head_dim:
            raise ValueError(f"--channels {self.channels}: takes a multiple of 32 and of --head-dim {self.head_dim}")


# Batches are the per-GPU shares of the H200 logs of MLPerf v5.0: 4 on 64 GPUs, 32 on 8. The learning rate is 2.8e-7
# times the global batch, 256 in both.
PRESETS = {
    "tiny": Config(
        batch=2,
        channels=32,
        multipliers="1,1,1,1",
        res_blocks=1,
        latent_size=8,
        context_tokens=8,
        context_dim=64,
        head_dim=16,
        precision="bf16",
        lr=1e-3,
        lr_warmup=10,
        growth_interval=20,
        workers=1,
    ),
    "bench": Config(),
    "bench_b1": Config(batch=1),
    "full": Config(batch=32),
    "mlperf": Config(batch=4, zero_init=True, min_steps=200),
}

FACTS = {
    "files": ["other_variants"],
    "parity_steps": 50,
    "sweeps": {"batch": ["batch"]},
    "presets_need": lambda preset, config: needs(preset != "tiny", submitted=(8, 8) if preset == "mlperf" else None),
}


class Block(NamedTuple):
    """One block: kind "conv_in", "res", "down", "up" or "conv_out"; channels; size: height and width at its output.

    attention: a transformer follows. pushes, pops: its output goes to, its input takes from the skip connections.
    """

    kind: str
    in_channels: int
    out_channels: int
    size: int
    attention: bool = False
    pushes: bool = False
    pops: bool = False


def plan(config: Config) -> list[Block]:
    """The UNet's blocks in the order of the forward pass.

    Source: NeMo 25.04, diffusionmodules/openaimodel.py with MLPerf's settings: channel multipliers 1, 2, 4, 4, two
    residual blocks a level (three on the way up), transformers at the first three levels and in the middle.
    """
    widths = [config.channels * multiplier for multiplier in map(int, config.multipliers.split(","))]
    size, channels = config.latent_size, config.channels
    blocks = [Block("conv_in", 4, channels, size, pushes=True)]
    skips = [channels]
    for level, width in enumerate(widths):
        for _ in range(config.res_blocks):
            blocks.append(Block("res", channels, width, size, attention=level < 3, pushes=True))
            channels = width
            skips.append(channels)
        if level < 3:
            size //= 2
            blocks.append(Block("down", channels, channels, size, pushes=True))
            skips.append(channels)
    blocks += [Block("res", channels, channels, size, attention=True), Block("res", channels, channels, size)]
    for level, width in reversed(list(enumerate(widths))):
        for _ in range(config.res_blocks + 1):
            blocks.append(Block("res", channels + skips.pop(), width, size, attention=level < 3, pops=True))
            channels = width
        if level > 0:
            size *= 2
            blocks.append(Block("up", channels, channels, size))
    blocks.append(Block("conv_out", channels, 4, size))
    return blocks


def _parts(config: Config):
    """(weights of matrices and convolutions, positions of a sample that they are applied to, other parameters: biases
    and norms) of each part of the UNet."""
    emb = 4 * config.channels
    yield config.channels * emb + emb * emb, 1, 2 * emb
    for block in plan(config):
        i, o, area = block.in_channels, block.out_channels, block.size**2
        if block.kind == "res":
            skip = i != o
            yield 9 * (i * o + o * o) + skip * i * o, area, 2 * i + 4 * o + skip * o
            yield emb * o, 1, o
        else:
            yield 9 * i * o, area, o + (2 * i if block.kind == "conv_out" else 0)
        if block.attention:
            # Self-attention 4, cross-attention 2, feed-forward 12, projections 2; then keys and values of the text.
            yield 20 * o * o, area, 21 * o
            yield 2 * config.context_dim * o, config.context_tokens, 0


def num_parameters(config: Config) -> int:
    """Parameters of the UNet; 865,910,724 with MLPerf's settings."""
    return sum(weights + others for weights, _, others in _parts(config))


def flops_per_sample(config: Config) -> float:
    """FLOP of forward and backward (three times the forward) for one sample; 2,412.77e9 with MLPerf's settings.

    A multiply-add counts as two; convolutions, linear layers and attention in full, nothing recomputed.
    tests/stable_diffusion/test_config.py checks it against FlopCounterMode.
    """
    macs = sum(weights * positions for weights, positions, _ in _parts(config))
    for block in plan(config):
        if block.attention:
            macs += 2 * block.size**2 * (block.size**2 + config.context_tokens) * block.out_channels
    return 3.0 * 2 * macs


def card(config: Config, on_gpu: bool) -> list[str]:
    """Lines about what runs."""
    tflops = config.batch * flops_per_sample(config) / 1e12
    memory = f" | memory predicted {predicted_bytes(config) / 2**30:.1f} GiB" if on_gpu else ""
    return [
        f"UNet of {num_parameters(config) / 1e6:,.1f} M parameters",
        f"batch {config.batch} of 4 x {config.latent_size} x {config.latent_size} latents, text "
        f"{config.context_tokens} x {config.context_dim} | {config.precision} with FP32 masters | "
        f"{tflops:.3g} TFLOP/step{memory}",
    ]


def predicted_bytes(config: Config) -> int:
    """Device memory that a step needs, from sizes alone.

    A parameter takes 16 bytes: 16-bit weight and gradient, FP32 master and two moments. Activations that the backward
    reads, each area x channels x 2 bytes: 2 at a residual block's input width, 2 at its output width, 28 of a
    transformer, besides the text with its keys and values: 0.72 GiB a sample with MLPerf's settings. Fifteen percent
    for workspaces, and CONTEXT_BYTES for CUDA and its libraries.
    """
    units = config.context_tokens * config.context_dim
    for block in plan(config):
        area = block.size**2
        if block.kind == "res":
            units += 2 * area * (block.in_channels + block.out_channels)
        if block.attention:
            units += (28 * area + 2 * config.context_tokens) * block.out_channels
    # In integers: a float does not hold what some flags ask for.
    return (16 * num_parameters(config) + 2 * config.batch * units) * 115 // 100 + CONTEXT_BYTES


def require(config: Config, available_bytes: int | None) -> None:
    """ValueError where the config cannot fit the host's memory; None: the machine does not tell.

    Without a GPU's kernels the optimizer has the gradients in FP32 too, and norms and GEGLU keep more: a half on top.
    """
    fit.require(config, PRESETS, lambda tried: predicted_bytes(tried) * 3 // 2, available_bytes)


def learning_rate(config: Config, index: int) -> float:
    """Linear warm-up over lr_warmup steps, then constant (the benchmark's WarmupHoldPolicy)."""
    return config.lr * min(1.0, (index + 1) / config.lr_warmup) if config.lr_warmup else config.lr
