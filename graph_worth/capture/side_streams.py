"""Check side streams: each has to begin after the step's own stream, which has to wait for all of their work.

Each stream knows how many operators of each other stream are done when its next one runs. An event carries what its
stream knew when it was recorded, and a stream that waits for the event knows that, too.
"""

import contextlib
from typing import Any
from unittest import mock

import torch


class StreamWatch:
    """Within it, operators and waits of streams are noted; the backend is None where there are no streams."""

    def __init__(self, backend: Any = torch.cuda):
        self._backend = backend
        self._known: dict[Any, dict] = {}
        self._events: dict[int, dict] = {}
        self._kept: list = []
        self._places: dict[Any, Any] = {}
        self._late: dict[Any, Any] = {}
        self._patches = contextlib.ExitStack()
        self._main: Any = None

    def __enter__(self):
        if self._backend is None:
            return self
        self._main = self._backend.current_stream()
        stream_type, event_type = self._backend.Stream, self._backend.Event
        self._wrap(stream_type, "record_event", lambda result, stream, event=None: self._note(event or result, stream))
        self._wrap(stream_type, "wait_event", lambda result, stream, event: self._waited(stream, event))
        now = self._backend.current_stream
        self._wrap(event_type, "record", lambda result, event, stream=None: self._note(event, stream or now()))
        self._wrap(event_type, "wait", lambda result, event, stream=None: self._waited(stream or now(), event))
        return self

    def __exit__(self, *_):
        self._patches.close()

    def launched(self, place) -> None:
        """Note an operator on the current stream."""
        if self._backend is None:
            return
        stream = self._backend.current_stream()
        known = self._known.setdefault(stream, {})
        if stream != self._main:
            if self._main not in known:
                self._late.setdefault(stream, place)
            self._places[stream] = place
        known[stream] = known.get(stream, 0) + 1

    def unjoined(self) -> list:
        """Return (text, place) for each side stream that begins or ends apart from the step's own stream."""
        main = self._known.get(self._main, {})
        faults = []
        for stream, place in self._places.items():
            if main.get(stream, 0) < self._known[stream][stream]:
                faults.append(("the step does not wait for this work on a side stream", place))
            elif stream in self._late:
                faults.append(("this work on a side stream does not wait for the step's stream", self._late[stream]))
        return faults

    def _wrap(self, owner, name, after):
        original = getattr(owner, name)

        def wrapped(*args, **kwargs):
            result = original(*args, **kwargs)
            after(result, *args, **kwargs)
            return result

        self._patches.enter_context(mock.patch.object(owner, name, wrapped))

    def _note(self, event, stream):
        self._kept.append(event)
        known = dict(self._known.get(stream, {}))
        known.setdefault(stream, 0)
        self._events[id(event)] = known

    def _waited(self, stream, event):
        known = self._known.setdefault(stream, {})
        for source, count in self._events.get(id(event), {}).items():
            known[source] = max(known.get(source, 0), count)
