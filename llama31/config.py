"""Llama 3.1: what can be set, the presets, and arithmetic on them (no torch here)."""

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, replace

from common.config import TINY_TIMING, Timing, option, require_fields, require_folder_of_its_own
from common.fitting import blame, gib
from common.flops import gpt
from common.parallel import Parallel, require_divisible
from llama31.capturable import Setting, refuse

PRECISIONS = ("bf16", "fp8", "nvfp4", "nvfp4_emulated")
# Llama 3.1's scaling of the rotary embedding (config.json, rope_scaling of type llama3).
ROPE_SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_COUNTS = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "sequence", "microbatch")
_COUNTS += ("microbatches", "share_tp", "share_cp", "batches", "min_steps", "tp", "pp", "cp")


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
    share_tp: int = option(8, "a tensor-parallel share without ranks: widths and vocabulary are divided by this too")
    share_cp: int = option(2, "a context-parallel share without ranks: the sequence is divided by this too")
    cp_order: str = option(
        "balanced",
        "which tokens a context rank has. causal: one run of them; balanced: two, so that all ranks see as many keys",
        ("balanced", "causal"),
    )
    zero: bool = option(False, "split masters and moments over the ranks with equal parameters (ZeRO-1)")
    rope_theta: float = option(500000.0, "base of the rotary position embedding")
    norm_eps: float = option(1e-5, "epsilon of RMSNorm")
    precision: str = option(
        "fp8",
        "fp8: current scaling by tensor, emulated without FP8 hardware; nvfp4_emulated: its numbers",
        PRECISIONS,
    )
    weights: str = option("bf16", "format of the layers' stored matrices; fp8 needs --precision fp8", ("bf16", "fp8"))
    main_grad: str = option("bf16", "format of the accumulated gradients", ("bf16", "fp32"))
    moments: str = option("fp32", "format of Adam's moments", ("bf16", "fp32"))
    layer: str = option(
        "auto", "te: te.TransformerLayer; torch: plain PyTorch; auto: te where it runs", ("auto", "te", "torch")
    )
    recompute: int = option(
        -1, "layers of a stage whose forward runs again in the backward (-1: as many as memory asks for)"
    )
    clip: str = option(
        "device", "where the factor that clips gradients is computed; host: the norm is read", ("device", "host")
    )
    nan_checks: bool = option(False, "read each microbatch's loss and the gradient norm and stop at NaN")
    validate_every: int = option(0, "validate after every so many steps, in the step (0: never)")
    lr: float = option(2e-5, "learning rate of Adam")
    data: str = option(
        "", "folder of text or Megatron .bin/.idx prefix (empty: the Python standard library)", is_path=True
    )
    checkpoint: str = option("", "folder of a Hugging Face Llama 3.1 (empty: random weights)", is_path=True)
    batches: int = option(8, "different batches that rotate")

    def __post_init__(self):
        require_fields(self, _COUNTS, lambda value: value >= 1, "a number from 1 up")
        require_fields(self, ("validate_every",), lambda value: value >= 0, "a number from 0 up")
        require_fields(self, ("recompute",), lambda value: -1 <= value <= self.layers, "-1, or 0 to --layers")
        require_fields(self, ("lr",), lambda value: 0 <= value < math.inf, "a finite number from 0 up")
        require_fields(self, ("rope_theta", "norm_eps"), lambda value: 0 < value < math.inf, "a finite number above 0")
        for name in ("data", "checkpoint"):
            require_folder_of_its_own(f"--{name}", getattr(self, name))
        if self.heads % self.kv_heads:
            raise ValueError(f"--heads {self.heads}: takes a multiple of --kv-heads {self.kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"--head-dim {self.head_dim}: takes an even number")
        split = self.share_tp * self.tp
        for flag, size in (("--kv-heads", self.kv_heads), ("--ffn", self.ffn), ("--vocab", self.vocab)):
            require_divisible(flag, size, f"--share-tp {self.share_tp} x --tp {self.tp} =", split)
        runs = self.share_cp * self.cp * (2 if self.cp > 1 and self.cp_order == "balanced" else 1)
        require_divisible("--sequence", self.sequence, "runs of tokens, by --share-cp, --cp and --cp-order,", runs)
        require_divisible("a context rank's tokens", self.local_sequence, "--tp (sequence parallelism)", self.tp)
        if self.weights == "fp8" and self.precision != "fp8":
            raise ValueError(f"--weights fp8 needs --precision fp8, not {self.precision}")
        widths = (self.hidden, self.local_ffn, self.local_heads * self.head_dim, self.local_sequence * self.microbatch)
        if self.precision != "bf16" and any(width % 16 for width in widths):
            raise ValueError(
                f"--precision {self.precision} needs --hidden, a GPU's feed-forward width, heads x head-dim and tokens "
                "of a microbatch divisible by 16"
            )
        if self.zero and (self.main_grad, self.moments, self.weights) != ("fp32", "fp32", "bf16"):
            raise ValueError("--zero true takes --main-grad fp32 --moments fp32 --weights bf16")
        layers_of_stages(self.layers, self.pp)
        if max(self.counts) > self.microbatches:
            raise ValueError(f"--ramp {self.ramp}: takes numbers up to --microbatches {self.microbatches}")

    @property
    def counts(self) -> tuple[int, ...]:
        """Numbers of microbatches that steps have in turn."""
        if not self.ramp:
            return (self.microbatches,)
        parts = self.ramp.split(",")
        if not all(part.strip().isdigit() and int(part) for part in parts):
            raise ValueError(f"--ramp {self.ramp}: takes numbers from 1 up with commas between them, such as 4,6,8")
        return tuple(map(int, parts))

    @property
    def local_heads(self) -> int:
        return self.heads // (self.share_tp * self.tp)

    @property
    def local_kv_heads(self) -> int:
        return self.kv_heads // (self.share_tp * self.tp)

    @property
    def local_ffn(self) -> int:
        return self.ffn // (self.share_tp * self.tp)

    @property
    def local_vocab(self) -> int:
        return self.vocab // (self.share_tp * self.tp)

    @property
    def local_sequence(self) -> int:
        """Tokens of a sequence on this context rank, those of all its tensor ranks together."""
        return self.sequence // (self.share_cp * self.cp)

    @property
    def q_width(self) -> int:
        return self.heads * self.head_dim


def layers_of_stages(layers: int, pp: int) -> list[range]:
    """Numbers of the layers of each pipeline stage.

    Equal numbers, else NVIDIA's split, in which embedding and loss count as a layer each. ValueError where neither
    works out.
    """
    if layers % pp == 0:
        sizes = [layers // pp] * pp
    elif (layers + 2) % pp == 0 and (layers + 2) // pp > 1:
        each = (layers + 2) // pp
        sizes = [each - 1, *[each] * (pp - 2), each - 1]
    else:
        raise ValueError(f"--layers {layers}: takes a multiple of --pp {pp}, or two less than one")
    starts = [sum(sizes[:stage]) for stage in range(pp)]
    return [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]


_WHOLE_8B = {"hidden": 4096, "heads": 32, "ffn": 14336, "layers": 32, "share_tp": 1, "share_cp": 1}
# bench: one GPU's share of 405B at the submission's TP8 CP2, 4 of 126 layers. full: 8B whole, 12 bytes a parameter.
# mlperf: NVIDIA's 512 GPUs of MLPerf Training v5.1 (tensor 4, pipeline 8, context 2, 144 microbatches), without
# interleaved stages.
PRESETS = {
    "tiny": Config(
        layers=2,
        hidden=128,
        heads=4,
        kv_heads=2,
        head_dim=32,
        ffn=256,
        vocab=256,
        sequence=64,
        microbatches=3,
        share_tp=1,
        share_cp=1,
        lr=2e-3,
        batches=4,
        **TINY_TIMING,
    ),
    "bench": Config(),
    "full": Config(
        **_WHOLE_8B, microbatches=2, weights="fp8", moments="bf16", min_steps=8, min_window_s=20.0, batches=4
    ),
    "mlperf": Config(
        layers=126, share_tp=1, share_cp=1, tp=4, pp=8, cp=2, microbatches=144, min_steps=8, min_window_s=20.0
    ),
}

VARIANTS = {
    "eager": "kernels launched one by one",
    "layer": "a forward and a backward graph per layer and microbatch, one pool, buffers chained",
    "chunk": "a graph per microbatch, forward and backward",
    "graph": "NVIDIA's submission: forward and backward of all microbatches, with their communication, in one graph",
    "full_step": "graph, with clipping and Adam in it",
    "compile": "torch.compile of the layers (default mode, no graphs)",
    "reduce_overhead": "torch.compile(mode='reduce-overhead'): graphs as torch makes them",
    "eager_nan_checks": "eager, with the NaN checks that a graph over all microbatches forbids",
}
GRAPHS = ("layer", "chunk", "graph", "full_step")


def num_validations(config: Config, index: int) -> int:
    """Validations in step `index`: 1 or 0."""
    return int(config.validate_every > 0 and (index + 1) % config.validate_every == 0)


def promises(config: Config, variant: str) -> tuple[int | None, int | None]:
    """(graphs, replays a step) of a variant; None: at least one, known only later."""
    layers = 2 * len(layers_of_stages(config.layers, config.pp)[0]) * config.microbatches
    training = {"layer": layers, "chunk": config.microbatches, "graph": 1, "full_step": 1}
    if variant == "reduce_overhead":
        return None, None
    if variant not in training:
        return 0, 0
    changes = len(set(config.counts)) > 1 or config.counts[0] != config.microbatches or config.validate_every
    # The graph more is that of the validation.
    return training[variant] + 1, None if changes else training[variant]


ABOUT = {
    "bitwise": ["eager", "eager_nan_checks", *GRAPHS],
    "traits": {"eager_nan_checks": {"extra_work": "reads each microbatch's loss and the gradient norm on the host"}},
    "sweeps": {"batch": ["microbatches"], "sequence": ["sequence"], "layers": ["layers"]},
    "kinds": {
        **dict.fromkeys(("eager", "eager_nan_checks"), "eager"),
        **dict.fromkeys(GRAPHS, "graph"),
        **dict.fromkeys(("compile", "reduce_overhead"), "compile"),
    },
    "promises": promises,
    "presets_need": {
        name: {"gpus": 0 if name == "tiny" else 1, "world_size": preset.world_sizes()}
        for name, preset in PRESETS.items()
    },
}


# ------------------------------------------------------------------------------------------------
# What cannot be captured


def setting(config: Config, variant: str, environment) -> Setting:
    """What `variant` would capture, in the words of llama31/capturable.py. environment: such as os.environ."""
    impl = {"layer": "layer", "chunk": "chunk", "graph": "full_iteration", "full_step": "full_iteration"}
    allocator = environment.get("PYTORCH_ALLOC_CONF", environment.get("PYTORCH_CUDA_ALLOC_CONF", ""))
    return Setting(
        impl=impl.get(variant, "none"),
        optimizer=variant == "full_step",
        nan_check=config.nan_checks or variant == "eager_nan_checks",
        clip_on_host=config.clip == "host",
        changing_microbatches=len(set(config.counts)) > 1,
        expandable_segments="expandable_segments:True" in allocator,
        nccl_graph_register=environment.get("NCCL_GRAPH_REGISTER", "") != "0",
    )


def require_capturable(config: Config, variant: str, environment) -> None:
    """ValueError in one line where `variant` cannot capture a step of this config; asked before any work on the GPU."""
    refuse(setting(config, variant, environment))
    if variant in ("layer", "chunk") and config.pp > 1:
        raise ValueError(f"--variant {variant} takes --pp 1; graph and full_step capture a pipeline's schedule")


# ------------------------------------------------------------------------------------------------
# Arithmetic


def layer_parameters(config: Config) -> int:
    """Elements of one layer on this GPU: four matrices and two norms."""
    c, heads = config, (config.local_heads + 2 * config.local_kv_heads) * config.head_dim
    return c.hidden * (heads + c.local_heads * c.head_dim + 3 * c.local_ffn + 2)


def num_parameters(config: Config) -> int:
    """Elements on a GPU of the widest stage: 8,030,261,248 of the whole 8B, 405,853,388,800 of 405B."""
    layers = max(map(len, layers_of_stages(config.layers, config.pp)))
    ends = (2 if config.pp == 1 else 1) * config.local_vocab * config.hidden + config.hidden
    return layers * layer_parameters(config) + ends


def flops_per_step(config: Config, causal_half: bool = True) -> float:
    """Model FLOP of a step on one GPU, the mean over a ramp; not causal_half: as MLPerf counts, attention in full.

    A context-parallel share without ranks attends within its own tokens.
    """
    c = config
    ranks, sequence = c.tp * c.cp * c.pp, c.sequence // c.share_cp
    per_sequence = gpt(
        num_layers=c.layers,
        sequence_length=sequence,
        hidden=c.hidden,
        q_width=c.q_width // c.share_tp,
        kv_width=c.kv_heads * c.head_dim // c.share_tp,
        ffn=c.ffn // c.share_tp,
        vocab=c.vocab // c.share_tp,
        mlp_matrices=3,
        causal_half=causal_half,
    )
    return per_sequence / ranks * c.microbatch * sum(c.counts) / len(c.counts)


def state_bytes(config: Config) -> dict[str, int]:
    """Bytes of a parameter of the layers by what they are for.

    Matrices in FP8, whether stored so or cast from bf16, have the transposed copy that Hopper's GEMMs read.
    """
    c = config
    weight = 2 if c.weights == "fp8" else 4 if c.precision in ("fp8", "nvfp4") else 2
    widths = {"bf16": 2, "fp32": 4}
    return {"weight": weight, "main_grad": widths[c.main_grad], "master": 4, "moments": 2 * widths[c.moments]}


def activation_bytes(config: Config) -> int:
    """What one layer keeps of a microbatch for its backward.

    Per token: both norms' inputs and both residual sums in bf16, the inputs of q k v and fc1 in FP8 or bf16, q k v and
    attention's output with its input to the projection, fc1's output and SwiGLU's.
    """
    c = config
    operand = 1 if c.precision == "fp8" else 2
    tokens, heads = c.local_sequence * c.microbatch, c.local_heads + 2 * c.local_kv_heads
    shared = c.hidden * (8 // c.tp + 2 * operand)
    return tokens * (shared + c.head_dim * (2 * heads + (2 + operand) * c.local_heads) + c.local_ffn * (4 + operand))


CONTEXT_BYTES = 2 * 2**30


def predicted_bytes(config: Config, recompute: int | None = None) -> int:
    """Device memory that a step needs, from sizes alone. recompute: layers whose forward runs again; default: as set.

    Parameters with all that Adam keeps of them, embedding and head with a bf16 weight; what layers keep of a microbatch
    (in a pipeline of as many as there are stages); a layer that runs again, its input. Logits in bf16 and FP32 with
    their gradients, the batches, a tenth of what is not parameters for workspaces and fragments, and CONTEXT_BYTES.
    """
    c, per = config, state_bytes(config)
    recompute = max(c.recompute, 0) if recompute is None else recompute
    layers = max(map(len, layers_of_stages(c.layers, c.pp)))
    recompute, in_flight = min(recompute, layers), min(c.pp, c.microbatches)
    in_layers, tokens = layers * layer_parameters(c), c.local_sequence * c.microbatch
    replicas = c.cp if c.zero else 1
    state = per["main_grad"] + (per["master"] + per["moments"]) // replicas
    parameters = in_layers * (per["weight"] + state) + (num_parameters(c) - in_layers) * (2 + state)
    kept = (layers - recompute) * activation_bytes(c) + recompute * tokens * c.hidden * 2 // c.tp
    rest = kept * in_flight + (activation_bytes(c) if recompute else 0) + tokens * c.local_vocab * 10
    return parameters + (rest + 16 * c.microbatches * tokens) * 110 // 100 + CONTEXT_BYTES


def fit(config: Config, available_bytes: int) -> Config:
    """The config with as few recomputed layers as let it fit, and where none does with as many layers as fit.

    A given --recompute stays. ValueError where not even one layer for each stage fits.
    """

    def least(layers):
        return replace(
            config, layers=layers, recompute=layers if config.recompute < 0 else min(config.recompute, layers)
        )

    def need(layers):
        return predicted_bytes(least(layers))

    layers = config.layers
    if need(layers) > available_bytes:
        numbers = range(config.pp, layers, config.pp)
        fitting = bisect_right(numbers, available_bytes, key=need)
        if not fitting:
            raise ValueError(
                blame(least(layers), PRESETS, predicted_bytes, available_bytes)
                or f"one layer a stage needs {gib(need(config.pp))} GiB, {gib(available_bytes)} GiB are free: lower "
                "--sequence, raise --share-tp or run --preset tiny"
            )
        layers = numbers[fitting - 1]
    smaller = least(layers)
    if config.recompute >= 0:
        return smaller
    of_a_stage = range(max(map(len, layers_of_stages(layers, config.pp))) + 1)
    return replace(
        smaller, recompute=bisect_left(of_a_stage, -available_bytes, key=lambda count: -predicted_bytes(smaller, count))
    )


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
    batch = 16 * config.microbatches * config.microbatch * config.local_sequence
    return max(predicted_bytes(config) - CONTEXT_BYTES, config.batches * batch)
