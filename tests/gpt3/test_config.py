"""gpt3/config: parameter counts against what is built, the presets' widths, what fits."""

from dataclasses import replace

import pytest
import torch

from common.parallel.groups import Ranks
from gpt3.config import (
    CONTEXT_BYTES,
    PRESETS,
    SWEEPS,
    Config,
    fit,
    layer_parameters,
    num_parameters,
    predicted_bytes,
    require,
)
from gpt3.state import State

TINY, BENCH, RANK = PRESETS["tiny"], PRESETS["bench"], PRESETS["rank"]
FULL = replace(BENCH, heads=96, ffn=49152, vocab=51200)


@pytest.mark.parametrize(
    "config",
    [
        TINY,
        # No two widths alike, attention narrower and wider than hidden.
        Config(layers=1, hidden=48, heads=2, head_dim=16, ffn=80, vocab=37, sequence=11),
        Config(layers=1, hidden=32, heads=3, head_dim=16, ffn=16, vocab=5, sequence=7, precision="bf16"),
        *(replace(TINY, layers=12, pp=3, chunks=2, microbatches=3, pp_rank=stage) for stage in range(3)),
    ],
)
def test_counted_parameters_are_the_built_ones(config):
    state = State(replace(config, layer="torch"), torch.device("cpu"))
    assert num_parameters(config) == sum(parameter.numel() for parameter in state.parameters)
    layer = sum(parameter.numel() for parameter in state.layers[0].parameters())
    assert layer_parameters(config) == layer


def test_sizes_are_those_of_gpt3_and_of_the_submission():
    """12 hidden^2 weights, 1,811.94 M; biases of q k v, projection and both feed-forward matrices; two norms."""
    assert layer_parameters(FULL) == 1_811_939_328 + (36864 + 12288 + 49152 + 12288) + 4 * 12288
    assert num_parameters(replace(FULL, layers=96)) / 1e9 == pytest.approx(174.6, rel=1e-3)
    assert (8 * BENCH.heads, 8 * BENCH.heads * BENCH.head_dim, 8 * BENCH.ffn, 8 * BENCH.vocab) == (
        96,
        12288,
        49152,
        51200,  # 50,257 padded to a multiple of 128 x 8
    )
    assert (BENCH.layers, BENCH.microbatches, BENCH.precision, BENCH.amax_history) == (8, 4, "fp8", 1024)
    assert (4 * RANK.heads, 4 * RANK.ffn, 4 * RANK.vocab) == (96, 49152, 50688)
    assert (RANK.layers, RANK.stage_layers, RANK.chunks, RANK.microbatches) == (96, 16, 8, 6)


def test_fit_takes_the_most_layers_that_fit():
    for layers in (1, 3, 8):
        need = predicted_bytes(replace(BENCH, layers=layers))
        assert fit(BENCH, need) == replace(BENCH, layers=layers)
        if layers > 1:
            assert fit(BENCH, need - 1).layers == layers - 1
    assert fit(BENCH, 2**50) == BENCH
    with pytest.raises(ValueError, match=r"one layer needs .* GiB, .* GiB are free: .*--sequence .*--preset tiny"):
        fit(BENCH, predicted_bytes(replace(BENCH, layers=1)) - 1)


def test_fit_leaves_the_same_number_of_layers_in_each_chunk():
    config = replace(BENCH, layers=96, pp=2, chunks=4)
    need = predicted_bytes(replace(config, layers=40))
    assert fit(config, need).layers == 40 and fit(config, need - 1).layers == 32
    with pytest.raises(ValueError, match="one layer in each chunk needs"):
        fit(replace(config, layers=8), 2**30)


def test_masters_and_moments_are_split_over_data_ranks_or_elsewhere():
    whole, split = predicted_bytes(BENCH), predicted_bytes(replace(BENCH, zero1=True), dp=4)
    assert whole == predicted_bytes(replace(BENCH, zero1=True)) == predicted_bytes(BENCH, dp=4)
    assert whole - split == pytest.approx(9 * 1.15 * num_parameters(BENCH), rel=1e-3)
    # A share of the submission's Adam fits beside what the rank that runs alone has.
    assert predicted_bytes(PRESETS["mlperf"], dp=484) < predicted_bytes(RANK)
    # 16 layers at 8 bytes a parameter and 24 GiB of activations of 96 layers and microbatches.
    assert 75 < predicted_bytes(RANK) / 2**30 < 125


def test_prediction_grows_with_every_size():
    for name in ("layers", "hidden", "heads", "head_dim", "ffn", "vocab", "sequence", "microbatch"):
        assert predicted_bytes(replace(BENCH, **{name: 2 * getattr(BENCH, name)})) > predicted_bytes(BENCH), name
    assert predicted_bytes(replace(BENCH, precision="bf16")) < predicted_bytes(BENCH)
    # Eighteen bytes a parameter at the very least.
    assert predicted_bytes(BENCH) > 18 * num_parameters(BENCH)


def test_host_that_is_too_small_is_told_to_run_tiny():
    need = predicted_bytes(BENCH) - CONTEXT_BYTES
    require(BENCH, need)
    require(BENCH, None)
    with pytest.raises(ValueError, match="there is none, and the host has .* GiB free: run --preset tiny"):
        require(BENCH, need - 1)


@pytest.mark.parametrize(
    "fields, flag",
    [
        ({"layers": 0}, "--layers 0: takes a number from 1 up"),
        ({"lr": float("nan")}, "--lr nan"),
        ({"ffn": 250}, "--precision fp8 needs"),
        ({"heads": 3, "head_dim": 8}, "--precision fp8 needs"),
        ({"precision": "fp32", "layer": "te"}, "--precision fp32 needs --layer torch"),
        ({"pp": 2, "chunks": 2}, "--layers 2 is not divisible by --pp x --chunks 4"),
        ({"pp": 2, "chunks": 2, "layers": 4, "microbatches": 3}, "--microbatches 3 is no multiple of --pp 2"),
        ({"tp": 3}, "--sequence 32 is not divisible by --tp 3"),
        ({"cp": 2}, "--cp 2: takes 1"),
        ({"pp": 2, "pp_rank": 2}, "--pp-rank 2: takes a stage from 0 to 1 with --pp 2"),
        ({"pp_rank": -2}, "--pp-rank -2: takes a stage from 0 up, or -1"),
        ({"pp": 2, "pp_rank": 0, "tp": 2}, "--pp-rank 0 needs --tp 1"),
    ],
)
def test_mistake_names_the_flag(fields, flag):
    with pytest.raises(ValueError, match=flag):
        replace(TINY, **fields)
    assert replace(TINY, ffn=250, precision="bf16").ffn == 250


def test_sweeps_name_fields_and_doubled_values_are_valid():
    for preset in PRESETS.values():
        for first, *others in SWEEPS.values():
            scaled = {name: getattr(preset, name) * 2 for name in (first, *others)}
            assert predicted_bytes(replace(preset, **scaled)) > predicted_bytes(preset)


@pytest.mark.parametrize(
    "preset, changes, world_size, told",
    [
        ("tiny", {"tp": 2}, 3, "--tp 2 needs a multiple of 2 ranks, this run has 3"),
        ("mlperf", {}, 8, "--tp 4 --pp 6 need a multiple of 24 ranks, this run has 8"),
        ("rank", {}, 2, "--pp-rank 0 runs one stage by itself, this run has 2 ranks"),
        ("tiny", {"layer": "megatron"}, 2, "--layer megatron runs by itself, this run has 2 ranks"),
    ],
)
def test_world_sizes_that_are_refused(preset, changes, world_size, told):
    with pytest.raises(ValueError, match=told):
        replace(PRESETS[preset], **changes).ranks(world_size)


def test_world_sizes_that_are_taken():
    sizes = {name: config.world_sizes() for name, config in PRESETS.items()}
    assert sizes["bench"] == {"multiple_of": 1} and sizes["tiny_pp"] == {"multiple_of": 2}
    assert sizes["mlperf"] == {"multiple_of": 24} and sizes["rank"] == {"at_most": 1}
    assert PRESETS["mlperf"].ranks(11_616) == Ranks(dp=484, tp=4, pp=6)
    assert RANK.ranks(1) == Ranks(1)
