"""The best thing to do with a training step, by a run: leave it eager, compile it, capture it, or compile and capture.

The verdict of `measure`, the table and the page of a run, and the suite's tables ask `best_of`.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from graph_worth.harness import checks, intervals
from graph_worth.harness.intervals import Ratio
from graph_worth.harness.judge import Judged, of_itself
from graph_worth.measuring.parity import amount, loss_deviation

# Of variants whose steps differ by less than this share the simpler one is the best, and eager is the simplest.
AS_FAST = 0.01
EAGER = "leave it eager"
# In tables over runs, where the numbers of all of them do not bear out the run that measured most variants.
RUNS_DIFFER = "unclear: runs differ"
# Its graphs use a second stream, and that makes replays of other graphs in the process up to 9 % slower.
REDUCE_OVERHEAD = "reduce_overhead"
WORDS = {
    "compile": "compile alone",
    REDUCE_OVERHEAD: 'compile alone, with mode="reduce-overhead"',
    "mine": "keep the capture that your file makes",
}
# Beginning of the names of graphs -> the part of the step that they hold.
SCOPES = {
    "graph_step": "the whole step",
    "graph_fwd_bwd": "forward and backward, and leave the optimizer eager",
    "graph_modules": "the modules that its row names, forward and backward",
    "graph_networks": "the networks",
    "graph_layer": "each layer",
    "graph_microbatch": "each microbatch",
}


@dataclass(frozen=True)
class Best:
    """The best variant of a state, in the process in which it was measured.

    Attributes:
        word: "faster", or why the step is best left eager: "same", "slower" or "unclear". Then `name` is the variant
            that came nearest.
    """

    judged: Judged
    name: str
    ratio: Ratio
    word: str

    @property
    def words(self) -> str:
        """The advice, as "compile, then capture the whole step"."""
        if self.word != "faster":
            return EAGER
        scope = next((SCOPES[start] for start in SCOPES if self.name.startswith(start)), "")
        kind = self.judged.build.variants[self.name].kind
        capture = f"capture {scope}" if scope else f"capture as {self.name} does"
        return WORDS.get(self.name) or (f"compile, then {capture}" if kind == "compile" else capture)

    @property
    def sentence(self) -> str:
        """The verdict with its numbers."""
        ratio = self.ratio
        numbers = f"{ratio.ratio:.3f}x, {ratio.low:.3f} to {ratio.high:.3f}, on this host in these minutes"
        return {
            "faster": f"Faster: {self.words} ({self.name}): {numbers}.",
            "same": f"Same: {EAGER}. The best graph, {self.name}, gains less than 1 %: {numbers}.",
            "slower": f"Slower: {EAGER}. The best graph, {self.name}: {numbers}.",
            "unclear": f"Unclear: {self.name} at {numbers}. CYCLES=auto (--cycles auto) goes on until the interval is"
            " narrow.",
        }[self.word]

    @property
    def difference(self) -> str:
        """How far its losses are from its reference's, beside the reference's from its own; "" where no file tells."""
        build, reference_name = self.judged.build, checks.reference_of(self.judged.build, self.name)
        variant, reference = build.variants[self.name], build.variants.get(reference_name)
        if self.word != "faster" or reference is None or not variant.parity or not reference.parity:
            return ""
        deviation = loss_deviation(variant.parity[0].losses, reference.parity[0].losses)
        if self.judged.verdicts[self.name].parity == "bitwise" or deviation is None:
            return self.judged.verdicts[self.name].parity
        itself = of_itself(reference)
        if 0 < deviation <= itself:
            return f"losses differ by {amount(deviation)}, no more than {reference_name}'s from its own"
        return f"losses differ by {amount(deviation)}, {reference_name}'s from its own by {amount(itself)}"


def best_of(builds: Iterable[Judged]) -> Best | None:
    """Return the best of the variants that passed, parity at their declared tolerance included.

    A variant has to be faster than the base of its process by more than AS_FAST, with an interval above 1. Of those
    that take up to AS_FAST longer than the fastest, the simplest is the best: compiling alone is simpler than a
    capture, which is simpler than both. Steps of different processes are compared by their times.

    Args:
        builds: of one state: that of the preset, and those of the variants that stand apart.

    Returns:
        None where no variant has two cycles.
    """
    measured = [
        Best(judged, name, ratio, intervals.word(ratio))
        for judged in builds
        for name, variant in judged.build.variants.items()
        if variant.kind != "eager" and name != judged.run.control
        if (ratio := judged.ratio_of(name)) is not None and ratio.cycles > 1
    ]
    faster = [best for best in measured if best.word == "faster" and best.ratio.ratio > 1 + AS_FAST]
    if faster:
        longest_ms = (1 + AS_FAST) * min(best.ratio.variant_ms for best in faster)
        alike = [best for best in faster if best.ratio.variant_ms <= longest_ms]
        return min(alike, key=lambda best: (_effort(best), best.ratio.variant_ms))
    nearest = max(measured, key=lambda best: best.ratio.low, default=None)
    return replace(nearest, word="same") if nearest and nearest.word == "faster" else nearest


def _effort(best: Best) -> int:
    is_captured = best.name not in ("compile", REDUCE_OVERHEAD)
    return 2 * is_captured + (best.judged.build.variants[best.name].kind == "compile")


def of_state(builds: dict[str, Judged], judged: Judged) -> list[Judged]:
    """Return the builds of a run that have the state of one of them."""
    return [known for known in builds.values() if known.build.fields == judged.build.fields]
