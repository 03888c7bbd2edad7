"""Results that the tests of a file share, made once though pytest's processes run them side by side."""

import fcntl
import json
import os
import shutil


def once(tmp_path_factory, name, make):
    """(folder, answer): the first process that asks calls make(folder); all others wait for it and read its answer.

    name: unique among all tests. The answer is what JSON can hold.
    """
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    folder, answer = root / f"once-{name}", root / f"once-{name}.json"
    with open(root / f"once-{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not answer.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            made = json.dumps(make(folder))
            answer.with_suffix(".part").write_text(made)
            answer.with_suffix(".part").rename(answer)
    return folder, json.loads(answer.read_text())
