"""Stable Diffusion v2: the whole training iteration in one CUDA graph.

In the graph: latents sampled from the VAE's moments, timesteps and noise, UNet forward, loss, backward, all-reduce,
overflow check, AdamW and loss scale. Eager: the batch's copy into static inputs, one number for the learning rate, and
what the host reads of the last steps. Why: nothing in the iteration needs the host, so nothing has to wait for it.

    python -m stable_diffusion.train --preset tiny --variant graph
    python -m stable_diffusion.train --preset bench --variant graph --record runs/graph.r1.json
    torchrun --standalone --nproc-per-node 2 -m stable_diffusion.train --variant graph    # data parallel
"""

from common.config import mistakes_in_one_line, parse
from stable_diffusion import config as sd_config
from stable_diffusion.config import ABOUT, PRESETS, VARIANTS, Config

if __name__ == "__main__":
    # Before torch is imported: --help, --describe and mistakes are answered at once.
    args = parse("stable_diffusion", Config, PRESETS, VARIANTS, about=ABOUT)

import contextlib
import sys

import torch
import torch.nn.functional as F

from common import collectives, environment, flops, measure
from common.capture import Pool
from common.measure import Capture, Unsupported, mark, section
from stable_diffusion.lightning_variant import LightningGraph
from stable_diffusion.state import State, hyperparameters

# ------------------------------------------------------------------------------------------------
# The eager step


def training_step(state: State):
    """Forward, loss, backward and update on the batch in the static inputs. Nothing here waits for the device."""
    with section("noise"):
        x, t, target = state.noisy_latents(state.inputs["moments"])
    with section("forward"):
        loss = F.mse_loss(state.model(x, t, state.inputs["context"]), target)
    mark()
    with section("backward"):
        grads = torch.autograd.grad(state.scaled(loss), state.parameters)
        grads = state.reduce(grads)
    mark()
    with section("optimizer"):
        state.update(loss, grads)


def eager_step(state: State, index: int):
    state.begin_step(index)
    training_step(state)
    state.end_step(index)


# ------------------------------------------------------------------------------------------------
# The capture, and the step that replays it


class Graphed:
    """The full iteration as one graph: one replay a step."""

    def __init__(self, state: State):
        self.state = state
        self.pool = Pool(state.device)
        self.capture = Capture(strategy="full iteration", pools=[self.pool])
        _warm_up(state, self.capture)
        static = tuple(state.inputs.buffers.values())
        with self.capture.timed("capture_s"):
            self.graph, _ = self.pool.capture(lambda: training_step(state), static)

    def step(self, index: int):
        self.state.begin_step(index)
        with section("replay"):
            self.graph.replay()
        self.state.end_step(index)

    def replays_of(self, index: int) -> int:
        return 1

    def close(self):
        self.pool.release()


class Partial:
    """UNet forward and backward as two graphs of one pool; noise, loss, update are launched one by one."""

    def __init__(self, state: State):
        self.state = state
        self.pool = Pool(state.device)
        self.capture = Capture(strategy="UNet forward and backward", pools=[self.pool])
        _warm_up(state, self.capture)
        x, t, _ = state.noisy_latents(state.inputs["moments"])
        self.x, self.t = torch.zeros_like(x), torch.zeros_like(t)
        self.grad_v = torch.zeros_like(x)
        with self.capture.timed("capture_s"):
            self.forward, v = self.pool.capture(
                lambda: state.model(self.x, self.t, state.inputs["context"]), (self.x, self.t)
            )
            self.backward, self.grads = self.pool.capture(
                lambda: torch.autograd.grad(v, state.parameters, self.grad_v), (self.grad_v,)
            )
        self.v = v.detach()

    def step(self, index: int):
        state = self.state
        state.begin_step(index)
        with section("noise"):
            x, t, target = state.noisy_latents(state.inputs["moments"])
            self.x.copy_(x)
            self.t.copy_(t)
        with section("forward"):
            self.forward.replay()
            v = self.v.requires_grad_()
            loss = F.mse_loss(v, target)
        with section("backward"):
            self.grad_v.copy_(torch.autograd.grad(state.scaled(loss), v)[0])
            self.backward.replay()
            grads = state.reduce(self.grads)
        with section("optimizer"):
            state.update(loss, grads)
        state.end_step(index)

    def replays_of(self, index: int) -> int:
        return 2

    def close(self):
        self.pool.release()


def _warm_up(state, capture, steps=3):
    """Eager steps on the capture stream: libraries initialise and choose their kernels before anything is recorded."""
    state.inputs.reset()
    with capture.timed("warmup_s"):
        for index in range(steps):
            eager_step(state, index)


# ------------------------------------------------------------------------------------------------
# The other variants


class Eager:
    """The baseline: no graph, no compiler, nothing that waits for the device."""

    def __init__(self, state: State):
        self.state = state
        self.capture = Capture(strategy="none")
        _warm_up(state, self.capture)

    def step(self, index: int):
        eager_step(self.state, index)

    def replays_of(self, index: int) -> int:
        return 0

    def close(self):
        """Nothing to release."""


class EagerTorch(Eager):
    """Eager with torch's own group norm and GEGLU: more kernels, each cheaper to launch than Triton's. The same
    training, rounded otherwise; which of the two is the faster depends on the host."""

    def __init__(self, state: State):
        if state.config.kernels == "torch":
            raise Unsupported("--kernels torch: every variant has torch's kernels, eager_torch would be eager")
        state.unet.use_kernels("torch")
        super().__init__(state)

    def close(self):
        self.state.unet.use_kernels(self.state.config.kernels)


class EagerSync(Eager):
    """The usual loop: the loss is logged, and the host looks at the overflow before it updates; each by .item()."""

    def step(self, index: int):
        state = self.state
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
        self.logged = logged


class Compiled(Eager):
    """torch.compile of the UNet; the rest of the step as in eager."""

    mode = "default"

    def __init__(self, state: State):
        _require_compiler(state)
        self.state = state
        self.pool = Pool(state.device)
        self.capture = Capture(strategy=f"torch.compile of the UNet, mode {self.mode}", pools=[self.pool])
        # reduce-overhead captures in its second and third step; from then on each step makes as many replays.
        with self.pool.adopt():
            compile_unet(state, self.capture, self.mode)
            before = self.pool.num_replays
            self.step(0)
        self.num_replays = self.pool.num_replays - before

    def replays_of(self, index: int) -> int:
        return self.num_replays

    @contextlib.contextmanager
    def as_eager(self):
        compiled, self.state.model = self.state.model, self.state.unet
        try:
            yield
        finally:
            self.state.model = compiled


class ReduceOverhead(Compiled):
    """torch.compile's own graphs of forward and backward."""

    mode = "reduce-overhead"

    def __init__(self, state: State):
        super().__init__(state)
        if not self.num_replays:
            raise Unsupported("torch.compile(mode='reduce-overhead') made no graphs of the UNet")

    def step(self, index: int):
        torch.compiler.cudagraph_mark_step_begin()
        super().step(index)


class CompiledGraphed(Graphed):
    """torch.compile of the UNet, captured within the full iteration."""

    as_eager = Compiled.as_eager

    def __init__(self, state: State):
        _require_compiler(state)
        compiling = Capture(strategy="")
        compile_unet(state, compiling, "default")
        super().__init__(state)
        self.capture.strategy = "full iteration, UNet by torch.compile"
        self.capture.compile_s = compiling.compile_s


def compile_unet(state, capture, mode):
    """Put the compiled UNet into the step and run it until nothing is compiled or captured any more."""
    state.model = torch.compile(state.unet, mode=mode, dynamic=False, fullgraph=True)
    state.inputs.reset()
    with capture.timed("compile_s"):
        for index in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            eager_step(state, index)


def _require_compiler(state):
    if state.device.type != "cuda":
        raise Unsupported("torch.compile is measured on a GPU only: the host graph cannot record compiled code")


MAKE_VARIANT = {
    "eager": Eager,
    "eager_torch": EagerTorch,
    "eager_sync": EagerSync,
    "partial": Partial,
    "graph": Graphed,
    "lightning_graph": LightningGraph,
    "compile": Compiled,
    "compile_graph": CompiledGraphed,
    "reduce_overhead": ReduceOverhead,
}

# ------------------------------------------------------------------------------------------------
# Main


def _card(config, device, flops_per_step):
    name = "UNet of Stable Diffusion v2" if config.channels == 320 else "toy widths"
    memory = f" | memory predicted {sd_config.predicted_bytes(config) / 2**30:.1f} GiB" if device.type == "cuda" else ""
    return [
        f"{sd_config.num_parameters(config) / 1e6:,.1f} M parameters: {name}",
        f"batch {config.batch} of 4 x {config.latent_size} x {config.latent_size} latents, text "
        f"{config.context_tokens} x {config.context_dim} | {config.precision} with FP32 masters | "
        f"{flops_per_step / 1e12:.3g} TFLOP/step{memory}",
    ]


def main(args):
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    rank, local_rank, world_size = collectives.init(kind)
    device = torch.device(kind, local_rank) if kind == "cuda" else torch.device(kind)
    try:
        config = args.config
        if kind == "cpu":
            sd_config.require(config, environment.available_host_bytes())
        flops_per_step = config.batch * sd_config.flops_per_sample(config)
        gpu = torch.cuda.get_device_name(device) if kind == "cuda" else ""
        workload = measure.Workload(
            model="stable_diffusion",
            build=lambda config, device: State(config, device, rank, world_size),
            variants=MAKE_VARIANT,
            reference=eager_step,
            card=_card(config, device, flops_per_step),
            notes=[] if config.zero_init else ["last layers of residual branches start small, not at zero"],
            flops_per_step=flops_per_step,
            flops_convention=flops.FULL_ATTENTION,
            items_per_step=config.batch,
            unit="samples",
            peak_flops=flops.peak_flops(gpu, config.precision),
            hyperparameters=hyperparameters(config, world_size),
            kinds=ABOUT["kinds"],
            promises=ABOUT["promises"],
        )
        return measure.run(workload, args, device, rank, world_size)
    finally:
        collectives.shutdown()


if __name__ == "__main__":
    with mistakes_in_one_line("stable_diffusion"):
        record = main(args)
    sys.exit(0 if record["status"] in ("pass", "unsupported", "oom") else 1)
