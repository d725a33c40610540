"""Forward Triton kernels of the causal additive scan: chunk states, their scan, outputs. See `triton_parts`.

Device buffers, with c a chunk, b a block (chunk * NB + place), h a head:
  peak[b, h, D]    running maximum inside the chunk, after block b (float32)
  mass[b, h, D]    sum exp(k) of block b in units of exp(peak); after `scan_mass` the sum of all earlier tokens of the
                   sequence in units of exp(before)
  before[b, h, D]  running maximum of all earlier tokens of the sequence, -inf where there are none
  kv[c, h, (2,) D, V]  what a chunk adds, in units of its own maximum; after `scan_states` what it finds, in units of
                   exp(before) and with angle 0 at its first token
"""

# What Triton compiles is not quite Python: early exits stand alone, tuples grow by +, and types change between uses.
# ruff: noqa: SIM102, RUF005
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from .triton_parts import (
    LEVELS,
    SAFE_GROWTH,
    activated,
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
    store_half,
    store_rows,
)


@triton.jit
def fill_angles(
    theta_ptr, cos_ptr, sin_ptr, LENGTH: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr
):
    """cos and sin of place times theta, [H, LENGTH + 1, D], in float64 until they are stored."""
    head = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, DP)
    theta = tl.load(theta_ptr + head * D + col, mask=col < D, other=0.0).to(tl.float64)
    angle = row[:, None].to(tl.float64) * theta[None, :]
    at = (head * (LENGTH + 1) + row)[:, None] * D + col[None, :]
    stored = (row <= LENGTH)[:, None] & (col < D)[None, :]
    tl.store(cos_ptr + at, tl.cos(angle).to(cos_ptr.dtype.element_ty), mask=stored)
    tl.store(sin_ptr + at, tl.sin(angle).to(sin_ptr.dtype.element_ty), mask=stored)


@triton.jit
def chunk_states(
    k_ptr, v_ptr, chunks_ptr, cos_ptr, sin_ptr, kv_ptr, peak_ptr, mass_ptr,
    skb, skn, skh, svb, svn, svh, H,
    D: tl.constexpr, V: tl.constexpr, DH: tl.constexpr, VP: tl.constexpr, BT: tl.constexpr, NB: tl.constexpr,
    LRPE: tl.constexpr, KEEP_LAST: tl.constexpr, OP: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Every chunk on its own: peak, mass and kv. One program a (chunk, head, block of features)."""
    chunk = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    batch, first, length, ends = load_chunk(chunks_ptr, chunk)
    step, vcol = tl.arange(0, BT), tl.arange(0, VP)
    col = tl.program_id(2) * DH + tl.arange(0, DH)
    k_ptr += batch * skb + first * skn + head * skh
    v_ptr += batch * svb + first * svn + head * svh
    at = (chunk * NB * H + head) * D + col
    peak = tl.full([DH], float("-inf"), tl.float32)
    blocks = tl.cdiv(length, BT)
    if ends < 2 or KEEP_LAST:
        real = tl.zeros([DH, VP], tl.float32)
        imag = tl.zeros([DH, VP], tl.float32)
        for i in range(0, blocks):
            row = i * BT + step
            keys = load_keys(k_ptr, row, skn, col, row < length, D, DH)
            new = tl.maximum(peak, tl.max(keys, 0))
            weight = tl.exp(keys - new[None, :])
            fade = tl.exp(peak - new)[:, None]
            tl.store(peak_ptr + at, new, mask=col < D)
            tl.store(mass_ptr + at, tl.sum(weight, 0), mask=col < D)
            value = load_rows(v_ptr, row, svn, vcol, row < length, V, VP).to(OP)
            if LRPE:
                cos = load_angles(cos_ptr, head, row, col, NB * BT, D, DH)
                sin = load_angles(sin_ptr, head, row, col, NB * BT, D, DH)
                real = tl.dot(tl.trans((weight * cos).to(OP)), value, real * fade, input_precision=PREC)
                imag = tl.dot(tl.trans((weight * sin).to(OP)), value, imag * fade, input_precision=PREC)
            else:
                real = tl.dot(tl.trans(weight.to(OP)), value, real * fade, input_precision=PREC)
            peak = new
            at += H * D
        kv_ptr += (chunk * H + head) * ((2 if LRPE else 1) * D * V)
        store_half(kv_ptr, col, vcol, real, D, V)
        if LRPE:
            store_half(kv_ptr + D * V, col, vcol, imag, D, V)
    else:
        for i in range(0, blocks):
            row = i * BT + step
            keys = load_keys(k_ptr, row, skn, col, row < length, D, DH)
            peak = tl.maximum(peak, tl.max(keys, 0))
            tl.store(peak_ptr + at, peak, mask=col < D)
            tl.store(mass_ptr + at, tl.sum(tl.exp(keys - peak[None, :]), 0), mask=col < D)
            at += H * D


@triton.jit
def scan_mass(
    sequences_ptr, peak_ptr, mass_ptr, before_ptr, max0_ptr, sum0_ptr, max_ptr, sum_ptr, H,
    D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr, INITIAL: tl.constexpr, FINAL: tl.constexpr,
):  # fmt: skip
    """Running maximum and mass before every block of a sequence. One program a (sequence, head)."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    start = tl.load(sequences_ptr + sequence * 3).to(tl.int64)
    blocks = tl.load(sequences_ptr + sequence * 3 + 2)
    col, step = tl.arange(0, DP), tl.arange(0, ROWS)
    state = (sequence.to(tl.int64) * H + head) * D + col
    if INITIAL:
        top = tl.load(max0_ptr + state, mask=col < D, other=0.0)
        total = tl.load(sum0_ptr + state, mask=col < D, other=0.0)
    else:
        top = tl.full([DP], float("-inf"), tl.float32)
        total = tl.zeros([DP], tl.float32)
    for base in range(0, blocks, ROWS):
        row = base + step
        at = ((start + row) * H + head)[:, None] * D + col[None, :]
        ok = (row < blocks)[:, None] & (col < D)[None, :]
        peaks = tl.load(peak_ptr + at, mask=ok, other=float("-inf"))
        masses = tl.load(mass_ptr + at, mask=ok, other=0.0)
        tops = tl.zeros([ROWS, DP], tl.float32)
        totals = tl.zeros([ROWS, DP], tl.float32)
        for i in tl.static_range(ROWS):
            chosen = (step == i)[:, None]
            tops = tl.where(chosen, top[None, :], tops)
            totals = tl.where(chosen, total[None, :], totals)
            peak = tl.max(tl.where(chosen, peaks, float("-inf")), 0)
            new = tl.maximum(top, peak)
            known = new > float("-inf")  # else both are -inf
            added = tl.sum(tl.where(chosen, masses, 0.0), 0)
            total = tl.where(known, total * tl.exp(top - new) + added * tl.exp(peak - new), 0.0)
            top = new
        tl.store(before_ptr + at, tops, mask=ok)
        tl.store(mass_ptr + at, totals, mask=ok)
    if FINAL:
        tl.store(max_ptr + state, top, mask=col < D)
        tl.store(sum_ptr + state, total, mask=col < D)


@triton.jit
def scan_states(
    sequences_ptr, lengths_ptr, kv_ptr, peak_ptr, before_ptr, theta_cos_ptr, theta_sin_ptr, kv0_ptr, kvn_ptr, H,
    D: tl.constexpr, V: tl.constexpr, BD: tl.constexpr, VP: tl.constexpr, NB: tl.constexpr, LRPE: tl.constexpr,
    INITIAL: tl.constexpr, FINAL: tl.constexpr,
):  # fmt: skip
    """kv from what each chunk adds to what it finds, in place. One program a (sequence, head, block of features)."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    row, col = tl.program_id(2) * BD + tl.arange(0, BD), tl.arange(0, VP)
    ok = row < D
    start = tl.load(sequences_ptr + sequence * 3).to(tl.int64)
    chunks = tl.load(sequences_ptr + sequence * 3 + 1)
    blocks = tl.load(sequences_ptr + sequence * 3 + 2)
    SIZE: tl.constexpr = (2 if LRPE else 1) * D * V
    stride = H * SIZE
    at = kv_ptr + (start // NB * H + head) * SIZE
    block = (start * H + head) * D + row
    state = (sequence.to(tl.int64) * H + head) * SIZE
    real = tl.zeros([BD, VP], tl.float32)
    imag = tl.zeros([BD, VP], tl.float32)
    if INITIAL:
        real = load_half(kv0_ptr + state, row, col, D, V)
        if LRPE:
            imag = load_half(kv0_ptr + state + D * V, row, col, D, V)
    if LRPE:
        cos = tl.load(theta_cos_ptr + head * D + row, mask=ok, other=0.0)[:, None]
        sin = tl.load(theta_sin_ptr + head * D + row, mask=ok, other=0.0)[:, None]
    real_next = tl.zeros([BD, VP], tl.float32)
    imag_next = tl.zeros([BD, VP], tl.float32)
    if chunks > 1 or FINAL:
        if chunks > 0:
            real_next = load_half(at, row, col, D, V)
            if LRPE:
                imag_next = load_half(at + D * V, row, col, D, V)
    for i in range(0, chunks):
        real_added, imag_added = real_next, imag_next
        if i + 1 < chunks - (0 if FINAL else 1):  # asked for early: the chain must not wait for memory
            real_next = load_half(at + stride, row, col, D, V)
            if LRPE:
                imag_next = load_half(at + stride + D * V, row, col, D, V)
        before = tl.load(before_ptr + block, mask=ok, other=0.0)
        last = tl.minimum(NB, blocks - i * NB) - 1
        peak = tl.load(peak_ptr + block + last * (H * D), mask=ok, other=0.0)
        if i > 0 or INITIAL:
            store_half(at, row, col, real, D, V)
            if LRPE:
                store_half(at + D * V, row, col, imag, D, V)
        new = tl.maximum(before, peak)
        fade, enter = tl.exp(before - new)[:, None], tl.exp(peak - new)[:, None]
        real = real * fade + real_added * enter
        if LRPE:
            imag = imag * fade + imag_added * enter
            if i + 1 < chunks:
                turned = real * cos + imag * sin
                imag = imag * cos - real * sin
                real = turned
        at += stride
        block += NB * H * D
    if FINAL:
        if LRPE:
            count = tl.load(lengths_ptr + sequence)  # tokens in the last chunk; the next token is at angle 0
            if count > 0:
                place = (sequence * H + head) * D + row
                cos = tl.load(theta_cos_ptr + H * D + place, mask=ok, other=0.0)[:, None]
                sin = tl.load(theta_sin_ptr + H * D + place, mask=ok, other=0.0)[:, None]
                turned = real * cos + imag * sin
                imag = imag * cos - real * sin
                real = turned
            store_half(kvn_ptr + state + D * V, row, col, imag, D, V)
        store_half(kvn_ptr + state, row, col, real, D, V)


@triton.jit
def outputs(
    q_ptr, k_ptr, v_ptr, o_ptr, chunks_ptr, cos_ptr, sin_ptr, kv_ptr, peak_ptr, mass_ptr, before_ptr, flag_ptr,
    sqb, sqn, sqh, skb, skn, skh, svb, svn, svh, sob, son, soh, H,
    D: tl.constexpr, V: tl.constexpr, DH: tl.constexpr, NH: tl.constexpr, VP: tl.constexpr, BT: tl.constexpr,
    NB: tl.constexpr, LRPE: tl.constexpr, SILU: tl.constexpr, INITIAL: tl.constexpr, EXACT: tl.constexpr,
    OP: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """One program a (block, head): the block against itself, the chunk's earlier blocks, and the state."""
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
    row = place * BT + step
    present = row < length
    q_ptr += batch * sqb + first * sqn + head * sqh
    k_ptr += batch * skb + first * skn + head * skh
    v_ptr += batch * svb + first * svn + head * svh
    o_ptr += batch * sob + first * son + head * soh
    kv_ptr += (chunk * H + head) * ((2 if LRPE else 1) * D * V)
    at = (block * H + head) * D
    out = tl.zeros([BT, VP], tl.float32)
    reads = ()
    units = ()
    worst = 0.0
    for half in tl.static_range(NH):
        col = half * DH + tl.arange(0, DH)
        before = load_vector(before_ptr + at, col, D, DH)
        mass = load_vector(mass_ptr + at, col, D, DH)
        keys = load_keys(k_ptr, row, skn, col, present, D, DH)
        if EXACT:
            unit = before
        else:
            peak = load_vector(peak_ptr + at, col, D, DH)
            begin = load_vector(k_ptr + place * BT * skn, col, D, DH).to(tl.float32)
            unit, growth = reference(before, begin, peak)
            worst = tl.maximum(worst, tl.max(growth, 0))
        scale = read_scale(keys, before, mass, unit, unit, present, BT, DH, EXACT, OP, PREC)
        read = activated(load_rows(q_ptr, row, sqn, col, present, D, DH), SILU) * scale
        units = units + (unit,)
        if LRPE:
            read_cos = read * load_angles(cos_ptr, head, row, col, NB * BT, D, DH)
            read_sin = read * load_angles(sin_ptr, head, row, col, NB * BT, D, DH)
            reads = reads + (read_cos.to(OP), read_sin.to(OP))
        else:
            read_cos = read
            reads = reads + (read_cos.to(OP),)
        if (ends & 1) == 0 or INITIAL:
            origin = load_vector(before_ptr + at - place * H * D, col, D, DH)
            entry = tl.where(origin == float("-inf"), 0.0, tl.exp(origin - unit))[None, :]
            state = load_matrix(kv_ptr, col, vcol, D, V, DH, VP)
            out = tl.dot((read_cos * entry).to(OP), state, out, input_precision=PREC)
            if LRPE:
                state = load_matrix(kv_ptr + D * V, col, vcol, D, V, DH, VP)
                out = tl.dot((read_sin * entry).to(OP), state, out, input_precision=PREC)
    if not EXACT:
        tl.store(flag_ptr + block * H + head, (worst > SAFE_GROWTH).to(tl.int32))
    for i in range(0, place):
        there = i * BT + step
        scores = tl.zeros([BT, BT], tl.float32)
        for half in tl.static_range(NH):
            col = half * DH + tl.arange(0, DH)
            weight = tl.exp(load_keys(k_ptr, there, skn, col, there < length, D, DH) - units[half][None, :])
            if LRPE:
                cos = load_angles(cos_ptr, head, there, col, NB * BT, D, DH)
                scores = tl.dot(reads[2 * half], tl.trans((weight * cos).to(OP)), scores, input_precision=PREC)
                sin = load_angles(sin_ptr, head, there, col, NB * BT, D, DH)
                scores = tl.dot(reads[2 * half + 1], tl.trans((weight * sin).to(OP)), scores, input_precision=PREC)
            else:
                scores = tl.dot(reads[half], tl.trans(weight.to(OP)), scores, input_precision=PREC)
        value = load_rows(v_ptr, there, svn, vcol, there < length, V, VP).to(OP)
        out = tl.dot(scores.to(OP), value, out, input_precision=PREC)

    scores = tl.zeros([BT, BT], tl.float32)
    for half in tl.static_range(NH):
        col = half * DH + tl.arange(0, DH)
        keys = load_keys(k_ptr, row, skn, col, present, D, DH, 1)
        if LRPE:
            cos = load_angles(cos_ptr, head, row, col, NB * BT, D, DH, 1)
            sin = load_angles(sin_ptr, head, row, col, NB * BT, D, DH, 1)
        if EXACT:
            before = load_vector(before_ptr + at, col, D, DH)
            mass = load_vector(mass_ptr + at, col, D, DH)
            top, total = exact_mass(keys, before, mass, present, BT, DH)
            phi = activated(load_rows(q_ptr, row, sqn, col, present, D, DH), SILU)
            own = tl.sum(tl.where(present[:, None], phi * tl.exp(keys - top) / total, 0.0), 1)
            scores += tl.where(step[:, None] == step[None, :], own[:, None], 0.0)
            for level in tl.static_range(LEVELS):
                peak = left_peak(keys, BT, DH, 2 << level)
                weight = level_keys(keys, peak, BT, 2 << level)
                read = phi * level_scale(peak, top, total, present, BT, 2 << level)
                if LRPE:
                    pairs = tl.dot((read * cos).to(OP), tl.trans((weight * cos).to(OP)), input_precision=PREC)
                    pairs = tl.dot((read * sin).to(OP), tl.trans((weight * sin).to(OP)), pairs, input_precision=PREC)
                else:
                    pairs = tl.dot(read.to(OP), tl.trans(weight.to(OP)), input_precision=PREC)
                scores += tl.where(level_pairs(BT, 2 << level), pairs, 0.0)
        else:
            weight = tl.exp(keys - units[half][None, :])
            if LRPE:
                scores = tl.dot(reads[2 * half], tl.trans((weight * cos).to(OP)), scores, input_precision=PREC)
                scores = tl.dot(reads[2 * half + 1], tl.trans((weight * sin).to(OP)), scores, input_precision=PREC)
            else:
                scores = tl.dot(reads[half], tl.trans(weight.to(OP)), scores, input_precision=PREC)
    if not EXACT:
        scores = tl.where(step[:, None] >= step[None, :], scores, 0.0)
    value = load_rows(v_ptr, row, svn, vcol, present, V, VP).to(OP)
    out = tl.dot(scores.to(OP), value, out, input_precision=PREC)
    store_rows(o_ptr, row, son, vcol, present, out, V)
