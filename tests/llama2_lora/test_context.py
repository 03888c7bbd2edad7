"""llama2_lora --cp: two ranks that share each window against one process, graphed against eager, and their parts."""

from dataclasses import replace

import pytest
import torch

from common.parallel.differentiable_collectives import places
from graph_worth.made_variant import Unsupported
from llama2_lora import state as states
from llama2_lora.config import PRESETS, flops_per_step
from llama2_lora.data.windows import PackedBatch
from llama2_lora.kernels.scaling import Formats
from llama2_lora.layers.context import own_part
from llama2_lora.plan import fixed_bytes
from llama2_lora.state import State, require_kind
from tests.helpers import gloo_ranks
from tests.helpers.llama2_lora_case import (
    CPU,
    TINY,
    follow_eager,
    inputs_of,
    losses_of_graphs,
    own_rank,
    shorten_corpus,
)

# FP32 and no dropout, whose masks are each rank's own: what is left is the order of sums.
EXACT = replace(TINY, precision="bf16", dropout=0.0)
STEPS = 3


def exact_losses(monkeypatch, config, rank=0, world_size=1):
    """(losses, gradient norms) of training in FP32."""
    shorten_corpus(monkeypatch)  # in the ranks' processes, too
    monkeypatch.setattr(states.Formats, "of", lambda config: Formats(*[torch.float32] * 3))
    state = State(config, CPU, "handwritten", rank, world_size)
    losses, norms, _ = follow_eager(state, STEPS)
    return losses, norms


def trained(config):
    with pytest.MonkeyPatch.context() as patch:
        return exact_losses(patch, config, *own_rank())


def cp2():
    return [trained(replace(EXACT, cp=2, documents=documents)) for documents in ("whole", "separate")]


def dp2_cp2():
    return trained(replace(EXACT, cp=2))


def dp2():
    return trained(EXACT)


def close(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        assert one == pytest.approx(other, rel=1e-5)


@pytest.mark.slow
def test_two_ranks_of_a_window_train_as_one_process_does(monkeypatch):
    alone = [exact_losses(monkeypatch, replace(EXACT, documents=each)) for each in ("whole", "separate")]
    assert alone[0][0] != alone[1][0]
    for ranks in gloo_ranks.run(__name__, "cp2", 2):
        for ours, theirs in zip(ranks, alone, strict=True):
            close(ours, theirs)


@pytest.mark.slow
def test_two_windows_of_two_ranks_each_train_as_two_data_ranks_do():
    expected = gloo_ranks.run(__name__, "dp2", 2)
    for rank, ours in enumerate(gloo_ranks.run(__name__, "dp2_cp2", 4)):
        close(ours, expected[rank // 2])


def graphed():
    """With dropout; handwritten layers in FP8, which keep nothing, something and everything."""
    config = replace(TINY, cp=2)
    state = State(replace(config, keep="1 qkv residual, 1 all"), CPU, "handwritten", *own_rank())
    return losses_of_graphs(state, STEPS)


@pytest.mark.slow
def test_two_ranks_graphed_equal_two_ranks_eager_bit_for_bit():
    first, second = gloo_ranks.run(__name__, "graphed", 2)
    assert first == second and len(set(first)) == STEPS


@pytest.mark.parametrize("lengths", [[64], [10, 1, 30, 23], [5] * 12 + [4]])
def test_bounds_of_runs_are_those_of_their_documents(lengths):
    """Check flash attention's mask by the bounds of queries and keys, spelled out, against the whole window's mask."""
    config = replace(TINY, cp=2)
    inputs = inputs_of(config, lengths=lengths)
    window = PackedBatch(
        inputs["tokens"], inputs["targets"], inputs["weights"], inputs["cu_seqlens"], inputs["positions"]
    )
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    visible = (document[:, None] == document) & torch.ones(64, 64, dtype=torch.bool).tril()
    for rank in range(2):
        part, own = own_part(window, config, rank), places(64, 2, rank)
        assert torch.equal(part["tokens"], window.tokens[own]) and torch.equal(part["positions"], window.positions[own])
        bounds, bounds_k = part["cu_seqlens"].tolist(), part["cu_seqlens_k"].tolist()
        starts = own[::16].tolist()
        keys = torch.cat([torch.arange(start + 16) for start in starts])
        assert (bounds[0], bounds[-1], bounds_k[-1]) == (0, 32, len(keys)) and len(bounds) == len(bounds_k)
        seen = torch.zeros(32, 64, dtype=torch.bool)
        for begin, end, begin_k, end_k in zip(bounds, bounds[1:], bounds_k, bounds_k[1:], strict=False):
            for query in range(begin, end):
                # The last query of a document sees all its keys.
                seen[query, keys[begin_k : end_k - (end - 1 - query)]] = True
        assert torch.equal(seen, visible[own])


def test_sizes_are_those_of_a_ranks_tokens():
    config = PRESETS["mlperf_cp8"]
    assert (config.tokens, config.ranks(16).dp) == (1024, 2)
    assert flops_per_step(config) == flops_per_step(PRESETS["full"]) / 8
    # Beside a window of 1024 tokens of its own: keys, values and positions of the others.
    assert fixed_bytes(PRESETS["bench"]) < fixed_bytes(config) < fixed_bytes(PRESETS["bench"]) * 1.02
    seen = [int((places(8192, 8, rank) + 1).sum()) for rank in range(8)]
    assert len(set(seen)) == 1


def test_what_does_not_fit_is_said():
    with pytest.raises(ValueError, match="--cp 2 needs a multiple of 2 ranks, this run has 3"):
        replace(TINY, cp=2).ranks(3)
    with pytest.raises(ValueError, match="--sequence 64: takes a multiple of 16 x --cp 3"):
        replace(TINY, cp=3)
    with pytest.raises(Unsupported, match="--cp 2 needs handwritten layers"):
        require_kind("te", replace(TINY, cp=2), CPU)
