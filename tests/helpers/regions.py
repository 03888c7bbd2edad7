"""A region by hand: a captured function that is called with tensors like its examples."""

from common.capture.parameterized.region import capture


class Captured:
    """`fn`, captured with `examples`; results belong to the caller."""

    def __init__(self, fn, examples):
        self.region = capture(fn, examples)

    def __call__(self, *inputs):
        results, _ = self.region.launch(list(inputs))
        return self.region.unflatten(results)

    @property
    def report(self):
        region = self.region
        counts = {"launches": region.num_launches, "patched": region.num_patched, "patch_s": region.patch_s}
        return {**region.report, **counts}
