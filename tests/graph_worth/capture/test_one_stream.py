"""The rule of docs/one_stream.md: what the suite does in a process launches no kernel on a second stream."""

import json
import subprocess
import sys

import pytest

# A process of its own: the other tests of this one have used several streams.
PROGRAM = """
import json, sys, torch
from graph_worth import DoubleBuffered, Pool
from graph_worth.measuring.torch_settings import prepare

device = torch.device("cuda", 0)
prepare(device)
work, pool = torch.zeros(2**16, device=device), Pool(device)

def step():
    for _ in range(8):
        work.add_(1.0)

class Source:
    batch = {"tokens": torch.zeros(2**18, dtype=torch.int64).pin_memory()}
    def next(self):
        return self.batch

with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
    step()
    torch.cuda.synchronize()
    graph, _ = pool.capture(step)
    inputs = DoubleBuffered({"tokens": torch.zeros(2**18, dtype=torch.int64, device=device)}, Source())
    for _ in range(3):
        inputs.load()
        step()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream() if "second" in sys.argv else torch.cuda.current_stream()):
        step()
    torch.cuda.synchronize()
profile.export_chrome_trace(sys.argv[1])
"""


@pytest.mark.gpu
@pytest.mark.parametrize("more", [[], ["second"]])
def test_kernels_are_on_one_stream(more, tmp_path):
    """Copies of batches are on another one, which costs replays nothing. The second case would be seen."""
    trace = tmp_path / "trace.json"
    subprocess.run([sys.executable, "-c", PROGRAM, str(trace), *more], check=True, timeout=300)
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event.get("cat") == "kernel"]
    assert len(events) >= 40
    assert len({event["args"]["stream"] for event in events}) == 1 + len(more)
