"""The best thing to do with a step, by runs that are made: words, the simpler of equals, and losses beside eager's."""

import pytest

from graph_worth.harness import judge
from graph_worth.harness.best import best_of, of_state
from graph_worth.harness.files.facts import Course, Raised
from tests.helpers.made_run import made_run, with_apart


def best(ms, failed="", **changes):
    """The best of a run of graph_step and compiled variants of these times; eager takes 10 ms in each process."""
    kinds = {"": ("graph_step", "graph_layer", "graph_other"), "compiled": ("compile", "graph_step_compiled")}
    kinds["reduce_overhead"] = ("reduce_overhead",)
    chosen = {apart: [name for name in names if name in ms] for apart, names in kinds.items()}
    run = made_run(names=("eager", *chosen.pop("")), ms=ms, **changes)
    for apart, names in chosen.items():
        if names:
            run = with_apart(run, apart, names=("eager", *names), ms=ms)
            for name in names:
                run.builds[f"+{apart}"].variants[name].kind = "compile"
    for build in run.builds.values():
        if failed in build.variants:
            build.variants[failed].raised = Raised(kind="error", reason="it ended")
    builds = judge.judged(run)
    return best_of(of_state(builds, builds[""]))


@pytest.mark.parametrize(
    "ms, words",
    [
        ({"compile": 8.0, "graph_step": 5.0, "graph_step_compiled": 3.0}, "compile, then capture the whole step"),
        ({"compile": 8.0, "graph_step": 5.04, "graph_step_compiled": 5.0}, "capture the whole step"),
        ({"compile": 8.0, "graph_step": 5.06, "graph_step_compiled": 5.0}, "compile, then capture the whole step"),
        ({"compile": 5.04, "graph_step": 5.0}, "compile alone"),
        ({"reduce_overhead": 3.02, "graph_step_compiled": 3.0}, 'compile alone, with mode="reduce-overhead"'),
        ({"graph_layer": 8.0, "graph_other": 9.0}, "capture each layer"),
        ({"graph_layer": 9.0, "graph_other": 8.0}, "capture as graph_other does"),
        ({"graph_step": 9.92, "compile": 9.95}, "leave it eager"),
        ({"graph_step": 11.0, "compile": 12.0}, "leave it eager"),
    ],
)
def test_the_fastest_is_the_best_and_of_those_within_1_percent_the_simplest(ms, words):
    assert best(ms).words == words


def test_a_variant_that_did_not_pass_is_not_the_best():
    ms = {"compile": 8.0, "graph_step_compiled": 3.0}
    assert best(ms, failed="graph_step_compiled").name == "compile"
    assert best({"compile": 8.0}, failed="compile") is None and best({"graph_step": 5.0}, cycles=1) is None


def test_a_gain_below_1_percent_is_no_reason_and_a_wide_interval_says_that_more_cycles_may_be():
    assert (
        "Same: leave it eager. The best graph, graph_step, gains less than 1 %: 1.008x"
        in best({"graph_step": 9.92}).sentence
    )
    assert best({"graph_step": [5.0, 16.0] * 4}).sentence.startswith("Unclear: graph_step at ")
    assert best({"graph_step": 11.0}).sentence.startswith("Slower: leave it eager. The best graph, graph_step: 0.909x")


@pytest.mark.parametrize(
    "losses, again, text",
    [
        ([1.0], [1.0], "bitwise"),
        ([1.00045], [1.0], "losses differ by 4.5e-04, eager's from its own by nothing"),
        ([1.00045], [1.0001], "losses differ by 4.5e-04, eager's from its own by 1.0e-04"),
        ([1.00045], [1.001], "losses differ by 4.5e-04, no more than eager's from its own"),
    ],
)
def test_losses_stand_beside_what_eager_differs_by_in_the_same_run(losses, again, text):
    found = best({"graph_step": 5.0})
    variants = found.judged.build.variants
    hashes = ["h" if losses == [1.0] else "g"]
    variants["graph_step"].parity = [Course(hashes=hashes, losses=losses)] * 2
    variants["graph_step"].promise = 1e-3
    variants["eager"].parity = [Course(hashes=["h"], losses=[1.0]), Course(hashes=["h"], losses=again)]
    judged = judge.Judged(found.judged.run, found.judged.build)
    assert best_of([judged]).difference == text
