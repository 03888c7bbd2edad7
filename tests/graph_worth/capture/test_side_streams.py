"""Side streams: work that the step does not wait for, on streams that only count."""

import pytest

from graph_worth.capture.side_streams import StreamWatch


class Event:
    def record(self, stream=None):
        pass

    def wait(self, stream=None):
        pass


class Stream:
    def record_event(self, event=None):
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event):
        pass

    def wait_stream(self, other):
        self.wait_event(other.record_event())


class Backend:
    def __init__(self):
        self.current = Stream()
        self.Stream, self.Event = Stream, Event

    def current_stream(self):
        return self.current


@pytest.fixture
def backend():
    return Backend()


def watched(backend, work):
    """Run work(launch, main, side), in which launch(stream, place) is an operator, and return what is found."""
    main, side = backend.current, Stream()
    with StreamWatch(backend) as watch:

        def launch(stream, place):
            backend.current = stream
            watch.launched(place)
            backend.current = main

        launch(main, "first")
        work(launch, main, side)
    return [(text.split(" this")[0], place) for text, place in watch.unjoined()]


def test_a_stream_that_is_joined_after_its_last_operator_is_sound(backend):
    def work(launch, main, side):
        side.wait_stream(main)
        launch(side, "copy")
        main.wait_stream(side)
        launch(main, "last")

    assert watched(backend, work) == []


def test_a_stream_that_is_not_joined_is_named_with_its_last_operator(backend):
    def work(launch, main, side):
        side.wait_stream(main)
        launch(side, "copy")
        main.wait_stream(side)
        launch(side, "late")

    assert watched(backend, work) == [("the step does not wait for", "late")]


def test_a_stream_that_does_not_wait_for_the_step_is_named_with_its_first_operator(backend):
    def work(launch, main, side):
        launch(side, "early")
        launch(side, "later")
        main.wait_stream(side)

    ((text, place),) = watched(backend, work)
    assert "does not wait for the step's stream" in text and place == "early"


def test_a_stream_may_be_joined_through_another_one_and_by_events(backend):
    def work(launch, main, side):
        other = Stream()
        ready = Event()
        ready.record(main)
        ready.wait(side)
        launch(side, "copy")
        done = side.record_event()
        other.wait_event(done)
        launch(other, "sum")
        main.wait_event(other.record_event())

    assert watched(backend, work) == []


def test_methods_are_put_back(backend):
    before = Stream.wait_event, Event.record
    watched(backend, lambda launch, main, side: None)
    assert (Stream.wait_event, Event.record) == before
