"""The first launches of a region beside eager, with everything at old addresses spoiled."""

import itertools
from typing import Any

import torch

from graph_worth.capture import tensor_places
from graph_worth.capture.graph_error import RegionRefused
from graph_worth.capture.parameterized import random_state

# All bits set is NaN in every floating-point format, and no address.
_POISON = 0xFF
# Share of a tensor's largest element by which two eager runs may differ.
_MAX_NOISE = 2e-2
# What new memory holds before launches, in turn: bytes that keep both were not written.
_FILLS = (0xA5, 0x5A)
_NUM_COMPARED = 2
_HALVES = (torch.float16, torch.bfloat16)
_NUM_REPEATS = 4
# torch.get_deterministic_debug_mode() of "error".
_DETERMINISTIC = 2
# Bytes before and behind an address that stands for one outside the region.
_MARGIN = 1 << 20
# Bytes in which every lower half of an address occurs once.
_WINDOW = 1 << 32


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a strided tensor as a contiguous uint8 tensor."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


class Verification:
    """Compares launches with eager runs of the function that was captured, on copies of its inputs.

    region: its `launch(inputs, fill)` gives results and arenas. inexact: results that eager itself does not repeat,
    compared by a tolerance.
    """

    def __init__(self, region, fn, examples: list[torch.Tensor]):
        self._region, self._fn, self._examples = region, fn, examples
        self._device = examples[0].device
        self._draws = random_state.generator(self._device)
        self._state = self._draws.get_state()
        self._eps = max((torch.finfo(t.dtype).eps for t in examples if t.dtype in _HALVES), default=0.0)
        self.inexact: set[str] = set()
        self._fills = itertools.cycle(_FILLS)
        # Memory that no launch may write, and the byte that it holds.
        self._spoiled: list[torch.Tensor] = []
        self._watched: list[tuple[torch.Tensor, int]] = []
        # Of the launch before, held so that this one gets other addresses.
        self._before: list[torch.Tensor] = []
        self._owners: list[Any] = []

    def prove(self, analysis) -> list[str]:
        """Compare launches with eager runs, then launches with other words in the place of unexplained ones.

        Returns `inexact`, sorted.
        """
        ranges = (*analysis.first.segments, *analysis.first.given)
        self._spoiled = [tensor_places.bytes_at(address, size, self._device) for address, size in ranges if size]
        for tensor in self._spoiled:
            tensor.fill_(_POISON)
        for _ in range(_NUM_COMPARED):
            self.run()
        if analysis.unexplained:
            self.prove_unread(analysis)
        # Addresses of these launches come no more.
        self._region.overwrite([], [])
        return sorted(self.inexact)

    def run(self) -> None:
        """Launch, compare with eager, spoil the launch's memory. RegionRefused where a result or a byte differs."""
        eager = self._eager()
        offset = self._draws.get_offset()
        got, num_results, owned = self._launch(fill := next(self._fills))
        if (at := self._draws.get_offset()) != offset:
            raise RegionRefused(f"the generator is at {at} after a launch, at {offset} after eager")
        pairs = enumerate(zip(got, eager, strict=True))
        # Such as seeds of attention without dropout, which no kernel writes.
        wrong = [index for index, pair in pairs if not _alike(*pair) and not _holds(pair[0], fill)]
        if wrong:
            self._compare(wrong, got, eager, num_results, fill)
        if not all(_holds(tensor, _POISON) for tensor in (*self._spoiled, *self._before)):
            raise RegionRefused("a launch wrote to memory of an earlier one: an address was missed")
        if not all(_holds(*pair) for pair in self._watched):
            raise RegionRefused("a launch wrote to memory that stands for memory outside the region")
        self._before, self._owners = owned, got
        for tensor in owned:
            tensor.fill_(_POISON)

    def _eager(self) -> list[Any]:
        """Results and inputs of an eager run from the same random state."""
        self._draws.set_state(self._state)
        inputs = [tensor_places.clone(tensor) for tensor in self._examples]
        return [*self._fn(*inputs), *inputs]

    def _launch(self, fill) -> tuple[list[Any], int, list[torch.Tensor]]:
        """Results and inputs of a launch from the same random state, and all its memory as bytes."""
        self._draws.set_state(self._state)
        inputs = [tensor_places.clone(tensor) for tensor in self._examples]
        results, arenas = self._region.launch(inputs, fill)
        owned = [
            tensor_places.bytes_at(t.data_ptr(), tensor_places.extent(t), self._device) for t in inputs if t.numel()
        ]
        return [*results, *inputs], len(results), [*arenas, *owned]

    def _compare(self, wrong, got, eager, num_results, fill):
        """Refuse unless eager leaves the bytes that differ unwritten too, or does not repeat itself there."""
        # All results of so many runs at once would be the most memory that a capture takes.
        again = _chosen(wrong, self._launch(other_fill := next(self._fills))[0])
        repeats = []
        for _ in range(_NUM_REPEATS):
            # What eager leaves unwritten then differs from run to run.
            tensor_places.fill_free(self._device, next(self._fills))
            repeats.append(_chosen(wrong, self._eager()))
        for index in wrong:
            name = f"result {index}" if index < num_results else f"input {index - num_results}"
            value, expected = got[index], eager[index]
            if value.device != expected.device:
                raise RegionRefused(f"{name} is on {value.device}, in eager on {expected.device}")
            first, second = as_bytes(value), as_bytes(again[index])
            unwritten = (first == fill) & (second == other_fill)
            differs = (first != as_bytes(expected)) & ~unwritten
            varies = torch.stack([as_bytes(repeat[index]) != as_bytes(expected) for repeat in repeats]).any(0)
            if not expected.dtype.is_floating_point:
                # Integers that eager itself leaves unwritten.
                differs &= ~varies
            if not bool(differs.any()):
                continue
            words = f"{name} of a launch differs from eager in {int(differs.sum())} of {differs.numel()} bytes"
            # Operators repeat their bits. In the warning mode attention's backward adds in any order.
            is_exact = torch.get_deterministic_debug_mode() == _DETERMINISTIC
            if (is_exact and not bool(varies.any())) or not expected.dtype.is_floating_point:
                raise RegionRefused(words)
            # Atomic additions, whose order a graph's timing changes. A stale address gives NaN or nonsense.
            # Of what is added to an input, the increase: beside large sums a lost one would be noise.
            before = self._examples[index - num_results].detach().double() if index >= num_results else 0.0
            plain = expected.detach().double() - before
            noise = max(float((repeat[index].detach().double() - before - plain).abs().max()) for repeat in repeats)
            error = float((value.detach().double() - before - plain).abs().max())
            scale, size = float(plain.abs().max()), float(expected.detach().double().abs().max())
            # A sum in 32 bits of what was rounded to 16 differs by a rounding of these, where eager does not repeat.
            noise = max(noise, torch.finfo(expected.dtype).eps * size, self._eps * scale if bool(varies.any()) else 0.0)
            if not error <= 4 * noise or noise > _MAX_NOISE * scale:
                raise RegionRefused(f"{words}, by {error:.3g} where eager differs from itself by {noise:.3g}")
            self.inexact.add(name)

    def prove_unread(self, analysis) -> None:
        """Show that no kernel reads the words that differ and are no address of the region, such as unused bytes.

        In a first launch they take the values of the second capture, in another one zero in the bytes that differ. A
        word that looks like an address of other memory takes the address of live memory instead, whose bytes are zero
        in the first launch and NaN in the other. RegionRefused where a result or such a byte changes.
        """
        unexplained = analysis.unexplained
        suspects = [word for word in unexplained if word.is_suspect]
        # A lower half that both captures agree upon may be a number beside unused bytes: it stays.
        window = _WINDOW if any(_has_known_half(word) for word in suspects) else 0
        scratch = _scratch(analysis.largest() + window if suspects else 0, self._device)
        try:
            for fill, margin in ((0, 2 * _MARGIN), (_POISON, _MARGIN)):
                self._watched = [(scratch.fill_(fill), fill)]
                start = scratch.data_ptr() + margin
                numbers = [word.agreed if fill else word.second for word in unexplained]
                pairs = zip(unexplained, numbers, strict=True)
                values = [_stand_in(word, start) if word.is_suspect else number for word, number in pairs]
                self._region.overwrite(unexplained, values)
                self.run()
        except RegionRefused as error:
            raise RegionRefused(
                "words of parameters differ between two captures, are no address of the region and matter "
                f"({error}): {analysis.name()}"
            ) from error
        self._watched = []
        self._region.overwrite(unexplained, [word.first for word in unexplained])


def _scratch(largest, device):
    """Live memory around addresses that a kernel may read or write instead of a tensor."""
    return torch.empty(largest + 3 * _MARGIN, dtype=torch.uint8, device=device)


def _has_known_half(word) -> bool:
    return (word.first ^ word.second) % _WINDOW == 0


def _stand_in(word, start) -> int:
    """The address for a suspect from `start` on: the first, or the first with its lower half where that is known."""
    return start + (word.first - start) % _WINDOW if _has_known_half(word) else start


def _chosen(indices, values) -> dict[int, Any]:
    return {index: values[index] for index in indices}


def _alike(value, expected) -> bool:
    if not isinstance(expected, torch.Tensor):
        return value == expected
    return value.device == expected.device and torch.equal(as_bytes(value), as_bytes(expected))


def _holds(value, fill: int) -> bool:
    return isinstance(value, torch.Tensor) and bool((as_bytes(value) == fill).all())
