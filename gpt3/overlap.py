"""graph_layer_overlap: `graph_layer` with the forward of microbatch m + 1 beside the backward of microbatch m.

Kernels and values are those of graph_layer; the forward runs on a second stream, so that two kernels run at once where
one does not fill the GPU. The host can feed two streams, since it issues replays in a tenth of the step. Kernels that
run at the same time must not share memory. So forward and backward graphs have a pool each; forward m + 1 is captured
before backward m frees its activations; and x is a pair, because backward m still reads its own.
"""

import torch

from common.capture.pool import Pool
from common.measuring.marks import mark, section
from common.variant import Capture, Unsupported, warm_up
from gpt3.config import FP8
from gpt3.state import State
from gpt3.train import Graphed, Microbatch, capture_backward, capture_forward, eager_step, replay


class GraphedOverlap(Graphed):
    """Captured and left eager: as in `Graphed`."""

    def __init__(self, state: State):
        require(state)
        self.state = state
        ahead, behind = Pool(state.device), Pool(state.device)
        self.capture = Capture(strategy="layer x microbatch, forward beside backward", pools=[ahead, behind])
        self.side = torch.cuda.Stream(state.device) if state.device.type == "cuda" else None
        warm_up(state, self.capture, eager_step)
        sample = torch.zeros_like(state.embedding(state.inputs["tokens"][0]))
        self.x = [torch.zeros_like(sample).requires_grad_() for _ in range(2)]
        self.grad_y = torch.zeros_like(sample)
        self.microbatches, last = [], state.config.microbatches - 1
        with self.capture.timed("capture_s"), state.fp8.capturing():
            following = capture_forward(state.layers, ahead, self.x[0], 0)
            for microbatch in range(last + 1):
                forward, saved, y = following
                if microbatch < last:
                    following = capture_forward(state.layers, ahead, self.x[(microbatch + 1) % 2], microbatch + 1)
                with state.fp8.other_workspace():
                    backward, grad_x = capture_backward(behind, saved, self.grad_y)
                self.microbatches.append(Microbatch(forward, y, backward, grad_x))

    def step(self, index: int):
        state, last = self.state, len(self.microbatches) - 1
        state.begin_step(index)
        embedded = self._forward(0)
        self._loss(0)
        for microbatch, graphs in enumerate(self.microbatches):
            following = self._forward(microbatch + 1, self.side) if microbatch < last else None
            with section("backward"):
                with state.fp8.backward(replayed=True):
                    replay(graphs.backward)
                embedded.backward(graphs.grad_x)
            mark()
            if self.side:
                torch.cuda.current_stream().wait_stream(self.side)
            if microbatch < last:
                self._loss(microbatch + 1)
            embedded = following
        state.end_step(index)

    def _forward(self, microbatch, stream=None):
        """Embed on the current stream, replay the layers on `stream` (None: the current one). Returns the embedding."""
        with section("embedding"):
            embedded = self.state.embedding(self.state.inputs["tokens"][microbatch])
            self.x[microbatch % 2].detach().copy_(embedded.detach())
        if stream:
            stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), section("forward"), self.state.fp8.forward():
            replay(self.microbatches[microbatch].forward)
        return embedded

    def _loss(self, microbatch):
        """Compute the loss of the forward graphs' output, and its gradient into grad_y."""
        hidden = self.microbatches[microbatch].y.detach().requires_grad_()
        loss = self.state.microbatch_loss(hidden, microbatch)
        with section("backward"):
            loss.backward()
            self.grad_y.copy_(hidden.grad)
        mark()


def require(state: State) -> None:
    """Raise Unsupported where two streams would share a workspace or a group of ranks."""
    if state.device.type == "cuda" and not (state.config.layer == "te" and state.config.precision in FP8):
        raise Unsupported(
            "graph_layer_overlap needs --layer te and --precision fp8 or fp8_current: other GEMMs share one workspace"
        )
    if state.config.tp > 1:
        raise Unsupported("graph_layer_overlap needs --tp 1: two streams would use one group of ranks at a time")
