"""benchmarks.submit with a recording sbatch: what is asked of Slurm, what is refused, and that nothing stays half done.

pytest tests/test_submit.py
"""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys

import pytest

from benchmarks import ROOT, script, sessions, submit
from benchmarks.slurm import collate, queue
from common import record as records
from tests.harness import describe_here

FAKE = "tests.fake_model"
SCRIPTS = ROOT / "benchmarks" / "slurm"

# Logs its name, words and settings; $LOG/<name>.fails holds a word of the calls that it refuses.
SHIM = r"""#!/bin/bash
name=${0##*/}
python3 - "$name" "$@" >>"$LOG/calls" <<'PROGRAM'
import json, os, sys
names = ("RECORDS", "PYTHON", "NGPU", "IMAGE", "MOUNTS", "SBATCH_WAIT", "SBATCH_QOS")
settings = {key: os.environ[key] for key in names if key in os.environ}
print(json.dumps([sys.argv[1:], settings]))
PROGRAM
# $LOG/<name>.does is run by the calls that hold the word in its first line.
if [ -e "$LOG/$name.does" ] && [[ " $* " == *"$(head -n 1 "$LOG/$name.does")"* ]]; then
    source <(tail -n +2 "$LOG/$name.does")
fi
if [ -e "$LOG/$name.fails" ] && [[ " $* " == *"$(cat "$LOG/$name.fails")"* ]]; then
    echo "$name: error: this is refused" >&2
    exit 1
fi
case "$name $*" in
squeue*) cat "$LOG/limit" 2>/dev/null ;;
*--test-only*) ;;
*collate.sbatch*) echo 43 ;;
sbatch*) echo "42;cluster" ;;
esac
"""


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Fakes of Slurm's commands first on PATH; returns what they log. The environment has no settings for them."""
    for name in list(os.environ):
        if name.startswith(("SBATCH_", "SLURM_", "MASTER_", "NODE_PYTHON", "MAX_REQUEUES")):
            monkeypatch.delenv(name)
    return shims(tmp_path / "slurm", monkeypatch, "sbatch", "squeue", "scancel", "scontrol")


@pytest.fixture(autouse=True)
def described(monkeypatch):
    """--describe without a process each time."""
    monkeypatch.setattr(script, "describe", describe_here)


class shims:
    def __init__(self, folder, monkeypatch, *names):
        self.folder = folder
        folder.mkdir()
        for name in names:
            (folder / name).write_text(SHIM)
            (folder / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        monkeypatch.setenv("LOG", str(folder))

    def refuse(self, name, word):
        (self.folder / f"{name}.fails").write_text(word)

    def do(self, name, word, script):
        """Make the calls of `name` that hold `word` run `script` first."""
        (self.folder / f"{name}.does").write_text(f"{word}\n{script}\n")

    def calls(self, name=None):
        path = self.folder / "calls"
        found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [call for call in found if name in (None, call[0][0])]


def go(*arguments, flags=()):
    try:
        words = [str(word) for word in arguments]
        argv = words if any(word.startswith("--model") for word in words) else ["--model", FAKE, *words]
        return submit.main([*argv, *(["--", *flags] if flags else [])])
    except SystemExit as stop:
        return stop.code


# ------------------------------------------------------------------------------------------------
# What is submitted


def test_one_model_is_one_job_and_one_for_the_tables(slurm, tmp_path, capsys):
    out = tmp_path / "out"
    more = ["--partition", "gpu", "--account", "me", "--time", "2:00:00", "--rounds", "auto", "--minutes", "60"]
    more += ["--sbatch", "qos=high 'comment=two words'"]
    assert go("--nodes", 2, "--ngpu", 8, "--variants", "graph", "--out", out, *more, flags=["--seconds", "1"]) == 0
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
        *["benchmarks.run", FAKE, "--", "--model", "{}", "--preset", "bench", "--out", str(out)],
        *["--variants", "graph", "--rounds", "auto", "--minutes", "60", "--", "--seconds", "1"],
    ]
    assert settings["RECORDS"] == str(out) and settings["NGPU"] == "8" and "IMAGE" not in settings
    assert "--dependency=afterany:42" in tables and "--kill-on-invalid-dep=yes" in tables
    assert tables[-3:] == ["benchmarks/slurm/collate.sbatch", "42", str(out)]
    assert (out / "logs").is_dir()
    text = capsys.readouterr().out
    assert "job 42 " in text and "job 43 " in text and str(out) in text and text.isascii()
    # What is printed is what was run.
    printed = shlex.split(text.replace("\\\n", " ").partition("records")[2])
    assert printed[printed.index("sbatch") + 1 : printed.index("sbatch") + len(bench)] == bench[1:]


def test_several_models_are_an_array_with_a_folder_each(slurm, tmp_path):
    assert go("--model", f"gpt3,{FAKE}", "--preset", "tiny", "--out", tmp_path / "out", "--host-load", 4) == 0
    bench, settings = slurm.calls("sbatch")[2]
    assert "--array=0-1" in bench and f"--output={tmp_path}/out/logs/slurm-%A_%a.out" in bench
    assert settings["RECORDS"] == f"{tmp_path}/out/{{}}-tiny-load4"
    assert bench[bench.index("--out") + 1] == settings["RECORDS"]
    assert not any("gpus" in word for word in bench)
    folders = slurm.calls("sbatch")[3][0][-2:]
    assert folders == [f"{tmp_path}/out/{model}-tiny-load4" for model in ("gpt3", FAKE)]


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
    more = ["--values", "1,2,4", "--rounds", "3", "--out", tmp_path / "out"]
    assert go("--model", "gpt3", "--over", "batch", "--variant", "graph_te", *more) == 0
    bench, settings = slurm.calls("sbatch")[2]
    program = bench[bench.index("benchmarks/slurm/bench.sbatch") + 1 :]
    assert program[:5] == ["benchmarks.sweep", "1", "2", "4", "--"]
    assert program[5:11] == ["--model", "gpt3", "--over", "batch", "--values", "{}"]
    assert program[11:13] == ["--variant", "graph_te"]
    assert "--array=0-2" in bench and settings["RECORDS"] == f"{tmp_path}/out/batch-{{}}"
    assert bench[bench.index("--out") + 1] == f"{tmp_path}/out"


def test_the_default_folder_names_nodes_and_gpus(slurm, capsys):
    assert go("--nodes", 2, "--ngpu", 4, "--dry-run") == 0
    assert f"runs/slurm/2x4/{FAKE}-bench" in capsys.readouterr().out


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
    assert f"--output={tmp_path}/50%%j/logs/slurm-%j.out" in bench and settings["RECORDS"] == f"{tmp_path}/50%j"
    assert f"--output={tmp_path}/50%%j/logs/collate-%j.out" in slurm.calls("sbatch")[3][0]


def test_a_dry_run_asks_and_leaves_nothing(slurm, tmp_path, capsys):
    assert go("--out", tmp_path / "out", "--dry-run") == 0
    calls = [call for call, _ in slurm.calls()]
    assert ["--test-only" in call for call in calls] == [True, True] and not (tmp_path / "out").exists()
    assert "collate.sbatch" in " ".join(calls[1]) and "afterany" not in " ".join(calls[1])
    text = capsys.readouterr().out
    assert "nothing submitted" in text and "sbatch --parsable" in text and "collate.sbatch JOB" in text


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
        (["--variants", "graph,fast"], "unknown variant 'fast'"),
        (["--nodes", "0"], "--nodes"),
        (["--nodes", "two"], "--nodes"),
        (["--ngpu", "-1"], "--ngpu"),
        (["--rounds", "none"], "--rounds"),
        (["--minutes", "-3"], "--minutes"),
        (["--over", "batch"], "--values"),
        (["--over", "moon", "--values", "1"], "unknown quantity 'moon'"),
        (["--variant", "graph"], "--over is missing"),
        (["--over", "batch", "--values", "1,x"], "'1,x' is not a list of whole numbers"),
        (["--over", "batch", "--values", ","], "--values"),
        (["--over", "batch", "--values", "1", "--model", f"gpt3,{FAKE}"], "one --model"),
        (["--nodes", "2", "--host-load", "8"], "--host-load"),
        (["--mounts", "/a:/b"], "--image is missing"),
        (["--sbatch", "comment='open"], "--sbatch"),
        *[(["--sbatch", word], f"not {word.split('=')[0].lstrip('-')}, this command") for word in OWNED],
        (["--sbatch", "qos=high wai"], "not wait, this command sets it"),
        (["--sbatch", "nodes=2"], "not nodes, --nodes of this command does it"),
        (["--sbatch", "time=60"], "not time, --time of this command does it"),
        (["--over", "batch", "--values", "\u00b2"], "--values"),
        (["--over", "batch", "--values", "1,3"], "--batch 3: the fake takes every number but this"),
        (["--over", "width", "--values", "3"], "3 makes --inner no whole number"),
        (["--over", "batch", "--values", "1", "--variant", "eager"], "--variant eager"),
        (["--out", "/dev/null/x"], "/dev/null is no folder"),
        (["--out", "a{}b"], "--out"),
        (["--model=--"], "--model"),
        (["--out=--"], "--out"),
        (["--time=--"], "--time"),
        (["--rounds=--"], "--rounds"),
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
    command = [sys.executable, "-m", "benchmarks.submit", "--model", FAKE, "--out", tmp_path / "out"]
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
    assert said in error and f"squeue --me --name=bench-{FAKE}" in error and "nothing submitted" not in error
    # Of the second job the same, and the first one goes.
    slurm.do("sbatch", "--dependency", script)
    assert go("--out", tmp_path) == 1
    error = capsys.readouterr().err
    assert said in error and "squeue --me --name=collate" in error and "nothing submitted" not in error
    assert [call for call, _ in slurm.calls("scancel")] == [["scancel", "42"]]


def test_a_reader_that_goes_away_is_no_traceback(slurm, tmp_path):
    command = [sys.executable, "-m", "benchmarks.submit", "--model", FAKE, "--out", tmp_path / "out"]
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


# ------------------------------------------------------------------------------------------------
# The batch script: how it starts runs, with a recording srun and interpreter

PYTHON_SHIM = '#!/bin/bash\nprintf "%s\\n" "$@" >"$LOG/python"\n'


@pytest.fixture
def batch(tmp_path, monkeypatch):
    """Runs bench.sbatch as one task of a job; returns (result, words that reach Python, srun's calls)."""
    shim = shims(tmp_path / "bin", monkeypatch, "srun", "scontrol")
    (shim.folder / "python-shim").write_text(PYTHON_SHIM)
    (shim.folder / "python-shim").chmod(0o755)

    def run(*words, **settings):
        environment = {
            "PATH": os.environ["PATH"],
            "LOG": str(shim.folder),
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "n[1-2]",
            "PYTHON": str(shim.folder / "python-shim"),
            "RECORDS": f"{tmp_path}/out-{{}}",
            **settings,
        }
        result = subprocess.run(
            ["bash", SCRIPTS / "bench.sbatch", *words],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=30,
        )
        path = shim.folder / "python"
        return result, path.read_text().splitlines() if path.exists() else [], [c for c, _ in shim.calls("srun")]

    return run


WORDS = ["benchmarks.run", "a", "b", "--", "--model", "{}", "--out", "x/{}", "--", "--text", "two words"]


def test_one_node_without_image_needs_no_srun(batch, tmp_path):
    result, words, sruns = batch(*WORDS, SLURM_ARRAY_JOB_ID="5", SLURM_ARRAY_TASK_ID="1", NGPU="4")
    assert result.returncode == 0, result.stderr
    assert " ".join(words[:-1]) == "-m benchmarks.run --ngpu 4 --model b --out x/b -- --text"
    assert words[-1] == "two words"
    assert sruns == []
    assert (tmp_path / "out-b" / "logs" / "job-5.status").read_text() == "0\n"


def test_several_nodes_go_through_srun(batch):
    _, words, sruns = batch(*WORDS, SLURM_JOB_NUM_NODES="2", MASTER_ADDR="n1", MASTER_PORT="1234")
    launch = shlex.split(words[words.index("--launch") + 1])
    assert words[2:4] == ["--nnodes", "2"] and words[words.index("--rendezvous") + 1] == "n1:1234"
    assert launch[0] == "srun" and launch[-1] == "benchmarks/slurm/node.sh" and "--ntasks-per-node=1" in launch
    assert "--kill-on-bad-exit=1" in launch and not any("container" in word for word in launch)
    assert sruns == []


def test_an_image_is_had_once_and_used_by_name(batch, tmp_path):
    result, words, sruns = batch(*WORDS, IMAGE="some#image", MOUNTS="/data:/data:ro")
    assert result.returncode == 0, result.stderr
    first, last = sruns
    assert "--container-image=some#image" in first and "--container-name=bench-7" in first and first[-1] == "true"
    launch = shlex.split(words[words.index("--launch") + 1])
    assert "--container-name=bench-7" in launch and not any("container-image" in word for word in launch)
    assert f"--container-mounts={ROOT}:{ROOT},/data:/data:ro" in launch
    # Of one node too, and the container goes when the job does.
    assert words[2:4] == ["--nnodes", "1"] and "--rendezvous" not in words
    assert "enroot remove" in " ".join(last)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"SLURM_JOB_ID": ""}, "SLURM_JOB_ID: is not set"),
        ({"RECORDS": ""}, "RECORDS: is not set"),
        ({"PYTHON": "/no/python"}, "no interpreter /no/python"),
        ({"SLURM_ARRAY_TASK_ID": "2"}, "no item for array task 2: there are 2"),
    ],
)
def test_settings_that_are_missing_are_named(batch, change, expected):
    result, words, _ = batch(*WORDS, **change)
    assert result.returncode != 0 and expected in result.stderr and words == []


def test_a_failing_command_is_the_jobs_status(batch, tmp_path):
    (tmp_path / "bin" / "python-shim").write_text("#!/bin/bash\nexit 7\n")
    result, _, _ = batch(*WORDS)
    assert result.returncode == 7 and (tmp_path / "out-a" / "logs" / "job-7.status").read_text() == "7\n"


def test_node_sh_sets_the_rank_and_takes_another_interpreter(tmp_path):
    node = [SCRIPTS / "node.sh", sys.executable, "-c", "import os; print(os.environ['PET_NODE_RANK'], os.getcwd())"]
    environment = {"PATH": os.environ["PATH"], "SLURM_NODEID": "3"}
    answer = subprocess.run(node, env=environment, cwd="/", capture_output=True, text=True)
    assert answer.stdout == f"3 {ROOT}\n"
    answer = subprocess.run(node, env={**environment, "NODE_PYTHON": "echo"}, capture_output=True, text=True)
    assert answer.stdout.startswith("-c import os")
    answer = subprocess.run(node, env={"PATH": os.environ["PATH"]}, capture_output=True, text=True)
    assert answer.returncode != 0 and "SLURM_NODEID" in answer.stderr


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="no shellcheck on PATH")
def test_scripts_pass_shellcheck():
    paths = [*SCRIPTS.glob("*.sbatch"), *SCRIPTS.glob("*.sh"), ROOT / ".ci" / "run", ROOT / "setup.sh"]
    answer = subprocess.run(["shellcheck", *paths], capture_output=True, text=True)
    assert answer.returncode == 0, answer.stdout


# ------------------------------------------------------------------------------------------------
# Collate


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
