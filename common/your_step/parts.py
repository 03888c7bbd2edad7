"""What a step is made of: tensors in nests such as its batches, and the parts of its modules with their calls."""

from dataclasses import dataclass

import torch
from torch.utils._pytree import keystr, tree_leaves, tree_leaves_with_path, tree_map

from common.measuring.module_parts import hooked


def tensors_in(tree) -> list[torch.Tensor]:
    """Return the tensors of a nest."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def signature_of(batch) -> tuple:
    """Return what a graph holds of a batch: shapes, dtypes and strides of tensors, and values that are no tensors."""
    return tuple(
        (tuple(leaf.shape), leaf.dtype, leaf.stride()) if isinstance(leaf, torch.Tensor) else repr(leaf)
        for leaf in tree_leaves(batch)
    )


def changing_values(batches: list) -> dict[str, list]:
    """Return name -> values of the numbers and texts that differ among batches whose tensors have one shape."""
    found: dict[str, list] = {}
    first: dict[tuple, dict] = {}
    for batch in batches:
        leaves = {keystr(path): leaf for path, leaf in tree_leaves_with_path(batch)}
        shapes = signature_of([leaf for leaf in leaves.values() if isinstance(leaf, torch.Tensor)])
        plain = {name: leaf for name, leaf in leaves.items() if not isinstance(leaf, torch.Tensor)}
        for name, value in first.setdefault(shapes, plain).items():
            other = plain.get(name, value)
            if repr(other) != repr(value):
                values = found.setdefault(f"batch{name}", [value])
                values += [other] if other not in values else []
    return found


def static_copy(batch, device: torch.device):
    """Return the batch with copies of its tensors on the device, which a graph reads."""
    return tree_map(lambda leaf: leaf.to(device, copy=True) if isinstance(leaf, torch.Tensor) else leaf, batch)


def copy_batch(static, batch) -> None:
    """Copy a batch of the same shapes into the tensors that a graph reads."""
    for own, leaf in zip(tree_leaves(static), tree_leaves(batch), strict=True):
        if isinstance(own, torch.Tensor):
            own.copy_(leaf, non_blocking=True)


def has_several_ranks() -> bool:
    """Return whether this process is one of several ranks."""
    return torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1


@dataclass
class Call:
    """The first call of a module in a step.

    Attributes:
        path: of the module; of a whole model the name of its class.
        has_grad: autograd was on.
        casts_to: dtype of the autocast that it ran under, or None.
        is_plain: its arguments, at least one, and its results are tensors.
        key: equal for modules that are alike.
        number: calls in the step.
    """

    path: str
    module: torch.nn.Module
    args: tuple
    kwargs: dict
    has_grad: bool
    casts_to: torch.dtype | None
    is_plain: bool
    key: tuple[str, ...]
    number: int = 1


def first_calls(state) -> list[Call]:
    """Make one step; return the first call of each module in the order in which they end: inner ones first."""
    calls: dict[torch.nn.Module, Call] = {}
    kind = state.device.type
    names = {part: name or type(module).__name__ for module in state.modules for name, part in module.named_modules()}

    def note(path, module, args, kwargs, output):
        if module in calls:
            calls[module].number += 1
            return
        casts_to = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        results = output if isinstance(output, (list, tuple)) else [output]
        is_plain = bool(args) and not kwargs and all(isinstance(each, torch.Tensor) for each in [*args, *results])
        needs = [tensor.requires_grad for tensor in tensors_in((args, kwargs))]
        key = tuple(map(str, (type(module), repr(module), signature_of((args, kwargs)), *needs)))
        calls[module] = Call(path, module, args, kwargs, torch.is_grad_enabled(), casts_to, is_plain, key)

    with hooked([(name, part) for part, name in names.items()], note):
        state.reset()
        state.step(state.batch(0))
    return list(calls.values())
