"""Triton kernels of the UNet's pointwise parts, for channels_last: group norm with SiLU, and GEGLU.

torch's group norm on CUDA (2.11) computes on contiguous [N, C, H, W]: channels_last tensors are copied there and back
at each of the 61 norms. Here memory stays [N, H, W, C]. Sums are made in a fixed order: runs repeat bit for bit.
torch.compile takes the kernels as they are: it copies their source into a module that imports tl and triton alone, so
annotations say tl.constexpr. Eager launches them through common/triton_launch, at the host cost of an operator. Each
function is plain torch where its input is not on a GPU, and where in_triton is false.
"""

import functools
import math

import torch
import torch.nn.functional as F

from graph_worth import Launch

try:
    import triton
    import triton.language as tl
except ModuleNotFoundError:  # a machine without a GPU
    triton = None

ROWS, COLUMNS = 64, 64
GEGLU_ROWS, GEGLU_COLUMNS, GEGLU_STEPS = 8, 256, 8


def group_norm(x, groups: int, weight, bias, eps: float = 1e-5, silu: bool = False, in_triton: bool = True):
    """group_norm(x [N, C, H, W]) with weight and bias [C], then SiLU if asked; Triton's result is channels_last."""
    if x.is_cuda and in_triton:
        return _GroupNorm.apply(x, groups, weight, bias, eps, silu)
    y = F.group_norm(x, groups, weight, bias, eps)
    return F.silu(y) if silu else y


def geglu(x, bias, in_triton: bool = True):
    """value * gelu(gate) [..., c] of x + bias = (value, gate), x [..., 2 c], bias [2 c]."""
    if x.is_cuda and in_triton:
        return _Geglu.apply(x, bias)
    value, gate = (x + bias).chunk(2, dim=-1)
    return value * F.gelu(gate)


def _plan(kind, *arguments):
    """kind(*arguments), made once for equal arguments; torch.compile traces through a new one."""
    return kind(*arguments) if torch.compiler.is_compiling() else _kept_plan(kind, *arguments)


@functools.cache
def _kept_plan(kind, *arguments):
    return kind(*arguments)


# ------------------------------------------------------------------------------------------------
# Group norm


class _Norm:
    """The launches of a group norm of [N, C, H, W] and its gradients, and the sizes of what they need.

    dtypes: of x, weight and bias.
    """

    def __init__(self, shape, groups, eps, silu, *dtypes):
        n, c, h, w = shape
        area, chunks = h * w, triton.cdiv(h * w, ROWS)
        self.num_partial, self.num_stats = 2 * n * chunks * c, 2 * n * groups
        self.tiles, self.groups = (n * chunks, triton.cdiv(c, COLUMNS), 1), (n * groups, 1, 1)
        self.sums = (n * groups + triton.cdiv(c, COLUMNS), 1, 1)
        padded = (triton.next_power_of_2(chunks), triton.next_power_of_2(c // groups))
        grouped = (area, c, n, groups, chunks)
        tiled = (*grouped, silu, ROWS, COLUMNS)
        self.moments = Launch(_moments, area, c, n, chunks, ROWS, COLUMNS)
        self.statistics = Launch(_statistics, *grouped, eps, ROWS, *padded)
        self.normalise = Launch(_normalise, *tiled)
        self.grad_moments = Launch(_grad_moments, *tiled)
        self.grad_sums = Launch(_grad_sums, *grouped, ROWS, COLUMNS, *padded, triton.cdiv(n * chunks, ROWS))
        self.grad_input = Launch(_grad_input, *tiled)


class _GroupNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, groups, weight, bias, eps, silu):
        x = x.contiguous(memory_format=torch.channels_last)
        norm = _plan(_Norm, x.shape, groups, eps, silu, x.dtype, weight.dtype, bias.dtype)
        partial = torch.empty(norm.num_partial, dtype=torch.float32, device=x.device)
        stats = torch.empty(norm.num_stats, dtype=torch.float32, device=x.device)
        y = torch.empty_like(x)
        norm.moments(norm.tiles, (x, partial))
        norm.statistics(norm.groups, (partial, stats))
        norm.normalise(norm.tiles, (x, y, stats, weight, bias))
        ctx.save_for_backward(x, stats, weight, bias)
        ctx.norm = norm
        return y

    @staticmethod
    def backward(ctx, grad):
        x, stats, weight, bias = ctx.saved_tensors
        norm = ctx.norm
        assert grad.dtype == x.dtype
        grad = grad.contiguous(memory_format=torch.channels_last)
        # The kernels put their sums behind the partial ones.
        partial = torch.empty(norm.num_partial + norm.num_stats, dtype=torch.float32, device=x.device)
        grad_x, grad_weight, grad_bias = torch.empty_like(x), torch.empty_like(weight), torch.empty_like(bias)
        norm.grad_moments(norm.tiles, (grad, x, partial, stats, weight, bias))
        norm.grad_sums(norm.sums, (partial, weight, grad_weight, grad_bias))
        norm.grad_input(norm.tiles, (grad, x, grad_x, stats, partial, weight, bias))
        return grad_x, None, grad_weight, grad_bias, None, None


if triton:

    @triton.jit
    def _tile(area, c, chunks, rows: tl.constexpr, columns: tl.constexpr):
        """(sample, chunk, rows inside, offsets, channels) of this program's tile [rows, columns] of [N, area, C]."""
        sample, chunk = tl.program_id(0) // chunks, tl.program_id(0) % chunks
        row = chunk * rows + tl.arange(0, rows)
        channel = tl.program_id(1) * columns + tl.arange(0, columns)
        offset = (sample.to(tl.int64) * area + row)[:, None] * c + channel[None, :]
        return sample, chunk, (row < area)[:, None] & (channel < c)[None, :], offset, channel

    @triton.jit
    def _moments(x, partial, area, c, n, chunks, rows: tl.constexpr, columns: tl.constexpr):
        """partial [2, N, chunks, C]: mean, and sum of squared distances from it, over each chunk's rows."""
        sample, chunk, inside, offset, channel = _tile(area, c, chunks, rows, columns)
        values = tl.load(x + offset, mask=inside, other=0.0).to(tl.float32)
        count = tl.minimum(rows, area - chunk * rows)
        mean = tl.sum(values, axis=0) / count
        distance = tl.where(inside, values - mean[None, :], 0.0)
        place = (sample * chunks + chunk) * c + channel
        tl.store(partial + place, mean, mask=channel < c)
        tl.store(partial + n * chunks * c + place, tl.sum(distance * distance, axis=0), mask=channel < c)

    @triton.jit
    def _statistics(
        partial, stats, area, c, n, groups, chunks, eps,
        rows: tl.constexpr, p_chunks: tl.constexpr, p_size: tl.constexpr,
    ):  # fmt: skip
        """stats [2, N, groups]: mean and 1 / standard deviation of each group, from the chunks' moments."""
        sample, group, size = tl.program_id(0) // groups, tl.program_id(0) % groups, c // groups
        chunk, member = tl.arange(0, p_chunks), tl.arange(0, p_size)
        inside = (chunk < chunks)[:, None] & (member < size)[None, :]
        place = (sample * chunks + chunk)[:, None] * c + group * size + member[None, :]
        means = tl.load(partial + place, mask=inside, other=0.0)
        squares = tl.load(partial + n * chunks * c + place, mask=inside, other=0.0)
        count = tl.minimum(rows, area - chunk * rows).to(tl.float32)[:, None]
        mean = tl.sum(tl.sum(tl.where(inside, means * count, 0.0), axis=1), axis=0) / (area * size)
        between = tl.where(inside, (means - mean) * (means - mean) * count, 0.0)
        variance = tl.sum(tl.sum(squares + between, axis=1), axis=0) / (area * size)
        tl.store(stats + tl.program_id(0), mean)
        tl.store(stats + n * groups + tl.program_id(0), 1.0 / tl.sqrt(variance + eps))

    @triton.jit
    def _hat(x, stats, weight, bias, sample, inside, offset, channel, c, n, groups):
        """(normalised x, weight, bias, 1 / standard deviation) of a tile."""
        group = sample * groups + channel // (c // groups)
        real = channel < c
        mean = tl.load(stats + group, mask=real, other=0.0)[None, :]
        rstd = tl.load(stats + n * groups + group, mask=real, other=0.0)[None, :]
        hat = (tl.load(x + offset, mask=inside, other=0.0).to(tl.float32) - mean) * rstd
        w = tl.load(weight + channel, mask=real, other=0.0).to(tl.float32)[None, :]
        b = tl.load(bias + channel, mask=real, other=0.0).to(tl.float32)[None, :]
        return hat, w, b, rstd

    @triton.jit
    def _normalise(
        x, y, stats, weight, bias, area, c, n, groups, chunks,
        silu: tl.constexpr, rows: tl.constexpr, cols: tl.constexpr,
    ):  # fmt: skip
        sample, _, inside, offset, channel = _tile(area, c, chunks, rows, cols)
        hat, w, b, _ = _hat(x, stats, weight, bias, sample, inside, offset, channel, c, n, groups)
        z = hat * w + b
        if silu:
            z = z * tl.sigmoid(z)
        tl.store(y + offset, z, mask=inside)

    @triton.jit
    def _grad_z(grad, hat, w, b, inside, offset, silu: tl.constexpr):
        """The gradient before SiLU."""
        dz = tl.load(grad + offset, mask=inside, other=0.0).to(tl.float32)
        if silu:
            z = hat * w + b
            s = tl.sigmoid(z)
            dz = dz * s * (1.0 + z * (1.0 - s))
        return dz

    @triton.jit
    def _grad_moments(
        grad, x, partial, stats, weight, bias, area, c, n, groups, chunks,
        silu: tl.constexpr, rows: tl.constexpr, cols: tl.constexpr,
    ):  # fmt: skip
        """partial [2, N, chunks, C]: sums over each chunk's rows of dz, and of dz times normalised x."""
        sample, chunk, inside, offset, channel = _tile(area, c, chunks, rows, cols)
        hat, w, b, _ = _hat(x, stats, weight, bias, sample, inside, offset, channel, c, n, groups)
        dz = _grad_z(grad, hat, w, b, inside, offset, silu)
        place = (sample * chunks + chunk) * c + channel
        tl.store(partial + place, tl.sum(dz, axis=0), mask=channel < c)
        tl.store(partial + n * chunks * c + place, tl.sum(dz * hat, axis=0), mask=channel < c)

    @triton.jit
    def _grad_sums(
        partial, weight, grad_weight, grad_bias, area, c, n, groups, chunks,
        rows: tl.constexpr, cols: tl.constexpr, p_chunks: tl.constexpr, p_size: tl.constexpr, num_loops: tl.constexpr,
    ):  # fmt: skip
        """Behind partial, sums [2, N, groups]: means over a group of w dz and w dz hat; then, in the last programs,
        weight and bias."""
        second = partial + n * chunks * c
        sums = second + n * chunks * c
        if tl.program_id(0) < n * groups:
            sample, group, size = tl.program_id(0) // groups, tl.program_id(0) % groups, c // groups
            chunk, member = tl.arange(0, p_chunks), tl.arange(0, p_size)
            inside = (chunk < chunks)[:, None] & (member < size)[None, :]
            place = (sample * chunks + chunk)[:, None] * c + group * size + member[None, :]
            w = tl.load(weight + group * size + member, mask=member < size, other=0.0).to(tl.float32)
            dz_sum = tl.sum(tl.load(partial + place, mask=inside, other=0.0), axis=0)
            dz_hat_sum = tl.sum(tl.load(second + place, mask=inside, other=0.0), axis=0)
            tl.store(sums + tl.program_id(0), tl.sum(dz_sum * w, axis=0) / (area * size))
            tl.store(sums + n * groups + tl.program_id(0), tl.sum(dz_hat_sum * w, axis=0) / (area * size))
        else:
            channel = (tl.program_id(0) - n * groups) * cols + tl.arange(0, cols)
            of_bias, of_weight = tl.zeros((cols,), tl.float32), tl.zeros((cols,), tl.float32)
            for step in range(num_loops):
                row = step * rows + tl.arange(0, rows)
                inside = (row < n * chunks)[:, None] & (channel < c)[None, :]
                place = row[:, None] * c + channel[None, :]
                of_bias += tl.sum(tl.load(partial + place, mask=inside, other=0.0), axis=0)
                of_weight += tl.sum(tl.load(second + place, mask=inside, other=0.0), axis=0)
            tl.store(grad_bias + channel, of_bias, mask=channel < c)
            tl.store(grad_weight + channel, of_weight, mask=channel < c)

    @triton.jit
    def _grad_input(
        grad, x, grad_x, stats, partial, weight, bias, area, c, n, groups, chunks,
        silu: tl.constexpr, rows: tl.constexpr, cols: tl.constexpr,
    ):  # fmt: skip
        sample, _, inside, offset, channel = _tile(area, c, chunks, rows, cols)
        hat, w, b, rstd = _hat(x, stats, weight, bias, sample, inside, offset, channel, c, n, groups)
        dz = _grad_z(grad, hat, w, b, inside, offset, silu)
        group = sample * groups + channel // (c // groups)
        sums = partial + 2 * n * chunks * c
        first = tl.load(sums + group, mask=channel < c, other=0.0)[None, :]
        second = tl.load(sums + n * groups + group, mask=channel < c, other=0.0)[None, :]
        tl.store(grad_x + offset, rstd * (w * dz - first - hat * second), mask=inside)


# ------------------------------------------------------------------------------------------------
# GEGLU


class _Product:
    """The launches of GEGLU of [..., 2 c] and its gradients, and the sizes of what they need.

    dtypes: of x and bias.
    """

    def __init__(self, shape, *dtypes):
        c = shape[-1] // 2
        self.shape = (*shape[:-1], c)
        rows = math.prod(shape[:-1])
        blocks = triton.cdiv(rows, GEGLU_ROWS * GEGLU_STEPS)
        self.partial = (blocks, 2 * c)
        columns = triton.cdiv(c, GEGLU_COLUMNS)
        self.tiles, self.blocks = (triton.cdiv(rows, GEGLU_ROWS), columns, 1), (blocks, columns, 1)
        self.columns = (triton.cdiv(2 * c, COLUMNS), 1, 1)
        self.forward = Launch(_geglu, rows, c, GEGLU_ROWS, GEGLU_COLUMNS)
        self.backward = Launch(_geglu_backward, rows, c, GEGLU_ROWS, GEGLU_COLUMNS, GEGLU_STEPS)
        self.add_rows = Launch(_add_rows, blocks, 2 * c, ROWS, COLUMNS, triton.cdiv(blocks, ROWS))


class _Geglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, bias):
        x = x.contiguous()
        product = _plan(_Product, x.shape, x.dtype, bias.dtype)
        y = torch.empty(product.shape, dtype=x.dtype, device=x.device)
        product.forward(product.tiles, (x, bias, y))
        ctx.save_for_backward(x, bias)
        ctx.product = product
        return y

    @staticmethod
    def backward(ctx, grad):
        x, bias = ctx.saved_tensors
        product = ctx.product
        assert grad.dtype == x.dtype
        grad, grad_x, grad_bias = grad.contiguous(), torch.empty_like(x), torch.empty_like(bias)
        partial = torch.empty(product.partial, dtype=torch.float32, device=x.device)
        product.backward(product.blocks, (grad, x, bias, grad_x, partial))
        product.add_rows(product.columns, (partial, grad_bias))
        return grad_x, grad_bias


if triton:

    @triton.jit
    def _halves(x, bias, row, num_rows, c, columns: tl.constexpr):
        """(offset in the result, offset of the value in x, inside, value, gate) of these rows' tile."""
        row = row[:, None].to(tl.int64)
        column = (tl.program_id(1) * columns + tl.arange(0, columns))[None, :]
        inside = (row < num_rows) & (column < c)
        place = row * 2 * c + column
        value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
        gate = tl.load(x + place + c, mask=inside, other=0.0).to(tl.float32)
        value += tl.load(bias + column, mask=column < c, other=0.0).to(tl.float32)
        gate += tl.load(bias + c + column, mask=column < c, other=0.0).to(tl.float32)
        return row * c + column, place, inside, value, gate

    @triton.jit
    def _geglu(x, bias, y, num_rows, c, rows: tl.constexpr, columns: tl.constexpr):
        row = tl.program_id(0) * rows + tl.arange(0, rows)
        offset, _, inside, value, gate = _halves(x, bias, row, num_rows, c, columns)
        tl.store(y + offset, value * gate * 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476)), mask=inside)

    @triton.jit
    def _geglu_backward(
        grad, x, bias, grad_x, partial, num_rows, c, rows: tl.constexpr, columns: tl.constexpr, steps: tl.constexpr
    ):
        """grad_x, and partial [blocks, 2 c]: its sums over the rows of each block of rows * steps."""
        of_value, of_gate = tl.zeros((columns,), tl.float32), tl.zeros((columns,), tl.float32)
        for step in range(steps):
            row = (tl.program_id(0) * steps + step) * rows + tl.arange(0, rows)
            offset, place, inside, value, gate = _halves(x, bias, row, num_rows, c, columns)
            dy = tl.load(grad + offset, mask=inside, other=0.0).to(tl.float32)
            cdf = 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476))
            density = 0.3989422804014327 * tl.exp(-0.5 * gate * gate)
            grad_value, grad_gate = dy * gate * cdf, dy * value * (cdf + gate * density)
            tl.store(grad_x + place, grad_value, mask=inside)
            tl.store(grad_x + place + c, grad_gate, mask=inside)
            of_value += tl.sum(grad_value, axis=0)
            of_gate += tl.sum(grad_gate, axis=0)
        column = tl.program_id(1) * columns + tl.arange(0, columns)
        place = tl.program_id(0) * 2 * c + column
        tl.store(partial + place, of_value, mask=column < c)
        tl.store(partial + place + c, of_gate, mask=column < c)

    @triton.jit
    def _add_rows(partial, total, num_rows, c, rows: tl.constexpr, columns: tl.constexpr, steps: tl.constexpr):
        """total [c]: sum of partial's rows, always in the same order."""
        column = tl.program_id(0) * columns + tl.arange(0, columns)
        result = tl.zeros((columns,), tl.float32)
        for step in range(steps):
            row = step * rows + tl.arange(0, rows)
            inside = (row < num_rows)[:, None] & (column < c)[None, :]
            result += tl.sum(tl.load(partial + row[:, None] * c + column[None, :], mask=inside, other=0.0), axis=0)
        tl.store(total + column, result, mask=column < c)
