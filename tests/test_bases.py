"""Which eager a variant is compared with: kernels, layers, arithmetic, batches; and sessions that ran too few."""

import json

import pytest

from benchmarks import bases, compare, frame, gate, overview_rows, overview_tables, readme, rows, script, tables
from tests.table_records import STRATEGY, make, packed, schema_1

TRAITS = {
    "eager_torch": {"kernels": "torch's"},
    "eager_lean": {"layer": "lean"},
    "graph_lean": {"layer": "lean"},
    "eager_bf16": {"arithmetic": "bf16"},
    "eager_half": {"batches": "every other sample"},
    "eager_sync": {"extra_work": "waits"},
}


def runs(times, declared=("eager",), num=5, **changes):
    """Rounds of each variant at its step time, ms, as the harness leaves them: with traits and the eagers declared."""
    found = []
    for number in range(1, num + 1):
        for variant, step_ms in times.items():
            kind = "eager" if variant.startswith("eager") else "graph"
            said = {"kind": kind, "traits": TRAITS.get(variant, {}), "eagers": list(declared)}
            record = make(variant, number, step_ms * (1 + 0.001 * number), extra=said, **changes)
            if kind == "graph":
                record["capture"].update(STRATEGY, num_replays=20, expected_replays=20)
            found.append(record)
    return found


def table_of(found, base=None):
    return {row["variant"]: row for row in rows.summarise(found, base)}


def host(root, found, hour):
    return packed(root, found, hour=hour, boot=f"{hour:06x}", gpu=f"{hour:04x}")


# ------------------------------------------------------------------------------------------------
# The best eager of what trains the same


@pytest.mark.parametrize(("torch_ms", "base"), [(9.0, "eager_torch"), (11.0, "eager")])
def test_kernels_are_eagers_choice(torch_ms, base):
    times = {"eager": 10.0, "eager_torch": torch_ms, "eager_sync": 12.0, "graph": 8.0}
    table = table_of(runs(times, ("eager", "eager_torch")))
    assert table["graph"]["base"] == base and table[base]["is_base"] and next(iter(table)) == base
    assert table["graph"]["speedup"] == pytest.approx(min(10.0, torch_ms) / 8.0)
    assert sum(row["is_base"] for row in table.values()) == 1
    assert all(row["missing_eagers"] == [] and row["across_base"] is None for row in table.values())


def test_an_eager_that_waits_is_a_candidate_where_it_was_run():
    assert table_of(runs({"eager": 10.0, "eager_sync": 9.0, "graph": 8.0}))["graph"]["base"] == "eager_sync"


@pytest.mark.parametrize("other", ["eager_bf16", "eager_half"])
def test_another_arithmetic_or_other_batches_are_no_base(other):
    table = table_of(runs({"eager": 10.0, other: 5.0, "graph": 8.0}))
    assert table["graph"]["base"] == "eager" and table["graph"]["speedup"] == pytest.approx(10.0 / 8.0)
    # Nor is it compared with what it does not equal, in either column.
    assert table[other]["is_base"] and table[other]["speedup"] is None and table[other]["across_base"] is None


def test_a_variant_without_an_eager_of_its_kind_has_no_ratio():
    row = table_of(runs({"eager": 10.0, "graph_lean": 8.0}))["graph_lean"]
    assert (row["base"], row["speedup"], row["ceiling"]) == (None, None, None)
    assert row["verdict"].startswith("no eager of the same")


LAYERS = {"eager": 10.0, "eager_lean": 9.0, "graph": 8.0, "graph_lean": 8.1}
BOTH = ("eager", "eager_lean")


def test_ratios_stand_against_the_own_layer_and_beside_against_all():
    table = table_of(runs(LAYERS, BOTH))
    assert {name: row["base"] for name, row in table.items()} == {
        "eager_lean": None, "eager": None, "graph": "eager", "graph_lean": "eager_lean",
    }  # fmt: skip
    assert [name for name, row in table.items() if row["is_base"]] == ["eager_lean", "eager"]
    assert table["graph"]["speedup"] == pytest.approx(10.0 / 8.0)
    assert table["graph"]["across_speedup"] == pytest.approx(9.0 / 8.0)
    assert table["graph_lean"]["speedup"] == table["graph_lean"]["across_speedup"] == pytest.approx(9.0 / 8.1)
    assert table["eager"]["across_speedup"] == pytest.approx(0.9) and table["eager_lean"]["across_speedup"] is None
    assert {row["across_base"] for row in table.values()} == {"eager_lean"}
    assert table["graph"]["ceiling"] == pytest.approx(10.0 / 8.0)


def test_the_second_column_appears_only_where_there_are_several_layers(tmp_path):
    text = tables.folder_text(list(table_of(runs(LAYERS, BOTH)).values()))
    heading, lean, eager, *_ = text.splitlines()
    assert "all layers" in heading and lean.startswith("eager_lean") and "0.900x" in eager
    assert lean.split()[-4:-1] == ["1", "lean", "1"]
    notes = compare.notes(runs(LAYERS, BOTH), rows.summarise(runs(LAYERS, BOTH)), [])
    assert {"base: eager", "base of layer lean: eager_lean"} <= set(notes)
    one = tables.folder_text(list(table_of(runs({"eager": 10.0, "graph": 8.0})).values()))
    assert "layer" not in one


def test_the_overview_has_a_row_for_the_slower_layers_eager_and_the_base_of_each(tmp_path):
    host(tmp_path / "fake-bench", runs(LAYERS, BOTH), 1)
    blocks, _, _ = overview_rows.read(tmp_path)
    found = {row["variant"]: row for row in overview_rows.rows_of(blocks)}
    assert list(found) == ["eager", "graph", "graph_lean"]
    assert [found[name]["base_ms"] for name in found] == [pytest.approx(ms, rel=0.01) for ms in (9.0, 10.0, 9.0)]
    assert [found[name]["base"] for name in found] == ["eager_lean", "eager", "eager_lean"]
    # The base's own kernels take 0.8 of eager's step, and all of eager_lean's.
    busy = [found[name]["eager_busy_ms"] for name in ("graph", "graph_lean")]
    assert busy == [pytest.approx(8.0, rel=0.01), pytest.approx(9.0, rel=0.01)]
    assert found["graph_lean"]["ceiling"] == pytest.approx(9.0 / 8.1)
    text = overview_tables.text_of(tmp_path, blocks, [])
    assert "all layers" in text and "best eager of all kinds of layer" in text
    assert text.count("eager_lean") >= 2


def test_a_base_that_was_named_is_that_of_every_layer():
    table = table_of(runs(LAYERS, BOTH), base="eager_lean")
    assert {row["base"] for row in table.values()} == {None, "eager_lean"}
    assert table["eager"]["speedup"] == pytest.approx(0.9) and table["graph"]["across_base"] is None


def test_each_layer_has_one_base_over_the_sessions_that_pool(tmp_path):
    """eager is the faster of its layer in the first session by chance, eager_torch over both."""
    declared = (*BOTH, "eager_torch")
    host(tmp_path, runs({**LAYERS, "eager_torch": 10.1}, declared), 1)
    host(tmp_path, runs({**LAYERS, "eager_torch": 8.5}, declared), 2)
    table = table_of(frame.read(tmp_path).frame)
    assert (table["graph"]["base"], table["graph"]["num_pairs"]) == ("eager_torch", 10)
    assert table["graph"]["speedup"] == pytest.approx((10.1 * 8.5) ** 0.5 / 8.0)
    assert (table["graph_lean"]["base"], table["graph_lean"]["across_base"]) == ("eager_lean", "eager_lean")


# ------------------------------------------------------------------------------------------------
# Sessions that ran fewer eagers than their model declares

DECLARED = ("eager", "eager_torch")
FEW, ALL = {"eager": 10.0, "graph": 8.0}, {"eager": 10.0, "eager_torch": 9.0, "graph": 8.0}


def test_a_row_of_fewer_eagers_is_marked_and_names_what_is_missing():
    found = runs(FEW, DECLARED)
    table = table_of(found)
    row = table["graph"]
    assert (row["base"], row["missing_eagers"]) == ("eager", ["eager_torch"])
    assert row["lacks"] == "not all eagers run" and "not all eagers run" in tables.folder_text(list(table.values()))
    assert row["verdict"] == "faster" and row["scope"] == "on this host"
    (note,) = [note for note in compare.notes(found, rows.summarise(found), []) if "not all eagers" in note]
    assert note.startswith("eager, graph: not all eagers run, eager_torch missing")


def test_fewer_eagers_give_no_plain_verdict(tmp_path):
    for hour in (1, 2, 3):
        host(tmp_path / "few", runs(FEW, DECLARED), hour)
        host(tmp_path / "all", runs(ALL, DECLARED), hour)
    few, every = (table_of(frame.read(tmp_path / name).frame)["graph"] for name in ("few", "all"))
    assert (few["num_hosts"], few["verdict"], few["scope"]) == (3, "faster", "on this host")
    assert (every["num_hosts"], every["verdict"], every["scope"]) == (3, "faster", "plain")


def test_a_session_of_all_eagers_stands_before_a_newer_one_of_fewer(tmp_path):
    host(tmp_path, runs(ALL, DECLARED), 1)
    host(tmp_path, runs(FEW, DECLARED), 2)
    table = table_of(frame.read(tmp_path).frame)
    row = table["graph"]
    assert (row["base"], row["num_sessions"], row["num_older"], row["missing_eagers"]) == ("eager_torch", 1, 1, [])
    assert row["speedup"] == pytest.approx(9.0 / 8.0) and table["eager_torch"]["is_base"]
    assert not table["eager"]["is_base"] and table["eager"]["speedup"] == pytest.approx(0.9)


@pytest.mark.parametrize("status", ["unsupported", "oom", "failed", "numerics_failed"])
def test_an_eager_that_cannot_run_here_counts_as_run(status):
    lost = make("eager_torch", 0, status=status, message="no", extra={"kind": "eager", "eagers": list(DECLARED)})
    missing = [] if status in ("unsupported", "oom") else ["eager_torch"]
    assert table_of([*runs(FEW, DECLARED), lost])["graph"]["missing_eagers"] == missing


def test_an_eager_of_too_few_rounds_does_not_count_as_run():
    def missing(num):
        return table_of([*runs(FEW, DECLARED), *runs({"eager_torch": 9.0}, DECLARED, num=num)])["graph"]

    assert (missing(2)["missing_eagers"], missing(2)["base"]) == (["eager_torch"], "eager")
    assert (missing(3)["missing_eagers"], missing(3)["base"]) == ([], "eager_torch")
    # One round of each is as much as there is.
    found = runs(ALL, DECLARED, num=1)
    assert table_of(found)["graph"]["missing_eagers"] == [] and table_of(found)["graph"]["base"] == "eager_torch"


def test_a_cpu_is_marked_with_nothing():
    changes = {"device": "cpu", "env": {"gpu_name": None, "gpu_uuid": None}}
    assert all(
        not row["missing_eagers"] and not row["lacks"] for row in table_of(runs(FEW, DECLARED, **changes)).values()
    )


def test_a_session_that_timed_no_eager_does_not_stand_before_one_that_did(tmp_path):
    host(tmp_path, runs(FEW, DECLARED), 1)
    host(tmp_path, runs({"graph": 8.0}, DECLARED), 2)
    assert table_of(frame.read(tmp_path).frame)["graph"]["num_pairs"] == 5


# ------------------------------------------------------------------------------------------------
# Records that do not say


def old(times, model, **changes):
    found = runs(times, model=model, **changes)
    for record in found:
        del record["extra"]["traits"], record["extra"]["eagers"]
    return found


def test_of_an_older_record_the_script_of_today_speaks(monkeypatch):
    described = {
        "variants": {"eager": "", "eager_lean": "", "eager_sync": "", "graph": "", "graph_lean": ""},
        "kinds": {"eager": "eager", "eager_lean": "eager", "eager_sync": "eager"},
        "traits": TRAITS,
    }
    monkeypatch.setattr(bases, "described", lambda model: described if model == "toy" else {})
    table = table_of(old(LAYERS, "toy"))
    assert (table["graph"]["base"], table["graph_lean"]["base"]) == ("eager", "eager_lean")
    assert table_of(old(FEW, "toy"))["graph"]["missing_eagers"] == ["eager_lean"]
    assert table_of(schema_1(old(FEW, "toy")))["graph"]["lacks"].endswith("not all eagers run")
    # A model that is not here says nothing.
    assert table_of(old(FEW, "gone"))["graph"]["missing_eagers"] == []
    # What the record says stands, whatever the script says now.
    assert table_of(runs(FEW, ("eager",), model="toy"))["graph"]["missing_eagers"] == []


def test_the_scripts_of_this_repository_say_which_eagers_they_need():
    assert bases.described("no_such_model") == {}
    described = {model: bases.described(model) for model in ("gpt3", "rnnt", "stable_diffusion")}
    assert {model: script.eagers_of(each) for model, each in described.items()} == {
        "gpt3": ["eager"], "rnnt": ["eager"], "stable_diffusion": ["eager", "eager_torch"],
    }  # fmt: skip
    candidates = {name for name, kind in described["rnnt"]["kinds"].items() if kind == "eager"}
    assert candidates == {"eager", "eager_sync", "eager_padded"}
    traits = described["stable_diffusion"]["traits"]
    assert set(traits["eager_torch"]) == {"kernels"} and set(traits["eager_sync"]) == {"extra_work"}


def test_a_record_keeps_what_its_script_says_of_it():
    kinds = {"eager": "eager", "eager_torch": "eager", "graph": "graph"}
    described = {"variants": dict.fromkeys(kinds, ""), "kinds": kinds, "traits": TRAITS}
    assert script.said(described, "eager_torch") == {
        "kind": "eager", "traits": {"kernels": "torch's"}, "eagers": ["eager", "eager_torch"],
    }  # fmt: skip
    assert script.said(described, "control")["kind"] == "control" and script.said(described, "graph")["traits"] == {}
    assert json.loads(json.dumps(script.said(described, "graph"))) == script.said(described, "graph")


# ------------------------------------------------------------------------------------------------
# README and gate


@pytest.fixture
def root(tmp_path):
    host(tmp_path / "results" / "fake-bench", runs(FEW, DECLARED), 1)
    host(tmp_path / "results" / "other-bench", runs(ALL, DECLARED, model="other"), 1)
    return tmp_path


def rendered(root, words):
    (root / "README.md").write_text(f"<!-- table: {words} -->\n<!-- end -->\n")
    return readme.render(root / "README.md", root)


def test_ratios_against_fewer_eagers_stay_out_of_readmes(root):
    text = rendered(root, "front results bought")
    assert "| 1.250x" not in text and text.count("not measured yet against all eagers |") == 1
    text = rendered(root, "compare results/fake-bench headline gain")
    assert "its ratios stand in [table.md](results/fake-bench/table.md) alone" in text and "1.250x" not in text
    assert "| graph | 5 |" in rendered(root, "compare results/other-bench gain")
    # The overview of the results shows them, marked.
    blocks, _, _ = overview_rows.read(root / "results")
    text = overview_tables.text_of(root / "results", blocks, [])
    assert "not all eagers run" in text and "not all eagers run, eager_torch missing: fake/bench" in text


def test_a_submission_measured_with_fewer_eagers_is_not_called_unmeasured(root):
    host(root / "results" / "gpt3-bench", runs(FEW, DECLARED, model="gpt3"), 1)
    text = rendered(root, "front results published")
    assert text.count("not measured yet against all eagers") == 1 and text.count("not measured yet |") == 4


def test_the_gate_pairs_both_sides_with_one_eager(tmp_path):
    """Though the newer set has a faster eager beside: the variant itself has not changed."""
    host(tmp_path / "base", runs(FEW, ("eager",)), 1)
    host(tmp_path / "new", runs(ALL, DECLARED), 1)
    judged = gate.judge(gate.match(gate.read(tmp_path / "base"), gate.read(tmp_path / "new")), 0.02)
    (ratio,) = [each for each in judged if each.quantity == "speed-up"]
    assert (ratio.row, ratio.verdict, ratio.base) == ("fake/bench graph", "ok", "1.250x")
    # Where the base has gone, it is what both have.
    judged = gate.judge(gate.match(gate.read(tmp_path / "new"), gate.read(tmp_path / "base")), 0.02)
    assert {each.row: each.verdict for each in judged if each.quantity == "speed-up"}["fake/bench graph"] == "ok"
