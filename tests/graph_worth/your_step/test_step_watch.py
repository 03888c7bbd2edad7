"""The watch over one step: calls that only a GPU knows, on streams and events that do nothing."""

import threading
import warnings

import pytest
import torch

from graph_worth.your_step import step_watch as watching
from graph_worth.your_step.place import place_of_call
from tests.graph_worth.capture import test_side_streams


class Stream(test_side_streams.Stream):
    def synchronize(self):
        pass

    def query(self):
        return True


class Event(test_side_streams.Event):
    def synchronize(self):
        pass

    def query(self):
        return True

    def elapsed_time(self, other):
        return 0.0


@pytest.fixture
def current(monkeypatch):
    """The current stream of a machine that seems to have a GPU, in a list."""
    torch.optim.SGD([torch.zeros(1)])  # imports torch's compiler, which asks for a GPU
    found = [Stream()]
    fakes = {
        "Stream": Stream,
        "Event": Event,
        "current_stream": lambda *device: found[0],
        "is_available": lambda: True,
        "get_sync_debug_mode": lambda: 0,
        "set_sync_debug_mode": lambda mode: None,
        "is_current_stream_capturing": lambda: False,
        "synchronize": lambda *device: None,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return found


def watched(step):
    """(names of refused calls with their lines in this file, all that was seen)."""
    found = watching.watch(step, torch.ones(2, 4), [])
    assert all(refused.place.own.startswith(__file__) for refused in found.refused)
    first = step.__code__.co_firstlineno
    return [(each.name, int(each.place.own.rpartition(":")[2]) - first) for each in found.refused], found


def test_waiting_and_asking_are_noted_with_their_lines(current):
    def step(batch):
        torch.cuda.synchronize()
        current[0].query()
        Event().elapsed_time(Event())
        return batch.sum()

    refused, found = watched(step)
    assert refused == [("torch.cuda.synchronize", 1), ("Stream.query", 2), ("Event.elapsed_time", 3)]
    assert {refused.reason for refused in found.refused} == {watching.WAITS}


def test_work_on_a_side_stream_is_followed(current):
    side = Stream()

    def step(batch):
        main = current[0]
        total = batch.sum()
        side.wait_stream(main)
        current[0] = side
        total = total * 2
        current[0] = main
        return total

    _, found = watched(step)
    ((text, place),) = found.unjoined
    assert "does not wait" in text and int(place.own.rpartition(":")[2]) == step.__code__.co_firstlineno + 5


def test_warnings_of_torch_become_findings(current):
    def step(batch):
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("The AccumulateGrad node's stream does not match the stream of the node", stacklevel=1)
        return batch.sum()

    refused, found = watched(step)
    assert refused == [("a CUDA operation", 1)]
    assert [text.split("'")[0] for text, _ in found.warned] == ["The AccumulateGrad node"]


def test_everything_is_put_back(current):
    before = torch.cuda.synchronize, Stream.query, torch.Tensor.tolist, warnings.showwarning
    watched(lambda batch: batch.sum())
    assert before == (torch.cuda.synchronize, Stream.query, torch.Tensor.tolist, warnings.showwarning)


def test_a_tensor_that_the_step_makes_may_become_a_view_of_another_and_no_other(current):
    weights, kept = torch.ones(4), torch.ones(4)

    def step(batch):
        torch.empty(0).set_(weights.untyped_storage())
        kept.set_(weights.untyped_storage())
        return batch.sum()

    refused, _ = watched(step)
    assert refused == [("aten.set_.source_Storage", 2)]


def test_a_call_in_a_thread_of_torch_has_the_line_at_which_the_main_thread_waits():
    # As a file of torch: none of the frames of this thread is the user's.
    names = {"call": place_of_call, "found": []}
    run = compile("found.append(call())", torch.__file__, "exec")
    backward = threading.Thread(target=exec, args=(run, names))
    backward.start()
    backward.join()
    assert names["found"][0].own.startswith(f"{__file__}:")
