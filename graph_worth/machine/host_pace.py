"""The time that this host needs to issue work: microseconds of one eager operator and of one bare launch.

Hosts differ twofold in this, and with it in what a graph gains. An operator is an in-place addition to one element,
with Python, the dispatcher and the launch; a launch is torch's spinning kernel of no cycles, which has no dispatcher.
Both are issued in bursts far below the 1,024 launches that the driver queues, so that the host never waits for the GPU,
and the GPU is drained between bursts.

As a program it tells the percentiles of single calls, once for each line of its input: python -m benchmarks.host.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable

import torch

BURST = 200
SECONDS = 0.2
CPU_SECONDS = 0.05
# Single calls: seconds of all kinds together in a run, calls between two drains, and the layer, whose work is small.
CALLS_SECONDS, CALLS_BURST = 1.0, 50
ROWS, WIDTH = 8, 64


def measure_us(issue, drain, seconds: float) -> float:
    """Median over bursts of the host microseconds that one call of `issue` takes.

    drain: waits until what was issued is done; it is not timed. seconds: of all bursts together, at least three of them
    after one that does not count.
    """
    bursts: list[float] = []
    end = time.perf_counter() + seconds
    while len(bursts) < 4 or time.perf_counter() < end:
        start = time.perf_counter_ns()
        for _ in range(BURST):
            issue()
        bursts.append((time.perf_counter_ns() - start) / BURST / 1e3)
        drain()
    return round(statistics.median(bursts[1:]), 3)


def operator_us(seconds: float = SECONDS) -> float:
    """Return the host's microseconds to issue one small operator, on the CPU to compute it.

    Args:
        seconds: of all bursts together.
    """
    is_gpu = torch.cuda.is_available()
    operand = torch.zeros(1, device="cuda" if is_gpu else "cpu")
    return measure_us(lambda: operand.add_(1.0), torch.cuda.synchronize if is_gpu else lambda: None, seconds)


def pace_of_host() -> dict:
    """Return operator_us, launch_us and `calls_us` as calls. There is no launch on the CPU: None."""
    if not torch.cuda.is_available():
        return {"operator_us": operator_us(CPU_SECONDS), "launch_us": None, "calls": calls_us(2 * CPU_SECONDS)}
    sleep = torch.cuda._sleep
    launch_us = measure_us(lambda: sleep(0), torch.cuda.synchronize, SECONDS)
    return {"operator_us": operator_us(), "launch_us": launch_us, "calls": calls_us(CALLS_SECONDS)}


def calls_us(seconds: float) -> dict[str, dict[str, float]]:
    """Return the percentiles of the time that the host spends in a call, in microseconds.

    Args:
        seconds: of all calls together.

    Returns:
        Name -> p50_us and p99_us. operator: an addition; linear: a Linear of 64 features and 8 rows, forward and
        backward; graph: the launch of a graph, on a GPU alone. On the CPU the work itself is in the time.
    """
    is_gpu = torch.cuda.is_available()
    calls = _calls(torch.device("cuda" if is_gpu else "cpu"))
    drain = torch.cuda.synchronize if is_gpu else lambda: None
    return {name: percentiles_us(call, drain, seconds / len(calls)) for name, call in calls.items()}


def _calls(device: torch.device) -> dict[str, Callable]:
    operand = torch.zeros(1, device=device)
    # Zeros: what is drawn for weights would be missing in the user's random numbers.
    batch, gradient = (torch.zeros(ROWS, WIDTH, device=device) for _ in range(2))
    weight, bias = (torch.zeros(*shape, device=device, requires_grad=True) for shape in ((WIDTH, WIDTH), (WIDTH,)))
    calls: dict[str, Callable] = {
        "operator": lambda: operand.add_(1.0),
        "linear": lambda: torch.nn.functional.linear(batch, weight, bias).backward(gradient),
    }
    if device.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            operand.add_(1.0)
        calls["graph"] = graph.replay
    return calls


def percentiles_us(call: Callable, drain: Callable, seconds: float) -> dict[str, float]:
    """Return p50_us and p99_us of single calls; the first burst does not count, nor does draining."""
    times: list[int] = []
    end = time.perf_counter() + seconds
    while len(times) < 4 * CALLS_BURST or time.perf_counter() < end:
        for _ in range(CALLS_BURST):
            start = time.perf_counter_ns()
            call()
            times.append(time.perf_counter_ns() - start)
        drain()
    of_hundred = statistics.quantiles(times[CALLS_BURST:], n=100, method="inclusive")
    return {"p50_us": round(of_hundred[49] / 1e3, 3), "p99_us": round(of_hundred[98] / 1e3, 3)}


def main() -> None:
    """Describe the host in a line of JSON, then print `calls_us` for each line of stdin, which has the seconds."""
    from graph_worth.machine.environment import describe_host

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # Two that share a core would wait for each other.
    torch.set_num_threads(1)
    print(json.dumps(describe_host(device)), flush=True)
    for line in sys.stdin:
        print(json.dumps(calls_us(float(line))), flush=True)


if __name__ == "__main__":
    main()
