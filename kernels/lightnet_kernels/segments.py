"""How a batch of sequences is cut into chunks.

Every sequence (a batch row, or a segment of `cu_seqlens`) starts at a chunk boundary, so no chunk holds two of them and
a reset is only a change of row. Masked tokens are dropped: lags and lengths count real tokens.

Chunks lie in depth-major order: the first chunk of every sequence (longest sequence first), then the second ones, and
so on. The sequences still alive at a depth are then a prefix of those alive before, and a recurrence over depths works
on plain slices.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64


@dataclass(frozen=True)
class ChunkLayout:
    """A cut of [batch, tokens] into chunks; build it with `chunk_layout`."""

    batch: int
    tokens: int
    chunk: int
    counts: list[int]  # sequences alive at each depth
    lengths: Tensor  # [sequences] int64 on the device, real tokens, in the caller's order
    order: Tensor | None  # [sequences], caller's index of each row; None: the caller's order already
    inverse_order: Tensor | None
    slots: Tensor | None  # [chunks * chunk], token in each slot, -1 for none; None: a regular grid
    slot_of: Tensor | None  # [batch * tokens], slot of each token, -1 for a masked one
    by_heads: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)  # of _with_heads, by heads

    @property
    def sequences(self) -> int:
        return self.lengths.shape[0]

    @property
    def chunks(self) -> int:
        return sum(self.counts)

    def pack(self, x: Tensor, fill: float = 0.0) -> Tensor:
        """[B, N, ...] -> [chunks, chunk, ...]; slots without a token hold `fill`."""
        tail = x.shape[2:]
        if self.slots is not None:
            assert self.slot_of is not None
            flat = x.reshape(self.batch * self.tokens, *tail)
            return _gather(flat, self.slots, self.slot_of, fill).view(self.chunks, self.chunk, *tail)
        depth = len(self.counts)
        missing = depth * self.chunk - self.tokens
        if missing:
            x = F.pad(x, [0, 0] * len(tail) + [0, missing], value=fill)
        x = x.reshape(self.batch, depth, self.chunk, *tail).transpose(0, 1)
        return x.reshape(self.chunks, self.chunk, *tail)

    def unpack(self, x: Tensor) -> Tensor:
        """[chunks, chunk, ...] -> [B, N, ...]; masked tokens get 0."""
        tail = x.shape[2:]
        if self.slots is not None:
            assert self.slot_of is not None
            flat = x.reshape(self.chunks * self.chunk, *tail)
            return _gather(flat, self.slot_of, self.slots, 0.0).view(self.batch, self.tokens, *tail)
        depth = len(self.counts)
        x = x.reshape(depth, self.batch, self.chunk, *tail).transpose(0, 1)
        return x.reshape(self.batch, depth * self.chunk, *tail)[:, : self.tokens]

    def pack_channels(self, x: Tensor) -> Tensor:
        """[B, N, d] -> [d, chunks, chunk], contiguous."""
        return _ChannelsFirst.apply(self.pack(x), True)

    def unpack_channels(self, x: Tensor) -> Tensor:
        """The inverse of `pack_channels`; masked tokens get 0."""
        return self.unpack(_ChannelsFirst.apply(x, False))

    def pack_heads(self, x: Tensor, fill: float = 0.0) -> Tensor:
        """[B, N, H, D] -> [chunks, H, chunk, D], contiguous, so that matrix products need no copies."""
        heads, width = x.shape[2:]
        if self.slots is not None:
            assert self.slot_of is not None
            forward, backward = self._with_heads(heads)
            flat = x.reshape(self.batch * self.tokens * heads, width)
            return _gather(flat, forward, backward, fill).view(self.chunks, heads, self.chunk, width)
        depth = len(self.counts)
        missing = depth * self.chunk - self.tokens
        if missing:
            x = F.pad(x, (0, 0, 0, 0, 0, missing), value=fill)
        x = x.reshape(self.batch, depth, self.chunk, heads, width).permute(1, 0, 3, 2, 4)
        return x.contiguous().view(self.chunks, heads, self.chunk, width)

    def unpack_heads(self, x: Tensor) -> Tensor:
        """The inverse of `pack_heads`; masked tokens get 0."""
        heads, width = x.shape[1], x.shape[3]
        if self.slots is not None:
            assert self.slot_of is not None
            forward, backward = self._with_heads(heads)
            flat = x.reshape(self.chunks * heads * self.chunk, width)
            return _gather(flat, backward, forward, 0.0).view(self.batch, self.tokens, heads, width)
        depth = len(self.counts)
        x = x.view(depth, self.batch, heads, self.chunk, width).permute(1, 0, 3, 2, 4)
        return x.reshape(self.batch, depth * self.chunk, heads, width)[:, : self.tokens]

    def _with_heads(self, heads: int) -> tuple[Tensor, Tensor]:
        """slots and slot_of for rows of one head: places in [tokens, H], and in [chunks, H, chunk]."""
        if heads in self.by_heads:
            return self.by_heads[heads]
        assert self.slots is not None and self.slot_of is not None
        head = torch.arange(heads, device=self.slots.device)
        slots = self.slots.view(self.chunks, 1, self.chunk)
        forward = torch.where(slots < 0, -1, slots * heads + head[:, None])
        slot = self.slot_of[:, None]
        place = (slot // self.chunk * heads + head) * self.chunk + slot % self.chunk
        self.by_heads[heads] = forward.reshape(-1), torch.where(slot < 0, -1, place).reshape(-1)
        return self.by_heads[heads]

    def to_rows(self, x: Tensor) -> Tensor:
        """Per-sequence values in the caller's order -> in the order of the chunks' rows."""
        return x if self.order is None else x.index_select(0, self.order)

    def from_rows(self, x: Tensor) -> Tensor:
        """The inverse of `to_rows`."""
        return x if self.inverse_order is None else x.index_select(0, self.inverse_order)

    def spread(self, x: Tensor) -> Tensor:
        """Per-row values [sequences, ...] -> one for each chunk [chunks, ...]."""
        if self.counts == [x.shape[0]]:
            return x
        return torch.cat([x[:0], *(x[:count] for count in self.counts)])

    def collect(self, x: Tensor) -> Tensor:
        """Sums over the chunks of each row: [chunks, ...] -> [sequences, ...]."""
        if self.counts == [self.sequences]:
            return x
        rows = torch.arange(self.sequences, device=x.device)
        return x.new_zeros(self.sequences, *x.shape[1:]).index_add(0, self.spread(rows), x)

    def tokens_in_last_chunk(self) -> Tensor:
        """[sequences], caller's order: real tokens in the last chunk, 0 for an empty sequence."""
        return torch.where(self.lengths > 0, (self.lengths - 1) % self.chunk + 1, 0)


def chunk_layout(
    batch: int,
    tokens: int,
    cu_seqlens: list[int] | None,
    key_mask: Tensor | None,
    device: torch.device,
    *,
    chunk: int | None = CHUNK,
    reverse: bool = False,
) -> ChunkLayout:
    """Cut [batch, tokens] into chunks of at most `chunk` tokens (None: as long as the longest sequence, where that
    wastes little). `reverse` runs every sequence from its end."""
    if cu_seqlens is None and key_mask is None and not reverse:
        size = max(1, tokens if chunk is None else min(chunk, tokens))
        depth = -(-tokens // size)
        lengths = torch.full((batch,), tokens, dtype=torch.int64, device=device)
        return ChunkLayout(batch, tokens, size, [batch] * depth, lengths, None, None, None, None)

    flat = torch.arange(batch * tokens, device=device)
    if key_mask is not None:
        flat = flat[key_mask.reshape(-1)]
    if cu_seqlens is None:
        sequences, owner = batch, flat // max(tokens, 1)
    else:
        ends = torch.tensor(cu_seqlens[1:], dtype=torch.int64, device=device)
        # right=True puts a token at a boundary into the segment that starts there, past any empty ones.
        sequences, owner = len(cu_seqlens) - 1, torch.searchsorted(ends, flat, right=True)
    lengths = torch.bincount(owner, minlength=sequences)
    order = inverse_order = None
    ordered = lengths.tolist()
    if any(one < other for one, other in itertools.pairwise(ordered)):
        order = torch.argsort(lengths, descending=True, stable=True)
        inverse_order = torch.empty_like(order)
        inverse_order[order] = torch.arange(sequences, device=device)
        ordered.sort(reverse=True)
    size = _chunk_size(ordered, chunk)
    depths = [-(-length // size) for length in ordered]
    counts = [sum(1 for depth in depths if depth > i) for i in range(depths[0] if depths else 0)]
    chunks = sum(counts)
    starts = torch.tensor([0, *counts], dtype=torch.int64, device=device).cumsum(0)

    rank = torch.arange(flat.shape[0], device=device) - (lengths.cumsum(0) - lengths)[owner]
    if reverse:
        rank = lengths[owner] - 1 - rank
    row = owner if inverse_order is None else inverse_order[owner]
    slot = (starts[rank // size] + row) * size + rank % size
    slots = torch.full((chunks * size,), -1, dtype=torch.int64, device=device)
    slots[slot] = flat
    slot_of = torch.full((batch * tokens,), -1, dtype=torch.int64, device=device)
    slot_of[flat] = slot
    return ChunkLayout(batch, tokens, size, counts, lengths, order, inverse_order, slots, slot_of)


def _chunk_size(lengths: list[int], limit: int | None) -> int:
    """The longest sequence where it fits the limit and pads little; else halved until padding is within twice."""
    longest, total = max(lengths, default=0), sum(lengths)
    if limit is None:
        if longest * len(lengths) <= 2 * total:
            return max(1, longest)
        limit = CHUNK
    size = max(1, min(limit, longest))
    while size > 8 and sum(-(-length // size) for length in lengths) * size > 2 * total:
        size //= 2
    return size


class _Gather(torch.autograd.Function):
    """Rows of x by index, -1 giving `fill`. `inverse` is the same map the other way, so that the gradient is a gather
    too: index_add, the general adjoint, is many times slower on a CPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, inverse: Tensor, fill: float) -> Tensor:
        ctx.save_for_backward(inverse)
        return _take(x, index, fill)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (inverse,) = ctx.saved_tensors
        return _take(grads[0], inverse, 0.0), None, None, None


class _ChannelsFirst(torch.autograd.Function):
    """[chunks, C, d] <-> [d, chunks, C], contiguous in both directions: a strided gradient would make every product
    of the backward pass copy it matrix by matrix."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, first: bool) -> Tensor:
        ctx.first = first
        return x.permute(*((2, 0, 1) if first else (1, 2, 0))).contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0].permute(*((1, 2, 0) if ctx.first else (2, 0, 1))).contiguous(), None


def _take(x: Tensor, index: Tensor, fill: float) -> Tensor:
    if x.shape[0] == 0:
        return x.new_full((index.shape[0], *x.shape[1:]), fill)
    empty = (index < 0).nonzero().squeeze(-1)
    return x.index_select(0, index.clamp_min(0)).index_fill_(0, empty, fill)


def _gather(x: Tensor, index: Tensor, inverse: Tensor, fill: float) -> Tensor:
    return _Gather.apply(x, index, inverse, fill)
