"""stable_diffusion/config: the plan's arithmetic, limits and messages."""

from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from stable_diffusion import config as sd
from stable_diffusion.unet import UNet

BENCH, TINY = sd.PRESETS["bench"], sd.PRESETS["tiny"]


def test_plan():
    blocks = sd.plan(BENCH)
    assert sum(block.kind == "res" for block in blocks) == 22
    assert sum(block.attention for block in blocks) == 16
    assert sum(block.pushes for block in blocks) == sum(block.pops for block in blocks) == 12
    heads = {block.out_channels // BENCH.head_dim for block in blocks if block.attention}
    assert heads == {5, 10, 20}
    sizes = [block.size for block in blocks]
    assert (sizes[0], min(sizes), sizes[-1]) == (64, 8, 64)


@pytest.mark.parametrize("config", [BENCH, TINY], ids=["bench", "tiny"])
def test_parameters_are_those_of_the_model(config):
    with torch.device("meta"):
        unet = UNet(config)
    assert sd.num_parameters(config) == sum(parameter.numel() for parameter in unet.parameters())


@pytest.mark.parametrize("config", [BENCH, TINY, replace(TINY, latent_size=32, context_tokens=5)])
def test_flops_are_three_times_the_counted_forward(config):
    with torch.device("meta"), FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        x = torch.empty(2, 4, config.latent_size, config.latent_size)
        UNet(config)(x, torch.zeros(2, dtype=torch.long), torch.empty(2, config.context_tokens, config.context_dim))
    assert 2 * sd.flops_per_sample(config) == 3 * counter.get_total_flops()


def test_the_benchmark_s_flops():
    # 402.129 GMAC forward: MLPerf Stable Diffusion's UNet, counted by FlopCounterMode.
    assert sd.flops_per_sample(BENCH) == pytest.approx(2412.77e9, rel=1e-5)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"batch": 0}, "--batch 0: takes a number from 1 up"),
        ({"lr": float("nan")}, "--lr nan: takes a number from 0 to 1"),
        ({"loss_scale": float("inf")}, "--loss-scale inf: takes a number from 1 to 4294967296"),
        ({"latent_size": 20}, "--latent-size 20: takes a multiple of 8"),
        ({"channels": 48}, "--channels 48: takes a multiple of 32 and of --head-dim 16"),
        ({"workers": -1}, "--workers -1: takes a number from 0 to 64"),
    ],
)
def test_settings_are_checked(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(TINY, **changes)


def test_learning_rate_warms_up_and_holds():
    config = replace(TINY, lr=1.0, lr_warmup=4)
    assert [sd.learning_rate(config, index) for index in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert sd.learning_rate(replace(config, lr_warmup=0), 0) == 1.0


def test_memory_grows_with_the_batch_and_is_refused_by_name():
    sizes = [sd.predicted_bytes(replace(BENCH, batch=batch)) for batch in (1, 4, 32)]
    assert sizes == sorted(sizes)
    sd.require(BENCH, 2 * sizes[1])
    sd.require(BENCH, None)
    with pytest.raises(ValueError, match=rf"--batch 32 needs .* \({sizes[2] * 3 // 2:,} bytes\), .* lower --batch"):
        sd.require(sd.PRESETS["full"], sizes[1])
