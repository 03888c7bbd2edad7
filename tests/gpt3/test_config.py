"""gpt3/config: parameter counts against what is built, the presets' widths, what fits."""

from dataclasses import replace

import pytest
import torch

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
from gpt3.model import Embedding, PlainLayer, TeHalves, layer_class, te_layer
from gpt3.state import State

TINY, BENCH = PRESETS["tiny"], PRESETS["bench"]
FULL = replace(BENCH, heads=96, ffn=49152, vocab=51200)


@pytest.mark.parametrize(
    "config",
    [
        TINY,
        BENCH,
        FULL,
        replace(TINY, layers=3, precision="bf16"),
        # No two widths alike, attention narrower and wider than hidden.
        Config(layers=1, hidden=48, heads=2, head_dim=16, ffn=80, vocab=37, sequence=11),
        Config(layers=1, hidden=32, heads=3, head_dim=16, ffn=16, vocab=5, sequence=7, precision="bf16"),
    ],
)
def test_counted_parameters_are_the_built_ones(config):
    layer = PlainLayer(config, torch.bfloat16, "meta")
    embedding = Embedding(config, torch.bfloat16, "meta")
    assert layer_parameters(config) == sum(parameter.numel() for parameter in layer.parameters())
    assert num_parameters(config) == config.layers * layer_parameters(config) + sum(
        parameter.numel() for parameter in embedding.parameters()
    )


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_counted_parameters_of_a_stage_are_the_built_ones(stage):
    config = replace(TINY, layers=12, pp=3, chunks=2, microbatches=3, pp_rank=stage, layer="torch")
    state = State(config, torch.device("cpu"))
    assert num_parameters(config) == sum(parameter.numel() for parameter in state.parameters)
    assert num_parameters(replace(config, pp_rank=-1)) == num_parameters(replace(config, pp_rank=0))


def test_full_width_layer():
    """12 hidden^2 weights, 1,811.94 M; biases of q k v, projection and both feed-forward matrices; two norms."""
    assert 12 * 12288**2 == 1_811_939_328
    assert layer_parameters(FULL) == 1_811_939_328 + (36864 + 12288 + 49152 + 12288) + 4 * 12288


def test_whole_model_is_gpt3_175b():
    assert num_parameters(replace(FULL, layers=96)) / 1e9 == pytest.approx(174.6, rel=1e-3)


def test_bench_is_an_eighth_of_gpt3():
    assert (BENCH.hidden, BENCH.head_dim, BENCH.sequence, BENCH.microbatch) == (12288, 128, 2048, 1)
    assert (8 * BENCH.heads, 8 * BENCH.heads * BENCH.head_dim, 8 * BENCH.ffn) == (96, 12288, 49152)
    assert 8 * BENCH.vocab == 51200  # 50,257 padded to a multiple of 128 x 8
    assert (BENCH.layers, BENCH.microbatches, BENCH.precision, BENCH.amax_history) == (8, 4, "fp8", 1024)


def test_tiny_has_more_than_one_of_everything():
    """Chained layers, accumulated microbatches and rotating batches all need two."""
    assert min(TINY.layers, TINY.heads, TINY.microbatches, TINY.batches) >= 2
    assert TINY.precision == "fp8"
    assert num_parameters(TINY) < 1e6


def test_fit_takes_the_most_layers_that_fit():
    for layers in (1, 3, 8):
        need = predicted_bytes(replace(BENCH, layers=layers))
        assert fit(BENCH, need) == replace(BENCH, layers=layers)
        if layers > 1:
            assert fit(BENCH, need - 1).layers == layers - 1
    assert fit(BENCH, 2**50) == BENCH


def test_fit_says_what_to_change_when_not_even_one_layer_fits():
    one = predicted_bytes(replace(BENCH, layers=1))
    with pytest.raises(ValueError, match=r"one layer needs .* GiB, .* GiB are free: .*--sequence .*--preset tiny"):
        fit(BENCH, one - 1)


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
    assert predicted_bytes(PRESETS["mlperf"], dp=484) < predicted_bytes(PRESETS["rank"])


def test_submissions_sizes():
    rank = PRESETS["rank"]
    assert (4 * rank.heads, 4 * rank.ffn, 4 * rank.vocab) == (96, 49152, 50688)
    assert (rank.layers, rank.stage_layers, rank.chunks, rank.microbatches) == (96, 16, 8, 6)
    assert PRESETS["mlperf"].ranks(11_616).dp == 484


def test_prediction_grows_with_every_size():
    for name in ("layers", "hidden", "heads", "head_dim", "ffn", "vocab", "sequence", "microbatch"):
        assert predicted_bytes(replace(BENCH, **{name: 2 * getattr(BENCH, name)})) > predicted_bytes(BENCH), name
    current = replace(BENCH, precision="fp8_current")
    assert predicted_bytes(replace(BENCH, precision="bf16")) < predicted_bytes(current) < predicted_bytes(BENCH)
    # Less by the history of eight operands a layer.
    assert predicted_bytes(BENCH) - predicted_bytes(current) == pytest.approx(1.15 * 8 * 8 * 1024 * 4, rel=1e-3)
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
        ({"layers": 0}, "--layers 0"),
        ({"head_dim": -1}, "--head-dim -1"),
        ({"microbatches": 0}, "--microbatches"),
        ({"batches": 0}, "--batches"),
        ({"min_steps": 0}, "--min-steps"),
        ({"amax_history": 0}, "--amax-history"),
        ({"lr": float("nan")}, "--lr nan"),
        ({"lr": -1e-3}, "--lr -0.001"),
        ({"ffn": 250}, "--precision fp8 needs"),
        ({"heads": 3, "head_dim": 8}, "--precision fp8 needs"),
        ({"ffn": 250, "precision": "fp8_current"}, "--precision fp8_current needs"),
        ({"precision": "fp32", "layer": "te"}, "--layer torch"),
    ],
)
def test_mistake_names_the_flag(fields, flag):
    with pytest.raises(ValueError, match=flag):
        replace(TINY, **fields)


def test_sweeps_name_fields_and_doubled_values_are_valid():
    for preset in PRESETS.values():
        for first, *others in SWEEPS.values():
            for value in (getattr(preset, first) * 2, getattr(preset, first) * 4):
                scaled = {name: getattr(preset, name) * value // getattr(preset, first) for name in (first, *others)}
                assert predicted_bytes(replace(preset, **scaled)) > predicted_bytes(preset)
    # The share at tensor-parallel size 4.
    assert SWEEPS["width"] == ["heads", "ffn"]
    assert (BENCH.heads * 2 * 4, BENCH.ffn * 2 * 4) == (96, 49152)


def test_odd_widths_are_fine_in_bf16():
    assert replace(TINY, ffn=250, precision="bf16").ffn == 250


def test_layers_are_made_in_halves_where_halves_are_captured():
    te = replace(BENCH, layer="te")
    assert layer_class(te) is te_layer and layer_class(replace(te, graph_scope="mlp")) is TeHalves
    assert layer_class(replace(te, layer="torch", graph_scope="mlp")) is PlainLayer
