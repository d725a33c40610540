"""How rows and their packed segments fall on the ranks that share each row."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

# Renamed by torch 2.13.
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
GATHERED = 8  # ranks up to which "auto" gathers all states: beyond, each would receive more than it can use

Method = Literal["auto", "all_gather", "prefix"]


@dataclass
class Traffic:
    """What this rank has sent to its sequence-parallel neighbours: bytes of payload, and messages or collectives."""

    bytes: int = 0
    messages: int = 0

    def add(self, payload: Tensor, receivers: int) -> None:
        """Count a payload that goes to so many other ranks."""
        self.bytes += payload.numel() * payload.element_size() * receivers
        self.messages += 1


@dataclass(frozen=True)
class SequencePlace:
    """This rank's place among those that share each row.

    Attributes:
        rank, size, group: among the ranks that share a row, in the order of its tokens.
        exchange: how states travel, see :mod:`lightnet_llm.parallel.exchange`.
        in_flight: dtype of states and their gradients on their way.
        traffic: what has been sent so far.
    """

    rank: int
    size: int
    group: Any
    exchange: Method = "auto"
    in_flight: torch.dtype = torch.float32
    traffic: Traffic = field(default_factory=Traffic, compare=False, repr=False)

    def using(self, exchange: Method, in_flight: torch.dtype) -> SequencePlace:
        """The same place with another way to exchange states."""
        return replace(self, exchange=exchange, in_flight=in_flight)

    @property
    def gathers(self) -> bool:
        """Whether states are all-gathered; else they are handed on from rank to rank."""
        return self.size <= GATHERED if self.exchange == "auto" else self.exchange == "all_gather"

    def width(self, tokens: int) -> int:
        """Columns of a row of ``tokens`` that every rank holds; the last ranks' may be padding."""
        return -(-tokens // self.size)

    def padding(self, tokens: int) -> int:
        """Columns added at the end of a row, so that all ranks hold as many."""
        return self.width(tokens) * self.size - tokens

    def part(self, x: Tensor, fill: int = 0) -> Tensor:
        """This rank's columns of [B, N], [B, width]; columns beyond the row hold ``fill`` (-1 for labels: not counted)."""
        width = self.width(x.shape[1])
        return F.pad(x, (0, self.padding(x.shape[1])), value=fill)[:, self.rank * width :][:, :width].contiguous()

    def loss_weight(self, tokens: int) -> float:
        """Means over a rank's columns, averaged over the ranks, times this are the mean over the row's tokens."""
        return self.width(tokens) * self.size / tokens


@dataclass(frozen=True)
class Line:
    """What passes between ranks when they are visited in one direction.

    Attributes:
        position: this rank's place in order of travel.
        continues: bool [ranks, B], in order of travel, whether a row's state goes on into the next rank.
        single: bool [ranks, B], whether a rank's part of a row is one segment, which what arrives passes through.
        source: int64 [B], the local segment of each row whose state travels.
        target: int64 [B], the local segment of each row that receives.
        backwards: whether ranks are visited from the last to the first.
        gives: int64 [segments], the row whose state a local segment sends on; -1 for none.
        receives: int64 [segments], the row whose state it receives; -1 for none.
    """

    position: int
    continues: Tensor
    single: Tensor
    source: Tensor
    target: Tensor
    backwards: bool
    gives: Tensor
    receives: Tensor


@dataclass(frozen=True)
class SegmentPlan:
    """How segments of B rows fall on ranks; all from the global boundaries, so every rank knows all of it.

    Attributes:
        cu_seqlens: int32 boundaries of this rank's tokens on the CPU, its part of row 0 first; None where rows are not
            cut into segments: then a rank's state has one entry a row.
        first, last: int64 [B], index of each row's first and last local segment.
        continues: bool [ranks, B], whether a rank's part of a row begins inside a segment.
        single: bool [ranks, B], whether a rank's part of a row holds one segment only.
        rank: this rank.
        segments: local segments of all rows.
    """

    cu_seqlens: Tensor | None
    first: Tensor
    last: Tensor
    continues: Tensor
    single: Tensor
    rank: int
    segments: int

    def line(self, backwards: bool = False) -> Line:
        """Travel from the first rank to the last, or backwards; the same for every layer."""
        return self._lines[backwards]

    @cached_property
    def _lines(self) -> tuple[Line, Line]:
        ends = torch.zeros_like(self.continues[:1])
        going, single = torch.cat([self.continues[1:], ends]), self.single.contiguous()
        # A row leaves rank r backwards where its part there begins inside a segment.
        back = self.continues.flip(0).contiguous()
        last, first = self._rows(self.last), self._rows(self.first)
        return (
            Line(self.rank, going, single, self.last, self.first, False, last, first),
            Line(
                len(back) - 1 - self.rank, back, single.flip(0).contiguous(), self.first, self.last, True, first, last
            ),
        )

    def _rows(self, segments: Tensor) -> Tensor:
        """Row of each of these local segments [B], -1 for all others."""
        none = torch.full((self.segments,), -1, dtype=torch.int64, device=segments.device)
        return none.index_copy(0, segments, torch.arange(len(segments), device=segments.device))


def plan_segments(
    cu_seqlens: Tensor | None, rows: int, tokens: int, place: SequencePlace, device: torch.device | None = None
) -> SegmentPlan:
    """Plan from global boundaries over ``rows`` x ``tokens`` flattened tokens; a row's edge is always a boundary.

    Columns that the ranks add to a row (``place.padding``) are a segment of their own, so that no state sees them.

    Args:
        cu_seqlens: int [S + 1], empty segments allowed; None: every row is one segment, padding included (mask it).
        device: of the plan's index tensors; that of ``cu_seqlens`` by default.
    """
    width, padded = place.width(tokens), place.width(tokens) * place.size
    if cu_seqlens is None:
        every = torch.arange(rows, device=device)
        continues = torch.ones(place.size, rows, dtype=torch.bool, device=device)
        continues[0] = False
        return SegmentPlan(None, every, every, continues, torch.ones_like(continues), place.rank, rows)
    device = cu_seqlens.device if device is None else device
    bounds = cu_seqlens.cpu().long()
    begins = torch.zeros(rows + 1, padded, dtype=torch.bool)
    begins.view(-1)[bounds.div(tokens, rounding_mode="floor") * padded + bounds % tokens] = True
    if padded > tokens:
        begins[:, tokens] = True
    parts = begins[:rows].view(rows, place.size, width)
    continues = ~parts[:, :, 0]
    starts = parts.clone()
    starts[:, :, 0] = True
    counts = starts.sum(-1)  # segments of each part, [B, ranks]
    mine = starts[:, place.rank].reshape(-1)
    local = torch.cat([mine.nonzero()[:, 0], torch.tensor([rows * width])]).to(torch.int32)
    last = counts[:, place.rank].cumsum(0) - 1
    first = last - counts[:, place.rank] + 1

    def there(x: Tensor) -> Tensor:
        return x.to(device, non_blocking=True)

    return SegmentPlan(
        local, there(first), there(last), there(continues.T), there((counts == 1).T), place.rank, len(local) - 1
    )
