"""All that Stable Diffusion's training reads and writes: built once, reset in place, the same for every variant."""

import contextlib
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from common.optimizers.adam import Adam
from common.optimizers.hyperparameters import Hyperparameters
from common.optimizers.loss_scaler import LossScaler
from common.parallel.buckets import GradientBuckets
from common.step_report import ScaledReport
from graph_worth import DoubleBuffered, section
from graph_worth.machine import memory
from stable_diffusion.config import LATENT_SCALE, TIMESTEPS, Config, learning_rate, predicted_bytes
from stable_diffusion.data.batches import Batches
from stable_diffusion.data.shards import Samples
from stable_diffusion.data.synthetic import ensure_generated
from stable_diffusion.unet import UNet, initialise

SEED = 1234
ADAM = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
# Kernels of attention, the fastest first; each is taken where it can run.
ATTENTION = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
# Below it the smallest feature map has one pixel, and cuDNN's gradients of its weights are not channels_last.
LEAST_SIZE = 16
BUCKET_BYTES = 288 * 10**6  # the submission's bucket_cap
CACHE = Path(__file__).resolve().parent.parent / "runs" / ".cache" / "stable_diffusion"


class State:
    """UNet, noise schedule, loss scaler, optimizer, data, and the losses so far."""

    def __init__(self, config: Config, device: torch.device, rank: int = 0, world_size: int = 1):
        self.config, self.device, self.rank = config, device, rank
        if device.type == "cuda" and config.latent_size < LEAST_SIZE:
            raise ValueError(f"--latent-size {config.latent_size}: a GPU needs {LEAST_SIZE} or more")
        memory.require_batch(config.batch, predicted_bytes(config), device)
        # For as long as the state is open: compiles and captures come later.
        self.opened = contextlib.ExitStack()
        self.opened.enter_context(sdpa_kernel(ATTENTION, set_priority=True))
        dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[config.precision]
        with torch.device(device):
            # `model` is the function that the step calls; a compiled variant puts its own there.
            self.model = self.unet = UNet(config).to(memory_format=torch.channels_last)
        for parameter in self.unet.parameters():
            parameter.data = parameter.data.to(dtype)
        initialise(self.unet, config, SEED)
        self.names, self.parameters = zip(*self.unet.named_parameters(), strict=True)
        self.root_alpha, self.root_beta = schedule(device)
        self.scaler = LossScaler(device, config.loss_scale, config.growth_interval, config.hysteresis)
        self.adam = Adam(self.parameters, Hyperparameters(lr=config.lr, **ADAM), scaler=self.scaler)
        self.reduced = [torch.zeros_like(parameter) for parameter in self.parameters] if world_size > 1 else None
        self.buckets = GradientBuckets(self.reduced, BUCKET_BYTES) if world_size > 1 else None
        sizes = (config.latent_size, config.context_tokens, config.context_dim)
        samples = Samples(config.data or ensure_generated(CACHE, *sizes), *sizes)
        self.batches = Batches(samples, config.batch, rank, world_size, config.workers, device.type == "cuda", SEED)
        buffers = {
            name: torch.zeros((config.batch, *shape), dtype=self.batches.dtypes[name], device=device)
            for name, shape in samples.shapes.items()
        }
        self.inputs = DoubleBuffered(buffers, self.batches)
        # Ranks that stop must stop at the same step.
        self.report = ScaledReport(device, self.scaler, config.max_floor_overflows, exact=world_size > 1)

    def reset(self):
        # Weights are the same on all ranks, draws each rank's own.
        torch.manual_seed(SEED + self.rank)
        initialise(self.unet, self.config, SEED)
        self.adam.reset()
        self.scaler.reset()
        self.inputs.reset()
        self.report.reset()

    def close(self):
        self.opened.close()
        self.batches.close()
        return {"num_skipped_steps": int(self.scaler.num_skipped)}

    # -- one step, part by part; all but begin_step and end_step can be captured

    def begin_step(self, index: int):
        """Copy the next batch into the static inputs and write this step's learning rate to its device number."""
        with section("data"):
            self.inputs.load()
            self.adam.lr.fill_(learning_rate(self.config, index))

    def noisy_latents(self, moments):
        """(x_t, t, v): latents sampled from the moments, noised to random timesteps, and the target of the UNet."""
        mean, log_variance = moments.float().chunk(2, dim=1)
        std = torch.exp(0.5 * log_variance.clamp(-30.0, 20.0))
        z = LATENT_SCALE * (mean + std * torch.randn_like(mean))
        t = torch.randint(0, TIMESTEPS, (len(z),), device=self.device)
        noise = torch.randn_like(z)
        root_alpha, root_beta = self.root_alpha[t].view(-1, 1, 1, 1), self.root_beta[t].view(-1, 1, 1, 1)
        return root_alpha * z + root_beta * noise, t, root_alpha * noise - root_beta * z

    @torch.no_grad()
    def reduce(self, grads):
        """The mean of the gradients over all ranks."""
        if not self.buckets:
            return grads
        torch._foreach_copy_(self.reduced, grads)
        self.buckets.all_reduce_mean()
        return self.reduced

    @torch.no_grad()
    def update(self, loss, grads):
        """Overflow check, AdamW, loss scale, report."""
        self.adam.step(grads)
        self.report.fill(loss, self.adam.grad_norm)

    def end_step(self, index: int):
        """Start the report's copy to the host. Raises FloatingPointError where an earlier step's ends the run."""
        with section("report"):
            self.report.end_step(index)

    def named_state(self):
        yield from zip(self.names, self.parameters, strict=True)
        yield from self.adam.named_state()
        yield from self.scaler.named_state()


def schedule(device):
    """(sqrt(abar), sqrt(1 - abar)), FP32 [1000]: betas evenly spaced in their roots from 0.00085 to 0.012."""
    betas = torch.linspace(0.00085**0.5, 0.012**0.5, TIMESTEPS, dtype=torch.float64) ** 2
    alphas = torch.cumprod(1.0 - betas, dim=0)
    return alphas.sqrt().float().to(device), (1.0 - alphas).sqrt().float().to(device)
