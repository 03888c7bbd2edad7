"""The profile of a step without a GPU: how many operators it runs, and the share that host graphs run again."""

from torch.utils._python_dispatch import TorchDispatchMode

from graph_worth.capture.dispatch_modes import without_compiler


@without_compiler
class Counter(TorchDispatchMode):
    """Counts the operators that run within it, compiled functions' too."""

    def __init__(self):
        super().__init__()
        self.count = 0

    @classmethod
    def is_infra_mode(cls):
        """Return True: torch leaves compiled functions compiled within it."""
        return True

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += self.counts(function)
        return function(*args, **(kwargs or {}))

    def counts(self, function) -> bool:
        """Return whether this call of an operator counts."""
        return True


def profile(variant, num_steps: int) -> dict:
    """`kernels`, the operators of a step, and `graph_share`, the share in replays of host graphs.

    num_steps: steps that are counted, after one that is not. There is no busy time on a CPU.
    """
    variant.step(0)
    graphs = [graph for pool in variant.capture.pools for graph in pool.graphs]
    before = [graph.num_replays for graph in graphs]
    counter = Counter()
    with counter:
        for index in range(1, num_steps + 1):
            variant.step(index)
    pairs = zip(graphs, before, strict=True)
    replayed = sum((graph.num_replays - replays) * sum(graph.nodes().values()) for graph, replays in pairs)
    return {
        "busy_ms": None,
        "kernels": round(counter.count / num_steps, 2),
        "graph_share": min(1.0, replayed / counter.count) if counter.count else None,
        "steps": num_steps,
    }
