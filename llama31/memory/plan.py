"""The tensors that layers keep for a microbatch's backward, and predicted bytes, from sizes (no torch).

A plain layer (llama31/model.py) keeps everything, or runs again in the backward as a whole. Parts of
te.TransformerLayer run again: attention, the MLP up to fc2, or all of it.
"""

from common import fit as fitting
from common import memory_plan, schedule
from common.memory_plan import GIB, MemoryPlan
from llama31.config import KEEP, PRESETS, Config, layer_parameters, num_parameters

# What CUDA, NCCL, cuBLAS and cuDNN take outside of torch's allocator.
CONTEXT_BYTES = 2 * GIB
# Items of te.TransformerLayer outside of attention and MLP; of a plain layer all but its input.
REST = "rest"


def items(config: Config) -> dict[str, int]:
    """Return the bytes of a microbatch's items that a layer may keep, in forward order; x, its input, is always kept.

    te keeps inputs of FP8 GEMMs in FP8.
    """
    c, tokens = config, config.local_sequence * config.microbatch
    # A token's tensor rank has its part of what lies outside of attention and MLP.
    residual = 2 * tokens * c.hidden // c.tp
    q_width, kv_width = c.local_heads * c.head_dim, c.local_kv_heads * c.head_dim
    qkv, fc1 = 2 * tokens * (q_width + 2 * kv_width), 4 * tokens * c.local_ffn
    attention = 2 * tokens * q_width + 4 * tokens * c.local_heads
    is_quantized = c.precision in ("fp8", "nvfp4") and c.layer != "torch"
    if c.layer == "torch":
        # Normalised inputs of qkv and fc1; q and k turned; SwiGLU's output; attention's, once rounded.
        rounded = 0 if c.precision == "bf16" else q_width
        rest = 2 * tokens * (2 * c.hidden + q_width + kv_width + c.local_ffn + rounded)
        return {"x": residual, REST: qkv + attention + residual + fc1 + rest}
    # Normalised inputs of qkv and fc1, inputs of proj, which in bf16 is attention's output, and of fc2. Of fc1's in FP8
    # LayerNormMLP keeps the transposed copy beside the one that it multiplies; of a part of the sequence there is none.
    operand, copies = (1 if is_quantized else 2), (2 if is_quantized and c.tp == 1 else 1)
    rest = qkv + residual + tokens * operand * (c.hidden // c.tp + (q_width if is_quantized else 0))
    mlp = fc1 + tokens * operand * (copies * c.hidden // c.tp + c.local_ffn)
    return {"x": residual, "attention": attention, "mlp": mlp, REST: rest}


def kept_bytes(config: Config) -> dict[str, int]:
    """Return the bytes of torch's segments that a layer takes to keep an item of all microbatches in flight."""
    # Of the first stage, which has the most.
    in_flight = schedule.peak_in_flight(config.pp, 0, 1, config.microbatches) if config.pp > 1 else 1
    return {name: memory_plan.share_bytes(size) * in_flight for name, size in items(config).items()}


def can_keep(kept: frozenset[str]) -> bool:
    """Say whether layers can run that keep these items: for the rest te.TransformerLayer runs again as a whole."""
    return REST in kept or kept == {"x"}


def state_bytes(config: Config) -> dict[str, int]:
    """Bytes of a parameter of the layers by what they are for.

    Matrices in FP8, whether stored so or cast from bf16, have the transposed copy that Hopper's GEMMs read. Where NVFP4
    is emulated, a bf16 matrix has two rounded copies. Megatron's optimizer copies bf16 gradients to FP32.
    """
    c = config
    weight = 2 if c.weights == "fp8" else {"bf16": 2, "nvfp4_emulated": 6}.get(c.precision, 4)
    widths = {"bf16": 2, "fp32": 4}
    has_adam = c.optimizer == "adam"
    kept = {"master": 4 * has_adam, "moments": 2 * widths[c.moments] * has_adam}
    if c.layer == "megatron" and c.main_grad == "bf16":
        kept["master"] += 4
    return {"weight": weight, "main_grad": widths[c.main_grad], **kept}


def fixed_bytes(config: Config) -> int:
    """Bytes that torch reserves whatever layers keep.

    Parameters with all that Adam keeps of them, embedding and head with a bf16 weight. What the running layer has, as
    much as one that keeps everything. Logits in bf16; in FP32 logarithms of their softmax, and the gradients of both;
    the batches; a tenth of what is not parameters for workspaces and fragments.
    """
    c, per = config, state_bytes(config)
    tokens = c.local_sequence * c.microbatch
    in_all, in_layers = num_parameters(c), _layers(c) * layer_parameters(c)
    parameters = in_layers * per["weight"] + (in_all - in_layers) * 2
    parameters += in_all * (per["main_grad"] + per["master"] + per["moments"])
    running = sum(items(c).values())
    return parameters + (running + tokens * (c.local_vocab * 14 + 16 * c.microbatches)) * 110 // 100


def _layers(config):
    """Return the number of layers of the widest stage."""
    return max(config.stage_sizes)


def make_plan(config: Config, keep: str | None = None) -> MemoryPlan:
    """Return the plan of --keep, or of `keep`, for the widest stage, with the predicted bytes.

    ValueError where layers cannot run so.
    """
    keep, sizes = config.keep if keep is None else keep, kept_bytes(config)
    names = [name for name in sizes if name != "x"]
    layers = tuple(kept | {"x"} for kept in memory_plan.kept_by_layers(keep, names, _layers(config)))
    if not all(map(can_keep, layers)):
        raise ValueError(f"--keep {keep}: a te layer keeps attention and mlp with rest only")
    return MemoryPlan(sizes, layers, fixed_bytes(config))


def choose(config: Config, preset: str, total_bytes: int, budget: int) -> str:
    """Choose the items that layers keep on a GPU, see `common.memory_plan.choose`."""
    cards = KEEP.get((preset, config.layer), {})
    return memory_plan.choose(config.keep, cards, total_bytes, budget, lambda keep: make_plan(config, keep).bytes)


def needed_bytes(config: Config) -> int:
    """Reserved where layers keep the least."""
    return fixed_bytes(config) + _layers(config) * kept_bytes(config)["x"]


def fit(config: Config, budget: int) -> Config:
    """The config with as many layers as fit where they keep the least. ValueError where not one for each stage does."""
    return fitting.fit_layers(config, PRESETS, needed_bytes, budget, config.pp)


def require(config: Config, available_bytes: int | None) -> None:
    """ValueError where the config cannot fit into a host without a GPU; None: the host does not tell."""
    fitting.require(config, PRESETS, _host_bytes, available_bytes)


def _host_bytes(config):
    """Return the host bytes where layers keep the least, or of the batches that rotate, where those are larger."""
    batch = 16 * config.microbatches * config.microbatch * config.local_sequence
    return max(needed_bytes(config), config.batches * batch)
