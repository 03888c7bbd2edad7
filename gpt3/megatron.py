"""GPT-3's slice in Megatron-Core, `--layer megatron`: its eager step and the three captures that it ships.

Shapes, initial values, batches, vocabulary and loss are those of gpt3/train.py. Megatron's optimizer decays no
biases and norms, and stays eager. docs/megatron.md says what each variant captures.

Megatron interleaves the rows of q, k and v in groups of heads, here of one head each: [heads, 3, head_dim] as ours.
"""

import torch
from torch.nn import functional as F

from common import megatron
from gpt3.model import INIT_STD, NORM_EPS, initialise
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
    c = config
    fields = {
        "num_layers": c.layers,
        "hidden_size": c.hidden,
        "ffn_hidden_size": c.ffn,
        "num_attention_heads": c.heads,
        "kv_channels": c.head_dim,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "bf16": True,
        "params_dtype": torch.bfloat16,
        "pipeline_dtype": torch.bfloat16,
        "autocast_dtype": torch.bfloat16,
        "init_method_std": INIT_STD,
        "perform_initialization": False,
        "layernorm_epsilon": NORM_EPS,
        "layernorm_zero_centered_gamma": True,
        "activation_func": F.gelu,
        "bias_activation_fusion": True,
        "bias_dropout_fusion": True,
        "masked_softmax_fusion": True,
        "gradient_accumulation_fusion": True,
        "use_te_rng_tracker": True,
        "cuda_graph_warmup_steps": 3,
        "cuda_graph_use_single_mempool": True,
    }
    if c.precision == "fp8":
        fields |= {
            "fp8": "hybrid",
            "fp8_recipe": "delayed",
            "fp8_amax_history_len": c.amax_history,
            "fp8_amax_compute_algo": "max",
        }
    return fields


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


def initialise_as_ours(named_parameters) -> None:
    """Set Megatron's parameters to the seeded numbers of the te build, in place."""
    initialise(((our_name(name), parameter) for name, parameter in named_parameters), SEED)


def megatron_state(config, device, world_size: int):
    if world_size > 1:
        raise ValueError("--layer megatron runs on one GPU: --ngpu 1")
    betas, adam = ADAM["betas"], {"lr": config.lr, "adam_eps": ADAM["eps"], "clip_grad": ADAM["clip"]}
    adam |= {"adam_beta1": betas[0], "adam_beta2": betas[1], "weight_decay": ADAM["weight_decay"]}
    state = megatron.MegatronState(config, device, options(config), model_options(config), adam, initialise_as_ours)
    state.batches = training_batches(config, device, 0)
    return state


@variant(
    "megatron_eager",
    kind="eager",
    help="Megatron-Core's eager step: cuda_graph_impl none",
    parity="bitwise",
    builds=("megatron",),
    when=lambda c: c.layer == "megatron",
)
def eager_step(state, index: int):
    state.step(index)


@variant(
    "megatron_local",
    kind="graph",
    help="Megatron-Core's CudaGraphManager: a forward and a backward graph for each layer",
    graphs=lambda c: 2 * c.layers,
    replays=lambda c: c.layer_passes,
    parity=1e-2,  # it updates the FP8 history of gradients after each layer, so that the history ages faster
    reference="megatron_eager",
    builds=("megatron",),
    traits={"kernels": "FP8 history of gradients ages with each layer and microbatch"},
    when=lambda c: c.layer == "megatron",
)
class MegatronLocal(megatron.Local):
    def __init__(self, state, capture):
        super().__init__(state, capture, eager_step)


@variant(
    "megatron_te",
    kind="graph",
    help="Megatron-Core's TECudaGraphHelper: Transformer Engine's graphs of each layer, no clones of gradients",
    graphs=lambda c: 2 * c.layers,
    replays=lambda c: c.layer_passes,
    parity="bitwise",
    reference="megatron_eager",
    builds=("megatron",),
    when=lambda c: c.layer == "megatron",
)
class MegatronTransformerEngine(megatron.TransformerEngineHelper):
    def __init__(self, state, capture):
        super().__init__(state, capture, eager_step)


@variant(
    "megatron_full",
    kind="graph",
    help="Megatron-Core's FullCudaGraphWrapper: forward and backward of all microbatches, the optimizer eager",
    graphs=1,
    parity="bitwise",
    reference="megatron_eager",
    builds=("megatron",),
    when=lambda c: c.layer == "megatron",
)
class MegatronFull(megatron.FullIteration):
    def __init__(self, state, capture):
        super().__init__(state, capture, eager_step)
