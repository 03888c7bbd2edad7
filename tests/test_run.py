"""The command against a fake model: a whole session, rows and statuses, mistakes."""

import json
import resource
import shutil
import subprocess
import sys

import pytest

from benchmarks import ROOT, children, compare, frame, intervals, run, script, sessions
from benchmarks.request import Request
from common import record as records
from tests import harness
from tests.harness import (
    MODEL,
    ON_GPU,
    edited,
    go,
    main,
    names,
    newest,
    of,
    only,
    processes_with,
    quick_children,
    read,
    stop_at,
    watched,
)

pytest_plugins = ["tests.machines"]
pytestmark = pytest.mark.usefixtures("no_gpu")
EAGER_GRAPH = of(["eager", "graph"], 2)


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


# ------------------------------------------------------------------------------------------------
# A whole session


def test_two_rounds_of_eager_and_graph_are_a_packed_session(out, capsys):
    """With real processes."""
    assert go(out) == 0
    session = only(out)
    assert session.parent == out / "cpux1" / f"{MODEL}-tiny" and sessions.NAME.fullmatch(session.name)
    assert session.name.endswith("-cpu0") and not list(out.rglob("*.open"))
    assert sorted(path.name for path in session.iterdir() if path.suffix != ".gz") == [
        *["logs", "records.jsonl.xz", "session.json"]
    ]
    found = read(session)
    assert sorted(found) == EAGER_GRAPH
    for record in found.values():
        assert (record["status"], record["numerics"]["parity"]) == ("pass", "bitwise")
        assert (record["session"], record["schema"]) == (session.name, 2)
    assert found["graph.r0"]["steps"]["gpu_ms"] == []
    assert len(found["graph.r0"]["numerics"]["loss"]) == 20
    assert (session / "graph.r1.trace.json.gz").read_bytes() == b"trace"
    assert (session / "logs" / "graph.r2.log").read_text().startswith("fake graph round 2")
    meta = sessions.read_meta(session)
    assert (meta["closed"], meta["num_records"], meta["rounds"], meta["probes"]) == ("complete", 6, 2, [])
    assert meta["end_utc"] >= meta["begin_utc"] and meta["source"]["source_hash"]
    assert meta["request"]["variants"] == ["eager", "graph"] and meta["nodes"][0]["boot_id"]
    assert (session.parent / "summary.csv").read_text().count("\n") == 7
    assert "| graph |" in (session.parent / "table.md").read_text()
    text = capsys.readouterr().out
    assert text.startswith("tests.fake_model/tiny  CPU") and "left" in text and text.isascii()
    assert f"{session}/: the session" in text
    # ABBA, parity before all of it.
    lines = [line.split()[:3] for line in text.splitlines() if line.startswith(("parity ", "round "))]
    assert lines[0][:2] == ["parity", "eager"] and lines[1][:2] == ["parity", "graph"]
    order = [["1", "eager"], ["1", "graph"], ["2", "graph"], ["2", "eager"]]
    assert [line[1:] for line in lines[2:]] == order
    # Nothing published leads back to this folder.
    assert all(str(out) not in records.dumps(record) for record in found.values())


def test_a_gpu_session_prints_the_gain(out, gpu, quick, capsys):
    assert go(out, "graph", "--preset", "bench", "--rounds", "5", flags=ON_GPU) == 0
    assert only(out).parent == out / "h200x1" / f"{MODEL}-bench-pretend-gpu-true" and only(out).name.endswith("-0000")
    row = compare.summarise(frame.read(out).frame)[1]
    assert row["verdict"] == "faster" and row["speedup"] == pytest.approx(1.25, rel=0.02)
    text = capsys.readouterr().out
    assert "NVIDIA H200 x1" in text
    assert "1.2" in text[text.index("speed-up") :]


def test_a_variant_with_a_reference_of_its_own_is_compared_with_that(out, quick, monkeypatch, capsys):
    stop_at(monkeypatch, "on_shifted.r1")
    assert go(out, "on_shifted", "--rounds", "1") == 130
    # Its reference comes with it, and is run twice as eager is.
    assert (only(out) / "logs" / "shifted.r0.control.log").exists()
    lines = [line.split()[1] for line in capsys.readouterr().out.splitlines() if line.startswith("parity ")]
    assert lines == ["eager", "shifted", "on_shifted"]
    # What is missing later is still compared with it.
    (only(out) / "on_shifted.r0.json").unlink()
    assert go(out, "on_shifted", "--rounds", "1") == 0
    found = read(only(out))
    assert sorted(found) == of(["eager", "on_shifted", "shifted"], 1)
    for name in ("shifted.r0", "on_shifted.r0", "on_shifted.r1"):
        assert (found[name]["status"], found[name]["numerics"]["parity"]) == ("pass", "bitwise"), found[name]["message"]
    assert found["on_shifted.r1"]["numerics"]["reference"] == "shifted"


def test_a_reference_is_not_taken_for_eager(out, quick, monkeypatch):
    # With eager as its reference, what is equal to something else fails by its losses.
    real = script.describe
    monkeypatch.setattr(script, "describe", lambda *a: {k: v for k, v in real(*a).items() if k != "reference"})
    assert go(out, "on_shifted", "--rounds", "1") == 1
    record = read(only(out))["on_shifted.r0"]
    assert record["status"] == "numerics_failed" and record["message"].startswith("not bitwise equal to eager")


def test_flags_are_checked_with_the_preset_that_they_are_added_to(tmp_path, gpu):
    persistent = ["--lstm", "persistent"]
    assert script.describe("rnnt", persistent, "bench")["model"] == "rnnt"
    with pytest.raises(script.Mistake, match="--lstm persistent: takes --precision fp16"):
        script.describe("rnnt", persistent, "tiny")
    session = Request(run.parse(["--model", "rnnt", "--out", str(tmp_path), "--", *persistent]))
    assert session.preset == "bench" and session.flags == persistent
    assert session.group == tmp_path / "h200x1" / "rnnt-bench-lstm-persistent"
    with pytest.raises(script.Mistake, match="--lstm persistent: takes --precision fp16"):
        Request(run.parse(["--model", "rnnt", "--preset", "tiny", "--out", str(tmp_path), "--", *persistent]))


def test_auto_stops_on_width(tmp_path, gpu, quick, monkeypatch):
    monkeypatch.setattr(intervals, "AUTO_MIN_ROUNDS", 4)
    monkeypatch.setattr(intervals, "AUTO_MAX_ROUNDS", 5)
    quiet, loud = ["--noise", "0", "--run-noise", "0.0001"], ["--run-noise", "0.1"]
    for name, flags, num_rounds in (("quiet", quiet, 4), ("loud", loud, 5)):
        assert go(tmp_path / name, "graph", "--rounds", "auto", flags=[*ON_GPU, *flags]) == 0
        assert names(only(tmp_path / name)) == of(["eager", "graph"], num_rounds)


def test_minutes_start_no_round_that_cannot_end_and_leave_the_session_open(out, quick, capsys, monkeypatch):
    quick_children(monkeypatch, lambda number, variant: 10.0)
    # 30 s of parity, then rounds of 20 s.
    assert go(out, "graph", "--rounds", "9", "--minutes", "1.5") == 0
    text = capsys.readouterr().out
    assert "--minutes 1.5: round 4 would take 20.0 s, not started" in text
    assert "the session stays open: the same command goes on with it for a day, make bench CLOSE=1 SESSION=" in text
    assert names(only(out)) == of(["eager", "graph"], 3) and sessions.is_open(only(out))
    assert "| graph |" in (only(out).parent / "table.md").read_text()


def test_minutes_that_leave_no_timed_round_are_a_failure(out, quick, capsys, monkeypatch):
    quick_children(monkeypatch, lambda number, variant: 10.0)
    assert go(out, "graph", "--minutes", "0.75") == 1
    assert capsys.readouterr().out.rstrip().endswith("no timed round fitted into --minutes 0.75")
    assert names(only(out)) == ["eager.r0", "graph.r0"]
    # A session that finds its rounds measured before is no failure, however little time it has.
    assert go(out, "graph", "--rounds", "3", "--minutes", "1.1") == 0
    assert names(only(out)) == of(["eager", "graph"], 3)
    assert go(out, "graph", "--rounds", "3", "--minutes", "0.01") == 1


def test_nothing_timed_is_a_failure_without_minutes_too(out, quick, capsys):
    assert go(out, "graph", "--rounds", "1", flags=["--only", "unsupported"]) == 1
    assert capsys.readouterr().out.rstrip().endswith("no timed round: no variant got beyond round 0")


def test_a_session_without_a_table_shows_its_progress(out, quick, capsys):
    assert go(out, "graph", "--rounds", "1", "--no-table") == 0
    text = capsys.readouterr().out
    assert text.splitlines()[2].startswith("session ") and "speed-up" not in text and "step ms" not in text
    assert len([line for line in text.splitlines() if line.startswith(("parity ", "round "))]) == 4
    assert "| graph |" in (only(out).parent / "table.md").read_text()


def test_time_left_is_told_by_rounds_of_the_same_kind(out, quick, capsys, monkeypatch):
    quick_children(monkeypatch, lambda number, variant: 30.0 if number else 4.0)
    assert go(out, "graph", "--rounds", "2") == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("parity ", "round "))]
    # Four timed runs are to come besides, which take no less than one of round 0.
    assert [line.rpartition("at least ")[2] for line in lines[:2]] == ["20.0 s left", "16.0 s left"]
    left = [line.rpartition("about ")[2] for line in lines[2:]]
    assert left[:3] == ["90.0 s left", "60.0 s left", "30.0 s left"] and "left" not in left[3]


def test_a_session_that_began_later_is_told_at_the_end(out, quick, capsys, monkeypatch):
    """The first run is over before it begins, and it ends within the fourth."""
    looks = iter([[]] * 3 + [["rnnt/bench on the CPU, process 7"]] * 5)
    monkeypatch.setattr(run.locks, "others_here", lambda: next(looks, []))
    assert go(out, "graph", "--rounds", "2") == 0
    text = capsys.readouterr().out
    # Asked at the start, and before and after each of seven runs: two of eager's round 0, one of graph's, four timed.
    assert text.count("beside") == 2 and "\nbeside   rnnt/bench on the CPU, process 7, in 2 of 6 runs\n" in text


def test_relative_paths_of_the_script_are_taken_from_where_the_command_runs(out, tmp_path, quick, monkeypatch):
    described = [{"flag": "--data", "type": "path"}, {"flag": "--name", "type": "str"}]
    words = [{"flag": "--data", "type": "path", "words": ["corpus"]}]
    flags = ["--data", "corpus", "--name", "x", "--data=a/b", "--name=c", "--data", "/there", "--data=", "--data", ""]
    monkeypatch.chdir(tmp_path)
    here = str(tmp_path)
    expected = ["--data", f"{here}/corpus", "--name", "x", f"--data={here}/a/b", *flags[5:]]
    assert script.from_root(flags, described) == expected
    assert script.from_root(["--data", "corpus", "--data=corpus", "--data=b"], words)[1:] == [
        "corpus",
        "--data=corpus",
        f"--data={here}/b",
    ]
    monkeypatch.chdir(ROOT)
    assert script.from_root(flags, described) == flags
    monkeypatch.chdir(tmp_path)
    assert go(out, "graph", "--rounds", "1", flags=["--data", "folder"]) == 0
    assert read(only(out))["graph.r1"]["config"]["data"] == f"{here}/folder"
    # And --out too, as every command takes its own.
    assert go("sub", "graph", "--rounds", "1") == 0
    assert only(tmp_path / "sub")


def test_host_load_is_recorded_and_beside_timed_runs_only(out, quick, monkeypatch):
    seen = []

    class Spy(children.HostLoad):
        def __enter__(self):
            seen.append(self.num_processes)
            return super().__enter__()

    monkeypatch.setattr(children, "HostLoad", Spy)
    assert go(out, "graph", "--rounds", "1", "--host-load", "1") == 0
    assert seen == [0, 0, 0, 1, 1]
    assert [read(only(out))[name]["host_load"] for name in ("graph.r0", "graph.r1")] == [0, 1]
    assert only(out).parent.name == f"{MODEL}-tiny-load1"


def test_round_0_is_deterministic_and_caches_are_the_roots(out, quick, monkeypatch):
    seen = []

    def spy(command, *, environment, **more):
        seen.append((command[command.index("--round") + 1], "--parity" in command, environment))
        return children.Outcome(1, False, 0.1)

    monkeypatch.setattr(children, "run_child", spy)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    assert go(out) == 1
    number, parity, environment = seen[0]
    assert (number, parity) == ("0", True)
    assert environment["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert environment["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] == "0"
    # Of all sessions, as what is compiled once serves the next.
    assert environment["TORCHINDUCTOR_CACHE_DIR"] == str(out / ".cache" / "inductor")
    assert environment["TRITON_CACHE_DIR"] == str(out / ".cache" / "triton")
    assert environment["TORCHINDUCTOR_AUTOGRAD_CACHE_ALLOW_CUSTOM_AUTOGRAD"] == "1"


def test_the_first_timed_round_leaves_an_mllog_beside_its_output(out, quick, monkeypatch):
    seen = {}

    def before(name, words):
        seen[name] = words[words.index("--mllog") + 1] if "--mllog" in words else None

    watched(monkeypatch, before)
    assert go(out, "graph", "--rounds", "2") == 0
    assert seen["graph.r0"] is None and seen["graph.r2"] is None
    assert seen["graph.r1"] == str(only(out).with_name(f"{only(out).name}.open") / "logs" / "graph.r1.mllog")


def test_several_ranks_go_through_torchrun(out, quick, monkeypatch):
    seen = []
    failed = children.Outcome(1, False, 0.1)
    monkeypatch.setattr(children, "run_child", lambda command, **more: seen.append(command) or failed)
    go(out, "graph", "--ngpu", "2")
    expected = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", f"{MODEL}.train"]
    assert seen[0][1:8] == expected
    assert only(out).parent.parent.name == "cpux2"


def test_steps_of_parity_are_asked_for_and_all_make_those_that_eager_made(out, quick, monkeypatch):
    asked = {}
    watched(monkeypatch, lambda name, words: asked.update({name: harness.option(words, "--parity-steps")}), None)
    real = children.run_child

    def child(command, **more):
        return real(command if "--parity" in command else [*command, "--parity-steps", "-"], **more)

    monkeypatch.setattr(children, "run_child", child)
    stop_at(monkeypatch, "eager.r1")
    assert go(out, "graph") == 130
    # The script chooses for eager; the others follow it.
    assert asked == {"eager.r0": "0", "eager.r0.control": "20", "graph.r0": "20"}
    stop_at(monkeypatch, "eager.r1")
    assert go(out, "graph", "--parity-steps", "5") == 130
    assert set(asked.values()) == {"5"}
    assert len(read(newest(out))["graph.r0"]["numerics"]["loss"]) == 5


# ------------------------------------------------------------------------------------------------
# Rows that are not sound


def test_oom_and_unsupported_are_rows_and_no_failure(out, quick):
    assert go(out, "graph,oom,unsupported", "--rounds", "1") == 0
    # Round 0 settled them.
    assert names(only(out)) == ["eager.r0", "eager.r1", "graph.r0", "graph.r1", "oom.r0", "unsupported.r0"]
    assert read(only(out))["oom.r0"]["message"] == "tried 9.0 GiB, 1.0 GiB free"
    table = (only(out).parent / "table.md").read_text()
    assert "needs hardware that nobody has" in table and "| graph |" in table


FAULTS = {
    "few_replays": ("failed", "39 replays counted, its steps make 40"),
    "die": ("failed", "killed by signal 9, perhaps out of host memory"),
    "crash": ("failed", "RuntimeError: the fake model crashes"),
    "half": ("failed", "not a whole JSON document"),
}


def test_variants_that_fail_round_0_are_rows_and_the_others_go_on(out, quick, capsys):
    assert go(out, ",".join([*FAULTS, "graph"]), "--rounds", "1") == 1
    text, found = capsys.readouterr().out, read(only(out))
    for variant, (status, message) in FAULTS.items():
        for name in (f"{variant}.r0", f"{variant}.r0.t1"):
            assert found[name]["status"] == status and message in found[name]["message"]
        assert f"{variant}.r1" not in found
        assert f"{variant} ({status})" in text[text.index("not sound: ") :]
    assert found["graph.r1"]["status"] == "pass"


def test_a_broken_promise_keeps_the_whole_first_record(out, quick):
    assert go(out, "differs", "--rounds", "1") == 1
    record = read(only(out))["differs.r0"]
    assert record["status"] == "numerics_failed"
    assert "first at step 7 in tensor_1, by up to 0.33 relative" in record["message"]
    numerics = record["numerics"]
    assert (numerics["parity"], numerics["first_difference"]) == ("differs", {"step": 7, "tensor": "tensor_1"})
    assert len(numerics["loss"]) == 20 and numerics["max_rel_diff"] == pytest.approx(1 / 3)


def test_compiled_kernels_promise_a_tolerance_only(out, quick):
    assert go(out, "compile", "--rounds", "1") == 0
    first, timed = (read(only(out))[f"compile.r{number}"] for number in (0, 1))
    assert first["status"] == "pass" and first["numerics"]["parity"] == "differs"
    assert timed["numerics"]["max_rel_diff"] == first["numerics"]["max_rel_diff"] == pytest.approx(1e-5, rel=0.01)
    assert timed["numerics"]["first_difference"] == {"step": 0, "tensor": "tensor_0"}


def described(monkeypatch, **more):
    original = script.describe
    monkeypatch.setattr(script, "describe", lambda *arguments: original(*arguments) | more)


def test_a_variant_whose_kind_is_not_declared_is_not_run(out, quick, monkeypatch, capsys):
    described(monkeypatch, kinds={"eager": "eager"})
    assert go(out, "graph") == 2 and not out.exists()
    assert f"{MODEL} does not declare what kind variant 'graph' is" in capsys.readouterr().err


def test_a_script_can_promise_and_tolerate_otherwise(tmp_path, quick, monkeypatch):
    described(monkeypatch, bitwise=["compile"])
    assert go(tmp_path / "a", "compile,differs", "--rounds", "1") == 1
    found = read(only(tmp_path / "a"))
    assert "not bitwise" in found["compile.r0"]["message"]
    assert "allowed 0.001" in found["differs.r0"]["message"]
    # Its tensors differ by a third: what is tolerated is a difference of the losses.
    described(monkeypatch, bitwise=[], tolerance={"differs": 3e-3, "compile": 1e-6})
    assert go(tmp_path / "b", "compile,differs", "--rounds", "1") == 1
    found = read(only(tmp_path / "b"))
    assert found["differs.r0"]["status"] == "pass"
    assert "allowed 1e-06" in found["compile.r0"]["message"]


def test_a_step_that_ignores_its_input_is_caught_by_its_timed_losses(out, quick):
    assert go(out, "stale,graph") == 1
    found = read(only(out))
    assert found["stale.r1"]["status"] == "numerics_failed" and found["stale.r1"]["message"].startswith("timed work: ")
    # More eager rounds might have shown that they lie within its spread: the verdict stops no round.
    assert found["stale.r2"]["status"] == "numerics_failed"
    assert found["graph.r2"]["status"] == "pass"


@pytest.mark.parametrize(
    ("variant", "status", "message"),
    [
        ("edited", "failed", "does not follow"),
        ("busy_above", "failed", "busy_ms"),
        ("no_graph", "failed", "graph"),
        ("no_norm", "numerics_failed", "grad_norm is missing"),
        ("drops", "numerics_failed", "timed work: "),
    ],
)
def test_a_run_that_lies_is_named(out, quick, capsys, variant, status, message):
    assert go(out, variant, "--rounds", "1") == 1
    record = read(only(out))[f"{variant}.r1"]
    assert record["status"] == status and message in record["message"], record["message"]
    assert f"not sound: {variant} ({status})" in capsys.readouterr().out


def test_a_run_of_another_source_than_its_session_s_fails(out, quick, monkeypatch):
    def edit(name, record):
        if name == "graph.r1":
            record["env"]["source_hash"] = "edited meanwhile"

    edited(monkeypatch, edit)
    assert go(out, "graph", "--rounds", "1") == 1
    record = read(only(out))["graph.r1"]
    assert (record["status"], record["message"]) == (
        "failed",
        "the source changed while the session ran: edited meanwhile",
    )


def test_eager_that_does_not_repeat_itself(out):
    assert go(out, "graph", flags=["--nondeterministic", "true"]) == 1
    found = read(only(out))
    record = found["eager.r0"]
    assert record["status"] == "eager_two_runs_differ" and "from step 0 on" in record["message"]
    # What eager cannot do is not asked of a variant, and the timed rounds are still worth having.
    assert found["graph.r0"]["status"] == "pass"
    assert found["graph.r2"]["status"] == "pass"


def test_a_run_that_hangs_is_killed_with_its_children(out, quick):
    assert go(out, "hang", "--rounds", "1", "--limit-s", "1.5") == 1
    record = read(only(out))["hang.r0"]
    assert record["status"] == "timeout" and "killed after 1.5 s (--limit-s)" in record["message"]
    assert (only(out) / "logs" / "hang.r0.log").read_text().count("fake hang") == 2
    assert processes_with(str(out)) == []


def test_a_failure_is_tried_once_more_and_stays_in_the_session(tmp_path, quick, capsys):
    assert go(tmp_path / "once", "graph", "--rounds", "1", flags=["--fail-times", "1"]) == 0
    text = capsys.readouterr().out
    assert "once more" in text and "1 left out" not in text
    once = only(tmp_path / "once")
    assert names(once) == ["eager.r0", "eager.r0.t1", "eager.r1", "graph.r0", "graph.r1"]
    failed = read(once)["eager.r0.t1"]
    assert (failed["status"], failed["extra"]["superseded"]) == ("failed", True)
    # It is no row, and is told.
    runs = frame.read(once)
    assert len(runs.frame) == 4 and set(runs.frame["status"]) == {"pass"} and runs.faults == []
    assert len(runs.doubts) == 1 and runs.doubts[0].startswith(
        f"eager r0 of {once.name} failed at first: exit status 3"
    )
    assert go(tmp_path / "twice", "graph", "--rounds", "1", flags=["--fail-times", "2"]) == 1
    found = read(only(tmp_path / "twice"))
    assert found["eager.r0"]["status"] == found["eager.r0.t1"]["status"] == "failed"
    assert "exit status 3" in found["eager.r0"]["message"]
    assert "no parity" in found["graph.r0"]["message"]


def test_a_table_that_cannot_be_is_a_line_and_the_session_is_packed(out, quick, monkeypatch, capsys):
    def mixed(folder):
        raise compare.Mixed("two models in one folder")

    monkeypatch.setattr(compare, "write_summary", mixed)
    assert go(out, "graph", "--rounds", "1") == 0
    assert not sessions.is_open(only(out))
    assert "no table of " in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------
# Mistakes


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--model", "gtp3"], ["unknown model 'gtp3'", "gpt3"]),
        (["--model", "../x"], ["unknown model"]),
        (["--model=--"], ["--model", "'--'"]),
        (["--preset", "huge"], ["unknown preset 'huge'", "tiny, bench"]),
        (["--preset", "bench"], ["needs an NVIDIA GPU", "PRESET=tiny"]),
        (["--variants", "eager,grpah"], ["unknown variant 'grpah'", "eager, graph, compile"]),
        (["--variants", ","], ["eager, graph"]),
        (["--variants=--"], ["--variants", "'--'"]),
        (["--rounds", "few"], ["'few' is not a number of rounds", "auto"]),
        (["--rounds", "0"], ["'0' is not"]),
        (["--rounds=--"], ["--rounds", "'--'"]),
        (["--first-round", "3"], ["--first-round"]),
        (["--steps", "-1"], ["--steps"]),
        (["--parity-steps", "-1"], ["--parity-steps"]),
        (["--ngpu", "0"], ["--ngpu"]),
        (["--minutes", "nan"], ["--minutes"]),
        (["--limit-s", "0"], ["--limit-s"]),
        (["--host-load", "x"], ["--host-load"]),
        (["--label", "a/b"], ["--label", "'a/b' is not a word"]),
        (["--label="], ["--label"]),
        (["--session", "x"], ["--session is for --close"]),
        (["--nonsense"], ["--nonsense"]),
        (["--", "--seconds", "soon"], ["--seconds", "'soon'"]),
        (["--", "--seconds=--"], ["--seconds", "'--'"]),
        (["--", "--variant", "graph"], ["--variant", "leave it out"]),
    ],
)
def test_a_mistake_is_one_line_and_exit_2(out, quick, capsys, monkeypatch, arguments, named):
    monkeypatch.setattr(run, "models", lambda: ["gpt3", "rnnt"])
    with_model = arguments if any("--model" in word for word in arguments) else ["--model", MODEL, *arguments]
    assert main(["--out", out, "--limit-s", "1", *with_model]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and all(word in error for word in named), error
    assert not out.exists()


@pytest.mark.parametrize("where", ["results", "results/h200x1", "results/../results/x", "runs/../results"])
def test_results_are_no_output_root(quick, capsys, where):
    assert go(ROOT / where) == 2
    error = capsys.readouterr().err
    assert "results/ grows by make publish SESSION=... alone" in error and error.count("\n") == 1


def test_more_gpus_than_there_are_is_a_mistake(out, gpu, quick, capsys):
    assert go(out, "graph", "--preset", "tiny", "--ngpu", "2") == 2
    assert "--ngpu 2: this machine shows 1" in capsys.readouterr().err


def session_of(*arguments):
    return Request(run.parse(["--model", MODEL, *arguments]))


def test_defaults_without_a_gpu(quick):
    chosen = session_of()
    assert (chosen.preset, chosen.rounds, chosen.limit_s) == ("tiny", 2, 300)
    assert chosen.group == ROOT / "runs" / "cpux1" / f"{MODEL}-tiny"
    assert set(chosen.variants) == set(script.describe(MODEL, [])["variants"]) and chosen.variants[0] == "eager"


def test_defaults_with_a_gpu(gpu, quick):
    chosen = session_of("--host-load", "16", "--variants", "graph,eager")
    assert (chosen.preset, chosen.rounds, chosen.limit_s) == ("bench", 5, 1800)
    assert chosen.group == ROOT / "runs" / "h200x1" / f"{MODEL}-bench-load16"
    assert chosen.variants == ["eager", "graph"]
    assert session_of("--label", "a.b", "--control", "--", "--batch", "2").group.name == f"{MODEL}-bench-a.b"


def test_models_are_folders_with_a_train_script(tmp_path, monkeypatch):
    monkeypatch.setattr(script, "ROOT", tmp_path)
    for folder in ("gpt3", "rnnt", "common", ".hidden"):
        (tmp_path / folder).mkdir()
    for folder in ("gpt3", "rnnt", ".hidden"):
        (tmp_path / folder / "train.py").write_text("")
    assert script.models() == ["gpt3", "rnnt"]


@pytest.mark.parametrize("module", ["run", "compare"])
def test_help_needs_no_torch(module):
    code = f"import sys\nimport benchmarks.{module} as m\ntry:\n    m.main(['--help'])\nexcept SystemExit as s:\n"
    code += "    assert s.code == 0\nassert 'torch' not in sys.modules"
    answer = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    assert "usage: python -m benchmarks" in answer.stdout


def test_pandas_is_imported_neither_to_describe_nor_to_measure(out):
    out.mkdir()
    words = ["-X", "importtime", "-m", f"{MODEL}.train"]
    for more in (["--describe"], ["--record", str(out / "x.json"), "--round", "1"]):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        answer = subprocess.run([sys.executable, *words, *more], cwd=ROOT, capture_output=True, text=True)
        assert answer.returncode == 0, answer.stderr[-300:]
        assert "common.config" in answer.stderr and "pandas" not in answer.stderr
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        # Of the processor, so that neighbours do not count.
        assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 5.0


def test_the_describe_of_the_fake_is_what_config_says():
    description = script.describe(MODEL, [])
    assert description["model"] == MODEL and json.dumps(description)
    assert list(description["presets"]) == ["tiny", "bench"]
    assert script.needs_gpu(description, "bench") and not script.needs_gpu(description, "tiny")


def test_a_folder_that_cannot_be_is_one_line(tmp_path, quick, capsys):
    (tmp_path / "file").write_text("")
    assert go(tmp_path / "file" / "sub", "graph") == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_sessions_lie_side_by_side_and_are_read_as_one_table(out, quick):
    assert go(out) == 0
    first = only(out)
    # A complete session is never gone on with.
    assert go(out) == 0
    assert len(sessions.find(out)) == 2 and newest(out) != first
    assert len(frame.read(out).frame) == 12 - 2 * 2, "equal steps are one run: the fake repeats itself"
    shutil.rmtree(first)
    assert len(frame.read(out).frame) == 6
