"""Items, memory and plan of the tensors that layers keep for a microbatch's backward, from sizes and rates (no torch).

A plain layer (llama31/model.py) that keeps everything runs as it is. Any other runs again in the backward, with the
results of the GEMMs and of attention that it has kept in the place of those operators (llama31/memory/recompute.py).
Parts of te.TransformerLayer run again: attention, the MLP up to fc2, or all of it.
"""

from common.training import memory_plan, schedule
from common.training.memory_fit import fit_layers, require_host
from common.training.memory_plan import (
    ATTENTION_TFLOPS,
    BF16_TFLOPS,
    COPY_GB_PER_S,
    FP8_TFLOPS,
    GIB,
    Configuration,
    Item,
    Plan,
    copy_ms,
    gemm_ms,
)
from llama31.config import PRESETS, Config, layer_parameters, num_parameters

# What CUDA, NCCL, cuBLAS and cuDNN take outside of torch's allocator.
CONTEXT_BYTES = 2 * GIB
# Items of a layer that are not the result of one operator: what norms, RoPE, SwiGLU and the GEMMs' inputs keep.
REST = "rest"


def items(config: Config) -> list[Item]:
    """Return the items a layer may keep of a microbatch, in forward order, with the ms to compute each again.

    Communication of --tp and --cp is not counted in them. te keeps inputs of FP8 GEMMs in FP8.
    """
    c = config
    # A token's tensor rank has its part of what lies outside of attention and MLP.
    residual = 2 * _tokens(c) * c.hidden // c.tp
    q_width, kv_width = c.local_heads * c.head_dim, c.local_kv_heads * c.head_dim
    qkv_bytes, fc1_bytes = 2 * _tokens(c) * (q_width + 2 * kv_width), 4 * _tokens(c) * c.local_ffn
    attention_bytes = 2 * _tokens(c) * q_width + 4 * _tokens(c) * c.local_heads
    qkv_ms, proj_ms = _gemm_ms(c, q_width + 2 * kv_width, c.hidden), _gemm_ms(c, c.hidden, q_width)
    fc1_ms = _gemm_ms(c, 2 * c.local_ffn, c.hidden)
    attention_ms = gemm_ms(2 * _tokens(c) * (c.sequence // c.share_cp) * q_width, ATTENTION_TFLOPS)
    attention_passes = _passes_ms(c, 3 * c.hidden + 2 * q_width + 4 * (q_width + kv_width))
    mlp_passes = _passes_ms(c, 3 * c.hidden + 3 * c.local_ffn)
    attention_rest, mlp_rest = _rest_bytes(c)
    x = Item("x", residual, None, None)
    if c.layer == "te":
        layer = qkv_bytes + residual + attention_rest
        if _quantized(c) and c.weights == "bf16":
            # The MLP casts its weights once more: bf16 is read, FP8 and its transpose are written.
            mlp_passes += copy_ms(4 * 3 * c.hidden * c.local_ffn, COPY_GB_PER_S)
        return [
            x,
            Item("attention", attention_bytes, None, attention_ms),
            Item("mlp", fc1_bytes + mlp_rest, None, fc1_ms + mlp_passes),
            Item(REST, layer, None, qkv_ms + proj_ms + attention_passes, needs=("x",)),
        ]
    return [
        x,
        Item("qkv", qkv_bytes, None, qkv_ms, needs=("x",)),
        Item("attention", attention_bytes, None, attention_ms, needs=("qkv",)),
        Item("residual", residual, None, proj_ms, needs=("attention",)),
        Item("fc1", fc1_bytes, fc1_bytes // 2, fc1_ms, needs=("residual",)),
        Item(REST, attention_rest + mlp_rest, None, attention_passes + mlp_passes),
    ]


def _tokens(config):
    return config.local_sequence * config.microbatch


def _quantized(config):
    """Say whether GEMMs read FP8 or FP4."""
    return config.precision in ("fp8", "nvfp4") and config.layer != "torch"


def _gemm_ms(config, outputs, inputs):
    return gemm_ms(2 * _tokens(config) * outputs * inputs, FP8_TFLOPS if _quantized(config) else BF16_TFLOPS)


def _passes_ms(config, elements):
    """Elementwise work over bf16 elements of a token, read or written."""
    return copy_ms(2 * _tokens(config) * elements, COPY_GB_PER_S)


def _rest_bytes(config):
    """Bytes of attention and MLP that are not the result of one operator."""
    c, tokens, q_width = config, _tokens(config), config.local_heads * config.head_dim
    if c.layer == "torch":
        # Normalised inputs of qkv and fc1; q and k turned; SwiGLU's output; attention's, once rounded.
        rounded = 0 if c.precision == "bf16" else q_width
        turned = q_width + c.local_kv_heads * c.head_dim
        return 2 * tokens * (c.hidden + turned + rounded), 2 * tokens * (c.hidden + c.local_ffn)
    # Normalised inputs of qkv and fc1, inputs of proj, which in bf16 is attention's output, and of fc2. Of fc1's in FP8
    # LayerNormMLP keeps the transposed copy beside the one that it multiplies; of a part of the sequence there is none.
    quantized = _quantized(c)
    operand, copies = (1 if quantized else 2), (2 if quantized and c.tp == 1 else 1)
    attention = tokens * operand * (c.hidden // c.tp + (q_width if quantized else 0))
    return attention, tokens * operand * (copies * c.hidden // c.tp + c.local_ffn)


def ways(config: Config) -> list[Configuration]:
    """The ways to run a layer, the one that keeps everything first.

    A plain layer that runs again computes all of the rest again; te.TransformerLayer runs again as a whole for it.
    """
    # Of the first stage, which has the most; a layer is in one of its chunks.
    in_flight = schedule.peak_in_flight(config.pp, 0, config.chunks, config.microbatches) if config.pp > 1 else 1
    found = memory_plan.configurations(
        items(config),
        in_flight=-(-in_flight // config.chunks),
        allow_fp8=("fc1",) if config.fc1_store == "fp8" else (),
    )
    if config.layer == "te":
        return [way for way in found if REST not in way.recomputes or {"attention", "mlp"} <= set(way.recomputes)]
    return [way for way in found if REST in way.recomputes or not way.recomputes]


def state_bytes(config: Config) -> dict[str, int]:
    """Bytes of a parameter of the layers by what they are for.

    Matrices in FP8, whether stored so or cast from bf16, have the transposed copy that Hopper's GEMMs read. Where NVFP4
    is emulated, a bf16 matrix has two rounded copies.
    """
    c = config
    weight = 2 if c.weights == "fp8" else {"bf16": 2, "nvfp4_emulated": 6}.get(c.precision, 4)
    widths = {"bf16": 2, "fp32": 4}
    has_adam = c.optimizer == "adam"
    kept = {"master": 4 * has_adam, "moments": 2 * widths[c.moments] * has_adam}
    return {"weight": weight, "main_grad": widths[c.main_grad], **kept}


def fixed_bytes(config: Config, dp: int = 1) -> int:
    """Bytes that torch reserves whatever layers keep. dp: data ranks, over which ZeRO-1 splits masters and moments.

    Parameters with all that Adam keeps of them, embedding and head with a bf16 weight. What the running layer has, as
    much as one that keeps everything. Logits in bf16; in FP32 logarithms of their softmax, and the gradients of both;
    the batches; a tenth of what is not parameters for workspaces and fragments.
    """
    c, per = config, state_bytes(config)
    tokens = c.local_sequence * c.microbatch
    in_all, in_layers = num_parameters(c), _layers(c) * layer_parameters(c)
    replicas = c.cp * dp if c.zero else 1
    parameters = in_layers * per["weight"] + (in_all - in_layers) * 2 + in_all * per["main_grad"]
    parameters += in_all * (per["master"] + per["moments"]) // replicas
    running = sum(item.bytes for item in items(c))
    return parameters + (running + tokens * (c.local_vocab * 14 + 16 * c.microbatches)) * 110 // 100


def _layers(config):
    """Return the number of layers of the widest stage."""
    return max(config.stage_sizes)


def budget_bytes(free_bytes: int) -> int:
    """Return the bytes torch may reserve of a GPU's free memory, in whole GiB: runs of one session get one plan."""
    return max(1, (free_bytes - CONTEXT_BYTES) // GIB) * GIB


def make_plan(config: Config, budget: int | None = None, dp: int = 1) -> Plan:
    """The fastest plan of the widest stage's layers within `budget` bytes of reserved memory.

    budget: default --memory-gib, which 0 leaves without a bound. dp: data ranks. ValueError, with the bytes, where no
    plan fits.
    """
    if budget is None:
        budget = int(config.memory_gib * GIB) if config.memory_gib else 2**62
    return memory_plan.choose(ways(config), _layers(config), budget, fixed_bytes(config, dp))


def needed_bytes(config: Config, dp: int = 1) -> int:
    """Reserved by the smallest plan. dp: data ranks."""
    layers = _layers(config)
    smallest = min(way.bytes for way in ways(config))
    return fixed_bytes(config, dp) + layers * smallest


def fit(config: Config, budget: int, dp: int = 1) -> Config:
    """The config with as many layers as the smallest plan fits. ValueError where not one for each stage does.

    dp: data ranks.
    """
    unit = config.pp * config.chunks
    return fit_layers(config, PRESETS, lambda tried: needed_bytes(tried, dp), budget, unit)


def require(config: Config, available_bytes: int | None) -> None:
    """ValueError where the config cannot fit into a host without a GPU; None: the host does not tell."""
    require_host(config, PRESETS, _host_bytes, available_bytes)


def _host_bytes(config):
    """Return the host bytes of the smallest plan, or of the batches that rotate, where those are larger."""
    batch = 16 * config.microbatches * config.microbatch * config.local_sequence
    return max(needed_bytes(config), config.batches * batch)
