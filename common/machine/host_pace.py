"""The time that this host needs to issue work: microseconds of one eager operator and of one bare launch.

    python -m common.machine.host_pace [--seconds 2]
    {"us_per_operator": 3.41, "us_per_launch": 1.93, "device": "cuda"}

Hosts differ twofold in this, and with it in what a graph gains. An operator is an in-place addition to one element,
with Python, the dispatcher and the launch; a launch is torch's spinning kernel of no cycles, which has no dispatcher.
Both are issued in bursts far below the 1,024 launches that the driver queues, so that the host never waits for the GPU,
and the GPU is drained between bursts. Each number is the median over all bursts of a burst's mean. On the CPU an
operator is computed as it is issued, and there is no launch: null.
"""

import json
import statistics
import sys
import time

from common.config import Parser, checked

BURST = 200
MAX_SECONDS = 60.0


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


def probe(seconds: float) -> dict:
    """The JSON object that `main` prints. Imports torch; on a GPU it uses the current one."""
    import torch

    if not torch.cuda.is_available():
        operand = torch.zeros(1)
        us = measure_us(lambda: operand.add_(1.0), lambda: None, seconds)
        return {"us_per_operator": us, "us_per_launch": None, "device": "cpu"}
    operand = torch.zeros(1, device="cuda")
    sleep = torch.cuda._sleep
    return {
        "us_per_operator": measure_us(lambda: operand.add_(1.0), torch.cuda.synchronize, seconds / 2),
        "us_per_launch": measure_us(lambda: sleep(0), torch.cuda.synchronize, seconds / 2),
        "device": "cuda",
    }


def main(argv=None) -> int:
    """Print what `probe` measures, as one line of JSON, and return the exit status."""
    parser = Parser(prog="python -m common.machine.host_pace", description=__doc__.splitlines()[0], allow_abbrev=False)
    takes = f"a number of seconds above 0, at most {MAX_SECONDS:g}"
    seconds = checked(float, lambda value: 0 < value <= MAX_SECONDS, takes)
    parser.add_argument("--seconds", metavar="S", type=seconds, default=2.0, help="of measuring, without imports (2)")
    args = parser.parse_args(argv)
    print(json.dumps(probe(args.seconds)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
