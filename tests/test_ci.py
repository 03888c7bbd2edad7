""".ci/run: what it runs, where it stops, what its last line says. size.py, names.py and rooms.py.

pytest tests/test_ci.py
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.processes import program

CI = Path(__file__).resolve().parent.parent / ".ci"

# Prints pytest's summary. A target named in FAILING fails, in FLAKY at its first call.
FAKE_MAKE = """#!/bin/bash
echo "make $*" >>"$CALLS"
case "$1 ${2:-}" in
"test ") echo "==== 12 passed, 2 skipped, 9 deselected in 3.21s ====" ;;
"test-slow ") echo "${SLOW_SUMMARY:-3 passed, 18 deselected in 61.00s (0:01:01)}" ;;
*" ARGS"*) echo "${AGAIN_SUMMARY:-1 passed in 1.00s}" ;;
esac
[ "$1" != "${FAILING:-}" ] || exit 2
[ "$1 ${2:-}" != "${FLAKY:-} " ] || { echo "FAILED tests/test_x.py::test_y[a b] - assert 1 == 2"; exit 2; }
"""
# Stands for the interpreter of pip.
FAKE_PYTHON = """#!/bin/bash
echo "python $*" >>"$CALLS"
[[ "$*" != *"${FAILING:-none}"* ]]
"""
# What comes in packages, all there, so that nothing is installed.
PACKAGED = ("sbatch", "slurmctld", "slurmd", "munged", "git", "shellcheck", "espeak-ng")
TOOLS = ("awk", "bash", "cat", "dirname", "id", "mktemp", "mv", "rm", "sed", "tee")


def run_ci(tmp_path, **variables):
    """A copy of .ci/run beside a make and a python that fail as asked: (exit status, output lines, calls)."""
    (tmp_path / ".ci").mkdir()
    (tmp_path / "work").mkdir()
    shutil.copy(CI / "run", tmp_path / ".ci")
    programs = {"make": FAKE_MAKE, "python": FAKE_PYTHON, **dict.fromkeys(PACKAGED, "#!/bin/bash\n")}
    for name, text in programs.items():
        program(tmp_path / name, text)
    for name in TOOLS:
        (tmp_path / name).symlink_to(shutil.which(name))
    folders = {
        "PATH": tmp_path,
        "PYTHON": tmp_path / "python",
        "CALLS": tmp_path / "calls",
        "TMPDIR": tmp_path / "work",
    }
    environment = {name: str(path) for name, path in folders.items()} | variables
    answer = subprocess.run(
        [tmp_path / ".ci" / "run"], cwd="/", env=environment, capture_output=True, text=True, timeout=300
    )
    assert not list((tmp_path / "work").iterdir()), "the temporary folder is left behind"
    return answer.returncode, answer.stdout.splitlines(), (tmp_path / "calls").read_text().splitlines()


def test_ci_runs_every_step_and_sums_the_tests(tmp_path):
    status, lines, calls = run_ci(tmp_path)
    assert status == 0
    assert calls[0] == "make lint" and calls[1].startswith("python -m pip ") and " triton==" in calls[1]
    assert calls[2:] == ["python .ci/size.py", "make test", "make test-slow"]
    assert "3 passed, 18 deselected in 61.00s (0:01:01)" in lines
    assert lines[-1].startswith("15 passed, 2 skipped in ") and lines[-1].endswith("s")


@pytest.mark.parametrize(
    ("failing", "step", "num_calls", "status", "passed"),
    [
        ("triton", "triton", 2, 1, 0),
        ("size", "size", 3, 1, 0),
        ("test", "test, once more what failed", 5, 2, 13),
        ("test-slow", "test-slow, once more what failed", 6, 2, 16),
    ],
)
def test_ci_stops_at_the_step_that_fails(tmp_path, failing, step, num_calls, status, passed):
    returned, lines, calls = run_ci(tmp_path, FAILING=failing)
    assert (returned, len(calls)) == (status, num_calls)
    assert lines[-2] == f"step {step} failed with exit status {status}"
    assert lines[-1].startswith(f"1 failed, {passed} passed, ")


def test_what_passes_when_it_is_run_once_more_is_named_and_fails_nothing(tmp_path):
    status, lines, calls = run_ci(tmp_path, FLAKY="test-slow", SLOW_SUMMARY="1 failed, 2 passed in 61.00s")
    assert status == 0
    assert calls[-1] == "make test-slow ARGS=--last-failed --last-failed-no-failures none -n 0"
    assert lines[-1].startswith("15 passed, 2 skipped in ")
    assert lines[-1].endswith("; flaky: tests/test_x.py::test_y[a b]")


def test_what_fails_twice_is_counted_once(tmp_path):
    summary = "2 failed, 1 passed, 1 error in 4.00s"
    _, lines, _ = run_ci(
        tmp_path, FAILING="test-slow", SLOW_SUMMARY=summary, AGAIN_SUMMARY="1 failed, 1 error in 3.00s"
    )
    assert lines[-1].startswith("2 failed, 13 passed, 2 skipped in ")


# ------------------------------------------------------------------------------------------------
# Sizes


def run_in_repository(folder, name):
    """A program of .ci in a folder that becomes a repository."""
    (folder / ".ci").mkdir()
    shutil.copy(CI / name, folder / ".ci")
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    subprocess.run(["git", "add", "."], cwd=folder, check=True)
    return subprocess.run([sys.executable, f".ci/{name}"], cwd=folder, capture_output=True, text=True)


PROGRAM = '"""Text."""\n\nVALUE = 1\n\n\ndef double(x):\n    """Text."""\n    return 2 * x\n'


def run_size(tmp_path, *rows):
    """(exit status, stdout, stderr) for a tree with PROGRAM and a test of one line, and a log with these rows."""
    for name, text in {
        "a.py": PROGRAM,
        "tests/test_a.py": "import a\n",
        "docs/log.md": "\n## Size\n\n" + "\n".join(rows),
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    done = run_in_repository(tmp_path, "size.py")
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (["| 9 | 3 | 1 | the first |", "| 8 | 3 | 1 | less |"], ""),
        (
            ["| 9 | 3 | 1 | the first |", "| 7 | 2 | 1 | less |"],
            "1 lines of source too many; 1 statements of source too",
        ),
        (["| 8 | 3 | 0 | the first |"], "1 lines of tests too many"),
        (["| 7 | 3 | 1 | the first |", "| 1,008 | 3 | 1 | |"], "the row 1,008 | 3 | 1 has no reason"),
        ([], "docs/log.md has no table of numbers"),
    ],
    ids=["equal", "source", "tests", "no reason", "no table"],
)
def test_a_tree_that_grows_is_refused_with_the_numbers(tmp_path, rows, said):
    status, out, err = run_size(tmp_path, *rows)
    assert (status, said in err) == (1 if said else 0, True), err
    assert not said or err.count("\n") == 1
    if not said:
        assert out.splitlines() == [
            "8 lines of source, 8 allowed",
            "3 statements of source, 3 allowed",
            "1 lines of tests, 1 allowed",
        ]


# ------------------------------------------------------------------------------------------------
# Names


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("for each in range(3):\n    print(each)\n", [1]),
        ("def double(own, /):\n    return [made for made in own]\n", [1, 2]),
        ("class Point:\n    own: int\n\n    def size(self):\n        return self.own\n", []),
        ("blocks = [block for block in range(3)]\n", []),
    ],
)
def test_a_name_that_says_nothing_is_refused_with_its_line(tmp_path, text, lines):
    for name, content in {"a.py": text, "tests/test_a.py": "each = 1\n"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    done = run_in_repository(tmp_path, "names.py")
    said = done.stdout.splitlines()
    assert done.returncode == bool(lines) and [line.split(":")[:2] for line in said] == [
        ["a.py", str(n)] for n in lines
    ]


# ------------------------------------------------------------------------------------------------
# Rooms


@pytest.mark.parametrize(
    ("path", "text", "said"),
    [
        ("mine/train.py", "import torch\nfrom yours.deep import layer\n", "mine/train.py:2: mine imports yours.deep "),
        ("mine/model.py", "def f():\n    import gpt3.model as m\n", "mine/model.py:2: mine imports gpt3 "),
        ("yours/deep/train.py", "from gpt3 import train\n", "yours/deep/train.py:1: yours.deep imports gpt3 "),
        ("mine/train.py", "from graph_worth import harness\n", "mine imports graph_worth.harness "),
        ("common/data.py", "import mine.model\n", "common/data.py:1: common imports mine "),
        ("mine/train.py", "from mine import model\nfrom common import gpt3\nimport gpt3_data\nimport yours\n", ""),
        ("yours/deep/other.py", "from . import train\nfrom .train import build\nfrom ..data import rows\n", ""),
        ("benchmarks/page.py", "from graph_worth.harness import judge\n", ""),
    ],
)
def test_a_model_of_any_folder_that_imports_another_is_refused_with_its_line(tmp_path, path, text, said):
    for name in ("gpt3/train.py", "mine/train.py", "mine/model.py", "yours/deep/train.py", path):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text if name == path else "")
    done = run_in_repository(tmp_path, "rooms.py")
    assert done.returncode == bool(said) and done.stdout.count("\n") == bool(said), done.stdout + done.stderr
    assert said in done.stdout


@pytest.mark.parametrize("program", ["size.py", "names.py", "rooms.py"])
def test_a_syntax_error_is_one_line(tmp_path, program):
    for name, text in {"mine/train.py": "x = 1\ndef f(:\n", "docs/log.md": "\n## Size\n\n| 9 | 3 | 1 | all |"}.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
    done = run_in_repository(tmp_path, program)
    assert done.returncode == 1 and done.stderr == "mine/train.py:2: invalid syntax\n", done.stderr
