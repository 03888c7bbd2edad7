"""gpt3/pipeline/stage.py and stage_graphs.py in one process: chunks, one stage alone, what is captured."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from common.optimizers.no_adam import NUDGE
from common.schedule import peak_in_flight
from gpt3 import train
from gpt3.config import PRESETS
from gpt3.pipeline import stage as pipeline
from gpt3.pipeline import stage_graphs
from gpt3.state import State
from graph_worth.capture.pool import Pool
from graph_worth.made_variant import Unsupported
from tests.helpers import contracts
from tests.helpers.followed import difference, follow
from tests.helpers.gpt3_case import CPU, SMALL, STEPS, eager_step_of

ONE_RANK = SimpleNamespace(rank=0, world_size=1)
# The 11,616-GPU run's stage at toy width: 8 chunks of 2 layers, 6 stages, 6 microbatches.
RANK = replace(
    PRESETS["rank"],
    **{name: getattr(SMALL, name) for name in ("hidden", "heads", "head_dim", "ffn", "vocab", "sequence", "layer")},
    amax_history=4,
    batches=2,
)


def graph_layer(state):
    return contracts.made("gpt3", "graph_layer", state)


@pytest.mark.parametrize("chunks, precision", [(2, "fp32"), (4, "bf16")])
def test_chunks_of_one_process_are_the_lessons_step(chunks, precision):
    """Bit for bit; in FP8 scales are updated once a step instead of once a microbatch."""
    one = State(replace(SMALL, precision=precision), CPU)
    split = State(replace(SMALL, precision=precision, chunks=chunks), CPU)
    ours, lesson = (follow(state, eager_step_of(state), STEPS) for state in (split, one))
    assert difference(ours, lesson, one) == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"chunks": 2},
        {"chunks": 2, "precision": "bf16", "microbatches": 3},
        {"pp": 2, "chunks": 2, "pp_rank": 0},
        {"pp": 2, "chunks": 2, "pp_rank": 1},
        {"pp": 4, "pp_rank": 1, "precision": "bf16"},
        {"pp": 2, "chunks": 2, "pp_rank": 0, "microbatches": 2},
    ],
    ids=lambda changes: ",".join(f"{name}={value}" for name, value in changes.items()),
)
def test_graphs_equal_eager_bit_for_bit(changes):
    state = State(replace(SMALL, **changes), CPU)
    eager = follow(state, eager_step_of(state), 4)
    variant = graph_layer(state)
    before = variant.capture.num_replays
    graphed = follow(state, variant.step, 4)
    assert difference(graphed, eager, state) == ""
    graphs, replays = contracts.model_of("gpt3", state).promises("graph_layer")
    assert variant.capture.num_replays - before == 4 * replays == sum(map(variant.replays_of, range(4)))
    assert len(variant.pool.graphs) == graphs
    mixed = follow(state, lambda index: variant.step(index) if index % 2 else eager_step_of(state)(index), 4)
    assert (mixed[2] == eager[2]).all()
    variant.close()


@pytest.mark.slow
def test_the_rank_of_the_11616_gpu_run_at_toy_width():
    state = State(RANK, CPU)
    assert [len(chunk) for chunk in state.chunks] == [2] * 8 and state.numbers[2:4] == [12, 13]
    # As many microbatches as stages: all forward passes come first, with 48 chunks' activations in flight.
    assert [step > 0 for step, _ in state.steps] == [True] * 48 + [False] * 48
    assert peak_in_flight(6, 0, 8, 6) == 48
    eager = follow(state, eager_step_of(state), 2)
    variant = graph_layer(state)
    assert len(variant.pool.graphs) == 192
    assert contracts.model_of("gpt3", state, PRESETS["rank"]).promises("graph_layer") == (192, 192)
    before = variant.capture.num_replays
    graphed = follow(state, variant.step, 2)
    assert variant.capture.num_replays - before == 192 * 2
    assert difference(graphed, eager, state) == ""
    assert len(set(eager[0])) == 2, "the weights move"


@pytest.mark.parametrize("stage", [0, 3, 5])
def test_a_stage_alone_has_its_own_layers_and_edges(stage):
    state = State(replace(RANK, pp_rank=stage), CPU)
    assert state.numbers[:4] == [2 * stage, 2 * stage + 1, 12 + 2 * stage, 13 + 2 * stage]
    assert (state.embedding is None) == (stage == 3)
    received = Counter(transfer.sends for transfers in state.transfers for transfer in transfers)
    # Each of 48 passes forward and backward; the model's ends receive nothing there.
    assert received == {True: 96 - 6 * (stage in (0, 5)), False: 96 - 6 * (stage in (0, 5))}
    names = {name for name, _ in state.named_state()}
    assert {"main_grad.0"} < names and not any("exp_avg" in name for name in names)


def test_a_stage_alone_moves_vectors_and_first_rows_against_their_gradients():
    state = State(replace(SMALL, pp=2, pp_rank=1), CPU)
    before = {name: parameter.detach().clone() for name, parameter in state.named_parameters()}
    eager_step_of(state)(0)
    for name, parameter in state.named_parameters():
        moved, grad = parameter.detach() - before[name], parameter.main_grad
        rows = slice(0, 1) if parameter.ndim > 1 else slice(None)
        assert (moved[rows].sign() == -grad[rows].sign()).float().mean() > 0.99, name
        assert float(moved[rows].abs().max()) <= 1.5 * NUDGE
        assert parameter.ndim == 1 or not moved[1:].any()


def test_a_stage_alone_is_fed_the_same_in_each_step_and_process():
    edges = [State(replace(SMALL, pp=2, pp_rank=1), CPU).edges for _ in range(2)]
    for one, other in zip(edges[0].activations, edges[1].activations, strict=True):
        assert torch.equal(one, other) and float(one.float().std()) == pytest.approx(1, rel=0.1)
    total = sum(float(grad.float().square().sum()) for grad in edges[0].gradients)
    assert total == pytest.approx(1, rel=0.1)


def test_receive_buffers_are_used_again_where_they_are_free():
    """A middle stage of 1F1B: as many activations as are in flight, and gradients, however many microbatches."""
    state = State(replace(SMALL, pp=4, pp_rank=1, microbatches=12), CPU)
    buffers = stage_graphs.receive_buffers(state)
    assert len(buffers) == 24
    assert len({id(buffer) for buffer in buffers.values()}) <= 2 * peak_in_flight(4, 1, 1, 12)


def test_graphs_chain_their_buffers():
    """From layer to layer and from chunk to chunk; filled are the first input and the gradient of the loss."""
    variant = graph_layer(State(replace(SMALL, chunks=2, microbatches=1), CPU))
    filled = {step for (step, _), each in variant.passes.items() if each.read is not None}
    assert filled == {1, -2}


def test_borrowed_memory_is_free_for_later_captures():
    pool, x = Pool(CPU), torch.ones(4)
    first, y = pool.capture(lambda: x + 1)
    borrowed = pool.borrow(y)
    del y
    second, _ = pool.capture(lambda: x + 2)
    first.replay()
    assert borrowed.tolist() == [2.0] * 4
    second.replay()
    assert borrowed.isnan().all()


def test_what_is_not_there_for_stages_says_so():
    model = contracts.model_of("gpt3", State(replace(SMALL, chunks=2), CPU))
    assert model.reference_step("graph_layer").func is pipeline.eager_step
    with pytest.raises(Unsupported, match="no code for these settings; eager, graph_layer, graph_layer_te have"):
        model.make("graph_layer_optimizer")
    with pytest.raises(Unsupported, match="graph_layer_te needs a GPU"):
        model.make("graph_layer_te")


def test_a_stage_alone_is_said_so():
    made = train.build(RANK, CPU, ONE_RANK)
    assert any("edges fed with fixed tensors, no optimizer" in note for note in made.notes)
    assert "edges fed" in made.card[-1]
    assert made.items == RANK.sequence * RANK.microbatch * RANK.microbatches
    # The embedding is no product; the head is the last stage's.
    assert train.build(replace(RANK, pp_rank=5), CPU, ONE_RANK).flops > made.flops
