"""RNN-T's other variants: eager with the usual host reads, and torch.compile."""

import torch

from common.marks import mark, section
from common.variant import Compiled, Eager, require_compiler
from rnnt import buckets


def eager_sync(state, load_batch, mean_loss, warm_up_step) -> Eager:
    """The usual loop: a loss that needs lengths on the host, a logged loss, and a look at the overflow; each waits.

    load_batch, mean_loss: of rnnt/train.py, whose train_on this is with the reads of the host.
    """

    def step(state, index):
        batch = load_batch(state, index)
        with state.side_stream(), section("prediction"):
            g = state.prediction(batch.tokens, batch.token_lengths)
        with section("encoder"):
            f, lengths = state.encoder(batch.features, batch.feature_lengths)
        state.wait_for_side_stream(g)
        mark()
        with section("joint and loss"):
            # What torchaudio's loss reads: it takes logits of just these sizes.
            sizes = lengths.max().item(), batch.token_lengths.max().item()
            assert sizes == (f.shape[1], g.shape[1] - 1)
            loss = mean_loss(state, f, g, lengths, batch)
            logged = loss.item()
        if logged != logged:
            state.check()
            raise FloatingPointError(f"loss is NaN at step {index}")
        mark()
        with section("backward"):
            gradients = torch.autograd.grad(loss * state.scaler.scale, state.parameters)
        mark()
        with section("optimizer"):
            state.lamb.check(gradients)
            if not state.scaler.found_inf.item():
                state.lamb.apply(gradients)
            state.scaler.update()
            state.report.fill(loss, state.lamb.grad_norm)
        state.end_step(index)

    return Eager(state, step, warm_up_step)


def compiled(state, train_on, padded_step) -> Compiled:
    """torch.compile of the three networks; their LSTMs break its graphs, so it has what lies between and the joint.

    Batches are padded, since each shape is compiled anew: train_on runs once on each. Dropout draws as eager does, but
    not the joint's: compiled code cannot call its kernel.
    """
    require_compiler(state.device)
    import torch._dynamo.config
    import torch._inductor.config

    shapes = state.plan.require_few_pairs("compile")
    torch._inductor.config.fallback_random = True
    # Each shape is compiled once, and what is not compiled is not timed as if it were.
    torch._dynamo.config.recompile_limit = 4 * buckets.MAX_PAIRS
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    if state.config.lstm != "cudnn":
        hide_kernels(state.model.encoder)
        hide_kernels(state.model.prediction)
    networks = ("encoder", "prediction", "joint")
    return Compiled(
        state,
        padded_step,
        [(state, name) for name in networks],
        "encoder, prediction network and joint",
        fullgraph=False,
        compile_steps=lambda: [train_on(state, state.inputs.dummy_batch(*shape)) for shape in shapes],
    )


def hide_kernels(network) -> None:
    """Keep the compiler from looking into the launches of our LSTM kernels.

    Not a decorator of theirs, which would import the compiler in every run.
    """
    network.run_stack = torch.compiler.disable(network.run_stack)
