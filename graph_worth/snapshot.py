"""The start that every variant trains from: all that a step changes, remembered once and put back in place.

Tensors are written back where they lie, since graphs hold their addresses. Numbers on the host, such as a scheduler's
count or an optimizer's learning rate, go back through the objects that hold them.
"""

import copy
import random
import sys

import torch

Named = list[tuple[str, torch.Tensor]]


class Snapshot:
    """The state of objects as it is now.

    owned: what training changes: modules, optimizers, tensors, generators, lists and dicts of these, and any object
    with state_dict and load_state_dict; ValueError where one is none of these. device: that the step runs on.
    has_tensors: False for `put_numbers_back` alone, which needs no memory.

    Attributes:
        tensors: names and tensors of what training changes, each once.
        parameters: those of modules and optimizers, and those handed over.
        generators: besides torch's own, which a graph has to know.
    """

    def __init__(self, owned: list, device: torch.device, has_tensors: bool = True):
        self.device = device
        self.tensors: Named = []
        self._numbers: list = []
        self.generators: list[torch.Generator] = []
        self.parameters: list[torch.nn.Parameter] = []
        kinds = [type(item).__name__ for item in owned]
        for i, (kind, item) in enumerate(zip(kinds, owned, strict=True)):
            # With a number where there are several of a class.
            self._add(kind if kinds.count(kind) == 1 else f"{kind} {kinds[:i].count(kind)}", item)
        self.tensors = [(name, own_part(tensor)) for name, tensor in _without_doubles(self.tensors) if has_tensors]
        self._values = [tensor.detach().clone() for _, tensor in self.tensors]
        self._gradients = [
            (parameter, parameter.grad, None if parameter.grad is None else parameter.grad.clone())
            for parameter in (self.parameters if has_tensors else ())
        ]
        self._random = self._random_states()

    def restore(self) -> None:
        """Put everything back."""
        with torch.no_grad():
            for (_, tensor), value in zip(self.tensors, self._values, strict=True):
                tensor.copy_(value)
            for parameter, gradient, kept in self._gradients:
                parameter.grad = gradient
                if gradient is not None and kept is not None:
                    gradient.copy_(kept)
        self.put_numbers_back()
        for set_state, state in self._random:
            set_state(state)

    def put_numbers_back(self) -> None:
        """Put back what optimizers, schedules and other objects hold on the host."""
        for put_back in self._numbers:
            put_back()

    def _add(self, name, item):
        if isinstance(item, torch.Tensor):
            self.tensors.append((name, item))
            if isinstance(item, torch.nn.Parameter):
                self.parameters.append(item)
        elif isinstance(item, torch.nn.Module):
            self.parameters += list(item.parameters())
            self.tensors += [(f"{name}.{key}", tensor) for key, tensor in item.named_parameters()]
            self.tensors += [(f"{name}.{key}", tensor) for key, tensor in item.named_buffers()]
        elif isinstance(item, torch.optim.Optimizer):
            self._add_optimizer(name, item)
        elif isinstance(item, torch.Generator):
            self.generators.append(item)
        elif isinstance(item, dict):
            for key, value in item.items():
                self._add(f"{name}.{key}", value)
        elif isinstance(item, (list, tuple)):
            for index, value in enumerate(item):
                self._add(f"{name}.{index}", value)
        elif hasattr(item, "state_dict") and hasattr(item, "load_state_dict"):
            self._add_stateful(name, item)
        else:
            raise ValueError(
                f"what training changes has a {name}: it needs state_dict and load_state_dict, or hand over its tensors"
            )

    def _add_optimizer(self, name, optimizer):
        for group in optimizer.param_groups:
            self.parameters += group["params"]
            for key, value in group.items():
                if isinstance(value, torch.Tensor):
                    self.tensors.append((f"{name}.{key}", value))
            self._numbers.append(_entries_of(group))
        for index, state in enumerate(optimizer.state.values()):
            # LBFGS has lists of tensors, too.
            self.tensors += _tensors_of(f"{name}.{index}", dict(state))
            self._numbers.append(_entries_of(state))

    def _add_stateful(self, name, item):
        """Any other object: tensors that it hands out itself, the rest through load_state_dict."""
        state = item.state_dict()
        again = item.state_dict()
        tensors = _tensors_of(name, state)
        pairs = zip(tensors, _tensors_of(name, again), strict=True)
        is_live = bool(tensors) and all(a is b or a.data_ptr() == b.data_ptr() for (_, a), (_, b) in pairs)
        if is_live:
            # A schedule shows tensors that it fills; its counts are attributes of the same names.
            self.tensors += tensors
            kept_numbers = {key: state[key] for key in state.keys() & vars(item).keys() if isinstance(state[key], int)}
            self._numbers.append(lambda: vars(item).update(copy.deepcopy(kept_numbers)))
            return
        kept = copy.deepcopy(state)
        self._numbers.append(lambda: item.load_state_dict(copy.deepcopy(kept)))

    def _random_states(self):
        states: list = [(torch.set_rng_state, torch.get_rng_state()), (random.setstate, random.getstate())]
        if "numpy" in sys.modules:
            numpy = sys.modules["numpy"]
            states.append((numpy.random.set_state, numpy.random.get_state()))
        if self.device.type == "cuda":
            states.append((torch.cuda.set_rng_state, torch.cuda.get_rng_state()))
        return states + [(generator.set_state, generator.get_state()) for generator in self.generators]

    def has_drawn(self) -> bool:
        """Return whether torch has drawn random numbers since, and none were put back."""
        states = zip(self._random, self._random_states(), strict=True)
        return any(isinstance(was, torch.Tensor) and not torch.equal(was, now) for (_, was), (_, now) in states)


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor that FSDP has spread over ranks, which lies where the tensor does."""
    return tensor.to_local().detach() if hasattr(tensor, "to_local") else tensor


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """Return the storage of a tensor, or of this rank's part of it; None where it has none of its own."""
    tensor = getattr(tensor, "_local_tensor", tensor)
    return tensor.untyped_storage() if tensor.layout == torch.strided else None


def storage_id(tensor: torch.Tensor) -> int | None:
    """Return what tells a tensor's storage from all others that exist, None where it has none of its own."""
    storage = storage_of(tensor)
    return None if storage is None else storage._cdata


def _entries_of(table):
    """A function that puts the entries of a dict back: numbers, and which tensors they are, as LBFGS binds others."""
    kept = {key: copy.copy(value) if isinstance(value, list) else value for key, value in table.items()}

    def put_back():
        table.clear()
        table.update({key: copy.copy(value) if isinstance(value, list) else value for key, value in kept.items()})

    return put_back


def _tensors_of(name, tree) -> Named:
    if isinstance(tree, torch.Tensor):
        return [(name, tree)]
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, (list, tuple)) else ()
    return [pair for key, value in items for pair in _tensors_of(f"{name}.{key}", value)]


def _without_doubles(named: Named) -> Named:
    """Each tensor once: an optimizer and its module share parameters, tied weights have two names."""
    seen: set[int] = set()
    return [(name, tensor) for name, tensor in named if not (id(tensor) in seen or seen.add(id(tensor)))]  # type: ignore[func-returns-value]
