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


def copied(fake, allocations):
    """A graph at X and a copy of it that was compared with one at Y."""
    made = [graph(fake, base) for base in (X, Y)]
    captured = [nodes.read_nodes(each) for each in made]
    nodes.check_alike(*captured)
    (chunks, blob), (_, other) = (words.layout([node.parameters for node in each]) for each in captured)
    slots, unexplained = words.explain(chunks, (blob, other), allocations, bool)
    assert not unexplained
    assert slots.node.tolist() == [0, 1, 2, 3, 3]
    return made[0], nodes.Graph(made[0], captured[0], chunks, blob, slots)


def test_nodes_are_read_with_their_kinds_and_names(fake):
    read = nodes.read_nodes(graph(fake, X))
    assert [(node.kind, node.name) for node in read] == [
        ("kernel", "plain"), ("kernel", "packed"), ("memset", "memset"), ("memcpy", "memcpy"), ("empty", "empty"),
    ]  # fmt: skip
    assert [node.packed for node in read] == [False, True, False, False, False]


def test_every_node_is_launched_with_the_addresses_of_the_call(fake):
    _, copy = copied(fake, [(X, Y, 4096)])
    for base in (0x7A00_0000_0000, 0x7B00_0000_0000):
        executable, num_set = copy.executable(np.array([base]))
        assert num_set == 4
        kernel, other, memset, memcpy, _ = fake.executables[executable].values()
        assert kernel[-1] == [struct.pack("<I", 7), struct.pack("<QQ", base + 16, 3)]
        assert other[-1] == struct.pack("<IIQ", 1, 2, base + 64)
        assert struct.unpack_from("<Q", memset[-1])[0] == base + 32
        buffer = ctypes.create_string_buffer(memcpy[-1], 200)
        of_copy = fake.CUDA_MEMCPY3D(_ptr=ctypes.addressof(buffer))
        assert (of_copy.srcDevice, of_copy.dstDevice, of_copy.WidthInBytes) == (base, base + 128, 64)
    assert len(fake.set) == 2 * 4
    # None of them has changed since it was made.
    assert len({str(executable) for executable in fake.executables.values()}) == len(fake.executables) == 2


def test_nodes_at_addresses_that_came_before_are_set_anew(fake):
    """The memory there may be other memory, which the driver looks up where a copy is set."""
    made, copy = copied(fake, [(X, Y, 4096)])
    for _ in range(2):
        fake.set.clear()
        copy.executable(np.array([X]))
        assert [node for _, node in fake.set] == fake.graphs[made][:4]


def test_a_node_with_another_address_alone_is_moved(fake):
    parts = [(X + start, Y + start, 16) for start in (0, 16, 32, 64, 128)]
    made, copy = copied(fake, parts)
    bases = np.array([base for base, _, _ in parts])
    executable, _ = copy.executable(bases)
    for moving, index, word in ((0, 3, 48), (2, 2, 0), (4, 3, 136)):
        fake.set.clear()
        old, bases = bases, bases + 4096 * (np.arange(5) == moving)
        assert copy.move(executable, old, bases) == 1
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


def test_an_executable_goes_with_the_copy_that_it_was_made_of(fake):
    _, copy = copied(fake, [(X, Y, 4096)])
    (one, _), (another, _) = (copy.executable(np.array([X])) for _ in range(2))
    copy.drop(one)
    assert fake.destroyed == [one]
    copy.destroy()
    assert fake.destroyed == [one, another, copy._copy] and not fake.executables
    fake.error["cuGraphClone"] = CUresult.CUDA_ERROR_UNKNOWN
    with pytest.raises(driver.DriverError, match="cuGraphClone: CUDA_ERROR_UNKNOWN"):
        copied(fake, [(X, Y, 4096)])
