"""Llama 2 70B LoRA: what can be set, the presets, and counts that follow from them (no torch here)."""

import copy
import math
from dataclasses import dataclass

from common.fit import require_split
from common.parallel.groups import Parallel
from graph_worth import Timing, needs, option, require_fields, require_folder_of_its_own

# Tensors that a layer quantises (llama2_lora/kernels/scaling.py).
FORWARD_SCALES = ("qkv_in", "proj_in", "fc1_in", "fc2_in", "fc1_out")
SCALES = (*FORWARD_SCALES, "qkv_grad", "proj_grad", "fc1_grad", "fc2_grad")
# MLPERF_LR is NVIDIA's for 8 H200s in v4.1. Random weights have no minimum near the adapters: at 5e-4 their loss went
# from 12.0 to 10.1 to 34.0 on an H200, and on such a course any difference grows.
MLPERF_LR, RANDOM_LR = 5e-4, 2e-5
# Documents in a window. Padding counts as a document.
MAX_DOCUMENTS = 16
_COUNTS = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "sequence", "rank", "batches")
_COUNTS += ("min_steps", "amax_history", "tp", "cp")
# Adapters that are the same on all tensor ranks; each rank has a shard of the others.
REPLICATED = ("qkv.a", "proj.b")
# Sizes that tensor ranks split among them.
_SPLIT = ("heads", "kv_heads", "ffn", "vocab")


@dataclass(frozen=True, kw_only=True)
class Config(Parallel, Timing):
    """Llama 2 70B with LoRA adapters on attention's q k v and output projections. A step trains on one sequence.

    Widths and sequence are the whole model's. `shard` has those of one tensor rank; `tokens` are one context rank's.
    """

    layers: int = option(80, "transformer layers")
    hidden: int = option(8192, "hidden size")
    heads: int = option(64, "attention heads")
    kv_heads: int = option(8, "groups of keys and values, which several heads share")
    head_dim: int = option(128, "size of one attention head")
    ffn: int = option(28672, "feed-forward width, of the gate and of the up projection each")
    vocab: int = option(32000, "rows of embedding and head")
    sequence: int = option(8192, "tokens in a window")
    tp: int = option(1, "ranks that share each layer (tensor parallelism), in handwritten layers")
    cp: int = option(1, "ranks that share each window (context parallelism), in handwritten layers")
    rank: int = option(16, "rank of the adapters")
    alpha: float = option(32.0, "the adapters' output is scaled by alpha / rank")
    dropout: float = option(0.1, "probability that the adapters drop an element of their input")
    rope_theta: float = option(10000.0, "base of the rotary position embedding")
    norm_eps: float = option(1e-5, "epsilon of RMSNorm")
    precision: str = option(
        "fp8",
        "precision of the frozen GEMMs. fp8: delayed scaling, emulated without FP8 hardware; nvfp4: compute capability "
        "10.0, te layers; nvfp4_emulated: its numbers, in handwritten layers",
        ("fp8", "bf16", "nvfp4", "nvfp4_emulated"),
    )
    layer: str = option(
        "handwritten",
        "handwritten: our forward and backward, without autograd; te: Transformer Engine's modules; torch: plain "
        "PyTorch, bf16 only",
        ("handwritten", "te", "torch"),
    )
    keep: str = option(
        "auto",
        "what handwritten layers keep for their backward: all, least, or numbers of the last layers with tensors, such "
        "as '5 qkv fc1, 75 all'; auto: what fits, by the preset",
    )
    amax_history: int = option(4, "steps in the amax history of delayed scaling")
    lr: float = option(-1.0, f"learning rate of Adam; -1: {MLPERF_LR:g} with --checkpoint, else {RANDOM_LR:g}")
    documents: str = option(
        "whole",
        "whole: a window is one causal sequence, as in MLPerf; separate: its documents do not see each other",
        ("whole", "separate"),
    )
    data: str = option("", "packed rows: a file, or a folder of train files (empty: the Python standard library)")
    checkpoint: str = option("", "folder of a Hugging Face Llama (empty: random weights)")
    save_adapter: str = option("", "new folder for the trained adapter, in PEFT's format (empty: none)")
    batches: int = option(8, "different windows that rotate")

    def __post_init__(self):
        require_fields(self, _COUNTS, lambda value: value >= 1, "a number from 1 up")
        require_fields(self, ("layers",), lambda value: value <= 4096, "a number up to 4096")
        require_fields(self, ("dropout",), lambda value: 0 <= value < 1, "a number from 0 up, below 1")
        require_fields(
            self, ("lr",), lambda value: value == -1 or 0 <= value < math.inf, "-1 or a finite number from 0 up"
        )
        positive = ("alpha", "rope_theta", "norm_eps")
        require_fields(self, positive, lambda value: 0 < value < math.inf, "a finite number above 0")
        if self.layer == "torch" and self.precision != "bf16":
            raise ValueError(f"--layer torch needs --precision bf16, not {self.precision}")
        for name in ("data", "checkpoint", "save_adapter"):
            require_folder_of_its_own(f"--{name.replace('_', '-')}", getattr(self, name))
        if self.heads % self.kv_heads:
            raise ValueError(f"--heads {self.heads}: takes a multiple of --kv-heads {self.kv_heads}")
        if self.sequence % (16 * self.cp):
            by = f" x --cp {self.cp}" if self.cp > 1 else ""
            raise ValueError(f"--sequence {self.sequence}: takes a multiple of 16{by}")
        if self.head_dim & (self.head_dim - 1) or self.head_dim < 2:
            raise ValueError(f"--head-dim {self.head_dim}: takes a power of two, 64 or 128 in models of this kind")
        if self.pp != 1:
            raise ValueError(f"--pp {self.pp}: takes 1, this model has no pipeline; take --tp or --cp")
        require_split({f"--{name.replace('_', '-')}": getattr(self, name) for name in _SPLIT}, self.tp)
        shard = self.shard
        if any(width % 16 for width in (self.hidden, shard.ffn, shard.q_width, shard.qkv_width)):
            by = f", divided by --tp {self.tp}," if self.tp > 1 else ""
            raise ValueError(
                f"--hidden, --ffn, --heads x --head-dim and --kv-heads x --head-dim{by} take multiples of 16"
            )

    @property
    def shard(self) -> "Config":
        """The config with the widths of one tensor rank: heads, ffn and vocabulary divided by tp."""
        if self.tp == 1:
            return self
        shard = copy.copy(self)  # not checked again
        for name in _SPLIT:
            object.__setattr__(shard, name, getattr(self, name) // self.tp)
        object.__setattr__(shard, "tp", 1)
        return shard

    @property
    def tokens(self) -> int:
        """Tokens of a window that one rank has."""
        return self.sequence // self.cp

    @property
    def learning_rate(self) -> float:
        """lr if it is given, else MLPerf's for a checkpoint and RANDOM_LR for random weights."""
        if self.lr >= 0:
            return self.lr
        return MLPERF_LR if self.checkpoint else RANDOM_LR

    @property
    def q_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def qkv_width(self) -> int:
        """Columns of the fused projection: q, then k, then v."""
        return self.q_width + 2 * self.kv_width

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """Frozen weights of a layer: name -> (outputs, inputs). fc1 has the gate's rows, then the up projection's."""
        return {
            "qkv": (self.qkv_width, self.hidden),
            "proj": (self.hidden, self.q_width),
            "fc1": (2 * self.ffn, self.hidden),
            "fc2": (self.hidden, self.ffn),
        }

    @property
    def adapters(self) -> dict[str, tuple[int, int]]:
        """Trainable matrices of a layer: name -> shape. y += (alpha / rank) dropout(x) a^T b^T.

        First those of REPLICATED, then the others.
        """
        return {
            "qkv.a": (self.rank, self.hidden),
            "proj.b": (self.hidden, self.rank),
            "qkv.b": (self.qkv_width, self.rank),
            "proj.a": (self.rank, self.q_width),
        }


# Widths, LoRA and optimizer are those of MLPerf Training v5.0's llama2_70b_lora (NVIDIA's configs). 1024 tokens are a
# GPU's share of its largest, graphed runs (mlperf_cp8: context-parallel size 8), 8192 those of its run on 8 GPUs.
PRESETS = {
    "tiny": Config(
        layers=3,
        hidden=128,
        heads=4,
        kv_heads=2,
        head_dim=32,
        ffn=256,
        vocab=256,
        sequence=64,
        rank=8,
        alpha=16.0,
        lr=1e-2,
        batches=4,
    ),
    "bench": Config(sequence=1024),
    "full": Config(min_steps=8, batches=4),
    "slice": Config(layers=8, sequence=1024),
    "mlperf": Config(min_steps=8),
    "mlperf_cp8": Config(cp=8),
}

# What handwritten layers keep (--keep) on a card of so many GB, where not everything fits.
_KEEP_8192 = {
    80: "2 attention",
    141: "76 attention residual fc1, 1 qkv attention fc1, 3 qkv attention residual fc1",
}
KEEP = {
    "bench": {80: "80 qkv attention residual fc1", 141: "5 qkv attention residual fc1, 75 all"},
    "full": _KEEP_8192,
    "mlperf": _KEEP_8192,
    "mlperf_cp8": {
        80: "52 attention residual fc1, 4 qkv attention fc1, 24 qkv attention residual fc1",
        141: "2 qkv attention fc1, 1 qkv attention fc1 transpose, 4 qkv attention residual fc1, 73 all",
    },
}

# torch.compile needs plain layers in bf16: it cannot see into our kernels or Transformer Engine's.
TORCH_BF16 = {"layer": "torch", "precision": "bf16"}

FACTS = {
    "files": ["other_variants"],
    "builds": {
        "te": {"layer": "te"},
        "torch_bf16": TORCH_BF16,
        "nvfp4_emulated": {"layer": "handwritten", "precision": "nvfp4_emulated"},
    },
    # Transformer Engine reads it when a layer is made: parity has a process of its own.
    "parity_variables": {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"},
    "sweeps": {"sequence": ["sequence"], "layers": ["layers"]},
    "presets_need": lambda preset, config: needs(
        preset != "tiny", **config.world_sizes(), submitted={"mlperf": (1, 8), "mlperf_cp8": (128, 4)}.get(preset)
    ),
}


def layer_weights(config: Config) -> int:
    """Elements of the four frozen matrices of a layer: 855,638,016 in Llama 2 70B."""
    return sum(outputs * inputs for outputs, inputs in config.matrices.values())


def num_trainable(config: Config) -> int:
    """Elements of all adapters: 44,564,480 in Llama 2 70B at rank 16."""
    return config.layers * sum(rows * columns for rows, columns in config.adapters.values())


def num_parameters(config: Config) -> int:
    """Frozen elements: matrices and norms of the layers, embedding, final norm, head."""
    layer = layer_weights(config) + 2 * config.hidden
    return config.layers * layer + (2 * config.vocab + 1) * config.hidden


def flops_per_step(config: Config) -> float:
    """Model FLOP that one rank computes in a step, in its part of the layers and of a window of s tokens.

    Frozen weights have no gradient: 4 s W a layer and 4 s h V for the head instead of 6; attention 3 times its causal
    half, 2 s^2 q; the adapters 6 s P. Recomputed work is not counted. 2,517.7 TFLOP for 8192 tokens of the whole model.
    """
    s = config.sequence
    layer = 4 * s * layer_weights(config) + 3 * 2 * s * s * config.q_width
    window = config.layers * layer + 4 * s * config.hidden * config.vocab + 6 * s * num_trainable(config)
    return window / (config.tp * config.cp)
