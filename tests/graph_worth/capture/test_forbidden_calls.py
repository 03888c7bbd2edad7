"""docs/what_to_capture.md: a graph refuses each call of the first column, and holds each of the last."""

import re
import subprocess
import sys

import pytest
import torch

from graph_worth.capture.host_graph import HostPool
from graph_worth.folders import ROOT

PAGE = (ROOT / "docs" / "what_to_capture.md").read_text()
# (call, " (GPU)" if no host graph sees it, call to take instead)
ROWS = re.findall(r"(?m)^\| `([^`]+)`( \(GPU\))? \| [^|]*(?:`[^`]+`[^|]*)*\| `([^`]+)` \|$", PAGE)


def names(device):
    x = torch.arange(1.0, 5.0, device=device)
    return {"torch": torch, "x": x, "own": torch.Generator(device).manual_seed(0)}


def captured_on_host(call):
    given, code = names("cpu"), compile(call, "what_to_capture.md", "eval")
    HostPool().capture(lambda: eval(code, given))


def captured_on_gpu(call):
    given, code = names("cuda"), compile(call, "what_to_capture.md", "eval")
    with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
        eval(code, given)


@pytest.mark.parametrize(("call", "gpu", "instead"), ROWS, ids=[row[0] for row in ROWS])
def test_a_host_graph_refuses_the_call_and_holds_the_other(call, gpu, instead, capsys):
    if not gpu:
        with pytest.raises(RuntimeError):
            captured_on_host(call)
    captured_on_host(instead)


@pytest.mark.gpu
def test_a_graph_of_the_gpu_does_the_same():
    """In a process of its own: captures that fail leave torch's allocator and generator as in a capture."""
    code = "from tests.graph_worth.capture import test_forbidden_calls as own; own.capture_all_on_gpu()"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    said = [line.partition(" ") for line in done.stdout.splitlines() if line.startswith(("held ", "refused "))]
    assert {each for word, _, each in said if word == "refused"} == {call for call, _, _ in ROWS}, done.stdout
    assert {each for word, _, each in said if word == "held"} == {instead for _, _, instead in ROWS}, done.stdout


def capture_all_on_gpu():
    """Print "held CALL" or "refused CALL" for each call of the table, those that a graph should hold first."""
    for call in dict.fromkeys([*(instead for _, _, instead in ROWS), *(call for call, _, _ in ROWS)]):
        try:
            captured_on_gpu(call)
        except RuntimeError:
            print(f"\nrefused {call}")
            torch.cuda.default_generators[0].graphsafe_set_state(torch.Generator("cuda").graphsafe_get_state())
        else:
            print(f"\nheld {call}")


def test_the_calls_of_the_front_page_are_in_the_table():
    section = PAGE.partition("## Calls that a graph cannot hold")[2].partition("\n## ")[0]
    assert len(ROWS) == section.count("\n| `") >= 10
    calls = " ".join(row[0] for row in ROWS)
    front = (ROOT / "README.md").read_text()
    assert "[What a graph cannot hold](docs/what_to_capture.md)" in front and "`.item()`" in front
    for name in (".item()", "print", "nonzero", "if"):
        assert name in calls
