"""common/capture/parameterized/nodes and driver against a driver that is made up: what is read, refused and set."""

import ctypes
import struct

import pytest

from common.capture.checks import RegionRefused
from common.capture.parameterized import driver, nodes, words

PLAIN, PACKED, CLEAR, COPY, NOTHING = 101, 102, 103, 104, 105
X, Y = 0x7F00_0000_0000, 0x7F10_0000_0000


class Driver:
    """The functions of libcuda that are called, over a graph in Python."""

    def __init__(self, base, kinds, name=b"add", host_copy=False):
        self.base, self.kinds, self.name, self.host_copy = base, kinds, name, host_copy
        self.arguments = [struct.pack("<I", 7), struct.pack("<QQ", base + 16, 3)]
        self.buffers = [ctypes.create_string_buffer(data, len(data)) for data in self.arguments]
        self.pointers = (ctypes.c_void_p * 2)(*map(ctypes.addressof, self.buffers))
        self.packed = ctypes.create_string_buffer(struct.pack("<IIQ", 1, 2, base + 64), 16)
        self.size = ctypes.c_size_t(16)
        self.extra = (ctypes.c_void_p * 5)(1, ctypes.addressof(self.packed), 2, ctypes.addressof(self.size), None)
        self.seen = {}
        # Functions of C: their arguments are converted as libcuda's are.
        self.cuGraphExecKernelNodeSetParams_v2 = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 3)(self.set_kernel)
        memory = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)
        self.cuGraphExecMemsetNodeSetParams = memory(self.set_memset)
        self.cuGraphExecMemcpyNodeSetParams = memory(self.set_memcpy)

    def cuGraphGetNodes(self, graph, out, count):
        if out is None:
            count._obj.value = len(self.kinds)
        else:
            out[:] = list(self.kinds)
        return 0

    def cuGraphNodeGetType(self, node, kind):
        kind._obj.value = self.kinds[node.value]
        return 0

    def cuGraphKernelNodeGetParams_v2(self, node, params):
        params = params._obj
        params.func, params.grid[0], params.block[0], params.shared_bytes = 5000, 8, 256, 48
        if node.value == PLAIN:
            params.kernel_params = ctypes.addressof(self.pointers)
        else:
            params.extra = ctypes.addressof(self.extra)
        return 0

    def cuFuncGetName(self, name, function):
        name._obj.value = self.name
        return 0

    def cuFuncGetParamInfo(self, function, index, offset, size):
        if index.value == 2:
            return 1
        offset._obj.value, size._obj.value = ((0, 4), (8, 16))[index.value]
        return 0

    def cuGraphMemsetNodeGetParams(self, node, params):
        params = params._obj
        params.dst, params.value, params.element_size, params.width, params.height = self.base + 32, 0, 4, 9, 1
        return 0

    def cuGraphMemcpyNodeGetParams(self, node, params):
        params = params._obj
        params.src_type, params.src_device = (1, None) if self.host_copy else (2, self.base)
        params.dst_type, params.dst_device, params.width, params.height, params.depth = 2, self.base + 128, 64, 1, 1
        return 0

    def cuCtxGetCurrent(self, context):
        context._obj.value = 77
        return 0

    def set_kernel(self, executable, node, params):
        given = driver.KernelParams.from_address(params)
        assert (given.func, given.grid[0], given.block[0], given.shared_bytes) == (5000, 8, 256, 48)
        self.seen[node] = driver.kernel_arguments(given)
        return 0

    def set_memset(self, executable, node, params, context):
        self.seen[node] = driver.MemsetParams.from_address(params).dst, context
        return 0

    def set_memcpy(self, executable, node, params, context):
        given = driver.MemcpyParams.from_address(params)
        self.seen[node] = given.src_device, given.dst_device, given.width
        return 0


class Executable:
    def __init__(self, handles):
        self.handle = ctypes.c_void_p(1)
        self.nodes = [ctypes.c_void_p(handle) for handle in handles]


ALL = {PLAIN: 0, PACKED: 0, CLEAR: 2, COPY: 1, NOTHING: 5}


def read(monkeypatch, *arguments, **options):
    made_up = Driver(*arguments, **options)
    monkeypatch.setattr(driver, "library", lambda: made_up)
    return made_up, nodes.read_nodes(1)


def test_structures_have_the_sizes_of_cuda_h():
    sizes = [ctypes.sizeof(kind) for kind in (driver.KernelParams, driver.MemsetParams, driver.MemcpyParams)]
    assert sizes == [72, 40, 200]


def test_every_node_is_launched_with_the_addresses_of_the_call(monkeypatch):
    _, first = read(monkeypatch, X, ALL)
    made_up, second = read(monkeypatch, Y, ALL)
    assert [node.name for node in first] == ["add", "add", "memset", "memcpy", "empty"]
    assert [node.packed for node in first] == [False, True, False, False, False]
    nodes.check_alike(first, second)
    chunks, blob = words.layout([node.parameters for node in first])
    _, other = words.layout([node.parameters for node in second])
    slots, unexplained = words.explain(chunks, (blob, other), [(X, Y, 4096)])
    assert not unexplained
    assert slots.node.tolist() == [0, 1, 2, 3, 3]

    setters = nodes.Setters(Executable(ALL), first, chunks, blob)
    base = 0x7A00_0000_0000
    setters.apply(words.Patcher(blob, slots, 1).patch([base]))
    assert made_up.seen == {
        PLAIN: [(0, struct.pack("<I", 7)), (8, struct.pack("<QQ", base + 16, 3))],
        PACKED: [(0, struct.pack("<IIQ", 1, 2, base + 64))],
        CLEAR: (base + 32, 77),
        COPY: (base, base + 128, 64),
    }


@pytest.mark.parametrize(
    ("kinds", "options", "message"),
    [
        ({9: 3}, {}, "node 0 is a host function node"),
        ({PLAIN: 0, 9: 13}, {}, "node 1 is a conditional node"),
        ({9: 4}, {}, "child graph"),
        ({PLAIN: 0}, {"name": b"ncclDevKernel_AllReduce"}, "is a collective, ncclDevKernel_AllReduce"),
        ({COPY: 1}, {"host_copy": True}, "node 0 copies from memory of the host"),
    ],
)
def test_a_node_that_cannot_move_is_refused_by_name(monkeypatch, kinds, options, message):
    with pytest.raises(RegionRefused, match=message):
        read(monkeypatch, X, kinds, **options)


def test_two_captures_that_launch_other_work_are_refused(monkeypatch):
    _, first = read(monkeypatch, X, ALL)
    _, fewer = read(monkeypatch, Y, {PLAIN: 0})
    _, renamed = read(monkeypatch, Y, ALL, name=b"add_vectorized")
    with pytest.raises(RegionRefused, match="5 and 1 nodes"):
        nodes.check_alike(first, fewer)
    with pytest.raises(RegionRefused, match="differ in node 0: add .* and add_vectorized"):
        nodes.check_alike(first, renamed)


def test_an_error_of_the_driver_names_the_node(monkeypatch):
    kinds = {PLAIN: 0, NOTHING: 5, PACKED: 0}
    made_up, read_nodes = read(monkeypatch, X, kinds)
    chunks, blob = words.layout([node.parameters for node in read_nodes])
    errors = iter([0, 1])
    monkeypatch.setattr(made_up, "cuGraphExecKernelNodeSetParams_v2", lambda *_: next(errors))
    monkeypatch.setattr(made_up, "cuGetErrorName", lambda *_: 0, raising=False)
    setters = nodes.Setters(Executable(kinds), read_nodes, chunks, blob)
    with pytest.raises(driver.DriverError, match="parameters of node 2: 1"):
        setters.apply([0, 2])


class Graphs:
    """libcuda with the calls that make and drop a graph."""

    def __init__(self, error):
        self.error, self.calls = error, []

    def cuGetErrorName(self, error, text):
        return 0

    def __getattr__(self, name):
        def call(*arguments):
            self.calls.append(name)
            if name in ("cuGraphClone", "cuGraphNodeFindInClone"):
                arguments[0]._obj.value = 70 if name == "cuGraphClone" else arguments[1].value + 10
            return self.error if name == "cuGraphInstantiateWithFlags" else 0

        return call


def test_an_executable_has_the_nodes_of_a_copy_which_a_failure_drops(monkeypatch):
    library = Graphs(error=0)
    monkeypatch.setattr(driver, "library", lambda: library)
    monkeypatch.setattr(driver, "_graph_launch", lambda: None)
    assert [node.value for node in driver.Executable(7, [1, 2]).nodes] == [11, 12]
    assert library.calls == ["cuGraphClone", *["cuGraphNodeFindInClone"] * 2, "cuGraphInstantiateWithFlags"]

    library.error = 2
    with pytest.raises(driver.DriverError, match="cuGraphInstantiateWithFlags: 2"):
        driver.Executable(7, [1])
    assert library.calls[-1] == "cuGraphDestroy"
