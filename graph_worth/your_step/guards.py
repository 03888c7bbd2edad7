"""Cheap looks before a replay: does the host still hold what it held at the capture?"""

import itertools
import operator
from collections.abc import Iterator

import torch

from graph_worth.capture.pool import CaptureError

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_address = torch.Tensor.data_ptr
_training = operator.itemgetter("training")
_TENSOR_RATE = "make lr a tensor on the device, and fill it: group['lr'].fill_(value)"


def parts_of(owned) -> Iterator:
    """Yield the objects in a nest of lists, tuples and dicts."""
    if isinstance(owned, dict):
        owned = list(owned.values())
    if isinstance(owned, (list, tuple)):
        for item in owned:
            yield from parts_of(item)
    else:
        yield owned


class Guards:
    """What the host holds of the objects that training changes, as it is at the capture.

    Looked at are the numbers in param_groups, the modules' `training`, children and hooks, and the addresses of all
    parameters, buffers and tensors of optimizers. Lists of numbers are compared, and names looked up where they differ.
    """

    def __init__(self, owned):
        parts = list(parts_of(owned))
        modules = {id(m): m for part in parts if isinstance(part, torch.nn.Module) for m in part.modules()}
        self._modules = [vars(module) for module in modules.values()]
        self._names = [type(module).__name__ for module in modules.values()]
        self._tensors = {str(index): part for index, part in enumerate(parts) if type(part) in _PLAIN}
        self._optimizers = [part for part in parts if isinstance(part, torch.optim.Optimizer)]
        self._hooks = [module[name] for module in self._modules for name in _HOOKS]
        self._children = [module["_modules"] for module in self._modules if module["_modules"]]
        # The optimizers' tensors, which the graph reads, whatever load_state_dict binds.
        self._kept = [{key: dict(values) for key, values in each.state.items()} for each in self._optimizers]
        self._kept_groups = [[dict(group) for group in each.param_groups] for each in self._optimizers]
        self._find()
        self._before = self._now()

    def check(self) -> None:
        """Raise a CaptureError where something differs; what `load_state_dict` has bound is copied to its old place."""
        if self._homes != self._homes_now():
            self._adopt()
        now = self._now()
        if now != self._before:
            raise CaptureError(self._difference(now))

    def _homes_now(self):
        return [id(table) for each in self._optimizers for table in (each.state, *each.param_groups)]

    def _find(self):
        """Find the dicts whose values are looked at."""
        self._homes = self._homes_now()
        tables = [module[name] for module in self._modules for name in ("_parameters", "_buffers")]
        tables += [values for each in self._optimizers for values in each.state.values()]
        tables = [table for table in [*tables, self._tensors] if table]
        is_plain = [all(type(value) in _PLAIN for value in table.values()) for table in tables]
        self._tables = [table for table, plain in zip(tables, is_plain, strict=True) if plain]
        self._mixed = [table for table, plain in zip(tables, is_plain, strict=True) if not plain]
        self._sized = [*self._hooks, *(each.state for each in self._optimizers)]
        self._groups = [group for each in self._optimizers for group in each.param_groups]

    def _now(self) -> tuple:
        values = itertools.chain.from_iterable
        return (
            list(map(_address, values(map(dict.values, self._tables)))),
            [(key, _held(value)) for table in self._mixed for key, value in table.items()],
            [(key, _held(value)) for group in self._groups for key, value in group.items()],
            list(map(_training, self._modules)),
            list(map(id, values(map(dict.values, self._children)))),
            list(map(len, self._sized)),
        )

    def _difference(self, now) -> str:
        addresses, mixed, numbers, training, children, sizes = map(
            lambda before, after: (
                [i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b]
                or ([-1] if len(before) != len(after) else [])
            ),
            self._before,
            now,
        )
        if numbers:
            key, was = self._before[2][numbers[0]]
            value = now[2][numbers[0]][1]
            if len(now[2]) != len(self._before[2]) or now[2][numbers[0]][0] != key:
                return "param_groups have other keys than at the capture"
            words = f"{key} in param_groups was {was} at the capture and is {value}, and a replay keeps {was}"
            return words + (f": {_TENSOR_RATE}" if key == "lr" else "")
        if training:
            name = self._names[training[0]]
            return f"{name}.training is {now[3][training[0]]}, and was {self._before[3][training[0]]} at the capture"
        if children:
            return "a module has another child than at the capture"
        if addresses or mixed:
            return f"{self._name_of(addresses, mixed)} lies elsewhere than at the capture: copy into the old tensor"
        index = sizes[0]
        if index >= len(self._hooks):
            return "an optimizer has another number of states than at the capture"
        return f"{self._names[index // len(_HOOKS)]} has {now[5][index]} {_HOOKS[index % len(_HOOKS)]}, and had "
        f"{self._before[5][index]} at the capture"

    def _name_of(self, addresses, mixed) -> str:
        keys = [key for table in (self._tables if addresses else self._mixed) for key in table]
        index = (addresses or mixed)[0]
        key = keys[index] if 0 <= index < len(keys) else "a tensor"
        return key if isinstance(key, str) and not key.isdigit() else "a tensor that was handed over"

    def _adopt(self):
        """Copy what load_state_dict has bound into the tensors that the graph reads, and bind these again."""
        for optimizer, kept, kept_groups in zip(self._optimizers, self._kept, self._kept_groups, strict=True):
            pairs = [(kept[key], optimizer.state[key]) for key in kept if key in optimizer.state]
            for old, new in [*pairs, *zip(kept_groups, optimizer.param_groups, strict=False)]:
                for name, tensor in old.items():
                    value = new.get(name)
                    if isinstance(tensor, torch.Tensor) and value is not None and value is not tensor:
                        with torch.no_grad():
                            tensor.copy_(torch.as_tensor(value))
                        new[name] = tensor
        self._find()


def _held(value):
    """Return what tells a value from another one: of a tensor its address."""
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    return len(value) if isinstance(value, list) else value
