"""common/source: one number for the code of a checkout, a copy and a commit; what a run used; git's state."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from graph_worth.machine import source

ROOT = Path(__file__).resolve().parents[3]

CODE = (
    "common/__init__.py",
    "common/a.py",
    "common/rules.yaml",
    "gpt3/train.py",
    "gpt3/deep/b.py",
    "gpt3/kernel.cu",
    "gpt3/kernel.h",
    "gpt3/host.cpp",
    "graph_worth/harness/run.py",
    "benchmarks/slurm/bench.sbatch",
    "benchmarks/results/reader.py",
    ".ci/check.py",
    "setup.sh",
    "pyproject.toml",
    "Makefile",
    "constraints.txt",
)
OTHER = (
    "README.md",
    "gpt3/README.md",
    "gpt3/words.txt",
    "docs/method.py",
    "tests/conftest.py",
    "tests/lying_model/train.py",
    "results/h200x1/plot.py",
    ".gitignore",
)
# None of these is tracked: what lies beside the code on a machine that measures.
BESIDE = (
    ".gpu_te/transformer_engine/common.py",
    ".venv/lib/python3.11/site-packages/torch/nn.py",
    ".github/check.yaml",
    "venv/pyvenv.cfg",
    "venv/lib/python3.11/site-packages/torch/nn.py",
    "runs/cpux1/gpt3-tiny/.cache/inductor/x.py",
    "gpt3/runs/x.py",
    "build/lib/gpt3/train.py",
    "dist/x.py",
    "node_modules/x.py",
    "graph_worth.egg-info/x.py",
    "gpt3/__pycache__/x.py",
    "results/h200x1/new.py",
    "notes.txt",
    "gpt3/train.pyc",
)


def write(root, name, content):
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(content)


@pytest.fixture
def repository(tmp_path):
    """A repository of CODE and OTHER, committed; what a file holds is its name."""
    root = tmp_path / "repository"
    for name in (*CODE, *OTHER):
        write(root, name, f"{name}\n")
    write(root, ".gitignore", "scratch*\n__pycache__\n.venv/\n")
    git(root, "init", "-q")
    git(root, "add", "-A")
    commit(root)
    return root


def git(root, *arguments):
    command = ["git", "-C", root, "-c", "user.name=n", "-c", "user.email=e", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def commit(root):
    git(root, "commit", "-q", "-a", "-m", "m", "--no-gpg-sign")


# --- source_hash


def test_hash_is_the_same_in_a_checkout_a_copy_and_for_the_commit(repository, tmp_path):
    value = source.source_hash(repository)
    assert re.fullmatch(r"[0-9a-f]{16}", value)
    assert source.source_hash_of_commit("HEAD", repository) == value
    copy = tmp_path / "elsewhere" / "copy"
    shutil.copytree(repository, copy, ignore=shutil.ignore_patterns(".git"))
    for name in BESIDE:
        write(copy, name, "beside\n")
    assert source.source_hash(copy) == value
    assert source.code_files(copy) == source.code_files(repository) == sorted(CODE)


def test_hash_of_this_repository_counts_its_code():
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    if not tracked:
        pytest.skip("no git here")
    code = set(source.code_files())
    for name in ("rnnt/kernels/lamb.py", "setup.sh", "Makefile", "constraints.txt"):
        assert name in code
    left_out = ("results/", "tests/", "docs/", ".ci/")
    assert {name for name in tracked if name.endswith((".py", ".cu", ".sh")) and not name.startswith(left_out)} <= code
    assert not any(name.startswith(left_out[:3]) for name in code)


def test_hash_follows_all_code_in_the_tree_and_in_the_commit(repository):
    seen = [source.source_hash(repository)]
    for name in (*CODE, "gpt3/new.py", "gpt3/scratch.py", "top.py"):
        write(repository, name, "changed\n")
        seen.append(source.source_hash(repository))
    assert len(set(seen)) == len(seen)
    assert source.source_hash_of_commit("HEAD", repository) == seen[0]
    git(repository, "add", "-f", ".")
    commit(repository)
    assert source.source_hash_of_commit("HEAD", repository) == seen[-1]


def test_hash_ignores_the_rest_in_the_tree_and_in_the_commit(repository):
    before = source.source_hash(repository)
    # Nobody commits a virtual environment, and a commit is not searched for one.
    for name in [name for name in (*OTHER, *BESIDE) if not name.startswith("venv")]:
        write(repository, name, "changed\n")
        assert source.source_hash(repository) == before, name
    git(repository, "add", "-f", ".")
    commit(repository)
    assert source.source_hash_of_commit("HEAD", repository) == before


def test_hash_sees_a_rename_and_moved_borders(repository):
    before = source.source_hash(repository)
    (repository / "gpt3/train.py").rename(repository / "gpt3/trail.py")
    assert source.source_hash(repository) != before
    two_files = source.hash_files({"a": b"x", "b": b"y"})
    assert source.hash_files({"a": b"xb\0y"}) != two_files
    assert source.hash_files({"a": b"xb\0\0y"}) != two_files
    assert source.hash_files({"a": b"xb\x001\0y"}) != two_files


def test_hash_of_links_and_odd_names_is_gits(repository, tmp_path):
    """A linked file counts by where it points; a linked folder is not entered."""
    (repository / "gpt3/linked.py").symlink_to("train.py")
    (repository / "gpt3/dangling.py").symlink_to("nowhere.py")
    write(tmp_path, "outside/x.py", "x\n")
    (repository / "gpt3/outside").symlink_to(tmp_path / "outside")
    write(repository, "gpt3/a name of words\nand lines.py", "x\n")
    (repository / os.fsdecode(b"gpt3/\xff.py")).write_text("x\n")
    git(repository, "add", "-A")
    commit(repository)
    assert source.source_hash(repository) == source.source_hash_of_commit("HEAD", repository)
    assert not any("outside" in name for name in source.code_files(repository))


def test_hash_of_unknown_commits(repository, tmp_path, monkeypatch):
    assert source.source_hash_of_commit("0" * 40, repository) is None
    assert source.source_hash_of_commit("--help", repository) is None
    assert source.source_hash_of_commit("HEAD", tmp_path) is None
    for name in CODE:
        git(repository, "rm", "-q", name)
    commit(repository)
    assert source.source_hash_of_commit("HEAD", repository) is None
    monkeypatch.setenv("PATH", "")
    assert source.source_hash_of_commit("HEAD~1", repository) is None


# --- git_state


def test_state_is_clean_after_a_commit(repository, monkeypatch):
    write(repository, "gpt3/notes.txt", "does not run\n")
    for name in BESIDE:
        write(repository, name, "beside\n")
    write(repository, "results/h200x1/plot.py", "changed evidence\n")
    write(repository, "results/h200x1/new.json", "{}\n")
    head, tree = git(repository, "rev-parse", "HEAD"), git(repository, "rev-parse", "HEAD^{tree}")
    assert source.git_state(repository) == (head, tree, False)
    # A copy of the files may lie beside the .git of another commit.
    for name, value in (("SOURCE_SHA", "abc"), ("SOURCE_TREE", "def"), ("SOURCE_DIRTY", "0")):
        monkeypatch.setenv(name, value)
    assert source.git_state(repository) == ("abc", "def", False)


@pytest.mark.parametrize("name", ["graph_worth/harness/run.py", "tests/conftest.py", "common/scratch.py", "new.sh"])
def test_state_is_dirty_for_tracked_changes_and_new_code(repository, name):
    write(repository, name, "changed\n")
    assert source.git_state(repository)[2] is True


def test_state_inside_a_hook(repository, tmp_path, monkeypatch):
    git(tmp_path, "init", "-q", "elsewhere")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere" / ".git"))
    assert source.git_state(repository)[2] is False


@pytest.mark.parametrize("text, dirty", [("0", False), ("false", False), ("1", True), ("", None)])
def test_state_from_the_environment(tmp_path, monkeypatch, text, dirty):
    monkeypatch.setenv("SOURCE_SHA", "abc")
    monkeypatch.setenv("SOURCE_TREE", "def")
    monkeypatch.setenv("SOURCE_DIRTY", text)
    assert source.git_state(tmp_path) == ("abc", "def", dirty)
    monkeypatch.delenv("SOURCE_SHA")
    monkeypatch.setenv("SOURCE_TREE", "")
    assert source.git_state(tmp_path)[:2] == (None, None)
