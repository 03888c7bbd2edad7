"""GpuRegion with fakes of the GPU: counts of patching, the function that it holds, a launch that fails."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

from common.capture.parameterized import analysis, gpu, random_state, verify
from common.capture.parameterized.backend import Region
from common.capture.parameterized.region import capture


class Patcher:
    """Moves one node for each base."""

    def __init__(self):
        self.bases = []

    def patch(self, bases):
        changed = [index for index, base in enumerate(bases) if [base] != self.bases[index : index + 1]]
        self.bases = bases
        return changed


def test_only_launches_that_change_a_node_cost_host_seconds(monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr(gpu.time, "perf_counter", lambda: next(clock))
    applied = []
    region = object.__new__(gpu.GpuRegion)
    region._patcher, region._setters, region.patch_s = Patcher(), SimpleNamespace(apply=applied.append), 0.0
    assert [region._patch(bases) for bases in ([1, 2], [1, 2], [1, 3])] == [2, 0, 1]
    assert applied == [[0, 1], [1]]
    assert region.patch_s == 2.0


def test_a_row_counts_the_captures_before_too():
    region = Region("forward 0")
    for patched, seconds in ((5, 0.5), (7, 0.25)):
        region.captured = SimpleNamespace(
            report={"slots": 3}, num_launches=2, num_patched=patched, patch_s=seconds, release=lambda: None
        )
        region.state = "parameterized"
        row = region.row()
        region.drop("eager", "moved")
    assert {name: row[name] for name in ("launches", "patched", "patch_s", "slots")} == {
        "launches": 4, "patched": 12, "patch_s": 0.75, "slots": 3,
    }  # fmt: skip
    assert region.num_replays == 4


def test_a_region_holds_the_function_until_release(monkeypatch):
    """The graph reads tensors that only the function's closure holds at their addresses."""
    graph = SimpleNamespace(raw_cuda_graph=lambda: 0)
    first = SimpleNamespace(inputs=[], outputs=[], structure=None, nodes=[], graph=graph)
    found = SimpleNamespace(
        first=first, plan=SimpleNamespace(sizes=[]), written=[], increment=0, blob=None, slots=[],
        chunks=[], unexplained=[], suspects=[], build_s={}, check=lambda: None, release=lambda: None,
        all_bytes=lambda: [],
    )  # fmt: skip
    compared = []
    checked = SimpleNamespace(
        inexact=set(), spoil=compared.append, run=compared.append, prove_unread=lambda found, inputs: None
    )
    monkeypatch.setattr(analysis, "analyse", lambda fn, inputs, device: found)
    monkeypatch.setattr(verify, "Verification", lambda *arguments: checked)
    monkeypatch.setattr(gpu.words, "Patcher", lambda *arguments: None)
    monkeypatch.setattr(gpu, "_in_arenas", lambda found: None)
    monkeypatch.setattr(gpu.driver, "Executable", lambda *arguments: SimpleNamespace(destroy=lambda: None))
    monkeypatch.setattr(gpu, "Setters", lambda *arguments: None)

    def make():
        three = torch.full((4,), 3.0)
        return capture(lambda x: x * three, inputs), weakref.ref(three)

    inputs = [SimpleNamespace(device=torch.device("cuda", 0))]
    region, three = make()
    assert compared == [[], inputs, inputs]
    gc.collect()
    assert three() is not None
    region.release()
    gc.collect()
    assert three() is None


@pytest.mark.parametrize(("increment", "fails", "after"), [(8, False, 108), (8, True, 100), (0, False, 100)])
def test_a_launch_that_fails_draws_nothing(monkeypatch, increment, fails, after):
    """What runs eagerly in its place draws the same numbers."""

    class Draws:
        offset = 100

        def get_offset(self):
            return self.offset

        def set_offset(self, offset):
            self.offset = offset

    draws = Draws()
    anchor = SimpleNamespace(replay=lambda: draws.set_offset(draws.offset + 4))
    monkeypatch.setattr(random_state, "generator", lambda device: draws)
    monkeypatch.setattr(random_state, "_anchor", lambda index: (anchor, None))

    def launch():
        with random_state.advanced(torch.device("cuda", 0), increment):
            assert draws.offset == 100
            if fails:
                raise OSError

    if fails:
        with pytest.raises(OSError):
            launch()
    else:
        launch()
    assert draws.offset == after
