"""Mixture of experts: what can be set, the presets, and arithmetic on them (no torch here)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from common.fit import fit_layers
from graph_worth import Timing, needs, option, require_fields, require_folder_of_its_own

GIB = 2**30
# What CUDA, cuBLAS and cuDNN take outside of torch's allocator.
CONTEXT_BYTES = 2 * GIB
# An adapter's output is scaled by LORA_ALPHA / rank.
LORA_ALPHA = 32.0
# Tokens whose logits the loss has at a time.
LOSS_TOKENS = 2048
# A rank has at most --ep times the rows that a balanced router sends to another, and no published model as many ranks.
MOST_CAPACITY = 1000
# (hidden, experts) -> name and layers of the whole model.
KNOWN = {(2048, 128): ("Qwen3-30B-A3B", 48), (2880, 32): ("GPT-OSS-20B", 24), (2880, 128): ("GPT-OSS-120B", 36)}
_COUNTS = ("layers", "hidden", "heads", "kv_heads", "head_dim", "experts", "top_k", "ffn", "vocab", "sequence")
_COUNTS += ("microbatch", "microbatches", "share_tp", "share_ep", "ep", "batches", "min_steps")


@dataclass(frozen=True, kw_only=True)
class Config(Timing):
    """A decoder whose feed-forward layers are experts, or one GPU's share of it.

    Widths are the whole model's; properties named local_* are this GPU's after --share-tp and --share-ep, which no rank
    stands for. Attention has its heads over all tokens, the experts have their part of the sequence (sequence
    parallelism). A share's router chooses among the local experts, which so get as many rows as a balanced exchange
    would bring.
    """

    family: str = option(
        "qwen3",
        "qwen3: norms of queries and keys, SwiGLU; gpt_oss: biases, attention sinks, sliding windows, clamped SwiGLU",
        ("qwen3", "gpt_oss"),
    )
    layers: int = option(8, "transformer layers")
    hidden: int = option(2048, "hidden size")
    heads: int = option(32, "attention heads")
    kv_heads: int = option(4, "groups of keys and values, which several heads share")
    head_dim: int = option(128, "size of one attention head")
    experts: int = option(128, "experts of a layer")
    top_k: int = option(8, "experts that a token chooses")
    ffn: int = option(768, "width of an expert, of the gate and of the up projection each")
    vocab: int = option(151936, "rows of embedding and head")
    window: int = option(0, "tokens that every second layer sees, from layer 0 on (0: all layers see all)")
    sequence: int = option(4096, "tokens in a sequence")
    documents: int = option(0, "documents packed into a sequence, at most; bounds on the device (0: one causal run)")
    microbatch: int = option(1, "sequences in a microbatch")
    microbatches: int = option(1, "microbatches in a step")
    share_tp: int = option(1, "a tensor-parallel share without ranks: divides heads, vocabulary and experts' tokens")
    share_ep: int = option(1, "an expert-parallel share without ranks: divides the experts")
    ep: int = option(1, "ranks that share the experts, all of torchrun's; each has sequences of its own")
    routing: str = option(
        "real",
        "real: the router chooses; balanced: every expert gets as many tokens, as published rows have it",
        ("real", "balanced"),
    )
    rank_capacity_factor: float = option(
        1.5, "of the static variants: rows that a rank sends to each rank over those of a balanced router"
    )
    aux_loss: float = option(0.001, "coefficient of the load-balancing loss (0: none)")
    update: bool = option(True, "clip and Adam behind the backward; false: forward and backward alone")
    moments: str = option("bf16", "format of Adam's moments", ("bf16", "fp32"))
    lora_rank: int = option(0, "rank of adapters on attention's projections, all else is frozen (0: all is trained)")
    rope_theta: float = option(1000000.0, "base of the rotary position embedding")
    norm_eps: float = option(1e-6, "epsilon of RMSNorm")
    lr: float = option(2e-6, "learning rate of Adam")
    data: str = option(
        "", "folder of text up to 1 GiB, or Megatron .bin/.idx prefix, whose ids are folded (empty: Python's library)"
    )
    checkpoint: str = option("", "folder of a Hugging Face checkpoint (empty: random weights)")
    batches: int = option(8, "different batches that rotate")

    def __post_init__(self):
        require_fields(self, _COUNTS, lambda value: value >= 1, "a number from 1 up")
        natural = ("window", "documents", "lora_rank")
        require_fields(self, natural, lambda value: value >= 0, "a number from 0 up")
        require_fields(self, ("lr", "aux_loss"), lambda value: 0 <= value < math.inf, "a finite number from 0 up")
        require_fields(self, ("norm_eps",), lambda value: 0 < value < math.inf, "a finite number above 0")
        # YaRN divides by its logarithm.
        require_fields(self, ("rope_theta",), lambda value: 1 < value < math.inf, "a finite number above 1")
        factor = ("rank_capacity_factor",)
        require_fields(self, factor, lambda value: 1 <= value <= MOST_CAPACITY, f"a number from 1 to {MOST_CAPACITY}")
        for name in ("data", "checkpoint"):
            require_folder_of_its_own(f"--{name}", getattr(self, name))
        for flag, size, by, parts in (
            ("--heads", self.heads, "--kv-heads", self.kv_heads),
            ("--kv-heads", self.kv_heads, "--share-tp", self.share_tp),
            ("--vocab", self.vocab, "--share-tp", self.share_tp),
            ("--sequence", self.sequence, "--share-tp", self.share_tp),
            ("--experts", self.experts, "--share-ep", self.share_ep),
            ("--experts", self.experts, "--ep", self.ep),
        ):
            if size % parts:
                raise ValueError(f"{flag} {size}: takes a multiple of {by} {parts}")
        if self.head_dim % 2:
            raise ValueError(f"--head-dim {self.head_dim}: takes an even number")
        if self.hidden % 8 or self.ffn % 8:
            raise ValueError(f"--hidden {self.hidden} --ffn {self.ffn}: take multiples of 8, which grouped GEMMs need")
        if self.top_k > self.local_experts:
            raise ValueError(f"--top-k {self.top_k}: a token can choose among {self.local_experts} experts")
        for name in ("window", "documents"):
            if getattr(self, name) > self.sequence:
                raise ValueError(f"--{name} {getattr(self, name)}: takes at most --sequence {self.sequence}")
        if self.lora_rank > min(self.hidden, self.local_heads * self.head_dim):
            raise ValueError(f"--lora-rank {self.lora_rank}: takes at most the width of a projection")
        if self.ep > 1 and self.share_ep > 1:
            raise ValueError(f"--ep {self.ep} has ranks, --share-ep {self.share_ep} stands for them: take one of both")
        if self.checkpoint and self.share_tp * self.share_ep * self.ep > 1:
            raise ValueError("--checkpoint takes a whole model: --share-tp 1 --share-ep 1 --ep 1")

    @property
    def local_heads(self) -> int:
        return self.heads // self.share_tp

    @property
    def local_kv_heads(self) -> int:
        return self.kv_heads // self.share_tp

    @property
    def local_vocab(self) -> int:
        return self.vocab // self.share_tp

    @property
    def local_experts(self) -> int:
        return self.experts // self.share_ep

    @property
    def rank_experts(self) -> int:
        """Experts that this rank holds, of those that its router chooses among."""
        return self.local_experts // self.ep

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch."""
        return self.microbatch * self.sequence

    @property
    def routed_tokens(self) -> int:
        """Tokens of a microbatch that this GPU's router sees."""
        return self.tokens // self.share_tp

    @property
    def rows(self) -> int:
        """Rows that the experts multiply in a microbatch."""
        return self.routed_tokens * self.top_k

    @property
    def rank_capacity(self) -> int:
        """Rows that this rank sends to each rank with static buffers, in whole tiles of 8."""
        return -(-math.ceil(self.rows * self.rank_capacity_factor / self.ep) // 8) * 8

    @property
    def layer_passes(self) -> int:
        """Forward and backward passes of layers in a step."""
        return 2 * self.layers * self.microbatches

    def require_ranks(self, world_size: int) -> None:
        """ValueError where a run of `world_size` processes is not that of --ep."""
        if world_size != self.ep:
            raise ValueError(
                f"--ep {self.ep} needs as many ranks, this run has {world_size}: change it or torchrun --nproc-per-node"
            )

    def window_of(self, layer: int) -> int:
        """Tokens that a layer's attention sees, its own included; 0 for all."""
        return self.window if layer % 2 == 0 else 0


# Qwen3-30B-A3B: 48 layers. bench is the slice that fits one GPU with its optimizer.
_QWEN3 = Config()
# GPT-OSS-20B: 24 layers; GPT-OSS-120B: 36 layers and 128 experts, alike otherwise.
_GPT_OSS = replace(
    _QWEN3,
    family="gpt_oss",
    layers=24,
    hidden=2880,
    heads=64,
    kv_heads=8,
    head_dim=64,
    experts=32,
    top_k=4,
    ffn=2880,
    vocab=201088,
    window=128,
    rope_theta=150000.0,
    norm_eps=1e-5,
    # The flash backward, which windows and sinks need, adds atomically: steps that are larger magnify its rounding.
    lr=5e-7,
    min_steps=20,
)
_TINY = {
    "layers": 2,
    "hidden": 64,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
    "experts": 8,
    "top_k": 2,
    "ffn": 32,
    "vocab": 256,
    "sequence": 64,
    "microbatches": 2,
    "lr": 2e-3,
    "batches": 4,
    "min_steps": 50,
}
PRESETS = {
    "tiny": replace(_QWEN3, **_TINY),
    "bench": _QWEN3,
    "qwen3_slice_1k": replace(_QWEN3, sequence=1024),
    "qwen3_slice_fwd_bwd": replace(_QWEN3, update=False),
    # One GPU of Megatron Bridge's 16 (tensor 2, pipeline 2, expert 4; global batch 8, microbatch 1).
    "qwen3_share": replace(_QWEN3, layers=24, share_tp=2, share_ep=4, microbatches=2),
    "gpt_oss": _GPT_OSS,
    "gpt_oss_fwd_bwd": replace(_GPT_OSS, update=False),
    "gpt_oss_l8": replace(_GPT_OSS, layers=8),
    "gpt_oss_120b": replace(_GPT_OSS, layers=36, experts=128),
    "gpt_oss_120b_fwd_bwd": replace(_GPT_OSS, layers=36, experts=128, update=False),
    "qwen3_packed": replace(_QWEN3, documents=16),
    "gpt_oss_lora": replace(_GPT_OSS, documents=16, lora_rank=16, lr=1e-5),
    "tiny_gpt_oss": replace(_GPT_OSS, **_TINY | {"window": 16}),
    "tiny_packed": replace(_QWEN3, **_TINY | {"documents": 4}),
    "tiny_lora": replace(_GPT_OSS, **_TINY | {"window": 16, "documents": 4, "lora_rank": 4}),
}

FACTS = {
    "files": ["static_buffers"],
    "sweeps": {"sequence": ["sequence"], "layers": ["layers"], "batch": ["microbatch"]},
    "presets_need": lambda preset, config: needs(
        not preset.startswith("tiny"), multiple_of=config.ep, at_most=config.ep
    ),
}


# ------------------------------------------------------------------------------------------------
# Arithmetic


def layer_parameters(config: Config) -> int:
    """Elements of one layer on this GPU."""
    c = config
    q, kv = c.local_heads * c.head_dim, c.local_kv_heads * c.head_dim
    attention = c.hidden * (2 * q + 2 * kv)
    experts = c.local_experts * c.hidden + c.rank_experts * 3 * c.hidden * c.ffn
    if c.family == "qwen3":
        return attention + experts + 2 * c.hidden + 2 * c.head_dim
    biases = q + 2 * kv + c.hidden + c.local_heads + c.local_experts * (1 + c.hidden) + c.rank_experts * 2 * c.ffn
    return attention + experts + 2 * c.hidden + biases


def num_parameters(config: Config) -> int:
    """Elements on this GPU: 30,532,122,624 of Qwen3-30B-A3B, 20,914,757,184 of GPT-OSS-20B."""
    return config.layers * layer_parameters(config) + 2 * config.local_vocab * config.hidden + config.hidden


def trained_parameters(config: Config) -> int:
    """Elements that have a gradient: all, or the adapters, which `num_parameters` does not count."""
    c = config
    q, kv = c.local_heads * c.head_dim, c.local_kv_heads * c.head_dim
    return c.layers * c.lora_rank * (2 * c.hidden + 2 * q + 2 * kv) if c.lora_rank else num_parameters(c)


def logits_flops(config: Config) -> float:
    """FLOP of a step's logits on one GPU; with --lora-rank the head has no weight gradient."""
    c = config
    return (4.0 if c.lora_rank else 6.0) * c.tokens * c.hidden * c.local_vocab * c.microbatches


def flops_per_step(config: Config, lengths: Sequence[int] = ()) -> float:
    """Model FLOP of a step on one GPU by Megatron-LM's formula (num_floating_point_operations in its training.py).

    The causal half of attention is counted, of each document by itself, and a window of w of n tokens as
    w - w (w - 1) / (2 n) keys a token; the experts that a token chooses, not the router; the logits. Frozen matrices
    have no weight gradient; adapters count. lengths: of all packed documents, whose mean counts.
    """
    c, lengths = config, lengths or [config.sequence]
    q, kv = c.local_heads * c.head_dim, c.local_kv_heads * c.head_dim
    passes, flop = 4.0 if c.lora_rank else 6.0, 0.0
    flop += 6.0 * c.tokens * trained_parameters(c) if c.lora_rank else 0
    for layer in range(c.layers):
        window = c.window_of(layer)
        # Pairs of a token and a key.
        seen = [n * n / 2 if not window else min(window, n) * (n - (min(window, n) - 1) / 2) for n in lengths]
        keys = sum(seen) / sum(lengths)
        flop += passes * c.tokens * c.hidden * (2 * q + 2 * kv) + 6.0 * c.tokens * 2 * q * keys
        flop += passes * c.rows * 3 * c.hidden * c.ffn
    return logits_flops(c) + flop * c.microbatches


def activation_bytes(config: Config) -> int:
    """Bytes that layers keep of a microbatch, in bf16, those of the running experts' backward, of logits and gradient.

    Attention keeps its input and output, and four tensors between. Frozen router and experts do not keep their inputs.
    """
    c = config
    q, kv = c.local_heads * c.head_dim, c.local_kv_heads * c.head_dim
    trains = not c.lora_rank
    attention = c.tokens * (3 * c.hidden + 3 * q + 4 * kv + 2 * c.lora_rank)
    kept = c.layers * (attention + c.tokens * c.hidden * trains + c.rows * (c.hidden * trains + 2 * c.ffn))
    return 2 * (kept + c.rows * (3 * c.hidden + 4 * c.ffn) + 2 * min(LOSS_TOKENS, c.tokens) * c.local_vocab)


def state_bytes(config: Config) -> int:
    """Bytes of bf16 parameters and of all that is kept of those that are trained: gradient, FP32 master, moments."""
    c, trained = config, trained_parameters(config)
    weights = 2 * (num_parameters(c) + (trained if c.lora_rank else 0))
    if not c.update:
        return weights + 2 * trained
    return weights + (2 + 4 + (4 if c.moments == "bf16" else 8)) * trained


def needed_bytes(config: Config, num_pools: int = 3) -> int:
    """Bytes that torch reserves, with a tenth of activations on top. num_pools: variants with graphs in one process."""
    return state_bytes(config) + activation_bytes(config) * 110 * (1 + num_pools) // 100


def host_bytes(config: Config) -> int:
    """Bytes on a CPU, where attention is plain: scores of all pairs of tokens, which each layer keeps for its backward.

    A pair has FP32 weights and a bf16 copy in each head of each layer, and 12 bytes in each head while they are made.
    """
    heads = config.local_heads * (6 * config.layers + 12)
    return needed_bytes(config) + (heads + 9) * config.tokens**2


def fit(config: Config, budget_bytes: int) -> Config:
    """The config with as many layers as fit. ValueError where not one does."""
    return fit_layers(config, PRESETS, needed_bytes, budget_bytes)


def flops_notes(config: Config, flops: float) -> list[str]:
    """Return the share of the logits in a slice, which is larger than in the whole model."""
    is_slice = config.layers < KNOWN.get((config.hidden, config.experts), ("", 0))[1]
    return [f"logits {100 * logits_flops(config) / flops:.0f} % of FLOP"] if is_slice else []


def card(config: Config, flops: float) -> list[str]:
    """Lines that say what runs."""
    c = config
    name, layers = KNOWN.get((c.hidden, c.experts), ("toy widths", c.layers))
    slice_of = f"{c.layers} of {layers} layers of " if c.layers != layers else ""
    share = f", a GPU's share at TP{c.share_tp} EP{c.share_ep}" if c.share_tp * c.share_ep > 1 else ""
    share += f", {c.rank_experts} of the experts on each of {c.ep} ranks" if c.ep > 1 else ""
    packed = f", up to {c.documents} documents packed into a sequence" if c.documents else ""
    return [
        f"{c.layers} layers, hidden {c.hidden}, heads {c.local_heads} ({c.local_kv_heads} groups), {c.local_experts} "
        f"experts of width {c.ffn}, {c.top_k} a token, {num_parameters(c) / 1e6:,.1f} M parameters: "
        f"{slice_of}{name}{share}",
        f"{c.microbatches} microbatches of {c.microbatch} x {c.sequence} tokens{packed} | bf16, {c.routing} routing | "
        f"{flops / 1e12:.4g} TFLOP/step",
    ]
