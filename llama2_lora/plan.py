"""The tensors that handwritten layers keep for their backward, predicted bytes, and a run's card (no torch here).

`workspace` lists what llama2_lora/layers/handwritten.py allocates, so the prediction and the program cannot differ.
"""

import math

from common import fit as fitting
from common import memory_plan
from common.memory_plan import GIB, MemoryPlan
from graph_worth.config import flag_of
from llama2_lora import config as lora_config
from llama2_lora.config import KEEP, MAX_DOCUMENTS, PRESETS, Config, layer_weights, num_trainable

# Memory that CUDA, cuBLAS and cuDNN take outside of torch's allocator.
CONTEXT_BYTES = int(1.5 * GIB)
# FP32 tensors of the size of all scores that are alive at a time in plain attention's backward.
PLAIN_ATTENTION_COPIES = 5
# cuBLAS workspaces, 32 MiB each on Hopper: of the two streams of eager steps, and in the pools of two graphed variants.
LIBRARY_BYTES = 128 * 2**20
# FP32 copies of the elements that common/precision/nvfp4.py rounds at a time, some ten.
ROUNDING_BYTES = 10 * 4 * 2**24


def element_bytes(config: Config, kind: str) -> int:
    """Bytes of an element: "main" is bf16; "operand" and "gradient" are FP8, or bf16 where GEMMs are not FP8."""
    return {"main": 2, "fp32": 4}.get(kind) or (1 if config.precision == "fp8" else 2)


def workspace(config: Config) -> dict[str, tuple[tuple[int, ...], str]]:
    """name -> (shape, kind as in `element_bytes`) of tensors that all handwritten layers share, and of those that each
    layer always keeps: x and the adapters' a.
    """
    c, s = config.shard, config.tokens
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
    if c.precision == "fp8":
        # For the matrices of layers that do not hold theirs transposed, one after the other.
        shapes["transpose"] = ((max(outputs * inputs for outputs, inputs in c.matrices.values()),), "operand")
    return shapes


def items(config: Config) -> dict[str, int]:
    """Bytes of the tensors that a layer may keep beside x, in the order of its forward.

    transpose: its matrices transposed, as FP8 GEMMs read them in the backward, for the whole run.
    """
    c, s = config.shard, config.tokens
    return {
        "qkv": 2 * s * c.qkv_width,
        "attention": 2 * s * c.q_width + 4 * s * c.heads,  # with the logarithms of the sums, FP32
        "residual": 2 * s * c.hidden,
        "fc1": 2 * element_bytes(c, "operand") * s * c.ffn,
        "transpose": layer_weights(c) if c.precision == "fp8" else 0,
    }


def built_sizes(config: Config) -> list[int]:
    """Bytes of each tensor that a run allocates once, whatever layers keep."""
    c = config.shard
    # Where NVFP4 is emulated, a matrix is rounded along its inputs, and once more along its outputs.
    copies = 2 if c.precision == "nvfp4_emulated" else 1
    sizes = [rows * columns * element_bytes(c, "operand") for rows, columns in c.matrices.values()] * c.layers * copies
    sizes += [2 * c.hidden] * (2 * c.layers + 1) + [2 * c.vocab * c.hidden] * 2
    # The adapters: values and gradients in bf16; gradient, master and two moments in FP32.
    sizes += [2 * num_trainable(c)] * 2 + [4 * num_trainable(c)] * 4
    sizes += [math.prod(shape) * element_bytes(c, kind) for shape, kind in workspace(c).values()]
    # The history of amaxes; tables of RoPE; tokens, targets, positions; shares of the loss.
    sizes.append(4 * c.amax_history * c.layers * len(lora_config.SCALES))
    return sizes + [2 * c.sequence * c.head_dim] * 2 + [8 * c.tokens] * 3 + [4 * c.tokens]


def fixed_bytes(config: Config) -> int:
    """Bytes that torch reserves whatever layers keep: all that is built, and the memory of attention and libraries."""
    c = config.shard
    keys, padding = c.tokens, 128 * MAX_DOCUMENTS
    if c.cp > 1:
        # The keys that two runs of queries see; each run has its own part of a document.
        keys, padding = c.sequence + c.tokens // 2, 2 * padding
    # Attention's backward: three gradients. Its output, where no layer keeps it. All twice: in a graph's pool, and
    # outside for the eager steps that graphs are compared with.
    sizes = [2 * c.tokens * width for width in (c.q_width, c.kv_width, c.kv_width, c.q_width, 2 * c.heads)] * 2
    # Flash attention, which parity takes and which needs more than cuDNN's: FP32 sums of q's gradient, 128 rows more
    # for each document, and gradients of keys and values of every head.
    sizes += [4 * (c.tokens + padding) * c.q_width, *[2 * keys * c.q_width] * 2] * 2
    if c.cp > 1:
        # Keys and values of all ranks, as gathered and as attention takes them; their gradients in both forms, in bf16
        # and FP32.
        sizes += [2 * c.sequence * 2 * c.kv_width * factor for factor in (1, 2, 2, 4, 2, 1)] * 2
    if c.precision == "nvfp4_emulated":
        sizes += [ROUNDING_BYTES]
    if config.tp > 1:
        # The loss over all ranks' parts of the vocabulary: powers in FP32, targets as logical values and in FP32.
        sizes += [c.tokens * c.vocab * factor for factor in (4, 1, 4)] * 2
    return memory_plan.reserved_bytes(built_sizes(config) + sizes) + LIBRARY_BYTES


def make_plan(config: Config, keep: str | None = None) -> MemoryPlan:
    """Return the plan of --keep, or of `keep`: the items that layers keep, with the predicted bytes."""
    sizes = {name: memory_plan.share_bytes(size) for name, size in items(config).items()}
    layers = memory_plan.kept_by_layers(config.keep if keep is None else keep, list(sizes), config.layers)
    return MemoryPlan(sizes, layers, fixed_bytes(config))


def choose(config: Config, preset: str, total_bytes: int, budget_bytes: int) -> str:
    """Choose the items that layers keep on a GPU, see `common.memory_plan.choose`."""
    cards = KEEP.get(preset, {})
    return memory_plan.choose(config.keep, cards, total_bytes, budget_bytes, lambda keep: make_plan(config, keep).bytes)


def card(config: Config, kind: str, on_gpu: bool) -> list[str]:
    """Lines that say what runs; on a GPU with what handwritten layers keep. kind: of the layers."""
    model = f"{config.layers} of 80 layers of Llama 2 70B" if config.hidden == 8192 else "toy widths"
    of_window = f" of a window of {config.sequence}, which {config.cp} ranks share" if config.cp > 1 else ""
    of_window += f" | {config.tp} ranks share each layer" if config.tp > 1 else ""
    lines = [
        f"{config.layers} layers, hidden {config.hidden}, heads {config.heads} ({config.kv_heads} groups), "
        f"ffn {config.ffn}: {model}",
        f"{lora_config.num_parameters(config) / 1e6:,.1f} M frozen parameters, "
        f"{'of ' + config.checkpoint if config.checkpoint else 'random'}; "
        f"{num_trainable(config) / 1e6:,.2f} M trainable ones, learning rate {config.learning_rate:g}",
        f"{config.tokens} tokens{of_window} | {kind} layers, {config.precision} | "
        f"{lora_config.flops_per_step(config) / 1e12:.4g} TFLOP/step",
    ]
    if on_gpu and kind == "handwritten":
        lines += ["", *make_plan(config).text().splitlines()]
    return lines


def fit(config: Config, budget_bytes: int) -> Config:
    """The config with as many of its layers as fit where they keep the least. ValueError if not even one does."""
    fitted = fitting.fit_layers(config, PRESETS, fixed_bytes, budget_bytes)
    _require_indexable(config)
    return fitted


def require(config: Config, available_bytes: int | None) -> None:
    """ValueError if the config does not fit into a host without a GPU (None: the host does not tell)."""
    fitting.require(config, PRESETS, host_bytes, available_bytes)
    _require_indexable(config)


def host_bytes(config: Config) -> int:
    """Bytes of a run on a CPU: fixed ones, the rotating windows, and plain attention's scores of all pairs."""
    c = config.shard
    windows = c.batches * c.tokens * (3 * 8 + 4)
    return fixed_bytes(c) + windows + PLAIN_ATTENTION_COPIES * 4 * c.heads * c.tokens * c.sequence


def _require_indexable(config):
    """Kernels count the elements of a tensor in 32 bits."""
    c = config.shard
    width, name = max((2 * c.ffn, "ffn"), (c.vocab, "vocab"), (c.qkv_width, "heads"), (c.hidden, "hidden"))
    if c.tokens * width >= 2**31:
        raise ValueError(
            f"--sequence {c.sequence} with {flag_of(name)} {getattr(config, name)}: takes fewer, a tensor of a layer "
            "has 2^31 elements at most"
        )
