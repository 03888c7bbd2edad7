"""Jobs on a real Slurm that the tests start on this machine: two nodes, which are both this host.

The jobs run from a copy of the repository, which cannot change under them.

pytest tests/test_slurm.py
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmarks import ROOT, sessions
from tests.harness import names, only, processes_with, read, until
from tests.slurm_cluster import Cluster, free_ports

pytestmark = pytest.mark.slurm

# The same fake under two names.
FAKES = (FAKE := "tests.fake_model", "tests.other_model")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    start = time.monotonic()
    with Cluster(tmp_path_factory.mktemp("slurm") / "cluster", num_nodes=2) as cluster:
        cluster.start_s = time.monotonic() - start
        cluster.root = copy_of_repository(tmp_path_factory.mktemp("repository"))
        # Node names are Slurm's only; ranks of a node must not share this host's cores by spinning.
        cluster.environment |= {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_ports(1)[0]),
            "OMP_NUM_THREADS": "1",
            "GRAPH_LOCK_DIR": str(cluster.folder / "locks"),
        }
        cluster.environment.pop("CUDA_VISIBLE_DEVICES", None)
        yield cluster
    assert processes_with(str(cluster.folder)) == []


def copy_of_repository(folder):
    for name in ("benchmarks", "common", "gpt3", "tests/fake_model"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "tests" / "__init__.py").touch()
    shutil.copytree(folder / "tests" / "fake_model", folder / "tests" / "other_model")
    return folder


def submit(cluster, *arguments, flags=()):
    """Submit; (id of the job, id of the collate job)."""
    command = [sys.executable, "-m", "benchmarks.submit", "--preset", "tiny", *map(str, arguments)]
    answer = cluster.run(*command, *(["--", *flags] if flags else []), cwd=cluster.root)
    assert answer.returncode == 0, answer.stderr
    return re.findall(r"^job (\d+) ", answer.stdout, re.MULTILINE)


def text_of(folder, name):
    return (folder / "logs" / name).read_text()


def end(cluster, job, limit_s=600.0):
    return cluster.until_state(job, "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", limit_s=limit_s)


def queued(cluster):
    return set(cluster.run("squeue", "--noheader", "--format=%i").stdout.split())


def log_of(out, name):
    """The log of a run, once it has begun, else None."""
    return next(out.glob(f"*/*/*/logs/{name}.log"), None)


def table(session):
    return (session.parent / "table.md").read_text()


def test_the_cluster_is_up_in_ten_seconds(cluster):
    assert cluster.start_s < 10
    assert cluster.states() == ["idle", "idle"]


@pytest.fixture(scope="module")
def near_its_limit(cluster, tmp_path_factory):
    """A test as a future: the job has a minute and holds one node, so that the next tests have the other meanwhile."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(check_near_its_limit, cluster, tmp_path_factory.mktemp("limit") / "out")


def check_near_its_limit(cluster, out):
    # A minute is the least limit that Slurm has, and the signal may come half a minute early.
    limits = ("--time", "1", "--sbatch", "signal=B:USR1@20")
    arguments = ("--model", FAKE, "--variants", "graph", "--rounds", "16", "--out", out, *limits)
    job, collate = submit(cluster, *arguments, flags=["--seconds", "1"])
    cluster.until_state(job, "RUNNING")
    cluster.until_state(job, "PENDING", "COMPLETED", "FAILED", limit_s=60)
    log = text_of(out, f"slurm-{job}.out")
    assert "the time limit is near: stopping" in log and "back into the queue" in log
    assert cluster.job(collate)["JobState"] == "PENDING"
    assert until(lambda: not processes_with(str(out)))
    session = only(out)
    before = [path.read_text().rstrip("\n") for path in sessions.record_files(session)]
    assert sessions.is_open(session) and 0 < len(before) < 34
    while cluster.until_state(job, "PENDING", "COMPLETED", limit_s=90) == "PENDING":
        # Slurm would wait two minutes before it starts a job that came back.
        # Not at once: Slurm kills what starts again within the second of its end.
        assert until(lambda: cluster.job(job)["Reason"] == "BeginTime")
        time.sleep(3)
        cluster.run("scontrol", "update", f"JobId={job}", "StartTime=now")
        cluster.until_state(job, "RUNNING", "COMPLETED")
    packed = only(out)
    assert packed.name == sessions.session_name(session) and len(names(packed)) == 34
    lines, _ = sessions.read_lines(packed / sessions.RECORDS)
    assert set(before) <= set(lines), "a record was measured twice"
    assert f"goes on with {packed.name}" in text_of(out, f"slurm-{job}.out")
    assert int(read(packed)["graph.r16"]["env"]["slurm"]["restart_count"]) >= 1
    assert end(cluster, collate) == "COMPLETED"
    assert "1 sessions, 34 records" in text_of(out, f"collate-{collate}.out") and "| graph |" in table(packed)


@pytest.mark.usefixtures("near_its_limit")
def test_a_job_measures_gpt3_and_the_collate_job_writes_its_table(cluster, tmp_path):
    out = tmp_path / "out"
    job, collate = submit(cluster, "--model", "gpt3", "--variants", "graph", "--rounds", "1", "--out", out)
    assert cluster.job(collate)["JobState"] == "PENDING"
    assert end(cluster, job) == "COMPLETED", text_of(out, f"slurm-{job}.out")
    assert end(cluster, collate) == "COMPLETED"
    session = only(out)
    assert names(session) == ["eager.r0", "eager.r1", "graph.r0", "graph.r1"]
    for record in read(session).values():
        assert (record["status"], record["env"]["slurm"]["job_id"]) == ("pass", job)
        assert record["env"]["slurm"]["nodelist"] in ("node0", "node1")
    assert not sessions.is_open(session) and "| graph |" in table(session)
    assert f"job {job}: 1 of 1 tasks ended well" in text_of(out, f"collate-{collate}.out")


def test_a_failing_job_fails_and_the_collate_job_says_so(cluster, tmp_path):
    out = tmp_path / "out"
    job, collate = submit(cluster, "--model", FAKE, "--variants", "crash", "--rounds", "1", "--out", out)
    assert (end(cluster, job), end(cluster, collate)) == ("FAILED", "FAILED")
    assert cluster.job(job)["ExitCode"] == "1:0"
    said = text_of(out, f"collate-{collate}.out")
    assert f"failed: {out}: ended with exit status 1" in said
    assert f"job {job}: 0 of 1 tasks ended well" in said


def test_sbatch_wait_returns_the_exit_status(cluster, tmp_path):
    environment = {**cluster.environment, "RECORDS": str(tmp_path / "out"), "PYTHON": sys.executable}
    # An option that the command does not have: exit status 2.
    words = ["benchmarks.run", FAKE, "--", "--model", "{}", "--preset", "tiny", "--nonsense"]
    command = ["sbatch", "--wait", f"--output={tmp_path}/log", "benchmarks/slurm/bench.sbatch", *words]
    answer = cluster.run(*command, cwd=cluster.root, env=environment)
    assert answer.returncode == 2
    assert "--nonsense" in (tmp_path / "log").read_text()


def test_a_cancelled_job_is_named_by_the_collate_job(cluster, tmp_path):
    out = tmp_path / "out"
    job, collate = submit(cluster, "--model", FAKE, "--rounds", "1", "--out", out, flags=["--seconds", "60"])
    cluster.until_state(job, "RUNNING")
    assert until(lambda: log_of(out, "eager.r0"), 30)
    cluster.run("scancel", job)
    assert (end(cluster, job), end(cluster, collate)) == ("CANCELLED", "FAILED")
    assert "ended with exit status 143" in text_of(out, f"collate-{collate}.out")
    assert until(lambda: not processes_with(str(out)))


def test_an_array_covers_two_models(cluster, tmp_path):
    out = tmp_path / "out"
    arguments = ("--variants", "graph", "--rounds", "1", "--out", out)
    job, collate = submit(cluster, "--model", ",".join(FAKES), *arguments)
    assert end(cluster, collate) == "COMPLETED"
    for task, model in enumerate(FAKES):
        session = only(out / f"{model}-tiny")
        assert names(session) == ["eager.r0", "eager.r1", "graph.r0", "graph.r1"]
        record = read(session)["graph.r1"]
        slurm = record["env"]["slurm"]
        assert (record["model"], slurm["array_job_id"], slurm["array_task_id"]) == (model, job, str(task))
        assert "task " + str(task) in text_of(out, f"slurm-{job}_{task}.out")
        assert table(session)
    said = text_of(out, f"collate-{collate}.out")
    assert f"job {job}: 2 of 2 tasks ended well" in said and all(f"{model} preset tiny" in said for model in FAKES)


def test_near_its_limit_a_job_is_queued_again_and_resumes(near_its_limit):
    near_its_limit.result()


def test_a_task_of_an_array_that_is_queued_again_leaves_the_others_alone(cluster, tmp_path):
    out = tmp_path / "out"
    arguments = ("--variants", "eager", "--rounds", "3", "--out", out)
    job, collate = submit(cluster, "--model", ",".join(FAKES), *arguments, flags=["--seconds", "2"])
    folders = [out / f"{model}-tiny" for model in FAKES]
    assert until(lambda: list(folders[1].glob("*/*/*/eager.r0.json")), 60)
    # The last task's own id is that of the whole array.
    assert cluster.job(f"{job}_1")["JobId"] == job
    cluster.run("scancel", "--signal=USR1", "--batch", f"{job}_1")
    assert until(lambda: cluster.job(f"{job}_1").get("Restarts") == "1", 30)
    assert end(cluster, f"{job}_0") == "COMPLETED" and cluster.job(f"{job}_0")["Restarts"] == "0"
    # Not sooner: Slurm kills what starts again within the second of its end.
    assert cluster.job(f"{job}_1")["Reason"] == "BeginTime"
    time.sleep(3)
    cluster.run("scontrol", "update", f"JobId={job}_1", "StartTime=now")
    assert end(cluster, collate) == "COMPLETED", text_of(out, f"collate-{collate}.out")
    logs = [text_of(out, f"slurm-{job}_{task}.out") for task in (0, 1)]
    assert [log.count("  start ") for log in logs] == [1, 2]
    assert ["the time limit is near" in log for log in logs] == [False, True]
    restarts = [read(only(folder))["eager.r3"]["env"]["slurm"].get("restart_count") for folder in folders]
    assert restarts[0] in (None, "0") and restarts[1] == "1"


def test_a_job_whose_runs_are_longer_than_its_limit_does_not_come_back_for_ever(cluster, tmp_path):
    out = tmp_path / "out"
    job, collate = submit(cluster, "--model", FAKE, "--rounds", "1", "--out", out, flags=["--seconds", "600"])
    assert until(lambda: log_of(out, "eager.r0"), 30)
    cluster.run("scancel", "--signal=USR1", "--batch", job)
    assert (end(cluster, job), end(cluster, collate)) == ("FAILED", "FAILED")
    assert "no run ended well within the time limit" in text_of(out, f"slurm-{job}.out")


def test_two_nodes_run_one_job_of_two_ranks(cluster, tmp_path):
    out = tmp_path / "out"
    arguments = ("--model", "gpt3", "--nodes", "2", "--variants", "graph", "--rounds", "1", "--out", out)
    job, collate = submit(cluster, *arguments)
    assert end(cluster, collate) == "COMPLETED", text_of(out, f"slurm-{job}.out")
    session = only(out)
    assert session.parent.parent.name == "cpux2" and len(sessions.read_meta(session)["nodes"]) == 2
    for record in read(session).values():
        assert (record["status"], record["numerics"]["parity"]) == ("pass", "bitwise")
        assert record["env"]["world_size"] == 2
        assert record["env"]["slurm"]["nodelist"] == "node[0-1]"
        assert record["extra"]["request"]["num_nodes"] == 2
    assert read(session)["graph.r1"]["rank_skew_ms"] is not None


@pytest.mark.parametrize("how", ["limit", "ctrl-c", "kill"])
def test_of_a_run_that_is_killed_nothing_is_left_on_any_node(cluster, tmp_path, how):
    """The launcher is Slurm's own srun, from outside of a job, as with salloc."""
    out = tmp_path / "out"
    srun = f"srun --nodes=2 --ntasks-per-node=1 --mpi=none {cluster.root}/benchmarks/slurm/node.sh"
    command = [sys.executable, "-m", "benchmarks.run", "--model", FAKE, "--preset", "tiny", "--variants", "eager"]
    command += ["--rounds", "1", "--out", str(out), "--nnodes", "2", "--launch", srun]
    command += ["--rendezvous", f"127.0.0.1:{free_ports(1)[0]}", *(["--limit-s", "12"] if how == "limit" else [])]
    process = subprocess.Popen(
        [*command, "--", "--seconds", "600"],
        cwd=cluster.root,
        env=cluster.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )

    def both_began():
        log = log_of(out, "eager.r0")
        return log is not None and log.read_text().count("fake eager round 0") == 2

    try:
        assert until(both_began, 60), log_of(out, "eager.r0")
        if how != "limit":
            process.send_signal(signal.SIGINT if how == "ctrl-c" else signal.SIGKILL)
            assert process.wait(30) == (130 if how == "ctrl-c" else -signal.SIGKILL)
            assert until(lambda: not processes_with(str(out)), 20)
            assert until(lambda: cluster.states() == ["idle", "idle"], 20)
            return
        said = process.communicate(timeout=90)[0]
        assert process.returncode == 1 and "killed after 12 s" in said
        assert not processes_with(str(out))
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()


def test_ranks_that_are_not_what_was_asked_fail_by_name(cluster, tmp_path):
    # The fake model says that it is alone.
    out = tmp_path / "out"
    arguments = ("--model", FAKE, "--nodes", "2", "--variants", "eager", "--rounds", "1", "--out", out)
    job, _ = submit(cluster, *arguments)
    assert end(cluster, job) == "FAILED"
    assert "world size 1, --nnodes 2 --ngpu 1 asks for 2" in text_of(out, f"slurm-{job}.out")


def test_slurm_refuses_and_nothing_stays(cluster, tmp_path):
    command = [
        sys.executable,
        "-m",
        "benchmarks.submit",
        "--model",
        FAKE,
        "--preset",
        "tiny",
        "--out",
        tmp_path / "out",
    ]
    before = queued(cluster)
    # More nodes than there are; and options that cannot be.
    for more, expected in (
        (["--nodes", "3"], "not available"),
        # A cluster that answers has checked a dry run.
        (["--nodes", "3", "--dry-run"], "not available"),
        (["--sbatch", "begin=whenever"], "--begin"),
        (["--sbatch", "reservation=none"], "eservation"),
    ):
        answer = cluster.run(*command, *more, cwd=cluster.root)
        assert answer.returncode == 1 and expected in answer.stderr, answer.stderr
        assert "nothing submitted" in answer.stderr
    assert queued(cluster) <= before
    assert not (tmp_path / "out").exists()


def test_an_image_without_the_plugin_fails_with_srun_s_own_words(cluster, tmp_path):
    out = tmp_path / "out"
    job, _ = submit(cluster, "--model", FAKE, "--rounds", "1", "--out", out, "--image", "some#image")
    assert end(cluster, job) == "FAILED"
    log = text_of(out, f"slurm-{job}.out")
    assert "container-image" in log and "the image some#image cannot be had" in log
    assert Path(out, "logs", f"job-{job}.status").read_text() == "2\n"


def test_the_environment_of_tests_is_not_a_job():
    assert "SLURM_JOB_ID" not in os.environ
