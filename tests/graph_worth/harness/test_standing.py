"""graph_worth/harness/standing.py: quiet, unknown, beside other work, or in no range."""

import pytest

from graph_worth.harness.judge import judged
from graph_worth.harness.standing import Correction, is_light, standing_of
from tests.helpers.made_run import made_run, quiet


def of(run, correction=None):
    return standing_of(judged(run)[""], correction)


def test_a_run_whose_file_shows_a_quiet_host_is_quiet():
    assert of(quiet(made_run())).kind == "quiet" and of(quiet(made_run())).text == ""


def test_an_older_file_is_unknown_and_counts():
    standing = of(made_run())
    assert (standing.kind, standing.is_counted) == ("unknown", True)
    assert standing.text == "the file does not tell of other work on the host"


@pytest.mark.parametrize("cycle", [0, 3, 7])
def test_a_benchmark_on_another_gpu_in_any_cycle_sets_a_run_apart(cycle):
    run = quiet(made_run())
    run.builds[""].cycles[cycle].others = 2
    assert (of(run).kind, of(run).text) == ("beside", "beside 2 benchmarks on other GPUs")


@pytest.mark.parametrize("kind", ["unclean", "superseded"])
def test_a_run_that_is_named_is_in_no_range(kind):
    standing = of(quiet(made_run()), Correction(kind, "why"))
    assert (standing.kind, standing.text, standing.is_counted) == ("aside", f"{kind}: why", False)


def test_a_disturbed_run_ran_beside_other_work_whatever_its_file_tells():
    assert of(quiet(made_run()), Correction("disturbed", "tests ran")).kind == "beside"
    assert of(made_run(), Correction("disturbed", "tests ran")).text == "beside other work: tests ran"


def test_a_base_that_differs_from_itself_alone_is_no_headline():
    run = quiet(made_run())
    run.builds[""].variants["eager"].alone.step_ms = [9.0] * 20
    assert (of(run).kind, of(run).text) == ("aside", "eager in blocks takes 1.11 times as long as alone")
    for cycle in run.builds[""].cycles:
        cycle.others = None
    assert of(run).kind == "aside", "an older file, too"


@pytest.mark.parametrize(("last", "kind"), [(10.9, "quiet"), (11.1, "aside"), (9.2, "quiet"), (9.0, "aside")])
def test_the_hosts_pace_may_change_by_a_tenth(last, kind):
    """Half of the cycles each; the base alone lies between."""
    run = quiet(made_run(ms={"eager": [*[10.0] * 4, *[last] * 4]}), alone_ms=(10 * last) ** 0.5)
    assert of(run).kind == kind
    assert ("at the end as at the beginning" in of(run).text) == (kind == "aside")


@pytest.mark.parametrize(("busy_ms", "kind"), [(9.4, "slowed"), (9.6, "beside"), (10.3, "beside")])
def test_a_fault_that_slows_the_host_counts_where_the_host_limits_eager(busy_ms, kind):
    """Eager takes 10 ms. A run beside other work is slowed, too."""
    ms = {"eager": 10.0, "graph_layer": 9.9}
    run = judged(quiet(made_run(ms=ms, issue=(9.9, busy_ms))))[""]
    standing = standing_of(run, Correction("disturbed", "tests ran"), "a variable slowed eager")
    assert (standing.kind, standing.is_counted) == (kind, False)
    assert (standing.text == "a variable slowed eager") == (kind == "slowed")


def test_the_pace_of_an_older_file_is_unknown_like_all_else():
    assert of(made_run(ms={"eager": [*[10.0] * 4, *[14.0] * 4]})).kind == "unknown"


def test_without_eager_alone_a_new_file_counts_as_unknown():
    """A census."""
    run = quiet(made_run())
    run.builds[""].variants["eager"].alone = None
    assert (of(run).kind, of(run).text) == ("unknown", "eager alone in a process has too few steps")
    assert of(quiet(made_run(cycles=1))).text == "too few cycles to see the host's pace"
    run.builds[""].cycles = []
    assert of(run).kind == "unknown"


def test_a_census_and_few_cycles_are_light():
    assert not is_light(judged(made_run())[""], 8) and is_light(judged(made_run())[""], 7)
    assert is_light(judged(made_run(parity="blocks"))[""], 8)
