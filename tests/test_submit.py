"""benchmarks.submit with a recording sbatch: what is asked of Slurm, what is refused, and that nothing stays half done.

pytest tests/test_submit.py
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import rounds, submit
from benchmarks.slurm import collate
from common import record as records

FAKE = "tests.fake_model"
SCRIPTS = rounds.ROOT / "benchmarks" / "slurm"

# Logs its name, words and settings; $LOG/<name>.fails holds a word of the calls that it refuses.
SHIM = r"""#!/bin/bash
name=${0##*/}
python3 - "$name" "$@" >>"$LOG/calls" <<'PROGRAM'
import json, os, sys
settings = {key: os.environ[key] for key in ("RECORDS", "PYTHON", "NGPU", "IMAGE", "MOUNTS") if key in os.environ}
print(json.dumps([sys.argv[1:], settings]))
PROGRAM
if [ -e "$LOG/$name.fails" ] && [[ " $* " == *"$(cat "$LOG/$name.fails")"* ]]; then
    echo "$name: error: this is refused" >&2
    exit 1
fi
case "$name $*" in
sinfo*) echo "gpu"; echo "long" ;;
*--test-only*) ;;
*collate.sbatch*) echo 43 ;;
sbatch*) echo "42;cluster" ;;
esac
"""


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Fakes of Slurm's commands first on PATH; returns what they log."""
    return shims(tmp_path / "slurm", monkeypatch, "sbatch", "sinfo", "scancel")


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

    def calls(self, name=None):
        path = self.folder / "calls"
        found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [call for call in found if name in (None, call[0][0])]


def go(*arguments, flags=()):
    try:
        argv = ["--model", FAKE, *map(str, arguments)] if "--model" not in arguments else [*map(str, arguments)]
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
    (test, _), (bench, settings), (tables, _) = slurm.calls("sbatch")
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
    bench, settings = slurm.calls("sbatch")[1]
    assert "--array=0-1" in bench and f"--output={tmp_path}/out/logs/slurm-%A_%a.out" in bench
    assert settings["RECORDS"] == f"{tmp_path}/out/{{}}-tiny-load4"
    assert bench[bench.index("--out") + 1] == settings["RECORDS"]
    assert not any("gpus" in word for word in bench)
    folders = slurm.calls("sbatch")[2][0][-2:]
    assert folders == [f"{tmp_path}/out/{model}-tiny-load4" for model in ("gpt3", FAKE)]


def test_points_of_a_sweep_are_an_array(slurm, tmp_path):
    more = ["--values", "1,2,4", "--rounds", "3", "--out", tmp_path / "out"]
    assert go("--model", "gpt3", "--over", "batch", "--variant", "graph_te", *more) == 0
    bench, settings = slurm.calls("sbatch")[1]
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
    settings = slurm.calls("sbatch")[1][1]
    assert settings["IMAGE"] == "nvcr.io#nvidia/pytorch:25.09-py3"
    assert settings["MOUNTS"] == f"{tmp_path}/a:{tmp_path}/a,/data:/data"
    monkeypatch.setenv("IMAGE", "left over")
    assert go("--out", tmp_path / "b") == 0
    assert "IMAGE" not in slurm.calls("sbatch")[-2][1]


def test_a_dry_run_asks_and_leaves_nothing(slurm, tmp_path, capsys):
    assert go("--out", tmp_path / "out", "--dry-run") == 0
    assert slurm.calls("sbatch") == [] and not (tmp_path / "out").exists()
    text = capsys.readouterr().out
    assert "nothing submitted" in text and "sbatch --parsable" in text and "collate.sbatch JOB" in text


# ------------------------------------------------------------------------------------------------
# What is refused


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
        (["--partition", "cpu"], "unknown partition 'cpu', Slurm knows gpu, long"),
        (["--collate-partition", "cpu"], "unknown partition 'cpu'"),
        (["--over", "batch"], "--values"),
        (["--over", "moon", "--values", "1"], "has no quantity 'moon'"),
        (["--variant", "graph"], "--over is missing"),
        (["--over", "batch", "--values", "1,x"], "--values 1,x"),
        (["--over", "batch", "--values", ","], "--values"),
        (["--over", "batch", "--values", "1", "--model", f"gpt3,{FAKE}"], "one --model"),
        (["--nodes", "2", "--host-load", "8"], "--host-load"),
        (["--mounts", "/a:/b"], "--image is missing"),
        (["--sbatch", "comment='open"], "--sbatch"),
        (["--out", "a{}b"], "--out"),
    ],
)
def test_mistakes_name_the_flag_and_submit_nothing(slurm, arguments, expected, capsys):
    assert go(*arguments) == 2
    said = capsys.readouterr()
    assert expected in said.err and said.err.count("\n") == 1
    assert slurm.calls("sbatch") == []


def test_a_flag_that_the_script_does_not_have_is_a_mistake(slurm, capsys):
    assert go(flags=["--nonsense", "1"]) == 2
    assert "--nonsense" in capsys.readouterr().err and slurm.calls("sbatch") == []


@pytest.mark.parametrize("word", ["--test-only", "--parsable --chdir"])
def test_a_refused_job_is_slurms_message_and_exit_status_1(slurm, tmp_path, word, capsys):
    slurm.refuse("sbatch", word)
    assert go("--out", tmp_path / "out") == 1
    assert "nothing submitted: sbatch: error: this is refused" in capsys.readouterr().err
    assert not any("collate" in " ".join(call) for call, _ in slurm.calls("sbatch"))


def test_a_refused_second_job_takes_the_first_back(slurm, tmp_path, capsys):
    slurm.refuse("sbatch", "collate.sbatch")
    assert go("--out", tmp_path / "out") == 1
    assert [call for call, _ in slurm.calls("scancel")] == [["scancel", "42"]]
    assert "this is refused" in capsys.readouterr().err
    # And where that fails too, the job that is left is named.
    slurm.refuse("scancel", "42")
    assert go("--out", tmp_path / "out") == 1
    assert "job 42 could not be cancelled: scancel: error" in capsys.readouterr().err


def test_without_slurm(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert go("--out", tmp_path / "out") == 1
    assert "no sbatch on PATH" in capsys.readouterr().err and not (tmp_path / "out").exists()
    assert go("--out", tmp_path / "out", "--dry-run") == 0
    assert "no sbatch on PATH" in capsys.readouterr().out


def test_help_needs_no_torch():
    code = (
        "import sys; from benchmarks import submit; from benchmarks.slurm import collate; print('torch' in sys.modules)"
    )
    answer = subprocess.run([sys.executable, "-c", code], cwd=rounds.ROOT, capture_output=True, text=True, check=True)
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
            cwd=rounds.ROOT,
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
    assert f"--container-mounts={rounds.ROOT}:{rounds.ROOT},/data:/data:ro" in launch
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
    assert answer.stdout == f"3 {rounds.ROOT}\n"
    answer = subprocess.run(node, env={**environment, "NODE_PYTHON": "echo"}, capture_output=True, text=True)
    assert answer.stdout.startswith("-c import os")
    answer = subprocess.run(node, env={"PATH": os.environ["PATH"]}, capture_output=True, text=True)
    assert answer.returncode != 0 and "SLURM_NODEID" in answer.stderr


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="no shellcheck on PATH")
def test_scripts_pass_shellcheck():
    paths = [*SCRIPTS.glob("*.sbatch"), *SCRIPTS.glob("*.sh"), rounds.ROOT / ".ci" / "run", rounds.ROOT / "setup.sh"]
    answer = subprocess.run(["shellcheck", *paths], capture_output=True, text=True)
    assert answer.returncode == 0, answer.stdout


# ------------------------------------------------------------------------------------------------
# Collate


def write(folder: Path, status=None, **values):
    folder.mkdir(parents=True, exist_ok=True)
    record = records.blank(model="m", preset="tiny", variant="eager", round=0, status="pass", device="cpu", **values)
    records.write(folder / "eager.r0.json", record)
    if status is not None:
        (folder / "logs").mkdir()
        (folder / "logs" / "job-9.status").write_text(status)


def test_collate_writes_tables_and_names_what_failed(tmp_path, capsys):
    write(tmp_path / "good", "0\n")
    write(tmp_path / "bad", "1\n")
    write(tmp_path / "killed")
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
    assert all((tmp_path / name / "table.md").exists() for name in ("good", "bad", "killed"))
    assert collate.main(["9", str(tmp_path / "good")]) == 0


def test_collate_goes_on_after_a_folder_that_mixes_machines(tmp_path, capsys):
    write(tmp_path / "mixed", "0\n")
    record = records.read(tmp_path / "mixed" / "eager.r0.json")
    record.update(device="cuda", round=1)
    record["env"].update(gpu_name="NVIDIA H200", gpu_uuid="GPU-0")
    records.write(tmp_path / "mixed" / "eager.r1.json", record)
    write(tmp_path / "good", "0\n")
    assert collate.main(["9", str(tmp_path / "mixed"), str(tmp_path / "good")]) == 1
    text = capsys.readouterr().out
    assert f"failed: {tmp_path}/mixed" in text and "job 9: 1 of 2 tasks ended well" in text
    assert (tmp_path / "good" / "table.md").exists()
