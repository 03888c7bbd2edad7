"""Names of the lying model's variants: sound ones, ones that lie about their work, and ones that break."""

SOUND = (
    "eager_twin",
    "graph_step",
    "graph_fwd_bwd",
    "graph_halves",
    "graph_room",
    "graph_room_too",
    "graph_entered",
)
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
    "grows_in_enter": "memory grew",
    "grows_in_leave": "memory grew",
    "grows_untimed": "memory grew",
    "remembers": "losses",
    "slower_rate": "losses",
    "threads": "threads more",
    "late_update": "still changed",
    "fewer_replays": "promised",
    "more_graphs": "promised",
    "no_graph": "promised",
    "scaled_update": "losses",
    "starts_process": "left 1 processes running: sleep",
}
# Name -> (the variant that fails, what is said of it), where eager repeats audits in a process of its own.
FOUND_BY_AUDITS = {
    "hands_in": ("hands_in", "a process of its own, from a state that a secret draw had scaled"),
    "bends_state": ("eager", "from a state that a secret draw had scaled"),
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
    "haunts": "left 1 threads running: Thread-",
    "haunts_unsupported": "needs hardware that nobody has",
    "haunts_later": "left 1 threads running: Thread-",
    "unsupported": "needs hardware that nobody has",
    "breaks_in_block": "RuntimeError: the variant breaks in a block",
    "breaks_in_profile": "RuntimeError: no profile",
}
