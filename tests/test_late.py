"""common/late: numbers read late, on the CPU, and the order of events with fakes of CUDA's."""

import pytest
import torch

from common.late import LateReader


def test_the_step_before_is_read():
    reader = LateReader(torch.device("cpu"), 2)
    assert reader.latest() is None
    reader.push(0, torch.tensor([1.0, 2.0]))
    assert reader.latest() is None
    reader.push(1, torch.tensor([3.0, 4.0]))
    assert reader.latest() == (0, [1.0, 2.0])
    for index in range(2, 9):
        reader.push(index, torch.tensor([float(index), 0.0]))
        assert reader.latest()[0] == index - 1


def test_what_was_pushed_is_a_copy():
    reader, values = LateReader(torch.device("cpu"), 1), torch.tensor([1.0])
    reader.push(0, values)
    values.fill_(7.0)
    reader.push(1, values)
    assert reader.latest() == (0, [1.0])


def test_reset_forgets():
    reader = LateReader(torch.device("cpu"), 1)
    for index in range(5):
        reader.push(index, torch.zeros(1))
    reader.reset()
    assert reader.latest() is None


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
    return LateReader(torch.device("cuda"), 1, depth=3)


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
    reader = LateReader(torch.device("cuda"), 1, depth=3, exact=True)
    found = []
    for index in range(5):
        reader.push(index, torch.tensor([float(index)]))
        found.append(reader.latest())
    assert found == [None, None, (0, [0.0]), (1, [1.0]), (2, [2.0])]
    assert FakeEvent.num_waits == 3
