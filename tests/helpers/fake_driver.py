"""CUDA's driver over graphs in Python: the calls of cuda-bindings, with kernels that work on memory of the host."""

import contextlib
import ctypes
import itertools
from enum import IntEnum
from types import SimpleNamespace

import torch

from common.capture.parameterized import driver, gpu

KINDS = ["KERNEL", "MEMCPY", "MEMSET", "HOST", "GRAPH", "EMPTY", "CONDITIONAL"]


class CUresult(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_UNKNOWN = 999


class _Params:
    """Attributes of a structure of cuda.h over memory of its own, or at `_ptr`."""

    def __init__(self, _ptr=0):
        made = self._structure()
        object.__setattr__(self, "_at", self._structure.from_address(_ptr) if _ptr else made)

    def getPtr(self):
        return ctypes.addressof(self._at)

    def __getattr__(self, name):
        return getattr(self._at, name)

    def __setattr__(self, name, value):
        setattr(self._at, name, value)


def _params(name, *fields):
    return type(name, (_Params,), {"_structure": type("_", (ctypes.Structure,), {"_fields_": fields})})


_WORD, _INT = ctypes.c_ulonglong, ctypes.c_uint


def _side(name):
    at = [(f"{name}{axis}", _WORD) for axis in ("XInBytes", "Y", "Z", "LOD")]
    memory = [(f"{name}MemoryType", _INT), *((f"{name}{of}", _WORD) for of in ("Host", "Device", "Array", "_reserved"))]
    return [*at, *memory, (f"{name}Pitch", _WORD), (f"{name}Height", _WORD)]


class FakeDriver:
    """A stand-in for cuda.bindings.driver.

    add(*nodes) makes a graph. A node is ("kernel", function, [bytes of each parameter]), ("packed", function, bytes),
    ("memset", address, value, bytes), ("memcpy", source, target, bytes) or (another kind,). function(*parameters) works
    on memory at the addresses in its parameters. Set `error` to {name of a call: CUresult} for calls that fail.
    """

    CUDA_VERSION = 13000
    CUresult = CUresult
    CUgraphNodeType = IntEnum("CUgraphNodeType", {f"CU_GRAPH_NODE_TYPE_{kind}": i for i, kind in enumerate(KINDS)})
    CUpointer_attribute = SimpleNamespace(CU_POINTER_ATTRIBUTE_MEMORY_TYPE=2)
    CUDA_KERNEL_NODE_PARAMS = _params(
        "CUDA_KERNEL_NODE_PARAMS",
        ("func", _WORD),
        *((f"{of}Dim{axis}", _INT) for of in ("grid", "block") for axis in "XYZ"),
        ("sharedMemBytes", _INT),
        *((name, _WORD) for name in ("kernelParams", "extra", "kern", "ctx")),
    )
    CUDA_MEMSET_NODE_PARAMS = _params(
        "CUDA_MEMSET_NODE_PARAMS",
        ("dst", _WORD), ("pitch", _WORD), ("value", _INT), ("elementSize", _INT), ("width", _WORD), ("height", _WORD),
    )  # fmt: skip
    CUDA_MEMCPY3D = _params(
        "CUDA_MEMCPY3D", *_side("src"), *_side("dst"), *((f, _WORD) for f in ("WidthInBytes", "Height", "Depth"))
    )

    def __init__(self):
        self._handles = itertools.count(1000)
        self.graphs, self.nodes, self.executables = {}, {}, {}
        self.functions, self.error, self.destroyed = {}, {}, []
        # The graph's node, or (executable, the node), of each call that set parameters. num_frees: torch's count.
        self.set, self.num_frees = [], 0

    def add(self, *nodes):
        graph = next(self._handles)
        self.graphs[graph] = [self._node(*node) for node in nodes]
        return graph

    def _node(self, kind, *rest):
        handle = next(self._handles)
        if kind in ("kernel", "packed"):
            function, data = rest
            number = next((n for n, known in self.functions.items() if known[0] is function), next(self._handles))
            self.functions[number] = (function, [] if kind == "packed" else [len(part) for part in data])
            self.nodes[handle] = ("kernel", number, kind == "packed", data if kind == "packed" else list(data))
        elif kind == "memset":
            params = self.CUDA_MEMSET_NODE_PARAMS()
            params.dst, params.value, params.elementSize, params.width = rest[0], rest[1], 1, rest[2]
            params.height = 1
            self.nodes[handle] = ("memset", self._copy(params))
        elif kind == "memcpy":
            params = self.CUDA_MEMCPY3D()
            source, target, size, *memory_type = rest
            params.srcMemoryType, params.dstMemoryType = *(memory_type or [2]), 2
            params.srcDevice, params.dstDevice, params.WidthInBytes = source, target, size
            params.Height = params.Depth = 1
            self.nodes[handle] = ("memcpy", self._copy(params))
        else:
            self.nodes[handle] = (kind,)
        return handle

    @staticmethod
    def _copy(params):
        return ctypes.string_at(params.getPtr(), ctypes.sizeof(params._structure))

    def __getattr__(self, name):
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*arguments):
            if error := self.error.get(name):
                return (error,) if "Set" in name or "Destroy" in name else (error, None)
            return (CUresult.CUDA_SUCCESS, *getattr(self, f"_{name}")(*arguments))

        call.__name__ = name
        return call

    def _cuGraphGetNodes(self, graph, count):
        return self.graphs[graph][:count], len(self.graphs[graph])

    def _cuGraphNodeGetType(self, node):
        return (self.CUgraphNodeType[f"CU_GRAPH_NODE_TYPE_{self.nodes[node][0].upper()}"],)

    def _cuGraphKernelNodeGetParams(self, node):
        _, number, packed, data = self.nodes[node]
        params = self.CUDA_KERNEL_NODE_PARAMS()
        params.func, params.gridDimX, params.blockDimX, params.sharedMemBytes = number, 8, 256, 48
        parts = [ctypes.create_string_buffer(part, len(part)) for part in ([data] if packed else data)]
        size = ctypes.c_size_t(len(data))
        if packed:
            array = (ctypes.c_void_p * 5)(1, ctypes.addressof(parts[0]), 2, ctypes.addressof(size), None)
            params.extra = ctypes.addressof(array)
        else:
            array = (ctypes.c_void_p * len(parts))(*map(ctypes.addressof, parts))
            params.kernelParams = ctypes.addressof(array)
        object.__setattr__(params, "_keep", (parts, size, array))
        return (params,)

    def _cuGraphMemsetNodeGetParams(self, node):
        params = self.CUDA_MEMSET_NODE_PARAMS()
        ctypes.memmove(params.getPtr(), self.nodes[node][1], 40)
        return (params,)

    def _cuGraphMemcpyNodeGetParams(self, node):
        params = self.CUDA_MEMCPY3D()
        ctypes.memmove(params.getPtr(), self.nodes[node][1], 200)
        return (params,)

    def _cuFuncGetName(self, function):
        return (self.functions[function][0].__name__.encode(),)

    def cuFuncGetParamInfo(self, function, index):
        sizes = self.functions[function][1]
        if index == len(sizes):
            return CUresult.CUDA_ERROR_INVALID_VALUE, 0, 0
        return CUresult.CUDA_SUCCESS, 16 * index, sizes[index]

    def cuPointerGetAttribute(self, attribute, address):
        return CUresult.CUDA_ERROR_INVALID_VALUE, None

    def _cuGraphClone(self, graph):
        copy = next(self._handles)
        self.graphs[copy] = []
        for node in self.graphs[graph]:
            self.nodes[(copy, node)] = self.nodes[node]
            self.graphs[copy].append((copy, node))
        return (copy,)

    def _cuGraphNodeFindInClone(self, node, copy):
        return ((copy, node),)

    def _cuGraphInstantiate(self, graph, flags):
        executable = next(self._handles)
        self.executables[executable] = {node: self.nodes[node] for node in self.graphs[graph]}
        return (executable,)

    def _cuCtxGetCurrent(self):
        return (77,)

    def _read(self, node, params):
        """A node with the parameters that it is given."""
        kind, *rest = node
        if kind == "kernel":
            found = [data for _, data in driver.kernel_arguments(params)]
            return (kind, rest[0], rest[1], found[0] if rest[1] else found)
        return (kind, ctypes.string_at(params.getPtr(), len(rest[0])))

    def _set_in_graph(self, node, params):
        self.set.append(node)
        self.nodes[node] = self._read(self.nodes[node], params)
        return ()

    def _set_in_executable(self, executable, node, params, context=77):
        assert context == 77
        self.set.append((executable, node))
        self.executables[executable][node] = self._read(self.executables[executable][node], params)
        return ()

    _cuGraphExecKernelNodeSetParams = _cuGraphExecMemsetNodeSetParams = _set_in_executable
    _cuGraphExecMemcpyNodeSetParams = _set_in_executable
    _cuGraphKernelNodeSetParams = _cuGraphMemsetNodeSetParams = _cuGraphMemcpyNodeSetParams = _set_in_graph

    def _cuGraphExecDestroy(self, executable):
        self.destroyed.append(executable)
        self.executables.pop(executable, None)
        return ()

    def _cuGraphDestroy(self, graph):
        self.destroyed.append(graph)
        return ()

    def launch(self, executable, stream):
        """cuGraphLaunch, which works at once."""
        if error := self.error.get("cuGraphLaunch"):
            return error
        for kind, *rest in list(self.executables[executable.value].values()):
            if kind == "kernel":
                number, packed, data = rest
                self.functions[number][0](*([data] if packed else data))
            elif kind == "memset":
                buffer = ctypes.create_string_buffer(rest[0], 40)
                params = self.CUDA_MEMSET_NODE_PARAMS(_ptr=ctypes.addressof(buffer))
                ctypes.memset(params.dst, params.value, params.width)
            elif kind == "memcpy":
                buffer = ctypes.create_string_buffer(rest[0], 200)
                params = self.CUDA_MEMCPY3D(_ptr=ctypes.addressof(buffer))
                ctypes.memmove(params.dstDevice, params.srcDevice, params.WidthInBytes)
        return 0


def install(monkeypatch) -> FakeDriver:
    """A new FakeDriver in the place of CUDA's, and of what torch.cuda is asked at a launch."""
    fake = FakeDriver()
    monkeypatch.setattr(driver, "cu", fake)
    monkeypatch.setattr(driver, "_graph_launch", lambda: fake.launch)
    free = itertools.count(1 << 30, -(1 << 10))
    of_torch = {
        "device": lambda device: contextlib.nullcontext(),
        "is_current_stream_capturing": lambda: False,
        "current_stream": lambda device: SimpleNamespace(cuda_stream=7),
        "memory_stats_as_nested_dict": lambda device: {"num_device_free": fake.num_frees},
        "mem_get_info": lambda device: (next(free), 1 << 30),
    }
    for name, function in of_torch.items():
        monkeypatch.setattr(gpu.torch.cuda, name, function)
    return fake


_DTYPES = {ctypes.c_float: torch.float32, ctypes.c_longlong: torch.int64, ctypes.c_ubyte: torch.uint8}


def words_at(address, count, kind=ctypes.c_float):
    """Numbers in memory as an array that can be written."""
    return torch.frombuffer((kind * count).from_address(address), dtype=_DTYPES[kind])


class FakeCaptures:
    """The part of torch.cuda that a capture asks for: functions run on the CPU and say what a GPU would record.

    A function calls `new(count)` for a tensor of floats in the pool and `node(...)` for a node of its graph. With
    `seeds`, a capture gets two tensors of a generator. `memory` keeps all that it made: a pool's bytes stay.
    """

    def __init__(self, fake, monkeypatch, analysis, memory, seeds=False):
        self._fake, self._seeds = fake, seeds
        self.memory, self._nodes, self._events, self._segments, self.seed_addresses = [], [], [], [], []
        pools = itertools.count(1)
        of_torch = {
            "graph_pool_handle": lambda: (0, next(pools)),
            "synchronize": lambda *device: None,
            "empty_cache": lambda: None,
            "stream": lambda stream: contextlib.nullcontext(),
            "current_stream": lambda device: SimpleNamespace(cuda_stream=7, wait_stream=lambda other: None),
        }
        for name, function in of_torch.items():
            monkeypatch.setattr(torch.cuda, name, function)
        monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: False, raising=False)
        monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda *on, **options: self._events.clear())
        monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"device_traces": {None: list(self._events)}})
        monkeypatch.setattr(torch.cuda.memory, "memory_snapshot", lambda mempool_id: self._segments)
        monkeypatch.setattr(analysis, "_side_stream", lambda index: SimpleNamespace(wait_stream=lambda other: None))
        monkeypatch.setattr(analysis, "new_workspaces", contextlib.nullcontext)
        monkeypatch.setattr(analysis, "CudaGraph", self._cuda_graph)
        monkeypatch.setattr(memory, "bytes_at", lambda at, size, device: words_at(at, size, ctypes.c_ubyte))

    def new(self, count):
        self.memory.append(torch.zeros(count))
        self._alloc(self.memory[-1])
        return self.memory[-1]

    def node(self, *node):
        self._nodes.append(node)

    def _alloc(self, tensor):
        self._events.append({"action": "alloc", "addr": tensor.data_ptr(), "size": tensor.nbytes, "stream": 7})

    def _cuda_graph(self, static):
        """common.capture.pool.CudaGraph."""
        graph = SimpleNamespace(pool=lambda: (0, 1), reset=lambda: None)

        def capture(fn, pool):
            result = self._capture(fn)
            handle = self._fake.add(*self._nodes)
            graph.raw_cuda_graph = lambda: handle
            return result

        return SimpleNamespace(capture=capture, graph=graph)

    def _capture(self, fn):
        self._nodes.clear()
        self.seed_addresses = []
        if self._seeds:
            self.memory += [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
            for tensor in self.memory[-2:]:
                self._alloc(tensor)
                self.seed_addresses.append(tensor.data_ptr())
        num_outside = len(self._events)
        result = fn()
        pool_events = self._events[num_outside:]
        self._segments = [{"address": e["addr"], "total_size": e["size"], "blocks": []} for e in pool_events]
        return result
