"""Variants of the lying model: sound ones, ones that lie about their time, and ones that break."""

from common.variant_table import Declared, table

HERE = "tests.lying_model"


BUILDS = {"too_large": {"too_large": True}}
TOO_LARGE = {"reference": "eager_too_large", "builds": ("too_large",)}


def _graph(name, help, make, graphs=1, replays=1, **more):
    return Declared(
        name, help, "graph", f"{HERE}.sound:{make}", graphs=graphs, replays=replays, parity="bitwise", **more
    )


SOUND = {
    "eager_twin": Declared("eager_twin", "eager by another object", "eager", f"{HERE}.sound:eager", parity="bitwise"),
    "graph_step": _graph("graph_step", "the whole step", "Graphed", headline=True, formerly="graph"),
    "graph_fwd_bwd": _graph("graph_fwd_bwd", "forward and backward", "ForwardBackward"),
    "graph_halves": _graph("graph_halves", "two graphs", "Halves", graphs=2, replays=2),
    "graph_room": _graph("graph_room", "needs the memory that graph_room_too needs", "NeedsRoom"),
    "graph_room_too": _graph("graph_room_too", "needs the memory that graph_room needs", "NeedsRoom"),
    "graph_entered": _graph("graph_entered", "changes the state in enter, and back in leave", "Entered"),
}
# Name -> what the check says of it.
LIARS = {
    "drops": "losses",
    "half_precision": "losses",
    "frozen_rate": "losses",
    "half_batch": "losses",
    "stale_input": "parity",
    "one_operator": "graphs launch",
    "eager_graphed": "eager variant",
    "leak": "memory grew",
    "clock": "another process saw",
    "clock_sometimes": "another process saw",
    "grows_in_enter": "memory grew",
    "threads": "threads more",
    "late_work": "after a block",
    "late_update": "still changed",
    "fewer_replays": "promised",
    "more_graphs": "promised",
    "no_graph": "promised",
    "scaled_update": "losses",
}
BREAKS = {
    "segfault": "SIGSEGV",
    "exits": "exit status 3",
    "hangs": "no answer",
    "raises": "RuntimeError: the variant breaks",
    "not_finite": "not finite",
    "out_of_memory": "out of memory",
    "keeps_flags": "left torch changed",
    "moves_state": "moved the training state: weight 0",
    "unsupported": "needs hardware that nobody has",
    "breaks_in_block": "RuntimeError: the variant breaks in a block",
    "breaks_in_profile": "RuntimeError: no profile",
}
_KIND = {"eager_graphed": "eager"}
_MAKE = {"unsupported": "UnsupportedHere"}

VARIANTS = table(
    Declared("eager", "the reference", "eager", f"{HERE}.sound:eager", parity="bitwise", headline=True),
    *SOUND.values(),
    # In a build that cannot be built, and that has no variant named eager.
    Declared("eager_too_large", "eager of the large one", "eager", f"{HERE}.sound:eager", **TOO_LARGE),
    _graph("graph_too_large", "the whole step of the large one", "Graphed", **TOO_LARGE),
    *(
        Declared(
            name,
            f"lies: {said}",
            _KIND.get(name, "graph"),
            f"{HERE}.{file}:{_MAKE.get(name) or ''.join(word.capitalize() for word in name.split('_'))}",
            graphs=1,
            replays=1,
        )
        for file, kind in (("liars", LIARS), ("breaks", BREAKS))
        for name, said in kind.items()
    ),
)
