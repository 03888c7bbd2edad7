"""NVIDIA's published figures of CUDA graphs in training, as data, each with its source.

The figures are other people's: other GPUs, other scale, and a baseline of their own choice. They stand beside
this suite's measurements and are never mixed into them.
"""

from dataclasses import dataclass

_GUIDE = "https://docs.nvidia.com/dl-cuda-graph/latest/examples"
_BRIDGE = "https://docs.nvidia.com/nemo/megatron-bridge/latest/skills/perf-techniques/cuda-graphs/SKILL.html"
_RESULTS_4_1 = "https://github.com/mlcommons/training_results_v4.1/tree/main/NVIDIA/benchmarks"
_MLPERF = {"mlperf": "fewer GPUs"}


@dataclass(frozen=True, kw_only=True)
class Published:
    """One MLPerf submission, or a documented recipe.

    Attributes:
        model: folder of the suite's own version of it.
        variant: stands there for NVIDIA's mechanism.
        gain_range: the gain in one cell of a table.
        presets: those of the model here that may stand beside the submission, the nearest first, and in words what is
            different in each.
    """

    model: str
    title: str
    mechanism: str
    variant: str
    gain_range: str
    source: str
    presets: dict[str, str]


PUBLISHED = (
    Published(
        model="gpt3",
        title="GPT-3 175B",
        mechanism="TE make_graphed_callables",
        variant="graph_layer_te",
        gain_range="1.022x to 1.030x",
        source=f"{_GUIDE}/introduction.html",
        presets={
            **_MLPERF,
            "rank": "1 stage: 16 of 96 layers, no optimizer",
            "bench": "a GPU's share of 8 of 96 layers",
            "full": "4 undivided layers of 96",
        },
    ),
    Published(
        model="llama2_lora",
        title="Llama 2 70B LoRA",
        mechanism="Megatron CudaGraphManager",
        variant="graph_layer",
        gain_range="1.2x to 6.6x",
        source=f"{_GUIDE}/llama2-70b-lora.html",
        # At 8192 tokens a GPU the submission captures nothing.
        presets={
            "mlperf_cp8": "fewer GPUs",
            "bench": "all 80 layers",
            "slice": "8 of 80 layers",
        },
    ),
    Published(
        model="llama31",
        title="Llama 3.1 405B",
        mechanism="FullCudaGraphWrapper",
        variant="graph_fwd_bwd",
        gain_range="FP8 none; FP4 1.15x to 1.79x",
        source=f"{_GUIDE}/llama-31-405b.html",
        # full is another model, 8B.
        presets=_MLPERF | {"bench": "a GPU's share of 4 of 126 layers"},
    ),
    Published(
        model="rnnt",
        title="RNN-T",
        mechanism="own capture function",
        variant="graph_networks",
        gain_range="no number",
        source=f"{_GUIDE}/rnnt.html",
        presets=_MLPERF | dict.fromkeys(("full", "bench", "bench_b32", "bench_lengths"), "the same model"),
    ),
    Published(
        model="stable_diffusion",
        title="Stable Diffusion v2",
        mechanism="NeMo CUDAGraphCallback",
        variant="graph_step_lightning",
        gain_range="up to 1.58x",
        source=f"{_GUIDE}/stable-diffusion-v2.html",
        presets=_MLPERF | dict.fromkeys(("full", "bench", "bench_b1"), "the same model"),
    ),
    Published(
        model="moe",
        title="Qwen3-30B-A3B",
        mechanism="Megatron Bridge, TE graphs of parts of each layer",
        variant="graph_attn_router_preprocess",
        # 623 to 484 ms a step on 16 H100: tensor 2, pipeline 2, expert 4.
        gain_range="1.29x",
        source=_BRIDGE,
        presets={
            "qwen3_share": "a GPU's share of 24 of 48 layers, without communication",
            "bench": "8 of 48 layers, or what fits",
        },
    ),
)


@dataclass(frozen=True, kw_only=True)
class Rate:
    """Useful TFLOP/s that a submission reached on each GPU.

    Attributes:
        tflops: counted as a run of `model` here counts them, in flops_per_step.
        where: the run and its GPUs.
        remark: what the number is made of.
    """

    model: str
    tflops: float
    where: str
    source: str
    remark: str


RATES = (
    Rate(
        model="llama2_lora",
        tflops=778.0,
        where="MLPerf v4.1, 8 H200, eager, 8192 tokens a GPU",
        source=f"{_RESULTS_4_1}/llama2_70b_lora/implementations/h200_ngc24.09_nemo",
        remark="2.472 samples/s on 8 GPUs, 2,517.7 TFLOP a sample: LoRA, the causal half of attention",
    ),
)


def of_model(model: str) -> Published | None:
    """Return NVIDIA's submission of a model; None for a model without one."""
    return next((published for published in PUBLISHED if published.model == model), None)


def rate_of(model: str) -> Rate | None:
    """Return the published rate of a model; None where none is known."""
    return next((rate for rate in RATES if rate.model == model), None)


def stem(preset: str) -> str:
    """The preset as it was asked for: a GPU that holds fewer layers names it bench-l6."""
    return preset.partition("-")[0]


def title_of(model: str, preset: str) -> str:
    """Return the name of the model that a preset trains, as in GPT-3 175B; the folder of a model without a name."""
    if model == "moe" and "gpt_oss" in preset:
        return "GPT-OSS-120B" if "120b" in preset else "GPT-OSS-20B"
    own = of_model(model)
    return own.title if own else model
