"""Triton kernels of the causal additive scan: what a piece of a span adds to the state, or asks of it, as one product over its
tokens; and the scan over pieces of those sums that `cuda_chains` makes.

Every span but one of a long sequence waits for a state. The sums of all pieces are found at once, a scan over pieces makes of
them what each finds (`triton_forward.scan_spans`, `triton_backward_states.scan_span_grads`), and chains begin there. No state
is handed from block to block here: a piece's keys are in one unit, and are themselves turned to the place where the sum is
wanted.
"""

# What Triton compiles is not quite Python: types change between uses.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from .triton_forward import load_halves, load_span
from .triton_parts import (
    exp,
    fade,
    load_angles,
    load_keys,
    load_rows,
    load_vector,
    store_matrix,
    store_vector,
    turned,
)


@triton.jit
def span_sums(
    x_ptr, y_ptr, pieces_ptr, cos_ptr, sin_ptr, turn_ptr, enter_ptr, leave_ptr, to_ptr,
    sxb, sxn, sxh, syb, syn, syh, H,
    D: tl.constexpr, V: tl.constexpr, DH: tl.constexpr, NH: tl.constexpr, VB: tl.constexpr, BT: tl.constexpr, TB: tl.constexpr,
    LRPE: tl.constexpr, KEYS: tl.constexpr, ALL: tl.constexpr, OP: tl.constexpr, PREC: tl.constexpr,
    STAGES: tl.constexpr, STACKED: tl.constexpr,
):  # fmt: skip
    """KEYS: of keys x and values y what the piece adds, piece_kv of `triton_forward`; else of `x` of `triton_backward` and
    gradients y what its queries ask, piece_grad. Without ALL not in spans of which nobody asks it: each sequence's last,
    or first. One program a (piece, head, slice of features and slice of VB value features)."""
    piece, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    batch, first, length, block, place, _, last = load_span(pieces_ptr, piece)
    if not ALL:  # noqa: SIM102
        if (last != 0) if KEYS else (place == 0):
            return
    step, vcol = tl.arange(0, TB), (tl.program_id(2) // NH) * VB + tl.arange(0, VB)
    col = (tl.program_id(2) % NH) * DH + tl.arange(0, DH)
    x_ptr += batch * sxb + head * sxh
    y_ptr += batch * syb + head * syh
    tiles = tl.cdiv(length, TB)
    if STACKED:
        both = tl.zeros([2 * DH, VB], tl.float32)  # cosines and sines of a feature beside one another
    else:
        real = tl.zeros([DH, VB], tl.float32)
        imag = tl.zeros([DH, VB], tl.float32)
    if KEYS:
        unit = load_vector(leave_ptr + ((block + tl.cdiv(length, BT) - 1) * H + head) * D, col, D, DH)
    else:
        unit = load_vector(enter_ptr + (block * H + head) * D, col, D, DH)
    if LRPE:
        cos_first, sin_first = tl.full([DH], 1.0, tl.float32), tl.zeros([DH], tl.float32)  # of a tile's first token
        if KEYS:
            count = length - (tiles - 1) * TB  # from the last tile on: what is newest is turned least
            cos_first = load_vector(turn_ptr + (head * (BT + 1) + count) * (2 * D), col, D, DH)
            sin_first = -load_vector(turn_ptr + (head * (BT + 1) + count) * (2 * D) + D, col, D, DH)
        cos_on = load_vector(turn_ptr + (head * (BT + 1) + TB) * (2 * D), col, D, DH)
        sin_on = load_vector(turn_ptr + (head * (BT + 1) + TB) * (2 * D) + D, col, D, DH)
        if KEYS:
            sin_on = -sin_on
        cos = load_angles(cos_ptr, head, step, col, D, DH, BT)
        sin = load_angles(sin_ptr, head, step, col, D, DH, BT)
    for j in tl.range(0, tiles, num_stages=STAGES):
        i = (tiles - 1 - j) if KEYS else j
        present = i * TB + step < length
        row = first + i * TB
        y = load_rows(y_ptr + row * syn, step, syn, vcol, present, V, VB).to(OP)
        if KEYS:
            factor = exp(load_keys(x_ptr + row * sxn, step, sxn, col, present, D, DH) - unit[None, :])
        else:
            factor = load_rows(x_ptr + row * sxn, step, sxn, col, present, D, DH).to(tl.float32)
            factor *= exp(unit - load_vector(enter_ptr + ((block + i * TB // BT) * H + head) * D, col, D, DH))[None, :]
        if LRPE:
            x_cos = factor * (cos * cos_first[None, :] - sin * sin_first[None, :])
            x_sin = factor * (sin * cos_first[None, :] + cos * sin_first[None, :])
            if STACKED:
                turned = tl.reshape(tl.join(x_cos.to(OP), x_sin.to(OP)), [TB, 2 * DH])
                both = tl.dot(tl.trans(turned), y, both, input_precision=PREC)
            else:
                real = tl.dot(tl.trans(x_cos.to(OP)), y, real, input_precision=PREC)
                imag = tl.dot(tl.trans(x_sin.to(OP)), y, imag, input_precision=PREC)
            cos_first, sin_first = cos_first * cos_on - sin_first * sin_on, sin_first * cos_on + cos_first * sin_on
        else:
            real = tl.dot(tl.trans(factor.to(OP)), y, real, input_precision=PREC)
    target = to_ptr + (piece * H + head) * ((2 if LRPE else 1) * D * V)
    if STACKED:
        pair = tl.arange(0, 2 * DH)
        feature = (tl.program_id(2) % NH) * DH + pair // 2
        at = ((pair % 2) * D + feature)[:, None] * V + vcol[None, :]
        tl.store(target + at, both, mask=(feature < D)[:, None] & (vcol < V)[None, :])
    else:
        store_matrix(target, col, vcol, real, D, V, DH, VB)
        if LRPE:
            store_matrix(target + D * V, col, vcol, imag, D, V, DH, VB)


@triton.jit
def join_spans(
    sequences_ptr, tops_ptr, totals_ptr, found_tops_ptr, found_totals_ptr, piece_kv_ptr, move_ptr, max0_ptr, sum0_ptr,
    kv0_ptr, H,
    D: tl.constexpr, V: tl.constexpr, BD: tl.constexpr, VP: tl.constexpr, LRPE: tl.constexpr, INITIAL: tl.constexpr,
):  # fmt: skip
    """`scan_spans` of `triton_forward` where each piece has a maximum and mass of its own, `tops` and `totals` [pieces, H, D],
    and its kv is in units of exp(top): from what each adds to what it finds, kv in place. (Not so the vectors: warps that
    hold them at once would read what another has written.) One program a (sequence, head, slice of features)."""
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, vcol = tl.program_id(2) * BD + tl.arange(0, BD), tl.arange(0, VP)
    start = tl.load(sequences_ptr + sequence * 4).to(tl.int64)
    SIZE: tl.constexpr = (2 if LRPE else 1) * D * V
    state = sequence * H + head
    real = tl.zeros([BD, VP], tl.float32)
    imag = tl.zeros([BD, VP], tl.float32)
    top = tl.full([BD], float("-inf"), tl.float32)
    total = tl.zeros([BD], tl.float32)
    if INITIAL:
        top, total = load_vector(max0_ptr + state * D, row, D, BD), load_vector(sum0_ptr + state * D, row, D, BD)
        real, imag = load_halves(kv0_ptr + state * SIZE, row, vcol, D, V, BD, VP, LRPE)
    if LRPE:
        cos, sin = load_vector(move_ptr + head * D, row, D, BD), load_vector(move_ptr + (H + head) * D, row, D, BD)
    for i in range(0, tl.load(sequences_ptr + sequence * 4 + 2)):
        at = (start + i) * H + head
        peak, mass = load_vector(tops_ptr + at * D, row, D, BD), load_vector(totals_ptr + at * D, row, D, BD)
        real_added, imag_added = load_halves(piece_kv_ptr + at * SIZE, row, vcol, D, V, BD, VP, LRPE)
        store_vector(found_tops_ptr + at * D, row, top, D, BD)
        store_vector(found_totals_ptr + at * D, row, total, D, BD)
        store_matrix(piece_kv_ptr + at * SIZE, row, vcol, real, D, V, BD, VP)
        if LRPE:
            store_matrix(piece_kv_ptr + at * SIZE + D * V, row, vcol, imag, D, V, BD, VP)
        new = tl.maximum(top, peak)
        faded, counted = fade(top, new), fade(peak, new)
        total = total * faded + mass * counted
        top = new
        if LRPE:
            real, imag = turned(real, imag, cos * faded, sin * faded)
            imag += imag_added * counted[:, None]
            real += real_added * counted[:, None]
        else:
            real = real * faded[:, None] + real_added * counted[:, None]
