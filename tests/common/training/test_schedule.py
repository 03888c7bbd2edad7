"""common/schedule: published orders, a simulator over every small schedule, and a pipeline of gloo processes."""

import itertools
from collections import deque

import pytest
import torch

from common.training import schedule
from common.training.parallel import collectives
from tests.helpers import gloo_ranks

SIZES = [
    (pp, chunks, microbatches)
    for pp, chunks, microbatches in itertools.product(range(1, 9), range(1, 9), range(1, 17))
    if pp == 1 or chunks == 1 or microbatches % pp == 0
]


# --- orders


def test_published_orders():
    """Transformer Engine's own test; Megatron-Core's 1F1B and interleaved 1F1B."""
    assert schedule.split(schedule.order(2, 0, 1, 3), 2) == [1, 2, 1, 2, -2, -1, 1, 2, -2, -1, -2, -1]
    assert schedule.order(2, 0, 1, 4) == [1, 1, -1, 1, -1, 1, -1, -1]
    assert schedule.order(2, 1, 1, 4) == [1, -1] * 4
    assert schedule.order(2, 0, 2, 4) == [1, 1, 2, 2, 1, -2, 1, -2, 2, -1, 2, -1, -2, -2, -1, -1]
    assert schedule.order(2, 1, 2, 4) == [1, 1, 2, -2, 2, -2, 1, -1, 1, -1, 2, -2, 2, -2, -1, -1]


def test_one_stage_runs_each_microbatch_to_its_end():
    assert schedule.order(1, 0, 1, 3) == [1, -1] * 3
    assert schedule.order(1, 0, 3, 2) == [1, 2, 3, -3, -2, -1] * 2


@pytest.mark.parametrize("stage", range(6))
def test_as_many_microbatches_as_stages(stage):
    """The 11,616-GPU run of MLPerf v4.1: 6 stages, 8 chunks, 6 microbatches, 48 forwards and then 48 backwards."""
    steps = schedule.order(6, stage, 8, 6)
    assert steps == [c for c in range(1, 9) for _ in range(6)] + [c for c in range(-8, 0) for _ in range(6)]
    assert schedule.peak_in_flight(6, stage, 8, 6) == 48
    assert len(schedule.split(steps, 2)) == 192


def test_slots_of_the_submission_on_64_gpus():
    """Its get_num_graphs counts the same, and one more slot of each chunk."""
    assert list(schedule.num_slots(schedule.order(8, 0, 6, 512)).values()) == [16, 16, 16, 8, 8, 8]
    assert list(schedule.num_slots(schedule.order(8, 7, 6, 512)).values()) == [16, 16, 9, 8, 8, 1]


def test_peaks_of_the_literature():
    assert [schedule.peak_in_flight(4, stage, 1, 8) for stage in range(4)] == [4, 3, 2, 1]
    assert schedule.peak_in_flight(4, 0, 2, 8) == 11
    assert schedule.peak_in_flight(8, 0, 2, 16) == 23


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((2, 0, 2, 3), "--microbatches 3 is no multiple of --pp 2, .*--chunks 2"),
        ((0, 0, 1, 1), "--pp 0: takes a number from 1 up"),
        ((2, 0, 0, 2), "--chunks 0"),
        ((2, 0, 1, 0), "--microbatches 0"),
        ((2, 2, 1, 2), "--pp-rank 2: takes a stage from 0 to 1 with --pp 2"),
        ((2, -1, 1, 2), "--pp-rank -1"),
    ],
)
def test_bad_sizes(sizes, message):
    for function in (schedule.order, schedule.peak_in_flight):
        with pytest.raises(ValueError, match=message):
            function(*sizes)


# --- the simulator


def simulate(pp, chunks, microbatches):
    """Runs all stages, a transfer done only when both sides have posted it, tensors between two stages in order.

    A stage goes on when all transfers of its batch are done. Checks that what arrives is what the receiver expects and
    what its step takes; returns for each stage the most activations in flight.
    """
    orders = [schedule.numbered(schedule.order(pp, stage, chunks, microbatches)) for stage in range(pp)]
    batches = schedule.all_communications(pp, chunks, microbatches)
    # Posted and not yet met, between two stages.
    sent, awaited = ({pair: deque() for pair in itertools.permutations(range(pp), 2)} for _ in range(2))
    # Results of own steps, and what has arrived: (step, microbatch) each.
    made, arrived = ([set() for _ in range(pp)] for _ in range(2))
    # Transfers of the present batch that are not done; None before it is posted.
    pending, position = [None] * pp, [0] * pp
    live, peak = [0] * pp, [0] * pp

    def meet(sender, receiver):
        outgoing, incoming = sent[sender, receiver], awaited[sender, receiver]
        while outgoing and incoming:
            transfer, expected = outgoing.popleft(), incoming.popleft()
            part, direction = (abs(transfer.step) - 1) * pp + sender, 1 if transfer.step > 0 else -1
            taker = part + direction
            assert (taker % pp, direction * (taker // pp + 1)) == (receiver, expected.step)
            assert transfer.microbatch == expected.microbatch
            arrived[receiver].add((expected.step, expected.microbatch))
            pending[sender] -= 1
            pending[receiver] -= 1

    def advance(stage):
        """Advance the stage; return whether it could do anything."""
        if position[stage] > len(orders[stage]):
            return False
        if pending[stage] is None:
            batch = batches[stage][position[stage]]
            pending[stage] = len(batch)
            for transfer in batch:
                if transfer.sends:
                    assert (transfer.step, transfer.microbatch) in made[stage]
                    sent[stage, transfer.peer].append(transfer)
                else:
                    awaited[transfer.peer, stage].append(transfer)
            for transfer in batch:
                meet(*((stage, transfer.peer) if transfer.sends else (transfer.peer, stage)))
            return True
        if pending[stage]:
            return False
        if position[stage] < len(orders[stage]):
            step, microbatch = orders[stage][position[stage]]
            part = (abs(step) - 1) * pp + stage
            origin = (part - 1) % pp if step > 0 else (part + 1) % pp
            enters = part == 0 if step > 0 else part == pp * chunks - 1
            if step < 0:
                assert (-step, microbatch) in made[stage]
            if not enters and origin == stage:
                assert ((step - 1, microbatch)) in made[stage]
            elif not enters:
                arrived[stage].remove((step, microbatch))
            made[stage].add((step, microbatch))
            live[stage] += 1 if step > 0 else -1
            peak[stage] = max(peak[stage], live[stage])
        position[stage] += 1
        pending[stage] = None
        return True

    while any([advance(stage) for stage in range(pp)]):
        pass
    assert position == [len(order) + 1 for order in orders], "deadlock"
    assert not any(sent.values()) and not any(awaited.values()) and not any(arrived) and live == [0] * pp
    return peak


def test_every_small_schedule_runs_to_its_end():
    for pp, chunks, microbatches in SIZES:
        expected = [schedule.peak_in_flight(pp, stage, chunks, microbatches) for stage in range(pp)]
        assert simulate(pp, chunks, microbatches) == expected, (pp, chunks, microbatches)


def test_every_step_comes_once_for_each_microbatch():
    for pp, chunks, microbatches in SIZES:
        for stage in range(pp):
            steps = schedule.order(pp, stage, chunks, microbatches)
            assert sorted(steps) == sorted([*range(-chunks, 0), *range(1, chunks + 1)] * microbatches)


def test_every_schedule_fits_its_slots():
    """A slot for each microbatch in one pool; as few slots as can be in pools of their own. Two training steps."""
    for pp, chunks, microbatches in SIZES:
        for stage in range(pp):
            steps = schedule.order(pp, stage, chunks, microbatches) * 2
            each = dict.fromkeys(range(1, chunks + 1), microbatches)
            assert not schedule.unsafe_replay(steps, each, shared_pool=True)
            assert not schedule.unsafe_replay(steps, schedule.num_slots(steps), shared_pool=False)


def test_slots_that_are_not_safe():
    one_stage = schedule.order(1, 0, 1, 4)
    assert not schedule.unsafe_replay(one_stage, {1: 1}, shared_pool=True)
    steps = schedule.order(3, 0, 1, 6)
    assert schedule.num_slots(steps) == {1: 3}
    # The first slot's graphs were captured when no other slot was live.
    message = schedule.unsafe_replay(steps, {1: 3}, shared_pool=True)
    assert "step 4 (+1, microbatch 3) overwrites [(1, 1), (1, 2)]" in message
    assert "holds the activations" in schedule.unsafe_replay(steps, {1: 2}, shared_pool=False)
    assert "has no activations" in schedule.unsafe_replay([-1, 1], {1: 1}, shared_pool=False)


def test_timeline():
    """Interleaving divides the bubble by the number of chunks: (pp - 1) / (chunks * microbatches) of the work."""
    for chunks in (1, 2, 4):
        times = schedule.timeline(4, chunks, 8)
        assert max(end for stage in times for _, end in stage) == 16 * chunks + 2 * 3
    slow = schedule.timeline(2, 1, 2, lambda stage, step, microbatch: 3 if (stage, step) == (1, 1) else 1)
    assert slow == [[(0, 1), (1, 2), (5, 6), (9, 10)], [(1, 4), (4, 5), (5, 8), (8, 9)]]


def test_communications_of_one_stage():
    transfer = schedule.Transfer
    batches = schedule.communications(2, 1, 1, 2)
    assert batches[0] == [transfer(False, 0, 1, 0)]
    assert batches[2] == [transfer(True, 0, -1, 0)]
    assert batches[-1] == [transfer(True, 0, -1, 1)]
    assert schedule.communications(1, 0, 2, 2) == [[]] * 9


# --- buffers


def clash(pp, stage, chunks, microbatches, slots):
    """The first pass whose buffer is filled before what lies in it has been read for the last time; None."""
    steps = schedule.numbered(schedule.order(pp, stage, chunks, microbatches))
    place = {key: index for index, key in enumerate(steps)}
    filled = dict(place)
    for index, batch in enumerate(schedule.communications(pp, stage, chunks, microbatches)):
        filled |= {(t.step, t.microbatch): index for t in batch if not t.sends}
    read_last = {}
    for key in sorted(steps, key=lambda key: (filled[key], place[key])):
        if read_last.get(slots[key], -1) >= filled[key]:
            return key
        read_last[slots[key]] = place[-abs(key[0]), key[1]]
    return None


@pytest.mark.parametrize("pp, chunks", [(1, 1), (2, 1), (3, 1), (8, 1), (2, 2), (3, 2), (4, 3)])
def test_buffers_are_free_when_they_are_filled(pp, chunks):
    counts = (1, pp - 1, pp, 2 * pp, 3 * pp + 1) if chunks == 1 else (pp, 2 * pp, 4 * pp)
    for count, stage in itertools.product(filter(None, counts), range(pp)):
        steps = schedule.numbered(schedule.order(pp, stage, chunks, count))
        slots = schedule.buffer_slots(steps, schedule.communications(pp, stage, chunks, count))
        # A step of fewer microbatches, too.
        for fewer in range(1, count + 1) if chunks == 1 else (count,):
            assert clash(pp, stage, chunks, fewer, slots) is None, (count, stage, fewer)
        if chunks == 1:
            assert len(set(slots.values())) <= pp + 1


# --- a pipeline


def parts(count):
    torch.manual_seed(0)
    return [torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Tanh()).double() for _ in range(count)]


def inputs(microbatches):
    return torch.linspace(-1, 1, microbatches * 18, dtype=torch.float64).view(microbatches, 3, 6)


def reference(count, microbatches):
    model = parts(count)
    for x in inputs(microbatches):
        torch.nn.Sequential(*model)(x).square().sum().backward()
    return model


def train(chunks, microbatches):
    """Gradients of this stage's chunks against one process that has all of them."""
    pp, stage = collectives.group_size(), collectives.group_rank()
    own = parts(pp * chunks)[stage::pp]
    x, y, dy, dx = {}, {}, {}, {}
    for microbatch, value in enumerate(inputs(microbatches)):
        for chunk in range(1, chunks + 1):
            first, last = (chunk, stage) == (1, 0), (chunk, stage) == (chunks, pp - 1)
            x[chunk, microbatch] = value if first else torch.zeros(3, 6, dtype=torch.float64)
            dy[chunk, microbatch] = None if last else torch.zeros(3, 6, dtype=torch.float64)
    batches = schedule.communications(pp, stage, chunks, microbatches)
    steps = schedule.numbered(schedule.order(pp, stage, chunks, microbatches))
    for batch, (step, microbatch) in zip(batches, [*steps, (0, 0)], strict=True):
        exchange(batch, x, y, dy, dx)
        place = abs(step), microbatch
        if step > 0:
            x[place].requires_grad_(True)
            y[place] = own[step - 1](x[place])
        elif step < 0:
            if dy[place] is None:
                y[place].square().sum().backward()
            else:
                y[place].backward(dy[place])
            dx[place] = x[place].grad
    expected = reference(pp * chunks, microbatches)[stage::pp]
    return all(
        torch.equal(parameter.grad, other.grad)
        for module, same in zip(own, expected, strict=True)
        for parameter, other in zip(module.parameters(), same.parameters(), strict=True)
    )


def exchange(batch, x, y, dy, dx):
    outputs = [(t.peer, (y if t.step > 0 else dx)[abs(t.step), t.microbatch].detach()) for t in batch if t.sends]
    places = [(t.peer, (x if t.step > 0 else dy)[abs(t.step), t.microbatch]) for t in batch if not t.sends]
    collectives.exchange_(
        [tensor for _, tensor in outputs],
        [peer for peer, _ in outputs],
        [tensor for _, tensor in places],
        [peer for peer, _ in places],
    )


def worker():
    """Neighbours that send to each other at once, and pipelines of two stages."""
    return {"1F1B": train(1, 5), "interleaved": train(3, 4), "all forward first": train(2, 2)}


def test_pipelines_of_two_processes_are_bitwise_one_process():
    for result in gloo_ranks.run("tests.common.training.test_schedule", "worker", 2):
        assert result == dict.fromkeys(("1F1B", "interleaved", "all forward first"), True)
