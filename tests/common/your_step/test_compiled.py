"""common/your_step/compiled.py: a compiler that takes too long is given up in one line."""

import signal
import time

import pytest

from common.variant import Unsupported
from common.your_step import compiled


def test_a_block_is_stopped_at_its_limit_though_it_catches_exceptions():
    before = signal.getsignal(signal.SIGALRM)
    start = time.monotonic()
    with (
        pytest.raises(Unsupported, match=r"more than 0.1 s; --variants=eager,reduce_overhead waits"),
        compiled.deadline(0.1),
    ):
        while True:
            try:
                time.sleep(600)
            except Exception:
                continue
    assert time.monotonic() - start < 300
    assert signal.getsignal(signal.SIGALRM) is before and not signal.getitimer(signal.ITIMER_REAL)[0]


@pytest.mark.parametrize("limit_s", [0, 60])
def test_a_block_within_its_limit_goes_on(limit_s):
    with compiled.deadline(limit_s):
        pass
    assert not signal.getitimer(signal.ITIMER_REAL)[0]
