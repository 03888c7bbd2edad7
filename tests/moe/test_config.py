"""moe/config: sizes and FLOP of the published models, and flags that do not fit together."""

from dataclasses import replace

import numpy as np
import pytest

from moe.config import (
    FACTS,
    PRESETS,
    Config,
    fit,
    flops_notes,
    flops_per_step,
    needed_bytes,
    num_parameters,
    trained_parameters,
)
from moe.state import packing
from tests.helpers import contracts
from tests.helpers.moe_case import make

WHOLE_QWEN3 = replace(PRESETS["bench"], layers=48)


def test_parameters_of_the_published_models():
    assert num_parameters(WHOLE_QWEN3) == 30_532_122_624
    assert num_parameters(PRESETS["gpt_oss"]) == 20_914_757_184
    assert num_parameters(PRESETS["gpt_oss_120b"]) == 116_829_156_672


@pytest.mark.parametrize("preset", ["tiny", "tiny_gpt_oss"])
def test_parameters_are_those_of_the_state(preset):
    assert num_parameters(PRESETS[preset]) == sum(parameter.numel() for _, _, parameter in make(preset).parts)


def test_flops_are_megatrons():
    """94.2 TFLOP a sequence of 4,096 tokens, of Megatron's own formula with attention's causal half."""
    assert flops_per_step(WHOLE_QWEN3) / 1e12 == pytest.approx(94.2, abs=0.05)
    # All layers see all tokens.
    assert flops_per_step(replace(PRESETS["gpt_oss"], window=0)) / 1e12 == pytest.approx(98.5, abs=0.05)
    assert flops_per_step(PRESETS["gpt_oss"]) < flops_per_step(replace(PRESETS["gpt_oss"], window=0))
    # In a window of two of four tokens they see 1, 2, 2 and 2 keys, of all four 1, 2, 3 and 4, counted as half of four.
    short = replace(PRESETS["tiny_gpt_oss"], sequence=4, microbatches=1, window=2)
    seen = [6 * 2 * short.heads * short.head_dim * keys for keys in (1 + 2 + 2 + 2, 4 * 4 / 2)]
    assert flops_per_step(replace(short, window=0)) - flops_per_step(short) == seen[1] - seen[0]
    # A window of the whole sequence is the causal half with the diagonal.
    widest = replace(PRESETS["gpt_oss"], window=4096)
    assert flops_per_step(widest) == pytest.approx(flops_per_step(replace(widest, window=0)), rel=1e-4)


@pytest.mark.parametrize("preset, percent", [("qwen3_packed", 12.4), ("gpt_oss_lora", 6.1)])
def test_flops_of_packed_sequences_are_those_of_their_documents(preset, percent):
    """Megatron counts the sum of the squares of the documents' lengths, not of the sequences'."""
    packed = PRESETS[preset]
    lengths = [int(length) for index in range(packed.batches) for length in np.diff(packing(packed, index)) if length]
    too_many = flops_per_step(packed) - flops_per_step(packed, lengths)
    assert 100 * too_many / flops_per_step(packed, lengths) == pytest.approx(percent, abs=0.05)
    full = replace(packed, window=0)
    squares = packed.sequence**2 - sum(length**2 for length in lengths) / packed.batches
    pairs = 6 * packed.layers * packed.heads * packed.head_dim * squares
    assert flops_per_step(full) - flops_per_step(full, lengths) == pytest.approx(pairs)


def test_a_build_counts_the_documents_that_it_has():
    model = contracts.model("moe", "--preset", "tiny_packed")
    model.build()
    config, batches = model.training.config, model.training.state.batches
    lengths = [int(length) for batch in batches for row in batch["bounds"] for length in np.diff(row) if length]
    assert sum(lengths) == config.batches * config.tokens * config.microbatches
    assert model.training.flops == flops_per_step(config, lengths) < flops_per_step(config)


def test_a_window_ends_where_its_document_does():
    short = replace(PRESETS["tiny_gpt_oss"], sequence=6, microbatches=1, window=3)
    # Keys of tokens of documents of 4 and of 2 in layer 0; layer 1 counts half of the squares.
    keys = (1 + 2 + 3 + 3) + (1 + 2) + (4 * 4 + 2 * 2) / 2
    whole = flops_per_step(short) - 6 * 2 * short.heads * short.head_dim * (1 + 2 + 3 + 3 + 3 + 3 + 6 * 6 / 2)
    assert flops_per_step(short, [4, 2]) == whole + 6 * 2 * short.heads * short.head_dim * keys


@pytest.mark.parametrize("layers, preset, notes", [
    (7, "bench", ["logits 38 % of FLOP"]),
    (12, "gpt_oss", ["logits 26 % of FLOP"]),
    (48, "bench", []),
    (2, "tiny", []),
])  # fmt: skip
def test_a_slice_says_the_share_of_the_logits(layers, preset, notes):
    config = replace(PRESETS[preset], layers=layers)
    assert flops_notes(config, flops_per_step(config)) == notes


def test_as_many_layers_are_built_as_fit():
    config = PRESETS["gpt_oss"]
    fitted = fit(config, 139 * 2**30)
    assert 1 < fitted.layers < config.layers
    assert needed_bytes(fitted) <= 139 * 2**30 < needed_bytes(replace(fitted, layers=fitted.layers + 1))
    assert fit(PRESETS["gpt_oss_fwd_bwd"], 139 * 2**30).layers == 24


def test_frozen_matrices_count_twice_and_adapters_thrice():
    lora, whole = PRESETS["tiny_lora"], replace(PRESETS["tiny_lora"], lora_rank=0)
    attention = whole.hidden * 2 * (whole.heads + whole.kv_heads) * whole.head_dim
    matrices = whole.layers * (attention + whole.top_k * 3 * whole.hidden * whole.ffn) + whole.vocab * whole.hidden
    tokens = whole.tokens * whole.microbatches
    saved = 2 * tokens * matrices - 6 * tokens * trained_parameters(lora)
    assert flops_per_step(whole) - flops_per_step(lora) == saved


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"rope_theta": 1.0}, "--rope-theta 1.0: takes a finite number above 1"),
        ({"share_ep": 3}, "--experts 8: takes a multiple of --share-ep 3"),
        ({"rank_capacity_factor": 0.5}, "--rank-capacity-factor 0.5: takes a number from 1 to 1000"),
        ({"rank_capacity_factor": float("nan")}, "--rank-capacity-factor nan: takes a number from 1 to 1000"),
        ({"rank_capacity_factor": 1e300}, "--rank-capacity-factor 1e+300: takes a number from 1 to 1000"),
        ({"ep": 3}, "--experts 8: takes a multiple of --ep 3"),
        ({"ep": 2, "share_ep": 2}, "--ep 2 has ranks, --share-ep 2 stands for them"),
        ({"checkpoint": "somewhere", "ep": 2}, "--checkpoint takes a whole model"),
        ({"window": 65}, "--window 65: takes at most --sequence 64"),
        ({"documents": 65}, "--documents 65: takes at most --sequence 64"),
        ({"top_k": 9}, "--top-k 9: a token can choose among 8 experts"),
        ({"top_k": 3, "share_ep": 4}, "--top-k 3: a token can choose among 2 experts"),
        ({"ffn": 30}, "--ffn 30"),
        ({"head_dim": 15}, "--head-dim 15: takes an even number"),
        ({"checkpoint": "somewhere", "share_tp": 2}, "--checkpoint takes a whole model"),
        ({"lr": float("nan")}, "--lr nan"),
        ({"lora_rank": 65}, "--lora-rank 65: takes at most the width of a projection"),
        ({"lora_rank": -1}, "--lora-rank -1"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(changes, words):
    with pytest.raises(ValueError) as error:
        replace(PRESETS["tiny"], **changes)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_ranks_are_those_of_the_launcher():
    PRESETS["tiny"].require_ranks(1)
    with pytest.raises(ValueError, match="--ep 1 needs as many ranks, this run has 2: .* torchrun --nproc-per-node"):
        PRESETS["tiny"].require_ranks(2)
    assert FACTS["presets_need"]("bench", replace(PRESETS["bench"], ep=4))["world_size"] == {
        "multiple_of": 4,
        "at_most": 4,
    }
    assert FACTS["presets_need"]("tiny", PRESETS["tiny"])["world_size"]["at_most"] == 1


def test_each_rank_has_its_part_of_the_experts():
    config = replace(PRESETS["tiny_gpt_oss"], ep=4)
    assert (config.local_experts, config.rank_experts) == (8, 2)
    assert config.rank_capacity == 48  # 64 tokens x 2 choices x 1.5 / 4 ranks
    assert num_parameters(config) == sum(parameter.numel() for _, _, parameter in make("tiny_gpt_oss", ep=4).parts)


def test_a_share_has_its_part_of_everything():
    share = PRESETS["qwen3_share"]
    assert (share.local_heads, share.local_kv_heads, share.local_experts, share.local_vocab) == (16, 2, 32, 75968)
    # 8 choices of half of the sequence: what a balanced exchange over 4 ranks brings.
    assert share.rows == 4096 // 2 * 8
    assert isinstance(share, Config)
