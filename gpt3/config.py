"""GPT-3 175B: what can be set, the presets, and arithmetic on them (no torch here)."""

from dataclasses import dataclass, replace

from common.config import option, require_folder_of_its_own
from common.fitting import blame, gib


@dataclass(frozen=True, kw_only=True)
class Config:
    """One GPU's share of GPT-3. Widths are local: heads, ffn and vocab already divided by the tensor-parallel size."""

    layers: int = option(8, "transformer layers on this GPU")
    hidden: int = option(12288, "hidden size, never divided")
    heads: int = option(12, "attention heads on this GPU")
    head_dim: int = option(128, "size of one attention head")
    ffn: int = option(6144, "feed-forward width on this GPU")
    vocab: int = option(6400, "rows of embedding and head on this GPU; tokens are folded into them")
    sequence: int = option(2048, "tokens in a sequence")
    microbatch: int = option(1, "sequences in a microbatch")
    microbatches: int = option(4, "microbatches in a step, accumulated into main_grad")
    precision: str = option("fp8", "fp8: delayed scaling, emulated where there is no FP8 hardware", ("fp8", "bf16"))
    layer: str = option(
        "auto", "te: te.TransformerLayer; torch: plain PyTorch; auto: te where it runs", ("auto", "te", "torch")
    )
    amax_history: int = option(1024, "steps in the amax history of delayed scaling")
    lr: float = option(2e-5, "learning rate of Adam")
    data: str = option(
        "", "folder of text or Megatron .bin/.idx prefix (empty: the Python standard library)", is_path=True
    )
    batches: int = option(8, "different batches that rotate")
    min_steps: int = option(50, "timed steps at least")
    min_window_s: float = option(5.0, "timed seconds at least")
    warmup_min_s: float = option(4.0, "seconds of warm-up at least, until step time and clock settle")
    warmup_max_s: float = option(10.0, "seconds of warm-up at most")

    def __post_init__(self):
        for name in ("layers", "hidden", "heads", "head_dim", "ffn", "vocab", "sequence", "microbatch"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name)}: takes a number from 1 up")
        if self.microbatches < 1 or self.batches < 1 or self.min_steps < 1 or self.amax_history < 1:
            raise ValueError("--microbatches, --batches, --min-steps and --amax-history take a number from 1 up")
        if self.lr != self.lr or not 0 <= self.lr < float("inf"):
            raise ValueError(f"--lr {self.lr}: takes a finite number from 0 up")
        require_folder_of_its_own("--data", self.data)
        if self.precision == "fp8" and any(size % 16 for size in (self.hidden, self.ffn, self.heads * self.head_dim)):
            raise ValueError("--precision fp8 needs --hidden, --ffn and --heads x --head-dim divisible by 16")


# bench: one GPU's share at tensor-parallel size 8 (96 heads, ffn 49152, vocabulary 51200 divided by 8) of
# MLPerf v4.1's architecture, microbatch 1 as in its largest graphed submission, 8 of 96 layers.
PRESETS = {
    "tiny": Config(
        layers=2,
        hidden=128,
        heads=4,
        head_dim=32,
        ffn=256,
        vocab=256,
        sequence=64,
        microbatches=2,
        amax_history=16,
        lr=1e-3,
        batches=4,
        min_window_s=1.5,
        warmup_min_s=0.3,
        warmup_max_s=1.5,
    ),
    "bench": Config(),
}

VARIANTS = {
    "eager": "kernels launched one by one",
    "graph_te": "NVIDIA's submission: Transformer Engine's make_graphed_callables, a slot for every microbatch",
    "graph_te_slot": "graph_te with one slot that every microbatch uses again",
    "graph_te_default": "graph_te with Transformer Engine's default flags: gradients cloned, no buffer reused",
    "graph": "our own forward and backward graphs per layer and microbatch, one pool, buffers chained",
    "graph_opt": "graph, with clipping and Adam in a graph of their own",
    "graph_overlap": "graph, with the next microbatch's forward beside the backward on a second stream",
    "compile": "torch.compile of the layers (default mode, no graphs)",
    "reduce_overhead": "torch.compile(mode='reduce-overhead'): graphs as torch makes them",
}

# width is the share of the layers that this GPU has, 96 heads and ffn 49152 divided by the tensor-parallel size;
# hidden size and vocabulary stay as they are.
SWEEPS = {"batch": ["microbatch"], "sequence": ["sequence"], "width": ["heads", "ffn"], "layers": ["layers"]}
KINDS = {
    "eager": "eager",
    "graph_te": "graph",
    "graph_te_slot": "graph",
    "graph_te_default": "graph",
    "graph": "graph",
    "graph_opt": "graph",
    "graph_overlap": "graph",
    "compile": "compile",
    "reduce_overhead": "compile",
}


def promises(config: Config, variant: str) -> tuple[int | None, int | None]:
    """(graphs, replays a step) of a variant; None: at least one, known only once torch has made them."""
    per_layer = 2 * config.layers
    per_slot = per_layer * config.microbatches
    each = dict.fromkeys(("graph_te", "graph_te_default", "graph", "graph_overlap"), (per_slot, per_slot))
    # One slot is replayed by every microbatch; the optimizer's graph once a step.
    others = {"graph_te_slot": (per_layer, per_slot), "graph_opt": (per_slot + 1, per_slot + 1)}
    return {**each, **others, "reduce_overhead": (None, None)}.get(variant, (0, 0))


ABOUT = {
    "bitwise": [name for name, kind in KINDS.items() if kind in ("eager", "graph")],
    "sweeps": SWEEPS,
    "kinds": KINDS,
    "promises": promises,
    "presets_need": {name: {"gpus": 0 if name == "tiny" else 1, "world_size": "any"} for name in PRESETS},
}

CONTEXT_BYTES = 2 * 2**30


def layer_parameters(config: Config) -> int:
    """Weights, biases and norms of one layer on this GPU."""
    c, attention = config, config.heads * config.head_dim
    weights = c.hidden * 3 * attention + attention * c.hidden + 2 * c.hidden * c.ffn
    return weights + 3 * attention + c.hidden + c.ffn + c.hidden + 4 * c.hidden


def num_parameters(config: Config) -> int:
    """Parameters on this GPU: layers, token and position embedding (the head is tied), final norm."""
    return config.layers * layer_parameters(config) + (config.vocab + config.sequence + 2) * config.hidden


def predicted_bytes(config: Config) -> int:
    """Device memory that a step needs, from sizes alone.

    Per parameter 18 bytes: bf16 weight, FP32 gradient, master and two moments; with fp8 two more for the
    quantised weight and its transpose. Activations of one microbatch (one is in flight at a time): inputs
    of both norms and both residual sums in full width, the operands of the four GEMMs, attention's
    operands. Logits in bf16 and FP32 with their gradients. Fifteen percent for workspaces and graphs,
    and CONTEXT_BYTES for what CUDA and its libraries take. Besides one batch of tokens and targets (int64), and with
    fp8 the history of a layer's eight operands (FP32).
    """
    c, tokens, attention = config, config.sequence * config.microbatch, config.heads * config.head_dim
    per_parameter = 20 if c.precision == "fp8" else 18
    activations = c.layers * tokens * (12 * c.hidden + 12 * attention + 8 * c.ffn)
    logits = tokens * c.vocab * 12
    rest = batch_bytes(c) + (c.layers * 8 * c.amax_history * 4 if c.precision == "fp8" else 0)
    # In integers: a float does not hold what some flags ask for.
    return (num_parameters(c) * per_parameter + activations + logits + rest) * 115 // 100 + CONTEXT_BYTES


def batch_bytes(config: Config) -> int:
    """Tokens and targets of one step, int64."""
    return 16 * config.microbatches * config.microbatch * config.sequence


def fit(config: Config, available_bytes: int) -> Config:
    """The config with as many of its layers as fit into available_bytes. ValueError if not even one does."""
    one = replace(config, layers=1)
    if predicted_bytes(one) > available_bytes:
        raise ValueError(
            blame(one, PRESETS, predicted_bytes, available_bytes)
            or f"one layer needs {gib(predicted_bytes(one))} GiB, {gib(available_bytes)} GiB are free: "
            "lower --sequence or --ffn, or run --preset tiny"
        )
    fits, first_too_many = 1, config.layers + 1
    while first_too_many - fits > 1:
        layers = (fits + first_too_many) // 2
        if predicted_bytes(replace(config, layers=layers)) <= available_bytes:
            fits = layers
        else:
            first_too_many = layers
    return replace(config, layers=fits)


def require(config: Config, available_bytes: int | None) -> None:
    """ValueError where the config cannot fit into a host without a GPU; None: the host does not tell."""
    if available_bytes is not None and _host_bytes(config) > available_bytes:
        raise ValueError(
            blame(config, PRESETS, _host_bytes, available_bytes)
            or f"this preset needs {gib(_host_bytes(config))} GiB on a GPU, there is none, and the host has "
            f"{gib(available_bytes)} GiB free: run --preset tiny"
        )


def _host_bytes(config):
    """Without CUDA's context; or the batches that rotate, where those are larger."""
    return max(predicted_bytes(config) - CONTEXT_BYTES, config.batches * batch_bytes(config))
