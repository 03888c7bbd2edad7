"""The UNet of Stable Diffusion v2 as MLPerf trains it: 865,910,724 parameters.

Layout, norms and initialisation follow the benchmark (NeMo 25.04, openaimodel.py and attention.py): residual blocks
with 16-group norms, transformers with linear projections and heads of 64 channels, text through cross-attention.
Everything works on channels_last: convolutions by cuDNN, group norms and GEGLU by the kernels of
stable_diffusion/kernels.py, or by torch's own.

Matrices of the benchmark that read the same input are one here, by count some 300 kernels less: q, k and v of each
self-attention; keys and values of the text in all cross-attentions; the time embedding in all residual blocks. So there
are 560 tensors in place of 686.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

from graph_worth import mark
from stable_diffusion import kernels
from stable_diffusion.config import TIMESTEPS, Config, plan

LAST_LAYER_STD = 0.01


class UNet(nn.Module):
    """Predicts v from (x [B, 4, H, W], t [B] of int64, context [B, tokens, context_dim]); result as x, in FP32.

    Takes x and context of any floating dtype and computes in the dtype of its weights.
    """

    def __init__(self, config: Config):
        super().__init__()
        emb = 4 * config.channels
        self.register_buffer("sinusoids", sinusoids(config.channels), persistent=False)
        self.time_embed = nn.Sequential(nn.Linear(config.channels, emb), nn.SiLU(), nn.Linear(emb, emb))
        self.plan = plan(config)
        self.blocks = nn.ModuleList(_block(block) for block in self.plan)
        self.block_embed = BlockEmbedding(emb, [step.out_channels for step in self.plan if step.kind == "res"])
        self.transformers = nn.ModuleDict(
            {
                str(index): Transformer(block.out_channels, config.head_dim)
                for index, block in enumerate(self.plan)
                if block.attention
            }
        )
        self.widths = [2 * step.out_channels for step in self.plan if step.attention]
        self.to_kv = nn.Linear(config.context_dim, sum(self.widths), bias=False)

    def use_kernels(self, in_triton: bool) -> None:
        """Set group norm and GEGLU on a GPU: this suite's kernels, as they are at first, or torch's own."""
        for module in self.modules():
            if isinstance(module, GroupNorm | Transformer):
                module.in_triton = in_triton

    def forward(self, x, t, context):
        dtype = self.time_embed[0].weight.dtype
        embeddings = iter(self.block_embed(F.silu(self.time_embed(self.sinusoids[t].to(dtype)))))
        keys_and_values = iter(self.to_kv(context.to(dtype)).split(self.widths, dim=-1))
        h, skips = x.to(dtype, memory_format=torch.channels_last), []
        for index, (step, block) in enumerate(zip(self.plan, self.blocks, strict=True)):
            if step.pops:
                h = torch.cat((h, skips.pop()), dim=1)
            h = block(h, next(embeddings)) if step.kind == "res" else block(h)
            if step.attention:
                h = self.transformers[str(index)](h, next(keys_and_values))
            if step.pushes:
                skips.append(h)
            if not torch.compiler.is_compiling():
                mark(h)
        return h.float()


def sinusoids(channels, num_timesteps=TIMESTEPS, max_period=10000):
    """Timestep embeddings [num_timesteps, channels], FP32: cosines, then sines."""
    frequencies = torch.exp(-math.log(max_period) * torch.arange(channels // 2, dtype=torch.float32) / (channels // 2))
    angles = torch.arange(num_timesteps, dtype=torch.float32)[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=1)


def _block(block):
    i, o = block.in_channels, block.out_channels
    if block.kind == "res":
        return ResBlock(i, o)
    if block.kind == "down":
        return nn.Conv2d(i, o, 3, stride=2, padding=1)
    if block.kind == "up":
        return nn.Sequential(nn.Upsample(scale_factor=2, mode="nearest"), nn.Conv2d(i, o, 3, padding=1))
    if block.kind == "conv_out":
        return nn.Sequential(GroupNorm(16, i, silu=True), nn.Conv2d(i, o, 3, padding=1))
    return nn.Conv2d(i, o, 3, padding=1)


class GroupNorm(nn.GroupNorm):
    """Group norm of [N, C, H, W] in channels_last, with SiLU in the same kernel where asked."""

    in_triton = True

    def __init__(self, groups, channels, eps=1e-5, silu=False):
        super().__init__(groups, channels, eps=eps)
        self.silu = silu

    def forward(self, x):
        return kernels.group_norm(x, self.num_groups, self.weight, self.bias, self.eps, self.silu, self.in_triton)


class BlockEmbedding(nn.Module):
    """The terms that residual blocks add behind their first convolutions, a list of [B, channels, 1, 1].

    Each is a projection of the time embedding [B, emb] with its bias, plus the bias of the block's convolution.
    """

    def __init__(self, emb, channels):
        super().__init__()
        self.channels = channels
        self.proj = nn.Linear(emb, sum(channels))
        self.conv_bias = nn.Parameter(torch.zeros(sum(channels)))

    def forward(self, emb):
        both = F.linear(emb, self.proj.weight, self.proj.bias + self.conv_bias)
        return both[:, :, None, None].split(self.channels, dim=1)


class ResBlock(nn.Module):
    """norm, SiLU, conv, + BlockEmbedding's term, norm, SiLU, conv, + input. Groups are MLPerf's 16, 32 elsewhere."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.norm1 = GroupNorm(16, in_channels, silu=True)
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False)
        self.norm2 = GroupNorm(16, out_channels, silu=True)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1)
        self.skip = nn.Conv2d(in_channels, out_channels, 1) if in_channels != out_channels else nn.Identity()

    def forward(self, x, emb):
        # Biases are added where something else is added anyway: one pass forward and one sum backward less for each.
        h = self.conv1(self.norm1(x)) + emb
        h, bias = _without_bias(self.conv2, self.norm2(h)), self.conv2.bias
        if isinstance(self.skip, nn.Conv2d):
            x, bias = _without_bias(self.skip, x), bias + self.skip.bias
        return x + (h + bias[:, None, None])


def _without_bias(conv, x):
    return F.conv2d(x, conv.weight, None, conv.stride, conv.padding)


class Transformer(nn.Module):
    """Self-attention, cross-attention to the text and a GEGLU feed-forward over the picture's tokens.

    keys_and_values: of the text, [B, tokens, 2 * channels].
    """

    in_triton = True

    def __init__(self, channels, head_dim):
        super().__init__()
        self.head_dim = head_dim
        self.norm = GroupNorm(32, channels, eps=1e-6)
        self.proj_in = nn.Linear(channels, channels)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(channels) for _ in range(3))
        self.to_qkv = nn.Linear(channels, 3 * channels, bias=False)
        self.attention_out = nn.Linear(channels, channels)
        self.to_q = nn.Linear(channels, channels, bias=False)
        self.cross_attention_out = nn.Linear(channels, channels)
        self.ff_in = nn.Linear(channels, 8 * channels)
        self.ff_out = nn.Linear(4 * channels, channels)
        self.proj_out = nn.Linear(channels, channels)

    def forward(self, x, keys_and_values):
        b, c, height, width = x.shape
        h = self.norm(x).permute(0, 2, 3, 1).reshape(b, height * width, c)
        h = self.proj_in(h)
        h = h + self.attention_out(_attend(*_heads(self.to_qkv(self.norm1(h)), 3, self.head_dim)))
        q = self.to_q(self.norm2(h)).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        h = h + self.cross_attention_out(_attend(q, *_heads(keys_and_values, 2, self.head_dim)))
        y = F.linear(self.norm3(h), self.ff_in.weight)
        h = h + self.ff_out(kernels.geglu(y, self.ff_in.bias, self.in_triton))
        return x + self.proj_out(h).view(b, height, width, c).permute(0, 3, 1, 2)


def _heads(x, count, head_dim):
    """`count` views [B, heads, n, head_dim] of x [B, n, count * heads * head_dim]; one copy joins their gradients."""
    return [part.transpose(1, 2) for part in x.unflatten(-1, (count, -1, head_dim)).unbind(2)]


def _attend(q, k, v):
    """Softmax attention without a mask or dropout, [B, n, heads * head_dim]."""
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


@torch.no_grad()
def initialise(unet: UNet, config: Config, seed: int) -> None:
    """In place and seeded, on the weights' device: PyTorch's default ranges, norms one and zero.

    The benchmark starts the last layer of every residual branch at zero (`zero_init`). Otherwise it gets small normal
    numbers, as it has once training has begun: zero activations draw less power and so run faster than real ones.
    """
    generator = torch.Generator(unet.time_embed[0].weight.device).manual_seed(seed)
    blocks = [block for block in unet.blocks if isinstance(block, ResBlock)]
    last = {unet.blocks[-1][-1], *(block.conv2 for block in blocks)}
    last |= {transformer.proj_out for transformer in unet.transformers.values()}
    for block, bias in zip(blocks, unet.block_embed.conv_bias.split(unet.block_embed.channels), strict=True):
        bound = 1 / math.sqrt(block.conv1.weight[0].numel())
        bias.uniform_(-bound, bound, generator=generator)
    for module in unet.modules():
        if isinstance(module, nn.GroupNorm | nn.LayerNorm):
            module.weight.fill_(1.0)
            module.bias.zero_()
        elif module in last:
            module.weight.normal_(0.0, 0.0 if config.zero_init else LAST_LAYER_STD, generator=generator)
            module.bias.zero_()
        elif isinstance(module, nn.Linear | nn.Conv2d):
            bound = 1 / math.sqrt(module.weight[0].numel())
            for parameter in module.parameters():
                parameter.uniform_(-bound, bound, generator=generator)
