"""Updates by the GPU without one: rows of addresses, who sets which node, and why it may be off."""

import ctypes
import importlib.util
import struct
from types import SimpleNamespace

import pytest

from common.capture.parameterized import device_program, device_updates, driver, gpu, nodes, region, verify, words
from common.capture.parameterized.errors import RegionRefused
from common.capture.parameterized.nodes import Node

X, Y = 0x7F00_0000_0000, 0x7F10_0000_1000
KERNEL, PACKED, CLEAR = 0, 1, 2


def parameters(base):
    """Of a kernel with two parameters, of one with a packed buffer, and of a memset."""
    return [
        [(0, struct.pack("<I", 7)), (8, struct.pack("<QQ", base + 16, 3))],
        [(0, struct.pack("<IQI", 5, base + 64, (base + 32) & 0xFFFFFFFF))],
        [(0, struct.pack("<Q", base + 128))],
    ]


class Updater:
    def __init__(self):
        self.calls, self.error = [], None

    def update(self, executable, rows, uploads):
        self.calls.append((rows.tolist(), uploads))

    def check(self):
        if self.error:
            raise self.error


@pytest.fixture
def made(monkeypatch):
    """Setters of the three nodes, a patcher, the calls of the updater and the nodes that the host set."""
    chunks, blob = words.layout(parameters(X))
    slots, unexplained = words.explain(chunks, (blob, words.layout(parameters(Y))[1]), [(X, Y, 4096)])
    assert not unexplained
    records = device_updates.Records(chunks, blob, slots, {KERNEL: 900, PACKED: 901})
    by_host = []
    monkeypatch.setattr(nodes.Setters, "_setter", lambda self, executable, node, *rest: lambda: by_host.append(node))
    its_nodes = [Node(handle, kind, "k") for handle, kind in ((KERNEL, 0), (PACKED, 0), (CLEAR, 2))]
    updater = Updater()

    def make(threshold):
        executable = SimpleNamespace(handle=ctypes.c_void_p(1), nodes=[ctypes.c_void_p(2)] * 3)
        return device_updates.DeviceSetters(executable, its_nodes, records, updater, threshold)

    return SimpleNamespace(
        make=make, patcher=words.Patcher(blob, slots, 1), updater=updater, by_host=by_host, records=records
    )


def host_nodes(made):
    found = [node.handle for node in made.by_host]
    made.by_host.clear()
    return found


def test_rows_name_node_place_size_and_new_value(made):
    base = 0x7A00_1234_0000
    made.patcher.patch([base])
    eight, four = 8 << 32, 4 << 32
    assert made.records.rows([KERNEL]).tolist() == [[900, 8 | eight, base + 16]]
    assert made.records.rows([PACKED, CLEAR]).tolist() == [
        [901, 4 | eight, base + 64],
        [901, 12 | four, (base + 32) & 0xFFFFFFFF],
    ]
    assert made.records.rows([]).shape == (0, 3)


def test_few_kernels_are_set_by_the_host_and_many_by_the_gpu(made):
    setters = made.make(threshold=2)
    setters.apply(made.patcher.patch([0x7A00_0000_0000]))
    assert host_nodes(made) == [KERNEL, PACKED, CLEAR] and not made.updater.calls

    setters = made.make(threshold=1)
    setters.apply([KERNEL, CLEAR])
    assert host_nodes(made) == [KERNEL, CLEAR] and not made.updater.calls
    setters.apply([KERNEL, PACKED, CLEAR])
    assert host_nodes(made) == [CLEAR]
    ((rows, uploads),) = made.updater.calls
    assert [row[0] for row in rows] == [900, 901, 901] and uploads


def test_from_the_first_update_on_a_change_by_the_host_is_followed_by_all_of_the_gpus(made):
    setters = made.make(threshold=0)
    setters.apply([PACKED])
    setters.apply([KERNEL])
    setters.apply([CLEAR])
    assert host_nodes(made) == [CLEAR]
    assert [([row[0] for row in rows], uploads) for rows, uploads in made.updater.calls] == [
        ([901, 901], True),
        ([900], False),
        ([900, 901, 901], True),
    ]


def test_after_the_check_the_host_has_made_the_same_changes_and_the_threshold_holds(made):
    setters = made.make(threshold=-1)
    setters.apply([KERNEL, PACKED, CLEAR])
    host_nodes(made)
    setters.settle(1)
    assert host_nodes(made) == [KERNEL, PACKED]
    setters.apply([PACKED])
    assert host_nodes(made) == [PACKED] and len(made.updater.calls) == 1
    made.updater.error = driver.DriverError("cudaError 1")
    with pytest.raises(driver.DriverError):
        setters.settle(1)


def test_kernels_with_addresses_are_marked_and_nothing_else(monkeypatch):
    seen = []

    def mark(node, attribute, value):
        seen.append((node.value, attribute.value, value[0]))
        value[1] = 0x900 + node.value if node.value != 13 else None
        return 0

    monkeypatch.setattr(driver, "library", lambda: SimpleNamespace(cuGraphKernelNodeSetAttribute=mark))
    own = [Node(1, driver.KERNEL, "a"), Node(2, driver.MEMSET, "memset"), Node(3, driver.KERNEL, "b")]
    copies = [ctypes.c_void_p(address) for address in (11, 12, 13)]
    assert device_updates.mark(own, copies, {0, 1}) == {0: 0x90B}
    assert seen == [(11, 13, 1)]
    with pytest.raises(driver.DriverError, match="no handle of node 2"):
        device_updates.mark(own, copies, {2})


class Graphs:
    """libcuda with the calls that make and drop a graph."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        def call(*arguments):
            self.calls.append(name)
            if name in ("cuGraphClone", "cuGraphNodeFindInClone"):
                arguments[0]._obj.value = 70 if name == "cuGraphClone" else arguments[1].value + 10
            return 0

        return call


def test_nodes_of_the_copy_are_prepared_before_it_is_instantiated_and_a_failure_drops_it(monkeypatch):
    library = Graphs()
    monkeypatch.setattr(driver, "library", lambda: library)
    monkeypatch.setattr(driver, "_graph_launch", lambda: lambda handle, stream: 0)
    seen = []

    def prepare(nodes_of_copy):
        seen.append(([node.value for node in nodes_of_copy], list(library.calls)))

    executable = driver.Executable(7, [1, 2], prepare)
    executable.launch(5)
    assert executable.last_stream == 5
    before = ["cuGraphClone", "cuGraphNodeFindInClone", "cuGraphNodeFindInClone"]
    assert seen == [([11, 12], before)] and library.calls == [*before, "cuGraphInstantiateWithFlags"]

    def fail(nodes_of_copy):
        raise driver.DriverError("no")

    with pytest.raises(driver.DriverError, match="no"):
        driver.Executable(7, [1], fail)
    assert library.calls[-1] == "cuGraphDestroy" and library.calls.count("cuGraphInstantiateWithFlags") == 1


def test_a_graph_of_many_rows_is_updated_in_launches_of_as_many_as_a_kernel_takes(monkeypatch):
    import torch

    launches = []

    def call(name, *arguments):
        given = ctypes.cast(arguments[9][0], ctypes.POINTER(device_updates._Rows)).contents
        launches.append((name, arguments[1].value, given.count, list(given.row[given.count - 1])))

    monkeypatch.setattr(driver, "call", call)
    monkeypatch.setattr(device_updates, "_function", lambda index: ctypes.c_void_p(7))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=5))
    updater = device_updates.Updater(torch.device("cpu"))
    updater.check()
    rows = device_updates.np.arange(3 * 1500, dtype="uint64").reshape(-1, 3)
    updater.update(SimpleNamespace(last_stream=5, handle=None), rows, uploads=False)
    assert launches == [
        ("cuLaunchKernel", 22, 1364, rows[1363].tolist()),
        ("cuLaunchKernel", 3, 136, rows[1499].tolist()),
    ]
    updater._status.fill_(1)
    with pytest.raises(driver.DriverError, match="cudaError 1"):
        updater.check()


def test_the_parameters_of_the_kernel_fit():
    assert ctypes.sizeof(device_updates._Rows) + ctypes.sizeof(ctypes.c_void_p) <= 32764


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setattr(device_program, "_folders", list)
    with pytest.raises(device_program.Unavailable, match=r"libcudadevrt.a"):
        device_program.build("sm_12")


@pytest.mark.skipif(
    importlib.util.find_spec("nvidia") is None
    or not any(f.joinpath("libcudadevrt.a").is_file() for f in device_program._folders()),
    reason="no wheels of CUDA",
)
def test_the_kernel_is_built_from_the_wheels_and_links():
    assert device_program.NAME in device_program.build("sm_90")


@pytest.mark.parametrize(("verify", "encoded", "runs"), [(0, 0, 0), (1, 0, 1), (0, 3, 2), (5, 3, 5)])
def test_addresses_in_a_code_are_always_compared_with_eager(verify, encoded, runs):
    calls = []
    check = SimpleNamespace(
        spoil=lambda memory: calls.append("spoil"), run=lambda inputs: calls.append("run"),
        prove_unread=lambda analysis, inputs: calls.append("prove"),
    )  # fmt: skip
    analysis = SimpleNamespace(encoded=encoded, unexplained=[], all_bytes=list)
    region._prove(check, analysis, [], verify)
    assert calls == ["spoil"] * bool(runs) + ["run"] * runs + ["prove"]


class Captured:
    def __init__(self, failure=None):
        self.device, self.failure, self.calls = "cuda:0", failure, []
        self.report = {"inexact": ["result 1"], "slots": 3}

    def settle(self, threshold):
        self.calls.append(("settle", threshold))
        if self.failure:
            raise self.failure

    def forget(self):
        self.calls.append("forget")

    def release(self):
        self.calls.append("release")


class Checked:
    """A verification that passes, or not."""

    failure = None
    runs = 0

    def __init__(self, *arguments):
        self.inexact = {"result 0"}

    def spoil(self, memory):
        assert memory == ["bytes"]

    def run(self, inputs):
        Checked.runs += 1
        if self.failure:
            raise self.failure


@pytest.mark.parametrize(
    ("missing", "refused", "failed", "reason"),
    [
        (device_program.Unavailable("no nvrtc"), None, None, "off: no nvrtc"),
        (None, RegionRefused("result 0 differs\nmore"), None, "off: result 0 differs"),
        (None, None, driver.DriverError("cudaError 1"), "off: cudaError 1"),
        (None, None, None, "launches that change more than 40 kernels"),
    ],
)
def test_updates_by_the_gpu_are_used_where_launches_equal_eager_and_else_the_report_says_why(
    monkeypatch, missing, refused, failed, reason
):
    host, device = Captured(), Captured(failed)

    def make(fn, analysis, where, threshold):
        assert (fn, threshold) == ("the region", -1)
        if missing:
            raise missing
        return device

    monkeypatch.setattr(gpu, "GpuRegion", make)
    monkeypatch.setattr(verify, "Verification", Checked)
    monkeypatch.setattr(Checked, "failure", refused)
    monkeypatch.setattr(Checked, "runs", 0)
    analysis = SimpleNamespace(all_bytes=lambda: ["bytes"])
    chosen = region._updated_by_device(host, analysis, 40, ("the region", [], ()))
    works = not (missing or refused or failed)
    assert chosen is (device if works else host)
    assert chosen.report["device_updates"] == reason and chosen.report["slots"] == 3
    if works:
        assert chosen.report["inexact"] == ["result 0", "result 1"]
        assert (host.calls, device.calls, Checked.runs) == (["release"], [("settle", 40)], 2)
    else:
        assert host.calls == ["forget"] and device.calls[-1:] == ([] if missing else ["release"])
