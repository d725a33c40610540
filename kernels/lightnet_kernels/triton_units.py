"""Triton kernels of the causal additive scan that look at keys alone: the units that every block's state is kept in, and how
much mass came before it. See `triton_forward` for the buffers.

A sequence's blocks are looked at in turn, those of a long one by stretches: each one's total first, then all at once.
"""

# What Triton compiles is not quite Python: types change between uses.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from .triton_parts import SAFE_GROWTH, exp, fade, load_block, load_keys, load_vector, store_vector


@triton.jit
def block_peaks(
    k_ptr, blocks_ptr, first_ptr, peak_ptr, sum_ptr, skb, skn, skh, H,
    D: tl.constexpr, DP: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Every block on its own: its first key, its greatest, and sum exp(k) in units of exp(greatest). One program a
    (block, head)."""
    block, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    batch, first, length, _ = load_block(blocks_ptr, block)
    step, col = tl.arange(0, BT), tl.arange(0, DP)
    k_ptr += batch * skb + first * skn + head * skh
    keys = load_keys(k_ptr, step, skn, col, step < length, D, DP)
    peak = tl.max(keys, 0)
    at = (block * H + head) * D
    store_vector(first_ptr + at, col, load_vector(k_ptr, col, D, DP).to(tl.float32), D, DP)
    store_vector(peak_ptr + at, col, peak, D, DP)
    store_vector(sum_ptr + at, col, tl.sum(exp(keys - peak[None, :]), 0), D, DP)


@triton.jit
def joined_mass(top, total, peak, added):
    """Maximum and mass, in units of exp(maximum), of two stretches of tokens together."""
    new = tl.maximum(top, peak)
    return new, total * fade(top, new) + added * fade(peak, new)


@triton.jit(do_not_specialize=["stretch"])
def stretch_totals(
    sequences_ptr, peak_ptr, sum_ptr, tops_ptr, totals_ptr, H, stretch,
    D: tl.constexpr, DP: tl.constexpr, SLICES: tl.constexpr, ROWS: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """Maximum and mass of every stretch of a sequence's blocks, [sequences, H, D, MOST]. One program a (sequence, head,
    stretch and slice of DP features)."""
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start = tl.load(sequences_ptr + sequence * 2).to(tl.int64)
    blocks = tl.load(sequences_ptr + sequence * 2 + 1)
    place = tl.program_id(2) // SLICES
    col, step = (tl.program_id(2) % SLICES) * DP + tl.arange(0, DP), tl.arange(0, ROWS)
    top = tl.full([DP], float("-inf"), tl.float32)
    total = tl.zeros([DP], tl.float32)
    for base in tl.range(place * stretch, tl.minimum(blocks, (place + 1) * stretch), ROWS, num_stages=3):
        at = ((start + base + step) * H + head)[:, None] * D + col[None, :]
        ok = (base + step < blocks)[:, None] & (col < D)[None, :]
        peaks = tl.load(peak_ptr + at, mask=ok, other=float("-inf"))
        sums = tl.load(sum_ptr + at, mask=ok, other=0.0)
        peak = tl.max(peaks, 0)
        top, total = joined_mass(top, total, peak, tl.sum(sums * fade(peaks, peak[None, :]), 0))
    at = ((sequence * H + head) * D + col) * MOST + place
    tl.store(tops_ptr + at, top, mask=col < D)
    tl.store(totals_ptr + at, total, mask=col < D)


@triton.jit(do_not_specialize=["stretch"])
def scan_units(
    sequences_ptr, enter_ptr, leave_ptr, mass_ptr, flag_ptr, max0_ptr, sum0_ptr, max_ptr, sum_ptr, tops_ptr, totals_ptr,
    H, stretch,
    D: tl.constexpr, DP: tl.constexpr, SLICES: tl.constexpr, ROWS: tl.constexpr, MOST: tl.constexpr,
    INITIAL: tl.constexpr, FINAL: tl.constexpr,
):  # fmt: skip
    """enter, leave, mass and flag of a sequence's blocks in place of their first and greatest keys and sums. `tops` and
    `totals`: see `stretch_totals`, where a sequence is more than one. One program a (sequence, head, stretch and slice of DP
    features)."""
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start = tl.load(sequences_ptr + sequence * 2).to(tl.int64)
    blocks = tl.load(sequences_ptr + sequence * 2 + 1)
    place = tl.program_id(2) // SLICES
    stop = tl.minimum(blocks, (place + 1) * stretch)
    col, step = (tl.program_id(2) % SLICES) * DP + tl.arange(0, DP), tl.arange(0, ROWS)
    state = (sequence * H + head) * D
    if INITIAL:
        top = load_vector(max0_ptr + state, col, D, DP)
        total = load_vector(sum0_ptr + state, col, D, DP)
    else:
        top = tl.full([DP], float("-inf"), tl.float32)
        total = tl.zeros([DP], tl.float32)
    if tops_ptr is not None:
        earlier = tl.arange(0, MOST)
        from_at = (state + col)[None, :] * MOST + earlier[:, None]
        known = (earlier < place)[:, None] & (col < D)[None, :]
        tops_before = tl.load(tops_ptr + from_at, mask=known, other=float("-inf"))
        totals_before = tl.load(totals_ptr + from_at, mask=known, other=0.0)
        peak = tl.max(tops_before, 0)
        top, total = joined_mass(top, total, peak, tl.sum(totals_before * fade(tops_before, peak[None, :]), 0))
    for base in range(place * stretch, stop, ROWS):
        row = base + step
        at = ((start + row) * H + head)[:, None] * D + col[None, :]
        ok = (row < blocks)[:, None] & (col < D)[None, :]
        firsts = tl.load(enter_ptr + at, mask=ok, other=0.0)
        peaks = tl.load(leave_ptr + at, mask=ok, other=float("-inf"))
        sums = tl.load(mass_ptr + at, mask=ok, other=0.0)
        # Before each block: the carried maximum and mass, then the blocks above it.
        above = ok & (step > 0)[:, None]
        tops = tl.load(leave_ptr + at - H * D, mask=above, other=float("-inf"))
        totals = tl.load(mass_ptr + at - H * D, mask=above, other=0.0)
        first_row = (step == 0)[:, None]
        tops = tl.where(first_row, top[None, :], tops)
        totals = tl.where(first_row, total[None, :], totals)
        tops, totals = tl.associative_scan((tops, totals), 0, joined_mass)
        tl.debug_barrier()  # all loads of these rows come before the stores below
        low = tl.maximum(tops, firsts)
        high = tl.maximum(tops, peaks)
        fast = high - low > SAFE_GROWTH
        enter = tl.where(fast, low, low + 0.5 * (high - low))
        tl.store(enter_ptr + at, enter, mask=ok)
        tl.store(leave_ptr + at, tl.where(fast, high, enter), mask=ok)
        tl.store(mass_ptr + at, totals * fade(tops, enter), mask=ok)
        flagged = tl.max((fast & ok).to(tl.int32), 1)  # set to 0 before; slices only ever store 1
        tl.store(flag_ptr + (start + row) * H + head, flagged, mask=(row < blocks) & (flagged != 0))
        end = (step == tl.minimum(blocks - base, ROWS) - 1)[:, None]
        top, total = joined_mass(
            tl.max(tl.where(end, tops, float("-inf")), 0), tl.sum(tl.where(end, totals, 0.0), 0),
            tl.max(tl.where(end, peaks, float("-inf")), 0), tl.sum(tl.where(end, sums, 0.0), 0),
        )  # fmt: skip
    if FINAL:  # noqa: SIM102
        if blocks > 0 and stop == blocks and place * stretch < blocks:
            store_vector(max_ptr + state, col, top, D, DP)
            store_vector(sum_ptr + state, col, total, D, DP)
