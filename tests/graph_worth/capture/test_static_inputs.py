"""common/inputs: batches into static buffers, on the CPU and, with recorded streams, in the order that CUDA needs."""

import collections
import contextlib

import pytest
import torch

from graph_worth.capture.static_inputs import DoubleBuffered


class Counter:
    """A source whose batch k holds the number k."""

    def __init__(self, shape=(2, 3)):
        self.number, self.shape = 0, shape

    def next(self):
        self.number += 1
        return {"x": torch.full(self.shape, float(self.number - 1))}

    def reset(self):
        self.number = 0


# --- on the CPU


def test_on_the_cpu_batches_go_into_the_buffers_one_by_one_and_reset_begins_again():
    buffer, source = torch.full((2, 3), -1.0), Counter()
    inputs = DoubleBuffered({"x": buffer}, source)
    for number in range(3):
        inputs.load()
        assert inputs["x"].unique().tolist() == [number] and source.number == number + 1, "nothing is read ahead"
    assert inputs.buffers["x"] is buffer
    inputs.reset()
    inputs.load()
    assert buffer.unique().tolist() == [0]


def test_a_batch_that_does_not_fit_is_named_and_not_copied():
    buffer = torch.full((2, 3), -1.0)
    with pytest.raises(ValueError, match=r"input 'x' is \(2, 4\) torch.float32, captured as \(2, 3\) torch.float32"):
        DoubleBuffered({"x": buffer}, Counter(shape=(2, 4))).load()
    assert buffer.unique().tolist() == [-1]


# --- on CUDA: streams are queues here, run in whatever order their events allow


class FakeTensor:
    device = torch.device("cuda")
    shape, dtype = (), torch.float32

    def __init__(self, fake, value=None):
        self.fake, self.value = fake, value

    def copy_(self, source, non_blocking):
        assert non_blocking

        def copy():
            self.value = source.value

        self.fake.current.queue.append(copy)


class FakeStream:
    def __init__(self, device=None):
        self.queue = collections.deque()

    def wait_event(self, event):
        marks = set(event.marks[-1:])
        self.queue.append(lambda: marks <= event.reached)

    def wait_stream(self, stream):
        event = FakeEvent()
        event.record(stream)
        self.wait_event(event)


class FakeEvent:
    def __init__(self):
        self.marks, self.reached = [], set()

    def record(self, stream):
        mark = len(self.marks)
        self.marks.append(mark)
        stream.queue.append(lambda: self.reached.add(mark))


class FakeSource:
    def __init__(self, fake):
        self.fake, self.number = fake, 0

    def next(self):
        self.number += 1
        return {"x": FakeTensor(self.fake, self.number - 1)}

    def reset(self):
        self.number = 0


class FakeCuda:
    """The part of torch.cuda that DoubleBuffered uses. `step` stands for a training step that reads the buffer."""

    def __init__(self, monkeypatch):
        self.main = self.current = FakeStream()
        self.side = None
        self.seen = []
        monkeypatch.setattr(torch.cuda, "Stream", self._make_stream)
        monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
        monkeypatch.setattr(torch.cuda, "stream", self._stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: self.current)
        monkeypatch.setattr(torch, "empty_like", lambda like: FakeTensor(self))
        self.source = FakeSource(self)
        self.inputs = DoubleBuffered({"x": FakeTensor(self)}, self.source)

    def _make_stream(self, device):
        self.side = FakeStream()
        return self.side

    @contextlib.contextmanager
    def _stream(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    def step(self):
        self.inputs.load()
        self.main.queue.append(lambda: self.seen.append(self.inputs["x"].value))

    def run(self, first, second):
        """Run `first` as far as it gets, then one operation of `second`, and so on until both are empty."""
        while first.queue or second.queue:
            if not _advance(first):
                assert _advance(second), "both streams wait for each other"


def _advance(stream):
    """Run the stream's next operation; False where there is none or it waits. A wait returns whether it is over."""
    if not stream.queue or stream.queue[0]() is False:
        return False
    stream.queue.popleft()
    return True


@pytest.mark.parametrize("eager_copies", [True, False])
def test_steps_see_batches_in_order_however_the_streams_run(monkeypatch, eager_copies):
    fake = FakeCuda(monkeypatch)
    for _ in range(6):
        fake.step()
    fake.run(*((fake.side, fake.main) if eager_copies else (fake.main, fake.side)))
    assert fake.seen == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("eager_copies", [True, False])
def test_reset_throws_away_what_is_staged(monkeypatch, eager_copies):
    fake = FakeCuda(monkeypatch)
    for count in (3, 2, 4):
        for _ in range(count):
            fake.step()
        fake.inputs.reset()
    fake.run(*((fake.side, fake.main) if eager_copies else (fake.main, fake.side)))
    assert fake.seen == [0, 1, 2, 0, 1, 0, 1, 2, 3]


def test_the_next_batch_is_copied_while_the_step_runs(monkeypatch):
    fake = FakeCuda(monkeypatch)
    fake.step()
    fake.main.queue.append(lambda: False)  # the rest of the step does not end
    while _advance(fake.side) or _advance(fake.main):
        pass
    assert fake.seen == [0] and fake.source.number == 2 and not fake.side.queue


@pytest.mark.gpu
def test_batches_arrive_in_order_on_a_gpu():
    class Pinned(Counter):
        def next(self):
            return {name: tensor.pin_memory() for name, tensor in super().next().items()}

    with torch.cuda.stream(torch.cuda.Stream()):
        inputs = DoubleBuffered({"x": torch.zeros(1024, 1024, device="cuda")}, Pinned((1024, 1024)))
        work = torch.randn(4096, 4096, device="cuda")
        seen = []
        for number in range(20):
            if number == 10:
                inputs.reset()
            inputs.load()
            work = torch.tanh(work @ work)
            seen += [inputs["x"].amin(), inputs["x"].amax()]
        torch.cuda.synchronize()
    numbers = [*range(10), *range(10)]
    assert [int(value) for value in seen] == [number for number in numbers for _ in range(2)]
