"""How the Triton scan cuts a batch into blocks and spans: index tables, made on the host and kept on the device.

A span is one chain's, and there are as many as the card runs at a time, two programs a multiprocessor (forward in CUDA C++ with
LRPE: one). What spans add to the state, or ask of it, is summed by pieces of them, as many as take the shortest time: not every
span's sum is wanted, so that whole ones would leave multiprocessors without work."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

PROGRAMS = 264  # chains, or sums of pieces, that a large card runs at a time, two a multiprocessor
PIECES = (1, 2, 4, 8, 16)  # of a span
# Time of a piece's program beside its tokens, and of a scan over pieces at each, in those of a block's sums among two programs
# of a multiprocessor; and of a block's where there is one (benchmarks/LOG.md, version 24).
SETUP, HANDED, ALONE = 19, 2, 0.76
CUDA_SETUP, CUDA_HANDED = 2, 0.4  # of those by CUDA C++ (version 32)
WINDOW = 4  # blocks, see `triton_backward`


class Tables(NamedTuple):
    """int32 on the device; of a sequence (a batch row or a segment) blocks, spans and pieces are consecutive."""

    blocks: Tensor  # [blocks, 4]: batch row, first token, tokens, place in its sequence
    # [spans, 9]: batch row, first token, tokens, first block, its place, sequence, 1 if last, first piece, last piece.
    spans: Tensor
    pieces: Tensor  # [pieces, 9]: the same, but place and whether it is the last are its span's, and nobody reads the last two
    block_ranges: Tensor  # [sequences, 2]: first block, blocks
    # [sequences, 4]: first piece, pieces; those that are scanned forward and backward where only what spans find is wanted, up to
    # the last span's first and back to the first span's last.
    piece_ranges: Tensor
    lengths: Tensor  # [sequences] int64
    piece: int  # blocks in a full piece
    longest: int  # blocks of the longest sequence
    chained: bool  # whether some sequence has several spans


def _parts(lengths: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Parts of `size` tokens of every sequence: number in each sequence, owner and place of each part."""
    counts = (lengths + size - 1) // size
    owner = torch.repeat_interleave(torch.arange(len(counts)), counts)
    return counts, owner, torch.arange(len(owner)) - (counts.cumsum(0) - counts)[owner]


def pieces_of(span: int, summed: int, most: int, sums: int, cuda: bool) -> int:
    """How many pieces a span of so many blocks has, for the shortest time of a call that no rank shares. `summed`: spans whose
    sum somebody wants; `most`: spans of one sequence; `sums`, `cuda`: see `tables`."""

    def time(count: int) -> float:
        programs = summed * count * sums
        if cuda:
            return (programs / PROGRAMS + 0.5) * (span / count + CUDA_SETUP) + CUDA_HANDED * most * count
        waves = ALONE if programs <= PROGRAMS // 2 else -(-programs // PROGRAMS)
        return waves * (span / count + SETUP) + HANDED * most * count

    return min((count for count in PIECES if count == 1 or span >= 4 * WINDOW * count), key=time)


@functools.lru_cache(maxsize=32)
def tables(
    batch: int, tokens: int, bounds: tuple[int, ...] | None, block: int, chains: int, sums: int, device: torch.device,
    cuda: bool = False, whole: bool = False,
) -> Tables:  # fmt: skip
    """`chains`: programs that share a span (heads times slices of features); the fewer, the shorter the spans. `sums`:
    programs that share a piece, 0 where pieces are whole spans; `cuda`, whether those of `cuda_chains`. `whole`: a span a
    sequence."""
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
    cuts = 1 if whole else max(1, round(longest / ideal))
    span = -(-longest // cuts)  # equal spans: a short one would be a wave of its own
    wanted = int(((counts + span - 1) // max(1, span)).sum() - (counts > 0).sum()) if cuts > 1 else 0
    shares = pieces_of(span, wanted, cuts, sums, cuda) if cuts > 1 and sums else 1
    step = math.lcm(WINDOW, shares)
    span = max(step, -(-span // step) * step)
    piece = span // shares
    span_counts, span_owner, span_place = _parts(lengths, span * block)
    alone = span_counts, span_owner, span_place
    piece_counts, piece_owner, piece_place = alone if shares == 1 else _parts(lengths, piece * block)
    first_piece = (piece_counts.cumsum(0) - piece_counts)[span_owner] + span_place * shares
    last_piece = first_piece + (piece_counts[span_owner] - span_place * shares).clamp_max(shares) - 1

    def cut(owner: Tensor, place: Tensor, size: int, span_place: Tensor, *ends: Tensor) -> Tensor:
        fields = [
            rows[owner],
            begin[owner] + place * size * block,
            (lengths[owner] - place * size * block).clamp_max(size * block),
            starts[owner] + place * size,
            span_place * span,
            owner,
            (span_place == span_counts[owner] - 1).long(),
        ]
        return torch.stack([*fields, *ends], 1).to(**on)

    on = {"dtype": torch.int32, "device": device, "non_blocking": True}
    forward = (span_counts - 1).clamp_min(0) * shares + (counts > 0)
    backward = (piece_counts - shares).clamp_min(0) + (counts > 0)
    spans = pieces = cut(span_owner, span_place, span, span_place, first_piece, last_piece)
    if shares > 1:
        none = torch.zeros_like(piece_owner)
        pieces = cut(piece_owner, piece_place, piece, piece_place // shares, none, none)
    return Tables(
        blocks.to(**on),
        spans,
        pieces,
        torch.stack([starts, counts], 1).to(**on),
        torch.stack([piece_counts.cumsum(0) - piece_counts, piece_counts, forward, backward], 1).to(**on),
        lengths.to(device, non_blocking=True),
        piece,
        longest,
        bool((span_counts > 1).any()),
    )
