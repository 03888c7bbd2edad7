"""Other ways to run Stable Diffusion's step: torch's kernels, host reads, torch.compile, parameterized launches,
Lightning.

eager_step: of stable_diffusion/train.py.
"""

import torch
import torch.nn.functional as F

from common.measuring.marks import mark, section
from common.variant import Compiled, Eager, Unsupported
from common.variant_parameterized import Parameterized
from stable_diffusion.state import State


class EagerTorch(Eager):
    """Eager with torch's own group norm and GEGLU: more kernels, each cheaper to launch than Triton's.

    The same training, but for rounding. Which of the two eagers is the faster depends on the host.
    """

    def __init__(self, state: State, eager_step):
        if state.config.kernels == "torch":
            raise Unsupported("--kernels torch: every variant has torch's kernels, eager_torch would be eager")
        self.state = state
        self.enter()
        try:
            super().__init__(state, eager_step)
        finally:
            self.leave()

    def enter(self):
        self.state.unet.use_kernels("torch")

    def leave(self):
        self.state.unet.use_kernels(self.state.config.kernels)


def reading_step(state: State, index: int) -> dict:
    """The usual step: the host reads loss, overflow and loss scale by .item(). Returns what it would log."""
    state.begin_step(index)
    with section("noise"):
        x, t, target = state.noisy_latents(state.inputs["moments"])
    with section("forward"):
        loss = F.mse_loss(state.model(x, t, state.inputs["context"]), target)
        logged = {"loss": loss.item()}
    mark()
    with section("backward"):
        grads = state.reduce(torch.autograd.grad(loss * state.scaler.scale, state.parameters))
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
    """torch.compile of the UNet; the rest of the step is eager's. With mode "reduce-overhead" torch captures graphs."""
    return Compiled(state, eager_step, [(state, "model")], "the UNet", mode)


def parameterized(state: State, eager_step) -> Parameterized:
    """Forward and backward of the UNet as parameterized launches; the rest of the step is eager's."""
    return Parameterized(state, eager_step, [(state, "model")], "the UNet")


def compiled_graphed(state: State, eager_step, graphed):
    """The compiled UNet inside the full iteration's graph; graphed: the variant that captures that."""
    unet = compiled(state, eager_step)
    unet.enter()
    try:
        variant = graphed(state)
    finally:
        unet.leave()
    variant.capture.strategy = "full iteration, UNet by torch.compile"
    variant.capture.compile_s = unet.capture.compile_s
    variant.unet = unet  # keeps the compiled kernels, which the graph launches
    return variant


def graph_step_lightning(state: State):
    """The full iteration captured inside the loop of Lightning's Trainer, see stable_diffusion/lightning_variant.py."""
    if state.buckets:
        raise Unsupported("graph_step_lightning runs on one GPU: common.capture.lightning captures one device's step")
    try:
        from stable_diffusion.lightning_variant import LightningGraph
    except ImportError as error:
        raise Unsupported(f"graph_step_lightning needs lightning ({error}): ./setup.sh lightning") from None
    return LightningGraph(state)
