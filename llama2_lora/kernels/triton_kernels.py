"""Triton kernels of handwritten layers; triton_operators.py launches them.

A program computes a row where a row has a reduction, and passes over memory once. Arguments are pointers, then numbers,
then constants; a pointer that a constant switches off is any tensor. A kernel that quantises records the amax by an
atomic maximum, whose result depends on no order.

Instructions count here as much as bytes: compiled for sm_90, swiglu had 54 for each pair of gate and up; without
clamps, subnormal numbers and half of the threads it has 30.
"""

import os

import triton
import triton.language as tl

# Triton's interpreter has no inline assembly.
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def _is_kept(position, step, key, THRESHOLD: tl.constexpr):
    """Dropout: murmur3's finaliser over position and key; THRESHOLD is the probability times 2^24."""
    h = position.to(tl.uint32) * 0x9E3779B1
    h = h ^ (step ^ key).to(tl.uint32)
    h = h ^ (h >> 16)
    h = h * 0x85EBCA6B
    h = h ^ (h >> 13)
    h = h * 0xC2B2AE35
    h = h ^ (h >> 16)
    return h >= tl.full([], THRESHOLD * 256, tl.uint32)


@triton.jit
def _record(amax, value):
    """amax = max(amax, value); the plain read, which may be late, saves most of the atomics."""
    tl.atomic_max(amax, value, mask=value > tl.load(amax))


@triton.jit
def _rounded(value, scale, pointer):
    """A GPU's conversion to FP8 takes what is too large to the format's largest (cvt.satfinite)."""
    return (value * scale).to(pointer.dtype.element_ty)


@triton.jit
def _sigmoid(x):
    """1 / (1 + exp(-x)), without the cases of subnormal numbers that exp and division spend most instructions on.

    0 and 1 at the ends, as exp gives 0 and infinity there. 0fBFB8AA3B is -log2(e), 0f3F800000 is 1.
    """
    if INTERPRETED:
        return 1.0 / (1.0 + tl.exp(-x))
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .f32 t;
            mul.ftz.f32 t, $1, 0fBFB8AA3B;
            ex2.approx.ftz.f32 t, t;
            add.ftz.f32 t, t, 0f3F800000;
            rcp.approx.ftz.f32 $0, t;
            }""",
            "=f,f",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )


@triton.jit(do_not_specialize=["key"])
def norm(
    x, add, gain, total, operand, dropped, plain, scale, amax, step, key, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    EPS: tl.constexpr, ADD: tl.constexpr, OPERAND: tl.constexpr, DROPPED: tl.constexpr, PLAIN: tl.constexpr,
    RECORD: tl.constexpr, THRESHOLD: tl.constexpr, KEEP_SCALE: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    offset = tl.program_id(0) * WIDTH + column
    value = tl.load(x + offset, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        value = (value + tl.load(add + offset, mask=inside, other=0.0).to(tl.float32)).to(total.dtype.element_ty)
        tl.store(total + offset, value, mask=inside)
        value = value.to(tl.float32)
    inverse_rms = tl.rsqrt(tl.sum(value * value, 0) / WIDTH + EPS)
    normed = value * inverse_rms * tl.load(gain + column, mask=inside, other=0.0).to(tl.float32)
    normed = normed.to(x.dtype.element_ty)
    if PLAIN:
        tl.store(plain + offset, normed, mask=inside)
    normed = normed.to(tl.float32)
    if OPERAND:
        if RECORD:
            _record(amax, tl.max(tl.abs(normed), 0))
        tl.store(operand + offset, _rounded(normed, tl.load(scale), operand), mask=inside)
    if DROPPED:
        kept = _is_kept(offset, tl.load(step), key, THRESHOLD)
        normed = tl.where(kept, normed * KEEP_SCALE, 0.0)
        tl.store(dropped + offset, normed.to(dropped.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["key"])
def norm_backward(
    grad, through, x, gain, residual, out, operand, scale, amax, step, key, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    EPS: tl.constexpr, THROUGH: tl.constexpr, RESIDUAL: tl.constexpr, OPERAND: tl.constexpr, RECORD: tl.constexpr,
    THRESHOLD: tl.constexpr, KEEP_SCALE: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    offset = tl.program_id(0) * WIDTH + column
    value = tl.load(x + offset, mask=inside, other=0.0).to(tl.float32)
    inverse_rms = tl.rsqrt(tl.sum(value * value, 0) / WIDTH + EPS)
    normed = value * inverse_rms
    d = tl.load(grad + offset, mask=inside, other=0.0).to(tl.float32)
    if THROUGH:
        kept = _is_kept(offset, tl.load(step), key, THRESHOLD)
        d += tl.where(kept, tl.load(through + offset, mask=inside, other=0.0).to(tl.float32) * KEEP_SCALE, 0.0)
    d = d * tl.load(gain + column, mask=inside, other=0.0).to(tl.float32)
    d = (d - normed * (tl.sum(d * normed, 0) / WIDTH)) * inverse_rms
    if RESIDUAL:
        d += tl.load(residual + offset, mask=inside, other=0.0).to(tl.float32)
    d = d.to(out.dtype.element_ty)
    tl.store(out + offset, d, mask=inside)
    if OPERAND:
        d = d.to(tl.float32)
        if RECORD:
            _record(amax, tl.max(tl.abs(d), 0))
        tl.store(operand + offset, _rounded(d, tl.load(scale), operand), mask=inside)


@triton.jit(do_not_specialize=["key"])
def quantize(
    x, operand, dropped, scale, amax, step, key, WIDTH: tl.constexpr, BLOCK: tl.constexpr, OPERAND: tl.constexpr,
    DROPPED: tl.constexpr, RECORD: tl.constexpr, THRESHOLD: tl.constexpr,
    KEEP_SCALE: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    offset = tl.program_id(0) * WIDTH + column
    value = tl.load(x + offset, mask=inside, other=0.0).to(tl.float32)
    if OPERAND:
        if RECORD:
            _record(amax, tl.max(tl.abs(value), 0))
        tl.store(operand + offset, _rounded(value, tl.load(scale), operand), mask=inside)
    if DROPPED:
        kept = _is_kept(offset, tl.load(step), key, THRESHOLD)
        value = tl.where(kept, value * KEEP_SCALE, 0.0)
        tl.store(dropped + offset, value.to(dropped.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["key"])
def add_dropout_gradient(
    grad, through, step, key, COUNT: tl.constexpr, BLOCK: tl.constexpr, THRESHOLD: tl.constexpr,
    KEEP_SCALE: tl.constexpr,
):  # fmt: skip
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    # A constant, so that loads of 16 bytes need no mask.
    inside = offset < COUNT
    d = tl.load(grad + offset, mask=inside, other=0.0).to(tl.float32)
    kept = _is_kept(offset, tl.load(step), key, THRESHOLD)
    d += tl.where(kept, tl.load(through + offset, mask=inside, other=0.0).to(tl.float32) * KEEP_SCALE, 0.0)
    tl.store(grad + offset, d.to(grad.dtype.element_ty), mask=inside)


@triton.jit
def rope(qkv, cos, sin, positions, WIDTH: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr):
    """HEADS heads of one row, turned in place."""
    row = tl.program_id(0)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    pair = tl.arange(0, HALF)[None, :]
    pointer = qkv + row * WIDTH + head * (2 * HALF) + pair
    low, high = tl.load(pointer).to(tl.float32), tl.load(pointer + HALF).to(tl.float32)
    angle = tl.load(positions + row).to(tl.int32) * HALF + pair
    c, s = tl.load(cos + angle), tl.load(sin + angle)
    tl.store(pointer, (low * c - high * s).to(qkv.dtype.element_ty))
    tl.store(pointer + HALF, (high * c + low * s).to(qkv.dtype.element_ty))


@triton.jit
def rope_backward(
    grad_q, grad_k, grad_v, cos, sin, positions, out, operand, scale, amax, Q_HEAD: tl.constexpr, Q_ROW: tl.constexpr,
    K_HEAD: tl.constexpr, K_ROW: tl.constexpr, V_HEAD: tl.constexpr, V_ROW: tl.constexpr, WIDTH: tl.constexpr,
    NUM_Q: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, RECORD: tl.constexpr,
):  # fmt: skip
    """HEADS heads of one row: NUM_Q blocks of q's, then as many as k has, then v's, which is not turned.

    Q_HEAD, Q_ROW and so on: strides. Constants, so that the compiler knows how loads are aligned.
    """
    row, block = tl.program_id(0), tl.program_id(1)
    num_k = (tl.num_programs(1) - NUM_Q) // 2
    if block < NUM_Q:
        source = grad_q + row * Q_ROW + block * HEADS * Q_HEAD
        stride = Q_HEAD
    elif block < NUM_Q + num_k:
        source = grad_k + row * K_ROW + (block - NUM_Q) * HEADS * K_HEAD
        stride = K_HEAD
    else:
        source = grad_v + row * V_ROW + (block - NUM_Q - num_k) * HEADS * V_HEAD
        stride = V_HEAD
    head, pair = tl.arange(0, HEADS)[:, None], tl.arange(0, HALF)[None, :]
    source = source + head * stride + pair
    low, high = tl.load(source).to(tl.float32), tl.load(source + HALF).to(tl.float32)
    angle = tl.load(positions + row).to(tl.int32) * HALF + pair
    turns = block < NUM_Q + num_k
    c = tl.where(turns, tl.load(cos + angle), 1.0)
    s = tl.where(turns, tl.load(sin + angle), 0.0)
    first = (low * c + high * s).to(out.dtype.element_ty)
    second = (high * c - low * s).to(out.dtype.element_ty)
    offset = row * WIDTH + (block * HEADS + head) * (2 * HALF) + pair
    tl.store(out + offset, first)
    tl.store(out + offset + HALF, second)
    first, second = first.to(tl.float32), second.to(tl.float32)
    if RECORD:
        _record(amax, tl.max(tl.max(tl.maximum(tl.abs(first), tl.abs(second)), 1), 0))
    factor = tl.load(scale)
    tl.store(operand + offset, _rounded(first, factor, operand))
    tl.store(operand + offset + HALF, _rounded(second, factor, operand))


@triton.jit
def swiglu(
    fc1, operand, stored, scale, amax, stored_scale, stored_amax, FFN: tl.constexpr, BLOCK: tl.constexpr,
    RECORD: tl.constexpr, MEASURE: tl.constexpr, STORE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < FFN
    offset = row * 2 * FFN + column
    gate = tl.load(fc1 + offset, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(fc1 + offset + FFN, mask=inside, other=0.0).to(tl.float32)
    value = (gate * _sigmoid(gate) * up).to(fc1.dtype.element_ty).to(tl.float32)
    if RECORD:
        _record(amax, tl.max(tl.abs(value), 0))
    tl.store(operand + row * FFN + column, _rounded(value, tl.load(scale), operand), mask=inside)
    if MEASURE:
        _record(stored_amax, tl.max(tl.maximum(tl.abs(gate), tl.abs(up)), 0))
    if STORE:
        factor = tl.load(stored_scale)
        tl.store(stored + offset, _rounded(gate, factor, stored), mask=inside)
        tl.store(stored + offset + FFN, _rounded(up, factor, stored), mask=inside)


@triton.jit
def swiglu_backward(
    fc1, grad, operand, scale, amax, stored_scale, stored_inverse, FFN: tl.constexpr, BLOCK: tl.constexpr,
    RECORD: tl.constexpr, ROUND: tl.constexpr, DEQUANTIZE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < FFN
    offset = row * 2 * FFN + column
    gate = tl.load(fc1 + offset, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(fc1 + offset + FFN, mask=inside, other=0.0).to(tl.float32)
    if ROUND:
        factor = tl.load(stored_scale)
        gate = (gate * factor).to(tl.float8e4nv).to(tl.float32)
        up = (up * factor).to(tl.float8e4nv).to(tl.float32)
    if DEQUANTIZE:
        inverse = tl.load(stored_inverse)
        gate = gate * inverse
        up = up * inverse
    d = tl.load(grad + row * FFN + column, mask=inside, other=0.0).to(tl.float32)
    sigmoid = _sigmoid(gate)
    d_gate = d * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    d_up = d * gate * sigmoid
    if RECORD:
        _record(amax, tl.max(tl.maximum(tl.abs(d_gate), tl.abs(d_up)), 0))
    factor = tl.load(scale)
    tl.store(operand + offset, _rounded(d_gate, factor, operand), mask=inside)
    tl.store(operand + offset + FFN, _rounded(d_up, factor, operand), mask=inside)


@triton.jit
def cross_entropy(logits, targets, weights, losses, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """One row, in two passes: the largest and the sum of exponentials, then the gradient in place."""
    row = tl.program_id(0)
    logits += row * VOCAB
    target, weight = tl.load(targets + row), tl.load(weights + row)
    largest, total, wanted = -float("inf"), 0.0, 0.0
    for start in range(0, VOCAB, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = tl.load(logits + column, mask=column < VOCAB, other=-float("inf")).to(tl.float32)
        above = tl.maximum(largest, tl.max(value, 0))
        total = total * tl.exp(largest - above) + tl.sum(tl.exp(value - above), 0)
        largest = above
        # Not read by its place: another warp might have overwritten it by then.
        wanted += tl.sum(tl.where(column == target, value, 0.0), 0)
    log_sum = largest + tl.log(total)
    tl.store(losses + row, (log_sum - wanted) * weight)
    for start in range(0, VOCAB, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < VOCAB
        value = tl.load(logits + column, mask=inside, other=-float("inf")).to(tl.float32)
        d = (tl.exp(value - log_sum) - tl.where(column == target, 1.0, 0.0)) * weight
        tl.store(logits + column, d.to(logits.dtype.element_ty), mask=inside)


@triton.jit
def transpose(source, out, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr):
    """Bytes [rows, columns] -> [columns, rows], both as int32, ROWS and COLUMNS of them.

    4 x 4 blocks of bytes are turned in registers, tiles of them through shared memory.
    """
    row = tl.program_id(1) * TILE + tl.arange(0, TILE)
    column = tl.program_id(0) * TILE + tl.arange(0, TILE)
    pointer = source + (4 * row)[:, None] * COLUMNS + column[None, :]
    a0 = tl.load(pointer).to(tl.uint32, bitcast=True)
    a1 = tl.load(pointer + COLUMNS).to(tl.uint32, bitcast=True)
    a2 = tl.load(pointer + 2 * COLUMNS).to(tl.uint32, bitcast=True)
    a3 = tl.load(pointer + 3 * COLUMNS).to(tl.uint32, bitcast=True)
    target = out + (4 * column)[:, None] * ROWS + row[None, :]
    for k in tl.static_range(4):
        b = (a0 >> (8 * k)) & 255
        b = b | (((a1 >> (8 * k)) & 255) << 8)
        b = b | (((a2 >> (8 * k)) & 255) << 16)
        b = b | (((a3 >> (8 * k)) & 255) << 24)
        tl.store(target + k * ROWS, tl.trans(b.to(tl.int32, bitcast=True)))
