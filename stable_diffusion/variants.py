"""Stable Diffusion's step by other means: other kernels, host reads, torch.compile, Lightning. No capture of ours here.

step, eager_step: stable_diffusion.train's eager step, which these variants change or call.
"""

import torch
import torch.nn.functional as F

from common.marks import mark, section
from common.variant import Compiled, Eager, Unsupported
from stable_diffusion.state import State


class EagerTorch(Eager):
    """Eager with torch's own group norm and GEGLU: more kernels, each cheaper to launch than Triton's.

    The same training, rounded otherwise. Which of the two eagers is the faster depends on the host.
    """

    def __init__(self, state: State, step):
        if state.config.kernels == "torch":
            raise Unsupported("--kernels torch: every variant has torch's kernels, eager_torch would be eager")
        state.unet.use_kernels("torch")
        super().__init__(state, step)

    def close(self):
        self.state.unet.use_kernels(self.state.config.kernels)


def reading_step(state: State, index: int) -> dict:
    """The usual loop: the loss is logged, and the host looks at the overflow before it updates; each by .item().

    Returns what a loop would log.
    """
    state.begin_step(index)
    with section("noise"):
        x, t, target = state.noisy_latents(state.inputs["moments"])
    with section("forward"):
        loss = F.mse_loss(state.model(x, t, state.inputs["context"]), target)
        logged = {"loss": loss.item()}
    mark()
    with section("backward"):
        grads = state.reduce(torch.autograd.grad(state.scaled(loss), state.parameters))
    mark()
    with section("optimizer"):
        state.adam.check(grads)
        if not state.scaler.found_inf.item():
            state.adam.apply(grads)
        logged["loss_scale"] = state.scaler.scale.item()
        state.scaler.update()
        state.report.fill(loss, state.adam.grad_norm)
    state.end_step(index)
    return logged


def compiled(state: State, eager_step, mode="default") -> Compiled:
    """torch.compile of the UNet; the rest of the step as in eager. mode "reduce-overhead": in graphs of torch's own."""
    return Compiled(state, eager_step, [(state, "model")], "the UNet", mode)


def compiled_graphed(state: State, eager_step, graphed):
    """torch.compile of the UNet, captured within the full iteration. graphed: the variant that captures it."""
    unet = compiled(state, eager_step)
    variant = graphed(state)
    variant.capture.strategy = "full iteration, UNet by torch.compile"
    variant.capture.compile_s = unet.capture.compile_s
    variant.as_eager = unet.as_eager
    return variant


def lightning_graph(state: State):
    """The full iteration captured inside the loop of Lightning's Trainer, see stable_diffusion/lightning_variant.py."""
    if state.buckets:
        raise Unsupported("lightning_graph runs on one GPU: common.lightning_graph captures one device's step")
    try:
        from stable_diffusion.lightning_variant import LightningGraph
    except ModuleNotFoundError as error:
        raise Unsupported(f"lightning_graph needs lightning ({error}): ./setup.sh lightning") from None
    return LightningGraph(state)
