"""GPT-3's slice in Megatron-Core, `--layer megatron`, whose variants are in common/megatron.py.

Shapes, initial values, batches, vocabulary and loss are those of gpt3/train.py. Megatron's optimizer decays no
biases and norms, and stays eager. docs/megatron.md says what each variant captures.

Megatron interleaves the rows of q, k and v in groups of heads, here of one head each: [heads, 3, head_dim] as ours.
"""

from common import megatron
from gpt3.model import NORM_EPS, initialise
from gpt3.state import ADAM, SEED, training_batches

# Part of a name of Megatron's -> the same of the te build, on which the random numbers depend.
NAMES = {
    "decoder.layers.": "layers.",
    "self_attention.linear_qkv.": "self_attention.layernorm_qkv.",
    "self_attention.linear_proj.": "self_attention.proj.",
    "mlp.linear_fc1.": "layernorm_mlp.fc1_",
    "mlp.linear_fc2.": "layernorm_mlp.fc2_",
    "embedding.word_embeddings.weight": "embedding.tokens",
    "embedding.position_embeddings.weight": "embedding.positions",
}


def settings(config) -> dict:
    """Return Megatron's settings for our shapes, as `megatron.MegatronState` takes them."""
    options = megatron.transformer_options(
        config,
        num_attention_heads=config.heads,
        ffn_hidden_size=config.ffn,
        layernorm_epsilon=NORM_EPS,
        layernorm_zero_centered_gamma=True,
        fp8_amax_history_len=config.amax_history,
        fp8_amax_compute_algo="max",
    )
    model = {
        "vocab_size": config.vocab,
        "position_embedding_type": "learned_absolute",
        "share_embeddings_and_output_weights": True,
    }
    return {"options": options, "model": model, "ddp": {"grad_reduce_in_fp32": True}, "adam": ADAM}


def our_name(name: str) -> str:
    """Return the name that the te build gives to a parameter of Megatron's."""
    for theirs, ours in NAMES.items():
        name = name.replace(theirs, ours)
    return name


def megatron_state(config, device):
    """Return the state of Megatron's training, with our batches and the te build's seeded parameters."""

    def initialise_as_ours(name, parameter, master):
        initialise([(our_name(name), parameter)], SEED)
        master.copy_(parameter)

    batches = training_batches(config, device, 0)
    return megatron.MegatronState(config, device, batches, settings(config), initialise_as_ours)
