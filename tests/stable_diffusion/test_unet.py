"""stable_diffusion/unet: the benchmark's layout, its initialisation, and what its parts compute."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from graph_worth.compiled import MOST_GRAPHS
from stable_diffusion.config import PRESETS
from stable_diffusion.other_variants import repeated_blocks
from stable_diffusion.unet import ResBlock, Transformer, UNet, initialise, sinusoids

TINY = replace(PRESETS["tiny"], multipliers="1,2,4,4", res_blocks=2)


@pytest.fixture(scope="module")
def full():
    with torch.device("meta"):
        return UNet(PRESETS["bench"])


def test_parameters_and_tensors(full):
    assert sum(parameter.numel() for parameter in full.parameters()) == 865_910_724
    # 686 in the benchmark. One for 3 in 16 self-attentions, for 32 of the text, for 3 x 22 of the time embedding: 3.
    assert len(list(full.parameters())) == 686 - 2 * 16 - 31 - 63


def test_norms_and_heads(full):
    for module in full.modules():
        if isinstance(module, ResBlock):
            assert (module.norm1.num_groups, module.norm2.num_groups) == (16, 16)
        if isinstance(module, Transformer):
            assert (module.norm.num_groups, module.norm.eps) == (32, 1e-6)
    transformers = full.transformers.values()
    heads = {module.to_q.out_features // module.head_dim for module in transformers}
    assert heads == {5, 10, 20} and {module.head_dim for module in transformers} == {64}
    parts = [part for module in transformers for part in (module.to_qkv, module.to_q)] + [full.to_kv]
    assert all(part.bias is None for part in parts)


def test_every_parameter_gets_a_gradient_and_every_input_matters():
    unet = UNet(TINY)
    initialise(unet, TINY, 0)
    x, context = torch.randn(2, 4, 16, 16), torch.randn(2, 8, 64)
    v = unet(x, torch.tensor([3, 700]), context)
    assert v.shape == x.shape and v.dtype == torch.float32
    grads = torch.autograd.grad(v.square().sum(), list(unet.parameters()))
    assert all(grad.abs().sum() > 0 for grad in grads)
    assert not torch.equal(v, unet(x, torch.tensor([4, 700]), context))
    assert not torch.equal(v, unet(x, torch.tensor([3, 700]), context + 1))


def test_sinusoids_are_cosines_then_sines():
    table = sinusoids(8)
    assert table.shape == (1000, 8)
    assert table[0].tolist() == [1, 1, 1, 1, 0, 0, 0, 0]
    angle = 500 * 10000 ** (-1 / 4)
    assert table[500, 1].item() == pytest.approx(math.cos(angle), abs=2e-5)
    assert table[500, 5].item() == pytest.approx(math.sin(angle), abs=2e-5)


def softmax_attention(q, k, v):
    heads = []
    for part in (slice(0, 16), slice(16, 32)):
        weights = torch.softmax(q[..., part] @ k[..., part].mT / 4, dim=-1)
        heads.append(weights @ v[..., part])
    return torch.cat(heads, -1)


def test_a_transformer_attends_to_itself_and_to_the_text_by_softmax_attention():
    torch.manual_seed(0)
    x, keys, values = torch.randn(2, 32, 3, 5), torch.randn(2, 7, 32), torch.randn(2, 7, 32)
    part = Transformer(32, 16)
    with torch.no_grad():
        for norm in (part.norm, part.norm1, part.norm2, part.norm3):
            norm.weight.normal_()
            norm.bias.normal_()
    h = part.proj_in(part.norm(x).flatten(2).mT)
    y = part.norm1(h)
    q, k, v = (F.linear(y, weight) for weight in part.to_qkv.weight.chunk(3))
    h = h + part.attention_out(softmax_attention(q, k, v))
    h = h + part.cross_attention_out(softmax_attention(part.to_q(part.norm2(h)), keys, values))
    value, gate = part.ff_in(part.norm3(h)).chunk(2, -1)
    h = h + part.ff_out(value * F.gelu(gate))
    expected = x + part.proj_out(h).mT.reshape(x.shape)
    torch.testing.assert_close(part(x, torch.cat((keys, values), -1)), expected)


def test_each_block_gets_its_own_part_of_the_time_embedding_and_of_the_text(monkeypatch):
    torch.manual_seed(0)
    unet = UNet(TINY)
    initialise(unet, TINY, 0)
    seen = {ResBlock: [], Transformer: []}
    for kind, calls in seen.items():
        forward = kind.forward
        monkeypatch.setattr(
            kind, "forward", lambda self, x, y, f=forward, calls=calls: calls.append((self, y)) or f(self, x, y)
        )
    t, context = torch.tensor([3, 700]), torch.randn(2, 8, 64)
    unet(torch.randn(2, 4, 16, 16), t, context)
    emb, embed = F.silu(unet.time_embed(unet.sinusoids[t])), unet.block_embed
    assert [block for block, _ in seen[ResBlock]] == [block for block in unet.blocks if isinstance(block, ResBlock)]
    start = 0
    for block, given in seen[ResBlock]:
        own = slice(start, start := start + block.conv1.out_channels)
        expected = F.linear(emb, embed.proj.weight[own], embed.proj.bias[own]) + embed.conv_bias[own]
        torch.testing.assert_close(given, expected[:, :, None, None])
    assert start == len(embed.conv_bias)
    start = 0
    for transformer, given in seen[Transformer]:
        own = slice(start, start := start + 2 * transformer.proj_in.in_features)
        torch.testing.assert_close(given, F.linear(context, unet.to_kv.weight[own]))
    assert start == unet.to_kv.out_features and len(seen[Transformer]) == 16


def test_start_of_the_benchmark_and_of_the_presets():
    unet = UNet(TINY)
    initialise(unet, replace(TINY, zero_init=True), 0)
    x, t, context = torch.randn(1, 4, 16, 16), torch.tensor([5]), torch.randn(1, 8, 64)
    assert unet(x, t, context).abs().sum() == 0
    zero = {name for name, p in unet.named_parameters() if p.ndim > 1 and not p.abs().sum()}
    # 22 residual blocks, 16 transformers, the output convolution.
    assert len(zero) == 39
    initialise(unet, TINY, 0)
    assert unet(x, t, context).abs().sum() > 0


def test_initialise_is_seeded_and_in_place():
    unet = UNet(TINY)
    initialise(unet, TINY, 0)
    addresses = [parameter.data_ptr() for parameter in unet.parameters()]
    first = [parameter.clone() for parameter in unet.parameters()]
    with torch.no_grad():
        for parameter in unet.parameters():
            parameter.add_(1.0)
    torch.rand(3)
    initialise(unet, TINY, 0)
    assert [parameter.data_ptr() for parameter in unet.parameters()] == addresses
    assert all(map(torch.equal, first, unet.parameters()))
    initialise(unet, TINY, 1)
    assert not torch.equal(first[0], next(unet.parameters()))
    norm = next(module for module in unet.modules() if isinstance(module, nn.GroupNorm))
    assert norm.weight.eq(1).all() and norm.bias.eq(0).all()
    # The bias of a block's first convolution has that convolution's range.
    blocks = [block for block in unet.blocks if isinstance(block, ResBlock)]
    for block, bias in zip(blocks, unet.block_embed.conv_bias.split(unet.block_embed.channels), strict=True):
        bound = 1 / math.sqrt(9 * block.conv1.in_channels)
        assert 0.7 * bound < bias.abs().max() <= bound


@pytest.mark.slow
def test_the_compiler_sees_each_kind_of_block_once_and_the_same_numbers():
    """fullgraph=True fails at a graph break; the backend runs what was traced, forward and backward."""
    torch._dynamo.reset()
    unet = UNet(TINY).to(memory_format=torch.channels_last)
    initialise(unet, TINY, 0)
    blocks, kinds, compiled = repeated_blocks(unet), set(), []

    def backend(graph, inputs):
        compiled.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    for block in blocks:
        block.register_forward_pre_hook(
            lambda block, args: kinds.add(
                (*(arg.shape for arg in args), *(parameter.shape for parameter in block.parameters()))
            )
        )
    arguments = torch.randn(2, 4, 16, 16), torch.tensor([5, 900]), torch.randn(2, 8, 64)
    results = [unet(*arguments)]
    with torch._dynamo.config.patch(recompile_limit=MOST_GRAPHS):
        for block in blocks:
            block._forward_pre_hooks.clear()
            block.forward = torch.compile(block.forward, backend=backend, dynamic=False, fullgraph=True)
        results.append(unet(*arguments))
        torch.testing.assert_close(*results)
        grads = [torch.autograd.grad(v.square().mean(), list(unet.parameters())) for v in results]
    torch.testing.assert_close(*grads, atol=1e-7, rtol=1e-3)
    assert len(compiled) == len(kinds) < len(blocks) / 2
