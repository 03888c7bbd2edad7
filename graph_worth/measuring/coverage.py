"""The share of forward and backward that parameterized regions launch, and what new addresses cost the host."""

import contextlib

from graph_worth.capture.host_graph_rules import ALLOCATIONS
from graph_worth.measuring import kernel_trace, marks, operator_count

# Sections of the models' steps; what comes before and after is neither forward nor backward.
SECTIONS = ("embedding", "forward", "loss", "backward")
_NUM_STEPS = kernel_trace.UNTRACED_STEPS + kernel_trace.TRACED_STEPS
_PATCHED_STEPS = 4


def measure(step, regions, cuda: bool) -> dict[str, float | None]:
    """Count a step's nodes in regions and its launches beside them.

    Args:
        step: step(index), which trains on a batch with its sections marked.
        regions: with `launch`, `num_replays` and `nodes()`, as `graph_worth.capture.parameterized.backend.Region`.
        cuda: kernels, copies and memsets are counted, else operators.

    Returns:
        nodes: replayed in a step; eager: launched in its forward and backward one by one; coverage: nodes / both, None
        where the step marks no sections.
    """
    before = [region.num_replays for region in regions]
    if cuda:
        with marks.opening_sections(kernel_trace.named_range):
            eager = kernel_trace.single_work(kernel_trace.trace_steps(step, True), SECTIONS)
    else:
        eager = _operators(step, regions)
    nodes = sum(
        (region.num_replays - replays) * sum(count for kind, count in region.nodes().items() if kind != "empty")
        for region, replays in zip(regions, before, strict=True)
    )
    nodes /= _NUM_STEPS
    # A model's embedding or loss always is beside its regions, so nothing there means that the step has no sections.
    return {"nodes": nodes, "eager": eager, "coverage": nodes / (nodes + eager) if eager else None}


def patching(step, regions) -> dict[str, float | None]:
    """Measure in untraced steps how many nodes get new addresses, and the host's time for them.

    Returns:
        patched_per_launch: nodes set in a launch of a region, all of an executable that it makes; patch_us_per_node:
        host microseconds for each of them. None where there is nothing to divide by.
    """
    before = _counts(regions)
    for index in range(_PATCHED_STEPS):
        step(index)
    launches, patched, seconds = (now - old for now, old in zip(_counts(regions), before, strict=True))
    return {
        "patched_per_launch": patched / launches if launches else None,
        "patch_us_per_node": 1e6 * seconds / patched if patched else None,
    }


def _counts(regions):
    rows = [region.row() for region in regions]
    return [sum(row[name] for row in rows) for name in ("launches", "patched", "patch_s")]


class _Beside(operator_count.Counter):
    """Counts operators in the sections and beside the regions."""

    def __init__(self):
        super().__init__()
        self.depth, self.is_paused = 0, False

    def counts(self, function) -> bool:
        """Return whether this call counts: not of a view or of empty memory, which are no nodes either."""
        if self.depth <= 0 or self.is_paused or function._schema.name in ALLOCATIONS:
            return False
        aliases = [result.alias_info for result in function._schema.returns]
        return all(alias is None or alias.is_write for alias in aliases)

    @contextlib.contextmanager
    def section(self, name: str):
        """A section of the step."""
        self.depth += name in SECTIONS
        try:
            yield
        finally:
            self.depth -= name in SECTIONS

    def paused(self, launch):
        """`launch` without its operators."""

        def run(inputs):
            self.is_paused = True
            try:
                return launch(inputs)
            finally:
                self.is_paused = False

        return run


def _operators(step, regions) -> float:
    counter = _Beside()
    for region in regions:
        region.launch = counter.paused(region.launch)
    try:
        with marks.opening_sections(counter.section), counter:
            for index in range(_NUM_STEPS):
                step(index)
    finally:
        for region in regions:
            del region.launch
    return counter.count / _NUM_STEPS
