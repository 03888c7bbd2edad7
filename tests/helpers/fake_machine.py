"""A machine of fakes for make and setup.sh: interpreters, pip and nvidia-smi only log what they are asked."""

import shutil
import subprocess
import sys
from pathlib import Path

from tests.helpers.processes import program

ROOT = Path(__file__).resolve().parents[2]
TOOLS = "awk bash cat cksum cp dirname echo env find head make mkdir paste rm sleep tail touch"

# Stands for every interpreter. $MACHINE/faults holds lines "STATUS REGEX": what matches "$0 $*" exits so.
FAKE_PYTHON = """#!/bin/bash
call="${0#$MACHINE/bin/} $*"
# It makes a command of make's values and runs that, by this interpreter.
[[ $call != *benchmarks.from_make* ]] || exec "$REAL_PYTHON" "$@"
echo "$call${NVTE_FRAMEWORK:+ NVTE_FRAMEWORK=$NVTE_FRAMEWORK}" | paste -s -d ' ' >>"$MACHINE/log"
# An interrupt reaches make and this program at once. make 4.3 exits with 2 where the program has ended before make
# has looked, so it takes two seconds to end, as a run that stops its workers does.
run_until_interrupted() {
    trap 'kill $!; touch "$MACHINE/stopped"; sleep 2; exit 130' INT TERM
    sleep 60 &
    touch "$MACHINE/running"
    wait
}
while read -r status regex; do
    [[ $call =~ $regex ]] && exit "$status"
done <"$MACHINE/faults"
case "$*" in
"-m venv"*) rm -rf .venv && mkdir -p .venv/bin && cp "$MACHINE/fake_python" .venv/bin/python ;;
"- "*) exec "$REAL_PYTHON" "$@" ;;
--version) echo "Python 3.12.9" ;;
*benchmarks.run*) [ ! -e "$MACHINE/wait" ] || run_until_interrupted ;;
esac
"""


class Machine:
    """A folder with a copy of what set-up needs, and a PATH of few tools and fake interpreters."""

    def __init__(self, folder: Path):
        self.folder, self.repo, self.bin = folder, folder / "repo", folder / "bin"
        self.bin.mkdir()
        for name in TOOLS.split():
            (self.bin / name).symlink_to(shutil.which(name))
        (self.repo / "gpt3").mkdir(parents=True)
        (self.repo / "gpt3" / "train.py").touch()
        (self.repo / "benchmarks").mkdir()
        programs = ("benchmarks/__init__.py", "benchmarks/from_make.py")
        for name in ("Makefile", "setup.sh", "pyproject.toml", "constraints.txt", *programs):
            shutil.copy(ROOT / name, self.repo / name)
        for name in ("fake_python", "bin/python3.12", "bin/python3"):
            self.script(name, FAKE_PYTHON)
        (folder / "log").touch()
        self.faults()

    def script(self, name, text):
        program(self.folder / name, text)

    def faults(self, *lines):
        (self.folder / "faults").write_text("".join(line + "\n" for line in lines))

    def gpu(self, answer="GPU 0: NVIDIA H200 (UUID: GPU-1)", status=0):
        self.script("bin/nvidia-smi", f"#!/bin/bash\necho nvidia-smi >>$MACHINE/log\necho '{answer}'\nexit {status}\n")

    @property
    def environment(self):
        # Built from nothing: MAKEFLAGS and variables of an outer make must not reach the inner one.
        return {"PATH": str(self.bin), "MACHINE": str(self.folder), "REAL_PYTHON": sys.executable}

    def make(self, *arguments, **variables):
        return subprocess.run(
            ["make", *arguments],
            cwd=self.repo,
            env={**self.environment, **variables},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
        )

    def log(self):
        """Calls since the last time, one a line."""
        lines = (self.folder / "log").read_text().splitlines()
        (self.folder / "log").write_text("")
        return lines


def matching(lines, text):
    return [line for line in lines if text in line]
