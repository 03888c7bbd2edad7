"""FP8 training with delayed scaling as Transformer Engine runs it.

Delayed scaling keeps a state per GEMM operand: quantise with the scale at hand, record the largest magnitude (amax) of
what was quantised, and after a microbatch make a new scale from the amax history. The scale update is not part of a
layer: a graphed layer only fills amaxes, and the update runs eagerly between graphs. Weights are quantised once per
step, in the first microbatch, into a cache.

A script uses `NoScaling`, `TransformerEngineScaling` (transformer_engine.py beside it), or a stand-in without FP8
hardware (gpt3/emulated_fp8.py):

    with fp8.forward():                   the layers of one microbatch, called or replayed; scales updated on exit
    with fp8.backward(replayed=False):    their backward pass
    with fp8.layers(first=True):          the layers of one chunk and microbatch of a pipeline; no update
    fp8.update()                          all scales once, after a step's last pass, where layers() was used
    with fp8.capturing():                 around captures: no update is recorded
    fp8.reset(), fp8.named_state()        in place; for hashing
"""

import contextlib

E4M3_MAX, E5M2_MAX = 448.0, 57344.0


class NoScaling:
    """bf16 layers: nothing to scale, every part does nothing."""

    def _nothing(self, *arguments, **flags):
        return contextlib.nullcontext()

    forward = backward = layers = without_update = capturing = _nothing

    def update(self):
        """Nothing to update."""

    reset = update

    def named_state(self):
        """Nothing: bf16 layers have no scales."""
        return iter(())
