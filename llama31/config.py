"""Llama 3.1: what can be set, the presets, and arithmetic on them (no torch here)."""

import math
import os
from dataclasses import dataclass

from common.fit import require_split
from common.flops import Transformer
from common.parallel.groups import Parallel, require_divisible
from common.scope_rules import Setting, refuse
from graph_worth import Timing, needs, option, require_fields, require_folder_of_its_own
from graph_worth.config import flag_of
from graph_worth.machine.allocator import has_expandable_segments, nccl_registers

PRECISIONS = ("bf16", "fp8", "nvfp4", "nvfp4_emulated")
# Llama 3.1's scaling of the rotary embedding (config.json, rope_scaling of type llama3).
ROPE_SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_COUNTS = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "sequence", "microbatch")
_COUNTS += ("microbatches", "share_cp", "batches", "min_steps", "tp", "pp", "cp")
# Fields of which Megatron-Core's step has the default alone.
_NOT_BY_MEGATRON = ("tp", "pp", "cp", "ramp", "weights", "moments", "optimizer", "clip", "nan_checks")
_NOT_BY_MEGATRON += ("validate_every", "checkpoint")
# The tensor-parallel size whose share `bench` is.
_SUBMITTED_TP = 8


@dataclass(frozen=True, kw_only=True)
class Config(Parallel, Timing):
    """A Llama, or one GPU's share of it. Widths and sequence are the whole model's; properties named local_* are this
    GPU's, after --share-tp and --share-cp (which no rank stands for) and --tp and --cp (which ranks stand for)."""

    layers: int = option(4, "transformer layers, over all stages")
    hidden: int = option(16384, "hidden size")
    heads: int = option(128, "attention heads")
    kv_heads: int = option(8, "groups of keys and values, which several heads share")
    head_dim: int = option(128, "size of one attention head")
    ffn: int = option(53248, "feed-forward width, of the gate and of the up projection each")
    vocab: int = option(128256, "rows of embedding and head; tokens are folded into those that the ranks have")
    sequence: int = option(8192, "tokens in a sequence")
    microbatch: int = option(1, "sequences in a microbatch")
    microbatches: int = option(8, "microbatches in a step, accumulated into main_grad")
    ramp: str = option("", "numbers of microbatches that steps have in turn, such as 4,6,8 (empty: --microbatches)")
    share_tp: int = option(
        0,
        "a tensor-parallel share without ranks: widths and vocabulary are divided by this too (0: by 8 / --tp, so that "
        "ranks and share are the submission's 8)",
    )
    share_cp: int = option(2, "a context-parallel share without ranks: the sequence is divided by this too")
    rope_theta: float = option(500000.0, "base of the rotary position embedding")
    norm_eps: float = option(1e-5, "epsilon of RMSNorm")
    precision: str = option(
        "fp8",
        "fp8: current scaling by tensor, emulated without FP8 hardware; nvfp4: compute capability 10.0, te layers; "
        "nvfp4_emulated: its numbers",
        PRECISIONS,
    )
    weights: str = option("bf16", "format of the layers' stored matrices; fp8 needs --precision fp8", ("bf16", "fp8"))
    main_grad: str = option("bf16", "format of the accumulated gradients", ("bf16", "fp32"))
    moments: str = option("fp32", "format of Adam's moments", ("bf16", "fp32"))
    layer: str = option(
        "auto",
        "te: te.TransformerLayer; torch: plain PyTorch; auto: te where it runs; megatron: Megatron-Core's",
        ("auto", "te", "torch", "megatron"),
    )
    keep: str = option(
        "auto",
        "items that layers keep for their backward: all, least, or numbers of the last layers with items, such as "
        "'14 attention rest, 18 all'; auto: what fits, by the preset",
    )
    optimizer: str = option(
        "adam", "none: forward and backward alone, norms and first rows take fixed steps", ("adam", "none")
    )
    clip: str = option(
        "device", "where the factor that clips gradients is computed; host: the norm is read", ("device", "host")
    )
    nan_checks: bool = option(False, "read each microbatch's loss and the gradient norm and stop at NaN")
    validate_every: int = option(0, "validate after every so many steps, in the step (0: never)")
    # At 2e-5 random weights have no stable course. Attention's backward is not deterministic in timed runs, so the
    # first step's gradient norm takes one of three values; nine runs of `bench` are then 0.13 apart in the loss of step
    # 3 (results/h200x1/llama31-bench/20261123T155553Z-7dea93-8cfd). At 2e-6 six are 0.004 apart (20261123T175049Z).
    lr: float = option(2e-6, "learning rate of Adam; with random weights two equal runs part at 2e-5")
    data: str = option(
        "", "folder of text up to 1 GiB, or Megatron .bin/.idx prefix, whose ids are folded (empty: Python's library)"
    )
    checkpoint: str = option("", "folder of a Hugging Face Llama 3.1 (empty: random weights)")
    batches: int = option(8, "different batches that rotate")

    def __post_init__(self):
        require_fields(self, _COUNTS, lambda value: value >= 1, "a number from 1 up")
        require_fields(self, ("validate_every", "share_tp"), lambda value: value >= 0, "a number from 0 up")
        require_fields(self, ("lr",), lambda value: 0 <= value < math.inf, "a finite number from 0 up")
        require_fields(self, ("rope_theta", "norm_eps"), lambda value: 0 < value < math.inf, "a finite number above 0")
        for name in ("data", "checkpoint"):
            require_folder_of_its_own(f"--{name}", getattr(self, name))
        if self.heads % self.kv_heads:
            raise ValueError(f"--heads {self.heads}: takes a multiple of --kv-heads {self.kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"--head-dim {self.head_dim}: takes an even number")
        if not self.share_tp and _SUBMITTED_TP % self.tp:
            raise ValueError(f"--tp {self.tp}: takes a divisor of {_SUBMITTED_TP}, or --share-tp 1")
        require_split({"--kv-heads": self.kv_heads, "--ffn": self.ffn, "--vocab": self.vocab}, self.tp, self.share)
        # Of two runs that each context rank has, one is from the front and one from the back.
        runs = self.share_cp * self.cp * (2 if self.cp > 1 else 1)
        require_divisible("--sequence", self.sequence, "runs of tokens, by --share-cp and --cp,", runs)
        require_divisible("a context rank's tokens", self.local_sequence, "--tp (sequence parallelism)", self.tp)
        if self.weights == "fp8" and self.precision != "fp8":
            raise ValueError(f"--weights fp8 needs --precision fp8, not {self.precision}")
        widths = (self.hidden, self.local_ffn, self.local_heads * self.head_dim, self.local_sequence * self.microbatch)
        if self.precision != "bf16" and any(width % 16 for width in widths):
            raise ValueError(
                f"--precision {self.precision} needs --hidden, a GPU's feed-forward width, heads x head-dim and tokens "
                "of a microbatch divisible by 16"
            )
        if self.optimizer == "none" and (self.weights, self.clip) != ("bf16", "device"):
            raise ValueError("--optimizer none takes --weights bf16 --clip device: nothing is clipped")
        if max(self.counts) > self.microbatches:
            raise ValueError(f"--ramp {self.ramp}: takes numbers up to --microbatches {self.microbatches}")
        layers_of_stages(self.layers, self.pp)
        if self.layer == "megatron":
            if self.precision not in ("bf16", "fp8") or self.keep not in ("auto", "all"):
                raise ValueError("--layer megatron takes --precision bf16 or fp8, and --keep all")
            if any(getattr(self, name) != getattr(Config, name) for name in _NOT_BY_MEGATRON):
                flags = ", ".join(map(flag_of, _NOT_BY_MEGATRON))
                raise ValueError(f"--layer megatron runs on one GPU, without {flags}")

    @property
    def by_itself(self) -> str:
        return "--layer megatron runs" if self.layer == "megatron" else ""

    @property
    def counts(self) -> tuple[int, ...]:
        """Numbers of microbatches that steps have in turn: (4, 6, 8) for --ramp 4,6,8."""
        if not self.ramp:
            return (self.microbatches,)
        parts = [part.strip() for part in self.ramp.split(",")]
        if not all(part.isdecimal() and int(part) for part in parts):
            raise ValueError(f"--ramp {self.ramp}: takes numbers from 1 up with commas between them, such as 4,6,8")
        return tuple(map(int, parts))

    @property
    def stage_sizes(self) -> list[int]:
        """Layers of each pipeline stage."""
        return list(map(len, layers_of_stages(self.layers, self.pp)))

    @property
    def layer_passes(self) -> int | None:
        """Forward and backward passes of a stage's layers in a step. None: stages have different numbers of layers."""
        first, *others = self.stage_sizes
        return 2 * first * self.microbatches if set(others) <= {first} else None

    def replays(self, count: int | None) -> int | None:
        """`count` replays a step. None: steps differ in their number of microbatches, or some of them validate."""
        differ = set(self.counts) != {self.microbatches} or self.validate_every
        return None if differ else count

    @property
    def share(self) -> int:
        """--share-tp, or what --tp leaves of the submission's 8."""
        return self.share_tp or _SUBMITTED_TP // self.tp

    @property
    def local_heads(self) -> int:
        return self.heads // (self.share * self.tp)

    @property
    def local_kv_heads(self) -> int:
        return self.kv_heads // (self.share * self.tp)

    @property
    def local_ffn(self) -> int:
        return self.ffn // (self.share * self.tp)

    @property
    def local_vocab(self) -> int:
        return self.vocab // (self.share * self.tp)

    @property
    def local_sequence(self) -> int:
        """Tokens of a sequence on this context rank, those of all its tensor ranks together."""
        return self.sequence // (self.share_cp * self.cp)

    @property
    def q_width(self) -> int:
        return self.heads * self.head_dim


def layers_of_stages(layers: int, pp: int) -> list[range]:
    """Layer numbers of each stage: of equal size, else NVIDIA's split, in which embedding and loss count as a layer."""
    if layers % pp == 0:
        sizes = [layers // pp] * pp
    elif (layers + 2) % pp == 0 and (layers + 2) // pp > 1:
        inner = (layers + 2) // pp
        sizes = [inner - 1, *[inner] * (pp - 2), inner - 1]
    else:
        raise ValueError(f"--layers {layers}: takes a multiple of --pp {pp}, or two less than one")
    starts = [sum(sizes[:stage]) for stage in range(pp)]
    return [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]


_WHOLE_8B = {"hidden": 4096, "heads": 32, "ffn": 14336, "layers": 32, "share_tp": 1, "share_cp": 1}
# bench: one GPU's share of 405B at the submission's TP8 CP2, 4 of 126 layers. full: 8B whole, 12 bytes a parameter.
# slice_70b: 8 of the 80 layers of 70B at its full width, an eighth of the vocabulary, forward and backward alone.
# mlperf: NVIDIA's 512 B200 of MLPerf Training v5.1 (tensor 4, pipeline 8, context 2, 144 microbatches), without
# interleaved stages.
PRESETS = {
    "tiny": Config(
        layers=2,
        hidden=64,
        heads=4,
        kv_heads=2,
        head_dim=16,
        ffn=128,
        vocab=256,
        sequence=32,
        microbatches=3,
        share_tp=1,
        share_cp=1,
        lr=2e-3,
        batches=4,
    ),
    "bench": Config(),
    "full": Config(
        **_WHOLE_8B,
        microbatches=2,
        weights="fp8",
        moments="bf16",
        min_steps=8,
        batches=4,
        # At 2e-6 two eager runs are 0.02 apart in the loss of step 6, where 0.03 are allowed (20261123T202500Z).
        lr=5e-7,
    ),
    "slice_70b": Config(
        layers=8,
        hidden=8192,
        heads=64,
        ffn=28672,
        vocab=16032,
        microbatches=1,
        share_tp=1,
        share_cp=1,
        precision="bf16",
        layer="torch",
        optimizer="none",
        min_steps=8,
    ),
    "mlperf": Config(layers=126, share_tp=1, share_cp=1, tp=4, pp=8, cp=2, microbatches=144, min_steps=8),
}

# What layers of each kind keep (--keep) on a card of so many GB, where not everything fits. mlperf: layers of a stage.
KEEP = {
    ("full", "te"): {80: "2 attention rest", 141: "1 attention rest, 31 all"},
    ("full", "torch"): {141: "26 all"},
    ("mlperf", "te"): {80: "1 attention rest, 3 all", 141: "1 attention rest, 1 all"},
}


# te, FP8 and FP4 modules leave the compiler.
TORCH_BF16 = {"layer": "torch", "precision": "bf16", "weights": "bf16"}
FACTS = {
    "files": ["pipeline.stage_graphs", "other_variants"],
    "shared": ["common.megatron"],
    "builds": {
        "validate": {"validate_every": 4},  # training and validation, a graph each, as in NVIDIA's submission
        "torch_bf16": TORCH_BF16,
        "nvfp4_emulated": TORCH_BF16 | {"precision": "nvfp4_emulated"},
        "megatron": {"layer": "megatron"},
    },
    # Transformer Engine reads it when a layer is made: parity has a process of its own.
    "parity_variables": {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"},
    "sweeps": {"batch": ["microbatches"], "sequence": ["sequence"], "layers": ["layers"]},
    "presets_need": lambda preset, config: needs(
        preset != "tiny", **config.world_sizes(), submitted=(64, 8) if preset == "mlperf" else None
    ),
}


# ------------------------------------------------------------------------------------------------
# What cannot be captured

# Variant -> its scope in common/scope_rules.py; the other variants capture nothing themselves.
SCOPES = {
    "graph_attn": "attn",
    "graph_mlp": "mlp",
    "graph_layer": "layer",
    "graph_microbatch": "microbatch",
    "graph_fwd_bwd": "iteration",
    "graph_step": "step",
    "graph_step_nvfp4": "step",
    "graph_optimizer": "optimizer",
}


def require_capturable(config: Config, variant: str, environment) -> None:
    """ValueError in one line where `variant` cannot capture a step of this config; asked before any work on the GPU.

    environment: such as os.environ.
    """
    several_ranks = environment.get("WORLD_SIZE", "1") != "1"
    refuse(
        Setting(
            scope=SCOPES.get(variant, ""),
            nan_checks=config.nan_checks,
            host_clip=config.clip == "host",
            changing_microbatches=len(set(config.counts)) > 1,
            expandable_segments=several_ranks and nccl_registers(environment) and has_expandable_segments(environment),
        )
    )


def require_runnable(args) -> None:
    """ValueError in one line where these `graph_worth.config.Arguments` cannot be run, whatever the device."""
    require_capturable(args.config, args.run.variant, os.environ)


# ------------------------------------------------------------------------------------------------
# Arithmetic


def layer_parameters(config: Config) -> int:
    """Elements of one layer on this GPU: four matrices and two norms."""
    c, heads = config, (config.local_heads + 2 * config.local_kv_heads) * config.head_dim
    return c.hidden * (heads + c.local_heads * c.head_dim + 3 * c.local_ffn + 2)


def num_parameters(config: Config) -> int:
    """Elements on a GPU of the widest stage: 8,030,261,248 of the whole 8B, 405,853,388,800 of 405B."""
    layers = max(config.stage_sizes)
    ends = (2 if config.pp == 1 else 1) * config.local_vocab * config.hidden + config.hidden
    return layers * layer_parameters(config) + ends


def tokens_per_step(config: Config) -> float:
    """Tokens of a step on one GPU, the mean over a ramp: its share of a pipeline's and a tensor group's."""
    tokens = config.microbatch * config.local_sequence * sum(config.counts) / len(config.counts)
    return tokens / (config.tp * config.pp)


def flops_per_step(config: Config, causal_half: bool = True) -> float:
    """Model FLOP of a step on one GPU, the mean over a ramp; not causal_half: as MLPerf counts, attention in full.

    A context-parallel share without ranks attends within its own tokens.
    """
    c = config
    ranks, sequence = c.tp * c.cp * c.pp, c.sequence // c.share_cp
    model = Transformer(
        layers=c.layers,
        sequence=sequence,
        hidden=c.hidden,
        q_width=c.q_width // c.share,
        kv_width=c.kv_heads * c.head_dim // c.share,
        ffn=c.ffn // c.share,
        vocab=c.vocab // c.share,
        mlp_matrices=3,
    )
    return model.flops(causal_half) / ranks * c.microbatch * sum(c.counts) / len(c.counts)
