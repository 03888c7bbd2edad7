""".ci/run with a `make` that is made up: a step that fails fails the run, and the last line counts the tests of all.

pytest tests/test_ci.py
"""

import shutil
import subprocess
from pathlib import Path

import pytest

RUN = Path(__file__).resolve().parent.parent / ".ci" / "run"
FAKE_MAKE = """#!/bin/bash
case $1 in
test) echo "==== 12 passed, 2 skipped, 9 deselected in 3.21s ====" ;;
test-slow) echo "${SLOW_SUMMARY:-3 passed, 18 deselected in 61.00s (0:01:01)}" ;;
esac
[ "$1" != "${FAILING:-}" ] || exit 2
"""
# There is no apt-get among them, so nothing is installed.
TOOLS = ("awk", "bash", "cat", "dirname", "env", "id", "mktemp", "rm", "tee")


def run_ci(tmp_path, **variables):
    """(exit status, last two lines) of .ci/run."""
    (tmp_path / "make").write_text(FAKE_MAKE)
    (tmp_path / "make").chmod(0o755)
    for name in TOOLS:
        (tmp_path / name).symlink_to(shutil.which(name))
    (tmp_path / "work").mkdir()
    # The interpreter only installs something.
    environment = {"PATH": str(tmp_path), "PYTHON": shutil.which("true"), "TMPDIR": str(tmp_path / "work")}
    answer = subprocess.run([RUN], env=environment | variables, capture_output=True, text=True, timeout=300)
    assert not list((tmp_path / "work").iterdir()), "the temporary folder is left behind"
    return answer.returncode, answer.stdout.splitlines()[-2:]


def test_the_last_line_sums_the_tests(tmp_path):
    status, (_, last) = run_ci(tmp_path)
    assert status == 0 and last.startswith("15 passed, 2 skipped in ")


@pytest.mark.parametrize(("failing", "passed"), [("lint", 0), ("test", 12), ("test-slow", 15)])
def test_a_step_that_fails_fails_the_run(tmp_path, failing, passed):
    status, (step, last) = run_ci(tmp_path, FAILING=failing)
    assert (status, step) == (2, f"step {failing} failed with exit status 2")
    assert last.startswith(f"1 failed, {passed} passed, ")


def test_failed_tests_are_counted(tmp_path):
    _, (_, last) = run_ci(tmp_path, FAILING="test-slow", SLOW_SUMMARY="2 failed, 1 passed, 1 error in 4.00s")
    assert last.startswith("3 failed, 13 passed, 2 skipped in ")
