"""llama2_lora/config: counts against the published ones, presets, and mistakes in one line."""

from dataclasses import replace

import pytest

from common import flops
from llama2_lora.config import PRESETS, Config, flops_per_step, layer_weights, num_parameters, num_trainable
from tests.helpers import contracts

TINY, BENCH, FULL = (PRESETS[name] for name in ("tiny", "bench", "full"))


def test_llama_2_70b_lora():
    assert num_trainable(FULL) == 44_564_480
    assert layer_weights(FULL) == 855_638_016
    # 68,976,648,192: meta-llama/Llama-2-70b-hf.
    assert num_parameters(FULL) == 68_976_648_192
    assert num_trainable(replace(FULL, layers=1)) == 557_056


def test_flop_of_a_step():
    """2,517.7 TFLOP for 8192 tokens; the layers' part is that of common/flops with frozen weights."""
    assert flops_per_step(FULL) / 1e12 == pytest.approx(2517.67, abs=0.01)
    c = FULL
    model = flops.Transformer(
        layers=c.layers,
        sequence=c.sequence,
        hidden=c.hidden,
        q_width=c.q_width,
        kv_width=c.kv_heads * c.head_dim,
        ffn=c.ffn,
        vocab=c.vocab,
        mlp_matrices=3,
    )
    assert flops_per_step(FULL) == model.flops(weight_gradients=False) + 6 * c.sequence * num_trainable(c)


def test_presets():
    # Chained layers, shared groups and rotating windows all need two.
    assert min(TINY.layers, TINY.heads // TINY.kv_heads, TINY.kv_heads, TINY.batches) >= 2
    assert all((c.rank, c.alpha, c.dropout, c.precision) == (16, 32.0, 0.1, "fp8") for c in (BENCH, FULL))


def test_the_learning_rate_is_mlperfs_for_a_checkpoint_and_a_small_one_for_random_weights():
    assert BENCH.learning_rate == 2e-5 and TINY.learning_rate == 1e-2
    assert replace(BENCH, checkpoint="llama").learning_rate == 5e-4
    assert replace(BENCH, checkpoint="llama", lr=1e-3).learning_rate == 1e-3
    assert replace(BENCH, lr=0.0).learning_rate == 0.0


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"sequence": 8200}, ("--sequence 8200", "16")),
        ({"rank": 0}, ("--rank 0",)),
        ({"heads": 60}, ("--heads 60", "--kv-heads 8")),
        ({"head_dim": 127}, ("--head-dim 127",)),
        ({"ffn": 1001}, ("--ffn", "16")),
        ({"dropout": float("nan")}, ("--dropout nan",)),
        ({"lr": float("inf")}, ("--lr inf",)),
        ({"lr": -0.5}, ("--lr -0.5", "-1 or")),
        ({"layer": "torch"}, ("--layer torch needs --precision bf16, not fp8",)),
        ({"layers": 10**9}, ("--layers 1000000000: takes a number up to 4096",)),
        ({"checkpoint": "/"}, ("--checkpoint /",)),
    ],
)
def test_mistakes_are_one_line_that_names_the_flag(fields, words):
    with pytest.raises(ValueError) as error:
        Config(**fields)
    assert "\n" not in str(error.value) and all(word in str(error.value) for word in words), error.value


def test_promises():
    full = contracts.model("llama2_lora", "--preset", "full")
    assert full.promises("graph_layer") == full.promises("graph_layer_te") == (160, 160)
    assert full.promises("graph_step") == (1, 1)
    assert full.promises("eager") == full.promises("eager_te") == full.promises("compile") == (0, 0)
    assert full.promises("reduce_overhead") == full.promises("graph_parameterized") == (None, None)
