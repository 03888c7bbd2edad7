"""Other ways to run Stable Diffusion's step: torch's kernels, torch.compile, Lightning."""

from graph_worth import Compiled, Unsupported, variant
from stable_diffusion.state import State
from stable_diffusion.train import GraphedStep, eager_step
from stable_diffusion.unet import ResBlock, UNet


@variant("eager_torch", kind="eager", parity=1e-3, headline=True, traits={"kernels": "torch's group norm and GEGLU"})
class EagerTorch:
    """Eager with torch's own group norm and GEGLU.

    It launches more kernels, each cheaper to launch than Triton's. The training is the same, but for rounding. Which of
    the two eagers is the faster depends on the host.
    """

    def __init__(self, state: State, capture):
        self.state = state
        self.enter()
        try:
            capture.warm_up(eager_step)
        finally:
            self.leave()

    def step(self, index: int):
        eager_step(self.state, index)

    def enter(self):
        self.state.unet.use_kernels(in_triton=False)

    def leave(self):
        self.state.unet.use_kernels(in_triton=True)


@variant("graph_step_lightning", kind="graph", graphs=1, parity="bitwise", headline=True, formerly="lightning_graph")
def graph_step_lightning(state: State, capture):
    """The full iteration as one graph, captured and replayed inside the loop of Lightning's Trainer."""
    if state.buckets:
        raise Unsupported("graph_step_lightning runs on one GPU: graph_worth.lightning captures one device's step")
    try:
        from stable_diffusion.lightning_variant import LightningGraph
    except ImportError as error:
        raise Unsupported(f"graph_step_lightning needs lightning ({error}): ./setup.sh lightning") from None
    return LightningGraph(state, capture)


@variant("compile", kind="compile", parity=1e-3, apart="compiled")
def compiled(state: State, capture, mode="default"):
    """torch.compile of the UNet's residual blocks and transformers, no graphs.

    Blocks of one shape are compiled once: 18 kinds in the place of 38 blocks. What lies between them stays eager.
    """
    functions = [(block, "forward") for block in repeated_blocks(state.unet)]
    return Compiled(state, eager_step, functions, "each block of the UNet", mode, capture=capture)


def repeated_blocks(unet: UNet) -> list:
    return [*(block for block in unet.blocks if isinstance(block, ResBlock)), *unet.transformers.values()]


@variant("graph_step_compiled", kind="compile", graphs=1, parity=1e-3, apart="compiled", formerly="graph_step_compile")
def compiled_graphed(state: State, capture):
    """the full iteration as one graph, the UNet's blocks by torch.compile."""
    return compiled(state, capture).graphed(GraphedStep, "full iteration, the UNet's blocks by torch.compile")


@variant("reduce_overhead", kind="compile", graphs=None, parity=1e-3, apart="reduce_overhead")
def reduce_overhead(state: State, capture):
    """torch.compile(mode='reduce-overhead') of the same blocks: graphs as torch makes them."""
    return compiled(state, capture, "reduce-overhead")
