"""A test function on several gloo processes of this machine, forked with torch imported; or on as many GPUs (NCCL).

results = run("tests.rnnt.test_lamb", "worker", world_size=4)   what worker() returned on each rank, from JSON
"""

import contextlib
import importlib
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor

from graph_worth.parallel import collectives
from tests.helpers import forked
from tests.helpers.processes import free_ports

NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def run(module: str, function: str, world_size: int, timeout_s: float = 300, device: str = "cpu") -> list:
    """Results of all ranks; AssertionError with what a rank wrote to stderr where one failed."""
    done = run_script("tests.helpers.gloo_ranks", [module, function, device], world_size, timeout_s)
    return [json.loads(stdout.splitlines()[-1]) for stdout in done]


def run_script(module: str, arguments: list[str], world_size: int, timeout_s: float = 300) -> list[str]:
    """Return the stdout of each rank of `python -m module arguments...`; every rank must exit with 0."""
    (port,) = free_ports(1)
    shared = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    shared |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}

    def one(rank):
        environment = os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        return forked.run(module, arguments, environment, timeout_s)

    with ThreadPoolExecutor(world_size) as pool:
        done = list(pool.map(one, range(world_size)))
    errors = [f"rank {rank}:\n{process.stderr}" for rank, process in enumerate(done) if process.returncode]
    assert not errors, "\n".join(errors)
    return [process.stdout for process in done]


def main():
    module, function, device = sys.argv[1:]
    collectives.init(device, timeout_s=240)
    with contextlib.redirect_stdout(sys.stderr):
        result = getattr(importlib.import_module(module), function)()
    collectives.shutdown()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
