"""A layer in plain PyTorch under autograd, bf16, with the frozen weights and adapters of handwritten layers.

It draws dropout from torch's generator. torch.compile can see all of it.
"""

import torch
import torch.nn.functional as F
from torch import nn

from llama2_lora.config import Config
from llama2_lora.kernels.torch_operators import rope_angles


class Adapter(nn.Module):
    """alpha / rank * dropout(x) a^T b^T; a and b are parameters in the adapters' flat buffer, grads in theirs.

    name: "qkv" or "proj".
    """

    def __init__(self, config: Config, adapters, layer: int, name: str):
        super().__init__()
        self.dropout, self.ratio = config.dropout, config.alpha / config.rank
        values, grads = adapters.layers[layer], adapters.layer_grads[layer]
        self.a, self.b = nn.Parameter(values[f"{name}.a"]), nn.Parameter(values[f"{name}.b"])
        self.a.grad, self.b.grad = grads[f"{name}.a"], grads[f"{name}.b"]

    def forward(self, x):
        if self.dropout and self.training:
            # F.dropout as a GPU and the compiler run it; on the CPU eager's own rounds otherwise in bf16.
            x, _ = torch.native_dropout(x, self.dropout, True)
        return F.linear(F.linear(x, self.a), self.b) * self.ratio


class PlainLayer(nn.Module):
    """[s, hidden] -> [s, hidden]. inputs: name -> static tensor; the layer reads positions, int64 [s].

    tables: cosines and sines of RoPE, FP32 [s, head_dim / 2]. places: int64 [s], of the tokens in the window.
    """

    def __init__(self, config: Config, layer: int, weights, adapters, inputs, tables, places):
        super().__init__()
        self.config, self.norms, self.inputs = config, weights.norms[layer], inputs
        self.tables, self.places = tables, places
        self.matrices = {name: matrix.value for name, matrix in weights.layers[layer].items()}
        self.qkv_adapter, self.proj_adapter = (Adapter(config, adapters, layer, name) for name in ("qkv", "proj"))

    def forward(self, x):
        c = self.config
        normed = self._norm(x, self.norms[0])
        qkv = (F.linear(normed, self.matrices["qkv"]) + self.qkv_adapter(normed)).view(c.tokens, -1, c.head_dim)
        q, k, v = qkv.split([c.heads, c.kv_heads, c.kv_heads], 1)
        cos, sin = (table[self.inputs["positions"]][:, None] for table in self.tables)
        out = self._attention(_turned(q, cos, sin), _turned(k, cos, sin), v)
        x = x + (F.linear(out, self.matrices["proj"]) + self.proj_adapter(out))
        gate, up = F.linear(self._norm(x, self.norms[1]), self.matrices["fc1"]).chunk(2, 1)
        return x + F.linear(F.silu(gate) * up, self.matrices["fc2"])

    def _attention(self, q, k, v):
        q, k, v = (tensor.transpose(0, 1)[None] for tensor in (q, k, v))
        visible = None
        if self.config.documents == "separate":
            queries, keys = self.places[:, None], self.places
            visible = (keys <= queries) & (keys >= queries - self.inputs["positions"][:, None])
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, is_causal=visible is None, enable_gqa=True)
        return out[0].transpose(0, 1).flatten(1)

    def _norm(self, x, gain):
        return F.rms_norm(x, gain.shape, gain, self.config.norm_eps)


def _turned(x, cos, sin):
    low, high = x.float().chunk(2, -1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1).to(x.dtype)


def make_layers(config: Config, weights, adapters, inputs) -> nn.ModuleList:
    """All layers."""
    angles, device = rope_angles(config), weights.device
    tables = [table.float().to(device) for table in (angles.cos(), angles.sin())]
    parts = weights, adapters, inputs, tables, torch.arange(config.sequence, device=device)
    return nn.ModuleList(PlainLayer(config, layer, *parts) for layer in range(config.layers))
