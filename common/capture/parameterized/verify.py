"""The first launches of a region beside eager, with everything at old addresses spoiled."""

from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from common.capture.parameterized import driver, memory, random_state
from common.capture.parameterized.errors import RegionRefused

# All bits set is NaN in every floating-point format, and no address.
_POISON = 0xFF
# Share of a tensor's largest element by which two eager runs may differ.
_MAX_NOISE = 1e-2


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's elements as bytes.

    Args:
        tensor: strided.

    Returns:
        a contiguous uint8 tensor.
    """
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


class Verification:
    """Compares launches with eager runs, on the memory of one device.

    Args:
        region: its `launch(inputs)` gives flat results and arenas; `written` lists the inputs that it writes.
        fn: the function that was captured.
        device: the GPU.
    """

    def __init__(self, region, fn, device: torch.device):
        self._region = region
        self._fn = fn
        self._device = device
        self._spoiled: list[torch.Tensor] = []
        # Of the launch before, held so that this one gets other addresses.
        self._before: list[torch.Tensor] = []
        self._owners: list[torch.Tensor] = []

    def spoil(self, memory_of: list[torch.Tensor]) -> None:
        """Fill memory that no launch may touch any more, and watch it.

        Args:
            memory_of: tensors of bytes.
        """
        for tensor in memory_of:
            tensor.fill_(_POISON)
        self._spoiled += memory_of

    def run(self, example_inputs: list[torch.Tensor]) -> None:
        """Launch once on copies of the inputs, compare with eager, then spoil this launch's memory too.

        Args:
            example_inputs: inputs; they stay as they are.

        Raises:
            RegionRefused: a result differs, or memory was touched that belongs to an earlier launch.
        """
        draws = random_state.generator(self._device)
        state = draws.get_state()
        runs: list[list[Any]] = []
        for _ in range(2):
            draws.set_state(state)
            inputs = [memory.clone(tensor) for tensor in example_inputs]
            runs.append([*tree_leaves(self._fn(*inputs)), *inputs])
        offset = draws.get_offset()
        draws.set_state(state)
        inputs = [memory.clone(tensor) for tensor in example_inputs]
        results, arenas = self._region.launch(inputs)
        self._compare([*results, *inputs], runs, len(results))
        if draws.get_offset() != offset:
            raise RegionRefused(f"the generator is at {draws.get_offset()} after a launch, at {offset} after eager")
        draws.set_state(state)
        for tensor in (*self._spoiled, *self._before):
            if not bool((tensor == _POISON).all()):
                raise RegionRefused("a launch wrote to memory of an earlier one: an address was missed")
        self._owners = inputs
        self._before = [
            *arenas,
            *(memory.bytes_at(t.data_ptr(), memory.extent(t), self._device) for t in inputs if t.numel()),
        ]
        for tensor in self._before:
            tensor.fill_(_POISON)

    def prove_unread(self, analysis, example_inputs: list[torch.Tensor]) -> None:
        """Show that no kernel reads the words that differ and are no address, such as unused bytes of structures.

        They take the values of the second capture, whose memory is spoiled by now, then zero where no half of an
        address may be. No result may change.

        Args:
            analysis: of the region; both captures are alive.
            example_inputs: inputs; they stay as they are.

        Raises:
            RegionRefused: a result changes; the message names the words.
        """
        unexplained = analysis.unexplained
        if not unexplained:
            return
        second = [word.second for word in unexplained]
        zero = [word.second if any(map(driver.is_address, analysis.whole(word))) else 0 for word in unexplained]
        try:
            for values in (second, zero):
                self._region.overwrite(unexplained, values)
                self.run(example_inputs)
        except RegionRefused as error:
            raise RegionRefused(
                f"words of parameters differ between two captures, are no address and matter ({error}): "
                + analysis.name(unexplained)
            ) from error
        self._region.overwrite(unexplained, [word.first for word in unexplained])

    def _compare(self, got, runs, num_results):
        for index, (value, eager, again) in enumerate(zip(got, *runs, strict=True)):
            name = f"result {index}" if index < num_results else f"input {index - num_results}"
            if not isinstance(eager, torch.Tensor):
                if value != eager:
                    raise RegionRefused(f"{name} is {value}, in eager {eager}: a Python value that changes")
                continue
            if torch.equal(as_bytes(value), as_bytes(eager)):
                continue
            if torch.equal(as_bytes(eager), as_bytes(again)) or not eager.dtype.is_floating_point:
                raise RegionRefused(f"{name} of a launch differs from eager {differs(value, eager)}")
            # Eager itself does not repeat: atomic additions. A stale address gives NaN or nonsense.
            noise = (eager.detach().double() - again.detach().double()).abs().max()
            error = (value.detach().double() - eager.detach().double()).abs().max()
            if not bool(error <= 4 * noise) or bool(noise > _MAX_NOISE * eager.detach().double().abs().max()):
                raise RegionRefused(
                    f"{name} of a launch differs from eager by {error:.3g}, eager from itself by {noise:.3g}"
                )


def differs(value: torch.Tensor, eager: torch.Tensor) -> str:
    """Say how far two tensors differ.

    Args:
        value: of a launch.
        eager: of an eager run.

    Returns:
        words for a message.
    """
    where = as_bytes(value) != as_bytes(eager)
    return f"in {int(where.sum())} of {where.numel()} bytes"
