"""The variants beside train.py's: torch.compile, parameterized launches, and graph_step in FP4."""

from common.precision import nvfp4
from graph_worth import Compiled, Parameterized, Unsupported, require_compiler, variant
from llama31.state import State
from llama31.train import eager_step, graphed_step


@variant(
    "compile",
    kind="compile",
    help="torch.compile of the layers (default mode, no graphs)",
    parity=1e-3,  # compiled kernels round otherwise
    builds=("torch_bf16",),
    apart="compiled",
)
def compiled(state: State, capture, mode="default"):
    require_compiler(state.device)
    return Compiled(state, eager_step, _layers(state), "each layer", mode, capture=capture)


@variant(
    "graph_step_compiled",
    kind="compile",
    help="graph_step over layers that torch.compile made: what a graph adds to the compiler",
    graphs=2,
    replays=lambda c: c.replays(1),
    parity=1e-3,  # compiled kernels round otherwise
    builds=("torch_bf16",),
    apart="compiled",
)
def compiled_graphed(state: State, capture):
    return compiled(state, capture).graphed(graphed_step, "graph_step, each layer by torch.compile")


@variant(
    "reduce_overhead",
    kind="compile",
    help="torch.compile(mode='reduce-overhead'): graphs as torch makes them",
    graphs=None,
    parity=1e-3,  # compiled kernels round otherwise
    builds=("torch_bf16",),
    apart="reduce_overhead",
)
def reduce_overhead(state: State, capture):
    return compiled(state, capture, "reduce-overhead")


@variant(
    "graph_step_nvfp4",
    kind="graph",
    help="graph_step in FP4, or in its numbers (--precision nvfp4_emulated), which is slow",
    graphs=2,
    replays=lambda c: c.replays(1),
    parity="bitwise",
    builds=("nvfp4_emulated",),
)
def in_fp4(state: State, capture):
    nvfp4.require_asked(state.config.precision)
    return graphed_step(state, capture)


@variant(
    "graph_parameterized",
    kind="graph",
    help="forward and backward of each layer and of the head as graphs without a pool, on the memory of the eager step",
    graphs=None,
    parity="bitwise",
    builds=("torch_bf16",),
    apart="parameterized",
)
def parameterized(state: State, capture):
    functions, modules = _layers(state), [*state.layers]
    if state.head is not None:
        functions.append((state.head, "forward"))
        modules.append(state.head)
    summed = [list(module.parameters()) for module in modules]
    return Parameterized(state, eager_step, functions, "each layer and the head", summed, capture=capture)


def _layers(state):
    """The functions that the compiler takes."""
    if state.config.layer != "torch" or state.config.precision != "bf16":
        raise Unsupported(
            "te, FP8 and FP4 modules leave the compiler: compare all variants with --layer torch --precision bf16"
        )
    return [(layer, "forward") for layer in state.layers]
