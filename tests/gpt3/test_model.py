"""gpt3/model against an implementation of its own: forward, loss, and every gradient in main_grad."""

import math
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from gpt3.config import PRESETS, Config
from gpt3.emulated_fp8 import EmulatedScaling
from gpt3.model import INIT_STD, Embedding, PlainLayer, attach_main_grads, initialise

CONFIG = Config(
    layers=2,
    hidden=24,
    heads=3,
    head_dim=4,
    ffn=20,
    vocab=13,
    sequence=9,
    microbatch=2,
    precision="bf16",
    layer="torch",
)
CPU = torch.device("cpu")


class Model:
    """Layers and embedding as the training state puts them together, all parameters random (norms and biases too)."""

    def __init__(self, config, dtype, seed=0):
        self.layers = [PlainLayer(config, dtype, CPU) for _ in range(config.layers)]
        self.embedding = Embedding(config, dtype, CPU)
        self.modules = [*self.layers, self.embedding]
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for _, parameter in self.named():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)

    def named(self):
        for index, module in enumerate(self.modules):
            for name, parameter in module.named_parameters():
                yield f"{index}.{name}", parameter

    def loss(self, tokens, targets, first=True):
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden, is_first_microbatch=first)
        return self.embedding.loss(hidden, targets)


def batch(config, seed):
    generator = torch.Generator().manual_seed(seed)
    shape = (2, config.sequence, config.microbatch)
    return torch.randint(0, config.vocab, shape, generator=generator).unbind(0)


# --- the reference: from the architecture's description, one head and one sequence at a time


def layernorm1p(x, weight, bias):
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * (1 + weight) + bias


def tanh_gelu(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def reference_layer(p, x, heads, head_dim):
    """x: [s, b, hidden]; p: parameters by PlainLayer's names; q, k, v of a head stand together in the fused weight."""
    outputs = []
    for sequence in x.unbind(1):
        normed = layernorm1p(sequence, p["norm_1.weight"], p["norm_1.bias"])
        mixed = []
        for head in range(heads):
            q, k, v = (
                F.linear(normed, p["qkv.weight"][rows], p["qkv.bias"][rows])
                for part in range(3)
                for rows in [slice((3 * head + part) * head_dim, (3 * head + part + 1) * head_dim)]
            )
            scores = q @ k.T / math.sqrt(head_dim)
            scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -math.inf)
            mixed.append(scores.softmax(-1) @ v)
        sequence = sequence + F.linear(torch.cat(mixed, -1), p["proj.weight"], p["proj.bias"])
        normed = layernorm1p(sequence, p["norm_2.weight"], p["norm_2.bias"])
        widened = tanh_gelu(F.linear(normed, p["fc1.weight"], p["fc1.bias"]))
        outputs.append(sequence + F.linear(widened, p["fc2.weight"], p["fc2.bias"]))
    return torch.stack(outputs, 1)


def reference_loss(p, config, tokens, targets):
    """Mean over all tokens of -log softmax(logits)[target]; p: by Model's names, in float64."""
    last = config.layers
    hidden = p[f"{last}.tokens"][tokens] + p[f"{last}.positions"]
    for index in range(config.layers):
        layer = {name.partition(".")[2]: value for name, value in p.items() if name.startswith(f"{index}.")}
        hidden = reference_layer(layer, hidden, config.heads, config.head_dim)
    normed = layernorm1p(hidden, p[f"{last}.final_norm.weight"], p[f"{last}.final_norm.bias"])
    logits = normed @ p[f"{last}.tokens"].T
    chosen = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return (logits.logsumexp(-1) - chosen).mean()


def copies(named):
    return {name: parameter.detach().double().requires_grad_() for name, parameter in named}


def relative(ours, reference):
    return float((ours.detach().double() - reference.detach()).norm() / reference.detach().norm())


# --- forward


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_layer(dtype, tolerance):
    model = Model(CONFIG, dtype)
    x = torch.randn(9, 2, 24, generator=torch.Generator().manual_seed(1)).to(dtype)
    reference = reference_layer(copies(model.layers[0].named_parameters()), x.double(), 3, 4)
    for first in (True, False):
        assert relative(model.layers[0](x, first), reference) < tolerance


def test_layer_is_causal():
    model = Model(CONFIG, torch.float64)
    x = torch.randn(9, 2, 24, dtype=torch.float64, requires_grad=True)
    model.layers[0](x, True)[4].sum().backward()
    assert (x.grad[5:] == 0).all()
    assert (x.grad[:5].abs().amax(-1) > 0).all()


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-7), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_loss_is_the_mean_cross_entropy(dtype, tolerance):
    model = Model(CONFIG, dtype)
    tokens, targets = batch(CONFIG, 1)
    loss = model.loss(tokens, targets)
    reference = reference_loss(copies(model.named()), CONFIG, tokens, targets)
    assert float(loss.detach()) == pytest.approx(float(reference.detach()), rel=tolerance)
    assert loss.dtype == torch.float32 and loss.ndim == 0


# --- gradients


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-5), (torch.bfloat16, 5e-2)])
def test_main_grad_over_two_microbatches_is_the_gradient_of_the_summed_loss(dtype, tolerance):
    model = Model(CONFIG, dtype)
    attach_main_grads(model.modules)
    batches = [batch(CONFIG, 1), batch(CONFIG, 2)]
    for index, (tokens, targets) in enumerate(batches):
        model.loss(tokens, targets, first=index == 0).backward()

    reference = copies(model.named())
    sum(reference_loss(reference, CONFIG, tokens, targets) for tokens, targets in batches).backward()
    for name, parameter in model.named():
        assert parameter.grad is None, name
        assert parameter.main_grad.dtype == torch.float32
        wanted = reference[name].grad
        assert wanted.norm() > 1e-3, name
        assert relative(parameter.main_grad, wanted) < tolerance, name


def test_tied_rows_get_the_gradients_of_embedding_and_head():
    """Tokens that are looked up but never predicted, and the other way round."""
    model = Model(replace(CONFIG, layers=1), torch.float32)
    attach_main_grads(model.modules)
    tokens, targets = torch.zeros(9, 2, dtype=torch.int64), torch.full((9, 2), 7)
    model.loss(tokens, targets).backward()
    both = model.embedding.tokens.main_grad.clone()
    hidden = model.embedding(tokens).detach().requires_grad_()
    model.embedding.tokens.main_grad.zero_()
    model.embedding.loss(model.layers[0](hidden, True), targets).backward()
    head = model.embedding.tokens.main_grad
    assert (both[1:] == head[1:]).all()
    assert relative(both[0] - head[0], hidden.grad.sum((0, 1)).double()) < 1e-5


def test_overwritten_are_the_weights_of_emulated_linears():
    config = replace(PRESETS["tiny"], layer="torch")
    model = Model(config, torch.bfloat16)
    overwritten = {id(parameter) for parameter in attach_main_grads(model.modules)}
    names = {name for name, parameter in model.named() if id(parameter) in overwritten}
    assert names == {f"{index}.{name}.weight" for index in (0, 1) for name in ("qkv", "proj", "fc1", "fc2")}
    for _, parameter in model.named():
        assert parameter.main_grad.shape == parameter.shape and not parameter.main_grad.any()
    assert attach_main_grads(Model(CONFIG, torch.bfloat16).modules) == []


def test_fp8_overwrites_in_the_first_microbatch_and_adds_in_the_second():
    config = replace(PRESETS["tiny"], layer="torch")
    grads = []
    for poison in (0.0, 1e9):
        model = Model(config, torch.bfloat16)
        EmulatedScaling(model.layers)
        overwritten = attach_main_grads(model.modules)
        for parameter in overwritten:
            parameter.main_grad.fill_(poison)
        per_microbatch = []
        for index in range(2):
            model.loss(*batch(config, index), first=index == 0).backward()
            per_microbatch.append([parameter.main_grad.clone() for parameter in overwritten])
        grads.append(per_microbatch)
    for clean, poisoned in zip(grads[0], grads[1], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(clean, poisoned, strict=True))
    assert all(not torch.equal(a, b) for a, b in zip(*grads[0], strict=True))


# --- initialisation


def test_initial_values_are_seeded_and_in_place():
    model = Model(PRESETS["tiny"], torch.float32)
    addresses = [parameter.data_ptr() for _, parameter in model.named()]
    initialise(model.named(), 5)
    first = [parameter.detach().clone() for _, parameter in model.named()]
    for name, parameter in model.named():
        if parameter.ndim == 1:
            assert not parameter.any(), name
        else:
            assert float(parameter.detach().std()) == pytest.approx(INIT_STD, rel=0.05), name
    initialise(model.named(), 6)
    assert not torch.equal(first[-3], model.embedding.positions)
    initialise(model.named(), 5)
    assert all(torch.equal(a, b) for a, (_, b) in zip(first, model.named(), strict=True))
    assert addresses == [parameter.data_ptr() for _, parameter in model.named()]
