"""Regions of a made-up GPU: two captures over memory of the host, compared and launched by the code for GPUs."""

import math
import struct
from types import SimpleNamespace

import torch

from common.capture import memory
from common.capture.parameterized import analysis, gpu
from common.capture.parameterized.arenas import Block
from common.capture.parameterized.nodes import read_nodes
from tests.helpers.fake_driver import words_at

CPU = torch.device("cpu")


def address(*bases):
    return struct.pack(f"<{len(bases)}Q", *bases)


def add(out, a, b, scale):
    """out = a + scale * b, of 8 floats."""
    out, a, b = (struct.unpack("<Q", part)[0] for part in (out, a, b))
    words_at(out, 8).copy_(words_at(a, 8) + struct.unpack("<f", scale)[0] * words_at(b, 8))


def added(out, a, b, scale=1.0):
    return ("kernel", add, [address(out), address(a), address(b), struct.pack("<f", scale)])


class Pools:
    """Two captures of one program.

    program(inputs, seeds, blocks): nodes, given addresses. blocks: (offset in the pool's segment, in the second one,
    bytes) of each tensor. results: as analysis.Captured.outputs, over inputs and blocks.
    """

    def __init__(self, fake, program, inputs, blocks, results, increment=0):
        self.num_released = 0
        captures = []
        for side in (0, 1):
            segment = torch.zeros(1 << 16, dtype=torch.uint8)
            copies = [memory.clone(tensor) for tensor in inputs]
            seeds = [torch.zeros(1, dtype=torch.int64) for _ in range(2 if increment else 0)]
            pool = [Block(segment.data_ptr() + block[side], block[2], 0, math.inf, 7) for block in blocks]
            given = [(tensor.data_ptr(), tensor.nbytes) for tensor in (*copies, *seeds)]
            handle = fake.add(
                *program(*([base for base, *_ in part] for part in self._split(given, len(copies), pool)))
            )
            graph = SimpleNamespace(
                raw_cuda_graph=lambda handle=handle: handle, reset=self._reset, keep=(segment, seeds)
            )
            captures.append(
                analysis.Captured(
                    graph, read_nodes(handle), copies, given, [(segment.data_ptr(), segment.nbytes)], pool, results
                )
            )
        self.analysis = analysis._compare(*captures, increment, [], [])

    @staticmethod
    def _split(given, num_inputs, pool):
        return given[:num_inputs], given[num_inputs:], pool

    def _reset(self):
        self.num_released += 1

    def region(self, fn=None):
        made = gpu.GpuRegion(fn, self.analysis, CPU)
        return made


def place(index, shape=(8,), offset=0, dtype=torch.float32):
    """The metadata of a result at an allocation."""
    return memory.Place(index, offset, memory.describe(torch.empty(shape, dtype=dtype)))


def floats(seed):
    return torch.randn(8, generator=torch.Generator().manual_seed(seed))
