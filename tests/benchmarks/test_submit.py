"""benchmarks.submit with a recording sbatch: what is asked of Slurm, what is refused, and that nothing stays half done.

pytest tests/benchmarks/test_submit.py
"""

import functools
import os
import shlex
import signal
import subprocess
import sys

import pytest

from benchmarks import submit
from benchmarks.slurm import jobs
from graph_worth.folders import ROOT
from graph_worth.harness import script
from tests.helpers.slurm_shims import shims

MODEL = "tests.lying_model"
SBATCH = "benchmarks/slurm/bench.sbatch"
_describe = script.describe


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Fakes of Slurm's commands first on PATH; returns what they log. The environment has no settings for them."""
    for name in list(os.environ):
        if name.startswith(("SBATCH_", "SLURM_")):
            monkeypatch.delenv(name)
    return shims(tmp_path / "slurm", monkeypatch, "sbatch", "scancel", "scontrol")


@pytest.fixture(autouse=True)
def described(monkeypatch):
    """--describe without a process for what was asked before."""
    monkeypatch.setattr(script, "describe", lambda model, flags, preset=None: _described(model, tuple(flags), preset))
    monkeypatch.setattr(submit.command.signal, "signal", lambda *_: None)


@functools.cache
def _described(model, flags, preset):
    return _describe(model, list(flags), preset)


def go(*arguments, flags=()):
    try:
        words = [str(word) for word in arguments]
        argv = words if any(word.startswith("--model") for word in words) else ["--model", MODEL, *words]
        return submit.main([*argv, *(["--", *flags] if flags else [])])
    except SystemExit as stop:
        return stop.code


def submitted(slurm):
    """The words and settings of the two jobs that were submitted last."""
    return slurm.calls("sbatch")[-2:]


# ------------------------------------------------------------------------------------------------
# What is submitted


@pytest.mark.slow
def test_one_model_is_one_job_and_one_for_the_tables(slurm, tmp_path, capsys):
    out = tmp_path / "50%j"
    more = ["--partition", "gpu", "--account", "me", "--time", "2:00:00", "--cycles", "auto", "--minutes", "60"]
    more += ["--sbatch", "qos=high 'comment=two words'"]
    assert go("--nodes", 2, "--ngpu", 8, "--variants", "graph_step", "--out", out, *more, flags=["--width", "16"]) == 0
    assert ["--test-only" in call for call, _ in slurm.calls("sbatch")] == [True, True, False, False]
    (bench, settings), (tables, _) = submitted(slurm)
    split = bench.index(SBATCH)
    where = {"--partition=gpu", "--account=me", "--qos=high"}
    wanted = {"--nodes=2", "--gpus-per-node=8", "--time=2:00:00", "--comment=two words", "--hold", *where}
    # A percent sign in the folder is not Slurm's.
    wanted.add(f"--output={tmp_path}/50%%j/logs/slurm-%j.out")
    assert wanted <= set(bench[1:split]) and not any("--array" in option for option in bench)
    assert bench[split + 1 :] == [
        *["benchmarks.run", MODEL, "--", "--model", "{}", "--preset", "bench", "--out", str(out)],
        *["--variants", "graph_step", "--cycles", "auto", "--minutes", "60", "--", "--width", "16"],
    ]
    assert settings["RUNS"] == str(out) and settings["NGPU"] == "8" and "IMAGE" not in settings
    assert {"--dependency=afterany:42", "--kill-on-invalid-dep=yes", *where} <= set(tables)
    assert "--comment=two words" not in tables and "--hold" not in tables
    assert tables[-3:] == ["benchmarks/slurm/collate.sbatch", "42", str(out)]
    assert slurm.calls()[-1][0] == ["scontrol", "release", "42"] and (out / "logs").is_dir()
    text = capsys.readouterr().out
    assert "job 42 " in text and f"job 43  tables in {out}/logs/collate-43.out" in text and text.isascii()
    assert f"--output={tmp_path}/50%%j/logs/collate-%j.out" in tables
    # What is printed is what was run.
    printed = shlex.split(text.replace("\\\n", " ").partition("runs  ")[2])
    assert printed[printed.index("sbatch") + 1 : printed.index("sbatch") + len(bench)] == bench[1:]


@pytest.mark.slow
def test_several_models_are_an_array_with_a_folder_each(slurm, tmp_path):
    assert go("--model", f"gpt3,{MODEL}", "--preset", "tiny", "--out", tmp_path / "out", "--host-load", 4) == 0
    (bench, settings), (tables, _) = submitted(slurm)
    assert "--array=0-1" in bench and f"--output={tmp_path}/out/logs/slurm-%A_%a.out" in bench
    assert settings["RUNS"] == f"{tmp_path}/out/{{}}-tiny-load4"
    assert bench[bench.index("--out") + 1] == settings["RUNS"]
    assert not any("gpus" in word for word in bench), "the preset tiny runs on the CPU"
    assert tables[-2:] == [f"{tmp_path}/out/{model}-tiny-load4" for model in ("gpt3", MODEL)]


@pytest.mark.slow
def test_a_sweep_is_one_job(slurm, tmp_path):
    more = ["--values", "4,1,2", "--cycles", "3", "--out", tmp_path / "out"]
    assert go("--model", "gpt3", "--over", "batch", "--variant", "graph_layer_te", *more) == 0
    (bench, settings), _ = submitted(slurm)
    program = bench[bench.index(SBATCH) + 1 :]
    assert program[:5] == ["benchmarks.sweep", "gpt3", "--", "--model", "{}"]
    wanted = ["--over", "batch", "--values", "1,2,4", "--variant", "graph_layer_te", "--cycles", "3"]
    assert program[5:] == ["--preset", "bench", "--out", f"{tmp_path}/out", *wanted]
    assert not any("--array" in word for word in bench) and settings["RUNS"] == f"{tmp_path}/out"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "preset", "asked", "nodes", "ngpu"),
    [
        ("gpt3", "mlperf", [], 1452, 8),
        ("gpt3", "mlperf", ["--ngpu", 4], 2904, 4),
        ("gpt3", "mlperf", ["--nodes", 3], 3, 8),
        ("llama2_lora", "mlperf", [], 1, 8),
        ("gpt3", "bench", ["--nodes", 2], 2, 1),
        ("gpt3,rnnt", "bench", ["--ngpu", 8], 1, 8),
        ("gpt3,llama31", "mlperf", ["--nodes", 24, "--ngpu", 8], 24, 8),
    ],
)
def test_nodes_and_gpus_that_are_not_given_are_the_submissions(slurm, capsys, model, preset, asked, nodes, ngpu):
    assert go("--model", model, "--preset", preset, *asked, "--dry-run") == 0
    text = capsys.readouterr().out
    assert f"--nodes={nodes} " in text and f"--gpus-per-node={ngpu} " in text and f"NGPU={ngpu} " in text
    assert f"nodes    {nodes} x {ngpu} GPUs" in text and f"runs/slurm/{nodes}x{ngpu}/" in text


@pytest.mark.parametrize(
    ("model", "preset", "asked", "flags", "said"),
    [
        ("gpt3", "mlperf", ["--nodes", 2], (), "a multiple of 24 ranks, --nodes 2 x --ngpu 8 (NODES, NGPU) make 16"),
        ("gpt3", "mlperf", ["--ngpu", 7], (), "--ngpu 7: the submission's 11616 GPUs are no multiple"),
        ("gpt3", "bench", ["--ngpu", 3], ("--tp", "2"), "a multiple of 2 ranks"),
        ("gpt3,llama31", "mlperf", [], (), "models of mlperf differ: gpt3 1452 x 8, llama31 64 x 8"),
        ("rnnt", "mlperf", ["--host-load", 8], (), "--host-load with --nodes 64"),
    ],
)
def test_a_number_of_ranks_on_which_a_preset_does_not_run_is_refused(slurm, capsys, model, preset, asked, flags, said):
    assert go("--model", model, "--preset", preset, *asked, flags=flags) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1 and slurm.calls() == []


@pytest.mark.slow
def test_an_image_reaches_the_job_and_a_stray_one_does_not(slurm, tmp_path, monkeypatch):
    monkeypatch.setenv("SBATCH_WAIT", "1")
    assert go("--image", "nvcr.io#nvidia/pytorch:25.09-py3", "--mounts", "/data:/data", "--out", tmp_path / "a") == 0
    settings = submitted(slurm)[0][1]
    assert settings["IMAGE"] == "nvcr.io#nvidia/pytorch:25.09-py3" and "SBATCH_WAIT" not in settings
    assert settings["MOUNTS"] == f"{tmp_path}/a:{tmp_path}/a,/data:/data"
    monkeypatch.setenv("IMAGE", "left over")
    assert go("--out", tmp_path / "b") == 0
    assert "IMAGE" not in submitted(slurm)[0][1]


@pytest.mark.slow
@pytest.mark.parametrize(("own", "is_gpu"), [("gres=gpu:h200:2", True), ("gpus=2", True), ("gres=nvme:1", False)])
def test_gpus_are_asked_for_once(slurm, tmp_path, own, is_gpu):
    assert go("--ngpu", 2, "--sbatch", own, "--out", tmp_path) == 0
    words = submitted(slurm)[0][0]
    assert f"--{own}" in words and ("--gpus-per-node=2" in words) != is_gpu


def test_a_dry_run_asks_and_leaves_nothing(slurm, tmp_path, capsys):
    assert go("--out", tmp_path / "out", "--dry-run") == 0
    calls = [call for call, _ in slurm.calls()]
    assert ["--test-only" in call for call in calls] == [True, True] and not (tmp_path / "out").exists()
    assert "collate.sbatch" in " ".join(calls[1]) and "afterany" not in " ".join(calls[1])
    text = capsys.readouterr().out
    assert "nothing submitted" in text and "sbatch --parsable" in text and "collate.sbatch JOB" in text


def test_without_slurm(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    for more, status in (([], 1), (["--dry-run"], 0)):
        assert go("--out", tmp_path / "out", *more) == status
        text = capsys.readouterr().out
        assert "no sbatch on PATH, so that Slurm has not checked this" in text and "collate.sbatch JOB" in text
    assert not (tmp_path / "out").exists()


# ------------------------------------------------------------------------------------------------
# What is refused


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--model", "examples/gpt4"], "unknown model 'examples/gpt4'"),
        (["--model", ","], "--model takes some of"),
        (["--preset", "huge"], "--preset"),
        (["--variants", "graph_step,fast"], "unknown variant 'fast'"),
        (["--nodes", "0"], "--nodes"),
        (["--cycles", "none"], "--cycles"),
        (["--rounds", "3"], "--rounds"),
        (["--over", "batch"], "--values"),
        (["--over", "moon", "--values", "1"], "unknown quantity 'moon'"),
        (["--variant", "graph_step"], "--over is missing"),
        (["--over", "batch", "--values", "1", "--model", f"gpt3,{MODEL}"], "one --model"),
        (["--over", "batch", "--values", "1", "--host-load", "4"], "measured without other work"),
        (["--over", "size", "--values", "3"], "3 makes --batch no whole number"),
        (["--mounts", "/a:/b"], "--image is missing"),
        (["--sbatch", "comment='open"], "--sbatch"),
        (["--sbatch", "qos=high wait"], "wait is set by this command"),
        (["--sbatch", "nodes=2"], "nodes is set by this command"),
        (["--out", "a{}b"], "--out"),
        (["--model", "x" * 300], "File name too long"),
        (["--partition", "a\udcff"], "'a\\udcff': has a character"),
    ],
)
def test_mistakes_name_the_flag_and_submit_nothing(slurm, arguments, expected, capsys):
    assert go(*arguments) == 2
    said = capsys.readouterr()
    assert expected in said.err and said.err.count("\n") == 1
    assert slurm.calls("sbatch") == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limit", "more", "early_s"),
    [
        ("1:00", "", 120),
        ("2", "", 120),
        ("0:02:00", "", 120),
        ("0-0:2:10", "", 120),
        ("0-0:2", "", 120),
        ("5:00", "signal=B:USR1@300", 300),
        ("2:00:00", "", None),
        ("3", "", None),
        ("1", "signal=B:USR1@20", None),
        ("1-0", "", None),
        # No limit.
        ("0", "", None),
        ("UNLIMITED", "", None),
    ],
)
@pytest.mark.parametrize("is_inherited", [False, True])
def test_a_limit_that_leaves_no_time_to_work_is_refused(
    slurm, tmp_path, monkeypatch, capsys, limit, more, early_s, is_inherited
):
    if is_inherited:
        monkeypatch.setenv("SBATCH_TIMELIMIT", limit)
    asked = [
        "--out",
        tmp_path / "out",
        *(["--sbatch", more] if more else []),
        *([] if is_inherited else ["--time", limit]),
    ]
    assert go(*asked) == (2 if early_s else 0)
    said, flag = capsys.readouterr().err, "SBATCH_TIMELIMIT=" if is_inherited else "--time "
    wanted = f"{flag}{limit}: jobs stop {early_s} s before their limit, so this leaves no time to work"
    assert (wanted in said and said.count("\n") == 1) if early_s else not said
    assert bool(slurm.calls("sbatch")) == (early_s is None)


@pytest.mark.parametrize("out", ["/dev/null/x", "x" * 300])
def test_a_folder_that_cannot_be_is_a_mistake_before_a_job_is_there(slurm, capsys, out):
    assert go("--out", out) == 2 and capsys.readouterr().err.count("\n") == 1
    assert all("--test-only" in call for call, _ in slurm.calls("sbatch"))


@pytest.mark.parametrize(
    ("name", "word", "cancelled"),
    [
        ("sbatch", "--test-only", []),
        ("sbatch", "--parsable --hold --chdir", []),
        ("sbatch", "--dependency", ["42"]),
        # The end of the first would start the second.
        ("scontrol", "release", ["43", "42"]),
    ],
)
def test_where_slurm_refuses_nothing_stays(slurm, tmp_path, capsys, name, word, cancelled):
    slurm.refuse(name, word)
    assert go("--out", tmp_path / "out") == 1
    assert f"{name}: error: this is refused" in capsys.readouterr().err
    assert [call[1] for call, _ in slurm.calls("scancel")] == cancelled


def test_a_job_that_cannot_be_cancelled_is_named(slurm, tmp_path, capsys):
    slurm.refuse("sbatch", "--dependency")
    slurm.refuse("scancel", "42")
    assert go("--out", tmp_path / "out") == 1
    assert "this is refused; still in the queue: scancel 42" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("number", "name", "word", "cancelled"),
    [
        (signal.SIGTERM, "sbatch", "--parsable --hold --chdir", ["42"]),
        (signal.SIGINT, "sbatch", "--dependency", ["43", "42"]),
    ],
)
def test_a_signal_leaves_nothing_in_the_queue(slurm, tmp_path, number, name, word, cancelled):
    slurm.do(name, word, f"kill -{number.value} $PPID; sleep 0.2")
    command = [sys.executable, "-m", "benchmarks.submit", "--model", MODEL, "--out", tmp_path / "out"]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert answer.returncode == 130 and answer.stderr == "\nstopped, nothing submitted\n"
    assert [call[1] for call, _ in slurm.calls("scancel")] == cancelled


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "said"),
    [("exec sleep 20", "sbatch gives no answer in 5 s; see squeue --me"), ("echo welcome; exit 0", "see squeue --me")],
)
def test_without_an_answer_the_user_is_told_how_to_look(slurm, tmp_path, monkeypatch, script, said, capsys):
    monkeypatch.setattr(jobs, "SLURM_LIMIT_S", 5)
    slurm.do("sbatch", "--parsable --hold --chdir", script)
    assert go("--out", tmp_path) == 1
    assert said in capsys.readouterr().err


def test_help_needs_no_torch():
    code = "import sys; from benchmarks import submit, sweep; from benchmarks.slurm import collate"
    answer = subprocess.run(
        [sys.executable, "-c", f"{code}; print('torch' in sys.modules)"], cwd=ROOT, capture_output=True
    )
    assert answer.stdout == b"False\n"
