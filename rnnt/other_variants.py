"""RNN-T's other variants: eager with the usual host reads, and torch.compile."""

import contextlib

import torch

from common.measuring.marks import mark, section
from common.variant import Compiled, Eager, require_compiler
from rnnt.data import buckets


def eager_sync(state, load_batch, mean_loss, warm_up_step) -> Eager:
    """The usual loop: a loss that needs lengths on the host, a logged loss, and a look at the overflow; each waits.

    load_batch, mean_loss: of rnnt/train.py. The step is its `train_on` with reads on the host.
    """

    def step(state, index):
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

    return Eager(state, step, warm_up_step)


class CompiledNetworks(Compiled):
    """torch.compile of the three networks. Their LSTMs break its graphs, so it gets the joint and the parts between.

    Each shape is compiled anew, so batches are padded and train_on runs once on each shape. Dropout draws as in eager,
    except in the joint, whose kernel compiled code cannot call.
    """

    def __init__(self, state, train_on, padded_step):
        require_compiler(state.device)
        self._train_on, self._shapes = train_on, state.plan.require_few_pairs("compile")
        # `leave` takes back the changes of `enter`.
        self._changes = contextlib.ExitStack()
        super().__init__(
            state,
            padded_step,
            [(state, name) for name in ("encoder", "prediction", "joint")],
            "encoder, prediction network and joint",
            fullgraph=False,
        )

    def compile_steps(self):
        """Train once on each shape."""
        for shape in self._shapes:
            self._train_on(self.state, self.state.inputs.dummy_batch(*shape))

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
