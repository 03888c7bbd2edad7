"""examples/minimal, the model that others start from: `make bench MODEL=examples/minimal` measures it."""

import subprocess
import sys

from benchmarks import ROOT
from benchmarks.files import run_file


def test_the_smallest_model_is_measured(tmp_path):
    words = ["--model", "examples/minimal/", "--out", str(tmp_path), "--cycles", "2"]
    command = [sys.executable, "-m", "benchmarks.run", *words, "--preset", "tiny"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.rglob("*.json")
    (build,) = run_file.read(path).builds.values()
    own = build.variants["graph_step"]
    assert path.parent.name == "examples.minimal-tiny" and own.status == "pass"
    assert own.parity.result == own.parity.after == "bitwise" and own.capture["graphs"] == 1


def test_it_stays_small():
    text = (ROOT / "examples" / "minimal" / "train.py").read_text()
    assert len([line for line in text.splitlines() if line.strip()]) <= 120
