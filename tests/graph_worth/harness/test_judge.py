"""graph_worth/harness/judge.py: verdicts, base and gains of a run. Each check names its fault and can fail."""

import math
from pathlib import Path

import pytest

from graph_worth.harness import checks, judge
from graph_worth.harness.files import run_file
from graph_worth.harness.files.facts import (
    Alone,
    Audit,
    CaptureFacts,
    Course,
    GpuState,
    Profile,
    Raised,
    Sealed,
    Trained,
)
from graph_worth.harness.judge import Fault
from graph_worth.harness.pages import run_table
from tests.helpers.made_run import H200, made_run

RESULTS = Path(__file__).resolve().parents[3] / "results"
MIB = 2**20
EVERY = range(8)


def verdict(run, name="graph_layer"):
    return judge.judged(run)[""].verdicts[name]


def variant(run, name="graph_layer"):
    return run.builds[""].variants[name]


def change(run, name="graph_layer", cycles=EVERY, **values):
    """Set fields of the blocks of some cycles."""
    for block in variant(run, name).blocks:
        if block.cycle in cycles:
            for key, value in values.items():
                setattr(block, key, value)
    return run


def facts(run, name="graph_layer", **values):
    """Set fields of a variant."""
    for key, value in values.items():
        setattr(variant(run, name), key, value)
    return run


def course(*losses, digest="other"):
    return [Course(hashes=[digest], losses=list(losses))]


def threefold(run, cycles, name="graph_layer"):
    """A clock that lies threefold in some blocks: the steps seem to take a third of what another process saw."""
    for block in variant(run, name).blocks:
        if block.cycle in cycles:
            block.step_ms = [ms / 3 for ms in block.step_ms]
    return run


def outside(run, seconds=0.1):
    """Every block takes so long beside its timed steps."""
    for own in run.builds[""].variants.values():
        for block in own.blocks:
            block.whole_s = block.parent_s + seconds + block.mean_ms / 1e3 * (block.untimed_steps + block.drained_steps)
    return run


def captured(run, **values):
    for key, value in values.items():
        setattr(variant(run).capture, key, value)
    return run


def profiled(run, share):
    variant(run).profile.graph_share = share
    return run


def audits(*step_ms, losses=(1.0, 0.5), moved=(1.0,), again_ms=10.0):
    """Audits of such steps, with the losses 1.0 and 0.5 and a movement of 1.0 in the process that repeats them."""
    again = Trained(step_ms=[again_ms], losses=[1.0, 0.5], moved=[1.0])
    own = [Trained(step_ms=[ms], losses=list(losses), moved=list(moved)) for ms in step_ms]
    return [Audit(seed=seed, first=0, own=each, repetition=again) for seed, each in enumerate(own)]


def audited(run, **changes):
    """A run whose variants have audits; `changes` are those of graph_layer, as `audits` takes them."""
    facts(run, "eager", audits=audits(10.0, 10.0))
    return facts(run, audits=audits(10.0, 10.0, **changes))


def lasting(run, ms, name="graph_layer", cycles=EVERY):
    """Every step of a variant takes so long, by all clocks."""
    seconds = 20 * ms / 1e3
    return change(run, name, cycles, step_ms=[ms] * 20, parent_s=seconds, worker_s=seconds)


def working(run, name="graph_layer", **profile):
    """Fields of a variant's profile."""
    for key, value in profile.items():
        setattr(variant(run, name).profile, key, value)
    return run


def above(run, ms=5.0, kernels=9):
    """A graph of steps of 5 ms, and an eager one of 10 ms in which its kernels take 8 ms: a graph can gain 1.25x."""
    return lasting(working(working(run, "eager", busy_ms=8.0), busy_ms=min(ms, 8.0), kernels=kernels), ms)


SEALED = Sealed(status="failed", reason="as sealed", parity="")
# Fault -> (a run with it, words of its reason). On a GPU one block of eight shows a fault of a block.
CASES = {
    Fault.RAISED: (lambda run: facts(run, raised=Raised(kind="error", reason="broke")), "broke"),
    Fault.SEALED: (lambda run: facts(run, sealed=SEALED), "as sealed"),
    Fault.NOT_TIMED: (lambda run: facts(run, blocks=[]), "no block"),
    Fault.NOT_COMPARED: (lambda run: facts(run, parity=[]), "nothing compares"),
    Fault.PARITY: (lambda run: facts(run, parity=course(1.01)), "parity: differs by 1.0e-02 from step 0"),
    Fault.PARITY_AFTER: (lambda run: facts(run, after=course(1.01)), "parity after its blocks: differs by 1.0e-02"),
    Fault.GRAPHS: (lambda run: captured(run, graphs=2), "2 graphs made, 1 promised"),
    Fault.REPLAYS: (lambda run: change(run, cycles=[5], replays=19), "19 replays in 20 steps of cycle 5, 20 promised"),
    Fault.GRAPH_SHARE: (lambda run: profiled(run, 0.19), "graphs launch 19.0 % of the kernels"),
    Fault.CLOCK: (lambda run: threefold(run, [5]), "in cycle 5 sum to 0.067 s, another process saw 0.200 s"),
    Fault.OUTSIDE: (lambda run: change(outside(run), cycles=[5], whole_s=0.9), "0.50 s of work outside of the 0.20 s"),
    Fault.LATE_WORK: (lambda run: change(run, cycles=[5], late_ms=30.0), "30 ms of work went on"),
    Fault.LATE_CHANGE: (lambda run: change(run, cycles=[5], late_change=True), "still changed"),
    Fault.GROWTH: (lambda run: change(run, cycles=[5], growth_bytes=33 * MIB), "grew by 33 MiB"),
    Fault.THREADS: (lambda run: change(run, cycles=[5], threads=5), "2 threads more"),
    Fault.LOSSES: (lambda run: change(run, cycles=[5], losses=[1.0, 0.6]), "its losses in cycle 5 differ"),
    Fault.MOVEMENT: (lambda run: change(run, cycles=[5], moved=[0.5]), "cycle 5 moved the training state 0.50 times"),
    Fault.NOT_WATCHED: (lambda run: change(run, moved=[0.0]), "no watched tensor"),
    Fault.BELOW_BUSY: (
        lambda run: working(run, busy_ms=10.6),
        "takes 10.00 ms, its kernels keep the GPU busy for 10.6",
    ),
    Fault.ABOVE_CEILING: (above, "it gains 2.00x with the kernels of eager, which allow 1.25x at most"),
    Fault.NO_KERNELS: (lambda run: working(run, kernels=None), "the profile of graph_layer has no kernels"),
    Fault.AUDIT: (lambda run: audited(run, losses=[1.0, 0.502]), "losses differ by 4.0e-03 from those of eager in a"),
}


@pytest.mark.parametrize("fault", Fault, ids=lambda fault: fault.name)
def test_each_fault_is_found_and_named_and_eager_stays_sound(fault):
    make, said = CASES[fault]
    run = make(made_run())
    found = verdict(run)
    assert (found.status, found.fault) == ("failed", fault) and said in found.reason and "\n" not in found.reason
    assert verdict(run, "eager").status == "pass"
    assert judge.judged(run)[""].ratio_of("graph_layer") is None and not judge.is_sound(run)


EQUAL_LOSSES = "parity: equal losses, but not all bits of the state, from step 0"


@pytest.mark.parametrize(
    ("promise", "facts_of_course", "reason"),
    [
        (None, {}, EQUAL_LOSSES),
        (None, {"tensor": "ema.shadow"}, f"{EQUAL_LOSSES}: ema.shadow is the first"),
        (None, {"tensor": "a.bias", "apart": ""}, ""),
        (None, {"tensor": "a.bias", "apart": "a.bias differs"}, "parity: a.bias differs"),
        # A model of the suite keeps its promise.
        ("bitwise", {"tensor": "a.bias", "apart": ""}, f"{EQUAL_LOSSES}: a.bias is the first"),
    ],
)
def test_other_bits_with_equal_losses_are_named_and_roundings_of_a_step_pass(promise, facts_of_course, reason):
    run = made_run()
    graph = run.builds[""].variants["graph_layer"]
    graph.promise, before = promise, graph.parity[0]
    graph.parity = [Course(hashes=["x"] * len(before.hashes), losses=before.losses, **facts_of_course)]
    assert (verdict(run).fault, verdict(run).reason) == (Fault.PARITY if reason else None, reason)
    assert verdict(run).parity == "equal losses"


def test_a_block_s_own_two_clocks_agree():
    """The steps' clock is bent, and the process that watches was stopped for as long."""
    assert verdict(change(made_run(), cycles=[5], worker_s=0.3)).fault == Fault.CLOCK
    assert verdict(change(made_run(ranks=2), cycles=[5], worker_s=0.1)).fault is None
    assert verdict(change(made_run(ranks=2), cycles=[5], worker_s=0.3)).fault == Fault.CLOCK


def test_less_work_outside_counts_where_most_blocks_show_it():
    one, most = (change(outside(made_run()), cycles=cycles, whole_s=0.55) for cycles in ([5], EVERY))
    assert verdict(one).fault is None and verdict(most).fault == Fault.OUTSIDE


def test_a_graph_is_not_accused_of_the_steps_of_a_slower_base():
    """Stable Diffusion on an H200: five untimed and drained steps of 110 ms in the base, of 39 ms in the graph."""
    run = made_run(ms={"eager": 110.0, "graph_layer": 39.0})
    for own in run.builds[""].variants.values():
        for block in own.blocks:
            block.whole_s = block.parent_s + 5 * block.mean_ms / 1e3 + 0.05
    assert verdict(run).fault is None
    assert verdict(change(run, cycles=[5], whole_s=2.0)).fault == Fault.OUTSIDE


def test_blocks_of_different_cycles_need_not_train_alike():
    run = made_run()
    for name in run.builds[""].variants:
        for block in variant(run, name).blocks:
            block.first, block.losses = block.cycle, [1.0 + block.cycle, 0.5]
    assert verdict(run).fault is None
    assert verdict(change(run, cycles=[5], losses=[1.0, 0.5])).fault == Fault.LOSSES


def test_a_reference_that_does_not_repeat_widens_little():
    def noisy():
        run = made_run()
        for block in variant(run, "eager").blocks[1::2]:
            block.losses = [1.2, 0.6]
        return run

    assert verdict(change(noisy(), losses=[1.019, 0.5])).fault is None
    assert verdict(change(noisy(), losses=[1.03, 0.5])).fault == Fault.LOSSES
    assert verdict(change(noisy(), cycles=[5], moved=[0.95])).fault == Fault.MOVEMENT


@pytest.mark.parametrize(
    ("alone_ms", "ratio", "sentence"),
    [
        ([9.0] * 20, 10 / 9, "eager in blocks takes 1.11 times as long as alone"),
        ([8.0, 10.0] * 5, 10 / 9, "eager in blocks takes 1.11 times as long as alone"),
        ([11.0] * 10, 10 / 11, "eager takes 1.10 times as long alone as in blocks"),
        ([9.6] * 10, 10 / 9.6, ""),
        ([10.4] * 10, 10 / 10.4, ""),
        ([9.0] * 9, None, ""),
    ],
)
def test_a_base_that_differs_from_itself_alone_is_said(alone_ms, ratio, sentence):
    run = facts(made_run(), "eager", alone=Alone(peak_reserved_bytes=0, step_ms=alone_ms))
    own = judge.judged(run)[""]
    assert own.alone_ratio == (ratio and pytest.approx(ratio)) and own.disagrees_with_alone == sentence
    no_headline = f"{sentence}. These ratios are no headline."
    assert (no_headline in run_table.report(run)) == bool(sentence)
    assert (f"gpt3/bench: {no_headline}" in run_table.suite([run])) == bool(sentence)


def test_the_base_alone_counts_from_a_blocks_steps_on_where_these_are_fewer_than_ten():
    run = facts(made_run(ms={"eager": [[10.0] * 7]}), "eager", alone=Alone(peak_reserved_bytes=0, step_ms=[9.0] * 7))
    assert judge.judged(run)[""].alone_ratio == pytest.approx(10 / 9)
    assert judge.judged(facts(run, "eager", alone=None))[""].alone_ratio is None, "a census"


def test_the_mean_over_all_blocks_counts_and_not_the_fastest():
    run = facts(made_run(ms={"eager": [10.0, 14.4]}), "eager", alone=Alone(peak_reserved_bytes=0, step_ms=[10.0] * 10))
    assert judge.judged(run)[""].alone_ratio == pytest.approx(1.2)


def test_on_a_cpu_processes_share_cores_and_none_is_compared_with_itself_alone():
    run = facts(made_run(gpus=(), device="cpu"), "eager", alone=Alone(peak_reserved_bytes=0, step_ms=[5.0] * 20))
    assert judge.judged(run)[""].disagrees_with_alone == ""


PUBLISHED_APART = {
    "757612f1": 1.12, "1ffc897d": 1.15, "ba5f0a78": 1.08, "c50aefc0": 1.30, "514c1536": 1.18, "c50aef32": 1.16,
    "ba5f0a03": 1.07, "514c15db": 1.45, "c50aef96": 1.18, "a6d3b13d": 1.33, "fba8dbc3": 1.24, "6d6c7129": 1.32,
}  # fmt: skip


def test_published_runs_whose_base_was_slowed_are_said():
    """Eleven builds whose means differ, and Llama 2 at 128 tokens."""
    paths = [path for path in RESULTS.rglob("*.json") if path.stem[-8:] in PUBLISHED_APART]
    for path in paths:
        sentence = judge.judged(run_file.read(path))[""].disagrees_with_alone
        assert sentence == f"eager in blocks takes {PUBLISHED_APART[path.stem[-8:]]:.2f} times as long as alone"
    assert len(paths) == len(PUBLISHED_APART)


# ------------------------------------------------------------------------------------------------
# Fences


@pytest.mark.parametrize(
    ("ms", "kernels", "is_stopped"), [(7.65, 9, False), (7.6, 9, True), (7.6, 9.44, True), (7.6, 9.5, False)]
)
def test_a_graph_of_the_same_program_gains_no_more_than_its_ceiling(ms, kernels, is_stopped):
    run = above(made_run(), ms, kernels)
    assert verdict(run).fault == (Fault.ABOVE_CEILING if is_stopped else None)
    assert not any(own["graph_layer"].fault for own in [judge.judged(above(made_run(gpus=()), ms))[""].verdicts])


def test_a_base_that_is_busy_for_longer_than_its_step_allows_a_gain_of_5_percent():
    run = working(working(made_run(), "eager", busy_ms=10.4), busy_ms=9.0)
    assert verdict(lasting(run, 9.6)).fault is None
    assert verdict(lasting(run, 9.5)).fault == Fault.ABOVE_CEILING


def test_beside_busy_processes_the_ceiling_is_that_of_these_cycles():
    run = working(made_run(busy=16, ms={"eager": [10.0, 20.0]}), "eager", busy_ms=8.0)
    assert verdict(lasting(working(run, busy_ms=5.0), 8.0)).fault is None
    assert verdict(lasting(run, 5.0, cycles=range(1, 16, 2))).fault == Fault.ABOVE_CEILING


def test_a_compiled_graph_has_the_ceiling_of_the_compiled_program():
    run = made_run(names=("eager", "compile", "reduce_overhead"))
    for name, ms in (("compile", 9.0), ("reduce_overhead", 5.0)):
        facts(run, name, kind="compile", capture=CaptureFacts(graphs=int(name != "compile")))
        lasting(working(change(run, name, replays=0, expected_replays=0), name, busy_ms=min(ms, 6.0)), ms, name)
    assert verdict(run, "reduce_overhead").fault == Fault.ABOVE_CEILING
    assert verdict(lasting(run, 5.8, "reduce_overhead"), "reduce_overhead").fault is None
    assert verdict(working(run, "compile", kernels=0), "reduce_overhead").fault == Fault.NO_KERNELS


def test_no_step_is_shorter_than_its_own_work_not_even_eagers():
    assert verdict(working(made_run(), busy_ms=10.5)).fault is None
    assert verdict(working(made_run(gpus=()), busy_ms=99.0)).fault is None
    run = lasting(working(made_run(busy=16), busy_ms=10.0), 9.4, cycles=range(1, 16, 2))
    assert verdict(run).fault == Fault.BELOW_BUSY
    run = working(working(made_run(), "eager", busy_ms=10.6), busy_ms=9.0)
    assert verdict(run, "eager").fault == Fault.BELOW_BUSY and judge.judged(run)[""].base == ""
    twin = working(eagers(eager_twin=9.0), "eager_twin", busy_ms=9.6)
    assert verdict(twin, "eager_twin").fault == Fault.BELOW_BUSY and base_of(twin) == "eager"


def test_a_time_without_waiting_that_is_estimated_accuses_nobody():
    run = of_two_ranks()
    working_ms = judge.judged(run)[""].working("graph_layer")
    assert working_ms.note == judge.ESTIMATED
    assert verdict(lasting(run, 0.5 * working_ms.value)).fault is None
    for name in ("eager", "graph_layer"):
        working(run, name, working_ms=[working_ms.value - 1, working_ms.value])
    assert verdict(run).fault == Fault.BELOW_BUSY
    assert verdict(working(run, working_ms=[1.0])).fault == Fault.ABOVE_CEILING


def test_nothing_bounds_a_graph_without_kernels_in_the_profile_or_in_the_bases():
    assert verdict(working(made_run(), "eager", kernels=0.0)).fault == Fault.NO_KERNELS
    assert verdict(working(made_run(gpus=()), kernels=None)).fault is None
    run = working(made_run(), kernels=None)
    run.whole = False
    assert verdict(run).fault is None, "not profiled yet"
    assert verdict(working(run, steps=3)).fault == Fault.NO_KERNELS


# ------------------------------------------------------------------------------------------------
# References


def referring(run, **of_reference):
    """graph_layer is compared with eager_twin, which is compared with itself, as in a file that names it so."""
    facts(run, "eager_twin", reference="eager_twin", **of_reference)
    return facts(run, reference="eager_twin")


@pytest.mark.parametrize("traits", [{}, {"extra_work": "pads"}], ids=str)
def test_a_reference_is_compared_with_the_base_and_its_graphs_fail_with_it(traits):
    run = referring(eagers(eager_twin=10.5), traits=traits)
    assert verdict(run).fault is None and verdict(run, "eager_twin").parity == "bitwise"
    for name in ("eager_twin", "graph_layer"):
        change(run, name, losses=[1.0, 0.6])
    assert verdict(run, "eager_twin").fault == Fault.LOSSES and verdict(run, "eager").status == "pass"
    assert verdict(run).fault == Fault.NOT_COMPARED and "its reference eager_twin failed" in verdict(run).reason


def test_a_reference_that_draws_other_numbers_is_named_where_it_does():
    """RNN-T's padded shapes: dropout draws other numbers for them, and at `bench` there is no padding."""
    draws = {"draws": "dropout of padded shapes"}
    run = referring(eagers(eager_twin=10.5), traits=draws)
    assert "eager_twin" not in unchecked(run)
    for name in ("eager_twin", "graph_layer"):
        change(run, name, losses=[1.0, 0.6])
    said = "the losses of eager_twin, which draws other random numbers than eager"
    assert verdict(run).fault is verdict(run, "eager_twin").fault is None
    assert said in unchecked(run) and said in unchecked(run, "eager_twin") and said not in unchecked(run, "eager")
    assert verdict(change(run, losses=[1.0, 0.5])).fault == Fault.LOSSES
    run = referring(eagers(eager_twin=10.5), traits=draws, parity=course(1.02) * 2)
    assert verdict(run, "eager_twin").fault is None and said in unchecked(run, "eager_twin")


def test_the_courses_of_a_reference_are_compared_with_the_bases():
    for when, fault in (("parity", Fault.PARITY), ("after", Fault.PARITY_AFTER)):
        run = referring(eagers(eager_twin=10.5), **{when: course(1.01) * 2})
        assert verdict(run, "eager_twin").fault == fault
    assert verdict(referring(eagers(eager_twin=10.5), parity=course(1.000009) * 2), "eager_twin").fault is None


def test_a_graph_that_is_its_own_reference_is_compared_with_eager():
    run = change(facts(made_run(), reference="graph_layer"), losses=[1.0, 0.6])
    assert verdict(run).fault == Fault.LOSSES
    run = facts(eagers(eager_twin=10.5), "eager_twin", reference="graph_layer")
    assert verdict(change(facts(run, reference="eager_twin"), losses=[1.0, 0.6])).fault == Fault.LOSSES


def test_a_base_that_another_eager_is_the_reference_of_is_not_compared_twice():
    run = made_run(names=("eager_twin", "eager", "graph_layer"))
    assert checks.reference_of(run.builds[""], "eager") == "eager"


# ------------------------------------------------------------------------------------------------
# What was not checked is said


def unchecked(run, name="graph_layer"):
    return judge.judged(run)[""].unchecked(name)


def test_what_no_check_looked_at_is_said():
    names = ("eager", "graph_layer", "control")
    run = above(made_run(names=names), 8.0)
    assert (unchecked(run), unchecked(run, "control")) == ("no audits", "")
    assert "\nnot checked: eager, graph_layer (no audits)\n" in run_table.report(run)
    assert unchecked(audited(run)) == unchecked(run, "eager") == ""
    assert unchecked(audited(above(made_run(), 8.0))) == "no control"
    assert unchecked(made_run(names=names)) == "no audits, no ceiling"
    assert unchecked(change(audited(run), reset=False)) == "no losses of blocks compared"


def test_audits_that_compare_nothing_are_said():
    run = audited(above(made_run(names=("eager", "graph_layer", "control")), 8.0))
    audits_of = variant(run).audits
    audits_of[1].repetition = None
    assert unchecked(run) == "1 of 2 audits not compared"
    for audit in audits_of:
        audit.own, audit.repetition, audit.raised = None, None, "OutOfMemoryError: 9\n GiB"
    assert unchecked(run) == "2 of 2 audits not compared: OutOfMemoryError: 9 GiB" and verdict(run).fault is None
    again = Trained(step_ms=[1.0], losses=[], moved=[1.0])
    for audit in audits_of:
        audit.own, audit.repetition, audit.raised = again, again, ""
    assert unchecked(run) == "2 of 2 audits not compared"
    facts(run, audits=[])
    for audit in variant(run, "eager").audits:
        audit.own, audit.raised = None, "ValueError: scaled"
    assert unchecked(run) == "no audits, for eager raised: ValueError: scaled"
    assert unchecked(run, "eager") == "2 of 2 audits not compared: ValueError: scaled"


def test_losses_that_are_missing_compare_nothing():
    run = change(change(made_run(), losses=[]), "eager", losses=[])
    assert verdict(run).fault == Fault.LOSSES
    run = facts(made_run(), after=course())
    assert verdict(facts(run, "eager", after=course(digest="a") * 2)).fault == Fault.PARITY_AFTER
    run = change(made_run(), reset=False)
    assert verdict(run).fault is None
    run.parity = "blocks"
    assert verdict(run).fault == Fault.NOT_COMPARED


# ------------------------------------------------------------------------------------------------
# Audits


def test_an_audit_compares_movement_and_allows_what_is_declared():
    assert verdict(audited(made_run())).fault is None
    assert verdict(audited(made_run(), moved=[0.94])).fault == Fault.AUDIT
    assert verdict(audited(made_run(), moved=[None])).fault == Fault.AUDIT
    assert verdict(facts(audited(made_run(), losses=[1.0, 0.502]), tolerance=5e-3)).fault is None
    assert verdict(audited(made_run(), losses=[1.0, None])).fault == Fault.AUDIT


def test_a_single_audit_that_differs_by_rounding_accuses_nobody():
    run = audited(made_run())
    variant(run).audits[1].own.losses = [1.0, 0.504]
    assert verdict(run).fault is None
    variant(run).audits[1].own.losses = [1.0, 0.506]
    assert verdict(run).fault == Fault.AUDIT


def test_who_raises_in_an_audit_where_eager_trains_is_named():
    run = audited(made_run())
    variant(run).audits[1].own, variant(run).audits[1].raised = None, "AssertionError: no"
    assert "it raised AssertionError: no, where eager trained" in verdict(run).reason
    variant(run).audits[1].repetition = None
    assert verdict(run).fault is None


def test_an_audit_that_was_not_repeated_accuses_nobody():
    run = audited(made_run(), losses=[3.0, 3.0])
    for each in variant(run).audits:
        each.repetition = None
    assert verdict(run).fault is None
    for each in variant(run).audits:
        each.repetition = Trained(step_ms=[10.0], losses=[1.0, None], moved=[1.0])
    assert verdict(run).fault is None, "eager's own losses were not finite there"


def test_a_base_that_another_process_cannot_repeat_fails_itself():
    run = audited(made_run())
    facts(run, "eager", audits=audits(10.0, losses=[1.0, 0.6]))
    assert verdict(run, "eager").fault == Fault.AUDIT and judge.judged(run)[""].ratio_of("graph_layer") is None
    facts(run, "eager", audits=audits(10.0, losses=[1.0, 0.502]))
    assert verdict(run, "eager").fault is None
    facts(run, audits=audits(10.0, losses=[1.0, 0.5035]))
    assert verdict(run).fault is None, "twice what the base differs by"


# ------------------------------------------------------------------------------------------------
# Blocks: one is enough on a GPU. Threads want three of eight on a CPU, where time accuses nobody

OF_TIME = {
    "clock": threefold,
    "outside": lambda run, cycles: change(outside(run), cycles=cycles, whole_s=0.9),
    "late work": lambda run, cycles: change(run, cycles=cycles, late_ms=30.0),
}


@pytest.mark.parametrize("make", OF_TIME.values(), ids=OF_TIME)
def test_on_a_cpu_no_time_accuses_a_variant(make):
    assert verdict(make(made_run(), range(8))).status == "failed"
    assert verdict(make(made_run(gpus=()), range(8))).status == "pass"


@pytest.mark.parametrize(
    ("gpus", "cycles", "wrong", "is_accused"),
    [
        (H200, 8, 1, True),
        (H200, 1, 1, True),
        ((), 8, 2, False),
        ((), 8, 3, True),
        ((), 16, 5, False),
        ((), 16, 6, True),
        ((), 3, 2, False),
        ((), 3, 3, True),
        ((), 2, 2, False),
        ((), 1, 1, False),
    ],
)
def test_blocks_that_show_more_threads(gpus, cycles, wrong, is_accused):
    run = change(made_run(gpus=gpus, cycles=cycles), cycles=range(wrong), threads=4)
    assert verdict(run).fault == (Fault.THREADS if is_accused else None)


@pytest.mark.parametrize("gpus", [H200, ()])
@pytest.mark.parametrize(
    "values",
    [{"replays": 19}, {"losses": [1.0, 0.6]}, {"losses": [1.0]}, {"moved": [0.5]}, {"late_change": True}],
    ids=str,
)
def test_one_block_that_did_other_work_is_enough_on_any_device(values, gpus):
    assert verdict(change(made_run(gpus=gpus, cycles=3), cycles=[2], **values)).status == "failed"


def test_beside_busy_processes_a_gpu_is_looked_at_late():
    run = change(made_run(busy=16), cycles=range(1, 16, 2), late_ms=30.0, parent_s=0.3)
    assert verdict(run).fault is None
    assert verdict(change(run, cycles=[4], late_ms=30.0)).fault == Fault.LATE_WORK


@pytest.mark.parametrize(("parent_s", "one", "two"), [(0.1, True, False), (0.4, True, True), (0.19, False, False)])
def test_the_slowest_steps_of_ranks_may_sum_to_more_than_any_rank_took(parent_s, one, two):
    """20 steps of 10 ms: a shorter time on the other clock accuses one rank only, a longer one any number."""
    for ranks, is_accused in ((1, one), (2, two)):
        run = change(made_run(ranks=ranks), parent_s=parent_s)
        assert (verdict(run).fault == Fault.CLOCK) == is_accused


def test_a_burst_hidden_in_few_steps_counts_by_the_mean():
    """No check accuses it: the mean step is the number, and the median stands beside it as the typical step."""
    run = made_run(ms={"graph_layer": 10.0})
    own = variant(run)
    for block in own.blocks:
        block.step_ms = [8.0] * 19 + [88.0]
        block.parent_s = block.worker_s = sum(block.step_ms) / 1e3
    found = judge.judged(run)[""]
    assert found.verdicts["graph_layer"].status == "pass"
    assert (found.ms("graph_layer"), found.typical_ms("graph_layer")) == pytest.approx((12.0, 8.0))
    assert found.ratio_of("graph_layer").ratio == pytest.approx(10 / 12)
    for block in variant(run, "eager").blocks:
        block.step_ms = [14.0] * 19 + [34.0]
        block.parent_s = sum(block.step_ms) / 1e3
    assert found.ratio_of("graph_layer").ratio == pytest.approx(15 / 12)


# ------------------------------------------------------------------------------------------------
# Memory


def grown(run, name, mib):
    """Let the memory in use before a block be larger by `mib` after each block of a variant."""
    build, held = run.builds[""], 2**30
    placed = [(block.cycle, block.place, each, block) for each, own in build.variants.items() for block in own.blocks]
    for _, _, each, block in sorted(placed, key=lambda item: item[:2]):
        block.held_bytes = held
        held += mib * MIB if each == name else 0
    return run


def test_growth_in_enter_is_seen_over_the_cycles():
    """760 MiB in eight blocks, of which none is inside of steps."""
    run = grown(made_run(), "graph_layer", 95)
    assert checks.growth_over_cycles(run.builds[""]) == 7 * 95 * MIB
    assert checks.growth_over_cycles(run.builds[""], "graph_layer") == 7 * 95 * MIB
    assert checks.growth_over_cycles(run.builds[""], "graph_layer", begin=1) == 6 * 95 * MIB
    assert checks.growth_over_cycles(run.builds[""], "eager") == 0
    assert verdict(run).fault == Fault.GROWTH and "665 MiB" in verdict(run).reason
    assert verdict(run, "eager").status == "pass"
    assert verdict(grown(made_run(), "graph_layer", 4)).fault is None


def test_memory_that_the_next_block_gives_back_is_no_growth():
    run = grown(made_run(), "graph_layer", 95)
    for name in ("eager", "graph_layer"):
        for block in variant(run, name).blocks:
            block.held_bytes = 2**30 + (95 * MIB if block.place == 2 else 0)
    assert checks.growth_over_cycles(run.builds[""]) == 0 and verdict(run).fault is None


def test_growth_is_of_one_process_and_needs_memory_that_was_read():
    run = grown(made_run(), "graph_layer", 95)
    for name in ("eager", "graph_layer"):
        for block in variant(run, name).blocks:
            block.process = 100 * block.cycle + block.place
    assert checks.growth_over_cycles(run.builds[""]) == 0
    run = grown(made_run(), "graph_layer", 95)
    assert checks.growth_over_cycles(change(change(run, "eager", held_bytes=None), held_bytes=None).builds[""]) == 0
    assert checks.growth_over_cycles(made_run(cycles=2).builds[""]) == 0


@pytest.mark.parametrize(("gpus", "mib"), [(H200, 32), ((), 64)])
def test_growth_inside_of_steps_counts_from_the_first_cycle_on_and_on_a_cpu_from_the_second(gpus, mib):
    first = change(made_run(gpus=gpus), cycles=[0], growth_bytes=900 * MIB)
    assert (verdict(first).fault is None) == (not gpus)
    run = made_run(gpus=gpus)
    assert verdict(change(run, cycles=[3], growth_bytes=mib * MIB)).fault is None
    assert verdict(change(run, cycles=[4], growth_bytes=MIB)).fault == Fault.GROWTH


# ------------------------------------------------------------------------------------------------
# Promises and training


def test_graphs_that_were_promised_and_never_made():
    assert "0 graphs made, 1 promised" in verdict(captured(made_run(), graphs=0)).reason
    # Any number from one up.
    run = captured(made_run(), graphs=0, promised_graphs=None)
    assert verdict(run).fault == Fault.GRAPHS and "no graph made" in verdict(run).reason
    run = captured(made_run(), promised_replays=None)
    assert verdict(run).fault is None
    assert verdict(change(run, cycles=[1], replays=0, expected_replays=0)).fault == Fault.REPLAYS


def test_an_eager_variant_launches_nothing_by_graphs():
    run = made_run(issue=(12.0, 8.0))
    variant(run, "eager").profile.graph_share = 0.001
    assert verdict(run, "eager").fault == Fault.GRAPH_SHARE
    run = profiled(made_run(gpus=()), 0.06)
    assert verdict(run).fault is None
    assert verdict(profiled(run, 0.04)).fault == Fault.GRAPH_SHARE


def test_a_graph_of_a_small_part_that_its_traits_name_launches_some_kernels():
    run = profiled(made_run(), 0.002)
    assert verdict(run).fault == Fault.GRAPH_SHARE
    variant(run).traits = {"part": "the optimizer"}
    assert verdict(run).fault is None
    assert "0.0 % of the kernels, some are expected" in verdict(profiled(run, 0.0)).reason


def test_watched_tensors_that_never_move():
    """The median of the ratios of two is 1 where one of them stands still."""
    run = change(change(made_run(), moved=[1.0, 1.0, 0.0]), "eager", moved=[1.0, 1.0, 1.0])
    assert verdict(run).fault == Fault.MOVEMENT and "1 watched tensors" in verdict(run).reason
    assert verdict(change(run, cycles=[5], moved=[1.0, 1.0, 0.9])).fault is None
    # Neither does it in the reference.
    assert verdict(change(change(run, moved=[1.0, 1.0, 0.0]), "eager", moved=[1.0, 1.0, 0.0])).fault is None
    assert verdict(change(made_run(), "eager", moved=[]), "eager").fault == Fault.NOT_WATCHED


def test_a_state_that_is_not_finite_is_no_state_that_stands_still():
    run = change(made_run(), moved=[None])
    assert verdict(run).fault == Fault.MOVEMENT and "not finite" in verdict(run).reason


def test_where_the_bases_blocks_part_a_single_block_may_and_most_may_not():
    """Kernels that are not deterministic: in one cycle the base has another loss in its last digits."""

    def parted(**cycles):
        run = change(made_run(cycles=3), "eager", cycles=[1], losses=[1.0, 0.5001])
        for loss, where in cycles.values():
            change(run, cycles=where, losses=[1.0, loss])
        return run

    assert 1e-4 < checks.scatter_of_losses(variant(parted(), "eager")) < 3e-4
    assert verdict(parted(one=(0.503, [2]))).fault is None
    assert "by 1.4e-02, two eager blocks" in verdict(parted(one=(0.507, [2]))).reason
    assert "in most cycles" in verdict(parted(two=(0.503, [0, 2]))).reason


def test_what_the_control_differs_by_is_allowed_to_others():
    """GPT-3's pipeline on two H200s: eager's control parted by 1.2 %, and so did the graph of another library."""
    run = change(made_run(names=("eager", "graph_layer", "control")), cycles=[2], losses=[1.0, 0.507])
    assert verdict(run).fault == Fault.LOSSES
    change(run, "control", cycles=[1], losses=[1.0, 0.506])
    assert verdict(run).fault is None and verdict(run, "control").fault is None
    assert verdict(change(run, cycles=[2], losses=[1.0, 0.515])).fault == Fault.LOSSES


# ------------------------------------------------------------------------------------------------
# Parity


@pytest.mark.parametrize(
    ("promise", "scatter", "own", "is_within"),
    [
        # Equal losses with other bits: only equal bits will do where the reference repeats itself.
        ("bitwise", 0.0, [1.0], False),
        (None, 0.0, [1.0], False),
        (None, 1e-3, [1.0019], True),
        (None, 1e-3, [1.0021], False),
        ("bitwise", 1e-3, [1.0021], False),
        (1e-3, 0.0, [1.0009], True),
        (1e-3, 0.0, [1.0011], False),
        (1e-3, 1e-2, [1.0011], False),
        (1e-3, 0.0, [1.0, 1.0], False),
        (1e-3, 0.0, [None], False),
        (None, 1e-3, [], False),
    ],
)
def test_parity_before_the_blocks(promise, scatter, own, is_within):
    run = facts(made_run(), promise=promise, parity=course(*own))
    facts(run, "eager", parity=[*course(1.0, digest="a"), *course(1.0 + scatter, digest="b" if scatter else "a")])
    assert verdict(run).fault == (None if is_within else Fault.PARITY)
    assert verdict(run).is_wrong_numbers == (not is_within)
    assert verdict(run, "eager").status == "pass"


@pytest.mark.parametrize(
    ("tolerance", "scatter", "own", "is_within"),
    [
        (None, 0.0, [1.000009], True),
        (None, 0.0, [1.000011], False),
        (None, 0.0, [1.05], False),
        # Where eager's own runs part, a single course may by as much as a single block.
        (None, 1e-3, [1.0099], True),
        (None, 1e-3, [1.0101], False),
        (None, 6e-3, [1.0119], True),
        (None, 6e-3, [1.0121], False),
        (1e-2, 0.0, [1.009], True),
        (1e-2, 0.0, [1.011], False),
        (None, 0.0, [], False),
        (None, 0.0, [None], False),
    ],
)
def test_parity_after_the_blocks(tolerance, scatter, own, is_within):
    run = facts(made_run(), tolerance=tolerance, after=course(*own))
    facts(run, "eager", after=[*course(1.0, digest="a"), *course(1.0 + scatter, digest="b")])
    assert verdict(run).fault == (None if is_within else Fault.PARITY_AFTER)


def test_a_thread_that_ends_between_the_bases_blocks_of_a_cycle_accuses_nobody():
    run = made_run()
    first = next(block for block in run.builds[""].variants["eager"].blocks if block.cycle == 5)
    first.threads = 4
    assert verdict(change(run, cycles=[5], threads=4)).fault is None
    assert verdict(change(run, cycles=[5], threads=5)).fault == Fault.THREADS


def test_after_the_blocks_the_scatter_of_the_bases_blocks_counts_too():
    run = facts(made_run(), after=course(1.0019))
    assert verdict(run).fault == Fault.PARITY_AFTER
    assert verdict(change(run, "eager", cycles=[1], losses=[1.0, 0.5005])).fault is None


def test_a_verdict_says_how_near_both_parities_were():
    run = made_run()
    assert (verdict(run).parity, verdict(run).after) == ("bitwise", "bitwise")
    assert (verdict(facts(run, after=course(1.000005))).parity, verdict(run).after) == ("bitwise", "5.0e-06")
    run = facts(made_run(), promise=1e-2, parity=[Course(hashes=["h", "x", "y"], losses=[1.0, 1.0, 1.001])])
    facts(run, "eager", parity=[Course(hashes=["h", "h", "h"], losses=[1.0, 1.0, 1.0])])
    assert verdict(run).parity == "1.0e-03"
    facts(run, promise=1e-4)
    assert verdict(run).reason == "parity: differs by 1.0e-03 from step 1"


@pytest.mark.parametrize("missing", ["parity", "after"])
def test_a_variant_that_nothing_compares_fails_unless_the_blocks_are_the_parity(missing):
    when = {"parity": "before", "after": "after"}[missing]
    for name in ("graph_layer", "eager"):
        run = facts(made_run(), name, **{missing: []})
        assert verdict(run).fault == Fault.NOT_COMPARED and f"{when} its blocks" in verdict(run).reason
    run = facts(made_run(), parity=[], after=[])
    run.parity = "blocks"
    assert verdict(run).status == "pass"
    assert verdict(change(run, cycles=[5], losses=[1.0, 0.6])).fault == Fault.LOSSES
    assert verdict(facts(made_run(), reference="gone")).fault == Fault.NOT_COMPARED


# ------------------------------------------------------------------------------------------------
# What a worker raised, and files of schema 3


@pytest.mark.parametrize(
    ("kind", "status", "is_fine"),
    [
        ("unsupported", "unsupported", True),
        ("oom", "oom", True),
        ("capture_failed", "capture_failed", False),
        ("numerics_failed", "numerics_failed", False),
        ("timeout", "timeout", False),
        ("error", "failed", False),
        ("changed_settings", "failed", False),
        ("moved_state", "failed", False),
    ],
)
def test_what_a_worker_raised_is_the_status(kind, status, is_fine):
    run = facts(made_run(), raised=Raised(kind=kind, reason="said"))
    assert (verdict(run).status, verdict(run).reason) == (status, "said")
    assert judge.is_sound(run) == is_fine
    assert verdict(run).is_wrong_numbers == (kind == "numerics_failed")


def test_a_sealed_failure_stays_and_a_sealed_pass_is_still_checked():
    run = facts(made_run(), sealed=SEALED, parity=[])
    assert (verdict(run).fault, verdict(run).reason) == (Fault.SEALED, "as sealed")
    passed = Sealed(status="pass", reason="", parity="bitwise")
    run = facts(made_run(), sealed=passed, parity=[], after=[])
    assert (verdict(run).status, verdict(run).parity) == ("pass", "bitwise")
    assert verdict(change(run, cycles=[5], late_ms=30.0)).fault == Fault.LATE_WORK
    passed.parity = ""
    assert verdict(run).fault == Fault.NOT_COMPARED


def test_published_failures_stay_failed():
    path = RESULTS / "h200x1" / "llama2_lora-bench" / "20261125T034442Z-6c712fa9.json"
    found = judge.judged(run_file.read(path))[""]
    assert found.verdicts["graph_layer"].fault == Fault.SEALED and found.verdicts["graph_step"].fault == Fault.SEALED
    assert found.verdicts["eager"].status == "pass" and found.ratio_of("graph_layer") is None


# ------------------------------------------------------------------------------------------------
# The base, and gains


def eagers(**ms):
    names = ("eager", "eager_twin", "graph_layer", "control")
    return made_run(names=names, ms={"graph_layer": 5.0, **ms})


def base_of(run):
    return judge.judged(run)[""].base


def test_the_base_is_eager_unless_another_is_faster_for_sure():
    assert base_of(eagers(eager_twin=10.5)) == "eager"
    assert base_of(eagers(eager_twin=9.9)) == "eager_twin"
    # The interval contains 1.
    assert base_of(eagers(eager_twin=[9.0, 10.9])) == "eager"
    # The control is the base once more.
    assert base_of(eagers(control=9.0)) == "eager"


def test_an_eager_that_failed_or_does_more_work_is_no_base():
    run = eagers(eager_twin=9.0)
    assert base_of(facts(run, "eager_twin", traits={"extra_work": "pads"})) == "eager"
    run = change(eagers(eager_twin=9.0), "eager_twin", cycles=[5], losses=[1.0, 0.6])
    assert verdict(run, "eager_twin").status == "failed" and base_of(run) == "eager"
    run = facts(eagers(eager_twin=10.5), "eager", raised=Raised(kind="oom", reason="large"))
    assert base_of(run) == "eager_twin"
    run = facts(run, "eager_twin", raised=Raised(kind="oom", reason="large"))
    assert base_of(run) == "" and judge.judged(run)[""].ratio_of("graph_layer") is None


def test_ratios_are_to_the_base_and_the_controls_to_what_it_repeats():
    found = judge.judged(eagers(eager_twin=9.0, control=10.0))[""]
    assert found.ratio_of("graph_layer").ratio == pytest.approx(9 / 5)
    assert found.ratio_of("eager").ratio == pytest.approx(9 / 10)
    assert found.ratio_of("eager_twin") is None
    assert found.ratio_of("control").ratio == pytest.approx(1.0)


def test_the_ceiling_is_the_bases_step_over_its_busy_time():
    found = judge.judged(made_run(issue=(12.0, 8.0), ms={"eager": 12.0, "graph_layer": 8.1}))[""]
    assert found.ceiling("graph_layer") == found.ceiling("eager") == pytest.approx(1.5)
    assert found.reached("graph_layer") == pytest.approx(8.0 / 8.1) and found.reached("eager") is None
    assert judge.judged(made_run())[""].ceiling("graph_layer") is None


@pytest.mark.parametrize(
    ("busy_ms", "ceiling", "note"),
    [(9.9, 10 / 9.9, ""), (10.2, 1.0, ""), (10.3, None, "eager keeps the GPU busy for longer than its step")],
)
def test_no_ceiling_is_below_1(busy_ms, ceiling, note):
    found = judge.judged(made_run(issue=(9.0, busy_ms)))[""].ceiling_of("graph_layer")
    assert found.value == pytest.approx(ceiling) and found.note.startswith(note) and bool(found.note) == bool(note)


def of_two_ranks(eager=None, graph=None, **more):
    """Eager takes 347.5 ms, and spins for the other rank; the graph takes 171.2."""
    ms = {"eager": 347.5, "graph_layer": 171.2}
    run = made_run(ranks=2, gpus=H200 * 2, ms=ms, issue=(283.0, 393.7), kernels=4319, **more)
    facts(run, "eager", profile=Profile(**{"busy_ms": 393.7, "collective_ms": 263.1, "kernels": 4319} | (eager or {})))
    of_graph = {"busy_ms": 170.5, "collective_ms": 29.0, "kernels": 4330}
    return facts(run, "graph_layer", profile=Profile(**of_graph | (graph or {})))


def test_over_ranks_the_ceiling_leaves_out_waiting():
    working = {"working_ms": [150.0, 160.0], "waiting_ms": [243.7, 12.0]}
    found = judge.judged(of_two_ranks(working))[""]
    assert found.ceiling_of("graph_layer") == judge.Noted(pytest.approx(347.5 / 160.0))
    assert found.waiting_ms("eager") == 243.7 and found.skew_ms("eager") is None
    found = judge.judged(of_two_ranks({"unmatched": "rank 1 ran it twice"}))[""]
    assert found.ceiling_of("graph_layer") == judge.Noted(None, "rank 1 ran it twice")
    assert found.reached("graph_layer") is None and found.waiting_ms("eager") is None


def test_where_rank_0_alone_was_profiled_the_ceiling_is_estimated_from_another_variant():
    found = judge.judged(of_two_ranks())[""]
    assert found.ceiling_of("graph_layer") == judge.Noted(pytest.approx(347.5 / (393.7 - 263.1 + 29.0)), "estimated")
    assert found.reached("graph_layer") == pytest.approx(0.932, abs=1e-3)
    assert found.waiting_ms("eager") == pytest.approx(234.1)
    # The eager step's collectives may be the shorter ones.
    found = judge.judged(of_two_ranks({"collective_ms": 20.0, "busy_ms": 160.0}))[""]
    assert found.ceiling("graph_layer") == pytest.approx(347.5 / 160.0)


@pytest.mark.parametrize(
    ("eager", "graph", "note"),
    [
        ({}, {"kernels": 4400}, "no other variant has the same kernels"),
        ({}, {"collective_ms": None}, "no other variant has the same kernels"),
        ({"collective_ms": None}, {}, "does not tell how long collectives take"),
        ({"busy_ms": 200.0}, {}, "its collectives run beside other kernels"),
    ],
)
def test_what_an_older_file_does_not_tell_gives_no_ceiling(eager, graph, note):
    found = judge.judged(of_two_ranks(eager, graph))[""]
    assert found.ceiling("graph_layer") is found.ceiling("eager") is None
    assert note in found.ceiling_of("graph_layer").note
    text = run_table.report(found.run)
    assert f"No ceiling: {found.ceiling_of('eager').note}." in text.replace("\n", " ") and text.count("no ceiling") == 2


def test_the_same_names_of_kernels_are_the_same_kernels_besides_copies():
    hashed = {"kernels_hash": "a7eb3403c38a4640"}
    assert judge.judged(of_two_ranks(hashed, hashed | {"kernels": 4400}))[""].ceiling("eager") == pytest.approx(
        2.177, abs=1e-3
    )


def test_a_share_above_105_percent_is_of_another_program():
    run = made_run(issue=(12.0, 8.0), ms={"eager": 12.0, "graph_layer": [7.63, 7.64]})
    assert judge.judged(run)[""].reached("graph_layer") == pytest.approx(8.0 / 7.635, abs=1e-3)
    run = lasting(working(run, busy_ms=7.0, kernels=5), 7.6)
    assert verdict(run).fault is None and judge.judged(run)[""].reached("graph_layer") is None
    assert verdict(working(run, kernels=9)).fault == Fault.ABOVE_CEILING


def test_a_table_of_several_gpus_has_waiting_and_skew():
    run = of_two_ranks()
    for block in variant(run, "eager").blocks:
        block.fastest_ms = [ms - 0.5 for ms in block.step_ms]
    text = run_table.report(run)
    assert "2.177x estimated" in text and "busy for 159.6 (estimated, without waiting for other ranks)" in text.replace(
        "\n", " "
    )
    assert ["eager", "234.1", "0.500"] in [line.split() for line in text.splitlines()]
    assert max(map(len, text.splitlines())) <= run_table.WIDTH
    assert "waits" not in run_table.report(made_run(issue=(12.0, 8.0)))


def test_the_ceiling_of_a_compiled_graph_is_that_of_the_compiled_program():
    run = made_run(names=("eager", "compile", "reduce_overhead"), issue=(12.0, 8.0), ms={"eager": 12.0})
    for name, busy_ms in (("compile", 6.0), ("reduce_overhead", 5.9)):
        facts(run, name, kind="compile", profile=Profile(busy_ms=busy_ms))
        change(run, name, replays=0, expected_replays=0)
        variant(run, name).capture = CaptureFacts(graphs=int(name != "compile"))
    found = judge.judged(run)[""]
    assert found.uncaptured("reduce_overhead") == "compile" and found.ceiling("reduce_overhead") == pytest.approx(2.0)
    assert found.uncaptured("compile") == "" and found.ceiling("compile") is None


@pytest.mark.parametrize(
    ("ms", "made_s", "steps"),
    [([8.0, 8.01], 6.0, 3008), ([8.0, 8.01], None, None), ([12.0, 12.01], 6.0, None), ([9.0, 11.2], 6.0, None)],
)
def test_capture_is_paid_back_after_the_steps_that_gain_its_seconds(ms, made_s, steps):
    run = made_run(ms={"graph_layer": ms})
    variant(run).capture.made_s = made_s
    assert judge.judged(run)[""].paid_back("graph_layer") == steps


def test_issue_is_the_median_over_blocks_and_at_most_the_step():
    run = made_run(issue=(12.0, 8.0))
    assert judge.judged(run)[""].issue_ms("eager") == 10.0  # a step takes 10 ms
    for block, issued in zip(variant(run).blocks, (1, 2, 3, 4, 5, 6, 7, 99), strict=True):
        block.issue_ms = [issued, issued, 200.0]
    assert judge.judged(run)[""].issue_ms("graph_layer") == 4.5
    assert judge.judged(made_run())[""].issue_ms("eager") is None


def test_quiet_and_contended_cycles_are_apart():
    found = judge.judged(made_run(busy=16, ms={"eager": [10.0, 20.0], "graph_layer": 8.0}))[""]
    assert found.ratio_of("graph_layer").ratio == pytest.approx(1.25)
    assert found.ratio_of("graph_layer", busy=True).ratio == pytest.approx(2.5)
    assert found.quiet_cycles == 8


def test_memory_alone_and_energy():
    run = made_run(alone={"eager": 4 * 2**30, "graph_layer": 5 * 2**30})
    found = judge.judged(run)[""]
    assert (found.alone_bytes("graph_layer"), found.added_bytes("graph_layer")) == (5 * 2**30, 2**30)
    for block in variant(run).blocks:
        block.gpu = GpuState(sm_mhz=1500.0, power_w=500.0)
    assert found.joules("graph_layer") == pytest.approx(5.0) and found.sm_mhz("graph_layer") == 1500.0
    assert found.joules("eager") is None and found.sm_mhz("eager") is None


def test_steps_that_differ_in_kind_have_a_typical_step_and_no_rate():
    run = made_run(ms={"graph_layer": [[4.0, 4.0, 4.0, 20.0, 20.0, 30.0]]})
    build = run.builds[""]
    build.flops_per_step = 8e12
    found = judge.judged(run)[""]
    assert found.typical_ms("graph_layer") == pytest.approx(12.0) and found.tflops("graph_layer") is not None
    change(run, classes=[0, 0, 0, 1, 1, 1])
    assert found.typical_ms("graph_layer") == pytest.approx((4 + 20) / 2) and found.tflops("graph_layer") is None
    assert found.ms("graph_layer") == pytest.approx(82 / 6)
    assert found.tflops("eager") == pytest.approx(800.0) and math.isclose(found.ms("eager"), 10.0)


def test_without_a_base_that_passed_nothing_is_compared_not_even_the_control():
    run = made_run(names=("eager", "graph_layer", "control"))
    own = judge.judged(change(run, "eager", parent_s=3.0))[""]
    assert own.verdicts["eager"].fault == Fault.CLOCK and own.base == ""
    assert own.ratio_of("graph_layer") is None and own.ratio_of("control") is None
    assert own.ceiling("graph_layer") is None
