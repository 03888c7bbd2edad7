"""A region on the CPU: the recorded operators, run on new inputs and new memory in each call."""

import gc
from collections.abc import Callable
from typing import Any

import torch

from graph_worth.capture import tensor_places
from graph_worth.capture.graph_error import CaptureError, RegionRefused
from graph_worth.capture.host_graph_memory import ExternalStorage, View, held_outside
from graph_worth.capture.host_graph_recorder import Recorder, copy_results, refuse_inside_capture, replaying


class HostRegion:
    """A recorded run that moves to other memory. It holds fn, and what its closure holds, until `release`.

    fn runs once, on copies of the inputs. RegionRefused where it does what no graph can hold, or keeps a tensor.
    """

    def __init__(self, fn, example_inputs: list[torch.Tensor]):
        refuse_inside_capture("the capture of a region", "runs inside a capture")
        inputs = [tensor_places.clone(tensor) for tensor in example_inputs]
        versions = [tensor._version for tensor in inputs]
        state = torch.get_rng_state()
        recorder = Recorder({}, [torch.default_generator])
        try:
            leaves = list(recorder.run(lambda: fn(*inputs)))
        except CaptureError as error:
            raise RegionRefused(str(error)) from error
        finally:
            torch.set_rng_state(state)
        self.written = [index for index, tensor in enumerate(inputs) if tensor._version != versions[index]]
        self._inputs = [tensor.untyped_storage()._cdata for tensor in inputs]
        self._calls: list[Any] | None = recorder.calls
        arenas = {address for address, (_, constant) in recorder.produced.items() if not constant}
        self._constants = {address: recorder.storages[address] for address in recorder.produced.keys() - arenas}
        self._made = {address: recorder.storages[address].nbytes() for address in arenas}
        self._outside = {
            address: ExternalStorage(recorder.storages[address], *reader)
            for address, reader in recorder.read.items()
            if address not in self._inputs
        }
        self._results = [self._place(leaf) for leaf in leaves]
        del leaves
        storages = [recorder.storages[address] for address in self._made]
        storages += [tensor.untyped_storage() for tensor in inputs]
        inputs.clear()
        check_none_kept(lambda: sum(map(held_outside, storages)))
        self._fn = fn
        self.report: dict[str, Any] = {
            "nodes": {"operator": len(recorder.calls)},
            "arena_bytes": sum(self._made.values()),
            "launches": 0,
            # There is no node to patch: each call makes its views anew.
            "patched": 0,
            "patch_s": 0.0,
        }

    def launch(self, inputs: list[torch.Tensor]) -> tuple[list[Any], list[torch.Tensor]]:
        """Run the operators on inputs that are known to be like the examples; return like a GPU's region.

        CaptureError where the region was released, runs inside a capture, or reads a tensor that is gone.
        """
        if self._calls is None:
            raise CaptureError("call of a parameterized region that was released")
        refuse_inside_capture("a parameterized region", "runs inside a capture")
        for outside in self._outside.values():
            outside.check()
        arenas = {address: torch.full((size,), 0xFF, dtype=torch.uint8) for address, size in self._made.items()}
        storages = self._constants | {address: arena.untyped_storage() for address, arena in arenas.items()}
        given = dict(zip(self._inputs, inputs, strict=True))

        def tensor(view):
            if view.storage in given:
                source = given[view.storage].detach()
                offset = source.storage_offset() * source.element_size() // view.dtype.itemsize + view.offset
                return torch.empty(0, dtype=view.dtype).set_(source.untyped_storage(), offset, view.shape, view.stride)
            if view.storage in storages:
                return view.over(storages[view.storage])
            return self._outside[view.storage].tensor(view)

        # Counted before: what fails from here on has run in part.
        self.report["launches"] += 1
        with replaying():
            for call in self._calls:
                torch._C._set_grad_enabled(call.grad_enabled)
                leaves = [tensor(leaf) if isinstance(leaf, View) else leaf for leaf in call.leaves]
                args, kwargs = call.arguments(leaves)
                value = call.func(*args, **kwargs)
                if call.results:
                    copy_results([view and tensor(view) for view in call.results], value)
        for index in self.written:
            torch.autograd.graph.increment_version(inputs[index])
        results = [tensor(result) if isinstance(result, View) else result for result in self._results]
        return results, list(arenas.values())

    def release(self) -> None:
        """Drop the record. Results of earlier calls stay."""
        self._calls, self._outside, self._fn = None, {}, None

    def _place(self, leaf):
        """A result as its place in an input or in new memory; a tensor from outside, or a value, as it is."""
        if not isinstance(leaf, torch.Tensor):
            return leaf
        address = leaf.untyped_storage()._cdata
        if address in self._inputs or address in self._made:
            return View(address, int(leaf.storage_offset()), tuple(leaf.shape), leaf.stride(), leaf.dtype)
        return leaf.detach()


def check_none_kept(count: Callable[[], int]) -> None:
    """Refuse a region that keeps tensors besides its results, which `count` counts: no launch writes those again."""
    if count():
        # Cycles of Python objects may be all that holds them. A collection takes half a second, so not always.
        gc.collect()
    if number := count():
        raise RegionRefused(
            f"the region keeps {number} tensors beyond its end, such as gradients that it set, a cache or an input: "
            "return them, or make them before"
        )
