"""graph_worth/harness/builds/audit.py: which audits are missing, and how they are repeated."""

import pytest

from graph_worth.harness.builds import audit
from graph_worth.harness.files.partial import Partial

STEPS = {"untimed": 2, "timed": 30, "drained": 3, "resets_each": True}


@pytest.fixture
def begun(tmp_path):
    def make(ms=10.0, more=None, **plan):
        more = more or {}
        facts = Partial(tmp_path / "a.partial.jsonl")
        facts.add("plan", build="", base="eager", steps=STEPS | more, paces={"eager": {"ms": ms}}, **plan)
        return facts

    return make


def add(facts, variant, command, **more):
    kept = {key: command[key] for key in ("number", "seed", "first", *audit.STEPS)}
    facts.add("audit", build="", variant=variant, **kept, **more)


def asked(facts):
    return list(audit.missing(facts, "", ["graph_step", "eager"]))


def test_each_variant_has_audits_of_its_own_and_the_base_comes_first(begun):
    facts = begun(period=1)
    found = asked(facts)
    assert [name for name, _ in found] == ["eager", "graph_step"] * 2
    assert len({command["seed"] for _, command in found}) == 4
    assert all(command["reset"] and command["timed"] == 8 for _, command in found)
    add(facts, *found[1])
    assert [(name, command["number"]) for name, command in asked(facts)] == [
        ("eager", 0),
        ("eager", 1),
        ("graph_step", 1),
    ]


@pytest.mark.parametrize(("ms", "more"), [(300.0, {}), (10.0, {"resets_each": False})])
def test_a_variant_whose_steps_or_resets_take_long_has_one(begun, ms, more):
    facts = begun(ms, more, period=1)
    assert len(asked(facts)) == 2


@pytest.mark.parametrize(("period", "timed"), [(None, 8), (1, 8), (4, 8), (3, 9), (15, 15), (30, 30)])
def test_an_audit_has_whole_periods(begun, period, timed):
    found = asked(begun(period=period))
    assert {command["timed"] for _, command in found} == {timed}
    assert all(command["first"] % (period or 1) == 0 for _, command in found)


def test_a_repetition_makes_the_same_steps_by_the_reference_once(begun):
    facts = begun(period=1)
    for name, command in asked(facts):
        add(facts, name, command)
    references = {"graph_step": "eager_te", "eager": "eager"}
    found = audit.repetitions(facts, "", references)
    assert [name for name, _ in found] == ["eager", "eager", "eager_te", "eager_te"]
    seeds = {each["seed"]: each for each in facts.of("audit")}
    for _, command in found:
        assert all(command[key] == seeds[command["seed"]][key] for key in ("first", "timed"))
    facts.add("repetition", build="", variant="eager", seed=found[0][1]["seed"])
    assert audit.repetitions(facts, "", references) == found[1:]
    assert audit.repetitions(facts, "", {"eager": "eager"}) == found[1:2], "a variant that was left out"
