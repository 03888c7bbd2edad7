"""An LSTM layer whose recurrence is one launch forwards and one backwards, for the sizes of RNN-T at batch 8.

At this batch a time step is a product of 8 rows with 8 MiB of weights: what it takes is the time in which thread blocks
hear of each other's results, not arithmetic. rnnt/lstm_kernel.cu keeps the weights in registers and passes results on
in one journey through L2. All that has no order in time stays with cuBLAS: the input's product before, gradients of
input and weights after, for all steps at once.

Rounding is as in cuDNN: products in FP16 with FP32 sums, gates and cell computed in FP32; h, what is kept for the
backward and gradients in FP16, the input's product too. On the CPU the same arithmetic runs time step by time step.
"""

import torch
import torch.nn.functional as F

from rnnt.config import LSTM_BATCH


# Compiled code would look into the kernel's launch.
@torch.compiler.disable
def lstm(x, w_ih, w_hh, b_ih, b_hh, lengths=None, extra=0):
    """h [T, 8, H] of x [T, 8, I], FP16, from a state of zeros; differentiable. Weights as torch.nn.LSTM names them.

    lengths: int32 [8], time steps of each utterance, `extra` more for each. What comes after the longest of them is
    padding: h is 0 there and takes no time, which is read on the device, so that a graph does it too. None: all T.

    Raises ValueError for another batch size. The width is one of LSTM_WIDTHS where x is on a GPU.
    """
    if x.shape[1] != LSTM_BATCH:
        raise ValueError(f"--lstm persistent: takes batches of {LSTM_BATCH}, not of {x.shape[1]}: take cudnn")
    return _Lstm.apply(x, w_ih, w_hh, b_ih, b_hh, lengths, extra)


def require(device: torch.device, *widths: int) -> None:
    """ValueError where a GPU cannot run layers of these widths at the same time."""
    if device.type == "cuda":
        from rnnt import lstm_kernel

        lstm_kernel.require(device, *widths)


def check(device: torch.device) -> None:
    """Waits for the device. RuntimeError where a kernel gave up, after which all results are NaN."""
    if device.type == "cuda":
        from rnnt import lstm_kernel

        lstm_kernel.check(device)


class _Lstm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w_ih, w_hh, b_ih, b_hh, lengths, extra):
        h, cells, gates = _recurrence(x).forward(F.linear(x, w_ih, b_ih), w_hh, b_hh, lengths, extra)
        ctx.save_for_backward(x, w_ih, w_hh, h, cells, gates, lengths)
        ctx.extra = extra
        return h

    @staticmethod
    def backward(ctx, grad):
        x, w_ih, w_hh, h, cells, gates, lengths = ctx.saved_tensors
        grad_gates, grad_bias = _recurrence(x).backward(grad.contiguous(), w_hh, cells, gates, lengths, ctx.extra)
        grad_x = grad_gates @ w_ih if ctx.needs_input_grad[0] else None
        grad_w_ih = grad_gates.flatten(0, 1).t() @ x.flatten(0, 1)
        # Before the first step h was 0.
        grad_w_hh = grad_gates[1:].flatten(0, 1).t() @ h[:-1].flatten(0, 1)
        return grad_x, grad_w_ih, grad_w_hh, grad_bias, grad_bias, None, None


def _recurrence(x):
    if x.device.type == "cuda":
        from rnnt import lstm_kernel

        return lstm_kernel
    return Steps


class Steps:
    """What rnnt/lstm_kernel.py computes, in plain torch; there grad_bias sums what is not rounded yet.

    After the longest utterance cells and gates mean nothing, there or here.
    """

    @staticmethod
    def forward(inputs, w_hh, b_hh, lengths=None, extra=0):
        """inputs [T, B, 4 H]: W_ih x + b_ih. Gives h and cells [T, B, H], and gates [T, B, H, 4] of the backward.

        lengths, extra: as in `lstm`.
        """
        weights, bias = w_hh.float().t(), b_hh.float()
        hidden = w_hh.shape[1]
        h = inputs.new_zeros(inputs.shape[1], hidden)
        cell = h.float()
        kept = []
        for step in inputs:
            i, f, g, o = (step.float() + bias + h.float() @ weights).chunk(4, 1)
            i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
            cell = f * cell + i * g
            h = (o * cell.tanh()).to(inputs.dtype)
            kept.append((h, cell.to(inputs.dtype), torch.stack((i, f, g, o), -1).to(inputs.dtype)))
        h, cells, gates = (torch.stack(each) for each in zip(*kept, strict=True))
        return _without_padding(h, lengths, extra), cells, gates

    @staticmethod
    def backward(grad, w_hh, cells, gates, lengths=None, extra=0):
        """Gradients [T, B, 4 H] of the gates before their activations and [4 H] of biases, from grad [T, B, H] of h."""
        grad = _without_padding(grad, lengths, extra)
        weights, dtype = w_hh.float(), grad.dtype
        found = [None] * len(grad)
        grad_cell = torch.zeros_like(grad[0], dtype=torch.float32)
        for t in reversed(range(len(grad))):
            i, f, g, o = gates[t].float().unbind(-1)
            grad_h = grad[t].float()
            if t + 1 < len(grad):
                grad_h = grad_h + found[t + 1].float() @ weights
            tanh_cell = cells[t].float().tanh()
            previous = cells[t - 1].float() if t else torch.zeros_like(tanh_cell)
            grad_cell = grad_cell + grad_h * o * (1 - tanh_cell * tanh_cell)
            grad_i, grad_g = grad_cell * g * i * (1 - i), grad_cell * i * (1 - g * g)
            grad_f, grad_o = grad_cell * previous * f * (1 - f), grad_h * tanh_cell * o * (1 - o)
            found[t] = torch.cat((grad_i, grad_f, grad_g, grad_o), 1).to(dtype)
            grad_cell = grad_cell * f
        grad_gates = torch.stack(found)
        return grad_gates, grad_gates.float().sum((0, 1)).to(dtype)


def _without_padding(x, lengths, extra):
    """x [T, B, H], 0 after the longest utterance's end."""
    if lengths is None:
        return x
    is_needed = torch.arange(len(x), device=x.device) < lengths.max() + extra
    return torch.where(is_needed.view(-1, 1, 1), x, torch.zeros_like(x))
