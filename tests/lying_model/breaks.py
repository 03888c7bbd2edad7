"""Variants that break."""

import ctypes
import os
import threading
import time

import torch

from graph_worth.contract import variant
from graph_worth.made_variant import Unsupported
from tests.lying_model.sound import LATE, Graphed


@variant("segfault", kind="graph", help="breaks", graphs=1)
class Segfault(Graphed):
    def run(self, index):
        if self.is_late:
            ctypes.string_at(0)
        super().run(index)


@variant("exits", kind="graph", help="breaks", graphs=1)
class Exits(Graphed):
    def run(self, index):
        if self.is_late:
            os._exit(3)
        super().run(index)


@variant("hangs", kind="graph", help="breaks", graphs=1)
class Hangs(Graphed):
    def run(self, index):
        if self.is_late:
            time.sleep(3600)
        super().run(index)


@variant("raises", kind="graph", help="breaks", graphs=1)
class Raises(Graphed):
    def __init__(self, state, capture):
        raise RuntimeError("the variant breaks")


@variant("not_finite", kind="graph", help="breaks", graphs=1)
class NotFinite(Graphed):
    def run(self, index):
        super().run(index)
        if self.is_late:
            with torch.no_grad():
                self.state.weights[0].fill_(float("nan"))


@variant("out_of_memory", kind="graph", help="breaks", graphs=1)
class OutOfMemory(Graphed):
    def __init__(self, state, capture):
        raise torch.OutOfMemoryError("out of memory: made up")


@variant("keeps_flags", kind="graph", help="breaks", graphs=1)
class KeepsFlags(Graphed):
    def __init__(self, state, capture):
        super().__init__(state, capture)
        torch.set_float32_matmul_precision("medium")


@variant("moves_state", kind="graph", help="breaks", graphs=1)
class MovesState(Graphed):
    def close(self):
        self.state.weights[0].data = self.state.weights[0].data.clone()


@variant("haunts", kind="graph", help="breaks", graphs=1)
class Haunts(Graphed):
    """Its thread goes on in steps of others."""

    def __init__(self, state, capture):
        super().__init__(state, capture)
        threading.Thread(target=self.change, daemon=True).start()

    def change(self):
        while True:
            time.sleep(0.001)
            with torch.no_grad():
                self.state.weights[0].mul_(1.01)


@variant("haunts_unsupported", kind="graph", help="breaks", graphs=1)
class HauntsUnsupported(Haunts):
    def __init__(self, state, capture):
        super().__init__(state, capture)
        raise Unsupported("needs hardware that nobody has")


@variant("haunts_later", kind="graph", help="breaks", graphs=1)
class HauntsLater(Haunts):
    """Starts its thread in a block."""

    def __init__(self, state, capture):
        Graphed.__init__(self, state, capture)

    def run(self, index):
        super().run(index)
        if self.steps == LATE:
            timer = threading.Timer(0.5, self.change)
            timer.daemon = True
            timer.start()


@variant("unsupported", kind="graph", help="breaks", graphs=1)
class UnsupportedHere(Graphed):
    def __init__(self, state, capture):
        raise Unsupported("needs hardware that nobody has")


@variant("breaks_in_block", kind="graph", help="breaks", graphs=1)
class BreaksInBlock(Graphed):
    def run(self, index):
        if self.is_late:
            raise RuntimeError("the variant breaks in a block")
        super().run(index)


@variant("breaks_in_profile", kind="graph", help="breaks", graphs=1)
class BreaksInProfile(Graphed):
    def run(self, index):
        from torch.utils._python_dispatch import _get_current_dispatch_mode

        if _get_current_dispatch_mode() is not None:
            raise RuntimeError("no profile")
        super().run(index)
