"""A region by hand: a captured function that is called with tensors like its examples."""

from torch.utils._pytree import tree_flatten, tree_unflatten

from graph_worth.capture.parameterized.region import capture


class Captured:
    """`fn`, captured with `examples`; results belong to the caller and have the structure that `fn` returned."""

    def __init__(self, fn, examples):
        structures = []

        def flat(*inputs):
            leaves, structure = tree_flatten(fn(*inputs))
            structures[:] = [structure]
            return leaves

        self.region = capture(flat, examples)
        (self.structure,) = structures

    def __call__(self, *inputs):
        results, _ = self.region.launch(list(inputs))
        return tree_unflatten(results, self.structure)

    @property
    def report(self):
        return dict(self.region.report)
