"""The command against a fake model: statuses, parity, resume, locks, interruptions, mistakes."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from benchmarks import compare, intervals, rounds, run
from common import record as records
from tests.test_rounds import fake_nvidia_smi, processes_with, until

MODEL = "tests.fake_model"
GPU = r"GPU 0: NVIDIA H200 (UUID: GPU-0)\n"


@pytest.fixture(autouse=True)
def no_gpu(tmp_path_factory, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    fake_nvidia_smi(tmp_path_factory.mktemp("path") / "bin", monkeypatch, "No devices found.")


@pytest.fixture
def gpu(tmp_path, monkeypatch):
    fake_nvidia_smi(tmp_path / "bin", monkeypatch, GPU)


def go(out, variants="graph", *arguments, flags=()):
    """The command in this process; returns its exit status."""
    argv = ["--model", MODEL, "--variants", variants, "--out", str(out), *arguments]
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        return run.main([*argv, *(["--", *flags] if flags else [])])
    except SystemExit as stop:
        return stop.code
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def command(*arguments, **more):
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.run", *arguments],
        cwd=rounds.ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **more,
    )


def read(out, name):
    return records.read(out / f"{name}.json")


def names(out):
    return sorted(path.name.removesuffix(".json") for path in out.glob("*.json"))


# ------------------------------------------------------------------------------------------------
# A whole session


def test_two_rounds_of_eager_and_graph(tmp_path, capsys):
    assert go(tmp_path / "out") == 0
    out = tmp_path / "out"
    assert names(out) == ["eager.r0", "eager.r1", "eager.r2", "graph.r0", "graph.r1", "graph.r2"]
    for name in names(out):
        record = read(out, name)
        assert (record["status"], record["numerics"]["parity"]) == ("pass", "bitwise")
    assert read(out, "graph.r0")["steps"]["gpu_ms"] == []
    assert len(read(out, "graph.r0")["numerics"]["loss"]) == 20
    assert (out / "graph.r1.trace.json.gz").read_bytes() == b"trace"
    assert (out / "logs" / "graph.r2.log").read_text().startswith("fake graph round 2")
    assert (out / "summary.csv").read_text().count("\n") == 7
    assert "| graph | 2 | bitwise | ok |" in (out / "table.md").read_text()
    text = capsys.readouterr().out
    assert text.startswith("tests.fake_model/tiny  CPU") and "left" in text and text.isascii()
    assert "steps" in text and f"{tmp_path / 'out'}/: records" in text
    # ABBA, parity before all of it.
    lines = [line.split()[:3] for line in text.splitlines() if line.startswith(("parity ", "round "))]
    assert lines[0][:2] == ["parity", "eager"] and lines[1][:2] == ["parity", "graph"]
    order = [["1", "eager"], ["1", "graph"], ["2", "graph"], ["2", "eager"]]
    assert [line[1:] for line in lines[2:]] == order
    # Nothing published leads back to this folder.
    assert all(str(out) not in path.read_text() for path in out.glob("*.json"))


def test_a_gpu_session_prints_the_gain(tmp_path, gpu, capsys):
    assert go(tmp_path / "out", "graph", "--preset", "bench", "--rounds", "3", flags=["--pretend-gpu", "true"]) == 0
    row = compare.summarise(compare.load(tmp_path / "out")[0])[1]
    assert row["verdict"] == "faster" and row["speedup"] == pytest.approx(1.25, rel=0.02)
    text = capsys.readouterr().out
    assert "NVIDIA H200 x1" in text
    # Before it any seconds may be 1.2.
    assert text.index("to gain") < text.index("speed-up")
    assert "1.2" in text[text.index("speed-up") :]


def test_a_variant_with_a_reference_of_its_own_is_compared_with_that(tmp_path, capsys):
    out = tmp_path / "out"
    assert go(out, "on_shifted", "--rounds", "1") == 0
    # Its reference comes with it, and is run twice as eager is.
    assert names(out) == [f"{name}.r{number}" for name in ("eager", "on_shifted", "shifted") for number in (0, 1)]
    assert (out / "logs" / "shifted.r0.control.log").exists()
    for name in ("shifted.r0", "on_shifted.r0", "on_shifted.r1"):
        record = read(out, name)
        assert (record["status"], record["numerics"]["parity"]) == ("pass", "bitwise"), record["message"]
    lines = [line.split()[1] for line in capsys.readouterr().out.splitlines() if line.startswith("parity ")]
    assert lines == ["eager", "shifted", "on_shifted"]
    # What is missing later is still compared with it.
    (out / "on_shifted.r0.json").unlink()
    assert go(out, "on_shifted", "--rounds", "1") == 0
    assert read(out, "on_shifted.r0")["numerics"]["parity"] == "bitwise"


def test_a_reference_is_not_taken_for_eager(tmp_path, monkeypatch):
    # With eager as its reference, what is equal to something else fails by its losses.
    real = run.describe
    monkeypatch.setattr(run, "describe", lambda *a: {k: v for k, v in real(*a).items() if k != "reference"})
    assert go(tmp_path / "out", "on_shifted", "--rounds", "1") == 1
    record = read(tmp_path / "out", "on_shifted.r0")
    assert record["status"] == "numerics_failed" and record["message"].startswith("not bitwise equal to eager")


def test_flags_are_checked_with_the_preset_that_they_are_added_to(tmp_path, gpu, monkeypatch):
    persistent = ["--lstm", "persistent"]
    assert run.describe("rnnt", persistent, "bench")["model"] == "rnnt"
    with pytest.raises(run.Mistake, match="--lstm persistent: takes --precision fp16"):
        run.describe("rnnt", persistent, "tiny")
    session = run.Session(run.parse(["--model", "rnnt", "--out", str(tmp_path), "--", *persistent]))
    assert session.preset == "bench" and session.flags == persistent
    with pytest.raises(run.Mistake, match="--lstm persistent: takes --precision fp16"):
        run.Session(run.parse(["--model", "rnnt", "--preset", "tiny", "--out", str(tmp_path), "--", *persistent]))


@pytest.mark.slow
def test_auto_stops_on_width(tmp_path, gpu, monkeypatch):
    monkeypatch.setattr(intervals, "AUTO_MIN_ROUNDS", 4)
    monkeypatch.setattr(intervals, "AUTO_MAX_ROUNDS", 5)
    quiet, loud = ["--noise", "0", "--run-noise", "0.0001"], ["--run-noise", "0.1"]
    for name, flags, num_rounds in (("quiet", quiet, 4), ("loud", loud, 5)):
        assert go(tmp_path / name, "graph", "--rounds", "auto", flags=["--pretend-gpu", "true", *flags]) == 0
        assert len(list((tmp_path / name).glob("eager.r*.json"))) == 1 + num_rounds


def quick_children(monkeypatch, seconds):
    """Every child takes seconds(round, variant) on the session's own clock, and no time at all of the test's."""
    clock = [0.0]
    original = rounds.run_child

    def child(command, **more):
        number, variant = (command[command.index(flag) + 1] for flag in ("--round", "--variant"))
        outcome = original(command, **more)
        clock[0] += seconds(int(number), variant)
        return rounds.Outcome(outcome.exit_status, outcome.timed_out, seconds(int(number), variant))

    monkeypatch.setattr(rounds, "run_child", child)
    monkeypatch.setattr(run.time, "monotonic", lambda: clock[0])


def test_rounds_of_one_folder_made_in_two(tmp_path, capsys, monkeypatch):
    quick_children(monkeypatch, lambda number, variant: 10.0)
    assert go(tmp_path / "a", "graph", "--rounds", "1") == 0
    shutil.copytree(tmp_path / "a", tmp_path / "b", ignore=shutil.ignore_patterns("*.r1.*"))
    assert go(tmp_path / "b", "graph", "--first-round", "2", "--rounds", "3") == 0
    assert names(tmp_path / "b") == [f"{variant}.r{number}" for variant in ("eager", "graph") for number in (0, 2, 3)]
    shutil.copytree(tmp_path / "b", tmp_path / "c")
    capsys.readouterr()
    # What stands already takes no time.
    assert go(tmp_path / "c", "graph", "--rounds", "3") == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("round")]
    assert [line.split()[1:3] for line in lines] == [["1", "eager"], ["1", "graph"]]
    assert lines[0].endswith("left") and not lines[1].endswith("left")
    for path in (tmp_path / "a").glob("*.r1.*"):
        shutil.copy(path, tmp_path / "b")
    capsys.readouterr()
    assert go(tmp_path / "b", "graph", "--rounds", "3") == 0
    assert "8 records of an earlier run are reused" in capsys.readouterr().out


def test_minutes_start_no_round_that_cannot_end(tmp_path, capsys, monkeypatch):
    quick_children(monkeypatch, lambda number, variant: 10.0)
    # 30 s of parity, then rounds of 20 s.
    assert go(tmp_path / "out", "graph", "--rounds", "9", "--minutes", "1.5") == 0
    assert "--minutes 1.5: round 4 would take 20.0 s, not started" in capsys.readouterr().out
    assert [name for name in names(tmp_path / "out") if "eager" in name] == [f"eager.r{number}" for number in range(4)]


def test_minutes_that_leave_no_timed_round_are_a_failure(tmp_path, capsys, monkeypatch):
    quick_children(monkeypatch, lambda number, variant: 10.0)
    assert go(tmp_path / "out", "graph", "--minutes", "0.75") == 1
    assert capsys.readouterr().out.rstrip().endswith("no timed round fitted into --minutes 0.75")
    assert names(tmp_path / "out") == ["eager.r0", "graph.r0"]
    # A session that finds its rounds measured before is no failure, however little time it has.
    assert go(tmp_path / "out", "graph", "--rounds", "1") == 0
    assert go(tmp_path / "out", "graph", "--rounds", "1", "--minutes", "0.01") == 0


def test_nothing_timed_is_a_failure_without_minutes_too(tmp_path, capsys):
    assert go(tmp_path / "out", "graph", "--rounds", "1", flags=["--only", "unsupported"]) == 1
    assert capsys.readouterr().out.rstrip().endswith("no timed round: no variant got beyond round 0")


def test_a_session_without_a_table_shows_its_progress(tmp_path, capsys):
    assert go(tmp_path / "out", "graph", "--rounds", "1", "--no-table") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("round 1") and len(lines) == 7
    assert "| graph | 1 |" in (tmp_path / "out" / "table.md").read_text()


def test_time_left_is_told_by_rounds_of_the_same_kind(tmp_path, capsys, monkeypatch):
    quick_children(monkeypatch, lambda number, variant: 30.0 if number else 4.0)
    assert go(tmp_path / "out", "graph", "--rounds", "2") == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("parity ", "round "))]
    left = [line.rpartition("about ")[2] for line in lines]
    assert left[0] == "4.0 s left" and left[2:5] == ["90.0 s left", "60.0 s left", "30.0 s left"]


def test_relative_paths_of_the_script_are_taken_from_where_the_command_runs(tmp_path, monkeypatch):
    described = [{"flag": "--data", "type": "path"}, {"flag": "--name", "type": "str"}]
    words = [{"flag": "--data", "type": "path", "words": ["corpus"]}]
    flags = ["--data", "corpus", "--name", "x", "--data=a/b", "--name=c", "--data", "/there", "--data=", "--data", ""]
    monkeypatch.chdir(tmp_path)
    here = str(tmp_path)
    expected = ["--data", f"{here}/corpus", "--name", "x", f"--data={here}/a/b", *flags[5:]]
    assert rounds.from_root(flags, described) == expected
    assert rounds.from_root(["--data", "corpus", "--data=corpus", "--data=b"], words)[1:] == [
        "corpus",
        "--data=corpus",
        f"--data={here}/b",
    ]
    monkeypatch.chdir(rounds.ROOT)
    assert rounds.from_root(flags, described) == flags
    monkeypatch.chdir(tmp_path)
    assert go(tmp_path / "out", "graph", "--rounds", "1", flags=["--data", "folder"]) == 0
    assert read(tmp_path / "out", "graph.r1")["config"]["data"] == f"{here}/folder"


def test_host_load_is_recorded_and_beside_timed_runs_only(tmp_path, monkeypatch):
    seen = []

    class Spy(rounds.HostLoad):
        def __enter__(self):
            seen.append(self.num_processes)
            return super().__enter__()

    monkeypatch.setattr(rounds, "HostLoad", Spy)
    assert go(tmp_path / "out", "graph", "--rounds", "1", "--host-load", "1") == 0
    assert seen == [0, 0, 0, 1, 1]
    assert [read(tmp_path / "out", name)["host_load"] for name in ("graph.r0", "graph.r1")] == [0, 1]


def test_round_0_is_deterministic_and_caches_are_the_folders(tmp_path, monkeypatch):
    seen = []

    def spy(command, *, environment, **more):
        seen.append((command[command.index("--round") + 1], "--parity" in command, environment))
        return rounds.Outcome(1, False, 0.1)

    monkeypatch.setattr(rounds, "run_child", spy)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    assert go(tmp_path / "out") == 1
    number, parity, environment = seen[0]
    assert (number, parity) == ("0", True)
    assert environment["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert environment["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] == "0"
    assert environment["TORCHINDUCTOR_CACHE_DIR"].startswith(str(tmp_path / "out" / ".cache"))
    assert environment["TRITON_CACHE_DIR"].startswith(str(tmp_path / "out" / ".cache"))


def test_timed_rounds_leave_an_mllog_beside_their_output(tmp_path, monkeypatch):
    seen, run_child = {}, rounds.run_child

    def spy(command, **more):
        number = command[command.index("--round") + 1]
        seen[number] = command[command.index("--mllog") + 1] if "--mllog" in command else None
        return run_child(command, **more)

    monkeypatch.setattr(rounds, "run_child", spy)
    assert go(tmp_path / "out", "graph", "--rounds", "1") == 0
    assert seen == {"0": None, "1": str(tmp_path / "out" / "logs" / "graph.r1.mllog")}


def test_several_ranks_go_through_torchrun(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(
        rounds, "run_child", lambda command, **more: seen.append(command) or rounds.Outcome(1, False, 0.1)
    )
    go(tmp_path / "out", "graph", "--ngpu", "2")
    expected = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", f"{MODEL}.train"]
    assert seen[0][1:8] == expected


# ------------------------------------------------------------------------------------------------
# Rows that are not sound


def test_oom_and_unsupported_are_rows_and_no_failure(tmp_path):
    assert go(tmp_path / "out", "graph,oom,unsupported", "--rounds", "1") == 0
    out = tmp_path / "out"
    assert read(out, "oom.r0")["message"] == "tried 9.0 GiB, 1.0 GiB free"
    # Round 0 settled them.
    assert names(out) == ["eager.r0", "eager.r1", "graph.r0", "graph.r1", "oom.r0", "unsupported.r0"]
    table = (out / "table.md").read_text()
    assert "needs hardware that nobody has" in table and "| graph | 1 |" in table


FAULTS = {
    "few_replays": ("failed", "39 replays counted, 40 expected"),
    "die": ("failed", "killed by signal 9, perhaps out of host memory"),
    "crash": ("failed", "RuntimeError: the fake model crashes"),
    "half": ("failed", "not a whole JSON document"),
}


def test_variants_that_fail_round_0_are_rows_and_the_others_go_on(tmp_path, capsys):
    out = tmp_path / "out"
    assert go(out, ",".join([*FAULTS, "graph"]), "--rounds", "1") == 1
    text = capsys.readouterr().out
    for variant, (status, message) in FAULTS.items():
        record = read(out, f"{variant}.r0")
        assert record["status"] == status and message in record["message"]
        assert f"{variant}.r1" not in names(out)
        assert f"{variant} ({status})" in text[text.index("not sound: ") :]
    assert read(out, "graph.r1")["status"] == "pass"


def test_a_broken_promise_keeps_the_whole_first_record(tmp_path):
    assert go(tmp_path / "out", "differs", "--rounds", "1") == 1
    record = read(tmp_path / "out", "differs.r0")
    assert record["status"] == "numerics_failed"
    assert "first at step 7 in tensor_1, by up to 0.33 relative" in record["message"]
    numerics = record["numerics"]
    assert (numerics["parity"], numerics["first_difference"]) == ("differs", {"step": 7, "tensor": "tensor_1"})
    assert len(numerics["loss"]) == 20 and numerics["max_rel_diff"] == pytest.approx(1 / 3)


def test_compiled_kernels_promise_a_tolerance_only(tmp_path):
    assert go(tmp_path / "out", "compile", "--rounds", "1") == 0
    first, timed = (read(tmp_path / "out", f"compile.r{number}") for number in (0, 1))
    assert first["status"] == "pass" and first["numerics"]["parity"] == "differs"
    assert timed["numerics"]["max_rel_diff"] == first["numerics"]["max_rel_diff"] == pytest.approx(1e-5, rel=0.01)
    assert timed["numerics"]["first_difference"] == {"step": 0, "tensor": "tensor_0"}


def described(monkeypatch, **more):
    original = run.describe
    monkeypatch.setattr(run, "describe", lambda *arguments: original(*arguments) | more)


def test_a_script_can_promise_and_tolerate_otherwise(tmp_path, monkeypatch):
    described(monkeypatch, bitwise=["compile"])
    assert go(tmp_path / "a", "compile,differs", "--rounds", "1") == 1
    assert "not bitwise" in read(tmp_path / "a", "compile.r0")["message"]
    assert "allowed 0.001" in read(tmp_path / "a", "differs.r0")["message"]
    # Its tensors differ by a third: what is tolerated is a difference of the losses.
    described(monkeypatch, bitwise=[], tolerance={"differs": 3e-3, "compile": 1e-6})
    assert go(tmp_path / "b", "compile,differs", "--rounds", "1") == 1
    assert read(tmp_path / "b", "differs.r0")["status"] == "pass"
    assert "allowed 1e-06" in read(tmp_path / "b", "compile.r0")["message"]


def test_a_step_that_ignores_its_input_is_caught_by_its_timed_losses(tmp_path):
    assert go(tmp_path / "out", "stale,graph") == 1
    record = read(tmp_path / "out", "stale.r1")
    assert record["status"] == "numerics_failed" and "timed losses differ" in record["message"]
    # More eager rounds might have shown that they lie within its spread: the verdict stops no round.
    assert read(tmp_path / "out", "stale.r2")["status"] == "numerics_failed"
    assert read(tmp_path / "out", "graph.r2")["status"] == "pass"


def test_a_statistic_that_its_steps_do_not_bear_is_refused(tmp_path):
    assert go(tmp_path / "out", "edited", "--rounds", "1") == 1
    record = read(tmp_path / "out", "edited.r1")
    assert record["status"] == "failed" and "does not follow" in record["message"]


def test_eager_that_does_not_repeat_itself(tmp_path):
    assert go(tmp_path / "out", "graph", flags=["--nondeterministic", "true"]) == 1
    record = read(tmp_path / "out", "eager.r0")
    assert record["status"] == "eager_two_runs_differ" and "from step 0 on" in record["message"]
    # What eager cannot do is not asked of a variant, and the timed rounds are still worth having.
    assert read(tmp_path / "out", "graph.r0")["status"] == "pass"
    assert read(tmp_path / "out", "graph.r2")["status"] == "pass"


def test_a_run_that_hangs_is_killed_with_its_children(tmp_path):
    out = tmp_path / "out"
    assert go(out, "hang", "--rounds", "1", "--limit-s", "0.7") == 1
    record = read(out, "hang.r0")
    assert record["status"] == "timeout" and "killed after 0.7 s (--limit-s)" in record["message"]
    assert (out / "logs" / "hang.r0.log").read_text().count("fake hang") == 2
    assert processes_with(str(out / ".partial")) == []


def test_a_failure_is_tried_once_more(tmp_path, capsys):
    assert go(tmp_path / "once", "graph", "--rounds", "1", flags=["--fail-times", "1"]) == 0
    assert "once more" in capsys.readouterr().out
    assert go(tmp_path / "twice", "graph", "--rounds", "1", flags=["--fail-times", "2"]) == 1
    assert read(tmp_path / "twice", "eager.r0")["status"] == "failed"
    assert "exit status 3" in read(tmp_path / "twice", "eager.r0")["message"]
    assert "no parity" in read(tmp_path / "twice", "graph.r0")["message"]


# ------------------------------------------------------------------------------------------------
# Resume, locks, interruptions


def ages(out):
    return {path.name: path.stat().st_mtime_ns for path in out.glob("*.json")}


def test_the_same_command_reuses_and_goes_on(tmp_path, capsys):
    out = tmp_path / "out"
    assert go(out) == 0
    before = ages(out)
    assert go(out) == 0
    assert ages(out) == before
    assert "6 records of an earlier run are reused" in capsys.readouterr().out
    (out / "graph.r2.json").unlink()
    (out / "graph.r0.json").unlink()
    assert go(out) == 0
    after = ages(out)
    assert {name for name in after if after[name] != before.get(name)} == {"graph.r0.json", "graph.r2.json"}
    assert read(out, "graph.r0")["numerics"]["parity"] == "bitwise"
    # Without eager's sidecar a new variant has nothing to be compared with: eager's round 0 is run again.
    (out / ".partial" / "eager.r0.parity.npz").unlink()
    assert go(out, "compile") == 0
    assert read(out, "compile.r0")["numerics"]["parity"] == "differs"
    assert "eager round 0 is run anew" in capsys.readouterr().out


def test_a_record_that_differs_is_named_set_aside_and_run_anew(tmp_path, capsys):
    out = tmp_path / "out"
    assert go(out, "graph", "--rounds", "1") == 0
    record = read(out, "graph.r1")
    record["env"]["torch"] = "1.0"
    records.write(out / "graph.r1.json", record)
    capsys.readouterr()
    assert go(out, "graph", "--rounds", "1") == 0
    assert "graph round 1 is run anew: torch was 1.0, now" in capsys.readouterr().out
    assert read(out, "graph.r1")["env"]["torch"] != "1.0"
    (aside,) = (out / ".stale").iterdir()
    assert read(aside, "graph.r1")["env"]["torch"] == "1.0"
    assert go(out, "graph", "--rounds", "1", flags=["--step-ms", "20"]) == 0
    text = capsys.readouterr().out
    assert text.count("is run anew: flags was") == 4
    assert read(out, "eager.r1")["statistic_ms"] == pytest.approx(20, rel=0.02)


def test_foreign_files_are_named_skipped_and_counted(tmp_path, capsys):
    out = tmp_path / "out"
    assert go(out, "graph", "--rounds", "1") == 0
    (out / "foreign.json").write_text('{"schema": 7}')
    (out / "graph.r1.json").write_text((out / "graph.r1.json").read_text()[:500])
    assert go(out, "graph", "--rounds", "1") == 0
    text = capsys.readouterr().out
    assert "foreign.json: schema 7" in text and "graph.r1.json: not a whole JSON" in text
    assert "2 files skipped" in text
    assert read(out, "graph.r1")["status"] == "pass"
    assert (out / "foreign.json").read_text() == '{"schema": 7}'


def test_a_second_run_into_the_folder_refuses(tmp_path, capsys):
    with rounds.lock_folder(tmp_path / "out"):
        assert go(tmp_path / "out") == 1
    captured = capsys.readouterr()
    assert f"process {os.getpid()}" in captured.err
    assert names(tmp_path / "out") == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_session_leaves_records_and_no_process(tmp_path, number, capsys):
    out = tmp_path / "out"
    process = command("--model", MODEL, "--variants", "graph,hang", "--rounds", "1", "--out", str(out))
    assert until((out / "logs" / "hang.r0.log").exists)
    assert until(lambda: len(processes_with(str(out / ".partial"))) >= 3)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=20)
    assert until(lambda: processes_with(str(out / ".partial")) == [])
    assert names(out) == ["eager.r0", "graph.r0"]
    if number != signal.SIGKILL:
        assert process.returncode == 130
        assert "the same command goes on" in stderr and "Traceback" not in stderr
    before = ages(out)
    assert go(out, "graph", "--rounds", "1") == 0
    assert {name: age for name, age in ages(out).items() if name in before} == before


# ------------------------------------------------------------------------------------------------
# Mistakes


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--model", "gtp3"], ["unknown model 'gtp3'", "gpt3"]),
        (["--model", "../x"], ["unknown model"]),
        (["--preset", "huge"], ["unknown preset 'huge'", "tiny, bench"]),
        (["--preset", "bench"], ["needs an NVIDIA GPU", "PRESET=tiny"]),
        (["--variants", "eager,grpah"], ["unknown variant 'grpah'", "eager, graph, compile"]),
        (["--variants", ","], ["eager, graph"]),
        (["--rounds", "few"], ["'few' is not a number of rounds", "auto"]),
        (["--rounds", "0"], ["'0' is not"]),
        (["--first-round", "3"], ["--first-round 3", "--rounds"]),
        (["--first-round", "2", "--rounds", "auto"], ["--first-round 2", "auto"]),
        (["--steps", "-1"], ["--steps"]),
        (["--ngpu", "0"], ["--ngpu"]),
        (["--minutes", "nan"], ["--minutes"]),
        (["--limit-s", "0"], ["--limit-s"]),
        (["--host-load", "x"], ["--host-load"]),
        (["--nonsense"], ["--nonsense"]),
        (["--", "--seconds", "soon"], ["--seconds", "'soon'"]),
        (["--", "--variant", "graph"], ["--variant", "leave it out"]),
    ],
)
def test_a_mistake_is_one_line_and_exit_2(tmp_path, capsys, monkeypatch, arguments, named):
    monkeypatch.setattr(run, "models", lambda: ["gpt3", "rnnt"])
    with_model = arguments if "--model" in arguments else ["--model", MODEL, *arguments]
    out = ["--out", str(tmp_path / "out"), "--limit-s", "1"]
    try:
        status = run.main([*out, *with_model])
    except SystemExit as stop:
        status = stop.code
    error = capsys.readouterr().err
    assert status == 2
    assert error.count("\n") == 1 and all(word in error for word in named), error
    assert not (tmp_path / "out").exists()


def test_more_gpus_than_there_are_is_a_mistake(tmp_path, gpu, capsys):
    assert go(tmp_path / "out", "graph", "--preset", "tiny", "--ngpu", "2") == 2
    assert "--ngpu 2: this machine shows 1" in capsys.readouterr().err


def session(*arguments):
    return run.Session(run.parse(["--model", MODEL, *arguments]))


def test_defaults_without_a_gpu():
    chosen = session()
    assert (chosen.preset, chosen.rounds, chosen.limit_s) == ("tiny", 2, 300)
    assert chosen.out == rounds.ROOT / "runs" / "cpux1" / f"{MODEL}-tiny"
    assert chosen.variants[0] == "eager" and len(chosen.variants) == 15


def test_defaults_with_a_gpu(gpu):
    chosen = session("--host-load", "16", "--variants", "graph,eager")
    assert (chosen.preset, chosen.rounds, chosen.limit_s) == ("bench", 5, 1800)
    assert chosen.out == rounds.ROOT / "runs" / "h200x1" / f"{MODEL}-bench-load16"
    assert chosen.variants == ["eager", "graph"]


def test_models_are_folders_with_a_train_script(tmp_path, monkeypatch):
    monkeypatch.setattr(rounds, "ROOT", tmp_path)
    for folder in ("gpt3", "rnnt", "common", ".hidden"):
        (tmp_path / folder).mkdir()
    for folder in ("gpt3", "rnnt", ".hidden"):
        (tmp_path / folder / "train.py").write_text("")
    assert run.models() == ["gpt3", "rnnt"]


@pytest.mark.parametrize("module", ["run", "compare"])
def test_help_is_quick_and_needs_no_torch(module):
    code = f"import sys\nimport benchmarks.{module} as m\ntry:\n    m.main(['--help'])\nexcept SystemExit as s:\n"
    code += "    assert s.code == 0\nassert 'torch' not in sys.modules and 'pandas' not in sys.modules"
    start = time.monotonic()
    answer = subprocess.run([sys.executable, "-c", code], cwd=rounds.ROOT, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    assert "usage: python -m benchmarks" in answer.stdout
    assert time.monotonic() - start < 1.0


def test_the_describe_of_the_fake_is_what_config_says():
    description = run.describe(MODEL, [])
    assert description["model"] == MODEL and json.dumps(description)
    assert list(description["presets"]) == ["tiny", "bench"]


def test_records_set_aside_twice_are_all_kept(tmp_path, monkeypatch):
    out = tmp_path / "out"
    for number, step_ms in enumerate((10, 20, 10)):
        monkeypatch.setattr(run.time, "strftime", lambda form, number=number: f"session{number}")
        assert go(out, "graph", "--rounds", "1", flags=["--step-ms", str(step_ms)]) == 0
    assert sorted(path.name for path in (out / ".stale").iterdir()) == ["session1", "session2"]
    assert all((path / "graph.r1.json").exists() for path in (out / ".stale").iterdir())


def test_a_folder_that_cannot_be_is_one_line(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert go(tmp_path / "file" / "sub", "graph") == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
