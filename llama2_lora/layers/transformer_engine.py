"""A layer of Transformer Engine's modules (version 2.20.2) with handwritten layers' frozen weights and adapters."""

import torch
from torch import nn

from common.training.parallel import collectives
from common.training.parallel.context_parallel import places
from common.training.precision.fp8 import require_fp8, transformer_engine, usable_transformer_engine
from common.variant import Unsupported
from llama2_lora.config import Config
from llama2_lora.kernels.operators import rope_angles
from llama2_lora.layers.plain import Adapter


class TransformerEngineLayer(nn.Module):
    """[s, hidden] -> [s, hidden]; the modules themselves take [s, 1, hidden].

    FP8 weights are the bytes and scales that handwritten layers read. On Hopper TE makes W^T for a dgrad GEMM and keeps
    it, 63.75 GiB in all, unless a module is wrapped by FSDP2, whose flag frees it after the GEMM (module/base.py,
    `is_fsdp2`; module/linear.py, `clear_columnwise_cache`): the flag is set here. TE has no public name for it, nor
    for the memory of a weight.

    frequencies: FP32 [s, 1, 1, head_dim], angles of RoPE at the places of this rank's tokens. across: None, or the
    process group that shares a window, and a stream.
    """

    def __init__(self, config: Config, layer: int, weights, adapters, recipe, frequencies, across):
        super().__init__()
        te = transformer_engine()
        c = config
        self.config, self.frequencies = config, frequencies
        options = {"bias": False, "params_dtype": torch.bfloat16, "device": weights.device}
        norm = {"eps": c.norm_eps, "normalization": "RMSNorm"}
        with te.quantized_model_init(enabled=recipe is not None, recipe=recipe), torch.no_grad():
            self.qkv = te.LayerNormLinear(c.hidden, c.qkv_width, return_layernorm_output=True, **norm, **options)
            self.proj = te.Linear(c.q_width, c.hidden, **options)
            self.mlp = te.LayerNormMLP(c.hidden, c.ffn, activation="swiglu", **norm, **options)
        self.attention = te.DotProductAttention(
            c.heads, c.head_dim, num_gqa_groups=c.kv_heads, attn_mask_type="causal", qkv_format="sbhd"
        )
        if across:
            group, stream = across
            ranks = torch.distributed.get_process_group_ranks(group)
            self.attention.set_context_parallel_group(group, ranks, stream, "a2a")
        self.requires_grad_(False)
        self._take_weights(weights.norms[layer], weights.layers[layer], fp8=recipe is not None)
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
            apply_rotary_pos_emb(each.contiguous(), self.frequencies, tensor_format="sbhd", fused=True)
            for each in (q, k)
        )
        out = self.attention(q, k, v.contiguous())
        x = x + (self.proj(out) + self.proj_adapter(out))
        return (x + self.mlp(x))[:, 0]


def make_layers(config: Config, weights, adapters, recipe, group: str, rank: int) -> nn.ModuleList:
    """All layers. group, rank: name of the group of ranks that share a window, and this rank's number in it."""
    across = None
    if config.cp > 1:
        across = collectives.process_group(group), torch.cuda.Stream(weights.device)
    # Both halves of a head alike.
    angles = rope_angles(config)[places(config.sequence, config.cp, rank)].repeat(1, 2)
    parts = recipe, angles.float().to(weights.device)[:, None, None], across
    return nn.ModuleList(
        TransformerEngineLayer(config, layer, weights, adapters, *parts) for layer in range(config.layers)
    )


def recipe_of(config: Config):
    """The FP8 recipe of the config; None for bf16."""
    if config.precision == "bf16":
        return None
    from transformer_engine.common import recipe

    return recipe.DelayedScaling(
        fp8_format=recipe.Format.HYBRID, amax_history_len=config.amax_history, amax_compute_algo="max"
    )


def require_kind(kind: str, config: Config, device: torch.device) -> None:
    """Unsupported if this device does not compute the config with this kind of layer."""
    if kind != "te":
        return
    if config.cp > 1 and (config.kv_heads % config.cp or config.kv_heads % 2):
        raise Unsupported(
            f"Transformer Engine's layers share an even number of groups of keys and values out over --cp {config.cp} "
            f"ranks: --kv-heads {config.kv_heads} is no multiple of both"
        )
    if device.type != "cuda":
        raise Unsupported("Transformer Engine's layers need a GPU")
    usable_transformer_engine()
    if config.documents != "whole":
        raise Unsupported("Transformer Engine's layers take --documents whole here")
    if config.precision == "fp8":
        require_fp8()
