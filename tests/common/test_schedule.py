"""common/schedule: published orders and a simulator over small schedules."""

import itertools
from collections import deque

import pytest

from common import schedule

SIZES = [
    (pp, chunks, microbatches)
    for pp, chunks, microbatches in itertools.product(range(1, 6), range(1, 4), range(1, 11))
    if pp == 1 or chunks == 1 or microbatches % pp == 0
]


# --- orders


def test_published_orders():
    """Megatron-Core's 1F1B and interleaved 1F1B; one stage, which runs each microbatch to its end."""
    assert schedule.order(2, 0, 1, 4) == [1, 1, -1, 1, -1, 1, -1, -1]
    assert schedule.order(2, 1, 1, 4) == [1, -1] * 4
    assert schedule.order(2, 0, 2, 4) == [1, 1, 2, 2, 1, -2, 1, -2, 2, -1, 2, -1, -2, -2, -1, -1]
    assert schedule.order(2, 1, 2, 4) == [1, 1, 2, -2, 2, -2, 1, -1, 1, -1, 2, -2, 2, -2, -1, -1]
    assert schedule.order(1, 0, 3, 2) == [1, 2, 3, -3, -2, -1] * 2


def test_as_many_microbatches_as_stages():
    """The 11,616-GPU run of MLPerf v4.1: 6 stages, 8 chunks, 6 microbatches, 48 forwards and then 48 backwards."""
    for stage in range(6):
        steps = schedule.order(6, stage, 8, 6)
        assert steps == [c for c in range(1, 9) for _ in range(6)] + [c for c in range(-8, 0) for _ in range(6)]
        assert schedule.peak_in_flight(6, stage, 8, 6) == 48


def test_peaks_of_the_literature():
    assert [schedule.peak_in_flight(4, stage, 1, 8) for stage in range(4)] == [4, 3, 2, 1]
    assert schedule.peak_in_flight(4, 0, 2, 8) == 11
    assert schedule.peak_in_flight(8, 0, 2, 16) == 23


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((2, 0, 2, 3), "--microbatches 3 is no multiple of --pp 2, .*--chunks 2"),
        ((2, 0, 0, 2), "--chunks 0: takes a number from 1 up"),
        ((2, 2, 1, 2), "--pp-rank 2: takes a stage from 0 to 1 with --pp 2"),
    ],
)
def test_bad_sizes(sizes, message):
    for function in (schedule.order, schedule.peak_in_flight):
        with pytest.raises(ValueError, match=message):
            function(*sizes)


# --- the simulator


class Simulator:
    """All stages: a transfer is done when both sides have posted it, tensors between two stages in order.

    A stage goes on when all transfers of its batch are done. `peaks` are the most activations in flight.
    """

    def __init__(self, pp, chunks, microbatches):
        self.pp, self.last_part = pp, pp * chunks - 1
        self.orders = [schedule.numbered(schedule.order(pp, stage, chunks, microbatches)) for stage in range(pp)]
        self.batches = [schedule.communications(pp, stage, chunks, microbatches) for stage in range(pp)]
        # Posted and not yet met, between two stages.
        self.sent, self.awaited = ({pair: deque() for pair in itertools.permutations(range(pp), 2)} for _ in range(2))
        # Results of own steps, and what has arrived: (step, microbatch) each.
        self.made, self.arrived = ([set() for _ in range(pp)] for _ in range(2))
        # Transfers of the present batch that are not done; None before it is posted.
        self.pending, self.position = [None] * pp, [0] * pp
        self.live, self.peaks = [0] * pp, [0] * pp

    def run(self):
        while any([self.advance(stage) for stage in range(self.pp)]):
            pass
        assert self.position == [len(order) + 1 for order in self.orders], "deadlock"
        assert not any(self.sent.values()) and not any(self.awaited.values())
        assert not any(self.arrived) and self.live == [0] * self.pp

    def advance(self, stage):
        """Advance the stage; return whether it could do anything."""
        position = self.position[stage]
        if position > len(self.orders[stage]) or self.pending[stage]:
            return False
        if self.pending[stage] is None:
            self.post(stage, self.batches[stage][position])
            return True
        if position < len(self.orders[stage]):
            self.step(stage, *self.orders[stage][position])
        self.position[stage] += 1
        self.pending[stage] = None
        return True

    def post(self, stage, batch):
        self.pending[stage] = len(batch)
        for transfer in batch:
            if transfer.sends:
                assert (transfer.step, transfer.microbatch) in self.made[stage]
                self.sent[stage, transfer.peer].append(transfer)
            else:
                self.awaited[transfer.peer, stage].append(transfer)
        for transfer in batch:
            self.meet(*((stage, transfer.peer) if transfer.sends else (transfer.peer, stage)))

    def meet(self, sender, receiver):
        outgoing, incoming = self.sent[sender, receiver], self.awaited[sender, receiver]
        while outgoing and incoming:
            transfer, expected = outgoing.popleft(), incoming.popleft()
            direction = 1 if transfer.step > 0 else -1
            taker = (abs(transfer.step) - 1) * self.pp + sender + direction
            assert (taker % self.pp, direction * (taker // self.pp + 1)) == (receiver, expected.step)
            assert transfer.microbatch == expected.microbatch
            self.arrived[receiver].add((expected.step, expected.microbatch))
            self.pending[sender] -= 1
            self.pending[receiver] -= 1

    def step(self, stage, step, microbatch):
        part = (abs(step) - 1) * self.pp + stage
        enters = part == 0 if step > 0 else part == self.last_part
        if step < 0:
            assert (-step, microbatch) in self.made[stage]
        if not enters and self.pp == 1:
            assert (step - 1, microbatch) in self.made[stage]
        elif not enters:
            self.arrived[stage].remove((step, microbatch))
        self.made[stage].add((step, microbatch))
        self.live[stage] += 1 if step > 0 else -1
        self.peaks[stage] = max(self.peaks[stage], self.live[stage])


def test_small_schedules_run_to_their_end():
    for pp, chunks, microbatches in SIZES:
        simulator = Simulator(pp, chunks, microbatches)
        simulator.run()
        for stage, steps in enumerate(simulator.orders):
            assert simulator.peaks[stage] == schedule.peak_in_flight(pp, stage, chunks, microbatches)
            every = [
                (sign * chunk, m) for sign in (1, -1) for chunk in range(1, chunks + 1) for m in range(microbatches)
            ]
            assert sorted(steps) == sorted(every)


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


@pytest.mark.parametrize("pp, chunks", [(1, 1), (2, 1), (5, 1), (2, 2), (4, 3)])
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
