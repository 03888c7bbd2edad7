"""graph_worth/measuring/worker.py: the kernels that a state for parity is built under."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from graph_worth.contract import Training
from graph_worth.harness.builds.build_measurement import MOST_LEFT_BYTES
from graph_worth.made_variant import Refused, Unsupported
from graph_worth.measuring import worker as worker_module
from graph_worth.measuring.worker import Worker

PROMISES = {"eager": "bitwise", "right": None, "frozen": None, "frozen_bitwise": "bitwise"}
CPU, ONE_RANK = torch.device("cpu"), SimpleNamespace(rank=0, world_size=1)


def model(build):
    """As much of a `graph_worth.script.session.Model` as a build looks at."""
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


@pytest.mark.parametrize(("capture", "steps", "peak", "keep"), [(5, 3, 5, True), (2, 3, 3, False)])
def test_memory_alone_tells_the_steps_from_the_capture_and_what_is_left(monkeypatch, capture, steps, peak, keep):
    worker = Worker(model(training), CPU, None, ONE_RANK)
    worker.do_build({})
    worker.training = SimpleNamespace(reset=lambda: None)
    worker.model.kinds = {}
    held = iter((capture, steps))
    calls = []
    reserved = iter((40, 42 if keep else 40))
    monkeypatch.setattr(worker_module.memory, "reserved_bytes", lambda device: next(reserved))
    monkeypatch.setattr(worker, "_release", lambda variant: calls.append("release"))
    monkeypatch.setattr(worker_module.block, "forget_peak", lambda device: calls.append("forget"))
    monkeypatch.setattr(worker_module.block, "peak", lambda device: {"peak_reserved_bytes": next(held)})
    monkeypatch.setattr(worker_module.block, "timed_steps", lambda *args: calls.append("steps") or ([1.0], None))
    monkeypatch.setattr(worker, "_make", lambda name: calls.append("make") or (SimpleNamespace(), {}))
    found = worker.do_alone({"variant": "graph", "steps": 1, "seconds": None, "keep": keep})
    peaks = {"steps_reserved_bytes": steps, "peak_reserved_bytes": peak}
    assert found == {"step_ms": [1.0], "left_bytes": 2 if keep else 0, **peaks}
    assert calls == ["forget", "make", "forget", "steps"] + ["release"] * (not keep)
    assert ("graph" in worker.kept) == keep


def test_the_steps_alone_are_as_many_as_fit(monkeypatch):
    """A first one is not timed; two are made at least."""
    worker = Worker(SimpleNamespace(kinds={}), CPU, None, ONE_RANK)
    worker.training, numbers = SimpleNamespace(reset=lambda: None), []
    now_s = itertools.count(step=0.25)
    monkeypatch.setattr(worker_module.time, "monotonic", lambda: next(now_s))
    monkeypatch.setattr(worker, "_make", lambda name: (SimpleNamespace(step=numbers.append), {}))
    found = [
        len(worker.do_alone({"variant": "graph", "steps": 10, "seconds": seconds, "keep": True})["step_ms"])
        for seconds in (1.0, 0.25, 9.0, None)
    ]
    assert found == [4, 2, 10, 10] and numbers[:5] == [0, 1, 2, 3, 4]


@pytest.mark.gpu
def test_a_variant_that_is_released_leaves_nothing_so_the_next_has_the_memory_of_a_process_of_its_own(monkeypatch):
    device = torch.device("cuda")
    weight = torch.zeros(2**20, device=device)
    worker = Worker(SimpleNamespace(kinds={}), device, None, ONE_RANK)
    worker.training = SimpleNamespace(reset=weight.zero_)

    def make(name):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            weight.add_(torch.ones(16 * 2**20, device=device)[: 2**20])
        return SimpleNamespace(step=lambda index: graph.replay(), close=graph.reset), {}

    monkeypatch.setattr(worker, "_make", make)
    first, second, kept = (
        worker.do_alone({"variant": name, "steps": 3, "seconds": None, "keep": name == "kept"})
        for name in ("first", "second", "kept")
    )
    assert max(first["left_bytes"], second["left_bytes"]) <= MOST_LEFT_BYTES and kept["left_bytes"] >= 2**26
    peaks = [answer["peak_reserved_bytes"] for answer in (first, second, kept)]
    assert max(peaks) - min(peaks) <= MOST_LEFT_BYTES


def course_of(losses, **asked):
    """The facts of a worker's course whose steps add one to the only tensor."""
    weight = torch.zeros(2)
    worker = Worker(SimpleNamespace(kinds={}), CPU, None, ONE_RANK)
    worker.training = Training(
        state=None,
        results=lambda count: losses[:count],
        grad_norms=lambda count: losses[:count],
        named_state=lambda: [("weight", weight)],
        reset=weight.zero_,
    )
    return worker._course(SimpleNamespace(step=lambda index: weight.add_(1)), **asked)


def test_a_course_has_a_hash_after_each_step_or_after_the_last_one():
    losses = [1.0, 2.0, 3.0, 4.0, 5.0]
    every = course_of(losses, first=0, count=5, every_step=True)
    assert every["losses"] == every["grad_norms"] == losses and len(set(every["hashes"])) == 5
    last = course_of(losses, first=3, count=2, every_step=False)
    assert last == {"hashes": every["hashes"][-1:], "losses": [4.0, 5.0], "grad_norms": [4.0, 5.0]}


def test_a_course_ends_after_its_seconds_but_not_before_three_steps():
    facts = course_of([1.0] * 9, first=0, count=9, every_step=True, seconds=0.0)
    assert [len(each) for each in facts.values()] == [3, 3, 3]
    assert len(course_of([1.0] * 9, first=0, count=9, every_step=True, seconds=60.0)["hashes"]) == 9


def test_parity_names_the_tensor_whose_bits_leave_eagers_first():
    """The state's hashes say that it differs, and copies by how much: of a step without a promise."""
    bias, weight = torch.zeros(1), torch.zeros(2)
    worker = Worker(SimpleNamespace(kinds={}), CPU, None, ONE_RANK)
    worker.training = Training(
        state=None,
        results=lambda count: [1.0] * count,
        named_state=lambda: [("weight", weight), ("bias", bias)],
        reset=lambda: (weight.zero_(), bias.zero_()),
        apart=lambda variant: "bias differs",
    )
    worker.model.declared = {name: SimpleNamespace(parity=parity) for name, parity in PROMISES.items()}

    def make(name):
        return SimpleNamespace(step=lambda index: bias.add_(index == 1 and name.startswith("frozen"))), {}

    worker._make, worker._release = make, lambda variant: None
    eagers = worker.do_parity({"variant": "eager", "steps": 3, "eager": None})
    command = {"steps": 3, "eager": eagers["hashes"]}
    facts = {name: worker.do_parity({"variant": name, **command}) for name in PROMISES}
    told = {name: {key: fact[key] for key in ("tensor", "apart") if key in fact} for name, fact in facts.items()}
    assert told == {
        "eager": {},
        "right": {},
        "frozen": {"tensor": "bias", "apart": "bias differs"},
        "frozen_bitwise": {"tensor": "bias"},
    }
    # A capture that fails ends its process: the next one has not made eager's parity.
    worker.of_eager = None
    assert worker.do_parity({"variant": "frozen", **command})["apart"] == "bias differs"


def test_a_course_whose_loss_is_not_finite_raises():
    with pytest.raises(FloatingPointError, match="loss is nan at step 1"):
        course_of([1.0, float("nan"), 3.0], first=0, count=3, every_step=True)
