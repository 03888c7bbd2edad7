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

from benchmarks import ROOT, script, submit
from benchmarks.slurm import queue
from tests.helpers.slurm_shims import shims

MODEL = "tests.lying_model"
_describe = script.describe


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Fakes of Slurm's commands first on PATH; returns what they log. The environment has no settings for them."""
    for name in list(os.environ):
        if name.startswith(("SBATCH_", "SLURM_", "MASTER_", "NODE_PYTHON", "MAX_REQUEUES")):
            monkeypatch.delenv(name)
    return shims(tmp_path / "slurm", monkeypatch, "sbatch", "squeue", "scancel", "scontrol")


@pytest.fixture(autouse=True)
def described(monkeypatch):
    """--describe without a process for what was asked before."""
    monkeypatch.setattr(script, "describe", describe_once)


@functools.cache
def _described(model, flags, preset):
    return _describe(model, list(flags), preset)


def describe_once(model, flags, preset=None):
    return _described(model, tuple(flags), preset)


def go(*arguments, flags=()):
    try:
        words = [str(word) for word in arguments]
        argv = words if any(word.startswith("--model") for word in words) else ["--model", MODEL, *words]
        return submit.main([*argv, *(["--", *flags] if flags else [])])
    except SystemExit as stop:
        return stop.code


# ------------------------------------------------------------------------------------------------
# What is submitted


def test_one_model_is_one_job_and_one_for_the_tables(slurm, tmp_path, capsys):
    out = tmp_path / "out"
    more = ["--partition", "gpu", "--account", "me", "--time", "2:00:00", "--cycles", "auto", "--minutes", "60"]
    more += ["--sbatch", "qos=high 'comment=two words'"]
    assert go("--nodes", 2, "--ngpu", 8, "--variants", "graph_step", "--out", out, *more, flags=["--width", "16"]) == 0
    (test, _), _, (bench, settings), (tables, _) = slurm.calls("sbatch")
    assert "--test-only" in test
    split = bench.index("benchmarks/slurm/bench.sbatch")
    options = bench[1:split]
    for option in (
        "--nodes=2",
        "--gpus-per-node=8",
        "--partition=gpu",
        "--account=me",
        "--time=2:00:00",
        "--qos=high",
        "--comment=two words",
    ):
        assert option in options
    assert f"--output={out}/logs/slurm-%j.out" in options and not any("--array" in option for option in options)
    assert bench[split + 1 :] == [
        *["benchmarks.run", MODEL, "--", "--model", "{}", "--preset", "bench", "--out", str(out)],
        *["--variants", "graph_step", "--cycles", "auto", "--minutes", "60", "--", "--width", "16"],
    ]
    assert settings["RUNS"] == str(out) and settings["NGPU"] == "8" and "IMAGE" not in settings
    assert "--dependency=afterany:42" in tables and "--kill-on-invalid-dep=yes" in tables
    assert tables[-3:] == ["benchmarks/slurm/collate.sbatch", "42", str(out)]
    assert (out / "logs").is_dir()
    text = capsys.readouterr().out
    assert "job 42 " in text and "job 43 " in text and str(out) in text and text.isascii()
    # What is printed is what was run.
    printed = shlex.split(text.replace("\\\n", " ").partition("runs  ")[2])
    assert printed[printed.index("sbatch") + 1 : printed.index("sbatch") + len(bench)] == bench[1:]


def test_several_models_are_an_array_with_a_folder_each(slurm, tmp_path):
    assert go("--model", f"gpt3,{MODEL}", "--preset", "tiny", "--out", tmp_path / "out", "--host-load", 4) == 0
    bench, settings = slurm.calls("sbatch")[2]
    assert "--array=0-1" in bench and f"--output={tmp_path}/out/logs/slurm-%A_%a.out" in bench
    assert settings["RUNS"] == f"{tmp_path}/out/{{}}-tiny-load4"
    assert bench[bench.index("--out") + 1] == settings["RUNS"]
    assert not any("gpus" in word for word in bench)
    folders = slurm.calls("sbatch")[3][0][-2:]
    assert folders == [f"{tmp_path}/out/{model}-tiny-load4" for model in ("gpt3", MODEL)]


@pytest.mark.parametrize(
    ("model", "preset", "gpus"),
    [
        ("stable_diffusion", "bench_b1", True),
        ("rnnt", "bench_b32", True),
        ("rnnt", "bench_lengths", True),
        ("rnnt", "tiny", False),
    ],
)
def test_a_preset_gets_gpus_where_its_script_says_so(slurm, capsys, model, preset, gpus):
    assert go("--model", model, "--preset", preset, "--ngpu", 2, "--dry-run") == 0
    text = capsys.readouterr().out
    assert ("--gpus-per-node=2" in text) == gpus and ("2 GPUs" in text) == gpus
    assert ("ranks, on the CPU" in text) != gpus


def test_points_of_a_sweep_are_an_array(slurm, tmp_path):
    more = ["--values", "1,2,4", "--cycles", "3", "--out", tmp_path / "out"]
    assert go("--model", "gpt3", "--over", "batch", "--variant", "graph_layer_te", *more) == 0
    bench, settings = slurm.calls("sbatch")[2]
    program = bench[bench.index("benchmarks/slurm/bench.sbatch") + 1 :]
    assert program[:5] == ["benchmarks.sweep", "1", "2", "4", "--"]
    assert program[5:11] == ["--model", "gpt3", "--over", "batch", "--values", "{}"]
    assert program[11:13] == ["--variant", "graph_layer_te"]
    assert "--array=0-2" in bench and settings["RUNS"] == f"{tmp_path}/out/batch-{{}}"
    assert bench[bench.index("--out") + 1] == f"{tmp_path}/out"


def test_the_default_folder_names_nodes_and_gpus(slurm, capsys):
    assert go("--nodes", 2, "--ngpu", 4, "--dry-run") == 0
    assert f"runs/slurm/2x4/{MODEL}-bench" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("model", "preset", "asked", "nodes", "ngpu"),
    [
        ("gpt3", "mlperf", [], 1452, 8),
        ("gpt3", "mlperf", ["--ngpu", 4], 2904, 4),
        ("gpt3", "mlperf", ["--nodes", 3], 3, 8),
        ("gpt3", "mlperf", ["--nodes", 6, "--ngpu", 4], 6, 4),
        ("llama31", "mlperf", [], 64, 8),
        ("llama2_lora", "mlperf", [], 1, 8),
        ("llama2_lora", "mlperf_cp8", [], 128, 4),
        ("rnnt", "mlperf", [], 64, 8),
        ("stable_diffusion", "mlperf", [], 8, 8),
        ("gpt3", "bench", [], 1, 1),
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
    assert ("as submitted" in text) == (preset != "bench" and not asked)


@pytest.mark.parametrize(
    ("model", "preset", "asked", "flags", "said"),
    [
        ("gpt3", "mlperf", ["--nodes", 2], (), "a multiple of 24 ranks, --nodes 2 x --ngpu 8 (NODES, NGPU) make 16"),
        ("gpt3", "mlperf", ["--ngpu", 7], (), "--ngpu 7: the submission's 11616 GPUs are no multiple"),
        ("gpt3", "mlperf", ["--ngpu", 20_000], (), "--ngpu 20000: the submission's 11616 GPUs are no multiple"),
        ("gpt3", "rank", ["--ngpu", 2], (), "gpt3/rank runs on 1 rank, --nodes 1 x --ngpu 2"),
        ("gpt3", "bench", ["--ngpu", 3], ("--tp", "2"), "a multiple of 2 ranks"),
        ("gpt3", "mlperf", [], ("--pp", "5", "--layers", "80", "--microbatches", "5"), "a multiple of 20 ranks"),
        ("llama31", "mlperf", ["--nodes", 3], (), "a multiple of 64 ranks"),
        ("llama2_lora", "mlperf_cp8", ["--nodes", 1], (), "a multiple of 8 ranks"),
        ("gpt3,llama31", "mlperf", [], (), "models of mlperf differ: gpt3 1452 x 8, llama31 64 x 8"),
        ("rnnt", "mlperf", ["--host-load", 8], (), "--host-load with --nodes 64"),
    ],
)
def test_a_number_of_ranks_on_which_a_preset_does_not_run_is_refused(slurm, capsys, model, preset, asked, flags, said):
    assert go("--model", model, "--preset", preset, *asked, flags=flags) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1 and slurm.calls() == []


def test_an_image_reaches_the_job_and_a_stray_one_does_not(slurm, tmp_path, monkeypatch):
    assert go("--image", "nvcr.io#nvidia/pytorch:25.09-py3", "--mounts", "/data:/data", "--out", tmp_path / "a") == 0
    settings = slurm.calls("sbatch")[2][1]
    assert settings["IMAGE"] == "nvcr.io#nvidia/pytorch:25.09-py3"
    assert settings["MOUNTS"] == f"{tmp_path}/a:{tmp_path}/a,/data:/data"
    monkeypatch.setenv("IMAGE", "left over")
    assert go("--out", tmp_path / "b") == 0
    assert "IMAGE" not in slurm.calls("sbatch")[-2][1]


def test_points_that_are_given_twice_are_one(slurm, capsys):
    assert go("--over", "batch", "--values", "2,01,1", "--dry-run") == 0
    assert "over batch 1, 2" in capsys.readouterr().out


@pytest.mark.parametrize("own", ["gres=gpu:h200:2", "gpus=2", "gpus-per-node=h200:2", "gpus-per-task=2"])
def test_gpus_are_asked_for_once(slurm, tmp_path, own):
    assert go("--ngpu", 2, "--sbatch", own, "--out", tmp_path) == 0
    bench = slurm.calls("sbatch")[2][0]
    assert [word for word in bench if word.startswith("--g")] == [f"--{own}"]


def test_gres_that_is_no_gpu_leaves_the_gpus(slurm, tmp_path, monkeypatch):
    assert go("--ngpu", 2, "--sbatch", "gres=nvme:1", "--out", tmp_path) == 0
    assert {"--gpus-per-node=2", "--gres=nvme:1"} <= set(slurm.calls("sbatch")[2][0])
    monkeypatch.setenv("SBATCH_GRES", "gpu:2")
    assert go("--ngpu", 2, "--out", tmp_path) == 0
    assert "--gpus-per-node=2" not in slurm.calls("sbatch")[-2][0]


def test_where_jobs_may_run_holds_for_both(slurm, tmp_path):
    more = "partition=long qos=high reservation=r account=me nice=10"
    assert go("--partition", "gpu", "--sbatch", more, "--out", tmp_path) == 0
    tables = slurm.calls("sbatch")[3][0]
    assert {"--partition=long", "--qos=high", "--reservation=r", "--account=me"} <= set(tables)
    assert "--nice=10" not in tables and "--partition=gpu" not in tables


def test_the_card_names_what_comes_from_the_environment(slurm, tmp_path, monkeypatch, capsys):
    for name, value in {
        "SBATCH_QOS": "low",
        "SBATCH_PARTITION": "long",
        "SBATCH_OUTPUT": "not-used",
        "SBATCH_WAIT": "1",
        "MASTER_PORT": "1234",
        "NODE_PYTHON": "/opt/python",
        "MAX_REQUEUES": "3",
    }.items():
        monkeypatch.setenv(name, value)
    assert go("--nodes", 2, "--out", tmp_path) == 0
    environ = [line.split()[1] for line in capsys.readouterr().out.splitlines() if line.startswith("environ ")]
    assert sorted(environ) == [
        *["MASTER_PORT=1234", "MAX_REQUEUES=3", "NODE_PYTHON=/opt/python", "SBATCH_PARTITION=long", "SBATCH_QOS=low"]
    ]
    settings = slurm.calls("sbatch")[2][1]
    assert settings["SBATCH_QOS"] == "low" and "SBATCH_WAIT" not in settings
    assert go("--partition", "gpu", "--out", tmp_path, "--dry-run") == 0
    text = capsys.readouterr().out
    assert "partition gpu" in text and "SBATCH_PARTITION" not in text and "MASTER_PORT" not in text


def test_a_percent_sign_in_the_folder_is_not_slurms(slurm, tmp_path):
    assert go("--out", tmp_path / "50%j") == 0
    bench, settings = slurm.calls("sbatch")[2]
    assert f"--output={tmp_path}/50%%j/logs/slurm-%j.out" in bench and settings["RUNS"] == f"{tmp_path}/50%j"
    assert f"--output={tmp_path}/50%%j/logs/collate-%j.out" in slurm.calls("sbatch")[3][0]


def test_a_dry_run_asks_and_leaves_nothing(slurm, tmp_path, capsys):
    assert go("--out", tmp_path / "out", "--dry-run") == 0
    calls = [call for call, _ in slurm.calls()]
    assert ["--test-only" in call for call in calls] == [True, True] and not (tmp_path / "out").exists()
    assert "collate.sbatch" in " ".join(calls[1]) and "afterany" not in " ".join(calls[1])
    text = capsys.readouterr().out
    assert "nothing submitted" in text and "sbatch --parsable" in text and "collate.sbatch JOB" in text


def test_a_dry_run_shows_the_jobs_where_no_cluster_answers(slurm, tmp_path, capsys):
    slurm.refuse("sbatch", "--test-only")
    slurm.refuse("scontrol", "ping")
    assert go("--out", tmp_path / "out", "--dry-run") == 0
    text = capsys.readouterr().out
    assert "Slurm has not checked this, no cluster answers: sbatch: error: this is refused" in text
    assert "sbatch --parsable" in text and "collate.sbatch JOB" in text
    # Without --dry-run it is a failure, and nothing is asked that would submit.
    assert go("--out", tmp_path / "out") == 1
    assert all("--test-only" in call for call, _ in slurm.calls("sbatch")) and not (tmp_path / "out").exists()


# ------------------------------------------------------------------------------------------------
# What is refused


OWNED = ("array=0-3", "chdir=/", "dependency=singleton", "export=NONE", "hold", "ntasks=4", "output=x", "parsable")
OWNED += ("requeue", "test-only", "wait", "wrap=true", "clusters=other", "no-requeue")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--model", "gpt4"], "unknown model 'gpt4'"),
        (["--model", ","], "--model takes some of"),
        (["--preset", "huge"], "--preset takes one of tiny, bench"),
        (["--variants", "graph_step,fast"], "unknown variant 'fast'"),
        (["--nodes", "0"], "--nodes"),
        (["--nodes", "two"], "--nodes"),
        (["--ngpu", "-1"], "--ngpu"),
        (["--cycles", "none"], "--cycles"),
        (["--rounds", "3"], "--rounds"),
        (["--steps", "3"], "--steps"),
        (["--minutes", "-3"], "--minutes"),
        (["--over", "batch"], "--values"),
        (["--over", "moon", "--values", "1"], "unknown quantity 'moon'"),
        (["--variant", "graph_step"], "--over is missing"),
        (["--over", "batch", "--values", "1,x"], "'1,x' is not a list of whole numbers"),
        (["--over", "batch", "--values", ","], "--values"),
        (["--over", "batch", "--values", "1", "--model", f"gpt3,{MODEL}"], "one --model"),
        (["--nodes", "2", "--host-load", "8"], "--host-load"),
        (["--mounts", "/a:/b"], "--image is missing"),
        (["--sbatch", "comment='open"], "--sbatch"),
        *[(["--sbatch", word], f"not {word.split('=')[0].lstrip('-')}, this command") for word in OWNED],
        (["--sbatch", "qos=high wai"], "not wait, this command sets it"),
        (["--sbatch", "nodes=2"], "not nodes, --nodes of this command does it"),
        (["--sbatch", "time=60"], "not time, --time of this command does it"),
        (["--over", "batch", "--values", "\u00b2"], "--values"),
        (["--over", "batch", "--values", f"1,{2**60}"], "--batch"),
        (["--over", "size", "--values", "3"], "3 makes --batch no whole number"),
        (["--over", "batch", "--values", "1", "--variant", "eager"], "--variant eager"),
        (["--out", "/dev/null/x"], "/dev/null is no folder"),
        (["--out", "a{}b"], "--out"),
        (["--model=--"], "--model"),
        (["--out=--"], "--out"),
        (["--time=--"], "--time"),
        (["--cycles=--"], "--cycles"),
        (["--out", "x" * 300], "File name too long"),
        (["--model", "x" * 300], "File name too long"),
        (["--partition", "a\nb"], "cannot be printed"),
        (["--partition", "a\udcff"], "'a\\udcff': has a character"),
        (["--account", "\x1b[1m"], "cannot be printed"),
    ],
)
def test_mistakes_name_the_flag_and_submit_nothing(slurm, arguments, expected, capsys):
    assert go(*arguments) == 2
    said = capsys.readouterr()
    assert expected in said.err and said.err.count("\n") == 1
    assert go(*arguments, "--dry-run") == 2
    assert slurm.calls("sbatch") == []


def test_a_flag_that_a_sweep_sets_is_a_mistake(slurm, capsys):
    assert go("--over", "batch", "--values", "1", flags=["--batch", "2"]) == 2
    assert "--batch after -- is what --over batch sets" in capsys.readouterr().err and slurm.calls("sbatch") == []


@pytest.mark.parametrize(("limit", "status"), [("3:59", 2), ("4:00", 0), ("1-00:00:00", 0), ("UNLIMITED", 0), ("", 0)])
def test_a_limit_that_leaves_no_time_to_measure_takes_both_jobs_back(slurm, tmp_path, limit, status, capsys):
    """The limit is what Slurm made of --time, SBATCH_TIMELIMIT or the partition's default."""
    (slurm.folder / "limit").write_text(limit)
    assert go("--out", tmp_path) == status
    cancelled = [call for call, _ in slurm.calls("scancel")]
    assert cancelled == ([["scancel", "43"], ["scancel", "42"]] if status else [])
    said = capsys.readouterr().err
    assert ("a job stops 120 s before its limit of 3:59, ask for 4 minutes" in said) == bool(status)
    # A job that is told later to stop needs less, and one that is told earlier more.
    assert go("--out", tmp_path, "--sbatch", "signal=B:USR1@30") == 0
    assert go("--out", tmp_path, "--sbatch", "signal=B:USR1@300") == (2 if limit in ("3:59", "4:00") else 0)


def test_other_clusters_are_refused(slurm, monkeypatch, capsys):
    monkeypatch.setenv("SBATCH_CLUSTERS", "other")
    assert go() == 2 and "SLURM_CLUSTERS" in capsys.readouterr().err
    assert slurm.calls("sbatch") == []


def test_a_flag_that_the_script_does_not_have_is_a_mistake(slurm, capsys):
    assert go(flags=["--nonsense", "1"]) == 2
    assert "--nonsense" in capsys.readouterr().err and slurm.calls("sbatch") == []


@pytest.mark.parametrize("word", ["--test-only", "--parsable --hold --chdir"])
def test_a_refused_job_is_slurms_message_and_exit_status_1(slurm, tmp_path, word, capsys):
    slurm.refuse("sbatch", word)
    assert go("--out", tmp_path / "out") == 1
    assert "nothing submitted: sbatch: error: this is refused" in capsys.readouterr().err
    assert not any("afterany" in " ".join(call) for call, _ in slurm.calls("sbatch"))
    assert go("--out", tmp_path / "out", "--dry-run") == (word == "--test-only")


def test_a_refused_second_job_takes_the_first_back(slurm, tmp_path, capsys):
    slurm.refuse("sbatch", "--dependency")
    assert go("--out", tmp_path / "out") == 1
    assert [call for call, _ in slurm.calls("scancel")] == [["scancel", "42"]]
    assert "this is refused" in capsys.readouterr().err
    # And where that fails too, the job that is left is named.
    slurm.refuse("scancel", "42")
    assert go("--out", tmp_path / "out") == 1
    error = capsys.readouterr().err
    assert "job 42 could not be cancelled: scancel: error" in error and "nothing submitted" not in error


def test_the_first_job_is_held_until_the_second_is_there(slurm, tmp_path):
    assert go("--out", tmp_path) == 0
    calls = [call for call, _ in slurm.calls() if call[0] != "squeue"]
    assert ["--hold" in call for call in calls if "--test-only" not in call] == [True, False, False]
    assert calls[-1] == ["scontrol", "release", "42"]


def test_a_job_that_cannot_be_released_takes_both_back(slurm, tmp_path, capsys):
    slurm.refuse("scontrol", "release")
    assert go("--out", tmp_path) == 1
    # The end of the first would start the second.
    assert [call for call, _ in slurm.calls("scancel")] == [["scancel", "43"], ["scancel", "42"]]
    assert "nothing submitted: scontrol: error: this is refused" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("number", "name", "word", "cancelled"),
    [
        (signal.SIGTERM, "sbatch", "--test-only", []),
        (signal.SIGTERM, "sbatch", "--parsable --hold --chdir", ["42"]),
        (signal.SIGHUP, "sbatch", "--dependency", ["43", "42"]),
        (signal.SIGINT, "sbatch", "--dependency", ["43", "42"]),
        (signal.SIGTERM, "scontrol", "release", ["43", "42"]),
    ],
)
def test_a_signal_leaves_nothing_in_the_queue(slurm, tmp_path, number, name, word, cancelled):
    slurm.do(name, word, f"kill -{number.value} $PPID; sleep 0.2")
    command = [sys.executable, "-m", "benchmarks.submit", "--model", MODEL, "--out", tmp_path / "out"]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert answer.returncode == 130
    assert answer.stderr == "python -m benchmarks.submit: stopped, nothing submitted\n"
    assert [call[1] for call, _ in slurm.calls("scancel")] == cancelled


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("exec sleep 5", "sbatch gives no answer in 0.5 s"),
        ("echo 'sbatch: error: Socket timed out on send/recv operation' >&2; exit 1", "Socket timed out"),
        ("echo 'welcome to the cluster'; exit 0", "welcome"),
        ("kill -9 $$", "exit status -9"),
    ],
)
def test_without_a_sure_answer_the_job_may_be_there(slurm, tmp_path, monkeypatch, script, said, capsys):
    monkeypatch.setattr(queue, "SLURM_LIMIT_S", 0.5)
    slurm.do("sbatch", "--parsable --hold --chdir", script)
    assert go("--out", tmp_path) == 1
    error = capsys.readouterr().err
    assert said in error and f"squeue --me --name=bench-{MODEL}" in error and "nothing submitted" not in error
    # Of the second job the same, and the first one goes.
    slurm.do("sbatch", "--dependency", script)
    assert go("--out", tmp_path) == 1
    error = capsys.readouterr().err
    assert said in error and "squeue --me --name=collate" in error and "nothing submitted" not in error
    assert [call for call, _ in slurm.calls("scancel")] == [["scancel", "42"]]


def test_a_reader_that_goes_away_is_no_traceback(slurm, tmp_path):
    command = [sys.executable, "-m", "benchmarks.submit", "--model", MODEL, "--out", tmp_path / "out"]
    read, written = os.pipe()
    os.close(read)
    for more, status in ((["--dry-run"], 0), ([], 1)):
        answer = subprocess.run([*command, *more], cwd=ROOT, stdout=written, stderr=subprocess.PIPE, text=True)
        assert answer.returncode == status
        assert answer.stderr == "python -m benchmarks.submit: nobody reads the output, nothing submitted\n"
    os.close(written)
    assert slurm.calls("sbatch") == []


def test_without_slurm(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert go("--out", tmp_path / "out") == 1
    text = capsys.readouterr().out
    assert "no sbatch on PATH, so that Slurm has not checked this" in text and "collate.sbatch JOB" in text
    assert not (tmp_path / "out").exists()
    assert go("--out", tmp_path / "out", "--dry-run") == 0
    assert "no sbatch on PATH" in capsys.readouterr().out


def test_help_needs_no_torch():
    code = (
        "import sys; from benchmarks import submit; from benchmarks.slurm import collate; print('torch' in sys.modules)"
    )
    answer = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert answer.stdout == "False\n"
