"""Fakes of Slurm's commands: they log how they are called, and fail or do what a test asks."""

import json
import os

from tests.helpers.processes import program

# Logs its name, words and settings; $LOG/<name>.fails holds a word of the calls that it refuses.
SHIM = r"""#!/bin/bash
name=${0##*/}
python3 - "$name" "$@" >>"$LOG/calls" <<'PROGRAM'
import json, os, sys
names = ("RUNS", "PYTHON", "NGPU", "IMAGE", "MOUNTS", "SBATCH_WAIT")
settings = {key: os.environ[key] for key in names if key in os.environ}
print(json.dumps([sys.argv[1:], settings]))
PROGRAM
# $LOG/<name>.does is run by the calls that hold the word in its first line.
if [ -e "$LOG/$name.does" ] && [[ " $* " == *"$(head -n 1 "$LOG/$name.does")"* ]]; then
    source <(tail -n +2 "$LOG/$name.does")
fi
if [ -e "$LOG/$name.fails" ] && [[ " $* " == *"$(cat "$LOG/$name.fails")"* ]]; then
    echo "$name: error: this is refused" >&2
    exit 1
fi
case "$name $*" in
*--test-only*) ;;
*collate.sbatch*) echo 43 ;;
sbatch*) echo "42;cluster" ;;
esac
"""


class shims:
    def __init__(self, folder, monkeypatch, *names):
        self.folder = folder
        folder.mkdir()
        for name in names:
            program(folder / name, SHIM)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        monkeypatch.setenv("LOG", str(folder))

    def refuse(self, name, word):
        (self.folder / f"{name}.fails").write_text(word)

    def do(self, name, word, script):
        """Make the calls of `name` that hold `word` run `script` first."""
        (self.folder / f"{name}.does").write_text(f"{word}\n{script}\n")

    def calls(self, name=None):
        path = self.folder / "calls"
        found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [call for call in found if name in (None, call[0][0])]
