"""How the Triton scan cuts a batch into blocks and spans: index tables, made on the host and kept on the device."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

PROGRAMS = 264  # chains that fill the multiprocessors of a large card twice
LONG = 256  # blocks of a span from which there are
WAVES = 2  # times as many spans: their sums fill the card, too
WINDOW = 4  # blocks, see `triton_backward`


class Tables(NamedTuple):
    """int32 on the device; of a sequence (a batch row or a segment) blocks and spans are consecutive."""

    blocks: Tensor  # [blocks, 4]: batch row, first token, tokens, place in its sequence
    spans: Tensor  # [spans, 8]: batch row, first token, tokens, first block, its place, sequence, 1 if last, 0
    block_ranges: Tensor  # [sequences, 2]: first block, blocks
    span_ranges: Tensor  # [sequences, 2]: first span, spans
    lengths: Tensor  # [sequences] int64
    span: int  # blocks in a full span
    chained: bool  # whether some sequence has several spans


def _parts(lengths: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Parts of `size` tokens of every sequence: number in each sequence, owner and place of each part."""
    counts = (lengths + size - 1) // size
    owner = torch.repeat_interleave(torch.arange(len(counts)), counts)
    return counts, owner, torch.arange(len(owner)) - (counts.cumsum(0) - counts)[owner]


@functools.lru_cache(maxsize=32)
def tables(
    batch: int, tokens: int, bounds: tuple[int, ...] | None, block: int, chains: int, device: torch.device
) -> Tables:
    """`chains`: programs that share a span (heads times slices of features); the fewer, the shorter the spans."""
    if bounds is None:
        begin = torch.zeros(batch, dtype=torch.int64)
        lengths = torch.full((batch,), tokens, dtype=torch.int64)
        rows = torch.arange(batch)
    else:
        edges = torch.tensor(bounds, dtype=torch.int64)
        begin, lengths = edges[:-1], edges.diff()
        rows = torch.zeros_like(begin)
    counts, owner, place = _parts(lengths, block)
    starts = counts.cumsum(0) - counts
    blocks = torch.stack(
        [rows[owner], begin[owner] + place * block, (lengths[owner] - place * block).clamp_max(block), place], 1
    )
    ideal = max(2 * WINDOW, int(counts.sum()) * chains / PROGRAMS)
    longest = int(counts.max()) if len(counts) else 0
    cuts = max(1, round(longest / ideal))
    if cuts > 1 and ideal >= LONG:
        cuts *= WAVES
    span = -(-longest // cuts)  # equal spans: a short one would be a wave of its own
    span = max(WINDOW, -(-span // WINDOW) * WINDOW)
    span_counts, owner, place = _parts(lengths, span * block)
    spans = torch.stack(
        [
            rows[owner],
            begin[owner] + place * span * block,
            (lengths[owner] - place * span * block).clamp_max(span * block),
            starts[owner] + place * span,
            place * span,
            owner,
            (place == span_counts[owner] - 1).long(),
            torch.zeros_like(owner),
        ],
        1,
    )
    on = {"dtype": torch.int32, "device": device, "non_blocking": True}
    return Tables(
        blocks.to(**on),
        spans.to(**on),
        torch.stack([starts, counts], 1).to(**on),
        torch.stack([span_counts.cumsum(0) - span_counts, span_counts], 1).to(**on),
        lengths.to(device, non_blocking=True),
        span,
        bool((span_counts > 1).any()),
    )
