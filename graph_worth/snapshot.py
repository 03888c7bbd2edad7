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
    """

    def __init__(self, owned: list, device: torch.device):
        self.device = device
        self.tensors: Named = []
        self._numbers: list = []
        self._generators: list[torch.Generator] = []
        self._parameters: list[torch.nn.Parameter] = []
        kinds = [type(each).__name__ for each in owned]
        for i, (kind, each) in enumerate(zip(kinds, owned, strict=True)):
            # With a number where there are several of a class.
            self._add(kind if kinds.count(kind) == 1 else f"{kind} {kinds[:i].count(kind)}", each)
        self.tensors = [(name, own_part(tensor)) for name, tensor in _without_doubles(self.tensors)]
        self._values = [tensor.detach().clone() for _, tensor in self.tensors]
        self._gradients = [
            (parameter, parameter.grad, None if parameter.grad is None else parameter.grad.clone())
            for parameter in self._parameters
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

    def _add(self, name, each):
        if isinstance(each, torch.Tensor):
            self.tensors.append((name, each))
            if isinstance(each, torch.nn.Parameter):
                self._parameters.append(each)
        elif isinstance(each, torch.nn.Module):
            self._parameters += list(each.parameters())
            self.tensors += [(f"{name}.{key}", tensor) for key, tensor in each.named_parameters()]
            self.tensors += [(f"{name}.{key}", tensor) for key, tensor in each.named_buffers()]
        elif isinstance(each, torch.optim.Optimizer):
            self._add_optimizer(name, each)
        elif isinstance(each, torch.Generator):
            self._generators.append(each)
        elif isinstance(each, dict):
            for key, value in each.items():
                self._add(f"{name}.{key}", value)
        elif isinstance(each, (list, tuple)):
            for index, value in enumerate(each):
                self._add(f"{name}.{index}", value)
        elif hasattr(each, "state_dict") and hasattr(each, "load_state_dict"):
            self._add_stateful(name, each)
        else:
            raise ValueError(
                f"what training changes has a {name}: it needs state_dict and load_state_dict, or hand over its tensors"
            )

    def _add_optimizer(self, name, optimizer):
        for group in optimizer.param_groups:
            self._parameters += group["params"]
            for key, value in group.items():
                if isinstance(value, torch.Tensor):
                    self.tensors.append((f"{name}.{key}", value))
            self._numbers.append(_numbers_of(group))
        for index, state in enumerate(optimizer.state.values()):
            self.tensors += [(f"{name}.{index}.{key}", t) for key, t in state.items() if isinstance(t, torch.Tensor)]
            self._numbers.append(_numbers_of(state))

    def _add_stateful(self, name, each):
        """Any other object: tensors that it hands out itself, the rest through load_state_dict."""
        state = each.state_dict()
        again = each.state_dict()
        own = _tensors_of(name, state)
        is_live = bool(own) and all(
            a is b or a.data_ptr() == b.data_ptr() for (_, a), (_, b) in zip(own, _tensors_of(name, again), strict=True)
        )
        if is_live:
            # A schedule shows tensors that it fills; its counts are attributes of the same names.
            self.tensors += own
            kept_numbers = {key: state[key] for key in state.keys() & vars(each).keys() if isinstance(state[key], int)}
            self._numbers.append(lambda: vars(each).update(copy.deepcopy(kept_numbers)))
            return
        kept = copy.deepcopy(state)
        self._numbers.append(lambda: each.load_state_dict(copy.deepcopy(kept)))

    def _random_states(self):
        states: list = [(torch.set_rng_state, torch.get_rng_state()), (random.setstate, random.getstate())]
        if "numpy" in sys.modules:
            numpy = sys.modules["numpy"]
            states.append((numpy.random.set_state, numpy.random.get_state()))
        if self.device.type == "cuda":
            states.append((torch.cuda.set_rng_state, torch.cuda.get_rng_state()))
        return states + [(generator.set_state, generator.get_state()) for generator in self._generators]

    def has_drawn(self) -> bool:
        """Return whether torch has drawn random numbers since, and none were put back."""
        states = zip(self._random, self._random_states(), strict=True)
        return any(isinstance(was, torch.Tensor) and not torch.equal(was, now) for (_, was), (_, now) in states)

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """Parameters of what training changes."""
        return self._parameters

    @property
    def generators(self) -> list[torch.Generator]:
        """Generators besides torch's own, which a graph has to know."""
        return self._generators


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


def _numbers_of(table):
    """A function that puts the entries of a dict back that are no tensors and no parameters."""
    kept = {key: copy.copy(value) for key, value in table.items() if _is_number(value)}
    return lambda: table.update({key: copy.copy(value) for key, value in kept.items()})


def _is_number(value):
    if isinstance(value, (list, tuple)):
        return all(map(_is_number, value))
    return value is None or isinstance(value, (bool, int, float, str))


def _tensors_of(name, tree) -> Named:
    if isinstance(tree, torch.Tensor):
        return [(name, tree)]
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, (list, tuple)) else ()
    return [found for key, value in items for found in _tensors_of(f"{name}.{key}", value)]


def _without_doubles(named: Named) -> Named:
    """Each tensor once: an optimizer and its module share parameters, tied weights have two names."""
    seen: set[int] = set()
    return [(name, tensor) for name, tensor in named if not (id(tensor) in seen or seen.add(id(tensor)))]  # type: ignore[func-returns-value]
