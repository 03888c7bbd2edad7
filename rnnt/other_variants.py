"""RNN-T's other variants: eager with the usual host reads, and torch.compile."""

import contextlib

import torch

from common.contract import variant
from common.measuring.marks import mark, section
from common.variant import Compiled, require_compiler
from rnnt.data import buckets
from rnnt.train import load_batch, mean_loss, padded_step, train_on


@variant(
    "eager_sync",
    kind="eager",
    help="eager with the usual host reads: loss, overflow, lengths for the loss",
    parity="bitwise",
    traits={"extra_work": "reads loss, overflow and lengths on the host"},
    warm_up=padded_step,
)
def sync_step(state, index: int):
    """`eager_step` with reads on the host; each waits for the GPU."""
    batch = load_batch(state, index)
    with section("prediction"):
        g = state.prediction(batch.tokens)
    with section("encoder"):
        f, lengths = state.encoder(batch.features, batch.feature_lengths)
    mark()
    with section("joint and loss"):
        # torchaudio's loss reads these sizes on the host and takes logits of no other size.
        sizes = lengths.max().item(), batch.token_lengths.max().item()
        assert sizes == (f.shape[1], g.shape[1] - 1)
        loss = mean_loss(state, f, g, lengths, batch)
        logged = loss.item()
    if logged != logged:
        raise FloatingPointError(f"loss is NaN at step {index}")
    mark()
    with section("backward"):
        gradients = torch.autograd.grad(loss * state.scaler.scale, state.parameters)
    mark()
    with section("optimizer"):
        state.lamb.check(gradients)
        if not state.scaler.found_inf.item():
            state.lamb.apply()
        state.scaler.update()
        state.report.fill(loss, state.lamb.grad_norm)
    state.end_step(index)


@variant(
    "compile",
    kind="compile",
    help="torch.compile of the three networks around their LSTMs, no graphs",
    reference="eager_padded",  # it trains on padded batches
    parity=0.1,  # compiled code cannot call the joint's kernel and draws another dropout mask in its place
)
class CompiledNetworks(Compiled):
    """torch.compile of the three networks. Their LSTMs break its graphs, so it gets the joint and the parts between.

    Each shape is compiled anew, so batches are padded and train_on runs once on each shape. Dropout draws as in eager,
    except in the joint, whose kernel compiled code cannot call.
    """

    def __init__(self, state, capture):
        require_compiler(state.device)
        self._shapes = state.plan.require_few_pairs("compile")
        # `leave` takes back the changes of `enter`.
        self._changes = contextlib.ExitStack()
        super().__init__(
            state,
            padded_step,
            [(state, name) for name in ("encoder", "prediction", "joint")],
            "encoder, prediction network and joint",
            capture=capture,
            fullgraph=False,
        )

    def compile_steps(self):
        """Train once on each shape."""
        for shape in self._shapes:
            train_on(self.state, self.state.inputs.dummy_batch(*shape))

    def enter(self):
        """Set the compiler's options and put in the compiled functions."""
        import torch._dynamo.config
        import torch._inductor.config

        change = self._changes.enter_context
        change(torch._inductor.config.patch(fallback_random=True))
        # Each shape is compiled once. Code that is not compiled must not be timed as if it were.
        limits = {"recompile_limit": 4 * buckets.MAX_PAIRS, "fail_on_recompile_limit_hit": True}
        change(torch._dynamo.config.patch(**limits))
        super().enter()

    def leave(self):
        """Take all of it back."""
        super().leave()
        self._changes.close()
