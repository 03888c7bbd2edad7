"""The identity of the code that ran: a hash over all code of the tree, and its state in git.

`source_hash` has to be the same number in a checkout, in a copy without .git on another machine, and for a commit that
is not checked out. So a rule on paths alone says what code is (`is_code`), and git is not asked: git's list of tracked
files does not travel with a copy, and packs and scratch folders lie beside the code there. A file that the rule counts
and git does not know makes the tree dirty, so that the hash of a clean tree is always that of its commit.
"""

import hashlib
import io
import os
import subprocess
import tarfile
from pathlib import Path, PurePosixPath

from graph_worth.folders import CODE, ROOT, models_below

SUFFIXES = (".py", ".cu", ".cuh", ".cpp", ".h", ".sh", ".sbatch", ".toml", ".yaml")
NAMES = ("Makefile", "constraints.txt")
# At the top: evidence, tests and documents decide nothing about what is measured.
TOP_FOLDERS_LEFT_OUT = ("results", "tests", "docs")
# Anywhere: what .gitignore leaves out, and what tools make.
FOLDERS_LEFT_OUT = ("runs", "build", "dist", "node_modules", "__pycache__")
HIDDEN_FOLDER_OF_CODE = ".ci"

# ------------------------------------------------------------------------------------------------
# What code is


def is_code(path: str) -> bool:
    """Return whether a file counts for `source_hash`. path: relative to the repository's root, with slashes."""
    *folders, name = path.split("/")
    if not (name in NAMES or PurePosixPath(name).suffix in SUFFIXES):
        return False
    return not (folders and folders[0] in TOP_FOLDERS_LEFT_OUT) and all(map(_may_hold_code, folders))


def _may_hold_code(folder):
    if folder.startswith("."):
        return folder == HIDDEN_FOLDER_OF_CODE
    return folder not in FOLDERS_LEFT_OUT and not folder.endswith(".egg-info")


def code_files(root: Path = CODE) -> list[str]:
    """Paths of all code below `root`, relative to it, sorted. Linked folders and virtual environments are left out."""
    paths = []
    for folder, folders, names in os.walk(root):
        prefix = Path(folder).relative_to(root).as_posix()
        prefix = "" if prefix == "." else prefix + "/"
        if prefix and "pyvenv.cfg" in names:
            folders.clear()
            continue
        folders[:] = [name for name in folders if _may_hold_code(name) and (prefix or name not in TOP_FOLDERS_LEFT_OUT)]
        paths += [prefix + name for name in names if is_code(prefix + name)]
    return sorted(paths)


# ------------------------------------------------------------------------------------------------
# Hashes


def source_hash(root: Path = CODE, project: Path | None = None) -> str:
    """First 16 hex digits of a SHA-256 over path and content of all code below `root`, and of a project's models.

    Independent of git and of the order in which the file system lists. A link counts by where it points, as in git.
    project: a folder outside of `root`, where code in the folders that have a train.py counts, too.
    """
    files = {name: _content(root / name) for name in code_files(root)}
    if project is not None:
        for folder in models_below(project):
            where = folder.relative_to(project).as_posix()
            files |= {f"project/{where}/{name}": _content(folder / name) for name in code_files(folder)}
    return hash_files(files)


def source_hash_of_commit(sha: str, root: Path = CODE) -> str | None:
    """`source_hash` of the files as they are in commit `sha`; None without git, that commit or any code in it."""
    left_out = [f":(exclude,top){folder}" for folder in TOP_FOLDERS_LEFT_OUT]
    archive = _git(root, "archive", "--format=tar", f"{sha}^{{commit}}", "--", ".", *left_out)
    if archive is None:
        return None
    files = {}
    with tarfile.open(fileobj=io.BytesIO(archive), errors="surrogateescape") as tar:
        for member in tar:
            if member.isdir() or not is_code(member.name):
                continue
            file = tar.extractfile(member) if member.isfile() else None
            files[member.name] = file.read() if file else os.fsencode(member.linkname)
    return hash_files(files) if files else None


def _content(path):
    return os.fsencode(os.readlink(path)) if path.is_symlink() else path.read_bytes()


def hash_files(files):
    """files: path relative to the root -> content. Lengths are hashed too, so that no two trees run together."""
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(f"{name}\0{len(files[name])}\0".encode(errors="surrogateescape"))
        digest.update(files[name])
    return digest.hexdigest()[:16]


# ------------------------------------------------------------------------------------------------
# git


def git_state(root: Path = CODE) -> tuple[str | None, str | None, bool | None]:
    """(sha of HEAD, hash of its tree, whether the files differ from it). None: not known.

    Dirty means a changed tracked file outside results/, or a file that `is_code` counts and git does not track, ignored
    or not: it could be imported like any other. A copy of the files may lie beside no .git, or beside the .git of
    another commit: SOURCE_SHA, SOURCE_TREE and SOURCE_DIRTY (0 or 1) of the environment come first.
    """
    head = None
    if not os.environ.get("SOURCE_SHA", "").strip() and (root / ".git").exists():
        head = _git(root, "rev-parse", "HEAD", "HEAD^{tree}")
    if head is None:
        dirty = os.environ.get("SOURCE_DIRTY", "").strip().lower()
        sha, tree = (os.environ.get(name, "").strip() or None for name in ("SOURCE_SHA", "SOURCE_TREE"))
        return sha, tree, dirty not in ("0", "false") if dirty else None
    sha, tree = head.decode().split()
    outside = ("--", ".", ":(exclude,top)results")
    changed = _git(root, "--no-optional-locks", "status", "--porcelain", "--untracked-files=no", *outside)
    tracked = _git(root, "ls-files", "-z")
    if changed is None or tracked is None:
        return sha, tree, None
    unknown = set(code_files(root)) - set(tracked.decode(errors="surrogateescape").split("\0"))
    return sha, tree, bool(changed or unknown)


def describe_source(root: Path = CODE) -> dict:
    """Return `git_state` and `source_hash` by the names that they have beside a run's environment."""
    sha, tree, dirty = git_state(root)
    project = None if ROOT.is_relative_to(CODE) else ROOT
    return {"git_sha": sha, "git_tree": tree, "git_dirty": dirty, "source_hash": source_hash(root, project)}


def last_commits(number: int, root: Path = CODE) -> list[str]:
    """The last commits of HEAD, newest first; none where git does not answer."""
    answer = _git(root, "rev-list", "-n", str(number), "HEAD")
    return answer.decode().split() if answer else []


def _git(root, *arguments):
    """Return git's output as bytes, or None where git or the repository has no answer."""
    # A git hook exports GIT_DIR and GIT_INDEX_FILE, which would redirect these calls.
    variables = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        return subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, check=True, env=variables
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
