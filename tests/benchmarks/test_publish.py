"""make publish: which run files are evidence, and where their copies lie.

pytest tests/benchmarks/test_publish.py
"""

import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from benchmarks import frame, publish
from graph_worth.folders import ROOT
from graph_worth.harness.files import run_file
from graph_worth.harness.files.facts import Census
from graph_worth.harness.files.run_file import Damaged
from graph_worth.harness.pages import run_table
from graph_worth.machine import source
from tests.helpers.made_run import made_run, put_sweep, write

GROUP = "h200x1/gpt3-bench"
WHOLE = made_run()


@pytest.fixture
def results(tmp_path):
    return tmp_path / "results"


@pytest.fixture(autouse=True)
def commits(monkeypatch):
    """The repository knows the commit c, whose source is h."""
    monkeypatch.setattr(publish, "last_commits", lambda number, root: [])
    monkeypatch.setattr(publish, "source_hash_of_commit", lambda sha, root: "h" if sha == "c" else None)


@pytest.fixture
def made(tmp_path):
    """made(...): the path of a run file in runs/."""
    return lambda folder=GROUP, **more: write(made_run(**more), tmp_path / "runs" / folder)


def refused(path, results):
    """Return the one-line reason of the refusal; check that nothing was written."""
    before = sorted(results.rglob("*"))
    with pytest.raises((publish.NotPublished, Damaged)) as caught:
        publish.publish(path, results)
    assert str(caught.value).count("\n") == 0 and sorted(results.rglob("*")) == before
    return str(caught.value)


def test_a_file_that_holds_verdicts_is_not_published(results, monkeypatch):
    monkeypatch.setattr(publish, "is_committed", lambda source: True)
    (path, *_) = [each for each in (ROOT / "results").rglob("*.json") if b'"schema":3' in each.read_bytes()[:200]]
    assert "schema 3 holds verdicts" in refused(path, results)


def without(run, name):
    return {each: own for each, own in run.builds[""].variants.items() if each != name}


# ------------------------------------------------------------------------------------------------
# What is published, and where


def test_a_run_is_copied_byte_for_byte_under_its_machine_and_folder(made, results):
    path = made()
    target = publish.publish(path, results)
    assert target == results / GROUP / path.name and target.read_bytes() == path.read_bytes()
    assert target.stat().st_mode & 0o222 == 0
    assert publish.publish(path, results) == target


def test_the_folder_follows_from_the_run_and_not_from_where_its_file_lies(made, results):
    run = {"label": "batch-2", "gpus": ({"name": "NVIDIA H100 80GB HBM3"},) * 2, "ranks": 2}
    assert publish.publish(made("elsewhere", **run), results).parent == results / "h100x2" / "gpt3-bench-batch-2"


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (made_run(preset="tiny"), "preset tiny"),
        (made_run(gpus=()), "on a CPU"),
        (made_run(source={"commit": "c", "clean": False, "hash": "changed"}), "a tree with changes"),
        (made_run(source={"commit": "deadbeef", "clean": True, "hash": "x"}), "an unknown commit"),
        (made_run(cycles=2), "2 whole cycles"),
        (made_run(cycles=2, busy=16), "2 whole cycles without busy processes"),
        (made_run(id="../../x"), "cannot be the name of a file"),
        (made_run(label="a/b"), "cannot be the name of a file"),
        (made_run(label="a\nb"), "is no name that can be printed"),
        (replace(WHOLE, whole=False), "ended before"),
        (replace(WHOLE, builds={}), "no build"),
        (replace(WHOLE, builds=WHOLE.builds | {"fp8": made_run(cycles=2).builds[""]}), "build fp8 has 2 whole cycles"),
        (replace(WHOLE, builds={"": replace(WHOLE.builds[""], variants=without(WHOLE, "eager"))}), "no eager variant"),
    ],
)
def test_what_is_no_evidence_is_refused(tmp_path, results, run, said):
    path = tmp_path / "run.json"
    path.write_bytes(run_file.as_bytes(run))
    assert said in refused(path, results)


def test_few_cycles_are_published_and_said(made, results, capsys):
    assert publish.main([str(made(cycles=3)), "--into", str(results)]) == 0
    assert "no headline by itself: 3 cycles, no full run" in capsys.readouterr().out


def test_links_are_refused_wherever_they_stand(made, tmp_path, results):
    path = made()
    for link, target in (
        (tmp_path / "runs" / GROUP / "link.json", path),
        (tmp_path / "runs" / "h200x1" / "link", path.parent),
        (tmp_path / "runs" / "link", path.parents[1]),
    ):
        link.symlink_to(target)
        inside = path.relative_to(target) if target != path else ""
        assert "link" in refused(link / inside, results)
    (results / "h200x1").mkdir(parents=True)
    (results / GROUP).symlink_to(tmp_path)
    assert "nothing is written there" in refused(path, results)


@pytest.mark.parametrize("damage", [b"{}", b"\xff\xfe", None])
def test_damaged_and_foreign_files_are_refused(made, results, damage):
    path = made()
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:-20] if damage is None else damage)
    assert str(path) in refused(path, results)


def test_a_name_that_is_taken_by_other_content_is_refused(made, results):
    target = publish.publish(made(), results)
    before = target.read_bytes()
    other = made("other", end_utc="x", flags=["--batch", "2"])
    assert "published with other content" in refused(other, results)
    assert target.read_bytes() == before


def test_what_the_facts_do_not_show_is_refused(made, tmp_path, results):
    """Nothing in a file says that a variant passed: forged replays are counted again."""
    run = made_run()
    for block in run.builds[""].variants["eager"].blocks:
        block.replays = 5
    assert "no eager variant of the run passed" in refused(write(run, tmp_path / "runs" / GROUP), results)


def forged(name="graph_layer", **more):
    """A run whose graph is 170 times as fast as eager, whose kernels allow 1.77x at most."""
    run = made_run(names=("eager", "graph_layer", "control"), issue=(10.0, 5.65), **more)
    for block in run.builds[""].variants[name].blocks:
        block.step_ms = [10.0 / 170] * 20
        block.parent_s = block.worker_s = 0.2 / 170
    run.builds[""].variants[name].profile.busy_ms = 10.0 / 170
    return run


def test_a_gain_of_170_beside_177_at_most_is_refused_by_a_line_and_printed_as_failed(tmp_path, results, capsys):
    path = write(forged(), tmp_path / "runs" / GROUP)
    said = "graph_layer failed: it gains 170.00x with the kernels of eager, which allow 1.77x at most"
    assert f"{path}: {said}; --as-is publishes it with this failure" == refused(path, results)
    assert "failed: graph_layer (it gains 170.00x" in run_table.report(run_file.read(path))
    assert publish.main([str(path), "--into", str(results)]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert publish.main([str(path), "--into", str(results), "--as-is"]) == 0
    target, line, *_ = capsys.readouterr().out.splitlines()
    assert line == f"  published as it is: {said}" and Path(target).read_bytes() == path.read_bytes()
    (row,) = [row for row in frame.load(results).records() if row.variant == "graph_layer"]
    assert row.status == "failed" and "it gains 170.00x" in row.reason and row.gain is None


def test_where_a_fence_stopped_eager_nothing_is_compared(tmp_path, results, capsys):
    run = forged("eager")
    run.builds[""].variants["eager"].profile.busy_ms = 5.0
    path = write(run, tmp_path / "runs" / GROUP)
    assert "eager failed: a step takes 0.059 ms, its kernels keep the GPU busy for 5.00 ms; --as-is" in refused(
        path, results
    )
    assert publish.main([str(path), "--into", str(results), "--as-is"]) == 0
    assert "published as it is: eager failed" in capsys.readouterr().out
    assert all(row.gain is None for row in frame.load(results).records())


def test_as_is_publishes_nothing_else_that_is_no_evidence(made, results):
    for run in ({"cycles": 2}, {"preset": "tiny"}):
        with pytest.raises(publish.NotPublished):
            publish.publish(made(**run), results, as_is=True)


def census(tmp_path, **more):
    models = {"gpt3": "20261125T101500Z-a7d396c1", "rnnt": "20261125T101600Z-a7d396c2"}
    runs = [made_run(cycles=4, model=model, id=number) for model, number in models.items()]
    left_out = {"moe": "too large"}
    found = Census(schema=run_file.SCHEMA, census=True, id=runs[0].id, left_out=left_out, runs=runs)
    for run in runs:
        run.parity = "blocks"
    path = tmp_path / "runs" / "h200x1" / "census" / f"{found.id}.json"
    path.parent.mkdir(parents=True)
    path.write_bytes(run_file.as_bytes(replace(found, **more)))
    return path


def test_a_census_is_one_file_that_adds_a_host_to_each_row(tmp_path, results, capsys):
    publish.publish(write(made_run(boot="a"), tmp_path / "other" / GROUP), results)
    path = census(tmp_path)
    assert publish.main([str(path), "--into", str(results)]) == 0
    target, first, second, *_ = capsys.readouterr().out.splitlines()
    assert target == str(results / "h200x1" / "census" / path.name)
    assert "gpt3/bench graph_layer: a host more (before 1.00x, one unknown host)" in first
    assert "rnnt/bench graph_layer: a host more (the first)" in second
    assert len(run_file.find(results)[0]) == 3


def test_a_census_without_runs_or_of_two_hosts_is_refused(tmp_path, results):
    path = census(tmp_path)
    found = run_file.read_all(path)
    found.runs[1].host.boot = "other"
    path.write_bytes(run_file.as_bytes(found))
    assert "of several hosts" in refused(path, results)
    path.write_bytes(run_file.as_bytes(replace(found, runs=[])))
    assert "without a run" in refused(path, results)


def test_a_sweep_is_published_with_the_point_that_does_not_fit(tmp_path, results, capsys):
    path = put_sweep(tmp_path / "runs", oom=(1024,))
    assert publish.main([str(path), "--into", str(results)]) == 0
    target, *lines = capsys.readouterr().out.splitlines()
    assert target == str(results / "h200x1" / "llama2_lora-slice-over-sequence" / path.name)
    assert sum("sequence-" in line for line in lines) == 4
    assert any("sequence-1024 graph_layer: oom (no eager variant is left)" in line for line in lines)


def named(run, over):
    run.over, run.label = over, f"{over}-{run.value}"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda runs: [setattr(run, "preset", "tiny") for run in runs], "preset tiny"),
        (lambda runs: setattr(runs[1], "label", "layers-2-sequence-256"), "points of several sweeps"),
        (lambda runs: setattr(runs[1], "over", "layers"), "points of several sweeps"),
        (lambda runs: setattr(runs[1].host, "boot", "other"), "of several hosts"),
        (lambda runs: [named(run, "../x") for run in runs], "cannot be the name of a file"),
    ],
)
def test_what_is_no_sweep_of_one_host_is_refused(tmp_path, results, change, reason):
    assert reason in refused(put_sweep(tmp_path / "runs", change=change), results)


def test_a_sweep_in_which_nothing_fits_is_refused(tmp_path, results):
    path = put_sweep(tmp_path / "runs", oom=(128, 256, 512, 1024))
    assert "nothing in it was timed" in refused(path, results)


# ------------------------------------------------------------------------------------------------
# The command


def test_the_command_copies_what_it_can_and_says_the_rest_in_a_line_each(made, tmp_path, results, capsys):
    good, bad = made(), tmp_path / "a\nb\x1b[2J.json"
    status = publish.main([str(bad), str(good), str(tmp_path / "none.json"), "--into", str(results)])
    said = capsys.readouterr()
    assert status == 1 and said.out.splitlines()[0] == str(results / GROUP / good.name)
    assert [line.startswith("python -m benchmarks.publish: ") for line in said.err.splitlines()] == [True, True]
    assert "\x1b" not in said.err
    assert publish.main([str(good), "--into", str(results)]) == 0


def test_publishing_a_run_imports_no_table_code():
    code = "import sys; from benchmarks import publish; print({'pandas', 'torch'} & set(sys.modules))"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert answer.stdout == "set()\n", answer.stderr


def test_a_tree_that_git_calls_changed_counts_where_its_hash_is_a_commit(monkeypatch):
    """A copy of a commit may lie beside the .git of another one."""
    monkeypatch.setattr(publish, "last_commits", lambda number, root: ["newer", "older"])
    monkeypatch.setattr(publish, "source_hash_of_commit", lambda sha, root: {"newer": "aaaa", "older": "bbbb"}.get(sha))
    assert publish.is_committed({"clean": False, "commit": "other", "hash": "bbbb"})
    assert not publish.is_committed({"clean": False, "commit": "other", "hash": "cccc"})
    assert not publish.is_committed({"clean": False, "commit": "other"})


def test_the_hash_of_a_commit_here_is_found(monkeypatch):
    monkeypatch.setattr(publish, "last_commits", source.last_commits)
    monkeypatch.setattr(publish, "source_hash_of_commit", source.source_hash_of_commit)
    (sha,) = source.last_commits(1)
    assert publish.is_committed({"clean": False, "commit": None, "hash": source.source_hash_of_commit(sha)})
