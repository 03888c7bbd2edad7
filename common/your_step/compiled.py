"""A limit on the time that torch.compile may take."""

import contextlib
import signal

from common.variant import Unsupported


class _TooLong(BaseException):
    """No Exception: the compiler catches those."""


@contextlib.contextmanager
def deadline(limit_s: float):
    """Interrupt a block of the main thread that takes more than limit_s seconds (0: no limit), which is Unsupported."""
    if not limit_s:
        yield
        return

    def stop(number, frame):
        raise _TooLong

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    except _TooLong:
        raise Unsupported(
            f"torch.compile takes more than {limit_s:g} s; a variant that --variants names waits for it"
        ) from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
