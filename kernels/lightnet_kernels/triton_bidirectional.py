"""Entry kernels of the bidirectional one-scan form; the loops are in `triton_bidirectional_parts`.

One program per piece of a sequence and head (and block of FW features, NF of them, where a state is too large for one).
Heads run fastest: their rows lie side by side in memory. Sums over pieces are taken in order: no atomics.
"""

# ruff: noqa: RUF005 (Triton's language has no starred tuples)
# mypy: disable-error-code="assignment"

from __future__ import annotations

import triton
import triton.language as tl

from .triton_bidirectional_parts import (
    collect,
    find_piece,
    load_state,
    load_vectors,
    products_with,
    query_grads,
    read,
    row_of,
    scaled,
    state_grads,
    store_state,
    store_vectors,
    vectors,
    weight_grads,
)

# Of a call's tokens and batch, not of its widths: kernels are not compiled again for others.
COUNTS = ["tokens", "splits", "length", "places_b", "mask_b", "query_b", "key_b", "value_b", "output_b", "grad_b"]
COUNTS += ["grad_query_b", "grad_key_b", "grad_value_b"]


@triton.jit
def finite(x, WS: tl.constexpr):
    """Maxima, with 0 for those of no tokens at all."""
    tiles = ()
    for i in tl.static_range(len(WS)):
        tiles = tiles + (tl.where(x[i] == float("-inf"), 0.0, x[i]),)
    return tiles


@triton.jit
def inverse(x, WS: tl.constexpr):
    """1 / mass, 0 where there are no tokens."""
    tiles = ()
    for i in tl.static_range(len(WS)):
        tiles = tiles + (tl.where(x[i] > 0.0, 1.0 / x[i], 0.0),)
    return tiles


@triton.jit
def weighting(peak_ptr, mass_ptr, FW: tl.constexpr, D: tl.constexpr, OP: tl.constexpr, NORM: tl.constexpr):
    """(peak, norm) such that the weights are exp(k - peak) norm. With bfloat16 operands the norm is part of the peak:
    a sum's rounding is a thousandth at keys of 10^4, where bfloat16 has steps of 64."""
    peak = finite(load_vectors(peak_ptr, 0, FW, D), FW)
    if not NORM:
        return peak, ()
    elif tl.bfloat16 == OP:
        return log_mass(peak, load_vectors(mass_ptr, 0, FW, D), FW), ()
    else:
        return peak, inverse(load_vectors(mass_ptr, 0, FW, D), FW)


@triton.jit
def log_mass(peak, mass, FW: tl.constexpr):
    tiles = ()
    for i in tl.static_range(len(FW)):
        tiles = tiles + (peak[i] + tl.log(tl.where(mass[i] > 0.0, mass[i], 1.0)),)
    return tiles


@triton.jit(do_not_specialize=COUNTS)
def piece_states(
    key, value, peak_ptr, mass_ptr, kv_ptr,
    theta, remainder, places, mask, table, key_b, key_t, key_h, value_b, value_t, value_h, places_b, mask_b,
    heads, tokens, splits, length,
    D: tl.constexpr, V: tl.constexpr, FW: tl.constexpr, VW: tl.constexpr, NF: tl.constexpr, BT: tl.constexpr,
    BS: tl.constexpr,
    LRPE: tl.constexpr, AXES: tl.constexpr, REST: tl.constexpr, MASK: tl.constexpr, TABLE: tl.constexpr, OP: tl.constexpr,
    PREC: tl.constexpr, APPROX: tl.constexpr, ALIGN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Forward, first pass: the state of each piece, float32."""
    pid = tl.program_id(0)
    first = pid % NF * FW[0] if NF > 1 else 0
    head = pid // NF % heads
    piece = pid // NF // heads
    batch, window, _ = find_piece(table, piece, splits, length, tokens, TABLE)
    peak, mass, kv = collect(
        row_of(key, batch, head, window[1], key_b, key_t, key_h, ALIGN),
        row_of(value, batch, head, window[1], value_b, value_t, value_h, ALIGN), key_t * ALIGN, value_t * ALIGN, window,
        theta + head * D if LRPE else theta, remainder + head * D if REST else None,
        places + batch.to(tl.int64) * places_b if AXES > 0 else places, mask + batch.to(tl.int64) * mask_b if MASK else mask,
        first, D, V, FW, VW, NF, BS, LRPE, AXES, MASK, OP, PREC, APPROX, STAGES,
    )  # fmt: skip
    at = piece.to(tl.int64) * heads + head
    store_vectors(peak_ptr + at * D, first, peak, FW, D)
    store_vectors(mass_ptr + at * D, first, mass, FW, D)
    store_state(kv_ptr + at * ((2 if LRPE else 1) * D * V), first, kv, FW, VW, D, V, LRPE)


@triton.jit(do_not_specialize=COUNTS)
def fused_forward(
    query, key, value, output, peak_ptr, mass_ptr, state_ptr,
    theta, remainder, places, mask, table, query_b, query_t, query_h, key_b, key_t, key_h, value_b, value_t, value_h,
    output_b, output_t, output_h, places_b, mask_b, heads, tokens, splits, length,
    D: tl.constexpr, V: tl.constexpr, FW: tl.constexpr, VW: tl.constexpr, BT: tl.constexpr,
    BS: tl.constexpr,
    LRPE: tl.constexpr, AXES: tl.constexpr, REST: tl.constexpr, MASK: tl.constexpr, TABLE: tl.constexpr, OP: tl.constexpr,
    PREC: tl.constexpr, APPROX: tl.constexpr, ALIGN: tl.constexpr, SILU: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Forward in one pass, a piece being a sequence; leaves maximum, mass and G."""
    head = tl.program_id(0) % heads
    piece = tl.program_id(0) // heads
    batch, window, sequence = find_piece(table, piece, splits, length, tokens, TABLE)
    theta = theta + head * D if LRPE else theta
    remainder = remainder + head * D if REST else None
    places = places + batch.to(tl.int64) * places_b if AXES > 0 else places
    mask = mask + batch.to(tl.int64) * mask_b if MASK else mask
    peak, mass, kv = collect(
        row_of(key, batch, head, window[1], key_b, key_t, key_h, ALIGN),
        row_of(value, batch, head, window[1], value_b, value_t, value_h, ALIGN), key_t * ALIGN, value_t * ALIGN, window,
        theta, remainder, places, mask, 0, D, V, FW, VW, 1, BS, LRPE, AXES, MASK, OP, PREC, APPROX, STAGES,
    )  # fmt: skip
    norm = inverse(mass, FW)
    sine = scaled(kv[1], norm, FW, VW) if LRPE else ()
    at = sequence.to(tl.int64) * heads + head
    store_vectors(peak_ptr + at * D, 0, peak, FW, D)
    store_vectors(mass_ptr + at * D, 0, mass, FW, D)
    state_ptr += at * ((2 if LRPE else 1) * D * V)
    store_state(state_ptr, 0, (scaled(kv[0], norm, FW, VW), sine), FW, VW, D, V, LRPE)
    # G goes through memory, which it must reach anyway, into the form that the second loop wants.
    tl.debug_barrier()
    held = load_state(state_ptr, 0, FW, VW, D, V, LRPE)
    read(
        row_of(query, batch, head, window[1], query_b, query_t, query_h, ALIGN),
        row_of(output, batch, head, window[1], output_b, output_t, output_h, ALIGN), query_t * ALIGN, output_t * ALIGN, window,
        theta, remainder, places, mask, held, state_ptr,
        D, V, FW, VW, BT, LRPE, AXES, MASK, OP, PREC, APPROX, SILU, False, STAGES,
    )  # fmt: skip


@triton.jit(do_not_specialize=COUNTS)
def read_pieces(
    query, output, state_ptr,
    theta, remainder, places, mask, table, query_b, query_t, query_h, output_b, output_t, output_h, places_b, mask_b,
    heads, tokens, splits, length,
    D: tl.constexpr, V: tl.constexpr, FW: tl.constexpr, VW: tl.constexpr, BT: tl.constexpr,
    LRPE: tl.constexpr, AXES: tl.constexpr, REST: tl.constexpr, MASK: tl.constexpr, TABLE: tl.constexpr, OP: tl.constexpr,
    PREC: tl.constexpr, APPROX: tl.constexpr, ALIGN: tl.constexpr, SILU: tl.constexpr,
    RELOAD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Forward, last pass: the outputs of each piece."""
    head = tl.program_id(0) % heads
    piece = tl.program_id(0) // heads
    batch, window, sequence = find_piece(table, piece, splits, length, tokens, TABLE)
    at = state_ptr + (sequence.to(tl.int64) * heads + head) * ((2 if LRPE else 1) * D * V)
    held = ((), ()) if RELOAD else load_state(at, 0, FW, VW, D, V, LRPE)
    read(
        row_of(query, batch, head, window[1], query_b, query_t, query_h, ALIGN),
        row_of(output, batch, head, window[1], output_b, output_t, output_h, ALIGN), query_t * ALIGN, output_t * ALIGN, window,
        theta + head * D if LRPE else theta, remainder + head * D if REST else None,
        places + batch.to(tl.int64) * places_b if AXES > 0 else places, mask + batch.to(tl.int64) * mask_b if MASK else mask,
        held, at, D, V, FW, VW, BT, LRPE, AXES, MASK, OP, PREC, APPROX, SILU, RELOAD, STAGES,
    )  # fmt: skip


@triton.jit(do_not_specialize=COUNTS)
def read_grad_pieces(
    query, grad, grad_query, state_ptr, grad_state_ptr, torque_ptr,
    theta, remainder, places, mask, table, query_b, query_t, query_h, grad_b, grad_t, grad_h, grad_query_b,
    grad_query_t, grad_query_h, places_b, mask_b, heads, tokens, splits, length,
    D: tl.constexpr, V: tl.constexpr, FW: tl.constexpr, VW: tl.constexpr, FN: tl.constexpr, NF: tl.constexpr, BT: tl.constexpr,
    BS: tl.constexpr,
    LRPE: tl.constexpr, AXES: tl.constexpr, REST: tl.constexpr, MASK: tl.constexpr, TABLE: tl.constexpr, OP: tl.constexpr,
    PREC: tl.constexpr, APPROX: tl.constexpr, ALIGN: tl.constexpr, SILU: tl.constexpr,
    RELOAD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Backward, first pass: gradient of q, and each piece's share of dG, float32."""
    pid = tl.program_id(0)
    first = pid % NF * FW[0] if NF > 1 else 0
    head = pid // NF % heads
    piece = pid // NF // heads
    batch, window, sequence = find_piece(table, piece, splits, length, tokens, TABLE)
    theta = theta + head * D if LRPE else theta
    remainder = remainder + head * D if REST else None
    places = places + batch.to(tl.int64) * places_b if AXES > 0 else places
    mask = mask + batch.to(tl.int64) * mask_b if MASK else mask
    query = row_of(query, batch, head, window[1], query_b, query_t, query_h, ALIGN)
    grad = row_of(grad, batch, head, window[1], grad_b, grad_t, grad_h, ALIGN)
    size: tl.constexpr = (2 if LRPE else 1) * D * V
    at = piece.to(tl.int64) * heads + head
    grad_state = state_grads(
        query, grad, query_t * ALIGN, grad_t * ALIGN, window, theta, remainder, places, mask, first,
        D, V, FW, VW, NF, BS, LRPE, AXES, MASK, OP, PREC, APPROX, SILU, STAGES,
    )  # fmt: skip
    store_state(grad_state_ptr + at * size, first, grad_state, FW, VW, D, V, LRPE)
    state = state_ptr + (sequence.to(tl.int64) * heads + head) * size
    held = ((), ()) if RELOAD else load_state(state, first, FN, VW, D, V, LRPE)
    torque = query_grads(
        query, grad, row_of(grad_query, batch, head, window[1], grad_query_b, grad_query_t, grad_query_h, ALIGN),
        query_t * ALIGN, grad_t * ALIGN, grad_query_t * ALIGN, window, theta, remainder, places, mask,
        first, held, state,
        D, V, FN, VW, NF, BT, LRPE, AXES, MASK, OP, PREC, APPROX, SILU, RELOAD, STAGES,
    )  # fmt: skip
    if LRPE:
        store_vectors(torque_ptr + at * D, first, torque, FN, D)


@triton.jit(do_not_specialize=COUNTS)
def weight_grad_pieces(
    key, value, grad_key, grad_value, peak_ptr, norm_ptr, pressure_ptr, grad_state_ptr, torque_ptr,
    theta, remainder, places, mask, table, key_b, key_t, key_h, value_b, value_t, value_h, grad_key_b, grad_key_t,
    grad_key_h, grad_value_b, grad_value_t, grad_value_h, places_b, mask_b, heads, tokens, splits, length,
    D: tl.constexpr, V: tl.constexpr, FW: tl.constexpr, VW: tl.constexpr, BT: tl.constexpr,
    LRPE: tl.constexpr, AXES: tl.constexpr, REST: tl.constexpr, MASK: tl.constexpr, TABLE: tl.constexpr, OP: tl.constexpr,
    PREC: tl.constexpr, APPROX: tl.constexpr, ALIGN: tl.constexpr, RELOAD: tl.constexpr,
    STAGES: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Backward, last pass: gradients of k and v. Without NORM the weights are exp(k - peak)."""
    head = tl.program_id(0) % heads
    piece = tl.program_id(0) // heads
    batch, window, sequence = find_piece(table, piece, splits, length, tokens, TABLE)
    at = sequence.to(tl.int64) * heads + head
    peak, norm = weighting(peak_ptr + at * D, norm_ptr + at * D if NORM else norm_ptr, FW, D, OP, NORM)
    pressure = load_vectors(pressure_ptr + at * D, 0, FW, D)
    state = grad_state_ptr + at * ((2 if LRPE else 1) * D * V)
    held = ((), ()) if RELOAD else load_state(state, 0, FW, VW, D, V, LRPE)
    torque = weight_grads(
        row_of(key, batch, head, window[1], key_b, key_t, key_h, ALIGN),
        row_of(value, batch, head, window[1], value_b, value_t, value_h, ALIGN),
        row_of(grad_key, batch, head, window[1], grad_key_b, grad_key_t, grad_key_h, ALIGN),
        row_of(grad_value, batch, head, window[1], grad_value_b, grad_value_t, grad_value_h, ALIGN),
        key_t * ALIGN, value_t * ALIGN, grad_key_t * ALIGN, grad_value_t * ALIGN, window,
        theta + head * D if LRPE else theta, remainder + head * D if REST else None,
        places + batch.to(tl.int64) * places_b if AXES > 0 else places, mask + batch.to(tl.int64) * mask_b if MASK else mask,
        peak, norm, pressure, held, state,
        D, V, FW, VW, BT, LRPE, AXES, MASK, OP, PREC, APPROX, RELOAD, STAGES,
    )  # fmt: skip
    if LRPE:
        store_vectors(torque_ptr + (piece.to(tl.int64) * heads + head) * D, 0, torque, FW, D)


@triton.jit(do_not_specialize=COUNTS)
def fused_backward(
    query, key, value, grad, grad_query, grad_key, grad_value, peak_ptr, mass_ptr, state_ptr, grad_state_ptr,
    pressure_ptr, torque_ptr, theta, remainder, places, mask, table, query_b, query_t, query_h, key_b, key_t, key_h,
    value_b, value_t, value_h, grad_b, grad_t, grad_h, grad_query_b, grad_query_t, grad_query_h, grad_key_b,
    grad_key_t, grad_key_h, grad_value_b, grad_value_t, grad_value_h, places_b, mask_b, heads, tokens, splits, length,
    D: tl.constexpr, V: tl.constexpr, FW: tl.constexpr, VW: tl.constexpr, FN: tl.constexpr, BT: tl.constexpr,
    BS: tl.constexpr,
    LRPE: tl.constexpr, AXES: tl.constexpr, REST: tl.constexpr, MASK: tl.constexpr, TABLE: tl.constexpr, OP: tl.constexpr,
    PREC: tl.constexpr, APPROX: tl.constexpr, ALIGN: tl.constexpr, SILU: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Backward in one pass, a piece being a sequence."""
    head = tl.program_id(0) % heads
    piece = tl.program_id(0) // heads
    batch, window, sequence = find_piece(table, piece, splits, length, tokens, TABLE)
    theta = theta + head * D if LRPE else theta
    remainder = remainder + head * D if REST else None
    places = places + batch.to(tl.int64) * places_b if AXES > 0 else places
    mask = mask + batch.to(tl.int64) * mask_b if MASK else mask
    at = sequence.to(tl.int64) * heads + head
    state_ptr += at * ((2 if LRPE else 1) * D * V)
    query = row_of(query, batch, head, window[1], query_b, query_t, query_h, ALIGN)
    grad = row_of(grad, batch, head, window[1], grad_b, grad_t, grad_h, ALIGN)
    grad_state = state_grads(
        query, grad, query_t * ALIGN, grad_t * ALIGN, window, theta, remainder, places, mask, 0,
        D, V, FW, VW, 1, BS, LRPE, AXES, MASK, OP, PREC, APPROX, SILU, STAGES,
    )  # fmt: skip
    pressure = products_with(state_ptr, grad_state[0], FW, VW, D, V, vectors(0.0, FW))
    if LRPE:
        pressure = products_with(state_ptr + D * V, grad_state[1], FW, VW, D, V, pressure)
    grad_state_ptr += at * ((2 if LRPE else 1) * D * V)
    store_state(grad_state_ptr, 0, grad_state, FW, VW, D, V, LRPE)
    store_vectors(pressure_ptr + at * D, 0, pressure, FW, D)
    read_torque = query_grads(
        query, grad, row_of(grad_query, batch, head, window[1], grad_query_b, grad_query_t, grad_query_h, ALIGN),
        query_t * ALIGN, grad_t * ALIGN, grad_query_t * ALIGN, window, theta, remainder, places, mask,
        0, load_state(state_ptr, 0, FN, VW, D, V, LRPE), state_ptr,
        D, V, FN, VW, 1, BT, LRPE, AXES, MASK, OP, PREC, APPROX, SILU, False, STAGES,
    )  # fmt: skip
    tl.debug_barrier()  # dG and p went through memory, into the form that the last loop wants
    peak, norm = weighting(peak_ptr + at * D, mass_ptr + at * D, FN, D, OP, True)
    torque = weight_grads(
        row_of(key, batch, head, window[1], key_b, key_t, key_h, ALIGN),
        row_of(value, batch, head, window[1], value_b, value_t, value_h, ALIGN),
        row_of(grad_key, batch, head, window[1], grad_key_b, grad_key_t, grad_key_h, ALIGN),
        row_of(grad_value, batch, head, window[1], grad_value_b, grad_value_t, grad_value_h, ALIGN),
        key_t * ALIGN, value_t * ALIGN, grad_key_t * ALIGN, grad_value_t * ALIGN, window, theta, remainder, places, mask,
        peak, norm, load_vectors(pressure_ptr + at * D, 0, FN, D),
        load_state(grad_state_ptr, 0, FN, VW, D, V, LRPE), grad_state_ptr,
        D, V, FN, VW, BT, LRPE, AXES, MASK, OP, PREC, APPROX, False, STAGES,
    )  # fmt: skip
    if LRPE:
        total = ()
        for i in tl.static_range(len(FN)):
            total = total + (torque[i] + read_torque[i],)
        store_vectors(torque_ptr + at * D, 0, total, FN, D)


@triton.jit
def sequence_pieces(ranges, sequence, splits, TABLE: tl.constexpr):
    """First piece of a sequence and the one after its last."""
    if TABLE:
        return tl.load(ranges + sequence), tl.load(ranges + sequence + 1)
    else:
        return sequence * splits, sequence * splits + splits


@triton.jit(do_not_specialize=COUNTS)
def merge_states(
    piece_peak, piece_mass, piece_kv, peak_ptr, mass_ptr, state_ptr, ranges, heads, splits,
    D: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr, VP: tl.constexpr, HALVES: tl.constexpr,
    TABLE: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """State of each sequence from its pieces, ROWS features a program: G with NORM, else in units of exp(maximum)."""
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, VP)
    begin, end = sequence_pieces(ranges, sequence, splits, TABLE)
    peak = tl.full((ROWS,), float("-inf"), tl.float32)
    for piece in range(begin, end):
        at = (tl.cast(piece, tl.int64) * heads + head) * D + row
        peak = tl.maximum(peak, tl.load(piece_peak + at, mask=row < D, other=0.0))
    unit = tl.where(peak == float("-inf"), 0.0, peak)
    mass = tl.zeros((ROWS,), tl.float32)
    for piece in range(begin, end):
        at = (tl.cast(piece, tl.int64) * heads + head) * D + row
        scale = tl.exp(tl.load(piece_peak + at, mask=row < D, other=0.0) - unit)
        mass += scale * tl.load(piece_mass + at, mask=row < D, other=0.0)
    at = sequence.to(tl.int64) * heads + head
    tl.store(peak_ptr + at * D + row, peak, mask=row < D)
    tl.store(mass_ptr + at * D + row, mass, mask=row < D)
    norm = tl.where(mass > 0.0, 1.0 / mass, 0.0) if NORM else tl.full((ROWS,), 1.0, tl.float32)
    mask = (row < D)[:, None] & (col < V)[None, :]
    for half in tl.static_range(HALVES):
        inner = (half * D + row)[:, None] * V + col[None, :]
        total = tl.zeros((ROWS, VP), tl.float32)
        for piece in range(begin, end):
            source = tl.cast(piece, tl.int64) * heads + head
            scale = tl.exp(tl.load(piece_peak + source * D + row, mask=row < D, other=0.0) - unit)
            part = tl.load(piece_kv + source * (HALVES * D * V) + inner, mask=mask, other=0.0)
            total += part * scale[:, None]
        total = total * norm[:, None]
        tl.store(state_ptr + at * (HALVES * D * V) + inner, total.to(state_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=COUNTS)
def merge_grads(
    piece_grads, state_ptr, grad_state_ptr, pressure_ptr, ranges, heads, splits,
    D: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr, VP: tl.constexpr, HALVES: tl.constexpr,
    TABLE: tl.constexpr,
):  # fmt: skip
    """dG of each sequence from its pieces, and p."""
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, VP)
    begin, end = sequence_pieces(ranges, sequence, splits, TABLE)
    mask = (row < D)[:, None] & (col < V)[None, :]
    at = sequence.to(tl.int64) * heads + head
    pressure = tl.zeros((ROWS,), tl.float32)
    for half in tl.static_range(HALVES):
        inner = (half * D + row)[:, None] * V + col[None, :]
        total = tl.zeros((ROWS, VP), tl.float32)
        for piece in range(begin, end):
            source = tl.cast(piece, tl.int64) * heads + head
            total += tl.load(piece_grads + source * (HALVES * D * V) + inner, mask=mask, other=0.0)
        held = tl.load(state_ptr + at * (HALVES * D * V) + inner, mask=mask, other=0.0)
        pressure += tl.sum(held.to(tl.float32) * total, 1)
        tl.store(grad_state_ptr + at * (HALVES * D * V) + inner, total.to(grad_state_ptr.dtype.element_ty), mask=mask)
    tl.store(pressure_ptr + at * D + row, pressure, mask=row < D)
