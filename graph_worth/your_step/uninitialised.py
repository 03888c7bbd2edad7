"""Memory that a step reads before it has written it: torch.empty filled with NaN, and looked for in what comes out.

Fresh memory often holds zeros. In a graph it holds what the graph's other kernels have left there.
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from graph_worth.capture.host_graph_rules import ALLOCATIONS
from graph_worth.your_step import rank_decisions
from graph_worth.your_step.parts import tensors_in
from graph_worth.your_step.place import Place, place_of_call
from graph_worth.your_step.step_watch import written


def read_before_written(state, indices: list[int]) -> tuple[Place, str] | None:
    """Make a step on each of some batches; return (place of an allocation, evidence), None where it does not matter."""
    for index in indices:
        read, has_nan = _filled_step(state, index, float("nan"))
        if rank_decisions.first(has_nan) and not rank_decisions.first(_filled_step(state, index, 0.0)[1]):
            return read
    return None


def _filled_step(state, index, value):
    """Places that read fresh memory which holds a value, and whether NaN comes out of the step."""
    state.reset()
    batch, filled = state.batch(index), Filled(value)
    with filled:
        loss = state.step(batch)
    tensors = [tensor for _, tensor in state.snapshot.tensors]
    return filled.found, any(map(_nan, tensors_in((loss, tensors))))


def _nan(tensor) -> bool:
    if tensor.element_size() == 1:
        tensor = tensor.float()  # FP8 has no isnan
    can_be = not tensor.is_meta and (tensor.is_floating_point() or tensor.is_complex())
    return can_be and bool(tensor.isnan().any())


class Filled(TorchDispatchMode):
    """In this block, fresh memory holds a value: zeros, so that what reads it gives the same each time, or NaN.

    The first operator that takes NaN of it into a tensor of its own is noted.
    """

    def __init__(self, value: float):
        super().__init__()
        self._value = value
        self.found: tuple[Place, str] | None = None
        self._allocated: dict[int, tuple[Place, torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func._schema.name in ALLOCATIONS:
            if isinstance(result, torch.Tensor) and result.is_floating_point() and result.layout == torch.strided:
                result.fill_(self._value)
                storage = result.untyped_storage()
                self._allocated[storage._cdata] = (place_of_call(), storage)
        elif self.found is None and self._allocated:
            self._look(func, args, kwargs, result)
        return result

    def _look(self, func, args, kwargs, result):
        read = list(filter(self._is_allocated, tensors_in((args, kwargs))))
        outputs = [*tensors_in(result), *written(func, args, kwargs)]
        if read and any(not self._is_allocated(tensor) and _nan(tensor) for tensor in outputs):
            place, _ = self._allocated[read[0].untyped_storage()._cdata]
            name = str(func).removesuffix(".default")
            evidence = f"{name} at {place_of_call().own} reads memory that was allocated here and not written"
            self.found = place, evidence

    def _is_allocated(self, tensor):
        return tensor.layout == torch.strided and tensor.untyped_storage()._cdata in self._allocated
