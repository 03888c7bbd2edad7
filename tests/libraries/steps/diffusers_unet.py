"""The training loop of diffusers' tutorial: noise at a random time, and a UNet that predicts it."""

import torch
from diffusers import DDPMScheduler, UNet2DModel


def build(device):
    torch.manual_seed(0)
    blocks = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
    model = UNet2DModel(8, block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4, **blocks).to(device)
    noise_scheduler = DDPMScheduler(num_train_timesteps=1000)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, capturable=device.type == "cuda")
    batches = [torch.randn(4, 3, 8, 8) for _ in range(4)]

    def step(batch):
        clean_images = batch.to(device)
        noise = torch.randn(clean_images.shape, device=clean_images.device)
        timesteps = torch.randint(0, noise_scheduler.config.num_train_timesteps, (4,), device=clean_images.device)
        noisy_images = noise_scheduler.add_noise(clean_images, noise, timesteps)
        noise_pred = model(noisy_images, timesteps, return_dict=False)[0]
        loss = torch.nn.functional.mse_loss(noise_pred, noise)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step, batches, [model, optimizer]
