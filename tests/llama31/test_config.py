"""llama31/config: sizes, FLOP, presets, promises, and flags that do not fit together."""

from dataclasses import replace

import pytest

from llama31.config import (
    PRESETS,
    Config,
    flops_per_step,
    layers_of_stages,
    num_parameters,
)
from llama31.variants import VARIANTS

TINY, BENCH, FULL, MLPERF = (PRESETS[name] for name in ("tiny", "bench", "full", "mlperf"))
WHOLE = replace(BENCH, layers=126, share_tp=1, share_cp=1)


def test_parameters_are_those_of_metas_models():
    assert num_parameters(WHOLE) == 405_853_388_800
    assert num_parameters(FULL) == 8_030_261_248
    assert num_parameters(replace(PRESETS["slice_70b"], layers=80, vocab=128256)) == 70_553_706_496


def test_flop_of_the_whole_model_are_megatrons_and_mlperfs():
    """Per sample of 8192 tokens: 20,676 TFLOP with the causal half of attention, 21,508 in full."""
    one = replace(WHOLE, microbatches=1)
    assert flops_per_step(one) / 1e12 == pytest.approx(20_676, abs=0.5)
    assert flops_per_step(one, causal_half=False) / 1e12 == pytest.approx(21_508, abs=1)


def test_a_share_is_what_one_gpu_of_the_ranks_does():
    share = replace(BENCH, share_cp=1)
    ranks = replace(share, share_tp=1, tp=8)
    assert num_parameters(share) == num_parameters(ranks)
    assert flops_per_step(share) == pytest.approx(flops_per_step(ranks))
    assert (BENCH.local_heads, BENCH.local_kv_heads, BENCH.local_ffn, BENCH.local_sequence) == (16, 1, 6656, 4096)
    assert flops_per_step(replace(TINY, ramp="1,2,3")) == pytest.approx(flops_per_step(TINY) * 2 / 3)


def test_layers_of_stages():
    assert layers_of_stages(4, 2) == [[range(2)], [range(2, 4)]]
    assert layers_of_stages(8, 2, 2) == [[range(2), range(4, 6)], [range(2, 4), range(6, 8)]]
    # 126 layers with embedding and loss are 128 slots, as NVIDIA splits them.
    sizes = [len(chunk) for (chunk,) in layers_of_stages(126, 8)]
    assert sizes == [15, 16, 16, 16, 16, 16, 16, 15]
    assert [layer for (chunk,) in layers_of_stages(126, 8) for layer in chunk] == list(range(126))
    sizes = [[len(chunk) for chunk in stage] for stage in layers_of_stages(126, 8, 8)]
    assert sizes == [[1] + 7 * [2], *6 * [8 * [2]], 7 * [2] + [1]]
    with pytest.raises(ValueError, match="--layers 5: takes a multiple of --pp 2,"):
        layers_of_stages(5, 2)
    with pytest.raises(ValueError, match="--layers 9: takes a multiple of --pp 2 x --chunks 2,"):
        layers_of_stages(9, 2, 2)


def promised(name, config=TINY):
    return VARIANTS[name].promised(config)


def test_promises():
    assert promised("graph_fwd_bwd") == promised("graph_step") == (2, 1)
    assert promised("graph_microbatch") == (4, 3)
    assert promised("graph_layer") == (13, 12)
    stages = replace(TINY, pp=2)
    assert promised("graph_microbatch", stages) == promised("graph_layer", stages) == (7, 6)
    interleaved = replace(TINY, pp=2, chunks=2, layers=8, microbatches=4)
    assert promised("graph_microbatch", interleaved) == (17, 16) and promised("graph_layer", interleaved) == (33, 32)
    # Stages of 15 and 16 layers.
    assert promised("graph_layer", MLPERF) == (None, None)
    assert promised("graph_microbatch", replace(TINY, ramp="1,2,3")) == (4, None)
    assert promised("graph_fwd_bwd", replace(TINY, validate_every=2)) == (2, None)
    assert promised("reduce_overhead") == (None, None)
    others = [name for name, variant in VARIANTS.items() if variant.kind != "graph" and name != "reduce_overhead"]
    assert all(promised(name) == (0, 0) for name in others)


def test_the_submission_runs_on_a_multiple_of_its_ranks():
    assert (MLPERF.tp, MLPERF.pp, MLPERF.cp, MLPERF.microbatches) == (4, 8, 2, 144)
    assert MLPERF.ranks(512).dp == 8
    with pytest.raises(ValueError, match="a multiple of 64 ranks"):
        MLPERF.ranks(8)


@pytest.mark.parametrize(
    "changes, told",
    [
        ({"layers": 0}, "--layers 0: takes a number from 1 up"),
        ({"heads": 5}, "--heads 5: takes a multiple of --kv-heads 2"),
        ({"tp": 4}, "--kv-heads 2 is not divisible by --share-tp 1 x --tp 4 = 4"),
        ({"cp": 3}, "--sequence 32 is not divisible by"),
        ({"sequence": 72, "precision": "fp8"}, "divisible by 16"),
        ({"precision": "bf16", "weights": "fp8"}, "--weights fp8 needs --precision fp8"),
        ({"zero": True}, "--zero true takes --main-grad fp32"),
        ({"zero": True, "main_grad": "fp32", "moments": "fp32", "clip": "host"}, "--clip host needs --zero false"),
        ({"optimizer": "none", "clip": "host"}, "--optimizer none takes --zero false --weights bf16"),
        ({"ramp": "4,6"}, "--ramp 4,6: takes numbers up to --microbatches 3"),
        ({"ramp": "1,x"}, "--ramp 1,x: takes numbers from 1 up"),
        ({"fc1_store": "fp8", "layer": "te"}, "--fc1-store fp8 needs --layer torch"),
        ({"chunks": 2}, "--chunks 2 needs --pp 2 or more"),
        ({"chunks": 2, "pp": 2, "layers": 4}, "--microbatches 3 is no multiple of --pp 2"),
        ({"chunks": 2, "pp": 2, "layers": 4, "microbatches": 4, "ramp": "2,4"}, "--ramp needs --chunks 1"),
        ({"pp": 3}, "--layers 2: takes a multiple of --pp 3"),
        ({"lr": float("nan")}, "--lr nan: takes a finite number"),
    ],
)
def test_flags_that_do_not_fit(changes, told):
    with pytest.raises(ValueError) as caught:
        Config(**{**vars(TINY), **changes})
    assert told in str(caught.value) and "\n" not in str(caught.value)
