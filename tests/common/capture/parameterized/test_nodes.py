"""common/capture/parameterized/nodes and driver over a made-up driver: what is read, refused and set."""

import ctypes
import struct

import numpy as np
import pytest

from common.capture.checks import RegionRefused
from common.capture.parameterized import driver, nodes, words
from tests.helpers import fake_driver
from tests.helpers.fake_driver import CUresult

X, Y = 0x7F00_0000_0000, 0x7F10_0000_0000


@pytest.fixture
def fake(monkeypatch):
    return fake_driver.install(monkeypatch)


def plain(number, pair):
    pass


def packed(buffer):
    pass


def graph(fake, base, function=plain):
    """A kernel with an array of parameters, another one with a packed buffer, a memset, a copy, an empty node."""
    return fake.add(
        ("kernel", function, [struct.pack("<I", 7), struct.pack("<QQ", base + 16, 3)]),
        ("packed", packed, struct.pack("<IIQ", 1, 2, base + 64)),
        ("memset", base + 32, 0, 9),
        ("memcpy", base, base + 128, 64),
        ("empty",),
    )


def test_structures_have_the_sizes_of_cuda_h():
    sizes = {name: ctypes.sizeof(getattr(fake_driver.FakeDriver, name)._structure) for name, _ in STRUCTURES}
    assert sizes == {"CUDA_MEMCPY3D": 200, "CUDA_MEMSET_NODE_PARAMS": 40} == dict(STRUCTURES)


STRUCTURES = nodes._STRUCTURES.values()


def test_every_node_is_launched_with_the_addresses_of_the_call(fake):
    first, second = (nodes.read_nodes(graph(fake, base)) for base in (X, Y))
    assert [(node.kind, node.name) for node in first] == [
        ("kernel", "plain"), ("kernel", "packed"), ("memset", "memset"), ("memcpy", "memcpy"), ("empty", "empty"),
    ]  # fmt: skip
    assert [node.packed for node in first] == [False, True, False, False, False]
    nodes.check_alike(first, second)
    chunks, blob = words.layout([node.parameters for node in first])
    _, other = words.layout([node.parameters for node in second])
    slots, unexplained = words.explain(chunks, (blob, other), [(X, Y, 4096)], bool)
    assert not unexplained
    assert slots.node.tolist() == [0, 1, 2, 3, 3]

    made = graph(fake, X)
    parameters = nodes.Parameters(driver.Graph(made, fake.graphs[made]), first, chunks, blob, slots)
    for base in (0x7A00_0000_0000, 0x7B00_0000_0000):
        executable, num_set = parameters.executable(np.array([base]))
        assert num_set == 4
        kernel, other, memset, memcpy, _ = fake.executables[executable].values()
        assert kernel[-1] == [struct.pack("<I", 7), struct.pack("<QQ", base + 16, 3)]
        assert other[-1] == struct.pack("<IIQ", 1, 2, base + 64)
        assert struct.unpack_from("<Q", memset[-1])[0] == base + 32
        buffer = ctypes.create_string_buffer(memcpy[-1], 200)
        copied = fake.CUDA_MEMCPY3D(_ptr=ctypes.addressof(buffer))
        assert (copied.srcDevice, copied.dstDevice, copied.WidthInBytes) == (base, base + 128, 64)
    assert len(fake.set) == 2 * 4
    # None of them has changed since it was made.
    assert len({str(executable) for executable in fake.executables.values()}) == len(fake.executables) == 2


def test_nodes_at_addresses_that_came_before_are_set_anew(fake):
    """The memory there may be other memory, which the driver looks up where a copy is set."""
    made = graph(fake, X)
    first = nodes.read_nodes(made)
    chunks, blob = words.layout([node.parameters for node in first])
    _, other = words.layout([node.parameters for node in nodes.read_nodes(graph(fake, Y))])
    slots, _ = words.explain(chunks, (blob, other), [(X, Y, 4096)], bool)
    parameters = nodes.Parameters(driver.Graph(made, fake.graphs[made]), first, chunks, blob, slots)
    for _ in range(2):
        fake.set.clear()
        parameters.executable(np.array([X]))
        assert [node for _, node in fake.set] == fake.graphs[made][:4]


def test_a_node_with_another_address_alone_is_moved(fake):
    made = graph(fake, X)
    first = nodes.read_nodes(made)
    chunks, blob = words.layout([node.parameters for node in first])
    _, other = words.layout([node.parameters for node in nodes.read_nodes(graph(fake, Y))])
    parts = [(X + start, Y + start, 16) for start in (0, 16, 32, 64, 128)]
    slots, _ = words.explain(chunks, (blob, other), parts, bool)
    parameters = nodes.Parameters(driver.Graph(made, fake.graphs[made]), first, chunks, blob, slots)
    bases = np.array([base for base, _, _ in parts])
    executable, _ = parameters.executable(bases)
    for moving, index, word in ((0, 3, 48), (2, 2, 0), (4, 3, 136)):
        fake.set.clear()
        old, bases = bases, bases + 4096 * (np.arange(5) == moving)
        assert parameters.move(executable, old, bases) == 1
        (_, node), *others = fake.set
        assert node[1] == fake.graphs[made][index] and not others
        assert struct.unpack_from("<Q", fake.executables[executable][node][-1], word)[0] == bases[moving]


def collective(parameter):
    pass


collective.__name__ = "ncclDevKernel_AllReduce"


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ([("host",)], "node 0 is a host node"),
        ([("empty",), ("conditional",)], "node 1 is a conditional node"),
        ([("graph",)], "graph node"),
        ([("kernel", collective, [b"1234"])], "is a collective, ncclDevKernel_AllReduce"),
        ([("memcpy", X, X + 128, 64, 1)], "node 0 copies from memory of the host"),
    ],
)
def test_a_node_that_cannot_move_is_refused_by_name(fake, made, message):
    with pytest.raises(RegionRefused, match=message):
        nodes.read_nodes(fake.add(*made))


def vectorized(number, pair):
    pass


def test_two_captures_that_launch_other_work_are_refused(fake):
    first, renamed = (nodes.read_nodes(graph(fake, X, function)) for function in (plain, vectorized))
    with pytest.raises(RegionRefused, match="5 and 1 nodes"):
        nodes.check_alike(first, first[:1])
    with pytest.raises(RegionRefused, match="differ in node 0: plain .*, vectorized"):
        nodes.check_alike(first, renamed)


def test_an_executable_has_the_nodes_of_a_copy_and_goes_with_it(fake):
    made = graph(fake, X)
    copy = driver.Graph(made, fake.graphs[made][::-1])
    assert [node for _, node in copy.nodes] == fake.graphs[made][::-1]
    first, second = copy.instantiate(), copy.instantiate()
    copy.drop(first)
    assert fake.destroyed == [first]
    copy.destroy()
    assert fake.destroyed == [first, second, copy._graph]
    fake.error["cuGraphClone"] = CUresult.CUDA_ERROR_UNKNOWN
    with pytest.raises(driver.DriverError, match="cuGraphClone: CUDA_ERROR_UNKNOWN"):
        driver.Graph(made, fake.graphs[made])
