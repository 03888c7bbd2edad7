"""The reason why a graph is not faster: the one of NVIDIA's five reasons its profile shows (docs/nvidia_rules.md)."""

from graph_worth.harness.judge import Judged

# Below it the GPU is the limit: docs/your_step.md leaves such a step eager.
LEAST_CEILING = 1.05
# Of the busy time or of the overlap of kernels that eager has.
MUCH = 0.02
LEAST_SHARE = 0.8
LEAST_KERNELS = 30


def reason(judged: Judged, name: str) -> str:
    """Return the reason in words, the likeliest one; "" for a run on a CPU or without a profile."""
    variant, base = judged.build.variants[name], judged.build.variants.get(judged.base)
    graph, eager = variant.profile, base.profile if base else None
    ceiling, base_ms = judged.ceiling(judged.base), judged.ms(judged.base) if base else None
    graph_ms, eager_ms = judged.working(name).value, judged.working(judged.base).value
    if eager is None or not graph_ms or not eager_ms or ceiling is None or not base_ms:
        return ""
    lost_ms = (eager.overlap_ms or 0.0) - (graph.overlap_ms or 0.0)
    added_ms = graph_ms - eager_ms
    if lost_ms > MUCH * eager_ms and added_ms > MUCH * eager_ms:
        effect = f"kernels that ran side by side in eager, for {eager.overlap_ms:.3g} ms, run in turn"
        cause = (
            "gradients wait for the end of a captured backward pass"
            if judged.run.ranks > 1
            else "streams share a queue"
        )
        return f"{effect}: {cause}"
    kernels = (graph.kernels or 0.0) - (eager.kernels or 0.0)
    if added_ms > MUCH * eager_ms and kernels > 0:
        return f"its copies of inputs: {kernels:,.0f} kernels more than eager, {added_ms:.3g} ms more of busy time"
    if ceiling < LEAST_CEILING:
        return f"the GPU is the limit, busy for {100 / ceiling:.0f} % of an eager step"
    if graph.graph_share is not None and graph.graph_share < LEAST_SHARE:
        return f"the graphs hold the wrong part of the step, {100 * graph.graph_share:.0f} % of its kernels"
    graphs = variant.capture.graphs
    if graphs > 1 and graph.kernels and graph.kernels / graphs < LEAST_KERNELS:
        return f"too many small graphs, {graphs:,} with {graph.kernels / graphs:.0f} kernels on average"
    return "none of NVIDIA's five reasons shows in the profile"
