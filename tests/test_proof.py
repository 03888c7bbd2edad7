"""common/proof: which steps are kept, samples of the state, late work, growth and promises."""

import mmap
import time
from types import SimpleNamespace

import pytest
import torch

from common import proof
from common import record as records

CPU = torch.device("cpu")


# --- steps


@pytest.mark.parametrize("num_steps", [1, 8, 49, 50, 51, 60, 500, 4096, 100_000])
def test_steps_that_are_kept(num_steps):
    steps = proof.proof_steps(num_steps)
    assert steps[: min(50, num_steps)] == list(range(min(50, num_steps)))
    assert steps[-1] == num_steps - 1 and sorted(set(steps)) == steps
    assert len(steps) <= 50 + 56
    # Windows of different length have all but the last in common.
    assert set(steps[:-1]) <= set(proof.proof_steps(2 * num_steps))


def test_a_buffer_that_overwrites_its_last_place_has_the_first_steps_and_the_last():
    given = {}
    values = [float(index) for index in range(57)] + [999.0]
    proof.fill_series(given, 1000, values, [*values[:3], float("inf"), float("nan"), *values[5:]])
    # Step 57 had the last place before step 999 took it.
    assert given["steps"] == [*range(50), 50, 999]
    assert all(loss == step for step, loss in zip(given["steps"][:-1], given["loss"], strict=False))
    assert given["loss"][-1] == 999.0
    assert given["grad_norm"][3] is given["grad_norm"][4] is None and given["grad_norm"][5] == 5.0


def test_a_whole_series_is_kept_at_its_steps():
    given = {}
    values = [float(index) for index in range(300)]
    proof.fill_series(given, 300, values, values)
    assert given["steps"] == proof.proof_steps(300) and given["loss"] == given["grad_norm"] == given["steps"]
    proof.fill_series(given, 2, [1.0, 2.0], [])
    assert given["steps"] == [0, 1] and given["grad_norm"] == [None, None]


# --- the state


def test_a_sample_is_of_few_elements_of_tensors_spread_over_the_state():
    tensors = {f"t{index}": torch.arange(100.0) + index for index in range(40)}
    tensors["count"], tensors["step"] = torch.zeros(9, dtype=torch.int64), torch.zeros(())
    sample = proof.StateSample(tensors.items(), CPU)
    assert len(sample.names) == proof.NUM_TENSORS and {"t0", "t20"} <= set(sample.names)
    sample.take(sample.start)
    tensors["t20"].add_(0.5)
    sample.take(sample.after)
    sample.values()
    tensors["t20"].add_(9.0)
    sample.values()
    report = {entry["name"]: entry for entry in sample.report()}
    assert report["t0"]["start"] == report["t0"]["after"] == report["t0"]["end"] == [12.0 * k for k in range(8)]
    assert report["t20"]["start"] == [12.0 * k + 20 for k in range(8)]
    assert report["t20"]["after"] == report["t20"]["end"] == [12.0 * k + 20.5 for k in range(8)]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(7, 9),
        torch.randn(9, 7).t(),
        torch.randn(2, 8, 5, 5).to(memory_format=torch.channels_last),
        torch.randn(50)[::3],
        torch.randn(30, dtype=torch.bfloat16),
        torch.nn.Parameter(torch.randn(4, 4)),
        torch.randn(10, 8, 3)[:, :, 1],
    ],
)
def test_a_sample_is_a_view_of_any_layout(tensor):
    sample = proof.StateSample([("it", tensor)], CPU)
    before = sample.values()
    with torch.no_grad():
        tensor.add_(1.0)
    after = sample.values()
    count = sample.views[0].numel()
    assert count >= 7 or count == tensor.shape[-1]
    assert all(b - a == pytest.approx(1.0, abs=0.05) for a, b in zip(before[0][:count], after[0][:count], strict=True))
    assert "it" in {entry["name"] for entry in sample.report()}


def test_tensors_elsewhere_are_not_sampled():
    sample = proof.StateSample([("here", torch.ones(9)), ("there", torch.ones(9, device="meta"))], CPU)
    assert sample.names == ["here"]
    assert proof.StateSample([], CPU).report() == []


def test_small_tensors_are_taken_where_there_are_no_others():
    sample = proof.StateSample([("a", torch.ones(3)), ("b", torch.tensor([float("nan"), float("inf")]))], CPU)
    sample.take(sample.start)
    sample.values()
    assert [entry["start"] for entry in sample.report()] == [[1.0, 1.0, 1.0], [None, None]]


@pytest.mark.gpu
def test_a_sample_waits_for_nothing():
    device = torch.device("cuda")
    weight, x = torch.zeros(4096, device=device), torch.randn(8192, 8192, device=device)
    sample = proof.StateSample([("weight", weight)], device)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(40):
        x @ x
    weight.add_(1.0)
    sample.take(sample.after)
    weight.add_(1.0)
    issued_s = time.perf_counter() - start
    torch.cuda.synchronize()
    assert issued_s < 0.3 * (time.perf_counter() - start)
    sample.values()
    assert sample.report()[0]["after"] == [1.0] * 8 and sample.report()[0]["end"] == [2.0] * 8


# --- after the window


class Time:
    """Sleep and process time as the test wants them."""

    def __init__(self, monkeypatch, on_sleep=lambda: None, busy_s=0.0):
        self.slept, self.used, self.on_sleep, self.busy_s = [], 0.0, on_sleep, busy_s
        monkeypatch.setattr(proof, "time", self)

    def process_time(self):
        return self.used

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.used += self.busy_s
        self.on_sleep()


@pytest.mark.parametrize(("step_ms", "pause_s"), [(1.0, 0.05), (100.0, 0.15), (9000.0, 1.0)])
def test_the_pause_is_longer_than_a_step(monkeypatch, step_ms, pause_s):
    clock = Time(monkeypatch)
    weight = torch.ones(8)
    seen = proof.look_again(lambda: [1.0], proof.StateSample([("w", weight)], CPU), CPU, step_ms)
    assert clock.slept == [pytest.approx(pause_s)]
    assert seen == {"late_ms": 0.0, "late_change": False, "read": [1.0]}


@pytest.mark.parametrize("what", ["state", "losses"])
def test_what_changes_after_the_window_is_seen(monkeypatch, what):
    weight, losses = torch.ones(8), [1.0, float("nan")]

    def change():
        if what == "state":
            weight.add_(1e-6)
        else:
            losses[0] = 1.5

    Time(monkeypatch, change)
    seen = proof.look_again(lambda: list(losses), proof.StateSample([("w", weight)], CPU), CPU, 1.0)
    assert seen["late_change"] is True and seen["read"][0] == 1.0


def test_time_that_is_used_late_counts(monkeypatch):
    clock = Time(monkeypatch, busy_s=0.03)

    def read():
        clock.used += 0.2
        return []

    sample = proof.StateSample([("w", torch.ones(8))], CPU)
    assert proof.look_again(read, sample, CPU, 1.0)["late_ms"] == pytest.approx(230.0)
    # On a GPU a pause is for threads that read data.
    assert proof.look_again(read, sample, SimpleNamespace(type="cuda"), 1.0)["late_ms"] == pytest.approx(200.0)


@pytest.mark.parametrize(
    ("device", "growth_mib", "peak_gib", "leaks"),
    [
        ("cuda", 60, 1, False),
        ("cuda", 70, 1, True),
        ("cuda", 900, 100, False),
        ("cuda", 1100, 100, True),
        ("cpu", 120, 1, False),
        ("cpu", 140, 1, True),
        ("cpu", -500, 1, False),
    ],
)
def test_what_grows_by_more_than_a_steady_loop_leaks(device, growth_mib, peak_gib, leaks):
    record = records.blank(device=device)
    record["memory"]["peak_allocated_bytes"] = peak_gib * 2**30
    record["proof"]["growth_bytes"] = growth_mib * 2**20
    said = proof.leaked(record)
    assert (f"memory grew by {growth_mib} MiB" in said) if leaks else said is None
    record["proof"]["growth_bytes"] = None
    assert proof.leaked(record) is None


def test_held_bytes_grow_with_what_is_held():
    before = proof.held_bytes(CPU)
    # Not of malloc, which may have pages left from earlier tests.
    with mmap.mmap(-1, 512 * 2**20) as held:
        for _ in range(512):
            held.write(bytes(2**20))
        assert proof.held_bytes(CPU) - before == pytest.approx(512 * 2**20, rel=0.3)


@pytest.mark.parametrize(
    ("share", "graphs", "kind", "wrong"),
    [
        (0.0, 0, "eager", False),
        (0.01, 0, "eager", True),
        (0.01, 2, "graph", False),
        (0.0, 2, "graph", True),
        (0.0, None, "graph", True),
        (0.0, 0, "compile", False),
        (0.7, 1, "compile", False),
        (None, 2, "graph", False),
        (0.0, 2, None, False),
    ],
)
def test_the_share_of_graphs_is_that_of_the_kind(share, graphs, kind, wrong):
    said = proof.wrong_share(share, {"graphs": graphs, "replays_per_step": None}, kind)
    assert (said is not None) == wrong
