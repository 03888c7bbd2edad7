"""A layer of Transformer Engine's modules (version 2.20.2) with handwritten layers' frozen weights and adapters."""

import torch
from torch import nn

from common.precision import nvfp4
from common.precision.transformer_engine import transformer_engine
from llama2_lora.config import Config
from llama2_lora.kernels.torch_operators import rope_angles
from llama2_lora.layers.plain import Adapter


class TransformerEngineLayer(nn.Module):
    """[s, hidden] -> [s, hidden]; the modules themselves take [s, 1, hidden].

    FP8 weights are the bytes and scales that handwritten layers read. On Hopper TE makes W^T for a dgrad GEMM and keeps
    it, 63.75 GiB in all, unless a module is wrapped by FSDP2, whose flag frees it after the GEMM (module/base.py,
    `is_fsdp2`; module/linear.py, `clear_columnwise_cache`): the flag is set here. TE has no public name for it, nor
    for the memory of a weight.

    frequencies: FP32 [s, 1, 1, head_dim], angles of RoPE.
    """

    def __init__(self, config: Config, layer: int, weights, adapters, recipe, frequencies):
        super().__init__()
        te = transformer_engine()
        # NVFP4 is cast from bf16 weights in each pass.
        c, is_fp8 = config, config.precision == "fp8"
        self.config, self.frequencies = config, frequencies
        options = {"bias": False, "params_dtype": torch.bfloat16, "device": weights.device}
        norm = {"eps": c.norm_eps, "normalization": "RMSNorm"}
        with te.quantized_model_init(enabled=is_fp8, recipe=recipe), torch.no_grad():
            self.qkv = te.LayerNormLinear(c.hidden, c.qkv_width, return_layernorm_output=True, **norm, **options)
            self.proj = te.Linear(c.q_width, c.hidden, **options)
            self.mlp = te.LayerNormMLP(c.hidden, c.ffn, activation="swiglu", **norm, **options)
        self.attention = te.DotProductAttention(
            c.heads, c.head_dim, num_gqa_groups=c.kv_heads, attn_mask_type="causal", qkv_format="sbhd"
        )
        self.requires_grad_(False)
        self._take_weights(weights.norms[layer], weights.layers[layer], is_fp8)
        for module in (self.qkv, self.proj, self.mlp):
            module._is_fsdp2 = True
        self.qkv_adapter, self.proj_adapter = (Adapter(config, adapters, layer, name) for name in ("qkv", "proj"))

    @torch.no_grad()
    def _take_weights(self, norms, matrices, fp8):
        """As handwritten layers have them: in FP8 the same memory, in bf16 the same values."""
        self.qkv.layer_norm_weight.copy_(norms[0])
        self.mlp.layer_norm_weight.copy_(norms[1])
        parameters = (self.qkv.weight, self.proj.weight, self.mlp.fc1_weight, self.mlp.fc2_weight)
        for parameter, name in zip(parameters, ("qkv", "proj", "fc1", "fc2"), strict=True):
            matrix = matrices[name]
            if not fp8:
                parameter.copy_(matrix.value)
                continue
            assert parameter._data.shape == matrix.value.shape
            parameter._data = matrix.value.view(torch.uint8)
            parameter._scale_inv = matrix.inverse.view(parameter._scale_inv.shape)
            parameter._transpose, parameter._transpose_invalid = None, True

    def forward(self, x):
        from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb

        c = self.config
        x = x[:, None]
        qkv, normed = self.qkv(x)
        qkv = (qkv + self.qkv_adapter(normed)).view(c.tokens, 1, -1, c.head_dim)
        q, k, v = qkv.split([c.heads, c.kv_heads, c.kv_heads], 2)
        q, k = (
            apply_rotary_pos_emb(tensor.contiguous(), self.frequencies, tensor_format="sbhd", fused=True)
            for tensor in (q, k)
        )
        out = self.attention(q, k, v.contiguous())
        x = x + (self.proj(out) + self.proj_adapter(out))
        return (x + self.mlp(x))[:, 0]


def make_layers(config: Config, weights, adapters, recipe) -> nn.ModuleList:
    """All layers."""
    # Both halves of a head alike.
    angles = rope_angles(config).repeat(1, 2).float().to(weights.device)[:, None, None]
    parts = weights, adapters, recipe, angles
    return nn.ModuleList(TransformerEngineLayer(config, layer, *parts) for layer in range(config.layers))


def recipe_of(config: Config):
    """The recipe of the config; None for bf16."""
    if config.precision == "bf16":
        return None
    if config.precision == "nvfp4":
        return nvfp4.recipe()
    from transformer_engine.common import recipe

    return recipe.DelayedScaling(
        fp8_format=recipe.Format.HYBRID, amax_history_len=config.amax_history, amax_compute_algo="max"
    )
