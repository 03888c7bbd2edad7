"""Variants that break."""

import ctypes
import os
import time

import torch

from common.variant import Unsupported
from tests.lying_model.sound import Graphed


class Segfault(Graphed):
    def run(self, index):
        if self.is_late:
            ctypes.string_at(0)
        super().run(index)


class Exits(Graphed):
    def run(self, index):
        if self.is_late:
            os._exit(3)
        super().run(index)


class Hangs(Graphed):
    def run(self, index):
        if self.is_late:
            time.sleep(3600)
        super().run(index)


class Raises(Graphed):
    def __init__(self, state):
        raise RuntimeError("the variant breaks")


class NotFinite(Graphed):
    def run(self, index):
        super().run(index)
        if self.is_late:
            with torch.no_grad():
                self.state.weights[0].fill_(float("nan"))


class OutOfMemory(Graphed):
    def __init__(self, state):
        raise torch.OutOfMemoryError("out of memory: made up")


class KeepsFlags(Graphed):
    def __init__(self, state):
        super().__init__(state)
        torch.set_float32_matmul_precision("medium")


class MovesState(Graphed):
    def close(self):
        super().close()
        self.state.weights[0].data = self.state.weights[0].data.clone()


class UnsupportedHere(Graphed):
    def __init__(self, state):
        raise Unsupported("needs hardware that nobody has")


class BreaksInBlock(Graphed):
    def run(self, index):
        if self.is_late:
            raise RuntimeError("the variant breaks in a block")
        super().run(index)


class BreaksInProfile(Graphed):
    def run(self, index):
        from torch.utils._python_dispatch import _get_current_dispatch_mode

        if _get_current_dispatch_mode() is not None:
            raise RuntimeError("no profile")
        super().run(index)
