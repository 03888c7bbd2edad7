"""The record of one eager step under watch: its operators, and each call that no graph can hold."""

from dataclasses import dataclass, field

import torch

from graph_worth.capture import host_graph_rules as rules
from graph_worth.your_step.place import Place

WAITS = "waits for the GPU"
A_CUDA_OPERATION = "a CUDA operation"
PINS = "allocates pinned memory"
BY_TABLE = "is held by no graph"
COPIES_TO_HOST = "copies to the host, which waits for the GPU"
# Reason -> kind of finding.
KINDS = {
    rules.READS: "host read",
    rules.LENGTHS: "host read",
    COPIES_TO_HOST: "host read",
    WAITS: "synchronisation",
    PINS: "pinned memory",
    BY_TABLE: "host read",
    rules.SHAPE: "shape from values",
    rules.NEW: "host data",
    rules.RANDOM: "random state",
    rules.RESIZES: "moved memory",
    rules.COLLECTIVE: "collective",
}


@dataclass(frozen=True)
class RefusedCall:
    """A call that no graph can hold: its name, the reason, which is a key of KINDS, and its place.

    is_hidden: inside of torch's C++, where a host graph does not see it.
    why_not: "in a capture" or "in the loader" of a read that no step in a graph makes, else "".
    """

    name: str
    reason: str
    place: Place
    is_hidden: bool = False
    why_not: str = ""


@dataclass(frozen=True)
class Operator:
    """One operator of a step.

    Attributes:
        name: such as aten.addmm.default.
        shapes: of the tensors that it gave.
        numbers: Python's numbers among its arguments, which a graph keeps as they are.
        outside: for each tensor among its arguments the storage, where no operator of this step has made it, else None.
        place: where it was called.
    """

    name: str
    shapes: tuple
    numbers: tuple
    outside: tuple
    place: Place


@dataclass
class Watched:
    """A record of one step.

    Attributes:
        operators: in order.
        refused: calls that no graph can hold.
        of_host: lines whose reads are of tensors of the host.
        generators: those that operators drew from, with the place of the first call.
        copies: (place, storage, whether it is pinned) of copies from memory of the host to the GPU.
        made: storage -> place of the operator that made it.
        written: storage from outside of the step -> place of the first operator that writes it.
        from_host: storages of tensors that the step has made from data of the host.
        exchanged: storages of tensors that collectives and FSDP's own operators take, as the buckets of DDP.
        rewritten: those storages from outside whose first operator writes all of it: nothing is carried over in them.
        contents: hash of small memory of the host that the step reads from outside, after its own operators.
        refilled: such storages that no operator has changed since an earlier step -> place of the first that reads it.
        kept: storages from outside of the step, held so that no other one gets their address.
        threads: places that start a thread, or hand work to one.
        drawing: places of threads that were at work when the random state changed between two operators.
        loads: places that load an optimizer's state.
        warned: (message, place) of each warning.
        asked_capturing: place where the step asked first whether a stream captures.
        unjoined: (text, place) of work on side streams that the step does not wait for.
    """

    operators: list[Operator] = field(default_factory=list)
    refused: list[RefusedCall] = field(default_factory=list)
    of_host: set[str] = field(default_factory=set)
    generators: dict[int, tuple[torch.Generator, Place]] = field(default_factory=dict)
    copies: list[tuple[Place, int | None, bool]] = field(default_factory=list)
    made: dict[int, Place] = field(default_factory=dict)
    written: dict[int, Place] = field(default_factory=dict)
    from_host: set[int] = field(default_factory=set)
    exchanged: set[int | None] = field(default_factory=set)
    rewritten: set[int | None] = field(default_factory=set)
    contents: dict[int, int] = field(default_factory=dict)
    refilled: dict[int, Place] = field(default_factory=dict)
    kept: dict[int, torch.UntypedStorage | None] = field(default_factory=dict)
    threads: list[Place] = field(default_factory=list)
    drawing: list[Place] = field(default_factory=list)
    loads: list[Place] = field(default_factory=list)
    warned: list[tuple[str, Place]] = field(default_factory=list)
    asked_capturing: Place | None = None
    unjoined: list[tuple[str, Place]] = field(default_factory=list)
