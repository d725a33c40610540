"""Triton kernels of `decode`: a step reads a layer's state once, and writes it once a block.

`block_weights` finds, for every head, what the new token weighs each state row and each token of the block with, after
it has moved a full block into the state. `read_state` then sums rows and values by those weights: that is where the time
goes, one pass over kv.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .companions import on_device
from .state import ToeplitzState
from .triton_launch import launch
from .triton_parts import activated

BLOCK = tl.constexpr(64)  # decode.BLOCK
TOGETHER = tl.constexpr(8)  # tokens that `enter_block` adds at once
FEATURES = 32  # of one program of `block_weights`


@triton.jit
def load_wide(ptr, low_ptr, at, mask):
    return tl.load(ptr + at, mask=mask, other=0.0).to(tl.float64) + tl.load(low_ptr + at, mask=mask, other=0.0).to(
        tl.float64
    )


@triton.jit
def store_wide(ptr, low_ptr, at, x, mask):
    """x in float32, and what that leaves of it."""
    high = x.to(tl.float32)
    low = (x - high.to(tl.float64)).to(tl.float32)
    tl.store(ptr + at, high, mask=mask)
    tl.store(low_ptr + at, low.to(low_ptr.dtype.element_ty), mask=mask)


@triton.jit
def enter_block(
    kv_ptr, low_ptr, keys_ptr, values_ptr, angles_ptr, turn_ptr, head, col, inside, top, scale, heads,
    D: tl.constexpr, V: tl.constexpr, DB: tl.constexpr, VB: tl.constexpr, LRPE: tl.constexpr,
):  # fmt: skip
    """kv's rows of the features `col`: rescaled, with the block added, and turned to the next block's first token.

    Once a block, so float64 costs little, and what float32 leaves of the result is kept.
    """
    scale = scale.to(tl.float64)[:, None]
    for first in range(0, V, VB):
        vcol = first + tl.arange(0, VB)
        at = col[:, None] * V + vcol[None, :]
        mask = inside[:, None] & (vcol < V)[None, :]
        real = tl.zeros((DB, VB), tl.float32)
        imag = tl.zeros((DB, VB), tl.float32)
        for start in range(0, BLOCK, TOGETHER):  # outer products of some tokens at once: each turn waits for memory
            r = start + tl.arange(0, TOGETHER)[:, None]
            some = inside[None, :]
            keys = tl.load(keys_ptr + r * D + col[None, :], mask=some, other=0.0).to(tl.float32)
            mass = tl.exp(keys - top[None, :])
            value = tl.load(values_ptr + r * V + vcol[None, :], mask=(vcol < V)[None, :], other=0.0).to(tl.float32)
            if LRPE:
                angle = angles_ptr + (r * heads + head) * D + col[None, :]
                cos = tl.load(angle, mask=some, other=0.0)
                sin = tl.load(angle + BLOCK * heads * D, mask=some, other=0.0)
                real += tl.sum((mass * cos)[:, :, None] * value[:, None, :], 0)
                imag += tl.sum((mass * sin)[:, :, None] * value[:, None, :], 0)
            else:
                real += tl.sum(mass[:, :, None] * value[:, None, :], 0)
        new = real.to(tl.float64) + scale * load_wide(kv_ptr, low_ptr, at, mask)
        if LRPE:
            turned = imag.to(tl.float64) + scale * load_wide(kv_ptr, low_ptr, at + D * V, mask)
            cos = tl.load(turn_ptr + head * D + col, mask=inside, other=0.0)[:, None]
            sin = tl.load(turn_ptr + (heads + head) * D + col, mask=inside, other=0.0)[:, None]
            store_wide(kv_ptr, low_ptr, at + D * V, cos * turned - sin * new, mask)
            new = cos * new + sin * turned
        store_wide(kv_ptr, low_ptr, at, new, mask)


@triton.jit
def block_weights(
    query_ptr, key_ptr, max_ptr, sum_ptr, kv_ptr, sum_low_ptr, kv_low_ptr, keys_ptr, values_ptr, count_ptr, slot_ptr,
    weights_ptr, angles_ptr, turn_ptr, stride_qb, stride_qh, stride_kb, stride_kh, heads,
    D: tl.constexpr, V: tl.constexpr, DB: tl.constexpr, VB: tl.constexpr, LRPE: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """For DB features of a head: the weights of their rows, their part of the weights of the block's tokens (weights
    [B, H, rows of kv + parts * BLOCK]), and the new token's slot in the block."""
    ROWS: tl.constexpr = 2 * D if LRPE else D
    index = tl.program_id(0).to(tl.int64)
    batch, head = index // heads, index % heads
    count = tl.load(count_ptr + batch)
    full = count == BLOCK
    slot = tl.where(full, 0, count)
    part = tl.program_id(1)
    if (head == 0) & (part == 0):
        tl.store(slot_ptr + batch, slot)
    keys_ptr += index * BLOCK * D
    values_ptr += index * BLOCK * V
    weights_ptr += index * (ROWS + tl.num_programs(1) * BLOCK)
    place = tl.arange(0, BLOCK)
    earlier = place < slot
    col = part * DB + tl.arange(0, DB)
    inside = col < D
    at = index * D + col
    peak = tl.load(max_ptr + at, mask=inside, other=float("-inf"))
    mass = tl.load(sum_ptr + at, mask=inside, other=0.0)
    known = (earlier | full)[:, None] & inside[None, :]
    keys = tl.load(keys_ptr + place[:, None] * D + col[None, :], mask=known, other=0.0).to(tl.float32)
    if full:
        top = tl.maximum(peak, tl.max(keys, 0))
        scale = tl.where(peak == float("-inf"), 0.0, tl.exp(peak - top))
        enter_block(
            kv_ptr + index * ROWS * V, kv_low_ptr + index * ROWS * V, keys_ptr, values_ptr, angles_ptr, turn_ptr,
            head, col, inside, top, scale, heads, D, V, DB, VB, LRPE,
        )  # fmt: skip
        total = load_wide(sum_ptr, sum_low_ptr, at, inside) * scale.to(tl.float64)
        total += tl.sum(tl.exp(keys - top[None, :]), 0).to(tl.float64)
        peak = tl.where(inside, top, float("-inf"))
        tl.store(max_ptr + at, peak, mask=inside)
        store_wide(sum_ptr, sum_low_ptr, at, total, inside)
        mass = total.to(tl.float32)
    query = tl.load(query_ptr + batch * stride_qb + head * stride_qh + col, mask=inside, other=0.0)
    key = tl.load(key_ptr + batch * stride_kb + head * stride_kh + col, mask=inside, other=0.0).to(tl.float32)
    keys = tl.where(earlier[:, None], keys, float("-inf"))
    top = tl.maximum(tl.maximum(peak, key), tl.max(keys, 0))
    masses = tl.exp(keys - top[None, :])
    own = tl.exp(key - top)
    scale = tl.where(peak == float("-inf"), 0.0, tl.exp(peak - top))
    weight = activated(query, SILU) / (mass * scale + (tl.sum(masses, 0) + own))
    if LRPE:
        lag = tl.where(earlier, slot - place, 0)
        angle = angles_ptr + (lag[:, None] * heads + head) * D + col[None, :]
        masses *= tl.load(angle, mask=earlier[:, None] & inside[None, :], other=0.0)
        angle = angles_ptr + (slot * heads + head) * D + col
        sin = tl.load(angle + BLOCK * heads * D, mask=inside, other=0.0)
        tl.store(weights_ptr + D + col, weight * scale * sin, mask=inside)
        scale *= tl.load(angle, mask=inside, other=0.0)
    tl.store(weights_ptr + col, weight * scale, mask=inside)
    scores = tl.sum(masses * weight[None, :], 1) + tl.where(place == slot, tl.sum(own * weight, 0), 0.0)
    tl.store(weights_ptr + ROWS + part * BLOCK + place, scores)


@triton.jit
def read_state(
    key_ptr, value_ptr, output_ptr, kv_ptr, keys_ptr, values_ptr, count_ptr, length_ptr, slot_ptr, weights_ptr,
    stride_kb, stride_kh, stride_vb, stride_vh, heads,
    D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, V: tl.constexpr, RB: tl.constexpr,
    VB: tl.constexpr,
):  # fmt: skip
    """Output [B, H, V]; the new key and value go into the block."""
    index = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    batch, head = index // heads, index % heads
    slot = tl.load(slot_ptr + batch)
    vcol = part * VB + tl.arange(0, VB)
    visible = vcol < V
    kv_ptr += index * ROWS * V
    values_ptr += index * BLOCK * V
    weights_ptr += index * (ROWS + PARTS * BLOCK)
    total = tl.zeros((RB, VB), tl.float32)
    for first in range(0, ROWS, RB):
        row = first + tl.arange(0, RB)
        weight = tl.load(weights_ptr + row, mask=row < ROWS, other=0.0)
        kv = tl.load(
            kv_ptr + row[:, None] * V + vcol[None, :], mask=(row < ROWS)[:, None] & visible[None, :], other=0.0
        )
        total += weight[:, None] * kv
    for first in range(0, slot, RB):
        row = first + tl.arange(0, RB)
        weight = tl.zeros((RB,), tl.float32)
        for i in tl.static_range(PARTS):
            weight += tl.load(weights_ptr + ROWS + i * BLOCK + row, mask=row < slot, other=0.0)
        values = tl.load(
            values_ptr + row[:, None] * V + vcol[None, :], mask=(row < slot)[:, None] & visible[None, :], other=0.0
        )
        total += weight[:, None] * values.to(tl.float32)
    value = tl.load(value_ptr + batch * stride_vb + head * stride_vh + vcol, mask=visible, other=0.0)
    output = tl.sum(total, 0)
    for i in tl.static_range(PARTS):
        output += tl.load(weights_ptr + ROWS + i * BLOCK + slot) * value.to(tl.float32)
    tl.store(output_ptr + index * V + vcol, output.to(output_ptr.dtype.element_ty), mask=visible)
    tl.store(values_ptr + slot * V + vcol, value, mask=visible)
    if part == 0:
        col = tl.arange(0, DP)
        key = tl.load(key_ptr + batch * stride_kb + head * stride_kh + col, mask=col < D, other=0.0)
        tl.store(keys_ptr + (index * BLOCK + slot) * D + col, key, mask=col < D)
        if head == 0:
            tl.store(count_ptr + batch, slot + 1)
            tl.store(length_ptr + batch, tl.load(length_ptr + batch) + 1)


@triton.jit(do_not_specialize=["batch"])
def toeplitz_token(
    hidden_ptr, length_ptr, x_ptr, decay_ptr, gain_ptr, y_ptr, stride_b, stride_d, batch, d,
    E: tl.constexpr, EP: tl.constexpr, BD: tl.constexpr, NB: tl.constexpr,
):  # fmt: skip
    """h <- lambda h + x, y = sum_i b_i h_i, for BD channels of NB sequences."""
    channel = tl.program_id(0) * BD + tl.arange(0, BD)
    e = tl.arange(0, EP)
    inside = channel < d
    mask = inside[:, None] & (e < E)[None, :]
    parameter = channel[:, None] * E + e[None, :]
    decay = tl.load(decay_ptr + parameter, mask=mask, other=0.0)
    gain = tl.load(gain_ptr + parameter, mask=mask, other=0.0)
    for i in tl.static_range(NB):
        row = tl.program_id(1).to(tl.int64) * NB + i
        if row < batch:
            x = tl.load(x_ptr + row * stride_b + channel * stride_d, mask=inside, other=0.0).to(tl.float32)
            at = hidden_ptr + row * d * E + parameter
            hidden = decay * tl.load(at, mask=mask, other=0.0) + x[:, None]
            tl.store(at, hidden, mask=mask)
            y = tl.sum(gain * hidden, 1)
            tl.store(y_ptr + row * d + channel, y.to(y_ptr.dtype.element_ty), mask=inside)
            if tl.program_id(0) == 0:
                tl.store(length_ptr + row, tl.load(length_ptr + row) + 1)


def decode_step(state: Any, query: Tensor, key: Tensor, value: Tensor, silu: bool) -> Tensor:
    """See `decode.decode_step`; the state is a `decode.DecodeState`."""
    query, key, value = (x if x.stride(2) == 1 else x.contiguous() for x in (query, key, value))
    batch, heads, rows, width = state.kv.shape
    features = state.keys.shape[3]
    output = torch.empty(batch, heads, width, dtype=value.dtype, device=value.device)
    parts = triton.cdiv(features, FEATURES)
    weights = torch.empty(batch, heads, rows + parts * BLOCK.value, device=value.device)
    slot = torch.empty_like(state.count)
    if not output.numel():
        return output
    padded = max(16, triton.next_power_of_2(width))
    # Few heads in all: their values are cut up, so that all of the card reads.
    part = min(padded, 128 if batch * heads >= 512 else 32)
    with on_device(query):
        launch(block_weights, (batch * heads, parts))(
            query, key, state.max, state.sum, state.kv, state.sum_low, state.kv_low, state.keys, state.values, state.count,
            slot, weights, state.angles, state.turn, *query.stride()[:2], *key.stride()[:2], heads,
            D=features, V=width, DB=FEATURES, VB=min(padded, 32), LRPE=state.angles is not None, SILU=silu, num_warps=4,
        )  # fmt: skip
        launch(read_state, (batch * heads, triton.cdiv(width, part)))(
            key, value, output, state.kv, state.keys, state.values, state.count, state.length, slot, weights,
            *key.stride()[:2], *value.stride()[:2], heads, D=features, DP=triton.next_power_of_2(features),
            ROWS=rows, PARTS=parts, V=width, RB=4096 // part, VB=part, num_warps=4,
        )  # fmt: skip
    return output


def toeplitz_step(state: ToeplitzState, x: Tensor, decay: Tensor, gain: Tensor) -> Tensor:
    """See `decode.toeplitz_step`."""
    batch, channels, rank = state.hidden.shape
    y = torch.empty(batch, channels, dtype=x.dtype, device=x.device)
    if not y.numel():
        return y
    together = 4 if batch * channels >= 2**15 else 1  # sequences for which a program loads its parameters once
    with on_device(x):
        launch(toeplitz_token, (triton.cdiv(channels, 16), triton.cdiv(batch, together)))(
            state.hidden, state.length, x, decay.float().contiguous(), gain.float().contiguous(), y, *x.stride(),
            batch, channels, E=rank, EP=triton.next_power_of_2(rank), BD=16, NB=together, num_warps=4,
        )  # fmt: skip
    return y
