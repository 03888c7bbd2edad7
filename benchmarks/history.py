"""Whether evidence only grew: every record that the history ever held is in some session, and no session has changed.

    python -m benchmarks.history            exit status 0, or 1 with a line for each fault

Needs git and the whole history. In a shallow clone or an archive `what_is_missing` says so, and the files are checked
against results/sessions.sha256 alone.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

from benchmarks import ROOT, sessions
from common.source import read_blobs

# What is made again from records stands beside sessions and may change.
_IN_SESSION = re.compile(r"results/(?:[^/]+/)*" + sessions.NAME.pattern + r"/.+")
_RECORD = re.compile(r"results/.*\.r\d+\.json")


def what_is_missing(root=ROOT) -> str | None:
    """Why the history cannot be asked, in words, or None."""
    if not (Path(root) / ".git").exists():
        return "no .git: an archive"
    if _git(root, "rev-parse", "--is-shallow-repository").strip() != b"false":
        return "a shallow clone"
    return None


def faults(root=ROOT) -> list[str]:
    """A line for each record of the history that is in no session, and each session file that was changed or removed.

    Raises OSError or CalledProcessError where git does not answer.
    """
    root = Path(root)
    versions = _versions(root)
    there = {_canonical(record) for session in sessions.find(root / "results") for record in _records(session)}
    wanted = {blob: path for path, blobs in versions.items() if _RECORD.fullmatch(path) for blob in blobs}
    lines = []
    for blob, content in read_blobs(wanted, root).items():
        try:
            record = json.loads(content)
        except ValueError:
            lines.append(f"{wanted[blob]} ({blob[:12]}): not a whole JSON document, and in no session")
            continue
        if _canonical(record) not in there:
            lines.append(f"{wanted[blob]} ({blob[:12]}): in no session")
    for path, blobs in sorted(versions.items()):
        if not _IN_SESSION.fullmatch(path):
            continue
        file = root / path
        if not file.is_file():
            lines.append(f"{path}: committed once, and gone")
        elif len(blobs) > 1 or _git(root, "hash-object", "--no-filters", str(file)).decode().strip() not in blobs:
            lines.append(f"{path}: changed since it was committed first")
    listed = read_blobs(versions.get(f"results/{sessions.SUMS}", ()), root)
    ever = {line for text in listed.values() for line in text.decode().splitlines() if line}
    sums = root / "results" / sessions.SUMS
    for line in sorted(ever - set(sums.read_text().splitlines() if sums.is_file() else ())):
        lines.append(f"{sessions.SUMS}: the line of {line.partition('  ')[2]} is gone or changed")
    return lines


def _versions(root):
    """path below results/ -> blobs that it ever was, over all commits of HEAD's history."""
    text = _git(root, "log", "--raw", "--no-abbrev", "--no-renames", "-m", "--format=", "HEAD", "--", "results")
    found: dict[str, set[str]] = {}
    for line in text.decode().splitlines():
        if line.startswith(":"):
            meta, path = line.split("\t", 1)
            new, status = meta.split()[3:5]
            if status != "D":
                found.setdefault(path, set()).add(new)
    return found


def _records(session):
    if not (session / sessions.RECORDS).exists():
        return []
    lines, fault = sessions.read_lines(session / sessions.RECORDS)
    assert fault is None, fault
    return [json.loads(line) for line in lines]


def _canonical(record):
    return json.dumps(record, sort_keys=True)


def _git(root, *arguments):
    return subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, check=True).stdout


def main() -> int:
    missing = what_is_missing()
    if missing:
        print(f"{missing}: files are checked against results/{sessions.SUMS} alone")
    found = sessions.verify(ROOT / "results") + ([] if missing else faults())
    print("\n".join([*found, f"{len(found)} faults"]))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
