"""common/record: the schema key by key, atomic writes, and files that are not records named for what they are."""

import errno
import json
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from common import record

# Written out by hand: a key that goes missing in the template is missed here.
SCHEMA_KEYS = {
    "": "schema session model preset variant round attempt host_load status message device begin_utc end_utc config "
    "argv env conditions seconds clocks energy_j capture promised steps statistic_ms issue_ms busy_ms optimizer_ms "
    "rank_skew_ms ranks num_kernels idle_fraction memory flops_per_step flops_convention items_per_step unit numerics "
    "proof extra digest",
    "env": "gpu_name gpu_uuid num_gpus world_size boot_id driver cuda cudnn nccl torch transformer_engine dali python "
    "host cpu git_sha git_tree git_dirty source_hash run_hash slurm variables",
    "conditions": "settled window_s cores numa_node us_per_operator us_per_launch others_on_gpu other_sessions",
    "seconds": "start import build warmup compile capture settle window passes profile",
    "clocks": "sm_mhz power_w temperature_c throttle",
    "capture": "strategy warmup_s compile_s capture_s num_graphs num_replays expected_replays nodes",
    "promised": "graphs replays_per_step",
    "steps": "gpu_ms batch wall_ms",
    "memory": "peak_allocated_bytes peak_reserved_bytes graph_pool_bytes device_used_bytes",
    "numerics": "loss grad_norm state_hash parity reference max_rel_diff first_difference",
    "proof": "steps loss grad_norm state_step state_sample settled_ms late_ms late_change growth_bytes "
    "graph_kernel_share",
}
STATUSES = "pass oom capture_failed numerics_failed eager_two_runs_differ unsupported timeout failed"
ALL_KEYS = [(group, key) for group, keys in SCHEMA_KEYS.items() for key in keys.split()]


def write_text(folder, text):
    path = folder / "eager.r1.json"
    path.write_text(text)
    return path


def test_a_blank_record_has_every_key_of_the_schema_and_no_other():
    blank = record.blank()
    assert set(blank) == set(SCHEMA_KEYS[""].split())
    for group in set(SCHEMA_KEYS) - {""}:
        assert set(blank[group]) == set(SCHEMA_KEYS[group].split()), group
    assert blank["schema"] == 2
    assert blank["status"] == "failed", "a record that nobody completed must not pass"
    assert record.check(blank) is None


def test_blank_sets_values_refuses_unknown_keys_and_shares_nothing():
    first = record.blank(model="gpt3", round=3)
    assert (first["model"], first["round"]) == ("gpt3", 3)
    first["steps"]["gpu_ms"].append(1.0)
    first["env"]["torch"] = "2.13"
    assert record.blank()["steps"]["gpu_ms"] == [] and record.blank()["env"]["torch"] is None
    with pytest.raises(ValueError, match="not keys of record schema 2: modle, speed"):
        record.blank(speed=1, modle="gpt3")


@pytest.mark.parametrize(("group", "key"), ALL_KEYS)
def test_each_missing_key_is_named(tmp_path, group, key):
    broken = record.blank(status="pass")
    del (broken[group] if group else broken)[key]
    path = write_text(tmp_path, json.dumps(broken))
    with pytest.raises(record.RecordError) as error:
        record.read(path)
    assert str(path) in str(error.value)
    named = f"{group}.{key}" if group else key
    expected = "foreign JSON document, it has no key 'schema'" if named == "schema" else f"keys missing: {named}"
    assert str(error.value).endswith(expected)


@pytest.mark.parametrize("status", STATUSES.split())
def test_every_status_of_the_schema_is_read(tmp_path, status):
    path = tmp_path / "eager.r1.json"
    record.write(path, record.blank(status=status))
    assert record.read(path)["status"] == status


def test_there_are_no_other_statuses(tmp_path):
    assert set(record.STATUSES) == set(STATUSES.split())
    path = write_text(tmp_path, json.dumps(record.blank(status="passed")))
    with pytest.raises(record.RecordError, match="unknown status 'passed', known: pass, oom, capture_failed"):
        record.read(path)


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"", "not a whole JSON document"),
        (record.dumps(record.blank(status="pass")).encode()[:-200], "not a whole JSON document"),
        (b'{"schema": 1}\n{"schema": 1}\n', "not a whole JSON document"),
        (b'\xff\xfe{"schema": 1}', "not a whole JSON document"),
        (b"[1, 2]", "a foreign JSON document"),
        (b"7", "a foreign JSON document"),
        (b'{"name": "some-package", "version": "1.0"}', "a foreign JSON document, it has no key 'schema'"),
        (json.dumps(record.blank() | {"schema": 3}).encode(), "schema 3, this code reads schema 1 and 2"),
        (json.dumps(record.blank() | {"schema": "1"}).encode(), "schema '1', this code reads schema 1 and 2"),
        (json.dumps(record.blank() | {"memory": 12}).encode(), "key 'memory' is not an object"),
        (json.dumps(record.blank() | {"status": ["pass"]}).encode(), "unknown status"),
    ],
)
def test_what_is_not_a_record_is_named(tmp_path, content, fault):
    path = tmp_path / "eager.r1.json"
    path.write_bytes(content)
    with pytest.raises(record.RecordError) as error:
        record.read(path)
    assert str(path) in str(error.value) and fault in str(error.value)
    assert "\n" not in str(error.value)


def test_write_and_read_keep_every_value(tmp_path):
    written = record.blank(model="gpt3", status="pass", config={"lr": 2e-5, "data": ""}, energy_j=12.5)
    written["steps"]["gpu_ms"] = [0.1 + 0.2, 1e-300, 123456789.123456789]
    written["capture"]["nodes"] = {"kernel": 7}
    path = tmp_path / "deep" / "er" / record.file_name("graph", 3)
    record.write(path, written)
    assert path.name == "graph.r3.json"
    assert record.read(path) == written
    assert path.read_text().count("\n") == 1 and path.read_text().endswith("}\n")
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_nan_and_infinity_become_null_at_any_depth():
    values = record.blank(energy_j=float("nan"), statistic_ms=1.5)
    values["numerics"]["loss"] = [1.0, float("inf"), float("-inf"), float("nan")]
    values["extra"] = {"nested": [{"ratio": float("nan")}, (2.0, float("inf"))]}

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    back = json.loads(record.dumps(values), parse_constant=refuse)
    assert back["energy_j"] is None and back["statistic_ms"] == 1.5
    assert back["numerics"]["loss"] == [1.0, None, None, None]
    assert back["extra"] == {"nested": [{"ratio": None}, [2.0, None]]}


@pytest.mark.parametrize("interrupted", ["dumps", "fsync", "replace"])
def test_a_failing_write_leaves_the_old_file_and_no_other(tmp_path, monkeypatch, interrupted):
    path = tmp_path / "graph.r1.json"
    old = record.blank(status="pass", message="old")
    record.write(path, old)

    def interrupt(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(record if interrupted == "dumps" else os, interrupted, interrupt)
    with pytest.raises(KeyboardInterrupt):
        record.write(path, record.blank(message="new"))
    monkeypatch.undo()
    assert record.read(path) == old
    assert os.listdir(tmp_path) == ["graph.r1.json"]


def test_a_value_that_json_cannot_hold_is_an_error_and_leaves_nothing(tmp_path):
    with pytest.raises(TypeError):
        record.write(tmp_path / "graph.r1.json", record.blank(extra={"handle": object()}))
    assert os.listdir(tmp_path) == []


def test_the_file_is_whole_on_disk_before_it_takes_the_name(tmp_path, monkeypatch):
    path = tmp_path / "graph.r1.json"
    old, new = record.blank(message="old"), record.blank(message="new")
    record.write(path, old)
    replace, synced, seen = os.replace, [], []
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(os.fstat(handle).st_size))

    def watch(source, target):
        assert record.read(source) == new and record.read(target) == old
        assert synced == [Path(source).stat().st_size]
        # What kill -9 leaves here is no record to anybody who lists *.json.
        assert [file.name for file in tmp_path.glob("*.json")] == ["graph.r1.json"]
        seen.append(target)
        replace(source, target)

    monkeypatch.setattr(os, "replace", watch)
    record.write(path, new)
    assert seen == [path] and record.read(path) == new


def test_a_reader_beside_a_writer_never_sees_a_half(tmp_path):
    path = tmp_path / "graph.r1.json"
    versions = [record.blank(message=letter * size) for letter, size in (("a", 10), ("b", 300_000))]
    record.write(path, versions[0])
    failures, num_read, done = [], 0, threading.Event()

    def keep_reading():
        nonlocal num_read
        while not done.is_set():
            try:
                found = record.read(path)
                if found not in versions:
                    failures.append("neither the old record nor the new one")
            except (record.RecordError, OSError) as error:
                failures.append(str(error)[:200])
            num_read += 1

    reader = threading.Thread(target=keep_reading)
    reader.start()
    for index in range(60):
        record.write(path, versions[index % 2])
    done.set()
    reader.join()
    assert num_read > 10
    assert failures == []


def test_records_are_read_without_torch():
    code = "import sys; sys.modules['torch'] = None; sys.modules['numpy'] = None; from common import record"
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[1], check=True)


def test_a_folder_with_a_records_name_is_named(tmp_path):
    (tmp_path / "eager.r1.json").mkdir()
    with pytest.raises(record.RecordError, match="eager.r1.json"):
        record.read(tmp_path / "eager.r1.json")


# --- schema 1, and the digest of schema 2


ONLY_2 = {"session", "attempt", "begin_utc", "end_utc", "conditions", "seconds", "promised", "ranks", "proof", "digest"}


def old_record(**values):
    """A record as schema 1 had it."""
    old = {key: value for key, value in record.blank(status="pass").items() if key not in ONLY_2} | {"schema": 1}
    old["capture"]["num_fallbacks"] = 0
    for group, key in (("env", "git_tree"), ("env", "run_hash"), ("numerics", "reference")):
        del old[group][key]
    return old | values


def test_schema_1_is_read_as_it_was_written_and_upgraded_in_a_copy(tmp_path):
    old = old_record(extra={"settle": {"settled": False}})
    old["steps"]["wall_ms"] = 5200.0
    path = write_text(tmp_path, json.dumps(old))
    read = record.read(path)
    assert read == old
    full = record.upgrade(read)
    assert set(full) >= set(record.TEMPLATE) and full["schema"] == 1 and read == old
    assert (full["session"], full["attempt"], full["begin_utc"], full["proof"]["loss"]) == ("", 1, None, [])
    assert (full["conditions"]["settled"], full["conditions"]["window_s"]) == (False, 5.2)
    assert record.upgrade(record.blank()) == record.blank()
    # What is missing in schema 1 is missing there, too.
    with pytest.raises(record.RecordError, match=r"keys missing: capture\.num_fallbacks"):
        del old["capture"]["num_fallbacks"]
        record.read(write_text(tmp_path, json.dumps(old)))


def test_an_edit_by_hand_is_named(tmp_path):
    path = tmp_path / "graph.r1.a2.json"
    assert record.file_name("graph", 1, 2) == path.name
    record.write(path, record.blank(statistic_ms=12.0, status="pass"))
    assert record.read(path)["digest"]
    path.write_text(path.read_text().replace("12.0", "11.0"))
    with pytest.raises(record.RecordError, match="digest is not that of its content"):
        record.read(path)


@pytest.mark.parametrize("where", ["mkdir", "fsync", "replace"])
def test_a_full_disk_is_an_error_that_names_the_record(tmp_path, monkeypatch, where):
    path = tmp_path / "new" / "graph.r1.json"

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path if where == "mkdir" else os, where, full)
    with pytest.raises(OSError, match="No space left on device") as error:
        record.write(path, record.blank())
    assert error.value.filename == str(path) and error.value.errno == errno.ENOSPC
    assert where == "mkdir" or os.listdir(path.parent) == []
