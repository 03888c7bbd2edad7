"""common/measuring/worker.py: the kernels that a state for parity is built under."""

from types import SimpleNamespace

import pytest
import torch

from common.contract import Training
from common.measuring import worker as worker_module
from common.measuring.worker import Worker
from common.variant import Refused, Unsupported

CPU, ONE_RANK = torch.device("cpu"), SimpleNamespace(rank=0, world_size=1)


def model(build):
    """As much of a `common.session.Model` as a build looks at."""
    return SimpleNamespace(build=build, config=SimpleNamespace())


def training():
    """A training without steps."""
    return Training(state=None, results={}, named_state=lambda: [("weight", torch.zeros(8))], unit="tokens")


def test_a_worker_builds_when_it_is_told_to():
    """It may be started while another one has the GPU."""
    asked = []

    def build():
        asked.append(True)
        return training()

    worker = Worker(model(build), CPU, None, ONE_RANK)
    assert not asked
    worker.do_build({})
    assert asked == [True]


def test_what_cannot_run_here_is_no_failure():
    def build():
        raise Refused("--layer te needs a GPU")

    with pytest.raises(Unsupported, match="--layer te needs a GPU"):
        Worker(model(build), CPU, None, ONE_RANK).do_build({})


@pytest.mark.parametrize("parity", [False, True])
def test_a_state_for_parity_is_built_under_deterministic_kernels(parity):
    """Llama 2 chooses its attention when it is built: cuDNN's backward is not deterministic."""
    seen = []

    def build():
        seen.append(torch.are_deterministic_algorithms_enabled())
        return training()

    worker = Worker(model(build), CPU, None, ONE_RANK)
    assert worker.do_build({"parity": parity})["unit"] == "tokens"
    assert seen == [parity] and not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("keep", [False, True])
def test_parity_keeps_a_variant_that_is_compiled_once(monkeypatch, keep):
    """Code that torch compiles for deterministic kernels it would compile again for those that are timed."""
    made = []

    def make(name):
        made.append(torch.are_deterministic_algorithms_enabled())
        return SimpleNamespace(), {"graphs": len(made)}

    worker = Worker(SimpleNamespace(kinds={}), CPU, None, ONE_RANK)
    monkeypatch.setattr(worker, "_make", make)
    monkeypatch.setattr(worker, "_release", lambda variant: None)
    monkeypatch.setattr(worker, "_course", lambda *args, **more: {"hashes": ["h"]})
    found = worker.do_parity({"variant": "compiled", "steps": 3, "keep": keep})
    assert found == {"graphs": 1, "hashes": ["h"]}
    assert worker.do_capture({"variant": "compiled"}) == {"graphs": 1 if keep else 2}
    assert made == ([False] if keep else [True, False])


@pytest.mark.parametrize(("capture", "steps", "peak"), [(5, 3, 5), (2, 3, 3)])
def test_memory_alone_tells_the_steps_from_the_capture(monkeypatch, capture, steps, peak):
    worker = Worker(model(training), CPU, None, ONE_RANK)
    worker.do_build({})
    worker.training = SimpleNamespace(reset=lambda: None)
    worker.model.kinds = {}
    held = iter((capture, steps))
    calls = []
    monkeypatch.setattr(worker_module.block, "forget_peak", lambda device: calls.append("forget"))
    monkeypatch.setattr(worker_module.block, "peak", lambda device: {"peak_reserved_bytes": next(held)})
    monkeypatch.setattr(worker_module.block, "timed_steps", lambda *args: calls.append("steps") or ([1.0], None))
    monkeypatch.setattr(worker, "_make", lambda name: calls.append("make") or (SimpleNamespace(), {}))
    found = worker.do_alone({"variant": "graph", "steps": 1})
    assert found == {"step_ms": [1.0], "steps_reserved_bytes": steps, "peak_reserved_bytes": peak}
    assert calls == ["forget", "make", "forget", "steps"]
