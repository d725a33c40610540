"""Backward Triton kernels of the causal additive scan: those that look at tokens; `triton_backward_states` has the others. See
`triton_forward` for the buffers.

With asked_t = phi_t dphi_t / s_t: dk_r = e^{k_r} (sum_{t>=r} phi_t c_tr <do_t, v_r> / s_t - sum_{t>=r} asked_t). Buffers:
  x[B, N, H, D]          phi exp(enter) / s_t in the operands' dtype: computed once, for all that comes after
  later[B, N, H, D]      sum of `asked` from a token to the end of its block, in units of exp(-enter); in the exact form
                         times exp(k), what the block's own normalisers take from dk
  grad[b, h, (2,) D, V]  what all queries after block b ask of the state that it leaves, in units of exp(-leave),
                         angle 0 at the block's first token
  piece_grad[p, h, (2,) D, V]  float32, what the queries of a piece of a span ask of the state that it finds
                         (`triton_span_sums`), in units of exp(-enter) of its first block, angle 0 at its first token; after
                         `scan_span_grads` what all later pieces ask of the state that it leaves, in units of exp(-leave)
                         of its last block, angle 0 at the token after
  pressure[b, h, D]      sum of `asked` over block b, in units of exp(-enter) (`own`); and, by `scan_pressure`, over all
                         that comes later, in units of exp(-leave)
theta's gradient is the sum over tokens of torque times place. Places count from windows of WINDOW blocks, so that large
products need not cancel; a state that is handed on from window to window is moved by that many tokens (`moved`).
"""

# What Triton compiles is not quite Python: types change between uses.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from .triton_exact import exact_key_sums, exact_query_sums, exact_scale, exact_scores, exact_taken
from .triton_forward import LAST_PIECE, SPAN_FIELDS, load_span
from .triton_parts import (
    exp,
    inverse,
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
    store_vector,
    turned,
)

WINDOW = tl.constexpr(4)


@triton.jit
def query_grads_of(
    block, head, q_ptr, k_ptr, v_ptr, g_ptr, dq_ptr, x_ptr, later_ptr, blocks_ptr, tri_ptr, cos_ptr, sin_ptr, kv_ptr,
    enter_ptr, mass_ptr, pressure_ptr, torque_ptr,
    sqb, sqn, sqh, skb, skn, skh, svb, svn, svh, sgb, sgn, sgh, sdb, sdn, sdh, seb, sen, seh, slb, sln, slh, H,
    D: tl.constexpr, V: tl.constexpr, DH: tl.constexpr, NH: tl.constexpr, VP: tl.constexpr, BT: tl.constexpr,
    LRPE: tl.constexpr, SILU: tl.constexpr, OP: tl.constexpr, PREC: tl.constexpr, STAGES: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """dq, x, later and pressure."""
    batch, first, length, place = load_block(blocks_ptr, block)
    step, vcol = tl.arange(0, BT), tl.arange(0, VP)
    present = step < length
    q_ptr += batch * sqb + first * sqn + head * sqh
    k_ptr += batch * skb + first * skn + head * skh
    v_ptr += batch * svb + first * svn + head * svh
    g_ptr += batch * sgb + first * sgn + head * sgh
    x_ptr += batch * sdb + first * sdn + head * sdh
    dq_ptr += batch * seb + first * sen + head * seh
    later_ptr += batch * slb + first * sln + head * slh
    at = (block * H + head) * D
    kv_ptr += at * ((2 if LRPE else 1) * V)
    upstream = load_rows(g_ptr, step, sgn, vcol, present, V, VP).to(OP)
    value = load_rows(v_ptr, step, svn, vcol, present, V, VP).to(OP)
    pairs = tl.dot(upstream, tl.trans(value), input_precision=PREC)
    pairs = tl.where(step[:, None] >= step[None, :], pairs, 0.0)
    triangle = load_triangle(tri_ptr, BT)
    lag = (step + (place % WINDOW) * BT).to(tl.float32)
    for part in tl.range(0, NH, num_stages=STAGES):
        col = part * DH + tl.arange(0, DH)
        enter, mass = load_vector(enter_ptr + at, col, D, DH), load_vector(mass_ptr + at, col, D, DH)
        query = load_rows(q_ptr, step, sqn, col, present, D, DH).to(tl.float32)
        state = load_matrix(kv_ptr, col, vcol, D, V, DH, VP)
        real = tl.dot(upstream, tl.trans(state), input_precision=PREC)
        if LRPE:
            cos = load_angles(cos_ptr, head, step, col, D, DH, BT)
            sin = load_angles(sin_ptr, head, step, col, D, DH, BT)
            state = load_matrix(kv_ptr + D * V, col, vcol, D, V, DH, VP)
            imag = tl.dot(upstream, tl.trans(state), input_precision=PREC)
        if EXACT:
            scale = exact_scale(k_ptr, skn, length, col, enter, mass, BT, D, DH)
            own, own_sin = exact_query_sums(
                pairs, k_ptr, cos_ptr, sin_ptr, skn, head, length, col, enter, mass, BT, D, DH, LRPE
            )  # fmt: skip
            real = real * scale + own
            if LRPE:
                imag = imag * scale + own_sin
        else:
            weight = exp(load_keys(k_ptr, step, skn, col, present, D, DH) - enter[None, :])
            scale = inverse(running_mass(triangle, weight.to(OP), mass, PREC))
            if LRPE:
                real = tl.dot(pairs.to(OP), (weight * cos).to(OP), real, input_precision=PREC) * scale
                imag = tl.dot(pairs.to(OP), (weight * sin).to(OP), imag, input_precision=PREC) * scale
            else:
                real = tl.dot(pairs.to(OP), weight.to(OP), real, input_precision=PREC) * scale
        if SILU:
            gate = inverse(1.0 + exp(-query))
            phi = query * gate
        else:
            phi = query
        if LRPE:
            grad_phi = real * cos + imag * sin
            turn = phi * (imag * cos - real * sin) * lag[:, None]
            store_vector(torque_ptr + at, col, tl.sum(turn, 0), D, DH)
        else:
            grad_phi = real
        asked = phi * grad_phi
        store_rows(x_ptr, step, sdn, col, present, phi * scale, D, DH)
        if SILU:
            grad_phi *= gate + phi * (1.0 - gate)
        store_rows(dq_ptr, step, sen, col, present, grad_phi, D, DH)
        later = tl.dot(tl.trans(triangle), (asked * scale).to(OP), input_precision=PREC)
        tl.store(
            (pressure_ptr + at) + step[:, None] * 0 + col[None, :],
            later,
            mask=(step == 0)[:, None] & (col < D)[None, :],
        )
        if EXACT:
            later = exact_taken(asked, k_ptr, skn, length, col, enter, mass, BT, D, DH)
        store_rows(later_ptr, step, sln, col, present, later, D, DH)


@triton.jit(do_not_specialize=["total"])
def query_grads(
    q_ptr, k_ptr, v_ptr, g_ptr, dq_ptr, x_ptr, later_ptr, blocks_ptr, tri_ptr, cos_ptr, sin_ptr, kv_ptr, enter_ptr,
    mass_ptr, flag_ptr, pressure_ptr, torque_ptr, total,
    sqb, sqn, sqh, skb, skn, skh, svb, svn, svh, sgb, sgn, sgh, sdb, sdn, sdh, seb, sen, seh, slb, sln, slh, H,
    D: tl.constexpr, V: tl.constexpr, DH: tl.constexpr, NH: tl.constexpr, VP: tl.constexpr, BT: tl.constexpr,
    LRPE: tl.constexpr, SILU: tl.constexpr, OP: tl.constexpr, PREC: tl.constexpr, STAGES: tl.constexpr,
    COUNT: tl.constexpr,
):  # fmt: skip
    """dq, x, later and pressure. COUNT as in `triton_forward.outputs`."""
    if COUNT == 0:
        block, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
        if tl.load(flag_ptr + block * H + head) == 0:
            query_grads_of(
                block, head,
                q_ptr, k_ptr, v_ptr, g_ptr, dq_ptr, x_ptr, later_ptr, blocks_ptr, tri_ptr, cos_ptr, sin_ptr, kv_ptr,
                enter_ptr, mass_ptr, pressure_ptr, torque_ptr,
                sqb, sqn, sqh, skb, skn, skh, svb, svn, svh, sgb, sgn, sgh, sdb, sdn, sdh, seb, sen, seh, slb, sln, slh, H,
                D, V, DH, NH, VP, BT, LRPE, SILU, OP, PREC, STAGES, False,
            )  # fmt: skip
    else:
        start = tl.program_id(0).to(tl.int64) * COUNT
        if some_flags(flag_ptr, start, total, COUNT):
            for i in range(0, tl.minimum(total - start, COUNT)):
                if tl.load(flag_ptr + start + i) != 0:
                    query_grads_of(
                        (start + i) // H, (start + i) % H,
                        q_ptr, k_ptr, v_ptr, g_ptr, dq_ptr, x_ptr, later_ptr, blocks_ptr, tri_ptr, cos_ptr, sin_ptr, kv_ptr,
                        enter_ptr, mass_ptr, pressure_ptr, torque_ptr,
                        sqb, sqn, sqh, skb, skn, skh, svb, svn, svh, sgb, sgn, sgh, sdb, sdn, sdh, seb, sen, seh, slb, sln,
                        slh, H,
                        D, V, DH, NH, VP, BT, LRPE, SILU, OP, PREC, 1, True,
                    )  # fmt: skip


@triton.jit
def chain_grads(
    x_ptr, g_ptr, spans_ptr, cos_ptr, sin_ptr, turn_ptr, kv_ptr, grad_ptr, enter_ptr, leave_ptr, moved_ptr, from_ptr,
    to_ptr, sdb, sdn, sdh, sgb, sgn, sgh, H,
    D: tl.constexpr, V: tl.constexpr, DH: tl.constexpr, NH: tl.constexpr, VB: tl.constexpr, BT: tl.constexpr,
    LRPE: tl.constexpr, FROM: tl.constexpr, TO: tl.constexpr, OP: tl.constexpr,
    PREC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Every block's gradient, a span's blocks from the last to the first, from the gradient in `from` (FROM: 1, one a
    piece, 2, one a sequence, 0, none). TO: the gradient of the state that each sequence finds is kept in `to`. One program
    a (span, head, slice of features and slice of VB value features)."""
    span = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    batch, first, length, block, place, sequence, _ = load_span(spans_ptr, span)
    step, vcol = tl.arange(0, BT), (tl.program_id(2) // NH) * VB + tl.arange(0, VB)
    col = (tl.program_id(2) % NH) * DH + tl.arange(0, DH)
    SIZE: tl.constexpr = (2 if LRPE else 1) * D * V
    x_ptr += batch * sdb + head * sdh
    g_ptr += batch * sgb + head * sgh
    blocks = tl.cdiv(length, BT)
    real = tl.zeros([DH, VB], tl.float32)
    imag = tl.zeros([DH, VB], tl.float32)
    moved = tl.zeros([DH], tl.float32)
    unit = load_vector(leave_ptr + ((block + blocks - 1) * H + head) * D, col, D, DH)
    if FROM:
        found = tl.load(spans_ptr + span * SPAN_FIELDS + LAST_PIECE).to(tl.int64) if FROM == 1 else sequence
        source = (found * H + head) * SIZE
        real = load_matrix(from_ptr + source, col, vcol, D, V, DH, VB)
        if LRPE:
            imag = load_matrix(from_ptr + source + D * V, col, vcol, D, V, DH, VB)
    if LRPE:
        count = length - (blocks - 1) * BT
        cos_turn = load_vector(turn_ptr + (head * (BT + 1) + count) * (2 * D), col, D, DH)
        sin_turn = load_vector(turn_ptr + (head * (BT + 1) + count) * (2 * D) + D, col, D, DH)
        cos_on = load_vector(turn_ptr + (head * (BT + 1) + BT) * (2 * D), col, D, DH)
        sin_on = load_vector(turn_ptr + (head * (BT + 1) + BT) * (2 * D) + D, col, D, DH)
    for j in tl.range(0, blocks, num_stages=STAGES):
        i = blocks - 1 - j
        present = i * BT + step < length
        row = first + i * BT
        at = ((block + i) * H + head) * D
        read = load_rows(x_ptr + row * sdn, step, sdn, col, present, D, DH)
        upstream = load_rows(g_ptr + row * sgn, step, sgn, vcol, present, V, VB).to(OP)
        enter, leave = load_vector(enter_ptr + at, col, D, DH), load_vector(leave_ptr + at, col, D, DH)
        faded = exp(leave - unit)
        if LRPE:
            real, imag = turned(real, imag, cos_turn * faded, -sin_turn * faded)
            cos_turn, sin_turn = cos_on, sin_on
        else:
            real *= faded[:, None]
        store_matrix(grad_ptr + at * (SIZE // D), col, vcol, real, D, V, DH, VB)
        if LRPE:
            store_matrix(grad_ptr + at * (SIZE // D) + D * V, col, vcol, imag, D, V, DH, VB)
        crossed = exp(enter - leave)[:, None]
        if LRPE:
            cos = load_angles(cos_ptr, head, step, col, D, DH, BT)
            sin = load_angles(sin_ptr, head, step, col, D, DH, BT)
            read = read.to(tl.float32)
            real = tl.dot(tl.trans((read * cos).to(OP)), upstream, real * crossed, input_precision=PREC)
            imag = tl.dot(tl.trans((read * sin).to(OP)), upstream, imag * crossed, input_precision=PREC)
        else:
            real = tl.dot(tl.trans(read), upstream, real * crossed, input_precision=PREC)
        unit = enter
        if LRPE:  # noqa: SIM102
            if (place + i) % WINDOW == 0 and place + i > 0:
                state = load_matrix(kv_ptr + at * (SIZE // D), col, vcol, D, V, DH, VB).to(tl.float32)
                state_sin = load_matrix(kv_ptr + at * (SIZE // D) + D * V, col, vcol, D, V, DH, VB).to(tl.float32)
                moved += tl.sum(state_sin * real - state * imag, 1) * (WINDOW * BT)
    if LRPE:
        slices = (tl.num_programs(2) // NH) * span + tl.program_id(2) // NH
        store_vector(moved_ptr + (slices * H + head) * D, col, moved, D, DH)
    if TO and place == 0:
        target = (sequence * H + head) * SIZE
        store_matrix(to_ptr + target, col, vcol, real, D, V, DH, VB)
        if LRPE:
            store_matrix(to_ptr + target + D * V, col, vcol, imag, D, V, DH, VB)


@triton.jit
def key_grads_of(
    block, head, q_ptr, k_ptr, v_ptr, g_ptr, dk_ptr, x_ptr, later_ptr, blocks_ptr, cos_ptr, sin_ptr, grad_ptr,
    enter_ptr, leave_ptr, mass_ptr, pressure_ptr, torque_ptr,
    sqb, sqn, sqh, skb, skn, skh, svb, svn, svh, sgb, sgn, sgh, sdb, sdn, sdh, seb, sen, seh, slb, sln, slh, H,
    D: tl.constexpr, V: tl.constexpr, DH: tl.constexpr, NH: tl.constexpr, VP: tl.constexpr, BT: tl.constexpr,
    LRPE: tl.constexpr, SILU: tl.constexpr, OP: tl.constexpr, PREC: tl.constexpr, STAGES: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """dk. `later` may be the same memory."""
    batch, first, length, place = load_block(blocks_ptr, block)
    step, vcol = tl.arange(0, BT), tl.arange(0, VP)
    present = step < length
    q_ptr += batch * sqb + first * sqn + head * sqh
    k_ptr += batch * skb + first * skn + head * skh
    v_ptr += batch * svb + first * svn + head * svh
    g_ptr += batch * sgb + first * sgn + head * sgh
    x_ptr += batch * sdb + first * sdn + head * sdh
    dk_ptr += batch * seb + first * sen + head * seh
    later_ptr += batch * slb + first * sln + head * slh
    at = (block * H + head) * D
    grad_ptr += at * ((2 if LRPE else 1) * V)
    value = load_rows(v_ptr, step, svn, vcol, present, V, VP).to(OP)
    upstream = load_rows(g_ptr, step, sgn, vcol, present, V, VP).to(OP)
    pairs = tl.dot(value, tl.trans(upstream), input_precision=PREC)  # [r, t]
    pairs = tl.where(step[:, None] <= step[None, :], pairs, 0.0)
    lag = (step + (place % WINDOW) * BT).to(tl.float32)
    for part in tl.range(0, NH, num_stages=STAGES):
        col = part * DH + tl.arange(0, DH)
        leave = load_vector(leave_ptr + at, col, D, DH)
        taken = load_vector(pressure_ptr + at, col, D, DH)[None, :]
        state = load_matrix(grad_ptr, col, vcol, D, V, DH, VP)
        real = tl.dot(value, tl.trans(state), input_precision=PREC)
        if LRPE:
            cos = load_angles(cos_ptr, head, step, col, D, DH, BT)
            sin = load_angles(sin_ptr, head, step, col, D, DH, BT)
            state = load_matrix(grad_ptr + D * V, col, vcol, D, V, DH, VP)
            imag = tl.dot(value, tl.trans(state), input_precision=PREC)
        if not EXACT:
            read = load_rows(x_ptr, step, sdn, col, present, D, DH)
            if LRPE:
                read = read.to(tl.float32)
                real = tl.dot(pairs.to(OP), (read * cos).to(OP), real, input_precision=PREC)
                imag = tl.dot(pairs.to(OP), (read * sin).to(OP), imag, input_precision=PREC)
            else:
                real = tl.dot(pairs.to(OP), read, real, input_precision=PREC)
        weight = exp(load_keys(k_ptr, step, skn, col, present, D, DH) - leave[None, :])
        later = load_rows(later_ptr, step, sln, col, present, D, DH).to(tl.float32)
        if EXACT:
            enter, mass = load_vector(enter_ptr + at, col, D, DH), load_vector(mass_ptr + at, col, D, DH)
            own, own_sin = exact_key_sums(
                pairs, q_ptr, k_ptr, cos_ptr, sin_ptr, sqn, skn, head, length, col, enter, mass,
                BT, D, DH, LRPE, SILU,
            )  # fmt: skip
            real = real * weight + own
            if LRPE:
                imag = imag * weight + own_sin
                turn = (imag * cos - real * sin) * lag[:, None]
                real = real * cos + imag * sin
            grad = real - later - weight * taken
        else:
            if LRPE:
                turn = weight * (imag * cos - real * sin) * lag[:, None]
                real = real * cos + imag * sin
            grad = weight * (real - later - taken)
        if LRPE:
            store_vector(torque_ptr + at, col, tl.sum(turn, 0), D, DH)
        store_rows(dk_ptr, step, sen, col, present, grad, D, DH)


@triton.jit(do_not_specialize=["total"])
def key_grads(
    q_ptr, k_ptr, v_ptr, g_ptr, dk_ptr, x_ptr, later_ptr, blocks_ptr, cos_ptr, sin_ptr, grad_ptr, enter_ptr, leave_ptr,
    mass_ptr, flag_ptr, pressure_ptr, torque_ptr, total,
    sqb, sqn, sqh, skb, skn, skh, svb, svn, svh, sgb, sgn, sgh, sdb, sdn, sdh, seb, sen, seh, slb, sln, slh, H,
    D: tl.constexpr, V: tl.constexpr, DH: tl.constexpr, NH: tl.constexpr, VP: tl.constexpr, BT: tl.constexpr,
    LRPE: tl.constexpr, SILU: tl.constexpr, OP: tl.constexpr, PREC: tl.constexpr, STAGES: tl.constexpr,
    COUNT: tl.constexpr,
):  # fmt: skip
    """dk. COUNT as in `triton_forward.outputs`."""
    if COUNT == 0:
        block, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
        if tl.load(flag_ptr + block * H + head) == 0:
            key_grads_of(
                block, head,
                q_ptr, k_ptr, v_ptr, g_ptr, dk_ptr, x_ptr, later_ptr, blocks_ptr, cos_ptr, sin_ptr, grad_ptr, enter_ptr,
                leave_ptr, mass_ptr, pressure_ptr, torque_ptr,
                sqb, sqn, sqh, skb, skn, skh, svb, svn, svh, sgb, sgn, sgh, sdb, sdn, sdh, seb, sen, seh, slb, sln, slh, H,
                D, V, DH, NH, VP, BT, LRPE, SILU, OP, PREC, STAGES, False,
            )  # fmt: skip
    else:
        start = tl.program_id(0).to(tl.int64) * COUNT
        if some_flags(flag_ptr, start, total, COUNT):
            for i in range(0, tl.minimum(total - start, COUNT)):
                if tl.load(flag_ptr + start + i) != 0:
                    key_grads_of(
                        (start + i) // H, (start + i) % H,
                        q_ptr, k_ptr, v_ptr, g_ptr, dk_ptr, x_ptr, later_ptr, blocks_ptr, cos_ptr, sin_ptr, grad_ptr, enter_ptr,
                        leave_ptr, mass_ptr, pressure_ptr, torque_ptr,
                        sqb, sqn, sqh, skb, skn, skh, svb, svn, svh, sgb, sgn, sgh, sdb, sdn, sdh, seb, sen, seh, slb, sln,
                        slh, H,
                        D, V, DH, NH, VP, BT, LRPE, SILU, OP, PREC, 1, True,
                    )  # fmt: skip


@triton.jit
def value_grads_of(
    block, head, q_ptr, k_ptr, g_ptr, dv_ptr, x_ptr, blocks_ptr, cos_ptr, sin_ptr, grad_ptr, enter_ptr, leave_ptr,
    mass_ptr,
    sqb, sqn, sqh, skb, skn, skh, sgb, sgn, sgh, sdb, sdn, sdh, seb, sen, seh, H,
    D: tl.constexpr, V: tl.constexpr, DH: tl.constexpr, NH: tl.constexpr, VP: tl.constexpr, BT: tl.constexpr,
    LRPE: tl.constexpr, SILU: tl.constexpr, OP: tl.constexpr, PREC: tl.constexpr, STAGES: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """dv: `outputs` the other way round."""
    batch, first, length, _ = load_block(blocks_ptr, block)
    step, vcol = tl.arange(0, BT), tl.arange(0, VP)
    present = step < length
    q_ptr += batch * sqb + first * sqn + head * sqh
    k_ptr += batch * skb + first * skn + head * skh
    g_ptr += batch * sgb + first * sgn + head * sgh
    x_ptr += batch * sdb + first * sdn + head * sdh
    dv_ptr += batch * seb + first * sen + head * seh
    at = (block * H + head) * D
    grad_ptr += at * ((2 if LRPE else 1) * V)
    out = tl.zeros([BT, VP], tl.float32)
    scores = tl.zeros([BT, BT], tl.float32)  # [r, t]
    for part in tl.range(0, NH, num_stages=STAGES):
        col = part * DH + tl.arange(0, DH)
        leave = load_vector(leave_ptr + at, col, D, DH)
        weight = exp(load_keys(k_ptr, step, skn, col, present, D, DH) - leave[None, :])
        state = load_matrix(grad_ptr, col, vcol, D, V, DH, VP)
        if LRPE:
            cos = load_angles(cos_ptr, head, step, col, D, DH, BT)
            sin = load_angles(sin_ptr, head, step, col, D, DH, BT)
            weight_cos, weight_sin = (weight * cos).to(OP), (weight * sin).to(OP)
            if not EXACT:
                read = load_rows(x_ptr, step, sdn, col, present, D, DH).to(tl.float32)
                scores = tl.dot(weight_cos, tl.trans((read * cos).to(OP)), scores, input_precision=PREC)
                scores = tl.dot(weight_sin, tl.trans((read * sin).to(OP)), scores, input_precision=PREC)
            out = tl.dot(weight_cos, state, out, input_precision=PREC)
            state = load_matrix(grad_ptr + D * V, col, vcol, D, V, DH, VP)
            out = tl.dot(weight_sin, state, out, input_precision=PREC)
        else:
            if not EXACT:
                read = load_rows(x_ptr, step, sdn, col, present, D, DH)
                scores = tl.dot(weight.to(OP), tl.trans(read), scores, input_precision=PREC)
            out = tl.dot(weight.to(OP), state, out, input_precision=PREC)
    upstream = load_rows(g_ptr, step, sgn, vcol, present, V, VP).to(OP)
    if EXACT:
        scores = exact_scores(
            q_ptr, k_ptr, enter_ptr + at, mass_ptr + at, cos_ptr, sin_ptr, sqn, skn, head, length,
            D, DH, NH, BT, LRPE, SILU, True,
        )  # fmt: skip
    else:
        scores = tl.where(step[:, None] <= step[None, :], scores, 0.0)
    out = tl.dot(scores.to(OP), upstream, out, input_precision=PREC)
    store_rows(dv_ptr, step, sen, vcol, present, out, V, VP)


@triton.jit(do_not_specialize=["total"])
def value_grads(
    q_ptr, k_ptr, g_ptr, dv_ptr, x_ptr, blocks_ptr, cos_ptr, sin_ptr, grad_ptr, enter_ptr, leave_ptr, mass_ptr, flag_ptr,
    total,
    sqb, sqn, sqh, skb, skn, skh, sgb, sgn, sgh, sdb, sdn, sdh, seb, sen, seh, H,
    D: tl.constexpr, V: tl.constexpr, DH: tl.constexpr, NH: tl.constexpr, VP: tl.constexpr, BT: tl.constexpr,
    LRPE: tl.constexpr, SILU: tl.constexpr, OP: tl.constexpr, PREC: tl.constexpr, STAGES: tl.constexpr,
    COUNT: tl.constexpr,
):  # fmt: skip
    """dv. COUNT as in `triton_forward.outputs`."""
    if COUNT == 0:
        block, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
        if tl.load(flag_ptr + block * H + head) == 0:
            value_grads_of(
                block, head,
                q_ptr, k_ptr, g_ptr, dv_ptr, x_ptr, blocks_ptr, cos_ptr, sin_ptr, grad_ptr, enter_ptr, leave_ptr,
                mass_ptr,
                sqb, sqn, sqh, skb, skn, skh, sgb, sgn, sgh, sdb, sdn, sdh, seb, sen, seh, H,
                D, V, DH, NH, VP, BT, LRPE, SILU, OP, PREC, STAGES, False,
            )  # fmt: skip
    else:
        start = tl.program_id(0).to(tl.int64) * COUNT
        if some_flags(flag_ptr, start, total, COUNT):
            for i in range(0, tl.minimum(total - start, COUNT)):
                if tl.load(flag_ptr + start + i) != 0:
                    value_grads_of(
                        (start + i) // H, (start + i) % H,
                        q_ptr, k_ptr, g_ptr, dv_ptr, x_ptr, blocks_ptr, cos_ptr, sin_ptr, grad_ptr, enter_ptr, leave_ptr,
                        mass_ptr,
                        sqb, sqn, sqh, skb, skn, skh, sgb, sgn, sgh, sdb, sdn, sdh, seb, sen, seh, H,
                        D, V, DH, NH, VP, BT, LRPE, SILU, OP, PREC, 1, True,
                    )  # fmt: skip
