"""Nests of tensors, such as the batches of a step."""

import torch
from torch.utils._pytree import keystr, tree_leaves, tree_leaves_with_path, tree_map


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
    values_by_name: dict[str, list] = {}
    first: dict[tuple, dict] = {}
    for batch in batches:
        leaves = {keystr(path): leaf for path, leaf in tree_leaves_with_path(batch)}
        shapes = signature_of([leaf for leaf in leaves.values() if isinstance(leaf, torch.Tensor)])
        plain = {name: leaf for name, leaf in leaves.items() if not isinstance(leaf, torch.Tensor)}
        for name, value in first.setdefault(shapes, plain).items():
            batch_value = plain.get(name, value)
            if repr(batch_value) != repr(value):
                values = values_by_name.setdefault(f"batch{name}", [value])
                values += [batch_value] if batch_value not in values else []
    return values_by_name


def static_copy(batch, device: torch.device):
    """Return the batch with copies of its tensors on the device, which a graph reads."""
    return tree_map(lambda leaf: leaf.to(device, copy=True) if isinstance(leaf, torch.Tensor) else leaf, batch)


def copy_batch(static, batch) -> None:
    """Copy a batch of the same shapes into the tensors that a graph reads."""
    for static_leaf, leaf in zip(tree_leaves(static), tree_leaves(batch), strict=True):
        if isinstance(static_leaf, torch.Tensor):
            static_leaf.copy_(leaf, non_blocking=True)


def has_several_ranks() -> bool:
    """Return whether this process is one of several ranks."""
    return torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
