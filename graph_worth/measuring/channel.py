"""The line between a worker and the process that started it: one JSON object a line over a Unix socket.

The starting process sends commands, the worker answers each with one or more messages. What the worker has sent is
out of its reach.
"""

import json
import select
import socket


class Closed(ConnectionError):
    """The other end is gone."""


class Channel:
    """One end of the line."""

    def __init__(self, connection: socket.socket):
        self._socket, self._buffer = connection, b""

    @classmethod
    def connect(cls, path: str) -> "Channel":
        """Connect to the process that listens at `path`."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(path)
        return cls(connection)

    def send(self, message: dict) -> None:
        """Send one message; Closed where the other end is gone, ValueError where it holds NaN or infinity."""
        data = json.dumps(message, allow_nan=False, separators=(",", ":")).encode() + b"\n"
        try:
            self._socket.sendall(data)
        except OSError as error:
            raise Closed(str(error)) from None

    def receive(self, timeout_s: float | None = None) -> dict | None:
        """The next message; None where none came within `timeout_s` (None: wait for ever), Closed as for `send`."""
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self._socket], [], [], timeout_s)
            if not ready:
                return None
            try:
                data = self._socket.recv(2**16)
            except OSError as error:
                raise Closed(str(error)) from None
            if not data:
                raise Closed("the other end has closed the line")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)

    def close(self) -> None:
        """Close this end."""
        self._socket.close()
