"""benchmarks/slurm/collate: tables of what a job measured, and what became of its tasks."""

import pytest

from benchmarks.slurm import collate
from graph_worth.harness.files import partial
from tests.helpers import made_run


def task(root, status="0\n", slurm=(("job_id", "9"),), **run):
    """A task with a run; status: None of a task that did not come to its end."""
    host = {"boot": "b", "gpus": [], "versions": {"torch": "2.13"}, "slurm": dict(slurm)}
    path = made_run.write(made_run.made_run(host=host, **run), root / "cpux1" / "gpt3-bench")
    (root / "logs").mkdir(exist_ok=True)
    if status is not None:
        (root / "logs" / "job-9.status").write_text(status)
    return path


def test_tables_are_printed_and_what_failed_is_named(tmp_path, capsys):
    for name, status in (("good", "0\n"), ("bad", "1\n"), ("killed", None)):
        task(tmp_path / name, status)
    (tmp_path / "empty").mkdir()
    folders = [tmp_path / name for name in ("good", "bad", "killed", "empty", "missing")]
    assert collate.main(["9", *map(str, folders)]) == 1
    text = capsys.readouterr().out
    failed = [line for line in text.splitlines() if line.startswith("failed: ")]
    assert failed == [
        f"failed: {tmp_path}/bad: ended with exit status 1",
        f"failed: {tmp_path}/killed: did not come to its end (killed, cancelled, or never started)",
        f"failed: {tmp_path}/empty: did not come to its end (killed, cancelled, or never started)",
        f"failed: {tmp_path}/empty: no run",
        f"failed: {tmp_path}/missing: did not come to its end (killed, cancelled, or never started)",
        f"failed: {tmp_path}/missing: no run",
    ]
    assert "job 9: 1 of 5 tasks ended well" in text
    assert text.count("\nvariant  ") == 3 and text.count("gpt3/bench  graph_layer") == 3
    assert collate.main(["9", str(tmp_path / "good")]) == 0


def test_a_run_that_was_begun_on_another_node_is_named(tmp_path, capsys):
    path = task(tmp_path).with_name(f"other{partial.SUFFIX}")
    path.touch()
    assert collate.main(["9", str(tmp_path)]) == 0
    assert f"not at its end: {path}\n" in capsys.readouterr().out


@pytest.mark.parametrize("other", [False, True])
def test_a_damaged_run_is_named_and_the_rest_is_shown(tmp_path, capsys, other):
    path = task(tmp_path)
    if other:
        task(tmp_path, id="20261125T111500Z-a7d396c1")
    path.chmod(0o644)
    path.write_text(path.read_text()[:200])
    assert collate.main(["9", str(tmp_path)]) == 1
    text = capsys.readouterr().out
    assert f"failed: {tmp_path}: {path}: no whole JSON" in text and ("no run\n" in text) != other
    assert ("graph_layer" in text) == other


def test_only_the_runs_of_the_job_are_shown_each_with_its_date(tmp_path, capsys):
    others = [{}, {"job_id": "8"}, {"job_id": "7", "array_job_id": "6"}]
    for number, slurm in enumerate([*others, {"job_id": "9"}, {"job_id": "12", "array_job_id": "9"}]):
        date = f"2026-11-2{number}T10:15:00Z"
        task(tmp_path, slurm=slurm.items(), id=f"2026112{number}T101500Z-a7d396c1", begin_utc=date)
    assert collate.main(["9", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    for number in range(5):
        is_own = number > 2
        assert (f"2026112{number}T101500Z-a7d396c1.json\n2026-11-2{number}T10:15:00Z to 2026-11-25" in text) == is_own
        assert (f"  2026-11-2{number} 10:15\n" in text) == is_own
    assert max(map(len, text.partition("workload")[2].splitlines())) <= 100
