"""Nests of tensors, such as the batches of a step."""

import copy
import dataclasses
from collections.abc import Callable, Container, Mapping

import torch
from torch.utils import _pytree
from torch.utils._pytree import MappingKey, keystr, tree_leaves, tree_leaves_with_path, tree_map, tree_map_with_path


def tensors_in(tree) -> list[torch.Tensor]:
    """Return the tensors of a nest."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def register_nests(batch) -> None:
    """Let the nests of a batch be those of torch, too: dataclasses, mappings, Data and Batch of PyG."""
    unknown = [leaf for leaf in tree_leaves(batch) if type(leaf) not in _pytree.SUPPORTED_NODES and _parts_of(leaf)[0]]
    for kind in {type(leaf) for leaf in unknown}:
        _register(kind)
    if unknown:
        register_nests(batch)


@dataclasses.dataclass
class _Registered:
    """The names of the values in a nest, by which structures are compared, and the nest."""

    names: list
    nest: object = dataclasses.field(compare=False)


def _register(kind):
    def flatten(nest):
        values, _ = _parts_of(nest)
        return list(values.values()), _Registered(list(values), nest)

    def flatten_with_keys(nest):
        values, context = flatten(nest)
        return [(MappingKey(key), value) for key, value in zip(context.names, values, strict=True)], context

    def unflatten(values, context):
        return _parts_of(context.nest)[1](context.nest, dict(zip(context.names, values, strict=True)))

    _pytree.register_pytree_node(kind, flatten, unflatten, flatten_with_keys_fn=flatten_with_keys)


def _parts_of(nest) -> tuple[dict, Callable]:
    """Values by name of what holds a batch, else {}, and the function of (it, values) that gives another such one."""
    if dataclasses.is_dataclass(nest) and not isinstance(nest, type):
        return {field.name: getattr(nest, field.name) for field in dataclasses.fields(nest)}, _with_attributes
    if isinstance(nest, Mapping):
        return dict(nest), lambda nest, values: type(nest)(values)
    if hasattr(nest, "_store") and hasattr(nest, "to_dict"):
        return nest.to_dict(), _with_items
    return {}, _with_items


def _with_attributes(nest, values):
    copied = copy.copy(nest)
    for name, value in values.items():
        object.__setattr__(copied, name, value)
    return copied


def _with_items(nest, values):
    copied = copy.copy(nest)
    for name, value in values.items():
        copied[name] = value
    return copied


def loss_of(result):
    """Return the loss in the result of a step: itself, its "loss", its .loss, or the first scalar of a tuple."""
    if isinstance(result, Mapping):
        return result.get("loss", result)
    if isinstance(result, (tuple, list)):
        return next(filter(_is_scalar, result), result)
    return result if isinstance(result, torch.Tensor) else getattr(result, "loss", result)


def _is_scalar(value) -> bool:
    return value.numel() == 1 if isinstance(value, torch.Tensor) else isinstance(value, (int, float))


def signature_of(batch, unread: Container[str] = ()) -> tuple:
    """Return what a graph holds of a batch: shapes, dtypes and strides of tensors, and values that are no tensors.

    unread: names, as in `changing_values`, of values that the step does not read.
    """
    return tuple(
        (tuple(leaf.shape), leaf.dtype, leaf.stride()) if isinstance(leaf, torch.Tensor) else repr(leaf)
        for path, leaf in tree_leaves_with_path(batch)
        if f"batch{keystr(path)}" not in unread
    )


class _Unread:
    """Raises where a step does anything with it."""

    def _raise(self, *args):
        raise LookupError("a value of a batch was read")

    __eq__ = __bool__ = __int__ = __float__ = __index__ = __iter__ = __len__ = __str__ = __format__ = _raise
    __lt__ = __gt__ = __add__ = __radd__ = __mul__ = __rmul__ = __getitem__ = __contains__ = __getattr__ = _raise
    __hash__ = __repr__ = _raise  # type: ignore[assignment]


def without(batch, name: str):
    """Return the batch with a value in it, named as in `changing_values`, that raises where a step uses it."""
    return tree_map_with_path(lambda path, leaf: _Unread() if f"batch{keystr(path)}" == name else leaf, batch)


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
