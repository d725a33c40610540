"""Forward Triton kernels of the causal additive scan: states, their scan over spans, outputs. See `triton_parts`.

A sequence's blocks are cut into spans, one program's chain; a short sequence is one span. Device buffers, with b a
block, p a span, h a head:
  enter, leave[b, h, D]  the block's units (float32)
  mass[b, h, D]          sum exp(k) of all earlier tokens of the sequence in units of exp(enter)
  flag[b, h, slice]      1 where the block needs the exact form
  kv[b, h, (2,) D, V]    the state that the block finds, in units of exp(enter), angle 0 at its first token
  span_max, span_sum[p, h, D], span_kv[p, h, (2,) D, V]  float32, what a span adds, in units of exp(span_max), angle 0 at
                         the token after it; after `scan_spans` what it finds
"""

# What Triton compiles is not quite Python: types change between uses.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from .triton_exact import exact_scale, exact_scores
from .triton_parts import (
    SAFE_GROWTH,
    activated,
    any_flag,
    fade,
    load_angles,
    load_block,
    load_keys,
    load_matrix,
    load_rows,
    load_vector,
    running_mass,
    store_matrix,
    store_rows,
    store_vector,
    turned,
)

SPAN_FIELDS = tl.constexpr(8)


@triton.jit
def load_span(spans_ptr, span):
    """A row of the span table: batch row, first token, tokens, first block, its place in the sequence, sequence,
    whether the span is its sequence's last."""
    row = spans_ptr + span * SPAN_FIELDS
    return (
        tl.load(row).to(tl.int64), tl.load(row + 1).to(tl.int64), tl.load(row + 2), tl.load(row + 3).to(tl.int64),
        tl.load(row + 4), tl.load(row + 5).to(tl.int64), tl.load(row + 6),
    )  # fmt: skip


@triton.jit
def fill_angles(
    theta_ptr, cos_ptr, sin_ptr, turn_ptr, D: tl.constexpr, DP: tl.constexpr, BT: tl.constexpr, ROWS: tl.constexpr
):
    """cos and sin of a place in a block times theta, [H, BT, D], and in float32 of a move by 0 to BT tokens,
    turn[H, BT + 1, 2, D]; float64 until they are stored."""
    head = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, DP)
    theta = tl.load(theta_ptr + head * D + col, mask=col < D, other=0.0).to(tl.float64)
    angle = row[:, None].to(tl.float64) * theta[None, :]
    cos, sin = tl.cos(angle), tl.sin(angle)
    at = (head * BT + row)[:, None] * D + col[None, :]
    stored = (row < BT)[:, None] & (col < D)[None, :]
    tl.store(cos_ptr + at, cos.to(cos_ptr.dtype.element_ty), mask=stored)
    tl.store(sin_ptr + at, sin.to(sin_ptr.dtype.element_ty), mask=stored)
    at = (head * (BT + 1) + row)[:, None] * (2 * D) + col[None, :]
    stored = (row <= BT)[:, None] & (col < D)[None, :]
    tl.store(turn_ptr + at, cos.to(tl.float32), mask=stored)
    tl.store(turn_ptr + at + D, sin.to(tl.float32), mask=stored)


@triton.jit
def chain_states(
    k_ptr, v_ptr, spans_ptr, cos_ptr, sin_ptr, turn_ptr, kv_ptr, enter_ptr, leave_ptr, mass_ptr, flag_ptr,
    from_max_ptr, from_sum_ptr, from_kv_ptr, to_max_ptr, to_sum_ptr, to_kv_ptr,
    skb, skn, skh, svb, svn, svh, H,
    D: tl.constexpr, V: tl.constexpr, DH: tl.constexpr, NH: tl.constexpr, VP: tl.constexpr, BT: tl.constexpr,
    LRPE: tl.constexpr, FROM: tl.constexpr, BLOCKS: tl.constexpr, TO: tl.constexpr, OP: tl.constexpr,
    PREC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A span's blocks in turn, from the state in `from` (FROM: 1, one a span, 2, one a sequence, 0, none). With BLOCKS every
    block's units and state are kept. TO: 1, the state at the end is kept for every span, 2, for each sequence's last.
    One program a (span, head, slice of features)."""
    span = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    part = tl.program_id(2)
    batch, first, length, block, place, sequence, last = load_span(spans_ptr, span)
    step, vcol = tl.arange(0, BT), tl.arange(0, VP)
    col = part * DH + tl.arange(0, DH)
    SIZE: tl.constexpr = (2 if LRPE else 1) * D * V
    k_ptr += batch * skb + head * skh
    v_ptr += batch * svb + head * svh
    real = tl.zeros([DH, VP], tl.float32)
    imag = tl.zeros([DH, VP], tl.float32)
    mass = tl.zeros([DH], tl.float32)
    top = tl.full([DH], float("-inf"), tl.float32)  # running maximum
    if FROM:
        source = (span if FROM == 1 else sequence) * H + head
        top = load_vector(from_max_ptr + source * D, col, D, DH)
        mass = load_vector(from_sum_ptr + source * D, col, D, DH)
        real = load_matrix(from_kv_ptr + source * SIZE, col, vcol, D, V, DH, VP)
        if LRPE:
            imag = load_matrix(from_kv_ptr + source * SIZE + D * V, col, vcol, D, V, DH, VP)
    unit = top  # of the state
    if LRPE:
        cos_on = load_vector(turn_ptr + (head * (BT + 1) + BT) * (2 * D), col, D, DH)
        sin_on = load_vector(turn_ptr + (head * (BT + 1) + BT) * (2 * D) + D, col, D, DH)
        cos_turn, sin_turn = tl.full([DH], 1.0, tl.float32), tl.zeros([DH], tl.float32)
        cos = load_angles(cos_ptr, head, step, col, D, DH, BT)
        sin = load_angles(sin_ptr, head, step, col, D, DH, BT)
    for i in tl.range(0, tl.cdiv(length, BT), num_stages=STAGES):
        present = i * BT + step < length
        keys = load_keys(k_ptr + (first + i * BT) * skn, step, skn, col, present, D, DH)
        value = load_rows(v_ptr + (first + i * BT) * svn, step, svn, vcol, present, V, VP).to(OP)
        low = tl.maximum(top, tl.sum(tl.where(step[:, None] == 0, keys, 0.0), 0))
        top = tl.maximum(top, tl.max(keys, 0))
        growth = top - low
        fast = growth > SAFE_GROWTH
        enter = tl.where(fast, low, low + 0.5 * growth)
        leave = tl.where(fast, top, enter)
        faded = fade(unit, enter)
        mass *= faded
        real *= faded[:, None]
        if LRPE:
            imag *= faded[:, None]
            real, imag = turned(real, imag, cos_turn, sin_turn)
            cos_turn, sin_turn = cos_on, sin_on
        if BLOCKS:
            at = ((block + i) * H + head) * D
            store_vector(enter_ptr + at, col, enter, D, DH)
            store_vector(leave_ptr + at, col, leave, D, DH)
            store_vector(mass_ptr + at, col, mass, D, DH)
            tl.store(flag_ptr + ((block + i) * H + head) * NH + part, tl.max(fast.to(tl.int32), 0))
            store_matrix(kv_ptr + ((block + i) * H + head) * SIZE, col, vcol, real, D, V, DH, VP)
            if LRPE:
                store_matrix(kv_ptr + ((block + i) * H + head) * SIZE + D * V, col, vcol, imag, D, V, DH, VP)
        moved = tl.exp(enter - leave)
        weight = tl.exp(keys - leave[None, :])
        mass = mass * moved + tl.sum(weight, 0)
        if LRPE:
            real = tl.dot(tl.trans((weight * cos).to(OP)), value, real * moved[:, None], input_precision=PREC)
            imag = tl.dot(tl.trans((weight * sin).to(OP)), value, imag * moved[:, None], input_precision=PREC)
        else:
            real = tl.dot(tl.trans(weight.to(OP)), value, real * moved[:, None], input_precision=PREC)
        unit = leave
    if TO == 1 or (TO == 2 and last != 0):
        target = (span if TO == 1 else sequence) * H + head
        faded = tl.exp(unit - top)
        real *= faded[:, None]
        if LRPE:
            count = length - (tl.cdiv(length, BT) - 1) * BT
            cos_turn = load_vector(turn_ptr + (head * (BT + 1) + count) * (2 * D), col, D, DH)
            sin_turn = load_vector(turn_ptr + (head * (BT + 1) + count) * (2 * D) + D, col, D, DH)
            imag *= faded[:, None]
            real, imag = turned(real, imag, cos_turn, sin_turn)
            store_matrix(to_kv_ptr + target * SIZE + D * V, col, vcol, imag, D, V, DH, VP)
        store_vector(to_max_ptr + target * D, col, top, D, DH)
        store_vector(to_sum_ptr + target * D, col, mass * faded, D, DH)
        store_matrix(to_kv_ptr + target * SIZE, col, vcol, real, D, V, DH, VP)


@triton.jit
def scan_spans(
    sequences_ptr, span_max_ptr, span_sum_ptr, span_kv_ptr, move_ptr, max0_ptr, sum0_ptr, kv0_ptr, H,
    D: tl.constexpr, V: tl.constexpr, BD: tl.constexpr, VP: tl.constexpr, LRPE: tl.constexpr, INITIAL: tl.constexpr,
):  # fmt: skip
    """From what each span adds to what it finds, in place. `move` [2, H, D]: cos and sin of a span's tokens. One
    program a (sequence, head, slice of features)."""
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, vcol = tl.program_id(2) * BD + tl.arange(0, BD), tl.arange(0, VP)
    start = tl.load(sequences_ptr + sequence * 2).to(tl.int64)
    spans = tl.load(sequences_ptr + sequence * 2 + 1)
    SIZE: tl.constexpr = (2 if LRPE else 1) * D * V
    real = tl.zeros([BD, VP], tl.float32)
    imag = tl.zeros([BD, VP], tl.float32)
    mass = tl.zeros([BD], tl.float32)
    top = tl.full([BD], float("-inf"), tl.float32)
    if INITIAL:
        state = sequence * H + head
        top = load_vector(max0_ptr + state * D, row, D, BD)
        mass = load_vector(sum0_ptr + state * D, row, D, BD)
        real = load_matrix(kv0_ptr + state * SIZE, row, vcol, D, V, BD, VP)
        if LRPE:
            imag = load_matrix(kv0_ptr + state * SIZE + D * V, row, vcol, D, V, BD, VP)
    if LRPE:
        cos, sin = load_vector(move_ptr + head * D, row, D, BD), load_vector(move_ptr + (H + head) * D, row, D, BD)
    for i in range(0, spans):
        at = (start + i) * H + head
        peak = load_vector(span_max_ptr + at * D, row, D, BD)
        added = load_vector(span_sum_ptr + at * D, row, D, BD)
        real_added = load_matrix(span_kv_ptr + at * SIZE, row, vcol, D, V, BD, VP)
        store_vector(span_max_ptr + at * D, row, top, D, BD)
        store_vector(span_sum_ptr + at * D, row, mass, D, BD)
        store_matrix(span_kv_ptr + at * SIZE, row, vcol, real, D, V, BD, VP)
        new = tl.maximum(top, peak)
        faded, entered = fade(top, new), fade(peak, new)
        mass = mass * faded + added * entered
        top = new
        if LRPE:
            imag_added = load_matrix(span_kv_ptr + at * SIZE + D * V, row, vcol, D, V, BD, VP)
            store_matrix(span_kv_ptr + at * SIZE + D * V, row, vcol, imag, D, V, BD, VP)
            real, imag = turned(real, imag, cos, sin)  # by a full span: the last one's sum is not used
            imag = imag * faded[:, None] + imag_added * entered[:, None]
        real = real * faded[:, None] + real_added * entered[:, None]


@triton.jit
def outputs(
    q_ptr, k_ptr, v_ptr, o_ptr, blocks_ptr, cos_ptr, sin_ptr, kv_ptr, enter_ptr, mass_ptr, flag_ptr,
    sqb, sqn, sqh, skb, skn, skh, svb, svn, svh, sob, son, soh, H,
    D: tl.constexpr, V: tl.constexpr, DH: tl.constexpr, NH: tl.constexpr, VP: tl.constexpr, BT: tl.constexpr,
    LRPE: tl.constexpr, SILU: tl.constexpr, OP: tl.constexpr, PREC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The block against itself and the state that it finds. One program a (block, head)."""
    block = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    batch, first, length, place = load_block(blocks_ptr, block)
    step, vcol = tl.arange(0, BT), tl.arange(0, VP)
    present = step < length
    q_ptr += batch * sqb + first * sqn + head * sqh
    k_ptr += batch * skb + first * skn + head * skh
    v_ptr += batch * svb + first * svn + head * svh
    o_ptr += batch * sob + first * son + head * soh
    at = (block * H + head) * D
    kv_ptr += at * ((2 if LRPE else 1) * V)
    flagged = any_flag(flag_ptr, block * H + head, NH)
    out = tl.zeros([BT, VP], tl.float32)
    scores = tl.zeros([BT, BT], tl.float32)
    for part in tl.range(0, NH, num_stages=STAGES):
        col = part * DH + tl.arange(0, DH)
        enter, mass = load_vector(enter_ptr + at, col, D, DH), load_vector(mass_ptr + at, col, D, DH)
        keys = load_keys(k_ptr, step, skn, col, present, D, DH)
        query = load_rows(q_ptr, step, sqn, col, present, D, DH)
        if flagged:
            weight = tl.zeros([BT, DH], tl.float32)
            read = exact_scale(k_ptr, skn, length, col, enter, mass, BT, D, DH)
        else:
            weight = tl.exp(keys - enter[None, :])
            read = 1.0 / running_mass(weight.to(OP), mass, BT, PREC)
        read *= activated(query, SILU)
        state = load_matrix(kv_ptr, col, vcol, D, V, DH, VP)
        if LRPE:
            cos = load_angles(cos_ptr, head, step, col, D, DH, BT)
            sin = load_angles(sin_ptr, head, step, col, D, DH, BT)
            state_sin = load_matrix(kv_ptr + D * V, col, vcol, D, V, DH, VP)
            read_cos, read_sin = (read * cos).to(OP), (read * sin).to(OP)
            scores = tl.dot(read_cos, tl.trans((weight * cos).to(OP)), scores, input_precision=PREC)
            scores = tl.dot(read_sin, tl.trans((weight * sin).to(OP)), scores, input_precision=PREC)
            out = tl.dot(read_cos, state, out, input_precision=PREC)
            out = tl.dot(read_sin, state_sin, out, input_precision=PREC)
        else:
            scores = tl.dot(read.to(OP), tl.trans(weight.to(OP)), scores, input_precision=PREC)
            out = tl.dot(read.to(OP), state, out, input_precision=PREC)
    value = load_rows(v_ptr, step, svn, vcol, present, V, VP).to(OP)
    scores = tl.where(step[:, None] >= step[None, :], scores, 0.0)
    if flagged:
        scores = exact_scores(
            q_ptr, k_ptr, enter_ptr + at, mass_ptr + at, cos_ptr, sin_ptr, sqn, skn, head, length,
            D, DH, NH, BT, LRPE, SILU, False,
        )  # fmt: skip
    out = tl.dot(scores.to(OP), value, out, input_precision=PREC)
    store_rows(o_ptr, step, son, vcol, present, out, V, VP)
