""".ci/run and .ci/check_run.py: what they run, what they refuse, and what their last line says.

pytest tests/test_ci.py
"""

import dataclasses
import importlib.util
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from tests.helpers.made_run import made_run, write

CI = Path(__file__).resolve().parent.parent / ".ci"

spec = importlib.util.spec_from_file_location("check_run", CI / "check_run.py")
check_run = importlib.util.module_from_spec(spec)
spec.loader.exec_module(check_run)


@pytest.fixture
def run():
    """As on a machine without a GPU: three cycles, and graph_layer_te cannot run."""
    return made_run(preset="tiny", gpus=(), cycles=3, unsupported=("graph_layer_te",))


def faults_of(run, num_cycles=3):
    return check_run.run_faults(run, ["eager", "graph_layer"], num_cycles)


def variant(run, name="graph_layer"):
    return run.builds[""].variants[name]


# ------------------------------------------------------------------------------------------------
# check_run.py


def test_a_whole_and_sound_run_has_no_fault(run, tmp_path):
    assert faults_of(run) == []
    write(run, tmp_path / "cpux1" / "gpt3-tiny")
    assert check_run.find_faults(tmp_path, ["eager", "graph_layer"], 3) == []


def test_status_other_than_pass(run):
    for name in ("graph_layer", "graph_layer_te"):
        variant(run, name).status, variant(run, name).reason = "oom", "no memory"
    assert faults_of(run) == ["graph_layer: oom: no memory", "graph_layer_te: oom: no memory"]


@pytest.mark.parametrize(("result", "after"), [("2.1e-05", "bitwise"), ("bitwise", "differs by 1.0"), (None, None)])
def test_parity_other_than_bitwise(run, result, after):
    own = variant(run)
    own.parity = None if result is None else dataclasses.replace(own.parity, result=result, after=after)
    (fault,) = faults_of(run)
    assert fault.startswith("graph_layer: parity is ") and fault.endswith("not bitwise")


def test_cycles_that_are_missing(run):
    assert "3 cycles, not 8" in faults_of(run, 8)
    variant(run).blocks.pop()
    assert faults_of(run) == ["graph_layer: blocks in 2 cycles, not 3"]


def test_a_variant_that_is_missing_and_a_run_that_ended_early(run):
    del run.builds[""].variants["graph_layer"]
    run.whole = False
    assert faults_of(run) == ["it ended early", "graph_layer is missing"]


def test_none_two_damaged_and_unsealed_files_are_faults(run, tmp_path):
    def faults():
        return check_run.find_faults(tmp_path / "runs", [], 3)

    assert faults() == [f"0 run files below {tmp_path}/runs, not one"]
    path = write(run, tmp_path / "runs" / "cpux1" / "gpt3-tiny")
    path.chmod(0o644)
    assert faults() == [f"{path.name} is not sealed, it may be written"]
    path.chmod(0o444)
    second = write(dataclasses.replace(run, id="20261125T111500Z-a7d396aa"), path.parent)
    assert faults() == [f"2 run files below {tmp_path}/runs, not one"]
    second.chmod(0o644)
    second.write_text(second.read_text()[:100])
    assert faults() == [f"{second}: no whole JSON"]


def test_exit_status_follows_the_faults(run, tmp_path, capsys):
    write(run, tmp_path / "cpux1" / "gpt3-tiny")
    assert check_run.main([str(tmp_path), "--cycles", "3"]) == 0
    assert check_run.main([str(tmp_path), "--cycles", "4"]) == 1
    assert "check_run.py: " in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------
# run

FAKE_MAKE = """#!/bin/bash
echo "make $*" >>"$CALLS"
case $1 in
test) echo "==== 12 passed, 2 skipped, 9 deselected in 3.21s ====" ;;
test-slow) echo "${SLOW_SUMMARY:-3 passed, 18 deselected in 61.00s (0:01:01)}" ;;
bench)
    echo "12 steps a second"
    [ -z "${ENDLESS:-}" ] || exec sleep 600
    ;;
esac
[ "$1" != "${FAILING:-}" ] || exit 2
"""

# What comes in packages, all there, so that nothing is installed.
SLURM = ("sbatch", "slurmctld", "slurmd", "munged")
PACKAGED = (*SLURM, "git", "shellcheck", "espeak-ng")
TOOLS = ("awk", "bash", "cat", "chmod", "dirname", "env", "id", "mktemp", "rm", "sleep", "tee")
FAKE_SUDO = '#!/bin/bash\nshift\nexec "$@"\n'
# Installs the names in INSTALLS beside itself.
FAKE_APT = """#!/bin/bash
echo "apt-get $*" >>"$CALLS"
[ "${FAILING:-}" != apt-get ] || exit 100
[[ "$*" == *install* ]] || exit 0
for name in ${INSTALLS:-sbatch slurmctld slurmd munged}; do
    : >"${0%/*}/$name"
    chmod +x "${0%/*}/$name"
done
"""

# Stands for the interpreter of pip and of the checker.
FAKE_PYTHON = """#!/bin/bash
echo "python $*" >>"$CALLS"
step=run
[[ "$*" != *pip* ]] || step=triton
[ "${FAILING:-}" != $step ] || exit 1
"""


def run_ci(tmp_path, packaged=PACKAGED, **variables):
    """A copy of .ci/run among fakes: (exit status, output lines, calls)."""
    (tmp_path / ".ci").mkdir()
    # Only what is in the folder counts, not this machine's daemons.
    (tmp_path / ".ci" / "run").write_text((CI / "run").read_text().replace(":/usr/sbin", ""))
    (tmp_path / ".ci" / "run").chmod(0o755)
    fakes = {name: "#!/bin/bash\n" for name in packaged}
    for name, text in {
        "make": FAKE_MAKE,
        "python": FAKE_PYTHON,
        "apt-get": FAKE_APT,
        "sudo": FAKE_SUDO,
        **fakes,
    }.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    for name in TOOLS:
        (tmp_path / name).symlink_to(shutil.which(name))
    (tmp_path / "work").mkdir()
    environment = {
        "PATH": str(tmp_path),
        "PYTHON": str(tmp_path / "python"),
        "CALLS": str(tmp_path / "calls"),
        "TMPDIR": str(tmp_path / "work"),
        "CI": "true",
        **variables,
    }
    answer = subprocess.run(
        [tmp_path / ".ci" / "run"], cwd="/", env=environment, capture_output=True, text=True, timeout=300
    )
    assert not list((tmp_path / "work").iterdir()), "the temporary folder is left behind"
    return answer.returncode, answer.stdout.splitlines(), (tmp_path / "calls").read_text().splitlines()


def test_ci_runs_every_step_and_sums_the_tests(tmp_path):
    status, lines, calls = run_ci(tmp_path)
    assert status == 0
    assert calls[0] == "make lint" and calls[1].startswith("python -m pip ") and " triton==" in calls[1]
    assert calls[2] == "make test"
    # The benchmark runs beside the slow tests.
    bench, slow = sorted(calls[3:5])
    assert bench.startswith("make bench MODEL=gpt3 PRESET=tiny OUT=") and slow == "make test-slow"
    folder = bench.partition("OUT=")[2]
    assert calls[5:] == [f"python .ci/check_run.py {folder} --cycles 3"]
    assert lines.index("12 steps a second") > lines.index("3 passed, 18 deselected in 61.00s (0:01:01)")
    assert lines[-1].startswith("15 passed, 2 skipped in ")


@pytest.mark.parametrize(
    ("failing", "num_calls", "status", "passed"),
    [
        ("triton", 2, 1, 0),
        ("test", 3, 2, 12),
        ("test-slow", 4, 2, 15),
        ("run", 5, 1, 15),
    ],
)
def test_ci_stops_at_the_step_that_fails(tmp_path, failing, num_calls, status, passed):
    returned, lines, calls = run_ci(tmp_path, FAILING=failing)
    assert (returned, len([call for call in calls if not call.startswith("make bench")])) == (status, num_calls)
    assert lines[-2] == f"step {failing} failed with exit status {status}"
    assert lines[-1].startswith(f"1 failed, {passed} passed, ")


def test_ci_ends_the_benchmark_where_slow_tests_fail(tmp_path):
    start = time.monotonic()
    status, lines, _ = run_ci(tmp_path, FAILING="test-slow", ENDLESS="1")
    assert status == 2 and lines[-2] == "step test-slow failed with exit status 2"
    assert time.monotonic() - start < 240


def test_ci_installs_what_the_tests_with_slurm_need(tmp_path):
    # As after apt install slurm-client slurmd.
    status, _, calls = run_ci(tmp_path, packaged=("sbatch", "slurmd", "munged", "git"))
    assert status == 0
    assert calls[:2] == [
        "apt-get -qq update",
        "apt-get -qq install -y --no-install-recommends shellcheck espeak-ng slurm-wlm munge",
    ]
    assert calls[2] == "make lint"


@pytest.mark.parametrize("variables", [{"INSTALLS": "sbatch slurmd munged"}, {"FAILING": "apt-get"}])
def test_ci_fails_where_slurm_could_be_installed_and_was_not(tmp_path, variables):
    status, lines, calls = run_ci(tmp_path, packaged=("git", "shellcheck", "espeak-ng"), **variables)
    assert status != 0 and not any(call.startswith("make") for call in calls)
    assert lines[-2].startswith("step packages failed")


def test_ci_without_slurm_if_told(tmp_path):
    status, _, calls = run_ci(tmp_path, packaged=("git", "shellcheck", "espeak-ng"), WITHOUT_SLURM="1")
    assert status == 0 and calls[0] == "make lint"


def test_ci_counts_failed_tests(tmp_path):
    summary = "2 failed, 1 passed, 1 error in 4.00s"
    _, lines, _ = run_ci(tmp_path, FAILING="test-slow", SLOW_SUMMARY=summary)
    assert lines[-1].startswith("3 failed, 13 passed, 2 skipped in ")
