"""Run files and partial ones: how they are written and read back, and damaged ones that are refused in one line."""

import errno
import os

import pytest

from benchmarks import command
from benchmarks.files import partial, run_file
from benchmarks.files.partial import Partial
from tests.helpers.made_run import HEADER, add_cycle


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
    return [block.ms for block in run.builds[""].variants[name].blocks]


def test_a_sealed_run_reads_back_as_it_was(made):
    folded = partial.folded(made.facts)
    path = partial.seal(made)
    assert run_file.read(path) == folded and not made.path.exists()
    assert times(folded) == [8.0, 8.0]


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


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no whole JSON"),
        ("[" * 200_000, "no whole JSON"),
        ("[]", "no run file"),
        ('{"schema": 4}', "schema 4, this version reads 3"),
        ('{"schema": 3}', "id is missing"),
        (None, "no regular file"),
    ],
)
def test_a_damaged_file_is_one_line_and_others_are_read(made, tmp_path, text, said):
    partial.seal(made)
    os.mkfifo(tmp_path / "other.json") if text is None else (tmp_path / "other.json").write_text(text)
    found, faults = run_file.find(tmp_path)
    assert len(found) == 1 and len(faults) == 1 and said in faults[0] and "\n" not in faults[0]
