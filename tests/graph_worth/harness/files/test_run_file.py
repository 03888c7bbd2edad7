"""Run files and partial ones: how they are written and read back, and damaged ones that are refused in one line."""

import errno
import json
import os
import re
from pathlib import Path

import msgspec
import pytest

from graph_worth.folders import ROOT
from graph_worth.harness import command, judge
from graph_worth.harness.files import partial, run_file, schema_3
from graph_worth.harness.files.facts import Raised
from graph_worth.harness.files.partial import Partial
from graph_worth.harness.judge import Fault
from tests.helpers.made_run import HEADER, add_cycle, made_run, write

PUBLISHED = sorted(path for path in (ROOT / "results").glob("h*/*/*.json"))
OLD = ROOT / "results" / "h200x1" / "gpt3-bench" / "20261125T034016Z-34f08cfa.json"


@pytest.fixture
def made(tmp_path):
    own = Partial(tmp_path / f"run{partial.SUFFIX}")
    own.add("header", **HEADER)
    own.add("plan", build="", base="eager", steps={}, paces={})
    own.add("capture", build="", variant="graph_step", graphs=1, promised_graphs=1, promised_replays=1)
    for cycle in range(2):
        add_cycle(own, cycle, {"eager": 10.0, "graph_step": 8.0})
    yield own
    own.close()


def times(run, name="graph_step"):
    return [block.mean_ms for block in run.builds[""].variants[name].blocks]


# ------------------------------------------------------------------------------------------------
# Partial files


def test_a_fact_is_on_disk_when_add_returns(tmp_path):
    """A kill loses no fact that a run has said: nothing waits in a buffer of the process."""
    own = Partial(tmp_path / f"run{partial.SUFFIX}")
    for number in range(3):
        own.add("block", number=number)
        assert [json.loads(line)["number"] for line in own.path.read_bytes().splitlines()] == [*range(number + 1)]
    own.close()


def test_a_cycle_that_was_begun_again_without_a_variant_replaces_all_of_it(made):
    """Its order is another one then, so first blocks may stand at places that the second time has for others."""
    add_cycle(made, 2, {"eager": 99.0, "graph_step": 99.0}, is_whole=False)
    assert times(partial.folded(made.facts)) == [8.0, 8.0]
    add_cycle(made, 2, {"eager": 7.0, "control": 7.0, "graph_step": 7.0})
    assert times(partial.folded(made.facts)) == [8.0, 8.0, 7.0]
    assert times(partial.folded(made.facts), "eager") == [10.0] * 4 + [7.0] * 2


def test_half_a_line_is_cut_off(tmp_path):
    path = tmp_path / f"run{partial.SUFFIX}"
    path.write_bytes(b'{"fact":"header"}\n{"fact":"block","m')
    own = Partial(path)
    assert [each["fact"] for each in own.facts] == ["header"]
    own.add("end")
    own.close()
    assert path.read_bytes() == b'{"fact":"header"}\n{"fact":"end"}\n'


def test_a_partial_run_has_one_writer(made):
    with pytest.raises(partial.Busy):
        Partial(made.path)


def test_a_full_disk_is_one_line_that_names_the_file(made, capsys, monkeypatch):
    class Full:
        def write(self, data):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(command.signal, "signal", lambda *_: None)
    monkeypatch.setattr(made, "_file", Full())
    assert command.exit_status("run", lambda: made.add("end")) == 2
    assert capsys.readouterr().err == f"run: {made.path}: No space left on device\n"


# ------------------------------------------------------------------------------------------------
# Sealed files


def test_a_sealed_run_reads_back_as_it_was(made):
    folded = partial.folded(made.facts)
    path = partial.seal(made)
    assert run_file.read(path) == folded and not made.path.exists()
    assert times(folded) == [8.0, 8.0] and path.stat().st_mode & 0o222 == 0


def test_facts_are_checked_before_a_file_is_sealed(made):
    """A written file reads back byte for byte: whole numbers of a script are numbers of the file's types."""
    worker = {"config": {}, "card": [], "notes": [], "flops_per_step": 7, "items_per_step": 32}
    made.add("worker", build="", flops_convention="", unit="rows", **worker)
    data = run_file.as_bytes(partial.folded(made.facts))
    assert run_file.as_bytes(run_file.parsed(data)) == data and b'"flops_per_step":7.0' in data
    made.facts[0] = json.loads(json.dumps(made.facts[0]))
    made.facts[0]["builds"][""]["variants"]["eager"]["kind"] = 7
    with pytest.raises(msgspec.ValidationError, match=r"Expected `str`, got `int` - at `\$.kind`"):
        partial.folded(made.facts)


def test_a_file_holds_every_step_and_no_verdict(tmp_path):
    run = made_run(
        issue=(12.0, 8.0), ms={"eager": [[9.0, 11.0, 13.0]]}, alone={"eager": 2**30}, unsupported=("graph_x",)
    )
    path = write(run, tmp_path)
    assert run_file.read(path) == run
    text = path.read_text()
    for word in ("pass", "failed", "status", "verdict", "ratio"):
        assert f'"{word}"' not in text, word
    own = json.loads(text)["builds"][""]["variants"]
    assert own["eager"]["blocks"][0]["step_ms"] == [9.0, 11.0, 13.0]
    assert own["graph_x"]["raised"] == {"kind": "unsupported", "reason": "needs a GPU"}
    assert "failed" not in msgspec.json.schema(Raised)["$defs"]["Raised"]["properties"]["kind"]["enum"]


def test_a_block_counts_by_its_mean():
    block = made_run(ms={"eager": [[1.0] * 19 + [21.0]]}).builds[""].variants["eager"].blocks[0]
    assert (block.steps, block.mean_ms, block.typical_ms) == (20, 2.0, 1.0)
    assert block.issued_ms is None
    block.issue_ms = [0.5, 0.6, 9.0]
    assert block.issued_ms == 0.6
    block.issue_ms = [3.0]
    assert block.issued_ms == 2.0
    block.classes = [0] * 10 + [1] * 10
    assert block.num_classes == 2 and block.typical_ms == 1.0


def test_every_published_file_is_read(tmp_path):
    assert len(PUBLISHED) >= 17
    for path in PUBLISHED:
        found = run_file.read_all(path)
        assert path.stem == found.id
        if found.schema != schema_3.SCHEMA:
            continue
        run = run_file.read(path)
        assert run.whole
        statuses = {own.status for each in judge.judged(run).values() for own in each.verdicts.values()}
        assert judge.PASS in statuses, path
    found, faults = run_file.find(ROOT / "results")
    runs = [path for path in PUBLISHED if path.parent.name != run_file.EPOCHS]
    assert list(dict.fromkeys(path for path, _ in found)) == runs and not faults


# ------------------------------------------------------------------------------------------------
# Bad input: one line that names the file, and the others are read


def blocks_of(data, name="graph_layer"):
    return data["builds"][""]["variants"][name]["blocks"]


def two_blocks(data):
    blocks_of(data)[1]["cycle"] = 0


def without(part, key):
    part.pop(key)


BLOCK = r"\$\.builds\[...\]\.variants\[...\]\.blocks\[2\]"
# What is done to a file of schema 4, and what the line says after the path of the file.
DAMAGE = {
    "a time that is NaN": (
        lambda data: blocks_of(data)[2]["step_ms"].__setitem__(3, float("nan")),
        r"no whole JSON: .*byte \d+.*",
    ),
    "a time without end": (lambda data: blocks_of(data)[2]["step_ms"].__setitem__(3, float("inf")), "no whole JSON.*"),
    "a time that is null": (
        lambda data: blocks_of(data)[2]["step_ms"].__setitem__(3, None),
        rf"Expected `float`, got `null` - at `{BLOCK}\.step_ms\[3\]`",
    ),
    "a time that is a text": (
        lambda data: blocks_of(data)[2].__setitem__("parent_s", "fast"),
        rf"Expected `float`, got `str` - at `{BLOCK}\.parent_s`",
    ),
    "a time below zero": (
        lambda data: blocks_of(data)[2]["step_ms"].__setitem__(3, -1.0),
        rf"Expected `float` > .* - at `{BLOCK}\.step_ms\[3\]`",
    ),
    "a block without steps": (
        lambda data: blocks_of(data)[2].__setitem__("step_ms", []),
        "graph_layer has a block without steps",
    ),
    "two bases": (two_blocks, "graph_layer has more blocks in a cycle than the order has"),
    "classes of other steps": (
        lambda data: blocks_of(data)[2].__setitem__("classes", [1, 2]),
        "graph_layer has a block whose classes are not those of its steps",
    ),
    "a block without its process": (
        lambda data: without(blocks_of(data)[2], "process"),
        rf"Object missing required field `process` - at `{BLOCK}`",
    ),
    "no builds": (lambda data: without(data, "builds"), "Object missing required field `builds`"),
    "a model with an escape": (lambda data: data.__setitem__("model", "a\x1b[2J"), r"'a\\x1b\[2J' is no name .*"),
    "a device of its own": (
        lambda data: data.__setitem__("device", "tpu"),
        r"Invalid enum value 'tpu' - at `\$\.device`",
    ),
    "another schema": (lambda data: data.__setitem__("schema", 9), "schema 9, this version reads 3 and 4"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_run_is_one_line_and_the_others_are_read(name, tmp_path):
    change, said = DAMAGE[name]
    write(made_run(), tmp_path)
    data = json.loads(run_file.as_bytes(made_run()))
    change(data)
    (tmp_path / "other.json").write_text(json.dumps(data))
    found, faults = run_file.find(tmp_path)
    assert len(found) == 1 and len(faults) == 1
    assert re.fullmatch(f"{re.escape(str(tmp_path))}/other.json: {said}", faults[0]), faults[0]


def numbers(data, steps=()):
    """The place of each number in nested values; of a list those of its first item."""
    if isinstance(data, (dict, list)):
        for key in data if isinstance(data, dict) else range(min(1, len(data))):
            yield from numbers(data[key], (*steps, key))
    elif isinstance(data, (int, float)) and not isinstance(data, bool):
        yield steps


@pytest.mark.parametrize("huge", ["9" * 5000, "9" * 400, "-" + "9" * 30], ids=["5000", "400", "-30"])
def test_a_huge_number_anywhere_is_one_line(huge):
    """A page would format it, and a float of it overflows."""
    old = json.loads(OLD.read_text())
    old["builds"][""]["notes"] = [f"2 of {huge.strip('-')} layers: what fits into 80 GB"]
    assert run_file.schema_3._FEWER_LAYERS.match(old["builds"][""]["notes"][0])
    with pytest.raises((ValueError, msgspec.ValidationError)):
        run_file.parsed(json.dumps(old).encode())
    new = json.loads(run_file.as_bytes(made_run(issue=(9.0, 8.0), alone={"eager": 1})))
    build = new["builds"][""]
    build["asked_layers"] = 8
    build["variants"]["eager"]["capture"] |= {"memory": {"a": [1]}, "report": {"a": 1}}
    build["variants"]["eager"]["audits"] = [{"seed": 1, "first": 1}]
    build["config"], build["fields"], new["host"]["cores"] = {"layers": 1}, {"layers": 1}, 2
    old["builds"][""]["notes"] = []
    places = {}
    for data in (new, old):
        run_file.parsed(json.dumps(data).encode())
        places |= {(steps[-1], data is new): (data, steps) for steps in numbers(data)}
    names = {name for name, is_new in places if is_new}
    assert names >= {"threads", "process", "drained_steps", "asked_layers", "cores"}
    for data, steps in places.values():
        text = json.dumps(changed(data, steps, "@HUGE@")).replace('"@HUGE@"', huge)
        try:
            content = run_file.parsed(text.encode())
        except ValueError as error:
            assert "\n" not in str(error), steps
        else:
            # Fields of schema 3 that nobody reads.
            assert data is old and b"9" * 30 not in run_file.as_bytes(content), steps


def changed(data, steps, value):
    """A copy of nested values with another one at a place."""
    if not steps:
        return value
    copy = data.copy()
    copy[steps[0]] = changed(data[steps[0]], steps[1:], value)
    return copy


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no whole JSON: Input data was truncated"),
        ('{"schema": 4, "id": "a', "no whole JSON: Input data was truncated"),
        ("[" * 200_000, "Expected `object`, got `array`"),
        ('{"schema": 4, "x": ' + "[" * 200_000, "no whole JSON"),
        ("[]", "Expected `object`, got `array`"),
        ("{}", "Object missing required field `schema`"),
        ('{"schema": "4"}', "Expected `int`, got `str` - at `$.schema`"),
        ('{"schema": 4}', "Object missing required field `id`"),
        ('{"schema": 3}', "no run of schema 3: host is missing"),
        ('{"schema": 3, "host": {}, "builds": {"": 7}}', "no run of schema 3: "),
        (None, "no regular file"),
    ],
)
def test_a_file_that_is_no_run_is_one_line_and_the_others_are_read(made, tmp_path, text, said):
    partial.seal(made)
    os.mkfifo(tmp_path / "other.json") if text is None else (tmp_path / "other.json").write_text(text)
    found, faults = run_file.find(tmp_path)
    assert len(found) == 1 and len(faults) == 1 and "\n" not in faults[0]
    assert faults[0].startswith(f"{tmp_path}/other.json: {said}"), faults[0]


def test_a_graph_that_was_promised_and_never_made_is_a_row_that_failed(tmp_path):
    run = made_run()
    run.builds[""].variants["graph_layer"].capture.graphs = 0
    run = run_file.read(write(run, tmp_path))
    found = judge.judged(run)[""].verdicts
    assert found["eager"].status == "pass"
    assert (found["graph_layer"].status, found["graph_layer"].reason) == ("failed", "0 graphs made, 1 promised")


def altered(tmp_path, change) -> Path:
    """A published file of schema 3 that was changed."""
    data = json.loads(OLD.read_text())
    change(data["builds"][""]["variants"])
    path = tmp_path / OLD.name
    path.write_text(json.dumps(data))
    return path


@pytest.mark.parametrize(
    "change",
    [
        lambda variants: variants["graph_layer"].__setitem__("parity", None),
        lambda variants: variants["graph_layer"].pop("parity"),
        lambda variants: variants["graph_layer"]["parity"].pop("result"),
    ],
)
def test_a_file_of_schema_3_without_parity_has_a_row_that_failed(tmp_path, change):
    found = judge.judged(run_file.read(altered(tmp_path, change)))[""]
    assert found.verdicts["graph_layer"].fault == Fault.NOT_COMPARED and found.ratio_of("graph_layer") is None
    assert found.verdicts["eager"].status == "pass" and found.ratio_of("graph_layer_te") is not None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda variants: variants["graph_layer"].pop("status"), "no run of schema 3: status is missing"),
        (lambda variants: variants["graph_layer"].__setitem__("parity", [1]), "no run of schema 3: .*"),
        (
            lambda variants: variants["graph_layer"]["blocks"][2].__setitem__("mean_ms", None),
            rf"Expected `float`, got `null` - at `{BLOCK}\.summary\.mean_ms`",
        ),
        (lambda variants: variants["graph_layer"]["blocks"][2].__setitem__("steps", 0), r"Expected `int` >= 1 - at .*"),
        (
            lambda variants: variants["graph_layer"]["blocks"][2].__setitem__("cycle", 1),
            "graph_layer has more blocks in a cycle than the order has",
        ),
    ],
)
def test_a_damaged_file_of_schema_3_is_one_line(tmp_path, change, said):
    path = altered(tmp_path, change)
    with pytest.raises(run_file.Damaged) as error:
        run_file.read(path)
    assert re.fullmatch(f"{re.escape(str(path))}: {said}", str(error.value)), error.value


def test_a_file_of_thousands_of_variants_is_refused(tmp_path):
    """Pages and figures would take minutes to set each beside the others."""
    run = made_run(cycles=1)
    run.builds[""].variants |= {f"graph_{number}": run.builds[""].variants["graph_layer"] for number in range(499)}
    with pytest.raises(run_file.Damaged, match="501 variants, a run file has at most 500"):
        run_file.read(write(run, tmp_path))


def test_variants_of_older_files_have_their_new_names_and_the_file_stays_as_it_is(tmp_path):
    run = made_run(names=("eager", "graph_compiled", "graph_step"))
    path = write(run, tmp_path)
    before, read = path.read_bytes(), run_file.read(path)
    assert b'"graph_compiled"' in before and path.read_bytes() == before
    assert list(read.builds[""].variants) == ["eager", "graph_step_compiled", "graph_step"]
    assert {name for cycle in read.builds[""].cycles for name in cycle.order} == set(read.builds[""].variants)
    assert judge.judged(read)[""].ratio_of("graph_step_compiled") is not None
