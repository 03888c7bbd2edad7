"""graph_worth/files: a file that is written appears whole or not at all, and JSON has no NaN."""

import errno
import json
import os
import stat
from pathlib import Path

import pytest

from graph_worth.files import json_line, write_text


def test_text_and_bytes_are_written_into_folders_that_are_made(tmp_path):
    path = tmp_path / "deep" / "er" / "run.json"
    write_text(path, "ä\n")
    assert path.read_text(encoding="utf-8") == "ä\n" and stat.S_IMODE(path.stat().st_mode) == 0o644
    write_text(path, b"\x00\xff")
    assert path.read_bytes() == b"\x00\xff" and os.listdir(path.parent) == ["run.json"]


def test_a_failing_write_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    path = tmp_path / "run.json"
    write_text(path, "old")

    def interrupt(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_text(path, "new")
    monkeypatch.undo()
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["run.json"]


def test_the_file_is_whole_on_disk_before_it_takes_the_name(tmp_path, monkeypatch):
    path = tmp_path / "run.json"
    write_text(path, "old")
    replace, synced, seen = os.replace, [], []
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(os.fstat(handle).st_size))

    def watch(source, target):
        assert Path(source).read_text() == "new one" and path.read_text() == "old"
        assert synced == [Path(source).stat().st_size]
        # What kill -9 leaves here is nothing to anybody who lists *.json.
        assert [file.name for file in tmp_path.glob("*.json")] == ["run.json"]
        seen.append(target)
        replace(source, target)

    monkeypatch.setattr(os, "replace", watch)
    write_text(path, "new one")
    assert seen == [path] and path.read_text() == "new one"


@pytest.mark.parametrize("where", ["mkdir", "fsync", "replace"])
def test_a_full_disk_is_an_error_that_names_the_file(tmp_path, monkeypatch, where):
    path = tmp_path / "new" / "run.json"

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path if where == "mkdir" else os, where, full)
    with pytest.raises(OSError, match="No space left on device") as error:
        write_text(path, "text")
    assert error.value.filename == str(path) and error.value.errno == errno.ENOSPC
    assert where == "mkdir" or os.listdir(path.parent) == []


def test_nan_and_infinity_become_null_at_any_depth():
    values = {"loss": [1.0, float("inf"), float("-inf"), float("nan")], "ms": 1.5}
    values["nested"] = [{"ratio": float("nan")}, (2.0, float("inf"))]
    line = json_line(values)
    assert "\n" not in line
    back = json.loads(line, parse_constant=pytest.fail)
    assert back == {"loss": [1.0, None, None, None], "ms": 1.5, "nested": [{"ratio": None}, [2.0, None]]}


def test_numbers_keep_every_digit_and_what_json_cannot_hold_is_an_error():
    values = [0.1 + 0.2, 1e-300, 123456789.123456789]
    assert json.loads(json_line(values)) == values
    with pytest.raises(TypeError):
        json_line({"handle": object()})


def test_a_pipe_or_device_is_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="no regular file"):
        write_text(tmp_path / "pipe", "text")
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
