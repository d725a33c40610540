"""Backward Triton kernels of the causal additive scan. See `triton_forward` for the buffers.

With p_t = phi dphi / s_t: dk_r = e^{k_r} (sum_{t>=r} phi_t c_tr <do_t, v_r> / s_t - sum_{t>=r} p_t). Further buffers:
  grad[c, h, (2,) D, V]  what a chunk's queries ask of earlier tokens, in units of exp(-before); after
                         `scan_state_grads` what all later chunks ask, in units of exp(-(running maximum after the
                         chunk)), angle 0 at the chunk's first token
  pressure[b, h, D]      sum of p over block b, in units of exp(-before); after `scan_pressure` over all later blocks,
                         in units of exp(-(running maximum after the block))
  x[B, N, H, D]          phi / s_t in units of exp(-before), in the operands' dtype: what later kernels would compute again
                         for every pair of blocks
Every kernel of blocks adds theta's part of its tokens, place times torque, into its own row of torque[b, h, D].
"""

# What Triton compiles is not quite Python: early exits stand alone, tuples grow by +, and types change between uses.
# ruff: noqa: SIM102, RUF005
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from .triton_parts import (
    LEVELS,
    activated,
    earlier_pairs,
    exact_mass,
    left_peak,
    level_keys,
    level_pairs,
    level_scale,
    load_angles,
    load_chunk,
    load_half,
    load_keys,
    load_matrix,
    load_rows,
    load_vector,
    read_scale,
    reference,
    running_mass,
    store_half,
    store_rows,
    triangle,
)


@triton.jit
def block_reference(k_ptr, peak_ptr, before, at, skn, start, col, D: tl.constexpr, DH: tl.constexpr):
    """The mid reference of a block that starts at token `start` of its chunk."""
    peak = load_vector(peak_ptr + at, col, D, DH)
    begin = load_vector(k_ptr + start * skn, col, D, DH).to(tl.float32)
    unit, _ = reference(before, begin, peak)
    return unit


@triton.jit
def any_flag(flag_ptr, block, blocks, H, NB: tl.constexpr):
    """Whether one of `blocks` blocks needs the exact form."""
    step = tl.arange(0, NB)
    return tl.max(tl.load(flag_ptr + (block + step) * H, mask=step < blocks, other=0), 0)


@triton.jit
def state_grads(
    q_ptr, k_ptr, g_ptr, x_ptr, chunks_ptr, cos_ptr, sin_ptr, grad_ptr, peak_ptr, mass_ptr, before_ptr, flag_ptr,
    sqb, sqn, sqh, skb, skn, skh, sgb, sgn, sgh, sxb, sxn, sxh, H,
    D: tl.constexpr, V: tl.constexpr, DH: tl.constexpr, VP: tl.constexpr, BT: tl.constexpr, NB: tl.constexpr,
    LRPE: tl.constexpr, SILU: tl.constexpr, EXACT: tl.constexpr, OP: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """read of every token, and grad of every chunk on its own. One program a (chunk, head, block of features)."""
    chunk = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    batch, first, length, ends = load_chunk(chunks_ptr, chunk)
    blocks = tl.cdiv(length, BT)
    if EXACT:
        if any_flag(flag_ptr + head, chunk * NB, blocks, H, NB) == 0:
            return
    step, vcol = tl.arange(0, BT), tl.arange(0, VP)
    col = tl.program_id(2) * DH + tl.arange(0, DH)
    q_ptr += batch * sqb + first * sqn + head * sqh
    k_ptr += batch * skb + first * skn + head * skh
    x_ptr += batch * sxb + first * sxn + head * sxh
    g_ptr += batch * sgb + first * sgn + head * sgh
    at = (chunk * NB * H + head) * D
    origin = load_vector(before_ptr + at, col, D, DH)
    real = tl.zeros([DH, VP], tl.float32)
    imag = tl.zeros([DH, VP], tl.float32)
    for i in range(0, blocks):
        row = i * BT + step
        present = row < length
        before = load_vector(before_ptr + at, col, D, DH)
        mass = load_vector(mass_ptr + at, col, D, DH)
        unit = block_reference(k_ptr, peak_ptr, before, at, skn, i * BT, col, D, DH)
        keys = load_keys(k_ptr, row, skn, col, present, D, DH)
        scale = read_scale(keys, before, mass, unit, before, present, BT, DH, EXACT, OP, PREC)
        read = activated(load_rows(q_ptr, row, sqn, col, present, D, DH), SILU) * scale
        store_rows(x_ptr, row, sxn, col, present, read, D)
        read *= tl.where(origin == float("-inf"), 0.0, tl.exp(origin - before))[None, :]
        grad = load_rows(g_ptr, row, sgn, vcol, present, V, VP).to(OP)
        if LRPE:
            cos = load_angles(cos_ptr, head, row, col, NB * BT, D, DH)
            sin = load_angles(sin_ptr, head, row, col, NB * BT, D, DH)
            real = tl.dot(tl.trans((read * cos).to(OP)), grad, real, input_precision=PREC)
            imag = tl.dot(tl.trans((read * sin).to(OP)), grad, imag, input_precision=PREC)
        else:
            real = tl.dot(tl.trans(read.to(OP)), grad, real, input_precision=PREC)
        at += H * D
    if (ends & 1) == 1:  # nothing lies before
        return
    grad_ptr += (chunk * H + head) * ((2 if LRPE else 1) * D * V)
    store_half(grad_ptr, col, vcol, real, D, V)
    if LRPE:
        store_half(grad_ptr + D * V, col, vcol, imag, D, V)


@triton.jit
def scan_state_grads(
    sequences_ptr, kv_ptr, grad_ptr, peak_ptr, before_ptr, theta_cos_ptr, theta_sin_ptr, torque_ptr, H,
    D: tl.constexpr, V: tl.constexpr, BD: tl.constexpr, VP: tl.constexpr, BT: tl.constexpr, NB: tl.constexpr,
    LRPE: tl.constexpr,
):  # fmt: skip
    """grad from what each chunk asks to what all later ones ask, in place, from the end; theta's part of the moves
    between chunks. One program a (sequence, head, block of features)."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    row, col = tl.program_id(2) * BD + tl.arange(0, BD), tl.arange(0, VP)
    ok = row < D
    start = tl.load(sequences_ptr + sequence * 3).to(tl.int64)
    chunks = tl.load(sequences_ptr + sequence * 3 + 1)
    blocks = tl.load(sequences_ptr + sequence * 3 + 2)
    SIZE: tl.constexpr = (2 if LRPE else 1) * D * V
    if LRPE:
        cos = tl.load(theta_cos_ptr + head * D + row, mask=ok, other=0.0)[:, None]
        sin = tl.load(theta_sin_ptr + head * D + row, mask=ok, other=0.0)[:, None]
    real = tl.zeros([BD, VP], tl.float32)
    imag = tl.zeros([BD, VP], tl.float32)
    torque = tl.zeros([BD], tl.float32)
    last = tl.maximum(chunks - 1, 0)
    at = ((start // NB + last) * H + head) * SIZE
    block = ((start + last * NB) * H + head) * D + row
    real_next = tl.zeros([BD, VP], tl.float32)
    imag_next = tl.zeros([BD, VP], tl.float32)
    if chunks > 1:
        real_next = load_half(grad_ptr + at, row, col, D, V)
        if LRPE:
            imag_next = load_half(grad_ptr + at + D * V, row, col, D, V)
    for i in range(0, chunks - 1):  # chunk last - i; the first one of a sequence is asked by nobody
        real_added, imag_added = real_next, imag_next
        if i + 2 < chunks:
            real_next = load_half(grad_ptr + at - H * SIZE, row, col, D, V)
            if LRPE:
                imag_next = load_half(grad_ptr + at - H * SIZE + D * V, row, col, D, V)
        if LRPE:
            real_kv = load_half(kv_ptr + at, row, col, D, V)
            imag_kv = load_half(kv_ptr + at + D * V, row, col, D, V)
        before = tl.load(before_ptr + block, mask=ok, other=0.0)
        count = tl.minimum(NB, blocks - (last - i) * NB)
        tail = block + (count - 1) * (H * D)
        after = tl.maximum(tl.load(before_ptr + tail, mask=ok, other=0.0), tl.load(peak_ptr + tail, mask=ok, other=0.0))
        store_half(grad_ptr + at, row, col, real, D, V)
        if LRPE:
            store_half(grad_ptr + at + D * V, row, col, imag, D, V)
        fade = tl.exp(before - after)[:, None]
        real = real_added + fade * real
        if LRPE:
            imag = imag_added + fade * imag
            torque += tl.sum(imag_kv * real - real_kv * imag, 1) * (NB * BT)
            turned = real * cos - imag * sin
            imag = real * sin + imag * cos
            real = turned
        at -= H * SIZE
        block -= NB * H * D
    if chunks > 0:
        store_half(grad_ptr + at, row, col, real, D, V)
        if LRPE:
            store_half(grad_ptr + at + D * V, row, col, imag, D, V)
    if LRPE:
        tl.store(torque_ptr + (sequence.to(tl.int64) * H + head) * D + row, torque, mask=ok)


@triton.jit
def query_grads(
    q_ptr, k_ptr, v_ptr, g_ptr, dq_ptr, dk_ptr, chunks_ptr, cos_ptr, sin_ptr, kv_ptr, peak_ptr, mass_ptr, before_ptr,
    flag_ptr, pressure_ptr, torque_ptr,
    sqb, sqn, sqh, skb, skn, skh, svb, svn, svh, sgb, sgn, sgh, sdb, sdn, sdh, H,
    D: tl.constexpr, V: tl.constexpr, DH: tl.constexpr, VP: tl.constexpr, BT: tl.constexpr, NB: tl.constexpr,
    LRPE: tl.constexpr, SILU: tl.constexpr, EXACT: tl.constexpr, OP: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """dq and pressure; into dk what the block's own p take from its keys. One program a (block, head, block of
    features)."""
    block = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    chunk, place = block // NB, (block % NB).to(tl.int32)
    batch, first, length, ends = load_chunk(chunks_ptr, chunk)
    if place * BT >= length:
        return
    if EXACT:
        if tl.load(flag_ptr + block * H + head) == 0:
            return
    step, vcol = tl.arange(0, BT), tl.arange(0, VP)
    col = tl.program_id(2) * DH + tl.arange(0, DH)
    row = place * BT + step
    present = row < length
    q_ptr += batch * sqb + first * sqn + head * sqh
    k_ptr += batch * skb + first * skn + head * skh
    v_ptr += batch * svb + first * svn + head * svh
    g_ptr += batch * sgb + first * sgn + head * sgh
    at = (block * H + head) * D
    before = load_vector(before_ptr + at, col, D, DH)
    mass = load_vector(mass_ptr + at, col, D, DH)
    if EXACT:
        unit = before
    else:
        unit = block_reference(k_ptr, peak_ptr, before, at, skn, place * BT, col, D, DH)
    grad = load_rows(g_ptr, row, sgn, vcol, present, V, VP).to(OP)

    real = tl.zeros([BT, DH], tl.float32)
    imag = tl.zeros([BT, DH], tl.float32)
    if (ends & 1) == 0:
        origin = load_vector(before_ptr + at - place * H * D, col, D, DH)
        kv_ptr += (chunk * H + head) * ((2 if LRPE else 1) * D * V)
        entry = tl.exp(origin - unit)[None, :]
        state = load_matrix(kv_ptr, col, vcol, D, V, DH, VP)
        real = tl.dot(grad, tl.trans(state), real, input_precision=PREC) * entry
        if LRPE:
            state = load_matrix(kv_ptr + D * V, col, vcol, D, V, DH, VP)
            imag = tl.dot(grad, tl.trans(state), imag, input_precision=PREC) * entry
    for i in range(0, place):
        there = i * BT + step
        value = load_rows(v_ptr, there, svn, vcol, there < length, V, VP).to(OP)
        pairs = tl.dot(grad, tl.trans(value), input_precision=PREC).to(OP)
        weight = tl.exp(load_keys(k_ptr, there, skn, col, there < length, D, DH) - unit[None, :])
        if LRPE:
            cos = load_angles(cos_ptr, head, there, col, NB * BT, D, DH)
            real = tl.dot(pairs, (weight * cos).to(OP), real, input_precision=PREC)
            sin = load_angles(sin_ptr, head, there, col, NB * BT, D, DH)
            imag = tl.dot(pairs, (weight * sin).to(OP), imag, input_precision=PREC)
        else:
            real = tl.dot(pairs, weight.to(OP), real, input_precision=PREC)

    value = load_rows(v_ptr, row, svn, vcol, present, V, VP).to(OP)
    pairs = tl.dot(grad, tl.trans(value), input_precision=PREC)
    keys = load_keys(k_ptr, row, skn, col, present, D, DH)
    if LRPE:
        cos = load_angles(cos_ptr, head, row, col, NB * BT, D, DH)
        sin = load_angles(sin_ptr, head, row, col, NB * BT, D, DH)
    if EXACT:
        top, total = exact_mass(keys, before, mass, present, BT, DH)
        scale = tl.where(present[:, None], tl.exp(before[None, :] - top) / total, 0.0)
        self_scale = tl.where(present[:, None], tl.exp(keys - top) / total, 0.0)
        own = tl.sum(tl.where(step[:, None] == step[None, :], pairs, 0.0), 1)[:, None] * self_scale
        real *= scale
        if LRPE:
            real += own * cos
            imag = imag * scale + own * sin
        else:
            real += own
        for level in tl.static_range(LEVELS):
            peak = left_peak(keys, BT, DH, 2 << level)
            weight = level_keys(keys, peak, BT, 2 << level)
            scale = level_scale(peak, top, total, present, BT, 2 << level)
            kept = tl.where(level_pairs(BT, 2 << level), pairs, 0.0).to(OP)
            if LRPE:
                real += tl.dot(kept, (weight * cos).to(OP), input_precision=PREC) * scale
                imag += tl.dot(kept, (weight * sin).to(OP), input_precision=PREC) * scale
            else:
                real += tl.dot(kept, weight.to(OP), input_precision=PREC) * scale
    else:
        inverse = 1.0 / running_mass(keys, before, mass, unit, BT, OP, PREC)
        weight = tl.exp(keys - unit[None, :])
        kept = tl.where(step[:, None] >= step[None, :], pairs, 0.0).to(OP)
        if LRPE:
            real = tl.dot(kept, (weight * cos).to(OP), real, input_precision=PREC) * inverse
            imag = tl.dot(kept, (weight * sin).to(OP), imag, input_precision=PREC) * inverse
            cos = load_angles(cos_ptr, head, row, col, NB * BT, D, DH, 1)
            sin = load_angles(sin_ptr, head, row, col, NB * BT, D, DH, 1)
        else:
            real = tl.dot(kept, weight.to(OP), real, input_precision=PREC) * inverse

    query = load_rows(q_ptr, row, sqn, col, present, D, DH).to(tl.float32)
    gate = tl.sigmoid(query)
    phi = query * gate if SILU else query
    grad_phi = real * cos + imag * sin if LRPE else real
    product = tl.where(present[:, None], phi * grad_phi, 0.0)
    if LRPE:
        turn = tl.where(present[:, None], phi * (imag * cos - real * sin) * row[:, None].to(tl.float32), 0.0)
        tl.store(torque_ptr + at + col, tl.sum(turn, 0), mask=col < D)
    dq_ptr += batch * sdb + first * sdn + head * sdh
    dk_ptr += batch * sdb + first * sdn + head * sdh
    if SILU:
        grad_phi *= gate * (1.0 + query * (1.0 - gate))
    store_rows(dq_ptr, row, sdn, col, present, grad_phi, D)
    if EXACT:
        taken = product * self_scale
        for level in tl.static_range(LEVELS):
            peak = left_peak(keys, BT, DH, 2 << level)
            asked = product * level_scale(peak, top, total, present, BT, 2 << level)
            right = tl.trans(tl.where(level_pairs(BT, 2 << level), 1.0, 0.0).to(OP))
            taken += tl.dot(right, asked.to(OP), input_precision=PREC) * level_keys(keys, peak, BT, 2 << level)
        here = tl.sum(tl.where(present[:, None], product * tl.exp(before[None, :] - top) / total, 0.0), 0)
    else:
        asked = product * inverse
        here = tl.exp(before - unit) * tl.sum(asked, 0)
        later = tl.dot(tl.trans(triangle(BT, OP)), asked.to(OP), input_precision=PREC)
        taken = tl.exp(load_keys(k_ptr, row, skn, col, present, D, DH, 1) - unit[None, :]) * later
    tl.store(pressure_ptr + at + col, here, mask=col < D)
    store_rows(dk_ptr, row, sdn, col, present, taken, D)


@triton.jit
def scan_pressure(
    sequences_ptr, peak_ptr, before_ptr, pressure_ptr, H,
    D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """pressure of the later blocks of the sequence, in place: a true reverse sum. One program a (sequence, head)."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    start = tl.load(sequences_ptr + sequence * 3).to(tl.int64)
    blocks = tl.load(sequences_ptr + sequence * 3 + 2)
    col, step = tl.arange(0, DP), tl.arange(0, ROWS)
    total = tl.zeros([DP], tl.float32)
    for base in range(0, blocks, ROWS):
        row = blocks - 1 - base - step
        at = ((start + row) * H + head)[:, None] * D + col[None, :]
        ok = (row >= 0)[:, None] & (col < D)[None, :]
        own = tl.load(pressure_ptr + at, mask=ok, other=0.0)
        before = tl.load(before_ptr + at, mask=ok, other=0.0)
        after = tl.maximum(before, tl.load(peak_ptr + at, mask=ok, other=0.0))
        fades = tl.exp(before - after)
        totals = tl.zeros([ROWS, DP], tl.float32)
        for i in tl.static_range(ROWS):
            chosen = (step == i)[:, None]
            totals = tl.where(chosen, total[None, :], totals)
            fade = tl.sum(tl.where(chosen, fades, 0.0), 0)
            total = tl.sum(tl.where(chosen, own, 0.0), 0) + fade * total
        tl.store(pressure_ptr + at, totals, mask=ok)


@triton.jit
def key_grads(
    q_ptr, k_ptr, v_ptr, g_ptr, x_ptr, dk_ptr, chunks_ptr, cos_ptr, sin_ptr, grad_ptr, peak_ptr, mass_ptr, before_ptr,
    flag_ptr, pressure_ptr, torque_ptr,
    sqb, sqn, sqh, skb, skn, skh, svb, svn, svh, sgb, sgn, sgh, sxb, sxn, sxh, sdb, sdn, sdh, H,
    D: tl.constexpr, V: tl.constexpr, DH: tl.constexpr, VP: tl.constexpr, BT: tl.constexpr, NB: tl.constexpr,
    LRPE: tl.constexpr, SILU: tl.constexpr, EXACT: tl.constexpr, OP: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """dk, of which `query_grads` left a part there. One program a (block, head, block of features)."""
    block = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    chunk, place = block // NB, (block % NB).to(tl.int32)
    batch, first, length, ends = load_chunk(chunks_ptr, chunk)
    if place * BT >= length:
        return
    blocks = tl.cdiv(length, BT)
    # Each (block, head) is done once: dk is read and written here.
    if (tl.load(flag_ptr + block * H + head) != 0) != EXACT:
        return
    step, vcol = tl.arange(0, BT), tl.arange(0, VP)
    col = tl.program_id(2) * DH + tl.arange(0, DH)
    row = place * BT + step
    present = row < length
    q_ptr += batch * sqb + first * sqn + head * sqh
    k_ptr += batch * skb + first * skn + head * skh
    v_ptr += batch * svb + first * svn + head * svh
    x_ptr += batch * sxb + first * sxn + head * sxh
    g_ptr += batch * sgb + first * sgn + head * sgh
    at = (block * H + head) * D
    before = load_vector(before_ptr + at, col, D, DH)
    after = tl.maximum(before, load_vector(peak_ptr + at, col, D, DH))
    value = load_rows(v_ptr, row, svn, vcol, present, V, VP).to(OP)

    real = tl.zeros([BT, DH], tl.float32)
    imag = tl.zeros([BT, DH], tl.float32)
    if ends < 2:  # the chunk is full and not its sequence's last
        tail = at + (NB - 1 - place) * H * D
        end = tl.maximum(load_vector(before_ptr + tail, col, D, DH), load_vector(peak_ptr + tail, col, D, DH))
        grad_ptr += (chunk * H + head) * ((2 if LRPE else 1) * D * V)
        fade = tl.exp(after - end)[None, :]
        state = load_matrix(grad_ptr, col, vcol, D, V, DH, VP)
        real = tl.dot(value, tl.trans(state), real, input_precision=PREC) * fade
        if LRPE:
            state = load_matrix(grad_ptr + D * V, col, vcol, D, V, DH, VP)
            imag = tl.dot(value, tl.trans(state), imag, input_precision=PREC) * fade
    for i in range(place + 1, blocks):
        there = i * BT + step
        grad = load_rows(g_ptr, there, sgn, vcol, there < length, V, VP).to(OP)
        pairs = tl.dot(value, tl.trans(grad), input_precision=PREC).to(OP)
        before_t = load_vector(before_ptr + at + (i - place) * H * D, col, D, DH)
        read = load_rows(x_ptr, there, sxn, col, there < length, D, DH).to(tl.float32)
        read *= tl.exp(after - before_t)[None, :]
        if LRPE:
            cos = load_angles(cos_ptr, head, there, col, NB * BT, D, DH)
            real = tl.dot(pairs, (read * cos).to(OP), real, input_precision=PREC)
            sin = load_angles(sin_ptr, head, there, col, NB * BT, D, DH)
            imag = tl.dot(pairs, (read * sin).to(OP), imag, input_precision=PREC)
        else:
            real = tl.dot(pairs, read.to(OP), real, input_precision=PREC)

    grad = load_rows(g_ptr, row, sgn, vcol, present, V, VP).to(OP)
    pairs = tl.dot(value, tl.trans(grad), input_precision=PREC)  # [r, t]
    mass = load_vector(mass_ptr + at, col, D, DH)
    later = load_vector(pressure_ptr + at, col, D, DH)
    keys = load_keys(k_ptr, row, skn, col, present, D, DH)
    if EXACT and LRPE:
        cos = load_angles(cos_ptr, head, row, col, NB * BT, D, DH)
        sin = load_angles(sin_ptr, head, row, col, NB * BT, D, DH)
    phi = activated(load_rows(q_ptr, row, sqn, col, present, D, DH), SILU)
    if EXACT:
        top, total = exact_mass(keys, before, mass, present, BT, DH)
        weight = tl.exp(keys - after[None, :])
        read = tl.where(present[:, None], phi * tl.exp(keys - top) / total, 0.0)
        own = tl.sum(tl.where(step[:, None] == step[None, :], pairs, 0.0), 1)[:, None] * read
        if LRPE:
            real = real * weight + own * cos
            imag = imag * weight + own * sin
        else:
            real = real * weight + own
        for level in tl.static_range(LEVELS):
            peak = left_peak(keys, BT, DH, 2 << level)
            weight_level = level_keys(keys, peak, BT, 2 << level)
            read = phi * level_scale(peak, top, total, present, BT, 2 << level)
            kept = tl.where(earlier_pairs(BT, 2 << level), pairs, 0.0).to(OP)
            if LRPE:
                real += tl.dot(kept, (read * cos).to(OP), input_precision=PREC) * weight_level
                imag += tl.dot(kept, (read * sin).to(OP), input_precision=PREC) * weight_level
            else:
                real += tl.dot(kept, read.to(OP), input_precision=PREC) * weight_level
        taken = weight * later[None, :]
    else:
        unit = block_reference(k_ptr, peak_ptr, before, at, skn, place * BT, col, D, DH)
        read = phi / running_mass(keys, before, mass, unit, BT, OP, PREC)
        weight = tl.exp(keys - unit[None, :])
        fade = tl.exp(unit - after)[None, :]
        kept = tl.where(step[:, None] <= step[None, :], pairs, 0.0).to(OP)
        if LRPE:
            cos = load_angles(cos_ptr, head, row, col, NB * BT, D, DH)
            real = tl.dot(kept, (read * cos).to(OP), real * fade, input_precision=PREC) * weight
            sin = load_angles(sin_ptr, head, row, col, NB * BT, D, DH)
            imag = tl.dot(kept, (read * sin).to(OP), imag * fade, input_precision=PREC) * weight
        else:
            real = tl.dot(kept, read.to(OP), real * fade, input_precision=PREC) * weight
        taken = weight * (fade * later[None, :])
        if LRPE:
            cos = load_angles(cos_ptr, head, row, col, NB * BT, D, DH, 1)
            sin = load_angles(sin_ptr, head, row, col, NB * BT, D, DH, 1)
    dk_ptr += batch * sdb + first * sdn + head * sdh
    taken += load_rows(dk_ptr, row, sdn, col, present, D, DH).to(tl.float32)
    if LRPE:
        turn = tl.where(present[:, None], (imag * cos - real * sin) * row[:, None].to(tl.float32), 0.0)
        tl.store(torque_ptr + at + col, tl.sum(turn, 0), mask=col < D)
        store_rows(dk_ptr, row, sdn, col, present, real * cos + imag * sin - taken, D)
    else:
        store_rows(dk_ptr, row, sdn, col, present, real - taken, D)


@triton.jit
def value_grads(
    q_ptr, k_ptr, g_ptr, x_ptr, dv_ptr, chunks_ptr, cos_ptr, sin_ptr, grad_ptr, peak_ptr, mass_ptr, before_ptr,
    flag_ptr,
    sqb, sqn, sqh, skb, skn, skh, sgb, sgn, sgh, sxb, sxn, sxh, sdb, sdn, sdh, H,
    D: tl.constexpr, V: tl.constexpr, DH: tl.constexpr, NH: tl.constexpr, VP: tl.constexpr, BT: tl.constexpr,
    NB: tl.constexpr, LRPE: tl.constexpr, SILU: tl.constexpr, EXACT: tl.constexpr, OP: tl.constexpr,
    PREC: tl.constexpr,
):  # fmt: skip
    """dv: `outputs` the other way round. One program a (block, head)."""
    block = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    chunk, place = block // NB, (block % NB).to(tl.int32)
    batch, first, length, ends = load_chunk(chunks_ptr, chunk)
    if place * BT >= length:
        return
    blocks = tl.cdiv(length, BT)
    if EXACT:
        if tl.load(flag_ptr + block * H + head) == 0:
            return
    step, vcol = tl.arange(0, BT), tl.arange(0, VP)
    row = place * BT + step
    present = row < length
    q_ptr += batch * sqb + first * sqn + head * sqh
    k_ptr += batch * skb + first * skn + head * skh
    x_ptr += batch * sxb + first * sxn + head * sxh
    g_ptr += batch * sgb + first * sgn + head * sgh
    dv_ptr += batch * sdb + first * sdn + head * sdh
    grad_ptr += (chunk * H + head) * ((2 if LRPE else 1) * D * V)
    at = (block * H + head) * D
    out = tl.zeros([BT, VP], tl.float32)
    weights = ()
    for half in tl.static_range(NH):
        col = half * DH + tl.arange(0, DH)
        keys = load_keys(k_ptr, row, skn, col, present, D, DH)
        if LRPE:
            cos = load_angles(cos_ptr, head, row, col, NB * BT, D, DH)
            sin = load_angles(sin_ptr, head, row, col, NB * BT, D, DH)
        after = tl.maximum(load_vector(before_ptr + at, col, D, DH), load_vector(peak_ptr + at, col, D, DH))
        weight = tl.exp(keys - after[None, :])
        if LRPE:
            weight_cos = weight * cos
            weight_sin = weight * sin
            weights = weights + (weight_cos.to(OP), weight_sin.to(OP))
        else:
            weight_cos = weight
            weights = weights + (weight.to(OP),)
        if ends < 2:
            tail = at + (NB - 1 - place) * H * D
            end = tl.maximum(load_vector(before_ptr + tail, col, D, DH), load_vector(peak_ptr + tail, col, D, DH))
            fade = tl.exp(after - end)[None, :]
            state = load_matrix(grad_ptr, col, vcol, D, V, DH, VP)
            out = tl.dot((weight_cos * fade).to(OP), state, out, input_precision=PREC)
            if LRPE:
                state = load_matrix(grad_ptr + D * V, col, vcol, D, V, DH, VP)
                out = tl.dot((weight_sin * fade).to(OP), state, out, input_precision=PREC)
    for i in range(place + 1, blocks):
        there = i * BT + step
        other = at + (i - place) * H * D
        scores = tl.zeros([BT, BT], tl.float32)  # [r, t]
        for half in tl.static_range(NH):
            col = half * DH + tl.arange(0, DH)
            after = tl.maximum(load_vector(before_ptr + at, col, D, DH), load_vector(peak_ptr + at, col, D, DH))
            before_t = load_vector(before_ptr + other, col, D, DH)
            read = load_rows(x_ptr, there, sxn, col, there < length, D, DH).to(tl.float32)
            read *= tl.exp(after - before_t)[None, :]
            if LRPE:
                cos = load_angles(cos_ptr, head, there, col, NB * BT, D, DH)
                scores = tl.dot(weights[2 * half], tl.trans((read * cos).to(OP)), scores, input_precision=PREC)
                sin = load_angles(sin_ptr, head, there, col, NB * BT, D, DH)
                scores = tl.dot(weights[2 * half + 1], tl.trans((read * sin).to(OP)), scores, input_precision=PREC)
            else:
                scores = tl.dot(weights[half], tl.trans(read.to(OP)), scores, input_precision=PREC)
        grad = load_rows(g_ptr, there, sgn, vcol, there < length, V, VP).to(OP)
        out = tl.dot(scores.to(OP), grad, out, input_precision=PREC)

    scores = tl.zeros([BT, BT], tl.float32)
    for half in tl.static_range(NH):
        col = half * DH + tl.arange(0, DH)
        before = load_vector(before_ptr + at, col, D, DH)
        mass = load_vector(mass_ptr + at, col, D, DH)
        keys = load_keys(k_ptr, row, skn, col, present, D, DH, 1)
        if LRPE:
            cos = load_angles(cos_ptr, head, row, col, NB * BT, D, DH, 1)
            sin = load_angles(sin_ptr, head, row, col, NB * BT, D, DH, 1)
        phi = activated(load_rows(q_ptr, row, sqn, col, present, D, DH), SILU)
        if EXACT:
            top, total = exact_mass(keys, before, mass, present, BT, DH)
            read = tl.where(present[:, None], phi * tl.exp(keys - top) / total, 0.0)
            scores += tl.where(step[:, None] == step[None, :], tl.sum(read, 1)[:, None], 0.0)
            for level in tl.static_range(LEVELS):
                peak = left_peak(keys, BT, DH, 2 << level)
                weight = level_keys(keys, peak, BT, 2 << level)
                read = phi * level_scale(peak, top, total, present, BT, 2 << level)
                if LRPE:
                    product = tl.dot((weight * cos).to(OP), tl.trans((read * cos).to(OP)), input_precision=PREC)
                    product = tl.dot(
                        (weight * sin).to(OP), tl.trans((read * sin).to(OP)), product, input_precision=PREC
                    )
                else:
                    product = tl.dot(weight.to(OP), tl.trans(read.to(OP)), input_precision=PREC)
                scores += tl.where(earlier_pairs(BT, 2 << level), product, 0.0)
        else:
            unit = block_reference(k_ptr, peak_ptr, before, at, skn, place * BT, col, D, DH)
            read = phi / running_mass(keys, before, mass, unit, BT, OP, PREC)
            weight = tl.exp(keys - unit[None, :])
            if LRPE:
                scores = tl.dot((weight * cos).to(OP), tl.trans((read * cos).to(OP)), scores, input_precision=PREC)
                scores = tl.dot((weight * sin).to(OP), tl.trans((read * sin).to(OP)), scores, input_precision=PREC)
            else:
                scores = tl.dot(weight.to(OP), tl.trans(read.to(OP)), scores, input_precision=PREC)
    if not EXACT:
        scores = tl.where(step[:, None] <= step[None, :], scores, 0.0)
    grad = load_rows(g_ptr, row, sgn, vcol, present, V, VP).to(OP)
    out = tl.dot(scores.to(OP), grad, out, input_precision=PREC)
    store_rows(dv_ptr, row, sdn, vcol, present, out, V)
