""".ci/run: what it runs, where it stops, and what its last line says.

pytest tests/test_ci.py
"""

import shutil
import subprocess
from pathlib import Path

import pytest

CI = Path(__file__).resolve().parent.parent / ".ci"

FAKE_MAKE = """#!/bin/bash
echo "make $*" >>"$CALLS"
case $1 in
test) echo "==== 12 passed, 2 skipped, 9 deselected in 3.21s ====" ;;
test-slow) echo "${SLOW_SUMMARY:-3 passed, 18 deselected in 61.00s (0:01:01)}" ;;
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

# Stands for the interpreter of pip.
FAKE_PYTHON = """#!/bin/bash
echo "python $*" >>"$CALLS"
[ "${FAILING:-}" != triton ] || exit 1
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
    assert calls[2:] == ["make test", "make test-slow"]
    assert "3 passed, 18 deselected in 61.00s (0:01:01)" in lines
    assert lines[-1].startswith("15 passed, 2 skipped in ")


@pytest.mark.parametrize(
    ("failing", "num_calls", "status", "passed"),
    [
        ("triton", 2, 1, 0),
        ("test", 3, 2, 12),
        ("test-slow", 4, 2, 15),
    ],
)
def test_ci_stops_at_the_step_that_fails(tmp_path, failing, num_calls, status, passed):
    returned, lines, calls = run_ci(tmp_path, FAILING=failing)
    assert (returned, len(calls)) == (status, num_calls)
    assert lines[-2] == f"step {failing} failed with exit status {status}"
    assert lines[-1].startswith(f"1 failed, {passed} passed, ")


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
