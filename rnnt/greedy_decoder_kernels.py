"""What rnnt/greedy_decoder.py does between matrix products, as Triton kernels: one program for an utterance."""

import functools

import triton
import triton.language as tl

from common.triton_launch import Launch


def join(search, f) -> None:
    assert f.stride(2) == 1
    launch = _join_of(f.stride(0), f.stride(1), f.shape[2], f.dtype, search.g.dtype)
    launch((search.batch, 1, 1), (f, search.g, search.joined, search.frame, search.lengths))


def advance(search) -> None:
    strides = search.recurrent.stride(0), search.x.stride(0)
    sizes = search.batch, search.logits.shape[1], search.hidden
    limits = search.max_symbols_per_frame, search.max_symbols
    launch = _advance_of(*strides, *sizes, *limits, search.logits.dtype)
    launch((search.batch, 1, 1), (
        search.logits, search.labels, search.counters, search.lengths, search.num_active,
        search.recurrent, search.table, search.x, search.c,
    ))  # fmt: skip


def rise(search, layer) -> None:
    gates, (h, c) = search.gates[layer - 1], search.layers[layer]
    launch = _rise_of(gates.stride(0), h.stride(0), search.hidden, h.dtype)
    launch((search.batch, 1, 1), (gates, search.emitted, h, c))


@functools.cache
def _join_of(stride_row, stride_frame, width, *dtypes):
    return Launch(_join, stride_row, stride_frame, width, triton.next_power_of_2(width))


@functools.cache
def _advance_of(stride_gates, stride_x, batch, vocab, hidden, max_per_frame, max_total, dtype):
    numbers = (stride_gates, stride_x, batch, vocab, hidden, max_per_frame, max_total)
    return Launch(_advance, *numbers, VOCAB=triton.next_power_of_2(vocab), HIDDEN=triton.next_power_of_2(hidden))


@functools.cache
def _rise_of(stride_gates, stride_x, hidden, dtype):
    return Launch(_rise, stride_gates, stride_x, hidden, triton.next_power_of_2(hidden))


@triton.jit
def _join(f, g, joined, frames, lengths, stride_row, stride_frame, width, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    unit = tl.arange(0, WIDTH)
    inside = unit < width
    frame = tl.maximum(tl.minimum(tl.load(frames + row), tl.load(lengths + row) - 1), 0)
    encoded = tl.load(f + row * stride_row + frame * stride_frame + unit, inside, other=0.0).to(tl.float32)
    predicted = tl.load(g + row * width + unit, inside, other=0.0).to(tl.float32)
    # As torch adds: rounded, then cut at zero, which is the same.
    tl.store(joined + row * width + unit, tl.maximum(encoded + predicted, 0.0), inside)


@triton.jit
def _advance(
    logits, labels, counters, lengths, num_active, gates, table, x, c,
    stride_gates, stride_x, batch, vocab, hidden, max_per_frame, max_total,
    VOCAB: tl.constexpr, HIDDEN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    frame = tl.load(counters + row)
    total = tl.load(counters + batch + row)
    added = tl.load(counters + 2 * batch + row)
    done = tl.load(counters + 3 * batch + row)
    if done == 0:
        index = tl.arange(0, VOCAB)
        values = tl.load(logits + row * vocab + index, index < vocab, other=float("-inf")).to(tl.float32)
        label = tl.argmax(values, 0)
        emits = label != vocab - 1
        if emits:
            tl.store(labels + row * (max_total + 1) + total, label.to(tl.int64))
            total += 1
            added += 1
        if (label == vocab - 1) | (added >= max_per_frame):
            frame += 1
            added = added * 0
        tl.store(counters + row, frame)
        tl.store(counters + batch + row, total)
        tl.store(counters + 2 * batch + row, added)
        tl.store(counters + 4 * batch + row, emits.to(tl.int64))
        if (frame >= tl.load(lengths + row)) | (total >= max_total):
            tl.store(counters + 3 * batch + row, done + 1)
            tl.atomic_add(num_active, -1)
        if emits:
            unit = tl.arange(0, HIDDEN)
            inputs = table + label * 4 * hidden
            _cell(gates + row * stride_gates, inputs, x + row * stride_x, c + row * hidden, unit, hidden, True)
    else:
        tl.store(counters + 4 * batch + row, done * 0)


@triton.jit
def _rise(gates, emitted, x, c, stride_gates, stride_x, hidden, HIDDEN: tl.constexpr):
    row = tl.program_id(0)
    if tl.load(emitted + row) != 0:
        unit = tl.arange(0, HIDDEN)
        own = gates + row * stride_gates
        _cell(own, own, x + row * stride_x, c + row * hidden, unit, hidden, False)


@triton.jit
def _cell(gates, inputs, h, c, unit, hidden, HAS_INPUTS: tl.constexpr):
    """An LSTM's new h and c in place. gates: of one row, those of `inputs` to be added where there are any."""
    inside = unit < hidden
    enters = tl.load(gates + unit, inside, other=0.0).to(tl.float32)
    stays = tl.load(gates + hidden + unit, inside, other=0.0).to(tl.float32)
    new = tl.load(gates + 2 * hidden + unit, inside, other=0.0).to(tl.float32)
    leaves = tl.load(gates + 3 * hidden + unit, inside, other=0.0).to(tl.float32)
    if HAS_INPUTS:
        enters += tl.load(inputs + unit, inside, other=0.0).to(tl.float32)
        stays += tl.load(inputs + hidden + unit, inside, other=0.0).to(tl.float32)
        new += tl.load(inputs + 2 * hidden + unit, inside, other=0.0).to(tl.float32)
        leaves += tl.load(inputs + 3 * hidden + unit, inside, other=0.0).to(tl.float32)
    state = tl.sigmoid(stays) * tl.load(c + unit, inside, other=0.0) + tl.sigmoid(enters) * _tanh(new)
    tl.store(c + unit, state, inside)
    tl.store(h + unit, tl.sigmoid(leaves) * _tanh(state), inside)


@triton.jit
def _tanh(x):
    return 2 * tl.sigmoid(2 * x) - 1
