"""moe: the flash kernels with windows, sinks and packed sequences, on a GPU, against plain attention in FP32."""

import pytest
import torch

from graph_worth.measuring import torch_settings
from moe.attention import Sequences, attend

TOKENS, HEADS, KV_HEADS, DIM = 64, 4, 2, 64


def draw(*shape, seed):
    """Numbers that bf16 holds."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def attended(device, dtype, sequences, window, has_sinks):
    """The output and the gradients of queries, keys, values and sinks, FP32 on the host."""
    q, k, v = (draw(TOKENS, heads, DIM, seed=heads + i) for i, heads in enumerate((HEADS, KV_HEADS, KV_HEADS)))
    inputs = [q, k, v, *([draw(HEADS, seed=9)] if has_sinks else [])]
    inputs = [each.to(device, dtype).requires_grad_() for each in inputs]
    bounds = None if sequences.bounds is None else sequences.bounds.to(device)
    out = attend(*inputs[:3], sequences._replace(bounds=bounds), window, inputs[3] if has_sinks else None)
    out.backward(draw(TOKENS, HEADS, DIM, seed=7).to(device, dtype))
    return [each.float().cpu() for each in (out.detach(), *(each.grad for each in inputs))]


SEQUENCES = {
    "two": Sequences(TOKENS // 2),
    # Documents of 5, 35 and 24 tokens, and two that are missing.
    "packed": Sequences(TOKENS, torch.tensor([0, 5, 40, 64, 64, 64], dtype=torch.int32)),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", SEQUENCES)
@pytest.mark.parametrize("window", [0, 8])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_flash_kernels_give_plain_attention(name, window, has_sinks):
    case = (SEQUENCES[name], window, has_sinks)
    ours, plain = attended("cuda", torch.bfloat16, *case), attended("cpu", torch.float32, *case)
    for own, expected in zip(ours, plain, strict=True):
        torch.testing.assert_close(own, expected, rtol=3e-2, atol=5e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("window, has_sinks", [(128, True), (128, False), (0, True)])
def test_attention_gives_the_same_bits_five_times(window, has_sinks):
    """At GPT-OSS's widths, eager and by replays, forward and backward, with deterministic kernels."""
    shapes = ((4096, 64, 64), (4096, 8, 64), (4096, 8, 64), *([(64,)] if has_sinks else []))
    inputs = [draw(*shape, seed=seed).cuda().requires_grad_() for seed, shape in enumerate(shapes)]
    grad = draw(*shapes[0], seed=7).cuda()

    def run():
        out = attend(*inputs[:3], Sequences(4096), window, inputs[3] if has_sinks else None)
        return [out.detach(), *torch.autograd.grad(out, inputs, grad)]

    with torch.cuda.stream(torch.cuda.Stream()), torch_settings.deterministic_kernels():
        first, graph = run(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            replayed = run()
        for _ in range(5):
            assert all(map(torch.equal, run(), first))
            graph.replay()
            assert all(map(torch.equal, replayed, first))


@pytest.mark.parametrize("name", SEQUENCES)
@pytest.mark.parametrize("window", [0, 8])
def test_a_sink_is_a_key_without_a_value(name, window):
    """By hand, token by token."""
    sequences, sinks = SEQUENCES[name], draw(HEADS, seed=9).float()
    q, k, v = (draw(TOKENS, heads, DIM, seed=heads + i).float() for i, heads in enumerate((HEADS, KV_HEADS, KV_HEADS)))
    out = attend(q, k, v, sequences, window, sinks)
    starts = [0, TOKENS // 2] if sequences.bounds is None else sequences.bounds.tolist()
    for token in range(TOKENS):
        first = max(start for start in starts if start <= token)
        first = max(first, token - window + 1) if window else first
        for head in range(HEADS):
            of_head = head * KV_HEADS // HEADS
            scores = k[first : token + 1, of_head] @ q[token, head] * DIM**-0.5
            weights = torch.cat((scores, sinks[head : head + 1])).softmax(0)[:-1]
            torch.testing.assert_close(out[token, head], weights @ v[first : token + 1, of_head], rtol=1e-4, atol=1e-5)
