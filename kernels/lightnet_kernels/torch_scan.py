"""Backend "torch": the chunked additive scan in plain PyTorch (model-spec 1, "Numerics").

Inside a chunk the scan is ordinary attention with keys exp(k - c) and queries phi(q) / den, where c is a reference per
chunk and feature and den the running normaliser in units of exp(c). Between chunks goes the state. With
g = growth of the running max inside a chunk, c is half way up, so that every factor stays within exp(+-g / 2). Where g
is too large for that, the (chunk, head) is done again in the exact form, whose exponents are never positive.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .chunk_scan import ScanConstants, scan_chunks
from .lrpe import double, grid_rotation, rotation
from .segments import ChunkLayout, chunk_layout
from .state import ScanState, scale_between, shift_state

# The mid reference is accurate to g = 140, but its factors then reach exp(-70) and a small upstream gradient times that
# is a subnormal (measured: 8e-5 off at 1e-12). exp(-40) leaves room for those.
SAFE_GROWTH = 80.0
SLOW_ITEMS = 16  # (chunk, head) pairs done at once in the exact form, which holds [chunk, chunk, D] for each


class _Frame(NamedTuple):
    """References of the exponents, all [chunks, H, D] and constants."""

    entry: Tensor  # unit of the state a chunk receives
    exit: Tensor  # unit of what a chunk adds
    enter: Tensor  # exp(unit before - entry)
    keep: Tensor | None  # exp(entry - exit), None where they are the same
    slow: Tensor | None  # [chunks, H] bool, what needs the exact form
    last_max: Tensor  # [rows, H, D], running max at the end
    last_unit: Tensor  # [rows, H, D], unit of the last state


def causal_scan(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    activation: bool,
    theta: Tensor | None,
    decay: Tensor | None,
    cu_seqlens: list[int] | None,
    key_mask: Tensor | None,
    initial: ScanState,
    continued: bool,
    need_output: bool = True,
    need_state: bool = True,
) -> tuple[Tensor | None, ScanState | None]:
    """See `scan.additive_scan`; inputs are in the computing dtype. What is not needed may be None."""
    if is_one_step(key, theta, cu_seqlens, key_mask):
        return one_token(query, key, value, activation, theta, decay, initial)
    layout = chunk_layout(key.shape[0], key.shape[1], cu_seqlens, key_mask, key.device)
    mass = layout.pack_heads(key if decay is None else decay, fill=float("-inf"))  # [chunks, H, C, D]
    gain = None if decay is None else F.silu(layout.pack_heads(key))
    v = layout.pack_heads(value)
    q = layout.pack_heads(query) if need_output else None
    frame = _frame(layout, mass.detach(), layout.to_rows(initial.max.detach()))
    constants = ScanConstants(layout.counts, activation, frame.exit, frame.enter, frame.keep, frame.slow, need_state)
    kv, total = layout.to_rows(initial.kv), layout.to_rows(initial.sum)
    if continued and theta is not None:
        # Carried in float64: a rounded rotation, the same in call after call, would drift.
        kv, total = kv.double(), total.double()
    packed, held_kv, held_sum, last_kv, last_sum = scan_chunks(q, mass, gain, v, theta, kv, total, constants)

    output = None
    if packed is not None and q is not None:
        if frame.slow is not None:
            phi = F.silu(q) if activation else q
            packed = _redo(packed, phi, mass, gain, v, theta, held_kv, held_sum, frame)
        output = layout.unpack_heads(packed)
    if not need_state:
        return output, None

    scale = scale_between(frame.last_unit, frame.last_max.double()).to(last_kv.dtype)
    wide = scale if theta is None else scale.repeat(1, 1, 2)
    final = ScanState(
        layout.from_rows(frame.last_max),
        layout.from_rows(last_sum * scale),
        layout.from_rows(last_kv * wide.unsqueeze(-1)),
        initial.length + layout.lengths,
    )
    return output, shift_state(final, layout.tokens_in_last_chunk(), theta)


def is_one_step(
    key: Tensor, theta: Tensor | None, cu_seqlens: list[int] | Tensor | None, key_mask: Tensor | None
) -> bool:
    """Whether a call is `one_token`."""
    # Training goes through the chunks, so that every parameter is part of the graph (theta is not, in one step).
    trains_theta = theta is not None and theta.requires_grad and torch.is_grad_enabled()
    return key.shape[1] == 1 and cu_seqlens is None and key_mask is None and not trains_theta


def one_token(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    activation: bool,
    theta: Tensor | None,
    decay: Tensor | None,
    initial: ScanState,
) -> tuple[Tensor, ScanState]:
    """A step of decoding: the recurrence itself, in the state's dtype, without chunks."""
    q, k, v = query[:, 0], key[:, 0], value[:, 0]  # [B, H, D]
    mass = (k if decay is None else decay[:, 0]).to(initial.sum.dtype)
    peak = torch.maximum(initial.max, mass.detach())
    scale, weight = scale_between(initial.max, peak), torch.exp(mass - peak)
    total = initial.sum * scale + weight
    # The token is at angle 0: it adds to the cosine half and its query reads only that.
    width = k.shape[2]
    added = (weight if decay is None else weight * F.silu(k)).unsqueeze(-1) * v.unsqueeze(-2)
    real = initial.kv[:, :, :width] * scale.unsqueeze(-1) + added
    phi = F.silu(q) if activation else q
    output = ((phi / total).unsqueeze(-2) @ real).squeeze(-2).unsqueeze(1)
    kv = real
    if theta is not None:
        kv = torch.cat([real, initial.kv[:, :, width:] * scale.unsqueeze(-1)], dim=2)
    state = ScanState(peak, total, kv, initial.length + 1)
    return output.to(value.dtype), shift_state(state, 1, theta)


def bidirectional_scan(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    activation: bool,
    theta: Tensor | None,
    coordinates: Tensor | None,
    decay: Tensor | None,
    cu_seqlens: list[int] | None,
    key_mask: Tensor | None,
    combine: Callable[[ScanState], ScanState],
) -> tuple[Tensor, ScanState]:
    """See `scan.additive_scan`; `combine` takes the state of the local tokens to that of all tokens."""
    layout = chunk_layout(key.shape[0], key.shape[1], cu_seqlens, key_mask, key.device, chunk=None)
    q, v = layout.pack_heads(query), layout.pack_heads(value)
    mass = layout.pack_heads(key if decay is None else decay, fill=float("-inf"))
    tables = _coordinate_tables(layout, theta, coordinates, mass.dtype)

    # The maximum over a whole sequence is known before any exponential: a plain softmax over tokens.
    peak = mass.new_full((layout.sequences, *key.shape[2:]), float("-inf"))
    start = 0
    for count in layout.counts:
        peak[:count] = torch.maximum(peak[:count], mass.detach()[start : start + count].amax(2))
        start += count
    weight = torch.exp(mass - layout.spread(peak).unsqueeze(2))
    features = weight if decay is None else weight * F.silu(layout.pack_heads(key))
    kv = layout.collect(double(features, tables).transpose(-1, -2) @ v)
    local_sum = layout.from_rows(layout.collect(weight.sum(2)))
    whole = combine(ScanState(layout.from_rows(peak), local_sum, layout.from_rows(kv), layout.lengths))

    mass_sum = layout.spread(layout.to_rows(whole.sum.to(v.dtype))).unsqueeze(2)
    whole_kv = layout.spread(layout.to_rows(whole.kv.to(v.dtype)))
    phi = F.silu(q) if activation else q
    packed = double(phi / mass_sum, tables) @ whole_kv
    output = layout.unpack_heads(packed)
    return output, whole if coordinates is not None else shift_state(whole, layout.lengths, theta)


def _frame(layout: ChunkLayout, mass: Tensor, start: Tensor) -> _Frame:
    """Choose the references (no gradients: they cancel from every output)."""
    peak = mass.amax(2)  # [chunks, H, D]
    before = torch.empty_like(peak)
    running = start.to(peak.dtype, copy=True)
    begin = 0
    for count in layout.counts:
        rows = slice(begin, begin + count)
        before[rows] = running[:count]
        running[:count] = torch.maximum(running[:count], peak[rows])
        begin += count
    first = torch.maximum(before, mass[:, :, 0])
    end = torch.maximum(before, peak)
    growth = end - first
    entry = leave = first + growth / 2
    slow, keep = (growth > SAFE_GROWTH).any(-1), None
    if bool(slow.any()):
        entry = torch.where(slow.unsqueeze(-1), first, entry)
        leave = torch.where(slow.unsqueeze(-1), end, leave)
        keep = torch.exp(entry - leave)
    # float64: an initial state may come with a maximum that the computing dtype cannot hold.
    previous = torch.empty_like(peak, dtype=torch.float64)
    unit = start.to(torch.float64, copy=True)
    begin = 0
    for count in layout.counts:
        rows = slice(begin, begin + count)
        previous[rows] = unit[:count]
        unit[:count] = leave[rows]
        begin += count
    enter = torch.exp(previous - entry.double())
    return _Frame(entry, leave, enter, keep, None if keep is None else slow, running, unit)


def _redo(
    packed: Tensor,
    phi: Tensor,
    mass: Tensor,
    gain: Tensor | None,
    v: Tensor,
    theta: Tensor | None,
    held_kv: Tensor,
    held_sum: Tensor,
    frame: _Frame,
) -> Tensor:
    """Replace the outputs of the flagged (chunk, head) pairs by their exact form."""
    assert frame.slow is not None
    items = frame.slow.nonzero()
    outputs = []
    for part in items.split(SLOW_ITEMS):
        at = (part[:, 0], part[:, 1])
        angle = None if theta is None else theta[part[:, 1]]
        factor = None if gain is None else gain[at]
        arguments = (phi[at], mass[at], factor, v[at], angle, held_kv[at], held_sum[at], frame.entry[at])
        # Recomputed in the backward pass: the [C, C, D] weights of many items would not fit.
        outputs.append(checkpoint(_exact_chunks, *arguments, use_reentrant=False))
    quiet = packed.masked_fill(frame.slow[..., None, None], 0.0)
    return quiet.index_put((items[:, 0], items[:, 1]), torch.cat(outputs))


def _exact_chunks(
    phi: Tensor,
    mass: Tensor,
    gain: Tensor | None,
    v: Tensor,
    theta: Tensor | None,
    held_kv: Tensor,
    held_sum: Tensor,
    first: Tensor,
) -> Tensor:
    """Chunks [items, C, D] with a reference per token, the running max: no exponent is positive, none overflows."""
    steps = torch.arange(mass.shape[1], device=mass.device)
    lag = steps[:, None] - steps
    peak = torch.maximum(mass.detach().cummax(1).values, first.unsqueeze(1))  # [items, t, D]
    exponent = (mass.unsqueeze(1) - peak.unsqueeze(2)).masked_fill((lag < 0).unsqueeze(-1), float("-inf"))
    weight = torch.exp(exponent)  # [items, t, r, D]
    entry = torch.exp(first.unsqueeze(1) - peak)
    read = phi / (weight.sum(2) + held_sum.unsqueeze(1) * entry)
    carried = read * entry
    if theta is not None:
        cos, sin = (x.transpose(0, 1) for x in rotation(theta, steps, mass.dtype))  # [items, C, D]
        weight = weight * (cos.unsqueeze(2) * cos.unsqueeze(1) + sin.unsqueeze(2) * sin.unsqueeze(1))
        carried = double(carried, (cos, sin))
    keys = weight if gain is None else weight * gain.unsqueeze(1)
    scores = (keys @ read.unsqueeze(-1)).squeeze(-1)
    return scores @ v + carried @ held_kv


def _coordinate_tables(
    layout: ChunkLayout, theta: Tensor | None, coordinates: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor] | None:
    """cos and sin of every slot's absolute angle, broadcastable to [chunks, H, C, D]."""
    if theta is None:
        return None
    device = layout.lengths.device
    depth = len(layout.counts)
    if not depth:
        return _feature_tables(rotation(theta, torch.zeros(layout.chunk, device=device), dtype))
    if coordinates is None:
        # Places within the sequence, 0 first: the same for the chunks of one depth.
        table = rotation(theta, torch.arange(depth * layout.chunk, device=device), dtype)
        by_depth = [_feature_tables_many(x.unflatten(0, (depth, layout.chunk))) for x in table]
        if depth == 1:
            return by_depth[0], by_depth[1]
        which = torch.tensor([i for i, count in enumerate(layout.counts) for _ in range(count)], device=device).long()
        return by_depth[0].index_select(0, which), by_depth[1].index_select(0, which)
    grid = coordinates if coordinates.ndim == 2 else coordinates.unsqueeze(1)
    table = grid_rotation(theta, grid, dtype)
    if layout.slots is None:
        return _feature_tables(table)
    token = layout.slots.clamp_min(0) % max(layout.tokens, 1)
    slots = [x.index_select(0, token).unflatten(0, (layout.chunks, layout.chunk)) for x in table]
    return _feature_tables_many(slots[0]), _feature_tables_many(slots[1])


def _feature_tables(tables: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """[C, H, D] -> [H, C, D]."""
    return tables[0].transpose(0, 1).contiguous(), tables[1].transpose(0, 1).contiguous()


def _feature_tables_many(table: Tensor) -> Tensor:
    return table.transpose(1, 2).contiguous()
