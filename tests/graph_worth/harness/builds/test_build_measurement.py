"""graph_worth/harness/builds/build_measurement.py: the blocks of cycles, and when a run has enough of them."""

from types import SimpleNamespace
from typing import ClassVar

import pytest

from graph_worth.harness import checks, judge, run
from graph_worth.harness.builds.audit import AUDITS
from graph_worth.harness.builds.build_measurement import BuildMeasurement
from graph_worth.harness.builds.request import FEWEST_CYCLES, BuildRequest, Settings
from graph_worth.harness.checks import Fault
from graph_worth.harness.files import partial, run_file
from graph_worth.harness.files.partial import Partial
from tests.helpers.made_run import HEADER, block


def cycles_made(cycle_s, **settings):
    """Cycles until the rule says that it is enough."""
    cycles = []
    facts = SimpleNamespace(of=lambda fact, build: cycles)
    request = SimpleNamespace(name="", variants={})
    worker = SimpleNamespace(request=request, settings=Settings(**settings), partial=facts, say=print)
    measurement = BuildMeasurement(worker)
    while not measurement._is_enough():
        cycles.append({"seconds": cycle_s})
    return len(cycles)


@pytest.mark.parametrize(
    ("cycle_s", "cycles_s", "cycles"),
    [(1.0, 20.0, 8), (5.0, 31.0, 6), (60.0, 0.0, FEWEST_CYCLES), (60.0, None, 8)],
)
def test_the_clock_ends_a_run_after_its_fewest_cycles(cycle_s, cycles_s, cycles):
    assert cycles_made(cycle_s, cycles_s=cycles_s) == cycles


STEPS = {"untimed": 2, "timed": 20, "drained": 3, "resets_each": True}


class FakeWorker:
    """A worker that answers at once."""

    apart, shares, raising, facts = False, False, (), {"period": 1, "least_steps": 0, "gpus": []}
    ended = ()
    # (variant, number of its block) -> its last loss, where it is no 0.5.
    parted: ClassVar[dict[tuple[str, int], float]] = {}

    def __init__(self, names):
        self.names, self.captured, self.asked, self.alones = names, list(names), [], []
        self.paces = {name: {"ms": 10.0, "reset_s": 0.0} for name in names}

    def remaining(self):
        return self.names

    def ask(self, variant, command):
        self.asked.append((variant, command))
        if command["do"] == "pace":
            return {"operator_us": 9.0}
        fact = block(variant, 0, 0)
        number = sum(name == variant and each["do"] == "block" for name, each in self.asked) - 1
        fact["first"] = command.get("first", 0)
        fact["losses"] = [1.0, self.parted.get((variant, number), 0.5)]
        return {key: value for key, value in fact.items() if key not in ("build", "variant", "cycle", "place", "busy")}

    def try_ask(self, variant, command):
        if variant in self.ended:
            return {"ended": "the worker was ended by SIGTERM"}
        return {"raised": "AssertionError: no"} if variant in self.raising else self.ask(variant, command)

    def alone(self, asks, is_last):
        self.alones.append(asks)
        return [(name, command, self.ask(name, command)) for name, command in asks]

    def start_ahead(self):
        pass


def measurement_of(folder, eagers, graphs):
    """A measurement by default settings that has its first plan, and the partial file of it."""
    declared = HEADER["builds"][""]["variants"]
    variants = {name: declared["eager"] for name in eagers} | {name: declared["graph_step"] for name in graphs}
    variants["control"] = declared["eager"] | {"reference": "control"}
    own = Partial(folder / f"run{partial.SUFFIX}")
    own.add("header", **HEADER | {"builds": {"": {"variants": variants}}})
    own.add("plan", build="", base=eagers[0], steps=STEPS, paces={})
    own.add("worker", build="", gpus=[], config={}, host={"gpus": [], "versions": {"torch": "2.13"}}, unit="samples")
    settings = run.settings_of(run.parse(["--model", "gpt3"]), "bench")
    request = BuildRequest(name="", fields={}, variants=variants, command=None, environment={})
    worker = FakeWorker([*eagers, *graphs])
    worker.request, worker.settings, worker.partial, worker.say = request, settings, own, lambda text: None
    return BuildMeasurement(worker), own


@pytest.fixture
def eight_cycles(tmp_path):
    """The run of eager and two graphs by default settings, and its worker."""
    measurement, own = measurement_of(tmp_path, ["eager"], ["graph_a", "graph_b"])
    measurement._measure_cycles()
    own.close()
    return partial.folded(own.facts), measurement.worker


def test_by_default_eight_cycles_have_the_control_and_another_order_each_time(eight_cycles):
    found, _ = eight_cycles
    build = found.builds[""]
    orders = [cycle.order for cycle in build.cycles]
    assert len(orders) == 8 and build.anchor == "eager"
    assert all(order[0] == order[-1] == "eager" for order in orders)
    assert all(sorted(order[1:-1]) == ["control", "graph_a", "graph_b"] for order in orders)
    assert len(set(map(tuple, orders))) > 2
    assert [len(own.blocks) for own in build.variants.values()] == [16, 8, 8, 8]
    assert [block.place for block in build.variants["eager"].blocks[:2]] == [0, 4]


def test_the_control_is_blocks_of_the_base_and_the_hosts_pace_is_sampled_in_each_cycle(eight_cycles):
    found, worker = eight_cycles
    blocks = [variant for variant, command in worker.asked if command["do"] == "block"]
    assert blocks.count("eager") == 24 and "control" not in blocks
    assert [cycle.operator_us for cycle in found.builds[""].cycles] == [9.0] * 8


@pytest.mark.parametrize(
    ("graphs_loss", "eagers_block", "blocks_again", "fault"),
    [
        (0.5005, 28, 5, None),  # eager's fifth block more parts, too
        (0.5005, None, 12, Fault.LOSSES),  # it never does
        (0.51, 25, 0, Fault.LOSSES),  # no rounding parts so far
    ],
)
def test_eager_repeats_its_block_where_a_graph_parted_a_little(
    tmp_path, monkeypatch, graphs_loss, eagers_block, blocks_again, fault
):
    """Eager has made 24 blocks in eight cycles, with the control's."""
    monkeypatch.setattr(FakeWorker, "parted", {("graph_a", 3): graphs_loss, ("eager", eagers_block): 0.5003})
    measurement, own = measurement_of(tmp_path, ["eager"], ["graph_a", "graph_b"])
    for name in ("graph_a", "graph_b"):
        own.add("capture", build="", variant=name, graphs=1, promised_graphs=1, promised_replays=1)
    measurement._measure_cycles()
    measurement._look_again()
    run = partial.folded(own.facts)
    assert len(run.builds[""].variants["eager"].again) == blocks_again
    assert {each.first for each in run.builds[""].variants["eager"].again} <= {own.of("block")[5 * 3]["first"]}
    found = checks.fault_of(run, run.builds[""], "graph_a")
    assert (found.fault if found else None) == fault


def test_eager_repeats_the_audits_of_all_in_one_process_and_only_those_that_are_missing(tmp_path):
    measurement, own = measurement_of(tmp_path, ["eager", "eager_torch"], ["graph_step"])
    measurement._measure_cycles()
    measurement._audit()
    measurement.measure_base([measurement])
    (asks,) = measurement.worker.alones
    assert [command["do"] for _, command in asks] == ["capture", *["block"] * 6] and {name for name, _ in asks} == {
        "eager"
    }
    found = partial.folded(own.facts).builds[""].variants
    assert all(len(found[name].audits) == AUDITS for name in ("eager", "eager_torch", "graph_step"))
    assert all(each.repetition is not None for variant in found.values() for each in variant.audits)
    asked = len(measurement.worker.asked)
    measurement._audit()
    measurement.measure_base([measurement])
    assert len(measurement.worker.asked) == asked


def test_who_raises_in_an_audit_is_not_left_out_and_after_the_base_nobody_is_audited(tmp_path):
    measurement, own = measurement_of(tmp_path, ["eager"], ["graph_a", "graph_b"])
    measurement._measure_cycles()
    measurement.worker.raising = ("graph_a",)
    measurement._audit()
    measurement.measure_base([measurement])
    found = partial.folded(own.facts).builds[""].variants
    assert {each.raised for each in found["graph_a"].audits} == {"AssertionError: no"}
    assert all(each.repetition for name in ("graph_a", "graph_b") for each in found[name].audits)
    other, facts = measurement_of(tmp_path / "other", ["eager"], ["graph_a", "graph_b"])
    other._measure_cycles()
    other.worker.raising = ("eager", "graph_a")
    other._audit()
    assert [each["variant"] for each in facts.of("audit")] == ["eager"]
    assert partial.folded(facts.facts).builds[""].variants["eager"].audits[0].raised == "AssertionError: no"


def test_an_audit_that_a_signal_ended_accuses_nobody_and_is_not_repeated(tmp_path):
    measurement, own = measurement_of(tmp_path, ["eager"], ["graph_a", "graph_b"])
    for name in ("graph_a", "graph_b"):
        own.add("capture", build="", variant=name, graphs=1, promised_graphs=1, promised_replays=1)
    measurement._measure_cycles()
    measurement.worker.ended, measurement.worker.raising = ("graph_a",), ("graph_b",)
    measurement._audit()
    measurement.measure_base([measurement])
    run = partial.folded(own.facts)
    (build,) = run.builds.values()
    assert {(audit.ended, audit.raised) for audit in build.variants["graph_a"].audits} == {
        ("the worker was ended by SIGTERM", "")
    }
    assert not any(audit.own or audit.repetition for audit in build.variants["graph_a"].audits)
    assert checks.fault_of(run, build, "graph_a") is None
    assert checks.fault_of(run, build, "graph_b").fault == Fault.AUDIT


def test_a_base_that_fails_in_its_audit_is_not_asked_again(tmp_path):
    measurement, own = measurement_of(tmp_path, ["eager", "eager_torch"], ["graph_step"])
    measurement._measure_cycles()
    own.add("left_out", build="", variant="eager", kind="error", reason="sample 13 cannot be read")
    measurement.worker.names.remove("eager")
    asked = len(measurement.worker.asked)
    measurement._audit()
    assert {name for name, _ in measurement.worker.asked[asked:]} == {"eager_torch", "graph_step"}
    # Their reference is gone.
    measurement.measure_base([measurement])
    assert not measurement.worker.alones


def test_a_run_goes_on_with_another_base_where_its_base_fails_between_cycles(tmp_path):
    measurement, own = measurement_of(tmp_path, ["eager", "eager_torch"], ["graph_step"])
    for number in range(3):
        measurement._measure_cycle(number)
    own.add("left_out", build="", variant="eager", kind="error", reason="sample 13 cannot be read")
    measurement.worker.names.remove("eager")
    own.add("plan", build="", base="eager_torch", steps=STEPS, paces={})
    measurement._measure_cycles()
    own.add("end", end_utc="2026-11-25T10:20:00Z")
    own.close()
    (judged,) = judge.judged(run_file.read(partial.seal(own))).values()
    assert judged.verdicts["eager"].reason == "sample 13 cannot be read" and judged.build.anchor == "eager_torch"
    # What the control repeated first is no longer the base.
    counts = {name: len(variant.blocks) for name, variant in judged.build.variants.items()}
    assert counts == {"eager": 6, "eager_torch": 3 + 2 * 5, "graph_step": 8, "control": 5}
    assert judged.ratio_to("eager_torch", "graph_step").cycles == 8
    assert judged.ratio_to("eager_torch", "control").cycles == 5


@pytest.mark.parametrize(
    ("words", "preset", "cycles", "control"),
    [
        ([], "bench", 8, "control"),
        ([], "tiny", 3, "control"),
        (["--no-control"], "bench", 8, ""),
        (["--cycles", "5"], "bench", 5, "control"),
        (["--cycles", "auto"], "bench", "auto", "control"),
    ],
)
def test_what_a_run_measures_unless_told(words, preset, cycles, control):
    settings = run.settings_of(run.parse(["--model", "gpt3", *words]), preset)
    assert (settings.cycles, settings.control) == (cycles, control)
    assert (Settings().cycles, Settings().control) == (8, "control")
