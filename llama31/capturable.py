"""The table of features that a CUDA graph of a training step cannot hold, asked before any work on the GPU.

    TABLE.refuse(Setting(variant="graph_fwd_bwd", nan_checks=True))     ValueError: what, why, what to take instead

    python -m llama31.capturable --variant graph_fwd_bwd --ramp 4,6,8 --nan-checks true        is this one possible?
    python -m llama31.capturable --variant transformer_engine --scope attn,moe         and this one, of Megatron's?
    python -m llama31.capturable                                                       the table, as in docs/

Flags that llama31.train has too have its names. The rules are Megatron-Core 0.19's and Megatron Bridge's for dense
models (transformer_config.py, cuda_graphs.py, and Bridge's config.py), and this repository's own.
docs/what_cannot_be_captured.md is this table.
"""

from dataclasses import dataclass

from common.config import option, require_fields
from common.rule_table import Rule, RuleTable

# Those of llama31.train that capture nothing themselves, those that do, and Megatron's.
NOT_CAPTURING, OURS = (
    ("eager", "eager_nan_checks", "compile", "reduce_overhead", "graph_parameterized"),
    ("graph_layer", "graph_microbatch", "graph_fwd_bwd", "graph_step"),
)
VARIANTS = (*NOT_CAPTURING, *OURS, "local", "transformer_engine")
DENSE_SCOPES, OTHER_SCOPES = ("attn", "mlp"), ("moe", "moe_router", "moe_preprocess", "mamba")
SCOPES = ("full", "full_iteration", *DENSE_SCOPES, *OTHER_SCOPES)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A training step and what shall be captured of it."""

    variant: str = option(
        "graph_fwd_bwd",
        "a variant of llama31.train, or who captures in Megatron: local, transformer_engine",
        VARIANTS,
    )
    scope: str = option("", f"Megatron's cuda_graph_scope, with commas: {', '.join(SCOPES)}")
    nan_checks: bool = option(False, "loss or gradients are checked for NaN on the host")
    cpu_offload: bool = option(False, "activations or weights are moved to the host and back")
    changing_lengths: bool = option(False, "sequences or documents change in length from step to step")
    ramp: str = option("", "numbers of microbatches that steps have in turn, such as 4,6,8 (empty: one number)")
    clip: str = option("device", "host: clipping reads the gradient norm on the host", ("device", "host"))
    expandable_segments: bool = option(False, "PYTORCH_ALLOC_CONF has expandable_segments:True")
    nccl_graph_register: bool = option(
        True, "NCCL registers buffers in captures: with several ranks, all but NCCL_GRAPH_REGISTER=0"
    )
    dropout: float = option(0.0, "probability of dropout in what is captured")
    registered_generator: bool = option(True, "dropout's generator is registered with the graph")
    full_recompute: bool = option(False, "recompute_granularity is full")

    def __post_init__(self):
        require_fields(self, ("dropout",), lambda value: 0 <= value < 1, "a number from 0 up, below 1")
        numbers_of(self.ramp)
        if not set(self.scopes) <= set(SCOPES):
            raise ValueError(f"--scope {self.scope}: takes some of {', '.join(SCOPES)}")

    @property
    def scopes(self) -> tuple[str, ...]:
        return tuple(part.strip() for part in self.scope.split(",") if part.strip())

    @property
    def captures(self) -> bool:
        return self.variant not in NOT_CAPTURING

    @property
    def changing_microbatches(self) -> bool:
        return len(set(numbers_of(self.ramp))) > 1

    @property
    def whole(self) -> bool:
        """Return whether all of a microbatch, its loss too, is captured together."""
        return self.variant == "graph_microbatch" or self.iteration

    @property
    def iteration(self) -> bool:
        """Return whether all microbatches are captured together."""
        return self.variant in ("graph_fwd_bwd", "graph_step") or "full_iteration" in self.scopes


def numbers_of(ramp: str) -> tuple[int, ...]:
    """(4, 6, 8) of "4,6,8", () of "". ValueError where something else is between the commas."""
    parts = [part.strip() for part in ramp.split(",")] if ramp else []
    if not all(part.isdecimal() and int(part) for part in parts):
        raise ValueError(f"--ramp {ramp}: takes numbers from 1 up with commas between them, such as 4,6,8")
    return tuple(map(int, parts))


RULES = (
    Rule(
        what="a NaN check with a graph over whole microbatches",
        why="it reads the loss or the gradients on the host, between kernels that the graph launches at once",
        instead="--nan-checks false (Megatron: --no-check-for-nan-in-loss-and-grad), or --variant eager_nan_checks",
        refuses=lambda s: s.captures and s.whole and s.nan_checks,
    ),
    Rule(
        what="CPU offload with graphs of layers or microbatches",
        why="their copies wait for events of the other graphs; Megatron takes it within a whole iteration only",
        instead="cpu_offloading off, recomputed activations (--keep), or the whole iteration",
        refuses=lambda s: s.captures and not s.iteration and s.cpu_offload,
    ),
    Rule(
        what="sequences of changing length",
        why="a graph has the shapes and host numbers of its capture",
        instead="padding or packing to one length, with the documents' bounds in a tensor on the device",
        refuses=lambda s: s.captures and s.changing_lengths,
    ),
    Rule(
        what="a number of microbatches that changes, with a graph over all of them",
        why="each number is another schedule and must be captured again, with a warm-up and memory of its own (a run "
        "file with one number says how much: capture.warmup_s, capture.capture_s, capture.pool_bytes)",
        instead="--variant graph_microbatch, whose graphs are replayed as often as asked, or one number (--ramp '')",
        refuses=lambda s: s.captures and s.iteration and s.changing_microbatches,
    ),
    Rule(
        what="clipping with a host read in a captured optimizer",
        why="the host would have to read the norm in the middle of the graph",
        instead="--clip device, whose factor stays on the GPU, or --variant graph_fwd_bwd, which leaves the optimizer "
        "eager",
        refuses=lambda s: s.variant == "graph_step" and s.clip == "host",
    ),
    Rule(
        what="expandable segments while NCCL registers buffers in captures",
        why="memory that is mapped piece by piece cannot be registered",
        instead="NCCL_GRAPH_REGISTER=0, or PYTORCH_ALLOC_CONF without expandable_segments:True",
        refuses=lambda s: s.captures and s.expandable_segments and s.nccl_graph_register,
    ),
    Rule(
        what="dropout whose generator is not registered",
        why="every replay would drop the elements of the capture",
        instead="register_generator_state for its generator (Megatron: te_rng_tracker), or dropout 0",
        refuses=lambda s: s.captures and s.dropout > 0 and not s.registered_generator,
    ),
    Rule(
        what="scope full beside other scopes",
        why="full is the whole layer, all others are parts of it",
        instead="full alone, or an empty scope",
        refuses=lambda s: s.captures and "full" in s.scopes and len(s.scopes) > 1,
    ),
    Rule(
        what="scopes of modules with the whole iteration",
        why="the iteration contains them all",
        instead="an empty scope",
        refuses=lambda s: s.captures and s.iteration and not set(s.scopes) <= {"full_iteration"},
    ),
    Rule(
        what="scopes of experts or Mamba in a dense model",
        why="a dense layer has attention and an MLP alone",
        instead="attn, mlp, or both",
        refuses=lambda s: s.captures and bool(set(s.scopes) & set(OTHER_SCOPES)),
    ),
    Rule(
        what="scopes of modules with variant local",
        why="Megatron Bridge's local is the whole iteration only; Megatron-Core 0.19 captures the whole layer for attn "
        "and fails for mlp",
        instead="variant transformer_engine, or scope full_iteration",
        refuses=lambda s: s.variant == "local" and bool(set(s.scopes) & {"full", *DENSE_SCOPES}),
    ),
    Rule(
        what="scope full_iteration with variant transformer_engine",
        why="make_graphed_callables captures layers and their modules",
        instead="variant local (Megatron-Core: full_iteration)",
        refuses=lambda s: s.variant == "transformer_engine" and "full_iteration" in s.scopes,
    ),
    Rule(
        what="recompute of full granularity with Megatron's graphs of layers",
        why="the layers that run again are called outside of the graphs",
        instead="recompute_granularity selective, or the whole iteration",
        refuses=lambda s: s.variant in ("local", "transformer_engine") and not s.iteration and s.full_recompute,
    ),
)


TABLE = RuleTable("python -m llama31.capturable", Setting, RULES)

if __name__ == "__main__":
    TABLE.main()
