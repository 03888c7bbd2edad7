"""Megatron's rules about graphs of a mixture of experts, as one table: who captures x what is captured.

    TABLE.refuse(Setting(scope="attn,moe_preprocess"))         ValueError: what, why, and what to take instead

    python -m moe.capturable --scope attn,moe --capacity-factor 1.25        is this one possible in Megatron?
    python -m moe.capturable                                                the table

The rules are those of Megatron-Core 0.19 (transformer_config.py, cuda_graphs.py) and Megatron Bridge (config.py).
The variants of moe.train need few of them: without --ep they read no count on the host and exchange nothing.
"""

from dataclasses import dataclass

from common.config import option, require_fields
from common.rule_table import Rule, RuleTable

IMPLS = ("none", "local", "transformer_engine", "full_iteration")
SCOPES = ("attn", "mlp", "moe", "moe_router", "moe_preprocess")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A training step of experts in Megatron, and what shall be captured of it."""

    impl: str = option("transformer_engine", "who captures: cuda_graph_impl", IMPLS)
    scope: str = option(
        "", f"what is captured, cuda_graph_modules, with commas: {', '.join(SCOPES)} (empty: whole layers)"
    )
    capacity_factor: float = option(0.0, "rows of an expert over those of a balanced router, padded (0: dropless)")
    experts: int = option(128, "experts of a layer")
    ep: int = option(1, "ranks that share the experts")
    dense_layers: int = option(0, "layers with a dense MLP in the place of experts")
    recompute: str = option("none", "what runs again in the backward", ("none", "moe", "selective", "full"))
    dropout: float = option(0.0, "probability of dropout in what is captured and runs again")
    rng_tracker: bool = option(True, "the random state is kept by te_rng_tracker")
    nan_checks: bool = option(False, "loss or gradients are checked for NaN on the host")
    cpu_offload: bool = option(False, "activations or weights are moved to the host and back")
    overlap_exchange: bool = option(False, "overlap_moe_expert_parallel_comm")
    packed: bool = option(False, "several documents in a sequence")
    padded_bounds: bool = option(False, "pad_to_max_length and pad_cu_seqlens: sequence and bounds have a fixed length")
    expandable_segments: bool = option(False, "PYTORCH_ALLOC_CONF has expandable_segments:True")
    nccl_graph_register: bool = option(True, "NCCL registers buffers in captures: all but NCCL_GRAPH_REGISTER=0")

    def __post_init__(self):
        if not set(self.scopes) <= set(SCOPES):
            raise ValueError(f"--scope {self.scope}: takes some of {', '.join(SCOPES)}")
        require_fields(self, ("experts", "ep"), lambda value: value >= 1, "a number from 1 up")
        require_fields(self, ("dense_layers",), lambda value: value >= 0, "a number from 0 up")
        require_fields(self, ("dropout",), lambda value: 0 <= value < 1, "a number from 0 up, below 1")
        if not (self.capacity_factor == 0 or 1 <= self.capacity_factor < float("inf")):
            raise ValueError(f"--capacity-factor {self.capacity_factor}: takes 0 or a finite number from 1 up")
        if self.experts % self.ep:
            raise ValueError(f"--ep {self.ep}: takes a divisor of --experts {self.experts}")

    @property
    def scopes(self) -> tuple[str, ...]:
        return tuple(part.strip() for part in self.scope.split(",") if part.strip())

    @property
    def of_layers(self) -> bool:
        """Return whether layers or their modules are captured."""
        return self.impl in ("local", "transformer_engine")

    @property
    def holds_experts(self) -> bool:
        """Return whether a graph of a layer or module holds the experts."""
        return self.of_layers and (not self.scopes or "moe" in self.scopes)

    @property
    def holds_attention(self) -> bool:
        """Return whether a graph of a layer or module holds the attention."""
        return self.of_layers and (not self.scopes or "attn" in self.scopes)


RULES = (
    Rule(
        what="scope moe beside moe_router",
        why="moe is the whole layer of experts, its router too",
        instead="moe with a capacity factor, or moe_router without moe",
        refuses=lambda s: s.of_layers and {"moe", "moe_router"} <= set(s.scopes),
    ),
    Rule(
        what="scope moe_preprocess without moe_router",
        why="it orders the rows that the router's graph has chosen, in the same graph",
        instead="moe_router,moe_preprocess",
        refuses=lambda s: s.of_layers and "moe_preprocess" in s.scopes and "moe_router" not in s.scopes,
    ),
    Rule(
        what="dropless experts in a graph of the layer",
        why="the exchange and the GEMMs take the number of rows of each expert from the host",
        instead="--capacity-factor 1 or more, which drops and pads, or attn,moe_router,moe_preprocess (here: moe.train "
        "--variant graph_layer, whose rows are counted on the GPU)",
        refuses=lambda s: s.holds_experts and not s.capacity_factor,
    ),
    Rule(
        what="scope moe_preprocess with a capacity factor",
        why="the dispatcher then reads the capacity on the host",
        instead="moe, which captures dropped and padded experts whole",
        refuses=lambda s: s.of_layers and "moe_preprocess" in s.scopes and bool(s.capacity_factor),
    ),
    Rule(
        what="scope mlp without dense layers",
        why="all layers have experts, mlp is captured of dense ones alone",
        instead="moe, or moe_router",
        refuses=lambda s: s.of_layers and "mlp" in s.scopes and not s.dense_layers,
    ),
    Rule(
        what="scopes of modules with impl full_iteration",
        why="the iteration contains them all",
        instead="an empty scope",
        refuses=lambda s: s.impl == "full_iteration" and bool(s.scopes),
    ),
    Rule(
        what="scopes of modules with impl local in Bridge",
        why="Megatron Bridge takes local for the whole iteration only",
        instead="impl transformer_engine",
        refuses=lambda s: s.impl == "local" and bool(s.scopes),
    ),
    Rule(
        what="experts that run again beside a captured router",
        why="what runs again is called outside of the router's graph, with Transformer Engine's graphs",
        instead="recompute none or selective, or a scope without moe_router",
        refuses=lambda s: s.impl == "transformer_engine" and s.recompute == "moe" and "moe_router" in s.scopes,
    ),
    Rule(
        what="recompute of full granularity with graphs of layers",
        why="the layers that run again are called outside of the graphs",
        instead="recompute selective, or impl full_iteration",
        refuses=lambda s: s.of_layers and s.recompute == "full",
    ),
    Rule(
        what="dropout in captured modules that run again",
        why="the second run would draw other random numbers",
        instead="dropout 0, or recompute none",
        refuses=lambda s: s.of_layers and s.recompute != "none" and s.dropout > 0,
    ),
    Rule(
        what="graphs without te_rng_tracker",
        why="a replay draws new random numbers only from a generator that is registered with the graph",
        instead="te_rng_tracker",
        refuses=lambda s: s.impl != "none" and not s.rng_tracker,
    ),
    Rule(
        what="a NaN check with impl full_iteration",
        why="it reads the loss or the gradients on the host, between kernels that the graph launches at once",
        instead="--no-check-for-nan-in-loss-and-grad (Bridge: rerun_state_machine.check_for_nan_in_loss and "
        "ddp.check_for_nan_in_grad false)",
        refuses=lambda s: s.impl == "full_iteration" and s.nan_checks,
    ),
    Rule(
        what="CPU offload with graphs of layers",
        why="its copies wait for events of the other graphs",
        instead="cpu_offloading off, or impl full_iteration",
        refuses=lambda s: s.of_layers and s.cpu_offload,
    ),
    Rule(
        what="overlap of the experts' exchange with captured experts",
        why="the exchange is issued between the parts of the layer that the graph holds",
        instead="attn,moe_router,moe_preprocess, or overlap off",
        refuses=lambda s: s.impl == "transformer_engine" and s.overlap_exchange and s.holds_experts,
    ),
    Rule(
        what="packed documents with captured attention",
        why="a graph has the shapes of its capture, and takes no packed_seq_params",
        instead="pad_to_max_length and pad_cu_seqlens, or a scope without attn (this repository: --documents, whose "
        "bounds have a fixed length and are read on the GPU)",
        refuses=lambda s: s.packed and not s.padded_bounds and (s.holds_attention or s.impl == "full_iteration"),
    ),
    Rule(
        what="expandable segments while NCCL registers buffers in captures",
        why="memory that is mapped piece by piece cannot be registered",
        instead="NCCL_GRAPH_REGISTER=0, or PYTORCH_ALLOC_CONF without expandable_segments:True",
        refuses=lambda s: s.of_layers and s.expandable_segments and s.nccl_graph_register,
    ),
)


TABLE = RuleTable("python -m moe.capturable", Setting, RULES)

if __name__ == "__main__":
    TABLE.main()
