"""Triton kernels of the Toeplitz scan (model-spec 3).

Tokens lie channel by channel, [d, rows, C]: a row is a chunk of C tokens of one sequence, and every sequence starts a
row. For one channel the scan is then four products of small matrices, with X the rows [M, C] and H [M, e] the state
that each row receives:

    Y = X T + H W        T[r, t] = sum_i b_i lambda_i^(t - r), W[i, t] = b_i lambda_i^(t + 1)
    H_k = lambda^C H_(k-1) + X_(k-1) P        P[r, i] = lambda_i^(C - 1 - r)

One program takes all rows of a channel, M at a time. The backward pass runs the rows from the end with Q_k, the gradient
of what row k leaves to the next one. Nothing of size [tokens, d, e] exists, and no product is larger than [M, C, C].
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import triton_parts  # noqa: F401  (its shim of Triton's interpreter)

FIELDS = tl.constexpr(5)  # of a row: batch row, token of slot 0, tokens, bit 0 first + bit 1 last, sequence


@triton.jit
def power(n, log_decay):
    """lambda^n, 0 for n < 0 and 1 for n = 0 (also where lambda is 0)."""
    raised = tl.exp2(n.to(tl.float32) * log_decay)
    return tl.where(n > 0, raised, tl.where(n == 0, 1.0, 0.0))


@triton.jit(do_not_specialize=["rows"])
def pack_channels(
    x_ptr, packed_ptr, table_ptr, stride_b, stride_n, rows, d,
    REVERSE: tl.constexpr, C: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """x [B, N, d] -> [d, rows, C]; 0 in slots without a token."""
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BD + tl.arange(0, BD)
    slot = tl.arange(0, C)
    place = table_ptr + row * FIELDS
    batch, base, tokens = tl.load(place).to(tl.int64), tl.load(place + 1).to(tl.int64), tl.load(place + 2)
    token = base - slot if REVERSE else base + slot
    inside = channel < d
    at = x_ptr + batch * stride_b + token[:, None] * stride_n + channel[None, :]
    x = tl.load(at, mask=(slot < tokens)[:, None] & inside[None, :], other=0.0)
    to = packed_ptr + (channel.to(tl.int64)[:, None] * rows + row) * C + slot[None, :]
    tl.store(to, tl.trans(x), mask=inside[:, None])


@triton.jit(do_not_specialize=["rows"])
def unpack_channels(
    packed_ptr, x_ptr, table_ptr, stride_b, stride_n, rows, d,
    REVERSE: tl.constexpr, C: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """The inverse of `pack_channels`; tokens of no row are left as they are."""
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BD + tl.arange(0, BD)
    slot = tl.arange(0, C)
    place = table_ptr + row * FIELDS
    batch, base, tokens = tl.load(place).to(tl.int64), tl.load(place + 1).to(tl.int64), tl.load(place + 2)
    token = base - slot if REVERSE else base + slot
    inside = channel < d
    at = packed_ptr + (channel.to(tl.int64)[:, None] * rows + row) * C + slot[None, :]
    packed = tl.load(at, mask=inside[:, None], other=0.0)
    to = x_ptr + batch * stride_b + token[:, None] * stride_n + channel[None, :]
    tl.store(to, tl.trans(packed), mask=(slot < tokens)[:, None] & inside[None, :])


@triton.jit
def load_decay(log_decay_ptr, gain_ptr, channel, E: tl.constexpr, EP: tl.constexpr):
    """log2 lambda and b of one channel; exponents that do not exist have lambda = b = 0."""
    e = tl.arange(0, EP)
    at = channel * E + e
    return (
        tl.load(log_decay_ptr + at, mask=e < E, other=float("-inf")),
        tl.load(gain_ptr + at, mask=e < E, other=0.0),
    )


@triton.jit
def sum_taps(
    log_decay_ptr, gain_ptr, taps_ptr, E: tl.constexpr, EP: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """taps [d, C]: sum_i b_i lambda_i^n."""
    channel = tl.program_id(0)
    log_decay, gain = load_decay(log_decay_ptr, gain_ptr, channel, E, EP)
    lag = tl.arange(0, C)
    taps = tl.sum(gain[None, :] * power(lag[:, None], log_decay[None, :]), 1)
    tl.store(taps_ptr + channel * C + lag, taps)


@triton.jit
def load_toeplitz(taps_ptr, lag, CENTRE: tl.constexpr):
    return tl.load(taps_ptr + lag, mask=(lag >= 0) if CENTRE else (lag > 0), other=0.0)


@triton.jit
def load_rows(ptr, row, slot, present, C: tl.constexpr):
    return tl.load(ptr + row.to(tl.int64)[:, None] * C + slot[None, :], mask=present[:, None], other=0.0).to(tl.float32)


@triton.jit
def chain(keep_one, added_one, keep_two, added_two):
    """Two steps of h <- keep h + added as one."""
    return keep_one * keep_two, added_one * keep_two + added_two


@triton.jit
def received(
    x_ptr, initial_ptr, row, slot, flags, sequence, before, P, full, channel, d, start, INITIAL: tl.constexpr,
    E: tl.constexpr, EP: tl.constexpr, C: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """H: what each row of a tile receives; `before` is what the row before the tile received."""
    e = tl.arange(0, EP)
    opens = (flags & 1) == 1
    added = tl.dot(load_rows(x_ptr, row - 1, slot, opens == 0, C), P, input_precision=PREC)
    if INITIAL:
        at = initial_ptr + (sequence.to(tl.int64) * d + channel)[:, None] * E + e[None, :]
        added += tl.load(at, mask=opens[:, None] & (e < E)[None, :], other=0.0)
    keep = tl.where(opens[:, None], 0.0, full[None, :])
    added += tl.where((row == start)[:, None], keep * before[None, :], 0.0)
    _, held = tl.associative_scan((keep, added), 0, chain)
    return held


@triton.jit(do_not_specialize=["rows"])
def scan_channels(
    x_ptr, y_ptr, table_ptr, log_decay_ptr, full_ptr, gain_ptr, taps_ptr, initial_ptr, carry_ptr, last_ptr, rows, d,
    OUTPUT: tl.constexpr, INITIAL: tl.constexpr, FINAL: tl.constexpr, CENTRE: tl.constexpr,
    E: tl.constexpr, EP: tl.constexpr, C: tl.constexpr, M: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Y; the state that the first row of each tile builds on (carry [d, tiles, e]); and the states that the last rows
    of the sequences receive (last [sequences, d, e])."""
    channel = tl.program_id(0).to(tl.int64)
    slot, e = tl.arange(0, C), tl.arange(0, EP)
    log_decay, gain = load_decay(log_decay_ptr, gain_ptr, channel, E, EP)
    full = tl.load(full_ptr + channel * E + e, mask=e < E, other=0.0)
    P = power((C - 1 - slot)[:, None], log_decay[None, :])
    if OUTPUT:
        W = gain[:, None] * power((slot + 1)[None, :], log_decay[:, None])
        T = load_toeplitz(taps_ptr + channel * C, slot[None, :] - slot[:, None], CENTRE)
    x_ptr += channel * rows * C
    y_ptr += channel * rows * C
    tiles = tl.cdiv(rows, M)
    before = tl.zeros((EP,), tl.float32)
    for tile in range(tiles):
        start = tile * M
        row = start + tl.arange(0, M)
        present = row < rows
        place = table_ptr + row * FIELDS
        # Rows beyond the last one open (and end) nothing that is stored.
        flags = tl.load(place + 3, mask=present, other=1)
        sequence = tl.load(place + 4, mask=present, other=0)
        tl.store(carry_ptr + (channel * tiles + tile) * E + e, before, mask=e < E)
        held = received(
            x_ptr, initial_ptr, row, slot, flags, sequence, before, P, full, channel, d, start, INITIAL, E, EP, C, PREC
        )
        before = tl.sum(tl.where((row == start + M - 1)[:, None], held, 0.0), 0)
        if FINAL:
            ends = present & ((flags & 2) == 2)
            at = last_ptr + (sequence.to(tl.int64) * d + channel)[:, None] * E + e[None, :]
            tl.store(at, held, mask=ends[:, None] & (e < E)[None, :])
        if OUTPUT:
            y = tl.dot(held, W, input_precision=PREC)
            y = tl.dot(load_rows(x_ptr, row, slot, present, C), T, y, input_precision=PREC)
            to = y_ptr + row.to(tl.int64)[:, None] * C + slot[None, :]
            tl.store(to, y.to(y_ptr.dtype.element_ty), mask=present[:, None])


@triton.jit
def passed_on(
    dy_ptr, dlast_ptr, table_ptr, row, slot, flags, state, after, W, full, start, FINAL: tl.constexpr,
    E: tl.constexpr, EP: tl.constexpr, C: tl.constexpr, M: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Q: the gradient of what each row of a tile leaves to the next one; `after` is that of the row after the tile."""
    goes_on = (flags & 2) == 0
    reading = tl.dot(load_rows(dy_ptr, row + 1, slot, goes_on, C), W, input_precision=PREC)
    if FINAL:
        ends = goes_on & ((tl.load(table_ptr + (row + 1) * FIELDS + 3, mask=goes_on, other=0) & 2) == 2)
        reading += tl.load(dlast_ptr + state, mask=ends[:, None] & (tl.arange(0, EP) < E)[None, :], other=0.0)
    keep = tl.where(goes_on[:, None], full[None, :], 0.0)
    reading += tl.where((row == start + M - 1)[:, None], keep * after[None, :], 0.0)
    _, passed = tl.associative_scan((keep, reading), 0, chain, reverse=True)
    return passed


@triton.jit(do_not_specialize=["rows"])
def scan_input_grads(
    dy_ptr, dx_ptr, table_ptr, log_decay_ptr, full_ptr, gain_ptr, taps_ptr, dlast_ptr, dinitial_ptr, rows, d,
    INITIAL: tl.constexpr, FINAL: tl.constexpr, CENTRE: tl.constexpr,
    E: tl.constexpr, EP: tl.constexpr, C: tl.constexpr, M: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Gradients to x and the initial states."""
    channel = tl.program_id(0).to(tl.int64)
    slot, e = tl.arange(0, C), tl.arange(0, EP)
    log_decay, gain = load_decay(log_decay_ptr, gain_ptr, channel, E, EP)
    full = tl.load(full_ptr + channel * E + e, mask=e < E, other=0.0)
    W = gain[None, :] * power((slot + 1)[:, None], log_decay[None, :])  # [t, i]
    P = power((C - 1 - slot)[None, :], log_decay[:, None])  # [i, r]
    T = load_toeplitz(taps_ptr + channel * C, slot[:, None] - slot[None, :], CENTRE)  # [t, r]
    dy_ptr += channel * rows * C
    dx_ptr += channel * rows * C
    tiles = tl.cdiv(rows, M)
    after = tl.zeros((EP,), tl.float32)
    for step in range(tiles):
        start = (tiles - 1 - step) * M
        row = start + tl.arange(0, M)
        present = row < rows
        flags = tl.load(table_ptr + row * FIELDS + 3, mask=present, other=3)
        sequence = tl.load(table_ptr + row * FIELDS + 4, mask=present, other=0)
        state = (sequence.to(tl.int64) * d + channel)[:, None] * E + e[None, :]
        passed = passed_on(
            dy_ptr, dlast_ptr, table_ptr, row, slot, flags, state, after, W, full, start, FINAL, E, EP, C, M, PREC
        )
        after = tl.sum(tl.where((row == start)[:, None], passed, 0.0), 0)
        dx = tl.dot(passed, P, input_precision=PREC)
        dy = load_rows(dy_ptr, row, slot, present, C)
        dx = tl.dot(dy, T, dx, input_precision=PREC)
        to = dx_ptr + row.to(tl.int64)[:, None] * C + slot[None, :]
        tl.store(to, dx.to(dx_ptr.dtype.element_ty), mask=present[:, None])
        if INITIAL:
            opens = present & ((flags & 1) == 1)
            first = tl.dot(dy, W, input_precision=PREC) + full[None, :] * passed
            if FINAL:
                alone = opens & ((flags & 2) == 2)
                first += tl.load(dlast_ptr + state, mask=alone[:, None] & (e < E)[None, :], other=0.0)
            tl.store(dinitial_ptr + state, first, mask=opens[:, None] & (e < E)[None, :])


@triton.jit(do_not_specialize=["rows"])
def scan_parameter_grads(
    x_ptr, dy_ptr, table_ptr, log_decay_ptr, full_ptr, gain_ptr, initial_ptr, carry_ptr, dlast_ptr, ddecay_ptr,
    dgain_ptr, rows, d, INITIAL: tl.constexpr, FINAL: tl.constexpr,
    E: tl.constexpr, EP: tl.constexpr, C: tl.constexpr, M: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Gradients to lambda and b, but for the part through T, which `add_tap_grads` adds."""
    channel = tl.program_id(0).to(tl.int64)
    slot, e = tl.arange(0, C), tl.arange(0, EP)
    log_decay, gain = load_decay(log_decay_ptr, gain_ptr, channel, E, EP)
    full = tl.load(full_ptr + channel * E + e, mask=e < E, other=0.0)
    W = gain[None, :] * power((slot + 1)[:, None], log_decay[None, :])  # [t, i]
    P = power((C - 1 - slot)[:, None], log_decay[None, :])  # [r, i]
    x_ptr += channel * rows * C
    dy_ptr += channel * rows * C
    tiles = tl.cdiv(rows, M)
    after = tl.zeros((EP,), tl.float32)
    dP = tl.zeros((C, EP), tl.float32)
    dW = tl.zeros((C, EP), tl.float32)
    dfull = tl.zeros((EP,), tl.float32)
    for step in range(tiles):
        tile = tiles - 1 - step
        start = tile * M
        row = start + tl.arange(0, M)
        present = row < rows
        flags = tl.load(table_ptr + row * FIELDS + 3, mask=present, other=3)
        sequence = tl.load(table_ptr + row * FIELDS + 4, mask=present, other=0)
        state = (sequence.to(tl.int64) * d + channel)[:, None] * E + e[None, :]
        passed = passed_on(
            dy_ptr, dlast_ptr, table_ptr, row, slot, flags, state, after, W, full, start, FINAL, E, EP, C, M, PREC
        )
        after = tl.sum(tl.where((row == start)[:, None], passed, 0.0), 0)
        x = load_rows(x_ptr, row, slot, present, C)
        dP = tl.dot(tl.trans(x), passed, dP, input_precision=PREC)
        before = tl.load(carry_ptr + (channel * tiles + tile) * E + e, mask=e < E, other=0.0)
        held = received(
            x_ptr, initial_ptr, row, slot, flags, sequence, before, P, full, channel, d, start, INITIAL, E, EP, C, PREC
        )
        dfull += tl.sum(passed * held, 0)
        dy = load_rows(dy_ptr, row, slot, present, C)
        dW = tl.dot(tl.trans(dy), held, dW, input_precision=PREC)
    n = slot[:, None]
    dgain = tl.sum(dW * power(n + 1, log_decay[None, :]), 0)
    ddecay = gain * tl.sum(dW * (n + 1) * power(n, log_decay[None, :]), 0)
    ddecay += tl.sum(dP * (C - 1 - n) * power(C - 2 - n, log_decay[None, :]), 0)
    ddecay += dfull * C * power(tl.full((EP,), C - 1, tl.int32), log_decay)
    tl.store(ddecay_ptr + channel * E + e, ddecay, mask=e < E)
    tl.store(dgain_ptr + channel * E + e, dgain, mask=e < E)


@triton.jit(do_not_specialize=["rows"])
def toeplitz_grads(
    x_ptr, dy_ptr, dtoeplitz_ptr, rows, C: tl.constexpr, M: tl.constexpr, PREC: tl.constexpr
):  # fmt: skip
    """The gradient to T as a whole, [d, C, C]."""
    channel = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, C)
    x_ptr += channel * rows * C
    dy_ptr += channel * rows * C
    dT = tl.zeros((C, C), tl.float32)
    for start in range(0, rows, M):
        row = start + tl.arange(0, M)
        x = load_rows(x_ptr, row, slot, row < rows, C)
        dT = tl.dot(tl.trans(x), load_rows(dy_ptr, row, slot, row < rows, C), dT, input_precision=PREC)
    tl.store(dtoeplitz_ptr + channel * C * C + slot[:, None] * C + slot[None, :], dT)


@triton.jit
def add_tap_grads(
    dtoeplitz_ptr, log_decay_ptr, gain_ptr, ddecay_ptr, dgain_ptr,
    CENTRE: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """The gradient through T: sums over its diagonals are the gradients of the taps."""
    channel = tl.program_id(0).to(tl.int64)
    e, lag, r = tl.arange(0, EP), tl.arange(0, C), tl.arange(0, C)
    log_decay, gain = load_decay(log_decay_ptr, gain_ptr, channel, E, EP)
    t = lag[:, None] + r[None, :]
    counted = (t < C) if CENTRE else (t < C) & (lag > 0)[:, None]
    dtaps = tl.sum(tl.load(dtoeplitz_ptr + channel * C * C + r[None, :] * C + t, mask=counted, other=0.0), 1)
    dgain = tl.sum(dtaps[:, None] * power(lag[:, None], log_decay[None, :]), 0)
    ddecay = gain * tl.sum((dtaps * lag)[:, None] * power(lag[:, None] - 1, log_decay[None, :]), 0)
    at = channel * E + e
    tl.store(dgain_ptr + at, tl.load(dgain_ptr + at, mask=e < E, other=0.0) + dgain, mask=e < E)
    tl.store(ddecay_ptr + at, tl.load(ddecay_ptr + at, mask=e < E, other=0.0) + ddecay, mask=e < E)
