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


@pytest.mark.parametrize("keep", [False, True])
def test_parity_keeps_a_variant_that_is_compiled_once(monkeypatch, keep):
    """What torch compiles for deterministic kernels it would compile again for those that are timed."""
    made = []

    def make(name):
        made.append(torch.are_deterministic_algorithms_enabled())
        return SimpleNamespace(), {"graphs": len(made)}

    worker = Worker(
        SimpleNamespace(kinds={}), SimpleNamespace(config=None), CPU, None, SimpleNamespace(rank=0, world_size=1)
    )
    monkeypatch.setattr(worker, "_make", make)
    monkeypatch.setattr(worker, "_release", lambda variant: None)
    monkeypatch.setattr(worker, "_course", lambda *args, **more: {"hashes": ["h"]})
    found = worker.do_parity({"variant": "compiled", "steps": 3, "keep": keep})
    assert found == {"graphs": 1, "hashes": ["h"]}
    assert worker.do_capture({"variant": "compiled"}) == {"graphs": 1 if keep else 2}
    assert made == ([False] if keep else [True, False])
