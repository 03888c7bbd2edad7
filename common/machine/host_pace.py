"""The time that this host needs to issue work: microseconds of one eager operator and of one bare launch.

Hosts differ twofold in this, and with it in what a graph gains. An operator is an in-place addition to one element,
with Python, the dispatcher and the launch; a launch is torch's spinning kernel of no cycles, which has no dispatcher.
Both are issued in bursts far below the 1,024 launches that the driver queues, so that the host never waits for the GPU,
and the GPU is drained between bursts.
"""

import statistics
import time

import torch

BURST = 200
SECONDS = 0.2
CPU_SECONDS = 0.05


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
    """Return operator_us and launch_us. There is no launch on the CPU: None."""
    if not torch.cuda.is_available():
        return {"operator_us": operator_us(CPU_SECONDS), "launch_us": None}
    sleep = torch.cuda._sleep
    launch_us = measure_us(lambda: sleep(0), torch.cuda.synchronize, SECONDS)
    return {"operator_us": operator_us(), "launch_us": launch_us}
