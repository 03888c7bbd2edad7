"""All runs below a folder as one frame: packed, open and loose, of both schemas, and what is left out by name."""

import json
import lzma
import time

import pytest

from benchmarks import compare, frame, overview_rows, overview_tables, sessions
from common import record as records
from tests.table_records import STEPS, make, opened, packed, put, schema_1, session


def num_runs(root):
    return len(frame.read(root).frame)


# ------------------------------------------------------------------------------------------------
# Where runs are found


def test_packed_open_and_loose_runs_stand_in_one_frame(tmp_path):
    group = tmp_path / "h200x1" / "fake-bench"
    packed(group, session(), hour=3)
    opened(group, session(), hour=5)
    packed(group, schema_1(session()), hour=1, day=20)
    put(tmp_path / "loose", *session(env={"boot_id": "abcdefgh", "gpu_uuid": "GPU-12345"}))
    runs = frame.read(tmp_path)
    assert not runs.faults and not runs.doubts and list(runs.frame.columns) == list(frame.COLUMNS)
    assert len(runs.frame) == 40 and runs.frame["is_timed"].all()
    parts = runs.frame.groupby(["group", "session"]).agg({"schema": set, "begin": set, "path": set, "gpus": set})
    assert {key: (row.schema, row.begin) for key, row in zip(parts.index, parts.itertuples(), strict=True)} == {
        ("h200x1/fake-bench", "20261120T010000Z-13f405-c77b"): ({1}, {"2026-11-20T01:00:00Z"}),
        ("h200x1/fake-bench", "20261122T030000Z-13f405-c77b"): ({2}, {"2026-11-22T03:00:00Z"}),
        ("h200x1/fake-bench", "20261122T050000Z-13f405-c77b"): ({2}, {"2026-11-22T05:00:00Z"}),
        ("loose", "loose-abcdef-1234"): ({2}, {""}),
    }
    # Of schema 1 too every record has all keys.
    assert all(set(records.TEMPLATE) <= set(record) for record in runs.frame["record"])
    row = runs.frame[runs.frame["session"] == "20261122T030000Z-13f405-c77b"].iloc[0].to_dict()
    assert (row["variant"], row["round"], row["attempt"], row["kind"], row["device"]) == (
        "eager",
        1,
        1,
        "eager",
        "cuda",
    )
    assert (row["gpus"], row["boots"], row["world_size"]) == (("GPU-c77b",), ("13f405",), 1)
    assert row["path"] == group / row["session"] and row["where"].endswith("records.jsonl.xz:1")
    assert row["identity"] == ("run", "") and row["quiet_ms"] == pytest.approx(9.98, abs=1e-4)
    assert set(runs.metas) == {("h200x1/fake-bench", name) for name in runs.frame["session"].unique()[:3]}


def test_a_root_is_a_tree_a_group_or_a_session(tmp_path):
    group = tmp_path / "h200x1" / "fake-bench"
    one, two = packed(group, session(), hour=3), opened(group, session(), hour=5)
    assert [num_runs(place) for place in (tmp_path, group, one, two)] == [20, 20, 10, 10]
    assert frame.read(group).frame["group"].unique() == ["."]
    for place in (one, two):
        assert frame.read(place).frame["group"].unique() == ["fake-bench"]
    with pytest.raises(FileNotFoundError, match="no folder"):
        frame.read(tmp_path / "nothing")


def test_what_is_no_session_is_passed_over(tmp_path):
    for name in (".partial", "20261122T030000Z-13f405-c77b.packing"):
        put(tmp_path / name, *session())
    put(tmp_path / "sweep" / "batch-1", *session())
    (tmp_path / "sweep" / "sweep.json").write_text("{}")
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "overview.json").write_text("{}")
    runs = frame.read(tmp_path)
    assert runs.frame.empty and not runs.faults and runs.sweeps == [tmp_path / "sweep"]
    assert num_runs(tmp_path / "sweep") == 10


def test_an_open_session_whose_packed_form_is_there_is_read_once(tmp_path):
    packed(tmp_path / "g", session())
    opened(tmp_path / "g", session(((10.0, 5.0),)))
    runs = frame.read(tmp_path)
    assert len(runs.frame) == 10 and not runs.doubts and set(runs.frame["schema"]) == {2}


def test_a_packed_session_reads_as_it_did_while_it_was_open(tmp_path):
    path = opened(tmp_path / "g", [*session(), make("graph", 3, 8.2, attempt=2)])
    before = frame.read(tmp_path).frame
    sessions.pack(path, "complete")
    after = frame.read(tmp_path).frame
    for name in set(frame.COLUMNS) - {"where", "path"}:
        assert before[name].tolist() == after[name].tolist(), name


def test_loose_records_are_one_session_for_each_boot_gpu_and_source(tmp_path):
    put(tmp_path, *session())
    assert frame.read(tmp_path).frame["session"].nunique() == 1
    for number, key in enumerate(("boot_id", "gpu_uuid", "source_hash"), 2):
        record = make("graph", number, 8.0, env={key: "GPU-other" if key == "gpu_uuid" else "other"})
        put(tmp_path, record)
        assert frame.read(tmp_path).frame["session"].nunique() == number
    # A run that came to nothing may know neither.
    blank = {"boot_id": None, "gpu_uuid": None, "source_hash": None}
    put(tmp_path, make("graph", 0, status="failed", message="no", env=blank))
    found = frame.read(tmp_path).frame
    assert found["session"].nunique() == 4 and "loose-000000-cpu0" not in set(found["session"])


def test_who_else_has_part_in_a_session_is_known_of_each_run(tmp_path):
    nodes = [{"boot_id": "a", "gpu_uuids": ["GPU-1", "GPU-2"]}, {"boot_id": "b", "gpu_uuids": ["GPU-3"]}]
    packed(tmp_path, session(), boot="13f405", gpu="c77b", nodes=nodes)
    row = frame.read(tmp_path).frame.iloc[0]
    assert row["gpus"] == ("GPU-1", "GPU-2", "GPU-3", "GPU-c77b") and row["boots"] == ("13f405", "a", "b")


def test_kinds_are_those_the_script_declares_and_of_schema_1_by_name():
    assert frame.kind_of(make("wide", extra={"kind": "eager"})) == "eager"
    names = {
        "eager": "eager",
        "eager_sync": "eager",
        "control": "control",
        "control_x": "control",
        "compile": "compile",
    }
    names |= {"reduce_overhead": "compile", "compile_graph": "compile", "graph": "graph", "partial": "graph"}
    assert {name: frame.kind_of(make(name)) for name in names} == names


def test_a_variant_of_schema_1_stands_under_its_name_of_today(tmp_path):
    """gpt3's graph_te had one slot for all microbatches then; its files keep their names."""
    put(tmp_path / "old", *schema_1([make(name, model="gpt3") for name in ("eager", "graph_te")]))
    put(tmp_path / "new", *(make(name, model="gpt3") for name in ("eager", "graph_te")))
    found = frame.read(tmp_path).frame
    assert set(found[found["schema"] == 1]["variant"]) == {"eager", "graph_te_slot"}
    assert set(found[found["schema"] == 2]["variant"]) == {"eager", "graph_te"}
    assert {row.record["variant"] for row in found.itertuples()} == set(found["variant"])
    assert frame.stored_variant("gpt3", "graph_te_slot", 1) == "graph_te"
    assert frame.stored_variant("gpt3", "graph_te_slot", 2) == "graph_te_slot"


def test_long_steps_have_no_tenth_percentile():
    assert frame.quiet_ms(make(step_ms=400.0)) == pytest.approx(0.998 * 400, rel=1e-5)
    assert frame.quiet_ms(make(step_ms=400.1)) is None
    assert frame.of([make(step_ms=500.0), make(number=0)])["quiet_ms"].tolist() == [None, None]


def test_timed_is_what_passed_with_a_statistic():
    found = [make(), make(number=0), make(number=2, status="oom"), make(number=3, statistic_ms=None)]
    assert [frame.is_timed(record) for record in found] == [True, False, False, False]


# ------------------------------------------------------------------------------------------------
# Which program ran


def test_a_program_is_its_code_or_what_it_did():
    def identity(state="s", **changes):
        return frame.identity_of(make("graph", 1, 8.0, **changes), state)

    profile = {"profile": {"kernels_hash": "k"}}
    one = identity(extra=profile, num_kernels=9)
    assert frame.same_program(one, identity(extra={}, num_kernels=8))
    other = {"env": {"run_hash": "other"}, "extra": profile}
    assert frame.same_program(one, identity(num_kernels=9, **other))
    assert not frame.same_program(one, identity(num_kernels=10, **other))
    assert not frame.same_program(one, identity(num_kernels=9, capture={"num_graphs": 2}, **other))
    assert not frame.same_program(one, identity("t", num_kernels=9, **other))
    assert not frame.same_program(one, identity(None, num_kernels=9, **other))
    assert not frame.same_program(
        one, identity(num_kernels=9, env=other["env"], extra={"profile": {"kernels_hash": "x"}})
    )
    # Nothing known is not equal to nothing known, and a source of schema 1 is no hash of schema 2.
    assert not frame.same_program(("", ""), ("", ""))
    old = records.upgrade(schema_1([make(env={"source_hash": "run"})])[0])
    assert frame.identity_of(old, None) == ("1:run", "") and not frame.same_program(frame.identity_of(old, None), one)
    top = {"profile": {"top_kernels": [{"name": "a", "num": 3}]}}
    assert frame.identity_of(records.upgrade(schema_1([make(extra=top)])[0]), "s")[1]


def test_the_state_of_a_fingerprint_is_that_of_round_0(tmp_path):
    found = session(extra={"profile": {"kernels_hash": "k"}})
    first = make("graph", 0, numerics={"state_hash": "s"})
    packed(tmp_path, [*found, first])
    identities = frame.read(tmp_path).frame.groupby("variant")["identity"].agg(lambda each: {one[1] for one in each})
    assert identities["eager"] == {""} and len(identities["graph"] - {""}) == 1


# ------------------------------------------------------------------------------------------------
# What is left out, by name


def test_a_record_edited_by_hand_is_named_by_file_and_line(tmp_path):
    path = packed(tmp_path / "g", session())
    lines = lzma.decompress((path / sessions.RECORDS).read_bytes()).decode().splitlines()
    edited = json.loads(lines[3])
    edited["issue_ms"] = 0.1
    lines[3] = json.dumps(edited)
    (path / sessions.RECORDS).write_bytes(lzma.compress("".join(f"{line}\n" for line in lines).encode()))
    runs = frame.read(tmp_path)
    assert len(runs.frame) == 9
    (fault,) = runs.faults
    assert fault == f"g/{path.name}/records.jsonl.xz:4: its digest is not that of its content: edited by hand?"


def test_a_published_session_edited_by_hand_is_named_wherever_it_is_read_from(tmp_path):
    group = tmp_path / "results" / "h200x1" / "fake-bench"
    source = packed(tmp_path / "runs" / "h200x1" / "fake-bench", schema_1(session()))
    other = packed(tmp_path / "runs" / "h200x1" / "fake-bench", session(), hour=6)
    for each in (source, other):
        sessions.publish(each, tmp_path / "results")
    path = group / source.name / sessions.RECORDS
    places = (tmp_path / "results", tmp_path / "results" / "h200x1", group, path.parent)
    assert [num_runs(place) for place in places] == [20, 20, 20, 10]
    text = lzma.decompress(path.read_bytes()).decode()
    path.write_bytes(sessions.compress(text.replace('"issue_ms":null', '"issue_ms":9.9', 1).encode()))
    for place, left in zip(places, (10, 10, 10, 0), strict=True):
        runs = frame.read(place)
        assert len(runs.frame) == left
        (fault,) = runs.faults
        assert fault.endswith(f"{sessions.RECORDS}: changed since it was published, its runs are left out")


def test_of_a_truncated_archive_the_rest_is_read_and_one_line_says_so(tmp_path):
    text = "".join(records.dumps(record) + "\n" for record in schema_1(session(STEPS * 40)))
    path = packed(tmp_path / "g", [])
    data = lzma.compress(text.encode(), preset=0)
    (path / sessions.RECORDS).write_bytes(data[: len(data) // 2])
    other = packed(tmp_path / "g", session(), hour=6)
    runs = frame.read(tmp_path)
    left = sum(runs.frame["session"] == path.name)
    assert 20 < left < 380 and sum(runs.frame["session"] == other.name) == 10
    (fault,) = runs.faults
    assert f"g/{path.name}/records.jsonl.xz: not a whole archive" in fault and f"{left} records are left" in fault


def test_a_session_without_its_words_is_read_without(tmp_path):
    path = packed(tmp_path / "g", session())
    (path / sessions.META).unlink()
    runs = frame.read(tmp_path)
    (fault,) = runs.faults
    assert len(runs.frame) == 10 and "no session.json: its records are read without" in fault
    assert set(runs.frame["begin"]) == {"20261122T030000Z"}


def test_one_foreign_record_in_a_folder_is_named_by_its_file(tmp_path):
    put(tmp_path, *session())
    wrong = make("graph", 7, 8.0)
    (tmp_path / "foreign.r1.json").write_text('{"a": 1}')
    (tmp_path / "half.r1.json").write_text('{"schema": 1, "mod')
    (tmp_path / "notes.json").write_text("{}")
    (tmp_path / "later.r1.json").write_text(json.dumps(wrong | {"schema": 7}))
    (tmp_path / "graph.r8.json").write_text(json.dumps(wrong))
    (tmp_path / "wrong.r1.json").write_text(json.dumps(make("wrong", 1, steps={"gpu_ms": "fast"})))
    (tmp_path / "time.r1.json").write_text(json.dumps(make("time", 1, begin_utc=5)))
    for name in ("overview.json", "sweep.json", "wer.json"):
        (tmp_path / name).write_text("{}")
    runs = frame.read(tmp_path)
    assert len(runs.frame) == 10
    assert sorted(runs.faults) == sorted(
        [
            "foreign.r1.json: a foreign JSON document, it has no key 'schema'",
            next(fault for fault in runs.faults if fault.startswith("half.r1.json: not a whole JSON document")),
            "notes.json: not the name of a record",
            "later.r1.json: schema 7, this code reads schema 1 and 2",
            "graph.r8.json: holds graph.r7, which is not its name",
            "wrong.r1.json: steps.gpu_ms is 'fast', not a list",
            "time.r1.json: begin_utc is 5, not text",
        ]
    )


def test_a_record_that_contradicts_itself_is_no_row_and_stays_in_its_session(tmp_path):
    found = session()
    found[1]["busy_ms"] = 8.3
    path = packed(tmp_path / "g", found)
    runs = frame.read(tmp_path)
    assert len(runs.frame) == 9 and len(sessions.read_records(path)[0]) == 10
    (fault,) = runs.faults
    assert fault.startswith(f"g/{path.name}/records.jsonl.xz:2: busy_ms 8.3 is above statistic_ms 8.0 by 3.8 %")


def test_equal_step_lists_are_one_run(tmp_path):
    found = session()
    copies = [json.loads(json.dumps(found[1])) | {"round": number} for number in range(6, 100)]
    packed(tmp_path / "g", [*found, *copies])
    runs = frame.read(tmp_path)
    assert len(runs.frame) == 10 and not runs.faults and len(runs.doubts) == 94
    name = "20261122T030000Z-13f405-c77b"
    assert runs.doubts[0] == f"graph round 6 of {name} has the steps of graph round 1 of {name}: one run, counted once"
    # In another session too, but not of another variant.
    packed(tmp_path / "h", [found[0], found[1] | {"variant": "other"}], hour=7)
    runs = frame.read(tmp_path)
    assert len(runs.frame) == 11 and len(runs.doubts) == 95 and "of 20261122T07" in runs.doubts[-1]


def test_superseded_tries_are_no_rows(tmp_path):
    folder = opened(tmp_path / "g", session())
    failed = make("graph", 2, 8.0, status="failed", message="killed", extra={"superseded": True})
    records.write(folder / "graph.r2.t1.json", failed)
    runs = frame.read(tmp_path)
    assert len(runs.frame) == 10 and not runs.faults
    assert runs.doubts == [f"graph r2 of {folder.name.removesuffix('.open')} failed at first: killed"]


@pytest.mark.parametrize("text", ["[" * 200_000, "1" * 5000, "\udcff"])
def test_no_file_brings_the_reader_down(tmp_path, text):
    put(tmp_path, *session())
    (tmp_path / "graph.r1.json").write_bytes(text.encode(errors="surrogateescape"))
    runs = frame.read(tmp_path)
    (fault,) = runs.faults
    assert len(runs.frame) == 9 and fault.startswith("graph.r1.json: ") and len(fault) < 200


# ------------------------------------------------------------------------------------------------
# Size


@pytest.mark.slow
def test_two_thousand_records_in_two_hundred_sessions_take_seconds(tmp_path):
    """Of the processor, so that neighbours do not count."""
    models = [f"model{index}" for index in range(20)]
    for index in range(200):
        model = models[index % 20]
        found = session(model=model, num_steps=300, extra={"profile": {"kernels_hash": "k"}})
        packed(tmp_path / "h200x1" / f"{model}-bench", found, hour=index // 20, boot=f"{index:06x}", gpu=f"{index:04x}")
    start = time.process_time()
    runs = frame.read(tmp_path)
    read_s = time.process_time() - start
    assert len(runs.frame) == 2000 and not runs.faults and not runs.doubts
    start = time.process_time()
    for model in models:
        runs = frame.read(tmp_path / "h200x1" / f"{model}-bench")
        text, _ = compare.report(runs.frame, runs.faults)
        assert "faster" in text
    blocks, faults, refused = overview_rows.blocks_of(frame.read(tmp_path), tmp_path)
    text = overview_tables.text_of(tmp_path, blocks, faults)
    tables_s = time.process_time() - start
    assert len(blocks) == 20 and not refused and "model19" in text
    print(f"frame {read_s:.2f} s, tables {tables_s:.2f} s")
    assert read_s <= 3 and tables_s <= 15
