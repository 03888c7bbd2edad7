"""Jobs on a real Slurm that the tests start on this machine: two nodes, which are both this host.

The jobs run from a copy of the repository, which cannot change under them.

pytest tests/benchmarks/slurm/test_slurm.py
"""

import json
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from graph_worth.folders import ROOT
from graph_worth.harness import judge
from graph_worth.harness.files import partial, run_file
from tests.helpers.bench_process import only_run
from tests.helpers.processes import free_ports, processes_with, until
from tests.helpers.slurm_cluster import Cluster

# One cluster serves all of them, so tests/conftest.py has one of pytest's processes run them.
pytestmark = pytest.mark.slurm

# The same model under two names.
MODELS = (MODEL := "tests.lying_model", "tests.other_model")
# More cycles than a test waits for.
LONG = ("--cycles", "1000")
CYCLES_OF_LIMIT = 60


@pytest.fixture(scope="module")
def cluster(request, tmp_path_factory):
    if request.config.getoption("loadgroup", False):
        # Two clusters at a time would have all jobs run twice as long.
        (tmp_path_factory.getbasetemp().parent / "slurm").touch(exist_ok=False)
    with Cluster(tmp_path_factory.mktemp("slurm") / "cluster", num_nodes=2) as cluster:
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
    assert not processes_with(str(cluster.folder))


def copy_of_repository(folder):
    for name in ("benchmarks", "common", "graph_worth", "gpt3", "tests/lying_model"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "tests" / "__init__.py").touch()
    other = shutil.copytree(folder / "tests" / "lying_model", folder / "tests" / "other_model")
    for path in other.glob("*.py"):
        path.write_text(path.read_text().replace("tests.lying_model", "tests.other_model"))
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


def cycles_of(out):
    """Cycles of the one run that was begun below a folder."""
    paths = list(out.glob(f"*/*/*{partial.SUFFIX}"))
    return paths[0].read_text().count('{"fact":"cycle"') if paths else 0


def goes_on_at_once(cluster, job):
    """Slurm would wait two minutes before it starts a job that came back, which has ten minutes then.

    Not sooner: Slurm kills what starts again within the second of its end.
    """
    assert until(lambda: cluster.job(job)["Reason"] == "BeginTime")
    time.sleep(3)
    cluster.run("scontrol", "update", f"JobId={job}", "StartTime=now", "TimeLimit=10")


@pytest.fixture(scope="module")
def near_its_limit(cluster, tmp_path_factory):
    """A test as a future: the job has a minute and holds one node, so that the next tests have the other meanwhile."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(check_near_its_limit, cluster, tmp_path_factory.mktemp("limit") / "out")


def check_near_its_limit(cluster, out):
    # A minute is the least limit that Slurm has, and the signal may come half a minute early.
    limits = ("--time", "1", "--sbatch", "signal=B:USR1@20")
    arguments = ("--model", MODEL, "--variants", "graph_step", "--out", out, *limits)
    # Steps that sleep: the other tests' jobs have the processor, and the cycles take 50 s on any machine.
    job, collate = submit(cluster, *arguments, "--cycles", CYCLES_OF_LIMIT, flags=["--pause-ms", "50"])
    cluster.until_state(job, "RUNNING")
    cluster.until_state(job, "PENDING", "COMPLETED", "FAILED", limit_s=180)
    log = text_of(out, f"slurm-{job}.out")
    assert "the time limit is near: stopping" in log and "back into the queue" in log, log
    assert cluster.job(collate)["JobState"] == "PENDING"
    assert until(lambda: not processes_with(str(out)))
    (begun,) = out.glob(f"*/*/*{partial.SUFFIX}")
    facts = [json.loads(line) for line in begun.read_text().splitlines()]
    before = [fact for fact in facts if fact["fact"] == "block"]
    # A busy machine may not come to a whole cycle in the job's half minute.
    num_cycles = cycles_of(out)
    assert num_cycles < CYCLES_OF_LIMIT and len(facts) > 1
    while cluster.until_state(job, "PENDING", "COMPLETED") == "PENDING":
        goes_on_at_once(cluster, job)
        cluster.until_state(job, "RUNNING", "COMPLETED")
    run = only_run(out)
    assert run.id == begun.name.removesuffix(partial.SUFFIX) and run.whole
    assert len(run.builds[""].cycles) == CYCLES_OF_LIMIT
    times = {(name, b.cycle, b.place): b.step_ms for name, own in run.builds[""].variants.items() for b in own.blocks}
    kept = [fact for fact in before if fact["cycle"] < num_cycles]
    assert all(times[fact["variant"], fact["cycle"], fact["place"]] == fact["step_ms"] for fact in kept)
    assert f"goes on with {begun}, cycles so far: {num_cycles}" in text_of(out, f"slurm-{job}.out")
    assert end(cluster, collate) == "COMPLETED"
    assert run.id in text_of(out, f"collate-{collate}.out")


@pytest.mark.usefixtures("near_its_limit")
def test_a_job_measures_gpt3_and_the_collate_job_prints_its_table(cluster, tmp_path):
    out = tmp_path / "out"
    job, collate = submit(cluster, "--model", "gpt3", "--variants", "graph_layer", "--cycles", 2, "--out", out)
    assert cluster.job(collate)["JobState"] == "PENDING"
    assert end(cluster, job) == "COMPLETED", text_of(out, f"slurm-{job}.out")
    assert end(cluster, collate) == "COMPLETED"
    run = only_run(out)
    assert run.host.slurm["job_id"] == job and run.host.slurm["nodelist"] in ("node0", "node1")
    assert {name: own.status for name, own in judge.judged(run)[""].verdicts.items()} == dict.fromkeys(
        ("eager", "graph_layer", "control"), "pass"
    )
    said = text_of(out, f"collate-{collate}.out")
    assert f"job {job}: 1 of 1 tasks ended well" in said and "\ngraph_layer  " in said


def test_a_failing_job_fails_and_the_collate_job_says_so(cluster, tmp_path):
    out = tmp_path / "out"
    job, collate = submit(cluster, "--model", MODEL, "--variants", "raises", "--cycles", 1, "--out", out)
    assert (end(cluster, job), end(cluster, collate)) == ("FAILED", "FAILED")
    assert cluster.job(job)["ExitCode"] == "1:0"
    said = text_of(out, f"collate-{collate}.out")
    assert f"failed: {out}: ended with exit status 1" in said and "RuntimeError: the variant breaks" in said
    assert f"job {job}: 0 of 1 tasks ended well" in said


def test_a_cancelled_job_is_named_by_the_collate_job(cluster, tmp_path):
    out = tmp_path / "out"
    job, collate = submit(cluster, "--model", MODEL, *LONG, "--out", out)
    cluster.until_state(job, "RUNNING")
    assert until(lambda: cycles_of(out))
    cluster.run("scancel", job)
    assert (end(cluster, job), end(cluster, collate)) == ("CANCELLED", "FAILED")
    said = text_of(out, f"collate-{collate}.out")
    assert "ended with exit status 143" in said and "no run\n" in said and "not at its end: " in said
    assert until(lambda: not processes_with(str(out)))


def test_a_job_measures_all_points_of_a_sweep(cluster, tmp_path):
    out = tmp_path / "out"
    arguments = ("--model", "gpt3", "--over", "layers", "--values", "1,2", "--variant", "graph_layer", "--cycles", 1)
    job, collate = submit(cluster, *arguments, "--out", out)
    assert end(cluster, collate) == "COMPLETED", text_of(out, f"slurm-{job}.out")
    runs = [run for _, run in run_file.find(out)[0]]
    assert [(run.value, run.builds[""].config["layers"], run.host.slurm["job_id"]) for run in runs] == [
        (value, value, job) for value in (1, 2)
    ]
    said = text_of(out, f"collate-{collate}.out")
    assert f"job {job}: 1 of 1 tasks ended well" in said
    assert all(f"gpt3/tiny layers-{value}  graph_layer" in said for value in (1, 2))


def test_near_its_limit_a_job_is_queued_again_and_goes_on_with_its_run(near_its_limit):
    near_its_limit.result()


def test_a_task_of_an_array_that_is_queued_again_leaves_the_others_alone(cluster, tmp_path):
    out = tmp_path / "out"
    arguments = ("--variants", "graph_step", "--cycles", 12, "--out", out)
    job, collate = submit(cluster, "--model", ",".join(MODELS), *arguments)
    folders = [out / f"{model}-tiny" for model in MODELS]
    assert until(lambda: cycles_of(folders[1]))
    # The last task's own id is that of the whole array.
    assert cluster.job(f"{job}_1")["JobId"] == job
    cluster.run("scancel", "--signal=USR1", "--batch", f"{job}_1")
    assert until(lambda: cluster.job(f"{job}_1").get("Restarts") == "1", 120)
    assert end(cluster, f"{job}_0") == "COMPLETED" and cluster.job(f"{job}_0")["Restarts"] == "0"
    goes_on_at_once(cluster, f"{job}_1")
    assert end(cluster, collate) == "COMPLETED", text_of(out, f"collate-{collate}.out")
    logs = [text_of(out, f"slurm-{job}_{task}.out") for task in (0, 1)]
    assert [log.count("  start ") for log in logs] == [1, 2]
    assert ["the time limit is near" in log for log in logs] == [False, True]
    runs = [only_run(folder) for folder in folders]
    assert [run.model for run in runs] == list(MODELS) and {len(run.builds[""].cycles) for run in runs} == {12}
    assert f"job {job}: 2 of 2 tasks ended well" in text_of(out, f"collate-{collate}.out")


def test_two_nodes_run_one_job_of_two_ranks(cluster, tmp_path):
    out = tmp_path / "out"
    arguments = ("--model", MODEL, "--nodes", "2", "--variants", "graph_step", "--cycles", 2, "--out", out)
    job, collate = submit(cluster, *arguments)
    assert end(cluster, collate) == "COMPLETED", text_of(out, f"slurm-{job}.out")
    run = only_run(out)
    own = judge.judged(run)[""]
    graph, verdict = own.build.variants["graph_step"], own.verdicts["graph_step"]
    assert (run.ranks, verdict.status, verdict.parity, len(graph.blocks)) == (2, "pass", "bitwise", 2)
    # Rank 0, which tells of itself, ran in a step of the node where the batch script runs.
    assert run.host.slurm["nodelist"] == "node[0-1]" and cluster.job(job)["BatchHost"] == "node0"
    assert list(out.glob("cpux2/*/*.json"))


@pytest.mark.parametrize("how", ["limit", "kill"])
def test_of_a_run_that_is_killed_nothing_is_left_on_any_node(cluster, tmp_path, how):
    """The launcher is Slurm's own srun, from outside of a job, as with salloc."""
    out, sockets = tmp_path / "out", tmp_path / "s"
    sockets.mkdir()
    srun = f"srun --nodes=2 --ntasks-per-node=1 --mpi=none {cluster.root}/benchmarks/slurm/node.sh"
    command = [sys.executable, "-m", "benchmarks.run", "--model", MODEL, "--preset", "tiny", "--no-control"]
    command += ["--variants", "hangs", "--out", str(out), "--nnodes", "2", "--launch", srun]
    command += ["--rendezvous", f"127.0.0.1:{free_ports(1)[0]}", *(["--limit-s", "8"] if how == "limit" else [])]
    process = subprocess.Popen(
        command,
        cwd=cluster.root,
        env=cluster.environment | {"GRAPH_SOCKET_DIR": str(sockets)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        begun = f"*/*/*{partial.SUFFIX}"
        assert until(lambda: any('"fact":"plan"' in path.read_text() for path in out.glob(begun)) or process.poll())
        # On each node torchrun and a rank, besides srun.
        assert len(processes_with(f"--worker\0{sockets}")) >= 5
        if how == "kill":
            process.kill()
            process.wait(60)
        else:
            said = process.communicate(timeout=300)[0]
            assert process.returncode == 1 and "no answer for 8 s" in said, said
        assert until(lambda: not processes_with(str(sockets)))
        assert until(lambda: cluster.states() == ["idle", "idle"])
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()


def test_slurm_refuses_and_nothing_stays(cluster, tmp_path):
    command = [sys.executable, "-m", "benchmarks.submit", "--model", MODEL, "--preset", "tiny"]
    command += ["--out", tmp_path / "out"]
    before = queued(cluster)
    # More nodes than there are.
    for more in (["--nodes", "3"], ["--nodes", "3", "--dry-run"]):
        answer = cluster.run(*command, *more, cwd=cluster.root)
        assert answer.returncode == 1 and "not available" in answer.stderr, answer.stderr
    assert queued(cluster) <= before
    assert not (tmp_path / "out").exists()


def test_an_image_without_the_plugin_fails_with_srun_s_own_words(cluster, tmp_path):
    out = tmp_path / "out"
    job, _ = submit(cluster, "--model", MODEL, "--out", out, "--image", "some#image")
    assert end(cluster, job) == "FAILED"
    log = text_of(out, f"slurm-{job}.out")
    assert "container-image" in log and "the image some#image cannot be had" in log
    assert Path(out, "logs", f"job-{job}.status").read_text() == "2\n"
