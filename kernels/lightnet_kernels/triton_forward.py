"""Forward Triton kernels of the causal additive scan: states, their scan over spans, outputs. See `triton_parts`.

A sequence's blocks are cut into spans, one program's chain, and spans into pieces; a short sequence is one span. Device
buffers, with b a block, p a piece, h a head:
  enter, leave[b, h, D]  the block's units (float32)
  mass[b, h, D]          sum exp(k) of all earlier tokens of the sequence in units of exp(enter)
  flag[b, h]             1 where the block needs the exact form
  kv[b, h, (2,) D, V]    the state that the block finds, in units of exp(enter), angle 0 at its first token
  piece_kv[p, h, (2,) D, V]  float32, what a piece of a span adds (`triton_span_sums`), in units of exp(leave) of its last
                         block, angle 0 at the token after it; after `scan_spans` what it finds, in units of exp(leave)
                         of the block before it (of `cuda_chains` in units of exp(maximum), before and after `join_spans`)
"""

# What Triton compiles is not quite Python: types change between uses.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from .triton_exact import exact_scale, exact_scores
from .triton_parts import (
    activated,
    activated_over,
    exp,
    fade,
    load_angles,
    load_block,
    load_keys,
    load_matrix,
    load_rows,
    load_triangle,
    load_vector,
    running_mass,
    some_flags,
    store_matrix,
    store_rows,
    turned,
)

SPAN_FIELDS = tl.constexpr(9)
FIRST_PIECE, LAST_PIECE = tl.constexpr(7), tl.constexpr(8)


@triton.jit
def load_span(spans_ptr, span):
    """A row of the table of spans or pieces: batch row, first token, tokens, first block, its span's place in the sequence,
    sequence, whether the span is its sequence's last."""
    row = spans_ptr + span * SPAN_FIELDS
    return (
        tl.load(row).to(tl.int64), tl.load(row + 1).to(tl.int64), tl.load(row + 2), tl.load(row + 3).to(tl.int64),
        tl.load(row + 4), tl.load(row + 5).to(tl.int64), tl.load(row + 6),
    )  # fmt: skip


@triton.jit
def load_halves(
    ptr, row, col, D: tl.constexpr, V: tl.constexpr, DH: tl.constexpr, VB: tl.constexpr, LRPE: tl.constexpr
):
    """Both halves of a doubled state; without LRPE the state, and zeros."""
    real = load_matrix(ptr, row, col, D, V, DH, VB)
    if LRPE:
        imag = load_matrix(ptr + D * V, row, col, D, V, DH, VB)
    else:
        imag = tl.zeros([DH, VB], tl.float32)
    return real, imag


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


@triton.jit(do_not_specialize=["piece", "sequences"])
def fill_moves(
    theta_ptr, lengths_ptr, moves_ptr, piece, sequences, heads, D: tl.constexpr, DP: tl.constexpr
):  # fmt: skip
    """cos and sin [2 + 2 sequences, H, D] of moves by `piece` tokens (rows 0 and 1) and by what is left of each sequence
    after whole ones (cos of all, then sin of all), in float64 until they are stored. One program a (move, head)."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    col = tl.arange(0, DP)
    tokens = tl.cast(piece, tl.int64)
    if row > 0:
        length = tl.load(lengths_ptr + row - 1)
        tokens = tl.maximum(length - 1, 0) % piece + 1
    theta = tl.load(theta_ptr + head * D + col, mask=col < D, other=0.0).to(tl.float64)
    angle = tokens.to(tl.float64) * theta
    cos_row = tl.where(row > 0, row + 1, 0)
    sin_row = tl.where(row > 0, row + 1 + sequences, 1)
    tl.store(moves_ptr + (cos_row * heads + head) * D + col, tl.cos(angle).to(tl.float32), mask=col < D)
    tl.store(moves_ptr + (sin_row * heads + head) * D + col, tl.sin(angle).to(tl.float32), mask=col < D)


@triton.jit
def chain_states(
    k_ptr, v_ptr, spans_ptr, cos_ptr, sin_ptr, turn_ptr, kv_ptr, enter_ptr, leave_ptr, max0_ptr, max_ptr, from_ptr,
    to_ptr, skb, skn, skh, svb, svn, svh, H,
    D: tl.constexpr, V: tl.constexpr, DH: tl.constexpr, NH: tl.constexpr, VB: tl.constexpr, BT: tl.constexpr,
    LRPE: tl.constexpr, FROM: tl.constexpr, TO: tl.constexpr, OP: tl.constexpr,
    PREC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Every block's kv, a span's blocks in turn, from the kv in `from` (FROM: 1, one a piece, 2, the initial one of each
    sequence, 0, none). TO: kv after each sequence's last token is kept in `to`, in units of exp(max). One program a
    (span, head, slice of features and slice of VB value features)."""
    span = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    batch, first, length, block, place, sequence, last = load_span(spans_ptr, span)
    step, vcol = tl.arange(0, BT), (tl.program_id(2) // NH) * VB + tl.arange(0, VB)
    col = (tl.program_id(2) % NH) * DH + tl.arange(0, DH)
    SIZE: tl.constexpr = (2 if LRPE else 1) * D * V
    k_ptr += batch * skb + head * skh
    v_ptr += batch * svb + head * svh
    at = (block * H + head) * D
    real = tl.zeros([DH, VB], tl.float32)
    imag = tl.zeros([DH, VB], tl.float32)
    unit = load_vector(enter_ptr + at, col, D, DH)  # of the state
    if FROM == 1:
        source = (tl.load(spans_ptr + span * SPAN_FIELDS + FIRST_PIECE).to(tl.int64) * H + head) * SIZE
        if place > 0:
            real, imag = load_halves(from_ptr + source, col, vcol, D, V, DH, VB, LRPE)
            unit = load_vector(leave_ptr + at - H * D, col, D, DH)
        elif max0_ptr is not None:
            real, imag = load_halves(from_ptr + source, col, vcol, D, V, DH, VB, LRPE)
            unit = load_vector(max0_ptr + (sequence * H + head) * D, col, D, DH)
    if FROM == 2:
        real, imag = load_halves(from_ptr + (sequence * H + head) * SIZE, col, vcol, D, V, DH, VB, LRPE)
        unit = load_vector(max0_ptr + (sequence * H + head) * D, col, D, DH)
    if LRPE:
        cos_on = load_vector(turn_ptr + (head * (BT + 1) + BT) * (2 * D), col, D, DH)
        sin_on = load_vector(turn_ptr + (head * (BT + 1) + BT) * (2 * D) + D, col, D, DH)
        cos_turn, sin_turn = tl.full([DH], 1.0, tl.float32), tl.zeros([DH], tl.float32)
    for i in tl.range(0, tl.cdiv(length, BT), num_stages=STAGES):
        # Sooner than elsewhere: so compiled, a chain from a state takes 3 %, not 12 %, longer than one from none.
        if LRPE and FROM == 1:
            cos = load_angles(cos_ptr, head, step, col, D, DH, BT)
            sin = load_angles(sin_ptr, head, step, col, D, DH, BT)
        present = i * BT + step < length
        keys = load_keys(k_ptr + (first + i * BT) * skn, step, skn, col, present, D, DH)
        value = load_rows(v_ptr + (first + i * BT) * svn, step, svn, vcol, present, V, VB).to(OP)
        enter, leave = load_vector(enter_ptr + at, col, D, DH), load_vector(leave_ptr + at, col, D, DH)
        faded = fade(unit, enter)
        if LRPE:
            real, imag = turned(real, imag, cos_turn * faded, sin_turn * faded)
            cos_turn, sin_turn = cos_on, sin_on
        else:
            real *= faded[:, None]
        store_matrix(kv_ptr + at * (SIZE // D), col, vcol, real, D, V, DH, VB)
        if LRPE:
            store_matrix(kv_ptr + at * (SIZE // D) + D * V, col, vcol, imag, D, V, DH, VB)
        moved = exp(enter - leave)[:, None]
        weight = exp(keys - leave[None, :])
        if LRPE and FROM != 1:
            cos = load_angles(cos_ptr, head, step, col, D, DH, BT)
            sin = load_angles(sin_ptr, head, step, col, D, DH, BT)
        if LRPE:
            real = tl.dot(tl.trans((weight * cos).to(OP)), value, real * moved, input_precision=PREC)
            imag = tl.dot(tl.trans((weight * sin).to(OP)), value, imag * moved, input_precision=PREC)
        else:
            real = tl.dot(tl.trans(weight.to(OP)), value, real * moved, input_precision=PREC)
        unit = leave
        at += H * D
    if TO and last != 0:
        target = (sequence * H + head) * SIZE
        faded = exp(unit - load_vector(max_ptr + (sequence * H + head) * D, col, D, DH))
        if LRPE:
            count = length - (tl.cdiv(length, BT) - 1) * BT
            cos_turn = load_vector(turn_ptr + (head * (BT + 1) + count) * (2 * D), col, D, DH)
            sin_turn = load_vector(turn_ptr + (head * (BT + 1) + count) * (2 * D) + D, col, D, DH)
            real, imag = turned(real, imag, cos_turn * faded, sin_turn * faded)
            store_matrix(to_ptr + target + D * V, col, vcol, imag, D, V, DH, VB)
        else:
            real *= faded[:, None]
        store_matrix(to_ptr + target, col, vcol, real, D, V, DH, VB)


@triton.jit
def scan_spans(
    sequences_ptr, pieces_ptr, enter_ptr, leave_ptr, piece_kv_ptr, move_ptr, max0_ptr, kv0_ptr, unit_ptr, max_ptr, total_ptr,
    H,
    D: tl.constexpr, V: tl.constexpr, BD: tl.constexpr, VP: tl.constexpr, BT: tl.constexpr, LRPE: tl.constexpr,
    INITIAL: tl.constexpr, TOTAL: tl.constexpr,
):  # fmt: skip
    """From what each piece adds to what it finds, in place, up to the last span's first. `move`, see `fill_moves`: cos and sin
    of a full piece's tokens come first. `unit`: leave of the blocks when the pieces were summed, if it was another. With TOTAL
    nothing changes, and the sequence's state after its last token is kept in `total`, in units of exp(max). One program a
    (sequence, head, slice of features)."""
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, vcol = tl.program_id(2) * BD + tl.arange(0, BD), tl.arange(0, VP)
    start = tl.load(sequences_ptr + sequence * 4).to(tl.int64)
    pieces = tl.load(sequences_ptr + sequence * 4 + (1 if TOTAL else 2))
    SIZE: tl.constexpr = (2 if LRPE else 1) * D * V
    state = sequence * H + head
    real = tl.zeros([BD, VP], tl.float32)
    imag = tl.zeros([BD, VP], tl.float32)
    unit = tl.full([BD], float("-inf"), tl.float32)
    if INITIAL:
        unit = load_vector(max0_ptr + state * D, row, D, BD)
        real = load_matrix(kv0_ptr + state * SIZE, row, vcol, D, V, BD, VP)
        if LRPE:
            imag = load_matrix(kv0_ptr + state * SIZE + D * V, row, vcol, D, V, BD, VP)
    if LRPE:
        cos, sin = load_vector(move_ptr + head * D, row, D, BD), load_vector(move_ptr + (H + head) * D, row, D, BD)
    for i in range(0, pieces):
        _, _, length, block, _, _, _ = load_span(pieces_ptr, start + i)
        at = (start + i) * H + head
        end = ((block + tl.cdiv(length, BT) - 1) * H + head) * D
        leave = load_vector(leave_ptr + end, row, D, BD)
        real_added = load_matrix(piece_kv_ptr + at * SIZE, row, vcol, D, V, BD, VP)
        if LRPE:
            imag_added = load_matrix(piece_kv_ptr + at * SIZE + D * V, row, vcol, D, V, BD, VP)
        if not TOTAL:
            store_matrix(piece_kv_ptr + at * SIZE, row, vcol, real, D, V, BD, VP)
            if LRPE:
                store_matrix(piece_kv_ptr + at * SIZE + D * V, row, vcol, imag, D, V, BD, VP)
        if unit_ptr is not None:  # from which a block may have become slower, by SAFE_GROWTH / 2 at most
            rescaled = fade(load_vector(unit_ptr + end, row, D, BD), leave)[:, None]
            real_added *= rescaled
            if LRPE:
                imag_added *= rescaled
        faded = fade(unit, leave)
        unit = leave
        if LRPE:
            if TOTAL:  # noqa: SIM102
                if i == pieces - 1:  # which may be short
                    sequences = tl.num_programs(0)
                    cos = load_vector(move_ptr + (2 * H + state) * D, row, D, BD)
                    sin = load_vector(move_ptr + ((2 + sequences) * H + state) * D, row, D, BD)
            # By a full piece: without TOTAL the sum after the last one is not used.
            real, imag = turned(real, imag, cos * faded, sin * faded)
            imag += imag_added
            real += real_added
        else:
            real = real * faded[:, None] + real_added
    if TOTAL:  # noqa: SIM102
        if pieces > 0:
            faded = fade(unit, load_vector(max_ptr + state * D, row, D, BD))[:, None]
            store_matrix(total_ptr + state * SIZE, row, vcol, real * faded, D, V, BD, VP)
            if LRPE:
                store_matrix(total_ptr + state * SIZE + D * V, row, vcol, imag * faded, D, V, BD, VP)


@triton.jit
def outputs_of(
    block, head, q_ptr, k_ptr, v_ptr, o_ptr, blocks_ptr, tri_ptr, cos_ptr, sin_ptr, kv_ptr, enter_ptr,
    mass_ptr,
    sqb, sqn, sqh, skb, skn, skh, svb, svn, svh, sob, son, soh, H,
    D: tl.constexpr, V: tl.constexpr, DH: tl.constexpr, NH: tl.constexpr, VP: tl.constexpr, BT: tl.constexpr,
    LRPE: tl.constexpr, SILU: tl.constexpr, OP: tl.constexpr, PREC: tl.constexpr, STAGES: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """The block against itself and the state that it finds."""
    batch, first, length, _ = load_block(blocks_ptr, block)
    step, vcol = tl.arange(0, BT), tl.arange(0, VP)
    present = step < length
    q_ptr += batch * sqb + first * sqn + head * sqh
    k_ptr += batch * skb + first * skn + head * skh
    v_ptr += batch * svb + first * svn + head * svh
    o_ptr += batch * sob + first * son + head * soh
    at = (block * H + head) * D
    kv_ptr += at * ((2 if LRPE else 1) * V)
    out = tl.zeros([BT, VP], tl.float32)
    scores = tl.zeros([BT, BT], tl.float32)
    triangle = load_triangle(tri_ptr, BT)
    for part in tl.range(0, NH, num_stages=STAGES):
        col = part * DH + tl.arange(0, DH)
        enter, mass = load_vector(enter_ptr + at, col, D, DH), load_vector(mass_ptr + at, col, D, DH)
        if EXACT:
            read = exact_scale(k_ptr, skn, length, col, enter, mass, BT, D, DH)
            read *= activated(load_rows(q_ptr, step, sqn, col, present, D, DH), SILU)
        else:
            weight = exp(load_keys(k_ptr, step, skn, col, present, D, DH) - enter[None, :])
            query = load_rows(q_ptr, step, sqn, col, present, D, DH)
            read = activated_over(query, running_mass(triangle, weight.to(OP), mass, PREC), SILU)
        state = load_matrix(kv_ptr, col, vcol, D, V, DH, VP)
        if LRPE:
            cos = load_angles(cos_ptr, head, step, col, D, DH, BT)
            sin = load_angles(sin_ptr, head, step, col, D, DH, BT)
            read_cos, read_sin = (read * cos).to(OP), (read * sin).to(OP)
            if not EXACT:
                scores = tl.dot(read_cos, tl.trans((weight * cos).to(OP)), scores, input_precision=PREC)
                scores = tl.dot(read_sin, tl.trans((weight * sin).to(OP)), scores, input_precision=PREC)
            out = tl.dot(read_cos, state, out, input_precision=PREC)
            state = load_matrix(kv_ptr + D * V, col, vcol, D, V, DH, VP)
            out = tl.dot(read_sin, state, out, input_precision=PREC)
        else:
            if not EXACT:
                scores = tl.dot(read.to(OP), tl.trans(weight.to(OP)), scores, input_precision=PREC)
            out = tl.dot(read.to(OP), state, out, input_precision=PREC)
    value = load_rows(v_ptr, step, svn, vcol, present, V, VP).to(OP)
    if EXACT:
        scores = exact_scores(
            q_ptr, k_ptr, enter_ptr + at, mass_ptr + at, cos_ptr, sin_ptr, sqn, skn, head, length,
            D, DH, NH, BT, LRPE, SILU, False,
        )  # fmt: skip
    else:
        scores = tl.where(step[:, None] >= step[None, :], scores, 0.0)
    out = tl.dot(scores.to(OP), value, out, input_precision=PREC)
    store_rows(o_ptr, step, son, vcol, present, out, V, VP)


@triton.jit(do_not_specialize=["total"])
def outputs(
    q_ptr, k_ptr, v_ptr, o_ptr, blocks_ptr, tri_ptr, cos_ptr, sin_ptr, kv_ptr, enter_ptr, mass_ptr, flag_ptr,
    total,
    sqb, sqn, sqh, skb, skn, skh, svb, svn, svh, sob, son, soh, H,
    D: tl.constexpr, V: tl.constexpr, DH: tl.constexpr, NH: tl.constexpr, VP: tl.constexpr, BT: tl.constexpr,
    LRPE: tl.constexpr, SILU: tl.constexpr, OP: tl.constexpr, PREC: tl.constexpr, STAGES: tl.constexpr,
    COUNT: tl.constexpr,
):  # fmt: skip
    """Outputs. COUNT 0: one program a (block, head), for those in the fast form; else the exact form, for those of
    COUNT (block, head) of `total` that need it, one after the other."""
    if COUNT == 0:
        block, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
        if tl.load(flag_ptr + block * H + head) == 0:
            outputs_of(
                block, head, q_ptr, k_ptr, v_ptr, o_ptr, blocks_ptr, tri_ptr, cos_ptr, sin_ptr, kv_ptr, enter_ptr,
                mass_ptr,
                sqb, sqn, sqh, skb, skn, skh, svb, svn, svh, sob, son, soh, H,
                D, V, DH, NH, VP, BT, LRPE, SILU, OP, PREC, STAGES, False,
            )  # fmt: skip
    else:
        start = tl.program_id(0).to(tl.int64) * COUNT
        if some_flags(flag_ptr, start, total, COUNT):
            for i in range(0, tl.minimum(total - start, COUNT)):
                if tl.load(flag_ptr + start + i) != 0:
                    outputs_of(
                        (start + i) // H, (start + i) % H, q_ptr, k_ptr, v_ptr, o_ptr, blocks_ptr, tri_ptr,
                        cos_ptr, sin_ptr, kv_ptr, enter_ptr, mass_ptr,
                        sqb, sqn, sqh, skb, skn, skh, svb, svn, svh, sob, son, soh, H,
                        D, V, DH, NH, VP, BT, LRPE, SILU, OP, PREC, 1, True,
                    )  # fmt: skip
