"""common/step_report: numbers read late, on the CPU, and the order of events with fakes of CUDA's."""

import pytest
import torch

from common.optimizers.loss_scaler import LossScaler
from common.step_report import DelayedReader, ScaledReport


def test_the_step_before_is_read():
    reader, values = DelayedReader(torch.device("cpu"), 2), torch.tensor([1.0, 2.0])
    assert reader.latest() is None
    reader.push(0, values)
    values.fill_(7.0)  # what was pushed is a copy
    assert reader.latest() is None
    reader.push(1, torch.tensor([3.0, 4.0]))
    assert reader.latest() == (0, [1.0, 2.0])
    for index in range(2, 9):
        reader.push(index, torch.tensor([float(index), 0.0]))
        assert reader.latest()[0] == index - 1


class FakeEvent:
    """Done once `FakeEvent.finished` steps are."""

    finished = 0
    num_waits = 0
    recorded = 0

    def __init__(self):
        self.step = None

    def record(self):
        self.step = FakeEvent.recorded
        FakeEvent.recorded += 1

    def query(self):
        return self.step is not None and self.step < FakeEvent.finished

    def synchronize(self):
        if self.step is not None and not self.query():
            FakeEvent.num_waits += 1
            FakeEvent.finished = self.step + 1


@pytest.fixture
def on_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    pageable = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *shape, pin_memory=False: pageable(*shape))
    FakeEvent.finished = FakeEvent.num_waits = FakeEvent.recorded = 0
    return DelayedReader(torch.device("cuda"), 1, depth=3)


def test_only_finished_copies_are_read(on_cuda):
    for index in range(3):
        on_cuda.push(index, torch.tensor([float(index)]))
    assert on_cuda.latest() is None
    FakeEvent.finished = 1
    assert on_cuda.latest() == (0, [0.0])
    FakeEvent.finished = 3
    assert on_cuda.latest() == (1, [1.0])
    assert FakeEvent.num_waits == 0


def test_the_host_runs_ahead_by_depth_and_no_further(on_cuda):
    for index in range(3):
        on_cuda.push(index, torch.zeros(1))
    assert FakeEvent.num_waits == 0
    on_cuda.push(3, torch.zeros(1))
    assert (FakeEvent.num_waits, FakeEvent.finished) == (1, 1)


def test_exact_reads_the_same_step_whatever_has_arrived(on_cuda):
    reader = DelayedReader(torch.device("cuda"), 1, depth=3, exact=True)
    found = []
    for index in range(5):
        reader.push(index, torch.tensor([float(index)]))
        found.append(reader.latest())
    assert found == [None, None, (0, [0.0]), (1, [1.0]), (2, [2.0])]
    assert FakeEvent.num_waits == 3


# ------------------------------------------------------------------------------------------------
# What a training reports


CPU = torch.device("cpu")


def report_of(steps, max_floor_overflows=3, scale=1.0):
    """A report after these steps, each a gradient norm; one that is not finite overflows."""
    scaler = LossScaler(CPU, scale, 1000, 1)
    report = ScaledReport(CPU, scaler, max_floor_overflows)
    for index, norm in enumerate(steps):
        norm = torch.tensor(float(norm))
        scaler.found_inf.fill_(float(not torch.isfinite(norm)))
        scaler.update()
        report.fill(torch.tensor(float(index)), norm)
        report.end_step(index)
    return report


def test_losses_and_norms_are_kept_until_reset():
    report = report_of([1.0, 2.0, float("inf"), 4.0])
    assert report.read_losses(4) == [0.0, 1.0, 2.0, 3.0]
    assert report.read_grad_norms(4) == [1.0, 2.0, float("inf"), 4.0]
    report.reset()
    assert report.read_losses(4) == report.read_grad_norms(4) == [0.0] * 4 and report.late.latest() is None


def test_a_step_beyond_the_last_place_overwrites_it(monkeypatch):
    monkeypatch.setattr(ScaledReport, "NUM_LOSSES", 3)
    assert report_of([1.0, 2.0, 3.0, 4.0, 5.0]).read_losses(9) == [0.0, 1.0, 4.0]


def test_a_storm_at_the_floor_ends_with_its_first_step_and_where_it_was_seen():
    with pytest.raises(FloatingPointError, match="3 steps in a row .* scale at 1, from step 2 on, .* step 5"):
        report_of([1.0, 1.0, *[float("inf")] * 9])
    # Above the floor the scale still has somewhere to go.
    report_of([1.0, 1.0, *[float("inf")] * 9], scale=2.0**20)


def test_a_run_without_one_finite_gradient_has_no_losses():
    report = report_of([float("inf")] * 20, scale=2.0**30)
    with pytest.raises(FloatingPointError, match="in each of 20 steps, nothing was trained"):
        report.read_losses(20)
    assert len(report.read_losses(19)) == 19
    assert report_of([float("inf")] * 19 + [1.0], scale=2.0**30).read_losses(20)[19] == 19.0
