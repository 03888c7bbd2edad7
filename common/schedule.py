"""Pipeline schedules: in which order a stage runs its chunks, and what it sends and receives between them. Pure Python.

A stage holds `chunks` parts of the model, of equal numbers of layers. Chunk c of stage s is part (c - 1) pp + s: an
activation goes through chunk 1 of stages 0 to pp - 1, then through chunk 2 of stage 0, and so on. A step of a stage is
+c, the forward pass of its chunk c, or -c, the backward pass of chunk c, in Transformer Engine's notation; the n-th +c,
and the n-th -c, are of microbatch n, counted from 0.

    before = communications(pp, stage, chunks, microbatches)
    for transfers, (step, microbatch) in zip(before, numbered(order(pp, stage, chunks, microbatches))):
        ...                     exchange what `transfers` lists, in one batch; then run `step`
    ...                         exchange what before[-1] lists

Rules of the order: 1F1B (Narayanan et al., 2019) and interleaved 1F1B (Narayanan et al., 2021) as Megatron-Core runs
them: forward passes of a warm-up, then pairs of one forward and one backward pass, then the backward passes left. With
as many microbatches as stages, interleaved, all forward passes come first.
"""

from collections import Counter, deque
from typing import NamedTuple

from common.parallel.groups import require_schedule


class Transfer(NamedTuple):
    """One tensor between two stages, from the side of one of them.

    sends: whether it goes out. peer: the other stage. step: the step of this stage that it belongs to: of +c the input
    (received) or output (sent) of chunk c, of -c the gradient of its output (received) or input (sent).
    """

    sends: bool
    peer: int
    step: int
    microbatch: int


def num_warmup(pp: int, stage: int, chunks: int, microbatches: int) -> int:
    """Forward passes of a stage before its first pair of a forward and a backward pass."""
    require_schedule(pp, stage, chunks, microbatches)
    if pp == 1:
        return chunks - 1
    if chunks == 1:
        return min(pp - stage - 1, microbatches)
    total = chunks * microbatches
    return total if microbatches == pp else min(2 * (pp - stage - 1) + (chunks - 1) * pp, total)


def order(pp: int, stage: int, chunks: int, microbatches: int) -> list[int]:
    """Steps of a stage: [1, 1, -1, ...], 2 x chunks x microbatches of them.

    One stage (pp 1) runs a microbatch forward and backward before the next one. ValueError as of `require_schedule`.
    """
    warmup = num_warmup(pp, stage, chunks, microbatches)
    if pp == 1:
        return [*range(1, chunks + 1), *range(-chunks, 0)] * microbatches
    # Microbatches go through the chunks in groups of pp; backward passes begin with the last chunk.
    forward = [1 + k % (pp * chunks) // pp for k in range(chunks * microbatches)]
    backward = [step - chunks - 1 for step in forward]
    num_pairs = len(forward) - warmup
    pairs = [step for pair in zip(forward[warmup:], backward, strict=False) for step in pair]
    return forward[:warmup] + pairs + backward[num_pairs:]


def numbered(steps) -> list[tuple[int, int]]:
    """(step, microbatch) of each step of an order."""
    counts: Counter[int] = Counter()
    result = []
    for step in steps:
        result.append((step, counts[step]))
        counts[step] += 1
    return result


def peak_in_flight(pp: int, stage: int, chunks: int, microbatches: int) -> int:
    """Most activations of a chunk and microbatch that a stage holds: those of the warm-up and of the first pair."""
    return min(num_warmup(pp, stage, chunks, microbatches) + 1, chunks * microbatches)


# ------------------------------------------------------------------------------------------------
# Slots of captured graphs and of buffers


def buffer_slots(steps, transfers) -> dict[tuple[int, int], int]:
    """{(step, microbatch): slot} of the buffers that a stage's passes read: those of one slot are never there together.

    steps: of `numbered`. transfers: of `communications`. An activation is read last in its chunk's backward pass, a
    gradient in the pass that takes it. What is not received is written right before its pass.
    """
    place = {key: index for index, key in enumerate(steps)}
    receives = [(index, transfer) for index, batch in enumerate(transfers) for transfer in batch if not transfer.sends]
    arrival = place | {(transfer.step, transfer.microbatch): index for index, transfer in receives}
    slots: dict[tuple[int, int], int] = {}
    free: dict[bool, deque[int]] = {True: deque(), False: deque()}
    busy: list[tuple[int, tuple[int, int]]] = []
    num_slots = 0
    for key in sorted(steps, key=lambda key: (arrival[key], place[key])):
        step, microbatch = key
        for last, busy_key in [pair for pair in busy if pair[0] < arrival[key]]:
            busy.remove((last, busy_key))
            free[busy_key[0] > 0].append(slots[busy_key])
        # Activations and gradients apart, the oldest first: so that fewer microbatches, which leave out some passes,
        # find them free as well.
        if free[step > 0]:
            slots[key] = free[step > 0].popleft()
        else:
            slots[key], num_slots = num_slots, num_slots + 1
        busy.append((place[-abs(step), microbatch], key))
    return slots


# ------------------------------------------------------------------------------------------------
# Time and communication


def communications(pp: int, stage: int, chunks: int, microbatches: int) -> list[list[Transfer]]:
    """Return the transfers of a stage before each step of its order and, last, after all steps.

    The transfers of one entry go in one batch; the stage runs its step when all of them are done. A tensor is sent
    right behind the step that makes it. Its receiver posts it at that time too, were all steps to last equally long,
    and so often before it is used: what is received needs a buffer for each chunk and microbatch. Sends from one stage
    to another and their receives come in the same order, so that one process group without tags serves both ways: the
    pipeline's, in which a stage's number is its rank.
    """
    orders = [numbered(order(pp, number, chunks, microbatches)) for number in range(pp)]
    starts = _starts(pp, chunks, orders)
    places = [{key: index for index, key in enumerate(steps)} for steps in orders]
    messages = []
    for taker, steps in enumerate(orders):
        for step, microbatch in steps:
            source, made_by = origin(pp, chunks, taker, step) or (taker, step)
            if source != taker:
                index = places[source][made_by, microbatch]
                messages.append((starts[source][index] + 1, source, index + 1, made_by, taker, step, microbatch))
    entries: list[list[list[Transfer]]] = [[[] for _ in range(len(steps) + 1)] for steps in orders]
    # Of each stage the entry that the next message finds: messages come by time, and so do entries.
    entry = [0] * pp
    for time, source, index, step, peer, peer_step, microbatch in sorted(messages):
        while entry[peer] < len(starts[peer]) and starts[peer][entry[peer]] < time:
            entry[peer] += 1
        entries[source][index].append(Transfer(True, peer, step, microbatch))
        entries[peer][entry[peer]].append(Transfer(False, source, peer_step, microbatch))
    return entries[stage]


def _starts(pp, chunks, orders):
    """For each stage the times of its steps, when every step takes 1 and starts as soon as its input is there."""
    starts: list[list[int]] = [[] for _ in orders]
    ended: set[tuple[int, int, int]] = set()
    time = 0
    while len(ended) < sum(map(len, orders)):
        ran = []
        for stage, steps in enumerate(orders):
            if len(starts[stage]) < len(steps):
                step, microbatch = steps[len(starts[stage])]
                source = origin(pp, chunks, stage, step)
                if source is None or (*source, microbatch) in ended:
                    starts[stage].append(time)
                    ran.append((stage, step, microbatch))
        assert ran, "a step waits for ever"
        ended.update(ran)
        time += 1
    return starts


def origin(pp, chunks, stage, step):
    """(stage, step) whose result a step takes; None for what enters the model."""
    position = (abs(step) - 1) * pp + stage
    if step < 0:
        return (stage, -step) if position == pp * chunks - 1 else ((position + 1) % pp, -((position + 1) // pp + 1))
    return ((position - 1) % pp, (position - 1) // pp + 1) if position else None
