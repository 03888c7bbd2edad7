"""gpt3/kernels against plain torch: on a GPU, and through Triton's interpreter without one."""

import importlib.util

import pytest
import torch

from tests.helpers.triton_interpreter import DEVICE, on_device, run_interpreted

pytest.importorskip("triton", reason="triton is not installed: pip install triton==3.7.1")


def expected(total, tokens, grad):
    return total.double().index_add(0, tokens.flatten(), grad.flatten(0, -2).double())


# The interpreter has no bfloat16 products.
@on_device
@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    ("rows", "hidden", "shape"),
    [(200, 160, (150, 1)), (64, 128, (64, 2)), (300, 40, (7, 3)), (700, 24, (2100, 1))],
    ids=str,
)
def test_rows_that_tokens_name_get_their_gradients_and_no_others(rows, hidden, shape, dtype):
    from gpt3.kernels.embedding_gradient import add_rows_

    torch.manual_seed(0)
    total = torch.randn(rows, hidden)
    # Few rows, some of them often, and the first and the last one.
    tokens = torch.randint(0, rows, shape) // 3 * 3 % rows
    tokens[0], tokens[-1] = 0, rows - 1
    grad = torch.randn(*shape, hidden).to(dtype)
    device, again = total.to(DEVICE), total.to(DEVICE, copy=True)
    device = device.clone()
    add_rows_(device, tokens.to(DEVICE), grad.to(DEVICE))
    add_rows_(again, tokens.to(DEVICE), grad.to(DEVICE))
    assert torch.equal(device, again)
    result = device.cpu()
    torch.testing.assert_close(result.double(), expected(total, tokens, grad), rtol=1e-5, atol=1e-5)
    others = torch.ones(rows, dtype=torch.bool).index_fill(0, tokens.flatten(), False)
    assert others.any() or rows == 64
    assert torch.equal(result[others], total[others])


@on_device
@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("shape", [(5, 2, 40), (3, 1, 4096)], ids=str)
def test_bias_and_residual_are_added_with_one_rounding(shape, dtype):
    from gpt3.kernels.bias_add import AddBias

    torch.manual_seed(0)
    x, residual, grad = (torch.randn(shape).to(dtype) for _ in range(3))
    bias = torch.randn(shape[-1]).to(dtype)
    ours = [tensor.to(DEVICE).requires_grad_() for tensor in (x, bias, residual)]
    out = AddBias.apply(*ours)
    out.backward(grad.to(DEVICE))
    assert torch.equal(out.cpu(), (residual.float() + (x.float() + bias.float())).to(dtype))
    assert torch.equal(ours[0].grad.cpu(), grad) and torch.equal(ours[2].grad.cpu(), grad)
    exact = grad.double().flatten(0, 1).sum(0)
    torch.testing.assert_close(ours[1].grad.cpu().double(), exact, rtol=1e-2, atol=1e-2)


@pytest.mark.gpu
@pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is None, reason="needs Transformer Engine")
def test_layers_add_as_transformer_engine_does():
    from gpt3.config import PRESETS
    from gpt3.model import te_layer

    device, shape = torch.device("cuda"), (PRESETS["tiny"].sequence, 2, PRESETS["tiny"].hidden)
    layer = te_layer(PRESETS["tiny"], torch.bfloat16, device)
    results = []
    for add in (layer._bias_dropout_add, type(layer)._bias_dropout_add.__get__(layer)):
        torch.manual_seed(0)
        given = [torch.randn(size, device=device).bfloat16().requires_grad_() for size in (shape, shape[-1:], shape)]
        out = add(*given)
        out.float().square().sum().backward()
        results.append([out, *[tensor.grad for tensor in given]])
    (out, *grads), (theirs, *their_grads) = results
    assert torch.equal(out, theirs)
    for ours, other in zip(grads, their_grads, strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-2, atol=1e-2)


@pytest.mark.gpu
def test_the_tied_rows_gradients_are_those_of_plain_torch():
    """Embedding and head together, on the GPU's own ways and on the CPU's."""
    from gpt3.config import PRESETS
    from gpt3.model import Embedding, attach_main_grads, initialise

    config = PRESETS["tiny"]
    torch.manual_seed(1)
    tokens = torch.randint(0, config.vocab, (config.sequence, 2))
    plain = Embedding(config, torch.bfloat16, "cpu")
    initialise(plain.named_parameters(), 0)
    ours = Embedding(config, torch.bfloat16, "cuda")
    ours.load_state_dict(plain.state_dict())
    for embedding in plain, ours:
        attach_main_grads([embedding])
        own = tokens.to(embedding.tokens.device)
        for _ in range(2):
            embedding.loss(embedding(own), own.roll(1, 0)).backward()
    ours, plain = ours.tokens.main_grad.cpu(), plain.tokens.main_grad
    assert (ours - plain).norm() < 0.02 * plain.norm()


@pytest.mark.slow
def test_in_the_interpreter():
    run_interpreted(__file__)
