"""Count the FLOP of a step with torch's FlopCounterMode."""

from collections.abc import Callable

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

CONVENTION = (
    "counted by torch's FlopCounterMode: matrix products, convolutions and attention, recomputed ones too; no norms, "
    "activations or optimizer, and no kernel that is no operator of torch"
)
# Operators of torch itself, and those of its collectives and its profiler, which compute nothing.
_OWN = ("aten", "prim", "prims", "profiler", "c10d", "_c10d_functional", "c10d_functional", "fsdp", "inductor")
# Words in the names of operators that multiply matrices.
_PRODUCTS = {"mm", "bmm", "addmm", "addbmm", "baddbmm", "mv", "addmv", "dot", "vdot", "matmul", "convolution"}
_PRODUCTS |= {"attention", "rnn", "lstm", "gru", "linalg", "fft", "cdist"}
MOST_NAMES = 4


def of_step(step: Callable[[], None], reset: Callable[[], None]) -> tuple[float, list[str]]:
    """Return the FLOP of one eager step of this rank, and a note where there is work that was not counted.

    Where the step does not run under the counter it is 0.0, and the note says why. Then reset() is called.
    """
    unknown = _Uncounted()
    try:
        # The counter takes some operators apart. What comes out of it is what was counted, or not.
        with unknown, FlopCounterMode(display=False) as counter:
            step()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        message = (str(error).strip() or "nothing").splitlines()[0][:200]
        return 0.0, [f"FLOP not counted: under torch's counter the step raised {type(error).__name__}: {message}"]
    finally:
        reset()
    names = sorted(unknown.names)
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    notes = [f"FLOP not counted: {', '.join(names[:MOST_NAMES])}{more}"] if names else []
    return float(counter.get_total_flops()), notes


class _Uncounted(TorchDispatchMode):
    """Names the operators that may multiply matrices and that the counter does not know."""

    def __init__(self):
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.partition("::")[2]
        words = name.split("_")
        is_product = not _PRODUCTS.isdisjoint(words) and "norm" not in words
        if func.overloadpacket not in flop_registry and (is_product or func.namespace not in _OWN):
            self.names.add(name if func.namespace == "aten" else f"{func.namespace}::{name}")
        return func(*args, **(kwargs or {}))
