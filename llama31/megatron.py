"""Llama 3.1's slice in Megatron-Core, `--layer megatron`, whose variants are in common/megatron.py.

Shapes, initial values, batches, vocabulary and loss are those of llama31/train.py, and so is FP8: current scaling by
tensor. Megatron's optimizer decays no norms, and stays eager. docs/megatron.md says what each variant captures.

Megatron has our order of rows: q, k and v by group of heads, the gate's before the up projection's.
"""

import torch

from common import megatron
from common.data import token_files
from llama31.config import ROPE_SCALING
from llama31.model import fill_at_random_
from llama31.state import ADAM, SEED, training_batches

# Name of a matrix of Megatron's -> ours, on which the random numbers depend.
NAMES = {
    "self_attention.linear_qkv.weight": "qkv",
    "self_attention.linear_proj.weight": "proj",
    "mlp.linear_fc1.weight": "fc1",
    "mlp.linear_fc2.weight": "fc2",
    "embedding.word_embeddings.weight": "embedding",
    "output_layer.weight": "head",
}


def settings(config) -> dict:
    """Return Megatron's settings for our shapes, as `megatron.MegatronState` takes them."""
    options = megatron.transformer_options(
        config,
        num_attention_heads=config.local_heads,
        num_query_groups=config.local_kv_heads,
        ffn_hidden_size=config.local_ffn,
        normalization="RMSNorm",
        layernorm_epsilon=config.norm_eps,
        activation_func=torch.nn.functional.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        apply_rope_fusion=True,
        fp8_recipe="tensorwise",
    )
    # The other numbers of its scaled rotary embedding are Llama 3.1's.
    model = {
        "vocab_size": config.local_vocab,
        "position_embedding_type": "rope",
        "rotary_base": config.rope_theta,
        "rope_scaling": True,
        "rope_scaling_factor": ROPE_SCALING["factor"],
    }
    ddp = {"grad_reduce_in_fp32": config.main_grad == "fp32"}
    return {"options": options, "model": model, "ddp": ddp, "adam": ADAM}


def our_name(name: str) -> tuple[str, int | None]:
    """Return our name of a parameter of Megatron's, and the number of its layer. Names of norms stay."""
    number, _, part = name.removeprefix("decoder.layers.").partition(".")
    return (NAMES.get(part, part), int(number)) if number.isdecimal() else (NAMES.get(name, name), None)


def megatron_state(config, device):
    """Return the state of Megatron's training, with our batches and our seeded masters."""
    place = config.ranks(1).place(0)

    def initialise_as_ours(name, parameter, master):
        fill_at_random_(master, config, place, *our_name(name), SEED)
        parameter.copy_(master)

    batches = training_batches(config, device, place, token_files.open_tokens(config.data))
    return megatron.MegatronState(config, device, batches, settings(config), initialise_as_ours)
