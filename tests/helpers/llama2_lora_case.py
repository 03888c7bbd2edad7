"""A small Llama LoRA for tests: handwritten stacks, and the model in functional PyTorch under autograd."""

import functools
import itertools
import json
import os
from dataclasses import replace
from types import SimpleNamespace

import numpy
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from common.data import token_files
from llama2_lora import plan as plans
from llama2_lora import train
from llama2_lora.config import PRESETS
from llama2_lora.kernels.attention import PlainAttention
from llama2_lora.kernels.scaling import Formats
from llama2_lora.kernels.torch_operators import TorchOperators
from llama2_lora.layers.handwritten import HandwrittenStack
from llama2_lora.weights.adapters import Adapters
from llama2_lora.weights.frozen import FrozenWeights
from tests.helpers.contracts import made
from tests.helpers.followed import difference, follow

CPU = torch.device("cpu")
TINY = PRESETS["tiny"]
GRAPHED = ("graph_layer", "graph_step")


def all_ways(config):
    """All sets of tensors that a layer may keep, everything first, nothing last."""
    names = [name for name, size in plans.items(config).items() if size]
    return [frozenset(way) for count in range(len(names), -1, -1) for way in itertools.combinations(names, count)]


def inputs_of(config, device=CPU, lengths=None, seed=0):
    """A window of random tokens. lengths: of its documents; None: one document."""
    generator, s = torch.Generator().manual_seed(seed), config.sequence
    lengths = lengths or [s]
    bounds = torch.tensor([0, *numpy.cumsum(lengths)], dtype=torch.int32)
    mask = (torch.rand(s, generator=generator) < 0.7).float()
    inputs = {
        "tokens": torch.randint(0, config.vocab, (s,), generator=generator),
        "targets": torch.randint(0, config.vocab, (s,), generator=generator),
        "weights": mask / mask.sum(),
        "positions": torch.cat([torch.arange(length) for length in lengths]),
        "cu_seqlens": bounds,
    }
    return {name: tensor.to(device) for name, tensor in inputs.items()}


def make_stack(config, keeps=None, main=torch.bfloat16, inputs=None, operators=TorchOperators, device=CPU):
    """A stack whose adapters have no zeros. keeps: what each layer keeps; None: everything."""
    formats = Formats.of(config, main)
    adapters = Adapters(config, main, device)
    adapters.values.copy_(torch.randn(adapters.values.shape, generator=torch.Generator().manual_seed(3)) * 0.05)
    weights = FrozenWeights(config, formats, device)
    inputs = inputs or inputs_of(config, device)
    keeps = keeps or [all_ways(config)[0]] * config.layers
    return HandwrittenStack(config, formats, weights, adapters, inputs, keeps, operators, PlainAttention)


def run_step(stack):
    """Losses and gradients of one step: (loss, flat gradients), copies."""
    train.forward_and_backward(SimpleNamespace(stack=stack, kind="handwritten", config=stack.config))
    stack.update_scales()
    return stack.loss.clone(), stack.adapters.grads.clone()


def kept(count, layer, adapter, step, dropout):
    """The dropout mask of `count` positions, in NumPy: murmur3's finaliser over position and key."""
    with numpy.errstate(over="ignore"):
        key = numpy.uint32(((2 * layer + adapter + 1) * 0x9E3779B1) & 0x7FFFFFFF)
        h = numpy.arange(count, dtype=numpy.uint32) * numpy.uint32(0x9E3779B1) ^ (numpy.uint32(step) ^ key)
        h = (h ^ (h >> numpy.uint32(16))) * numpy.uint32(0x85EBCA6B)
        h = (h ^ (h >> numpy.uint32(13))) * numpy.uint32(0xC2B2AE35)
        h ^= h >> numpy.uint32(16)
        return (h >> numpy.uint32(8)) >= numpy.uint32(int(dropout * 2**24))


def autograd_step(stack, step=1):
    """(loss, flat gradients) of the stack's weights and inputs by functional PyTorch, in the weights' dtype."""
    c, w, inputs = stack.config, stack.weights, stack.inputs
    flat = stack.adapters.values.clone().requires_grad_()
    adapters = stack.adapters.views(flat)
    s, positions = c.sequence, inputs["positions"]
    angle = positions.double()[:, None] / c.rope_theta ** (torch.arange(0, c.head_dim, 2).double() / c.head_dim)
    cos, sin = (t.repeat(1, 2)[:, None].to(flat.dtype) for t in (angle.cos(), angle.sin()))
    document = torch.cumsum(positions == 0, 0)
    visible = (document[:, None] == document) & torch.ones(s, s, dtype=torch.bool).tril()

    def turned(x):
        low, high = x.chunk(2, -1)
        return x * cos + torch.cat((-high, low), -1) * sin

    def adapted(x, layer, name, which):
        mask = torch.from_numpy(kept(x.numel(), layer, which, step, c.dropout)).view(x.shape)
        x = torch.where(mask, x / (1 - c.dropout), 0.0)
        return x @ adapters[layer][f"{name}.a"].t() @ adapters[layer][f"{name}.b"].t() * (c.alpha / c.rank)

    def norm(x, gain):
        return F.rms_norm(x, (c.hidden,), gain, c.norm_eps)

    x = w.embedding[inputs["tokens"]]
    for layer in range(c.layers):
        weight = {name: matrix.value.to(flat.dtype) * matrix.inverse for name, matrix in w.layers[layer].items()}
        n = norm(x, w.norms[layer][0])
        qkv = (n @ weight["qkv"].t() + adapted(n, layer, "qkv", 0)).view(s, -1, c.head_dim)
        q, k, v = qkv.split([c.heads, c.kv_heads, c.kv_heads], 1)
        q, k, v = (t.transpose(0, 1) for t in (turned(q), turned(k), v))
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=True).transpose(0, 1).reshape(s, -1)
        x = x + o @ weight["proj"].t() + adapted(o, layer, "proj", 1)
        gate, up = (norm(x, w.norms[layer][1]) @ weight["fc1"].t()).chunk(2, 1)
        x = x + (F.silu(gate) * up) @ weight["fc2"].t()
    losses = F.cross_entropy(norm(x, w.final_norm) @ w.head.t(), inputs["targets"], reduction="none")
    loss = (losses * inputs["weights"]).sum()
    (grads,) = torch.autograd.grad(loss, flat)
    return loss.detach(), grads


@functools.cache
def _start_of_corpus():
    corpus = token_files.python_corpus()
    return SimpleNamespace(tokens=corpus.tokens[:200_000], num_tokens=200_000, name=corpus.name)


def shorten_corpus(patch):
    """Train on a short text: to cut all of the standard library into windows takes longer than most tests."""
    start = _start_of_corpus()
    patch.setattr(token_files, "python_corpus", lambda: start)


def with_fields(**fields):
    return replace(TINY, **fields)


# --- whole steps


def follow_eager(state, count):
    return follow(state, lambda index: train.eager_step(state, index), count)


def assert_equal(ours, eager, state):
    assert difference(ours, eager, state) == ""


def losses_of_graphs(state, count):
    """Losses of eager steps on layers that keep in three ways, which every graphed variant repeats bit for bit."""
    assert len(set(state.plan.layers)) == 3
    eager = follow_eager(state, count)
    for name in GRAPHED:
        variant = made("llama2_lora", name, state)
        before = variant.capture.num_replays
        assert_equal(follow(state, variant.step, count), eager, state)
        assert variant.capture.num_replays - before == sum(map(variant.replays_of, range(count)))
        variant.close()
    return eager[0]


def own_rank():
    """(rank, number of ranks) of this process."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


# --- checkpoints


def described(config, **others):
    """config.json as transformers 4 wrote it for Llama 2."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": config.hidden,
        "intermediate_size": config.ffn,
        "num_attention_heads": config.heads,
        "num_hidden_layers": config.layers,
        "num_key_value_heads": config.kv_heads,
        "rms_norm_eps": config.norm_eps,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "vocab_size": config.vocab,
        **others,
    }


def weights(config, dtype=torch.bfloat16):
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    layer = {
        "self_attn.q_proj": (q, config.hidden),
        "self_attn.k_proj": (kv, config.hidden),
        "self_attn.v_proj": (kv, config.hidden),
        "self_attn.o_proj": (config.hidden, q),
        "mlp.gate_proj": (config.ffn, config.hidden),
        "mlp.up_proj": (config.ffn, config.hidden),
        "mlp.down_proj": (config.hidden, config.ffn),
        "input_layernorm": (config.hidden,),
        "post_attention_layernorm": (config.hidden,),
    }
    shapes = {f"model.layers.{i}.{name}.weight": shape for i in range(config.layers) for name, shape in layer.items()}
    shapes["model.embed_tokens.weight"] = shapes["lm_head.weight"] = (config.vocab, config.hidden)
    shapes["model.norm.weight"] = (config.hidden,)
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def write_checkpoint(folder, config, tensors=None, shards=2, **others):
    """A folder as save_pretrained leaves it: one file, or shards with an index."""
    folder.mkdir(exist_ok=True)
    tensors = weights(config) if tensors is None else tensors
    (folder / "config.json").write_text(json.dumps(described(config, **others)))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return folder
    names, weight_map = list(tensors), {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[shard::shards]}
        save_file(part, folder / file, {"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder
