"""Kernels of the causal scan's backward pass that look at states alone: spans, ends of sequences, sums over blocks. See
`triton_backward`, whose buffers these are.
"""

# What Triton compiles is not quite Python: types change between uses.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from .triton_backward import WINDOW
from .triton_forward import load_span
from .triton_parts import exp, load_matrix, load_vector, store_matrix, store_vector, turned


@triton.jit
def scan_span_grads(
    sequences_ptr, pieces_ptr, piece_grad_ptr, enter_ptr, leave_ptr, move_ptr, final_ptr, first_ptr, H,
    D: tl.constexpr, V: tl.constexpr, BD: tl.constexpr, VP: tl.constexpr, BT: tl.constexpr, LRPE: tl.constexpr,
    FINAL: tl.constexpr, TOTAL: tl.constexpr,
):  # fmt: skip
    """From what each piece's own queries ask of what it finds to what all later ones ask of what it leaves, in place, back to the
    first span's last.
    `final`: the gradient of each sequence's last state, in units of exp(-leave). With TOTAL nothing changes, and what is
    asked of what each sequence finds is kept in `first`, in units of exp(-enter). One program a (sequence, head, slice of
    features)."""
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, vcol = tl.program_id(2) * BD + tl.arange(0, BD), tl.arange(0, VP)
    start = tl.load(sequences_ptr + sequence * 4).to(tl.int64)
    pieces = tl.load(sequences_ptr + sequence * 4 + 1)
    SIZE: tl.constexpr = (2 if LRPE else 1) * D * V
    real = tl.zeros([BD, VP], tl.float32)
    imag = tl.zeros([BD, VP], tl.float32)
    unit = tl.zeros([BD], tl.float32)
    if FINAL:
        real = load_matrix(final_ptr + (sequence * H + head) * SIZE, row, vcol, D, V, BD, VP)
        if LRPE:
            imag = load_matrix(final_ptr + (sequence * H + head) * SIZE + D * V, row, vcol, D, V, BD, VP)
    if LRPE:
        cos, sin = load_vector(move_ptr + head * D, row, D, BD), load_vector(move_ptr + (H + head) * D, row, D, BD)
    for j in range(0, pieces if TOTAL else tl.load(sequences_ptr + sequence * 4 + 3)):
        piece = start + pieces - 1 - j
        _, _, length, block, _, _, _ = load_span(pieces_ptr, piece)
        at = piece * H + head
        enter = load_vector(enter_ptr + (block * H + head) * D, row, D, BD)
        leave = load_vector(leave_ptr + ((block + tl.cdiv(length, BT) - 1) * H + head) * D, row, D, BD)
        real_added = load_matrix(piece_grad_ptr + at * SIZE, row, vcol, D, V, BD, VP)
        if j > 0:
            faded = exp(leave - unit)[:, None]
            real *= faded
            imag *= faded
        if not TOTAL:
            store_matrix(piece_grad_ptr + at * SIZE, row, vcol, real, D, V, BD, VP)
        crossed = exp(enter - leave)[:, None]
        if LRPE:
            imag_added = load_matrix(piece_grad_ptr + at * SIZE + D * V, row, vcol, D, V, BD, VP)
            if not TOTAL:
                store_matrix(piece_grad_ptr + at * SIZE + D * V, row, vcol, imag, D, V, BD, VP)
            if j == 0:  # the last piece may be short
                last_cos = load_vector(move_ptr + (2 * H + sequence * H + head) * D, row, D, BD)
                sequences = tl.num_programs(0)
                last_sin = load_vector(move_ptr + ((2 + sequences) * H + sequence * H + head) * D, row, D, BD)
                real, imag = turned(real, imag, last_cos, -last_sin)
            else:
                real, imag = turned(real, imag, cos, -sin)
            imag = imag * crossed + imag_added
        real = real * crossed + real_added
        unit = enter
    if TOTAL:
        store_matrix(first_ptr + (sequence * H + head) * SIZE, row, vcol, real, D, V, BD, VP)
        if LRPE:
            store_matrix(first_ptr + (sequence * H + head) * SIZE + D * V, row, vcol, imag, D, V, BD, VP)


@triton.jit
def asks_of_last(
    sequences_ptr, leave_ptr, max_ptr, grad_sum_ptr, grad_kv_ptr, kv_ptr, pressure_ptr, H,
    D: tl.constexpr, V: tl.constexpr, BD: tl.constexpr, VP: tl.constexpr, LRPE: tl.constexpr,
):  # fmt: skip
    """From the gradients of last states, in units of exp(-max), to what is asked of the last blocks, kv's and the pressure,
    in units of exp(-leave). One program a (sequence, head, slice of features)."""
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, vcol = tl.program_id(2) * BD + tl.arange(0, BD), tl.arange(0, VP)
    start = tl.load(sequences_ptr + sequence * 2).to(tl.int64)
    blocks = tl.load(sequences_ptr + sequence * 2 + 1)
    if blocks == 0:  # not used
        return
    SIZE: tl.constexpr = (2 if LRPE else 1) * D * V
    state = sequence * H + head
    leave = load_vector(leave_ptr + ((start + blocks - 1) * H + head) * D, row, D, BD)
    # Without the initial state in it the last one's unit may be far below: then nobody asks anything of it.
    scale = exp(tl.minimum(leave - load_vector(max_ptr + state * D, row, D, BD), 80.0))
    store_vector(pressure_ptr + state * D, row, -scale * load_vector(grad_sum_ptr + state * D, row, D, BD), D, BD)
    grad = load_matrix(grad_kv_ptr + state * SIZE, row, vcol, D, V, BD, VP)
    store_matrix(kv_ptr + state * SIZE, row, vcol, grad * scale[:, None], D, V, BD, VP)
    if LRPE:
        grad = load_matrix(grad_kv_ptr + state * SIZE + D * V, row, vcol, D, V, BD, VP)
        store_matrix(kv_ptr + state * SIZE + D * V, row, vcol, grad * scale[:, None], D, V, BD, VP)


@triton.jit
def grads_of_first(
    sequences_ptr, enter_ptr, max_ptr, kv_ptr, sum_ptr, last_kv_ptr, last_sum_ptr, H,
    D: tl.constexpr, V: tl.constexpr, BD: tl.constexpr, VP: tl.constexpr, LRPE: tl.constexpr,
):  # fmt: skip
    """From what the first blocks ask (kv's and the pressure, in units of exp(-enter)) to the gradients of initial states, in
    units of exp(-max), in place. A sequence without tokens hands its state on: it gets those of the last one, if any,
    but where there is no state yet (max -inf), which counts for nothing. One program a (sequence, head, slice of features)."""
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, vcol = tl.program_id(2) * BD + tl.arange(0, BD), tl.arange(0, VP)
    start = tl.load(sequences_ptr + sequence * 2).to(tl.int64)
    blocks = tl.load(sequences_ptr + sequence * 2 + 1)
    SIZE: tl.constexpr = (2 if LRPE else 1) * D * V
    state = sequence * H + head
    total = tl.zeros([BD], tl.float32)
    real = tl.zeros([BD, VP], tl.float32)
    imag = tl.zeros([BD, VP], tl.float32)
    top = load_vector(max_ptr + state * D, row, D, BD)
    if blocks > 0:
        scale = tl.where(
            top == float("-inf"), 0.0, exp(top - load_vector(enter_ptr + (start * H + head) * D, row, D, BD))
        )
        total = -scale * load_vector(sum_ptr + state * D, row, D, BD)
        real = scale[:, None] * load_matrix(kv_ptr + state * SIZE, row, vcol, D, V, BD, VP)
        if LRPE:
            imag = scale[:, None] * load_matrix(kv_ptr + state * SIZE + D * V, row, vcol, D, V, BD, VP)
    else:
        if last_kv_ptr is not None:
            counts = tl.where(top == float("-inf"), 0.0, 1.0)
            total = counts * load_vector(last_sum_ptr + state * D, row, D, BD)
            real = counts[:, None] * load_matrix(last_kv_ptr + state * SIZE, row, vcol, D, V, BD, VP)
            if LRPE:
                imag = counts[:, None] * load_matrix(last_kv_ptr + state * SIZE + D * V, row, vcol, D, V, BD, VP)
    store_vector(sum_ptr + state * D, row, total, D, BD)
    store_matrix(kv_ptr + state * SIZE, row, vcol, real, D, V, BD, VP)
    if LRPE:
        store_matrix(kv_ptr + state * SIZE + D * V, row, vcol, imag, D, V, BD, VP)


@triton.jit
def last_moves(
    sequences_ptr, lengths_ptr, kv_ptr, grad_ptr, max_ptr, kv0_ptr, max0_ptr, theta_ptr, out_ptr, H,
    D: tl.constexpr, V: tl.constexpr, BD: tl.constexpr, VP: tl.constexpr, BT: tl.constexpr, LRPE: tl.constexpr,
    APART: tl.constexpr,
):  # fmt: skip
    """theta's gradient [sequences, H, D] of the last states' own move: their origin, the token after, counted from the
    last window. APART: the last state, kv in units of exp(max), is of these tokens alone, without the initial one, whose
    moves by whole windows `chain_grads` has counted with it. One program a (sequence, head, slice of features)."""
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, vcol = tl.program_id(2) * BD + tl.arange(0, BD), tl.arange(0, VP)
    blocks = tl.load(sequences_ptr + sequence * 2 + 1)
    tokens = tl.load(lengths_ptr + sequence).to(tl.int64)
    start = tl.maximum(blocks - 1, 0) // WINDOW * (WINDOW * BT)
    state = sequence * H + head
    SIZE: tl.constexpr = 2 * D * V
    grad_cos = load_matrix(grad_ptr + state * SIZE, row, vcol, D, V, BD, VP)
    grad_sin = load_matrix(grad_ptr + state * SIZE + D * V, row, vcol, D, V, BD, VP)
    real = load_matrix(kv_ptr + state * SIZE, row, vcol, D, V, BD, VP)
    imag = load_matrix(kv_ptr + state * SIZE + D * V, row, vcol, D, V, BD, VP)
    total = (tokens - start).to(tl.float32) * tl.sum(imag * grad_cos - real * grad_sin, 1)
    if APART:
        unit, top = load_vector(max0_ptr + state * D, row, D, BD), load_vector(max_ptr + state * D, row, D, BD)
        # Where the initial state is far above, what later ranks ask of these tokens' own is nothing beside it.
        scale = tl.where(unit == float("-inf"), 0.0, exp(tl.minimum(unit - top, 80.0)))
        real = load_matrix(kv0_ptr + state * SIZE, row, vcol, D, V, BD, VP)
        imag = load_matrix(kv0_ptr + state * SIZE + D * V, row, vcol, D, V, BD, VP)
        angle = tokens.to(tl.float64) * load_vector(theta_ptr + head * D, row, D, BD).to(tl.float64)
        real, imag = turned(real, imag, tl.cos(angle).to(tl.float32) * scale, tl.sin(angle).to(tl.float32) * scale)
        total -= start.to(tl.float32) * tl.sum(imag * grad_cos - real * grad_sin, 1)
    store_vector(out_ptr + state * D, row, tl.where(tokens > 0, total, 0.0), D, BD)


@triton.jit
def chained(factor, added, next_factor, next_added):
    """Two steps of x -> factor x + added, the second after the first."""
    return factor * next_factor, added * next_factor + next_added


@triton.jit
def scan_pressure(
    sequences_ptr, enter_ptr, leave_ptr, own_ptr, pressure_ptr, final_ptr, initial_ptr, H,
    D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr, FINAL: tl.constexpr, INITIAL: tl.constexpr,
):  # fmt: skip
    """From the blocks' own pressures, `own`, that of all that comes later in the sequence: a true reverse sum. `final`:
    that of what reads the last state, in units of exp(-leave); `initial`: all pressure on the first, in units of
    exp(-enter). One program a (sequence, head, slice of DP features)."""
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start = tl.load(sequences_ptr + sequence * 2).to(tl.int64)
    blocks = tl.load(sequences_ptr + sequence * 2 + 1)
    col, step = tl.program_id(2) * DP + tl.arange(0, DP), tl.arange(0, ROWS)
    total = tl.zeros([DP], tl.float32)  # on the state that the block above finds, in units of exp(-unit)
    state = (sequence * H + head) * D
    unit = tl.zeros([DP], tl.float32)
    if blocks > 0:
        unit = load_vector(leave_ptr + ((start + blocks - 1) * H + head) * D, col, D, DP)
    if FINAL:
        total = load_vector(final_ptr + state, col, D, DP)
    for base in range(0, blocks, ROWS):
        row = blocks - 1 - base - step
        at = ((start + row) * H + head)[:, None] * D + col[None, :]
        ok = (row >= 0)[:, None] & (col < D)[None, :]
        first_row = (step == 0)[:, None]
        later = ok & (first_row == 0)
        enters = tl.load(enter_ptr + at, mask=ok, other=0.0)
        leaves = tl.load(leave_ptr + at, mask=ok, other=0.0)
        owns = tl.load(own_ptr + at, mask=ok, other=0.0)
        next_enters = tl.load(enter_ptr + at + H * D, mask=later, other=0.0)
        next_leaves = tl.load(leave_ptr + at + H * D, mask=later, other=0.0)
        next_owns = tl.load(own_ptr + at + H * D, mask=later, other=0.0)
        factor = tl.where(later, exp(leaves - next_leaves), 0.0)
        added = tl.where(later, next_owns * exp(leaves - next_enters), 0.0)
        added = tl.where(first_row, (total[None, :] * exp(leaves - unit[None, :])), added)
        _, totals = tl.associative_scan((factor, added), 0, chained)
        tl.store(pressure_ptr + at, totals, mask=ok)
        end = (step == tl.minimum(blocks - base, ROWS) - 1)[:, None]
        total = tl.sum(tl.where(end, totals * exp(enters - leaves) + owns, 0.0), 0)
        unit = tl.sum(tl.where(end, enters, 0.0), 0)
    if INITIAL:
        store_vector(initial_ptr + state, col, total, D, DP)


@triton.jit(do_not_specialize=["rows"])
def sum_rows(x_ptr, total_ptr, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """x [rows, columns] summed over rows. One program COLUMNS of them."""
    step, col = tl.arange(0, ROWS), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for base in range(0, rows, ROWS):
        row = (base + step).to(tl.int64)
        ok = (row < rows)[:, None] & (col < columns)[None, :]
        total += tl.load(x_ptr + row[:, None] * columns + col[None, :], mask=ok, other=0.0)
    tl.store(total_ptr + col, tl.sum(total, 0), mask=col < columns)
