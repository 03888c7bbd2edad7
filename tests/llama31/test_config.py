"""llama31/config: sizes, FLOP, presets, promises, flags that do not fit together or that no graph can hold."""

import os
from dataclasses import replace

import pytest

from llama31.config import (
    PRESETS,
    SCOPES,
    Config,
    flops_per_step,
    layers_of_stages,
    num_parameters,
    require_capturable,
)
from tests.helpers import contracts, forked

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
    # Of tensor ranks the default share is the rest of the submission's 8.
    both = replace(BENCH, tp=2)
    assert (both.share, both.local_heads, num_parameters(both)) == (4, 16, num_parameters(BENCH))
    assert both.ranks(2).dp == 1 and flops_per_step(both) == pytest.approx(flops_per_step(BENCH))
    assert flops_per_step(replace(TINY, ramp="1,2,3")) == pytest.approx(flops_per_step(TINY) * 2 / 3)


def test_layers_of_stages():
    assert layers_of_stages(4, 2) == [range(2), range(2, 4)]
    # 126 layers with embedding and loss are 128 slots, as NVIDIA splits them.
    assert list(map(len, layers_of_stages(126, 8))) == [15, 16, 16, 16, 16, 16, 16, 15]
    assert [layer for stage in layers_of_stages(126, 8) for layer in stage] == list(range(126))
    with pytest.raises(ValueError, match="--layers 5: takes a multiple of --pp 2,"):
        layers_of_stages(5, 2)


MEGATRON = ("megatron_eager", "megatron_local", "megatron_te", "megatron_full")
KINDS = {name: each.kind for name, each in contracts.request("llama31").variants.items()}


def promised(name, config=TINY):
    model = contracts.model("llama31")
    model.config = config
    return model.promises(name)


def test_promises():
    assert promised("graph_fwd_bwd") == promised("graph_step") == (2, 1)
    assert promised("graph_microbatch") == (4, 3)
    assert promised("graph_layer") == (13, 12)
    stages = replace(TINY, pp=2)
    assert promised("graph_microbatch", stages) == promised("graph_layer", stages) == (7, 6)
    # Stages of 15 and 16 layers.
    assert promised("graph_layer", MLPERF) == (None, None)
    assert promised("graph_microbatch", replace(TINY, ramp="1,2,3")) == (4, None)
    assert promised("graph_fwd_bwd", replace(TINY, validate_every=2)) == (2, None)
    assert promised("reduce_overhead") == (None, None) and promised("graph_step_compiled") == (2, 1)
    others = {name for name, kind in KINDS.items() if kind != "graph"} - {"reduce_overhead", "graph_step_compiled"}
    others -= {*MEGATRON}
    by_megatron = [promised(name, replace(TINY, layer="megatron")) for name in MEGATRON]
    assert by_megatron == [(0, 0), (4, 12), (4, 12), (1, 1)]
    assert others == {"eager", "compile"} and all(promised(name) == (0, 0) for name in others)


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
        ({"tp": 4}, "--kv-heads 2 is not divisible by --tp 4: take --tp 2"),
        ({"tp": 2, "share_tp": 4}, "--kv-heads 2 is not divisible by --share-tp 4 x --tp 2 = 8: take --share-tp 1"),
        ({"tp": 3, "share_tp": 0}, "--tp 3: takes a divisor of 8, or --share-tp 1"),
        ({"cp": 3}, "--sequence 32 is not divisible by"),
        ({"sequence": 72, "precision": "fp8"}, "divisible by 16"),
        ({"precision": "bf16", "weights": "fp8"}, "--weights fp8 needs --precision fp8"),
        ({"optimizer": "none", "clip": "host"}, "--optimizer none takes --weights bf16 --clip device"),
        ({"ramp": "4,6"}, "--ramp 4,6: takes numbers up to --microbatches 3"),
        ({"ramp": "1,x"}, "--ramp 1,x: takes numbers from 1 up"),
        ({"pp": 3}, "--layers 2: takes a multiple of --pp 3"),
        ({"lr": float("nan")}, "--lr nan: takes a finite number"),
    ],
)
def test_flags_that_do_not_fit(changes, told):
    with pytest.raises(ValueError) as caught:
        Config(**{**vars(TINY), **changes})
    assert told in str(caught.value) and "\n" not in str(caught.value)


# --- the script's own flags and environment

EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512,expandable_segments:True"}
RANKS = {"WORLD_SIZE": "2"}
STEPS = ("graph_step", "graph_step_nvfp4")
WHOLE_GRAPHS = ("graph_microbatch", "graph_fwd_bwd", *STEPS)


def test_each_variant_that_captures_has_a_scope():
    """graph_parameterized captures nothing itself: torch.compile's backend does."""
    assert {*SCOPES, "graph_parameterized"} == {name for name, kind in KINDS.items() if kind == "graph"} - {*MEGATRON}


@pytest.mark.parametrize(
    "changes, environment, refused, rule",
    [
        ({}, {}, (), ""),
        ({"nan_checks": True}, {}, WHOLE_GRAPHS, "a NaN check"),
        ({"ramp": "1,2,3"}, {}, ("graph_fwd_bwd", *STEPS), "a changing number of microbatches"),
        ({"clip": "host"}, {}, (*STEPS, "graph_optimizer"), "clipping with a host read"),
        ({"ramp": "02,2"}, {}, (), ""),
        ({}, RANKS | EXPANDABLE, tuple(SCOPES), "expandable segments"),
        ({}, RANKS | EXPANDABLE | {"NCCL_GRAPH_REGISTER": "0"}, (), ""),
        (
            {},
            RANKS | {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "NCCL_GRAPH_REGISTER": "1"},
            tuple(SCOPES),
            "expandable segments",
        ),
        # Alone, a process has no NCCL.
        ({}, {"WORLD_SIZE": "1"} | EXPANDABLE, (), ""),
    ],
)
def test_flags_meet_the_rules(changes, environment, refused, rule):
    config = replace(TINY, **changes)
    for variant in KINDS:
        if variant in refused:
            with pytest.raises(ValueError, match=f"^cannot capture {rule}[^\\n]*$"):
                require_capturable(config, variant, environment)
        else:
            require_capturable(config, variant, environment)


def test_a_refusal_is_one_line_before_ranks_meet():
    """The other one of two ranks never comes: whoever waited for it would not end."""
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    environment |= {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
    words = ["--preset", "tiny", "--variant", "graph_fwd_bwd", "--ramp", "1,2,3"]
    answer = forked.run("llama31.train", words, environment, timeout_s=300)
    assert (answer.returncode, answer.stdout, answer.stderr.count("\n")) == (2, "", 1), answer
    assert "--variant graph_microbatch" in answer.stderr
