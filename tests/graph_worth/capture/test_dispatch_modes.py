"""graph_worth/capture/dispatch_modes.py: a mode's operators do not import the compiler."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

CODE = """
import sys, torch
from graph_worth.capture.pool import Pool
from graph_worth.measuring.operator_count import Counter

x, y = torch.ones(4), torch.zeros(4)
def double():
    return torch.add(x, x, out=y)

def seen():
    pool, counter = Pool(torch.device("cpu")), Counter()
    graph, _ = pool.capture(double, (x,))
    x.fill_(3.0)
    with counter:
        graph.replay()
    return y.tolist() == [6.0] * 4 and counter.count, Counter.__torch_dispatch__.__module__

print(*seen(), "torch._dynamo" in sys.modules)
import torch._dynamo
print(*seen())
"""


@pytest.mark.slow
def test_a_capture_imports_no_compiler_and_leaves_one_that_is_there_alone():
    answer = subprocess.run([sys.executable, "-c", CODE], cwd=ROOT, capture_output=True, text=True, check=True)
    # torch's own wrapper is a function of the mode's module, ours is not.
    assert answer.stdout.splitlines() == [
        "1 graph_worth.capture.dispatch_modes False",
        "1 graph_worth.measuring.operator_count",
    ]
