"""A step of one stage of a pipeline: its passes in the order of the schedule, and the exchanges between them.

    for each pass (chunk, microbatch) in the stage's order:
        exchange(...)                              one batch of sends and receives
        forward or backward pass of the chunk's layers
    exchange(...), scale updates, optimizer

Interleaved 1F1B (common/schedule.py): a stage has `chunks` parts of the model, and several microbatches are on
their way through it at a time. No variant captures the sends and receives, since their other end is another rank's own
step; embedding, final norm and loss, as in gpt3/train.py; the FP8 scale updates, one a step, since a chunk's amaxes are
complete when its last microbatch has run; and the optimizer.

With --pp-rank a stage runs without the others. Its inputs are then copied from fixed tensors (`Edges`),
its outputs are dropped, and their root mean squares are added to its loss, since most stages have no loss of their own.
"""

from common.schedule import origin
from gpt3.state import State
from graph_worth import mark, section, variant
from graph_worth.parallel import collectives


class Stage:
    """The stage's passes with its layers called, kernels launched one by one. Subclasses replay graphs instead.

    made: {(stage, step, microbatch): output of that pass, made here or received}, until another pass takes it. step: as
    in common/schedule.py, +c and -c for the forward and the backward pass of chunk c, counted from 1.
    """

    accumulate_all = False

    def __init__(self, state: State):
        self.state = state
        self.made, self._embedded, self._saved = {}, {}, {}

    def layers(self, chunk: int, microbatch: int):
        return self.state.chunks[chunk - 1]

    def run_forward(self, chunk: int, microbatch: int, x):
        """Return the output of a chunk's layers, without autograd's graph."""
        x = x.detach().requires_grad_()
        hidden = x
        for layer in self.layers(chunk, microbatch):
            hidden = layer(hidden, is_first_microbatch=microbatch == 0)
        self._saved[chunk, microbatch] = x, hidden
        return hidden.detach()

    def run_backward(self, chunk: int, microbatch: int, grad):
        """Return the gradient of the chunk's input; weight gradients go to main_grad."""
        x, hidden = self._saved.pop((chunk, microbatch))
        hidden.backward(grad)
        return x.grad

    def buffer(self, step: int, microbatch: int):
        """A tensor to receive a pass's input into."""
        return self.state.empty_hidden()

    def step(self, index: int):
        """Train on batch `index`. Nothing in it waits for the GPU."""
        state = self.state
        state.begin_step(index, self.accumulate_all)
        for (step, microbatch), transfers in zip(state.steps, state.transfers, strict=False):
            self._exchange(transfers)
            (self._forward if step > 0 else self._backward)(step, microbatch)
            # Behind a pass, whose tensors are sent next: never between a send and its receive.
            mark()
        self._exchange(state.transfers[-1])
        state.fp8.update()
        with section("optimizer"):
            state.reduce_gradients()
            state.adam.step()
        state.keep_results(index)

    def _forward(self, chunk, microbatch):
        state, source = self.state, self._origin(chunk)
        if source is None:
            with section("embedding"):
                self._embedded[microbatch] = state.embedding(state.inputs["tokens"][microbatch])
            x = self._embedded[microbatch].detach()
        else:
            x = self.made.pop((*source, microbatch))
        with section("forward"), state.fp8.layers(first=microbatch == 0):
            self.made[state.stage, chunk, microbatch] = self.run_forward(chunk, microbatch, x)

    def _backward(self, step, microbatch):
        state, source = self.state, self._origin(step)
        grad = self.made.pop((*source, microbatch))
        if source == (state.stage, -step):
            # The model's last chunk: its own output, which the loss is computed from.
            grad = self._loss_gradient(grad.detach().requires_grad_(), microbatch)
        with section("backward"):
            grad = self.run_backward(-step, microbatch, grad)
            if step == -1 and microbatch in self._embedded:
                self._embedded.pop(microbatch).backward(grad)
            else:
                self.made[state.stage, step, microbatch] = grad

    def _loss_gradient(self, hidden, microbatch):
        loss = self.state.microbatch_loss(hidden, microbatch)
        with section("loss"):
            loss.backward()
        return hidden.grad

    def _origin(self, step):
        """(stage, step) whose output a pass takes; None for the embedding."""
        return origin(self.state.config.pp, self.state.config.chunks, self.state.stage, step)

    def _exchange(self, transfers):
        sent, destinations, received, sources = [], [], [], []
        for _, peer, step, microbatch in (transfer for transfer in transfers if transfer.sends):
            sent.append(self.made.pop((self.state.stage, step, microbatch)))
            destinations.append(peer)
        for _, peer, step, microbatch in (transfer for transfer in transfers if not transfer.sends):
            received.append(self.buffer(step, microbatch))
            self.made[*self._origin(step), microbatch] = received[-1]
            sources.append(peer)
        with section("pipeline"):
            if self.state.edges:
                self.state.loss.add_(self.state.edges.feed(sent, transfers, received))
            else:
                collectives.exchange_(sent, destinations, received, sources, self.state.groups.pipeline)


@variant("eager", when=lambda c: c.staged)
def eager_step(state: State, index: int):
    Stage(state).step(index)
