"""What lean layers keep, from sizes and rates alone: the items of a layer, the memory around them, the plan (no torch).

`workspace` is what llama2_lora/lean.py allocates, by name, so that the prediction and the program cannot differ.

    python -m llama2_lora.plan        the plans of the whole model for an H200 and an H100, as in docs/memory_plan.md
"""

import math
from bisect import bisect_right
from dataclasses import replace

from common import memory_plan
from common.config import flag_of
from common.fitting import blame, gib
from common.memory_plan import (
    ATTENTION_TFLOPS,
    BF16_TFLOPS,
    COPY_GB_PER_S,
    FP8_TFLOPS,
    GIB,
    Item,
    Plan,
    copy_ms,
    gemm_ms,
)
from llama2_lora.config import (
    BACKWARD_SCALES,
    FORWARD_SCALES,
    FP8,
    MAX_DOCUMENTS,
    PRESETS,
    Config,
    layer_weights,
    num_trainable,
)

# What CUDA, cuBLAS and cuDNN take outside of torch's allocator.
CONTEXT_BYTES = int(1.5 * GIB)
# Of the scores of all pairs, FP32, that are alive at a time in plain attention's backward.
PLAIN_ATTENTION_COPIES = 5
# Of more, each allocation is not followed: no machine holds them.
MOST_LAYERS = 4096
# Elements that common/nvfp4.py rounds at a time, and FP32 copies of them that are alive meanwhile.
NVFP4_CHUNK, NVFP4_COPIES = 2**24, 7
# Bytes that torch reserves for one that Transformer Engine's layers allocate: 1.015 in four eager runs of 80 layers and
# 1024 tokens (results/h200x1/llama2_lora-bench), and a margin.
TE_RESERVED = 1.02
# cuBLAS workspaces of the two streams that a captured step uses, 32 MiB each on Hopper.
LIBRARY_BYTES = 64 * 2**20


def element_bytes(config: Config, kind: str) -> int:
    """Of "main" (bf16), "operand" and "gradient" (FP8, or main where GEMMs are not FP8), "fp8", "fp32", "int64"."""
    fp8 = config.precision in FP8
    return {"main": 2, "operand": 1 if fp8 else 2, "gradient": 1 if fp8 else 2, "fp8": 1, "fp32": 4, "int64": 8}[kind]


def workspace(config: Config) -> dict[str, tuple[tuple[int, ...], str]]:
    """name -> (shape, kind) of what all lean layers share, and of what each always keeps: x and the adapters' a."""
    c, s = config, config.tokens
    wide = max(c.hidden, c.q_width)
    shapes = {
        "operand": ((s * wide,), "operand"),
        "dropped": ((s * wide,), "main"),
        "qkv": ((s, c.qkv_width), "main"),
        "proj": ((s, c.hidden), "main"),
        "residual": ((s, c.hidden), "main"),
        "fc1": ((s * max(2 * c.ffn, c.vocab),), "main"),
        "fc2_in": ((s, c.ffn), "operand"),
        "fc2": ((s, c.hidden), "main"),
        "swiglu_grad": ((s, c.ffn), "main"),
        "fc1_grad": ((s, 2 * c.ffn), "gradient"),
        "wide_grad": ((s * wide,), "main"),
        "dropped_grad": ((s * wide,), "main"),
        "qkv_grad": ((s, c.qkv_width), "main"),
        "qkv_grad_operand": ((s, c.qkv_width), "gradient"),
        "grad": ((s, c.hidden), "main"),
        "grad_operand": ((s, c.hidden), "gradient"),
        "rank_grad": ((s, c.rank), "main"),
        "final": ((s, c.hidden), "main"),
        "losses": ((s,), "fp32"),
        "x": ((c.layers, s, c.hidden), "main"),
        "a": ((c.layers, 2, s, c.rank), "main"),
    }
    if c.precision in FP8:
        # A buffer that all matrices share, one for each matrix, or one for each of every layer.
        largest = max(outputs * inputs for outputs, inputs in c.matrices.values())
        sizes = {"inline": largest, "beside": layer_weights(c), "own": c.layers * layer_weights(c)}
        shapes["transpose"] = ((sizes[c.transposes],), "operand")
    return shapes


def items(config: Config) -> list[Item]:
    """What a lean layer may keep beside x, in the order of its forward, with the time to compute it again."""
    c, s = config, config.tokens
    rate = FP8_TFLOPS if c.precision in FP8 else BF16_TFLOPS

    def gemm(name):
        outputs, inputs = c.matrices[name]
        return gemm_ms(2 * s * outputs * inputs, rate)

    def passes(elements):
        """Elementwise work over bf16 elements, read or written."""
        return copy_ms(2 * s * elements, COPY_GB_PER_S)

    found = [
        # Norm, projection, the adapter's product and RoPE.
        Item("qkv", 2 * s * c.qkv_width, None, gemm("qkv") + passes(1.5 * c.hidden + 4 * c.qkv_width)),
        # With the logarithms of the sums, FP32.
        Item(
            "attention",
            2 * s * c.q_width + 4 * s * c.heads,
            None,
            gemm_ms(2 * s * c.sequence * c.q_width, ATTENTION_TFLOPS),
            needs=("qkv",),
        ),
        Item(
            "residual",
            2 * s * c.hidden,
            None,
            gemm("proj") + passes(1.5 * c.q_width + 5.5 * c.hidden),
            needs=("attention",),
        ),
        Item("fc1", 4 * s * c.ffn, 2 * s * c.ffn, gemm("fc1") + passes(1.5 * c.hidden), needs=("residual",)),
    ]
    if c.precision in FP8 and c.transposes != "own":
        weights = layer_weights(c)
        found.append(Item("transpose", weights, None, copy_ms(2 * weights, COPY_GB_PER_S), permanent=True))
    return found


def built_sizes(config: Config) -> list[int]:
    """Bytes of each tensor that a run allocates once, whatever layers keep."""
    c = config
    # nvfp4_emulated has weights of their own for both directions.
    copies = 2 if c.precision == "nvfp4_emulated" else 1
    sizes = [rows * columns * element_bytes(c, "operand") for rows, columns in c.matrices.values()] * c.layers * copies
    sizes += [2 * c.hidden] * (2 * c.layers + 1) + [2 * c.vocab * c.hidden] * 2
    # Values and gradients in bf16; gradient, master and two moments in FP32.
    sizes += [2 * num_trainable(c)] * 2 + [4 * num_trainable(c)] * 4
    sizes += [math.prod(shape) * element_bytes(c, kind) for shape, kind in workspace(c).values()]
    if c.precision == "fp8_current":
        # What an operand is before its scale is known (llama2_lora/operators.py).
        sizes.append(2 * c.tokens * max(c.hidden, c.q_width, c.qkv_width, 2 * c.ffn))
    # The history of amaxes; tables of RoPE; tokens, targets, positions; mask and shares of the loss.
    sizes.append(4 * c.amax_history * c.layers * len(FORWARD_SCALES + BACKWARD_SCALES))
    return sizes + [2 * c.sequence * c.head_dim] * 2 + [8 * c.tokens] * 3 + [4 * c.tokens] * 2


def fixed_bytes(config: Config) -> int:
    """Bytes that torch reserves whatever layers keep: what is built, and what attention and the libraries need."""
    c = config
    if c.layers > MOST_LAYERS:
        return math.ceil(fixed_bytes(replace(c, layers=MOST_LAYERS)) * c.layers / MOST_LAYERS)
    # Attention's backward: three gradients. Its output, where no layer keeps it. Besides, in flash attention, which
    # needs more than cuDNN's and which round 0 takes: FP32 sums of q's gradient, 128 rows more for each document, and
    # gradients of keys and values of every head. Twice: in a graph's pool, and beside it for the eager steps that
    # graphs are checked by.
    q_width, kv_width, keys = c.q_width, c.kv_heads * c.head_dim, c.tokens
    padding = 128 * MAX_DOCUMENTS
    if c.cp > 1:
        # Of the keys that two runs of queries see; each run has its own part of a document.
        keys, padding = c.sequence + c.tokens // 2, 2 * padding
    sizes = [2 * c.tokens * width for width in (q_width, kv_width, kv_width, q_width, 2 * c.heads)] * 2
    sizes += [4 * (c.tokens + padding) * q_width, *[2 * keys * q_width] * 2] * 2
    if c.cp > 1:
        # Keys and values of all ranks, once as gathered and once as attention takes them; their gradients in both
        # forms, in bf16 and FP32.
        sizes += [2 * c.sequence * 2 * kv_width * factor for factor in (1, 2, 2, 4, 2, 1)] * 2
    if c.precision == "nvfp4_emulated":
        sizes += [4 * min(NVFP4_CHUNK, c.tokens * max(2 * c.ffn, c.hidden, c.qkv_width))] * NVFP4_COPIES * 2
    return memory_plan.reserved_bytes(built_sizes(config) + sizes) + LIBRARY_BYTES


def budget_bytes(free_bytes: int) -> int:
    """What torch may reserve of a GPU's free memory, in whole GiB, so that runs of one session get one plan."""
    return max(1, (free_bytes - CONTEXT_BYTES) // GIB) * GIB


def te_items(config: Config) -> list[Item]:
    """What autograd keeps of a layer of Transformer Engine's modules: its input, and all the rest, or nothing of it.

    The rest is the MLP's input; masks of dropout and what they leave, for the adapters; q, k, v, attention's output and
    the logarithms of its sums; fc1's output. No frozen weight has a gradient, so no input of a GEMM is kept.
    """
    c = config
    kv_width = c.kv_heads * c.head_dim
    rest = 2 * c.hidden + 3 * (c.hidden + c.q_width) + 2 * (2 * c.q_width + 2 * kv_width) + 4 * c.heads + 4 * c.ffn
    rate = FP8_TFLOPS if c.precision in FP8 else BF16_TFLOPS
    again_ms = gemm_ms(2 * c.tokens * layer_weights(c), rate)
    again_ms += gemm_ms(2 * c.tokens * c.sequence * c.q_width, ATTENTION_TFLOPS)
    return [
        Item("x", int(TE_RESERVED * 2 * c.tokens * c.hidden), None, None),
        Item("rest", int(TE_RESERVED * c.tokens * (rest + 4 * c.rank)), None, again_ms, needs=("x",)),
    ]


def te_fixed_bytes(config: Config) -> int:
    """Reserved beside what Transformer Engine's layers keep: what is built, and the larger of the loss's and of a
    layer's backward's temporaries."""
    c = config
    lean = sum(math.prod(shape) * element_bytes(c, kind) for shape, kind in workspace(c).values())
    # In bf16 its modules have weights of their own.
    own = c.layers * layer_weights(c) * 2 if c.precision not in FP8 else 0
    # Logits in bf16 and FP32, the logarithms of the softmax, and both gradients.
    loss = 16 * c.tokens * c.vocab
    # Gradients of fc1's output and of SwiGLU in bf16, the former in FP8, and the transposed weight.
    backward = 8 * c.tokens * c.ffn + 2 * c.ffn * c.hidden
    return int(TE_RESERVED * (sum(built_sizes(c)) - lean + own + 2 * 2 * c.tokens * c.hidden + max(loss, backward)))


def make_te_plan(config: Config, budget_bytes: int) -> Plan:
    """The plan of Transformer Engine's layers: the first ones keep their input alone and run again in the backward.

    Of all of them, where even that does not fit: the allocator says so.
    """
    ways, fixed = memory_plan.configurations(te_items(config)), te_fixed_bytes(config)
    needed = fixed + config.layers * min(way.bytes for way in ways)
    return memory_plan.choose(ways, config.layers, max(budget_bytes, needed), fixed)


def plan_for(kind: str, config: Config, budget_bytes: int) -> Plan | None:
    """The plan of "lean" or "te" layers; None of others, which keep what autograd keeps."""
    planners = {"lean": make_plan, "te": make_te_plan}
    return planners[kind](config, budget_bytes) if kind in planners else None


def _ways(config):
    return memory_plan.configurations(items(config), allow_fp8=("fc1",) if config.fc1_fp8 else ())


def make_plan(config: Config, budget_bytes: int) -> Plan:
    """The fastest plan within budget_bytes of reserved memory. ValueError, with the bytes, where none fits."""
    return memory_plan.choose(_ways(config), config.layers, budget_bytes, fixed_bytes(config))


def needed_bytes(config: Config) -> int:
    """Reserved by the smallest plan."""
    return fixed_bytes(config) + config.layers * min(way.bytes for way in _ways(config))


def fit(config: Config, budget_bytes: int) -> Config:
    """The config with as many of its layers as the smallest plan fits. ValueError if not even one does."""
    layers = bisect_right(
        range(1, config.layers + 1), budget_bytes, key=lambda layers: needed_bytes(replace(config, layers=layers))
    )
    if not layers:
        one = replace(config, layers=1)
        raise ValueError(
            blame(one, PRESETS, needed_bytes, budget_bytes)
            or f"one layer needs {gib(needed_bytes(one))} GiB, {gib(budget_bytes)} GiB are free: "
            "lower --sequence or --ffn, or run --preset tiny"
        )
    _require_indexable(config)
    return replace(config, layers=layers)


def require(config: Config, available_bytes: int) -> None:
    """ValueError where the config does not fit into a host without a GPU."""
    if host_bytes(config) > available_bytes:
        raise ValueError(
            blame(config, PRESETS, host_bytes, available_bytes)
            or f"this preset needs {gib(host_bytes(config))} GiB on a GPU, there is none, and the host has "
            f"{gib(available_bytes)} GiB free: run --preset tiny"
        )
    _require_indexable(config)


def host_bytes(config: Config) -> int:
    """On a CPU: the smallest plan, the windows that rotate, and the scores of all pairs that plain attention makes."""
    c = config
    windows = c.batches * c.tokens * (3 * 8 + 4)
    return needed_bytes(c) + windows + PLAIN_ATTENTION_COPIES * 4 * c.heads * c.tokens * c.sequence


def _require_indexable(config):
    """Kernels count the elements of a tensor in 32 bits."""
    c = config
    name, width = max(
        [("ffn", 2 * c.ffn), ("vocab", c.vocab), ("heads", c.qkv_width), ("hidden", c.hidden)], key=lambda each: each[1]
    )
    if c.tokens * width >= 2**31:
        raise ValueError(
            f"--sequence {c.sequence} with {flag_of(name)} {getattr(c, name)}: takes fewer, a tensor of a layer has "
            "2^31 elements at most"
        )


# ------------------------------------------------------------------------------------------------
# The table of docs/memory_plan.md

GPUS = {"H200": 139, "H100": 78}  # GiB that are free


def table() -> str:
    """Markdown: the plans of the whole model at 1024 and 8192 tokens, predicted from the rates above."""
    columns = ["tokens", "free GiB", "layers", "q k v", "attention", "residual", "fc1 in FP8", "W^T", "GiB", "ms"]
    lines = [columns, ["---:"] * len(columns)]
    for preset in ("bench", "full"):
        for gpu, free_gib in GPUS.items():
            budget = budget_bytes(free_gib * GIB)
            config = fit(PRESETS[preset], budget)
            plan = make_plan(config, budget)
            kept = [row["kept"] + row["fp8"] for row in plan.items().values()]
            free = f"{free_gib} ({gpu})"
            lines.append([config.tokens, free, config.layers, *kept, gib(plan.bytes), f"{plan.ms:.0f}"])
    return "\n".join("| " + " | ".join(map(str, cells)) + " |" for cells in lines)


if __name__ == "__main__":
    print(table())
