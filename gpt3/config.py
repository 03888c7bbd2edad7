"""GPT-3 175B: what can be set, the presets, and arithmetic on them (no torch here)."""

from dataclasses import dataclass

from common import flops
from common.parallel.groups import Parallel, require_divisible, require_schedule
from graph_worth import Timing, needs, option, require_fields, require_folder_of_its_own

PRECISIONS = ("fp8", "bf16", "fp32")


@dataclass(frozen=True, kw_only=True)
class Config(Parallel, Timing):
    """GPT-3 as one rank has it: heads, ffn and vocab are one rank's, `tp` ranks have tp times as much together."""

    layers: int = option(8, "transformer layers of all stages together")
    hidden: int = option(12288, "hidden size, never divided")
    heads: int = option(12, "attention heads of a tensor rank")
    head_dim: int = option(128, "size of one attention head")
    ffn: int = option(6144, "feed-forward width of a tensor rank")
    vocab: int = option(6400, "rows of embedding and head of a tensor rank; tokens are folded into those of all")
    sequence: int = option(2048, "tokens in a sequence")
    microbatch: int = option(1, "sequences in a microbatch")
    microbatches: int = option(4, "microbatches in a step, accumulated into main_grad")
    chunks: int = option(1, "parts that a stage's layers are split into (interleaved pipeline)")
    pp_rank: int = option(-1, "run this stage of the pipeline alone, its edges fed with fixed tensors (-1: all stages)")
    zero1: bool = option(False, "with data parallelism, split masters and moments over the data ranks (ZeRO-1)")
    precision: str = option(
        "fp8",
        "of the layers. fp8: delayed scaling, emulated without FP8 hardware; fp32: plain layers, to compare "
        "decompositions",
        PRECISIONS,
    )
    layer: str = option(
        "auto",
        "te: te.TransformerLayer; torch: plain PyTorch; auto: te where it runs; megatron: Megatron-Core's",
        ("auto", "te", "torch", "megatron"),
    )
    amax_history: int = option(1024, "steps in the amax history of delayed scaling")
    lr: float = option(2e-5, "learning rate of Adam")
    data: str = option(
        "", "folder of text up to 1 GiB, or Megatron .bin/.idx prefix, whose ids are folded (empty: Python's library)"
    )
    batches: int = option(8, "different batches that rotate")

    def __post_init__(self):
        sizes = ("layers", "hidden", "heads", "head_dim", "ffn", "vocab", "sequence", "microbatch", "microbatches")
        counts = (*sizes, "chunks", "tp", "pp", "batches", "min_steps", "amax_history")
        require_fields(self, counts, lambda value: value >= 1, "a number from 1 up")
        require_fields(self, ("lr",), lambda value: 0 <= value < float("inf"), "a finite number from 0 up")
        require_folder_of_its_own("--data", self.data)
        if self.precision == "fp8" and any(size % 16 for size in (self.hidden, self.ffn, self.heads * self.head_dim)):
            raise ValueError("--precision fp8 needs --hidden, --ffn and --heads x --head-dim divisible by 16")
        if self.precision == "fp32" and self.layer in ("te", "megatron"):
            raise ValueError("--precision fp32 needs --layer torch")
        if self.layer == "megatron" and (self.staged or self.tp > 1 or self.zero1):
            raise ValueError("--layer megatron runs on one GPU, without --tp, --pp, --chunks, --pp-rank and --zero1")
        if self.cp != 1:
            raise ValueError(f"--cp {self.cp}: takes 1, this model does not split a sequence's attention")
        require_divisible("--layers", self.layers, "--pp x --chunks", self.pp * self.chunks)
        require_divisible("--sequence", self.sequence, "--tp", self.tp)
        if self.pp_rank < -1:
            raise ValueError(f"--pp-rank {self.pp_rank}: takes a stage from 0 up, or -1 for all stages")
        require_schedule(self.pp, max(self.pp_rank, 0), self.chunks, self.microbatches)
        if self.alone and self.tp > 1:
            raise ValueError(f"--pp-rank {self.pp_rank} needs --tp 1: its widths are one tensor rank's already")

    @property
    def alone(self) -> bool:
        """Return whether one stage runs by itself, without the others: its edges are fed, and it has no optimizer."""
        return self.pp_rank >= 0

    @property
    def staged(self) -> bool:
        """Return whether gpt3/pipeline/stage.py makes the step: several stages or chunks, or one stage alone."""
        return self.pp > 1 or self.chunks > 1 or self.alone

    @property
    def is_plain(self) -> bool:
        """Return whether the step of gpt3/train.py runs: not that of a stage, nor Megatron-Core's."""
        return not self.staged and self.layer != "megatron"

    @property
    def stage_layers(self) -> int:
        return self.layers // self.pp

    @property
    def layer_passes(self) -> int:
        """Forward and backward passes of layers in a step of one stage."""
        return 2 * self.stage_layers * self.microbatches

    @property
    def by_itself(self) -> str:
        if self.alone:
            return f"--pp-rank {self.pp_rank} runs one stage"
        return "--layer megatron runs" if self.layer == "megatron" else ""


_TINY = {
    "hidden": 64,
    "heads": 4,
    "head_dim": 16,
    "ffn": 128,
    "vocab": 256,
    "sequence": 32,
    "amax_history": 16,
    "lr": 1e-3,
    "batches": 4,
}
# MLPerf v4.1's largest graphed submission, 1,452 nodes of 8 GPUs: 96 heads, ffn 49152 and a vocabulary padded to 50,688
# over 4 tensor ranks, 6 stages of 8 chunks of 2 layers, as many microbatches as stages.
_SUBMITTED = {"layers": 96, "heads": 24, "ffn": 12288, "vocab": 12672, "pp": 6, "chunks": 8, "microbatches": 6}

# From random weights two equal runs part at MLPerf's rate: at 2e-5 the loss rose from 6.6 to 9.3 on two H200s, and
# eager repeated its own losses to within 1.2 % after eight steps. Time does not depend on the rate.
_RANDOM = {"lr": 2e-6}

# bench: one GPU's share at tensor-parallel size 8 (96 heads, ffn 49152, vocabulary 51200 divided by 8) of
# MLPerf v4.1's architecture, microbatch 1 as in its largest graphed submission, 8 of 96 layers.
# full: layers that are not divided, as many of four as fit. rank: one rank of the submission by itself.
PRESETS = {
    "tiny": Config(layers=2, microbatches=2, **_TINY),
    "tiny_pp": Config(layers=4, microbatches=4, pp=2, chunks=2, **_TINY),
    "bench": Config(**_RANDOM),
    "rank": Config(pp_rank=0, **_SUBMITTED, **_RANDOM),
    "full": Config(layers=4, heads=96, ffn=49152, vocab=51200, **_RANDOM),
    "mlperf": Config(tp=4, zero1=True, **_SUBMITTED),
}
ON_CPU = ("tiny", "tiny_pp")

# width is the share of the layers that this GPU has, 96 heads and ffn 49152 divided by the tensor-parallel size;
# hidden size and vocabulary stay as they are.
SWEEPS = {"batch": ["microbatch"], "sequence": ["sequence"], "width": ["heads", "ffn"], "layers": ["layers"]}

# torch.compile needs them: te and FP8 modules opt out of it.
TORCH_BF16 = {"layer": "torch", "precision": "bf16"}

FACTS = {
    "files": ["other_variants", "pipeline.stage", "pipeline.stage_graphs"],
    "shared": ["common.megatron"],
    "builds": {"torch_bf16": TORCH_BF16, "megatron": {"layer": "megatron"}},
    # Transformer Engine reads it when a layer is made: parity has a process of its own.
    "parity_variables": {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"},
    "sweeps": SWEEPS,
    "presets_need": lambda preset, config: needs(
        preset not in ON_CPU, **config.world_sizes(), submitted=(1452, 8) if preset == "mlperf" else None
    ),
}

CONTEXT_BYTES = 2 * 2**30


def layer_parameters(config: Config) -> int:
    """Weights, biases and norms of one layer on this GPU."""
    c, attention = config, config.heads * config.head_dim
    weights = c.hidden * 3 * attention + attention * c.hidden + 2 * c.hidden * c.ffn
    return weights + 3 * attention + c.hidden + c.ffn + c.hidden + 4 * c.hidden


def num_parameters(config: Config) -> int:
    """Parameters on this GPU: layers, token and position embedding (the head is tied), final norm.

    Of a pipeline those of the stage that runs alone, else of the first one, which has most.
    """
    c, stage = config, max(config.pp_rank, 0)
    first, last = stage == 0, stage == c.pp - 1
    rows = (first or last) * c.vocab + first * (c.sequence // c.tp) + 2 * last
    return c.stage_layers * layer_parameters(c) + rows * c.hidden


def predicted_bytes(config: Config, dp: int = 1) -> int:
    """Device memory that a step needs, from sizes alone. dp: data ranks, which ZeRO-1 splits masters and moments over.

    Per parameter 18 bytes: bf16 weight, FP32 gradient, master and two moments; with fp8 two more for the
    quantised weight and its transpose; a stage alone has no masters and moments. Activations of one microbatch: inputs
    of both norms and both residual sums in full width, the operands of the four GEMMs, attention's
    operands. What a pipeline has in flight beside it, without what is freed in a layer. Logits in bf16 and FP32 with
    their gradients. Fifteen percent for workspaces and graphs, and CONTEXT_BYTES for what CUDA and its libraries take.
    Besides one batch of tokens and targets (int64), and with fp8 the history of a layer's eight operands (FP32).
    """
    c, tokens, attention = config, config.sequence * config.microbatch, config.heads * config.head_dim
    parameters, hidden = num_parameters(c), -(-c.hidden // c.tp)
    states = parameters * (6 if c.precision == "bf16" else 8)
    if not c.alone:
        states += -(-12 * parameters // (dp if c.zero1 else 1))
    activations = c.stage_layers * tokens * (12 * hidden + 12 * attention + 8 * c.ffn)
    saved = 6 * hidden + 7 * attention + 3 * c.ffn if c.precision == "fp8" else 8 * (hidden + attention + c.ffn)
    activations += max(0, _passes_in_flight(c) - c.chunks) * (c.stage_layers // c.chunks) * tokens * saved
    logits = tokens * c.vocab * 12
    rest = batch_bytes(c) + (c.stage_layers * 8 * c.amax_history * 4 if c.precision == "fp8" else 0)
    # In integers: a float does not hold what some flags ask for.
    return (states + activations + logits + rest) * 115 // 100 + CONTEXT_BYTES


def _passes_in_flight(config):
    if not config.staged:
        return 1
    from common import schedule

    return schedule.peak_in_flight(config.pp, max(config.pp_rank, 0), config.chunks, config.microbatches)


def batch_bytes(config: Config) -> int:
    """Tokens and targets of one step, int64."""
    return 16 * config.microbatches * config.microbatch * config.sequence


def fit(config: Config, available_bytes: int, dp: int = 1) -> Config:
    """The config with as many layers as fit, equally many in each chunk of each stage. dp: data ranks."""
    from common import fit as fitting

    unit = config.pp * config.chunks
    return fitting.fit_layers(config, PRESETS, lambda tried: predicted_bytes(tried, dp), available_bytes, unit)


def require(config: Config, available_bytes: int | None) -> None:
    """ValueError where the config cannot fit into a host without a GPU; None: the host does not tell."""
    if available_bytes is not None and _host_bytes(config) > available_bytes:
        from common import fit as fitting

        fitting.require(config, PRESETS, _host_bytes, available_bytes)


def _host_bytes(config):
    """Without CUDA's context; or the batches that rotate, where those are larger."""
    return max(predicted_bytes(config) - CONTEXT_BYTES, config.batches * batch_bytes(config))


def step_flops(config: Config) -> float:
    """Return the FLOP of a step and a GPU: the mean over all stages, or those of the stage that runs alone."""
    attention = config.heads * config.head_dim
    all_stages = not config.alone
    model = flops.Transformer(
        layers=config.layers if all_stages else config.stage_layers,
        sequence=config.sequence,
        hidden=config.hidden,
        q_width=attention,
        kv_width=attention,
        ffn=config.ffn,
        vocab=config.vocab if all_stages or config.pp_rank == config.pp - 1 else 0,
        mlp_matrices=2,
    )
    return config.microbatch * config.microbatches * model.flops() / (config.pp if all_stages else 1)


def card(config: Config, data_ranks: int, on_gpu: bool) -> list[str]:
    """Return lines about what runs."""
    share = "one GPU's share of GPT-3 175B" if config.hidden == 12288 else "toy widths"
    memory = f" | memory predicted {predicted_bytes(config, data_ranks) / 2**30:.1f} GiB" if on_gpu else ""
    lines = [
        f"{config.stage_layers} layers, hidden {config.hidden}, heads {config.heads}, ffn {config.ffn}, "
        f"{num_parameters(config) / 1e6:,.1f} M parameters: {share}",
        f"{config.microbatches} microbatches of {config.microbatch} x {config.sequence} tokens | {config.layer} layer, "
        f"{config.precision} | {step_flops(config) / 1e12:.3g} TFLOP/step{memory}",
    ]
    if config.alone:
        lines.append(
            f"stage {config.pp_rank} of {config.pp} by itself, {config.chunks} chunks of "
            f"{config.stage_layers // config.chunks} layers: edges fed with fixed tensors, no optimizer"
        )
    elif config.tp * config.pp > 1 or config.staged:
        lines.append(f"tensor ranks {config.tp}, stages {config.pp} of {config.chunks} chunks, data ranks {data_ranks}")
    return lines
