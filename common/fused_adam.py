"""AdamW on FP32 masters in two passes over memory: the kernels behind `optimizers.ScaledMasterAdam` on a GPU.

torch's fused AdamW wants gradients in the masters' dtype: 16-bit gradients are copied to FP32 first, unscaled ones are
written back, and new masters are copied to the parameters in a pass of their own, 46 bytes a parameter in all. Here one
kernel reads the 16-bit gradients for their norm and one does the rest: 30 bytes. All tensors go into one launch, which
finds them through tables of addresses on the device.
"""

import math

import torch
import triton
import triton.language as tl

# A program has a chunk of one tensor, which it goes through block by block: 16 bytes of a gradient per thread.
CHUNK, BLOCK = 8192, 1024
NUM_WARPS = 4
OUTBOX = 16


@triton.jit
def _sum_of_squares(
    partial, grads, tensors, starts, sizes, chunk: tl.constexpr, block: tl.constexpr, dtype: tl.constexpr
):
    """partial [chunks]: sum of squares of each chunk of the gradients, in FP32."""
    tensor = tl.load(tensors + tl.program_id(0))
    grad = tl.multiple_of(tl.load(grads + tensor).to(tl.pointer_type(dtype)), 16)
    start, size = tl.multiple_of(tl.load(starts + tl.program_id(0)), 16), tl.load(sizes + tensor)
    total = tl.zeros((block,), tl.float32)
    # Whole chunks have no mask, which would keep the loads from being of 16 bytes.
    if start + chunk <= size:
        for step in tl.static_range(chunk // block):
            g = tl.load(grad + start + step * block + tl.arange(0, block)).to(tl.float32)
            total += g * g
    else:
        for step in range(chunk // block):
            offset = start + step * block + tl.arange(0, block)
            g = tl.load(grad + offset, mask=offset < size, other=0.0).to(tl.float32)
            total += g * g
    tl.store(partial + tl.program_id(0), tl.sum(total, axis=0))


@triton.jit
def _prepare(scalars, step, lr, scale, found_inf, weight_decay, log_beta1, log_beta2):
    """Count the step where found_inf is 0, and fill scalars: 1 / scale, step size, decay factor, root of bias 2."""
    count = tl.load(step) + tl.where(tl.load(found_inf) > 0, 0.0, 1.0)
    tl.store(step, count)
    # 1 - beta ** count loses half of FP32's digits in the first steps.
    exponent = count.to(tl.float64)
    bias1, bias2 = 1.0 - tl.exp(exponent * log_beta1), 1.0 - tl.exp(exponent * log_beta2)
    tl.store(scalars, 1.0 / tl.load(scale))
    tl.store(scalars + 1, (tl.load(lr) / bias1).to(tl.float32))
    tl.store(scalars + 2, 1.0 - tl.load(lr) * weight_decay)
    tl.store(scalars + 3, tl.sqrt(bias2).to(tl.float32))


@triton.jit
def _update(
    table,
    grads,
    num_tensors,
    tensors,
    starts,
    sizes,
    scalars,
    found_inf,
    beta1: tl.constexpr,
    beta2: tl.constexpr,
    eps: tl.constexpr,
    chunk: tl.constexpr,
    block: tl.constexpr,
    dtype: tl.constexpr,
):
    """One chunk of masters, moments and parameters."""
    if tl.load(found_inf) > 0:
        return
    tensor = tl.load(tensors + tl.program_id(0))
    start, size = tl.multiple_of(tl.load(starts + tl.program_id(0)), 16), tl.load(sizes + tensor)
    grad = tl.multiple_of(tl.load(grads + tensor).to(tl.pointer_type(dtype)), 16)
    param = tl.multiple_of(tl.load(table + tensor).to(tl.pointer_type(dtype)), 16)
    master = tl.multiple_of(tl.load(table + num_tensors + tensor).to(tl.pointer_type(tl.float32)), 16)
    exp_avg = tl.multiple_of(tl.load(table + 2 * num_tensors + tensor).to(tl.pointer_type(tl.float32)), 16)
    exp_avg_sq = tl.multiple_of(tl.load(table + 3 * num_tensors + tensor).to(tl.pointer_type(tl.float32)), 16)
    if start + chunk <= size:
        for step in range(chunk // block):
            offset = start + step * block + tl.arange(0, block)
            g, p = tl.load(grad + offset), tl.load(master + offset)
            m, v = tl.load(exp_avg + offset), tl.load(exp_avg_sq + offset)
            p, m, v = _adamw(g, p, m, v, scalars, beta1, beta2, eps)
            tl.store(master + offset, p)
            tl.store(exp_avg + offset, m)
            tl.store(exp_avg_sq + offset, v)
            tl.store(param + offset, p.to(dtype))
    else:
        for step in range(chunk // block):
            offset = start + step * block + tl.arange(0, block)
            inside = offset < size
            g, p = tl.load(grad + offset, mask=inside, other=0.0), tl.load(master + offset, mask=inside, other=0.0)
            m, v = (
                tl.load(exp_avg + offset, mask=inside, other=0.0),
                tl.load(exp_avg_sq + offset, mask=inside, other=0.0),
            )
            p, m, v = _adamw(g, p, m, v, scalars, beta1, beta2, eps)
            tl.store(master + offset, p, mask=inside)
            tl.store(exp_avg + offset, m, mask=inside)
            tl.store(exp_avg_sq + offset, v, mask=inside)
            tl.store(param + offset, p.to(dtype), mask=inside)


@triton.jit
def _adamw(g, p, m, v, scalars, beta1: tl.constexpr, beta2: tl.constexpr, eps: tl.constexpr):
    """(p, m, v) after a step with gradient g of the scaled loss."""
    g = g.to(tl.float32) * tl.load(scalars)
    m += (1.0 - beta1) * (g - m)
    v = beta2 * v + (1.0 - beta2) * g * g
    p = p * tl.load(scalars + 2) - tl.load(scalars + 1) * m / (tl.sqrt(v) / tl.load(scalars + 3) + eps)
    return p, m, v


class FusedUpdate:
    """Norm and AdamW update of many tensors, one launch each.

    params: dense 16-bit parameters. masters, exp_avg, exp_avg_sq: FP32 tensors of the same shapes and strides. Their
    addresses must not change; gradients may come at new addresses each step.
    """

    def __init__(self, params, masters, exp_avg, exp_avg_sq, betas, eps, weight_decay):
        self.params, self.betas, self.eps, self.weight_decay = params, betas, eps, weight_decay
        device = params[0].device
        self.dtype = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}[params[0].dtype]
        states = (params, masters, exp_avg, exp_avg_sq)
        self.table = torch.tensor([[t.data_ptr() for t in tensors] for tensors in states], device=device)
        chunks = [(i, start) for i, param in enumerate(params) for start in range(0, param.numel(), CHUNK)]
        self.tensors, self.starts = (torch.tensor(column, device=device) for column in zip(*chunks, strict=True))
        self.sizes = torch.tensor([param.numel() for param in params], device=device)
        self.partial = torch.zeros(len(chunks), device=device)
        self.scalars = torch.zeros(4, device=device)
        # The strides that a gradient must have too: elements are paired by their place in memory.
        self.layouts = [(param.shape, param.stride()) for param in params]
        # Where the gradients are: addresses, and the table on the device that holds them.
        self._pointed = ([], torch.zeros(len(params), dtype=torch.int64, device=device))
        self._eager = self._pointed
        on_cuda = device.type == "cuda"
        # Addresses on their way to the device; a captured graph keeps the one that its replays copy from.
        self._outbox = [torch.zeros(len(params), dtype=torch.int64, pin_memory=on_cuda) for _ in range(OUTBOX)]
        self._sent = [torch.cuda.Event() if on_cuda else None for _ in range(OUTBOX)]
        self._kept = []

    def norm(self, grads, out: torch.Tensor) -> None:
        """Norm of all gradients into out, a 0-d FP32 tensor."""
        self._point_to(grads)
        _sum_of_squares[(len(self.partial),)](
            self.partial,
            self._pointed[1],
            self.tensors,
            self.starts,
            self.sizes,
            CHUNK,
            BLOCK,
            self.dtype,
            num_warps=NUM_WARPS,
        )
        torch.sqrt(self.partial.sum(), out=out)

    def step(self, grads, step, lr, scale, found_inf) -> None:
        """Count the step and apply gradients of which norm() was taken; nothing changes where found_inf is 1.

        step (counted on the device), lr, scale (the gradients are divided by it), found_inf: 0-d FP32 tensors.
        """
        if [grad.data_ptr() for grad in grads] != self._pointed[0]:
            self._point_to(grads)
        logs = (math.log(beta) for beta in self.betas)
        _prepare[(1,)](self.scalars, step, lr, scale, found_inf, self.weight_decay, *logs, num_warps=1)
        _update[(len(self.partial),)](
            self.table,
            self._pointed[1],
            len(self.params),
            self.tensors,
            self.starts,
            self.sizes,
            self.scalars,
            found_inf,
            *self.betas,
            self.eps,
            CHUNK,
            BLOCK,
            self.dtype,
            num_warps=NUM_WARPS,
        )

    def _point_to(self, grads):
        """Make self._pointed the gradients' addresses.

        A captured graph has a table of its own, which its replays fill: what eager steps have in theirs stays.
        """
        addresses = [grad.data_ptr() for grad in grads]
        if self.sizes.is_cuda and torch.cuda.is_current_stream_capturing():
            self._require_layout(grads)
            source, table = self._outbox.pop(), torch.empty_like(self._eager[1])
            self._sent.pop()
            self._kept.append((source, table))
            source.copy_(torch.tensor(addresses))
            table.copy_(source, non_blocking=True)
            self._pointed = (addresses, table)
            return
        if addresses != self._eager[0]:
            self._require_layout(grads)
            source, sent = self._outbox.pop(0), self._sent.pop(0)
            if sent is not None:
                # Sent OUTBOX uploads ago: long done.
                sent.synchronize()
            source.copy_(torch.tensor(addresses))
            self._eager[1].copy_(source, non_blocking=True)
            if sent is not None:
                sent.record()
            self._outbox.append(source)
            self._sent.append(sent)
            self._eager = (addresses, self._eager[1])
        self._pointed = self._eager

    def _require_layout(self, grads):
        for grad, layout in zip(grads, self.layouts, strict=True):
            assert (grad.shape, grad.stride()) == layout, f"gradient {grad.shape} {grad.stride()}, parameter {layout}"
