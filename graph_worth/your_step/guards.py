"""Cheap looks before a replay: does the host still hold what it held at the capture?"""

import itertools
import operator
from collections.abc import Callable, Iterator

import torch
from torch.utils.hooks import RemovableHandle

from graph_worth.capture.pool import CaptureError

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OF_OPTIMIZERS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_END = (None,)
_OF_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_STATE = "an optimizer has another tensor in its state: copy into the old one"


def parts_of(owned) -> Iterator:
    """Yield the objects in a nest of lists, tuples and dicts."""
    values = owned.values() if isinstance(owned, dict) else owned
    for part in values if isinstance(owned, (dict, list, tuple)) else ():
        yield from parts_of(part)
    if not isinstance(owned, (dict, list, tuple)):
        yield owned


class Guards:
    """The host's values in the objects that training changes, as they are at the capture.

    Numbers in param_groups, `training`, children and replaced methods of modules, `requires_grad` and addresses of
    parameters, buffers and tensors, hooks of all these and of optimizers, which tensors an optimizer's state has, and
    autocast. About 50 us for a model of 148 parameters (docs/capture_it.md).
    """

    def __init__(self, owned):
        parts = list(parts_of(owned))
        modules = {id(m): m for part in parts if isinstance(part, torch.nn.Module) for m in part.modules()}
        kept = [module for module in modules.values() if "training" in vars(module)]
        self._modules, self._kinds = list(map(vars, kept)), list(map(type, kept))
        self._tensors = {index: part for index, part in enumerate(parts) if isinstance(part, torch.Tensor)}
        self._optimizers = [part for part in parts if isinstance(part, torch.optim.Optimizer)]
        # The tensors that the graph reads, whatever load_state_dict binds.
        self._kept = [{key: dict(table) for key, table in _tables(optimizer).items()} for optimizer in self._optimizers]
        self._counts: tuple = ()
        self._look()
        self._of_optimizers = [(optimizer, optimizer.state, optimizer.param_groups) for optimizer in self._optimizers]
        tables = [module[name] for module in self._modules for name in ("_parameters", "_buffers")]
        tables += [table for optimizer in self._optimizers for table in _tables(optimizer).values()]
        self._tables = [(table, dict(table)) for table in tables]
        tensors = [value for _, values in self._tables for value in values.values() if type(value) in _PLAIN]
        self._memory = [(tensor, tensor.data) for tensor in [*tensors, *self._tensors.values()]]

    def check(self) -> None:
        """Raise a CaptureError where something differs; what `load_state_dict` has bound goes to the old tensors."""
        if self._homes() != self._homes_before:
            self._adopt()
        words = self.difference()
        if words:
            raise CaptureError(words)

    def difference(self) -> str:
        """Return what differs in words, or ""."""
        if self._homes() != self._homes_before:
            return "an optimizer's state was loaded: a graph reads that of its capture"
        numbers = self._numbers()
        if numbers != self._numbers_before:
            pairs = itertools.zip_longest(self._numbers_before, numbers, fillvalue={"params": 0})
            old, new = next(pair for pair in pairs if pair[0] != pair[1])
            key = next(key for key in {**new, **old} if old.get(key) != new.get(key))
            remedy = ": make lr a tensor on the device, and fill it: group['lr'].fill_(value)" if key == "lr" else ""
            return f"{key} in param_groups is {new.get(key)}, and the graph keeps {old.get(key)} of its capture{remedy}"
        for words, values, before in self._looks:
            if tuple(values()) != before:
                return f"since the capture {words}"
        if (RemovableHandle.next_id, *map(len, self._modules)) != self._counts:
            # Handles and attributes that came may be of others.
            for words, values, before in self._rare_looks:
                if tuple(values()) != before:
                    return f"since the capture {words}"
            self._counts = RemovableHandle.next_id, *map(len, self._modules)
        return ""

    def put_back(self) -> None:
        """Bind tensors, their memory and numbers as they were, where a capture has bound its own."""
        for optimizer, state, groups in self._of_optimizers:
            optimizer.state, optimizer.param_groups = state, groups
        for table, values in self._tables:
            table.update(values)
        for tensor, data in self._memory:
            if tensor.data_ptr() != data.data_ptr():
                tensor.data = data

    def _homes(self):
        return [id(table) for optimizer in self._optimizers for table in (optimizer.state, *optimizer.param_groups)]

    def _numbers(self):
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        return [{key: _number(value) for key, value in group.items()} for group in groups]

    def _look(self):
        self._homes_before, self._numbers_before = self._homes(), self._numbers()
        tables = [module[name] for module in self._modules for name in ("_parameters", "_buffers")]
        tables = [table for table in [*tables, self._tensors] if table]
        plain = [table for table in tables if all(type(value) in _PLAIN for value in table.values())]
        mixed = [table for table in tables if not all(type(value) in _PLAIN for value in table.values())]
        states = [values for optimizer in self._optimizers for values in optimizer.state.values()]
        children = [module["_modules"] for module in self._modules if module["_modules"]]
        sized = [optimizer.state for optimizer in self._optimizers]

        def values(tables):
            views = [table.values() for table in tables]
            return lambda: itertools.chain.from_iterable(views)

        of_plain, of_mixed, of_states, of_children = map(values, (plain, mixed, states, children))

        def hooks():
            every = [module[name] for module in self._modules for name in _HOOKS]
            every += [vars(optimizer).get(name) for optimizer in self._optimizers for name in _OF_OPTIMIZERS]
            every += [getattr(tensor, name) for tensor in of_plain() for name in _OF_TENSORS]
            return [hooks or {} for hooks in every]

        def replaced():
            pairs = zip(self._modules, self._kinds, strict=True)
            return [(module, key) for module, kind in pairs for key in module if _is_of(kind, key)]

        kept = [*of_states(), *_END]
        hooked, methods, kinds = list(filter(None, hooks())), replaced(), list(dict.fromkeys(self._kinds))
        moved = "a parameter, a buffer or a tensor that was handed over lies elsewhere: copy into the old one"
        hooks_words, method_words = "a module, a tensor or an optimizer has other hooks", "a method was replaced"
        looks: list[tuple[str, Callable]] = [
            (moved, lambda: map(torch.Tensor.data_ptr, of_plain())),
            (moved, lambda: map(_number, of_mixed())),
            (_STATE, lambda: [all(map(operator.is_, itertools.chain(of_states(), _END), kept))]),
            ("train() or eval() was called", lambda: map(_training, self._modules)),
            ("a module has another child", of_children),
            ("requires_grad of a parameter was changed", lambda: map(_requires_grad, of_plain())),
            ("an optimizer has another number of states", lambda: map(len, sized)),
            (hooks_words, lambda: map(tuple, hooked)),
            (method_words, lambda: [*map(_forward, kinds), *(module.get(key) for module, key in methods)]),
            ("autocast was switched", _autocast),
        ]
        rare = [
            (hooks_words, lambda: map(tuple, hooks())),
            (method_words, lambda: [(id(module), key) for module, key in replaced()]),
        ]
        self._looks = [(words, now, tuple(now())) for words, now in looks]
        self._rare_looks = [(words, now, tuple(now())) for words, now in rare]
        self._counts = RemovableHandle.next_id, *map(len, self._modules)

    def _adopt(self):
        """Copy what load_state_dict has bound into the tensors that the graph reads, and bind these again."""
        for optimizer, kept in zip(self._optimizers, self._kept, strict=True):
            tables = _tables(optimizer)
            if any(values.keys() - tables.get(key, {}).keys() for key, values in kept.items()):
                raise CaptureError("load_state_dict has left out state of an optimizer, which the graph reads")
            tensors = [
                (key, name, t) for key, values in kept.items() for name, t in values.items() if torch.is_tensor(t)
            ]
            for key, name, tensor in tensors:
                if tables[key][name] is not tensor:
                    with torch.no_grad():
                        tensor.copy_(torch.as_tensor(tables[key][name]))
                    tables[key][name] = tensor
        numbers, looks = self._numbers_before, self._looks
        self._look()
        self._numbers_before = numbers
        # The state may come in another order; all else has to be as before.
        pairs = zip(self._looks, looks, strict=True)
        self._looks = [(*look[:2], look[2] if look[0] == _STATE else old[2]) for look, old in pairs]


def _tables(optimizer) -> dict:
    """Return the state of optimizer parameter, and the groups by their number."""
    return {**optimizer.state, **dict(enumerate(optimizer.param_groups))}


_training = operator.itemgetter("training")
_requires_grad, _forward = map(operator.attrgetter, ("requires_grad", "forward"))


def _is_of(kind, key) -> bool:
    """Return whether a name is that of a method of a class."""
    return not key.startswith("__") and callable(getattr(kind, key, None))


def _autocast():
    """Return the types of numbers that autocast chooses on a GPU and on a CPU, None where it is off."""
    return [torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None for kind in ("cuda", "cpu")]


def _number(value):
    """Return what tells a value from another one: of a tensor its address, of a list its length."""
    if isinstance(value, torch.Tensor):
        return getattr(value, "_local_tensor", value).data_ptr()
    return len(value) if isinstance(value, list) else value
