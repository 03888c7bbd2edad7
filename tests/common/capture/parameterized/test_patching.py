"""What a region counts of patching: nodes that change, and host seconds of the launches that change any."""

from types import SimpleNamespace

from common.capture.parameterized import gpu
from common.capture.parameterized.backend import Region


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
