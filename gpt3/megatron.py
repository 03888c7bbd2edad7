"""GPT-3's slice in Megatron-Core, `--layer megatron`: its eager step and the three captures that it ships.

Shapes, initial values, batches, vocabulary and loss are those of gpt3/train.py. Megatron's optimizer decays no
biases and norms, and stays eager. docs/megatron.md says what each variant captures.

Megatron interleaves the rows of q, k and v in groups of heads, here of one head each: [heads, 3, head_dim] as ours.
"""

import torch

from common import megatron
from gpt3.model import NORM_EPS, initialise
from gpt3.state import ADAM, SEED, training_batches
from graph_worth import variant

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


def options(config) -> dict:
    """Fields of Megatron's TransformerConfig for our shapes."""
    return {
        "num_layers": config.layers,
        "hidden_size": config.hidden,
        "ffn_hidden_size": config.ffn,
        "num_attention_heads": config.heads,
        "kv_channels": config.head_dim,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "bf16": True,
        "params_dtype": torch.bfloat16,
        "perform_initialization": False,
        "layernorm_epsilon": NORM_EPS,
        "layernorm_zero_centered_gamma": True,
        "bias_activation_fusion": True,
        "bias_dropout_fusion": True,
        "gradient_accumulation_fusion": True,
        "fp8": "hybrid" if config.precision == "fp8" else None,
        "fp8_amax_history_len": config.amax_history,
        "fp8_amax_compute_algo": "max",
    }


def model_options(config) -> dict:
    """Arguments of Megatron's GPTModel."""
    return {
        "vocab_size": config.vocab,
        "max_sequence_length": config.sequence,
        "position_embedding_type": "learned_absolute",
        "share_embeddings_and_output_weights": True,
    }


def our_name(name: str) -> str:
    """Return the name that the te build gives to a parameter of Megatron's."""
    for theirs, ours in NAMES.items():
        name = name.replace(theirs, ours)
    return name


def megatron_state(config, device):
    """Return the state of Megatron's training, with our batches and the te build's seeded parameters."""
    betas, adam = ADAM["betas"], {"lr": config.lr, "adam_eps": ADAM["eps"], "clip_grad": ADAM["clip"]}
    adam |= {"adam_beta1": betas[0], "adam_beta2": betas[1], "weight_decay": ADAM["weight_decay"]}

    def initialise_as_ours(named_parameters):
        initialise(((our_name(name), parameter) for name, parameter in named_parameters), SEED)

    batches = training_batches(config, device, 0)
    fields = {"options": options(config), "model": model_options(config), "adam": adam}
    return megatron.MegatronState(config, device, batches, fields, initialise_as_ours)


@variant(
    "megatron_eager",
    kind="eager",
    parity="bitwise",
    builds=("megatron",),
    when=lambda c: c.layer == "megatron",
)
def eager_step(state, index: int):
    """Megatron-Core's eager step: cuda_graph_impl none."""
    state.step(index)


@variant(
    "megatron_local",
    kind="graph",
    graphs=lambda c: 2 * c.layers,
    replays=lambda c: c.layer_passes,
    parity=1e-2,  # it updates the FP8 history of gradients after each layer, so that the history ages faster
    reference="megatron_eager",
    builds=("megatron",),
    traits={"kernels": "FP8 history of gradients ages with each layer and microbatch"},
    when=lambda c: c.layer == "megatron",
)
class MegatronLocal(megatron.Local):
    """Megatron-Core's CudaGraphManager: a forward and a backward graph for each layer."""


@variant(
    "megatron_te",
    kind="graph",
    graphs=lambda c: 2 * c.layers,
    replays=lambda c: c.layer_passes,
    parity="bitwise",
    reference="megatron_eager",
    builds=("megatron",),
    when=lambda c: c.layer == "megatron",
)
class MegatronTransformerEngine(megatron.TransformerEngineHelper):
    """Megatron-Core's TECudaGraphHelper: Transformer Engine's graphs of each layer, no clones of gradients."""


@variant(
    "megatron_full",
    kind="graph",
    graphs=1,
    parity="bitwise",
    reference="megatron_eager",
    builds=("megatron",),
    when=lambda c: c.layer == "megatron",
)
class MegatronFull(megatron.FullIteration):
    """Megatron-Core's FullCudaGraphWrapper: forward and backward of all microbatches, the optimizer eager."""
