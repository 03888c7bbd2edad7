"""Rules of what CUDA graphs of a training step cannot hold: Megatron's, and this repository's. No torch here.

    refuse(Setting(scope="attn,moe", model="moe"))                      ValueError that names the rule, in one line

    python -m common.scope_rules --model moe --scope attn,moe      is this possible in Megatron?
    python -m common.scope_rules                                   all rules, with reasons and sources

A scope says what is captured: parts of layers (Megatron's cuda_graph_modules), whole layers (no modules), a microbatch
with its loss (cuda_graph_granularity chunk), the iteration of all microbatches (cuda_graph_impl full_iteration), the
step with its optimizer (optimizer_cuda_graph, too), or the optimizer alone (optimizer_cuda_graph).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from graph_worth.config import Parser, option, parse_with_fields

PARTS, WHOLE = ("attn", "mlp", "moe", "moe_router", "moe_preprocess"), ("microbatch", "iteration", "step")
LAYERS, PASSES = (*PARTS, "layer"), (*PARTS, "layer", *WHOLE)
SCOPES = (*PASSES, "optimizer")
SEQUENCES = ("fixed", "changing", "packed", "padded")
CORE, GRAPHS = "Megatron-Core 0.19, transformer_config.py", "Megatron-Core 0.19, cuda_graphs.py"
BRIDGE, OURS = "Megatron Bridge, config.py", "this repository"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A training step and its captured scopes."""

    scope: str = option("iteration", f"what is captured, with commas, empty for nothing: {', '.join(SCOPES)}")
    impl: str = option("transformer_engine", "who captures layers: cuda_graph_impl", ("transformer_engine", "local"))
    model: str = option("dense", "dense layers, layers of experts, or both", ("dense", "moe", "both"))
    capacity: bool = option(False, "moe_expert_capacity_factor is set; without it experts are dropless")
    padded: bool = option(False, "moe_pad_expert_input_to_capacity")
    dispatcher: str = option("alltoall", "moe_token_dispatcher_type", ("alltoall", "allgather", "flex"))
    overlap_exchange: bool = option(False, "overlap_moe_expert_parallel_comm")
    recompute: str = option("none", "what runs again in the backward", ("none", "moe", "selective", "full"))
    dropout: bool = option(False, "dropout in what is captured")
    rng_tracker: bool = option(True, "te_rng_tracker: the random generator is registered with the graph")
    nan_checks: bool = option(False, "loss or gradients are checked for NaN on the host")
    cpu_offload: bool = option(False, "activations or weights are moved to the host and back")
    sequences: str = option("fixed", "changing: in length; packed: documents; padded: those, padded", SEQUENCES)
    changing_microbatches: bool = option(False, "steps have different numbers of microbatches")
    host_clip: bool = option(False, "clipping reads the gradient norm on the host")
    expandable_segments: bool = option(False, "expandable_segments:True, and NCCL registers buffers in captures")

    def __post_init__(self):
        if not self.scopes <= set(SCOPES):
            raise ValueError(f"--scope {self.scope}: takes some of {', '.join(SCOPES)}")

    @property
    def scopes(self) -> set[str]:
        """The names in `scope`."""
        return {part.strip() for part in self.scope.split(",") if part.strip()}


class Rule(NamedTuple):
    """A rule of graphs of some scopes: its name, the settings that break it, why, what to take instead, its source."""

    name: str
    scopes: tuple[str, ...]
    breaks: Callable[[Setting], bool]
    why: str
    instead: str
    source: str


RULES = tuple(Rule(*row) for row in (
    ("another scope beside a whole one", ("layer", *WHOLE), lambda s: len(s.scopes) > 1,
     "the whole layer, microbatch, iteration or step holds it", "one of both", CORE),
    ("impl local for less than an iteration", (*LAYERS, "microbatch"), lambda s: s.impl == "local",
     "Bridge's local is the whole iteration; Megatron-Core's captures the whole layer for attn and fails for mlp",
     "impl transformer_engine, or iteration", BRIDGE),
    ("scopes of experts in a dense model", ("moe", "moe_router", "moe_preprocess"), lambda s: s.model == "dense",
     "a dense layer has attention and an MLP alone", "attn, mlp, or both", CORE),
    ("mlp without dense layers", ("mlp",), lambda s: s.model == "moe",
     "all layers have experts, mlp is captured of dense ones alone", "moe, or moe_router", CORE),
    ("moe beside moe_router", ("moe",), lambda s: "moe_router" in s.scopes,
     "moe is the whole layer of experts, its router too", "moe with a padded capacity, or moe_router alone", CORE),
    ("moe_preprocess without moe_router", ("moe_preprocess",), lambda s: "moe_router" not in s.scopes,
     "it orders the rows that the router's graph has chosen, in the same graph", "moe_router,moe_preprocess", CORE),
    ("moe_preprocess with an unpadded capacity and alltoall", ("moe_preprocess",),
     lambda s: s.dispatcher == "alltoall" and s.capacity and not s.padded,
     "this dispatcher then reads the capacity on the host", "--padded true, or dispatcher flex (DeepEP)", CORE),
    ("dropless or unpadded experts in a graph of the layer", ("moe", "layer"),
     lambda s: s.model != "dense" and not (s.capacity and s.padded),
     "the exchange and the GEMMs take the number of rows of each expert from the host",
     "a padded capacity, or attn,moe_router,moe_preprocess (here graph_static; on one rank the GPU counts rows)", CORE),
    ("overlap of the experts' exchange with captured experts", ("moe", "layer"), lambda s: s.overlap_exchange,
     "the exchange is issued between the parts of the layer that the graph holds",
     "attn,moe_router,moe_preprocess, or overlap off", CORE),
    ("experts that run again beside a captured router", ("moe_router",), lambda s: s.recompute == "moe",
     "what runs again is called outside of the router's graph", "recompute none or selective, or no moe_router", CORE),
    ("recompute of full granularity with graphs of layers", LAYERS, lambda s: s.recompute == "full",
     "the layers that run again are called outside of the graphs", "recompute selective, or iteration", CORE),
    ("dropout in captured layers that run again", LAYERS, lambda s: s.dropout and s.recompute != "none",
     "the second run would draw other random numbers", "dropout 0, or recompute none", CORE),
    ("graphs without te_rng_tracker", PASSES, lambda s: not s.rng_tracker,
     "a replay draws new random numbers only from a generator that is registered with the graph",
     "te_rng_tracker (here register_generator_state)", BRIDGE),
    ("a NaN check with a graph over whole microbatches", WHOLE, lambda s: s.nan_checks,
     "it reads the loss or the gradients on the host, between kernels that the graph launches at once",
     "--nan-checks false (Megatron --no-check-for-nan-in-loss-and-grad)", BRIDGE),
    ("CPU offload with graphs of layers or microbatches", (*LAYERS, "microbatch"), lambda s: s.cpu_offload,
     "its copies wait for events of the other graphs", "no offload, or iteration", CORE),
    ("sequences of changing length", PASSES, lambda s: s.sequences == "changing",
     "a graph has the shapes and host numbers of its capture",
     "padding or packing to one length, with the documents' bounds in a tensor on the device", OURS),
    ("packed documents with captured attention", ("attn", "layer", *WHOLE), lambda s: s.sequences == "packed",
     "a graph takes no packed_seq_params", "pad_to_max_length and pad_cu_seqlens, or a scope without attn "
     "(here --documents, whose bounds have a fixed length and are read on the GPU)", BRIDGE),
    ("a changing number of microbatches in one graph", ("iteration", "step"), lambda s: s.changing_microbatches,
     "each number is another schedule, with a warm-up, a capture and memory of its own",
     "graphs that are replayed as often as asked (here --variant graph_microbatch, Megatron "
     "--cuda-graph-dynamic-microbatches), or one number (--ramp '')", OURS),
    ("clipping with a host read in a captured optimizer", ("step", "optimizer"), lambda s: s.host_clip,
     "the host would have to read the norm in the middle of the graph",
     "--clip device, whose factor stays on the GPU, or --variant graph_fwd_bwd, with an eager optimizer", OURS),
    ("expandable segments while NCCL registers buffers in captures", SCOPES, lambda s: s.expandable_segments,
     "memory that is mapped piece by piece cannot be registered",
     "NCCL_GRAPH_REGISTER=0, or PYTORCH_ALLOC_CONF without expandable_segments:True", GRAPHS),
))  # fmt: skip


def refuse(setting: Setting) -> None:
    """ValueError in one line that names all rules that the setting breaks."""
    broken = [rule for rule in RULES if setting.scopes & set(rule.scopes) and rule.breaks(setting)]
    if reasons := ". Nor ".join(f"{rule.name}: {rule.why}; take {rule.instead}" for rule in broken):
        raise ValueError(f"cannot capture {reasons}")


def markdown() -> str:
    """Return the table as Markdown."""
    rows = [f"| {rule.name} | {rule.why} | {rule.instead} | {rule.source} |" for rule in RULES]
    return "\n".join(["| what | why | take instead | source |", "| --- | --- | --- | --- |", *rows])


def main(argv=None) -> None:
    """Print the table; with options, whether it forbids them, and exit with 2 if so."""
    parser = Parser(prog="python -m common.scope_rules", allow_abbrev=False)
    _, given = parse_with_fields(parser, Setting, argv)
    try:
        refuse(Setting(**given))
    except ValueError as error:
        parser.error(str(error))
    print("nothing in the table forbids it" if given else markdown())


if __name__ == "__main__":
    main()
