"""common/capture/parameterized/driver.Repeated: addresses that have one piece of memory again and again."""

from unittest import mock

import pytest
import torch

from common.capture import memory
from common.capture.parameterized import driver

UNIT, ADDRESS = 2**21, 2**40


class Calls:
    """A driver that notes its calls; `failing` is the name of a call, and its number, that fails."""

    def __init__(self, failing=("", 0)):
        self.seen, self._failing = [], failing

    def __getattr__(self, name):
        if not name.startswith("cuMem"):
            return mock.MagicMock()

        def call(*args):
            self.seen.append((name, *args[:2]))
            number = sum(each[0] == name for each in self.seen)
            results = {"cuMemGetAllocationGranularity": [UNIT], "cuMemCreate": ["memory"]}
            results["cuMemAddressReserve"] = [ADDRESS]
            return int((name, number) == self._failing), *results.get(name, [])

        return call

    def of(self, name):
        return [args for each, *args in self.seen if each == name]


def test_the_memory_is_mapped_over_all_addresses_and_given_back(monkeypatch):
    calls = Calls()
    monkeypatch.setattr(driver, "cu", calls)
    repeated = driver.Repeated(3 * UNIT + 1, UNIT + 1, 0)
    assert (repeated.address, repeated.piece) == (ADDRESS, 2 * UNIT)
    assert calls.of("cuMemMap") == [[ADDRESS, 2 * UNIT], [ADDRESS + 2 * UNIT, 2 * UNIT]]
    assert calls.of("cuMemRelease") == [["memory"]]
    repeated.free()
    assert calls.of("cuMemUnmap") == calls.of("cuMemAddressFree") == [[ADDRESS, 4 * UNIT]]


@pytest.mark.parametrize(
    ("failing", "unmapped", "freed"),
    [
        (("cuMemMap", 2), [[ADDRESS, 2 * UNIT]], [[ADDRESS, 4 * UNIT]]),
        (("cuMemMap", 1), [], [[ADDRESS, 4 * UNIT]]),
        (("cuMemSetAccess", 1), [[ADDRESS, 4 * UNIT]], [[ADDRESS, 4 * UNIT]]),
        (("cuMemAddressReserve", 1), [], []),
    ],
)
def test_a_call_that_fails_leaves_nothing_mapped(monkeypatch, failing, unmapped, freed):
    calls = Calls(failing)
    monkeypatch.setattr(driver, "cu", calls)
    with pytest.raises(driver.DriverError, match=failing[0]):
        driver.Repeated(4 * UNIT, 2 * UNIT, 0)
    assert (calls.of("cuMemUnmap"), calls.of("cuMemAddressFree")) == (unmapped, freed)
    assert calls.of("cuMemRelease") == [["memory"]]


@pytest.mark.gpu
def test_on_a_gpu_all_addresses_show_what_one_was_given():
    device = torch.device("cuda", torch.cuda.current_device())
    torch.cuda.synchronize()
    free, _ = torch.cuda.mem_get_info()
    repeated = driver.Repeated(2**32 + 1, 64 * UNIT, device.index)
    try:
        assert torch.cuda.mem_get_info()[0] >= free - 96 * UNIT
        memory.bytes_at(repeated.address, repeated.piece, device).fill_(7)
        last = memory.bytes_at(repeated.address + 2**32 - 4, 5, device)
        assert last.tolist() == [7] * 5
        last.zero_()
        assert int((memory.bytes_at(repeated.address, repeated.piece, device) == 0).sum()) == 5
    finally:
        torch.cuda.synchronize()
        repeated.free()
    assert torch.cuda.mem_get_info()[0] >= free - UNIT
