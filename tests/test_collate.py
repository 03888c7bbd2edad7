"""benchmarks/slurm/collate: tables of what a job measured, and what became of its tasks."""

import shutil

from benchmarks import sessions
from benchmarks.slurm import collate
from common import record as records


def session(root, boot, *numbers, device="cpu", gpu=None, closed=True):
    """A session of eager below a task's root, packed or open."""
    group = root / ("h200x1" if gpu else "cpux1") / "m-tiny"
    path = sessions.create(group, boot, gpu, {"request": {}, "nodes": [], "source": {}})
    for number in numbers:
        record = records.blank(model="m", preset="tiny", variant="eager", round=number, status="pass", device=device)
        record["env"].update(gpu_name="NVIDIA H200" if gpu else None, gpu_uuid=gpu, boot_id=boot)
        records.write(path / records.file_name("eager", number), record)
    return sessions.pack(path, "complete") if closed else path


def ended(root, status):
    (root / "logs").mkdir(parents=True, exist_ok=True)
    (root / "logs" / "job-9.status").write_text(status)


def test_collate_writes_tables_and_names_what_failed(tmp_path, capsys):
    for name, status in (("good", "0\n"), ("bad", "1\n"), ("killed", None)):
        session(tmp_path / name, "aa", 0)
        if status:
            ended(tmp_path / name, status)
    (tmp_path / "empty").mkdir()
    folders = [tmp_path / name for name in ("good", "bad", "killed", "empty", "missing")]
    assert collate.main(["9", *map(str, folders)]) == 1
    text = capsys.readouterr().out
    failed = [line for line in text.splitlines() if line.startswith("failed: ")]
    assert failed == [
        f"failed: {tmp_path}/bad: ended with exit status 1",
        f"failed: {tmp_path}/killed: did not come to its end (killed, cancelled, or never started)",
        f"failed: {tmp_path}/empty: did not come to its end (killed, cancelled, or never started)",
        f"failed: {tmp_path}/empty: no records",
        f"failed: {tmp_path}/missing: did not come to its end (killed, cancelled, or never started)",
        f"failed: {tmp_path}/missing: no records",
    ]
    assert "job 9: 1 of 5 tasks ended well" in text
    assert all((tmp_path / name / "cpux1" / "m-tiny" / "table.md").exists() for name in ("good", "bad", "killed"))
    assert collate.main(["9", str(tmp_path / "good")]) == 0


def test_collate_counts_sessions_of_several_boots(tmp_path, capsys):
    """A job that went on on another node left an open session on the first."""
    session(tmp_path, "aa", 0, closed=False)
    session(tmp_path, "bb", 0, 1)
    ended(tmp_path, "0\n")
    assert collate.main(["9", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert f"{tmp_path}/cpux1/m-tiny: 2 sessions, 3 records\n" in text and "job 9: 1 of 1 tasks ended well" in text
    assert len(sessions.find(tmp_path)) == 2


def test_collate_goes_on_after_a_folder_that_mixes_machines(tmp_path, capsys):
    session(tmp_path / "mixed", "aa", 0)
    other = session(tmp_path / "mixed" / "elsewhere", "bb", 1, device="cuda", gpu="GPU-0")
    shutil.move(other, tmp_path / "mixed" / "cpux1" / "m-tiny")
    session(tmp_path / "good", "aa", 0)
    for name in ("mixed", "good"):
        ended(tmp_path / name, "0\n")
    assert collate.main(["9", str(tmp_path / "mixed"), str(tmp_path / "good")]) == 1
    text = capsys.readouterr().out
    assert f"failed: {tmp_path}/mixed: cpux1/m-tiny: " in text and "job 9: 1 of 2 tasks ended well" in text
    assert (tmp_path / "good" / "cpux1" / "m-tiny" / "table.md").exists()


def test_collate_names_a_damaged_archive_and_shows_the_rest(tmp_path, capsys):
    session(tmp_path, "aa", 0)
    damaged = session(tmp_path, "bb", 0, 1)
    (damaged / sessions.RECORDS).write_bytes((damaged / sessions.RECORDS).read_bytes()[:200])
    ended(tmp_path, "0\n")
    assert collate.main(["9", str(tmp_path)]) == 1
    text = capsys.readouterr().out
    (failed,) = [line for line in text.splitlines() if line.startswith("failed: ")]
    assert f"cpux1/m-tiny/{damaged.name}/records.jsonl.xz: not a whole archive" in failed
    assert "1 sessions, 1 records" in text
