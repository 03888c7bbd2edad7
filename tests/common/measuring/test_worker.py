"""common/measuring/worker.py: the kernels that a state for parity is built under."""

from types import SimpleNamespace

import pytest
import torch

from common.measuring.worker import Worker

CPU = torch.device("cpu")


class State:
    """As much of a training state as a build looks at."""

    def named_state(self):
        return [("weight", torch.zeros(8))]

    def batch_class(self, index):
        return 0


@pytest.mark.parametrize("parity", [False, True])
def test_a_state_for_parity_is_built_under_deterministic_kernels(parity):
    """Llama 2 chooses its attention when it is built: cuDNN's backward is not deterministic."""
    seen = []

    def build(config, device):
        seen.append(torch.are_deterministic_algorithms_enabled())
        return State()

    numbers = {"flops_per_step": 0.0, "flops_convention": "", "items_per_step": 1, "unit": "tokens"}
    workload = SimpleNamespace(build=build, card=[], notes=[], **numbers)
    args = SimpleNamespace(config=SimpleNamespace())
    worker = Worker(workload, args, CPU, None, SimpleNamespace(rank=0, world_size=1))
    assert worker.do_build({"parity": parity})["unit"] == "tokens"
    assert seen == [parity] and not torch.are_deterministic_algorithms_enabled()
