"""common/source: one number for the code of a checkout, a copy and a commit; what a run used; git's state."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from common import source

ROOT = Path(__file__).resolve().parent.parent

CODE = (
    "common/__init__.py",
    "common/a.py",
    "common/rules.yaml",
    "gpt3/train.py",
    "gpt3/deep/b.py",
    "gpt3/kernel.cu",
    "gpt3/kernel.h",
    "gpt3/host.cpp",
    "benchmarks/run.py",
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
    "tests/fake_model/train.py",
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
    for name in ("rnnt/lstm_kernel.cu", "setup.sh", "Makefile", "constraints.txt", "common/mllog_rules.yaml"):
        assert name in code
    left_out = ("results/", "tests/", "docs/", ".ci/")
    assert {name for name in tracked if name.endswith((".py", ".cu", ".sh")) and not name.startswith(left_out)} <= code
    assert not any(name.startswith(left_out[:3]) for name in code)


@pytest.mark.parametrize("name", [*CODE, "gpt3/new.py", "gpt3/scratch.py", "top.py", "llama/train.py"])
def test_hash_follows_all_code(repository, name):
    before = source.source_hash(repository)
    write(repository, name, "changed\n")
    after = source.source_hash(repository)
    assert after != before
    assert source.source_hash_of_commit("HEAD", repository) == before
    git(repository, "add", "-f", name)
    commit(repository)
    assert source.source_hash_of_commit("HEAD", repository) == after


# Nobody commits a virtual environment, and a commit is not searched for one.
@pytest.mark.parametrize("name", [name for name in (*OTHER, *BESIDE) if not name.startswith("venv")])
def test_hash_ignores_the_rest_in_the_tree_and_in_the_commit(repository, name):
    before = source.source_hash(repository)
    write(repository, name, "changed\n")
    assert source.source_hash(repository) == before
    git(repository, "add", "-f", name)
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


def test_hash_of_links_is_gits(repository, tmp_path):
    """A linked file counts by where it points; a linked folder is not entered."""
    (repository / "gpt3/linked.py").symlink_to("train.py")
    (repository / "gpt3/dangling.py").symlink_to("nowhere.py")
    write(tmp_path, "outside/x.py", "x\n")
    (repository / "gpt3/outside").symlink_to(tmp_path / "outside")
    git(repository, "add", "-A")
    commit(repository)
    assert source.source_hash(repository) == source.source_hash_of_commit("HEAD", repository)
    assert not any("outside" in name for name in source.code_files(repository))


def test_hash_of_odd_names_is_gits(repository):
    write(repository, "gpt3/a name of words\nand lines.py", "x\n")
    (repository / os.fsdecode(b"gpt3/\xff.py")).write_text("x\n")
    git(repository, "add", "-A")
    commit(repository)
    assert source.source_hash(repository) == source.source_hash_of_commit("HEAD", repository)


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


def test_hash_of_schema_1_is_that_of_common_and_the_model(repository):
    def of(model):
        return source.source_hash_1_of_commit(model, "HEAD", repository)

    names = ("common/__init__.py", "common/a.py", "gpt3/deep/b.py", "gpt3/train.py")
    assert of("gpt3") == source.hash_files({name: f"{name}\n".encode() for name in names})
    names = ("common/__init__.py", "common/a.py", "tests/fake_model/train.py")
    assert of("tests.fake_model") == source.hash_files({name: f"{name}\n".encode() for name in names})
    assert of("gpt9") is None
    assert source.source_hash_1_of_commit("gpt3", "0" * 40, repository) is None


def test_hash_of_schema_1_is_what_committed_records_hold():
    """results/h200x2/stable_diffusion-bench names this commit; a shallow clone may lack it."""
    found = source.source_hash_1_of_commit("stable_diffusion", "8764da6c876696d865f7e228015b8bac0fbb7fe7")
    assert found in ("0030626a4512e4f9", None)


# --- run_hash


def run_hash_of(root, code):
    """What `run_hash` gives in a process that has run `code` in `root`."""
    program = f"{code}\nfrom common import source\nfrom pathlib import Path\nprint(source.run_hash(Path.cwd()))"
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": ""}
    answer = subprocess.run([sys.executable, "-c", program], cwd=root, env=environment, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout.strip()


@pytest.fixture
def importable(tmp_path):
    """A tree with the real common/source.py and modules beside it."""
    root = tmp_path / "tree"
    (root / "common").mkdir(parents=True)
    shutil.copy(ROOT / "common/source.py", root / "common/source.py")
    for name in (
        "used",
        "unused",
        "conftest",
        "tests/fake_model/train",
        ".cache/made",
        "runs/made",
        "env/lib/installed",
    ):
        write(root, f"{name}.py", f"# {name}\n")
    write(root, "kernel.cu", "kernel\n")
    write(root, "constraints.txt", "torch==2\n")
    write(root, "env/pyvenv.cfg", "home\n")
    return root


IMPORTS = (
    "import sys; sys.path += ['.cache', 'runs', 'env/lib']; sys.modules['odd'] = None; import torchless",
    "import used, conftest, tests.fake_model.train",
    "import installed",
)


def test_run_hash_is_of_what_the_process_used(importable):
    write(importable, ".cache/torchless.py", "from importlib import import_module\n")
    code = "; ".join(IMPORTS)
    expected = ("common/source.py", "used.py", "tests/fake_model/train.py", "constraints.txt")
    files = {name: (importable / name).read_bytes() for name in expected}
    assert run_hash_of(importable, code) == source.hash_files(files)
    compiled = f"{code}; from common.source import note_compiled; note_compiled('kernel.cu')"
    files["kernel.cu"] = b"kernel\n"
    assert run_hash_of(importable, compiled) == source.hash_files(files)


def test_run_hash_follows_what_was_used_and_nothing_else(importable):
    code = "import used; from common.source import note_compiled; note_compiled('kernel.cu')"
    before = run_hash_of(importable, code)
    for name in ("unused.py", ".cache/made.py", "Makefile"):
        write(importable, name, "changed = 1\n")
        assert run_hash_of(importable, code) == before, name
    assert run_hash_of(importable, "import used") != before
    for name in ("used.py", "kernel.cu", "constraints.txt", "common/__init__.py"):
        before = run_hash_of(importable, code)
        write(importable, name, "changed = 1\n")
        assert run_hash_of(importable, code) != before, name


def test_run_hash_knows_the_script_that_runs(importable):
    write(
        importable,
        "train.py",
        "from common import source\nfrom pathlib import Path\nprint(source.run_hash(Path.cwd()))",
    )
    command = [sys.executable, "-m", "train"]
    answer = subprocess.run(command, cwd=importable, capture_output=True, text=True, check=True)
    names = ("common/source.py", "train.py", "constraints.txt")
    files = {name: (importable / name).read_bytes() for name in names}
    assert answer.stdout.strip() == source.hash_files(files)


def test_the_kernels_source_is_noted(monkeypatch):
    pytest.importorskip("torch")
    from rnnt import lstm_kernel

    monkeypatch.setattr(source, "compiled", set())
    before = source.run_hash()
    # Without a compiler it fails after the source has been read; what it says is tested elsewhere.
    monkeypatch.setitem(sys.modules, "cuda.bindings", type(sys)("cuda.bindings"))
    sys.modules["cuda.bindings"].nvrtc = object()
    with pytest.raises(AttributeError):
        lstm_kernel.compile_source(256, 16, 1, (9, 0))
    assert source.compiled == {str(ROOT / "rnnt/lstm_kernel.cu")}
    assert source.run_hash() != before


# --- git_state


def test_state_is_clean_after_a_commit(repository, monkeypatch):
    monkeypatch.setenv("SOURCE_SHA", "not this one")
    write(repository, "gpt3/notes.txt", "does not run\n")
    for name in BESIDE:
        write(repository, name, "beside\n")
    write(repository, "results/h200x1/plot.py", "changed evidence\n")
    write(repository, "results/h200x1/new.json", "{}\n")
    head, tree = git(repository, "rev-parse", "HEAD"), git(repository, "rev-parse", "HEAD^{tree}")
    assert source.git_state(repository) == (head, tree, False)


@pytest.mark.parametrize(
    "name", ["benchmarks/run.py", "gpt3/README.md", "tests/conftest.py", "gpt3/new.py", "common/scratch.py", "new.sh"]
)
def test_state_is_dirty_for_tracked_changes_and_new_code(repository, name):
    write(repository, name, "changed\n")
    assert source.git_state(repository)[2] is True


def test_state_is_dirty_for_a_removed_file(repository):
    (repository / "docs/method.py").unlink()
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


def test_state_of_a_repository_without_a_commit(tmp_path, monkeypatch):
    git(tmp_path, "init", "-q")
    monkeypatch.setenv("SOURCE_SHA", "abc")
    assert source.git_state(tmp_path)[0] == "abc"
