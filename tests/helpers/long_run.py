"""The real script of a model, whose loop keeps a checkpoint in the middle, and at its end resumes from it.

    python -m tests.helpers.long_run MODEL --variant graph_step --steps 500 --parity --record PATH

The checkpoint goes back into the tensors of the training, since the graphs live and hold their addresses. What --record
writes has "resumed", the hashes of the state after each step behind the checkpoint, once more.
"""

import runpy
import sys

import torch

from graph_worth.measuring.course import Course
from graph_worth.script import by_hand


class Checkpoint:
    """The named state, what follows from it (`of_model`), and the state of torch's generator."""

    def __init__(self, loop):
        self._tensors = [tensor.detach() for _, tensor in loop.training.named_state()] + of_model(loop)
        self._values, self._random = [tensor.clone() for tensor in self._tensors], torch.get_rng_state()

    def resume(self, training, index):
        """Put all back in place; batches go on with that of step `index`."""
        training.reset()
        training.skip(index)
        for tensor, value in zip(self._tensors, self._values, strict=True):
            tensor.copy_(value)
        torch.set_rng_state(self._random)


def of_model(loop) -> list[torch.Tensor]:
    state = loop.training.state
    if loop.model.name == "llama2_lora":
        # Adapters in bf16, which Adam writes from the masters; the count of steps that selects masks of dropout; scales
        # in the form that kernels read.
        scaling = state.stack.scaling
        scales = [scaling.scale, scaling.inverse, scaling.amax, scaling.history]
        return [state.adapters.values, state.stack.operators.step, *scales]
    return []


def steps(loop):
    training, variant, count = loop.training, loop.variant, loop.options.steps
    course, own_replays, middle = Course(training, hashed=range(count)), 0, count // 2
    for place, index in enumerate([*range(count), *range(middle, count)]):
        if place == middle:
            checkpoint = Checkpoint(loop)
        if place == count:
            losses = training.results(count)
            checkpoint.resume(training, middle)
        before = variant.capture.num_replays
        yield index
        own_replays += variant.capture.num_replays - before if place < count else 0
        course.look(index)
    assert training.results(count)[middle:] == losses[middle:]
    # The loop looks at the steps, not at those behind the checkpoint once more. The reset has forgotten earlier losses.
    loop.count = loop.made = count
    loop.replays = variant.capture.num_replays - own_replays
    training.results = lambda count: losses
    digests = course.digests()
    loop.result.update(state_hashes=digests[:count], resumed=digests[count:])
    loop.result.update(num_tensors=len(course.names), unmoved=[])


def main():
    model, *arguments = sys.argv[1:]
    by_hand.Loop._parity = steps
    sys.argv = [f"{model}/train.py", *arguments]
    runpy.run_module(f"{model}.train", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
